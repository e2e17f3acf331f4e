"""Block sizes: what the allocators gave for what was asked. Not recorded, but it follows.

The CPU's allocator gives what is asked for. torch's CUDA allocator

- rounds to 512 bytes; up to 1 MiB come from small segments, more from large ones;
- takes the front of a free block and cuts off the rest, except that in a large segment a rest of
  at most 1 MiB stays with the block (expandable segments always cut).

So in large segments every free block is larger than 1 MiB, and a block reaches up to the next
block in use, or to its segment's end, exactly if that is at most 1 MiB further than it needs.
Options of the allocator change these rules (rounding to powers of two, a largest size to split).
Hence the sum is compared with what the allocator itself counted when the trace ended; a device on
which they differ has no block sizes.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.allocator import segments
from pytracer.analysis.facts import devices
from pytracer.analysis.facts.lifetimes import Lifetimes, lifetimes
from pytracer.analysis.facts.scopes import Mask
from pytracer.recorded import Trace, once_per_trace
from pytracer.schema import ACTION, DEVICE_TYPES, I64, U64

UNKNOWN = -1
ROUND = 512  # bytes, of CUDA's allocator
SMALL = 1 << 20  # the largest block of a small pool


@dataclass(frozen=True)
class DeviceBytes:
    """A device's memory at one moment: three different things, never to be mixed."""

    requested: int  # what was asked for
    allocated: int | None  # the blocks that were given; None: not known
    reserved: int | None  # what the allocator holds from the driver; None: not known


def device_bytes(trace: Trace, alive: Mask, position: int, device: str) -> DeviceBytes:
    """Of what is alive on the device after the event at that position."""
    requested = int(lifetimes(trace).bytes[alive].sum())
    blocks = allocated_bytes(trace)[alive]
    allocated = None if (blocks == UNKNOWN).any() else int(blocks.sum())
    return DeviceBytes(requested, allocated, _reserved(trace, position, device))


def _reserved(trace: Trace, position: int, device: str) -> int | None:
    """The CPU's allocator holds nothing back; CUDA's is known from when its state was written."""
    snapshot = segments.snapshot_of(trace, device)
    if device == "cpu" or snapshot is None:
        return None
    known = segments.changes(trace, device)
    by_then = known.is_seed | (known.row <= max(position, snapshot))
    return int(known.bytes[by_then].sum())


@once_per_trace
def allocated_bytes(trace: Trace) -> I64:
    """The size of the block behind each allocation, UNKNOWN where that cannot be shown."""
    found, places = lifetimes(trace), trace.places
    size = found.bytes.astype(np.int64)
    is_cpu = places.device_type == DEVICE_TYPES.index("cpu")
    result = np.where(is_cpu[found.place], size, UNKNOWN)
    for index in np.unique(places.device_index[~is_cpu]):
        device = f"cuda:{index}"
        own = np.flatnonzero(devices.on(trace, device, found.place))
        sizes = _cuda_blocks(trace, found, device, own)
        alive = found.completed[own] < 0
        counted = devices.counted(trace, device, "allocated_bytes.current")
        if counted == int(sizes[alive].sum()):
            result[own] = sizes
    return result


def _cuda_blocks(
    trace: Trace, found: Lifetimes, device: str, own: NDArray[np.intp]
) -> NDArray[np.int64]:
    sizes = np.maximum(-(-found.bytes[own].astype(np.int64) // ROUND) * ROUND, ROUND)
    if devices.expandable(trace, device):
        return sizes
    large = np.flatnonzero(sizes > SMALL)
    bounds = _Bounds()
    seeds = large[found.start[own[large]] < 0]
    bounds.add_all(found.address[own[seeds]])
    known = segments.changes(trace, device)
    bounds.add_all(_ends(trace, known.row[known.is_seed]))
    for i in seeds:
        sizes[i] = bounds.reach(int(found.address[own[i]]), int(sizes[i]))
    for begins, address, i in _history(trace, found, known, own, large):
        if not begins:
            bounds.remove(address)
        elif i < 0:
            bounds.add(address)
        else:
            sizes[i] = bounds.reach(address, int(sizes[i]))
            bounds.add(address)
    return sizes


class _Bounds:
    """Where free memory ends: the starts of blocks in use, and the ends of segments."""

    def __init__(self) -> None:
        self._sorted: list[int] = []

    def add_all(self, addresses: NDArray[np.uint64]) -> None:
        self._sorted = sorted([*self._sorted, *addresses.tolist()])

    def add(self, address: int) -> None:
        insort(self._sorted, address)

    def remove(self, address: int) -> None:
        at = bisect_left(self._sorted, address)
        if at < len(self._sorted) and self._sorted[at] == address:
            del self._sorted[at]

    def reach(self, address: int, size: int) -> int:
        """The size of a block of at least `size` bytes that begins at the address."""
        at = bisect_right(self._sorted, address)
        room = self._sorted[at] - address if at < len(self._sorted) else 0
        return room if size <= room <= size + SMALL else size


def _ends(trace: Trace, rows: NDArray[np.intp]) -> U64:
    """Where these segments end."""
    ends: U64 = trace.events.address[rows] + trace.events.bytes[rows]
    return ends


def _history(
    trace: Trace,
    found: Lifetimes,
    known: segments.Changes,
    own: NDArray[np.intp],
    large: NDArray[np.intp],
) -> Iterator[tuple[bool, int, int]]:
    """What bounds appear and disappear, in order: whether, where, of which allocation (or -1)."""
    action = trace.events.action[known.row]
    numbers = own[large]
    made, freed = found.start[numbers] >= 0, found.completed[numbers] >= 0
    parts = [
        (found.start[numbers[made]], True, found.address[numbers[made]], large[made]),
        (found.completed[numbers[freed]], False, found.address[numbers[freed]], large[freed]),
    ]
    for name, begins in (("segment_alloc", True), ("segment_free", False)):
        rows = known.row[action == ACTION[name]]
        parts.append((rows, begins, _ends(trace, rows), np.full(len(rows), -1)))
    position = np.concatenate([part[0] for part in parts])
    begins_column = np.concatenate([np.full(len(part[0]), part[1]) for part in parts])
    address = np.concatenate([part[2] for part in parts])
    which = np.concatenate([part[3] for part in parts])
    # A block that ended unseen ends before the next one begins at the same event.
    order = np.lexsort((begins_column, position))
    yield from zip(
        begins_column[order].tolist(), address[order].tolist(), which[order].tolist(), strict=True
    )
