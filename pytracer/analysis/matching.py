"""Which events belong to the same block: the native matching, as arrays."""

from dataclasses import dataclass

from pytracer._native import C
from pytracer.analysis.once import once_per_trace
from pytracer.schema import I64, U16, U64
from pytracer.trace import Trace


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
    return Lifetimes(**C.lifetimes(columns))
