"""A trace as Chrome trace JSON, for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

This decides what is shown and where; csrc/core/chrome_trace.h writes it. docs/chrome-trace.md says
what a reader finds in the file.
"""

import json
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
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
_HEAVY = 1_000_000_000  # bytes of JSON from which Perfetto in a browser gets into trouble


@dataclass(frozen=True)
class Options:
    """What to write, and how much of it."""

    max_events: int | None = None  # JSON events; the largest and longest are kept
    min_dt_ns: int = 0  # counters: no more than the extremes of each such time
    arrows: int = 1000  # from how many allocations to their frees, and forwards to backwards


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    events: int
    json_bytes: int
    file_bytes: int
    left_out: dict[str, int]  # what max_events left out, by kind
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
    document = _Document(trace, options or Options())

    def fill(file: BinaryIO) -> None:
        chunks = document.chunks()
        for piece in _compressed(chunks) if path.suffix == ".gz" else chunks:
            file.write(piece)

    write_whole(path, fill, overwrite=overwrite)
    warnings = []
    if document.bytes > _HEAVY:
        warnings.append(
            f"{size_text(document.bytes)} of JSON: a browser may not hold that; "
            "max_events= keeps the largest of it"
        )
    return Exported(
        path=path,
        events=document.events,
        json_bytes=document.bytes,
        file_bytes=path.stat().st_size,
        left_out=document.left_out,
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


@dataclass
class _Rows:
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


class _Document:
    """Everything that is in the file, as rows, before it is text."""

    def __init__(self, trace: Trace, options: Options) -> None:
        if options.max_events is not None and options.max_events < 100:
            raise errors.UsageError("max_events must be 100 or more")
        if options.min_dt_ns < 0 or options.arrows < 0:
            raise errors.UsageError("min_dt_us and arrows cannot be negative")
        self.events = self.bytes = 0
        self.left_out: dict[str, int] = {}
        self._trace = trace
        self._options = options
        self._texts = _Texts(trace)
        self._base_ns = trace.began_unix_ns // _GRID_NS * _GRID_NS
        rank = trace.meta.get("rank")
        self._rank = rank if isinstance(rank, int) and 0 <= rank < 1_000_000 else 0
        self._program = _FIRST_PROCESS + _PROCESSES_PER_RANK * self._rank
        self._devices = views.devices(trace) or (views.main_device(trace),)
        self._end_ns = int(self._times(_last_tick(trace)).max())
        self._room = options.max_events
        story = [self._steps(), self._phases(), self._markers()]
        if self._room is not None:
            names = 2 * (len(trace.threads.name) + 3 + 2 * len(self._devices))
            self._room = max(self._room - names - sum(len(rows.begin) for rows in story), 1)
        self._slices = _ScopeSlices.of(trace, self._share(4))
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

    def _count(self, chunk: bytes) -> bytes:
        self.bytes += len(chunk)
        return chunk

    def _share(self, part: int) -> int | None:
        """A part of the events that are left, if there is a limit."""
        return None if self._room is None else max(self._room // part, 1)

    def _note(self, what: str, count: int) -> None:
        if count:
            self.left_out[what] = self.left_out.get(what, 0) + count

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
                "rank": self._rank,
                "world_size": meta.get("world_size", 1),
                "backend": "",
            },
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self._base_ns,
            "pytracer": {
                "began_unix_ns": self._trace.began_unix_ns,
                "devices": list(self._devices),
                "left_out": self.left_out,
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
        suffix = f" (rank {self._rank})" if self._trace.meta.get("world_size", 1) != 1 else ""
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
        return _FIRST_PROCESS * 2 + 100_000 * self._rank % 2_000_000_000 + number

    # ------------------------------------------------------------ what the program did

    def _scopes(self) -> _Rows:
        """Modules, autograd nodes, outermost ops, ...: a track for each thread."""
        trace, found, texts = self._trace, self._slices, self._texts
        tree = scopes.tree(trace)
        begin = self._times(found.begin)
        thread = found.thread.astype(np.int64) + self._thread(_FIRST_THREAD)
        kinds = np.array([texts.add(kind) for kind in SCOPE_KINDS])
        kind = np.minimum(tree.kind[found.numbers], len(SCOPE_KINDS) - 1)
        line, made = _made_in(trace, found)
        forward = tree.name[tree.forward[found.numbers]]
        return _Rows(
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

    def _steps(self) -> _Rows:
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

    def _phases(self) -> _Rows:
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
    ) -> _Rows:
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
        return _Rows(
            _SLICE,
            "pytracer",
            self._program,
            begin=begin,
            end=core.nest_slices(thread, begin, end),
            name=name,
            thread=thread,
            arguments=[(key, kind, np.array(values, np.int64))],
        )

    def _markers(self) -> _Rows:
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
        return _Rows(
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

    def _counters(self, number: int, device: str) -> list[_Rows]:
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

    def _counter(self, device: int, name: str, ticks: U64, values: dict[str, I64] | I64) -> _Rows:
        """Samples of one or more values; of many only as many as there may be."""
        columns = values if isinstance(values, dict) else {"bytes": values}
        count = min(len(ticks), *(len(column) for column in columns.values()))
        times = self._times(ticks[:count])
        columns = {key: column[:count] for key, column in columns.items()}
        kept = core.thin_samples(
            times, list(columns.values()), self._bucket_ns(times, len(columns))
        )
        self._note("counter samples", count - len(kept))
        return _Rows(
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
        if share is None or len(times) <= share:
            return least
        buckets = max(share // (columns + 1), 1)
        return max(least, int(times[-1] - times[0]) // buckets + 1)

    def _reserved(self, number: int, device: str) -> _Rows:
        """What the allocator holds from the driver, where it has segments."""
        return self._counter(number, "reserved", *_segments(self._trace, device))

    # ------------------------------------------------------------ allocations

    def _lifetimes(self, number: int, device: str) -> _Rows:
        """A bar for each allocation, on a track of its category."""
        trace, alloc, texts = self._trace, allocations(self._trace), self._texts
        which = np.flatnonzero(views.on_device(trace, device))
        share = self._share(6 * len(self._devices))
        if share is not None and len(which) > share:
            self._note("allocations", len(which) - share)
            which = np.sort(_largest(alloc.requested_bytes, which, share))
        begin, end = self._lives(which)
        began = views.first_step(trace)
        label, labels = alloc.label[which], sound.labels(trace)
        cast = alloc.role[which] == ROLE["autocast_copy"]  # the label's type is the weight's

        def lines(rows: NDArray[Any]) -> I64:
            return texts.each(rows[which], lambda row: owners.line_text(trace, row))

        return _Rows(
            _LIFETIME,
            "alloc",
            self._program + _ALLOCATIONS + number,
            begin=begin,
            end=end,
            name=texts.each(alloc.category[which], CATEGORIES.__getitem__),
            id=which,
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

    def _arrows(self, slices: _Rows) -> list[_Rows]:
        most = min(self._options.arrows, self._share(100) or self._options.arrows)
        return [self._frees(most), self._backwards(slices, most)]

    def _unique(self, numbers: NDArray[Any]) -> I64:
        """Among all ranks: arrows of two files that are put together must not be joined."""
        ids: I64 = numbers.astype(np.int64) + (self._rank << 32)
        return ids

    def _frees(self, most: int) -> _Rows:
        """From where the largest were made to where they were freed, if that is another slice."""
        trace, alloc = self._trace, allocations(self._trace)
        moments = phases.moments(trace)
        made = self._slices.row_of(moments.made_scope)
        freed = self._slices.row_of(moments.freed_scope)
        which = np.flatnonzero((made >= 0) & (freed >= 0) & (made != freed))
        which = _largest(alloc.requested_bytes, which, most)
        ticks = trace.events.ticks
        return _Rows(
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

    def _backwards(self, slices: _Rows, most: int) -> _Rows:
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
        return _Rows(
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
    _row: NDArray[np.intp]  # per scope, the row of the innermost shown one around it; or -1

    @classmethod
    def of(cls, trace: Trace, most: int | None) -> "_ScopeSlices":
        """All of them, or the longest, and modules, passes and steps before ops."""
        tree = scopes.tree(trace)
        is_op = tree.kind == scopes.OP
        shown = (~is_op | ~is_op[tree.parent]) & (tree.kind != scopes.STEP)
        shown[0] = False
        begin, end = tree.begin, _ends(trace)
        numbers = np.flatnonzero(shown)
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
        return cls(numbers, begin[numbers], end[numbers], thread, left_out, row)

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
