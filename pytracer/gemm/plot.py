"""Throughput against each dimension, with what explains its steps. Needs matplotlib."""

import itertools
from pathlib import Path
from typing import Any

from pytracer import errors

_FORMATS = (".png", ".svg")
# How an operand's alignment is drawn: the fewer bytes, the emptier the mark.
_MARKS = {1: "x", 2: "x", 4: "+", 8: "v", 16: "s", 32: "s", 64: "o", 128: "o"}


def check(path: Path, *, overwrite: bool) -> None:
    """Refuses what could not be drawn, before anything is measured.

    Raises:
        errors.PytracerError: another format, a file that is there, or no matplotlib.
    """
    if path.suffix not in _FORMATS:
        raise errors.UsageError(f"{path}: a plot is a {' or a '.join(_FORMATS)} file")
    if path.exists() and not overwrite:
        raise errors.FileIsThere(path)
    try:
        import matplotlib as _  # noqa: F401, ICN001
    except ImportError:
        raise errors.PytracerError("drawing needs matplotlib: pip install matplotlib") from None


def draw(document: dict[str, Any], path: Path) -> None:
    """One panel per group of a sweep that varies a dimension."""
    from matplotlib.figure import Figure

    panels = [
        (group["title"], _varied(group["rows"]), group["rows"]) for group in document["groups"]
    ]
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        raise errors.UsageError("nothing to draw: no group varies one dimension alone")
    wide = min(3, len(panels))
    tall = -(-len(panels) // wide)
    figure = Figure(figsize=(4.6 * wide, 3.2 * tall), layout="constrained")
    axes = figure.subplots(tall, wide, squeeze=False)
    for spare in axes.flat[len(panels) :]:
        spare.set_visible(False)
    for ax, (title, dimension, rows) in zip(axes.flat, panels, strict=False):
        _panel(ax, title, dimension, sorted(rows, key=lambda row: row[dimension]))
    figure.suptitle(
        f"{document['device']['name']}, torch {document['device']['torch']}", fontsize=10
    )
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise errors.CannotWrite(f"cannot write {path}: {error.strerror}") from None


def _varied(rows: list[dict[str, Any]]) -> str:
    """The one dimension that differs, or nothing."""
    differing = [name for name in ("m", "n", "k") if len({row[name] for row in rows}) > 1]
    return differing[0] if len(differing) == 1 else ""


def _panel(ax: Any, title: str, dimension: str, rows: list[dict[str, Any]]) -> None:
    sizes = [row[dimension] for row in rows]
    rates = [row["tflops"] for row in rows]
    ax.plot(sizes, rates, color="0.7", linewidth=1, zorder=1)
    drawn: set[int] = set()
    for row in rows:
        aligned = min(row["alignment_bytes"].values())
        time = row["microseconds"]
        rate = row["tflops"]
        low, high = (rate * time["median"] / time[end] for end in ("high", "low"))
        older = row["older_kernel"]
        ax.errorbar(
            row[dimension],
            rate,
            yerr=[[rate - low], [high - rate]],
            marker=_MARKS[aligned],
            color="tab:red" if older else "tab:blue",
            markerfacecolor="none" if aligned < 128 else None,
            label=None if aligned in drawn else f"{aligned} bytes",
            linestyle="none",
            zorder=2,
        )
        drawn.add(aligned)
    _wave_boundaries(ax, dimension, rows)
    ax.set_title(
        title + (" (red: an older generation's kernel)" if _any_older(rows) else ""), fontsize=8
    )
    ax.set_xlabel(dimension)
    ax.set_ylabel("TFLOP/s")
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=6, title="aligned to", title_fontsize=6, loc="lower left")


def _any_older(rows: list[dict[str, Any]]) -> bool:
    return any(row["older_kernel"] for row in rows)


def _wave_boundaries(ax: Any, dimension: str, rows: list[dict[str, Any]]) -> None:
    """A line between neighbours of which one needs another wave."""
    for before, after in itertools.pairwise(rows):
        if not (before["tiling"] and after["tiling"]):
            continue
        if before["tiling"]["waves"] < after["tiling"]["waves"]:
            between = (before[dimension] + after[dimension]) / 2
            ax.axvline(between, color="0.5", linestyle=":", linewidth=1)
