"""Lifetimes in plain, slow Python: the oracle that the native matcher is tested against.

`csrc/core/lifetimes.h` states the rules. This file follows them one event at a time with lists
and dicts, and is meant to be read beside it. Nothing here is fast, and nothing calls it but tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pytracer.data.schema import ACTIONS, I64, U16, U64, Events, Places

# Every counter of csrc/core/lifetimes.h, in its order.
COUNTERS = (
    "before_snapshot",
    "repeated_snapshots",
    "duplicate_seeds",
    "implicit_frees",
    "unmatched_free_requests",
    "unmatched_frees",
    "frees_from_before",
    "repeated_free_requests",
    "unmatched_labels",
    "unmatched_saves",
    "unknown_places",
    "unknown_actions",
)

Device = tuple[int, int]  # device type and index


class Lifetimes(NamedTuple):
    """One row per allocation, seeds first; positions are -1 where there is no such event."""

    start: I64
    end: I64
    completed: I64
    address: U64
    bytes: U64
    place: U16
    allocation_of_event: I64
    counters: dict[str, int]


class LiveBytes(NamedTuple):
    """One device's requested bytes after each event that changed them."""

    at_start: int
    position: I64
    bytes: U64
    peak: int
    peak_position: int


@dataclass
class _Event:
    position: int
    action: str
    address: int
    bytes: int
    place: int
    device: Device


@dataclass
class _Allocation:
    number: int
    start: int
    address: int
    bytes: int
    place: int
    end: int = -1
    completed: int = -1


@dataclass
class _Device:
    snapshot: int = -1
    live: dict[int, _Allocation] = field(default_factory=dict)  # by address


def match_lifetimes(events: Events, places: Places) -> Lifetimes:
    """Matches what began with what ended it, by the rules of csrc/core/lifetimes.h."""
    counters = dict.fromkeys(COUNTERS, 0)
    rows = _known_events(events, places, counters)
    devices = {row.device: _Device() for row in rows}
    for row in rows:
        device = devices[row.device]
        if row.action == "snapshot" and device.snapshot == -1:
            device.snapshot = row.position

    recorded = [row for row in rows if row.position >= devices[row.device].snapshot]
    counters["before_snapshot"] = len(rows) - len(recorded)

    allocations: list[_Allocation] = []
    allocation_of_event = [-1] * len(events.action)

    def begin(row: _Event, start: int) -> None:
        allocation = _Allocation(len(allocations), start, row.address, row.bytes, row.place)
        allocations.append(allocation)
        allocation_of_event[row.position] = allocation.number
        devices[row.device].live[row.address] = allocation

    for row in recorded:
        if row.action == "seed":
            device = devices[row.device]
            touched = _first_touch(recorded, row)
            at_an_instant = device.snapshot != -1  # else it is of what lives at its own row
            was_there = touched is None or (at_an_instant and touched != "alloc")
            if was_there and row.address not in device.live:
                begin(row, start=-1)

    for row in recorded:
        device = devices[row.device]
        found = device.live.get(row.address)
        if row.action == "seed":
            if allocation_of_event[row.position] != -1:
                pass  # planted already
            elif found is None and device.snapshot == -1:
                begin(row, start=row.position)
            else:
                counters["duplicate_seeds"] += 1
        elif row.action == "alloc":
            if found is not None:
                counters["implicit_frees"] += 1
                _finish(found, row.position)
            begin(row, start=row.position)
        elif row.action == "free_requested":
            if found is None:
                counters["unmatched_free_requests"] += 1
            else:
                allocation_of_event[row.position] = found.number
                if found.end == -1:
                    found.end = row.position
                else:
                    counters["repeated_free_requests"] += 1
        elif row.action == "free_completed":
            if found is None:
                known = device.snapshot != -1  # what had been there before
                counters["unmatched_frees" if known else "frees_from_before"] += 1
            else:
                allocation_of_event[row.position] = found.number
                _finish(found, row.position)
                del device.live[row.address]
        elif row.action in ("label", "saved"):
            found = found or _containing(device.live, row.address)
            if found is not None:
                allocation_of_event[row.position] = found.number
            elif row.action == "label":
                counters["unmatched_labels"] += 1
            else:
                counters["unmatched_saves"] += 1
        elif row.action == "snapshot" and row.position != device.snapshot:
            counters["repeated_snapshots"] += 1

    return Lifetimes(
        start=_column(allocations, "start", np.int64),
        end=_column(allocations, "end", np.int64),
        completed=_column(allocations, "completed", np.int64),
        address=_column(allocations, "address", np.uint64),
        bytes=_column(allocations, "bytes", np.uint64),
        place=_column(allocations, "place", np.uint16),
        allocation_of_event=np.array(allocation_of_event, dtype=np.int64),
        counters=counters,
    )


def live_bytes(lifetimes: Lifetimes, places: Places, device: Device) -> LiveBytes:
    """Sums up what lives on a device after each event: from alloc to completed free."""
    changes: dict[int, int] = {-1: 0}
    for i in range(len(lifetimes.start)):
        place = int(lifetimes.place[i])
        if (int(places.device_type[place]), int(places.device_index[place])) != device:
            continue
        size = int(lifetimes.bytes[i])
        start, completed = int(lifetimes.start[i]), int(lifetimes.completed[i])
        changes[start] = changes.get(start, 0) + size
        if completed != -1:
            changes[completed] = changes.get(completed, 0) - size

    sums: dict[int, int] = {}
    total = 0
    for position in sorted(changes):
        total += changes[position]
        sums[position] = total
    peak = max(sums.values())
    return LiveBytes(
        at_start=sums[-1],
        position=np.array([p for p in sums if p != -1], dtype=np.int64),
        bytes=np.array([sums[p] for p in sums if p != -1], dtype=np.uint64),
        peak=peak,
        peak_position=min(p for p in sums if sums[p] == peak),
    )


def _known_events(events: Events, places: Places, counters: dict[str, int]) -> list[_Event]:
    known = []
    for position, number in enumerate(events.action):
        place = int(events.place[position])
        if number >= len(ACTIONS):
            counters["unknown_actions"] += 1
        elif place >= len(places.device_type):
            counters["unknown_places"] += 1
        else:
            device = (int(places.device_type[place]), int(places.device_index[place]))
            address, size = int(events.address[position]), int(events.bytes[position])
            known.append(_Event(position, ACTIONS[number], address, size, place, device))
    return known


_TOUCHING = ("alloc", "free_requested", "free_completed")


def _first_touch(rows: Sequence[_Event], seed: _Event) -> str | None:
    """The first that the allocator did at the seed's address before the seed's row."""
    for row in rows:
        if row.position >= seed.position:
            return None
        if (row.device, row.address) == (seed.device, seed.address) and row.action in _TOUCHING:
            return row.action
    return None


def _finish(allocation: _Allocation, position: int) -> None:
    allocation.completed = position
    if allocation.end == -1:
        allocation.end = position


def _containing(live: dict[int, _Allocation], address: int) -> _Allocation | None:
    """The live block with the nearest start below, if it reaches the address."""
    below = [start for start in live if start <= address]
    if not below:
        return None
    nearest = live[max(below)]
    return nearest if address < nearest.address + nearest.bytes else None


def _column(allocations: Sequence[_Allocation], name: str, dtype: type[Any]) -> Any:
    return np.array([getattr(allocation, name) for allocation in allocations], dtype=dtype)
