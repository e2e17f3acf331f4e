"""Allocations: one row per life of a block, with everything that is known about it."""

from dataclasses import dataclass

import numpy as np

from pytracer.analysis.facts import lifetimes, owners, phases
from pytracer.analysis.facts.categories import categories
from pytracer.recorded import Trace, once_per_trace
from pytracer.schema import I64, U8, U16, U32, U64

MISSING_TIME = -1  # before the trace, or not freed


@dataclass(frozen=True)
class Allocations:
    """Columns, one row per allocation, its number the row. Numbers instead of texts.

    Seeds (alive before the trace) come first, then the others in the order they were made.
    """

    start: I64  # rows of the event table, -1: before the trace
    end: I64  # the program gave it back; -1: still alive
    completed: I64  # the allocator could hand it out again; -1: not yet
    address: U64
    requested_bytes: U64
    place: U16
    thread: U16
    step: I64  # -1: before the trace
    phase: U8  # phases.MISSING: before the trace
    free_phase: U8  # phases.MISSING: still alive
    category: U8
    role: U32  # see `role`
    label: U32  # a row of the label table: name, shape and dtype
    scope: U32
    module: U32  # rows of the string table, 0: none
    op: U32
    line: U32  # a row of the stack table: the user's innermost frame; 0: none
    forward_module: U32  # of what a backward made: the forward that caused it
    forward_op: U32
    forward_line: U32

    def __len__(self) -> int:
        """How many allocations there are."""
        return len(self.start)

    def cause(self, what: str) -> U32:
        """The "module", "op" or "line" that answers for each.

        Of what a backward made it is the forward's; a forward that runs again answers for itself.
        """
        own, forward = getattr(self, what), getattr(self, f"forward_{what}")
        itself = (self.phase == phases.RECOMPUTE) & (own != 0)
        answer: U32 = np.where((forward != 0) & ~itself, forward, own)
        return answer


@once_per_trace
def allocations(trace: Trace) -> Allocations:
    """Everything that is known about each allocation."""
    found, moments, what = lifetimes.lifetimes(trace), phases.moments(trace), categories(trace)
    owner = owners.owners(trace)
    before = found.start < 0
    step = phases.timeline(trace).step_at(moments.made_ticks)
    step[before] = -1
    thread = trace.events.thread[found.start]
    thread[before] = 0
    return Allocations(
        start=found.start,
        end=found.end,
        completed=found.completed,
        address=found.address,
        requested_bytes=found.bytes,
        place=found.place,
        thread=thread,
        step=step,
        phase=moments.made_phase,
        free_phase=moments.freed_phase,
        category=what.category,
        role=what.role,
        label=what.label,
        scope=moments.made_scope,
        module=owner.module,
        op=owner.op,
        line=owner.line,
        forward_module=owner.forward_module,
        forward_op=owner.forward_op,
        forward_line=owner.forward_line,
    )


def times_ns(trace: Trace, position: I64) -> I64:
    """When these rows of the event table happened; MISSING_TIME for -1."""
    times = np.full(len(position), MISSING_TIME, np.int64)
    known = position >= 0
    times[known] = trace.time_ns(trace.events.ticks[position[known]])
    return times
