"""What the program was doing at each event of a snapshot: runs of one activity, and intervals.

A run is a row of events with the same activity. An interval is one forward, one backward, one step
of an optimizer, or what lies between them. A forward goes on until its backward begins, and includes
the loss. A run of modules that makes no graph is an evaluation, and an interval of its own.
"""

from dataclasses import dataclass

import numpy as np

from pytracer.data.schema import ACTION, I64, U8, U64, Mask
from pytracer.snapshot import rows
from pytracer.snapshot.stacks import (
    ENGINE,
    FORWARD,
    NO_GRAPH,
    NOTHING,
    OPTIMIZER,
    RECOMPUTE,
    UNCLEAR,
    Shown,
)

# Kinds of intervals. BEFORE: older than the history.
BEFORE, OTHER, EVALUATION, TRAINING, BACKWARD, STEP = range(6)
_FREES = (ACTION["free_requested"], ACTION["free_completed"])
_NEWS = (ACTION["alloc"], ACTION["seed"])


@dataclass(frozen=True)
class Blocks:
    """One row per life of a block, in the order of their begins. Positions are those of events."""

    made: I64
    freed: I64  # the number of events: never
    bytes: U64
    stream: U64
    stack: I64
    free_stack: I64

    def __len__(self) -> int:
        """How many blocks there are."""
        return len(self.made)


def blocks(events: rows.Rows) -> Blocks:
    """The lives of all blocks: from an allocation to the first free of the same address."""
    count = len(events)
    keys = rows.keys(events.device, events.address)
    moves = np.flatnonzero(np.isin(events.action, (*_NEWS, *_FREES)))
    moves = moves[np.argsort(keys[moves], kind="stable")]
    is_new = np.isin(events.action[moves], _NEWS)
    freed = np.full(len(moves) + 1, count, np.int64)
    # A free follows its allocation directly; the other half of a free follows the free.
    follows = np.flatnonzero(is_new[:-1] & ~is_new[1:] & (keys[moves][:-1] == keys[moves][1:]))
    freed[follows] = moves[follows + 1]
    made, freed = moves[is_new], freed[:-1][is_new]
    order = np.argsort(made, kind="stable")
    made, freed = made[order], freed[order]
    stack = np.append(events.stack.astype(np.int64), 0)
    return Blocks(made, freed, events.bytes[made], events.stream[made], stack[made], stack[freed])


def activities(events: rows.Rows, shown: Shown, before: int) -> I64:
    """The activity of each event by its own stack.

    A free may only repeat the stack of its allocation, or have none where no free has one. It then
    shows nothing, like the segments, which come and go inside of an allocation.
    """
    activity: I64 = shown.activity[events.stack]
    is_free = np.isin(events.action, _FREES)
    is_alloc = events.action == ACTION["alloc"]
    frameless = events.stack == 0
    after = np.arange(len(events)) >= before
    for some in (is_free, ~is_free):
        says = (~frameless & some & after & (is_alloc | is_free)).any()
        activity[frameless & some] = ENGINE if says else UNCLEAR
    activity[is_free & _repeats(events)] = UNCLEAR
    activity[~is_alloc & ~is_free] = UNCLEAR
    activity[:before] = NOTHING
    return activity


def filled(activity: I64) -> I64:
    """Gives unclear events the activity of the event before."""
    clear = np.where(activity != UNCLEAR, np.arange(len(activity)), 0)
    found: I64 = activity[np.maximum.accumulate(clear)] if len(activity) else activity
    return np.where(found == UNCLEAR, NOTHING, found)


def _repeats(events: rows.Rows) -> Mask:
    """Which events have the stack of the event before at their address."""
    keys = rows.keys(events.device, events.address)
    order = np.argsort(keys, kind="stable")
    stack = events.stack[order]
    same = np.append(False, (keys[order][1:] == keys[order][:-1]) & (stack[1:] == stack[:-1]))
    found = np.zeros(len(keys), np.bool_)
    found[order] = same[: len(keys)]
    return found


@dataclass(frozen=True)
class Doing:
    """What the program was doing at each event."""

    own: I64  # the activity that the event's own stack shows
    activity: I64  # that, or the one of the event before
    steps: I64  # where steps of optimizers begin, also those in which nothing happened
    clears: Mask  # which events are in a zero_grad
    over: Mask  # which are in a step that came to its end


@dataclass(frozen=True)
class Timeline:
    """Runs and intervals. `run` and `interval` are per event, and -1 before the history."""

    activity: I64
    run: I64
    interval: I64
    begin: I64  # of each run
    end: I64  # one behind its last event
    activity_of_run: I64
    kind: U8  # of each interval
    kept_from: I64  # where the backward of a forward begins; the number of events: none
    interval_of_run: I64

    def kinds(self, at: I64) -> U8:
        """The kind of interval at each of these positions; past the end: BEFORE."""
        interval = np.append(self.interval, -1)[at]
        found: U8 = np.append(self.kind, np.uint8(BEFORE))[interval]
        return found

    def begins(self, activity: int) -> I64:
        """Where runs of this activity begin."""
        found: I64 = self.begin[self.activity_of_run == activity]
        return found

    def ends(self, activity: int) -> I64:
        """Where they end."""
        found: I64 = self.end[self.activity_of_run == activity]
        return found


# The default sizes of cuBLAS's workspace, on Hopper and on earlier devices. It stays for good.
CUBLAS_BYTES = (32 << 20, 8_519_680)
# The part of what a run made that is alive as a backward begins, or at the end of the file.
_KEPT = 0.5


def _trains(group: I64, lives: Blocks, run: I64, begin: I64, of_run: I64, shown: Shown) -> Mask:
    """Which runs of modules made a graph: the engine frees blocks of theirs, or a backward follows.

    What a function makes that wants no graph is no sign of one. Where modules ran several times before that backward, or the file ends within a forward, much of
    what the run made has to be alive then.
    """
    count = len(group)
    forward = of_run == FORWARD
    trains = np.zeros(len(begin), np.bool_)
    scratch = (lives.freed >= count) & np.isin(lives.bytes, CUBLAS_BYTES)
    scratch |= (shown.signs[lives.stack] & NO_GRAPH) != 0
    made = np.flatnonzero((run[lives.made] >= 0) & (group[lives.made] == FORWARD) & ~scratch)
    of_block, freed = run[lives.made[made]], lives.freed[made]
    trains[of_block[(np.append(group, NOTHING)[freed] == ENGINE)]] = True

    backward = following(begin[of_run == ENGINE], begin, count)
    in_time = forward & (backward <= following(begin[of_run == OPTIMIZER], begin, count))
    trains |= in_time & (backward < following(begin[forward], begin, count)) & (backward < count)
    sizes = lives.bytes[made].astype(np.float64)
    total = np.bincount(of_block, sizes, len(begin))
    stays = freed > np.minimum(backward[of_block], count - 1)
    kept = np.bincount(of_block[stays], sizes[stays], len(begin))
    trains |= in_time & (kept > _KEPT * np.maximum(total, 1))
    return trains


def following(positions: I64, after: I64, none: int) -> I64:
    """The first of these rising positions behind each other one; `none`: there is none."""
    found: I64 = np.append(positions, none)[np.searchsorted(positions, after, side="right")]
    return found


def timeline(activity: I64, lives: Blocks, before: int, shown: Shown) -> Timeline:
    """Cuts the events from `before` on into runs and intervals."""
    count = len(activity)
    group = np.where(activity == RECOMPUTE, ENGINE, activity)
    cuts = np.flatnonzero(group[before + 1 :] != group[before:-1]) + before + 1
    begin = np.concatenate([[before], cuts])[: count - before].astype(np.int64)
    end = np.append(begin[1:], count)[: len(begin)].astype(np.int64)
    run = np.full(count, -1, np.int64)
    run[before:] = np.repeat(np.arange(len(begin)), end - begin)
    of_run = group[begin]

    trains = _trains(group, lives, run, begin, of_run, shown)
    interval_of_run = np.zeros(len(begin), np.int64)
    kind: list[int] = []
    kept_from: list[int] = []
    open_ = -1
    kinds = {NOTHING: OTHER, FORWARD: EVALUATION, ENGINE: BACKWARD, OPTIMIZER: STEP}
    for number, what in enumerate(of_run.tolist()):
        if what == FORWARD and trains[number] and open_ < 0:
            open_ = len(kind)
            kind.append(TRAINING)
            kept_from.append(count)
        if what == ENGINE and open_ >= 0:
            kept_from[open_] = int(begin[number])
        if what in (ENGINE, OPTIMIZER):
            open_ = -1
        if open_ >= 0:
            interval_of_run[number] = open_
            continue
        interval_of_run[number] = len(kind)
        kind.append(kinds[what])
        kept_from.append(count)
    interval = np.where(run >= 0, np.append(interval_of_run, -1)[run], -1)
    return Timeline(
        activity,
        run,
        interval,
        begin,
        end,
        of_run,
        np.array(kind, np.uint8),
        np.array(kept_from, np.int64),
        interval_of_run,
    )
