"""What the peak becomes when some blocks are smaller, or end earlier: a replay of all the others."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pytracer.analysis.facts import usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.recorded import Trace
from pytracer.schema import U64, Mask


@dataclass(frozen=True)
class Edit:
    """What a change of the program does to some of its blocks."""

    which: Mask
    share: float = 0.0  # of their bytes that is left; 0: they are not made
    end: U64 | None = None  # ticks: they end no later, and keep their size


def peak_after(trace: Trace, device: str, edits: Iterable[Edit]) -> int:
    """The most requested bytes on the device after these edits, all of them together."""
    alloc = allocations(trace)
    count = len(trace.events.ticks)
    end = np.where(alloc.completed < 0, count, alloc.completed).astype(np.int64)
    size = alloc.requested_bytes.astype(np.int64)
    for edit in edits:
        if edit.end is None:
            size = np.where(edit.which, np.round(size * edit.share).astype(np.int64), size)
        else:
            earlier = np.searchsorted(trace.events.ticks, edit.end)
            end = np.where(edit.which, np.minimum(end, earlier), end)
    here = usage.on_device(trace, device)
    start = np.maximum(alloc.start[here].astype(np.int64), -1)
    changes = np.zeros(count + 2, np.int64)
    np.add.at(changes, start + 1, size[here])
    np.add.at(changes, np.maximum(end[here], start) + 1, -size[here])
    return int(np.cumsum(changes).max(initial=0))
