"""What the peak becomes when some blocks are smaller, or end earlier: a replay of all the others."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.facts import timelines, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import I64, U64, Mask


@dataclass(frozen=True)
class Edit:
    """What a change of the program does to some of its blocks."""

    which: Mask
    # Of their bytes, or of each one's, that is left; 0: they are not made.
    share: float | NDArray[np.float64] = 0.0
    end: U64 | None = None  # ticks: they end no later, and keep their size
    # When blocks do not exist: each one's row, and the ticks from which and until which it is gone.
    gone: tuple[NDArray[np.intp], U64, U64] | None = None


def peak_after(trace: Trace, device: str, edits: Iterable[Edit], step: int | None = None) -> int:
    """The most requested bytes on the device after these edits, all of them together; or in a step."""
    levels = _levels_after(trace, device, edits)
    if step is not None:
        first, end = timelines.bounds(trace)[step : step + 2]
        levels = levels[first + 1 : end + 1]
    return int(levels.max(initial=0))


def level_after(trace: Trace, device: str, edits: Iterable[Edit], position: int) -> int:
    """The requested bytes on the device right after that event, if these edits were made."""
    return int(_levels_after(trace, device, edits)[position + 1])


def _levels_after(trace: Trace, device: str, edits: Iterable[Edit]) -> I64:
    """The bytes before the first event, and after each."""
    alloc, count = allocations(trace), len(trace.events.ticks)
    changes, here = _changes(trace, device), usage.on_device(trace, device)
    made = list(edits)
    touched = np.zeros(len(alloc), np.bool_)
    for edit in made:
        touched |= edit.which
    rows = np.flatnonzero(touched & here)
    start = np.maximum(alloc.start[rows].astype(np.int64), -1) + 1
    end = np.where(alloc.completed[rows] < 0, count, alloc.completed[rows]).astype(np.int64)
    size = alloc.requested_bytes[rows].astype(np.int64)
    shorter, smaller, gone = end, size, np.zeros(count + 2, np.int64)
    for edit in made:
        which = edit.which[rows]
        if edit.gone is not None:
            block, *bounds = edit.gone
            begin, until = np.searchsorted(trace.events.ticks, bounds)
            lost = alloc.requested_bytes[block].astype(np.int64) * here[block]
            np.add.at(gone, begin + 1, -lost)
            np.add.at(gone, until + 1, lost)
        elif edit.end is None:
            share = edit.share if isinstance(edit.share, float) else edit.share[rows]
            left = np.round(smaller * share).astype(np.int64)
            smaller = np.where(which, left, smaller)
        else:
            earlier = np.searchsorted(trace.events.ticks, edit.end[rows])
            shorter = np.where(which, np.minimum(shorter, earlier), shorter)
    changes = changes + gone
    np.add.at(changes, start, smaller - size)
    np.add.at(changes, np.maximum(end + 1, start), size)
    np.add.at(changes, np.maximum(shorter + 1, start), -smaller)
    return np.cumsum(changes, out=changes)


@once_per_trace
def _changes(trace: Trace, device: str) -> I64:
    """The change of the device's bytes at each event; the first is what was there before."""
    alloc, count = allocations(trace), len(trace.events.ticks)
    here = usage.on_device(trace, device)
    start = np.maximum(alloc.start[here].astype(np.int64), -1) + 1
    end = np.where(alloc.completed[here] < 0, count, alloc.completed[here]).astype(np.int64) + 1
    size = alloc.requested_bytes[here].astype(np.int64)
    changes = np.zeros(count + 2, np.int64)
    np.add.at(changes, start, size)
    np.add.at(changes, np.maximum(end, start), -size)
    return changes
