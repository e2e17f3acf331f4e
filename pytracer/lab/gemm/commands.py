"""Does the work of `pytracer gemm`: options in; a document for programs and a text for people out."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytracer import errors
from pytracer.lab.gemm import device as devices, presets, report, shapes, sweep
from pytracer.lab.gemm.advice import advise, document as advice_document
from pytracer.lab.gemm.presets import Model
from pytracer.lab.gemm.shapes import LIBRARIES, ROLES, Gemm
from pytracer.lab.gemm.sweep import Knowledge
from pytracer.lab.gemm.timer import Comparison, Timer, Timing

Progress = Callable[[str], None]
Keep = Callable[[dict[str, Any]], None]

_SWEEP_DTYPES = ("bf16", "fp16", "tf32", "fp8")
_CPU_DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class Done:
    """The answer, as a document and as text."""

    document: dict[str, Any]
    text: str


def run(options: argparse.Namespace, traced: Model | None, progress: Progress, keep: Keep) -> Done:
    """Runs the command that the options name.

    Args:
        options: as `arguments.add` defines them.
        traced: for `advise`, the model from a trace.
        progress: called with a line about each measurement.
        keep: called with the document so far after each measurement, in case a time limit ends
            the program.

    Raises:
        errors.PytracerError: the command cannot run; the text says what to do instead.
    """
    device = devices.pick(options.device)
    timer = Timer(device)
    if options.what == "sweep":
        return _sweep(options, timer, progress, keep)
    if options.what == "find-peak":
        return _find_peak(options, timer, progress, keep)
    return _advise(options, traced, timer, progress)


def _listed(text: str, allowed: Sequence[str], option: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in words:
        if word not in allowed:
            raise errors.UsageError(f"--{option} {word!r}: there are {', '.join(allowed)}")
    return words


def _dtypes(options: argparse.Namespace, timer: Timer, default: Sequence[str]) -> tuple[str, ...]:
    if options.dtype is None:
        libraries = _libraries(options, timer)
        return tuple(
            name
            for name in default
            if name in devices.dtypes(timer.facts)
            and any(shapes.possible(Gemm(32, 32, 32, name, library=one)) for one in libraries)
        )
    wanted = _listed(options.dtype, tuple(shapes.DTYPES), "dtype")
    devices.require_dtypes(timer.facts, wanted)
    return wanted


def _libraries(options: argparse.Namespace, timer: Timer) -> tuple[str | None, ...]:
    if options.library is None:
        return (None,)
    wanted = _listed(options.library, LIBRARIES, "library")
    if timer.device.type != "cuda":
        raise errors.UsageError(f"--library {options.library}: {timer.device} has one library")
    return wanted


def _head(timer: Timer, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The keys that every document begins with."""
    return {
        "device": timer.facts.document(),
        "method": _method(timer),
        "clocks": sweep.gauges_summary(comparisons),
        "gauges": [reading for one in comparisons for reading in one.gauges],
        "notes": sorted({note for one in comparisons for note in one.notes}),
        "bias": [vars(one.bias) for one in comparisons if one.bias is not None],
    }


def _method(timer: Timer) -> dict[str, Any]:
    cuda = timer.device.type == "cuda"
    return {
        "version": 1,
        "sample": "one replay of a CUDA graph of calls, between events" if cuda else "a loop",
        "operands": f"random, rotated through {timer.caches[0]} times the cache where there is room",
        "pauses": "before each sample, for as long as it takes" if cuda else "none",
        "rounds": "interleaved, in random orders and the same backwards; two samples a round; "
        "medians of rounds with 95 % order-statistic intervals",
        "settings": vars(timer.settings),
    }


def _spend(timer: Timer, seconds: float) -> None:
    """Limits the seconds for each candidate, if the limit is less than the setting."""
    timer.settings = replace(timer.settings, seconds=min(seconds, timer.settings.seconds))


# ---------------------------------------------------------------------- sweep


def _sweep(options: argparse.Namespace, timer: Timer, progress: Progress, keep: Keep) -> Done:
    cuda = timer.device.type == "cuda"
    dtypes = _dtypes(options, timer, _SWEEP_DTYPES if cuda else _CPU_DTYPES)
    roles = _listed(options.roles, ROLES, "roles")
    if options.plot:
        from pytracer.lab.gemm import plot

        plot.check(options.plot, overwrite=options.force)
    libraries = _libraries(options, timer)
    groups = sweep.through(_groups(options, timer, dtypes, roles), libraries)
    for group in groups:
        timer.require_room([*group.works, group.works[0]])
    calibration = sweep.through(
        [group for dtype in dtypes for group in sweep.calibration_groups(timer.facts, dtype)],
        libraries,
    )
    candidates = sum(len(group.works) + 1 for group in [*calibration, *groups])
    _spend(timer, options.seconds / 2 / candidates)
    done: list[tuple[sweep.Group, Comparison]] = []
    total = len(groups) + len(calibration)
    for group, comparison in sweep.run([*calibration, *groups], timer):
        done.append((group, comparison))
        progress(f"{len(done)}/{total} {group.title}")
        if len(done) > len(calibration):
            knowledge = Knowledge(timer.facts, {}, {}, {})
            keep(_sweep_document(timer, done[len(calibration) :], done, knowledge))
    progress("asking which kernels ran")
    knowledge = _learn(timer, done[: len(calibration)], done)
    chosen = done[len(calibration) :]
    document = _sweep_document(timer, chosen, done, knowledge)
    rows = [row for group in document["groups"] for row in group["rows"]]
    text = [
        report.table(rows) + "\n",
        *report.conclusions(document["groups"]),
        _bias_text(chosen),
        report.gauges_text(document["clocks"], document["notes"]),
    ]
    if options.plot:
        from pytracer.lab.gemm import plot

        plot.draw(document, options.plot)
        text.append(f"Drawn in {options.plot}.")
    return Done(document, "\n".join(part for part in text if part))


def _groups(
    options: argparse.Namespace, timer: Timer, dtypes: Sequence[str], roles: Sequence[str]
) -> list[sweep.Group]:
    default = "4096" if timer.device.type == "cuda" else "512"
    given = {name: shapes.sizes(getattr(options, name) or default) for name in ("m", "n", "k")}
    single = all(len(sizes) == 1 for sizes in given.values())
    if options.batch < 1:
        raise errors.UsageError(f"--batch {options.batch}: it must be at least 1")
    if options.around and not single:
        raise errors.UsageError(f"--around {options.around} takes one size each of --m, --n, --k")
    if not single:
        made = [
            sweep.grid_groups(
                given["m"],
                given["n"],
                given["k"],
                (dtype,),
                sweep.roles_of(dtype, roles),
                options.batch,
            )
            for dtype in dtypes
        ]
        return [group for groups in made for group in groups]
    around = Gemm(given["m"][0], given["n"][0], given["k"][0], dtypes[0], roles[0], options.batch)
    varied = _listed(options.vary, ("m", "n", "k"), "vary")
    varied_groups: list[sweep.Group] = []
    for dtype in dtypes:
        shapes.check(replace(around, dtype=dtype))
        own = sweep.roles_of(dtype, roles)
        if options.around == "waves":
            varied_groups += sweep.wave_groups(around, (dtype,), own, timer.facts.multiprocessors)
        else:
            varied_groups += sweep.alignment_groups(around, (dtype,), own, varied)
    if not varied_groups:
        raise errors.UsageError("nothing to measure: the dtype allows none of the sizes")
    return varied_groups


def _learn(
    timer: Timer,
    calibration: Sequence[tuple[sweep.Group, Comparison]],
    done: Sequence[tuple[sweep.Group, Comparison]],
) -> Knowledge:
    """The kernels of all products, and the peak and the time model of each dtype."""
    works = [work for group, _ in done for work in group.works]
    kernels = sweep.learn_kernels(works, timer.device)
    peaks: dict[str, float] = {}
    training: dict[str, list[Timing]] = {}
    for _, comparison in done:
        for timing in comparison.timings:
            name = timing.work.dtype
            peaks[name] = max(peaks.get(name, 0.0), timing.tflops)
    for _, comparison in calibration:
        for timing in comparison.timings:
            training.setdefault(timing.work.dtype, []).append(timing)
    models = {
        dtype: fitted
        for dtype, timings in training.items()
        if (fitted := sweep.calibrate(timings, kernels, timer.facts)) is not None
    }
    return Knowledge(timer.facts, kernels, peaks, models)


def _sweep_document(
    timer: Timer,
    chosen: Sequence[tuple[sweep.Group, Comparison]],
    done: Sequence[tuple[sweep.Group, Comparison]],
    knowledge: Knowledge,
) -> dict[str, Any]:
    return {
        **_head(timer, [comparison for _, comparison in done]),
        "best_tflops": knowledge.peaks,
        "time_models": {dtype: vars(model) for dtype, model in knowledge.models.items()},
        "groups": [
            {
                "title": group.title,
                "stopped": comparison.stopped,
                "bias": vars(comparison.bias) if comparison.bias else None,
                "rows": [sweep.explain(timing, knowledge) for timing in comparison.timings],
            }
            for group, comparison in chosen
        ],
    }


def _bias_text(chosen: Sequence[tuple[sweep.Group, Comparison]]) -> str:
    off = [abs(one.bias.median - 1) for _, one in chosen if one.bias is not None]
    if not off:
        return ""
    off.sort()
    return (
        f"error of the measurement: the same product, timed twice, differed by "
        f"{off[len(off) // 2]:.2%} (median of {len(off)}), {off[-1]:.2%} at most"
    )


# ---------------------------------------------------------------------- find-peak


def _find_peak(options: argparse.Namespace, timer: Timer, progress: Progress, keep: Keep) -> Done:
    cuda = timer.device.type == "cuda"
    dtypes = _dtypes(options, timer, tuple(shapes.DTYPES) if cuda else _CPU_DTYPES)
    libraries = _libraries(options, timer)
    peaks: dict[str, sweep.Peak] = {}
    document: dict[str, Any] = {}
    counts = {d: len(libraries) * len(sweep.peak_candidates(timer.facts, d)) for d in dtypes}
    candidates = sum(count + 3 * sweep.FINALISTS for count in counts.values())
    _spend(timer, options.seconds / 2 / candidates)
    for dtype in dtypes:
        progress(f"{dtype}: {counts[dtype]} candidates")
        peaks[dtype] = sweep.find_peak(timer.facts, dtype, timer, libraries)
        document = _peak_document(timer, peaks, {})
        keep(document)
    kernels = sweep.learn_kernels(
        [
            timing.work
            for peak in peaks.values()
            for timing in peak.bursts.timings
            if isinstance(timing.work, Gemm)
        ],
        timer.device,
    )
    document = _peak_document(timer, peaks, kernels)
    lines = [
        report.peak_text(dtype, rows[0], document["sustained"][dtype])
        for dtype, rows in document["peaks"].items()
    ]
    lines.append(report.gauges_text(document["clocks"], document["notes"]))
    return Done(document, "\n".join(line for line in lines if line))


def _peak_document(
    timer: Timer, peaks: dict[str, sweep.Peak], kernels: dict[Gemm, Any]
) -> dict[str, Any]:
    best_tflops = {dtype: peak.bursts.timings[0].tflops for dtype, peak in peaks.items()}
    knowledge = Knowledge(timer.facts, kernels, best_tflops, {})
    return {
        **_head(timer, [one for peak in peaks.values() for one in (peak.bursts, peak.sustained)]),
        "peaks": {
            dtype: [sweep.explain(timing, knowledge) for timing in peak.bursts.timings]
            for dtype, peak in peaks.items()
        },
        "sustained": {
            dtype: sweep.explain(peak.sustained.timings[0], knowledge)
            for dtype, peak in peaks.items()
        },
    }


# ---------------------------------------------------------------------- advise


def _advise(
    options: argparse.Namespace, traced: Model | None, timer: Timer, progress: Progress
) -> Done:
    model = traced if traced is not None else _described(options)
    if options.step_ms is not None:
        model = replace(model, step_seconds=options.step_ms / 1e3)
    devices.require_dtypes(timer.facts, [model.dtype])
    libraries = _libraries(options, timer)
    if len(libraries) > 1:
        raise errors.UsageError(f"--library {options.library}: advise takes one library")
    _spend(timer, options.seconds / 200)
    advice = advise(
        model, timer, compiled=options.compiled, library=libraries[0], progress=progress
    )
    progress("asking which kernels ran")
    works = [timing.work for _, timing in advice.products if isinstance(timing.work, Gemm)]
    advice = replace(advice, kernels=sweep.learn_kernels(works, timer.device))
    document = {**_head(timer, advice.comparisons), **advice_document(advice)}
    clocks = report.gauges_text(document["clocks"], document["notes"])
    return Done(document, "\n".join([report.advice_text(advice), *([clocks] if clocks else [])]))


def _described(options: argparse.Namespace) -> Model:
    names = ("vocab", "hidden", "ffn", "layers", "batch", "seq")
    dtype = options.dtype or "bf16"
    if dtype not in shapes.DTYPES:
        raise errors.UsageError(f"--dtype {dtype!r}: there are {', '.join(shapes.DTYPES)}")
    given = {name: getattr(options, name) for name in names}
    return presets.described(options.model, dtype, given)
