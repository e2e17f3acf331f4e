"""Hugging Face's Trainer, unmodified but for `callbacks=[MemoryTrace()]`."""

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import pytracer

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


def a_trainer(folder: Path, report_to: str = "none", **more: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=4, use_cpu=True,
        report_to=report_to, save_strategy="no", disable_tqdm=True, logging_steps=100,
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
    assert memory.trace.data.meta["frameworks"][0] == "transformers.Trainer"


def test_a_name_in_training_arguments_is_enough_once_the_module_is_imported(
    tmp_path, monkeypatch, capsys
) -> None:
    import pytracer.integrations.transformers  # noqa: F401

    monkeypatch.chdir(tmp_path)
    trainer = a_trainer(tmp_path, report_to="pytracer")
    trainer.train()
    assert "on cpu   step" in capsys.readouterr().err
    assert list(tmp_path.glob("*.pytrace")) == []


def test_a_training_that_fails_fails_as_without_us_and_can_be_tried_again(tmp_path, capsys) -> None:
    from pytracer.integrations.transformers import MemoryTrace

    class Greedy(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                torch.empty(1 << 44)

    memory = MemoryTrace(devices="cpu", table=False)
    trainer = a_trainer(tmp_path, callbacks=[memory, Greedy()])
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        trainer.train()
    trainer.pop_callback(Greedy)
    trainer.train()
    assert len(memory.trace.steps()) == 3


def test_trainings_leave_the_excepthook_as_it_was(tmp_path, monkeypatch) -> None:
    from pytracer.integrations.transformers import MemoryTrace

    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: seen.append(error))
    before = sys.excepthook
    memory = MemoryTrace(devices="cpu", table=False)
    trainer = a_trainer(tmp_path, callbacks=[memory])
    trainer.train()
    assert sys.excepthook is before
    memory.on_train_begin(None, None, None)
    memory.on_train_begin(None, None, None)  # the first attempt failed
    error = RuntimeError("the program's own")
    sys.excepthook(RuntimeError, error, None)
    assert seen == [(RuntimeError, error, None)]
    memory.on_train_end(None, None, None)
    assert sys.excepthook is before


def test_an_excepthook_of_somebody_elses_stays_and_a_failed_training_is_let_go(monkeypatch) -> None:
    from pytracer.integrations.transformers import MemoryTrace

    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    memory = MemoryTrace(devices="cpu", table=False)
    memory.on_train_begin(None, None, None)
    ours = sys.excepthook
    theirs = lambda *error: ours(*error)  # noqa: E731
    sys.excepthook = theirs
    memory.on_train_end(None, None, None)
    assert sys.excepthook is theirs
    memory.on_train_begin(None, None, None)
    memory._callback.end(RuntimeError("it failed"))
    alive = weakref.ref(memory)
    del memory
    gc.collect()
    assert alive() is None
    sys.excepthook(RuntimeError, RuntimeError("later"), None)


def test_one_option_is_always_on_for_a_trainer(tmp_path) -> None:
    from pytracer.integrations.transformers import MemoryTrace

    folder = tmp_path / "mine.always"
    a_trainer(tmp_path, callbacks=[MemoryTrace(always=folder, devices="cpu")]).train()
    assert pytracer.History(folder).step_count == 6
