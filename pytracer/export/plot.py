"""Plots a trace with matplotlib: stacked categories over time, with long idle times cut."""

from typing import TYPE_CHECKING, Any

import numpy as np

from pytracer import errors
from pytracer.basics.units import size_text, time_text
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORY_COLORS
from pytracer.export.series import LEAST_APART, Clock, Series, clock, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 2000
_MOST_STEPS = 30  # lines of more steps would be noise
_PHASES = {"forward": 0.10, "backward": 0.22, "recompute": 0.16, "optimizer": 0.30}
_LATE = 0.75  # of the width: a text to the right would leave the picture
_MIB = 2**20


def plot(trace: Trace, ax: "Axes | None" = None, device: str | None = None) -> "Axes":
    """Draws on the axes, or on new ones, and returns them.

    Raises:
        errors.PytracerError: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot as plt
        from matplotlib.transforms import blended_transform_factory
    except ImportError:
        raise errors.PytracerError("a plot needs matplotlib: pip install matplotlib") from None
    shown = series(trace, _POINTS, device)
    axes: Any = ax if ax is not None else plt.subplots(figsize=(10, 4.5), layout="constrained")[1]
    times = shown.times_ns / 1e6
    scale = clock(times)
    names = list(shown.levels)
    if names:
        axes.stackplot(
            times,
            np.array([shown.levels[name] for name in names]) / _MIB,
            labels=names,
            colors=[CATEGORY_COLORS[name] for name in names],
            step="post",
            linewidth=0,
        )
    strip = blended_transform_factory(axes.transData, axes.transAxes)
    _phases_and_steps(axes, shown, scale, strip)
    peak = shown.peak
    late = scale.place(np.array([peak.time_ns / 1e6]))[0] > (_LATE if ax is None else 0.5)
    axes.plot([peak.time_ns / 1e6], [peak.bytes / _MIB], "v", color="black", markersize=6)
    axes.annotate(
        f"peak {size_text(peak.bytes)}",
        (peak.time_ns / 1e6, peak.bytes / _MIB),
        textcoords="offset points",
        xytext=(-6 if late else 6, 4),
        ha="right" if late else "left",
        fontsize=9,
        zorder=6,  # above the grey of cut times
    )
    axes.set_xlabel("time (ms)")
    axes.set_ylabel(f"{peak.device} memory (MiB)")
    axes.margins(x=0)
    _cut(axes, scale, strip)
    axes.set_ylim(0, max(peak.bytes / _MIB, 1e-9) * 1.12)
    if names:
        _legend(axes, is_alone=ax is None, late=late)
    result: Axes = axes
    return result


def _legend(axes: Any, *, is_alone: bool, late: bool) -> None:
    """Beside the data; where the axes have neighbours, in the corner that is far from the peak."""
    place: dict[str, Any] = {"loc": "upper left" if late else "upper right"}
    if is_alone:
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0}
    axes.legend(**place, fontsize=8, reverse=True)


def _phases_and_steps(axes: Any, shown: Series, scale: Clock, strip: Any) -> None:
    """Draws phases in a strip below the data, and steps as lines across the data."""
    for band in shown.phases:
        axes.fill_between(
            [band.begin_ns / 1e6, band.end_ns / 1e6],
            -0.02,
            0.0,
            transform=strip,
            color="0.2",
            alpha=_PHASES.get(band.name, 0.05) * 2,
            linewidth=0,
            clip_on=False,
        )
    if len(shown.steps) <= _MOST_STEPS:
        before = -1.0
        for step in shown.steps:
            axes.axvline(step.end_ns / 1e6, color="0.5", linewidth=0.6, linestyle=":")
            middle = scale.place(np.array([step.begin_ns, step.end_ns]) / 1e6).mean()
            if middle - before >= LEAST_APART:
                before, at = middle, scale.time(middle)
                axes.text(at, 1.01, f"step {step.name}", transform=strip, ha="center", fontsize=8)


def _cut(axes: Any, scale: Clock, strip: Any) -> None:
    """Cuts idle stretches, labels them with their length, and puts ticks into the busy ones."""
    if not scale.idle:
        return
    from matplotlib.ticker import MaxNLocator

    axes.set_xscale("function", functions=(scale.place, scale.time))
    for begin, end in scale.idle:
        axes.axvspan(begin, end, color="0.9", zorder=3)
        middle = scale.time((scale.place(begin) + scale.place(end)) / 2)
        text = f"{time_text(round((end - begin) * 1e6))} idle, cut"
        axes.text(
            middle,
            0.5,
            text,
            transform=strip,
            rotation=90,
            ha="center",
            va="center",
            fontsize=7,
            zorder=4,
        )
    ticks: list[float] = []
    knots = scale.times[1:-1]
    for begin, end in zip(knots[::2], knots[1::2], strict=True):
        bins = max(round(8 * float(scale.place(end) - scale.place(begin))), 1)
        values = MaxNLocator(bins).tick_values(begin, end)
        for tick in values[(values >= begin) & (values <= end)]:
            if not ticks or scale.place(tick) - scale.place(ticks[-1]) >= LEAST_APART:
                ticks.append(float(tick))
    axes.set_xticks(ticks, [f"{tick:,.6g}" for tick in ticks])
    axes.minorticks_off()
