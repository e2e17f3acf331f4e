"""A trace's figures for Weights & Biases and TensorBoard, where a program uses them already."""

import contextlib
import sys
from typing import Any

from pytracer import errors
from pytracer.reading import Views


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
    """To the W&B run that is going on, if there is one, and to a SummaryWriter."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.run.log(of(traced))
    if writer is not None:
        for name, value in of(traced).items():
            writer.add_scalar(name, value, step)
