"""Block sizes: how many bytes the allocators gave for each request. Inferred, not recorded.

The CPU's allocator gives exactly the requested bytes. torch's CUDA allocator

- rounds to 512 bytes; up to 1 MiB come from small segments, more from large ones;
- takes the front of a free block and cuts off the rest, except that in a large segment a rest of
  at most 1 MiB stays with the block (expandable segments always cut).

So in large segments every free block is larger than 1 MiB. A block reaches up to the next block in
use, or to its segment's end, exactly if that is at most 1 MiB further than it needs. Options of the
allocator change these rules (rounding to powers of two, a largest size to split). Therefore the
sum is compared with the allocator's own counter at the end of the trace. A device on which they
differ has no block sizes.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.allocator import segments
from pytracer.analysis.facts import devices
from pytracer.analysis.facts.lifetimes import Lifetimes, lifetimes
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import ACTION, DEVICE_TYPES, I64, U64, Mask

UNKNOWN = -1
ROUND = 512  # bytes, of CUDA's allocator
SMALL = 1 << 20  # the largest block of a small pool


@dataclass(frozen=True)
class DeviceBytes:
    """A device's memory at one moment, in three figures that must not be mixed."""

    requested: int  # the sizes that the program asked for
    allocated: int | None  # the sizes of the blocks that it got; None: unknown
    reserved: int | None  # the bytes that the allocator holds from the driver; None: unknown


def device_bytes(trace: Trace, alive: Mask, position: int, device: str) -> DeviceBytes:
    """The bytes of these live allocations, and the bytes reserved after the event there."""
    requested = int(lifetimes(trace).bytes[alive].sum())
    blocks = allocated_bytes(trace)[alive]
    allocated = None if (blocks == UNKNOWN).any() else int(blocks.sum())
    return DeviceBytes(requested, allocated, _reserved(trace, position, device))


def _reserved(trace: Trace, position: int, device: str) -> int | None:
    """The reserved bytes; None for the CPU, and for a device without a snapshot."""
    snapshot = segments.snapshot_of(trace, device)
    if device == "cpu" or snapshot is None:
        return None
    segment_changes = segments.changes(trace, device)
    by_then = segment_changes.is_seed | (segment_changes.row <= max(position, snapshot))
    return int(segment_changes.bytes[by_then].sum())


@once_per_trace
def allocated_bytes(trace: Trace) -> I64:
    """The size of each allocation's block; UNKNOWN if it cannot be inferred."""
    lives, places = lifetimes(trace), trace.places
    size = lives.bytes.astype(np.int64)
    is_cpu = places.device_type == DEVICE_TYPES.index("cpu")
    result = np.where(is_cpu[lives.place], size, UNKNOWN)
    for index in np.unique(places.device_index[~is_cpu]):
        device = f"cuda:{index}"
        own = np.flatnonzero(devices.on(trace, device, lives.place))
        sizes = _cuda_blocks(trace, lives, device, own)
        alive = lives.completed[own] < 0
        counted = devices.counted(trace, device, "allocated_bytes.current")
        if counted == int(sizes[alive].sum()):
            result[own] = sizes
    return result


def _cuda_blocks(
    trace: Trace, lives: Lifetimes, device: str, own: NDArray[np.intp]
) -> NDArray[np.int64]:
    sizes = np.maximum(-(-lives.bytes[own].astype(np.int64) // ROUND) * ROUND, ROUND)
    if devices.expandable(trace, device):
        return sizes
    large = np.flatnonzero(sizes > SMALL)
    reached = sizes.tolist()  # faster to read and write one by one
    seeds = large[lives.start[own[large]] < 0]
    segment_changes = segments.changes(trace, device)
    ends = _ends(trace, segment_changes.row[segment_changes.is_seed])
    # Where free memory ends: the starts of blocks in use, and the ends of segments.
    bounds = sorted([*lives.address[own[seeds]].tolist(), *ends.tolist()])

    def reach(address: int, size: int, at: int) -> int:
        """The size of a block of at least `size` bytes that begins there, before the bound."""
        room = bounds[at] - address if at < len(bounds) else 0
        return room if size <= room <= size + SMALL else size

    for i in seeds.tolist():
        address = int(lives.address[own[i]])
        reached[i] = reach(address, reached[i], bisect_right(bounds, address))
    for begins, address, i in _history(trace, lives, segment_changes, own, large):
        if begins:
            at = bisect_right(bounds, address)
            if i >= 0:
                reached[i] = reach(address, reached[i], at)
            bounds.insert(at, address)
        else:
            at = bisect_left(bounds, address)
            if at < len(bounds) and bounds[at] == address:
                del bounds[at]
    return np.array(reached, np.int64)


def _ends(trace: Trace, rows: NDArray[np.intp]) -> U64:
    """The end addresses of these segments."""
    ends: U64 = trace.events.address[rows] + trace.events.bytes[rows]
    return ends


def _history(
    trace: Trace,
    lives: Lifetimes,
    segment_changes: segments.Changes,
    own: NDArray[np.intp],
    large: NDArray[np.intp],
) -> Iterator[tuple[bool, int, int]]:
    """Bounds that appear or disappear, in order.

    Each is: whether it appears, its address, and its allocation (-1 for a segment's end).
    """
    action = trace.events.action[segment_changes.row]
    numbers = own[large]
    made, freed = lives.start[numbers] >= 0, lives.completed[numbers] >= 0
    parts = [
        (lives.start[numbers[made]], True, lives.address[numbers[made]], large[made]),
        (lives.completed[numbers[freed]], False, lives.address[numbers[freed]], large[freed]),
    ]
    for name, begins in (("segment_alloc", True), ("segment_free", False)):
        rows = segment_changes.row[action == ACTION[name]]
        parts.append((rows, begins, _ends(trace, rows), np.full(len(rows), -1)))
    position = np.concatenate([part[0] for part in parts])
    begins_column = np.concatenate([np.full(len(part[0]), part[1]) for part in parts])
    address = np.concatenate([part[2] for part in parts])
    which = np.concatenate([part[3] for part in parts])
    # A block that ended unseen ends before the block that begins at the same event.
    order = np.lexsort((begins_column, position))
    yield from zip(
        begins_column[order].tolist(), address[order].tolist(), which[order].tolist(), strict=True
    )
