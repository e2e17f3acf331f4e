"""Leaks and waste: memory that was kept for nothing, with its bytes, line and remedy.

Each rule is a function from a trace to findings. It yields only findings that the data proves.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from pytracer.analysis.allocator import advice as allocator_advice, blocks
from pytracer.analysis.answers import keepers
from pytracer.analysis.answers.edits import Edit
from pytracer.analysis.answers.growth import growing
from pytracer.analysis.answers.held import held, never_read
from pytracer.analysis.answers.outer_calls import (
    OuterCalls,
    ends_without_grad,
    in_vain_of,
    outermost,
)
from pytracer.analysis.answers.retained import retained
from pytracer.analysis.answers.situation import Finding, Proof, Situation, at_peak
from pytracer.analysis.answers.staying import left_behind, until_made_again
from pytracer.analysis.facts import lines, owners, phases, scopes, timelines, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.scopes import BACKWARD, NEVER
from pytracer.basics.names import short_line
from pytracer.basics.units import size_text
from pytracer.data import health, meta, sanitized
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import CATEGORY, I64, OWNED, ROLE, U64, Mask

_WORTH = 0.01  # of the peak: less is noise
_LEAST_GROWTH = 1024  # bytes a step, and a millionth of the peak: less is kept numbers
_CACHE_SHARE = 0.2  # of the bytes reserved at the peak
_SMALLEST_CACHE = 64 << 20  # a few segments are no waste


def findings(trace: Trace, device: str | None = None) -> list[Finding]:
    """All findings, the most bytes first; none if rows of the trace were lost.

    Without its free, a block would look kept. Without its backward, a call would look in vain.
    """
    return list(_findings(trace, device or usage.main_device(trace)))


@once_per_trace
def _findings(trace: Trace, device: str) -> list[Finding]:
    if len(allocations(trace)) == 0 or health.has_holes(trace.losses):
        return []
    now = at_peak(trace, device)
    return sorted([*in_vain(now), *_large(now, cache(now))], key=lambda finding: -finding.bytes)


def in_vain(now: Situation) -> list[Finding]:
    """Findings about memory in use at that moment, and about what grows; the most bytes first."""
    return sorted(_large(now, needless(now)), key=lambda finding: -finding.bytes)


def _large(now: Situation, rows: Iterable[Finding]) -> list[Finding]:
    least = _WORTH * now.bytes(now.alive)
    # Growth counts even if it is a small part of the peak, because it continues.
    growth = max(_LEAST_GROWTH, now.bytes(now.alive) / 1_000_000)
    return [row for row in rows if row.bytes >= (growth if row.kind == "growth" else least)]


def needless(now: Situation) -> list[Finding]:
    """Findings about memory kept in vain. One cause is one finding: growth is not also "held"."""
    grown = list(growing(now))
    rest = np.ones(len(allocations(now.trace)), np.bool_)
    for group in grown:
        rest &= ~group.alike
    rows = [group.finding for group in grown]
    if lines.training_lines(now.trace) > 1:
        return rows  # blocks for another line's use would look held in vain
    for rule in RULES:
        rows += rule(now, rest)
    return rows


def evaluation(now: Situation, rest: Mask) -> Iterator[Finding]:
    """A module ran with grad mode on, and nothing ever went backward through that call."""
    tree, alloc, calls = scopes.tree(now.trace), allocations(now.trace), outermost(now.trace)
    if len(calls.numbers) < 2 or not scopes.has_operators(now.trace):
        return
    name = tree.name[calls.numbers]
    in_vain = in_vain_of(now, calls) & ~_of_frozen_modules(now.trace, calls)
    # A library may call the model once before all training, to learn its shapes.
    first = in_vain & (calls.backwards == 0)
    in_vain &= ~first | (first.sum() > 1) | np.isin(name, name[in_vain & ~first])
    in_vain = np.append(in_vain, False)  # -1: in no call
    ends = np.append(tree.end[calls.numbers], NEVER)
    made_in, moments = calls.of_scope[alloc.scope], phases.moments(now.trace)
    freed = moments.freed_ticks
    kept = (made_in >= 0) & (freed > ends[made_in]) & (alloc.start >= 0)
    kept &= usage.on_device(now.trace, now.device) & ~np.isin(alloc.category, OWNED)
    # The last op's block is the call's result, which the program keeps in any case.
    last = np.zeros(len(ends), np.uint32)
    np.maximum.at(last, made_in[kept], alloc.scope[kept])
    kept &= alloc.scope != last[made_in]
    in_vain[:-1] &= ~_skipped(now.trace, calls, in_vain[:-1], np.where(kept, made_in, -1))
    # But the graph of a loss may be all that keeps results, and what a loss makes outside of modules.
    # The next call reads inputs.
    before = calls.before(moments.made_ticks) + (alloc.category == CATEGORY["inputs"])
    call = np.where(made_in >= 0, made_in, before)
    following = np.append(calls.begin, [NEVER, NEVER])[call + 1]
    by_losses = ~kept & keepers.in_graphs_alone(now.trace) & (freed > following) & (call >= 0)
    outlived = (kept | by_losses) & in_vain[call] & rest
    if not outlived.any():
        return
    none = np.zeros(len(alloc), np.int64)
    changes, (level,) = usage.level_columns(now.trace, outlived, none, 1)
    per_call = usage.sums(call[outlived], alloc.requested_bytes[outlived], len(ends))
    most, each = int(level.max()), int(per_call.max())
    worst = call == int(per_call.argmax())
    line, module = now.where(outlived & worst)
    trains = calls.went_back[name == name[int(per_call.argmax())]].any()
    count = int((per_call > 0).sum())
    called = now.trace.strings[name[int(per_call.argmax())]] or "a module"
    times = f"{count} calls of {called}" if count > 1 else f"A call of {called}"
    at = f" at {short_line(line)}" if line else ""
    at_once = (
        f"{size_text(most)} at once, {size_text(each)} each," if most > each else size_text(each)
    )
    cure = f"wrap {'them' if count > 1 else 'it'} in `with torch.no_grad():`"
    if most > each:
        cure += ", or keep numbers of them: loss.item()"
    elif trains:  # the same model trains elsewhere, so this may be a skipped step
        cure += "; if a step is skipped, `del` its loss before going on"
    yield Finding(
        "evaluation",
        most,
        now.bytes(outlived & now.alive & ~_in_use(now)),
        line,
        module,
        f"{times} kept up to {at_once}{at} for a backward that never came",
        cure,
        Proof(outlived, int(changes[int(level.argmax())])),
        Edit(outlived, end=np.where(by_losses, following, ends_without_grad(now.trace, kept))),
    )


def _skipped(trace: Trace, calls: OuterCalls, in_vain: Mask, kept_by: I64) -> Mask:
    """Calls that may be steps which the program skips, as of a loss that is not finite.

    They are rare, keep no more than a call for training, and nothing when the next call begins.
    `kept_by` has the call that each block was made in and outlived, or -1.
    """
    rows = np.flatnonzero(kept_by >= 0)
    of_call, count = kept_by[rows], len(calls.numbers)
    kept = usage.sums(of_call, allocations(trace).requested_bytes[rows], count)
    following = np.append(calls.begin, NEVER)[of_call + 1]
    until_the_next = np.zeros(count, np.bool_)
    until_the_next[of_call[phases.moments(trace).freed_ticks[rows] > following]] = True
    skipped = np.zeros(count, np.bool_)
    name = scopes.tree(trace).name[calls.numbers]
    for each in np.unique(name[in_vain]):
        trains = (name == each) & calls.went_back
        if 2 * (in_vain & (name == each)).sum() < trains.sum():
            skipped |= (name == each) & (kept <= kept[trains].max()) & ~until_the_next
    return skipped


def _in_use(now: Situation) -> Mask:
    """Blocks of the latest op and of the op before it, which the latest op usually reads."""
    alloc = allocations(now.trace)
    made = (alloc.start >= 0) & (alloc.start <= now.position)
    latest = np.unique(alloc.scope[made])[-2:]  # scopes are numbered in order
    return made & np.isin(alloc.scope, latest)


def _of_frozen_modules(trace: Trace, calls: OuterCalls) -> Mask:
    """Calls of modules without trainable parameters, in which no graph begins."""
    is_frozen = meta.of(trace).frozen_modules.__contains__
    of_frozen: Mask = scopes.scopes_named(trace, is_frozen)[calls.numbers]
    return of_frozen


def late_zero_grad(now: Situation, rest: Mask) -> Iterator[Finding]:
    """The previous step's gradients are still alive in the training forward that has the peak."""
    if now.phase != "forward" or now.position < 0:
        return
    alloc = allocations(now.trace)
    which = now.of_category("gradients") & (alloc.step < now.step) & rest
    if not which.any() or not _is_for_training(now):
        return
    place = owners.place_of(now.trace, int(now.trace.events.scope[now.position]))
    at = f" at {place.line}" if place.line else ""
    amount, edit = now.bytes(which), Edit(alloc.category == CATEGORY["gradients"])
    change, edit = "call optimizer.zero_grad()", replace(edit, end=_ends_of_steps(now.trace))
    ends = timelines.timeline(now.trace).step_ends
    if (np.searchsorted(ends, phases.moments(now.trace).freed_ticks[which]) > now.step).any():
        # They outlive this step, too: zero_grad() fills them with zeros.
        change += " as optimizer.zero_grad(set_to_none=True), which drops them,"
        edit = replace(edit, end=None, gone=until_made_again(now.trace))
    there = now.bytes(now.alive)
    # Memory may have run out below the peak: then another moment's height says nothing.
    is_peak = there == usage.peak(now.trace, now.device).bytes
    if is_peak and now.saved_by(edit) < _WORTH * there:
        return  # a backward is as high
    yield Finding(
        "late_zero_grad",
        amount,
        amount,
        place.line,  # the forward's line; torch frees gradients in no op, so theirs is unknown
        place.module,
        f"The peak is in the forward{at} while {size_text(amount)} of the previous step's "
        "gradients are still alive",
        f"{change} before that forward",
        Proof(which, now.position),
        edit,
    )


def _ends_of_steps(trace: Trace) -> U64:
    """Per allocation, when the step ends in which it was made; 0 for one before the trace."""
    ends = np.append(timelines.timeline(trace).step_ends, NEVER)
    step = allocations(trace).step
    return np.where(step < 0, np.uint64(0), ends[np.clip(step, 0, len(ends) - 1)])


def _is_for_training(now: Situation) -> bool:
    """Whether a backward goes through the call at that moment, or may after the trace.

    An evaluation between two steps also runs beside the gradients, but is no reason to move
    zero_grad().
    """
    calls = outermost(now.trace)
    position = slice(now.position, now.position + 1)
    call = int(calls.before(now.trace.events.ticks[position])[0])
    if call < 0 or calls.went_back[call]:
        return True
    after_the_last = calls.backwards[call] == (scopes.tree(now.trace).kind == BACKWARD).sum()
    return bool(calls.with_grad[call] & after_the_last & ~in_vain_of(now, calls)[call])


# Each rule takes a situation, and the allocations that no leak explains. It yields findings.
RULES: tuple[Callable[[Situation, Mask], Iterator[Finding]], ...] = (
    evaluation,
    held,
    never_read,
    retained,
    left_behind,
    late_zero_grad,
)


def twins(now: Situation) -> Iterator[Finding]:
    """The same numbers twice: a weight, and autocast's copy of it in 16 bits.

    That is how autocast works and no mistake, but a way to save if memory is short.
    """
    copies = allocations(now.trace).role == ROLE["autocast_copy"]
    which = now.of_category("weights") & copies
    if which.any():
        amount = size_text(now.bytes(which))
        row = now.finding(
            "twins",
            which,
            f"{amount} are 16-bit copies of float32 weights",
            "model.to(torch.bfloat16) needs none, and halves weights, gradients and their state",
        )
        half = _in_32_bits(now.trace) & ~copies
        yield replace(row, edit=Edit(half | copies, share=np.where(half, 0.5, 0.0)))


def _in_32_bits(trace: Trace) -> Mask:
    """Weights, gradients and optimizer state in float32, but no counts of steps.

    Gradients without a label are the weights'.
    """
    alloc, labels = allocations(trace), sanitized.labels(trace)
    kinds = [CATEGORY[name] for name in ("weights", "gradients", "optimizer_state")]
    is_float, is_scalar = (
        np.array([text == word for text in trace.strings]) for word in ("float32", "scalar")
    )
    is_float = (is_float[labels.dtype] & ~is_scalar[labels.shape])[alloc.label]
    unlabelled = (alloc.label == 0) & (alloc.category == CATEGORY["gradients"])
    result: Mask = np.isin(alloc.category, kinds) & (is_float | unlabelled)
    return result


def cache(now: Situation) -> Iterator[Finding]:
    """The allocator reserves much more than the peak needs."""
    memory: Any = blocks.device_bytes(now.trace, now.alive, now.position, now.device)
    if memory.reserved is None or memory.allocated is None:
        return
    spare = memory.reserved - memory.allocated
    if spare > max(_CACHE_SHARE * memory.reserved, _SMALLEST_CACHE):
        yield Finding(
            "cache",
            spare,
            0,
            "",
            "",
            f"The allocator reserves {size_text(memory.reserved)} where the peak needs "
            f"{size_text(memory.allocated)}: pieces that did not fit, or a larger peak before",
            _of_the_cache(now),
        )


def _of_the_cache(now: Situation) -> str:
    advice = allocator_advice.to_reserve_less(now.trace, now.device)
    if advice is not None:
        return f"{advice.text} reserves {size_text(advice.bytes)} less, as replay shows"
    return "no setting of the allocator would reserve less; empty_cache() after a larger peak does"
