"""Gradients that stay while others are dropped, and weights that stay while their model is gone."""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.answers.edits import Edit
from pytracer.analysis.answers.keepers import keeper_of, kinds
from pytracer.analysis.answers.outer_calls import ends_without_grad, outermost
from pytracer.analysis.answers.situation import Finding, Situation
from pytracer.analysis.facts import phases, scopes, timelines
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.scopes import BACKWARD, NEVER, NODE
from pytracer.basics.units import size_text
from pytracer.data import meta, sanitized
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORY, OWNED, ROLE, U64, Mask

_GONE_FOR = 2  # steps that did without them
_LONG_LIVED = 3  # steps: nothing drops gradients that live so long
_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


def gradients(now: Situation) -> Iterator[Finding]:
    """Those that no optimizer uses, and then those that one uses and that nothing drops."""
    alloc, ends = allocations(now.trace), timelines.timeline(now.trace).step_ends
    own = (alloc.category == CATEGORY["gradients"]) & (alloc.role != ROLE["bucket"])
    stays = own & now.alive & (alloc.end < 0) & (alloc.step >= 0)
    stays &= alloc.step + _LONG_LIVED <= len(ends)
    if not (own & (alloc.end >= 0)).any():
        return
    unstepped = meta.of(now.trace).unstepped
    named = np.array([text in unstepped for text in now.trace.strings])
    unused = named[sanitized.labels(now.trace).name][alloc.label]
    if (stays & unused).any():
        yield _said(
            now,
            stays & unused,
            "which no optimizer steps and nothing drops",
            "pass its parameters to an optimizer; or, if nothing uses its gradients, "
            "{}.requires_grad_(False)",
        )
    used = stays & ~unused
    if used.any() and now.phase != "forward":  # late_zero_grad is about those in a forward
        row = _said(
            now,
            used,
            "which nothing drops from step to step, though others are dropped",
            "call zero_grad(set_to_none=True) of its optimizer in each step",
        )
        gone = until_made_again(now.trace, used)
        yield replace(row, edit=Edit(np.zeros(len(own), np.bool_), gone=gone))


def _said(now: Situation, which: Mask, what: str, change: str) -> Finding:
    name = _module(now, which)
    said = f"{size_text(now.bytes(which))} are gradients of {f'`{name}`' if name else 'a module'}, {what}"
    again, without = _Again(now.trace, np.flatnonzero(which)), which.copy()
    for number in range(len(again.passes)):
        added, _ = again.in_pass(number)
        without[added[added >= 0]] = True
    row = now.finding("stays", which, said, change.replace("{}", name or "it"))
    return replace(row, edit=_frozen(now, without))


def _frozen(now: Situation, without: Mask) -> Edit:
    """These gradients are not made; nor is a graph for calls that need one for nothing else."""
    trace, tree, calls = now.trace, scopes.tree(now.trace), outermost(now.trace)
    alloc, scope = allocations(trace), phases.moments(trace).made_scope
    node = tree.node[scope]
    call = np.where(node != 0, calls.of_scope[tree.forward[node]], calls.of_scope[scope])
    graphless = np.zeros(len(calls.numbers) + 1, np.bool_)
    back = np.flatnonzero((node != 0) & (call >= 0) & (alloc.start >= 0))
    back = back[np.argsort(tree.forward[node[back]], kind="stable")]
    for each in np.unique(call[without & (node != 0) & (call >= 0)]).tolist():
        own = back[call[back] == each]
        # What its first operator has a gradient for: if for the input, too, a graph is needed.
        first = own[tree.forward[node[own]] == tree.forward[node[own[0]]]]
        graphless[each] = without[first].all()
    end = np.where(without, np.uint64(0), NEVER)
    kept = graphless[call] & ~np.isin(alloc.category, OWNED)
    forward = kept & (node == 0)
    end = np.minimum(end, np.where(kept & (node != 0), np.uint64(0), NEVER))
    end = np.minimum(end, np.where(forward, ends_without_grad(trace, forward), NEVER))
    return Edit(without | kept, end=end)


def left_behind(now: Situation, rest: Mask) -> Iterator[Finding]:
    """Weights of replaced layers or models, and their state, which only an optimizer keeps."""
    alloc, (made, _) = allocations(now.trace), _life(now.trace)
    addresses = np.array([*meta.of(now.trace).left_behind], np.uint64)
    own = (alloc.completed < 0) & np.isin(alloc.address, addresses) & rest
    if not own.any():
        return
    name = sanitized.labels(now.trace).name[alloc.label]
    weights = (alloc.category == CATEGORY["weights"]) & (name != 0)
    gradients = (alloc.category == CATEGORY["gradients"]) & (name != 0)
    since = np.full(len(own), NEVER)
    for each in np.unique(name[own]).tolist():
        there = np.flatnonzero(own & (name == each))
        # Its successor was made, or else its last gradient.
        others = np.append(np.sort(made[weights & (name == each)]), NEVER)
        last = made[gradients & (name == each)].max(initial=0) or NEVER
        later = others[np.searchsorted(others[:-1], made[there], side="right")]
        since[there] = np.where(later == NEVER, last, later)
    ends = timelines.timeline(now.trace).step_ends
    own &= (since != NEVER) & (len(ends) - np.searchsorted(ends, since) >= _GONE_FOR)
    if not own.any():
        return
    keeper = keeper_of(now, own, np.arange(len(own), dtype=np.uint64)).name  # those alone
    keeper = re.sub(r"\.(state|param_groups)$", "", keeper) or "an optimizer"
    row = now.finding(
        "left_behind",
        own,
        f"{size_text(now.bytes(own))} are weights that no model has any more, and their state: "
        f"`{keeper}` keeps them",
        "where layers or models are replaced, make a new optimizer, and drop the old one "
        f"from `{keeper}`",
    )
    edit = Edit(own, end=since)
    saved = now.saved_by(edit)
    yield replace(row, at_peak=max(min(row.at_peak, saved), 0), edit=edit)


def _module(now: Situation, which: Mask) -> str:
    """The part of a model that has all of these gradients, as the program would write it."""
    keeper = keeper_of(now, which, kinds(now.trace))
    if "Parameter.grad" not in keeper.path:
        return ""
    labels, texts = sanitized.labels(now.trace), now.trace.strings
    rows = np.unique(labels.name[allocations(now.trace).label[which]])
    paths = [texts[row].split(".")[:-1] for row in rows.tolist()]
    levels = [each[0] for each in zip(*paths, strict=False)]
    shared = next((i for i in range(len(levels)) if any(p[i] != levels[i] for p in paths)), None)
    inside = "".join(f".{level}" for level in levels[meta.of(now.trace).roots.several : shared])
    return keeper.name + _NUMBER.sub(r"[\1]", inside)


def until_made_again(trace: Trace, which: Mask | None = None) -> tuple[NDArray[np.intp], U64, U64]:
    """Gradients (or these) that outlive steps: from when to when they need not exist, once per step.

    Each backward would make them where the first one did, after as many of its nodes. What it makes
    there now, and adds to them, would be them.
    """
    ends = timelines.timeline(trace).step_ends
    of_gradients = allocations(trace).category == CATEGORY["gradients"]
    block = np.flatnonzero(of_gradients if which is None else of_gradients & which)
    made, freed = (ticks[block] for ticks in _life(trace))
    again = _Again(trace, block)
    rows, begins, until = np.zeros(0, np.intp), np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    for begin in ends[:-1]:
        following = int(np.searchsorted(again.passes, begin))
        if following < len(again.passes):
            added, over = again.in_pass(following)
            over[added >= 0] = np.maximum(over, _life(trace)[1][added])[added >= 0]
            there = (made < begin) & (freed > over)
            rows = np.append(rows, block[there])
            begins = np.append(begins, np.full(int(there.sum()), begin))
            until = np.append(until, over[there])
    return rows, begins, until


def _life(trace: Trace) -> tuple[U64, U64]:
    moments = phases.moments(trace)
    return moments.made_ticks, moments.freed_ticks


class _Again:
    """Where each backward pass would make these gradients: after as many nodes as the first did."""

    def __init__(self, trace: Trace, block: NDArray[np.intp]) -> None:
        tree, moments = scopes.tree(trace), phases.moments(trace)
        self.passes = np.sort(tree.begin[tree.kind == BACKWARD])
        # Not those that accumulate: no operator made them, and they are recorded only at times.
        self._nodes = np.sort(tree.begin[(tree.kind == NODE) & (tree.forward != 0)])
        self._first = np.append(np.searchsorted(self._nodes, self.passes), len(self._nodes))
        made, size = moments.made_ticks, allocations(trace).requested_bytes
        own = np.maximum(np.searchsorted(self.passes, made[block]) - 1, 0)
        self._after = np.searchsorted(self._nodes, made[block]) - self._first[own]
        self._size = size[block].tolist()
        rows = np.flatnonzero(
            (moments.made_phase == timelines.BACKWARD_PHASE)
            & (moments.freed_phase == timelines.BACKWARD_PHASE)
            & np.isin(size, size[block])
        )
        node = np.searchsorted(self._nodes, made[rows], side="right") - 1
        keys = zip(node.tolist(), size[rows].tolist(), strict=True)
        self._added = dict(zip(keys, rows.tolist(), strict=True))

    def in_pass(self, number: int) -> tuple[NDArray[np.intp], U64]:
        """Per gradient: the block that this pass adds to it, or -1, and when its node begins."""
        last = self._first[number + 1]
        node = np.minimum(self._first[number] + self._after, last) - 1
        keys = zip(node.tolist(), self._size, strict=True)
        added = np.array([self._added.get(key, -1) for key in keys], np.intp)
        begins = np.append(self._nodes, NEVER)[np.maximum(node, 0)]
        return added, np.maximum(begins, self.passes[number])
