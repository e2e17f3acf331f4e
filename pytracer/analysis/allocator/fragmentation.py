"""Fragmentation: the free gaps in CUDA's segments at one moment, and which a request could use.

A segment is a piece of memory that the allocator has from the driver; it cuts blocks from it. The
gaps between the blocks are free, but one gap must serve a whole request, and it must be of the
request's stream and pool. Small pools hold blocks of up to 1 MiB, large pools the others. So for a
request of N bytes, every gap that is too small, or elsewhere, is reserved and unusable.

Expandable segments give gaps back to the driver in whole pages (2 MiB in small pools, 20 MiB in
large ones) and map pages where memory is needed. So they could have gathered the whole pages of all
gaps for the request. A gap without a whole page stays unusable.

The layout is rebuilt from the segments' events and the blocks' addresses. It is known from the
device's snapshot on, if the blocks' sizes are (`blocks.allocated_bytes`).
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pytracer import errors
from pytracer.analysis.allocator import blocks, segments as segment_events
from pytracer.analysis.facts import devices, lifetimes, usage
from pytracer.analysis.facts.usage import At
from pytracer.data import frames
from pytracer.data.recorded import Trace
from pytracer.data.schema import ACTION

if TYPE_CHECKING:
    import pandas as pd

_PAGE = {"small": 2 << 20, "large": 20 << 20}  # the unit in which expandable segments map memory


@dataclass(frozen=True)
class Lane:
    """A stream and pool: a free gap serves only requests of its own lane."""

    stream: int
    private_pool: str  # "" is the default pool; otherwise a CUDA graph's, or the user's own
    pool: str  # "small" or "large"


@dataclass(frozen=True)
class Request:
    """The request for which gaps are usable or not."""

    bytes: int
    lane: Lane

    @property
    def block_bytes(self) -> int:
        """The size of the block that it needs."""
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
        """The bytes of all its gaps."""
        return sum(size for _, size in self.gaps)

    @property
    def largest_gap(self) -> int:
        """The largest block that one request could get from it."""
        return max((size for _, size in self.gaps), default=0)

    @property
    def free_pages(self) -> int:
        """Bytes of the whole pages that expandable segments would give back."""
        return sum(_whole_pages(self, gap) for gap in self.gaps)

    def usable_by(self, request: Request) -> int:
        """The bytes of the gaps that could serve this request."""
        if self.lane != request.lane:
            return 0
        return sum(size for _, size in self.gaps if size >= request.block_bytes)


@dataclass(frozen=True)
class Layout:
    """A device's segments at one moment, and the request for which gaps are usable or not."""

    device: str
    position: int
    segments: tuple[Segment, ...]
    request: Request | None  # None: the program never requested memory
    device_free: int | None  # bytes that the driver could still give; known if a request failed
    expandable: bool  # whether these are expandable segments already

    @property
    def reserved(self) -> int:
        """The bytes that the allocator holds."""
        return sum(segment.bytes for segment in self.segments)

    @property
    def free(self) -> int:
        """The bytes of all gaps: the allocator's cache."""
        return sum(segment.free_bytes for segment in self.segments)

    @property
    def usable(self) -> int:
        """The bytes of the cache that could serve the request."""
        if self.request is None:
            return self.free
        return sum(segment.usable_by(self.request) for segment in self.segments)

    @property
    def unusable(self) -> int:
        """The bytes of the cache that could not serve the request."""
        return self.free - self.usable

    @property
    def largest_gap(self) -> int:
        """The largest gap in the segments of the request's lane."""
        lane = self.request.lane if self.request else None
        return max((s.largest_gap for s in self.segments if lane in (None, s.lane)), default=0)

    @property
    def free_pages(self) -> int:
        """The bytes that expandable segments could have gathered, in all pools and streams."""
        return sum(segment.free_pages for segment in self.segments)

    @property
    def expandable_would_help(self) -> bool | None:
        """Whether expandable segments would have served the request without more memory.

        False if the request needs no help. If the request failed, the memory that the device had
        left counts as well. None if the segments are expandable already, or without a request.
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
    """The segments and gaps at a moment; None if they are unknown.

    Args:
        trace: a trace of a CUDA device.
        at: "peak", "end", nanoseconds, or "oom": just before the last request that failed.
        device: by default the device that the program trains on.
        request: bytes; by default the request that failed, or the largest one of the trace.

    Raises:
        errors.UsageError: the moment or the device does not exist.
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
    lives = lifetimes.lifetimes(trace)
    order = np.argsort(lives.address[alive], kind="stable")
    starts, lengths = lives.address[alive][order].tolist(), sizes[alive][order].tolist()
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
        # The event holds the device's free bytes. The program's own limit may leave less.
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
    """Joins the pieces of expandable segments that touch each other."""
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
    """The segment with the gaps between its blocks."""
    inside = slice(bisect_left(starts, held.address), bisect_left(starts, held.end))
    gaps, at = [], held.address
    for start, length in zip(starts[inside], lengths[inside], strict=True):
        if start > at:
            gaps.append((at, start - at))
        at = max(at, start + length)
    if at < held.end:
        gaps.append((at, held.end - at))
    largest = max(lengths[inside], default=0)
    # The largest block tells the pool; in an empty segment, its size does. Small pools get 2 MiB at
    # a time, and large expandable segments at least a page.
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
    """The request that failed, or the largest allocation, with the given size if there is one."""
    if failed >= 0:
        size, place = int(trace.events.bytes[failed]), int(trace.events.place[failed])
    else:
        lives = lifetimes.lifetimes(trace)
        own = np.flatnonzero(usage.on_device(trace, device) & (lives.start >= 0))
        if len(own) == 0:
            return None
        largest = own[int(lives.bytes[own].argmax())]
        size, place = int(lives.bytes[largest]), int(lives.place[largest])
    size = request or size
    return Request(size, _lane(trace, place, size > blocks.SMALL))


def _whole_pages(segment: Segment, gap: tuple[int, int]) -> int:
    page = _PAGE[segment.lane.pool]
    first = -(-(gap[0] - segment.address) // page)
    last = (gap[0] + gap[1] - segment.address) // page
    return max(last - first, 0) * page


def gap_sizes(layout: Layout) -> list[tuple[int, int, int]]:
    """Free bytes by the size of the gap: upper bound (a power of 4), gaps, bytes."""
    bounds = [blocks.ROUND * 4**power for power in range(20)]
    counts: dict[int, list[int]] = {}
    for segment in layout.segments:
        for _, size in segment.gaps:
            entry = counts.setdefault(bounds[bisect_left(bounds, size)], [0, 0])
            entry[0] += 1
            entry[1] += size
    return [(bound, count, total) for bound, (count, total) in sorted(counts.items())]


def frame(layout: Layout | None) -> "pd.DataFrame":
    """One row per segment, the most unusable bytes first; `attrs` holds the summary."""
    rows = []
    for segment in layout.segments if layout else ():
        usable = segment.usable_by(layout.request) if layout and layout.request else None
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
    table.attrs = summary(layout)
    return table.reset_index(drop=True)


def summary(layout: Layout | None) -> dict[str, object]:
    """The layout in a few numbers; empty if it is unknown."""
    if layout is None:
        return {}
    return {
        "device": layout.device,
        "request": layout.request.bytes if layout.request else None,
        "reserved": layout.reserved,
        "free": layout.free,
        "usable": layout.usable,
        "unusable": layout.unusable,
        "largest_gap": layout.largest_gap,
        "free_pages": layout.free_pages,
        "device_free": layout.device_free,
        "expandable": layout.expandable,
        "expandable_would_help": layout.expandable_would_help,
        "gap_sizes": [
            {"up_to": bound, "gaps": count, "bytes": total}
            for bound, count, total in gap_sizes(layout)
        ],
    }
