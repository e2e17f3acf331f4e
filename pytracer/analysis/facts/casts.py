"""Autocast's copies of weights: which allocations are a parameter in a smaller type.

Autocast casts the arguments of an op one after the other, the input like the weight, and the cast
itself does not show which is which. Four kinds of evidence do:

1. Proof. The gradient of a cast passes through the cast's node, and that node's block became a
   parameter's gradient. So the op cast that parameter, or a block whose op hands its gradient on
   unchanged, as the sum `x + position` does. If another such block was alive and as large, nothing
   is proved. For autocast's casts in a call of the parameter's own module, only other blocks of the
   same call count, because a weight is used by its module alone.
2. Repetition. Where gradients are added up instead, or a forward is run again, the same cast (same
   module, same turn, same size) stands for the same parameter.
3. Size, for parameters without any proof (frozen ones, a forward alone). The cast is as large as
   half of a float32 parameter of that module, and the call has no more casts of that size than the
   module has such parameters. Only autocast's casts count: a program's own `x.bfloat16()` may be of
   anything.
4. Order, where an input happens to be as large. A compiler casts the arguments of all ops from
   first to last, or of all ops from last to first. The ops with both a known weight and another
   cast show which. Without such ops, the cast is not counted as a copy.

A saved-tensor hook may pack a saved tensor in another type. That is never such a copy.
"""

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.facts import scopes
from pytracer.analysis.facts.phases import Moments
from pytracer.analysis.facts.scopes import OP, Tree
from pytracer.analysis.facts.timelines import FORWARD, RECOMPUTE
from pytracer.data import sanitized
from pytracer.data.model_names import module_text
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORY, I64, SCOPE_AUTOCAST, SCOPE_GRAD, U8, U32, U64, Mask


@dataclass(frozen=True)
class Copies:
    """Per allocation, whether it is such a copy, and its weight's label if known."""

    is_copy: Mask
    label: U32


def autocast_copies(
    trace: Trace, moments: Moments, size: U64, label: U32, label_category: U8
) -> Copies:
    """Finds the copies among forward's allocations; `label` is each allocation's label row."""
    tree = scopes.tree(trace)
    copies = Copies(np.zeros(len(size), np.bool_), np.zeros(len(size), np.uint32))
    is_cast = scopes.scopes_named(trace, lambda text: text == "aten::_to_copy")
    is_cast &= tree.kind == OP
    if not is_cast.any():
        return copies
    outermost = scopes.outermost_op(tree)
    is_cast &= ~_in_a_hook(tree, outermost)
    cast_around = scopes.nearest(tree.parent, is_cast)
    cast = cast_around[moments.made_scope]
    cast = np.where(cast != 0, cast, _cast_written_after(tree, is_cast)[moments.made_scope])
    forward = (moments.made_phase == FORWARD) | (moments.made_phase == RECOMPUTE)
    candidates = np.flatnonzero((cast != 0) & forward & (label_category != CATEGORY["weights"]))
    blocks = _Blocks(moments, size, label, label_category)
    claims = _claims(trace, tree, cast_around, blocks)
    by_program = scopes.scopes_named(trace, lambda text: text in _CASTS_OF_A_PROGRAM)[outermost]
    holds = _hold(trace, tree, claims, blocks, by_program)
    proof = np.zeros(len(tree.kind), np.uint32)
    proof[claims.cast[holds]] = claims.weight[holds]
    call = tree.module[moments.made_scope[candidates]]
    weight = _repeated(tree, call, size[candidates], proof[cast[candidates]])
    copies.is_copy[candidates] = weight != 0
    copies.label[candidates] = weight
    seen = {*copies.label[candidates].tolist(), *claims.weight.tolist()}
    possible = _halves_of_parameters(trace, tree, seen)
    of_autocast = ~by_program[cast[candidates]]
    candidates, call, cast = (
        candidates[of_autocast],
        call[of_autocast],
        cast[candidates[of_autocast]],
    )
    unclear = _by_size(trace, tree, copies, candidates, call, size[candidates], possible)
    if unclear:
        _by_order(outermost[cast], copies, candidates, unclear)
    return copies


def copies_or_not(
    trace: Trace, moments: Moments, size: U64, label_category: U8
) -> tuple[Mask, Mask]:
    """Where no operators were recorded: blocks that are such copies, and blocks that may be.

    A candidate is a block that a module under autocast makes, half as large as one of its float32
    parameters. It is a copy if all of this holds:

    - No call of the module makes more candidates than the module has parameters of that size.
    - The module has a matrix. Autocast casts the arguments of products, but not a norm's weight.
    - The call makes another block later. The last one is a result (of a product, an embedding).
    """
    tree = scopes.tree(trace)
    call = tree.module[moments.made_scope]
    forward = (moments.made_phase == FORWARD) | (moments.made_phase == RECOMPUTE)
    cast = forward & (tree.flags[call] & SCOPE_AUTOCAST != 0)
    cast &= (call != 0) & (label_category != CATEGORY["weights"])
    parameters = _halves_of_parameters(trace, tree, set())
    count = {key: len(rows) for key, rows in parameters.items()}
    has_matrix = {path for (path, _), rows in parameters.items() if _any_matrix(trace, rows)}
    blocks = np.flatnonzero(cast & np.isin(size, np.array([half for _, half in count], np.uint64)))
    keys = [(trace.strings[tree.name[call[b]]], int(size[b])) for b in blocks.tolist()]
    is_half = np.array([key in count for key in keys], np.bool_)
    blocks, keys = blocks[is_half], [key for key in keys if key in count]
    per_call = Counter(zip(call[blocks].tolist(), keys, strict=True))
    too_many = {key for (_, key), times in per_call.items() if times > count[key]}
    last = np.zeros(len(tree.kind), np.intp)  # per call, its last block
    np.maximum.at(last, call, np.arange(len(call)))
    doubt = [key in too_many or key[0] not in has_matrix for key in keys]
    unclear = np.array(doubt, np.bool_) | (last[call[blocks]] == blocks)
    copies, maybe = np.zeros(len(size), np.bool_), np.zeros(len(size), np.bool_)
    copies[blocks[~unclear]] = True
    maybe[blocks[unclear]] = True
    return copies, maybe


def _any_matrix(trace: Trace, rows: list[int]) -> bool:
    """Whether any of these labels has more than one dimension."""
    shape = sanitized.labels(trace).shape
    return any("x" in trace.strings[shape[row]] for row in rows)


# The ops by which a program casts. Autocast's casts lie inside the op whose arguments they cast.
_CASTS_OF_A_PROGRAM = ("aten::to", "aten::type_as")


def _in_a_hook(tree: Tree, outermost: U32) -> Mask:
    """Scopes without grad mode within an op that has it: kernels, and packing hooks."""
    with_grad = tree.flags & SCOPE_GRAD != 0
    is_in_hook: Mask = with_grad[outermost] & ~with_grad
    return is_in_hook


def _cast_written_after(tree: Tree, is_cast: Mask) -> U32:
    """Per scope, the cast around it, if the cast is recorded as the next scope beside it.

    When memory is allocated, only the outermost and the innermost of nested ops are recorded. The
    innermost is the factory inside the cast. The cast, in between, is recorded later, when it has
    made its node.
    """
    inner = np.flatnonzero((tree.kind == OP) & (tree.kind[tree.parent] == OP))
    order = inner[np.argsort(tree.parent[inner], kind="stable")]
    follows = (tree.parent[order[1:]] == tree.parent[order[:-1]]) & is_cast[order[1:]]
    result = np.zeros(len(tree.parent), np.uint32)
    result[order[:-1][follows]] = order[1:][follows]
    result[is_cast] = 0
    return result


@dataclass(frozen=True)
class _Blocks:
    """Facts about all allocations."""

    moments: Moments
    size: U64
    label: U32
    label_category: U8


@dataclass(frozen=True)
class _Claims:
    """Casts whose gradient became a parameter's gradient: they may be casts of that parameter."""

    cast: U32
    weight: U32  # rows of the label table
    size: U64  # of the gradient, and so of the tensor that was cast


def _claims(trace: Trace, tree: Tree, cast_around: U32, blocks: _Blocks) -> _Claims:
    labels, strings = sanitized.labels(trace), trace.strings
    weight_named = np.zeros(len(strings), np.uint32)
    rows = np.flatnonzero(labels.category == CATEGORY["weights"])
    weight_named[labels.name[rows]] = rows
    weight_named[0] = 0
    gradients = np.flatnonzero(blocks.label_category == CATEGORY["gradients"])
    cast = cast_around[tree.forward[tree.node[blocks.moments.made_scope[gradients]]]]
    weight = weight_named[labels.name[blocks.label[gradients]]]
    good = (cast != 0) & (weight != 0)
    return _Claims(cast[good], weight[good], blocks.size[gradients[good]])


# Ops whose nodes hand the gradient on unchanged to at least one argument. They allocate nothing in
# a backward pass, so the trace does not show them between a cast's node and a parameter.
_HAND_ON = (
    *("aten::add", "aten::sub", "aten::rsub", "aten::cat", "aten::stack", "aten::addcmul"),
    *("aten::addmm", "aten::baddbmm", "aten::index_add", "aten::scatter_add"),
)


def _hold(trace: Trace, tree: Tree, claims: _Claims, blocks: _Blocks, by_program: Mask) -> Mask:
    """Which claims are proofs: no block of an op that hands gradients on can have been cast."""
    made = blocks.moments.made_scope
    hands_on = scopes.scopes_named(trace, lambda text: text in _HAND_ON)[tree.op[made]]
    others = np.flatnonzero(hands_on & np.isin(blocks.size, claims.size))
    call, made_in = tree.module[claims.cast], tree.module[made[others]]
    anywhere = _alive_then(tree, blocks, others, claims, blocks.size[others], claims.size)
    pairs = _numbered_alike((blocks.size[others], made_in), (claims.size, call))
    here = _alive_then(tree, blocks, others, claims, *pairs)
    own = _of_own_module(trace, tree, claims.weight, call) & ~by_program[claims.cast]
    holds: Mask = _is_whole(trace, claims) & ~np.where(own, here, anywhere)
    return holds


def _alive_then(
    tree: Tree,
    blocks: _Blocks,
    others: NDArray[np.intp],
    claims: _Claims,
    others_key: NDArray[Any],
    key: NDArray[Any],
) -> Mask:
    """Per claim, whether another block with the claim's key was alive at the cast."""
    others_key, key = _numbered_alike((others_key,), (key,))
    moments, then = blocks.moments, tree.begin[claims.cast]
    ticks = np.concatenate((moments.made_ticks[others], moments.freed_ticks[others], then))
    _, rank = np.unique(ticks, return_inverse=True)
    made, freed, asked = np.split(rank, [len(others), 2 * len(others)])
    # All blocks with smaller keys have begun and ended, so they cancel out.
    asked += key * len(rank)
    begun = np.searchsorted(np.sort(others_key * len(rank) + made), asked)
    ended = np.searchsorted(np.sort(others_key * len(rank) + freed), asked)
    was_alive: Mask = begun > ended
    return was_alive


def _is_whole(trace: Trace, claims: _Claims) -> Mask:
    """Whether the cast is no larger than the parameter; otherwise the parameter is only a part."""
    labels, strings = sanitized.labels(trace), trace.strings
    most = {
        row: 4 * elements(strings[labels.shape[row]])
        for row in np.unique(claims.weight).tolist()
        if strings[labels.dtype[row]] == "float32"
    }
    pairs = zip(claims.weight.tolist(), claims.size.tolist(), strict=True)
    return np.array([size <= most.get(row, size) for row, size in pairs], np.bool_)


def _of_own_module(trace: Trace, tree: Tree, weight: U32, call: U32) -> Mask:
    """Whether each call is of the module that has the weight.

    For a weight of no called module, that is an outermost call.
    """
    labels, strings = sanitized.labels(trace), trace.strings
    called = scopes.called_modules(trace)
    outermost = tree.module[tree.parent[call]] == 0
    users = {row: _user(strings[labels.name[row]], called) for row in np.unique(weight).tolist()}
    rows = zip(weight.tolist(), tree.name[call].tolist(), outermost.tolist(), strict=True)
    return np.array(
        [users[row] == strings[name] or (not users[row] and top) for row, name, top in rows],
        np.bool_,
    )


def _user(weight: str, called: Container[str]) -> str:
    """The module that a weight belongs to; if that is never called, the nearest one above."""
    path = module_text(weight).rpartition(".")[0]
    while path and path not in called:
        path = path.rpartition(".")[0]
    return path


def _repeated(tree: Tree, call: U32, size: U64, weight: U32) -> U32:
    """Gives each cast without a known weight the weight of a cast like it."""
    key = _numbered(tree.name[call], _turn(call), size)
    weight_of = np.zeros(len(key), np.uint32)
    weight_of[key[weight != 0]] = weight[weight != 0]
    return np.where(weight != 0, weight, weight_of[key])


def _numbered_alike(
    some: tuple[NDArray[Any], ...], others: tuple[NDArray[Any], ...]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Like `_numbered`, for the rows of two tables together."""
    both = _numbered(*(np.concatenate(pair) for pair in zip(some, others, strict=True)))
    return both[: len(some[0])], both[len(some[0]) :]


def _numbered(*columns: NDArray[Any]) -> NDArray[np.intp]:
    """A number per row, below the number of rows; equal rows get equal numbers."""
    number = np.zeros(len(columns[0]), np.intp)
    for column in columns:
        distinct, code = np.unique(column, return_inverse=True)
        _, number = np.unique(number * len(distinct) + code, return_inverse=True)
    return number


def _turn(call: U32) -> I64:
    """Each cast's turn: how many casts its module's call made before it."""
    order = np.argsort(call, kind="stable")
    in_order = call[order]
    first = np.searchsorted(in_order, in_order)
    turn = np.empty(len(call), np.int64)
    turn[order] = np.arange(len(call)) - first
    return turn


@dataclass(frozen=True)
class _Unclear:
    """Casts in one call with half the size of some parameters, and more casts than parameters."""

    members: NDArray[np.intp]  # positions among all casts
    parameters: list[int]  # rows of the label table


def _by_size(
    trace: Trace,
    tree: Tree,
    copies: Copies,
    candidates: NDArray[np.intp],
    call: U32,
    size: U64,
    possible: dict[tuple[str, int], list[int]],
) -> list[_Unclear]:
    group = _numbered(call, size)
    count = np.bincount(group)
    member = np.zeros(len(count), np.intp)  # any one of each group
    member[group] = np.arange(len(group))
    shown = np.zeros(len(count), np.bool_)
    shown[group[copies.is_copy[candidates]]] = True
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
    copies.is_copy[candidates] |= fits[group]
    copies.label[candidates] = np.where(fits[group], label[group], copies.label[candidates])
    in_groups = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[in_groups], [i for i, _ in unclear])
    return [
        _Unclear(in_groups[start : start + count[i]], parameters)
        for (i, parameters), start in zip(unclear, starts, strict=True)
    ]


def _by_order(
    op: U32, copies: Copies, candidates: NDArray[np.intp], unclear: list[_Unclear]
) -> None:
    """Chooses, among each op's unclear casts, the one on the side where ops cast weights."""
    side = _side_of_weights(op, copies.is_copy[candidates])
    if side is None:
        return
    for group in unclear:
        members = group.members if side == "first" else group.members[::-1]
        _, first = np.unique(op[members], return_index=True)
        if len(first) <= len(group.parameters):
            chosen = candidates[members[first]]
            copies.is_copy[chosen] = True
            copies.label[chosen] = group.parameters[0] if len(group.parameters) == 1 else 0


def _side_of_weights(op: U32, shown: Mask) -> str | None:
    """Whether ops cast their weights "first" or "last"; None if the known casts do not show it."""
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
    """Label rows of float32 parameters not shown yet, by their user and by half their size.

    The user is the module that they belong to. If that is never called itself (the projection
    inside an attention), it is the nearest module above.
    """
    labels, strings = sanitized.labels(trace), trace.strings
    called = scopes.called_modules(trace)
    result: dict[tuple[str, int], list[int]] = {}
    for row in np.flatnonzero(labels.category == CATEGORY["weights"]):
        is_float = strings[labels.dtype[row]] == "float32"
        if row in shown or not is_float or strings[labels.role[row]] != "parameter":
            continue
        path = _user(strings[labels.name[row]], called)
        half = 2 * elements(strings[labels.shape[row]])
        result.setdefault((path, half), []).append(int(row))
    return result


def elements(shape: str) -> int:
    """How many elements a tensor has, from its shape in a label: `768x3072`, `scalar`."""
    count = 1
    for side in shape.split("x"):
        count *= int(side) if side.isdigit() else 1
    return count
