"""Blocks that operators read outside of modules, backward passes and steps (csrc/torch/reads.h).

A read is a label without a category: "used" by an operator with a graph, such as a loss; or "read"
by an operator that made a block, such as a normalisation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer import sanitized
from pytracer.analysis.facts import phases, scopes
from pytracer.analysis.facts.lifetimes import Lifetimes
from pytracer.analysis.facts.phases import Moments
from pytracer.recorded import Trace
from pytracer.schema import ACTION, CATEGORY, I64, U32, Mask


@dataclass(frozen=True)
class Reads:
    """One row per read, in order."""

    event: NDArray[np.intp]
    block: I64  # the allocation
    op: U32  # the operator that the program called
    used: Mask  # the operator had a graph


def reads(trace: Trace, lives: Lifetimes) -> Reads:
    """Finds the reads among the labels."""
    labels, tree = sanitized.labels(trace), scopes.tree(trace)
    is_read = scopes.names_where(trace, lambda text: text in ("used", "read"))
    is_used = scopes.names_where(trace, "used".__eq__)
    says = (labels.category == CATEGORY["unknown"]) & is_read[labels.role]
    event = np.flatnonzero(trace.events.action == ACTION["label"])
    row = sanitized.within(trace.events.bytes[event], len(says))
    good = says[row] & (lives.allocation_of_event[event] >= 0)
    event, row = event[good], row[good]
    scope = sanitized.within(trace.events.scope[event], len(tree.kind))
    op = tree.op[scopes.outermost_op(tree)[scope]]
    return Reads(event, lives.allocation_of_event[event], op, is_used[labels.role[row]])


def made_from(trace: Trace, moments: Moments, read: Reads, made: Mask) -> Mask:
    """The blocks from which these were made, directly or through other blocks.

    A block from which blocks of several steps were made is a data set and no batch. Blocks that
    come from a model's results (the words it chose, the state of a search) lead to no batch.
    """
    links = _Links(trace, moments, read)
    results = np.isin(moments.made_phase, (phases.FORWARD, phases.RECOMPUTE))
    of_results = links.closure(results, links.results_of)
    return links.closure(made & ~of_results, lambda those: links.sources_of(those) & ~of_results)


class _Links:
    """Which blocks the program's operators made from which."""

    def __init__(self, trace: Trace, moments: Moments, read: Reads) -> None:
        tree = scopes.tree(trace)
        self._read = read
        self._op_of_block = scopes.outermost_op(tree)[tree.op[moments.made_scope]]
        self._ops = len(tree.kind)
        self._step = _steps(trace, moments)

    def results_of(self, blocks: Mask) -> Mask:
        """Blocks made by operators that read one of these blocks."""
        reads_one = np.zeros(self._ops, np.bool_)
        reads_one[self._read.op[blocks[self._read.block]]] = True
        reads_one[0] = False
        made: Mask = reads_one[self._op_of_block]
        return made

    def sources_of(self, blocks: Mask) -> Mask:
        """Blocks read, for one step only, by operators that made one of these blocks."""
        made = np.flatnonzero(blocks & (self._op_of_block != 0))
        step = np.full(self._ops, -1, np.int64)
        step[self._op_of_block[made]] = self._step[made]
        leads = step[self._read.op] >= 0
        pairs = np.stack((self._read.block[leads], step[self._read.op[leads]]))
        block, times = np.unique(np.unique(pairs, axis=1)[0], return_counts=True)
        is_source = np.zeros(len(blocks), np.bool_)
        is_source[block[times == 1]] = True
        return is_source

    @staticmethod
    def closure(begin: Mask, more_of: Callable[[Mask], Mask]) -> Mask:
        """All blocks that `more_of` reaches from these, in any number of steps."""
        result = np.zeros(len(begin), np.bool_)
        while True:
            more = more_of(begin | result)
            if not (more & ~result).any():
                return result & more
            result |= more


def _steps(trace: Trace, moments: Moments) -> I64:
    """The step in which each block was made; without step ends, each backward begins a new one."""
    line, tree = phases.timeline(trace), scopes.tree(trace)
    ends = (
        line.step_ends if len(line.step_ends) else np.sort(tree.begin[tree.kind == scopes.BACKWARD])
    )
    return np.searchsorted(ends, moments.made_ticks, side="left").astype(np.int64)
