"""What the folder of a recorder that is always on says: every step in short, its looks, what was noted."""

import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytracer.data import step_totals
from pytracer.data.step_totals import StepTotals

if TYPE_CHECKING:
    import numpy as np

_DEPARTS, _DEPARTS_BYTES = 0.02, 1 << 20  # from the middle rank, both
_BEHIND, _BEHIND_STEPS = 0.05, 3


def is_history(path: str | Path) -> bool:
    """Whether the path is the folder of a recorder that is always on."""
    return (Path(path) / step_totals.NAME).is_file()


def histories_in(path: str | Path) -> list[Path]:
    """The folders of recorders in this folder, or that match this pattern: one for each rank."""
    place = Path(path)
    found = place.parent.glob(place.name) if "*" in place.name else place.glob("*")
    return sorted(folder for folder in found if is_history(folder))


@dataclass(frozen=True)
class Look:
    """Steps that were recorded whole."""

    step: int  # the first of them
    steps: int
    reason: str
    file: str


@dataclass(frozen=True)
class DeviceHistory:
    """What one device did in all steps. Bytes are the requested ones, but for `reserved`."""

    device: str
    usual: int  # the middle one of the steps' peaks
    least: int
    highest: int
    highest_step: int
    now: int
    reserved: int


class Steps:
    """All steps of a program, in short."""

    def __init__(self, folder: str | Path) -> None:
        """Reads the folder, also while the program runs.

        Raises:
            errors.UnreadableTrace: there is none, or it has another format.
        """
        self.folder = Path(folder)
        self.totals: StepTotals = step_totals.read(self.folder / step_totals.NAME)

    @property
    def command(self) -> str:
        """The program."""
        return str(self.totals.header.get("command", ""))

    @property
    def rank(self) -> int:
        """The process's number in its job."""
        return int(self.totals.header.get("rank", 0))

    @property
    def is_over(self) -> bool:
        """Whether its program has ended it, or is gone from this machine."""
        if any(event["kind"] == "ended" for event in self.events):
            return True
        header = self.totals.header
        return header.get("host") == platform.node() and not Path(f"/proc/{header['pid']}").exists()

    @property
    def grows(self) -> dict[str, Any] | None:
        """The last event that says that memory grows; None if there is none."""
        told = [event for event in self.events if event["kind"] == "grows"]
        return told[-1] if told else None

    @property
    def step_count(self) -> int:
        """The number of steps that are over."""
        return self.totals.steps

    @property
    def duration_ns(self) -> int:
        """From the beginning to the end of the last step."""
        rows = self.totals.rows
        began = self.totals.header.get("began_unix_ns", 0)
        return max(int(rows["unix_ns"].max()) - int(began), 0) if len(rows) else 0

    @cached_property
    def devices(self) -> list[DeviceHistory]:
        """A row per device, accelerators first."""
        return [_in_short(device, rows) for device, rows in self.totals.by_device()]

    @cached_property
    def looks(self) -> list[Look]:
        """The looks whose files are there, in the order of their steps."""
        found = []
        for event in self.events:
            path = self.folder / step_totals.name_of_look(int(event.get("first", -1)))
            if event["kind"] == "look" and path.is_file():
                found.append(Look(event["first"], event["steps"], event["reason"], path.name))
        return found

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """What was noted: looks, departures, growth, failed requests, alarms."""
        try:
            lines = (self.folder / step_totals.EVENTS).read_text("utf-8").splitlines()
        except OSError:  # nothing was noted yet
            return []
        return [event for event in map(_event, lines) if event is not None]


@dataclass(frozen=True)
class RankRow:
    """A rank in short, by the device that matters most: accelerators come first."""

    rank: int
    steps: int
    device: str
    usual: int
    highest: int
    highest_step: int
    now: int
    departs: bool  # its usual peak differs from the middle one of all ranks
    behind: bool  # it has ended far fewer steps than the others, or none for long
    grows: str  # what says so; "" if its memory does not grow


def ranks_in_short(ranks: list[Steps]) -> list[RankRow]:
    """A row for each rank that has ended a step, in their order."""
    known = sorted((one for one in ranks if one.devices), key=lambda one: one.rank)
    if not known:
        return []
    main = [one.devices[0] for one in known]
    usual = middle(device.usual for device in main)
    most = max(one.step_count for one in known)
    return [
        RankRow(
            rank=one.rank,
            steps=one.step_count,
            device=device.device,
            usual=device.usual,
            highest=device.highest,
            highest_step=device.highest_step,
            now=device.now,
            departs=abs(device.usual - usual) > max(_DEPARTS * usual, _DEPARTS_BYTES),
            behind=one.step_count < most - max(_BEHIND * most, _BEHIND_STEPS),
            grows=_growth(one),
        )
        for one, device in zip(known, main, strict=True)
    ]


def middle(sizes: Iterable[int]) -> int:
    """The middle one by size."""
    ordered = sorted(sizes)
    return ordered[len(ordered) // 2]


def _growth(one: Steps) -> str:
    if one.grows is None:
        return ""
    later = one.grows["step"]
    alarms = [each for each in one.events if each["kind"] == "alarm" and each["step"] >= later]
    return str(alarms[-1]["text"]) if alarms else f"since step {later:,}"


def _event(line: str) -> dict[str, Any] | None:
    """A line of the file of events; None if a killed process has left only its beginning."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "kind" in event and "step" in event else None


def _in_short(device: str, rows: "np.ndarray[Any, Any]") -> DeviceHistory:
    highest = int(rows["highest_peak"].argmax())
    return DeviceHistory(
        device=device,
        usual=_weighted_middle(rows["peak"], rows["steps"]),
        least=int(rows["least_peak"].min()),
        highest=int(rows["highest_peak"][highest]),
        highest_step=int(rows["step"][highest]),
        now=int(rows["now"][-1]),
        reserved=int(rows["reserved_peak"].max()),
    )


def _weighted_middle(values: "np.ndarray[Any, Any]", weights: "np.ndarray[Any, Any]") -> int:
    order = values.argsort(kind="stable")
    passed = weights[order].cumsum()
    return int(values[order][int(passed.searchsorted((passed[-1] + 1) // 2))])
