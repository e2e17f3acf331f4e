"""Activations that a variable or a Function's ctx keeps, though no backward needs them.

A variable is accused only with a proof that the recording took as a backward pass began: nothing but
the variable refers to the tensor, and the program does not read the variable again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pytracer.analysis.answers.edits import Edit
from pytracer.analysis.answers.keepers import kinds
from pytracer.analysis.answers.outer_calls import in_vain_of, lacks_its_end, outermost
from pytracer.analysis.answers.situation import Finding, Situation
from pytracer.analysis.facts import phases, scopes, timelines
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.evidence import label_events
from pytracer.analysis.facts.scopes import BACKWARD, NEVER, NODE
from pytracer.basics.units import size_text
from pytracer.data import meta, sanitized
from pytracer.data.recorded import Trace
from pytracer.data.schema import ACTION, CATEGORY, OWNED, ROLE, U64, Mask

_NEEDED = [*OWNED, CATEGORY["activations"]]  # activations have a rule of their own


def _backwards_after(now: Situation) -> int:
    """How many backward passes begin after the moment."""
    tree, ticks = scopes.tree(now.trace), now.trace.events.ticks
    moment = ticks[now.position] if now.position >= 0 else 0
    return int((tree.begin[tree.kind == BACKWARD] > moment).sum())


def held(now: Situation, rest: Mask) -> Iterator[Finding]:
    """Activations beside the graph that the program can let go of before the backward."""
    which = _beside_the_graph(now, rest)
    if not which.any():
        return
    of_step = allocations(now.trace).step >= now.step
    by_function, function = _on_context(now, which & of_step)
    if by_function.any():
        yield now.finding(
            "held",
            by_function,
            f"{size_text(now.bytes(by_function))} of activations are held: {function}'s ctx keeps "
            "them instead of autograd, which would free them in backward",
            "ctx.save_for_backward(...) instead of ctx.name = ...",
        )
    for spare in _spare(now, which & ~by_function):
        amount = size_text(now.bytes(spare.which))
        row = now.finding(
            "held",
            spare.which,
            f"{amount} of activations are held: only `{spare.variable}` keeps them, "
            "and nothing reads it later",
            f"del {spare.variable} before the backward",
        )
        edit = Edit(spare.alike, end=_kept_from(now))
        saved = now.saved_by(edit)
        yield replace(row, at_peak=min(row.at_peak, saved), edit=edit)


_LONG = 2  # ends of steps that a block survives: no input or result of a step does


def never_read(now: Situation, rest: Mask) -> Iterator[Finding]:
    """What stays from the first step to the end in a variable that is not read again.

    A loaded checkpoint is such. What a later step leaves for a few others may be a rollout's.
    """
    block, row, ticks = label_events(now.trace, "spare")
    alloc, ends = allocations(now.trace), timelines.timeline(now.trace).step_ends
    moments = phases.moments(now.trace)
    made, freed = moments.made_ticks[block], moments.freed_ticks[block]
    stays = (np.searchsorted(ends, freed) - np.searchsorted(ends, ticks)) >= _LONG
    stays &= (np.searchsorted(ends, made) == 0) & (freed == NEVER)
    stays &= now.alive[block] & rest[block] & ~np.isin(alloc.category[block], _NEEDED)
    block, row, ticks = block[stays], row[stays], ticks[stays]
    texts, names = now.trace.strings, sanitized.labels(now.trace).name[row]
    for number in sorted(set(names.tolist()), key=texts.__getitem__):
        own = np.zeros(len(alloc), np.bool_)
        own[block[names == number]] = True
        end = np.full(len(alloc), NEVER)
        np.minimum.at(end, block[names == number], ticks[names == number])
        finding = now.finding(
            "held",
            own,
            f"{size_text(now.bytes(own))} stay from step to step: only `{texts[number]}` keeps "
            "them, and nothing reads it later",
            f"del {texts[number]} once it was read",
        )
        yield replace(finding, edit=Edit(own, end=end))


def unexplained(now: Situation) -> Finding | None:
    """Activations that no graph had saved, of which nothing shows that the program can spare them.

    A statement and no accusation: a module, a hook, or a later step may need them.
    """
    which = _beside_the_graph(now, np.ones(len(allocations(now.trace)), np.bool_))
    if not which.any():
        return None
    which &= ~_on_context(now, which)[0] & ~_by_checkpoints(now)
    for spare in _spare(now, which):
        which &= ~spare.which
    if not which.any():
        return None
    amount = size_text(now.bytes(which))
    return now.finding("noticed", which, f"{amount} of activations are kept beside the graph", "")


def _beside_the_graph(now: Situation, rest: Mask) -> Mask:
    """Activations that no graph saved, or that a graph had saved and no longer needs."""
    none = np.zeros(len(rest), np.bool_)
    exact = bool((now.trace.events.action == ACTION["saved"]).any())
    if not (exact or (scopes.tree(now.trace).kind == NODE).any()):
        return none  # without nodes, the trace does not show which blocks a backward freed
    if lacks_its_end(now.trace) and _backwards_after(now) == 0:
        return none  # only the beginning of a backward shows which blocks it needs
    which = _of_no_use(now, rest, exact=exact)
    if not which.any():
        return which
    which &= ~_behind_numbers(now)
    # Fast weights: the program holds them so as to call a module with them.
    stands_in, _, _ = label_events(now.trace, "stand_in")
    which[stands_in] = False
    return which


@dataclass(frozen=True)
class _Spare:
    """Blocks that one variable keeps in vain."""

    variable: str
    which: Mask  # those of the moment
    alike: Mask  # those of any step


def _spare(now: Situation, which: Mask) -> Iterator[_Spare]:
    """These blocks, as far as they are like those that a spare variable kept, by variable.

    The variables of a few backward passes were looked at. In other steps, a block made in the same
    way is the same variable's if there are no more of them than the variable had.
    """
    block, row, ticks = label_events(now.trace, "spare")
    alloc, kind = allocations(now.trace), kinds(now.trace)
    tree = scopes.tree(now.trace)
    backwards = np.sort(tree.begin[tree.kind == BACKWARD])
    which = which & (_kept_from(now) <= _tick(now))
    texts, names = now.trace.strings, sanitized.labels(now.trace).name[row]
    for number in sorted(set(names.tolist()), key=texts.__getitem__):
        own = names == number
        passes = np.searchsorted(backwards, ticks[own], side="right")
        pairs, counts = np.unique(
            np.stack((kind[block[own]], passes.astype(np.uint64))), axis=1, return_counts=True
        )
        most = dict[int, int]()
        for each, count in zip(pairs[0].tolist(), counts.tolist(), strict=True):
            most[each] = max(most.get(each, 0), count)
        here, times = np.unique(kind[which], return_counts=True)
        proved = [
            each
            for each, count in zip(here.tolist(), times.tolist(), strict=True)
            if count <= most.get(each, 0)
        ]
        of_kind = np.isin(kind, np.array(proved, np.uint64))
        if (which & of_kind).any():
            alike = of_kind & (alloc.role == ROLE["held"])
            yield _Spare(texts[number], which & of_kind, alike)
            which = which & ~of_kind


def _kept_from(now: Situation) -> U64:
    """Per allocation, when the backward that follows its forward begins."""
    kept_from: U64 = timelines.timeline(now.trace).kept_from[
        phases.moments(now.trace).made_interval
    ]
    return kept_from


def _tick(now: Situation) -> np.uint64:
    ticks = now.trace.events.ticks
    return ticks[now.position] if now.position >= 0 else np.uint64(0)


def _of_no_use(now: Situation, rest: Mask, *, exact: bool) -> Mask:
    """Held activations that no backward will need, or that outlived their backward."""
    alloc, moments = allocations(now.trace), phases.moments(now.trace)
    which: Mask = now.of_category("activations") & (alloc.role == ROLE["held"]) & rest
    # A variable may keep the last step's until the next forward. Older blocks are growth.
    which &= alloc.step >= now.step - 1
    if not which.any():
        return which
    began, over = _following_backward(now.trace)
    outlives = (over != NEVER) & (moments.freed_ticks > over)
    # The graph is read when a backward begins. Hooks record every save, even without a backward.
    which &= np.where(began, outlives | exact, _tells_every_save(now.trace))
    # A call in vain has a graph of its own. That graph keeps the call's blocks, no variable does.
    calls = outermost(now.trace)
    call = calls.before(moments.made_ticks)
    unused = np.append(calls.with_grad & ~calls.went_back, False)[call]
    which &= ~np.append(calls.unclear, False)[call]
    which &= ~(unused & (began | np.append(in_vain_of(now, calls), False)[call]))
    return which


def _on_context(now: Situation, which: Mask) -> tuple[Mask, str]:
    """Which of these the forward of an autograd.Function made, and one such Function's name."""
    tree = scopes.tree(now.trace)
    nodes = np.flatnonzero((tree.kind == NODE) & (tree.forward > 0))
    names = now.trace.strings
    which = which & ~_by_checkpoints(now)
    number = {text: i for i, text in enumerate(names)}
    # Per string that names a Function's node, the Function's name. torch's nodes end in a number.
    function_of = np.array(
        [number.get(text.removesuffix("Backward"), 0) if text.endswith("Backward") else 0
         for text in names]
    )  # fmt: skip
    forward = tree.forward[nodes]
    named_so = function_of[tree.name[nodes]]
    functions = np.zeros(len(tree.kind), np.bool_)
    functions[forward[(named_so > 0) & (named_so == tree.name[forward])]] = True
    around = scopes.nearest(tree.parent, functions)[phases.moments(now.trace).made_scope]
    on_context: Mask = which & (around > 0)
    return on_context, names[tree.name[around[on_context][0]]] if on_context.any() else ""


def _by_checkpoints(now: Situation) -> Mask:
    """Blocks that torch's checkpoint keeps for its second forward: states of random numbers."""
    named = scopes.scopes_named(now.trace, "CheckpointFunction".__eq__)
    made = phases.moments(now.trace).made_scope
    by_checkpoint: Mask = scopes.nearest(scopes.tree(now.trace).parent, named)[made] > 0
    return by_checkpoint


# These losses make a value for each element, and reduce the values in place.
_KEEP_ELEMENTS = (
    *("aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss", "aten::binary_cross_entropy"),
)


def behind_numbers(now: Situation) -> Iterator[Finding]:
    """Elements that torch keeps behind the number that a loss returns. This is no mistake."""
    which = now.of_category("activations") & (allocations(now.trace).role == ROLE["held"])
    which &= _behind_numbers(now)
    if which.any():
        yield now.finding(
            "held",
            which,
            f"torch keeps every element of a loss, {size_text(now.bytes(which))}, behind the "
            "number that it returns",
            'reduction="none", and the mean of that, keeps the number only',
        )


def _behind_numbers(now: Situation) -> Mask:
    """Blocks of such losses, and blocks like those behind a variable with a single element."""
    alloc, kind = allocations(now.trace), kinds(now.trace)
    addresses = [a for each in meta.of(now.trace).variables for a in each.behind_numbers]
    there = (alloc.completed < 0) & np.isin(alloc.address, np.array(addresses, np.uint64))
    of_loss = scopes.names_where(now.trace, lambda text: text in _KEEP_ELEMENTS)[alloc.op]
    is_behind: Mask = np.isin(kind, kind[there]) | of_loss
    return is_behind


def _following_backward(trace: Trace) -> tuple[Mask, U64]:
    """Per allocation: whether its forward ended with a backward, and when this backward ended."""
    line = timelines.timeline(trace)
    backwards = line.phase == timelines.BACKWARD_PHASE
    begin = np.append(line.ticks[backwards], NEVER)
    over = np.append(np.append(line.ticks[1:], NEVER)[backwards], NEVER)
    kept_from = line.kept_from[phases.moments(trace).made_interval]
    following = np.searchsorted(begin, kept_from)
    began: Mask = (kept_from != NEVER) & (begin[following] == kept_from)
    return began, np.where(began, over[following], NEVER)


def _tells_every_save(trace: Trace) -> bool:
    return meta.of(trace).options.saved_tensors == "hooks"
