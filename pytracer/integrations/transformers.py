"""Hugging Face Trainer: `Trainer(..., callbacks=[MemoryTrace()])`, or `report_to="pytracer"`."""

import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import INTEGRATION_TO_CALLBACK

from pytracer.integrations.callback import Callback, shows_options


@shows_options
class MemoryTrace(TrainerCallback):  # type: ignore[misc]
    """Shows the memory of the first training steps. Takes the options of `Callback`."""

    def __init__(self, **options: Any) -> None:
        """Does not record until the training begins."""
        self._callback = Callback(**options)
        self._leave_excepthook: Callable[[], None] = lambda: None

    @property
    def trace(self) -> Any:
        """The trace of the kept steps; None until they are over."""
        return self._callback.trace

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts to record, also at a second attempt, perhaps with a smaller batch."""
        self._callback.begin(*([kwargs["model"]] if kwargs.get("model") is not None else []))
        self._watch_for_failure()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts a step of the optimizer."""
        self._callback.stepped()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the recording."""
        self._leave_excepthook()
        self._callback.end()

    def _watch_for_failure(self) -> None:
        """Sets `sys.excepthook`, because the Trainer does not pass exceptions to its callbacks."""
        self._leave_excepthook()
        # A weak reference, because a failed training never ends, and its recording must not stay alive.
        before, this = sys.excepthook, weakref.ref(self)

        def hook(
            kind: type[BaseException], error: BaseException, traceback: TracebackType | None
        ) -> None:
            before(kind, error, traceback)
            if (alive := this()) is not None:
                alive._callback.end(error)

        def leave() -> None:
            if sys.excepthook is hook:  # otherwise another hook calls ours
                sys.excepthook = before

        self._leave_excepthook, sys.excepthook = leave, hook


# Importing this module allows TrainingArguments(report_to="pytracer"), also in a settings file.
INTEGRATION_TO_CALLBACK.setdefault("pytracer", MemoryTrace)
