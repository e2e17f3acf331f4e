"""A trace as Chrome trace JSON, for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

This decides what is shown and where; csrc/core/chrome_trace.h writes it. docs/chrome-trace.md says
what a reader finds in the file.
"""

import json
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pytracer import errors
from pytracer._native import core
from pytracer.analysis import (
    blocks,
    device_times,
    devices,
    matching,
    module_costs,
    owners,
    phases,
    scopes,
    sound,
    views,
)
from pytracer.analysis.categories import ROLE, role_text
from pytracer.analysis.lifetimes import allocations
from pytracer.analysis.scopes import Mask
from pytracer.export.table import size_text
from pytracer.files import refuse_to_overwrite, write_whole
from pytracer.schema import (
    ACTION,
    CATEGORIES,
    CATEGORY,
    CATEGORY_ORDER,
    I64,
    PHASES,
    SCOPE_KINDS,
    SCOPE_RECOMPUTE,
    U64,
)
from pytracer.trace import Trace

# torch.profiler counts from the start of a quarter of a year of this many seconds: since 1970,
# microseconds with a fraction no longer fit a double. The same grid puts both on one clock.
_GRID_NS = 7_889_238 * 1_000_000_000

# Synthetic processes and threads: above every pid of Linux (at most 2**22), so that none is one
# of torch's when two files are put together, and in the order in which they are to be shown: one
# for each device's counters, the first of which has what the program did too, so that both stand
# together; and one for each device's allocations, which fill a screen.
_FIRST_PROCESS = 10_000_000
_PROCESSES_PER_RANK = 1000
_ALLOCATIONS = 500  # after at most 256 devices
_RANKS = _FIRST_PROCESS - 1  # the group of all ranks
_FIRST_COUNTER = 30_000_000  # tracks of Perfetto's own format
_STEPS, _PHASES, _MARKERS, _FIRST_THREAD = 1, 2, 3, 10

# Kinds of rows and of arguments: the enums of csrc/core/chrome_trace.h.
_SLICE, _LIFETIME, _COUNTER, _INSTANT, _FLOW = range(5)
_INTEGER, _HEX, _TEXT, _FLAG, _THOUSANDTHS = range(5)
_NO_VALUE = np.iinfo(np.int64).min

# Arguments of a module's slice: fields of a ModuleCost, how they are written, and by what factor.
_COSTS = {
    "forward_flops": (_INTEGER, 1),
    "backward_flops": (_INTEGER, 1),
    "forward_bytes": (_INTEGER, 1),
    "backward_bytes": (_INTEGER, 1),
    "forward_ms": (_THOUSANDTHS, 1000),
    "backward_ms": (_THOUSANDTHS, 1000),
    "flop_ratio": (_THOUSANDTHS, 1000),
    "time_ratio": (_THOUSANDTHS, 1000),
}

_ALWAYS = (*CATEGORY_ORDER[:5], "unknown")  # shown even when nothing was ever in them
_CHUNK = 4 << 20
_GAP_NS = 2
# More than these are folded: a person sees no more, and a browser holds them easily.
_MOST_BARS = 100_000
_MOST_SLICES = 200_000
_MOST_SAMPLES = 50_000
_COUNTER_BUCKETS = 5000
_FOLDS = 2000  # slices of time, each with a bar for what is folded
_MOST_NUMBERS = 2**63  # of a column of 64 bits
_HEAVY = 1_000_000_000  # bytes of JSON from which Perfetto in a browser gets into trouble


@dataclass(frozen=True)
class Options:
    """What to write, and how much of it."""

    max_events: int | None = None  # JSON events; the largest and longest are kept
    min_dt_ns: int = 0  # counters: no more than the extremes of each such time
    arrows: int = 1000  # from how many allocations to their frees, and forwards to backwards
    full: bool = False  # all of it; else what is too small to see is folded


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    events: int
    json_bytes: int
    file_bytes: int
    left_out: dict[str, int]  # what max_events left out, by kind
    folded: dict[str, int]  # what has no bar of its own, by kind; its counts and bytes are there
    warnings: tuple[str, ...]


# ---------------------------------------------------------------- the file


def write(
    trace: Trace, path: str | Path, options: Options | None = None, *, overwrite: bool = False
) -> Exported:
    """Writes `.json` or `.json.gz`; a file that cannot be finished is not left behind.

    Raises:
        errors.UsageError: another suffix, or a limit that allows nothing.
        errors.CannotWrite: the file exists already, or cannot be written.
    """
    path = Path(path)
    if not path.name.endswith((".json", ".json.gz")):
        raise errors.UsageError(f"{path}: a Chrome trace is a .json or a .json.gz file")
    refuse_to_overwrite(path, overwrite=overwrite)
    document = Document(trace, options or Options())

    def fill(file: BinaryIO) -> None:
        chunks = document.chunks()
        for piece in _compressed(chunks) if path.suffix == ".gz" else chunks:
            file.write(piece)

    write_whole(path, fill, overwrite=overwrite)
    warnings = []
    if document.bytes > _HEAVY:
        warnings.append(
            f"{size_text(document.bytes)} of JSON: a browser may fail to open it; max_events= "
            "keeps the largest events"
        )
    return Exported(
        path=path,
        events=document.events,
        json_bytes=document.bytes,
        file_bytes=path.stat().st_size,
        left_out=document.left_out,
        folded=document.folded,
        warnings=tuple(warnings),
    )


def _compressed(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """One gzip stream, its chunks compressed on two threads at a time."""
    yield b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"  # deflate, no time: equal traces, equal files
    crc = size = 0
    waiting: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(2) as pool:
        for chunk in chunks:
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
            waiting.append(pool.submit(_deflate, chunk))
            while len(waiting) > 3:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    yield b"\x03\x00"  # an empty last block
    yield crc.to_bytes(4, "little") + (size & 0xFFFFFFFF).to_bytes(4, "little")


def _deflate(chunk: bytes) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(chunk) + packer.flush(zlib.Z_SYNC_FLUSH)


# ---------------------------------------------------------------- rows


class _Texts:
    """Texts by number: the trace's own strings first, under their own numbers."""

    def __init__(self, trace: Trace) -> None:
        self.all = list(trace.strings) or [""]
        self._numbers: dict[str, int] = {"": 0}

    def add(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.all)
            self.all.append(text)
        return self._numbers[text]

    def each(self, rows: NDArray[Any], text: Callable[[int], str]) -> I64:
        """The number of each row's text; every distinct row is asked for once."""
        number = np.zeros(int(rows.max()) + 1 if len(rows) else 1, np.int64)
        used = np.zeros(len(number), np.bool_)
        used[rows] = True
        for row in np.flatnonzero(used).tolist():
            number[row] = self.add(text(row))
        result: I64 = number[rows]
        return result

    def encoded(self) -> list[bytes]:
        return [text.encode("utf-8", "surrogatepass") for text in self.all]


_NONE = np.zeros(0, np.int64)
Track = tuple[int, int, str, int, bool, bool]  # PerfettoTrack of csrc/core/perfetto_trace.h


@dataclass
class Rows:
    """Rows of one kind of event: ChromeRows of csrc/core/chrome_trace.h."""

    kind: int
    category: str
    process: int
    begin: I64
    name: I64
    end: I64 = field(default_factory=lambda: _NONE)
    thread: I64 = field(default_factory=lambda: _NONE)
    id: I64 = field(default_factory=lambda: _NONE)
    source: I64 = field(default_factory=lambda: _NONE)  # rows of the slices
    target: I64 = field(default_factory=lambda: _NONE)
    arguments: list[tuple[str, int, NDArray[Any]]] = field(default_factory=list)

    def columns(self) -> dict[str, Any]:
        """As the native side takes them."""
        named = dict(vars(self))
        named["from"], named["to"] = named.pop("source"), named.pop("target")
        named["arguments"] = [
            (name, kind, values.astype(np.int64, copy=False))
            for name, kind, values in self.arguments
        ]
        return named


def _or_none(values: NDArray[Any], missing: NDArray[np.bool_]) -> I64:
    return np.where(missing, _NO_VALUE, values.astype(np.int64))


# ---------------------------------------------------------------- the document


class Document:
    """Everything that is in the file, as rows, before it is text."""

    def __init__(self, trace: Trace, options: Options, *, native: bool = False) -> None:
        """`native`: for Perfetto's own format, in which a track need not have its bars' name."""
        if options.max_events is not None and options.max_events < 100:
            raise errors.UsageError("max_events must be 100 or more")
        if options.min_dt_ns < 0 or options.arrows < 0:
            raise errors.UsageError("min_dt_us and arrows cannot be negative")
        self.events = self.bytes = 0
        self.left_out: dict[str, int] = {}
        self.folded: dict[str, int] = {}
        self._native = native
        self._folds = not options.full and options.max_events is None
        self._trace = trace
        self._options = options
        self._texts = _Texts(trace)
        self._base_ns = trace.began_unix_ns // _GRID_NS * _GRID_NS
        rank = trace.meta.get("rank")
        self.rank = rank if isinstance(rank, int) and 0 <= rank < 1_000_000 else 0
        self._program = _FIRST_PROCESS + _PROCESSES_PER_RANK * self.rank
        self._devices = views.devices(trace) or (views.main_device(trace),)
        self._end_ns = int(self._times(_last_tick(trace)).max())
        self._room = options.max_events
        story = [self._steps(), self._phases(), self._markers()]
        if self._room is not None:
            names = 2 * (len(trace.threads.name) + 3 + 2 * len(self._devices))
            self._room = max(self._room - names - sum(len(rows.begin) for rows in story), 1)
        self._slices = _ScopeSlices.of(trace, _MOST_SLICES if self._folds else self._share(4))
        self._note("slices", self._slices.left_out)
        tables = [self._scopes(), *story]
        for i, device in enumerate(self._devices):
            tables += [*self._counters(i, device), self._reserved(i, device)]
            tables.append(self._lifetimes(i, device))
        tables += self._arrows(tables[0])
        self._tables = [rows for n, rows in enumerate(tables) if n == 0 or len(rows.begin)]

    def chunks(self) -> Iterator[bytes]:
        """The file's bytes, a few megabytes at a time."""
        native = core.ChromeTrace(self._texts.encoded(), [rows.columns() for rows in self._tables])
        yield self._count(self._head())
        while chunk := native.next(_CHUNK):
            yield self._count(chunk)
        # Each event so far is followed by a comma.
        metadata = list(self._metadata())
        yield self._count(",\n".join(metadata).encode() + b"\n]}\n")
        self.events = native.events() + len(metadata)

    def texts(self) -> list[bytes]:
        """What rows name by number."""
        return self._texts.encoded()

    def tracks(self) -> tuple[list[Track], list[tuple[dict[str, Any], list[int]]]]:
        """Where each table goes in Perfetto's own format, and the tracks in the order of a page."""
        alone = self._trace.meta.get("world_size", 1) == 1
        # Perfetto opens a group that is the only one. So all ranks have the same: their files may
        # be put together, one behind the other.
        group, suffix = (self._program, "") if alone else (_RANKS, f" (rank {self.rank})")
        name = f"memory of {self._devices[0]}" if alone else "memory by rank"
        first = 0 if alone else _PROCESSES_PER_RANK * self.rank  # places in the order
        tracks: list[Track] = [(group, 0, name, 0, False, False)]
        groups = {self._program: group}
        for number, device in enumerate(self._devices):
            process = self._program + number
            if number:
                groups[process] = process
                tracks.append(
                    (
                        process,
                        group,
                        f"memory of {device}{suffix}",
                        first + 100 + number,
                        False,
                        False,
                    )
                )
            closed = process + _ALLOCATIONS
            tracks.append(
                (
                    closed,
                    groups[process],
                    f"allocations on {device}{suffix}",
                    first + 90,
                    False,
                    False,
                )
            )
            tracks += [
                (int(track), closed, category, rank, False, True)
                for rank, category in enumerate(CATEGORY_ORDER)
                for track in lifetime_track(process, np.array([CATEGORY[category]]))
            ]
        threads = [(_STEPS, "steps"), (_PHASES, "phases"), (_MARKERS, "markers (peak, OOM)")]
        main = phases.main_thread(self._trace)
        found = np.unique(self._slices.thread).tolist()
        for thread in sorted(found, key=lambda each: each != main):
            name = _thread_name(self._trace, thread, main).rstrip("0123456789 ")
            threads.append((_FIRST_THREAD + thread, name))
        for rank, (thread, name) in enumerate(threads, first + 50):
            tracks.append((self._thread(thread), group, f"{name}{suffix}", rank, False, False))
        tables = []
        for table in self._tables:
            counters: list[int] = []
            for key, _, _ in table.arguments if table.kind == _COUNTER else ():
                counters.append(_FIRST_COUNTER + len(tracks) + (self.rank << 32))
                name = self._texts.all[int(table.name[0])]
                name = key.lstrip("0123456789 ") if name == "mem" else name
                of = groups[table.process]
                # A sum stands below those of the categories.
                rank = first + len(counters) if len(table.arguments) > 1 else first + 20
                tracks.append((counters[-1], of, f"{name}{suffix}", rank, True, False))
            tables.append((table, counters))
        return tracks, [(rows.columns(), counters) for rows, counters in tables]

    def _count(self, chunk: bytes) -> bytes:
        self.bytes += len(chunk)
        return chunk

    def _share(self, part: int) -> int | None:
        """A part of the events that are left, if there is a limit."""
        return None if self._room is None else max(self._room // part, 1)

    def _note(self, what: str, count: int) -> None:
        counts = self.folded if self._folds else self.left_out
        if count:
            counts[what] = counts.get(what, 0) + count

    def _times(self, ticks: U64) -> I64:
        """Nanoseconds since torch's base. What a damaged file says was before that, was then."""
        times = self._trace.time_ns(ticks)
        times += self._trace.began_unix_ns - self._base_ns
        return np.maximum(times, 0)

    # ------------------------------------------------------------ before and after the events

    def _head(self) -> bytes:
        """The object up to its events, with the keys that torch.profiler's own has."""
        meta = self._trace.meta
        known = {
            "schemaVersion": 1,
            "deviceProperties": [],
            "distributedInfo": {
                "rank": self.rank,
                "world_size": meta.get("world_size", 1),
                "backend": "",
            },
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self._base_ns,
            "pytracer": {
                "began_unix_ns": self._trace.began_unix_ns,
                "devices": list(self._devices),
                "left_out": self.left_out,
                "folded": self.folded,
                "losses": dict(self._trace.losses),
            },
            "metadata": {
                f"pytracer-{key}": value
                for key in ("pytracer", "torch", "python", "host", "command", "pid", "rank")
                if isinstance(value := meta.get(key), str | int)
            },
        }
        return (_json(known)[:-1] + ',"traceEvents":[\n').encode()

    def _metadata(self) -> Iterator[str]:
        """Names and order of processes and threads."""
        suffix = f" (rank {self.rank})" if self._trace.meta.get("world_size", 1) != 1 else ""
        processes = []
        for process, device in enumerate(self._devices, self._program):
            program = "program and " if process == self._program else ""
            processes.append((process, f"{program}memory of {device}"))
            processes.append((process + _ALLOCATIONS, f"allocations on {device}"))
        for process, name in processes:
            yield _metadata_event("process_name", process, process, name=f"{name}{suffix}")
            yield _metadata_event("process_sort_index", process, process, sort_index=process)
        threads = [(_STEPS, "steps"), (_PHASES, "phases"), (_MARKERS, "markers (peak, OOM)")]
        main = phases.main_thread(self._trace)
        threads += [
            (_FIRST_THREAD + thread, _thread_name(self._trace, thread, main))
            for thread in np.unique(self._slices.thread).tolist()
        ]
        for thread, name in threads:
            number = self._thread(thread)
            yield _metadata_event("thread_name", self._program, number, name=name)
            yield _metadata_event("thread_sort_index", self._program, number, sort_index=number)

    def _thread(self, number: int) -> int:
        """Unique among all processes: some readers know threads by their number alone."""
        return _FIRST_PROCESS * 2 + 100_000 * self.rank % 2_000_000_000 + number

    # ------------------------------------------------------------ what the program did

    def _scopes(self) -> Rows:
        """Modules, autograd nodes, outermost ops, ...: a track for each thread."""
        trace, found, texts = self._trace, self._slices, self._texts
        tree = scopes.tree(trace)
        begin = self._times(found.begin)
        thread = found.thread.astype(np.int64) + self._thread(_FIRST_THREAD)
        kinds = np.array([texts.add(kind) for kind in SCOPE_KINDS])
        kind = np.minimum(tree.kind[found.numbers], len(SCOPE_KINDS) - 1)
        line, made = _made_in(trace, found)
        inside = _with_what_is_inside(made, found.row_of(tree.parent[found.numbers]))
        own = _own_of_modules(trace, found)
        forward = tree.name[tree.forward[found.numbers]]
        return Rows(
            _SLICE,
            "scope",
            self._program,
            begin=begin,
            end=core.nest_slices(thread, begin, self._times(found.end)),
            name=self._known(tree.name[found.numbers]),
            thread=thread,
            arguments=[
                ("kind", _TEXT, kinds[kind]),
                ("line", _TEXT, texts.each(line, lambda row: owners.line_text(trace, row))),
                ("bytes allocated", _INTEGER, _or_none(made, made == 0)),
                ("own bytes", _INTEGER, own),
                ("inclusive bytes", _INTEGER, _or_none(inside, (inside == 0) & (own == _NO_VALUE))),
                ("slices folded", _INTEGER, _or_none(found.folded, found.folded == 0)),
                ("forward", _TEXT, self._known(forward)),
                ("recompute", _FLAG, tree.flags[found.numbers] & SCOPE_RECOMPUTE),
                *self._costs(),
            ],
        )

    def _costs(self) -> Iterator[tuple[str, int, I64]]:
        """What one call of each module costs, with all that is inside; from trace(cost=True)."""
        found = module_costs.per_call(self._trace)
        if not found:
            return
        tree = scopes.tree(self._trace)
        name = self._known(tree.name[self._slices.numbers])
        is_module = tree.kind[self._slices.numbers] == scopes.MODULE
        texts = {text: number for number, text in enumerate(self._trace.strings)}
        for key, (kind, scale) in _COSTS.items():
            by_name = np.full(max(len(self._trace.strings), 1), _NO_VALUE)
            for module, cost in found.items():
                value = getattr(cost, key)
                if value is not None and module in texts:
                    by_name[texts[module]] = round(value * scale)
            yield key.replace("_", " "), kind, np.where(is_module, by_name[name], _NO_VALUE)

    def _known(self, strings: NDArray[Any]) -> I64:
        """Rows of the trace's string table; those that are not there become 0."""
        return sound.within(strings, len(self._trace.strings)).astype(np.int64)

    def _steps(self) -> Rows:
        """A slice for each step, with its peak."""
        trace = self._trace
        # A step cut short may end, by its own events, before it begins: it is empty then.
        bounds = np.maximum.accumulate(_step_bounds(trace))
        times = self._times(bounds)
        asked = allocations(trace).requested_bytes.view(np.int64)
        ticks, level = _levels(trace, views.on_device(trace, self._devices[0]), asked)
        # What was allocated when a step began counts for its peak.
        cuts = np.searchsorted(ticks[1:], bounds, side="right")
        peaks = [int(level[a : b + 1].max()) for a, b in pairwise(cuts.tolist())]
        began = views.first_step(trace)
        texts = [self._texts.add(f"step {began + i}") for i in range(len(peaks))]
        names = np.array(texts, np.int64)
        return self._track(_STEPS, times[:-1], times[1:], names, ("peak bytes", _INTEGER, peaks))

    def _phases(self) -> Rows:
        """What the main thread was doing; `other` is left blank."""
        line = phases.timeline(self._trace)
        begin = self._times(line.begins)
        end = np.append(begin[1:], self._end_ns)
        names = np.array([self._texts.add(name) for name in PHASES])
        shown = (line.phase != phases.OTHER) & (end > begin)
        device_us = self._device_us(line)[shown].tolist()
        return self._track(
            _PHASES,
            begin[shown],
            end[shown],
            names[line.phase[shown]],
            ("device ms", _THOUSANDTHS, device_us),
        )

    def _device_us(self, line: phases.Timeline) -> I64:
        """Per stretch of the timeline what the device worked on it; of a cut one, in its first."""
        found = device_times.device_times(self._trace)
        _, first = np.unique(line.interval, return_index=True)
        stretch = first[line.interval[found.stretch]]
        sums = np.zeros(len(line.ticks), np.int64)
        known = line.phase[stretch] == found.phase
        np.add.at(sums, stretch[known], found.device_ns[known])
        return np.where(sums > 0, sums // 1000, _NO_VALUE)

    def _track(
        self,
        number: int,
        begin: I64,
        end: I64,
        name: I64,
        argument: tuple[str, int, Sequence[int]],
    ) -> Rows:
        """Slices of one track; of too many the longest."""
        key, kind, values = argument
        most = self._share(8)
        if most is not None and len(begin) > most:
            self._note("steps and phases", len(begin) - most)
            kept = _largest(end - begin, np.arange(len(begin)), most)
            begin, end, name = begin[kept], end[kept], name[kept]
            values = [values[i] for i in kept.tolist()]
        thread = np.full(len(begin), self._thread(number))
        # Each begins where another ends, and viewers read times as floating point numbers, which
        # are a nanosecond off by now: two slices that overlap by one are an error to them.
        end = np.maximum(begin, end - _GAP_NS)
        return Rows(
            _SLICE,
            "pytracer",
            self._program,
            begin=begin,
            end=core.nest_slices(thread, begin, end),
            name=name,
            thread=thread,
            arguments=[(key, kind, np.array(values, np.int64))],
        )

    def _markers(self) -> Rows:
        """The peak of each device, and allocations that failed."""
        marks: list[tuple[int, str, dict[str, int]]] = []
        ticks = self._trace.events.ticks
        for device in self._devices if len(ticks) else ():
            peak = views.peak(self._trace, device)
            at = self._times(ticks[max(peak.position, 0) : max(peak.position, 0) + 1])
            parts = {"bytes": peak.bytes, **peak.by_category}
            marks.append((int(at[0]), f"peak of {device}: {size_text(peak.bytes)}", parts))
        events = self._trace.events
        for row in np.flatnonzero(events.action == ACTION["oom"]).tolist():
            asked = int(events.bytes[row])
            text = f"out of memory: {size_text(asked)} asked for"
            parts = {"bytes": asked, "free on the device": int(events.address[row])}
            marks.append((int(self._times(ticks[row : row + 1])[0]), text, parts))
        keys = list(dict.fromkeys(key for _, _, parts in marks for key in parts))
        return Rows(
            _INSTANT,
            "pytracer",
            self._program,
            begin=np.array([time for time, _, _ in marks], np.int64),
            name=np.array([self._texts.add(text) for _, text, _ in marks], np.int64),
            thread=np.full(len(marks), self._thread(_MARKERS)),
            arguments=[
                (key, _INTEGER, np.array([m[2].get(key, _NO_VALUE) for m in marks], np.int64))
                for key in keys
            ],
        )

    # ------------------------------------------------------------ memory over time

    def _counters(self, number: int, device: str) -> list[Rows]:
        """Bytes per category and in all, after every change."""
        trace, alloc = self._trace, allocations(self._trace)
        here = views.on_device(trace, device)
        positions, levels = views.level_columns(trace, here, alloc.category, len(CATEGORY))
        start = views.bytes_before(trace, here, alloc.category, len(CATEGORY))
        used = np.bincount(alloc.category[here], minlength=len(CATEGORY)) > 0
        shown = [name for name in CATEGORY_ORDER if name in _ALWAYS or used[CATEGORY[name]]]
        columns = [
            np.concatenate([start[CATEGORY[name], None], levels[CATEGORY[name]]]) for name in shown
        ]
        ticks = np.concatenate([trace.events.ticks[:1], trace.events.ticks[positions]])
        # The digit is for the order in which Perfetto shows them.
        keys = [f"{i} {name}" for i, name in enumerate(shown, 1)]
        counters = [self._counter(number, "mem", ticks, dict(zip(keys, columns, strict=True)))]
        blocks_known = blocks.allocated_bytes(trace)
        asked = alloc.requested_bytes.view(np.int64)
        sizes = {}
        if not (blocks_known[here] == blocks.UNKNOWN).any():
            sizes["allocated"] = blocks_known
        if not np.array_equal(blocks_known[here], asked[here]):
            sizes["requested"] = asked  # a CPU's allocator gives what it is asked for
        for name, size in sizes.items():
            counters.append(self._counter(number, name, *_levels(trace, here, size)))
        return counters

    def _counter(self, device: int, name: str, ticks: U64, values: dict[str, I64] | I64) -> Rows:
        """Samples of one or more values; of many only as many as there may be."""
        columns = values if isinstance(values, dict) else {"bytes": values}
        count = min(len(ticks), *(len(column) for column in columns.values()))
        times = self._times(ticks[:count])
        columns = {key: column[:count] for key, column in columns.items()}
        kept = core.thin_samples(
            times, list(columns.values()), self._bucket_ns(times, len(columns))
        )
        self._note("counter samples", count - len(kept))
        return Rows(
            _COUNTER,
            "pytracer",
            self._program + device,
            begin=times[kept],
            name=np.full(len(kept), self._texts.add(name)),
            arguments=[(key, _INTEGER, column[kept]) for key, column in columns.items()],
        )

    def _bucket_ns(self, times: I64, columns: int) -> int:
        """How long a bucket is: each leaves a sample for each column's highest, and the last."""
        share = self._share(12 * len(self._devices))
        least = self._options.min_dt_ns
        if self._folds and least == 0 and len(times) > _MOST_SAMPLES:
            return int(times[-1] - times[0]) // _COUNTER_BUCKETS + 1
        if share is None or len(times) <= share:
            return least
        buckets = max(share // (columns + 1), 1)
        return max(least, int(times[-1] - times[0]) // buckets + 1)

    def _reserved(self, number: int, device: str) -> Rows:
        """What the allocator holds from the driver, where it has segments."""
        return self._counter(number, "reserved", *_segments(self._trace, device))

    # ------------------------------------------------------------ allocations

    def _lifetimes(self, number: int, device: str) -> Rows:
        """A bar for each allocation, on a track of its category."""
        trace, alloc, texts = self._trace, allocations(self._trace), self._texts
        which = np.flatnonzero(views.on_device(trace, device))
        share = self._share(6 * len(self._devices))
        if share is not None and len(which) > share:
            self._note("allocations", len(which) - share)
            which = np.sort(_largest(alloc.requested_bytes, which, share))
        begin, end = self._lives(which)
        folded = which[:0]
        if self._folds and len(which) > _MOST_BARS:
            area = (end - begin).astype(np.float64) * alloc.requested_bytes[which]
            seen = np.zeros(len(which), np.bool_)
            seen[np.argsort(area, kind="stable")[-_MOST_BARS:]] = True
            self._note("allocations", int(np.count_nonzero(~seen)))
            folded, folded_lives = which[~seen], (begin[~seen], end[~seen])
            which, begin, end = which[seen], begin[seen], end[seen]
        began = views.first_step(trace)
        label, labels = alloc.label[which], sound.labels(trace)
        cast = alloc.role[which] == ROLE["autocast_copy"]  # the label's type is the weight's

        def lines(rows: NDArray[Any]) -> I64:
            return texts.each(rows[which], lambda row: owners.line_text(trace, row))

        rows = Rows(
            _LIFETIME,
            "alloc",
            self._program + _ALLOCATIONS + number,
            begin=begin,
            end=end,
            name=self._bar_names(which),
            id=which,
            thread=lifetime_track(self._program + number, alloc.category[which]),
            arguments=[
                ("bytes", _INTEGER, alloc.requested_bytes[which]),
                ("address", _HEX, alloc.address[which].view(np.int64)),
                ("role", _TEXT, texts.each(alloc.role[which], lambda r: role_text(trace, r))),
                ("name", _TEXT, self._known(labels.name[label])),
                ("shape", _TEXT, self._known(labels.shape[label])),
                ("dtype", _TEXT, self._known(np.where(cast, 0, labels.dtype[label]))),
                ("module", _TEXT, self._known(alloc.module[which])),
                ("op", _TEXT, self._known(alloc.op[which])),
                ("line", _TEXT, lines(alloc.line)),
                ("forward module", _TEXT, self._known(alloc.forward_module[which])),
                ("forward op", _TEXT, self._known(alloc.forward_op[which])),
                ("forward line", _TEXT, lines(alloc.forward_line)),
                ("step", _INTEGER, _or_none(alloc.step[which] + began, alloc.step[which] < 0)),
                ("alive_at_start", _FLAG, alloc.start[which] < 0),
                ("alive_at_end", _FLAG, alloc.completed[which] < 0),
                ("allocations", _INTEGER, np.full(len(which), _NO_VALUE)),
            ],
        )
        return rows if len(folded) == 0 else self._with_folded(rows, folded, *folded_lives)

    def _bar_names(self, which: NDArray[np.intp]) -> I64:
        """Module, op and bytes; in JSON the category, since there a bar's name is its track's."""
        trace, alloc, texts = self._trace, allocations(self._trace), self._texts
        if not self._native:
            return texts.each(alloc.category[which], CATEGORIES.__getitem__)
        module, op = self._known(alloc.cause("module")[which]), self._known(alloc.op[which])
        size = alloc.requested_bytes[which]
        number, firsts = alike([module, op, size])
        names = []
        for row in firsts.tolist():
            parts = (trace.strings[module[row]], trace.strings[op[row]], size_text(int(size[row])))
            names.append(texts.add(" · ".join(part for part in parts if part)))
        return np.array(names, np.int64)[number] if names else np.zeros(0, np.int64)

    def _with_folded(self, rows: Rows, which: NDArray[np.intp], begin: I64, end: I64) -> Rows:
        """One more bar for all that are folded of a category and a slice of time."""
        alloc, texts = allocations(self._trace), self._texts
        span = max(self._end_ns - int(begin.min()), 1)
        key = (begin - begin.min()) * _FOLDS // (span + 1) * len(CATEGORIES)
        key += np.minimum(alloc.category[which], len(CATEGORIES) - 1)
        order = np.argsort(key, kind="stable")
        firsts = np.flatnonzero(np.append(True, np.diff(key[order]) != 0))
        counts = np.diff(np.append(firsts, len(order)))
        sizes = np.add.reduceat(alloc.requested_bytes[which][order].astype(np.int64), firsts)
        category = (key[order][firsts] % len(CATEGORIES)).astype(np.uint8)
        if self._native:
            pairs = zip(counts.tolist(), sizes.tolist(), strict=True)
            names = [texts.add(f"{n:,} small ones · {size_text(size)}") for n, size in pairs]
        else:
            names = [texts.add(CATEGORIES[each]) for each in category.tolist()]
        none = np.full(len(firsts), _NO_VALUE)
        empty = {_INTEGER: none, _HEX: none * 0, _TEXT: none * 0, _FLAG: none * 0}
        known = {"bytes": sizes, "allocations": counts}
        more: dict[str, Any] = {
            "begin": np.minimum.reduceat(begin[order], firsts),
            "end": np.maximum.reduceat(end[order], firsts),
            "name": np.array(names, np.int64),
            "id": which[order][firsts],
            "thread": lifetime_track(rows.process - _ALLOCATIONS, category),
        }
        both: dict[str, Any] = {
            name: np.concatenate([getattr(rows, name), values]) for name, values in more.items()
        }
        return replace(
            rows,
            **both,
            arguments=[
                (name, kind, np.concatenate([values, known.get(name, empty[kind])]))
                for name, kind, values in rows.arguments
            ],
        )

    def _lives(self, which: NDArray[np.intp]) -> tuple[I64, I64]:
        """From when to when the allocator counts these."""
        ticks = np.append(self._trace.events.ticks, np.uint64(0))
        first = self._times(ticks[:1])[0]
        alloc = allocations(self._trace)
        start, completed = alloc.start[which], alloc.completed[which]
        times = self._times(ticks)
        begin = np.where(start < 0, first, times[start])
        end = np.where(completed < 0, self._end_ns, times[completed])
        return begin, end

    # ------------------------------------------------------------ arrows

    def _arrows(self, slices: Rows) -> list[Rows]:
        most = min(self._options.arrows, self._share(100) or self._options.arrows)
        return [self._frees(most), self._backwards(slices, most)]

    def _unique(self, numbers: NDArray[Any]) -> I64:
        """Among all ranks: arrows of two files that are put together must not be joined."""
        ids: I64 = numbers.astype(np.int64) + (self.rank << 32)
        return ids

    def _frees(self, most: int) -> Rows:
        """From where the largest were made to where they were freed, if that is another slice."""
        trace, alloc = self._trace, allocations(self._trace)
        moments = phases.moments(trace)
        made = self._slices.row_of(moments.made_scope)
        freed = self._slices.row_of(moments.freed_scope)
        which = np.flatnonzero((made >= 0) & (freed >= 0) & (made != freed))
        which = _largest(alloc.requested_bytes, which, most)
        ticks = trace.events.ticks
        return Rows(
            _FLOW,
            "allocation",
            self._program,
            begin=self._times(ticks[alloc.start[which]]),
            end=self._times(ticks[alloc.end[which]]),
            name=np.full(len(which), self._texts.add("freed")),
            id=self._unique(which),
            source=made[which],
            target=freed[which],
        )

    def _backwards(self, slices: Rows, most: int) -> Rows:
        """From the forward ops that keep most to the nodes that they made."""
        trace, found = self._trace, self._slices
        tree, alloc = scopes.tree(trace), allocations(trace)
        source = found.row_of(tree.forward[found.numbers])
        target = np.flatnonzero(source >= 0)
        kept = (alloc.category == CATEGORY["activations"]) & (alloc.start >= 0)
        made = found.row_of(alloc.scope)
        kept &= made >= 0
        keeps = views.sums(made[kept], alloc.requested_bytes[kept], len(found.numbers))
        target = _largest(keeps[source], target, most)
        return Rows(
            _FLOW,
            "backward",
            self._program,
            begin=slices.begin[source[target]],
            end=slices.begin[target],
            name=np.full(len(target), self._texts.add("backward")),
            id=self._unique(found.numbers[target]),
            source=source[target],
            target=target,
        )


# ---------------------------------------------------------------- what the document is made of


@dataclass(frozen=True)
class _ScopeSlices:
    """The scopes that are shown: of ops only the outermost, and none of those without extent."""

    numbers: NDArray[np.intp]
    begin: U64  # ticks
    end: U64
    thread: NDArray[Any]
    left_out: int
    folded: I64  # how many that have no slice of their own are in each
    _row: NDArray[np.intp]  # per scope, the row of the innermost shown one around it; or -1

    @classmethod
    def of(cls, trace: Trace, most: int | None) -> "_ScopeSlices":
        """All of them, or the longest, and modules, passes and steps before ops."""
        tree = scopes.tree(trace)
        is_op = tree.kind == scopes.OP
        shown = (~is_op | ~is_op[tree.parent]) & (tree.kind != scopes.STEP)
        shown[0] = False
        begin, end = tree.begin, _ends(trace)
        wanted, numbers = shown.copy(), np.flatnonzero(shown)
        left_out = 0
        if most is not None and len(numbers) > most:
            left_out = len(numbers) - most
            length = np.where(end > begin, end - begin, 0)[numbers]
            order = np.lexsort((length, ~is_op[numbers]))
            shown[numbers[order[:left_out]]] = False
            numbers = np.flatnonzero(shown)
        nearest = scopes.nearest(tree.parent, shown)
        row = np.where(shown[nearest], np.cumsum(shown)[nearest] - 1, -1)
        thread = tree.thread[numbers]
        folded = np.zeros(len(numbers), np.int64)
        if left_out:
            hidden = row[wanted & ~shown]
            folded = np.bincount(hidden[hidden >= 0], minlength=len(numbers))
        return cls(numbers, begin[numbers], end[numbers], thread, left_out, folded, row)

    def row_of(self, scope: NDArray[Any]) -> NDArray[np.intp]:
        """The innermost slice at or around each scope; -1 for none."""
        rows: NDArray[np.intp] = self._row[scope]
        return rows


def _ends(trace: Trace) -> U64:
    """When each scope was left; one that was not seen to end did so with the one around it."""
    tree = scopes.tree(trace)
    ended = tree.end != scopes.NEVER
    end = tree.end.copy()
    end[0] = _last_tick(trace)[0]
    if not ended[1:].all():
        end = end[scopes.nearest(tree.parent, ended)]
    return end


def _last_tick(trace: Trace) -> U64:
    """When the trace ended, as an array of one."""
    columns = (trace.events.ticks, trace.scopes.ticks, trace.scope_ends.ticks)
    last = [column.max() for column in columns if len(column)]
    return np.array([max(last, default=0)], np.uint64)


def _made_in(trace: Trace, found: _ScopeSlices) -> tuple[NDArray[Any], I64]:
    """Of each slice: the line that called it, if it allocated, and the bytes that it allocated."""
    alloc = allocations(trace)
    row = found.row_of(alloc.scope)
    inside = (row >= 0) & (alloc.start >= 0)
    count = len(found.numbers)
    line = np.zeros(count, np.int64)
    is_op = scopes.tree(trace).kind[found.numbers] == scopes.OP
    line[row[inside]] = alloc.line[inside]
    made = views.sums(row[inside], alloc.requested_bytes[inside], count)
    return np.where(is_op, line, 0), made


def _own_of_modules(trace: Trace, found: _ScopeSlices) -> I64:
    """Of each module's call the bytes that it allocated and no module inside of it did."""
    alloc, tree = allocations(trace), scopes.tree(trace)
    of_call = np.zeros(len(tree.kind), np.int64)
    made = alloc.start >= 0
    np.add.at(of_call, tree.module[alloc.scope[made]], alloc.requested_bytes[made].astype(np.int64))
    is_module = tree.kind[found.numbers] == scopes.MODULE
    own: I64 = np.where(is_module, of_call[found.numbers], _NO_VALUE)
    return own


def _with_what_is_inside(own: I64, parent: NDArray[np.intp]) -> I64:
    """Each slice's sum with those of all slices inside it; parents come before their children."""
    depth = np.zeros(len(own), np.int64)
    above = parent.copy()
    while (deeper := above >= 0).any():
        depth += deeper
        above = np.where(deeper, parent[above], -1)
    total = own.copy()
    by_depth = np.argsort(depth, kind="stable")
    cuts = np.searchsorted(depth[by_depth], np.arange(1, int(depth.max(initial=0)) + 2))
    for begin, end in reversed(list(pairwise(cuts.tolist()))):
        rows = by_depth[begin:end]
        np.add.at(total, parent[rows], total[rows])
    return total


def lifetime_track(process: int, category: NDArray[Any]) -> I64:
    """The first of a category's tracks: lives that overlap have one each, numbered from it on."""
    tracks: I64 = (np.int64(process) << 32) + (category.astype(np.int64) + 1 << 24)
    return tracks


def alike(columns: Sequence[NDArray[Any]]) -> tuple[I64, NDArray[np.intp]]:
    """Rows that are equal in all columns have one number; and where each number comes first.

    Columns have no negative numbers.
    """
    number, most = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        values = int(column.max(initial=0)) + 1
        if most * values >= _MOST_NUMBERS:
            found, number = np.unique(number, return_inverse=True)
            most = len(found)
        if most * values >= _MOST_NUMBERS:
            found, column = np.unique(column, return_inverse=True)
            values = len(found)
        number *= values
        number += column.astype(np.int64, copy=False)
        most *= values
    _, firsts, number = np.unique(number, return_index=True, return_inverse=True)
    return number, firsts


def _step_bounds(trace: Trace) -> U64:
    """The first event, and the end of each step; the last one may have been cut short."""
    line = phases.timeline(trace)
    bounds = np.concatenate([trace.events.ticks[:1], line.step_ends])
    training = (line.phase == phases.FORWARD) | (line.phase == phases.BACKWARD_PHASE)
    if len(bounds) and (line.ticks[training] > bounds[-1]).any():
        bounds = np.append(bounds, _last_tick(trace))
    return bounds if len(trace.events.ticks) else bounds[:0]


def _levels(trace: Trace, which: Mask, size: I64) -> tuple[U64, I64]:
    """What these allocations sum to: at the first event, and after each change."""
    changes, alloc = matching.changes(trace), allocations(trace)
    own = which[changes.allocation]
    amounts = np.sign(changes.bytes[own]) * size[changes.allocation[own]]
    level = np.cumsum(np.append(size[which & (alloc.start < 0)].sum(), amounts))
    ticks = trace.events.ticks
    return np.concatenate([ticks[:1], ticks[changes.position[own]]]), level


def _segments(trace: Trace, device: str) -> tuple[U64, I64]:
    """When the device's reserved bytes change, and what they are from then on."""
    events = trace.events
    taken = _is_action(trace, "segment_alloc", "segment_map", "seed_segment")
    given = _is_action(trace, "segment_free", "segment_unmap")
    here = devices.on(trace, device, trace.events.place)
    position = np.flatnonzero((taken | given) & here)
    snapshot = np.flatnonzero(_is_action(trace, "snapshot") & here)
    if len(snapshot):
        position = position[position > snapshot[0]]
    size = events.bytes[position].astype(np.int64) * np.where(given[position], -1, 1)
    # Seeds are written while the program goes on, but tell of what was there at the start.
    seeds = events.action[position] == ACTION["seed_segment"]
    level = np.cumsum(np.where(seeds, 0, size)) + size[seeds].sum()
    return events.ticks[position], level


def _is_action(trace: Trace, *names: str) -> Mask:
    found: Mask = np.isin(trace.events.action, [ACTION[name] for name in names])
    return found


def _largest(size: NDArray[Any], which: NDArray[np.intp], most: int) -> NDArray[np.intp]:
    """Of these rows the ones with the largest sizes, in their order."""
    if len(which) <= most:
        return which
    return np.sort(which[np.argsort(size[which], kind="stable")[len(which) - most :]])


def _thread_name(trace: Trace, thread: int, main: int) -> str:
    threads = trace.threads
    if thread >= len(threads.name):
        return f"thread {thread}"
    text = int(threads.name[thread])
    name = (trace.strings[text] if text < len(trace.strings) else "") or "thread"
    return f"{'main thread' if thread == main else name} {threads.native_id[thread]}"


def _metadata_event(what: str, process: int, thread: int, **arguments: Any) -> str:
    row = {"ph": "M", "name": what, "pid": process, "tid": thread, "args": arguments}
    return _json(row)


def _json(document: Any) -> str:
    """UTF-8 as it is: some viewers do not read escapes beyond ASCII."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()
