"""Sends a trace's figures to the program's loggers, or into a file of JSON lines.

W&B, MLflow, Prometheus and OpenTelemetry get the figures if the program has imported them. This module
imports none of them.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.reading.views import Views

_GAUGES: dict[
    tuple[str, str], Any
] = {}  # kept, because both libraries refuse a second gauge of one name


def of(traced: Views) -> dict[str, float]:
    """Bytes by name: the peak, its categories, and the growth per step if there are three steps."""
    peak = traced.peak
    figures = {"memory/peak_bytes": float(peak.bytes)}
    for category, amount in peak.by_category.items():
        if amount:
            figures[f"memory/{category}_at_peak"] = float(amount)
    with contextlib.suppress(errors.UsageError):
        figures["memory/growth_per_step"] = float(traced.growth_per_step())
    return figures


def log(traced: Views, *, writer: Any = None, step: int = 0) -> None:
    """Sends the figures to the imported loggers, and to a TensorBoard SummaryWriter."""
    figures = of(traced)
    _to_wandb(figures)
    _to_mlflow(figures, step)
    _to_prometheus(figures)
    _to_opentelemetry(figures)
    if writer is not None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)


def add_lines(traced: Views, path: str | Path) -> None:
    """Appends one JSON line per step to a file, with the columns of `steps()`."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(traced.steps().reset_index().to_json(orient="records", lines=True))


def _to_wandb(figures: dict[str, float]) -> None:
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.run.log(figures)


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


def _to_opentelemetry(figures: dict[str, float]) -> None:
    metrics = sys.modules.get("opentelemetry.metrics")
    if metrics is not None and hasattr(metrics.Meter, "create_gauge"):
        meter = metrics.get_meter("pytracer")
        for name, value in figures.items():
            key = "opentelemetry", name
            if key not in _GAUGES:
                _GAUGES[key] = meter.create_gauge(_metric(name), unit="By")
            _GAUGES[key].set(value)


def _metric(name: str) -> str:
    return "pytracer_" + name.replace("/", "_")
