"""The part of a page without scripts: the table and a picture, without links or style sheets.

All text is escaped, because names come from other people's programs. Text and lines have the colours of
the page around them, so they are readable on light and on dark.
"""

import html
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pytracer.analysis.answers import breakdown, training_steps
from pytracer.analysis.facts import usage
from pytracer.basics.units import size_text, time_text
from pytracer.data.recorded import Trace
from pytracer.data.schema import ALWAYS_SHOWN, CATEGORY_COLORS, I64
from pytracer.export.series import LEAST_APART, Band, Series, clock, series
from pytracer.export.table import render as table
from pytracer.export.terminal import Terminal

_WIDTH, _HEIGHT = 760, 240  # of the picture, in its own units
_LEFT, _TOP, _BOTTOM = 70, 18, 22
_LINE = 'stroke="currentColor" stroke-width="1"'
_MOST_LABELS = 12  # steps with names below the picture


def fragment(trace: Trace, device: str | None = None) -> str:
    """The table and the picture for a notebook, without scripts."""
    shown = series(trace, device=device)
    peak = shown.peak
    head = f"peak {size_text(peak.bytes)} on {peak.device}"
    if peak.phase is not None:
        head += f", {training_steps.when(trace, peak)}, {time_text(peak.time_ns)} after the start"
    return "\n".join(
        [
            '<div style="font-family:sans-serif;font-size:13px">',
            f"<div><b>{_safe(head)}</b></div>",
            *_rows(trace, peak),
            *_picture(shown),
            f'<pre style="font-size:11px;white-space:pre-wrap">{_safe(_rest(trace, device))}</pre>',
            "</div>",
        ]
    )


def printable(text: str) -> str:
    """The text without control characters, which a terminal or a page might obey."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


_FOLDERS = re.compile(r"(?<![\w./])/(?:[^/\s:]+/)+(?=[^/\s:]+/[^/\s:]+:\d)")


def without_folders(text: str) -> str:
    """Cuts paths of source lines to their last folder, because people send pages to others."""
    return _FOLDERS.sub(".../", text)


def _safe(text: str) -> str:
    return html.escape(printable(text))


def _rest(trace: Trace, device: str | None) -> str:
    """The table's lines below the categories: modules, lines, changes."""
    return without_folders(table(trace, Terminal(100), device).split("\n\n")[-1])


def _rows(trace: Trace, peak: usage.Peak) -> Iterator[str]:
    yield '<table style="border-collapse:collapse;text-align:right">'
    heads = ("", "category", "at peak", "share", "own peak", "at end", "allocations")
    cells = "".join(
        f'<th style="padding:1px 8px">{text}</th>' if text else "<td></td>" for text in heads
    )
    yield f"<tr>{cells}</tr>"
    for row in breakdown.category_rows(trace, peak.device if usage.devices(trace) else None):
        if not (row.allocations or row.category in ALWAYS_SHOWN):
            continue
        share = row.at_peak / peak.bytes if peak.bytes else 0.0
        swatch = (
            f'<span style="display:inline-block;width:10px;height:10px;'
            f'background:{CATEGORY_COLORS[row.category]}"></span>'
        )
        numbers = (
            size_text(row.at_peak),
            _bar(share, CATEGORY_COLORS[row.category]),
            size_text(row.own_peak),
            size_text(row.at_end),
            f"{row.allocations:,}",
        )
        cells = "".join(f'<td style="padding:1px 8px">{text}</td>' for text in numbers)
        name = f'<td style="padding:1px 8px;text-align:left">{_safe(row.category)}</td>'
        yield f"<tr><td>{swatch}</td>{name}{cells}</tr>"
    yield "</table>"


def _bar(share: float, color: str) -> str:
    """A share as a bar with its number beside it."""
    return (
        f'<span data-bar style="display:inline-block;width:{60 * share:.0f}px;height:9px;'
        f'background:{color}"></span><span style="display:inline-block;width:3.2em">{share:.1%}</span>'
    )


# ---------------------------------------------------------------- the picture


def _picture(shown: Series) -> Iterator[str]:
    times = shown.times_ns
    scale = clock(times.astype(np.float64))
    highest = max(shown.peak.bytes, 1)
    high = _HEIGHT - _TOP - _BOTTOM

    def x(time: float) -> float:
        place = min(max(float(scale.place(time)), 0.0), 1.0)
        return round(_LEFT + (_WIDTH - _LEFT) * place, 1)

    def y(level: float) -> float:
        return round(_TOP + high * (1 - level / highest), 1)

    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'style="max-width:{_WIDTH}px;width:100%;font-size:10px" aria-label="memory over time">'
    )
    xs = [x(int(time)) for time in times]
    below = np.zeros(len(times), np.int64)
    for name, levels in shown.levels.items():
        above = below + levels
        yield (
            f'<path fill="{CATEGORY_COLORS[name]}" fill-opacity="0.85" d="{_area(xs, below, above, y)}">'
            f"<title>{name}</title></path>"
        )
        below = above
    for share in (0.0, 0.5, 1.0):
        at = y(highest * share)
        text = size_text(round(highest * share))
        yield f'<path d="M{_LEFT} {at}H{_WIDTH}" {_LINE} stroke-opacity="0.25"/>'
        yield f'<text x="{_LEFT - 6}" y="{at + 3}" text-anchor="end" fill="currentColor">{text}</text>'
    yield from _steps(shown.steps, x)
    for begin, end in scale.idle:
        yield from _gap(x(begin), x(end), f"{time_text(round(end - begin))} idle, cut")
    at = x(shown.peak.time_ns)
    yield f'<path d="M{at} {_TOP}V{_HEIGHT - _BOTTOM}" {_LINE} stroke-dasharray="3 2"/>'
    anchor = "end" if at > _WIDTH - 100 else "start"
    yield (
        f'<text x="{at}" y="{_TOP - 6}" text-anchor="{anchor}" fill="currentColor">'
        f"peak {size_text(shown.peak.bytes)}</text>"
    )
    yield "</svg>"


def _steps(steps: Sequence[Band], x: Callable[[float], float]) -> Iterator[str]:
    """A line at the end of each step, and a name below it if there are few steps."""
    for band in steps[: _MOST_LABELS * 20]:
        at = x(band.end_ns)
        yield f'<path d="M{at} {_TOP}V{_HEIGHT - _BOTTOM}" {_LINE} stroke-opacity="0.25"/>'
    before = 0.0
    for band in steps if len(steps) <= _MOST_LABELS else ():
        middle = round((x(band.begin_ns) + x(band.end_ns)) / 2, 1)
        if middle - before >= LEAST_APART * _WIDTH:
            before = middle
            yield (
                f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle" '
                f'fill="currentColor">step {_safe(band.name)}</text>'
            )


def _gap(left: float, right: float, text: str) -> Iterator[str]:
    """A cut stretch of time."""
    middle, high = round((left + right) / 2, 1), _HEIGHT - _TOP - _BOTTOM
    yield (
        f'<rect x="{left}" y="{_TOP}" width="{right - left:.1f}" height="{high}" fill="#888" '
        f'fill-opacity="0.5"><title>{text}</title></rect>'
    )
    yield (
        f'<text transform="translate({middle + 3},{_TOP + high / 2}) rotate(-90)" '
        f'text-anchor="middle" fill="currentColor">{text}</text>'
    )


def _area(xs: list[float], below: I64, above: I64, y: Callable[[float], float]) -> str:
    """The area between two levels, in steps. Each level lasts until the next."""
    top = [f"M{xs[0]} {y(int(above[0]))}"]
    top += [f"H{xs[i]}V{y(int(above[i]))}" for i in range(1, len(xs))]
    bottom = [f"V{y(int(below[i - 1]))}H{xs[i - 1]}" for i in range(len(xs) - 1, 0, -1)]
    return "".join([*top, *bottom, "Z"])
