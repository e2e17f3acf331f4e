"""An allocation that failed: who asked, and who held the memory."""

from dataclasses import dataclass

import numpy as np

from pytracer.analysis.allocator import blocks
from pytracer.analysis.facts import devices, grouping, owners, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import ACTION, Mask

_MIB = 1 << 20
_MOST_BYTES = (1 << 48) - 1  # the most that an event holds; a larger request is recorded as this


@dataclass(frozen=True)
class Failure:
    """The last allocation that failed. Sizes are bytes; None means unknown."""

    asked: int
    place: owners.Place
    moment: usage.Peak  # the live bytes at the failure
    alive: Mask
    allocated: int | None
    reserved: int | None
    limit: int | None  # the bytes that the allocator may hold
    device_free: int | None
    missing: int | None  # the bytes by which it failed

    @property
    def asked_is_least(self) -> bool:
        """Whether the request may be larger than an event can record."""
        return self.asked >= _MOST_BYTES

    @property
    def fragmented(self) -> int | None:
        """Bytes that the allocator reserves, in pieces that could not serve the request."""
        if self.reserved is None or self.allocated is None:
            return None
        return self.reserved - self.allocated


@once_per_trace
def failure(trace: Trace) -> Failure | None:
    """The last allocation that failed; None if all succeeded."""
    events = trace.events
    failures = np.flatnonzero(events.action == ACTION["oom"])
    if len(failures) == 0:
        return None
    at = int(failures[-1])
    device = devices.device_of_event(trace, at)
    here = devices.on(trace, device, allocations(trace).place)
    alive = here & usage.alive_at(trace, at)
    size = blocks.device_bytes(trace, alive, at, device)
    asked = int(events.bytes[at])
    limit = devices.counted(trace, device, "limit_bytes")
    free = int(events.address[at]) if device != "cpu" and events.address[at] else None
    return Failure(
        asked=asked,
        place=owners.place_of(trace, int(events.scope[at])),
        moment=usage.moment(trace, at, device),
        alive=alive,
        allocated=size.allocated,
        reserved=size.reserved,
        limit=limit,
        device_free=free,
        missing=_missing(asked, size.reserved, limit, free),
    )


def _missing(asked: int, reserved: int | None, limit: int | None, free: int | None) -> int | None:
    """The bytes that the allocator asked the driver for, less those that it could still get.

    The allocator asks only after it has given back every segment that it could.
    """
    rooms = [] if free is None else [free]
    if limit is not None and reserved is not None:
        rooms.append(limit - reserved)
    return max(_segment(asked) - min(rooms), 1) if rooms else None


def _segment(asked: int) -> int:
    """The segment that torch's CUDA allocator takes from the driver for a block."""
    if asked <= _MIB:
        return 2 * _MIB
    if asked < 10 * _MIB:
        return 20 * _MIB
    return -(-asked // (2 * _MIB)) * 2 * _MIB


# ---------------------------------------------------------------- who holds memory


@dataclass(frozen=True)
class Held:
    """Blocks that are alike."""

    bytes: int
    blocks: int
    category: str
    role: str
    name: str
    module: str
    op: str
    line: str
    shape: str
    dtype: str


_KEYS = ("category", "role", "name", "module", "op", "line", "shape", "dtype")


def largest(trace: Trace, alive: Mask, most: int | None = 8) -> list[Held]:
    """The largest holders; blocks of the same origin are one holder."""
    size = allocations(trace).requested_bytes
    if not alive.any():
        return []
    groups = [grouping.group(trace, key, alive) for key in _KEYS]
    distinct, which = grouping.together(groups)
    total = usage.sums(which, size[alive], len(distinct))
    count = np.bincount(which, minlength=len(distinct))
    rows = []
    for i in np.argsort(-total, kind="stable")[:most]:
        texts = (
            group.names[code] if code >= 0 else ""
            for group, code in zip(groups, distinct[i], strict=True)
        )
        rows.append(Held(int(total[i]), int(count[i]), *texts))
    return rows
