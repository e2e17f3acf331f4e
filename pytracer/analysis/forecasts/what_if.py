"""A program's memory with another batch or length, predicted from traces with small ones.

The traces' allocations are matched by origin: step, phase, module, op, the forward's module and op,
and the order among those alike. `laws` gives each a size with the wanted batch, where a law holds, and
bounds. Then the largest trace is replayed with these sizes.

The basis of an answer says what it rests on:

- "exact": a trace has the wanted batch and length; or traces with smaller and larger ones, three at
  least, show a law of every size.
- "interval": memory does not shrink when the batch grows. So the answer is at least the peak of the
  largest trace that the wanted shape holds, and at most that of a trace that holds it. Beyond the
  largest trace it is at most what the bounds give: a program may split, pad or cap there what it did
  not before, as a loss in chunks does. The likely value is that of the laws.
- "not known": one trace, which shows no law; another size of the inputs that changed on its own, as
  the edges of a graph; operators that only the largest trace has; a library's scratch, which follows
  no law.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pytracer import errors
from pytracer.analysis.allocator import replay
from pytracer.analysis.allocator.replay import EXACT, FEW_ORDERS, INTERVAL, NOT_KNOWN
from pytracer.analysis.allocator.steps import steps
from pytracer.analysis.answers import breakdown
from pytracer.analysis.facts import doubts, grouping, scopes, timelines, usage
from pytracer.analysis.facts.allocations import Allocations, allocations
from pytracer.analysis.forecasts import laws
from pytracer.analysis.forecasts.laws import Shape
from pytracer.analysis.forecasts.verified import Verified
from pytracer.data import sanitized
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORY, I64, OWNED, PHASE, ROLE, Mask

_MOST_FLAGGED = 5
_MATTERS = 0.01  # of the peak: what is less needs no word

_ONE_TRACE = "One trace shows no law: record a second one with another batch."
_NO_TRACE_REACHES = (
    "No trace has as much as {wanted}. Beyond {largest} the program may split, pad or cap what it did "
    "not before. A trace with {wanted} or more proves it; `pytracer imagine` makes one without memory."
)
_TOO_FEW = "Two traces show laws but prove none: a third one makes the answer exact."
_BETWEEN_MULTIPLES = (
    "The sizes may be padded: {wanted} is no multiple of what the batches and lengths of the traces "
    "have in common. Record one with {wanted}."
)
_NO_LAW = (
    "Some sizes follow no law, or more than one. Record another batch and length, or {wanted}."
)
_OTHER_SIZES = (
    "Another size of the inputs changed on its own: {sizes} beside a batch of {batches}. It is not "
    "known what it will be."
)
_OTHER_CALLS = (
    "The model gets {counts} inputs in a step of these traces: the program splits its batch before, so "
    "the rows of one call are not the batch."
)
_ONLY_IN_LARGEST = (
    "The largest trace has operators that the others lack ({names}), so it is not known what else a "
    "larger batch brings. Record one with {wanted}."
)
_WILD = "Some sizes change from step to step, or follow neither a law nor steps: values may decide."
_SCRATCH = "A library's scratch follows no law, and more than these figures say may be taken."


@dataclass(frozen=True)
class Flagged:
    """Allocations without a law. Sizes are bytes."""

    category: str
    module: str
    op: str
    lowest: int
    highest: int


@dataclass(frozen=True)
class WhatIf:
    """The peak with another batch and length. Sizes are bytes."""

    device: str
    batch: int
    length: int | None
    lowest: int
    highest: int
    likely: int | None  # if the program does what it did; None: some sizes have no law
    basis: str  # "exact", "interval" or "not known"
    reserved: tuple[int, int] | None  # by CUDA's allocator, with the least and the most
    traces: int
    batches: tuple[int, ...]  # of the traces: the first size of the model's input
    with_law: float  # share of the bytes at the peak whose size follows a law
    flagged: tuple[Flagged, ...]  # the largest
    notes: tuple[str, ...] = ()  # why it is not exact
    verified: Verified | None = None  # None: not verified

    @property
    def exact(self) -> bool:
        """Whether the traces prove it."""
        return self.basis == EXACT


def what_if(
    traces: Sequence[Trace], batch: int | None, length: int | None, device: str | None = None
) -> WhatIf:
    """The peak of the same program with this batch and length.

    Raises:
        errors.UsageError: no batch or length is given, the traces are not of one program, or all
            have more than is asked for.
    """
    if batch is None and length is None:
        raise errors.UsageError("what if what? say batch=32, seq=2048 or both")
    name = device or usage.main_device(traces[0])
    shapes = _shapes(traces, name, asks_batch=batch is not None and length is None)
    order = sorted(range(len(traces)), key=lambda i: shapes[i].volume)
    traces, shapes = [traces[i] for i in order], [shapes[i] for i in order]
    largest = shapes[-1]
    wanted = Shape(batch or largest.batch, length or largest.length)
    if length is not None and any(shape.length is None for shape in shapes):
        raise errors.UsageError("seq=: the inputs of these traces have no length to change")
    if batch is not None and length is None:
        _say_where_the_batch_is_second(shapes, batch)
    _say_what_never_changed(shapes, wanted)
    _same_program(traces, name)
    return _answer(_Case(traces, shapes, wanted, name))


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
        shape = _numbers(row.name)
        if shape:
            sizes[shape] = sizes.get(shape, 0) + row.bytes
    if not sizes:
        raise errors.UsageError(
            f"trace {number} does not show its model's inputs, so its batch is unknown: record "
            "whole steps, with the batch made inside"
        )
    return sorted(sizes, key=lambda shape: -sizes[shape])


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x") if part.isdecimal())


def _same_program(traces: Sequence[Trace], device: str) -> None:
    steps = [len(timelines.timeline(trace).step_ends) for trace in traces]
    if len(set(steps)) > 1:
        raise errors.UsageError(
            f"these traces have {', '.join(map(str, steps))} steps: record the same number of each, "
            f"as `pytracer run --steps {min(filter(None, steps))} train.py` does"
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


def _say_where_the_batch_is_second(shapes: Sequence[Shape], batch: int) -> None:
    """Raises if only the input's second size differs: a model that gets the sequence first."""
    first = {shape.batch for shape in shapes}
    second = {shape.length or 0 for shape in shapes}
    if len(first) > 1 or len(second) == 1 or 0 in second or batch in first:
        return
    listed = ", ".join(map(str, sorted(second)))
    raise errors.UsageError(
        f"batch {batch}: the first size of the model's input is taken for the batch, and it is "
        f"{first.pop()} in {_all(len(shapes))}. Only the second differs: {listed}. If that is your batch "
        f"(the sequence comes first), ask for it as the length: --seq {batch}, or seq={batch}"
    )


def _say_what_never_changed(shapes: Sequence[Shape], wanted: Shape) -> None:
    """Raises if a dimension should change that is the same in all traces: they show no law.

    Raises also if no trace is within the wanted shape: then a row may be no sample.
    """
    if not any(shape.is_within(wanted) for shape in shapes):
        of_traces = sorted({shape.batch for shape in shapes})
        listed = ", ".join(map(str, of_traces))
        raise errors.UsageError(
            f"{_words(wanted)}: all these traces have more. The first size of the model's input is taken "
            f"for the batch, and it is {listed}. Record a smaller batch, or ask for {of_traces[0]} or more. "
            "If that size counts something else, as the nodes of a graph, ask for a number of those"
        )
    if len(shapes) == 1:
        return
    for name, values, asked in (
        ("batch", {shape.batch for shape in shapes}, wanted.batch),
        ("seq", {shape.length for shape in shapes}, wanted.length),
    ):
        if len(values) == 1 and asked not in values:
            raise errors.UsageError(
                f"{name}={asked}: {_all(len(shapes))} have {name} {values.pop()}; also record another "
                f"{name}"
            )


def _all(count: int) -> str:
    return "both" if count == 2 else f"all {count} traces"


# ---------------------------------------------------------------- matching


@dataclass(frozen=True)
class _Case:
    """The question, and the traces from the smallest to the largest."""

    traces: Sequence[Trace]
    shapes: Sequence[Shape]
    wanted: Shape
    device: str

    @property
    def last(self) -> Trace:
        return self.traces[-1]


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


Origin: TypeAlias = tuple[Any, ...]
_STEP = 0  # where an origin has it


@dataclass(frozen=True)
class _Sizes:
    """Per allocation of the largest trace, with the wanted shape. Sizes are bytes."""

    recorded: I64
    highest: I64
    likely: I64
    has_law: Mask
    is_proved: Mask
    is_new: Mask  # the smaller traces have none of its origin
    is_scratch: Mask  # smaller in a larger trace
    is_wild: Mask  # depends on something else than the batch and the length


def _fixed(trace: Trace) -> Mask:
    """What depends on the model alone: what it owns, and what its optimizer makes meanwhile."""
    alloc = allocations(trace)
    fixed: Mask = np.isin(alloc.category, OWNED) | (alloc.phase == PHASE["optimizer"])
    is_copy: Mask = alloc.role == ROLE["autocast_copy"]
    return fixed | is_copy


def _sizes(case: _Case) -> _Sizes:
    last = case.last
    size = allocations(last).requested_bytes.astype(np.int64)
    high, likely = size.copy(), size.copy()
    has_law, is_proved, is_new, is_scratch, is_wild = (
        np.zeros(len(size), np.bool_) for _ in range(5)
    )
    fixed, growths = _fixed(last), _Growths(case)
    own, keys = _keys(last, case.device)
    for i, (*parts, number) in zip(own.tolist(), keys, strict=True):
        if fixed[i]:
            has_law[i] = is_proved[i] = True
            continue
        origin = tuple(parts)
        groups = growths.groups(origin)
        alike = len({len(group) for group in groups}) == 1
        seen = [group[number - 1] for group in groups] if alike else [int(size[i])]
        predicted = laws.predictions(seen, case.shapes, case.wanted) if alike else set()
        high[i] = laws.bound(int(size[i]), seen, growths.growth(origin), predicted)
        has_law[i] = len(predicted) == 1
        is_proved[i] = alike and laws.is_proved(seen, case.shapes, case.wanted)
        likely[i] = predicted.pop() if has_law[i] else high[i]
        is_new[i] = not all(groups)
        is_scratch[i] = any(a > b for a, b in pairwise(seen))
        is_wild[i] = not has_law[i] and (
            growths.varies(origin) or (alike and not laws.is_bounded(seen, case.shapes))
        )
    return _Sizes(size, high, likely, has_law, is_proved, is_new, is_scratch, is_wild)


class _Growths:
    """What the traces show of each origin: its blocks' sizes, and how their sum grows."""

    def __init__(self, case: _Case) -> None:
        self._case = case
        self._by_trace = [_by_origin(trace, case.device) for trace in case.traces]
        self._varying = {origin for each in self._by_trace for origin in _varying(each)}
        self._known: dict[Origin, float] = {}

    def groups(self, origin: Origin) -> list[tuple[int, ...]]:
        """Its blocks in each trace."""
        return [each.get(origin, ()) for each in self._by_trace]

    def growth(self, origin: Origin) -> float:
        """The factor by which they grow at most from the largest trace on."""
        if origin not in self._known:
            totals = [sum(group) for group in self.groups(origin)]
            self._known[origin] = laws.growth(totals, self._case.shapes, self._case.wanted)
        return self._known[origin]

    def varies(self, origin: Origin) -> bool:
        """Whether a trace has other sizes of them in another step."""
        return origin[_STEP + 1 :] in self._varying


def _by_origin(trace: Trace, device: str) -> Mapping[Origin, tuple[int, ...]]:
    """The sizes of each origin's allocations, in order."""
    own, keys = _keys(trace, device)
    sizes: dict[Origin, list[int]] = {}
    bytes_ = allocations(trace).requested_bytes[own].tolist()
    for key, size in zip(keys, bytes_, strict=True):
        sizes.setdefault(key[:-1], []).append(size)
    return {key: tuple(group) for key, group in sizes.items()}


def _varying(sizes: Mapping[Origin, tuple[int, ...]]) -> Iterator[Origin]:
    """Origins, without their step, of as many blocks in two steps, but with other sizes."""
    known: dict[tuple[Origin, int], tuple[int, ...]] = {}
    for origin, group in sizes.items():
        anywhere = origin[_STEP + 1 :]
        if known.setdefault((anywhere, len(group)), group) != group:
            yield anywhere


# ---------------------------------------------------------------- the answer


def _answer(case: _Case) -> WhatIf:
    sizes, last, device = _sizes(case), case.last, case.device
    likely, alive = _peak(last, device, sizes.likely)
    at_peak = int(sizes.likely[alive].sum())
    basis, why = _basis(case, sizes, alive)
    law = bool(sizes.has_law[alive].all())
    lowest, highest = (likely, likely) if basis == EXACT else _bounds(case, sizes)
    given = [i for i, shape in enumerate(case.shapes) if shape == case.wanted]
    if given:
        likely = lowest = highest = usage.peak(case.traces[given[0]], device).bytes
    return WhatIf(
        device=device,
        batch=case.wanted.batch,
        length=case.wanted.length,
        lowest=lowest,
        highest=highest,
        likely=likely if law or given else None,
        basis=basis,
        reserved=None if device == "cpu" else _reserved(case, sizes, is_exact=basis == EXACT),
        traces=len(case.traces),
        batches=tuple(sorted({shape.batch for shape in case.shapes})),
        with_law=float(sizes.likely[alive & sizes.has_law].sum() / at_peak) if at_peak else 1.0,
        flagged=tuple(_flagged(last, sizes.recorded, sizes.highest, alive & ~sizes.has_law)),
        notes=(*why, *replay.departed(last, device), *replay.late(last, device)),
    )


def _basis(case: _Case, sizes: _Sizes, alive: Mask) -> tuple[str, list[str]]:
    """What the answer rests on, and why it is not exact."""
    figures = [*doubts.doubts(case.last), *replay.missing(case.last, case.device)]
    if figures:
        return NOT_KNOWN, figures
    if case.wanted in case.shapes:
        return EXACT, []
    wanted = _words(case.wanted)
    unknown = [*_unknown(case, sizes, alive, wanted)]
    if unknown:
        return NOT_KNOWN, unknown
    if not any(case.wanted.is_within(shape) for shape in case.shapes):
        largest = _words(case.shapes[-1])
        return INTERVAL, [_NO_TRACE_REACHES.format(wanted=wanted, largest=largest)]
    if len(set(case.shapes)) < 3:
        return INTERVAL, [_TOO_FEW]
    if not laws.is_between(case.shapes, case.wanted):
        return INTERVAL, [_BETWEEN_MULTIPLES.format(wanted=wanted)]
    own = usage.on_device(case.last, case.device)
    if not sizes.is_proved[own].all():
        return INTERVAL, [_NO_LAW.format(wanted=wanted)]
    return EXACT, []


def _unknown(case: _Case, sizes: _Sizes, alive: Mask, wanted: str) -> Iterator[str]:
    """Why not even an interval is known."""
    if len(set(case.shapes)) == 1:
        yield _ONE_TRACE
        return
    yield from _other_sizes(case)
    worth = _MATTERS * max(int(sizes.highest[alive].sum()), 1)
    new = alive & sizes.is_new
    if int(sizes.highest[new].sum()) > worth:
        names = [row.name for row in grouping.holders(case.last, "op", new)][:3]
        yield _ONLY_IN_LARGEST.format(names=", ".join(names), wanted=wanted)
    if int(sizes.highest[alive & sizes.is_scratch].sum()) > worth:
        yield _SCRATCH
    if int(sizes.highest[alive & sizes.is_wild].sum()) > worth:
        yield _WILD


def _other_sizes(case: _Case) -> Iterator[str]:
    """Names sizes of the inputs that follow neither the batch nor the length."""
    given = [_given_at_peak(trace, case.device) for trace in case.traces]
    if len({tuple(map(len, shapes)) for shapes in given}) != 1:
        yield _OTHER_CALLS.format(counts=", ".join(str(len(shapes)) for shapes in given))
        return
    for of_traces in zip(*given, strict=True):
        for sizes in zip(*of_traces, strict=True):
            if not laws.predictions(sizes, case.shapes, case.shapes[-1]):
                batches = ", ".join(str(shape.batch) for shape in case.shapes)
                yield _OTHER_SIZES.format(sizes=", ".join(map(str, sizes)), batches=batches)
                return


def _given_at_peak(trace: Trace, device: str) -> list[tuple[int, ...]]:
    """The shapes of the inputs of the step with the peak, in order."""
    alloc = allocations(trace)
    given = usage.on_device(trace, device) & (alloc.category == CATEGORY["inputs"])
    given &= (alloc.role != ROLE["target"]) & (alloc.step == (usage.peak(trace, device).step or 0))
    which = np.flatnonzero(given)
    shapes = grouping.group(trace, "shape", which)
    return [_numbers(shapes.names[code]) for code in shapes.codes.tolist() if code >= 0]


def _bounds(case: _Case, sizes: _Sizes) -> tuple[int, int]:
    """The least and the most: memory does not shrink when the batch grows."""
    peaks = [usage.peak(trace, case.device).bytes for trace in case.traces]
    pairs = list(zip(peaks, case.shapes, strict=True))
    below = [peak for peak, shape in pairs if shape.is_within(case.wanted)]
    above = [peak for peak, shape in pairs if case.wanted.is_within(shape)]
    highest, alive = _most(case, sizes)
    scratch = int(sizes.highest[alive & sizes.is_scratch].sum())
    most = min(above) + scratch if above else highest
    return max(max(below) - scratch, 0), most


def _most(case: _Case, sizes: _Sizes) -> tuple[int, Mask]:
    """The highest level if a larger batch is split, and the allocations alive there.

    Gradients then stay while other parts go forward, and a module's are made once more to be added.
    """
    alloc = allocations(case.last)
    gradients = usage.on_device(case.last, case.device)
    gradients &= alloc.category == CATEGORY["gradients"]
    size = sizes.highest.copy()
    size[~gradients] = 0
    held = _peak(case.last, case.device, size)[0]
    _, made = np.unique(
        np.stack([alloc.step, alloc.forward_module])[:, gradients], axis=1, return_inverse=True
    )
    again = np.bincount(made.ravel(), size[gradients]).max(initial=0)
    highest, alive = _peak(case.last, case.device, np.where(gradients, 0, sizes.highest))
    return highest + held + int(again), alive


def _words(shape: Shape) -> str:
    length = "" if shape.length is None else f", length {shape.length}"
    return f"batch {shape.batch}{length}"


def _peak(trace: Trace, device: str, size: I64) -> tuple[int, Mask]:
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


def _reserved(case: _Case, sizes: _Sizes, *, is_exact: bool) -> tuple[int, int]:
    """The least and the most that the allocator reserves with these sizes, in a few orders."""
    ends = (sizes.likely, sizes.likely) if is_exact else (sizes.recorded, sizes.highest)
    columns = steps(case.last, case.device).columns
    rules = replay.recorded_rules(case.last, case.device)
    found = []
    for size in ends:
        recorded = columns["block"] < len(size)
        block = np.minimum(columns["block"], len(size) - 1)
        grown = np.where(recorded, size[block], columns["bytes"]).astype(np.uint64)
        found.append(replay.in_orders({**columns, "bytes": grown}, rules, FEW_ORDERS))
    return int(found[0]["lowest_peak"]), int(found[1]["highest_peak"])


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
