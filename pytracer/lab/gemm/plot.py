"""Plots throughput against each dimension, with the reasons of its steps. Needs matplotlib."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytracer import errors

_FORMATS = (".png", ".svg")
# The mark for an operand's alignment: the fewer bytes, the emptier the mark.
_MARKS = {1: "1", 2: "x", 4: "+", 8: "v", 16: "s", 32: "D", 64: "^", 128: "o"}


def check(path: Path, *, overwrite: bool) -> None:
    """Checks that the plot can be drawn, before anything is measured.

    Raises:
        errors.PytracerError: the format is unknown, the file exists, or matplotlib is missing.
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
    """Draws a panel for each group of the sweep that varies one dimension."""
    from matplotlib.figure import Figure

    panels = [
        (title, varied, sorted(rows, key=lambda row: row[varied]))
        for group in document["groups"]
        for title, rows in _by_library(group)
        if (varied := _varied(rows))
    ]
    if not panels:
        raise errors.UsageError("nothing to draw: no group varies one dimension alone")
    wide = min(3, len(panels))
    tall = -(-len(panels) // wide)
    figure = Figure(figsize=(4.6 * wide, 3.2 * tall), layout="constrained")
    axes = figure.subplots(tall, wide, squeeze=False)
    for spare in axes.flat[len(panels) :]:
        spare.set_visible(False)
    for ax, (title, dimension, rows) in zip(axes.flat, panels, strict=False):
        _panel(ax, title, dimension, rows)
    _legend(figure, panels)
    figure.suptitle(
        f"{document['device']['name']}, torch {document['device']['torch']}", fontsize=10
    )
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise errors.CannotWrite(f"cannot write {path}: {error.strerror}") from None


def _by_library(group: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The rows of each library, which become one line, even where two libraries took turns."""
    for library in dict.fromkeys(row["library"] for row in group["rows"]):
        rows = [row for row in group["rows"] if row["library"] == library]
        yield f"{group['title']} by {library}" if library else group["title"], rows


def _varied(rows: list[dict[str, Any]]) -> str:
    """The one dimension that differs; "" if none or several do."""
    differing = [name for name in ("m", "n", "k") if len({row[name] for row in rows}) > 1]
    return differing[0] if len(differing) == 1 else ""


def _panel(ax: Any, title: str, dimension: str, rows: list[dict[str, Any]]) -> None:
    sizes = [row[dimension] for row in rows]
    rates = [row["tflops"] for row in rows]
    ax.plot(sizes, rates, color="0.7", linewidth=1, zorder=1)
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
            linestyle="none",
            zorder=2,
        )
    for boundary in _wave_boundaries(dimension, rows):
        ax.axvline(boundary, color="0.5", linestyle=":", linewidth=1)
    ax.set_title(title, fontsize=8)
    ax.set_xlabel(dimension)
    ax.set_ylabel("TFLOP/s")
    ax.set_ylim(0, 1.1 * max(rates))


def _legend(figure: Any, panels: list[tuple[str, str, list[dict[str, Any]]]]) -> None:
    """One legend for all panels, of marks, colours and lines."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = [row for _, _, of_panel in panels for row in of_panel]
    blank: dict[str, Any] = {"linestyle": "none", "color": "tab:blue"}
    entries: list[Any] = [
        Line2D(
            [],
            [],
            marker=_MARKS[aligned],
            markerfacecolor="none" if aligned < 128 else None,
            label=f"aligned to {aligned} bytes",
            **blank,
        )
        for aligned in sorted({min(row["alignment_bytes"].values()) for row in rows})
    ]
    if any(row["older_kernel"] for row in rows):
        entries.append(Patch(color="tab:red", label="an older generation's kernel"))
    if any(next(_wave_boundaries(name, of_panel), None) for _, name, of_panel in panels):
        entries.append(Line2D([], [], color="0.5", linestyle=":", label="one more wave of tiles"))
    figure.legend(handles=entries, fontsize=7, ncols=4, loc="outside lower center")


def _wave_boundaries(dimension: str, rows: list[dict[str, Any]]) -> Iterator[float]:
    """The middles between neighbours with the same tile, where the larger needs another wave."""
    for before, after in itertools.pairwise(rows):
        one, other = before["tiling"], after["tiling"]
        if not (one and other) or any(one[name] != other[name] for name in ("tile_m", "tile_n")):
            continue
        if one["waves"] < other["waves"]:
            yield (before[dimension] + after[dimension]) / 2
