"""A trace's figures for the loggers that a program uses already, and as JSON lines for all others.

W&B, MLflow, Prometheus and OpenTelemetry are written to where the program has imported them.
Nothing is imported here.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.reading import Views

_GAUGES: dict[tuple[str, str], Any] = {}  # made once: both libraries refuse a name that they have


def of(traced: Views) -> dict[str, float]:
    """Names and bytes: the peak, each category in it, and the growth per step if there are three."""
    peak = traced.peak
    found = {"memory/peak_bytes": float(peak.bytes)}
    for category, amount in peak.by_category.items():
        if amount:
            found[f"memory/{category}_at_peak"] = float(amount)
    with contextlib.suppress(errors.UsageError):
        found["memory/growth_per_step"] = float(traced.growth_per_step())
    return found


def log(traced: Views, *, writer: Any = None, step: int = 0) -> None:
    """To whoever listens, and to a TensorBoard SummaryWriter."""
    found = of(traced)
    _to_wandb(found)
    _to_mlflow(found, step)
    _to_prometheus(found)
    _to_opentelemetry(found)
    if writer is not None:
        for name, value in found.items():
            writer.add_scalar(name, value, step)


def add_lines(traced: Views, path: str | Path) -> None:
    """Adds one JSON line per step to a file: what `steps()` says of it."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(traced.steps().reset_index().to_json(orient="records", lines=True))


def _to_wandb(found: dict[str, float]) -> None:
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.run.log(found)


def _to_mlflow(found: dict[str, float], step: int) -> None:
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None and mlflow.active_run() is not None:
        mlflow.log_metrics(found, step=step)


def _to_prometheus(found: dict[str, float]) -> None:
    client = sys.modules.get("prometheus_client")
    if client is not None:
        for name, value in found.items():
            key = "prometheus", name
            if key not in _GAUGES:
                _GAUGES[key] = client.Gauge(_metric(name), f"{name} of pytracer's last trace")
            _GAUGES[key].set(value)


def _to_opentelemetry(found: dict[str, float]) -> None:
    metrics = sys.modules.get("opentelemetry.metrics")
    if metrics is not None and hasattr(metrics.Meter, "create_gauge"):
        meter = metrics.get_meter("pytracer")
        for name, value in found.items():
            key = "opentelemetry", name
            if key not in _GAUGES:
                _GAUGES[key] = meter.create_gauge(_metric(name), unit="By")
            _GAUGES[key].set(value)


def _metric(name: str) -> str:
    return "pytracer_" + name.replace("/", "_")
