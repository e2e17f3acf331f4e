"""The screen: the memory at the peak, and the best changes, as some lines of text."""

import sys
from collections.abc import Iterator

from pytracer.analysis.answers.overview import Overview, overview
from pytracer.analysis.facts.usage import Peak
from pytracer.basics.names import short_line
from pytracer.basics.units import size_text, time_text
from pytracer.data import health
from pytracer.data.meta import Imagined
from pytracer.data.recorded import Trace
from pytracer.data.schema import ALWAYS_SHOWN, CATEGORY, CATEGORY_TABLE
from pytracer.export import advice_text
from pytracer.export.terminal import BOLD, DIM, MARGIN, PLAIN, Terminal, cut_in_front

_MOST_HOLDERS = 3

_NO_STEPS = (
    "none: a step ends where an optimizer of torch's has updated the weights, and none did. If your "
    "loop updates them itself, write `with trace() as t:` around it, and t.step() after each update; "
    "also for `pytracer run`."
)


def render(trace: Trace, terminal: Terminal = PLAIN, device: str | None = None) -> str:
    """The table as text, without a line break at its end."""
    now = overview(trace, device)
    if not now.events:
        return "\n".join([*_nothing(now, terminal), *_file(now, terminal), *_health(now, terminal)])
    lines = [
        *_head(now, terminal),
        *(line for doubt in now.doubts for line in terminal.paragraph("NOT KNOWN", doubt)),
        "",
        *category_lines(now.peak, terminal),
        "",
        *_holders(now, terminal),
        *_allocator(now, terminal),
        *_kinds(now, terminal),
        *_times(now, terminal),
        *_advice(trace, now, terminal),
        *_file(now, terminal),
        *_health(now, terminal),
        *_imagined(now, terminal),
        *_recorded(now, terminal),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _imagined(now: Overview, terminal: Terminal) -> list[str]:
    """A note that the card was imagined, with the lines that read stand-in values."""
    imagined = now.meta.imagined
    if imagined is None:
        return []
    rank = f"rank {imagined.rank} of {imagined.ranks} " if imagined.ranks > 1 else ""
    text = f"{rank}on {imagined.title}, which was not there: no byte of it is real"
    if imagined.peak_at_most is not None:
        most = size_text(imagined.peak_at_most)
        text += f". With {unknown(imagined)} the peak is at most {most}"
    if imagined.advice:
        text += f". {imagined.advice}"
    if imagined.not_counted:
        layers = " and ".join(imagined.not_counted)
        text += f". The peak is at least this: what oneDNN takes for {layers} is not known"
    lines = [str(row.get("line")) for row in imagined.stand_ins]
    if lines:
        more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
        text += f". Values were read and are stand-ins: {', '.join(lines[:3])}{more}"
    return terminal.paragraph("imagined", text)


def unknown(imagined: Imagined) -> str:
    """What only the card knows of this run."""
    parts = ["cuDNN's scratch"] if imagined.scratch_at_most else []
    if imagined.ranks > 1:
        parts.append("what NCCL may keep")
    if imagined.left_out:
        parts.append(f"gradients that only other ranks make ({', '.join(imagined.left_out)})")
    return " and ".join(parts or ["what other streams may still use"])


def _nothing(now: Overview, terminal: Terminal) -> list[str]:
    """A line in place of a table of zeros."""
    if now.meta.imported:
        return terminal.paragraph("empty", "the snapshot has no allocation")
    devices = now.meta.options.devices
    where = f" on {' and '.join(devices)}" if devices else ""
    return terminal.paragraph(
        "empty", f"no allocation was seen{where}: is the model there? devices= says where"
    )


def _head(now: Overview, terminal: Terminal) -> Iterator[str]:
    imagined = now.meta.imagined
    least = "at least " if imagined is not None and imagined.not_counted else ""
    head = f"peak {least}{size_text(now.peak.bytes)} on {now.peak.device}"
    when = "before the first event"
    if now.when:
        when = f"{now.when}, {time_text(now.peak.time_ns)} after the start"
    if len(f"{head}   {when}") <= terminal.width:
        yield f"{terminal.paint(head, BOLD)}   {when}"
    else:
        yield from (terminal.paint(head, BOLD), *terminal.wrap(when))
    if now.other_devices:
        listed = (f"{size_text(size)} on {name}" for name, size in now.other_devices.items())
        yield from (
            terminal.paint(line, DIM) for line in terminal.wrap(f"also {', '.join(listed)}")
        )


def category_lines(peak: Peak, terminal: Terminal) -> Iterator[str]:
    """A row and a bar per category."""
    room = terminal.width - 38
    largest = max(*peak.by_category.values(), 1)
    for name in shown_categories(peak):
        amount = peak.by_category[name]
        share = amount / peak.bytes if peak.bytes else 0.0
        # The longest bar is the largest category. The percentages are of the peak.
        bar = _block() * round(room * amount / largest)
        row = f"  {name:<16}{size_text(amount):>10}{share:>8.1%}  "
        yield row + terminal.paint(bar, category_color(name))


def category_color(name: str) -> str:
    """The escape sequence for the category's colour."""
    return f"\x1b[{CATEGORY_TABLE[CATEGORY[name]].terminal}m"


def shown_categories(peak: Peak) -> list[str]:
    """The categories that have a row in the table."""
    return [name for name, amount in peak.by_category.items() if amount or name in ALWAYS_SHOWN]


def _block() -> str:
    """The character of bars: a block, if the output can encode it."""
    try:
        "\N{FULL BLOCK}".encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return "#"
    return "\N{FULL BLOCK}"


def _holders(now: Overview, terminal: Terminal) -> Iterator[str]:
    modules = [f"{row.text} {size_text(row.bytes)}" for row in now.modules if row.bytes]
    lines = [f"{short_line(row.name)} {size_text(row.bytes)}" for row in now.lines if row.bytes]
    yield from _listed("modules", modules, terminal)
    yield from _listed("lines", lines, terminal)


def _allocator(now: Overview, terminal: Terminal) -> Iterator[str]:
    """The bytes that the allocator adds to the requests."""
    held, parts = now.memory, []
    if held.allocated is not None and held.allocated != held.requested:
        parts.append(f"rounds up by {size_text(held.allocated - held.requested)}")
    if held.reserved is not None:
        parts.append(f"reserves {size_text(held.reserved)}")
    if held.reserved is not None and held.allocated is not None:
        parts.append(f"caches {size_text(held.reserved - held.allocated)} of it")
    if parts:
        yield from terminal.paragraph("allocator", ", ".join(parts))


def _kinds(now: Overview, terminal: Terminal) -> Iterator[str]:
    """The peaks of a program that does more than one kind of work."""
    if now.by_kind:
        each = (f"{kind} {size_text(amount)}" for kind, amount in now.by_kind.items())
        yield from terminal.paragraph("peaks", ", ".join(each))


def _times(now: Overview, terminal: Terminal) -> Iterator[str]:
    """The median durations of a step's phases, or the reason why there are no steps."""
    if now.updates_by_hand:
        yield from terminal.paragraph("steps", _NO_STEPS)
    if now.medians is not None:
        parts = [f"{phase} {time_text(taken)}" for phase, taken in now.medians.by_phase.items()]
        where = " on the GPU" if now.medians.of_device else ""
        yield from terminal.paragraph("a step", f"{', '.join(parts)}{where}")


def _listed(title: str, items: list[str], terminal: Terminal) -> Iterator[str]:
    """As many of the first items as fit on one line, or two long ones on two lines."""
    shown = items[:_MOST_HOLDERS]
    while len(shown) > 1 and MARGIN + len(", ".join(shown)) > terminal.width:
        shown.pop()
    lines = [", ".join(shown)] if len(shown) > 1 else items[:2]
    for head, line in zip((title, ""), lines, strict=False):
        start = terminal.paint(head, DIM) + " " * (MARGIN - len(head))
        yield start + cut_in_front(line, terminal.width - MARGIN)


def _advice(trace: Trace, now: Overview, terminal: Terminal) -> Iterator[str]:
    """The best changes of the list, and how to see the others."""
    for note in now.notes:
        yield from terminal.paragraph("note", note)
    for kind, text in advice_text.best(trace, now.peak.device):
        yield from terminal.paragraph(kind, text)


def _file(now: Overview, terminal: Terminal) -> Iterator[str]:
    """The state of an incomplete file. It is shown whatever else was lost."""
    for row in now.health:
        if row.name in health.OF_FILES:
            yield from terminal.paragraph("file", f"{row.meaning}. {row.advice}")


def _health(now: Overview, terminal: Terminal) -> Iterator[str]:
    """The losses that can make the numbers wrong; `health()` has the rest."""
    rows = [row for row in now.health if row.name not in health.OF_FILES]
    bad = [row for row in rows if row.severity != "info"]
    for row in bad[:2]:
        text = f"{row.count:,} {row.name}: {row.meaning}. {row.advice}"
        yield from terminal.paragraph("lost" if row.severity == "loss" else "health", text)


def _recorded(now: Overview, terminal: Terminal) -> Iterator[str]:
    parts = [f"{now.events:,} events", f"{now.scopes:,} scopes"]
    if now.own_time is not None:
        taken = now.own_time
        parts.append(f"in about {time_text(taken.ns)} of CPU time ({taken.share:.1%})")
    yield from terminal.in_one_color("recorded", ", ".join(parts), DIM)
