"""What matrix products and convolutions leave: workspaces of cuBLAS's, and copies under autocast."""

import numpy as np

from pytracer.data.schema import Mask
from pytracer.snapshot import stacks
from pytracer.snapshot.facts import Facts
from pytracer.snapshot.rows import numbered
from pytracer.snapshot.stacks import ENGINE, FORWARD, NOTHING, OPTIMIZER, RECOMPUTE
from pytracer.snapshot.timeline import CUBLAS_BYTES, EVALUATION, OTHER, TRAINING


def blas(facts: Facts) -> Mask:
    """By a frame of C++; else by size, by being kept, and by following the result of a product."""
    found = facts.signed(stacks.BLAS)
    if facts.shown.has_native:
        return found
    found |= _old_blas(facts)
    candidates = np.isin(facts.lives.bytes, CUBLAS_BYTES)
    candidates &= np.isin(facts.activity, (FORWARD, ENGINE, RECOMPUTE))
    candidates |= (
        (facts.lives.bytes == _CUBLASLT) & facts.signed(stacks.CASTS) & _called_again(facts)
    )
    candidates &= facts.forever & ~facts.old & ~_is_born_again(facts)
    # Generated code makes the result in one line, and calls the product in another.
    call = np.where(facts.signed(stacks.GENERATED), -1, facts.call)
    seen: set[tuple[int, ...]] = set()
    for row in np.flatnonzero(candidates).tolist():
        engine = facts.activity[row] != FORWARD
        key = (int(facts.lives.bytes[row]), int(facts.lives.stream[row]), int(engine))
        beside = row > 0 and call[row] == call[row - 1]
        beside &= row > 0 and facts.run[row] == facts.run[row - 1]
        if beside and key not in seen:
            seen.add(key)
            found[row] = True
    return found


def _called_again(facts: Facts) -> Mask:
    """Blocks of calls that a later run makes again."""
    last = np.zeros(len(facts.shown.python), np.int64)
    np.maximum.at(last, facts.call, facts.run)
    found: Mask = last[facts.call] > facts.run
    return found


_CUBLASLT = 1 << 20  # its own workspace, up to torch 2.11


def _old_blas(facts: Facts) -> Mask:
    """Of what is older than the history: kept, by a call that is made again, or where no Python runs.

    Where others have frames, a block without them was made by the engine.
    """
    lives = facts.lives
    is_size = np.isin(lives.bytes, CUBLAS_BYTES)
    is_size |= (lives.bytes == _CUBLASLT) & facts.signed(stacks.CASTS)
    made = (facts.activity == FORWARD) & (lives.stack != 0) & _called_again(facts)
    if (facts.old & facts.forever & (lives.stack != 0)).any():
        others = (lives.stack != 0) & np.isin(facts.activity, (NOTHING, OPTIMIZER))
        made |= (lives.stack == 0) & ~np.isin(lives.bytes, lives.bytes[others])
    found: Mask = facts.old & facts.forever & is_size & made
    return found


def _is_born_again(facts: Facts) -> Mask:
    """Blocks as large as one that a later run of the same activity makes with the same stack."""
    alike = numbered(facts.alike, facts.activity)
    last = np.full(len(alike), -1, np.int64)
    np.maximum.at(last, alike, facts.run)
    found: Mask = last[alike] > facts.run
    return found


def autocast_copies(facts: Facts) -> Mask:
    """Copies that are told from others by their size, or by their place in the call.

    Where there is no graph, a copy that is there after the forward is in the cache: of a weight.
    """
    sure, _ = _casts(facts)
    cached = facts.signed(stacks.COPIES) & (facts.kind == EVALUATION)
    found: Mask = sure | (cached & (facts.freed_interval != facts.interval))
    return found


def maybe_autocast_copies(facts: Facts) -> Mask:
    """Also those of which the rule before has just said that they are copies."""
    _, maybe = _casts(facts)
    return maybe


def _casts(facts: Facts) -> tuple[Mask, Mask]:
    """Copies of weights under autocast: those that are sure, and all that there may be.

    A product copies what is not in half precision yet, and then makes its result. The first of
    several copies is one of a weight or bias: linear layers copy bias, weight and input in this
    order, and transformers' Conv1D weight, input and bias.
    """
    lives = facts.lives
    sure, maybe = np.zeros(len(lives), np.bool_), np.zeros(len(lives), np.bool_)
    casts = facts.signed(stacks.CASTS) & np.isin(facts.activity, (FORWARD, RECOMPUTE)) & ~facts.old
    rows = np.flatnonzero(casts & ~facts.is_of("workspaces"))
    # Scratch memory is gone before anything else is made.
    following = np.append(lives.made, facts.count)[rows + 1]
    rows = rows[(lives.freed[rows] > following) | facts.forever[rows]]
    if len(rows) == 0:
        return sure, maybe
    call = facts.call[rows]
    new = np.append(True, (call[1:] != call[:-1]) | (np.diff(rows) != 1))
    last = np.append(new[1:], True)
    size = lives.bytes[rows]
    whole = facts.is_of("weights") | facts.is_of("gradients")
    always = (facts.category == 0) & facts.lasting  # a weight, or not
    is_half = np.isin(size, lives.bytes[whole] // 2) & ~last
    passed = (facts.category == 0) & np.isin(facts.kind, (OTHER, EVALUATION, TRAINING))
    like_input = np.isin(2 * size, lives.bytes[passed]) | np.isin(size, size[last])
    first_of_several = new & ~np.append(last[1:], True)
    maybe[rows] = np.isin(size, lives.bytes[whole | always] // 2) & ~last
    weights = np.unique(lives.bytes[facts.is_of("weights") | facts.is_of("gradients")])
    if np.isin(weights // 2, size[is_half]).sum() < _MOST * len(weights):
        is_half[:] = False  # a coincidence: without autocast two products are one behind the other
    sure[rows] = is_half & (first_of_several | ~like_input)
    return sure, maybe


_MOST = 0.5  # of the sizes of weights
