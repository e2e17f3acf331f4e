"""Holds an imagined run against the same program's real run: the same blocks, but for scratch.

A block is known by its step, phase, category, operator and bytes. Its operator is the outermost one,
or in backward the node of the graph: what those call inside differs between kernels and fake tensors.
Every imagined block must be a real one. A real block that is not imagined must be scratch: an operator's,
which frees it before it returns, or of the library that talks to the other ranks.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np
import torch

from pytracer.analysis.facts import scopes, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.scopes import NODE, OP, Tree
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import CATEGORIES, PHASE, PHASES, ROLE, U32, Mask

# The same act by another name: a number from Python becomes a tensor.
_ALIKE = {"aten::lift_fresh": "aten::empty"}
_GENERATOR = torch.get_rng_state().nbytes  # the state of the host's generator, made by no operator
_NUMBER = 16  # the bytes of the largest number that Python passes where a tensor is wanted


class Block(NamedTuple):
    """What a real and an imagined block have in common."""

    step: int
    phase: str
    category: str
    op: str
    bytes: int


class Compared(NamedTuple):
    """What only one of the two runs has."""

    invented: Counter[Block]  # imagined, and not real
    missing: Counter[Block]  # real, no scratch, and not imagined
    scratch: int  # the most bytes of scratch at once


def compare(real: Trace, imagined: Trace) -> Compared:
    """Compares block by block."""
    there, guessed = blocks(real), blocks(imagined)
    kept = blocks(real, ~scratch(real))
    found = scratch(real) & usage.on_device(real)
    return Compared(guessed - there, kept - guessed, usage.highest_where(real, found).bytes)


def blocks(trace: Trace, which: Mask | None = None) -> Counter[Block]:
    """The blocks, or those of them that are marked."""
    alloc, names = allocations(trace), scopes.tree(trace).name[_named(trace)]
    taken = alloc.requested_bytes > 0
    found: Counter[Block] = Counter()
    for i in np.flatnonzero(taken if which is None else taken & which).tolist():
        amount, op = int(alloc.requested_bytes[i]), trace.strings[names[i]]
        op = "aten::empty" if not op and amount == _GENERATOR else _ALIKE.get(op, op)
        phase, category = PHASES[alloc.phase[i]], CATEGORIES[alloc.category[i]]
        found[Block(int(alloc.step[i]), phase, category, op, amount)] += 1
    return found


@once_per_trace
def scratch(trace: Trace) -> Mask:
    """Per allocation, whether it is an operator's scratch or of the library between the ranks."""
    alloc, kernel = allocations(trace), _kernel(trace)
    made = kernel[alloc.scope]
    freed_in = np.where(alloc.end >= 0, trace.events.scope[alloc.end], 0)
    inside = (made != 0) & (kernel[freed_in] == made)
    number = (alloc.op == 0) & (alloc.requested_bytes <= _NUMBER)
    result: Mask = (alloc.end >= 0) & (inside | number) | _between_ranks(trace)
    return result


def _between_ranks(trace: Trace) -> Mask:
    """Per allocation, whether gloo took it: on a thread of its own, or in a call that has its outputs."""
    alloc, tree = allocations(trace), scopes.tree(trace)
    calls = np.zeros(len(tree.kind), np.bool_)
    calls[scopes.scopes_named(trace, lambda name: name.startswith("c10d::"))] = True
    inside = scopes.nearest(tree.parent, calls)[alloc.scope] != 0
    result: Mask = inside | (alloc.role == ROLE["collective"])
    return result


def peaks(trace: Trace) -> dict[str, int]:
    """The most bytes of each category, and of all, without scratch."""
    alloc, kept = allocations(trace), ~scratch(trace) & usage.on_device(trace)
    found = {"all": usage.highest_where(trace, kept).bytes}
    for number, name in enumerate(CATEGORIES):
        of_it = kept & (alloc.category == number)
        if of_it.any():
            found[name] = usage.highest_where(trace, of_it).bytes
    return found


def _named(trace: Trace) -> U32:
    """Per allocation, the scope that names its operator: in backward a node."""
    alloc, tree = allocations(trace), scopes.tree(trace)
    node = tree.node[alloc.scope]
    outer = scopes.outermost_op(tree)[alloc.scope]
    outer = np.where(tree.kind[outer] == OP, outer, 0)
    in_node = (alloc.phase == PHASE["backward"]) & (node != 0)
    return np.where(in_node | (outer == 0), node, outer)


@once_per_trace
def _kernel(trace: Trace) -> U32:
    """Per scope, the outermost operator or node around it.

    One with a collective inside is none: it is of distributed tensors, and runs others for the local ones.
    """
    tree = scopes.tree(trace)
    whole = (tree.kind == OP) & ~_has_a_collective(trace, tree)
    inner = whole & whole[tree.parent]
    return scopes.nearest(tree.parent, (whole & ~inner) | (tree.kind == NODE))


def _has_a_collective(trace: Trace, tree: Tree) -> Mask:
    marked = np.zeros(len(tree.kind), np.bool_)
    up = tree.parent[scopes.scopes_named(trace, _is_collective)]
    while up.any():
        marked[up] = True
        up = np.unique(tree.parent[up])
    marked[0] = False
    return marked


def _is_collective(name: str) -> bool:
    return name.startswith(("_c10d_functional", "c10d"))
