"""Predictions as text: whether a run fits, with which plan, what another batch would need; verified."""

from collections.abc import Iterator

from pytracer.analysis.allocator.replay import FailedRequest
from pytracer.analysis.facts import owners
from pytracer.analysis.forecasts.checkpoint_plans import CheckpointPlan
from pytracer.analysis.forecasts.fits import Fits, Holder
from pytracer.analysis.forecasts.verified import Verified
from pytracer.analysis.forecasts.what_if import WhatIf
from pytracer.export.table import cut_in_front, paragraph
from pytracer.units import size_text

_MARGIN = 10
_MOST_CHOICES = 8


def render(found: Fits, width: int = 80) -> str:
    """The page, without a line break at its end."""
    lines = [*paragraph("fits", _answer(found), width)]
    lines += paragraph("beside", _beside(found), width)
    if found.replay.failed is not None:
        lines += _failure(found.replay.failed, width)
        lines += _holders(found.holders, width)
    lines += ["", *_choices(found, width)]
    for note in found.notes:
        lines += paragraph("note", note, width)
    return _joined(lines, found.verified, width)


def _joined(lines: list[str], verified: Verified | None, width: int) -> str:
    if verified is not None:
        lines = [*lines, "", render_verified(verified, width)]
    return "\n".join(line.rstrip() for line in lines)


def _answer(found: Fits) -> str:
    needs = f"the run needs a card of {size_text(found.smallest_card)}"
    if found.card is None:
        return f"{needs}, with the settings it was recorded with"
    card = size_text(found.card)
    if found:
        again = f", {found.replay.retries:,} retries" if found.replay.retries else ""
        return f"yes, on {card}: {needs}{again}"
    if found.helps is not None:
        return f"not on {card} as it is, but with {_named(found.helps.settings)}: {needs} without"
    return f"no, not on {card}: {needs}, and no setting of the allocator is enough"


def _beside(found: Fits) -> str:
    peak = size_text(found.replay.peak_reserved)
    return (
        f"{size_text(found.beside)} are the context, libraries and the driver's; torch's "
        f"allocator reserves {peak} of the rest"
    )


def _failure(failed: FailedRequest, width: int) -> Iterator[str]:
    what = f"{size_text(failed.bytes)} for {failed.op or 'a tensor'}"
    if failed.module:
        what += f" in {failed.module}"
    if failed.line:
        what += f" at {owners.short_line(failed.line)}"
    when = f", step {failed.step}, {failed.phase}" if failed.step is not None else ""
    yield from paragraph("fails at", what + when, width)
    room = (
        f"{size_text(failed.reserved)} reserved, {size_text(failed.allocated)} in use; of "
        f"{size_text(failed.free)} free the largest block that could serve has "
        f"{size_text(failed.largest_free)}"
    )
    yield from paragraph("", room, width)


def _holders(rows: tuple[Holder, ...], width: int) -> Iterator[str]:
    for i, row in enumerate(rows):
        start = f"{'holds' if i == 0 else '':<{_MARGIN}}{size_text(row.bytes):>8}  "
        parts = (row.category, row.module, owners.short_line(row.line))
        text = "  ".join(part for part in parts if part)
        yield start + cut_in_front(text, width - len(start))


def _choices(found: Fits, width: int) -> Iterator[str]:
    yield from paragraph("settings", "the smallest card with each, as replayed", width)
    for choice in found.choices[:_MOST_CHOICES]:
        size = size_text(choice.smallest_room + found.beside)
        says = "as recorded" if choice.as_recorded else ""
        if found.card is not None and choice.runs:
            says += f"{', ' if says else ''}fits"
        yield f"{'':<{_MARGIN}}{size:>8}  {_named(choice.settings):<42}{says}"[:width]


def _named(settings: str) -> str:
    return settings or "torch's defaults"


def render_what_if(found: WhatIf, width: int = 80) -> str:
    """The peak, and what has no law."""
    length = f", length {found.length}" if found.length is not None else ""
    lines = paragraph("what if", f"batch {found.batch}{length} on {found.device}", width)
    lines += paragraph("peak", _between(found.lowest, found.highest), width)
    if found.reserved is not None:
        lines += paragraph("reserved", _between(*found.reserved), width)
    law = f"{found.with_law:.1%} of the peak follow a law that {found.traces} traces agree on"
    lines += paragraph("known by", law, width)
    for i, row in enumerate(found.flagged):
        title = "no law" if i == 0 else ""
        where = f"  {row.category}  {row.module}  {row.op}"
        lines.append(f"{title:<{_MARGIN}}{_between(row.lowest, row.highest)}{where}"[:width])
    for note in found.notes:
        lines += paragraph("note", note, width)
    return _joined(lines, found.verified, width)


def _between(lowest: int, highest: int) -> str:
    low, high = size_text(lowest), size_text(highest)
    return low if lowest == highest else f"between {low} and {high}"


def render_plan(found: CheckpointPlan, width: int = 80) -> str:
    """Which modules, what that needs and takes, and the code to paste."""
    chosen, budget = found.chosen, size_text(found.budget)
    needs = f"{size_text(chosen.peak_reserved or chosen.peak)} instead of "
    needs += size_text(found.now.peak_reserved or found.now.peak)
    if not found:
        answer = f"no plan fits in {budget}; the smallest needs {needs}"
    elif not (chosen.modules or chosen.offloaded):
        answer = f"fits in {budget} without a checkpoint"
    else:
        answer = f"fits in {budget}: {needs}, for {chosen.time_ratio - 1:.0%} more time"
    lines = [*paragraph("plan", answer, width)]
    if chosen.modules:
        lines += paragraph("modules", ", ".join(chosen.modules), width)
    if chosen.offloaded:
        what = f"{', '.join(chosen.offloaded)}, with {size_text(chosen.pinned)} pinned on the host"
        lines += paragraph("offload", what, width)
    for warning in found.warnings:
        lines += paragraph("warning", warning, width)
    for note in found.notes:
        lines += paragraph("note", note, width)
    if found.code:
        lines += ["", *(f"    {line}" for line in found.code.splitlines())]
    return _joined(lines, found.verified, width)


def render_verified(found: Verified, width: int = 80) -> str:
    """Predicted and measured, side by side."""
    machine = found.machine
    where = f"{machine['device']}, torch {machine['torch']}"
    if found.limit is not None:
        where += f", with {size_text(found.limit)} for torch's allocator"
    lines = [*paragraph("verified", where, width)]
    lines.append(f"{'':<{_MARGIN}}{'':<16}{'predicted':>24}{'measured':>14}{'error':>12}")
    told, seen = ("runs" if each else "fails" for each in (found.was_to_run, found.ran))
    lines.append(f"{'':<{_MARGIN}}{'to the end':<16}{told:>24}{seen:>14}")
    for row in found.figures:
        told, seen = _between(row.lowest, row.highest), size_text(row.measured)
        told = told.removeprefix("between ")
        lines.append(f"{'':<{_MARGIN}}{row.name:<16}{told:>24}{seen:>14}{row.error:>+12.3%}")
    lines += paragraph("", "it held" if found else "it did not hold", width)
    for note in found.notes:
        lines += paragraph("note", note, width)
    lines += paragraph("", f"added to {found.file}", width)
    return "\n".join(line.rstrip() for line in lines)
