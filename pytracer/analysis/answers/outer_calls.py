"""The program's own calls of modules, and which of them a backward went through."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.answers.situation import Situation
from pytracer.analysis.facts import lines, scopes, timelines
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.scopes import BACKWARD, MODULE, NEVER, NODE, OP, Tree
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import I64, U64, Mask


def outermost_calls(trace: Trace) -> NDArray[np.intp]:
    """The calls of modules that the program itself made, in order."""
    tree = scopes.tree(trace)
    is_outermost = (tree.kind == MODULE) & (tree.module[tree.parent] == 0) & (tree.node == 0)
    threads = lines.lines(trace)
    marks = threads.marks & (threads.of_thread == 0)
    return np.flatnonzero(is_outermost & marks[tree.thread])


@dataclass(frozen=True)
class OuterCalls:
    """The outermost calls, and whether a backward went through them."""

    numbers: NDArray[np.intp]
    begin: U64
    of_scope: I64  # per scope, the call around it, as a row here; -1: none
    with_grad: Mask  # also True if unknown
    went_back: Mask
    unclear: Mask  # the following pass leads to no call
    backwards: NDArray[np.intp]  # per call, how many passes had begun before it

    def before(self, ticks: U64) -> NDArray[np.intp]:
        """The last call that had begun by then, -1 if none had: a call's loss follows it."""
        call: NDArray[np.intp] = np.searchsorted(self.begin, ticks, side="right") - 1
        return call


@once_per_trace
def outermost(trace: Trace) -> OuterCalls:
    """The outermost calls. Without operators or nodes, a backward goes through the last one."""
    tree = scopes.tree(trace)
    calls = outermost_calls(trace)
    row = np.full(len(tree.kind), -1, np.int64)
    row[calls] = np.arange(len(calls))
    is_call = row >= 0
    of_scope = row[tree.nearest_context(is_call)]
    ops = tree.kind == OP
    with_grad = timelines.ran_with_grad(trace, calls)
    passes = np.sort(tree.begin[tree.kind == BACKWARD])
    backwards = np.searchsorted(passes, tree.begin[calls])
    went_back = np.isin(np.arange(len(calls)), of_scope[tree.forward])
    unclear = np.append(_leads_nowhere(tree, of_scope, passes), False)[backwards]
    if not (ops & is_call[tree.nearest_context(is_call)]).any() or not (tree.kind == NODE).any():
        # Without ops or nodes, assume that a backward went through the last call before it.
        went_back = np.diff(backwards, append=len(passes)) > 0
        unclear = np.zeros(len(calls), np.bool_)
    went_back |= unclear
    return OuterCalls(calls, tree.begin[calls], of_scope, with_grad, went_back, unclear, backwards)


def _leads_nowhere(tree: Tree, of_scope: I64, passes: U64) -> Mask:
    """Backward passes whose nodes lead to no call: a transform's or a compiled graph's.

    Such a pass may have gone through any call since the previous pass.
    """
    nodes = np.flatnonzero((tree.kind == NODE) & (of_scope[tree.forward] >= 0))
    leads = np.searchsorted(passes, tree.begin[nodes], side="right")
    result = np.ones(len(passes) + 1, np.bool_)
    result[leads] = False
    return result[1:]


def ends_without_grad(trace: Trace, which: Mask) -> U64:
    """When these blocks of forward calls would end if autograd kept none of them.

    The last block of a call is its result, which ends with the next call beside it, or else with
    the call around it. Other blocks end with their call. All other blocks are NEVER here.
    """
    tree, alloc = scopes.tree(trace), allocations(trace)
    rows = np.flatnonzero(which)
    call = tree.module[alloc.scope]
    last = np.full(len(tree.kind), -1, np.int64)  # per call, the position at which it made a block
    np.maximum.at(last, call[alloc.start >= 0], alloc.start[alloc.start >= 0])
    outer = tree.module[tree.parent]
    calls = np.flatnonzero(tree.kind == MODULE)
    calls = calls[np.lexsort((tree.begin[calls], outer[calls]))]
    beside = np.zeros(len(tree.kind), np.uint32)  # the next call, 0 for none
    beside[calls[:-1]] = np.where(outer[calls[:-1]] == outer[calls[1:]], calls[1:], 0)
    beside[outer == 0] = 0
    end_position = np.searchsorted(trace.events.ticks, tree.end)

    result = np.full(len(which), NEVER)
    result[rows] = tree.end[call[rows]]
    rows = rows[(last[call[rows]] == alloc.start[rows])]
    here = call[rows]
    while len(rows):
        # The result of a last call may be that of the call around it.
        around = outer[here]
        is_last = (beside[here] == 0) & (around != 0) & (last[around] < end_position[here])
        until = np.where(beside[here] != 0, tree.end[beside[here]], tree.end[around])
        until[around == 0] = NEVER  # the program has it
        result[rows[~is_last]] = until[~is_last]
        rows, here = rows[is_last], around[is_last]
    return result


def in_vain_of(now: Situation, calls: OuterCalls) -> Mask:
    """Calls with grad mode on that no backward went through, and none can after the trace.

    A backward after the trace may go through as many calls as one did within it (if none did,
    through all), if blocks of these calls are still alive.
    """
    alloc, tree = allocations(now.trace), scopes.tree(now.trace)
    in_vain: Mask = calls.with_grad & ~calls.went_back
    left = calls.of_scope[alloc.scope[(alloc.start >= 0) & (alloc.end < 0)]]
    open_ = np.isin(np.arange(len(in_vain)), left) | (tree.end[calls.numbers] == NEVER)
    pending = in_vain & open_ & (calls.backwards == calls.backwards.max(initial=0))
    pending &= calls.backwards == (tree.kind == BACKWARD).sum()
    together = np.bincount(calls.backwards[calls.went_back]).max(initial=0)
    if pending.sum() <= max(together, 1) or not calls.went_back.any():
        in_vain &= ~pending
    if lacks_its_end(now.trace):  # the recording may end amid the pass through these calls
        finished = (tree.kind == BACKWARD) & (tree.end != NEVER)
        in_vain &= calls.backwards < finished.sum()
    return in_vain


def lacks_its_end(trace: Trace) -> bool:
    """Whether the recording was cut off, so that its last calls' backward may be missing."""
    return bool(trace.losses.get("truncated_file"))
