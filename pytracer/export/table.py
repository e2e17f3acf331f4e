"""The screen: the memory at the peak, as about a dozen lines of text."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import TextIO

from pytracer import health, meta
from pytracer.analysis.allocator import blocks
from pytracer.analysis.answers import hints, recording_quality, training_steps
from pytracer.analysis.facts import grouping, owners, usage
from pytracer.recorded import Trace
from pytracer.schema import ALWAYS_SHOWN, CATEGORY, CATEGORY_TABLE
from pytracer.units import size_text, time_text

_MARGIN = 10  # width of "modules   ", "hint      ", ...
_MOST_HOLDERS = 3

_NO_STEPS = (
    "none: no optimizer of torch's ended one. `with trace() as t:`, and t.step() where one ends."
)

_BOLD, _DIM, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"


def render(trace: Trace, width: int = 80, *, color: bool = False, device: str | None = None) -> str:
    """The table as text, without a line break at its end."""
    paint = Paint(color)
    if len(trace.events.ticks) == 0:
        return "\n".join([*_nothing(trace, width), *_file(trace, width), *_health(trace, width)])
    peak = usage.peak(trace, device)
    lines = [
        *_head(trace, peak, width, paint),
        "",
        *category_lines(peak, width, paint),
        "",
        *_holders(trace, peak, width),
        *_allocator(trace, peak, width),
        *_times(trace, width),
        *_advice(trace, peak, width),
        *_file(trace, width),
        *_health(trace, width),
        *_imagined(trace, width),
        *_recorded(trace, width, paint),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _imagined(trace: Trace, width: int) -> list[str]:
    """A note that the card was imagined, with the lines that read stand-in values."""
    imagined = meta.of(trace).imagined
    if imagined is None:
        return []
    rank = f"rank {imagined.rank} of {imagined.ranks} " if imagined.ranks > 1 else ""
    text = f"{rank}on {imagined.title}, which was not there: no byte of it is real"
    lines = [str(row.get("line")) for row in imagined.stand_ins]
    if lines:
        more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
        text += f". Values were read and are stand-ins: {', '.join(lines[:3])}{more}"
    return paragraph("imagined", text, width)


def wants_color(stream: TextIO) -> bool:
    """Whether to colour text on the stream, by https://no-color.org and force-color.org."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def columns() -> int:
    """The width of the terminal or of COLUMNS, from 40 to 80."""
    return min(max(shutil.get_terminal_size().columns, 40), 80)


class Paint:
    """Adds colours to text, or does nothing."""

    def __init__(self, on: bool) -> None:
        self._on = on

    def __call__(self, text: str, code: str) -> str:
        """The text in that colour."""
        return f"{code}{text}{_RESET}" if self._on and code and text else text


def _nothing(trace: Trace, width: int) -> list[str]:
    """A line in place of a table of zeros."""
    if meta.of(trace).imported:
        return paragraph("empty", "the snapshot has no allocation", width)
    devices = meta.of(trace).options.devices
    where = f" on {' and '.join(devices)}" if devices else ""
    return paragraph(
        "empty", f"no allocation was seen{where}: is the model there? devices= says where", width
    )


def _head(trace: Trace, peak: usage.Peak, width: int, paint: Paint) -> Iterator[str]:
    head = f"peak {size_text(peak.bytes)} on {peak.device}"
    when = "before the first event"
    if peak.phase is not None:
        when = f"{training_steps.when(trace, peak)}, {time_text(peak.time_ns)} after the start"
    if len(f"{head}   {when}") <= width:
        yield f"{paint(head, _BOLD)}   {when}"
    else:
        yield from (paint(head, _BOLD), *textwrap.wrap(when, width))
    others = [name for name in usage.devices(trace) if name != peak.device]
    if others:
        listed = (f"{size_text(usage.peak(trace, name).bytes)} on {name}" for name in others)
        yield from (paint(line, _DIM) for line in textwrap.wrap(f"also {', '.join(listed)}", width))


def category_lines(peak: usage.Peak, width: int, paint: Paint) -> Iterator[str]:
    """A row and a bar per category."""
    room = width - 38
    largest = max(*peak.by_category.values(), 1)
    for name in shown_categories(peak):
        amount = peak.by_category[name]
        share = amount / peak.bytes if peak.bytes else 0.0
        # The longest bar is the largest category. The percentages are of the peak.
        bar = _block() * round(room * amount / largest)
        row = f"  {name:<16}{size_text(amount):>10}{share:>8.1%}  "
        yield row + paint(bar, category_color(name))


def category_color(name: str) -> str:
    """The escape sequence for the category's colour."""
    return f"\x1b[{CATEGORY_TABLE[CATEGORY[name]].terminal}m"


def shown_categories(peak: usage.Peak) -> list[str]:
    """The categories that have a row in the table."""
    return [name for name, amount in peak.by_category.items() if amount or name in ALWAYS_SHOWN]


def _block() -> str:
    """The character of bars: a block, if the output can encode it."""
    try:
        "\N{FULL BLOCK}".encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return "#"
    return "\N{FULL BLOCK}"


def _holders(trace: Trace, peak: usage.Peak, width: int) -> Iterator[str]:
    there = usage.alive(trace, "peak", peak.device)
    modules = [
        f"{row.pattern} {size_text(row.bytes)}"
        for row in hints.repeated_modules(trace, there, depth=False)
        if row.bytes
    ]
    lines = [
        f"{owners.short_line(row.name)} {size_text(row.bytes)}"
        for row in grouping.holders(trace, "line", there)
        if row.bytes
    ]
    yield from _listed("modules", modules, width)
    yield from _listed("lines", lines, width)


def _allocator(trace: Trace, peak: usage.Peak, width: int) -> Iterator[str]:
    """The bytes that the allocator adds to the requests."""
    there = usage.alive(trace, "peak", peak.device)
    held = blocks.device_bytes(trace, there, peak.position, peak.device)
    parts = []
    if held.allocated is not None and held.allocated != held.requested:
        parts.append(f"rounds up by {size_text(held.allocated - held.requested)}")
    if held.reserved is not None:
        parts.append(f"reserves {size_text(held.reserved)}")
    if held.reserved is not None and held.allocated is not None:
        parts.append(f"caches {size_text(held.reserved - held.allocated)} of it")
    if parts:
        yield from paragraph("allocator", ", ".join(parts), width)


def _times(trace: Trace, width: int) -> Iterator[str]:
    """The median durations of a step's phases, or the reason why there are no steps."""
    if training_steps.updates_by_hand(trace):
        yield from paragraph("steps", _NO_STEPS, width)
    medians = None if meta.of(trace).imported else training_steps.phase_medians(trace)
    if medians is not None:
        parts = [f"{phase} {time_text(taken)}" for phase, taken in medians.by_phase.items()]
        where = " on the GPU" if medians.of_device else ""
        yield from paragraph("a step", f"{', '.join(parts)}{where}", width)


def _listed(title: str, items: list[str], width: int) -> Iterator[str]:
    """As many of the first items as fit on one line."""
    shown = items[:_MOST_HOLDERS]
    while len(shown) > 1 and _MARGIN + len(", ".join(shown)) > width:
        shown.pop()
    if shown:
        yield f"{title:<{_MARGIN}}{cut_in_front(', '.join(shown), width - _MARGIN)}"


def _advice(trace: Trace, peak: usage.Peak, width: int) -> Iterator[str]:
    advice = hints.hint(trace, peak.device if usage.devices(trace) else None)
    if advice is not None:
        yield from paragraph("hint", advice.text, width)


def _file(trace: Trace, width: int) -> Iterator[str]:
    """The state of an incomplete file. It is shown whatever else was lost."""
    for row in recording_quality.health_rows(trace):
        if row.name in health.OF_FILES:
            yield from paragraph("file", f"{row.meaning}. {row.advice}", width)


def _health(trace: Trace, width: int) -> Iterator[str]:
    """The losses that can make the numbers wrong; `health()` has the rest."""
    rows = [row for row in recording_quality.health_rows(trace) if row.name not in health.OF_FILES]
    bad = [row for row in rows if row.severity != "info"]
    for row in bad[:2]:
        text = f"{row.count:,} {row.name}: {row.meaning}. {row.advice}"
        yield from paragraph("lost" if row.severity == "loss" else "health", text, width)


def _recorded(trace: Trace, width: int, paint: Paint) -> Iterator[str]:
    events = len(trace.events.ticks)
    parts = [f"{events:,} events", f"{len(trace.scopes.ticks):,} scopes"]
    taken = recording_quality.own_time(trace)
    if taken is not None:
        parts.append(f"in about {time_text(taken.ns)} of CPU time ({taken.share:.1%})")
    yield from (paint(line, _DIM) for line in paragraph("recorded", ", ".join(parts), width))


def cut_in_front(text: str, room: int) -> str:
    """The name, or its end if it is too long, because the end is distinctive."""
    return text if len(text) <= room else f"...{text[len(text) - max(room - 3, 0) :]}"


def paragraph(title: str, text: str, width: int) -> list[str]:
    """A text beside its title, over as many lines as it needs."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=f"{title:<{_MARGIN}}",
        subsequent_indent=" " * _MARGIN,
        break_long_words=False,
    )
