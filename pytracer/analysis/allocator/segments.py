"""Segments: the memory that CUDA's allocator holds from the driver, rebuilt from the events.

A device's recording begins with a snapshot, followed by one `seed_segment` for each segment that
the allocator held then. The program continues while those rows are written, so all of them count
from the snapshot on. Later events add a segment (`segment_alloc`) or a piece of an expandable one
(`segment_map`), or give it back. The snapshot already includes all events before it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.facts import devices
from pytracer.basics.ranges import Ranges
from pytracer.data.recorded import Trace
from pytracer.data.schema import ACTION, ACTIONS, I64, Mask

GROWS, SHRINKS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


@dataclass(frozen=True)
class Changes:
    """Memory that a device's allocator took from the driver or gave back, in order of events."""

    row: NDArray[np.intp]  # of the event table
    bytes: I64  # negative: given back
    is_seed: Mask  # held when the snapshot was taken

    @property
    def at_start(self) -> int:
        """The bytes that the allocator held when the snapshot was taken."""
        return int(self.bytes[self.is_seed].sum())

    @property
    def level(self) -> I64:
        """The bytes that the allocator holds after each row."""
        after: I64 = np.cumsum(np.where(self.is_seed, 0, self.bytes)) + self.at_start
        return after


def snapshot_of(trace: Trace, device: str) -> int | None:
    """The position of the device's snapshot event; None if there is none."""
    events = trace.events
    here = devices.on(trace, device, events.place)
    rows = np.flatnonzero(here & (events.action == ACTION["snapshot"]))
    return int(rows[0]) if len(rows) else None


def changes(trace: Trace, device: str) -> Changes:
    """The changes of the device's segments; those of the snapshot are seeds."""
    events = trace.events
    sign = np.zeros(256, np.int8)
    sign[[ACTION[name] for name in (*GROWS, "seed_segment")]] = 1
    sign[[ACTION[name] for name in SHRINKS]] = -1
    own = devices.on(trace, device, events.place) & (sign[events.action] != 0)
    own[: (snapshot_of(trace, device) or 0)] = False
    row = np.flatnonzero(own)
    action = events.action[row]
    size = events.bytes[row].astype(np.int64) * sign[action]
    return Changes(row, size, action == ACTION["seed_segment"])


@dataclass(frozen=True)
class Held:
    """The place of a piece of memory that the allocator holds, and how it came."""

    place: int
    came_by: str  # the event's name


def held(trace: Trace, device: str, position: int | None = None) -> Ranges[Held]:
    """The address ranges that the allocator holds after the event there, or at the end."""
    events, segment_changes = trace.events, changes(trace, device)
    last = len(events.ticks) if position is None else position
    later = segment_changes.row[~segment_changes.is_seed]
    pieces: Ranges[Held] = Ranges()
    for row in (
        *segment_changes.row[segment_changes.is_seed].tolist(),
        *later[later <= last].tolist(),
    ):
        name, begin = ACTIONS[events.action[row]], int(events.address[row])
        end = begin + int(events.bytes[row])
        pieces.remove(begin, end)
        if name not in SHRINKS and begin < end:
            pieces.add(begin, end, Held(int(events.place[row]), name))
    return pieces
