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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from pytracer import errors
from pytracer.capture.allowance import SHARE, Allowance

NOT_WATCHED = (
    "The failure came in a step that was not watched: to watch each step costs more than "
    f"{SHARE:.0%} of the processor time here"
)

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


def cheapest_watch(options: Mapping[str, Any]) -> dict[str, Any]:
    """What a watched window changes in the options of `trace`, to cost least.

    A page about a failure needs modules and phases. It needs operators for Python lines only.
    """
    cheap = {"saved_tensors": "auto", "cost": False}
    return cheap if options.get("stacks") else {**cheap, "detail": "category"}


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

    @property
    def changes_next(self) -> bool:
        """Whether a window begins or ends with the next step."""
        return self._window_of(self.step + 1) != self._window

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
    """A long run: keeps a trace of some steps, and watches the later ones while it may."""

    def __init__(
        self,
        make: Callable[..., Any],
        *,
        skip: int,
        steps: int | None,
        watch: bool,
        options: Mapping[str, Any] | None = None,
        keep: dict[str, Any],
        watch_file: Callable[[], Path | None] = lambda: None,
        ready: Callable[[Any], None],
        problem: Callable[[str], None],
        watched: Callable[[Any, int], None] | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        """Nothing is recorded until `begin`.

        Args:
            make: makes a trace.
            skip: steps before the ones to keep.
            steps: steps to keep; None for all.
            watch: whether to trace the steps after them, too, while that costs little.
            options: arguments of `make`. Where the steps are only watched, some are cheaper ones.
            keep: more arguments of `make` for the steps to keep.
            watch_file: returns the place of the watched steps while they are recorded. The file
                stays if the program fails or is killed.
            ready: called with the trace of the steps to keep when it is whole.
            problem: called with a sentence when nothing can be recorded.
            watched: called with each watched trace before it is dropped, and with its first step.
            allowance: decides which of the later steps are watched.
        """
        self._make, self._keep, self._place = make, keep, watch_file
        self._ready, self._problem, self._watched = ready, problem, watched
        windows = kept_then_watched(skip, steps, watch=watch)
        self._cycles = Cycles(windows, self._start, self._stop)
        self._last_step = None if watch or steps is None else skip + steps
        self._options = options or {}
        self._allowance = allowance or Allowance()
        self._can_watch = True
        self.rests = False  # the present step is not watched, because watching costs too much
        self._told: set[str] = set()
        self._watch: Any = None
        self._watch_file: Path | None = None
        self.first: Any = None

    @property
    def steps_seen(self) -> int:
        """The number of steps that are over."""
        return self._cycles.step

    @property
    def is_over(self) -> bool:
        """Whether no later step is recorded."""
        return self._last_step is not None and self.steps_seen >= self._last_step

    @property
    def changes_next(self) -> bool:
        """Whether something begins or ends with the next step."""
        return self._cycles.changes_next

    @property
    def last(self) -> Any:
        """The trace that saw the end: the watched one if there is one, else the kept one."""
        return self._watch or self.first

    @property
    def watched(self) -> bool:
        """Whether the last step was watched."""
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

    def drop(self) -> None:
        """Stops recording without a result: something of ours has failed."""
        for traced in (self.first, self._watch):
            if traced is not None and traced.recording:
                with contextlib.suppress(Exception):
                    traced.__exit__(None, None, None)

    def drop_watched(self) -> None:
        """Removes the file of watched steps that nobody needs any more."""
        if self._watch_file is not None:
            self._watch_file.unlink(missing_ok=True)

    def _start(self, window: int) -> None:
        with self._warnings_as_lines():
            if window == 0:
                self.first = self._enter(is_read=True, **self._keep)
            elif self.first is not None and self._can_watch:
                self._watch = None
                self.rests = not self._allowance.allows()
                if not self.rests:
                    with self._allowance.begins():
                        self._start_watching()

    def _start_watching(self) -> None:
        self.drop_watched()
        self._watch_file = self._watch_file or self._place()
        more = cheapest_watch(self._options)
        if self._watch_file is not None:
            more["path"] = self._watch_file
        # Nobody reads it unless the program fails: the GPU need not catch up.
        self._watch = self._enter(is_read=False, **more)
        self._can_watch = self._watch is not None

    def _stop(self, window: int, error: BaseException | None) -> None:
        if window > 0:
            self._stop_watching(error)
        elif self.first is not None:
            self._exit(self.first, error)
            if error is None:
                self._ready(self.first)

    def _stop_watching(self, error: BaseException | None) -> None:
        if self._watch is None:
            return
        with self._allowance.ends():
            self._exit(self._watch, error)
            if self._watched is not None:
                with contextlib.suppress(errors.PytracerError):  # an empty window: already reported
                    self._watched(self._watch, self._watch.first_step)

    def _enter(self, *, is_read: bool, **more: Any) -> Any:
        try:
            traced = self._make(table=False, **{**self._options, **more})
            traced.is_read, traced.first_step = is_read, self.steps_seen
            return traced.__enter__()
        except errors.PytracerError as problem:
            self._problem(str(problem))
            return None

    def _exit(self, traced: Any, error: BaseException | None) -> None:
        if not traced.recording:
            return
        with self._warnings_as_lines():
            try:
                traced.__exit__(None if error is None else type(error), error, None)
            except errors.PytracerError as problem:
                self._problem(str(problem))

    @contextlib.contextmanager
    def _warnings_as_lines(self) -> Iterator[None]:
        """Passes our warnings to `problem`, each once: a watched window begins every few steps."""
        with errors.collected_warnings() as texts:
            yield
        for text in texts:
            if text not in self._told:
                self._told.add(text)
                self._problem(text)
