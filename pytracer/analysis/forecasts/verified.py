"""A prediction beside what happened when it was run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TOLERANCE = 0.01  # what one figure may be off and still hold


@dataclass(frozen=True)
class Figure:
    """One number: predicted, perhaps as an interval, and measured. Sizes are bytes."""

    name: str
    lowest: int
    highest: int
    measured: int

    @property
    def error(self) -> float:
        """What of the measured the nearer end of the prediction is too much; 0 inside an interval."""
        nearest = min(max(self.measured, self.lowest), self.highest)
        return nearest / self.measured - 1 if self.measured else float(nearest != 0)


@dataclass(frozen=True)
class Verified:
    """What was foretold and what was seen. True where it held."""

    question: str  # "fits", "checkpoint_plan" or "what_if"
    limit: int | None  # of torch's allocator; None: it was run without one
    was_to_run: bool
    ran: bool
    figures: tuple[Figure, ...]  # none where it was to fail: what would have followed is unknown
    machine: Mapping[str, Any]  # date, torch, CUDA, cuDNN and device
    file: str  # that a line was added to
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether it ended as foretold, with no figure more than a percent off."""
        close = all(abs(figure.error) <= _TOLERANCE for figure in self.figures)
        return self.was_to_run == self.ran and close

    def document(self) -> dict[str, Any]:
        """For programs."""
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
