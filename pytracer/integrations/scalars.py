"""Sends a trace's figures to the program's loggers, or into a file of JSON lines.

W&B, MLflow, Prometheus and OpenTelemetry get the figures if the program has imported them. This module
imports none of them.
"""

import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pytracer import errors
from pytracer.data.schema import device_name
from pytracer.data.step_totals import StepRow
from pytracer.reading.views import Views

_GPU_USAGE = "hw.gpu.memory.usage"  # of OpenTelemetry's semantic conventions
_AT_PEAK = "_at_peak"
_GAUGES: dict[
    tuple[str, str], Any
] = {}  # kept, because both libraries refuse a second gauge of one name


def of(traced: Views) -> dict[str, float]:
    """Bytes by name: the peak, its categories, and the growth per step if there are three steps."""
    peak = traced.peak
    figures = {"memory/peak_bytes": float(peak.bytes)}
    for category, amount in peak.by_category.items():
        if amount:
            figures[f"memory/{category}{_AT_PEAK}"] = float(amount)
    with contextlib.suppress(errors.UsageError):
        figures["memory/growth_per_step"] = float(traced.growth_per_step())
    return figures


def of_step(
    rows: list[StepRow], categories: Mapping[str, Mapping[str, int]]
) -> tuple[str, dict[str, float]]:
    """The device that matters most in a step, accelerators first, and its bytes by name.

    Args:
        rows: of the step.
        categories: those of the last look's peak, by device: between looks nobody sees any.
    """
    row = max(rows, key=lambda row: (row.device[0] > 0, row.peak))
    device = device_name(*row.device)
    held = categories.get(device, {})
    return device, {
        "memory/peak_bytes": float(row.peak),
        "memory/now_bytes": float(row.now),
        "memory/reserved_bytes": float(row.reserved_peak),
        "memory/failed_requests": float(row.failed),
        **{f"memory/{name}{_AT_PEAK}": float(amount) for name, amount in held.items() if amount},
    }


def log(traced: Views, *, writer: Any = None, step: int = 0) -> None:
    """Sends a trace's figures to the imported loggers, and to a TensorBoard SummaryWriter."""
    _send(of(traced), writer, step, traced.peak.device)


def log_step(
    rows: list[StepRow],
    *,
    writer: Any = None,
    categories: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
) -> None:
    """Sends a step's figures there, from a recorder that is always on."""
    if rows:
        device, figures = of_step(rows, categories)
        _send(figures, writer, rows[0].step, device, is_step=True)


def _send(
    figures: dict[str, float], writer: Any, step: int, device: str, *, is_step: bool = False
) -> None:
    _to_wandb(figures, is_step=is_step)
    _to_mlflow(figures, step)
    _to_prometheus(figures)
    _to_opentelemetry(figures, device)
    if writer is not None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)


def add_lines(traced: Views, path: str | Path) -> None:
    """Appends one JSON line per step to a file, with the columns of `steps()`."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(traced.steps().reset_index().to_json(orient="records", lines=True))


def add_line_of_step(rows: list[StepRow], path: str | Path) -> None:
    """Appends one JSON line per device of a step."""
    with Path(path).open("a", encoding="utf-8") as file:
        for row in rows:
            about = {**asdict(row), "device": device_name(*row.device)}
            file.write(f"{json.dumps(about)}\n")


def _to_wandb(figures: dict[str, float], *, is_step: bool) -> None:
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        # Those of each step go with the program's next row: W&B counts the rows.
        wandb.run.log(figures, commit=False) if is_step else wandb.run.log(figures)


def _to_mlflow(figures: dict[str, float], step: int) -> None:
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None and mlflow.active_run() is not None:
        mlflow.log_metrics(figures, step=step)


def _to_prometheus(figures: dict[str, float]) -> None:
    client = sys.modules.get("prometheus_client")
    if client is not None:
        for name, value in figures.items():
            key = "prometheus", name
            if key not in _GAUGES:
                _GAUGES[key] = client.Gauge(_metric(name), f"{name} of pytracer's last trace")
            _GAUGES[key].set(value)


def _to_opentelemetry(figures: dict[str, float], device: str) -> None:
    metrics = sys.modules.get("opentelemetry.metrics")
    if metrics is not None and hasattr(metrics.Meter, "create_gauge"):
        meter = metrics.get_meter("pytracer")
        for name, value in figures.items():
            of_device = {"hw.id": device}
            _gauge(meter, _metric(name)).set(value, of_device)
            short = name.removeprefix("memory/")
            if device.startswith("cuda") and short == "now_bytes":
                _gauge(meter, _GPU_USAGE).set(value, of_device)
            if device.startswith("cuda") and short.endswith(_AT_PEAK):
                category = short.removesuffix(_AT_PEAK)
                _gauge(meter, _GPU_USAGE).set(value, {**of_device, "pytracer.category": category})


def _gauge(meter: Any, name: str) -> Any:
    key = "opentelemetry", name
    if key not in _GAUGES:
        _GAUGES[key] = meter.create_gauge(name, unit="By")
    return _GAUGES[key]


def _metric(name: str) -> str:
    return "pytracer_" + name.replace("/", "_")
