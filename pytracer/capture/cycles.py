"""The machine that starts and stops recordings as training steps go by.

A plan of windows says which steps are recorded: it maps a step to the number of the window that it
is in, or to None. `Cycles` follows the plan:

    step      0     1     2     3     4     5     6
    window    None  None  0     0     None  1     1
              begin       start       stop  start    end: stop

`trace(schedule=)` follows a schedule like torch.profiler's. `pytracer run` and the frameworks'
callbacks keep some steps and watch the later ones in case memory runs out.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from pytracer import errors

_WATCH_STEPS = 20  # the steps of a watched window; the next window replaces it

Windows = Callable[[int], int | None]


class Schedule(Protocol):
    """What `torch.profiler.schedule` returns: an action for each step."""

    def __call__(self, step: int, /) -> Any:
        """The profiler's action: NONE, WARMUP, RECORD or RECORD_AND_SAVE."""


def always(step: int) -> int:
    """One window that never ends."""
    return 0


def of_schedule(schedule: Schedule) -> Windows:
    """A window for each run of recorded steps. A step to save is the last of its window."""
    number, is_over = 0, False

    def window_of(step: int) -> int | None:
        nonlocal number, is_over
        action = schedule(step).name
        is_recorded = action in ("RECORD", "RECORD_AND_SAVE")
        number += is_over or not is_recorded
        is_over = action == "RECORD_AND_SAVE"
        return number if is_recorded else None

    return window_of


def kept_then_watched(skip: int, steps: int | None, *, watch: bool) -> Windows:
    """Window 0 has the steps to keep. The windows after it are watched, if anybody watches."""

    def window_of(step: int) -> int | None:
        since = step - skip
        if since < 0:
            return None
        if steps is None or since < steps:
            return 0
        return 1 + (since - steps) // _WATCH_STEPS if watch else None

    return window_of


class Cycles:
    """Counts steps, and calls `start` and `stop` where a window begins and ends.

    `stop` also gets the error that ended the last window, or None. If `start` raises, the next step
    of the same window tries again.
    """

    def __init__(
        self,
        window_of: Windows,
        start: Callable[[int], None],
        stop: Callable[[int, BaseException | None], None],
    ) -> None:
        """Follows the plan `window_of`. Nothing starts until `begin`."""
        self._window_of, self._start, self._stop = window_of, start, stop
        self._window: int | None = None
        self.step = 0

    def begin(self) -> None:
        """Begins the first step."""
        self._enter(self._window_of(0))

    def stepped(self) -> None:
        """Ends a step and begins the next one."""
        self.count_from(self.step + 1)

    def count_from(self, step: int) -> None:
        """Begins the step of this number."""
        self.step = step
        self._enter(self._window_of(step))

    def end(self, error: BaseException | None = None) -> None:
        """Ends the last window. `error` is the exception that ended the program, if any."""
        self._enter(None, error)

    def _enter(self, window: int | None, error: BaseException | None = None) -> None:
        if window == self._window:
            return
        if self._window is not None:
            ended, self._window = self._window, None
            self._stop(ended, error)
        if window is not None:
            self._start(window)
            self._window = window


class Recording:
    """A long run: keeps a trace of some steps, and watches the later ones."""

    def __init__(
        self,
        make: Callable[..., Any],
        *,
        skip: int,
        steps: int | None,
        watch: bool,
        keep: dict[str, Any],
        watch_file: Callable[[], Path | None] = lambda: None,
        ready: Callable[[Any], None],
        problem: Callable[[str], None],
        watched: Callable[[Any, int], None] | None = None,
    ) -> None:
        """Nothing is recorded until `begin`.

        Args:
            make: makes a trace.
            skip: steps before the ones to keep.
            steps: steps to keep; None for all.
            watch: whether to trace the steps after them, too.
            keep: more arguments of `make` for the steps to keep.
            watch_file: returns the place of the watched steps while they are recorded. The file
                stays if the program fails or is killed.
            ready: called with the trace of the steps to keep when it is whole.
            problem: called with a sentence when nothing can be recorded.
            watched: called with each watched trace before it is dropped, and with its first step.
        """
        self._make, self._keep, self._place = make, keep, watch_file
        self._ready, self._problem, self._watched = ready, problem, watched
        windows = kept_then_watched(skip, steps, watch=watch)
        self._cycles = Cycles(windows, self._start, self._stop)
        self._watch: Any = None
        self._watch_file: Path | None = None
        self.first: Any = None

    @property
    def steps_seen(self) -> int:
        """The number of steps that are over."""
        return self._cycles.step

    @property
    def last(self) -> Any:
        """The trace that saw the end: the watched one if there is one, else the kept one."""
        return self._watch or self.first

    @property
    def watched(self) -> bool:
        """Whether the program ended after the steps to keep."""
        return self._watch is not None

    def begin(self) -> None:
        """Begins the program's first step."""
        self._cycles.begin()

    def stepped(self) -> None:
        """Ends a training step and begins the next one."""
        self._cycles.stepped()

    def end(self, error: BaseException | None = None) -> None:
        """Ends recording. `error` is the exception that ended the program, if any."""
        self._cycles.end(error)
        if error is None:
            self.drop_watched()

    def drop_watched(self) -> None:
        """Removes the file of watched steps that nobody needs any more."""
        if self._watch_file is not None:
            self._watch_file.unlink(missing_ok=True)

    def _start(self, window: int) -> None:
        if window == 0:
            with self._warnings_as_lines():
                self.first = self._enter(waits=True, **self._keep)
        elif (self.first if window == 1 else self._watch) is not None:
            self.drop_watched()
            self._watch_file = self._watch_file or self._place()
            more = {} if self._watch_file is None else {"path": self._watch_file}
            # Nobody reads it unless the program fails: the GPU need not catch up.
            self._watch = self._enter(waits=False, **more)

    def _stop(self, window: int, error: BaseException | None) -> None:
        if window == 0:
            self._stop_keeping(error)
        elif self._watch is not None:
            self._exit(self._watch, error)
            with contextlib.suppress(errors.PytracerError):  # an empty window: already reported
                if self._watched is not None:
                    self._watched(self._watch, self._watch.first_step)

    def _stop_keeping(self, error: BaseException | None) -> None:
        if self.first is not None:
            with self._warnings_as_lines():
                self._exit(self.first, error)
            if error is None:
                self._ready(self.first)

    def _enter(self, *, waits: bool, **more: Any) -> Any:
        try:
            traced = self._make(table=False, **more)
            traced.waits, traced.first_step = waits, self.steps_seen
            return traced.__enter__()
        except errors.PytracerError as problem:
            self._problem(str(problem))
            return None

    def _exit(self, traced: Any, error: BaseException | None) -> None:
        if not traced.recording:
            return
        try:
            traced.__exit__(None if error is None else type(error), error, None)
        except errors.PytracerError as problem:
            self._problem(str(problem))

    @contextlib.contextmanager
    def _warnings_as_lines(self) -> Iterator[None]:
        """Passes warnings to `problem`, apart from the program's own warnings.

        Used only for the steps to keep: afterwards Python shows every warning of the program
        again, and a watched window begins every few steps.
        """
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield
        for warning in warned:
            self._problem(str(warning.message))
