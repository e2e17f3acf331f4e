"""A claim of a document, and what a verdict about it is made of. Nothing here measures anything.

A judge is a pure function from measurements to a verdict, by the rule that stands beside it.
Measurements are figures by experiment: `measured["trainer_vanilla"]["peak_bytes"]`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

CONFIRMED, REFUTED, DEPENDS, SKIPPED, FAILED = (
    "CONFIRMED",
    "REFUTED",
    "DEPENDS",
    "SKIPPED",
    "FAILED",
)
VERDICTS = (CONFIRMED, REFUTED, DEPENDS, SKIPPED, FAILED)

# The documents, as they are cited.
SOURCES = {
    "S0": "Model training anatomy (Hugging Face)",
    "S1": "Efficient training on a single GPU (Hugging Face, v4.25.1)",
    "S2": "DNN model anatomy (notes)",
    "S3": "Efficient GPU utilization (notes)",
    "S4": "Adafactor on two GPUs (notebook)",
}

MOST_UNKNOWN = 0.001  # of the peak, in every trace

Figures = Mapping[str, Any]
Measured = Mapping[str, Figures]


@dataclass(frozen=True)
class Verdict:
    """What was found: the numbers in a line, and where it is not plainly so, on what it depends."""

    verdict: str
    measured: str
    because: str = ""


@dataclass(frozen=True)
class Claim:
    """One row of the documents."""

    id: str
    sources: tuple[str, ...]
    quote: str
    arithmetic: str  # what the documents' own numbers say, where they say more than the text
    rule: str
    judge: Callable[[Measured], Verdict]
    experiments: tuple[str, ...]
    welcome: tuple[str, ...] = ()  # experiments that add to it, and whose absence does not matter
    without_gpu: str = ""  # what a run on a CPU shows, and what it cannot


def on_gpu(figures: Figures) -> bool:
    """Whether these were measured on one."""
    return bool(figures["device"] != "cpu")


def full_size(figures: Figures) -> bool:
    """Whether this was the documents' own set-up, and no scaled-down one."""
    return bool(figures["scale"] == "full")


def confirmed_if(condition: bool, measured: str, because: str = "") -> Verdict:
    """One or the other."""
    return Verdict(CONFIRMED if condition else REFUTED, measured, because)


def ranged(figures: Figures, name: str, form: str = ".2f") -> str:
    """A median and, where it was measured more than once, where it lies: 2.02 (1.96 to 2.11)."""
    middle, low, high = figures[name], figures.get(f"{name}_low"), figures.get(f"{name}_high")
    if low is None or high is None or low == high:
        return f"{middle:{form}}"
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def mib(amount: float) -> str:
    """As the documents write sizes, who call it MB."""
    return (
        f"{amount / 2**20:,.0f} MiB" if abs(amount) >= 10 * 2**20 else f"{amount / 2**20:.2f} MiB"
    )


def change(now: float, before: float) -> str:
    """-42 %."""
    return f"{now / before - 1:+.1%}" if before else "from nothing"
