"""Writers that train by a framework, which writes checkpoints and logs."""

from pathlib import Path
from typing import Any

import torch
from torch import nn


class _Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(8), "labels": torch.zeros(8)}


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


def trainer(here: Path) -> None:
    """Trainer of transformers, with our callback."""
    from transformers import Trainer, TrainingArguments

    from pytracer.integrations.transformers import MemoryTrace

    arguments = TrainingArguments(
        output_dir=str(here / "results"), max_steps=2, save_steps=1, report_to=[], logging_steps=1
    )
    callback = MemoryTrace(steps=1, log=here / "memory.jsonl")
    Trainer(_Model(), arguments, train_dataset=_Rows(), callbacks=[callback]).train()
    assert (here / "results" / "checkpoint-2" / "trainer_state.json").exists()
    assert (here / "memory.jsonl").stat().st_size > 0
    assert callback.trace is not None
    assert callback.trace.peak.bytes > 0


def lightning(here: Path) -> None:
    """Lightning, with our callback, its checkpoints and its csv."""
    import lightning as pl

    from pytracer.integrations.lightning import MemoryTrace

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _Model()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    callback = MemoryTrace(steps=1)
    pl.Trainer(
        max_steps=2,
        default_root_dir=here / "results",
        callbacks=[callback],
        enable_progress_bar=False,
        log_every_n_steps=1,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
    ).fit(Module(), torch.utils.data.DataLoader(_Rows()))
    assert list((here / "results").rglob("*.ckpt"))
    assert callback.trace is not None


def accelerate(here: Path) -> None:
    """Accelerate, with our callback, and its checkpoint."""
    from accelerate import Accelerator

    from pytracer.integrations.accelerate import MemoryTrace

    one = Accelerator()
    model = _Model()
    model, optimizer = one.prepare(model, torch.optim.AdamW(model.parameters()))
    device = one.device
    with MemoryTrace(one, model, steps=1) as callback:
        for _ in range(2):
            one.backward(model(torch.ones(2, 8).to(device), torch.zeros(2, 8).to(device))["loss"])
            optimizer.step()
            optimizer.zero_grad()
    assert callback.trace is not None
    one.save_model(model, here / "results")
    assert list((here / "results").glob("*.safetensors"))


WRITERS = {each.__name__: each for each in (trainer, lightning, accelerate)}
