"""Accelerate: one line after `prepare`, `MemoryTrace(accelerator, model)`."""

from typing import Any

from accelerate import Accelerator

from pytracer.capture.session import Held
from pytracer.integrations.callback import Callback, shows_options


@shows_options
class MemoryTrace:
    """Shows where the memory of the next training steps goes; options as `Callback` has them.

    `trace` is there once its steps are over. It traces on until `end()`, in case a later step runs
    out of memory, unless watch=False. As a context manager it ends with its block, and explains
    an allocation that fails in there: `with MemoryTrace(accelerator, model): train()`.
    """

    def __init__(self, accelerator: Accelerator, *targets: Any, **options: Any) -> None:
        """Recording begins here; a step is one of the optimizer, not one that accumulates."""
        self._accelerator = accelerator
        self._callback = Callback(**options)
        self._counter = Held()
        self._counter.count_steps(self._stepped)
        self._logged = False
        self._callback.begin(*(accelerator.unwrap_model(target) for target in targets))

    @property
    def trace(self) -> Any:
        """The trace of the steps that were kept, once they are over."""
        return self._callback.trace

    def end(self, error: BaseException | None = None) -> None:
        """No more is recorded: not the rest of its steps, and none of those that it watches."""
        self._callback.end(error)
        self._counter.end()
        self._log()

    def __enter__(self) -> "MemoryTrace":
        """Already recording."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """What the block raised goes on unchanged."""
        self.end(error)

    def _stepped(self) -> None:
        self._callback.stepped()
        self._log()

    def _log(self) -> None:
        found = self._callback.scalars()
        if found and not self._logged and self._accelerator.trackers:
            self._logged = True
            self._accelerator.log(found)
