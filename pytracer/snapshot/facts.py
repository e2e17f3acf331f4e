"""What the rules look at: columns with one row per block of a snapshot."""

from functools import cached_property

import numpy as np

from pytracer.data.schema import CATEGORY, I64, U32, Mask
from pytracer.snapshot import stacks, timeline as timelines
from pytracer.snapshot.rows import Rows, numbered
from pytracer.snapshot.stacks import NOTHING, OPTIMIZER, Shown
from pytracer.snapshot.timeline import TRAINING, Doing


class Facts:
    """Columns with one row per block, and what has been decided so far."""

    def __init__(self, events: Rows, parents: U32, shown: Shown, doing: Doing, before: int) -> None:
        lives = timelines.blocks(events)
        line = timelines.timeline(doing.activity, lives, before, shown)
        self.events, self.shown, self.lives, self.line = events, shown, lives, line
        self.parents, self.own, self.steps = parents, doing.own, doing.steps
        self.count = count = len(events)
        self.category = np.zeros(len(lives), np.uint8)
        self.evidence = np.full(len(lives), "", object)
        self.doubtful = np.zeros(len(lives), np.bool_)
        self.old = lives.made < before
        self.forever = lives.freed >= count
        self.signs: U32 = shown.signs[lives.stack]
        self.free_signs: U32 = shown.signs[lives.free_stack]
        by_frame = (self.free_signs & stacks.CLEARS) != 0
        self.frees_tell = bool(lives.free_stack[~self.forever].any())
        self.cleared: Mask = ~self.forever & (
            by_frame | np.append(doing.clears, False)[lives.freed]
        )
        self.interval: I64 = line.interval[lives.made]
        self.freed_interval: I64 = np.append(line.interval, -1)[lives.freed]
        self.kind = line.kinds(lives.made)
        self.freed_kind = line.kinds(lives.freed)
        self.activity: I64 = line.activity[lives.made]
        # Of a block from before, its stack alone shows what the program was doing.
        by_stack = self.old & (lives.stack != 0)
        self.activity[by_stack] = shown.activity[lives.stack[by_stack]]
        self.run: I64 = line.run[lives.made]
        kept = np.append(line.kept_from, count)[self.interval]
        # The history ends within the interval that made it.
        ends_within = not doing.over[-1:].any()
        last = line.interval_of_run[-1:].sum()
        self.unfinished: Mask = ~self.old & (self.interval == last) & ends_within
        self.outlives_forward: Mask = (
            (self.kind == TRAINING) & (lives.freed > kept) & (kept < count)
        )

    def choose(self, where: Mask, category: str, evidence: str) -> None:
        """Decides for these blocks, unless it is decided already. "unknown" is a decision, too."""
        open_ = where & (self.category == 0) & ~self.doubtful
        if category == "unknown":
            self.doubtful |= open_
            return
        self.category[open_] = CATEGORY[category]
        self.evidence[open_] = evidence

    def signed(self, signs: int) -> Mask:
        """Blocks whose stack has one of these signs."""
        found: Mask = (self.signs & signs) != 0
        return found

    def alive_at(self, positions: I64) -> Mask:
        """Whether each block is alive at any of these positions, which rise."""
        found: Mask = self.next(positions, self.lives.made) < self.lives.freed
        return found

    def next(self, positions: I64, after: I64) -> I64:
        """The first of these positions behind each other one; the number of events: none."""
        return timelines.following(positions, after, self.count)

    @property
    def lasting(self) -> Mask:
        """Blocks of no model's call that are alive in two steps, one after the other, or for good."""
        first = self.next(self.steps, self.lives.made)
        second = self.next(self.steps, first)
        through = self.forever | ((second < self.count) & (self.lives.freed > second))
        found: Mask = through & np.isin(self.activity, (NOTHING, OPTIMIZER))
        return found

    @cached_property
    def call(self) -> I64:
        """The call that made each block, as far as Python's frames tell calls apart."""
        found: I64 = self.shown.python[self.lives.stack].astype(np.int64)
        return found

    @cached_property
    def alike(self) -> I64:
        """A number for each stack and size."""
        return numbered(self.lives.stack, self.lives.bytes)

    def is_of(self, category: str) -> Mask:
        """Blocks that this category was decided for."""
        found: Mask = self.category == CATEGORY[category]
        return found
