"""Accelerate: one line after `prepare`, `MemoryTrace(accelerator, model)`."""

from typing import Any

from accelerate import Accelerator

from pytracer.capture.session import Held
from pytracer.integrations.callback import Callback, shows_options


@shows_options
class MemoryTrace:
    """Shows the memory of the next training steps. Takes the options of `Callback`.

    `trace` is set when its steps are over. Tracing goes on until `end()`, to explain a later step
    that runs out of memory; watch=False turns that off. As a context manager it ends with its block,
    and explains an allocation that fails inside: `with MemoryTrace(accelerator, model): train()`.
    """

    def __init__(self, accelerator: Accelerator, *targets: Any, **options: Any) -> None:
        """Starts to record. A step is a step of the optimizer, so accumulation does not count."""
        self._accelerator = accelerator
        self._callback = Callback(**options)
        self._counter = Held()
        self._counter.count_steps(self._stepped)
        self._callback.begin(*(accelerator.unwrap_model(target) for target in targets))

    @property
    def trace(self) -> Any:
        """The trace of the kept steps; None until they are over."""
        return self._callback.trace

    def end(self, error: BaseException | None = None) -> None:
        """Stops recording and watching."""
        self._callback.end(error)
        self._counter.end()
        self._log()

    def __enter__(self) -> "MemoryTrace":
        """Returns this object, which records already."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Stops recording. An exception of the block goes on unchanged."""
        self.end(error)

    def _stepped(self) -> None:
        self._callback.stepped()
        self._log()

    def _log(self) -> None:
        scalars = self._callback.new_scalars() if self._accelerator.trackers else {}
        if scalars:
            self._accelerator.log(scalars)
