"""Which events belong to the same block: the native matching, as arrays."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer._native import core
from pytracer.recorded import Trace, once_per_trace
from pytracer.schema import ACTION, I64, U16, U64


@dataclass(frozen=True)
class Lifetimes:
    """One row per allocation: seeds first, then in the order of the allocs.

    Positions are rows of the event table; -1 is "before the trace" (start) and "still alive".
    """

    start: I64
    end: I64  # the program gave the block back
    completed: I64  # the allocator could hand it out again
    address: U64
    bytes: U64
    place: U16
    allocation_of_event: I64
    counters: dict[str, int]  # what did not match, by name


@once_per_trace
def lifetimes(trace: Trace) -> Lifetimes:
    """Matches allocs, frees and labels; csrc/core/lifetimes.h has the rules."""
    columns = {f"events.{name}": values for name, values in trace.events._asdict().items()}
    columns |= {f"places.{name}": values for name, values in trace.places._asdict().items()}
    return Lifetimes(**core.lifetimes(columns))


@dataclass(frozen=True)
class Changes:
    """Everything that changed what is allocated, in order; each change is one block's.

    Two changes can be at one event: a block ended unseen where its address was given out again.
    """

    position: NDArray[np.intp]  # rows of the event table
    allocation: I64
    bytes: I64  # what was added; negative: freed


@once_per_trace
def changes(trace: Trace) -> Changes:
    """A block counts from its alloc until it is completed, as its allocator counts it.

    One whose alloc nobody told of counts from where it was first seen.
    """
    found, action = lifetimes(trace), trace.events.action
    freed = action == ACTION["free_completed"]
    known = found.allocation_of_event >= 0
    counts = known & (freed | (action == ACTION["alloc"]))
    seeds = np.flatnonzero(known & (action == ACTION["seed"]))
    counts[seeds] = found.start[found.allocation_of_event[seeds]] == seeds
    position = np.flatnonzero(counts)
    allocation = found.allocation_of_event[position]
    size = found.bytes.view(np.int64)[allocation]
    size *= 1 - 2 * freed[position].view(np.int8)
    unseen = np.flatnonzero(~freed[found.completed] & (found.completed >= 0))
    if len(unseen):
        unseen = unseen[np.argsort(found.completed[unseen])]
        before = np.searchsorted(position, found.completed[unseen])
        position = np.insert(position, before, found.completed[unseen])
        allocation = np.insert(allocation, before, unseen)
        size = np.insert(size, before, -found.bytes[unseen].astype(np.int64))
    return Changes(position, allocation, size)
