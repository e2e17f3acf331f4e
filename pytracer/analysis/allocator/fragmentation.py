"""What CUDA's allocator holds and cannot use: the free gaps of its segments at one moment.

A segment is a piece of memory that the allocator has from the driver; blocks are cut from it. What
lies between the blocks is free, but a request is served by one gap only, of its own stream and
pool: small pools hold blocks of up to 1 MiB, large pools the others. So for a request of N bytes
every gap that is too small, or elsewhere, is reserved and unusable.

Expandable segments give gaps back to the driver in whole pages (2 MiB in small pools, 20 MiB in
large ones) and map them where they are needed. So what they could have gathered for the request is
the gaps' whole pages; a gap that has none stays as unusable as it was.

The layout is rebuilt from the segments' events and from where the blocks lie; it is known from the
device's snapshot on, and where the blocks' sizes are (`blocks.allocated_bytes`).
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pytracer import errors, frames
from pytracer.analysis.allocator import blocks, segments as segment_events
from pytracer.analysis.facts import devices, lifetimes, usage
from pytracer.analysis.facts.usage import At
from pytracer.recorded import Trace
from pytracer.schema import ACTION

if TYPE_CHECKING:
    import pandas as pd

_PAGE = {"small": 2 << 20, "large": 20 << 20}  # what expandable segments map and unmap at once


@dataclass(frozen=True)
class Lane:
    """Where a free gap can serve: requests of the same stream and pool."""

    stream: int
    private_pool: str  # "" is the default pool; else a CUDA graph's, or the user's own
    pool: str  # "small" or "large"


@dataclass(frozen=True)
class Request:
    """The request that the gaps are held against."""

    bytes: int
    lane: Lane

    @property
    def block_bytes(self) -> int:
        """The block it needs."""
        return max(-(-self.bytes // blocks.ROUND) * blocks.ROUND, blocks.ROUND)


@dataclass(frozen=True)
class Segment:
    """A segment: where it is, how large, and its free gaps."""

    address: int
    bytes: int
    lane: Lane
    gaps: tuple[tuple[int, int], ...]  # address and size

    @property
    def free_bytes(self) -> int:
        """All of its gaps."""
        return sum(size for _, size in self.gaps)

    @property
    def largest_gap(self) -> int:
        """What one request could have of it."""
        return max((size for _, size in self.gaps), default=0)

    @property
    def free_pages(self) -> int:
        """Bytes of the whole pages that expandable segments would give back."""
        return sum(_whole_pages(self, gap) for gap in self.gaps)

    def usable_by(self, request: Request) -> int:
        """Bytes of the gaps that this request could be served from."""
        if self.lane != request.lane:
            return 0
        return sum(size for _, size in self.gaps if size >= request.block_bytes)


@dataclass(frozen=True)
class Layout:
    """A device's segments at one moment, and the request they are held against."""

    device: str
    position: int
    segments: tuple[Segment, ...]
    request: Request | None  # None: nothing was ever requested
    device_free: int | None  # what could still be had from it; known where a request failed
    expandable: bool  # these are expandable segments already

    @property
    def reserved(self) -> int:
        """What the allocator holds."""
        return sum(segment.bytes for segment in self.segments)

    @property
    def free(self) -> int:
        """What it holds and has not given out: its cache."""
        return sum(segment.free_bytes for segment in self.segments)

    @property
    def usable(self) -> int:
        """What of the cache could serve the request."""
        if self.request is None:
            return self.free
        return sum(segment.usable_by(self.request) for segment in self.segments)

    @property
    def unusable(self) -> int:
        """What of the cache could not."""
        return self.free - self.usable

    @property
    def largest_gap(self) -> int:
        """Of the segments that the request could be served from."""
        lane = self.request.lane if self.request else None
        return max((s.largest_gap for s in self.segments if lane in (None, s.lane)), default=0)

    @property
    def free_pages(self) -> int:
        """What expandable segments could have gathered, in all pools and streams."""
        return sum(segment.free_pages for segment in self.segments)

    @property
    def expandable_would_help(self) -> bool | None:
        """Whether expandable segments would have served the request without more memory.

        False also where it needs no help. Where the request failed, what the device had left
        counts as well. None: they are in use already, or there is no request.
        """
        if self.request is None or self.expandable:
            return None
        if self.usable:
            return False
        page = _PAGE[self.request.lane.pool]
        pages = -(-self.request.block_bytes // page) * page
        return self.free_pages + (self.device_free or 0) >= pages


def layout(
    trace: Trace,
    at: At | str = "peak",
    device: str | None = None,
    request: int | None = None,
) -> Layout | None:
    """The segments and gaps at a moment; None where they are not known.

    Args:
        trace: of a CUDA device.
        at: "peak", "end", nanoseconds, or "oom": just before the last request that failed.
        device: by default the one the program trains on.
        request: bytes; by default the request that failed, or the largest one of the trace.

    Raises:
        errors.UsageError: a moment or device that does not exist.
    """
    name = device or usage.main_device(trace)
    usage.on_device(trace, name)
    if request is not None and request < 1:
        raise errors.UsageError(f"request={request!r}: a request is a positive number of bytes")
    events = trace.events
    here = devices.on(trace, name, events.place)
    failed = -1
    if at == "oom":
        failures = np.flatnonzero(here & (events.action == ACTION["oom"]))
        if len(failures) == 0:
            raise errors.UsageError(f"at='oom': no request failed on {name} in this trace")
        failed = int(failures[-1])
        position = failed - 1
    else:
        position = usage.position_of(trace, at, name)  # type: ignore[arg-type]
    return _layout(trace, name, position, failed, request)


def _layout(
    trace: Trace, device: str, position: int, failed: int, request: int | None
) -> Layout | None:
    events = trace.events
    snapshot = segment_events.snapshot_of(trace, device)
    sizes = blocks.allocated_bytes(trace)
    alive = usage.alive_at(trace, position) & usage.on_device(trace, device)
    if device == "cpu" or snapshot is None or (sizes[alive] == blocks.UNKNOWN).any():
        return None
    position = max(position, snapshot)
    alive = usage.alive_at(trace, position) & usage.on_device(trace, device)
    found = lifetimes.lifetimes(trace)
    order = np.argsort(found.address[alive], kind="stable")
    starts, lengths = found.address[alive][order].tolist(), sizes[alive][order].tolist()
    expandable = devices.expandable(trace, device)
    pieces = [
        _Piece(begin, end, piece.place, piece.came_by)
        for begin, end, piece in segment_events.held(trace, device, position)
    ]
    segments = tuple(_segment(trace, held, starts, lengths, expandable) for held in _merged(pieces))
    asked = _asked(trace, device, failed, request)
    left = int(events.address[failed]) if failed >= 0 else None
    allowed = devices.allowed(trace, device)
    if left is not None and allowed is not None:
        # The event says what the device had; the program's own limit may have been reached before.
        held = sum(segment.bytes for segment in segments)
        left = max(min(left, allowed - held), 0)
    return Layout(device, position, segments, asked, left, expandable)


@dataclass(frozen=True)
class _Piece:
    """A piece of memory that the allocator holds."""

    address: int
    end: int
    place: int
    came_by: str  # the event's name


def _merged(pieces: list[_Piece]) -> list[_Piece]:
    """An expandable segment is mapped piece by piece; a piece and what it touches are one."""
    merged: list[_Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        mapped = "segment_map" in (piece.came_by, last.came_by if last else "")
        if last and mapped and last.end == piece.address and last.place == piece.place:
            merged[-1] = replace(last, end=piece.end, came_by="segment_map")
        else:
            merged.append(piece)
    return merged


def _segment(
    trace: Trace,
    held: _Piece,
    starts: list[int],
    lengths: list[int],
    expandable: bool,
) -> Segment:
    """The segment with what lies between its blocks."""
    inside = slice(bisect_left(starts, held.address), bisect_left(starts, held.end))
    gaps, at = [], held.address
    for start, length in zip(starts[inside], lengths[inside], strict=True):
        if start > at:
            gaps.append((at, start - at))
        at = max(at, start + length)
    if at < held.end:
        gaps.append((at, held.end - at))
    largest = max(lengths[inside], default=0)
    # Blocks tell; of an empty segment its size does. Small pools get 2 MiB at a time, and large
    # expandable segments no less than a page.
    in_pages = expandable and held.came_by != "segment_alloc"
    least = _PAGE["large"] if in_pages else _PAGE["small"] + 1
    large = largest > blocks.SMALL if largest else held.end - held.address >= least
    return Segment(
        held.address, held.end - held.address, _lane(trace, held.place, large), tuple(gaps)
    )


def _lane(trace: Trace, place: int, large: bool) -> Lane:
    stream = int(trace.places.stream[place])
    return Lane(stream, devices.pool_text(trace, place), "large" if large else "small")


def _asked(trace: Trace, device: str, failed: int, request: int | None) -> Request | None:
    """What failed, or the largest allocation; its size may be another, its stream is as it was."""
    if failed >= 0:
        size, place = int(trace.events.bytes[failed]), int(trace.events.place[failed])
    else:
        found = lifetimes.lifetimes(trace)
        own = np.flatnonzero(usage.on_device(trace, device) & (found.start >= 0))
        if len(own) == 0:
            return None
        largest = own[int(found.bytes[own].argmax())]
        size, place = int(found.bytes[largest]), int(found.place[largest])
    size = request or size
    return Request(size, _lane(trace, place, size > blocks.SMALL))


def _whole_pages(segment: Segment, gap: tuple[int, int]) -> int:
    page = _PAGE[segment.lane.pool]
    first = -(-(gap[0] - segment.address) // page)
    last = (gap[0] + gap[1] - segment.address) // page
    return max(last - first, 0) * page


def gap_sizes(found: Layout) -> list[tuple[int, int, int]]:
    """Free bytes by the size of the gap: upper bound (a power of 4), gaps, bytes."""
    bounds = [blocks.ROUND * 4**power for power in range(20)]
    counts: dict[int, list[int]] = {}
    for segment in found.segments:
        for _, size in segment.gaps:
            entry = counts.setdefault(bounds[bisect_left(bounds, size)], [0, 0])
            entry[0] += 1
            entry[1] += size
    return [(bound, count, total) for bound, (count, total) in sorted(counts.items())]


def frame(found: Layout | None) -> "pd.DataFrame":
    """One row per segment, what is unusable first; what holds for all of them is in `attrs`."""
    rows = []
    for segment in found.segments if found else ():
        usable = segment.usable_by(found.request) if found and found.request else None
        rows.append(
            {
                "address": segment.address,
                "pool": segment.lane.pool,
                "private_pool": segment.lane.private_pool,
                "stream": segment.lane.stream,
                "bytes": segment.bytes,
                "used": segment.bytes - segment.free_bytes,
                "free": segment.free_bytes,
                "gaps": len(segment.gaps),
                "largest_gap": segment.largest_gap,
                "unusable": segment.free_bytes - usable if usable is not None else None,
                "free_pages": segment.free_pages,
            }
        )
    columns = ("address", "pool", "private_pool", "stream", "bytes", "used", "free", "gaps")
    table = frames.of_rows(rows, [*columns, "largest_gap", "unusable", "free_pages"])
    table["unusable"] = table["unusable"].astype("Int64")
    table = table.sort_values(["unusable", "address"], ascending=[False, True], kind="stable")
    table.attrs = summary(found)
    return table.reset_index(drop=True)


def summary(found: Layout | None) -> dict[str, object]:
    """The layout in a few numbers; empty where it is not known."""
    if found is None:
        return {}
    return {
        "device": found.device,
        "request": found.request.bytes if found.request else None,
        "reserved": found.reserved,
        "free": found.free,
        "usable": found.usable,
        "unusable": found.unusable,
        "largest_gap": found.largest_gap,
        "free_pages": found.free_pages,
        "device_free": found.device_free,
        "expandable": found.expandable,
        "expandable_would_help": found.expandable_would_help,
        "gap_sizes": [
            {"up_to": bound, "gaps": count, "bytes": total}
            for bound, count, total in gap_sizes(found)
        ],
    }
