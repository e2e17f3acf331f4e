"""Segments: the memory that CUDA's allocator holds from the driver, as the events tell of it.

A device's recording begins with a snapshot, followed by one `seed_segment` for each segment that
the allocator held then. The program goes on while those rows are written, so all of them count
from the snapshot on. Later events add a segment (`segment_alloc`), a piece of an expandable one
(`segment_map`), or give it back. Events before the snapshot are in the snapshot already.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.facts import devices
from pytracer.analysis.facts.scopes import Mask
from pytracer.ranges import Ranges
from pytracer.recorded import Trace
from pytracer.schema import ACTION, ACTIONS, I64

GROWS, SHRINKS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


@dataclass(frozen=True)
class Changes:
    """What a device's allocator took from the driver and gave back, in the order of the events."""

    row: NDArray[np.intp]  # of the event table
    bytes: I64  # negative: given back
    is_seed: Mask  # held when the snapshot was taken

    @property
    def at_start(self) -> int:
        """What the allocator held when the snapshot was taken."""
        return int(self.bytes[self.is_seed].sum())

    @property
    def level(self) -> I64:
        """What the allocator holds after each row."""
        after: I64 = np.cumsum(np.where(self.is_seed, 0, self.bytes)) + self.at_start
        return after


def snapshot_of(trace: Trace, device: str) -> int | None:
    """The event at which the allocator's state was written; None if it never was."""
    events = trace.events
    here = devices.on(trace, device, events.place)
    rows = np.flatnonzero(here & (events.action == ACTION["snapshot"]))
    return int(rows[0]) if len(rows) else None


def changes(trace: Trace, device: str) -> Changes:
    """The device's segments that came and went; those of the snapshot are seeds."""
    events = trace.events
    sign = np.zeros(256, np.int64)
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
    """What a piece of memory that the allocator holds belongs to."""

    place: int
    came_by: str  # the event's name


def held(trace: Trace, device: str, position: int | None = None) -> Ranges[Held]:
    """What the allocator holds after the event at the position, or at the end, by address."""
    events, known = trace.events, changes(trace, device)
    last = len(events.ticks) if position is None else position
    later = known.row[~known.is_seed]
    pieces: Ranges[Held] = Ranges()
    for row in (*known.row[known.is_seed].tolist(), *later[later <= last].tolist()):
        name, begin = ACTIONS[events.action[row]], int(events.address[row])
        end = begin + int(events.bytes[row])
        pieces.remove(begin, end)
        if name not in SHRINKS and begin < end:
            pieces.add(begin, end, Held(int(events.place[row]), name))
    return pieces
