"""Figures for W&B and TensorBoard, only where the program has imported them."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import pytracer
from pytracer.integrations import scalars


@pytest.fixture
def traced() -> pytracer.trace:
    with pytracer.trace(devices="cpu", report=False) as traced:
        torch.ones(100)
    return traced


def test_names_and_bytes(traced) -> None:
    assert scalars.of(traced) == {"memory/peak_bytes": 400.0, "memory/temporaries_at_peak": 400.0}


def test_a_run_of_wandb_that_is_going_on_gets_them(traced, monkeypatch) -> None:
    logged: list[dict[str, float]] = []
    wandb = ModuleType("wandb")
    wandb.run = SimpleNamespace(log=logged.append)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    scalars.log(traced)
    assert logged == [scalars.of(traced)]
    wandb.run = None  # type: ignore[attr-defined]
    scalars.log(traced)
    assert len(logged) == 1


def test_nothing_is_imported_for_it(traced) -> None:
    before = {"wandb", "tensorboard"} & sys.modules.keys()
    scalars.log(traced)
    assert {"wandb", "tensorboard"} & sys.modules.keys() == before


@pytest.mark.filterwarnings("default")
def test_a_summary_writer_writes_them(traced, tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        scalars.log(traced, writer=writer, step=7)
    read = EventAccumulator(str(tmp_path)).Reload()
    (value,) = read.Scalars("memory/peak_bytes")
    assert (value.step, value.value) == (7, 400.0)
