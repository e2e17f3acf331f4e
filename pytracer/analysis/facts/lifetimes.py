"""Which events belong to the same block: the native matching, as arrays."""

from dataclasses import dataclass

import numpy as np

from pytracer import errors
from pytracer.data._native import core
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import ACTION, I32, I64, U16, U64


@dataclass(frozen=True)
class Lifetimes:
    """One row per allocation: seeds first, then in the order of the allocs.

    Positions are rows of the event table; -1 is "before the trace" (start) and "still alive".
    """

    start: I32
    end: I32  # the program gave the block back
    completed: I32  # the allocator could hand it out again
    address: U64
    bytes: U64
    place: U16
    allocation_of_event: I32
    counters: dict[str, int]  # how many events did not match, by reason


_MOST_EVENTS = 2**31 - 1  # their numbers have 32 bits here


@once_per_trace
def lifetimes(trace: Trace) -> Lifetimes:
    """Matches allocs, frees and labels; csrc/core/lifetimes.h has the rules.

    Raises:
        errors.UsageError: the trace is too long.
    """
    count = len(trace.events.ticks)
    if count > _MOST_EVENTS:
        raise errors.UsageError(
            f"{count:,} events are more than can be analysed, {_MOST_EVENTS:,}: record fewer steps"
        )
    columns = {f"events.{name}": values for name, values in trace.events._asdict().items()}
    columns |= {f"places.{name}": values for name, values in trace.places._asdict().items()}
    return Lifetimes(**core.lifetimes(columns))


@dataclass(frozen=True)
class Changes:
    """The changes of allocated memory, in order; each row is about one block.

    One event can make two changes: the address of a block is given out again, so the old block
    must have ended unseen.
    """

    position: I32  # rows of the event table
    allocation: I32
    bytes: I64  # negative if the block was freed


@once_per_trace
def changes(trace: Trace) -> Changes:
    """Every block's begin and end. A block counts until it is completed, as in its allocator.

    A block without an alloc event counts from its first event.
    """
    lives, action = lifetimes(trace), trace.events.action
    freed = action == ACTION["free_completed"]
    matched = lives.allocation_of_event >= 0
    counts = matched & (freed | (action == ACTION["alloc"]))
    seeds = np.flatnonzero(matched & (action == ACTION["seed"]))
    counts[seeds] = lives.start[lives.allocation_of_event[seeds]] == seeds
    position = np.flatnonzero(counts).astype(np.int32)
    allocation = lives.allocation_of_event[position]
    size = lives.bytes.view(np.int64)[allocation]
    size *= 1 - 2 * freed[position].view(np.int8)
    unseen = np.flatnonzero(~freed[lives.completed] & (lives.completed >= 0))
    if len(unseen):
        unseen = unseen[np.argsort(lives.completed[unseen])]
        before = np.searchsorted(position, lives.completed[unseen])
        position = np.insert(position, before, lives.completed[unseen])
        allocation = np.insert(allocation, before, unseen)
        size = np.insert(size, before, -lives.bytes[unseen].astype(np.int64))
    return Changes(position, allocation, size)
