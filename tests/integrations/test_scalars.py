"""Figures for loggers, only where the program has imported them, and JSON lines for all others."""

import inspect
import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import pytracer
from pytracer.data.step_totals import StepRow
from pytracer.integrations import scalars
from pytracer.integrations.callback import Callback


@pytest.fixture
def traced() -> pytracer.trace:
    with pytracer.trace(devices="cpu", table=False) as traced:
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
    loggers = {"wandb", "tensorboard", "mlflow", "prometheus_client", "opentelemetry"}
    before = loggers & sys.modules.keys()
    scalars.log(traced)
    assert loggers & sys.modules.keys() == before


def test_an_mlflow_run_that_is_going_on_gets_them(traced, monkeypatch) -> None:
    logged: list[object] = []
    mlflow = ModuleType("mlflow")
    mlflow.active_run = lambda: None  # type: ignore[attr-defined]
    mlflow.log_metrics = lambda found, step: logged.append((found, step))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    scalars.log(traced)
    assert logged == []
    mlflow.active_run = lambda: "a run"  # type: ignore[attr-defined]
    scalars.log(traced, step=3)
    assert logged == [(scalars.of(traced), 3)]


def test_prometheus_serves_the_last_traces_figures(traced) -> None:
    client = pytest.importorskip("prometheus_client")
    for _ in range(2):  # a gauge is made once
        scalars.log(traced)
    served = client.generate_latest().decode()
    assert "pytracer_memory_peak_bytes 400.0" in served
    assert "pytracer_memory_temporaries_at_peak 400.0" in served


def test_opentelemetry_exports_them(traced) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))
    for _ in range(2):
        scalars.log(traced)
    told = json.loads(reader.get_metrics_data().to_json())  # type: ignore[union-attr]
    (scope,) = told["resource_metrics"][0]["scope_metrics"]
    values = {m["name"]: m["data"]["data_points"][0]["value"] for m in scope["metrics"]}
    assert values["pytracer_memory_peak_bytes"] == 400


CARD, HOST = (1, 3), (0, 0)


def a_step(number: int, device: tuple[int, int], peak: int) -> StepRow:
    return StepRow(number, 10, 5, False, device, peak // 2, peak, 2 * peak, 4, 3, 0)


def test_figures_of_a_step_are_those_of_the_accelerator(monkeypatch) -> None:
    rows = [a_step(7, HOST, 900), a_step(7, CARD, 400)]
    told: list[tuple[object, object]] = []
    wandb, mlflow = ModuleType("wandb"), ModuleType("mlflow")
    run = SimpleNamespace(log=lambda figures, commit: told.append((figures, commit)))
    wandb.run = run  # type: ignore[attr-defined]
    mlflow.active_run = lambda: 1  # type: ignore[attr-defined]
    mlflow.log_metrics = lambda figures, step: told.append((figures, step))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    writer = SimpleNamespace(add_scalar=lambda *about: told.append(about))
    scalars.log_step(rows, writer=writer)
    figures = {
        "memory/peak_bytes": 400.0,
        "memory/now_bytes": 200.0,
        "memory/reserved_bytes": 800.0,
        "memory/failed_requests": 0.0,
    }
    assert told[:2] == [(figures, False), (figures, 7)]  # no row of W&B's of its own
    assert told[2:] == [(name, value, 7) for name, value in figures.items()]


def test_opentelemetry_names_the_card(monkeypatch) -> None:
    told: list[tuple[str, float, object]] = []

    def gauge(name: str, unit: str) -> object:
        return SimpleNamespace(set=lambda value, about: told.append((name, value, about)))

    monkeypatch.setattr(scalars, "_GAUGES", {})
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # keeps its gauges for ever
    metrics = ModuleType("opentelemetry.metrics")
    metrics.Meter = SimpleNamespace(create_gauge=None)  # type: ignore[attr-defined]
    metrics.get_meter = lambda _: SimpleNamespace(create_gauge=gauge)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", metrics)
    scalars.log_step([a_step(1, CARD, 400)], categories={"cuda:3": {"gradients": 30}})
    assert (
        "hw.gpu.memory.usage",
        30.0,
        {"hw.id": "cuda:3", "pytracer.category": "gradients"},
    ) in told
    assert ("hw.gpu.memory.usage", 200.0, {"hw.id": "cuda:3"}) in told
    assert ("pytracer_memory_peak_bytes", 400.0, {"hw.id": "cuda:3"}) in told
    scalars._send({"memory/weights_at_peak": 8.0}, None, 0, "cuda:3")
    weights = {"hw.id": "cuda:3", "pytracer.category": "weights"}
    assert ("hw.gpu.memory.usage", 8.0, weights) in told


def test_always_on_sends_every_nth_step(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    weight = torch.nn.Parameter(torch.ones(100))
    optimizer = torch.optim.SGD([weight])
    callback = Callback(always="mine.always", every=2, log="steps.jsonl", devices="cpu")
    callback.begin()
    for _ in range(6):
        (weight * 2).sum().backward()
        optimizer.step()
        callback.stepped()
    assert callback.new_scalars()["memory/peak_bytes"] > 0
    assert callback.new_scalars() == {}
    callback.end()
    lines = [json.loads(line) for line in Path("steps.jsonl").read_text().splitlines()]
    history = pytracer.History("mine.always").steps()
    assert [line["step"] for line in lines] == [1, 3, 5]
    assert [line["peak"] for line in lines] == history.peak.tolist()[1::2]


def test_a_step_has_the_categories_of_the_last_look(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight])
    callback = Callback(always="mine.always", devices="cpu")
    callback.begin()
    figures, until = {}, time.monotonic() + 120  # another process reads the look
    while "memory/gradients_at_peak" not in figures and time.monotonic() < until:
        (weight * 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        figures = callback.new_scalars()
    callback.end()
    history = pytracer.History("mine.always")
    of_looks = [history.look(look.step).peak.by_category for look in history.looks]
    assert figures["memory/gradients_at_peak"] in [held["gradients"] for held in of_looks]
    assert figures["memory/peak_bytes"] > 0


def test_a_logger_that_fails_ends_no_recorder(tmp_path) -> None:
    weight = torch.nn.Parameter(torch.ones(100))
    optimizer = torch.optim.SGD([weight])

    def fails(rows: list[StepRow]) -> None:
        raise OSError("no connection")

    with pytracer.always(tmp_path / "mine.always", each=fails, devices="cpu"):
        for _ in range(4):
            (weight * 2).sum().backward()
            optimizer.step()
    assert pytracer.History(tmp_path / "mine.always").step_count == 4


def test_a_file_gets_a_json_line_for_each_step(tmp_path) -> None:
    weight = torch.nn.Parameter(torch.ones(100))
    optimizer = torch.optim.SGD([weight])
    with pytracer.trace(devices="cpu", table=False) as traced:
        for _ in range(3):
            (weight * 2).sum().backward()
            optimizer.step()
    for _ in range(2):  # what was there stays
        scalars.add_lines(traced, tmp_path / "steps.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2] * 2
    assert [line["peak_bytes"] for line in lines[:3]] == traced.steps().peak_bytes.tolist()


@pytest.mark.parametrize("framework", ["transformers", "lightning", "accelerate"])
def test_a_frameworks_callback_shows_its_options(framework) -> None:
    pytest.importorskip(framework)
    module = __import__(f"pytracer.integrations.{framework}", fromlist=["MemoryTrace"])
    signature = inspect.signature(module.MemoryTrace)
    assert {
        "steps",
        "skip",
        "path",
        "watch",
        "writer",
        "log",
        "always",
        "every",
    } <= signature.parameters.keys()
    assert "steps to keep" in module.MemoryTrace.__doc__
    assert "self" not in signature.parameters


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
