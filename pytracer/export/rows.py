"""The rows of a timeline, and the sink that its tracks write them through."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer import errors
from pytracer.analysis.facts import scopes, usage
from pytracer.data import meta, sanitized
from pytracer.data.recorded import Trace
from pytracer.data.schema import I64, U64

# torch.profiler counts time from the start of a quarter of a year with this many seconds, because
# microseconds since 1970 with a fraction do not fit a double. The same grid puts both on one clock.
GRID_NS = 7_889_238 * 1_000_000_000

# Synthetic processes and threads. Their numbers are above every pid of Linux (at most 2**22), so they
# never equal one of torch's in a joined file. They ascend in the order of the display. Each device has
# a process for its counters; the first also has the program's tracks, so that both stand together.
# Each device has another process for its allocations, which fill a screen.
FIRST_PROCESS = 10_000_000
PROCESSES_PER_RANK = 1000
ALLOCATIONS = 500  # after at most 256 devices
RANKS = FIRST_PROCESS - 1  # the group of all ranks
FIRST_COUNTER = 30_000_000  # tracks of Perfetto's own format
STEPS_THREAD, PHASES_THREAD, MARKERS_THREAD, COLLECTIVES_THREAD, FIRST_THREAD = 1, 2, 3, 4, 10

# Kinds of rows and of arguments: the enums of csrc/core/chrome_trace.h.
SLICE, LIFETIME, COUNTER, INSTANT, FLOW = range(5)
INTEGER, HEX, TEXT, FLAG, THOUSANDTHS = range(5)
NO_VALUE = np.iinfo(np.int64).min

# Arguments of a module's slice: fields of a ModuleCost, their kind, and their factor.
COSTS = {
    "forward_flops": (INTEGER, 1),
    "backward_flops": (INTEGER, 1),
    "forward_bytes": (INTEGER, 1),
    "backward_bytes": (INTEGER, 1),
    "forward_ms": (THOUSANDTHS, 1000),
    "backward_ms": (THOUSANDTHS, 1000),
    "flop_ratio": (THOUSANDTHS, 1000),
    "time_ratio": (THOUSANDTHS, 1000),
}

CHUNK = 4 << 20
GAP_NS = 2
# Rows beyond these limits are folded. A person sees no more, and a browser holds so many easily.
MOST_BARS = 100_000
MOST_SLICES = 200_000
MOST_SAMPLES = 50_000
COUNTER_BUCKETS = 5000
FOLDS = 2000  # slices of time, each with a bar for folded allocations
HEAVY = 1_000_000_000  # bytes of JSON from which Perfetto in a browser gets into trouble


@dataclass(frozen=True)
class Options:
    """The limits of an export."""

    max_events: int | None = None  # JSON events; the largest and longest are kept
    min_dt_ns: int = 0  # counters keep only the extremes of each such stretch of time
    arrows: int = 1000  # the most arrows from allocations to frees, and from forwards to backwards
    full: bool = False  # write all rows; the default folds those that are too small to see
    base_ns: int | None = None  # of the file's clock; by default that of the trace's own


class Texts:
    """Texts by number. The trace's own strings come first and keep their numbers."""

    def __init__(self, trace: Trace) -> None:
        self.all = list(trace.strings) or [""]
        self._numbers: dict[str, int] = {"": 0}

    def add(self, text: str) -> int:
        """The text's number in the table."""
        if text not in self._numbers:
            self._numbers[text] = len(self.all)
            self.all.append(text)
        return self._numbers[text]

    def each(self, rows: NDArray[Any], text: Callable[[int], str]) -> I64:
        """The number of each row's text. `text` is called once for each distinct row."""
        number = np.zeros(int(rows.max()) + 1 if len(rows) else 1, np.int64)
        used = np.zeros(len(number), np.bool_)
        used[rows] = True
        for row in np.flatnonzero(used).tolist():
            number[row] = self.add(text(row))
        result: I64 = number[rows]
        return result

    def encoded(self) -> list[bytes]:
        """All texts, as bytes."""
        return [text.encode("utf-8", "surrogatepass") for text in self.all]


_NONE = np.zeros(0, np.int64)


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
        """The columns in the form of the native side."""
        named = dict(vars(self))
        named["from"], named["to"] = named.pop("source"), named.pop("target")
        named["arguments"] = [
            (name, kind, values.astype(np.int64, copy=False))
            for name, kind, values in self.arguments
        ]
        return named


class Sink:
    """The interface of all tracks: one clock, one table of texts, and the limits.

    - A track is a function in tracks.py: it takes the sink and returns its rows.
    - `times` and `texts` turn the trace's ticks and strings into those of the file.
    - `share` limits the rows of a track, and `note` counts the rows that it leaves out.
    """

    slices: "ScopeSlices"  # the document sets it before the tracks that need it

    def __init__(self, trace: Trace, options: Options, *, native: bool = False) -> None:
        """`native`: for Perfetto's own format, where bars and tracks may differ in name."""
        if options.max_events is not None and options.max_events < 100:
            raise errors.UsageError("max_events must be 100 or more")
        if options.min_dt_ns < 0 or options.arrows < 0:
            raise errors.UsageError("min_dt_us and arrows cannot be negative")
        self.events = 0
        self.left_out: dict[str, int] = {}
        self.folded: dict[str, int] = {}
        self.native = native
        self.folds = not options.full and options.max_events is None
        self.trace = trace
        self.options = options
        self.texts = Texts(trace)
        self.base_ns = base_of(trace) if options.base_ns is None else options.base_ns
        self.rank = meta.of(trace).rank
        self.program = FIRST_PROCESS + PROCESSES_PER_RANK * self.rank
        self.devices = usage.devices(trace) or (usage.main_device(trace),)
        self.end_ns = int(self.times(usage.last_tick(trace)).max())
        self.room = options.max_events

    def share(self, part: int) -> int | None:
        """A part of the remaining events; None without a limit."""
        return None if self.room is None else max(self.room // part, 1)

    def note(self, kind: str, count: int) -> None:
        """Counts rows that have no bar of their own."""
        counts = self.folded if self.folds else self.left_out
        if count:
            counts[kind] = counts.get(kind, 0) + count

    def times(self, ticks: U64) -> I64:
        """Nanoseconds since torch's base. Earlier times, in a damaged file, become 0."""
        times = self.trace.time_ns(ticks)
        times += self.trace.began_unix_ns - self.base_ns
        return np.maximum(times, 0)

    def thread(self, number: int) -> int:
        """A number unique among all processes, because some readers know threads by number alone."""
        return FIRST_PROCESS * 2 + 100_000 * self.rank % 2_000_000_000 + number

    def known(self, strings: NDArray[Any]) -> I64:
        """Rows of the trace's string table. Missing rows become 0."""
        return sanitized.within(strings, len(self.trace.strings)).astype(np.int64)

    def unique(self, numbers: NDArray[Any]) -> I64:
        """Numbers unique among all ranks, because joined files must not share the ids of arrows."""
        ids: I64 = numbers.astype(np.int64) + (self.rank << 32)
        return ids


def base_of(trace: Trace) -> int:
    """The begin of the file's clock, as torch.profiler would choose it."""
    return trace.began_unix_ns // GRID_NS * GRID_NS


@dataclass(frozen=True)
class ScopeSlices:
    """The shown scopes: of ops only the outermost, and no steps, which have a track of their own."""

    numbers: NDArray[np.intp]
    begin: U64  # ticks
    end: U64
    thread: NDArray[Any]
    left_out: int
    folded: I64  # the number of folded scopes in each
    _row: NDArray[np.intp]  # per scope, the row of the innermost slice around it, or -1

    @classmethod
    def of(cls, trace: Trace, most: int | None) -> "ScopeSlices":
        """All scopes, or the longest. Modules, passes and steps come before ops."""
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
        """The innermost slice at or around each scope, or -1."""
        rows: NDArray[np.intp] = self._row[scope]
        return rows


def _ends(trace: Trace) -> U64:
    """The end of each scope. A scope without a recorded end ends with the scope around it."""
    tree = scopes.tree(trace)
    ended = tree.end != scopes.NEVER
    end = tree.end.copy()
    end[0] = usage.last_tick(trace)[0]
    if not ended[1:].all():
        end = end[scopes.nearest(tree.parent, ended)]
    return end


def largest(size: NDArray[Any], which: NDArray[np.intp], most: int) -> NDArray[np.intp]:
    """The rows with the largest sizes, in their order."""
    if len(which) <= most:
        return which
    return np.sort(which[np.argsort(size[which], kind="stable")[len(which) - most :]])


def or_none(values: NDArray[Any], missing: NDArray[np.bool_]) -> I64:
    """The values, with NO_VALUE in place of missing ones."""
    return np.where(missing, NO_VALUE, values.astype(np.int64))
