"""A trace as Chrome trace JSON, for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

This module decides the contents and their places; csrc/core/chrome_trace.h writes them.
docs/chrome-trace.md describes the file.
"""

import json
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from pytracer import errors
from pytracer.analysis.facts import lines
from pytracer.basics.files import refuse_to_overwrite, write_whole
from pytracer.basics.units import size_text
from pytracer.data import meta
from pytracer.data._native import core
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORY, CATEGORY_ORDER
from pytracer.export import tracks as tracks_of
from pytracer.export.rows import (
    ALLOCATIONS,
    CHUNK,
    COLLECTIVES_THREAD,
    COUNTER,
    FIRST_COUNTER,
    FIRST_THREAD,
    HEAVY,
    MARKERS_THREAD,
    MOST_SLICES,
    PHASES_THREAD,
    PROCESSES_PER_RANK,
    RANKS,
    STEPS_THREAD,
    Options,
    Rows,
    ScopeSlices,
    Sink,
)


@dataclass(frozen=True)
class Exported:
    """A written file and its counts."""

    path: Path
    events: int
    json_bytes: int
    file_bytes: int
    left_out: dict[str, int]  # rows that max_events dropped, by kind
    # Rows without a bar of their own, by kind. Their counts and bytes are kept.
    folded: dict[str, int]
    warnings: tuple[str, ...]


def write(
    trace: Trace, path: str | Path, options: Options | None = None, *, overwrite: bool = False
) -> Exported:
    """Writes `.json` or `.json.gz`. A failed export leaves no file.

    Raises:
        errors.UsageError: the suffix or a limit is wrong.
        errors.CannotWrite: the file exists already, or cannot be written.
    """
    return write_all([trace], path, options, overwrite=overwrite)


def write_all(
    traces: Iterable[Trace],
    path: str | Path,
    options: Options | None = None,
    *,
    overwrite: bool = False,
) -> Exported:
    """Like `write`, for the ranks of a job: one file, one clock, a process for each rank's device.

    It takes one trace at a time, so its memory is that of the largest.
    """
    path = Path(path)
    if not path.name.endswith((".json", ".json.gz")):
        raise errors.UsageError(f"{path}: a Chrome trace is a .json or a .json.gz file")
    refuse_to_overwrite(path, overwrite=overwrite)
    file_of_all = _File(traces, options or Options())

    def fill(file: BinaryIO) -> None:
        chunks = file_of_all.chunks()
        for piece in _compressed(chunks) if path.suffix == ".gz" else chunks:
            file.write(piece)

    write_whole(path, fill, overwrite=overwrite)
    warnings = []
    if file_of_all.bytes > HEAVY:
        warnings.append(
            f"{size_text(file_of_all.bytes)} of JSON: a browser may fail to open it; max_events= "
            "keeps only the largest events"
        )
    return Exported(
        path=path,
        events=file_of_all.events,
        json_bytes=file_of_all.bytes,
        file_bytes=path.stat().st_size,
        left_out=dict(file_of_all.left_out),
        folded=dict(file_of_all.folded),
        warnings=tuple(warnings),
    )


class _File:
    """The documents of one or more traces behind each other, and their counts."""

    def __init__(self, traces: Iterable[Trace], options: Options) -> None:
        self._traces = traces
        self._options = options
        self.events = self.bytes = 0
        self.left_out: Counter[str] = Counter()
        self.folded: Counter[str] = Counter()

    def chunks(self) -> Iterator[bytes]:
        """The file's bytes, a few megabytes at a time."""
        for piece in self._pieces():
            self.bytes += len(piece)
            yield piece

    def _pieces(self) -> Iterator[bytes]:
        options = self._options
        joined = _Joined()
        for number, trace in enumerate(self._traces):
            document = Document(trace, options)
            options = replace(options, base_ns=document.base_ns)
            yield b",\n" if number else document.head()
            yield from document.body()
            self.events += document.events
            self.left_out.update(document.left_out)
            self.folded.update(document.folded)
            joined.add(document.collectives)
        arrows = joined.arrows()
        self.events += len(arrows)
        yield "".join(f",\n{arrow}" for arrow in arrows).encode() + b"\n]}\n"


class _Joined:
    """The collectives of several ranks: arrows lead from the first rank that began one to the last."""

    def __init__(self) -> None:
        self._points: dict[int, list[tuple[int, int, int]]] = {}

    def add(self, rows: Rows) -> None:
        """Takes a rank's collectives."""
        columns = (rows.id, rows.begin, rows.thread)
        for number, time, thread in zip(*(column.tolist() for column in columns), strict=True):
            self._points.setdefault(number, []).append((time, rows.process, thread))

    def arrows(self) -> list[str]:
        """The events of arrows between ranks."""
        texts = []
        for number, points in self._points.items():
            last = len(points) - 1
            for place, (time, process, thread) in enumerate(sorted(points) if last else ()):
                row = {
                    "ph": "s" if place == 0 else "f" if place == last else "t",
                    "cat": "collective",
                    "name": "collective",
                    "id": number,
                    "pid": process,
                    "tid": thread,
                    "ts": time / 1000,
                    "bp": "e",
                }
                texts.append(_json(row))
        return texts


def _compressed(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Compresses the chunks into one gzip stream, on two threads."""
    yield b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"  # deflate, without a time: equal traces give equal files
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


class Track(NamedTuple):
    """A track of Perfetto's own format: PerfettoTrack of csrc/core/perfetto_trace.h."""

    id: int
    parent: int
    name: str
    order: int  # among the tracks of its parent
    is_counter: bool = False
    holds_lifetimes: bool = False
    scale: str = ""  # counters with the same one are as high for the same bytes


_OWN_THREADS = (
    (STEPS_THREAD, "steps"),
    (PHASES_THREAD, "phases"),
    (MARKERS_THREAD, "markers (peak, OOM)"),
)


class Document(Sink):
    """The contents of the file as rows."""

    def __init__(self, trace: Trace, options: Options, *, native: bool = False) -> None:
        """Makes the rows. `native`: for Perfetto's own format, where bars and tracks differ in name."""
        super().__init__(trace, options, native=native)
        story = [tracks_of.step_slices(self), tracks_of.phase_slices(self), tracks_of.marks(self)]
        self.collectives = tracks_of.collectives(self)
        if len(self.collectives.begin):
            story.append(self.collectives)
        if self.room is not None:
            names = 2 * (len(trace.threads.name) + 3 + 2 * len(self.devices))
            self.room = max(self.room - names - sum(len(rows.begin) for rows in story), 1)
        self.slices = ScopeSlices.of(trace, MOST_SLICES if self.folds else self.share(4))
        self.note("slices", self.slices.left_out)
        tables = [tracks_of.scope_slices(self), *story]
        for i, device in enumerate(self.devices):
            tables += [*tracks_of.counters(self, i, device), tracks_of.reserved(self, i, device)]
            tables.append(tracks_of.lifetimes_of(self, i, device))
        tables += tracks_of.arrows(self, tables[0])
        self._tables = [rows for n, rows in enumerate(tables) if n == 0 or len(rows.begin)]

    def body(self) -> Iterator[bytes]:
        """The events, a few megabytes at a time, with commas between them."""
        native = core.ChromeTrace(self.texts.encoded(), [rows.columns() for rows in self._tables])
        while chunk := native.next(CHUNK):
            yield chunk
        # Each event so far is followed by a comma.
        metadata = list(self._metadata())
        yield ",\n".join(metadata).encode()
        self.events = native.events() + len(metadata)

    def tracks(self) -> tuple[list[Track], list[tuple[dict[str, Any], list[int]]]]:
        """For Perfetto's own format: the tracks in their order, and the tables with their counters."""
        alone = meta.of(self.trace).world_size == 1
        # Perfetto opens a group if it is the only one. All ranks share a group, so that this also
        # holds for their concatenated files.
        group, suffix = (self.program, "") if alone else (RANKS, f" (rank {self.rank})")
        name = f"memory of {self.devices[0]}" if alone else "memory by rank"
        first = 0 if alone else PROCESSES_PER_RANK * self.rank  # places in the order
        tracks = [Track(group, 0, name, 0)]
        groups = {self.program: group}
        for number, device in enumerate(self.devices):
            process = self.program + number
            if number:
                groups[process] = process
                name = f"memory of {device}{suffix}"
                tracks.append(Track(process, group, name, first + 100 + number))
            bars = Track(
                process + ALLOCATIONS,
                groups[process],
                f"allocations on {device}{suffix}",
                first + 90,
            )
            tracks += [bars, *self._category_tracks(process, bars.id)]
        for order, (thread, name) in enumerate(self._thread_tracks(), first + 50):
            tracks.append(Track(self.thread(thread), group, f"{name}{suffix}", order))
        tables = []
        for table in self._tables:
            counters = self._counter_tracks(table, groups, len(tracks), first, suffix)
            tracks += counters
            tables.append((table.columns(), [counter.id for counter in counters]))
        return tracks, tables

    @staticmethod
    def _category_tracks(process: int, parent: int) -> Iterator[Track]:
        """The tracks of a device's bars, one for each category."""
        for order, category in enumerate(CATEGORY_ORDER):
            for track in tracks_of.lifetime_track(process, np.array([CATEGORY[category]])):
                yield Track(int(track), parent, category, order, holds_lifetimes=True)

    def _counter_tracks(
        self, table: Rows, groups: Mapping[int, int], others: int, first: int, suffix: str
    ) -> list[Track]:
        """The tracks of a table of counters. A sum stands below the counters of the categories."""
        result: list[Track] = []
        for key, _, _ in table.arguments if table.kind == COUNTER else ():
            name = self.texts.all[int(table.name[0])]
            name = key.lstrip("0123456789 ") if name == "mem" else name
            order = first + 1 + len(result) if len(table.arguments) > 1 else first + 20
            number = FIRST_COUNTER + others + len(result) + (self.rank << 32)
            parent = groups[table.process]
            track = Track(number, parent, f"{name}{suffix}", order, is_counter=True, scale="bytes")
            result.append(track)
        return result

    def _own_threads(self) -> list[tuple[int, str]]:
        """The threads that are none of the program's."""
        more = [(COLLECTIVES_THREAD, "collectives")] if len(self.collectives.begin) else []
        return [*_OWN_THREADS, *more]

    def _thread_tracks(self) -> list[tuple[int, str]]:
        """The threads of the program's group with their names, the main thread first."""
        main = lines.main_thread(self.trace)
        numbers = np.unique(self.slices.thread).tolist()
        return [
            *self._own_threads(),
            *(
                (
                    FIRST_THREAD + number,
                    _thread_name(self.trace, number, main).rstrip("0123456789 "),
                )
                for number in sorted(numbers, key=lambda number: number != main)
            ),
        ]

    def head(self) -> bytes:
        """The JSON object up to its events, with the same keys as torch.profiler's."""
        document = self.trace.meta
        head = {
            "schemaVersion": 1,
            "deviceProperties": [],
            "distributedInfo": {
                "rank": self.rank,
                "world_size": meta.of(self.trace).world_size,
                "backend": "",
            },
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self.base_ns,
            "pytracer": {
                "began_unix_ns": self.trace.began_unix_ns,
                "devices": list(self.devices),
                "left_out": self.left_out,
                "folded": self.folded,
                "losses": dict(self.trace.losses),
            },
            "metadata": {
                f"pytracer-{key}": value
                for key in ("pytracer", "torch", "python", "host", "command", "pid", "rank")
                if isinstance(value := document.get(key), str | int)
            },
        }
        return (_json(head)[:-1] + ',"traceEvents":[\n').encode()

    def _metadata(self) -> Iterator[str]:
        """Events with the names and the order of processes and threads."""
        suffix = f" (rank {self.rank})" if meta.of(self.trace).world_size != 1 else ""
        processes = []
        for process, device in enumerate(self.devices, self.program):
            program = "program and " if process == self.program else ""
            processes.append((process, f"{program}memory of {device}"))
            processes.append((process + ALLOCATIONS, f"allocations on {device}"))
        for process, name in processes:
            yield _metadata_event("process_name", process, process, name=f"{name}{suffix}")
            yield _metadata_event("process_sort_index", process, process, sort_index=process)
        main = lines.main_thread(self.trace)
        threads = [
            *self._own_threads(),
            *(
                (FIRST_THREAD + thread, _thread_name(self.trace, thread, main))
                for thread in np.unique(self.slices.thread).tolist()
            ),
        ]
        for thread, name in threads:
            number = self.thread(thread)
            yield _metadata_event("thread_name", self.program, number, name=name)
            yield _metadata_event("thread_sort_index", self.program, number, sort_index=number)


def _thread_name(trace: Trace, thread: int, main: int) -> str:
    threads = trace.threads
    if thread >= len(threads.name):
        return f"thread {thread}"
    text = int(threads.name[thread])
    name = (trace.strings[text] if text < len(trace.strings) else "") or "thread"
    number = threads.native_id[thread] or ""  # a row for many threads has none
    return f"{'main thread' if thread == main else name} {number}".rstrip()


def _metadata_event(event: str, process: int, thread: int, **arguments: Any) -> str:
    row = {"ph": "M", "name": event, "pid": process, "tid": thread, "args": arguments}
    return _json(row)


def _json(document: Any) -> str:
    """JSON in UTF-8, because some viewers cannot read escapes beyond ASCII."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()
