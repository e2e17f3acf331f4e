"""Writes a trace as a memory snapshot of torch, for https://pytorch.org/memory_viz and torch's tools.

The viewer colours allocations by `category`, which torch itself never writes. The first frame of each
allocation describes it: `activations:0:saved · h.0.mlp · aten::addmm`. Allocations from before the
trace are written as allocated at its start, because the viewer would not know their category
otherwise. A CPU has no segments, so its used addresses stand for them.

The file has only data (lists, dicts, texts, numbers), and pytracer.load() reads it again.
"""

import io
import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytracer import errors
from pytracer.analysis.allocator import blocks, segments
from pytracer.analysis.facts import devices, scopes, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.grouping import alike, role_text
from pytracer.basics.files import write_whole
from pytracer.basics.ranges import Ranges
from pytracer.basics.version import __version__
from pytracer.data import meta, sanitized
from pytracer.data._native import core
from pytracer.data.recorded import Trace
from pytracer.data.schema import ACTION, CATEGORIES, I32, I64, PHASE, PHASES, U8, U32, U64

_PROTOCOL = 4  # the newest version that every version of the viewer reads
_CHUNK = 1 << 16  # events at a time
_MOST_HELD = 500_000  # blocks at the end: each is a dict of 2 KB until it is written
_SMALL_SEGMENT = 2 << 20
_SEPARATOR = " · "


def write(trace: Trace, path: str | Path, *, overwrite: bool = False) -> Path:
    """Writes a `.pickle`. A failed export leaves no file.

    Raises:
        errors.CannotWrite: the file exists already, or cannot be written.
        errors.PytracerError: more blocks are alive at the end than a snapshot may have.
    """
    return write_whole(Path(path), lambda file: _fill(trace, file), overwrite=overwrite)


def _fill(trace: Trace, file: BinaryIO) -> None:
    """Writes the dict that torch.cuda.memory._snapshot() would return. Entries come last, streamed."""
    names = _device_names(trace)
    words = _Words(trace)
    parts = [_Device(trace, name, number, words) for number, name in enumerate(names)]
    if (held := sum(len(part.alive) for part in parts)) > _MOST_HELD:
        raise errors.PytracerError(
            f"{held:,} blocks are alive at the end, and a memory snapshot may have {_MOST_HELD:,}; "
            "choose another format, such as perfetto"
        )
    ours = {
        "version": __version__,
        "devices": names,
        "seeds": [part.seeds for part in parts],
        "phases": [part.phases() for part in parts],
        "directory": meta.of(trace).directory,
    }
    beginning = {
        "segments": [segment for part in parts for segment in part.segments()],
        "allocator_settings": dict(meta.of(trace).allocator_settings),
        "external_annotations": _annotations(trace),
        "pytracer": json.dumps(ours),
    }
    kept = io.BytesIO()
    pickler = pickle.Pickler(kept, _PROTOCOL)
    pickler.dump(beginning)
    memo = len(pickler.memo.copy())
    native = core.SnapshotWriter(words.all, memo)
    del beginning, pickler
    # The dict stays open: the instruction that ends the pickle is replaced by one that begins
    # a list of keys and values. Both take one byte, so the lengths of the pickle's frames stay right.
    file.write(kept.getbuffer()[:-1])
    file.write(b"(" + _text("device_traces"))
    file.write(native.begin())
    for part in parts:
        file.write(native.begin_device(part.tables()))
        for entries in part.entries():
            file.write(native.entries(entries.action, entries.row, part.time_us(entries)))
        file.write(native.end_device())
    file.write(native.end() + b"u.")


def _text(text: str) -> bytes:
    """A short text as a pickle's instruction."""
    return b"\x8c" + bytes([len(text)]) + text.encode()


def annotations(trace: Trace) -> Iterator[tuple[int, str]]:
    """The address and the description of every CUDA block that is alive at the end."""
    alloc, words = allocations(trace), _Words(trace)
    for name in usage.devices(trace):
        if name == "cpu":
            continue
        for row in np.flatnonzero(usage.alive(trace, "end", name)).tolist():
            parts = words.all[words.of[row]][:2]
            yield int(alloc.address[row]), _SEPARATOR.join(part for part in parts if part)


def _device_names(trace: Trace) -> list[str]:
    """Device names by number, in the viewer's order: CUDA devices first, the CPU last."""
    used = set(devices.device_of_place(trace)[np.unique(allocations(trace).place)])
    cuda = [devices.split(name)[1] for name in used if name != "cpu"]
    names = [f"cuda:{i}" for i in range(max(cuda, default=-1) + 1)]
    return [*names, "cpu"] if "cpu" in used or not names else names


def _annotations(trace: Trace) -> list[dict[str, Any]]:
    """The annotations of passes, optimizers and the user."""
    tree = scopes.tree(trace)
    kinds = (scopes.BACKWARD, scopes.OPTIMIZER, scopes.USER)
    numbers = np.flatnonzero(np.isin(tree.kind, kinds) & (tree.end != scopes.NEVER))
    rows = []
    for stage, ticks in (("START", tree.begin), ("END", tree.end)):
        times = _time_us(trace, ticks[numbers]).tolist()
        for number, time in zip(numbers.tolist(), times, strict=True):
            name = trace.strings[tree.name[number]]
            rows.append({"name": name, "stage": stage, "device": 0, "time_us": time})
    return sorted((row for row in rows if row["name"]), key=lambda row: row["time_us"])


def _time_us(trace: Trace, ticks: U64) -> I64:
    times: I64 = (trace.time_ns(ticks) + trace.began_unix_ns) // 1000
    return times


class _Entries(NamedTuple):
    """What an allocator did: the event, and a row of the allocations or, if not theirs, of events."""

    position: I64
    action: U8
    row: U32


@dataclass(frozen=True)
class _Source:
    """Entries of one kind, in order."""

    action: int | None  # None: each event's own
    at: NDArray[Any]  # by row: the position; of events their actions
    rows: U32

    @property
    def positions(self) -> NDArray[Any]:
        """Rising."""
        return self.rows if self.action is None else self.at[self.rows]

    def part(self, begin: int, end: int) -> _Entries:
        """Some of them."""
        rows = self.rows[begin:end]
        if self.action is None:
            return _Entries(rows.astype(np.int64), self.at[rows], rows)
        return _Entries(self.at[rows], np.full(len(rows), self.action, np.uint8), rows)


def _by(at: I32, rows: U32) -> U32:
    """The rows in the order of their positions."""
    return rows[np.argsort(at[rows], kind="stable")]


def _in_order(parts: list[_Entries]) -> _Entries:
    """Entries of several kinds. Kinds that share an event keep their order."""
    position, action, row = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(position, kind="stable")
    return _Entries(position[order], action[order], row[order])


@dataclass(frozen=True)
class _Segment:
    begin: int
    end: int
    stream: int
    pool: tuple[int, int]
    expandable: bool


class _Device:
    """One device's part of the snapshot."""

    def __init__(self, trace: Trace, name: str, number: int, words: "_Words") -> None:
        self.trace, self.name, self.number, self.words = trace, name, number, words
        self.alloc = allocations(trace)
        self.own = np.flatnonzero(devices.on(trace, name, self.alloc.place)).astype(np.uint32)
        self.seeds = int((self.alloc.start[self.own] < 0).sum())

    # ------------------------------------------------------------ entries

    def tables(self) -> dict[str, NDArray[Any]]:
        """The tables that the entries name rows of, for core.SnapshotWriter."""
        events, places, alloc = self.trace.events, self.trace.places, self.alloc
        return {
            "blocks.address": alloc.address,
            "blocks.bytes": alloc.requested_bytes,
            "blocks.place": alloc.place,
            "events.address": events.address,
            "events.bytes": events.bytes,
            "events.place": sanitized.within(events.place, len(places.stream)),
            "words": self.words.of,
            "places.stream": places.stream,
            "places.pool_high": places.pool_high,
            "places.pool_low": places.pool_low,
        }

    def entries(self) -> Iterator["_Entries"]:
        """Every allocation and free, segments and failures, in order and some at a time."""
        ends = np.arange(0, max(len(self.trace.events.ticks), 1), _CHUNK) + _CHUNK
        cuts = [np.searchsorted(source.positions, ends) for source in self._sources]
        begins = [0] * len(cuts)
        for chunk in zip(*cuts, strict=True):
            yield _in_order(
                [
                    source.part(begin, end)
                    for source, begin, end in zip(self._sources, begins, chunk, strict=True)
                ]
            )
            begins = list(chunk)

    @cached_property
    def _sources(self) -> list["_Source"]:
        """The three moments of a block, then the device's other events."""
        alloc, events, own = self.alloc, self.trace.events, self.own
        others = np.isin(events.action, [ACTION[name] for name in _OTHERS])
        others &= devices.on(self.trace, self.name, events.place)
        other = np.flatnonzero(others).astype(np.uint32)
        return [
            _Source(ACTION["free_requested"], alloc.end, _by(alloc.end, own[alloc.end[own] >= 0])),
            _Source(
                ACTION["free_completed"],
                alloc.completed,
                _by(alloc.completed, own[alloc.completed[own] >= 0]),
            ),
            _Source(ACTION["alloc"], alloc.start, _by(alloc.start, own)),
            _Source(None, events.action, other),
        ]

    def time_us(self, entries: "_Entries") -> I64:
        """Since 1970. Blocks from before the trace have the time of its first event."""
        ticks = self.trace.events.ticks
        at = np.maximum(entries.position, 0)
        return _time_us(self.trace, ticks[at] if len(ticks) else at.astype(np.uint64))

    def phases(self) -> list[list[int]]:
        """The phase of each entry, as runs: the number and how many entries have it."""
        runs: list[list[int]] = []
        for entries in self.entries():
            phase = self._phase_of(entries)
            firsts = np.flatnonzero(np.append(True, phase[1:] != phase[:-1])[: len(phase)])
            counts = np.diff(np.append(firsts, len(phase)))
            for number, count in zip(phase[firsts].tolist(), counts.tolist(), strict=True):
                if runs and runs[-1][0] == number:
                    runs[-1][1] += count
                else:
                    runs.append([number, count])
        return runs

    def _phase_of(self, entries: "_Entries") -> U8:
        _, action, row = entries
        phases = np.full(len(row), PHASE["other"], np.uint8)
        is_block = action <= ACTION["free_completed"]
        if is_block.any():
            block = np.where(is_block, row, 0)
            made = action == ACTION["alloc"]
            phase = np.where(made, self.alloc.phase[block], self.alloc.free_phase[block])
            known = is_block & (phase < len(PHASES))
            phases[known] = phase[known]
        return phases

    # ------------------------------------------------------------ segments at the end

    @cached_property
    def alive(self) -> U32:
        """The blocks that are alive at the end, by address."""
        alloc, own = self.alloc, self.own
        alive = own[(alloc.completed[own] < 0) & (alloc.requested_bytes[own] > 0)]
        by_address: U32 = alive[np.argsort(alloc.address[alive], kind="stable")]
        return by_address

    def segments(self) -> list[dict[str, Any]]:
        """The segments at the end, with their blocks."""
        alloc, alive = self.alloc, self.alive
        is_cpu = self.name == "cpu"  # whose blocks are as large as what was asked for
        sizes = alloc.requested_bytes if is_cpu else blocks.allocated_bytes(self.trace)
        rows = []
        at = 0
        for segment in self._held(alive):
            while at < len(alive) and alloc.address[alive[at]] < segment.begin:
                at += 1
            inside = []
            while at < len(alive) and alloc.address[alive[at]] < segment.end:
                inside.append(int(alive[at]))
                at += 1
            rows.append(self._segment(segment, inside, sizes))
        return rows

    def _segment(self, segment: _Segment, inside: list[int], sizes: NDArray[Any]) -> dict[str, Any]:
        alloc, blocks_inside = self.alloc, []
        at = segment.begin
        for i, row in enumerate(inside):
            begin, requested = int(alloc.address[row]), int(alloc.requested_bytes[row])
            following = int(alloc.address[inside[i + 1]]) if i + 1 < len(inside) else segment.end
            size = int(sizes[row])
            if size == blocks.UNKNOWN:
                size = -(-requested // blocks.ROUND) * blocks.ROUND
            size = min(max(size, requested), following - begin)
            if size <= 0:
                continue  # a damaged trace: two blocks at one place
            if begin > at:
                blocks_inside.append(_free_block(at, begin - at))
            state = "active_allocated" if alloc.end[row] < 0 else "active_pending_free"
            blocks_inside.append(
                {
                    "address": begin,
                    "size": size,
                    "requested_size": min(requested, size),
                    "state": state,
                    "frames": self.words.frames(row),
                }
            )
            at = begin + size
        if segment.end > at:
            blocks_inside.append(_free_block(at, segment.end - at))
        active = [block for block in blocks_inside if block["state"] != "inactive"]
        allocated = [block for block in active if block["state"] == "active_allocated"]
        return {
            "device": self.number,
            "address": segment.begin,
            "total_size": segment.end - segment.begin,
            "allocated_size": sum(block["size"] for block in allocated),
            "active_size": sum(block["size"] for block in active),
            "requested_size": sum(block["requested_size"] for block in active),
            "stream": segment.stream,
            "segment_type": "small" if segment.end - segment.begin <= _SMALL_SEGMENT else "large",
            "segment_pool_id": segment.pool,
            "is_expandable": segment.expandable,
            "frames": [],
            "blocks": blocks_inside,
        }

    def _held(self, alive: U32) -> list[_Segment]:
        """The segments at the end. If they are unknown, the used addresses."""
        recorded = self._recorded_segments()
        held = [
            _Segment(begin, end, segment.stream, segment.pool, segment.expandable)
            for begin, end, segment in recorded
        ]
        if any(segment.expandable for segment in held):
            held = _joined(held)
        rows = self.own
        if len(recorded):
            used = list(zip(*(column.tolist() for column in self._used(alive)), strict=True))
            whole = all(recorded.covers(*each) for each in used)
            outside = [not (whole or recorded.touches(*each)) for each in used]
            rows = alive[np.array(outside, np.bool_)]
        held += self._touching(rows)
        return sorted(held, key=lambda segment: segment.begin)

    def _used(self, rows: U32) -> tuple[U64, U64]:
        """The first address of each allocation, and the one behind its last."""
        begins, sizes = self.alloc.address[rows], self.alloc.requested_bytes[rows]
        return begins, begins + np.minimum(sizes, ~begins)  # a damaged trace may go beyond the end

    def _touching(self, rows: U32) -> Iterator[_Segment]:
        """The addresses of these allocations as segments, joined where they touch."""
        begins = ends = np.zeros(0, np.uint64)
        for part in range(0, len(rows), _CHUNK):
            more_begins, more_ends = self._used(rows[part : part + _CHUNK])
            begins, ends = _ranges(
                np.concatenate([begins, more_begins]), np.concatenate([ends, more_ends])
            )
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            yield _Segment(begin, end, 0, (0, 0), expandable=False)

    def _recorded_segments(self) -> Ranges[_Segment]:
        """The segments at the end, from the device's events."""
        places = self.trace.places
        recorded: Ranges[_Segment] = Ranges()
        for begin, end, piece in segments.held(self.trace, self.name):
            at, mapped = piece.place, piece.came_by == "segment_map"
            pool = (int(places.pool_high[at]), int(places.pool_low[at]))
            recorded.add(begin, end, _Segment(begin, end, int(places.stream[at]), pool, mapped))
        return recorded


def _ranges(begins: U64, ends: U64) -> tuple[U64, U64]:
    """These ranges without the empty ones, joined where they touch or overlap."""
    begins, ends = begins[begins < ends], ends[begins < ends]
    order = np.argsort(begins, kind="stable")
    begins, reached = begins[order], np.maximum.accumulate(ends[order])
    firsts = np.flatnonzero(np.append(True, begins[1:] > reached[:-1])[: len(begins)])
    lasts = np.append(firsts[1:], len(begins))[: len(firsts)] - 1
    return begins[firsts], reached[lasts]


_SEGMENTS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")
_OTHERS = (*_SEGMENTS, "oom")


def _free_block(address: int, size: int) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": size,
        "state": "inactive",
        "frames": [],
    }


def _joined(held: list[_Segment]) -> list[_Segment]:
    """Joins neighbours that were mapped piece by piece."""
    out: list[_Segment] = []
    for segment in sorted(held, key=lambda part: part.begin):
        last = out[-1] if out else segment
        mapped = last.expandable or segment.expandable
        alike = (last.stream, last.pool) == (segment.stream, segment.pool)
        if mapped and alike and last.end == segment.begin:
            out[-1] = _Segment(last.begin, segment.end, last.stream, last.pool, expandable=True)
        else:
            out.append(segment)
    return out


class _Words:
    """The description of each allocation. Many allocations share one."""

    def __init__(self, trace: Trace) -> None:
        alloc, labels, strings = allocations(trace), sanitized.labels(trace), trace.strings
        tree = scopes.tree(trace)
        stack = tree.stack
        if stack.any():
            stack = stack[scopes.nearest(tree.parent, stack != 0)]
        stack = stack[alloc.scope]
        columns = [alloc.role, labels.name[alloc.label], alloc.cause("module"), alloc.op]
        self._trace = trace
        self._of_stack: dict[int, list[_Frame]] = {}
        self._shown: dict[int, list[dict[str, Any]]] = {}
        self.of, firsts = alike([*columns, alloc.category, stack])
        self.all: list[tuple[str, str, str, list[_Frame]]] = []
        for row in firsts.tolist():
            role, name = role_text(trace, int(alloc.role[row])), strings[columns[1][row]]
            parts = (role, name, strings[columns[2][row]], strings[columns[3][row]])
            text = _SEPARATOR.join(part for part in parts if part)
            category = CATEGORIES[alloc.category[row]]
            # The first frame describes the block; the others made it.
            frames = [(text, category, 0), *self._stack_frames(int(stack[row]))]
            self.all.append((category, text, f"{role}\n{name}", frames))

    def frames(self, row: int) -> list[dict[str, Any]]:
        """The frames of an allocation, innermost first. Equal lists are one object."""
        which = int(self.of[row])
        if which not in self._shown:
            frames = self.all[which][3]
            self._shown[which] = [{"name": n, "filename": f, "line": i} for n, f, i in frames]
        return self._shown[which]

    def _stack_frames(self, row: int) -> list["_Frame"]:
        if row not in self._of_stack:
            stacks, strings = sanitized.stacks(self._trace), self._trace.strings
            at, frames = row, []
            while at:
                file, name = strings[stacks.file[at]], strings[stacks.function[at]]
                frames.append((name, file, int(stacks.line[at])))
                parent = int(stacks.parent[at])
                at = parent if parent < at else 0  # a damaged table must not make a loop
            self._of_stack[row] = frames
        return self._of_stack[row]


_Frame = tuple[str, str, int]  # function, file, line
