"""A program's memory with another batch or length, predicted from traces with small ones.

The traces' allocations are matched by origin: step, phase, module, op, the forward's module and op,
and the order among those alike. Each gets a law: the simplest that gives its size in every trace to
the byte. First come laws with one term: a constant, the batch, the length, both, both with the
length squared, the length squared; then each of these beside a constant. A law holds if at least
one trace more than it has terms agrees. If several laws hold and differ, the answer lies between
them. An allocation without a law, or without a match, is an interval: from its smallest size in
the traces to its size in the largest trace times the growth. So is a library's scratch, whose size
follows no law.

Then the largest trace is replayed with the sizes that the laws give.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer import errors, sanitized
from pytracer.analysis.allocator import replay
from pytracer.analysis.answers import breakdown
from pytracer.analysis.facts import grouping, phases, scopes, usage
from pytracer.analysis.facts.allocations import Allocations, allocations
from pytracer.analysis.forecasts.verified import Verified
from pytracer.recorded import Trace
from pytracer.schema import CATEGORY, I64, OWNED, ROLE

_MOST_FLAGGED = 5


@dataclass(frozen=True)
class Flagged:
    """Allocations without a law: a part of the answer that is an interval. Sizes are bytes."""

    category: str
    module: str
    op: str
    lowest: int
    highest: int


@dataclass(frozen=True)
class WhatIf:
    """The peak with another batch and length. Sizes are bytes; exact where both are equal."""

    device: str
    batch: int
    length: int | None
    lowest: int
    highest: int
    reserved: tuple[int, int] | None  # by CUDA's allocator
    traces: int
    with_law: float  # share of the bytes at the peak whose size follows a law
    flagged: tuple[Flagged, ...]  # the largest
    notes: tuple[str, ...] = ()  # why .reserved is not exact
    verified: Verified | None = None  # None: not verified

    @property
    def exact(self) -> bool:
        """Whether every size follows a law."""
        return self.lowest == self.highest


@dataclass(frozen=True)
class Shape:
    """The batch and length of a model's input."""

    batch: int
    length: int | None


def what_if(
    traces: Sequence[Trace], batch: int | None, length: int | None, device: str | None = None
) -> WhatIf:
    """The peak of the same program with this batch and length.

    Raises:
        errors.UsageError: no batch or length is given, or the traces are not of one program.
    """
    if batch is None and length is None:
        raise errors.UsageError("what if what? say batch=32, seq=2048 or both")
    name = device or usage.main_device(traces[0])
    shapes = _shapes(traces, name, asks_batch=batch is not None and length is None)
    order = sorted(range(len(traces)), key=lambda i: _volume(shapes[i]))
    traces, shapes = [traces[i] for i in order], [shapes[i] for i in order]
    largest = shapes[-1]
    wanted = Shape(batch or largest.batch, length or largest.length)
    _say_what_never_changed(shapes, wanted)
    if length is not None and any(shape.length is None for shape in shapes):
        raise errors.UsageError("seq=: the inputs of these traces have no length to change")
    _same_program(traces, name)
    low, high, law = _sizes(traces, shapes, wanted, name)
    return _answer(traces, name, wanted, low, high, law)


def _volume(shape: Shape) -> int:
    return shape.batch * (shape.length or 1)


def _shapes(traces: Sequence[Trace], device: str, *, asks_batch: bool) -> list[Shape]:
    """The shape of each trace's input.

    If the main input's first size is the same in all traces, the batch may be another input's.
    """
    given = [_inputs(trace, device, number) for number, trace in enumerate(traces, 1)]
    if asks_batch and len(traces) > 1:
        leads = [list(dict.fromkeys(shape[0] for shape in shapes)) for shapes in given]
        changing = [len(set(sizes)) > 1 for sizes in zip(*leads, strict=False)]
        if True in changing and not changing[0]:
            at = changing.index(True)
            return [Shape(sizes[at], None) for sizes in leads]
    return [Shape(most[0], most[1] if len(most) in (2, 3) else None) for most, *_ in given]


def _inputs(trace: Trace, device: str, number: int) -> list[tuple[int, ...]]:
    """The shapes of the model's inputs, the one with most bytes first."""
    alloc = allocations(trace)
    given = usage.on_device(trace, device) & (alloc.category == CATEGORY["inputs"])
    called_with = given & (alloc.role != ROLE["target"])
    if called_with.any():  # a loss's target has the shape that the loss sees: flattened
        given = called_with
    sizes: dict[tuple[int, ...], int] = {}
    for row in grouping.holders(trace, "shape", given):
        shape = tuple(int(part) for part in row.name.split("x") if part.isdecimal())
        if shape:
            sizes[shape] = sizes.get(shape, 0) + row.bytes
    if not sizes:
        raise errors.UsageError(
            f"trace {number} does not show its model's inputs, so its batch is unknown: record "
            "whole steps, with the batch made inside"
        )
    return sorted(sizes, key=lambda shape: -sizes[shape])


def _same_program(traces: Sequence[Trace], device: str) -> None:
    steps = [len(phases.timeline(trace).step_ends) for trace in traces]
    if len(set(steps)) > 1:
        raise errors.UsageError(
            f"these traces have {', '.join(map(str, steps))} steps: record the same number of each"
        )
    parameters = {breakdown.parameters(trace, device) for trace in traces}
    if len(parameters) > 1:
        listed = ", ".join(f"{count:,}" for count in sorted(parameters))
        raise errors.UsageError(
            f"these are traces of different programs: their models have {listed} parameters"
        )
    modules = [_modules(trace) for trace in traces]
    shared, all_of_them = set.intersection(*modules), set.union(*modules)
    if 2 * len(shared) < len(all_of_them):
        raise errors.UsageError(
            f"these are traces of different programs: of their {len(all_of_them)} modules "
            f"{len(shared)} are in all of them"
        )


def _modules(trace: Trace) -> set[str]:
    tree = scopes.tree(trace)
    return {trace.strings[row] for row in np.unique(tree.name[tree.kind == scopes.MODULE])}


def _say_what_never_changed(shapes: Sequence[Shape], wanted: Shape) -> None:
    """Raises if a dimension should change that is the same in all traces: they show no law.

    One trace alone has no laws at all, and its answer is an interval.
    """
    if len(shapes) == 1:
        return
    for name, of_traces, asked in (
        ("batch", {shape.batch for shape in shapes}, wanted.batch),
        ("seq", {shape.length for shape in shapes}, wanted.length),
    ):
        if len(of_traces) == 1 and asked not in of_traces:
            raise errors.UsageError(
                f"{name}={asked}: all these traces have {of_traces.pop()}, which shows no law; "
                "record one with another"
            )


# ---------------------------------------------------------------- matching


def _keys(trace: Trace, device: str) -> tuple[NDArray[np.intp], list[tuple[Any, ...]]]:
    """The device's allocations in order, and each one's origin and number among those alike."""
    alloc = allocations(trace)
    own = np.flatnonzero(usage.on_device(trace, device))
    texts, seen = trace.strings, dict[tuple[Any, ...], int]()
    keys = []
    for i in own.tolist():
        key = (*_made_by(trace, alloc, texts, i),)
        count = seen[key] = seen.get(key, 0) + 1
        keys.append((*key, count))
    return own, keys


def _made_by(trace: Trace, alloc: Allocations, texts: Sequence[str], i: int) -> Iterator[Any]:
    yield int(alloc.step[i])
    yield int(alloc.phase[i])
    yield int(alloc.category[i])
    for column in ("module", "op", "forward_module", "forward_op"):
        yield texts[getattr(alloc, column)[i]]
    yield texts[sanitized.labels(trace).name[alloc.label[i]]]


def _sizes(
    traces: Sequence[Trace], shapes: Sequence[Shape], wanted: Shape, device: str
) -> tuple[I64, I64, NDArray[np.bool_]]:
    """Per allocation of the largest trace: its least and most size, and whether a law gives it."""
    by_trace = []
    for trace in traces:
        own, keys = _keys(trace, device)
        sizes = allocations(trace).requested_bytes[own].tolist()
        by_trace.append(dict(zip(keys, sizes, strict=True)))
    counts = [_counts(each) for each in by_trace]
    last = traces[-1]
    size = allocations(last).requested_bytes.astype(np.int64)
    low, high, law = size.copy(), size.copy(), np.ones(len(size), np.bool_)
    growth = max(_volume(wanted) / _volume(shapes[-1]), 1.0)
    growth *= max((wanted.length or 1) / (shapes[-1].length or 1), 1.0)
    own, keys = _keys(last, device)
    category = allocations(last).category
    scratch = category == CATEGORY["workspaces"]
    fixed = np.isin(category, OWNED)  # the model's own size does not depend on its input
    for i, key in zip(own.tolist(), keys, strict=True):
        if fixed[i]:
            continue
        alike = all(each.get(key[:-1]) == counts[-1][key[:-1]] for each in counts)
        seen = [each[key] for each in by_trace] if alike else []
        changes_as_it_likes = scratch[i] and len(set(seen)) > 1
        predicted = set() if changes_as_it_likes or not alike else _law(seen, shapes, wanted)
        if len(predicted) == 1:
            low[i] = high[i] = predicted.pop()
            continue
        law[i] = False
        bounds = predicted or {*seen, int(size[i])}
        low[i] = min(bounds)
        high[i] = max(bounds) if predicted else int(size[i] * growth)
    return low, high, law


def _counts(sizes: dict[tuple[Any, ...], int]) -> dict[tuple[Any, ...], int]:
    counts: dict[tuple[Any, ...], int] = {}
    for key in sizes:
        counts[key[:-1]] = counts.get(key[:-1], 0) + 1
    return counts


# ---------------------------------------------------------------- laws


def _terms(shape: Shape) -> tuple[int, ...]:
    length = shape.length or 1
    return (1, shape.batch, length, shape.batch * length, shape.batch * length * length, length**2)


def _law(seen: Sequence[int], shapes: Sequence[Shape], wanted: Shape) -> set[int]:
    """The sizes that the simplest laws give that hold in all traces: several if they differ."""
    at, to = [_terms(shape) for shape in shapes], _terms(wanted)
    distinct = len({(shape.batch, shape.length) for shape in shapes})
    columns = [[row[term] for row in at] for term in range(len(to))]
    if distinct > 1:
        predicted = {_in_proportion(seen, column, to[term]) for term, column in enumerate(columns)}
        if predicted - {None}:
            return {size for size in predicted if size is not None}
    if distinct > 2:
        predicted = {
            _beside_a_constant(seen, column, to[term]) for term, column in enumerate(columns)
        }
        return {size for size in predicted if size is not None}
    return set()


def _in_proportion(seen: Sequence[int], at: Sequence[int], to: int) -> int | None:
    """The size by the law c * x, if all traces agree and it is a whole number."""
    if any(size * at[0] != seen[0] * x for size, x in zip(seen, at, strict=True)):
        return None
    return seen[0] * to // at[0] if seen[0] * to % at[0] == 0 else None


def _beside_a_constant(seen: Sequence[int], at: Sequence[int], to: int) -> int | None:
    """The size by the law a + c * x, if all traces agree and it is a whole number."""
    run = max(at) - min(at)
    if run == 0:
        return None
    rise = seen[at.index(max(at))] - seen[at.index(min(at))]
    pairs = zip(seen, at, strict=True)
    if any((size - seen[0]) * run != rise * (x - at[0]) for size, x in pairs):
        return None
    grown = rise * (to - at[0])
    return seen[0] + grown // run if grown % run == 0 else None


# ---------------------------------------------------------------- the answer


def _answer(
    traces: Sequence[Trace],
    device: str,
    wanted: Shape,
    low: I64,
    high: I64,
    law: NDArray[np.bool_],
) -> WhatIf:
    last = traces[-1]
    lowest, _ = _peak(last, device, low)
    highest, alive = _peak(last, device, high)
    reserved = None
    if device != "cpu":
        reserved = (_reserved(last, device, low), _reserved(last, device, high))
    at_peak = high[alive].sum()
    return WhatIf(
        device=device,
        batch=wanted.batch,
        length=wanted.length,
        lowest=lowest,
        highest=highest,
        reserved=reserved,
        traces=len(traces),
        with_law=float(high[alive & law].sum() / at_peak) if at_peak else 1.0,
        flagged=tuple(_flagged(last, low, high, alive & ~law)),
        notes=tuple(replay.notes(last, device)),
    )


def _peak(trace: Trace, device: str, size: I64) -> tuple[int, NDArray[np.bool_]]:
    """The highest level with these sizes, and the allocations alive there."""
    own = usage.on_device(trace, device)
    position, allocation, change = usage.changes_where(trace, own)
    before = own & (allocations(trace).start < 0)
    at_start = int(size[before].sum())
    levels = at_start + np.cumsum(np.sign(change) * size[allocation])
    if levels.max(initial=at_start) <= at_start:
        return at_start, before
    at = int(levels.argmax())
    return int(levels[at]), usage.alive_at(trace, int(position[at])) & own


def _reserved(trace: Trace, device: str, size: I64) -> int:
    columns = replay.steps(trace, device).columns
    recorded = columns["block"] < len(size)
    grown = np.where(recorded, size[np.minimum(columns["block"], len(size) - 1)], columns["bytes"])
    steps = {**columns, "bytes": grown.astype(np.uint64)}
    return int(replay.counted_as_recorded(trace, device, steps)["peak_reserved"])


def _flagged(trace: Trace, low: I64, high: I64, which: NDArray[np.bool_]) -> Iterator[Flagged]:
    total: dict[tuple[str, str, str], list[int]] = {}
    groups = [grouping.group(trace, key, which) for key in ("category", "module", "op")]
    for n, i in enumerate(np.flatnonzero(which).tolist()):
        names = [g.names[g.codes[n]] if g.codes[n] >= 0 else "" for g in groups]
        entry = total.setdefault((names[0], names[1], names[2]), [0, 0])
        entry[0] += int(low[i])
        entry[1] += int(high[i])
    for key in sorted(total, key=lambda key: -total[key][1])[:_MOST_FLAGGED]:
        yield Flagged(*key, *total[key])
