"""Blocks that operators read outside of modules, backward passes and steps (csrc/torch/reads.h).

A read is a label without a category: "used" by an operator with a graph, such as a loss; or "read"
by an operator that made a block, such as a normalisation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.facts import scopes, timelines
from pytracer.analysis.facts.lifetimes import Lifetimes
from pytracer.analysis.facts.phases import Moments
from pytracer.data import sanitized
from pytracer.data.recorded import Trace
from pytracer.data.schema import ACTION, CATEGORY, I32, I64, SCOPE_GRAPH, U32, Mask


@dataclass(frozen=True)
class Reads:
    """One row per read, in order."""

    event: NDArray[np.intp]
    block: I32  # the allocation
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


@dataclass(frozen=True)
class Proof:
    """What has to be known for a rule to say of some blocks what it says with everything."""

    events: NDArray[np.intp]  # sorted positions
    blocks: Mask  # other blocks

    def __or__(self, other: "Proof") -> "Proof":
        return Proof(np.union1d(self.events, other.events), self.blocks | other.blocks)


class Links:
    """Which blocks the program's operators made from which, outside of modules."""

    def __init__(self, trace: Trace, moments: Moments, read: Reads) -> None:
        """Finds who made each block, and in which step."""
        tree = scopes.tree(trace)
        self._read = read
        self._op_of_block = scopes.outermost_op(tree)[tree.op[moments.made_scope]]
        self._ops = len(tree.kind)
        self._step = _steps(trace, moments)
        forward = np.isin(moments.made_phase, (timelines.FORWARD, timelines.RECOMPUTE))
        has_graph = tree.flags[self._op_of_block] & SCOPE_GRAPH != 0
        in_module = tree.module[moments.made_scope] != 0
        # What a model returned, or an operator with a graph made of it.
        self.results: Mask = forward & (in_module | has_graph)
        # What operators made of neither, while a forward waited for its backward.
        by_operator = (self._op_of_block != 0) & (moments.made_phase == timelines.FORWARD)
        self.fresh: Mask = by_operator & ~self.results & ~self.made_of(self.results)

    def made_of(self, blocks: Mask) -> Mask:
        """Blocks that operators made of these, directly or through other blocks."""
        return self._closure(blocks, self._results_of)

    def sources(self, blocks: Mask, but: Mask) -> Mask:
        """The blocks from which these were made, directly or through others, but not those.

        A block from which blocks of several steps were made is a data set and no batch.
        """
        return self._closure(blocks & ~but, lambda those: self._sources_of(those) & ~but)

    def met_by(self, blocks: Mask) -> Mask:
        """Blocks that an operator read together with one of these."""
        met = self._one_read_of(blocks) >= 0
        result = np.zeros(len(blocks), np.bool_)
        result[self._read.block[met[self._read.op]]] = True
        return result & ~blocks

    def proof_of_sources(self, of: Mask, blocks: Mask, but: Mask) -> Proof:
        """What shows which of the first blocks are `sources`: two chains of reads for each.

        With it, and without all other reads and blocks, `sources` says the same of those.
        """
        read = self._read
        leads = np.full(self._ops, -1, np.int64)
        on_chain = (self.sources(blocks, but) | blocks) & ~but & (self._op_of_block != 0)
        leads[self._op_of_block[on_chain]] = np.flatnonzero(on_chain)
        made = leads[read.op]
        rows = np.flatnonzero(made >= 0)
        first, last = np.full((2, len(of)), -1, np.int64)
        last[read.block[rows]] = rows
        first[read.block[rows[::-1]]] = rows[::-1]
        begin = of & ~but
        return self._chain(np.append(first[begin], last[begin]), made, first)

    def proof_of_meeting(self, of: Mask, blocks: Mask) -> Proof:
        """What shows which of the first are `met_by` the second."""
        read = self._read
        partner = self._one_read_of(blocks)
        rows = np.flatnonzero(of[read.block] & ~blocks[read.block] & (partner[read.op] >= 0))
        _, one = np.unique(read.block[rows], return_index=True)
        both = np.append(rows[one], partner[read.op[rows[one]]])
        return self._chain(both, read.block, np.full(len(of), -1, np.int64))

    def proof_of_origin(self, of: Mask, roots: Mask) -> Proof:
        """What shows which of the first are `made_of` these roots: one chain of reads for each."""
        parent = self._one_read_of(roots | self.made_of(roots))[self._op_of_block]
        parent[roots] = -1
        return self._chain(parent[of], self._read.block, parent)

    def _chain(self, rows: I64, block_of: NDArray[Any], following: I64) -> Proof:
        """These rows of reads, the block that each leads to, and that block's following row.

        -1 is no row.
        """
        events, blocks = np.zeros(0, np.intp), np.zeros(len(following), np.bool_)
        while (rows := rows[rows >= 0]).size:
            events = np.union1d(events, self._read.event[rows])
            new = np.unique(block_of[rows])
            new = new[~blocks[new]]
            blocks[new] = True
            rows = following[new]
        return Proof(events, blocks)

    def _one_read_of(self, blocks: Mask) -> I64:
        """Per operator: a row in which it reads one of these blocks, or -1."""
        result = np.full(self._ops, -1, np.int64)
        rows = np.flatnonzero(blocks[self._read.block] & (self._read.op != 0))
        result[self._read.op[rows]] = rows
        return result

    def _results_of(self, blocks: Mask) -> Mask:
        """Blocks made by operators that read one of these blocks."""
        made: Mask = (self._one_read_of(blocks) >= 0)[self._op_of_block]
        return made

    def _sources_of(self, blocks: Mask) -> Mask:
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
    def _closure(begin: Mask, more_of: Callable[[Mask], Mask]) -> Mask:
        """All blocks that `more_of` reaches from these, in any number of steps."""
        result = np.zeros(len(begin), np.bool_)
        while True:
            more = more_of(begin | result)
            if not (more & ~result).any():
                return result & more
            result |= more


def _steps(trace: Trace, moments: Moments) -> I64:
    """The step in which each block was made; without step ends, each backward begins a new one."""
    line, tree = timelines.timeline(trace), scopes.tree(trace)
    ends = (
        line.step_ends if len(line.step_ends) else np.sort(tree.begin[tree.kind == scopes.BACKWARD])
    )
    return np.searchsorted(ends, moments.made_ticks, side="left").astype(np.int64)
