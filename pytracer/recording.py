"""A long run: the first steps are kept, the later ones watched in case memory runs out."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from pytracer import errors

_WATCH_STEPS = 20  # a window's worth of steps: thrown away when the next one begins


class Recording:
    """Counts steps, and starts and stops traces as they come."""

    def __init__(
        self,
        make: Callable[..., Any],
        *,
        skip: int,
        steps: int | None,
        watch: bool,
        keep: dict[str, Any],
        ready: Callable[[Any], None],
        problem: Callable[[str], None],
        watched: Callable[[Any, int], None] | None = None,
    ) -> None:
        """Nothing is recorded until `begin`.

        Args:
            make: makes a trace.
            skip: steps before the ones to keep.
            steps: steps to keep; None for all.
            watch: whether to trace those that come after, too.
            keep: what to tell `make` for the steps to keep.
            ready: called with their trace when it is whole.
            problem: told when nothing can be recorded.
            watched: called with each later window's trace before it is dropped, and its first step.
        """
        self._make, self._keep = make, keep
        self._skip, self._steps, self._wants_watch = skip, steps, watch
        self._ready, self._problem, self._watched = ready, problem, watched
        self._watch: Any = None
        self._watch_began = 0
        self._open = False
        self.first: Any = None
        self.steps_seen = 0

    @property
    def last(self) -> Any:
        """The trace that saw the end: the watch's, if it had come so far."""
        return self._watch or self.first

    @property
    def watched(self) -> bool:
        """Whether the end came after the steps to keep."""
        return self._watch is not None

    def begin(self) -> None:
        """From here on."""
        if self._skip == 0:
            self._begin_first()

    def stepped(self) -> None:
        """A training step is over."""
        self.steps_seen += 1
        since = self.steps_seen - self._skip
        if since == 0:
            self._begin_first()
        elif since == self._steps:
            self._close_first(None)
            if self._wants_watch and self.first is not None:
                self._watch = self._start_watch()
        elif self._watch is not None and (since - (self._steps or 0)) % _WATCH_STEPS == 0:
            self._close_watch(None)
            self._watch = self._start_watch()

    def end(self, error: BaseException | None = None) -> None:
        """No more steps; or none because of this."""
        if self._watch is not None:
            self._close_watch(error)
        self._close_first(error)

    def _begin_first(self) -> None:
        with self._warnings_told():
            self.first = self._start(**self._keep)
        self._open = self.first is not None

    def _close_first(self, error: BaseException | None) -> None:
        if self._open:
            self._open = False
            with self._warnings_told():
                self._close(self.first, error)
            if error is None:
                self._ready(self.first)

    def _start_watch(self) -> Any:
        watch, self._watch_began = self._start(), self.steps_seen
        if watch is not None:
            watch.waits = False  # nobody reads it unless memory runs out: the GPU need not catch up
        return watch

    def _close_watch(self, error: BaseException | None) -> None:
        self._close(self._watch, error)
        with contextlib.suppress(errors.PytracerError):  # it has nothing, which was told
            # A window counts its steps from 0; this is where the program was by then.
            self._watch.data.meta["first_step"] = self._watch_began
            if self._watched is not None:
                self._watched(self._watch, self._watch_began)

    def _start(self, **more: Any) -> Any:
        try:
            return self._make(table=False, **more).__enter__()
        except errors.PytracerError as problem:
            self._problem(str(problem))
            return None

    def _close(self, traced: Any, error: BaseException | None) -> None:
        if not traced.recording:
            return
        try:
            traced.__exit__(None if error is None else type(error), error, None)
        except errors.PytracerError as problem:
            self._problem(str(problem))

    @contextlib.contextmanager
    def _warnings_told(self) -> Iterator[None]:
        """They are lines of ours, and not the program's.

        For the first trace only: Python shows every warning of the program's again after this, and
        a window begins each few steps.
        """
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield
        for warning in warned:
            self._problem(str(warning.message))
