"""Which blocks autograd saved: as the capture saw it, and by likeness where it did not look.

With `saved_tensors="hooks"` every save is an event. By default the capture reads the graph just
before a backward, but not before each one, which would take too long. Training repeats itself. So a
block that was alive at a backward whose graph was not read counts as saved if all blocks like it
were. Two blocks are alike if the same op of the same module made them, in the same phase and of the
same size. "All" means, for blocks made in forward: those whose first backward's graph was read; for
blocks made outside: those alive at any backward whose graph was read. So a block that is made like
a target and never used does not count as saved.
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
from pytracer.analysis.facts.scopes import BACKWARD, Tree
from pytracer.recorded import Trace
from pytracer.schema import ACTION, U64, Mask


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

    If no graph was read that has a block's size (batches vary), the blocks of other sizes decide,
    if all of them were saved. `owned` blocks are no evidence: a block of another kind may be
    made in the same way, such as a copy of a weight.
    """
    backwards = _backwards(trace)
    first = np.searchsorted(backwards.begin, moments.made_ticks)
    next_begin = np.append(backwards.begin, scopes.NEVER)[first]
    is_there = moments.freed_ticks > next_begin
    # A forward without a backward of its own (without grad mode) saved nothing.
    kept_from = phases.timeline(trace).kept_from[moments.made_interval]
    is_there &= (moments.made_phase != FORWARD) | (kept_from == next_begin)
    was_read = np.append(backwards.read, False)[first]
    outside = np.isin(moments.made_phase, (OTHER, DATA))
    unread = _alive_at(backwards.begin[~backwards.read], moments)
    open_ = ~saved & (np.where(outside, unread, is_there & ~was_read))
    if not open_.any():
        return open_
    rows, tells = np.flatnonzero(open_), saved & ~owned
    kind = kinds(scopes.tree(trace), lives, moments)
    left = is_there & was_read & ~saved  # alive when the graph was read, but not in it
    read = _alive_at(backwards.begin[backwards.read], moments)
    unlike = np.where(outside, read & ~saved, left)
    like = np.isin(kind[rows], kind[tells]) & ~np.isin(kind[rows], kind[unlike])
    of_new_sizes = ~np.isin(kind[rows], kind[tells | unlike])
    # An optimizer's own blocks do not vary with the batch.
    of_new_sizes &= moments.made_phase[rows] != OPTIMIZER_PHASE
    if of_new_sizes.any():
        kind = kinds(scopes.tree(trace), lives, moments, sizes=False)
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
    # The graph is read right before its backward begins, so after the previous one began.
    counts = np.diff(np.searchsorted(reads, first, side="right"))
    return _Backwards(begin, counts > 0)


def _alive_at(times: U64, moments: Moments) -> Mask:
    """The allocations that are alive at one or more of these times."""
    next_time = np.append(times, scopes.NEVER)[np.searchsorted(times, moments.made_ticks)]
    alive: Mask = (next_time != scopes.NEVER) & (moments.freed_ticks > next_time)
    return alive


def kinds(tree: Tree, lives: Lifetimes, moments: Moments, *, sizes: bool = True) -> U64:
    """A number per allocation: equal for two blocks that are alike."""
    scope = moments.made_scope
    columns = (tree.name[tree.op[scope]], tree.name[tree.module[scope]], moments.made_phase)
    kind = lives.bytes.astype(np.uint64) * np.uint64(sizes)
    for column in columns:  # the overflow mixes the bits
        kind = kind * np.uint64(0x9E3779B97F4A7C15) + column.astype(np.uint64)
    return kind
