"""What autograd saved, where the capture looked, and what follows for where it did not.

With `saved_tensors="hooks"` every save is an event. By default the graph is read just before
backward, but not before every one: that would take too long. Training repeats itself, so a block
that was alive at a backward whose graph was not read is taken for saved if its like was: made by
the same op of the same module in the same phase, and of the same size. All its like must have been
saved: what a forward made, wherever the graph was read at its first backward; what was made
outside, at any that it was alive at. So what is made as targets are and never used is none.
"""

from dataclasses import dataclass

import numpy as np

from pytracer import meta
from pytracer.analysis.facts import phases, scopes
from pytracer.analysis.facts.lifetimes import Lifetimes
from pytracer.analysis.facts.phases import (
    BACKWARD_PHASE,
    DATA,
    FORWARD,
    OPTIMIZER_PHASE,
    OTHER,
    Moments,
)
from pytracer.analysis.facts.scopes import BACKWARD, Mask, Tree
from pytracer.recorded import Trace
from pytracer.schema import ACTION, U64


def saved(trace: Trace, found: Lifetimes, moments: Moments, owned: Mask) -> Mask:
    """Per allocation, whether autograd saved it. `owned`: weights and the like, known by labels."""
    result = np.zeros(len(found.start), np.bool_)
    about = found.allocation_of_event[trace.events.action == ACTION["saved"]]
    result[about[about >= 0]] = True
    result &= ~_let_go_at_once(trace, moments)
    if meta.of(trace).options.saved_tensors == "auto" and result.any():
        result |= _alike(trace, found, moments, result, owned)
    return result


def _let_go_at_once(trace: Trace, moments: Moments) -> Mask:
    """Freed inside the backward node that made it: a graph was made there, for no later backward.

    Only hooks see such a save. What a checkpoint makes again is RECOMPUTE's.
    """
    node = scopes.tree(trace).node
    made_in, freed_in = node[moments.made_scope], node[moments.freed_scope]
    within: Mask = (moments.made_phase == BACKWARD_PHASE) & (made_in != 0) & (made_in == freed_in)
    return within


def _alike(trace: Trace, found: Lifetimes, moments: Moments, saved: Mask, owned: Mask) -> Mask:
    """The blocks at backwards whose graph was not read that are like those that were saved.

    A size that no graph was read of (batches vary) is judged by the other sizes, if all of them
    were saved. A copy of a weight is made as a weight may be, and is none: those tell nothing.
    """
    backwards = _backwards(trace)
    first = np.searchsorted(backwards.begin, moments.made_ticks)
    next_begin = np.append(backwards.begin, scopes.NEVER)[first]
    is_there = moments.freed_ticks > next_begin
    # Of a forward that had no backward of its own nothing was saved: without grad mode.
    kept_from = phases.timeline(trace).kept_from[moments.made_interval]
    is_there &= (moments.made_phase != FORWARD) | (kept_from == next_begin)
    was_read = np.append(backwards.read, False)[first]
    outside = np.isin(moments.made_phase, (OTHER, DATA))
    unread = _alive_at(backwards.begin[~backwards.read], moments)
    open_ = ~saved & (np.where(outside, unread, is_there & ~was_read))
    if not open_.any():
        return open_
    rows, tells = np.flatnonzero(open_), saved & ~owned
    kind = kinds(scopes.tree(trace), found, moments)
    left = is_there & was_read & ~saved  # at a graph that was read, and not in it
    read = _alive_at(backwards.begin[backwards.read], moments)
    unlike = np.where(outside, read & ~saved, left)
    like = np.isin(kind[rows], kind[tells]) & ~np.isin(kind[rows], kind[unlike])
    of_new_sizes = ~np.isin(kind[rows], kind[tells | unlike])
    of_new_sizes &= moments.made_phase[rows] != OPTIMIZER_PHASE  # whose own are of no batch's size
    if of_new_sizes.any():
        kind = kinds(scopes.tree(trace), found, moments, sizes=False)
        of_new_sizes &= np.isin(kind[rows], kind[tells]) & ~np.isin(kind[rows], kind[unlike])
    open_[rows] = like | of_new_sizes
    return open_


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
    # The graph is read right before its backward begins: after the one before had begun.
    counts = np.diff(np.searchsorted(reads, first, side="right"))
    return _Backwards(begin, counts > 0)


def _alive_at(times: U64, moments: Moments) -> Mask:
    """The allocations that are alive at one of these times at least."""
    next_time = np.append(times, scopes.NEVER)[np.searchsorted(times, moments.made_ticks)]
    alive: Mask = (next_time != scopes.NEVER) & (moments.freed_ticks > next_time)
    return alive


def kinds(tree: Tree, found: Lifetimes, moments: Moments, *, sizes: bool = True) -> U64:
    """A number for everything that must be the same of two blocks that are alike."""
    scope = moments.made_scope
    columns = (tree.name[tree.op[scope]], tree.name[tree.module[scope]], moments.made_phase)
    kind = found.bytes.astype(np.uint64) * np.uint64(sizes)
    for column in columns:  # the overflow mixes the bits
        kind = kind * np.uint64(0x9E3779B97F4A7C15) + column.astype(np.uint64)
    return kind
