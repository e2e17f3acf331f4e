"""A trace's categories over time, with as many points as a picture needs."""

from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.answers import training_steps
from pytracer.analysis.facts import scopes, timelines, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORIES, CATEGORY, CATEGORY_ORDER, I64, PHASES

_IDLE = 0.1  # the share of the time without an event that is cut and marked
_LEFT_OF_IT = 0.03  # the width of a cut, as a share of the busy time
LEAST_APART = 0.05  # of the width; closer labels would overlap


@dataclass(frozen=True)
class Band:
    """A stretch of time with a name."""

    name: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class Series:
    """Bytes per category at chosen times, in the order in which they are stacked."""

    times_ns: I64
    levels: dict[str, I64]  # only categories that ever had something
    peak: usage.Peak
    steps: tuple[Band, ...]
    phases: tuple[Band, ...]


def series(trace: Trace, points: int = 400, device: str | None = None) -> Series:
    """At most about `points` moments: from each slice of time the one with the most memory.

    So no peak is lost, and the categories of a moment are those at that very moment.
    """
    here, alloc = usage.on_device(trace, device), allocations(trace)
    groups = alloc.category.astype(np.int64)
    positions, levels = usage.level_columns(trace, here, groups, len(CATEGORIES))
    before = usage.bytes_before(trace, here, groups, len(CATEGORIES))
    times = trace.time_ns(trace.events.ticks[positions])
    kept = _highest_of_slices(times, reduce(np.add, levels), points)
    last = int(trace.time_ns(trace.events.ticks[-1:])[0]) if len(trace.events.ticks) else 0
    first = min(0, int(times[0]) if len(times) else 0)
    # A level lasts until the next, so the picture needs the first and the last moment too.
    shown_times = np.concatenate([[first], times[kept], [max(last, first)]]).astype(np.int64)
    shown = {}
    for name in CATEGORY_ORDER:
        column, at_start = levels[CATEGORY[name]], int(before[CATEGORY[name]])
        at_end = int(column[-1]) if len(column) else at_start
        whole = np.concatenate([[at_start], column[kept], [at_end]]).astype(np.int64)
        if whole.any():
            shown[name] = whole
    began = training_steps.first_step(trace)
    return Series(
        times_ns=shown_times,
        levels=shown,
        peak=usage.peak(trace, device),
        steps=tuple(
            Band(str(began + row.step), row.start_ns, row.end_ns)
            for row in training_steps.step_rows(trace, device)
        ),
        phases=phase_bands(trace, last),
    )


def _highest_of_slices(times: I64, total: I64, points: int) -> NDArray[np.intp]:
    """The first highest position in each of equally long slices of time, rising."""
    if len(times) <= points:
        return np.arange(len(times))
    span = max(int(times[-1] - times[0]), 1)
    slices = (times - times[0]).astype(np.float64) / span * (points - 1)
    of = slices.clip(0, points - 1).astype(np.int64)  # in a damaged file time may go back
    firsts = np.flatnonzero(np.append(True, of[1:] != of[:-1]))
    highest = np.maximum.reduceat(total, firsts)
    is_highest = total == np.repeat(highest, np.diff(np.append(firsts, len(total))))
    candidates = np.flatnonzero(is_highest)
    _, first = np.unique(of[candidates], return_index=True)
    positions: NDArray[np.intp] = candidates[first]
    return positions


def phase_bands(trace: Trace, last: int) -> tuple[Band, ...]:
    """The main thread's phases, without the gaps between them."""
    line = timelines.timeline(trace)
    begins = np.append(trace.time_ns(line.begins), last) if len(line.ticks) else np.zeros(1)
    bands = []
    for i, phase in enumerate(line.phase.tolist()):
        begin, end = max(int(begins[i]), 0), min(int(begins[i + 1]), last)
        if PHASES[phase] != "other" and end > begin:
            bands.append(Band(PHASES[phase], begin, end))
    return tuple(bands)


@dataclass(frozen=True)
class Nested(Band):
    """A band with the number of bands around it."""

    depth: int


def module_bands(trace: Trace, last: int, most: int, depths: int = 3) -> tuple[Nested, ...]:
    """The main thread's calls of modules: the outer levels, and of too many calls the longest."""
    tree = scopes.tree(trace)
    calls = np.flatnonzero((tree.kind == scopes.MODULE) & (tree.thread == _main_thread(tree)))
    depth = np.zeros(len(tree.kind), np.int64)
    inside = np.ones(len(calls), np.bool_)
    outer = tree.module[tree.parent[calls]]
    while (inside := inside & (outer != 0)).any() and depth.max(initial=0) < depths:
        depth[calls[inside]] += 1
        outer = np.where(inside, tree.module[tree.parent[outer]], 0)
    calls = calls[depth[calls] < depths]
    begin = np.clip(trace.time_ns(tree.begin[calls]), 0, last)
    ended = np.minimum(tree.end[calls], np.uint64(np.iinfo(np.int64).max))
    end = np.where(tree.end[calls] == scopes.NEVER, last, np.clip(trace.time_ns(ended), 0, last))
    if len(calls) > most:
        kept = np.sort(np.argpartition(begin - end, most)[:most])
        calls, begin, end = calls[kept], begin[kept], end[kept]
    return tuple(
        Nested(trace.strings[tree.name[call]], int(b), int(e), int(depth[call]))
        for call, b, e in zip(calls.tolist(), begin.tolist(), end.tolist(), strict=True)
        if e > b
    )


def _main_thread(tree: scopes.Tree) -> int:
    """The thread with the most calls of modules."""
    callers = tree.thread[tree.kind == scopes.MODULE]
    return int(np.bincount(callers).argmax()) if len(callers) else 0


# ---------------------------------------------------------------- the axis


@dataclass(frozen=True)
class Clock:
    """Gives each time its place on the axis, from 0 to 1. Idle stretches are cut short."""

    times: NDArray[np.float64]  # knots: where busy and idle stretches begin and end
    places: NDArray[np.float64]
    idle: tuple[tuple[float, float], ...]

    def place(self, time: Any) -> Any:
        """The place of a time on the axis."""
        return np.interp(time, self.times, self.places)

    def time(self, place: Any) -> Any:
        """The time at a place on the axis."""
        return np.interp(place, self.places, self.times)


def clock(times: NDArray[np.float64]) -> Clock:
    """The axis for these rising times of events."""
    first, last = (float(times[0]), float(times[-1])) if len(times) else (0.0, 0.0)
    whole = max(last - first, 1e-9)
    long = np.flatnonzero(np.diff(times) > _IDLE * whole)
    idle = tuple((float(times[i]), float(times[i + 1])) for i in long)
    busy = max(whole - sum(end - begin for begin, end in idle), _LEFT_OF_IT * whole)
    knots = np.array([first, *(time for gap in idle for time in gap), first + whole])
    widths = np.diff(knots)
    widths[1::2] = _LEFT_OF_IT * busy
    places = np.append(0.0, np.cumsum(widths / widths.sum()))
    # The axis goes on at both sides, for times outside.
    return Clock(
        np.concatenate([[first - whole], knots, [first + 2 * whole]]),
        np.concatenate([[-1.0], places, [2.0]]),
        idle,
    )
