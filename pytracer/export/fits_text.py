"""Predictions as text: whether a run fits, a plan, another batch; and their verification."""

from collections.abc import Iterator, Sequence

from pytracer.analysis.allocator.advice import Choice
from pytracer.analysis.allocator.replay import EXACT, NOT_KNOWN, PERHAPS, FailedRequest
from pytracer.analysis.forecasts.checkpoint_plans import CheckpointPlan
from pytracer.analysis.forecasts.fits import Fits, Holder
from pytracer.analysis.forecasts.verified import Verified
from pytracer.analysis.forecasts.what_if import WhatIf
from pytracer.export import touched_text
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
    lines += paragraph("basis", _basis(fits), width)
    if len(fits.by_kind) > 1:
        kinds = (f"{kind} {size_text(peak.bytes)}" for kind, peak in fits.by_kind.items())
        lines += paragraph("peaks", ", ".join(kinds), width)
    if fits.replay.failed is not None and not _is_full(fits):
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
    if fits.verdict == NOT_KNOWN:
        where = "" if fits.card is None else f" on {size_text(fits.card)}"
        return (
            f"not known{where}; what was recorded needs a card of {size_text(fits.smallest_card)}"
        )
    if fits.card is None:
        return f"{needs}, with the settings it was recorded with"
    card = size_text(fits.card)
    if _is_full(fits):
        return f"no, not on {card}: all of it is in use before torch's allocator starts; {needs}"
    if fits:
        again = f", {fits.replay.retries:,} retries" if fits.replay.retries else ""
        return f"yes, on {card}: {needs}{again}"
    if fits.verdict == PERHAPS:
        sure = f"; surely with {_named(fits.helps.settings)}" if fits.helps is not None else ""
        return f"perhaps, on {card}: {_doubt(fits)}{sure}"
    if fits.helps is not None:
        return f"not on {card} as it is, but with {_named(fits.helps.settings)}: {needs} without"
    return f"no, not on {card}: {needs}, and no setting of the allocator is enough"


def _is_full(fits: Fits) -> bool:
    """Whether the card has nothing left for torch's allocator."""
    return fits.card is not None and fits.card <= fits.beside


def _doubt(fits: Fits) -> str:
    """Why it is not sure that the run fits."""
    if fits.replay.failing_orders:
        return (
            f"a request fails in {fits.replay.failing_orders:,} of {fits.replay.orders:,} orders in "
            "which the driver may place segments"
        )
    reserves = f"torch's allocator may reserve {size_text(fits.reserved[1])}"
    if fits.beside_at_most <= fits.beside:
        return reserves
    beside = f"the context and libraries may take {size_text(fits.beside_at_most)} beside it"
    return f"{reserves}, and {beside}"


def _beside(fits: Fits) -> str:
    if not fits.beside:
        return f"{NOT_MEASURED}. The allocator {_reserves(fits)}"
    beside, needed = _adding_up([fits.beside, fits.smallest_card - fits.beside])
    start = (
        f"{beside} are the context, libraries and the driver's. Torch's allocator needs {needed}"
    )
    return start if _is_full(fits) else f"{start}, and {_reserves(fits)}"


def _reserves(fits: Fits) -> str:
    replayed = fits.replay
    if replayed:
        return f"reserves {_between(*fits.reserved)} if it can"
    return f"has reserved {size_text(replayed.peak_reserved)} when a request fails"


def _adding_up(parts: Sequence[int]) -> list[str]:
    """The parts of a sum, rounded so that they add up to the sum as it is printed."""
    number, unit = size_text(sum(parts)).split()
    decimals = len(number.partition(".")[2])
    step = _UNITS[unit] / 10**decimals
    steps = [int(part // step) for part in parts]
    missing = round(float(number) * 10**decimals) - sum(steps)
    by_rest = sorted(range(len(parts)), key=lambda i: parts[i] % step, reverse=True)
    for i in by_rest[:missing]:
        steps[i] += 1
    return [f"{count / 10**decimals:.{decimals}f} {unit}" for count in steps]


_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def _basis(fits: Fits) -> str:
    if fits.basis == NOT_KNOWN:
        return "not known, for the reason in the notes"
    if fits.basis == EXACT:
        return "exact, wherever the driver puts segments"
    tried = "all orders" if fits.replay.are_all else f"{fits.replay.orders:,} orders"
    scratch = ", and of what libraries may take" if fits.uncertain else ""
    return f"an interval over {tried} in which the driver may put segments{scratch}"


def on_a_card(fits: Fits) -> str:
    """The answer in a sentence, for a line per card."""
    failed = fits.replay.failed
    beside = f"{size_text(fits.beside)} beside torch's allocator"
    beside = beside if fits.beside else f"beside {NOT_MEASURED}"
    kinds = [f"{kind} {size_text(peak.bytes)}" for kind, peak in fits.by_kind.items()]
    peaks = f"; peaks: {', '.join(kinds)}" if len(kinds) > 1 else ""
    if fits.verdict == NOT_KNOWN:
        why = fits.replay.notes[0].rstrip(".")
        needs = f"what is counted needs a card of {size_text(fits.smallest_card)}"
        return f"not known: {why}; {needs}{peaks}; {beside}"
    if failed is None:
        reserves = _between(*fits.reserved)
        if fits.verdict == PERHAPS:
            return f"{fits.verdict}: {_doubt(fits)}{peaks}; {beside}"
        return f"{fits.verdict}: torch reserves {reserves}{peaks}; {beside}"
    if fits.verdict == PERHAPS:
        return f"{fits.verdict}: {_doubt(fits)}{peaks}; {beside}"
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
    rows = [(_says(fits, choice), choice) for choice in fits.choices[:_MOST_CHOICES]]
    wide = max((len(says) for says, _ in rows), default=0)
    for says, choice in rows:
        size = size_text(choice.smallest_room + fits.beside)
        start = f"{'':<{_MARGIN}}{size:>8}  {says:<{wide}}{'  ' if wide else ''}"
        yield start + _named(choice.settings)


def _says(fits: Fits, choice: Choice) -> str:
    recorded = "as recorded" if choice.as_recorded else ""
    runs = "fits" if fits.card is not None and fits.surely_runs(choice) else ""
    return ", ".join(filter(None, (recorded, runs)))


def _named(settings: str) -> str:
    return settings or "torch's defaults"


def render_what_if(prediction: WhatIf, width: int = 80) -> str:
    """The predicted peak, and the rows without a law."""
    length = f", length {prediction.length}" if prediction.length is not None else ""
    lines = paragraph("what if", f"batch {prediction.batch}{length} on {prediction.device}", width)
    lines += paragraph("peak", _likely(prediction), width)
    traced = ", ".join(f"{batch:,}" for batch in prediction.batches)
    basis = f"{prediction.basis}, from traces with {traced} rows of the model's input"
    lines += paragraph("basis", basis, width)
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


def _likely(prediction: WhatIf) -> str:
    between = _between(prediction.lowest, prediction.highest)
    if prediction.exact or prediction.likely is None:
        return between
    return f"{between}; {size_text(prediction.likely)} if the program does what it did"


def text_of(forecast: Fits | WhatIf | CheckpointPlan) -> str:
    """Any forecast as text."""
    return render_what_if(forecast) if isinstance(forecast, WhatIf) else str(forecast)


def _between(lowest: int, highest: int) -> str:
    low, high = size_text(lowest), size_text(highest)
    if low == high and lowest != highest:  # three digits do not tell them apart
        low, high = (f"{bytes_ / (1 << 20):,.2f} MiB" for bytes_ in (lowest, highest))
    return low if lowest == highest else f"between {low} and {high}"


def render_plan(plan: CheckpointPlan, width: int = 80) -> str:
    """The modules of the plan, its memory and time, and the code to paste."""
    chosen, budget = plan.chosen, size_text(plan.budget)
    needs = f"{size_text(chosen.peak_reserved or chosen.peak)} instead of "
    needs += size_text(plan.now.peak_reserved or plan.now.peak)
    if not chosen.fits:
        answer = f"no plan fits in {budget}; the smallest needs {needs}"
        if not (chosen.modules or chosen.offloaded):
            now = size_text(chosen.peak_reserved or chosen.peak)
            answer = f"no plan fits in {budget}: no checkpoint lowers the {now} that it needs now"
    elif not (chosen.modules or chosen.offloaded):
        answer = f"fits in {budget} without a checkpoint"
    else:
        answer = f"fits in {budget}: {needs}, for {chosen.time_ratio - 1:.0%} more time"
    if plan.verdict == NOT_KNOWN:
        answer = f"not known, for the reason in the notes. By what was recorded: {answer}"
    elif plan.verdict == PERHAPS:
        answer = f"perhaps: {answer}, but not wherever the driver may put segments"
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
    lines += touched_text.render(verified.changes, kept=False, keep="", width=width).splitlines()
    return "\n".join(line.rstrip() for line in lines)
