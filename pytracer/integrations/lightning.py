"""Lightning: `Trainer(callbacks=[MemoryTrace()])`, of `lightning` or `pytorch_lightning`."""

from typing import Any

try:
    from lightning.pytorch import Callback as LightningCallback
except ImportError:
    from pytorch_lightning import Callback as LightningCallback

from pytracer.integrations.callback import Callback, shows_options


@shows_options
class MemoryTrace(LightningCallback):  # type: ignore[misc]
    """Shows where the memory of the first training steps went; options as `Callback` has them."""

    def __init__(self, **options: Any) -> None:
        """Nothing is recorded until the training begins."""
        super().__init__()
        self._callback = Callback(**options)
        self._seen = 0
        self._logged = False

    @property
    def trace(self) -> Any:
        """The trace of the steps that were kept, once they are over."""
        return self._callback.trace

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Also of a second attempt."""
        self._seen = trainer.global_step
        self._logged = False
        self._callback.begin(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """A batch is not always a step: gradients may be accumulated."""
        for _step in range(trainer.global_step - self._seen):
            self._callback.stepped()
        self._seen = trainer.global_step
        self._log(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """All is well."""
        self._callback.end()
        self._log(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """It is explained, and goes on."""
        self._callback.end(exception)

    def _log(self, trainer: Any) -> None:
        found = self._callback.scalars()
        if found and not self._logged:
            self._logged = True
            for logger in trainer.loggers:
                logger.log_metrics(found, step=trainer.global_step)
