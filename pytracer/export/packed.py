"""Packs a device's allocations for the report's page: few bytes each, with exact totals.

Many allocations have the same category, module, op, line and so on. Each such combination of texts is
a *group*, and a group with a size is a *kind*. An allocation is its kind, its address and its life.
Time is counted in *changes*: the allocs and frees of the device, in their recorded order. So the sum
of the blocks that are alive after a change equals `usage.alive`, to the byte.

A column is a run of whole numbers: all lowest bytes, then all second bytes, and so on up to the highest
that is not 0 everywhere; then deflated. `viewer/src/decode.ts` reads it; `unpacked` is the same in
Python, for tests.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.allocator import blocks, segments
from pytracer.analysis.answers import findings
from pytracer.analysis.facts import devices, grouping, owners, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORIES, I32, I64, U32
from pytracer.export.html import printable

Rows = NDArray[np.intp]

MOST = 2_000_000  # allocations on a page; of others, which cover less of the picture, only sums
MOST_FINDINGS = 32  # whose allocations are marked
LARGEST = 2**53 - 1  # a browser rounds larger numbers
_SAMPLES = 4096  # moments with sums of the allocations that are not shown
_UNIT_NS = 32  # the unit of times; no two events are closer
_LEVEL = 4  # of deflation: higher ones take longer for little
_GAP = 1 << 16  # addresses further apart than this are drawn as separate regions

# The texts of each kind. Those that a person may search for come first.
TEXTS = (
    *("category", "module", "op", "line", "own_line", "phase", "free_phase"),
    *("role", "name", "shape", "dtype"),
    *("made_module", "made_op", "made_line", "freed_module", "freed_op", "place", "thread"),
)


class Strings:
    """The page's texts, each once. Number 0 is the empty text."""

    def __init__(self) -> None:
        self.texts = [""]
        self._numbers = {"": 0}

    def number(self, text: str) -> int:
        """The text's number in the table."""
        text = printable(text)
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]

    def numbers(self, group: grouping.Group) -> U32:
        """The number of each row's text. Code -1 becomes the empty text."""
        of_names = np.array([*map(self.number, group.names), 0], np.uint32)
        of_rows: U32 = of_names[group.codes]
        return of_rows


@dataclass(frozen=True)
class Packed:
    """A device's allocations: columns of bytes, and the facts that a reader needs to unpack them."""

    facts: Mapping[str, Any]
    columns: Mapping[str, bytes]
    shown: "Order"
    marks: U32  # per allocation, a bit for each finding that it belongs to and that is shown whole


@dataclass(frozen=True)
class Order:
    """The device's changes, in order: allocs and frees by their row of the event table."""

    rows: Rows  # the allocations, in the order in which they begin
    position: I64  # per change, the event
    begins: NDArray[np.bool_]  # per change, whether an allocation begins
    of: Rows  # per change, its index in `rows`
    start: I64  # per row of `rows`, its change; -1: before the trace
    end: I64  # likewise; if it is still alive, the number of changes

    def change_at(self, position: int) -> int:
        """The last change at or before the event; -1: before the first."""
        return int(np.searchsorted(self.position, position, side="right")) - 1


def order(trace: Trace, device: str) -> Order:
    """The changes of a device. At one event, ends come before begins."""
    alloc = allocations(trace)
    own = np.flatnonzero(usage.on_device(trace, device))
    rows = own[np.argsort(alloc.start[own], kind="stable")]
    return _ordered(rows, alloc.start[rows], alloc.completed[rows])


def _ordered(rows: Rows, start: I32, completed: I32) -> Order:
    made, ended = np.flatnonzero(start >= 0), np.flatnonzero(completed >= 0)
    key = np.concatenate(
        [2 * completed[ended].astype(np.int64), 2 * start[made].astype(np.int64) + 1]
    )
    which = np.concatenate([ended, made])
    by_time = np.argsort(key, kind="stable")
    begins, of = (by_time >= len(ended)), which[by_time]
    number = np.arange(len(of))
    first = np.full(len(rows), -1, np.int64)
    last = np.full(len(rows), len(of), np.int64)
    first[of[begins]] = number[begins]
    last[of[~begins]] = number[~begins]
    return Order(rows, key[by_time] // 2, begins, of, first, last)


def pack(trace: Trace, device: str, strings: Strings, most: int = MOST) -> Packed:
    """Packs the device's allocations. `facts` counts those that are only in the sums."""
    whole = order(trace, device)
    marks = _marks(trace, device, whole.rows)
    kept = _worth_showing(trace, device, whole, marks, most)
    shown = whole if len(kept) == len(whole.rows) else _only(trace, whole.rows[kept])
    cut = np.bitwise_or.reduce(np.delete(marks, kept)) if len(kept) < len(marks) else np.uint32(0)
    shown_marks = marks[kept] & ~cut
    times = _times(trace, shown.position)
    begin = min(int(times[0]) if len(times) else 0, 0)
    steps = np.diff(times - begin, prepend=0)
    unit = _UNIT_NS
    while len(steps) and steps.max() // unit >= 2**32:
        unit *= 2
    clock = np.diff((times - begin) // unit, prepend=0).astype(np.uint32)
    kinds = _kinds(trace, shown.rows, strings)
    layout = _Addresses(trace, device, shown.rows)
    facts = {
        "allocations": len(whole.rows),
        "shown": len(shown.rows),
        "before": int((shown.start < 0).sum()),
        "changes": len(shown.of),
        "kinds": len(kinds.sizes),
        "groups": kinds.texts.shape[1],
        "unit_ns": unit,
        "begin_ns": begin,
        "address_unit": layout.unit,
        "regions": layout.regions,
        "peak_change": shown.change_at(usage.peak(trace, device).position),
        "rest": _rest(trace, whole, kept, shown),
        "first_row": int(shown.rows[0]) if len(shown.rows) else 0,
    }
    columns = {
        "kind": packed(kinds.of_rows),
        "address": packed(layout.places),
        "life": packed(shown.end - shown.start),
        "clock": packed(clock),
        "begins": _deflated(np.packbits(shown.begins, bitorder="little").tobytes()),
        "row": packed(_zigzag(np.diff(shown.rows, prepend=shown.rows[:1] - 1) - 1)),
        "group": packed(kinds.groups),
        "texts": packed(kinds.texts.reshape(-1)),
        "sizes": packed(kinds.sizes),
        "blocks": packed(kinds.blocks + 1),  # 0: not known
        "finding": packed(shown_marks),
    }
    return Packed(facts, columns, shown, shown_marks)


def packed(values: NDArray[Any]) -> bytes:
    """The numbers by bytes (the lowest of each, then the second of each, ...), deflated."""
    most = int(values.max(initial=0))
    wide = values.astype("<u8" if most >= 2**32 else "<u4", copy=False)
    planes = wide.view(np.uint8).reshape(len(wide), wide.itemsize).T
    return _deflated(planes[: (most.bit_length() + 7) // 8].tobytes())


def unpacked(column: bytes, count: int) -> I64:
    """The numbers in a packed column, which has so many."""
    planes = np.frombuffer(zlib.decompress(column), np.uint8)
    wide = np.zeros((8, count), np.uint8)
    if count:
        wide[: len(planes) // count] = planes.reshape(-1, count)
    return np.ascontiguousarray(wide.T).view("<i8").reshape(-1)


def _deflated(data: bytes) -> bytes:
    return zlib.compress(data, _LEVEL)


def _zigzag(values: I64) -> I64:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ...: small numbers for small amounts of either sign."""
    folded: I64 = (values << 1) ^ (values >> 63)
    return folded


def _only(trace: Trace, rows: Rows) -> Order:
    alloc = allocations(trace)
    return _ordered(rows, alloc.start[rows], alloc.completed[rows])


def _times(trace: Trace, position: I64) -> I64:
    """The times of events, made monotonic: threads may be recorded in another order than by clock."""
    times: I64 = np.maximum.accumulate(trace.time_ns(trace.events.ticks[position]))
    return times


def _marks(trace: Trace, device: str, rows: Rows) -> U32:
    """Per row, a bit for each finding that it belongs to."""
    marks = np.zeros(len(rows), np.uint32)
    for number, finding in enumerate(findings.findings(trace, device)[:MOST_FINDINGS]):
        if finding.proof is not None:
            marks |= finding.proof.which[rows].astype(np.uint32) << np.uint32(number)
    return marks


def _worth_showing(trace: Trace, device: str, whole: Order, marks: U32, most: int) -> Rows:
    """All allocations, or those of findings, alive at the peak or the end, or with the largest areas."""
    count = len(whole.rows)
    if count <= most:
        return np.arange(count)
    alloc = allocations(trace)
    peak = whole.change_at(usage.peak(trace, device).position)
    needed = (whole.start <= peak) & (whole.end > peak) | (whole.end == len(whole.of))
    marked = needed | (marks != 0)
    needed = marked if int(marked.sum()) <= most else needed
    area = alloc.requested_bytes[whole.rows].astype(np.float64) * (whole.end - whole.start)
    area[needed] = np.inf
    most = min(max(most, int(needed.sum()), 1), count)
    kept: Rows = np.sort(np.argpartition(-area, most - 1)[:most])
    return kept


def _rest(trace: Trace, whole: Order, kept: Rows, shown: Order) -> dict[str, Any] | None:
    """Bytes per category of the other allocations, at moments that include the peak and the end."""
    if len(kept) == len(whole.rows):
        return None
    alloc = allocations(trace)
    left_out = np.ones(len(whole.rows), np.bool_)
    left_out[kept] = False
    category = alloc.category[whole.rows]
    size = np.minimum(alloc.requested_bytes[whole.rows], LARGEST).astype(np.int64)
    device = devices.device_of_place(trace)[alloc.place[whole.rows[0]]]
    peak = shown.change_at(usage.peak(trace, str(device)).position)
    last = len(shown.of) - 1
    at = np.unique(np.append(np.linspace(0, last, _SAMPLES).astype(np.int64), max(peak, 0)))
    until = np.searchsorted(whole.position, shown.position[at], side="right")
    changes = np.flatnonzero(left_out[whole.of])
    of = whole.of[changes]
    amount = np.where(whole.begins[changes], size[of], -size[of])
    of_category = category[of]
    levels = {}
    for number, name in enumerate(CATEGORIES):
        own = np.flatnonzero(of_category == number)
        sums = np.concatenate([[0], np.cumsum(amount[own])])
        level = sums[np.searchsorted(changes[own], until)]
        level += int(size[left_out & (category == number) & (whole.start < 0)].sum())
        if level.any():
            levels[name] = level.tolist()
    return {"count": int(left_out.sum()), "at": at.tolist(), "levels": levels}


# ---------------------------------------------------------------- kinds


@dataclass(frozen=True)
class _Kinds:
    """The kinds of rows, and the groups of kinds."""

    of_rows: U32  # per row, its kind
    groups: U32  # per kind, its group
    texts: U32  # per text and group, the text's number
    sizes: I64  # per kind, requested bytes
    blocks: I64  # per kind, the bytes of the allocator's block; -1: not known


def _kinds(trace: Trace, rows: Rows, strings: Strings) -> _Kinds:
    group, first = _alike(_raw_columns(trace, rows))
    texts = _texts(trace, rows[first])
    numbers = np.stack([strings.numbers(texts[name]) for name in TEXTS])
    requested = np.minimum(allocations(trace).requested_bytes[rows], LARGEST).astype(np.int64)
    given = blocks.allocated_bytes(trace)[rows]
    kind, first = _alike([group, requested, given + 1])
    return _Kinds(kind, group[first], numbers, requested[first], given[first])


def _raw_columns(trace: Trace, rows: Rows) -> list[NDArray[Any]]:
    alloc = allocations(trace)
    names = (
        *("category", "role", "label", "module", "op", "line", "phase", "free_phase"),
        *("forward_module", "forward_op", "forward_line", "place", "thread"),
    )
    freed = owners.freed_by(trace)
    columns = [getattr(alloc, name) for name in names]
    return [column[rows] for column in (*columns, freed.module, freed.op)]


def _alike(columns: list[NDArray[Any]]) -> tuple[U32, Rows]:
    """Gives rows that agree in all columns one number. Also returns the first row of each, in order."""
    number, first = grouping.alike(columns)
    by_time = np.argsort(first)
    rank = np.empty(len(first), np.uint32)
    rank[by_time] = np.arange(len(first), dtype=np.uint32)
    kind: U32 = rank[number]
    return kind, first[by_time]


def _texts(trace: Trace, rows: Rows) -> dict[str, grouping.Group]:
    alloc, freed = allocations(trace), owners.freed_by(trace)
    of_views = "category module op line phase free_phase role name shape dtype"
    groups = {key: grouping.group(trace, key, rows) for key in of_views.split()}
    made = {"made_module": alloc.module, "made_op": alloc.op}
    left = {"freed_module": freed.module, "freed_op": freed.op}
    for key, column in {**made, **left}.items():
        groups[key] = grouping.grouped(column[rows], lambda row: trace.strings[row])
    groups["line"] = grouping.Group(groups["line"].codes, [*map(relative, groups["line"].names)])
    own = owners.own_frames(trace)[alloc.cause("line")[rows]]
    for key, column in {"own_line": own, "made_line": alloc.line[rows]}.items():
        groups[key] = grouping.grouped(column, lambda row: relative(owners.line_text(trace, row)))
    groups["place"] = grouping.grouped(alloc.place[rows], lambda place: _place_text(trace, place))
    groups["thread"] = grouping.grouped(
        alloc.thread[rows], lambda number: _thread_text(trace, number)
    )
    return groups


def relative(line: str) -> str:
    """A line's text without the folders of the machine."""
    return f".../{'/'.join(line.split('/')[-2:])}" if line.startswith("/") else line


def _place_text(trace: Trace, place: int) -> str:
    stream, pool = int(trace.places.stream[place]), devices.pool_text(trace, place)
    return ", ".join(
        [*([f"stream {stream}"] if stream else []), *([f"pool {pool}"] if pool else [])]
    )


def _thread_text(trace: Trace, number: int) -> str:
    name = trace.threads.name
    text = trace.strings[name[number]] if number < len(name) else ""
    return f"{number} {text}".rstrip()


# ---------------------------------------------------------------- addresses


class _Addresses:
    """Places of addresses. Close addresses form a region; regions are drawn one above the other."""

    def __init__(self, trace: Trace, device: str, rows: Rows) -> None:
        alloc = allocations(trace)
        begin = alloc.address[rows].astype(np.float64)
        self._starts, self._ends = self._regions(trace, device, begin, rows)
        lengths = self._ends - self._starts
        offsets = np.concatenate([[0.0], np.cumsum(lengths)])
        at = np.searchsorted(self._starts, begin, side="right") - 1
        places = (
            (offsets[at] + (begin - self._starts[at])).astype(np.uint64) if len(rows) else begin
        )
        unit = int(np.gcd.reduce(places.astype(np.uint64))) if len(rows) else 1
        unit = max(unit, 1)
        while offsets[-1] / unit >= 2**32:
            unit *= 2
        self.unit = unit
        self.places: U32 = (places // unit).astype(np.uint32)
        self.regions = [
            [int(start), int(offset), int(length)]
            for start, offset, length in zip(
                self._starts.tolist(), offsets.tolist(), lengths.tolist(), strict=False
            )
        ]

    @staticmethod
    def _regions(
        trace: Trace, device: str, begin: NDArray[np.float64], rows: Rows
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        size = np.maximum(allocations(trace).requested_bytes[rows], 1).astype(np.float64)
        changes = segments.changes(trace, device)
        grown = changes.row[changes.bytes > 0]
        held = trace.events.address[grown].astype(np.float64)
        held_ends = held + trace.events.bytes[grown].astype(np.float64)
        starts = np.concatenate([begin, held])
        ends = np.concatenate([begin + size, held_ends])
        by_address = np.argsort(starts, kind="stable")
        starts, ends = starts[by_address], np.maximum.accumulate(ends[by_address])
        first = np.flatnonzero(np.append(True, starts[1:] > ends[:-1] + _GAP)[: len(starts)])
        last = np.append(first[1:], len(starts)) - 1 if len(first) else first
        return starts[first], ends[last]


# ---------------------------------------------------------------- over time


@dataclass(frozen=True)
class Curve:
    """A level over time. Each value holds until the next time."""

    times_ns: list[int]
    bytes: list[int]


def reserved(trace: Trace, device: str) -> Curve:
    """The bytes that the device's allocator held from the driver. Empty if they are unknown."""
    snapshot = segments.snapshot_of(trace, device)
    if device == "cpu" or snapshot is None:
        return Curve([], [])
    changes = segments.changes(trace, device)
    later = ~changes.is_seed
    level = np.append(changes.at_start, changes.level[later])
    times = trace.time_ns(trace.events.ticks[np.append(snapshot, changes.row[later])])
    return Curve(times.tolist(), level.tolist())
