"""How far the clocks of a job's hosts are apart, from readings that the job's store has numbered.

The store numbers readings in one order. If host A's reading has a lower number than host B's, A's began
before B's ended:

    A's number 7:  before 100, after 104        B's number 8:  before 350, after 353

A's clock showed 100 no later than B's showed 353, so B's clock is ahead by 253 at most. A reading of A after
one of B bounds it from below in the same way. The middle of both bounds is the offset, and half of their
distance the uncertainty.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pytracer.data.meta import ClockReading
from pytracer.data.recorded import Trace


class Offset(NamedTuple):
    """A clock's lead over the reference clock."""

    ns: int
    uncertainty_ns: int | None  # None: nothing bounds it, so the clocks are taken as they are


UNKNOWN = Offset(0, None)
SAME = Offset(0, 0)


def offsets(readings: Mapping[str, Sequence[ClockReading]], reference: str) -> dict[str, Offset]:
    """Each host's offset. Hosts without readings are `UNKNOWN`, the reference is `SAME`."""
    base = readings.get(reference, ())
    found = {host: _between(base, own) for host, own in readings.items()}
    return {**found, reference: SAME}


def _between(base: Sequence[ClockReading], own: Sequence[ClockReading]) -> Offset:
    """The lead of `own` over `base`. Of earlier readings the latest one bounds most."""
    both = sorted(
        [(each.number, False, each) for each in base] + [(each.number, True, each) for each in own]
    )
    latest: dict[bool, int] = {}  # a host's latest time so far, though its clock may be set back
    most: list[int] = []
    least: list[int] = []
    for _, is_own, reading in both:
        earlier = latest.get(not is_own)
        if earlier is not None and is_own:
            most.append(reading.after_ns - earlier)
        elif earlier is not None:
            least.append(earlier - reading.after_ns)
        latest[is_own] = max(reading.before_ns, latest.get(is_own, reading.before_ns))
    if not most or not least or max(least) > min(most):  # or a clock was set meanwhile
        return UNKNOWN
    low, high = max(least), min(most)
    return Offset((low + high) // 2, (high - low + 1) // 2)


def corrected(trace: Trace, lead_ns: int) -> Trace:
    """The trace by the reference clock."""
    if lead_ns == 0:
        return trace
    clock = trace.clock._replace(unix_ns=trace.clock.unix_ns - lead_ns)
    document = dict(trace.meta)
    communication: Any = document.get("communication")
    if isinstance(communication, dict):
        document["communication"] = {
            **communication,
            "collectives": _earlier(communication.get("collectives"), lead_ns),
        }
    return replace(trace, clock=clock, meta=document)


def _earlier(columns: Any, lead_ns: int) -> Any:
    """The collectives' columns with earlier times; 0 stays, for an end that nobody noticed."""
    if not isinstance(columns, dict):
        return columns
    return {
        name: [each and each - lead_ns for each in column] if name.endswith("_ns") else column
        for name, column in columns.items()
    }
