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
    """Shows where the memory of the first training steps went; options as `Callback` has them."""

    def __init__(self, **options: Any) -> None:
        """Nothing is recorded until the training begins."""
        self._callback = Callback(**options)
        self._leave_excepthook: Callable[[], None] = lambda: None

    @property
    def trace(self) -> Any:
        """The trace of the steps that were kept, once they are over."""
        return self._callback.trace

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Also of a second attempt, with a smaller batch say."""
        self._callback.begin(*([kwargs["model"]] if kwargs.get("model") is not None else []))
        self._hear_of_failure()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer has stepped."""
        self._callback.stepped()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All is well."""
        self._leave_excepthook()
        self._callback.end()

    def _hear_of_failure(self) -> None:
        """The Trainer tells callbacks of no exception; one that ends the program comes by here."""
        self._leave_excepthook()
        # Weakly: a training that fails never ends, and what it recorded is not to stay for it.
        before, this = sys.excepthook, weakref.ref(self)

        def hook(
            kind: type[BaseException], error: BaseException, traceback: TracebackType | None
        ) -> None:
            before(kind, error, traceback)
            if (alive := this()) is not None:
                alive._callback.end(error)

        def leave() -> None:
            if sys.excepthook is hook:  # else somebody else's calls it
                sys.excepthook = before

        self._leave_excepthook, sys.excepthook = leave, hook


# Who imports this module can say TrainingArguments(report_to="pytracer"), also in a file of settings.
INTEGRATION_TO_CALLBACK.setdefault("pytracer", MemoryTrace)
