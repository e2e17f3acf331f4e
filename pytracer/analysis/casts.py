"""Autocast's copies of weights: which allocations are a parameter in a smaller type.

Autocast casts the arguments of an op one after the other, the input like the weight, and nothing
in the cast itself says which is which. What tells them apart:

1. Proof. The gradient of a cast passes through its node, and the block that node made became some
   parameter's gradient: then the op that made the node cast that parameter.
2. Repetition. Where gradients are added up instead, or a forward is run again, the same cast (the
   same module, the same turn, the same size) stands for the same parameter.
3. Size, for parameters without any proof (frozen ones, a forward alone): as large as half of a
   float32 parameter of that module, and no more such casts in the call than such parameters.
4. Order, where an input happens to be as large: a compiler has all ops' arguments cast from first
   to last, or all from last to first. Which of the two is seen at the ops of which some casts are
   shown by now. If there is none, nothing is claimed.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis import scopes, sound
from pytracer.analysis.phases import FORWARD, RECOMPUTE, Moments
from pytracer.analysis.scopes import MODULE, OP, Mask, Tree
from pytracer.schema import CATEGORY, I64, U8, U32, U64
from pytracer.trace import Trace


@dataclass(frozen=True)
class Copies:
    """Per allocation, whether it is such a copy, and the weight's label if it is known which."""

    is_copy: Mask
    label: U32


def autocast_copies(
    trace: Trace, moments: Moments, size: U64, label: U32, label_category: U8
) -> Copies:
    """Finds them among what forward made; `label` is what is known of each allocation."""
    tree = scopes.tree(trace)
    copies = Copies(np.zeros(len(size), np.bool_), np.zeros(len(size), np.uint32))
    is_cast = scopes.scopes_named(trace, lambda text: text == "aten::_to_copy")
    is_cast &= tree.kind == OP
    if not is_cast.any():
        return copies
    cast_around = scopes.nearest(tree.parent, is_cast)
    cast = cast_around[moments.made_scope]
    cast = np.where(cast != 0, cast, _cast_written_after(tree, is_cast)[moments.made_scope])
    forward = (moments.made_phase == FORWARD) | (moments.made_phase == RECOMPUTE)
    found = np.flatnonzero((cast != 0) & forward & (label_category != CATEGORY["weights"]))
    gradients = np.flatnonzero(
        (label_category == CATEGORY["gradients"]) & (moments.made_scope != 0)
    )
    proof = _proof(trace, tree, cast_around, moments.made_scope[gradients], label[gradients])
    call = tree.module[moments.made_scope[found]]
    which = _repeated(tree, call, size[found], proof[cast[found]])
    copies.is_copy[found] = which != 0
    copies.label[found] = which
    unclear = _by_size(trace, tree, copies, found, call, size[found])
    if unclear:
        _by_order(tree, copies, found, cast[found], unclear)
    return copies


def _cast_written_after(tree: Tree, is_cast: Mask) -> U32:
    """Per scope, the cast it was made by where that is the next scope beside it.

    Of nested ops only the outermost and the innermost are written down as memory is allocated:
    the factory inside the cast. The cast itself, in between, follows when it has made its node.
    """
    inner = np.flatnonzero((tree.kind == OP) & (tree.kind[tree.parent] == OP))
    order = inner[np.argsort(tree.parent[inner], kind="stable")]
    follows = (tree.parent[order[1:]] == tree.parent[order[:-1]]) & is_cast[order[1:]]
    result = np.zeros(len(tree.parent), np.uint32)
    result[order[:-1][follows]] = order[1:][follows]
    result[is_cast] = 0
    return result


def _proof(trace: Trace, tree: Tree, cast_around: U32, made: U32, label: U32) -> U32:
    """Per scope, the label of the weight that this op cast, 0 where that is not shown."""
    weight_named = np.zeros(len(trace.strings), np.uint32)
    rows = np.flatnonzero(sound.labels(trace).category == CATEGORY["weights"])
    weight_named[sound.labels(trace).name[rows]] = rows
    weight_named[0] = 0
    proof = np.zeros(len(tree.kind), np.uint32)
    proof[cast_around[tree.forward[tree.node[made]]]] = weight_named[
        sound.labels(trace).name[label]
    ]
    proof[0] = 0
    return proof


def _repeated(tree: Tree, call: U32, size: U64, which: U32) -> U32:
    """What is known of a cast is known of those like it."""
    key = _numbered(tree.name[call], _turn(call), size)
    known = np.zeros(len(key), np.uint32)
    known[key[which != 0]] = which[which != 0]
    return np.where(which != 0, which, known[key])


def _numbered(*columns: NDArray[Any]) -> NDArray[np.intp]:
    """Rows that are equal get equal numbers, below the number of rows."""
    number = np.zeros(len(columns[0]), np.intp)
    for column in columns:
        distinct, code = np.unique(column, return_inverse=True)
        _, number = np.unique(number * len(distinct) + code, return_inverse=True)
    return number


def _turn(call: U32) -> I64:
    """Which cast of its module's call each one is."""
    order = np.argsort(call, kind="stable")
    in_order = call[order]
    first = np.searchsorted(in_order, in_order)
    turn = np.empty(len(call), np.int64)
    turn[order] = np.arange(len(call)) - first
    return turn


@dataclass(frozen=True)
class _Unclear:
    """Casts in one call, as large as half of some parameters, and more than those."""

    members: NDArray[np.intp]  # positions among all casts
    parameters: list[int]  # rows of the label table


def _by_size(
    trace: Trace, tree: Tree, copies: Copies, found: NDArray[np.intp], call: U32, size: U64
) -> list[_Unclear]:
    group = _numbered(call, size)
    count = np.bincount(group)
    member = np.zeros(len(count), np.intp)  # any one of each group
    member[group] = np.arange(len(group))
    shown = np.zeros(len(count), np.bool_)
    shown[group[copies.is_copy[found]]] = True
    possible = _halves_of_parameters(trace, tree, set(copies.label[found].tolist()))
    fits = np.zeros(len(count), np.bool_)
    label = np.zeros(len(count), np.uint32)
    sizes = [half for _, half in possible]
    unclear = []
    for i in np.flatnonzero(~shown & np.isin(size[member], np.array(sizes, np.uint64))):
        path = trace.strings[tree.name[call[member[i]]]]
        parameters = possible.get((path, int(size[member[i]])), [])
        fits[i] = 0 < count[i] <= len(parameters)
        label[i] = parameters[0] if len(parameters) == 1 else 0
        if 0 < len(parameters) < count[i]:
            unclear.append((i, parameters))
    copies.is_copy[found] |= fits[group]
    copies.label[found] = np.where(fits[group], label[group], copies.label[found])
    in_groups = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[in_groups], [i for i, _ in unclear])
    return [
        _Unclear(in_groups[start : start + count[i]], parameters)
        for (i, parameters), start in zip(unclear, starts, strict=True)
    ]


def _by_order(
    tree: Tree,
    copies: Copies,
    found: NDArray[np.intp],
    cast: U32,
    unclear: list[_Unclear],
) -> None:
    """Of each op's unclear casts, the one on the side where weights are cast."""
    inner = (tree.kind == OP) & (tree.kind[tree.parent] == OP)
    op = scopes.nearest(tree.parent, ~inner)[cast]  # whose arguments these are
    side = _side_of_weights(op, copies.is_copy[found])
    if side is None:
        return
    for group in unclear:
        members = group.members if side == "first" else group.members[::-1]
        _, first = np.unique(op[members], return_index=True)
        if len(first) <= len(group.parameters):
            chosen = found[members[first]]
            copies.is_copy[chosen] = True
            copies.label[chosen] = group.parameters[0] if len(group.parameters) == 1 else 0


def _side_of_weights(op: U32, shown: Mask) -> str | None:
    """Whether ops cast their weights before or after their inputs, where both are known."""
    order = np.argsort(op, kind="stable")
    next_to = op[order[:-1]] == op[order[1:]]
    before, after = shown[order[:-1]][next_to], shown[order[1:]][next_to]
    weights_first, weights_last = (before & ~after).any(), (after & ~before).any()
    if weights_first == weights_last:
        return None
    return "first" if weights_first else "last"


def _halves_of_parameters(
    trace: Trace, tree: Tree, shown: set[int]
) -> dict[tuple[str, int], list[int]]:
    """Label rows of float32 parameters not shown yet, by the module that uses them and half size.

    That is the module they belong to or, where that is never called itself (the projection inside
    an attention), the one above.
    """
    labels, strings = sound.labels(trace), trace.strings
    called = {strings[name] for name in np.unique(tree.name[tree.kind == MODULE])}
    result: dict[tuple[str, int], list[int]] = {}
    for row in np.flatnonzero(labels.category == CATEGORY["weights"]):
        is_float = strings[labels.dtype[row]] == "float32"
        if row in shown or not is_float or strings[labels.role[row]] != "parameter":
            continue
        path = strings[labels.name[row]].rpartition(".")[0]
        while path and path not in called:
            path = path.rpartition(".")[0]
        half = 2 * elements(strings[labels.shape[row]])
        result.setdefault((path, half), []).append(int(row))
    return result


def elements(shape: str) -> int:
    """How many elements a tensor of this shape has, as labels write it: `768x3072`, `scalar`."""
    count = 1
    for side in shape.split("x"):
        count *= int(side) if side.isdigit() else 1
    return count
