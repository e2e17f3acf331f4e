"""Allocations: one row per life of a block, with everything that is known about it."""

from dataclasses import dataclass, replace

import numpy as np

from pytracer.analysis.facts import compiled, lifetimes, owners, phases, timelines
from pytracer.analysis.facts.categories import categories
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import I32, I64, U8, U16, U32, U64

MISSING_TIME = -1  # before the trace, or not freed


@dataclass(frozen=True)
class Allocations:
    """Columns with one row per allocation. They hold numbers instead of texts.

    Seeds (alive before the trace) come first, then the others in the order they were made.
    """

    start: I32  # rows of the event table, -1: before the trace
    end: I32  # the program gave it back; -1: still alive
    completed: I32  # the allocator could hand it out again; -1: not yet
    address: U64
    requested_bytes: U64
    place: U16
    thread: U16
    step: I32  # -1: before the trace
    phase: U8  # phases.MISSING: before the trace
    free_phase: U8  # phases.MISSING: still alive
    category: U8
    role: U32  # see `role`
    label: U32  # a row of the label table: name, shape and dtype
    scope: U32
    module: U32  # rows of the string table, 0: none
    op: U32
    line: U32  # a row of the stack table: the user's innermost frame; 0: none
    forward_module: U32  # for allocations in a backward: the forward that caused them
    forward_op: U32
    forward_line: U32

    def __len__(self) -> int:
        """How many allocations there are."""
        return len(self.start)

    def cause(self, what: str) -> U32:
        """The "module", "op" or "line" responsible for each allocation.

        For an allocation in a backward, the forward's is responsible; for one in a forward that
        runs again, its own.
        """
        own, forward = getattr(self, what), getattr(self, f"forward_{what}")
        itself = (self.phase == timelines.RECOMPUTE) & (own != 0)
        answer: U32 = np.where((forward != 0) & ~itself, forward, own)
        return answer


@once_per_trace
def allocations(trace: Trace) -> Allocations:
    """One row per allocation, with its moments, category and owners."""
    lives, moments, purpose = lifetimes.lifetimes(trace), phases.moments(trace), categories(trace)
    owner = owners.owners(trace)
    before = lives.start < 0
    step = timelines.timeline(trace).step_at(moments.made_ticks).astype(np.int32)
    step[before] = -1
    thread = trace.events.thread[lives.start]
    thread[before] = 0
    return Allocations(
        start=lives.start,
        end=lives.end,
        completed=lives.completed,
        address=lives.address,
        requested_bytes=lives.bytes,
        place=lives.place,
        thread=thread,
        step=step,
        phase=moments.made_phase,
        free_phase=moments.freed_phase,
        category=purpose.category,
        role=purpose.role,
        label=purpose.label,
        scope=moments.made_scope,
        module=owner.module,
        op=owner.op,
        line=owner.line,
        forward_module=owner.forward_module,
        forward_op=owner.forward_op,
        forward_line=owner.forward_line,
    )


def as_of(trace: Trace, position: int | None) -> Allocations:
    """The allocations with the owners that they have at this event; None: when they end.

    They differ where compiled code reuses a block.
    """
    whole = allocations(trace)
    if position is None or compiled.values(trace) is None:
        return whole
    return replace(whole, **vars(owners.owners(trace, position)))


def times_ns(trace: Trace, position: I32) -> I64:
    """When these rows of the event table happened; MISSING_TIME for -1."""
    times = np.full(len(position), MISSING_TIME, np.int64)
    recorded = position >= 0
    times[recorded] = trace.time_ns(trace.events.ticks[position[recorded]])
    return times
