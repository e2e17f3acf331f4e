"""A page about an allocation that failed: the request, the live memory, and changes that help."""

from collections.abc import Iterator

from pytracer.analysis.answers import postmortem, training_steps
from pytracer.analysis.answers.postmortem import Failure, Held
from pytracer.analysis.facts import owners, usage
from pytracer.analysis.forecasts import changes
from pytracer.basics.names import short_line
from pytracer.basics.units import size_text, time_text
from pytracer.data.recorded import Trace
from pytracer.export import advice_text
from pytracer.export.table import category_lines
from pytracer.export.terminal import DIM, MARGIN, PLAIN, RED, Terminal, cut_in_front


def render(trace: Trace, terminal: Terminal = PLAIN) -> str:
    """The page as text, without a line break at its end; "" if no allocation failed."""
    failed = postmortem.failure(trace)
    if failed is None:
        return ""
    lines = [
        *_head(trace, failed, terminal),
        "",
        *category_lines(failed.moment, terminal),
        "",
        *largest_lines(postmortem.largest(trace, failed.alive), terminal),
        *_changes(trace, failed, terminal),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _head(trace: Trace, failed: Failure, terminal: Terminal) -> Iterator[str]:
    moment, began = failed.moment, training_steps.first_step(trace)
    when = f"{training_steps.when(trace, moment)}, {time_text(moment.time_ns)} after the start"
    head = f"out of memory on {moment.device}"
    if len(f"{head}   {when}") <= terminal.width:
        yield f"{terminal.paint(head, RED)}   {when}"
    else:
        yield from (terminal.paint(head, RED), *terminal.wrap(when))
    yield ""
    asked = f"{'at least ' * failed.asked_is_least}{size_text(failed.asked)}"
    yield from terminal.paragraph("asked", f"{asked}{_by(failed.place)}")
    yield from terminal.paragraph("alive", ", ".join(_room(failed)))
    if began and moment.device == "cpu":
        text = f"Allocations from before step {began} are missing on this page, except those of models "
        text += "and optimizers: record more steps to see them."
        yield from terminal.paragraph("before", text)


def _by(place: owners.Place) -> str:
    parts = f" for {place.op}" if place.op else ""
    parts += " in the backward" * place.in_backward_of
    if place.module:
        parts += f" {'of' if place.in_backward_of else 'in'} {place.module}"
    return parts + (f", {short_line(place.line)}" if place.line else "")


def _room(failed: Failure) -> Iterator[str]:
    yield size_text(failed.moment.bytes)
    if failed.reserved is not None:
        yield f"{size_text(failed.reserved)} reserved"
    if failed.fragmented:
        yield f"{size_text(failed.fragmented)} of it in pieces that did not serve"
    if failed.limit is not None:
        yield f"limit {size_text(failed.limit)}"
    if failed.device_free is not None:
        yield f"{size_text(failed.device_free)} free on the device"
    if failed.missing is not None:
        yield f"short by {size_text(failed.missing)}"


def largest_lines(rows: list[Held], terminal: Terminal) -> Iterator[str]:
    """A row for each of the largest holders."""
    for i, row in enumerate(rows):
        title = "largest" if i == 0 else ""
        name = row.name or row.op
        parts = [row.shape, row.dtype, "" if row.name else row.module]
        if row.category == "optimizer_state":
            name = f"{row.role}, {name}"
        if row.blocks > 1:
            name = f"{row.blocks:,} blocks: {name}"
        held = f"{size_text(row.bytes):>8}  {row.category:<16}"
        room = terminal.width - MARGIN - len(held)
        start = terminal.paint(title, DIM) + " " * (MARGIN - len(title))
        yield start + held + _fitted(name, parts, short_line(row.line), room)


def _fitted(name: str, parts: list[str], line: str, room: int) -> str:
    """The name and the line, and between them as many of the parts as fit."""
    for count in range(len(parts), -1, -1):
        text = ", ".join(part for part in (name, *parts[:count], line) if part)
        if len(text) <= room:
            break
    return cut_in_front(text, room)


def _changes(trace: Trace, failed: Failure, terminal: Terminal) -> Iterator[str]:
    """The list of changes: the same as on the screen, to its end."""
    device = failed.moment.device
    seen = (*usage.devices(trace), usage.main_device(trace))  # others have no peak to lower
    rows = changes.changes(trace, device) if device in seen else []
    for row in rows:
        yield from terminal.paragraph(row.kind, advice_text.said(row))
    if rows and failed.missing is None:
        yield from terminal.paragraph(
            "", "The CPU's allocator does not report how many bytes are missing."
        )
