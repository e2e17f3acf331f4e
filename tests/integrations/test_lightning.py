"""Lightning, unmodified but for `callbacks=[MemoryTrace()]`."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import pytracer

lightning = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("default")


class Model(lightning.LightningModule):
    def __init__(self, fail_at: int = -1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.fail_at = fail_at

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if index == self.fail_at:
            torch.empty(1 << 44)
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def fit(model: Model, memory: Any, folder: Path, logger: Any = False) -> None:
    trainer = lightning.Trainer(
        max_steps=6, accelerator="cpu", callbacks=[memory], logger=logger, log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(torch.ones(64, 64), batch_size=4))


def test_the_first_steps_are_shown_and_logged(tmp_path, capsys) -> None:
    from pytracer.integrations.lightning import MemoryTrace

    class Logger(lightning.loggers.logger.DummyLogger):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, float] = {}

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.seen |= {k: v for k, v in metrics.items() if k.startswith("memory/")}

    memory, logger = MemoryTrace(devices="cpu"), Logger()
    fit(Model(), memory, tmp_path, logger)
    assert len(memory.trace.steps()) == 3
    weights = (64 * 64 + 64) * 4
    found = memory.trace.summary().own_peak
    assert found["weights"] == found["gradients"] == weights
    assert logger.seen["memory/peak_bytes"] == memory.trace.peak.bytes
    assert "memory/growth_per_step" in logger.seen
    assert "on cpu   step" in capsys.readouterr().err


def test_memory_that_runs_out_is_explained(tmp_path, capsys, monkeypatch) -> None:
    from pytracer.integrations.lightning import MemoryTrace

    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        fit(Model(fail_at=4), MemoryTrace(devices="cpu", stacks=True), tmp_path)
    page = capsys.readouterr().err
    assert "out of memory on cpu" in page
    assert "test_lightning.py:" in page.split("alive")[0].split("asked")[1]
    assert list(tmp_path.glob("pytracer-oom-*.pytrace"))


def test_one_option_is_always_on_and_lightnings_loggers_get_steps(tmp_path) -> None:
    from pytracer.integrations.lightning import MemoryTrace

    class Logger(lightning.loggers.logger.DummyLogger):
        steps: ClassVar[list[int]] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            if "memory/peak_bytes" in metrics and step is not None:
                self.steps.append(step)

    folder = tmp_path / "mine.always"
    fit(Model(), MemoryTrace(always=folder, devices="cpu"), tmp_path, Logger())
    assert pytracer.History(folder).step_count == 6
    assert Logger.steps == [1, 2, 3, 4, 5, 6]
