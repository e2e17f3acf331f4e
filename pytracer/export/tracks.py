"""The tracks of a timeline: each is a function from the sink to its rows."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.allocator import blocks, segments
from pytracer.analysis.answers import training_steps
from pytracer.analysis.facts import (
    device_times,
    lifetimes,
    owners,
    phases,
    scopes,
    timelines,
    usage,
)
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.grouping import alike, role_text
from pytracer.basics.units import size_text
from pytracer.cost import per_module
from pytracer.data import meta, sanitized
from pytracer.data._native import core
from pytracer.data.recorded import Trace
from pytracer.data.schema import (
    ACTION,
    ALWAYS_SHOWN,
    CATEGORIES,
    CATEGORY,
    CATEGORY_ORDER,
    I64,
    PHASES,
    ROLE,
    SCOPE_KINDS,
    SCOPE_RECOMPUTE,
    U64,
    Mask,
)
from pytracer.export.rows import (
    ALLOCATIONS,
    COLLECTIVES_THREAD,
    COSTS,
    COUNTER,
    COUNTER_BUCKETS,
    FIRST_THREAD,
    FLAG,
    FLOW,
    FOLDS,
    GAP_NS,
    HEX,
    INSTANT,
    INTEGER,
    LIFETIME,
    MARKERS_THREAD,
    MOST_BARS,
    MOST_SAMPLES,
    NO_VALUE,
    PHASES_THREAD,
    SLICE,
    STEPS_THREAD,
    TEXT,
    THOUSANDTHS,
    Rows,
    ScopeSlices,
    Sink,
    largest,
    or_none,
)


def scope_slices(sink: Sink) -> Rows:
    """Modules, autograd nodes, outermost ops, ...: a track for each thread."""
    trace, slices, texts = sink.trace, sink.slices, sink.texts
    tree = scopes.tree(trace)
    begin = sink.times(slices.begin)
    thread = slices.thread.astype(np.int64) + sink.thread(FIRST_THREAD)
    kinds = np.array([texts.add(kind) for kind in SCOPE_KINDS])
    kind = np.minimum(tree.kind[slices.numbers], len(SCOPE_KINDS) - 1)
    line, made = _made_in(trace, slices)
    inside = _with_what_is_inside(made, slices.row_of(tree.parent[slices.numbers]))
    own = _own_of_modules(trace, slices)
    forward = tree.name[tree.forward[slices.numbers]]
    return Rows(
        SLICE,
        "scope",
        sink.program,
        begin=begin,
        end=core.nest_slices(thread, begin, sink.times(slices.end)),
        name=sink.known(tree.name[slices.numbers]),
        thread=thread,
        arguments=[
            ("kind", TEXT, kinds[kind]),
            ("line", TEXT, texts.each(line, lambda row: owners.line_text(trace, row))),
            ("bytes allocated", INTEGER, or_none(made, made == 0)),
            ("own bytes", INTEGER, own),
            ("inclusive bytes", INTEGER, or_none(inside, (inside == 0) & (own == NO_VALUE))),
            ("slices folded", INTEGER, or_none(slices.folded, slices.folded == 0)),
            ("forward", TEXT, sink.known(forward)),
            ("recompute", FLAG, tree.flags[slices.numbers] & SCOPE_RECOMPUTE),
            *_costs(sink),
        ],
    )


def _costs(sink: Sink) -> Iterator[tuple[str, int, I64]]:
    """The cost of one call of each module, with inner modules, from trace(cost=True)."""
    by_module = per_module.per_call(sink.trace)
    if not by_module:
        return
    tree = scopes.tree(sink.trace)
    name = sink.known(tree.name[sink.slices.numbers])
    is_module = tree.kind[sink.slices.numbers] == scopes.MODULE
    texts = {text: number for number, text in enumerate(sink.trace.strings)}
    for key, (kind, scale) in COSTS.items():
        by_name = np.full(max(len(sink.trace.strings), 1), NO_VALUE)
        for module, cost in by_module.items():
            value = getattr(cost, key)
            if value is not None and module in texts:
                by_name[texts[module]] = round(value * scale)
        yield key.replace("_", " "), kind, np.where(is_module, by_name[name], NO_VALUE)


def step_slices(sink: Sink) -> Rows:
    """A slice for each step, with its peak."""
    trace = sink.trace
    # An unfinished last step may end before it begins, by its events. It is empty then.
    bounds = np.maximum.accumulate(_step_bounds(trace))
    times = sink.times(bounds)
    asked = allocations(trace).requested_bytes.view(np.int64)
    ticks, level = _levels(trace, usage.on_device(trace, sink.devices[0]), asked)
    # Memory that is alive when a step begins counts for its peak.
    cuts = np.searchsorted(ticks[1:], bounds, side="right")
    peaks = [int(level[a : b + 1].max()) for a, b in pairwise(cuts.tolist())]
    began = training_steps.first_step(trace)
    texts = [sink.texts.add(f"step {began + i}") for i in range(len(peaks))]
    names = np.array(texts, np.int64)
    return _track(sink, STEPS_THREAD, times[:-1], times[1:], names, ("peak bytes", INTEGER, peaks))


def phase_slices(sink: Sink) -> Rows:
    """The main thread's phases, without `other`."""
    line = timelines.timeline(sink.trace)
    begin = sink.times(line.begins)
    end = np.append(begin[1:], sink.end_ns)
    names = np.array([sink.texts.add(name) for name in PHASES])
    shown = (line.phase != timelines.OTHER) & (end > begin)
    device_us = _device_us(sink, line)[shown].tolist()
    return _track(
        sink,
        PHASES_THREAD,
        begin[shown],
        end[shown],
        names[line.phase[shown]],
        ("device ms", THOUSANDTHS, device_us),
    )


def _device_us(sink: Sink, line: timelines.Timeline) -> I64:
    """The device's time for each phase. An interrupted phase has it in its first stretch."""
    measured = device_times.device_times(sink.trace)
    _, first = np.unique(line.interval, return_index=True)
    stretch = first[line.interval[measured.stretch]]
    sums = np.zeros(len(line.ticks), np.int64)
    agree = line.phase[stretch] == measured.phase
    np.add.at(sums, stretch[agree], measured.device_ns[agree])
    return np.where(sums > 0, sums // 1000, NO_VALUE)


def _track(
    sink: Sink,
    number: int,
    begin: I64,
    end: I64,
    name: I64,
    argument: tuple[str, int, Sequence[int]],
) -> Rows:
    """The slices of one track. If there are too many, the longest."""
    key, kind, values = argument
    most = sink.share(8)
    if most is not None and len(begin) > most:
        sink.note("steps and phases", len(begin) - most)
        kept = largest(end - begin, np.arange(len(begin)), most)
        begin, end, name = begin[kept], end[kept], name[kept]
        values = [values[i] for i in kept.tolist()]
    thread = np.full(len(begin), sink.thread(number))
    # Slices touch, and viewers read times as floating-point numbers, which are a nanosecond off in
    # our time. The gap prevents an overlap of one nanosecond, which viewers report as an error.
    end = np.maximum(begin, end - GAP_NS)
    return Rows(
        SLICE,
        "pytracer",
        sink.program,
        begin=begin,
        end=core.nest_slices(thread, begin, end),
        name=name,
        thread=thread,
        arguments=[(key, kind, np.array(values, np.int64))],
    )


def marks(sink: Sink) -> Rows:
    """The peak of each device, and allocations that failed."""
    marks: list[tuple[int, str, dict[str, int]]] = []
    ticks = sink.trace.events.ticks
    for device in sink.devices if len(ticks) else ():
        peak = usage.peak(sink.trace, device)
        at = sink.times(ticks[max(peak.position, 0) : max(peak.position, 0) + 1])
        parts = {"bytes": peak.bytes, **peak.by_category}
        marks.append((int(at[0]), f"peak of {device}: {size_text(peak.bytes)}", parts))
    events = sink.trace.events
    for row in np.flatnonzero(events.action == ACTION["oom"]).tolist():
        asked = int(events.bytes[row])
        text = f"out of memory: {size_text(asked)} asked for"
        parts = {"bytes": asked, "free on the device": int(events.address[row])}
        marks.append((int(sink.times(ticks[row : row + 1])[0]), text, parts))
    keys = list(dict.fromkeys(key for _, _, parts in marks for key in parts))
    return Rows(
        INSTANT,
        "pytracer",
        sink.program,
        begin=np.array([time for time, _, _ in marks], np.int64),
        name=np.array([sink.texts.add(text) for _, text, _ in marks], np.int64),
        thread=np.full(len(marks), sink.thread(MARKERS_THREAD)),
        arguments=[
            (key, INTEGER, np.array([m[2].get(key, NO_VALUE) for m in marks], np.int64))
            for key in keys
        ],
    )


def collectives(sink: Sink) -> Rows:
    """The moments at which this rank began its collectives. Equal ids belong together in a job."""
    known = meta.of(sink.trace).communication
    texts = [sink.texts.add(one.operation) for one in known.collectives]
    groups = [known.groups[one.group] for one in known.collectives]
    titles = [sink.texts.add(group.description or group.name) for group in groups]
    times = np.array([one.begin_ns for one in known.collectives], np.int64) - sink.base_ns
    # A collective may end long after later ones began, so a bar to its end would hide them.
    begin = np.maximum(times, 0)
    end = np.minimum(begin + _MOMENT_NS, np.append(begin[1:], begin[-1:] + _MOMENT_NS))
    rows = known.collectives
    ended = [one.end_ns - one.begin_ns if one.end_ns else NO_VALUE for one in rows]
    return Rows(
        SLICE,
        "collective",
        sink.program,
        begin=begin,
        end=end,
        name=np.array(texts, np.int64),
        thread=np.full(len(begin), sink.thread(COLLECTIVES_THREAD)),
        id=np.array(
            [_joined(one, group) for one, group in zip(rows, groups, strict=True)], np.int64
        ),
        arguments=[
            ("group", TEXT, np.array(titles, np.int64)),
            ("ranks", INTEGER, np.array([len(group.ranks) for group in groups], np.int64)),
            ("sequence", INTEGER, np.array([one.sequence for one in rows], np.int64)),
            ("bytes", INTEGER, np.array([one.bytes for one in rows], np.int64)),
            ("its end was noticed after ns", INTEGER, np.array(ended, np.int64)),
        ],
    )


_MOMENT_NS = 1000


def _joined(one: meta.Collective, group: meta.Group) -> int:
    """A number that is equal on all ranks of a collective, and on both sides of a send."""
    ends = re.findall(r"\d+", one.operation) if one.point_to_point else []
    if "<-" in one.operation:
        ends.reverse()
    key = (group.name, group.ranks, one.point_to_point, ends, one.sequence)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 12  # JSON's numbers are exact up to 53 bits


def counters(sink: Sink, number: int, device: str) -> list[Rows]:
    """Counters of the bytes per category and of their sums, after every change."""
    trace, alloc = sink.trace, allocations(sink.trace)
    here = usage.on_device(trace, device)
    positions, levels = usage.level_columns(trace, here, alloc.category, len(CATEGORY))
    start = usage.bytes_before(trace, here, alloc.category, len(CATEGORY))
    used = np.bincount(alloc.category[here], minlength=len(CATEGORY)) > 0
    shown = [name for name in CATEGORY_ORDER if name in ALWAYS_SHOWN or used[CATEGORY[name]]]
    columns = [
        np.concatenate([start[CATEGORY[name], None], levels[CATEGORY[name]]]) for name in shown
    ]
    ticks = np.concatenate([trace.events.ticks[:1], trace.events.ticks[positions]])
    # Perfetto orders counters by name, so a digit keeps our order.
    keys = [f"{i} {name}" for i, name in enumerate(shown, 1)]
    counters = [_counter(sink, number, "mem", ticks, dict(zip(keys, columns, strict=True)))]
    blocks_known = blocks.allocated_bytes(trace)
    asked = alloc.requested_bytes.view(np.int64)
    sizes = {}
    if not (blocks_known[here] == blocks.UNKNOWN).any():
        sizes["allocated"] = blocks_known
    if not np.array_equal(blocks_known[here], asked[here]):
        sizes["requested"] = asked  # a CPU's allocator does not round, so both would be equal
    for name, size in sizes.items():
        counters.append(_counter(sink, number, name, *_levels(trace, here, size)))
    return counters


def _counter(sink: Sink, device: int, name: str, ticks: U64, values: dict[str, I64] | I64) -> Rows:
    """The samples of one or more values, thinned to the allowed number."""
    columns = values if isinstance(values, dict) else {"bytes": values}
    count = min(len(ticks), *(len(column) for column in columns.values()))
    times = sink.times(ticks[:count])
    columns = {key: column[:count] for key, column in columns.items()}
    kept = core.thin_samples(times, list(columns.values()), _bucket_ns(sink, times, len(columns)))
    sink.note("counter samples", count - len(kept))
    return Rows(
        COUNTER,
        "pytracer",
        sink.program + device,
        begin=times[kept],
        name=np.full(len(kept), sink.texts.add(name)),
        arguments=[(key, INTEGER, column[kept]) for key, column in columns.items()],
    )


def _bucket_ns(sink: Sink, times: I64, columns: int) -> int:
    """The length of a bucket of time. Each keeps the highest sample of each column, and the last."""
    share = sink.share(12 * len(sink.devices))
    least = sink.options.min_dt_ns
    if sink.folds and least == 0 and len(times) > MOST_SAMPLES:
        return int(times[-1] - times[0]) // COUNTER_BUCKETS + 1
    if share is None or len(times) <= share:
        return least
    buckets = max(share // (columns + 1), 1)
    return max(least, int(times[-1] - times[0]) // buckets + 1)


def reserved(sink: Sink, number: int, device: str) -> Rows:
    """The counter of the bytes that the allocator holds from the driver, if it has segments."""
    return _counter(sink, number, "reserved", *_segments(sink.trace, device))


def lifetimes_of(sink: Sink, number: int, device: str) -> Rows:
    """A bar for each allocation, on a track of its category."""
    trace, alloc, texts = sink.trace, allocations(sink.trace), sink.texts
    which = np.flatnonzero(usage.on_device(trace, device))
    share = sink.share(6 * len(sink.devices))
    if share is not None and len(which) > share:
        sink.note("allocations", len(which) - share)
        which = np.sort(largest(alloc.requested_bytes, which, share))
    begin, end = _lives(sink, which)
    seen = _large_enough(sink, alloc.requested_bytes[which], end - begin)
    folded, folded_lives = which[~seen], (begin[~seen], end[~seen])
    which, begin, end = which[seen], begin[seen], end[seen]
    began = training_steps.first_step(trace)
    label, labels = alloc.label[which], sanitized.labels(trace)
    cast = alloc.role[which] == ROLE["autocast_copy"]  # its label has the type of the weight

    def lines(rows: NDArray[Any]) -> I64:
        return texts.each(rows[which], lambda row: owners.line_text(trace, row))

    rows = Rows(
        LIFETIME,
        "alloc",
        sink.program + ALLOCATIONS + number,
        begin=begin,
        end=end,
        name=_bar_names(sink, which),
        id=which,
        thread=lifetime_track(sink.program + number, alloc.category[which]),
        arguments=[
            ("bytes", INTEGER, alloc.requested_bytes[which]),
            ("address", HEX, alloc.address[which].view(np.int64)),
            ("role", TEXT, texts.each(alloc.role[which], lambda r: role_text(trace, r))),
            ("name", TEXT, sink.known(labels.name[label])),
            ("shape", TEXT, sink.known(labels.shape[label])),
            ("dtype", TEXT, sink.known(np.where(cast, 0, labels.dtype[label]))),
            ("module", TEXT, sink.known(alloc.module[which])),
            ("op", TEXT, sink.known(alloc.op[which])),
            ("line", TEXT, lines(alloc.line)),
            ("forward module", TEXT, sink.known(alloc.forward_module[which])),
            ("forward op", TEXT, sink.known(alloc.forward_op[which])),
            ("forward line", TEXT, lines(alloc.forward_line)),
            ("step", INTEGER, or_none(alloc.step[which] + began, alloc.step[which] < 0)),
            ("alive_at_start", FLAG, alloc.start[which] < 0),
            ("alive_at_end", FLAG, alloc.completed[which] < 0),
            ("allocations", INTEGER, np.full(len(which), NO_VALUE)),
        ],
    )
    return rows if len(folded) == 0 else _with_folded(sink, rows, folded, *folded_lives)


def _large_enough(sink: Sink, size: U64, lasted: I64) -> Mask:
    """The bars to draw one by one: all, or the MOST_BARS of most bytes times time."""
    seen = np.ones(len(size), np.bool_)
    if sink.folds and len(size) > MOST_BARS:
        area = lasted.astype(np.float64) * size
        seen[np.argsort(area, kind="stable")[:-MOST_BARS]] = False
        sink.note("allocations", int(np.count_nonzero(~seen)))
    return seen


def _bar_names(sink: Sink, which: NDArray[np.intp]) -> I64:
    """Module, op and bytes. In JSON a bar's name is its track's name, so there it is the category."""
    trace, alloc, texts = sink.trace, allocations(sink.trace), sink.texts
    if not sink.native:
        return texts.each(alloc.category[which], CATEGORIES.__getitem__)
    module, op = sink.known(alloc.cause("module")[which]), sink.known(alloc.op[which])
    size = alloc.requested_bytes[which]
    number, firsts = alike([module, op, size])
    names = []
    for row in firsts.tolist():
        parts = (trace.strings[module[row]], trace.strings[op[row]], size_text(int(size[row])))
        names.append(texts.add(" · ".join(part for part in parts if part)))
    return np.array(names, np.int64)[number] if names else np.zeros(0, np.int64)


def _with_folded(sink: Sink, rows: Rows, which: NDArray[np.intp], begin: I64, end: I64) -> Rows:
    """Adds a bar for the folded allocations of each category and slice of time."""
    alloc, texts = allocations(sink.trace), sink.texts
    span = max(sink.end_ns - int(begin.min()), 1)
    key = (begin - begin.min()) * FOLDS // (span + 1) * len(CATEGORIES)
    key += np.minimum(alloc.category[which], len(CATEGORIES) - 1)
    order = np.argsort(key, kind="stable")
    firsts = np.flatnonzero(np.append(True, np.diff(key[order]) != 0))
    counts = np.diff(np.append(firsts, len(order)))
    sizes = np.add.reduceat(alloc.requested_bytes[which][order].astype(np.int64), firsts)
    category = (key[order][firsts] % len(CATEGORIES)).astype(np.uint8)
    if sink.native:
        pairs = zip(counts.tolist(), sizes.tolist(), strict=True)
        names = [texts.add(f"{n:,} small ones · {size_text(size)}") for n, size in pairs]
    else:
        names = [texts.add(CATEGORIES[each]) for each in category.tolist()]
    none = np.full(len(firsts), NO_VALUE)
    empty = {INTEGER: none, HEX: none * 0, TEXT: none * 0, FLAG: none * 0}
    folded = {"bytes": sizes, "allocations": counts}
    more: dict[str, Any] = {
        "begin": np.minimum.reduceat(begin[order], firsts),
        "end": np.maximum.reduceat(end[order], firsts),
        "name": np.array(names, np.int64),
        "id": which[order][firsts],
        "thread": lifetime_track(rows.process - ALLOCATIONS, category),
    }
    both: dict[str, Any] = {
        name: np.concatenate([getattr(rows, name), values]) for name, values in more.items()
    }
    return replace(
        rows,
        **both,
        arguments=[
            (name, kind, np.concatenate([values, folded.get(name, empty[kind])]))
            for name, kind, values in rows.arguments
        ],
    )


def _lives(sink: Sink, which: NDArray[np.intp]) -> tuple[I64, I64]:
    """The times between which the allocator counts these allocations."""
    ticks = np.append(sink.trace.events.ticks, np.uint64(0))
    first = sink.times(ticks[:1])[0]
    alloc = allocations(sink.trace)
    start, completed = alloc.start[which], alloc.completed[which]
    times = sink.times(ticks)
    begin = np.where(start < 0, first, times[start])
    end = np.where(completed < 0, sink.end_ns, times[completed])
    return begin, end


def arrows(sink: Sink, slices: Rows) -> list[Rows]:
    """Arrows from allocations to their frees, and from forward ops to their nodes."""
    most = min(sink.options.arrows, sink.share(100) or sink.options.arrows)
    return [_frees(sink, most), _backwards(sink, slices, most)]


def _frees(sink: Sink, most: int) -> Rows:
    """Arrows of the largest allocations that are made in one slice and freed in another."""
    trace, alloc = sink.trace, allocations(sink.trace)
    moments = phases.moments(trace)
    made = sink.slices.row_of(moments.made_scope)
    freed = sink.slices.row_of(moments.freed_scope)
    which = np.flatnonzero((made >= 0) & (freed >= 0) & (made != freed))
    which = largest(alloc.requested_bytes, which, most)
    ticks = trace.events.ticks
    return Rows(
        FLOW,
        "allocation",
        sink.program,
        begin=sink.times(ticks[alloc.start[which]]),
        end=sink.times(ticks[alloc.end[which]]),
        name=np.full(len(which), sink.texts.add("freed")),
        id=sink.unique(which),
        source=made[which],
        target=freed[which],
    )


def _backwards(sink: Sink, slices: Rows, most: int) -> Rows:
    """Arrows from the forward ops that keep most memory to the nodes that they made."""
    trace, shown = sink.trace, sink.slices
    tree, alloc = scopes.tree(trace), allocations(trace)
    source = shown.row_of(tree.forward[shown.numbers])
    target = np.flatnonzero(source >= 0)
    kept = (alloc.category == CATEGORY["activations"]) & (alloc.start >= 0)
    made = shown.row_of(alloc.scope)
    kept &= made >= 0
    keeps = usage.sums(made[kept], alloc.requested_bytes[kept], len(shown.numbers))
    target = largest(keeps[source], target, most)
    return Rows(
        FLOW,
        "backward",
        sink.program,
        begin=slices.begin[source[target]],
        end=slices.begin[target],
        name=np.full(len(target), sink.texts.add("backward")),
        id=sink.unique(shown.numbers[target]),
        source=source[target],
        target=target,
    )


def _made_in(trace: Trace, slices: ScopeSlices) -> tuple[NDArray[Any], I64]:
    """For each slice: the line that called it, if it allocated, and its allocated bytes."""
    alloc = allocations(trace)
    row = slices.row_of(alloc.scope)
    inside = (row >= 0) & (alloc.start >= 0)
    count = len(slices.numbers)
    line = np.zeros(count, np.int64)
    is_op = scopes.tree(trace).kind[slices.numbers] == scopes.OP
    line[row[inside]] = alloc.line[inside]
    made = usage.sums(row[inside], alloc.requested_bytes[inside], count)
    return np.where(is_op, line, 0), made


def _own_of_modules(trace: Trace, slices: ScopeSlices) -> I64:
    """The bytes that each call of a module allocated itself, without inner modules."""
    alloc, tree = allocations(trace), scopes.tree(trace)
    of_call = np.zeros(len(tree.kind), np.int64)
    made = alloc.start >= 0
    np.add.at(of_call, tree.module[alloc.scope[made]], alloc.requested_bytes[made].astype(np.int64))
    is_module = tree.kind[slices.numbers] == scopes.MODULE
    own: I64 = np.where(is_module, of_call[slices.numbers], NO_VALUE)
    return own


def _with_what_is_inside(own: I64, parent: NDArray[np.intp]) -> I64:
    """The sum of each slice and all slices inside it."""
    total, above = own.copy(), parent.copy()
    while len(inner := np.flatnonzero(above >= 0)):
        # Each round doubles the levels below a slice that its sum has.
        np.add.at(total, above[inner], total[inner])
        above[inner] = above[above[inner]]
    return total


def lifetime_track(process: int, category: NDArray[Any]) -> I64:
    """The number of a category's first track. Overlapping lives use the numbers after it."""
    tracks: I64 = (np.int64(process) << 32) + (category.astype(np.int64) + 1 << 24)
    return tracks


def _step_bounds(trace: Trace) -> U64:
    """The first event, and the end of each step. The last step may be unfinished."""
    line = timelines.timeline(trace)
    bounds = np.concatenate([trace.events.ticks[:1], line.step_ends])
    training = (line.phase == timelines.FORWARD) | (line.phase == timelines.BACKWARD_PHASE)
    if len(bounds) and (line.ticks[training] > bounds[-1]).any():
        bounds = np.append(bounds, usage.last_tick(trace))
    return bounds if len(trace.events.ticks) else bounds[:0]


def _levels(trace: Trace, which: Mask, size: I64) -> tuple[U64, I64]:
    """The sum of these allocations at the first event and after each change."""
    changes, alloc = lifetimes.changes(trace), allocations(trace)
    own = which[changes.allocation]
    amounts = np.sign(changes.bytes[own]) * size[changes.allocation[own]]
    level = np.cumsum(np.append(size[which & (alloc.start < 0)].sum(), amounts))
    ticks = trace.events.ticks
    return np.concatenate([ticks[:1], ticks[changes.position[own]]]), level


def _segments(trace: Trace, device: str) -> tuple[U64, I64]:
    """The times at which the device's reserved bytes change, and their new values."""
    changes = segments.changes(trace, device)
    return trace.events.ticks[changes.row], changes.level
