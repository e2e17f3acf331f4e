"""What operators read outside of modules, backward passes and steps (csrc/torch/reads.h).

A read is a label of no category: "used" by an operator with a graph, such as a loss; or "read" by
one that made a block, such as a normalisation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.facts import phases, sanitized, scopes
from pytracer.analysis.facts.lifetimes import Lifetimes
from pytracer.analysis.facts.phases import Moments
from pytracer.analysis.facts.scopes import OP, Mask, Tree
from pytracer.recorded import Trace
from pytracer.schema import ACTION, CATEGORY, I64, U32


@dataclass(frozen=True)
class Reads:
    """One row per read, in order."""

    event: NDArray[np.intp]
    block: I64  # the allocation
    op: U32  # the operator that the program called
    used: Mask  # it had a graph


def reads(trace: Trace, found: Lifetimes) -> Reads:
    """Finds them among the labels."""
    labels, tree = sanitized.labels(trace), scopes.tree(trace)
    is_read = scopes.names_where(trace, lambda text: text in ("used", "read"))
    is_used = scopes.names_where(trace, "used".__eq__)
    says = (labels.category == CATEGORY["unknown"]) & is_read[labels.role]
    event = np.flatnonzero(trace.events.action == ACTION["label"])
    row = sanitized.within(trace.events.bytes[event], len(says))
    good = says[row] & (found.allocation_of_event[event] >= 0)
    event, row = event[good], row[good]
    scope = sanitized.within(trace.events.scope[event], len(tree.kind))
    op = tree.op[outermost_op(tree)[scope]]
    return Reads(event, found.allocation_of_event[event], op, is_used[labels.role[row]])


def outermost_op(tree: Tree) -> U32:
    """Per scope of an op, the op that the program called."""
    inner = (tree.kind == OP) & (tree.kind[tree.parent] == OP)
    return scopes.nearest(tree.parent, ~inner)


def made_from(trace: Trace, moments: Moments, found: Reads, made: Mask) -> Mask:
    """What these blocks were made from, and what that was made from, and so on.

    What blocks of several steps are made from is no batch: it is a data set. And what comes from a
    model's results (the words it chose, what a search is at) leads to no batch.
    """
    links = _Links(trace, moments, found)
    results = np.isin(moments.made_phase, (phases.FORWARD, phases.RECOMPUTE))
    of_results = links.closure(results, links.results_of)
    return links.closure(made & ~of_results, lambda those: links.sources_of(those) & ~of_results)


class _Links:
    """Which blocks the program's operators made from which."""

    def __init__(self, trace: Trace, moments: Moments, found: Reads) -> None:
        tree = scopes.tree(trace)
        self._read = found
        self._op_of_block = outermost_op(tree)[tree.op[moments.made_scope]]
        self._ops = len(tree.kind)
        self._step = _steps(trace, moments)

    def results_of(self, blocks: Mask) -> Mask:
        """What an operator that read one of them made."""
        reads_one = np.zeros(self._ops, np.bool_)
        reads_one[self._read.op[blocks[self._read.block]]] = True
        reads_one[0] = False
        made: Mask = reads_one[self._op_of_block]
        return made

    def sources_of(self, blocks: Mask) -> Mask:
        """What operators that made one of them read, if it was for one step only."""
        made = np.flatnonzero(blocks & (self._op_of_block != 0))
        step = np.full(self._ops, -1, np.int64)
        step[self._op_of_block[made]] = self._step[made]
        leads = step[self._read.op] >= 0
        pairs = np.stack((self._read.block[leads], step[self._read.op[leads]]))
        block, times = np.unique(np.unique(pairs, axis=1)[0], return_counts=True)
        found = np.zeros(len(blocks), np.bool_)
        found[block[times == 1]] = True
        return found

    @staticmethod
    def closure(begin: Mask, more_of: Callable[[Mask], Mask]) -> Mask:
        """What these lead to, one after the other."""
        result = np.zeros(len(begin), np.bool_)
        while True:
            more = more_of(begin | result)
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
