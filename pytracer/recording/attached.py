"""What `pytracer attach` begins in a job that runs, and `pytracer detach` ends. Runs in the job.

A recording begins as a step ends, because then nothing is half done: no forward pass is open whose
blocks nobody saw being made. A job that ends no step gets its recording at once, when asked again.
"""

import atexit
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.basics import environment
from pytracer.capture.session import Held, all_devices
from pytracer.recording.always import always
from pytracer.recording.api import trace
from pytracer.recording.start import error_that_ended_python, safely

Answer = Callable[..., None]


def begin(
    answer: Answer, *, path: str, options: Mapping[str, Any], steps: int | None, now: bool
) -> None:
    """Begins a recording after this step, or now. Answers "waits", "begun", and "over" as it ends.

    Args:
        answer: tells who ordered it.
        path: the file or folder to make.
        options: of `trace`, or of `always`.
        steps: to trace; None to be always on.
        now: whether not to wait for the end of a step.
    """
    global _attached
    if _attached is None or _attached.is_left_behind:
        _attached = Attached(answer, Path(path), options, steps)
    elif not (now and _attached.waits):
        raise errors.CaptureError("pytracer is attached to this job already: pytracer detach it")
    _attached.answer = answer
    if now:
        _attached.start()
    else:
        _attached.wait()


def end(answer: Answer) -> None:
    """Ends it at once."""
    if _attached is None or _attached.is_left_behind:
        raise errors.CaptureError("pytracer is not attached to this job")
    _attached.end()
    answer(state="over", **_attached.outcome())


class Attached:
    """A recording that somebody else began."""

    def __init__(
        self, answer: Answer, path: Path, options: Mapping[str, Any], steps: int | None
    ) -> None:
        """Records nothing yet."""
        self.answer, self._path, self._options, self._steps = answer, path, options, steps
        self._counter: Any = None
        self._recorder: Any = None
        self._seen = 0
        self._owner = os.getpid()
        self.waits = False
        self._is_over = False

    @property
    def is_left_behind(self) -> bool:
        """Whether nothing of it goes on in this process, which may be a forked child."""
        return self._is_over or self._owner != os.getpid()

    def wait(self) -> None:
        """Starts as soon as a step ends."""
        self.waits = True
        self._count(lambda: safely(self._start_or_refuse))
        self.answer(state="waits")

    def start(self) -> None:
        """Starts now.

        Raises:
            errors.PytracerError: it cannot.
        """
        self.waits = False
        self._count(None)
        try:
            if self._steps is None:
                self._recorder = always(self._path, **self._options).begin()
                path = self._recorder.folder
            else:
                path = environment.file_of_rank(self._path)
                options = {**self._options, "devices": self._options["devices"] or all_devices()}
                self._recorder = trace(path=path, table=False, **options)
                with errors.collected_warnings():
                    self._recorder.__enter__()
                self._count(self._stepped)
        except BaseException:
            self.end()
            raise
        self._path = path
        atexit.register(self._end_with_python)
        self.answer(state="begun", path=str(path))

    def end(self, error: BaseException | None = None) -> None:
        """Ends it. Nothing stays hooked. `error` is the exception that ends the job, if any."""
        recorder, self._recorder, self._is_over = self._recorder, None, True
        atexit.unregister(self._end_with_python)
        self._count(None)
        if isinstance(recorder, always):
            recorder.end(error)
            self._seen = recorder.step
        elif recorder is not None and recorder.recording:
            with errors.collected_warnings():
                recorder.__exit__(type(error) if error else None, error, None)

    def outcome(self) -> dict[str, Any]:
        """Where the recording is, and of how many whole steps."""
        return {"path": str(self._path), "steps": self._seen}

    def _start_or_refuse(self) -> None:
        try:
            self.start()
        except errors.PytracerError as problem:
            self.answer(state="refused", text=" ".join(str(problem).split()))

    def _stepped(self) -> None:
        self._seen += 1
        if self._steps is not None and self._seen >= self._steps:
            safely(self.end)
            self.answer(state="over", **self.outcome())

    def _count(self, counter: Callable[[], object] | None) -> None:
        """Has this called after each step, and nothing else any more."""
        if self._counter is not None:
            self._counter.end()
        self._counter = None
        if counter is not None:
            self._counter = Held()
            self._counter.count_steps(counter)

    def _end_with_python(self) -> None:
        if not self.is_left_behind:
            safely(self.end, error_that_ended_python())


_attached: Attached | None = None
