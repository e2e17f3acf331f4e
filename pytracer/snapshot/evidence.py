"""What each block of a snapshot is for: rules that look at stacks, order, sizes and lives.

The first rule that holds decides. Its name is the block's role, so every category has its evidence.
A block that no rule holds for stays unknown.

| category        | evidence              | what it says                                          |
|-----------------|-----------------------|-------------------------------------------------------|
| weights         | unsharded             | FSDP gathers a layer's weights there                  |
| gradients       | reduced               | made as FSDP reduces, alive in the step that follows  |
|                 | unsharded             | made in a backward, and FSDP's reduction frees it     |
| unknown         | maybe_unsharded       | made in a backward, as large as a whole weight of     |
|                 |                       | FSDP's; where frees have no stacks                    |
| communication   | bucket                | DistributedDataParallel makes it                      |
|                 | collective            | made in a collective, or FSDP's buffer for one        |
| workspaces      | cublas                | made as cuBLAS gets its handle; without C++'s frames: |
|                 |                       | a default size, after a product's result, kept        |
| optimizer_state | init_group            | made in an optimizer's _init_group, alive after it    |
|                 | outlives_step         | made in a step, and alive in the next, or for good    |
| weights         | made_by_module        | made, moved or loaded by a module, alive in a forward |
| gradients       | freed_in_zero_grad    | made in a backward, and zero_grad frees it            |
|                 | accumulated           | AccumulateGrad makes it                               |
| unknown         | maybe_hooked          | made in a backward, freed there by Python, as large   |
|                 |                       | as a block that is always there                       |
| gradients       | outlives_backward     | made in a backward, alive in the step that follows,   |
|                 |                       | as large as a block that is always there              |
| weights         | as_large_as_gradient  | older than the first backward, always there; not more |
|                 |                       | of its size than there are gradients                  |
|                 | repeated              | the same, without frames, of no gradient's size, and  |
|                 |                       | at least four of its size; where state came later     |
|                 | autocast_copy         | before a product's result, half as large as a weight, |
|                 |                       | the first of several, or of no input's size; with     |
|                 |                       | C++'s frames: autocast's, and outlives an evaluation  |
| unknown         | maybe_a_copy          | the same, and it may be a copy of the input           |
| inputs          | batch                 | made before a model's call, there as it begins, and   |
|                 |                       | dropped within a step or replaced by the next but one |
| functional      | kv_cache              | made by a cache of keys and values, kept              |
|                 | output                | the last that an evaluation makes and does not drop   |
| graph_pools     | graph                 | in a private pool                                     |
| activations     | recomputed            | made as a forward runs again, alive after it          |
| unknown         | maybe_recomputed      | the same, if the history does not say when it is over |
| activations     | freed_in_backward     | made in a forward, freed in its backward              |
|                 | alive_at_backward     | made in a forward, alive as its backward begins       |
|                 | left_by_a_call        | made in a module's call that is over, alive where the |
|                 |                       | history ends within that forward                      |
| temporaries     | the phase             | made and freed within one forward, backward or step;  |
|                 |                       | or the history ends there, and it is too large for a  |
|                 |                       | gradient, or not made where state is made             |
| any             | like_other_steps      | all blocks of its size and stack (or, if older than   |
|                 |                       | the history, of its size and end) have this category  |
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer.data.schema import I64, U8, U32, U64, Mask
from pytracer.snapshot import products, stacks
from pytracer.snapshot.facts import Facts
from pytracer.snapshot.rows import Rows, numbered
from pytracer.snapshot.stacks import (
    ENGINE,
    FORWARD,
    NOTHING,
    OPTIMIZER,
    RECOMPUTE,
    UNCLEAR,
    Shown,
)
from pytracer.snapshot.timeline import (
    BACKWARD,
    EVALUATION,
    OTHER,
    STEP,
    TRAINING,
    Doing,
)

_PHASE_ROLES = {OTHER: "other", EVALUATION: "forward", TRAINING: "forward"}
_PHASE_ROLES |= {BACKWARD: "backward", STEP: "optimizer"}


@dataclass(frozen=True)
class Decided:
    """Per event: the category and the evidence of the block that it makes; 0 and "" for others."""

    category: U8
    evidence: NDArray[np.object_]
    lacks: list[str]  # why blocks at the peak are unknown, that of the most bytes first


def decide(events: Rows, parents: U32, shown: Shown, doing: Doing, before: int) -> Decided:
    """Applies the rules to the blocks of these events.

    Args:
        events: all events, of which the first `before` are older than the history.
        parents: the caller of each row of the stack table.
        shown: what each stack shows.
        doing: what the program was doing.
        before: how many events are older.
    """
    facts = Facts(events, parents, shown, doing, before)
    lives = facts.lives
    for category, evidence, rule in RULES:
        facts.choose(rule(facts), category, evidence)
    _temporaries(facts)
    _like_other_steps(facts)
    none = np.zeros(len(events), np.uint8), np.full(len(events), "", object)
    found = Decided(*none, _lacks(facts))
    found.category[lives.made], found.evidence[lives.made] = facts.category, facts.evidence
    return found


def _lacks(facts: Facts) -> list[str]:
    lives = facts.lives
    sizes = lives.bytes.astype(np.int64)
    change = np.zeros(facts.count + 1, np.int64)
    np.add.at(change, lives.made, sizes)
    np.add.at(change, lives.freed, -sizes)
    peak = int(np.cumsum(change[:-1]).argmax()) if facts.count else 0
    unknown = (lives.made <= peak) & (lives.freed > peak) & (facts.category == 0)
    was_full = bool((facts.old & (lives.stack != 0)).any())
    reasons = (
        ("ring" if was_full else "beginning", facts.old),
        ("frees", facts.doubtful & (not facts.frees_tell)),
        ("end", facts.unfinished & facts.forever),
        ("", unknown),
    )
    weight: dict[str, int] = {}
    for name, where in reasons:
        weight[name] = int(sizes[unknown & where].sum())
        unknown &= ~where
    return sorted((name for name in weight if weight[name]), key=lambda name: -weight[name])


# ---------------------------------------------------------------- rules


def _bucket(facts: Facts) -> Mask:
    return facts.signed(stacks.BUCKETS)


def _exchanged(facts: Facts) -> Mask:
    return facts.signed(stacks.EXCHANGES)


def _reduced(facts: Facts) -> Mask:
    """The result of FSDP's reduction, which stays."""
    found: Mask = facts.signed(stacks.REDUCES) & _alive_at_step(facts)
    return found


def _freed_as_reduced(facts: Facts) -> Mask:
    """Whole gradients, which FSDP drops when it has copied them."""
    made = (facts.activity == ENGINE) & ~facts.signed(stacks.EXCHANGES | stacks.GATHERS)
    found: Mask = made & ~facts.forever & ((facts.free_signs & stacks.REDUCES) != 0)
    return found


def _maybe_unsharded(facts: Facts) -> Mask:
    """As large as a whole weight, and nothing tells whether a reduction drops them or a node."""
    sizes = np.unique(facts.lives.bytes[facts.signed(stacks.GATHERS)])
    found: Mask = (facts.activity == ENGINE) & (facts.kind == BACKWARD)
    return found & np.isin(facts.lives.bytes, sizes) & (not facts.frees_tell)


def _gathered(facts: Facts) -> Mask:
    return facts.signed(stacks.GATHERS)


def _state_of_group(facts: Facts) -> Mask:
    outlives = facts.forever | (facts.freed_interval != facts.interval)
    found: Mask = facts.signed(stacks.INIT_GROUP) & outlives
    return found


def _outlives_step(facts: Facts) -> Mask:
    made = (facts.kind == STEP) | (facts.old & (facts.activity == OPTIMIZER))
    following = facts.next(facts.steps, facts.lives.made)
    alive = facts.forever | ((following < facts.count) & (facts.lives.freed > following))
    found: Mask = made & alive & ~facts.unfinished
    return found


def _of_module(facts: Facts) -> Mask:
    made = facts.signed(stacks.MOVED | stacks.BUILT | stacks.LOADED)
    made &= (facts.activity == NOTHING) | facts.old
    return made & (facts.forever | facts.alive_at(facts.line.begins(FORWARD)))


def _freed_in_zero_grad(facts: Facts) -> Mask:
    made = np.isin(facts.activity, (ENGINE, RECOMPUTE)) | facts.old
    found: Mask = facts.cleared & made
    return found


def _accumulated(facts: Facts) -> Mask:
    return facts.signed(stacks.ACCUMULATES)


def _maybe_hooked(facts: Facts) -> Mask:
    """As large as a weight, and freed in Python: a hook may have dropped a gradient."""
    sizes = np.unique(facts.lives.bytes[facts.lasting])
    by_python = facts.shown.python[facts.lives.free_stack] != 0
    made = (facts.activity == ENGINE) & (facts.call == 0) & (facts.kind == BACKWARD)
    found: Mask = made & by_python & (facts.freed_kind == BACKWARD)
    return found & np.isin(facts.lives.bytes, sizes)


def _outlives_a_backward(facts: Facts) -> Mask:
    """In a backward that has not ended, one as large as what it drops may be dropped, too.

    The gradient of an activation is as large as that.
    """
    sizes = np.unique(facts.lives.bytes[facts.lasting])
    dropped = (facts.kind == BACKWARD) & (facts.freed_interval == facts.interval)
    dropped |= (facts.kind == TRAINING) | (facts.activity == RECOMPUTE)
    doubtful = facts.unfinished & np.isin(facts.lives.bytes, facts.lives.bytes[dropped])
    return _outlives_backward(facts, sizes) & ~doubtful


def _outlives_backward(facts: Facts, sizes: U64) -> Mask:
    end = np.append(facts.line.end, 0)[facts.run]
    made = (facts.kind == BACKWARD) & (facts.lives.freed >= end)
    found: Mask = made & _alive_at_step(facts) & np.isin(facts.lives.bytes, sizes)
    return found


def _alive_at_step(facts: Facts) -> Mask:
    """Whether each block is alive in the step after it; for good, if there is none."""
    following = facts.next(facts.steps, facts.lives.made)
    found: Mask = np.where(
        following < facts.count, facts.lives.freed > following, facts.forever
    ).astype(np.bool_)
    return found


def _as_large_as_gradients(facts: Facts) -> Mask:
    """As many blocks of one size as there are gradients of it, and weights known by their frames."""
    lives, first = facts.lives, facts.line.begins(ENGINE)
    first_backward = int(first[0]) if len(first) else facts.count
    candidates = facts.forever & (facts.category == 0) & (lives.made < first_backward)
    candidates &= (facts.activity == NOTHING) | (facts.old & (lives.stack == 0))
    size = numbered(lives.bytes)
    own = np.bincount(size[candidates], minlength=len(size))
    known = np.bincount(size[facts.is_of("weights") & facts.lasting], minlength=len(size))
    most = _most_at_once(facts, facts.is_of("gradients"), size)
    found: Mask = candidates & (own + known <= most)[size]
    return found


def _repeated(facts: Facts) -> Mask:
    """Frozen weights: every layer has some of the same sizes."""
    lives = facts.lives
    old = facts.old & facts.forever & (lives.stack == 0) & (facts.category == 0)
    old &= ~np.isin(lives.bytes, lives.bytes[facts.is_of("gradients")])
    sizes, counts = np.unique(lives.bytes[old], return_counts=True)
    # A state that came before the history looks the same.
    state_is_known = (facts.is_of("optimizer_state") & ~facts.old).any()
    found: Mask = old & np.isin(lives.bytes, sizes[counts >= _LAYERS]) & state_is_known
    return found


_LAYERS = 4


def _most_at_once(facts: Facts, blocks: Mask, size: I64) -> I64:
    """How many of these blocks are alive at once, for each number of a size."""
    each, ones = size[blocks], np.ones(int(blocks.sum()), np.int64)
    change, of = np.concatenate([ones, -ones]), np.concatenate([each, each])
    at = np.concatenate([facts.lives.made[blocks], facts.lives.freed[blocks]])
    order = np.lexsort((change, at, of))
    most = np.zeros(len(size), np.int64)
    np.maximum.at(most, of[order], np.cumsum(change[order]))  # each size begins and ends at 0
    return most


def _batch(facts: Facts) -> Mask:
    """Made between two intervals, and there when the call that follows begins.

    It is dropped within a step, or when the next but one is made. The last one stays.
    """
    lives, line = facts.lives, facts.line
    follows = np.append(line.activity_of_run[1:], -2)
    begin = np.append(line.begin[1:], facts.count)
    made = (facts.kind == OTHER) & (follows[facts.run] == FORWARD) & ~facts.old
    made &= ~facts.signed(stacks.CLIPS | stacks.NO_GRAPH) & (lives.freed > begin[facts.run])
    passed = np.searchsorted(facts.steps, lives.freed) - np.searchsorted(facts.steps, lives.made)
    stay = np.bincount(facts.alike[facts.forever], minlength=len(lives) + 1)[facts.alike]
    last = _trained_before(facts) & (stay == 1)  # the program keeps what stays of each step
    ends = np.where(facts.forever, last, (passed <= 1) | _takes_turns(facts))
    found: Mask = made & ends
    return found


def _trained_before(facts: Facts) -> Mask:
    """Blocks that a backward went before."""
    backward = facts.line.begins(ENGINE)
    found: Mask = facts.lives.made > (backward[0] if len(backward) else facts.count)
    return found


def _takes_turns(facts: Facts) -> Mask:
    """Blocks that are gone when the next but one of their stack and size is made."""
    lives = facts.lives
    alike = facts.alike
    order = np.argsort(alike, kind="stable")
    found = np.zeros(len(lives), np.bool_)
    if len(order) > 2:
        same = alike[order[2:]] == alike[order[:-2]]
        found[order[:-2]] = same & (lives.freed[order[:-2]] < lives.made[order[2:]])
    return found


def _cached(facts: Facts) -> Mask:
    leaves = facts.freed_interval != facts.interval
    found: Mask = facts.signed(stacks.CACHES) & (facts.kind == EVALUATION) & leaves
    return found


def _output(facts: Facts) -> Mask:
    """Kept until after an evaluation, and the last such block of it.

    But not until a forward that is trained.
    """
    lives, line = facts.lives, facts.line
    trained = np.sort(line.begin[line.kind[line.interval_of_run] == TRAINING])
    kept = (facts.kind == EVALUATION) & (facts.freed_interval != facts.interval)
    last = np.full(len(line.kind) + 1, -1, np.int64)
    np.maximum.at(last, facts.interval[kept], np.flatnonzero(kept))
    kept &= last[facts.interval] == np.arange(len(kept))
    found: Mask = kept & (facts.freed_kind == OTHER) & ~facts.forever
    return found & (facts.next(trained, lives.made) > lives.freed)


def _in_pool(facts: Facts) -> Mask:
    made = facts.lives.made
    found: Mask = (facts.events.pool_high[made] != 0) | (facts.events.pool_low[made] != 0)
    return found


def _recomputed(facts: Facts) -> Mask:
    """Made as a forward runs again, and alive after the last event of that."""
    over = facts.next(_recomputations(facts)[1], facts.lives.made - 1)
    return _made_again(facts) & (facts.lives.freed > over)


def _maybe_recomputed(facts: Facts) -> Mask:
    """Freed at the end of a forward that runs again, or after it."""
    over = facts.next(_recomputations(facts)[0], facts.lives.made - 1)
    return _made_again(facts) & (facts.lives.freed > over)


def _made_again(facts: Facts) -> Mask:
    found: Mask = (facts.activity == RECOMPUTE) & ~facts.old & ~facts.forever
    return found


def _recomputations(facts: Facts) -> tuple[I64, I64]:
    """The last events that show a forward that runs again, and the events from which it is over.

    These are the same where frees show what the program was doing; else the next allocation.
    """
    clear = np.flatnonzero(facts.own != UNCLEAR)
    again = facts.own[clear] == RECOMPUTE
    last = np.flatnonzero(again & ~np.append(again[1:], False))
    if facts.frees_tell:
        return clear[last], clear[last]
    return clear[last], np.append(clear, facts.count)[last + 1]


def _freed_in_backward(facts: Facts) -> Mask:
    """Also what is older than a history that begins before the forward ends.

    There FSDP's weights would look alike.
    """
    forward = facts.line.begins(FORWARD)
    begun = facts.lives.freed > (forward[0] if len(forward) else facts.count)
    older = facts.old & (facts.lives.stack == 0) & begun & ~facts.signed(stacks.GATHERS).any()
    found: Mask = (facts.outlives_forward | older) & (facts.freed_kind == BACKWARD)
    return found


def _alive_at_backward(facts: Facts) -> Mask:
    """Also what the last step leaves; what the first leaves may be a table, or scratch memory.

    What an earlier step has left, too, the program keeps.
    """
    line = facts.line
    intervals = np.flatnonzero(line.kind == TRAINING)
    last = (facts.interval == intervals[-1]) if len(intervals) else facts.forever
    ends_within = line.kind[line.interval_of_run[-1:]] == BACKWARD
    sure = last & (_trained_before(facts) | bool(ends_within.any()))
    sure &= ~np.isin(facts.alike, facts.alike[facts.outlives_forward & facts.forever & ~last])
    found: Mask = facts.outlives_forward & (~facts.forever | sure)
    return found


def _left_by_a_call(facts: Facts) -> Mask:
    """Made in a call that is over, in a forward that is not: what lives can only be in the graph.

    The last block of such a call may be its result, which is on its way to somewhere.
    """
    candidates: Mask = (facts.kind == TRAINING) & facts.unfinished & facts.forever
    found = np.zeros(len(candidates), np.bool_)
    shown, lives = facts.shown, facts.lives
    left = _open_calls(facts) if candidates.any() else {}
    last = (0, -1)  # the outermost call that is over, and its last block
    for row in np.flatnonzero(candidates).tolist():
        call, outermost = int(shown.call[lives.stack[row]]), 0
        while call and lives.made[row] < left.get(call, facts.count):
            outermost, call = call, int(shown.call[facts.parents[call]])
        if last[0] and last[0] != outermost:
            found[last[1]] = False
        found[row], last = outermost != 0, (outermost, row)
    if last[0]:
        found[last[1]] = False
    return found


def _open_calls(facts: Facts) -> dict[int, int]:
    """The calls in which the history ends, by row of the stack table: when each was last left."""
    calls = facts.shown.call.tolist()
    within = np.flatnonzero((facts.own == FORWARD) & (facts.shown.call[facts.events.stack] != 0))
    chain = []
    call = calls[facts.events.stack[within[-1]]] if len(within) else 0
    while call:
        chain.append(call)
        call = calls[facts.parents[call]]
    chain.reverse()  # each is within the one before
    depth = np.zeros(len(calls), np.int64)  # of each stack: how many of the chain it contains
    for row, parent in enumerate(facts.parents.tolist()):
        at = depth[parent] if row else 0
        depth[row] = at + (at < len(chain) and calls[row] == chain[at])
    last = np.full(len(chain) + 1, -1, np.int64)
    np.maximum.at(last, depth[facts.events.stack[within]], within)
    return dict(zip(chain, np.maximum.accumulate(last).tolist(), strict=False))


RULES: tuple[tuple[str, str, Callable[[Facts], Mask]], ...] = (
    ("weights", "unsharded", _gathered),
    ("gradients", "reduced", _reduced),
    ("gradients", "unsharded", _freed_as_reduced),
    ("unknown", "maybe_unsharded", _maybe_unsharded),
    ("communication", "bucket", _bucket),
    ("communication", "collective", _exchanged),
    ("workspaces", "cublas", products.blas),
    ("optimizer_state", "init_group", _state_of_group),
    ("optimizer_state", "outlives_step", _outlives_step),
    ("weights", "made_by_module", _of_module),
    ("gradients", "freed_in_zero_grad", _freed_in_zero_grad),
    ("gradients", "accumulated", _accumulated),
    ("unknown", "maybe_hooked", _maybe_hooked),
    ("gradients", "outlives_backward", _outlives_a_backward),
    ("weights", "as_large_as_gradient", _as_large_as_gradients),
    ("weights", "repeated", _repeated),
    ("weights", "autocast_copy", products.autocast_copies),
    ("unknown", "maybe_a_copy", products.maybe_autocast_copies),
    ("inputs", "batch", _batch),
    ("functional", "kv_cache", _cached),
    ("functional", "output", _output),
    ("graph_pools", "graph", _in_pool),
    ("activations", "recomputed", _recomputed),
    ("unknown", "maybe_recomputed", _maybe_recomputed),
    ("activations", "freed_in_backward", _freed_in_backward),
    ("activations", "alive_at_backward", _alive_at_backward),
    ("activations", "left_by_a_call", _left_by_a_call),
)


def _temporaries(facts: Facts) -> None:
    within = (facts.freed_interval == facts.interval) & ~facts.old & ~facts.forever
    within &= ~_may_outlive_evaluation(facts)
    for kind, role in _PHASE_ROLES.items():
        here = within & (facts.kind == kind)
        if kind == OTHER:  # a batch may be made from it
            here &= _before_a_step(facts)
        facts.choose(here | (_in_unfinished(facts) & (facts.kind == kind)), "temporaries", role)


def _may_outlive_evaluation(facts: Facts) -> Mask:
    """Freed behind all that an evaluation makes, by a free that does not say when it comes."""
    line = facts.line
    clear = np.flatnonzero((facts.own != UNCLEAR) & (line.interval >= 0))
    last = np.full(len(line.kind) + 1, -1, np.int64)
    np.maximum.at(last, line.interval[clear], clear)
    found: Mask = (facts.kind == EVALUATION) & (facts.lives.freed > last[facts.interval])
    return found & (not facts.frees_tell)


def _in_unfinished(facts: Facts) -> Mask:
    """Blocks of a backward or step that has not ended, which can be no gradient and no state."""
    sizes = np.unique(facts.lives.bytes[facts.lasting])
    no_gradient = (facts.kind == BACKWARD) & ~np.isin(facts.lives.bytes, sizes)
    no_gradient &= facts.activity != RECOMPUTE  # an activation, or not
    states = (facts.kind == STEP) & facts.signed(stacks.INIT_GROUP)
    no_state = (facts.kind == STEP) & bool((states & facts.unfinished).any()) & ~states
    found: Mask = facts.unfinished & facts.forever & (no_gradient | no_state)
    return found & ~facts.signed(stacks.EXCHANGES | stacks.GATHERS | stacks.REDUCES)


def _before_a_step(facts: Facts) -> Mask:
    """Blocks made between a backward and the step that follows it."""
    line = facts.line
    follows = np.append(line.activity_of_run[1:], -2) == OPTIMIZER
    after = np.append(False, line.activity_of_run[:-1] == ENGINE)[: len(line.begin)]
    found: Mask = np.append(follows & after, False)[facts.run]
    return found


def _like_other_steps(facts: Facts) -> None:
    """Blocks that no rule holds for, whose likes in other steps all have one category.

    Alike are blocks of one size and stack; of those that are older than the history and have no
    stack, blocks of one size that end alike, or that are made between phases as these end.
    """
    lives = facts.lives
    has_stack = lives.stack != 0
    _follow(facts, facts.alike, has_stack & ~facts.is_of("temporaries"), has_stack)
    ends = numbered(lives.free_stack, lives.bytes, facts.freed_kind)
    old = facts.old & ~has_stack & ~facts.forever
    known = ~facts.old & ~facts.forever & (facts.category != 0)
    not_in_backward = facts.freed_kind != BACKWARD  # whose own blocks look like what it frees
    # A block is a temporary only of an interval in which it was made.
    cut = facts.freed_interval == facts.line.interval_of_run[:1].sum()
    for within, likes in ((cut, known), (~cut, known & ~facts.is_of("temporaries"))):
        earlier = _ends_before(facts, ends, likes)
        _follow(facts, ends, likes, old & within & not_in_backward & earlier)
    # What a program replaces goes as the new one comes.
    run = np.append(facts.line.run, -1)
    there = np.where(facts.old, run[lives.freed], facts.run)
    at_home = old & (facts.freed_kind == OTHER)
    places = numbered(there, lives.bytes)
    _follow(facts, places, ~facts.old & (facts.kind == OTHER), at_home)


def _ends_before(facts: Facts, alike: I64, likes: Mask) -> Mask:
    """Blocks that end in an interval before those in which their likes end: steps repeat."""
    first = np.full(int(alike.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, alike[likes], facts.freed_interval[likes])
    found: Mask = facts.freed_interval < first[alike]
    return found


def _follow(facts: Facts, alike: I64, known: Mask, where: Mask) -> None:
    """Decides blocks as those of the same number are decided, if these agree."""
    count = int(alike.max(initial=-1)) + 1
    least, most = np.full(count, 255, np.uint8), np.zeros(count, np.uint8)
    decided = known & (facts.category != 0)
    np.minimum.at(least, alike[decided], facts.category[decided])
    np.maximum.at(most, alike[decided], facts.category[decided])
    same = where & (facts.category == 0) & ~facts.doubtful & (least == most)[alike]
    facts.category[same], facts.evidence[same] = least[alike[same]], "like_other_steps"
