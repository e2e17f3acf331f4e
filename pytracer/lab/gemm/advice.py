"""Advises which size of a model to pad, and to what. Measures the gain, forward and backward.

Some sizes leave an operand less than 128 bytes aligned. For each of them, every product with that
size is timed as it is and at each larger size worth trying, in the same rounds. A larger size is
advised only if all products of the step together were faster. The gain must exceed its interval and
the null, in which the same product runs twice.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer import errors
from pytracer.lab.gemm import shapes, statistics
from pytracer.lab.gemm.kernels import Kernel
from pytracer.lab.gemm.presets import Layer, Model
from pytracer.lab.gemm.shapes import DTYPES, MOST_ALIGNED, CrossEntropy, Gemm, Work
from pytracer.lab.gemm.statistics import Interval
from pytracer.lab.gemm.timer import EVEN, Comparison, Measure, Pace, Timing

_LEAST_GAIN = 0.002  # of the measured products' time: a smaller gain is not worth a line
_AS_GOOD = 0.01  # candidates this close to the best count as equal, and the smallest is chosen


@dataclass(frozen=True)
class Use:
    """A product, and the number of times that a training step runs it."""

    work: Work
    layer: str
    role: str
    count: int


@dataclass(frozen=True)
class Candidate:
    """A larger size in place of the model's own."""

    value: int
    seconds: Interval  # of all products of a step with this size
    gain: Interval  # seconds that it saves per step
    spread: Interval  # of the gain from round to round, so what a single step may show
    doubt: float  # seconds by which the measurement could be wrong, from the null
    added_bytes: dict[str, int]  # by category
    faster: bool

    @property
    def within_doubt(self) -> bool:
        """Whether it was faster, but by no more than the null was off."""
        return 0 < self.gain.low <= self.doubt


@dataclass(frozen=True)
class Part:
    """A product's share of the candidates' gains."""

    layer: str
    role: str
    count: int
    before: Timing
    after: dict[int, Timing]  # by the size tried


@dataclass(frozen=True)
class Dimension:
    """A size of the model, its candidates, and the advice."""

    name: str
    value: int
    candidates: tuple[Candidate, ...]
    parts: tuple[Part, ...]
    advised: Candidate | None
    reason: str
    refused: dict[int, str] = field(default_factory=dict)  # sizes that could not be measured


@dataclass(frozen=True)
class Advice:
    """The measurements of a model, and the advice that follows."""

    model: Model
    products: tuple[tuple[Use, Timing], ...]  # unpadded; the one that loses most time is first
    best_tflops: float
    dimensions: tuple[Dimension, ...]
    comparisons: tuple[Comparison, ...]
    kernels: dict[Gemm, Kernel] = field(default_factory=dict)  # of the products, where known

    @property
    def seconds(self) -> float:
        """The time of a step's products, unpadded."""
        return sum(use.count * timing.time.median for use, timing in self.products)

    def lost(self, use: Use, timing: Timing) -> float:
        """Seconds per step that a product loses against the best measured rate."""
        if not use.work.flops:
            return 0.0
        return use.count * (timing.time.median - use.work.flops / self.best_tflops / 1e12)


def uses(model: Model) -> list[Use]:
    """Every product of a step. Equal products of a layer are one use with a count."""
    listed = [
        Use(gemm, layer.name, role, layer.count)
        for layer in model.layers
        for role, gemm in model.products(layer).items()
    ]
    listed += [
        Use(_loss_of(model, layer), layer.name, "loss", layer.count)
        for layer in model.layers
        if layer.loss
    ]
    return listed


def _loss_of(model: Model, layer: Layer) -> CrossEntropy:
    return CrossEntropy(model.rows, model.size(layer.out), model.dtype)


def misaligned(model: Model) -> dict[str, int]:
    """The sizes that leave an operand less than 128 bytes aligned, with their alignment in bytes."""
    alignments: dict[str, int] = {}
    itemsize = DTYPES[model.dtype].bytes
    for layer in model.layers:
        for name, times in (layer.out, layer.inner):
            aligned = shapes.aligned_to(model.sizes[name] * times * itemsize)
            if aligned < MOST_ALIGNED:
                alignments[name] = min(aligned, alignments.get(name, MOST_ALIGNED))
    aligned = shapes.aligned_to(model.rows * itemsize)
    if aligned < MOST_ALIGNED:
        alignments["seq"] = aligned
    return alignments


def advise(
    model: Model,
    measure: Measure,
    *,
    compiled: bool = False,
    library: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Advice:
    """Measures the products of a model, and then each padding that could help."""

    def as_run(work: Work) -> Work:
        if not isinstance(work, Gemm):
            return work
        return replace(work, compiled=compiled, library=library)

    for use in uses(model):
        shapes.check(as_run(use.work))
    comparisons: list[Comparison] = []

    def measured(works: Sequence[Work], *, null: bool = False, pace: Pace = EVEN) -> Comparison:
        comparison = measure([as_run(work) for work in works], null=null, pace=pace)
        comparisons.append(comparison)
        return comparison

    timed: dict[Work, Timing] = {}
    for use in uses(model):
        if use.work not in timed:
            progress(f"{use.layer}: {use.work}")
            timed[use.work] = measured([use.work]).timings[0]
    dimensions = [_dimension(model, name, measured, progress) for name in misaligned(model)]
    dimensions.sort(key=lambda one: -(one.advised.gain.median if one.advised else 0))
    reference = _reference(model, timed, measured, progress)
    products = [(use, timed[use.work]) for use in uses(model)]
    advice = Advice(model, (), reference, tuple(dimensions), tuple(comparisons))
    products.sort(key=lambda pair: -advice.lost(*pair))
    return replace(advice, products=tuple(products))


def _reference(
    model: Model, timed: dict[Work, Timing], measured: Measure, progress: Callable[[str], None]
) -> float:
    """The best rate of the model's products and of a fully aligned copy of the largest one."""
    largest = max((use.work for use in uses(model) if isinstance(use.work, Gemm)), key=_flops)
    aligned = Gemm(_down(largest.m), _down(largest.n), _down(largest.k), model.dtype)
    progress(f"for comparison: {aligned}")
    best = measured([aligned]).timings[0].tflops
    return max([best, *(timing.tflops for timing in timed.values())])


def _flops(gemm: Gemm) -> int:
    return gemm.flops


def _down(size: int) -> int:
    """A multiple of 256 near this size. It is at most 8192, because larger products take seconds."""
    return max(256, min(size, 8192) // 256 * 256)


# ---------------------------------------------------------------------- one size


@dataclass(frozen=True)
class _Rounds:
    """The samples of one product: a row for each round, a column for each size."""

    count: int
    seconds: NDArray[np.float64]
    bias: float  # of the null, relative


def _dimension(
    model: Model, name: str, measured: Measure, progress: Callable[[str], None]
) -> Dimension:
    value = model.sizes[name]
    values, refused = _possible(model, name)
    try:
        rounds, parts = _measured(model, name, values, measured, progress)
    except errors.PytracerError as error:
        reason = f"{called(name, value)} was not measured: {error}"
        return Dimension(name, value, (), (), None, reason)
    candidates = tuple(
        _candidate(model, name, size, rounds, column) for column, size in enumerate(values, 1)
    )
    advised = _chosen(candidates)
    reason = _reason(name, value, model, candidates, advised)
    return Dimension(name, value, candidates, tuple(parts), advised, reason, refused)


def _measured(
    model: Model,
    name: str,
    values: Sequence[int],
    measured: Measure,
    progress: Callable[[str], None],
) -> tuple[list[_Rounds], list[Part]]:
    """Times every product that changes with the size, at all of these values."""
    rounds: list[_Rounds] = []
    parts: list[Part] = []
    for use, padded in _affected(model, name, values):
        progress(f"padding {called(name, model.sizes[name])}: {use.layer}, {use.role}")
        works = [use.work, *padded]
        # Sizes that do not change a product need not be timed twice.
        distinct = list(dict.fromkeys(works))
        comparison = measured(distinct, null=True)
        columns = dict(zip(distinct, comparison.timings, strict=True))
        samples = np.array([columns[work].seconds for work in works]).T
        rounds.append(_Rounds(use.count, samples, comparison.doubt))
        after = {size: columns[work] for size, work in zip(values, padded, strict=True)}
        parts.append(Part(use.layer, use.role, use.count, columns[use.work], after))
    return rounds, parts


def _possible(model: Model, name: str) -> tuple[list[int], dict[int, str]]:
    """The sizes to try, and the sizes that the dtype does not allow, with the reason."""
    itemsize = DTYPES[model.dtype].bytes
    wanted = shapes.paddings(model.sizes[name], itemsize)
    if name == "seq":  # the number of tokens, batch times seq, must be aligned
        unit = MOST_ALIGNED // itemsize
        wanted = [size for size in wanted if size * model.sizes["batch"] % unit == 0] or wanted
    possible, refused = [], {}
    for size in wanted:
        bad = [
            use.work for use in uses(model.with_size(name, size)) if not shapes.possible(use.work)
        ]
        if bad:
            refused[size] = f"{bad[0]} cannot be"
        else:
            possible.append(size)
    return possible, refused


def _affected(model: Model, name: str, values: Sequence[int]) -> Iterator[tuple[Use, list[Work]]]:
    """The uses that change with a size, each with its products at these values.

    Layers with the same products at every value are one use, so each product is timed once.
    """
    others = [uses(model.with_size(name, value)) for value in values]
    merged: dict[tuple[Work, ...], Use] = {}
    for i, use in enumerate(uses(model)):
        works = (use.work, *(other[i].work for other in others))
        if set(works) == {use.work}:
            continue
        equal = merged.get(works)
        count = use.count + (equal.count if equal else 0)
        layer = f"{equal.layer}, {use.layer}" if equal else use.layer
        merged[works] = replace(use, count=count, layer=layer)
    for works, use in merged.items():
        yield use, list(works[1:])


def _candidate(
    model: Model, name: str, size: int, rounds: Sequence[_Rounds], column: int
) -> Candidate:
    before = statistics.sum_of_medians([(one.count, one.seconds[:, 0]) for one in rounds])
    seconds = statistics.sum_of_medians([(one.count, one.seconds[:, column]) for one in rounds])
    # Differences are taken within a round, so a slow moment cancels out.
    gain = statistics.sum_of_medians(
        [(one.count, one.seconds[:, 0] - one.seconds[:, column]) for one in rounds]
    )
    doubt = sum(one.count * float(np.median(one.seconds[:, 0])) * one.bias for one in rounds)
    return Candidate(
        size,
        seconds,
        gain,
        _spread(rounds, column),
        doubt,
        added_bytes(model, model.with_size(name, size)),
        faster=gain.low > doubt and gain.median > _LEAST_GAIN * before.median,
    )


def _spread(rounds: Sequence[_Rounds], column: int) -> Interval:
    """The sum over products of the gain of single rounds, from the 5th to the 95th percentile."""
    quantiles = np.zeros(3)
    for one in rounds:
        differences = one.seconds[:, 0] - one.seconds[:, column]
        quantiles += one.count * np.quantile(differences, [0.5, 0.05, 0.95])
    return Interval(*(float(value) for value in quantiles))


def _chosen(candidates: Sequence[Candidate]) -> Candidate | None:
    """The smallest candidate among those as good as the best; None if no candidate was faster."""
    faster = [candidate for candidate in candidates if candidate.faster]
    if not faster:
        return None
    best = min(candidate.seconds.median for candidate in faster)
    return min(
        (one for one in faster if one.seconds.median <= best * (1 + _AS_GOOD)),
        key=lambda candidate: candidate.value,
    )


def called(name: str, value: int) -> str:
    """A size as people read it. A trace's sizes have values but no names."""
    return f"size {value}" if name == str(value) else f"{name} {value}"


def _reason(
    name: str,
    value: int,
    model: Model,
    candidates: Sequence[Candidate],
    advised: Candidate | None,
) -> str:
    aligned = misaligned(model)[name]
    where = called(name, value)
    if name == "seq":
        where = f"{model.rows} tokens ({where})"
    head = f"{where}: rows of {model.dtype} are {aligned} bytes aligned"
    if not candidates:
        return f"{head}, and no larger size could be measured"
    if advised is None:
        tried = ", ".join(str(candidate.value) for candidate in candidates)
        return f"{head}, and none of {tried} is proven faster"
    not_faster = [one.value for one in candidates if one.value < advised.value and not one.faster]
    if not_faster:
        listed = ", ".join(map(str, not_faster))
        return f"{head}; {advised.value} was measured faster, of {listed} that is not proven"
    return f"{head}; {advised.value} was measured faster"


def added_bytes(before: Model, after: Model) -> dict[str, int]:
    """The bytes that padding adds, by category.

    Activations are the outputs of the layers and the loss's float32 copy. Other tensors of that size
    grow by the same share.
    """
    parameters = after.parameters - before.parameters
    return {
        "weights": parameters * before.parameter_bytes,
        "gradients": parameters * before.gradient_bytes,
        "optimizer_state": parameters * before.optimizer_bytes,
        "activations": after.output_bytes - before.output_bytes,
    }


# ---------------------------------------------------------------------- as a document


def document(advice: Advice) -> dict[str, Any]:
    """The advice for JSON, with all samples."""
    step = advice.model.step_seconds
    return {
        "model": {
            "name": advice.model.name,
            "sizes": advice.model.sizes,
            "dtype": advice.model.dtype,
            "step_ms": step * 1e3 if step else None,
            "notes": list(advice.model.notes),
            "optimizer_bytes_per_parameter": advice.model.optimizer_bytes,
            "bytes_per_parameter": advice.model.parameter_bytes,
        },
        "best_tflops": advice.best_tflops,
        "products_ms": advice.seconds * 1e3,
        "products": [
            {
                "layer": use.layer,
                "role": use.role,
                "count": use.count,
                "work": str(use.work),
                "ms_per_step": use.count * timing.time.median * 1e3,
                "lost_ms_per_step": advice.lost(use, timing) * 1e3,
                "kernel": _kernel(advice, timing),
                **_timing(timing),
            }
            for use, timing in advice.products
        ],
        "dimensions": [_dimension_document(one, step) for one in advice.dimensions],
    }


def _dimension_document(dimension: Dimension, step: float | None) -> dict[str, Any]:
    return {
        "name": dimension.name,
        "value": dimension.value,
        "advised": dimension.advised.value if dimension.advised else None,
        "reason": dimension.reason,
        "refused": dimension.refused,
        "candidates": [
            {
                "value": one.value,
                "faster": one.faster,
                "ms_per_step": _ms(one.seconds),
                "gain_ms_per_step": _ms(one.gain),
                "single_steps_gain_ms": _ms(one.spread),
                "doubt_ms_per_step": one.doubt * 1e3,
                "gain_of_step": one.gain.median / step if step else None,
                "added_bytes": one.added_bytes,
            }
            for one in dimension.candidates
        ],
        "parts": [
            {
                "layer": part.layer,
                "role": part.role,
                "count": part.count,
                "work": str(part.before.work),
                **_timing(part.before),
                "padded": [
                    {
                        "value": value,
                        "work": str(timing.work),
                        "ratio": vars(statistics.ratio(part.before.seconds, timing.seconds)),
                        **_timing(timing),
                    }
                    for value, timing in part.after.items()
                ],
            }
            for part in dimension.parts
        ],
    }


def _kernel(advice: Advice, timing: Timing) -> dict[str, Any] | None:
    work = timing.work
    kernel = advice.kernels.get(work) if isinstance(work, Gemm) else None
    return asdict(kernel) if kernel else None


def _timing(timing: Timing) -> dict[str, Any]:
    return {
        "tflops": timing.tflops or None,
        "microseconds": {name: value * 1e6 for name, value in vars(timing.time).items()},
        "samples_microseconds": [round(value * 1e6, 4) for value in timing.samples],
    }


def _ms(interval: Interval) -> dict[str, float]:
    return {name: value * 1e3 for name, value in vars(interval).items()}
