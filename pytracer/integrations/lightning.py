"""Lightning: `Trainer(callbacks=[MemoryTrace()])`, of `lightning` or `pytorch_lightning`."""

from typing import Any

try:
    from lightning.pytorch import Callback as LightningCallback
except ImportError:
    from pytorch_lightning import Callback as LightningCallback

from pytracer.integrations.callback import Callback, shows_options


@shows_options
class MemoryTrace(LightningCallback):  # type: ignore[misc]
    """Shows the memory of the first training steps. Takes the options of `Callback`."""

    def __init__(self, **options: Any) -> None:
        """Does not record until the training begins."""
        super().__init__()
        self._callback = Callback(**options)
        self._seen = 0

    @property
    def trace(self) -> Any:
        """The trace of the kept steps; None until they are over."""
        return self._callback.trace

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Starts to record, also at a second attempt."""
        self._seen = trainer.global_step
        self._callback.begin(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Counts the optimizer's steps, because a batch may only accumulate gradients."""
        for _step in range(trainer.global_step - self._seen):
            self._callback.stepped()
        self._seen = trainer.global_step
        self._log(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the recording."""
        self._callback.end()
        self._log(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Explains the exception, which then goes on."""
        self._callback.end(exception)

    def _log(self, trainer: Any) -> None:
        scalars = self._callback.new_scalars()
        if scalars:
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=trainer.global_step)
