"""Measures many products in groups, and explains each.

The products of a group run in the same rounds, so they can be compared. Each group is yielded as
soon as it is done, so a time limit loses only the last one.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from pytracer import errors
from pytracer.lab.gemm import kernels, model, shapes
from pytracer.lab.gemm.device import Facts, datasheet
from pytracer.lab.gemm.kernels import Kernel
from pytracer.lab.gemm.shapes import DTYPES, ROLES, Gemm
from pytracer.lab.gemm.timer import EVEN, SUSTAINED, Comparison, Measure, Pace, Timing

_MOST_IN_A_GROUP = 20  # memory holds the operands of a whole group
FINALISTS = 4
# Before each round of the finalists. On an H200 large products reach the power limit after some
# 50 ms, and the clock falls. 0.2 s later it is back.
_REST_SECONDS = 0.25


@dataclass(frozen=True)
class Group:
    """Products that run in the same rounds."""

    title: str
    works: tuple[Gemm, ...]


def base(dimensions: tuple[int, int, int], dtype: str, role: str, batch: int = 1) -> Gemm:
    """The product whose sizes the others vary."""
    m, n, k = dimensions
    return Gemm(m, n, k, dtype, role, batch)


def alignment_groups(
    around: Gemm, dtypes: Sequence[str], roles: Sequence[str], dimensions: Sequence[str]
) -> list[Group]:
    """Each dimension at 64, 32, ... 1 elements below a multiple of 128, which has all alignments."""
    groups = []
    for dtype in dtypes:
        for role in roles:
            aligned = Gemm(around.m, around.n, around.k, dtype, role, around.batch)
            for dimension in dimensions:
                sizes = shapes.below(getattr(aligned, dimension))
                works = shapes.vary(aligned, dimension, sizes)
                if len(works) > 1:
                    groups.append(Group(f"{dtype} {role} {dimension}", tuple(reversed(works))))
    return groups


def wave_groups(
    around: Gemm, dtypes: Sequence[str], roles: Sequence[str], multiprocessors: int
) -> list[Group]:
    """Sizes of n for which the last wave of 128x256 tiles is full or has just begun."""
    sizes = shapes.across_waves(around.m, 128, 256, multiprocessors)
    groups = []
    for dtype in dtypes:
        for role in roles:
            aligned = Gemm(around.m, around.n, around.k, dtype, role, around.batch)
            works = shapes.vary(aligned, "n", sizes)
            if len(works) > 1:
                groups.append(Group(f"{dtype} {role} waves", tuple(works)))
    return groups


def grid_groups(
    m: Sequence[int],
    n: Sequence[int],
    k: Sequence[int],
    dtypes: Sequence[str],
    roles: Sequence[str],
    batch: int = 1,
) -> list[Group]:
    """Every combination of the sizes. A combination that a dtype forbids is an error."""
    groups = []
    for dtype in dtypes:
        for role in roles:
            works = [
                Gemm(rows, columns, depth, dtype, role, batch)
                for rows in m
                for columns in n
                for depth in k
            ]
            for gemm in works:
                shapes.check(gemm)
            parts = range(0, len(works), _MOST_IN_A_GROUP)
            for number, part in enumerate(parts, 1):
                chosen = tuple(works[part : part + _MOST_IN_A_GROUP])
                which = f", {number} of {len(parts)}" if len(parts) > 1 else ""
                groups.append(Group(f"{dtype} {role}{which}", chosen))
    return groups


def through(groups: Iterable[Group], libraries: Sequence[str | None]) -> list[Group]:
    """The same products by each of these libraries, in the same rounds. None is torch's choice.

    Raises:
        errors.UsageError: no library of these multiplies this dtype.
    """
    extended = []
    for group in groups:
        works = [replace(work, library=name) for name in libraries for work in group.works]
        able = tuple(work for work in works if shapes.possible(work))
        if not able:
            shapes.check(works[0])
        extended.append(replace(group, works=able))
    return extended


def run(groups: Iterable[Group], measure: Measure) -> Iterator[tuple[Group, Comparison]]:
    """Measures one group after another. Each runs its first product twice, which shows the bias."""
    for group in groups:
        yield group, measure(group.works, null=True)


# ---------------------------------------------------------------------- the best there is


def peak_candidates(facts: Facts, dtype: str) -> list[Gemm]:
    """Large aligned products. Some fill every wave to the last multiprocessor."""
    if facts.kind == "cpu":
        sizes = [(256, 256, 256), (512, 512, 512), (768, 768, 768), (1024, 1024, 1024)]
    else:
        sizes = [
            (4096, 4096, 4096),
            (8192, 8192, 8192),
            (4096, 8192, 4096),
            (8192, 4096, 8192),
            (8192, 8192, 4096),
            (6144, 6144, 6144),
            *(
                (rows, columns, depth)
                for rows, columns in full_waves(facts.multiprocessors)
                for depth in (4096, 8192)
            ),
        ]
    return [Gemm(m, n, k, dtype) for m, n, k in dict.fromkeys(sizes)]


def full_waves(multiprocessors: int) -> list[tuple[int, int]]:
    """Sizes of about square results whose 128x256 tiles make whole waves."""
    sizes = []
    for waves in (4, 8, 16):
        tiles = waves * multiprocessors
        tall = min(
            (rows for rows in range(1, tiles + 1) if tiles % rows == 0),
            key=lambda rows: abs(math.log(rows * 128 / (tiles // rows * 256))),
        )
        sizes.append((tall * 128, tiles // tall * 256))
    return sizes


@dataclass(frozen=True)
class Peak:
    """The most that a device does in one dtype, after a rest and sustained.

    Both have the fastest products in the same order, which is that of the bursts.
    """

    bursts: Comparison  # each pass after a rest
    sustained: Comparison  # without a pause


def find_peak(
    facts: Facts, dtype: str, measure: Measure, libraries: Sequence[str | None] = (None,)
) -> Peak:
    """Finds the fastest products of this dtype: times all once, then the finalists together."""
    (all_of_them,) = through([Group(dtype, tuple(peak_candidates(facts, dtype)))], libraries)
    candidates = all_of_them.works
    timings: list[Timing] = []
    for part in range(0, len(candidates), FINALISTS):
        timings += measure(candidates[part : part + FINALISTS]).timings
    timings.sort(key=lambda timing: -timing.tflops)
    finalists = [timing.work for timing in timings[:FINALISTS]]
    sustained = measure(finalists, pace=SUSTAINED)
    bursts = measure(finalists, null=True, pace=rested(facts))
    order = sorted(range(len(finalists)), key=lambda i: -bursts.timings[i].tflops)
    return Peak(_in_order(bursts, order), _in_order(sustained, order))


def _in_order(comparison: Comparison, order: Sequence[int]) -> Comparison:
    return replace(comparison, timings=tuple(comparison.timings[i] for i in order), null=None)


def rested(facts: Facts) -> Pace:
    """A pace with rests long enough to reach the highest rate of a burst."""
    return Pace(rest=_REST_SECONDS) if facts.kind == "cuda" else EVEN


# ---------------------------------------------------------------------- calibration


def calibration_groups(facts: Facts, dtype: str) -> list[Group]:
    """Aligned products of many sizes, from a single wave to dozens, from short to deep."""
    if facts.kind == "cpu":
        sizes = [(64, 64, 64), (128, 256, 64), (256, 256, 256), (512, 128, 256), (512, 512, 512)]
    else:
        sizes = [
            (128, 128, 128),
            (1024, 1024, 1024),
            (2048, 2048, 512),
            (2048, 4096, 2048),
            (4096, 4096, 1024),
            (4096, 4096, 4096),
            (8192, 4096, 2048),
            (8192, 8192, 4096),
            (8192, 3072, 768),
            (8192, 8192, 128),
            (16384, 1024, 1024),
            (1024, 8192, 8192),
        ]
    works = [Gemm(m, n, k, dtype) for m, n, k in sizes]
    # Every second one, so that each group has small and large products.
    return [Group(f"{dtype} calibration", tuple(works[part::2])) for part in (0, 1)]


def calibrate(
    timings: Sequence[Timing], kernels: dict[Gemm, Kernel], facts: Facts
) -> model.TimeModel | None:
    """The time model of one dtype, fitted to its timings; None if there are too few."""
    rows = [
        (
            timing.work,
            model.tiling_of(timing.work, kernels.get(timing.work), facts),
            timing.time.median,
        )
        for timing in timings
        if isinstance(timing.work, Gemm)
    ]
    return model.fit(rows, facts.multiprocessors) if len(rows) >= 4 else None


# ---------------------------------------------------------------------- the explanation


@dataclass(frozen=True)
class Knowledge:
    """The facts that explain a row: the device, its kernels, its peaks and its time models."""

    facts: Facts
    kernels: dict[Gemm, Kernel]
    peaks: dict[str, float]  # measured TFLOP/s by dtype
    models: dict[str, model.TimeModel]


def learn_kernels(gemms: Sequence[Gemm], device: torch.device) -> dict[Gemm, Kernel]:
    """The main kernel of each product. Empty on a CPU."""
    main_kernels = {}
    for gemm, names in kernels.names_of(gemms, device).items():
        kernel = kernels.main_kernel(names)
        if kernel is not None:
            main_kernels[gemm] = kernel
    return main_kernels


def explain(timing: Timing, knowledge: Knowledge, *, samples: bool = True) -> dict[str, Any]:
    """One product as a row: its sizes, its time, and the reasons for it."""
    gemm = timing.work
    if not isinstance(gemm, Gemm):
        raise errors.UsageError(f"{gemm} is no matrix product")
    time = timing.time
    facts = knowledge.facts
    kernel = knowledge.kernels.get(gemm)
    tiles = model.tiling_of(gemm, kernel, facts)
    limit = model.roofline(gemm, facts)
    sheet = datasheet(facts.name)
    peak = knowledge.peaks.get(gemm.dtype)
    fitted = knowledge.models.get(gemm.dtype)
    predicted = fitted.predict(gemm, tiles) if fitted else None
    row: dict[str, Any] = {
        "m": gemm.m,
        "n": gemm.n,
        "k": gemm.k,
        "batch": gemm.batch,
        "dtype": gemm.dtype,
        "role": gemm.role,
        "layout": gemm.layout,
        "compiled": gemm.compiled,
        "library": gemm.library,
        "alignment_bytes": gemm.alignment,
        "microseconds": {
            "median": time.median * 1e6,
            "low": time.low * 1e6,
            "high": time.high * 1e6,
        },
        "tflops": timing.tflops,
        "datasheet_share": _share(timing.tflops, sheet.tflops.get(gemm.dtype) if sheet else None),
        "peak_share": _share(timing.tflops, peak),
        "bound": limit.bound if limit else None,
        "roofline_microseconds": limit.seconds * 1e6 if limit else None,
        "kernel": asdict(kernel) if kernel else None,
        "older_kernel": _is_older(kernel, facts),
        "tiling": asdict(tiles) if tiles else None,
        "predicted_microseconds": predicted * 1e6 if predicted else None,
        "prediction_error": predicted / time.median - 1 if predicted else None,
        "cold": timing.cold,
        "result_error": timing.error,
        "rounds": len(timing.seconds),
        "calls_per_sample": timing.calls,
    }
    if samples:
        row["samples_microseconds"] = [round(value * 1e6, 4) for value in timing.samples]
    return row


def _share(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None


def _is_older(kernel: Kernel | None, facts: Facts) -> bool | None:
    """Whether the kernel is for an older generation than the device; None if that is unknown."""
    if kernel is None or kernel.arch is None or facts.capability is None:
        return None
    return kernel.arch // 10 < facts.capability[0]


def gauges_summary(comparisons: Iterable[Comparison]) -> dict[str, Any] | None:
    """The range of the clock, the highest power and heat, and the reasons that held the clock down."""
    readings = [reading for comparison in comparisons for reading in comparison.gauges]
    if not readings:
        return None
    clocks = sorted(reading["sm_mhz"] for reading in readings)
    return {
        "readings": len(readings),
        "sm_mhz": {"least": clocks[0], "median": clocks[len(clocks) // 2], "most": clocks[-1]},
        "most_watts": max(reading["watts"] for reading in readings),
        "most_celsius": max(reading["celsius"] for reading in readings),
        "held_by": sorted({word for reading in readings for word in reading["held_by"]}),
    }


def roles_of(dtype: str, wanted: Sequence[str] = ROLES) -> tuple[str, ...]:
    """The roles that differ in this dtype. 8-bit operands have one layout, so one role is enough."""
    return tuple(wanted[:1]) if DTYPES[dtype].bytes == 1 else tuple(wanted)
