"""Which blocks autograd saved: as the capture saw it, and by likeness where it did not look.

With `saved_tensors="hooks"` every save is an event. By default the capture reads the graph just
before a backward, but not before each one, which would take too long. Training repeats itself. So a
block that was alive at a backward whose graph was not read counts as saved if all blocks like it
were until then. Two blocks are alike if the same op of the same module made them, in the same phase
and of the same size. "All" means, for blocks made in forward: those whose first backward's graph was
read; for blocks made outside: those of which the first graph in their life was read. So a block that
is made like a target and never used does not count as saved.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.facts import scopes, timelines
from pytracer.analysis.facts.lifetimes import Lifetimes
from pytracer.analysis.facts.phases import Moments
from pytracer.analysis.facts.scopes import BACKWARD, Tree
from pytracer.analysis.facts.timelines import BACKWARD_PHASE, DATA, FORWARD, OPTIMIZER_PHASE, OTHER
from pytracer.data import meta
from pytracer.data.recorded import Trace
from pytracer.data.schema import ACTION, U64, Mask


def saved(trace: Trace, lives: Lifetimes, moments: Moments, owned: Mask) -> Mask:
    """Per allocation, whether autograd saved it.

    `owned` marks weights, gradients and optimizer state, known by their labels.
    """
    result = np.zeros(len(lives.start), np.bool_)
    about = lives.allocation_of_event[trace.events.action == ACTION["saved"]]
    result[about[about >= 0]] = True
    result &= ~_let_go_at_once(trace, moments)
    if meta.of(trace).options.saved_tensors == "auto" and result.any():
        result |= _alike(trace, lives, moments, result, owned)
    return result


def _let_go_at_once(trace: Trace, moments: Moments) -> Mask:
    """Blocks freed inside the backward node that made them: their graph had no later backward.

    Only hooks see such a save. Blocks that a checkpoint makes again have the phase RECOMPUTE.
    """
    node = scopes.tree(trace).node
    made_in, freed_in = node[moments.made_scope], node[moments.freed_scope]
    within: Mask = (moments.made_phase == BACKWARD_PHASE) & (made_in != 0) & (made_in == freed_in)
    return within


def _alike(trace: Trace, lives: Lifetimes, moments: Moments, saved: Mask, owned: Mask) -> Mask:
    """Blocks at backwards whose graph was not read, and that are like blocks that were saved.

    Only what was seen before tells: the end of a trace does not change its beginning. If no graph
    was read that has a block's size (batches vary), the blocks of other sizes decide, if all of them
    were saved. `owned` blocks are no evidence: a block of another kind may be made in the same way,
    such as a copy of a weight.
    """
    backwards = _backwards(trace)
    at = _at_backwards(trace, moments, backwards)
    open_ = ~saved & at.unread
    if not open_.any():
        return open_
    rows, tells = np.flatnonzero(open_), saved & ~owned
    unlike = at.read & ~saved  # alive when the graph was read, but not in it
    seen = np.minimum(_saved_at(trace, lives), at.first)
    kind = kinds(scopes.tree(trace), lives, moments)
    has_like = _seen_before(kind, rows, tells, seen, at.first)
    has_unlike = _seen_before(kind, rows, unlike, at.first, at.first)
    # An optimizer's own blocks do not vary with the batch.
    is_new = ~has_like & ~has_unlike & (moments.made_phase[rows] != OPTIMIZER_PHASE)
    if is_new.any():
        kind = kinds(scopes.tree(trace), lives, moments, sizes=False)
        is_new &= _seen_before(kind, rows, tells, seen, at.first)
        is_new &= ~_seen_before(kind, rows, unlike, at.first, at.first)
    open_[rows] = (has_like & ~has_unlike) | is_new
    return open_


def _seen_before(
    kind: U64, rows: NDArray[np.intp], evidence: Mask, seen: U64, decided: U64
) -> Mask:
    """Which of these rows have evidence of their kind, seen by the time at which they are decided."""
    names = np.unique(kind[evidence])  # few: programs repeat
    first = np.full(len(names) + 1, scopes.NEVER)
    np.minimum.at(first, np.searchsorted(names, kind[evidence]), seen[evidence])
    at = np.searchsorted(names, kind[rows])
    known = np.where(np.append(names, 0)[at] == kind[rows], first[at], scopes.NEVER)
    before: Mask = (known <= decided[rows]) & (known != scopes.NEVER)
    return before


def _saved_at(trace: Trace, lives: Lifetimes) -> U64:
    """When each allocation was first seen to be saved; NEVER if it was not."""
    saves = np.flatnonzero(trace.events.action == ACTION["saved"])
    block = lives.allocation_of_event[saves]
    result = np.full(len(lives.start), scopes.NEVER)
    np.minimum.at(result, block[block >= 0], trace.events.ticks[saves[block >= 0]])
    return result


@dataclass(frozen=True)
class _AtBackwards:
    """The backwards at which each allocation may be saved: it is alive as they begin.

    For a block of a forward that is the next backward. A block made outside may wait for a later
    one. A later one does not tell what it is: an embedding is saved for its loss, and waits for the
    passes of its parts.
    """

    read: Mask  # the graph of the first of them was read
    unread: Mask  # there is one whose graph was not read
    first: U64  # the tick at which the first of them begins, or NEVER


def _at_backwards(trace: Trace, moments: Moments, backwards: "_Backwards") -> _AtBackwards:
    outside = np.isin(moments.made_phase, (OTHER, DATA))
    begin = np.searchsorted(backwards.begin, moments.made_ticks)
    end = np.searchsorted(backwards.begin, moments.freed_ticks)
    end = np.where(outside, end, np.minimum(end, begin + 1))
    ticks = np.append(backwards.begin, scopes.NEVER)
    # A forward without a backward of its own (without grad mode) saved nothing.
    kept_from = timelines.timeline(trace).kept_from[moments.made_interval]
    is_there = (end > begin) & ((moments.made_phase != FORWARD) | (kept_from == ticks[begin]))
    were_read = np.append(0, np.cumsum(backwards.read))
    return _AtBackwards(
        read=is_there & np.append(backwards.read, False)[begin],
        unread=is_there & (end - begin > were_read[end] - were_read[begin]),
        first=np.where(is_there, ticks[begin], scopes.NEVER),
    )


@dataclass(frozen=True)
class _Backwards:
    """Backward passes in their order."""

    begin: U64  # ticks
    read: Mask  # whether the graph was read before it


def _backwards(trace: Trace) -> _Backwards:
    tree, events = scopes.tree(trace), trace.events
    begin = np.sort(tree.begin[tree.kind == BACKWARD])
    reads = events.ticks[events.action == ACTION["saved"]]
    first = np.concatenate((np.zeros(1, np.uint64), begin))
    # The graph is read right before its backward begins, so after the previous one began.
    counts = np.diff(np.searchsorted(reads, first, side="right"))
    return _Backwards(begin, counts > 0)


def kinds(tree: Tree, lives: Lifetimes, moments: Moments, *, sizes: bool = True) -> U64:
    """A number per allocation: equal for two blocks that are alike."""
    scope = moments.made_scope
    columns = (tree.name[tree.op[scope]], tree.name[tree.module[scope]], moments.made_phase)
    kind = lives.bytes * np.uint64(sizes)
    for column in columns:  # the overflow mixes the bits
        kind *= np.uint64(0x9E3779B97F4A7C15)
        kind += column
    return kind
