"""What operators read outside of modules, backward passes and steps (csrc/torch/reads.h).

A read is a label of no category: "used" by an operator with a graph, such as a loss; or "read" by
one that made a block, such as a normalisation.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis import phases, scopes, sound
from pytracer.analysis.matching import Lifetimes
from pytracer.analysis.phases import Moments
from pytracer.analysis.scopes import OP, Mask, Tree
from pytracer.schema import ACTION, CATEGORY, I64, U32
from pytracer.trace import Trace


@dataclass(frozen=True)
class Reads:
    """One row per read, in order."""

    event: NDArray[np.intp]
    block: I64  # the allocation
    op: U32  # the operator that the program called
    used: Mask  # it had a graph


def reads(trace: Trace, found: Lifetimes) -> Reads:
    """Finds them among the labels."""
    labels, tree = sound.labels(trace), scopes.tree(trace)
    is_read = scopes.names_where(trace, lambda text: text in ("used", "read"))
    is_used = scopes.names_where(trace, "used".__eq__)
    says = (labels.category == CATEGORY["unknown"]) & is_read[labels.role]
    event = np.flatnonzero(trace.events.action == ACTION["label"])
    row = sound.within(trace.events.bytes[event], len(says))
    good = says[row] & (found.allocation_of_event[event] >= 0)
    event, row = event[good], row[good]
    scope = sound.within(trace.events.scope[event], len(tree.kind))
    op = tree.op[outermost_op(tree)[scope]]
    return Reads(event, found.allocation_of_event[event], op, is_used[labels.role[row]])


def outermost_op(tree: Tree) -> U32:
    """Per scope of an op, the op that the program called."""
    inner = (tree.kind == OP) & (tree.kind[tree.parent] == OP)
    return scopes.nearest(tree.parent, ~inner)


def made_from(trace: Trace, moments: Moments, found: Reads, made: Mask) -> Mask:
    """What these blocks were made from, and what that was made from, and so on.

    What blocks of several steps are made from is no batch: it is a data set.
    """
    tree = scopes.tree(trace)
    op_of_block = outermost_op(tree)[tree.op[moments.made_scope]]
    step_of_block = _steps(trace, moments)
    result = np.zeros(len(made), np.bool_)
    while True:
        blocks = np.flatnonzero((made | result) & (op_of_block != 0))
        step_of_op = np.full(len(tree.kind), -1, np.int64)
        step_of_op[op_of_block[blocks]] = step_of_block[blocks]
        leads = step_of_op[found.op] >= 0
        pairs = np.unique(np.stack((found.block[leads], step_of_op[found.op[leads]])), axis=1)
        block, times = np.unique(pairs[0], return_counts=True)
        more = np.zeros(len(made), np.bool_)
        more[block[times == 1]] = True
        if not (more & ~result).any():
            return result & more
        result |= more


def _steps(trace: Trace, moments: Moments) -> I64:
    """The step that each block was made in; without an optimizer a backward pass ends it."""
    line, tree = phases.timeline(trace), scopes.tree(trace)
    ends = (
        line.step_ends if len(line.step_ends) else np.sort(tree.begin[tree.kind == scopes.BACKWARD])
    )
    return np.searchsorted(ends, moments.made_ticks, side="left").astype(np.int64)
