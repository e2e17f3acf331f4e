"""What can be asked of a recorder that was always on."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytracer import errors
from pytracer.data import frames
from pytracer.data.history import Steps, histories_in, is_history
from pytracer.reading import views
from pytracer.reading.views import LoadedTrace

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["History", "histories_in", "is_history"]

_STEP_COLUMNS = (
    "step",
    "device",
    "steps",
    "peak",
    "least_peak",
    "highest_peak",
    "now",
    "reserved_peak",
    "largest",
    "requests",
    "failed",
    "duration_ns",
    "unix_ns",
    "looked_at",
)


class History(Steps):
    """All steps of a program, and the looks at some of them.

    Example:
        history = History("train.always")
        print(history)
        history.steps()
        print(history.look(40_012))
    """

    def look(self, step: int) -> LoadedTrace:
        """The trace of the look at this step.

        Raises:
            errors.UsageError: there was no look at it.
        """
        for one in self.looks:
            if one.step <= step < one.step + max(one.steps, 1):  # a program may end no step
                return views.read(self.folder / one.file)
        there = ", ".join(str(one.step) for one in self.looks) or "none"
        raise errors.UsageError(f"there was no look at step {step}; looks begin with: {there}")

    def steps(self) -> "pd.DataFrame":
        """Returns a row per device and step. Old rows may stand for several steps."""
        parts = [
            frames.of_columns(
                {name: device if name == "device" else rows[name] for name in _STEP_COLUMNS}
            )
            for device, rows in self.totals.by_device()
        ]
        return frames.joined(parts).set_index("step")

    def post_mortem(self) -> str:
        """Returns a page about memory that ran out between two looks; "" if it did not."""
        from pytracer.export import history_postmortem

        if not self.looks or not self.devices:
            return ""
        last = self.looks[-1]
        return history_postmortem.render(self, last, self.look(last.step).data)

    def document(self) -> dict[str, Any]:
        """What the screen shows, for programs."""
        return {
            "command": self.command,
            "steps": self.step_count,
            "duration_ns": self.duration_ns,
            "devices": [vars(one) for one in self.devices],
            "looks": [vars(one) for one in self.looks],
            "events": [event for event in self.events if event["kind"] != "look"],
        }

    def table(self, width: int | None = None, *, color: bool = False) -> str:
        """Returns the text that `print(history)` shows."""
        from pytracer.export import history_text, terminal

        return history_text.render(self, replace(terminal.plain(width), color=color))

    def __str__(self) -> str:
        """The table."""
        return self.table()

    def __repr__(self) -> str:
        """One line."""
        return f"<pytracer history: {self.step_count} steps, {len(self.looks)} looks>"
