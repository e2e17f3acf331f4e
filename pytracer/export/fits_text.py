"""Predictions as text: whether a run fits, a plan, another batch; and their verification."""

from collections.abc import Iterator, Sequence
from functools import partial

from pytracer.analysis.allocator.advice import Choice
from pytracer.analysis.allocator.replay import EXACT, NO, NOT_KNOWN, PERHAPS, YES, FailedRequest
from pytracer.analysis.forecasts.checkpoint_plans import CheckpointPlan
from pytracer.analysis.forecasts.fits import Fits, Holder
from pytracer.analysis.forecasts.verified import Verified
from pytracer.analysis.forecasts.what_if import WhatIf
from pytracer.basics.names import short_line
from pytracer.basics.units import size_text
from pytracer.data.model_names import module_text
from pytracer.export import touched_text
from pytracer.export.terminal import (
    DIM,
    GREEN,
    MARGIN,
    PLAIN,
    RED,
    YELLOW,
    Terminal,
    cut_in_front,
    plain,
)

_MOST_CHOICES = 8


def render(fits: Fits, terminal: Terminal = PLAIN) -> str:
    """The page, without a line break at its end."""
    lines = [*_verdict(terminal, "fits", answer(fits), fits.verdict)]
    lines += terminal.paragraph("beside", beside(fits))
    lines += terminal.paragraph("basis", _basis(fits))
    if len(fits.by_kind) > 1:
        kinds = (f"{kind} {size_text(peak.bytes)}" for kind, peak in fits.by_kind.items())
        lines += terminal.paragraph("peaks", ", ".join(kinds))
    if fits.replay.failed is not None and not _is_full(fits):
        lines += _failure(fits.replay.failed, terminal)
        lines += _holders(fits.holders, terminal)
    lines += ["", *_choices(fits, terminal)]
    for note in fits.notes:
        lines += terminal.paragraph("note", note)
    return _joined(lines, fits.verified, terminal)


def _verdict(terminal: Terminal, title: str, answer: str, verdict: str) -> list[str]:
    """The answer, in the colour of its verdict."""
    color = {YES: GREEN, NO: RED}.get(verdict, YELLOW)
    return terminal.in_one_color(title, answer, color)


def _joined(lines: list[str], verified: Verified | None, terminal: Terminal) -> str:
    if verified is not None:
        lines = [*lines, "", render_verified(verified, terminal)]
    return "\n".join(line.rstrip() for line in lines)


def answer(fits: Fits) -> str:
    """Whether the run fits, in a sentence."""
    needs = _needs(fits)
    if fits.verdict == NOT_KNOWN:
        where = "" if fits.card is None else f" on {size_text(fits.card)}"
        return (
            f"not known{where}; what was recorded needs a card of {size_text(fits.smallest_card)}"
        )
    if fits.card is None:
        return f"with the recorded settings, {needs}"
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


def _needs(fits: Fits) -> str:
    """The card that the run needs: at least, and surely, where these are not the same."""
    least, sure = size_text(fits.smallest_card), size_text(fits.surely_needs)
    if least == sure:
        return f"the run needs a card of {least}"
    if fits.beside or fits.uncertain:
        return f"the run needs a card of {least} at least, and {sure} are surely enough"
    return f"torch's allocator needs {least}, and the card must have more; {sure} are surely enough"


def _not_measured(fits: Fits) -> str:
    counted = size_text(fits.beside_at_most)
    return f"torch's allocator: not measured; up to {counted} are counted"


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


def beside(fits: Fits) -> str:
    """What the card holds beside torch's allocator, and what that needs of the rest."""
    if not fits.beside:
        who = "The allocator" if fits.replay else "Of the rest,"
        return f"{_not_measured(fits)}. {who} {_reserves(fits)}"
    besides, needed = _adding_up([fits.beside, fits.smallest_card - fits.beside])
    start = f"{besides} are the context, libraries and the driver's"
    needs = f"Torch's allocator needs {needed}"
    if _is_full(fits):
        return f"{start}. {needs}"
    if fits.replay:
        return f"{start}. {needs}, and {_reserves(fits)}"
    return f"{start}; of the rest, {_reserves(fits)}. {needs}"


def _reserves(fits: Fits) -> str:
    replayed = fits.replay
    if replayed:
        return f"reserves {_between(*fits.reserved)} if it can"
    return f"torch had reserved {size_text(replayed.peak_reserved)} when a request failed"


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
    beside = beside if fits.beside else f"beside {_not_measured(fits)}"
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
    needs = _needs(fits)
    return f"does not fit: {failure}; {needs}{peaks}; {beside}"


def _failure(failed: FailedRequest, terminal: Terminal) -> Iterator[str]:
    request = f"{size_text(failed.bytes)} for {failed.op or 'a tensor'}"
    if failed.module:
        request += f" in {failed.module}"
    if failed.line:
        request += f" at {short_line(failed.line)}"
    when = f", step {failed.step}, {failed.phase}" if failed.step is not None else ""
    yield from terminal.paragraph("fails at", request + when)
    room = (
        f"{size_text(failed.reserved)} reserved, {size_text(failed.allocated)} in use; of "
        f"{size_text(failed.free)} free the largest block that could serve has "
        f"{size_text(failed.largest_free)}"
    )
    yield from terminal.paragraph("", room)


def _holders(rows: tuple[Holder, ...], terminal: Terminal) -> Iterator[str]:
    for i, row in enumerate(rows):
        title = "holds" if i == 0 else ""
        size = f"{size_text(row.bytes):>8}  "
        parts = (row.category, row.module, short_line(row.line))
        text = "  ".join(part for part in parts if part)
        start = terminal.paint(title, DIM) + " " * (MARGIN - len(title)) + size
        yield start + cut_in_front(text, terminal.width - MARGIN - len(size))


def of_settings(fits: Fits) -> str:
    """What the figure beside each choice of settings is."""
    return "the smallest card" if fits.beside else "what torch's allocator needs"


def _choices(fits: Fits, terminal: Terminal) -> Iterator[str]:
    yield from terminal.paragraph("settings", f"{of_settings(fits)} with each, as replayed")
    rows = [(_says(fits, choice), choice) for choice in fits.choices[:_MOST_CHOICES]]
    wide = max((len(says) for says, _ in rows), default=0)
    longest = max((len(_named(choice.settings)) for _, choice in rows), default=0)
    in_columns = MARGIN + 12 + wide + longest <= terminal.width
    for says, choice in rows:
        size = f"{'':<{MARGIN}}{size_text(choice.smallest_room + fits.beside):>8}  "
        shown = terminal.paint(says, GREEN if says.endswith("fits") else "")
        named = _named(choice.settings)
        if in_columns:
            yield f"{size}{shown}{'':<{wide - len(says)}}{'  ' if wide else ''}{named}"
        else:
            yield from _broken(size, named, terminal)
            yield from [" " * len(size) + shown] if says else []


def _broken(start: str, settings: str, terminal: Terminal) -> Iterator[str]:
    """Long settings over several lines, which end with a comma."""
    line = ""
    for part in settings.split(","):
        if line and len(f"{start}{line},{part},") > terminal.width:
            yield f"{start}{line},"
            start, line = " " * len(start), ""
        line = f"{line},{part}" if line else part
    yield start + line


def _says(fits: Fits, choice: Choice) -> str:
    recorded = "as recorded" if choice.as_recorded else ""
    runs = "fits" if fits.card is not None and fits.surely_runs(choice) else ""
    return ", ".join(filter(None, (recorded, runs)))


def _named(settings: str) -> str:
    return settings or "torch's defaults"


def render_what_if(prediction: WhatIf, terminal: Terminal = PLAIN) -> str:
    """The predicted peak, and the rows without a law."""
    length = f", length {prediction.length}" if prediction.length is not None else ""
    lines = terminal.paragraph(
        "what if", f"batch {prediction.batch}{length} on {prediction.device}"
    )
    lines += terminal.paragraph("peak", _likely(prediction))
    traced = ", ".join(f"{batch:,}" for batch in prediction.batches)
    basis = f"{prediction.basis}, from traces with {traced} rows of the model's input"
    lines += terminal.paragraph("basis", basis)
    if prediction.reserved is not None:
        lines += terminal.paragraph("reserved", _between(*prediction.reserved))
    agree = "trace gives" if prediction.traces == 1 else "traces agree on"
    law = f"{prediction.with_law:.1%} of the peak follow a law that {prediction.traces} {agree}"
    lines += terminal.paragraph("known by", law)
    for i, row in enumerate(prediction.flagged):
        title = "no law" if i == 0 else ""
        start = f"{title:<{MARGIN}}{_between(row.lowest, row.highest)}  "
        lines.append(terminal.one_line(start, f"{row.category}  {row.module}  {row.op}"))
    for note in prediction.notes:
        lines += terminal.paragraph("note", note)
    return _joined(lines, prediction.verified, terminal)


def _likely(prediction: WhatIf) -> str:
    between = _between(prediction.lowest, prediction.highest)
    if prediction.exact or prediction.likely is None:
        return between
    return f"{between}; {size_text(prediction.likely)} if the program does what it did"


def text_of(forecast: Fits | WhatIf | CheckpointPlan, terminal: Terminal = PLAIN) -> str:
    """Any forecast as text."""
    if isinstance(forecast, WhatIf):
        return render_what_if(forecast, terminal)
    if isinstance(forecast, CheckpointPlan):
        return render_plan(forecast, terminal)
    return render(forecast, terminal)


def as_printed(forecast: Fits | CheckpointPlan) -> str:
    """The text of `print(t.fits(...))`: as wide as the terminal, and without colours."""
    return text_of(forecast, plain())


def _between(lowest: int, highest: int) -> str:
    low, high = size_text(lowest), size_text(highest)
    if low == high and lowest != highest:  # three digits do not tell them apart
        low, high = (f"{bytes_ / (1 << 20):,.2f} MiB" for bytes_ in (lowest, highest))
    return low if lowest == highest else f"between {low} and {high}"


def answer_of_plan(plan: CheckpointPlan) -> str:
    """Whether a plan fits the budget, in a sentence."""
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
        return f"not known, for the reason in the notes. By what was recorded: {answer}"
    if plan.verdict == PERHAPS:
        return f"perhaps: {answer}, but not wherever the driver may put segments"
    return answer


def render_plan(plan: CheckpointPlan, terminal: Terminal = PLAIN) -> str:
    """The modules of the plan, its memory and time, and the code to paste."""
    chosen, answer = plan.chosen, answer_of_plan(plan)
    lines = [*_verdict(terminal, "plan", answer, plan.verdict)]
    if chosen.modules:
        lines += terminal.paragraph("modules", ", ".join(map(module_text, chosen.modules)))
    if chosen.offloaded:
        text = f"{', '.join(map(module_text, chosen.offloaded))}, with {size_text(chosen.pinned)} pinned on the host"
        lines += terminal.paragraph("offload", text)
    for warning in plan.warnings:
        lines += terminal.paragraph("warning", warning)
    for note in plan.notes:
        lines += terminal.paragraph("note", note)
    if plan.code:
        lines += ["", *terminal.code(plan.code)]
    return _joined(lines, plan.verified, terminal)


def _row_of_figures(
    terminal: Terminal, name: str, predicted: str, measured: str, error: str
) -> str:
    if terminal.width < 76:
        return f"{name:<14}{predicted:>22}{measured:>12}{error:>12}"
    return f"{'':<{MARGIN}}{name:<16}{predicted:>24}{measured:>14}{error:>12}"


def render_verified(verified: Verified, terminal: Terminal = PLAIN) -> str:
    """The predicted and the measured figures, side by side."""
    machine = verified.machine
    where = f"{machine['device']}, torch {machine['torch']}"
    if verified.limit is not None:
        where += f", with {size_text(verified.limit)} for torch's allocator"
    lines = [*terminal.paragraph("verified", where)]
    row = partial(_row_of_figures, terminal)
    lines.append(row("", "predicted", "measured", "error"))
    predicted, measured = (
        "runs" if each else "fails" for each in (verified.was_to_run, verified.ran)
    )
    lines.append(row("to the end", predicted, measured, ""))
    for one in verified.figures:
        predicted = _between(one.lowest, one.highest).removeprefix("between ")
        lines.append(row(one.name, predicted, size_text(one.measured), f"{one.error:+.3%}"))
    held, color = ("it held", GREEN) if verified else ("it did not hold", RED)
    lines.append(" " * MARGIN + terminal.paint(held, color))
    for note in verified.notes:
        lines += terminal.paragraph("note", note)
    lines += terminal.paragraph("", f"added to {verified.file}")
    lines += touched_text.render(
        verified.changes, kept=False, keep="", terminal=terminal
    ).splitlines()
    return "\n".join(line.rstrip() for line in lines)
