"""Predictions as text: whether a run fits, a plan, another batch; and their verification."""

from collections.abc import Iterator

from pytracer.analysis.allocator.replay import FailedRequest
from pytracer.analysis.forecasts.checkpoint_plans import CheckpointPlan
from pytracer.analysis.forecasts.fits import Fits, Holder
from pytracer.analysis.forecasts.verified import Verified
from pytracer.analysis.forecasts.what_if import WhatIf
from pytracer.export.table import cut_in_front, paragraph
from pytracer.model_names import module_text
from pytracer.names import short_line
from pytracer.units import size_text

NOT_MEASURED = "torch's allocator: not measured; leave about 1 GiB"
_MARGIN = 10
_MOST_CHOICES = 8


def render(fits: Fits, width: int = 80) -> str:
    """The page, without a line break at its end."""
    lines = [*paragraph("fits", _answer(fits), width)]
    lines += paragraph("beside", _beside(fits), width)
    if len(fits.by_kind) > 1:
        kinds = (f"{kind} {size_text(peak.bytes)}" for kind, peak in fits.by_kind.items())
        lines += paragraph("peaks", ", ".join(kinds), width)
    if fits.replay.failed is not None:
        lines += _failure(fits.replay.failed, width)
        lines += _holders(fits.holders, width)
    lines += ["", *_choices(fits, width)]
    for note in fits.notes:
        lines += paragraph("note", note, width)
    return _joined(lines, fits.verified, width)


def _joined(lines: list[str], verified: Verified | None, width: int) -> str:
    if verified is not None:
        lines = [*lines, "", render_verified(verified, width)]
    return "\n".join(line.rstrip() for line in lines)


def _answer(fits: Fits) -> str:
    needs = f"the run needs a card of {size_text(fits.smallest_card)}"
    if fits.card is None:
        return f"{needs}, with the settings it was recorded with"
    card = size_text(fits.card)
    if fits:
        again = f", {fits.replay.retries:,} retries" if fits.replay.retries else ""
        return f"yes, on {card}: {needs}{again}"
    if fits.helps is not None:
        return f"not on {card} as it is, but with {_named(fits.helps.settings)}: {needs} without"
    return f"no, not on {card}: {needs}, and no setting of the allocator is enough"


def _beside(fits: Fits) -> str:
    peak = size_text(fits.replay.peak_reserved)
    reserves = f"reserves {peak}" if fits.replay else f"has reserved {peak} when a request fails"
    if not fits.beside:
        return f"{NOT_MEASURED}. The allocator {reserves}"
    return (
        f"{size_text(fits.beside)} are the context, libraries and the driver's; torch's "
        f"allocator {reserves} of the rest"
    )


def on_a_card(fits: Fits) -> str:
    """The answer in a sentence, for a line per card."""
    reserved, failed = size_text(fits.replay.peak_reserved), fits.replay.failed
    beside = f"{size_text(fits.beside)} beside torch's allocator"
    beside = beside if fits.beside else f"beside {NOT_MEASURED}"
    kinds = [f"{kind} {size_text(peak.bytes)}" for kind, peak in fits.by_kind.items()]
    peaks = f"; peaks: {', '.join(kinds)}" if len(kinds) > 1 else ""
    if failed is None and fits.uncertain:
        most = fits.replay.peak_reserved + fits.uncertain
        is_safe = fits.card is None or fits.beside + most <= fits.card
        start = "fits" if is_safe else "may fit"
        return f"{start}: torch reserves {reserved}, at most {size_text(most)}{peaks}; {beside}"
    if failed is None:
        return f"fits: torch reserves {reserved}{peaks}; {beside}"
    failure = (
        f"an allocation of {size_text(failed.bytes)} fails when torch has reserved "
        f"{size_text(failed.reserved)}"
    )
    if fits.helps is not None:
        return f"fits with {fits.helps.settings}; without, {failure}{peaks}; {beside}"
    needs = f"the run needs a card of {size_text(fits.smallest_card)}"
    return f"does not fit: {failure}; {needs}{peaks}; {beside}"


def _failure(failed: FailedRequest, width: int) -> Iterator[str]:
    request = f"{size_text(failed.bytes)} for {failed.op or 'a tensor'}"
    if failed.module:
        request += f" in {failed.module}"
    if failed.line:
        request += f" at {short_line(failed.line)}"
    when = f", step {failed.step}, {failed.phase}" if failed.step is not None else ""
    yield from paragraph("fails at", request + when, width)
    room = (
        f"{size_text(failed.reserved)} reserved, {size_text(failed.allocated)} in use; of "
        f"{size_text(failed.free)} free the largest block that could serve has "
        f"{size_text(failed.largest_free)}"
    )
    yield from paragraph("", room, width)


def _holders(rows: tuple[Holder, ...], width: int) -> Iterator[str]:
    for i, row in enumerate(rows):
        start = f"{'holds' if i == 0 else '':<{_MARGIN}}{size_text(row.bytes):>8}  "
        parts = (row.category, row.module, short_line(row.line))
        text = "  ".join(part for part in parts if part)
        yield start + cut_in_front(text, width - len(start))


def _choices(fits: Fits, width: int) -> Iterator[str]:
    yield from paragraph("settings", "the smallest card with each, as replayed", width)
    for choice in fits.choices[:_MOST_CHOICES]:
        size = size_text(choice.smallest_room + fits.beside)
        says = "as recorded" if choice.as_recorded else ""
        if fits.card is not None and choice.runs:
            says += f"{', ' if says else ''}fits"
        yield f"{'':<{_MARGIN}}{size:>8}  {_named(choice.settings):<42}{says}"[:width]


def _named(settings: str) -> str:
    return settings or "torch's defaults"


def render_what_if(prediction: WhatIf, width: int = 80) -> str:
    """The predicted peak, and the rows without a law."""
    length = f", length {prediction.length}" if prediction.length is not None else ""
    lines = paragraph("what if", f"batch {prediction.batch}{length} on {prediction.device}", width)
    lines += paragraph("peak", _between(prediction.lowest, prediction.highest), width)
    if prediction.reserved is not None:
        lines += paragraph("reserved", _between(*prediction.reserved), width)
    agree = "trace gives" if prediction.traces == 1 else "traces agree on"
    law = f"{prediction.with_law:.1%} of the peak follow a law that {prediction.traces} {agree}"
    lines += paragraph("known by", law, width)
    for i, row in enumerate(prediction.flagged):
        title = "no law" if i == 0 else ""
        where = f"  {row.category}  {row.module}  {row.op}"
        lines.append(f"{title:<{_MARGIN}}{_between(row.lowest, row.highest)}{where}"[:width])
    for note in prediction.notes:
        lines += paragraph("note", note, width)
    return _joined(lines, prediction.verified, width)


def text_of(forecast: Fits | WhatIf | CheckpointPlan) -> str:
    """Any forecast as text."""
    return render_what_if(forecast) if isinstance(forecast, WhatIf) else str(forecast)


def _between(lowest: int, highest: int) -> str:
    low, high = size_text(lowest), size_text(highest)
    return low if lowest == highest else f"between {low} and {high}"


def render_plan(plan: CheckpointPlan, width: int = 80) -> str:
    """The modules of the plan, its memory and time, and the code to paste."""
    chosen, budget = plan.chosen, size_text(plan.budget)
    needs = f"{size_text(chosen.peak_reserved or chosen.peak)} instead of "
    needs += size_text(plan.now.peak_reserved or plan.now.peak)
    if not plan:
        answer = f"no plan fits in {budget}; the smallest needs {needs}"
        if not (chosen.modules or chosen.offloaded):
            now = size_text(chosen.peak_reserved or chosen.peak)
            answer = f"no plan fits in {budget}: no checkpoint lowers the {now} that it needs now"
    elif not (chosen.modules or chosen.offloaded):
        answer = f"fits in {budget} without a checkpoint"
    else:
        answer = f"fits in {budget}: {needs}, for {chosen.time_ratio - 1:.0%} more time"
    lines = [*paragraph("plan", answer, width)]
    if chosen.modules:
        lines += paragraph("modules", ", ".join(map(module_text, chosen.modules)), width)
    if chosen.offloaded:
        text = f"{', '.join(map(module_text, chosen.offloaded))}, with {size_text(chosen.pinned)} pinned on the host"
        lines += paragraph("offload", text, width)
    for warning in plan.warnings:
        lines += paragraph("warning", warning, width)
    for note in plan.notes:
        lines += paragraph("note", note, width)
    if plan.code:
        lines += ["", *(f"    {line}" for line in plan.code.splitlines())]
    return _joined(lines, plan.verified, width)


def render_verified(verified: Verified, width: int = 80) -> str:
    """The predicted and the measured figures, side by side."""
    machine = verified.machine
    where = f"{machine['device']}, torch {machine['torch']}"
    if verified.limit is not None:
        where += f", with {size_text(verified.limit)} for torch's allocator"
    lines = [*paragraph("verified", where, width)]
    lines.append(f"{'':<{_MARGIN}}{'':<16}{'predicted':>24}{'measured':>14}{'error':>12}")
    predicted, measured = (
        "runs" if each else "fails" for each in (verified.was_to_run, verified.ran)
    )
    lines.append(f"{'':<{_MARGIN}}{'to the end':<16}{predicted:>24}{measured:>14}")
    for row in verified.figures:
        predicted, measured = _between(row.lowest, row.highest), size_text(row.measured)
        predicted = predicted.removeprefix("between ")
        lines.append(
            f"{'':<{_MARGIN}}{row.name:<16}{predicted:>24}{measured:>14}{row.error:>+12.3%}"
        )
    lines += paragraph("", "it held" if verified else "it did not hold", width)
    for note in verified.notes:
        lines += paragraph("note", note, width)
    lines += paragraph("", f"added to {verified.file}", width)
    return "\n".join(line.rstrip() for line in lines)
