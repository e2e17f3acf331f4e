"""Hugging Face's Trainer, unmodified but for `callbacks=[MemoryTrace()]`."""

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("default")


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((16,), i % 50), "labels": torch.full((16,), i % 50)}


def a_model() -> Any:
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def a_trainer(folder: Path, **more: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=4, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=100,
    )  # fmt: skip
    return transformers.Trainer(a_model(), arguments, train_dataset=Data(), **more)


def test_the_first_steps_are_shown_and_categories_are_exact(tmp_path, capsys) -> None:
    from pytracer.integrations.transformers import MemoryTrace

    memory = MemoryTrace(devices="cpu", path=tmp_path / "run.pytrace")
    trainer = a_trainer(tmp_path, callbacks=[memory])
    trainer.train()
    assert len(memory.trace.steps()) == 3
    weights = sum(p.nbytes for p in trainer.model.parameters())
    found = memory.trace.summary().own_peak
    assert found["gradients"] == weights
    assert 2 * weights <= found["optimizer_state"] < 2.01 * weights
    assert weights <= found["weights"] < 1.1 * weights
    assert found["unknown"] == 0
    assert "on cpu   step" in capsys.readouterr().err
    assert (tmp_path / "run.pytrace").exists()


def test_a_training_that_fails_fails_as_without_us_and_can_be_tried_again(tmp_path, capsys) -> None:
    from pytracer.integrations.transformers import MemoryTrace

    class Greedy(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                torch.empty(1 << 44)

    memory = MemoryTrace(devices="cpu", report=False)
    trainer = a_trainer(tmp_path, callbacks=[memory, Greedy()])
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        trainer.train()
    trainer.pop_callback(Greedy)
    trainer.train()
    assert len(memory.trace.steps()) == 3
