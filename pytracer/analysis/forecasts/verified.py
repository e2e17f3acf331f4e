"""A prediction beside the run that tested it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TOLERANCE = 0.01  # the largest error of a figure that still holds


@dataclass(frozen=True)
class Figure:
    """One number: predicted, perhaps as an interval, and measured. Sizes are bytes."""

    name: str
    lowest: int
    highest: int
    measured: int

    @property
    def error(self) -> float:
        """The error of the interval's nearer end, relative to the measured; 0 inside of it."""
        nearest = min(max(self.measured, self.lowest), self.highest)
        return nearest / self.measured - 1 if self.measured else float(nearest != 0)


@dataclass(frozen=True)
class Verified:
    """A prediction and its outcome. It is true if the prediction held."""

    question: str  # "fits", "checkpoint_plan" or "what_if"
    limit: int | None  # of torch's allocator; None: the run had no limit
    was_to_run: bool
    ran: bool
    figures: tuple[Figure, ...]  # empty if it was to fail, because the rest is then unknown
    machine: Mapping[str, Any]  # date, torch, CUDA, cuDNN and device
    file: str  # the file of predictions that got a new line
    notes: tuple[str, ...] = ()
    changes: tuple[Any, ...] = ()  # of files, in the program's private view of them

    def __bool__(self) -> bool:
        """Whether the run ended as predicted, with no figure more than a percent off."""
        close = all(abs(figure.error) <= _TOLERANCE for figure in self.figures)
        return self.was_to_run == self.ran and close

    def document(self) -> dict[str, Any]:
        """The result as a JSON document."""
        figures = {
            figure.name: {
                "predicted": [figure.lowest, figure.highest],
                "measured": figure.measured,
                "error": figure.error,
            }
            for figure in self.figures
        }
        ended = {"predicted": self.was_to_run, "measured": self.ran}
        return {
            "question": self.question,
            "held": bool(self),
            "limit": self.limit,
            "runs": ended,
            **figures,
            **self.machine,
            "notes": list(self.notes),
        }
