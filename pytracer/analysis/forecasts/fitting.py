"""Makes a program fit: tries changes that need no edit, and orders them by their cost in time.

Each candidate is imagined under the changes that `pytracer run --apply` would make. So what is
promised is what would run. Changes that cost no time come first. Then the checkpoints of a plan,
which a replay has proposed for the program with those.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace as changed
from typing import NamedTuple

from pytracer import errors
from pytracer.analysis.allocator import replay
from pytracer.analysis.facts import grouping, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.forecasts import checkpoint_plans, fits
from pytracer.analysis.forecasts.checkpoint_plans import CheckpointPlan
from pytracer.analysis.forecasts.fits import Fits
from pytracer.analysis.forecasts.shown import Shown
from pytracer.data import meta
from pytracer.data.changes import Changes
from pytracer.data.model_names import module_text
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORY, PHASE

_SHOWN = Shown(str, str)  # nobody prints the answers in between
_MOST_PLANS = 5  # checkpoint plans that are imagined
_PARTS = (2, 4, 8)  # of a batch
# Where the host is the limit, a forward that runs again costs at most so much more than the card says:
# its share of a step is larger there, and each tensor that a checkpoint makes again calls hooks.
_ON_HOST = 3.3
_TRAINER = "transformers.Trainer"
# What changes numbers, by the names of `--allow`.
ALLOWED = {
    "8bit": Changes(optimizer="8bit"),
    "bf16": Changes(bf16=True),
    "lora": Changes(lora=16),
}
_STAYS = ("weights", "gradients", "optimizer_state", "inputs", "functional", "workspaces")


@dataclass(frozen=True)
class Tried:
    """A program under some changes. Sizes are bytes."""

    changes: Changes
    peak: int  # of the requested bytes
    reserved: int  # by torch's allocator, at most
    needs: int  # a card on which it surely runs
    time_ratio: float  # a step's time at least, over that of the program as it is
    time_at_most: float  # the same on other hosts
    fits: bool
    verdict: str
    code: str = ""  # to paste instead
    flushes: bool = False  # the allocator gives its cache back in later steps, which takes time

    @property
    def fits_well(self) -> bool:
        """Whether it fits, and no step waits for the allocator."""
        return self.fits and not self.flushes


class Stays(NamedTuple):
    """What a category holds at the peak, and the module with the largest part of that."""

    category: str
    bytes: int
    module: str
    of_module: int


@dataclass(frozen=True)
class Found:
    """What was tried, and the best of it: it is true if that surely fits."""

    card: int
    tried: tuple[Tried, ...]  # the program as it is comes first
    chosen: Tried
    problems: tuple[str, ...] = ()  # of candidates that could not be imagined
    stays: tuple[Stays, ...] = ()  # what the best does not move, the largest first, if none fits
    how: str = "imagined"  # or replayed
    room: int = 0  # of the card, for torch's allocator

    def __bool__(self) -> bool:
        """Whether the chosen candidate fits."""
        return self.chosen.fits

    @property
    def frontier(self) -> list[Tried]:
        """The candidates that no other beats in time, memory and bits, the quickest first."""
        left = [one for one in self.tried if not any(_beats(other, one) for other in self.tried)]
        return sorted(left, key=_by_time)


_BITS = ("equal", "rounded", "changed")


def _beats(one: Tried, other: Tried) -> bool:
    pairs = [
        (one.time_ratio, other.time_ratio),
        (one.time_at_most, other.time_at_most),
        (one.needs, other.needs),
        (_BITS.index(one.changes.bits), _BITS.index(other.changes.bits)),
        (one.flushes, other.flushes),
    ]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


@dataclass(frozen=True)
class Wanted:
    """What the user asks for beside fitting."""

    minimise: bool = False  # the smallest peak, and not only one that fits
    keep_time: float = float("inf")  # the most that a step may take, over what it takes now
    allow: tuple[str, ...] = ()  # of ALLOWED: tried last


Imagine = Callable[[Changes], tuple[Trace | None, str]]  # the trace, or why there is none


def search(imagine: Imagine, first: Trace, card: int, wanted: Wanted) -> Found:
    """Tries candidates until one fits; for the smallest peak all of them."""
    tries = _Tries(imagine, card, first)
    free = Changes()
    if tries.wants_more(wanted):
        for one in _free(first, tries.last):
            now = tries.add(one, 1.0)
            if now is not None and _helps(now, tries.tried[0]):
                free = _both(free, one)
        if free not in tries.changes:
            tries.add(free, 1.0)
    base = tries.traces.get(free, first)
    if tries.wants_more(wanted):
        for changes, ratio, code in _plans(base, tries, free, wanted):
            tries.add(changes, ratio, code)
    if _TRAINER in meta.of(first).frameworks:
        for parts in _PARTS:
            if tries.wants_more(wanted):
                tries.add(changed(free, micro_batches=parts), 1.0)
    _try_allowed(tries, free, wanted)
    return tries.found(wanted)


def _try_allowed(tries: "_Tries", free: Changes, wanted: Wanted) -> None:
    """Tries what changes numbers: each alone, those that help together, and then with checkpoints."""
    before = tries.of(free)
    for name in wanted.allow:
        if tries.wants_more(wanted):
            now = tries.add(_both(tries.of(free).changes, ALLOWED[name]), 1.0)
            free = now.changes if now is not None and _helps(now, tries.of(free)) else free
    if before.changes != free and tries.wants_more(wanted):
        for changes, ratio, code in _plans(tries.traces[free], tries, free, wanted):
            tries.add(changes, ratio * tries.of(free).time_ratio, code)


class _Tries:
    """The candidates so far."""

    def __init__(self, imagine: Imagine, card: int, first: Trace) -> None:
        self._imagine, self.card = imagine, card
        self.traces: dict[Changes, Trace] = {Changes(): first}
        self.last = _fits(first, card)
        self.tried = [_tried(Changes(), first, self.last, (1.0, 1.0))]
        self.problems: list[str] = []

    @property
    def changes(self) -> list[Changes]:
        return [one.changes for one in self.tried]

    def of(self, changes: Changes) -> Tried:
        """What was tried with these changes; the program as it is if that could not be imagined."""
        return next((one for one in self.tried if one.changes == changes), self.tried[0])

    def wants_more(self, wanted: Wanted) -> bool:
        return wanted.minimise or not any(one.fits_well for one in self.tried)

    def add(self, changes: Changes, ratio: float, code: str = "") -> Tried | None:
        """Imagines a candidate, unless that was done; None if it cannot be imagined.

        The ratio of the times is used where the imagined runs have none.
        """
        if changes in self.changes:
            return self.tried[self.changes.index(changes)]
        trace, problem = self._imagine(changes)
        if trace is None:
            self.problems.append(problem)
            return None
        self.traces[changes] = trace
        self.last = _fits(trace, self.card)
        times = _times(self.traces[Changes()], trace) or _of_any_host(changes, ratio)
        self.tried.append(_tried(changes, trace, self.last, times, code))
        return self.tried[-1]

    def found(self, wanted: Wanted) -> Found:
        best = _best(self.tried, wanted)
        stays = () if best.fits else tuple(_stays(self.traces[best.changes], best.changes))
        room = fits_room(self.traces[Changes()], self.card)
        problems = tuple(self.problems)
        return Found(self.card, tuple(self.tried), best, problems, stays, room=room)


def with_rank(found: Found, rank: int, trace: Trace | None, problem: str) -> Found:
    """The same, if another rank also fits under the chosen changes; otherwise it does not fit."""
    fits = None if trace is None else _fits(trace, found.card)
    if fits:
        return found
    why = problem or f"rank {rank} needs another plan"
    chosen = changed(found.chosen, fits=False, verdict=replay.PERHAPS)
    return changed(found, chosen=chosen, problems=(*found.problems, why))


def _best(tried: Sequence[Tried], wanted: Wanted) -> Tried:
    quick = [one for one in tried if one.time_ratio <= wanted.keep_time]
    fitting = [one for one in quick if one.fits]
    if wanted.minimise or not fitting:
        return min(fitting or quick, key=lambda one: (one.needs, one.time_ratio))
    return min(fitting, key=_by_time)


def _by_time(one: Tried) -> tuple[bool, bool, float, float, bool, int, int]:
    """Sorts candidates: the quickest first, then those that keep all bits, then by few changes.

    Those that change numbers come last.

    A candidate that is quicker than the program as it is has no advantage from that.
    """
    count = sum(bool(each) for each in vars(one.changes).values())
    return (
        one.changes.changes_numbers,
        one.flushes,
        max(one.time_ratio, 1.0),
        max(one.time_at_most, 1.0),
        not one.changes.is_bit_equal,
        count,
        one.needs,
    )


def _times(first: Trace, trace: Trace) -> tuple[float, float] | None:
    """The least and the most ratio of the steps' times on the same host and card, if they are known."""
    before, after = (_step_ns(one) for one in (first, trace))
    if not before or len(before) != len(after):
        return None
    ratios = [a / b for a, b in zip(after, before, strict=True)]
    return min(ratios), max(ratios)


def _step_ns(trace: Trace) -> tuple[int, ...]:
    imagined = meta.of(trace).imagined
    return () if imagined is None else imagined.step_ns


def _of_any_host(changes: Changes, ratio: float) -> tuple[float, float]:
    """From a ratio for the card alone."""
    return ratio, max(1 + _ON_HOST * (ratio - 1), changes.micro_batches)


def _tried(
    changes: Changes, trace: Trace, fits: Fits, times: tuple[float, float], code: str = ""
) -> Tried:
    reserved = fits.reserved[1]
    return Tried(
        changes,
        usage.peak(trace).bytes,
        reserved,
        fits.surely_needs,
        *times,
        bool(fits),
        fits.verdict,
        code,
        flushes=bool(fits) and fits.flushes,
    )


def _helps(one: Tried, now: Tried) -> bool:
    return one.needs < now.needs


def _both(one: Changes, other: Changes) -> Changes:
    given = {name: value for name, value in vars(other).items() if value}
    return changed(one, **given)


# ---------------------------------------------------------------- changes that cost no time


def _free(first: Trace, fits: Fits) -> Iterator[Changes]:
    """Changes that may help this program, each alone."""
    trace = first
    best = next((one for one in fits.choices if fits.surely_runs(one)), None)
    best = best or min(fits.choices, key=lambda one: one.smallest_room, default=None)
    if best is not None and not best.as_recorded and fits.settings_known:
        yield Changes(settings=best.settings)
    if _in_phase(trace, "temporaries", "optimizer"):
        yield Changes(optimizer="fused")
    if _in_phase(trace, "gradients", "backward") and _gradients_stay(trace):
        yield Changes(set_to_none=True)
    if meta.of(trace).ddp_buckets:
        yield Changes(bucket_views=True)


def _in_phase(trace: Trace, category: str, phase: str) -> bool:
    alloc = allocations(trace)
    of_it = (alloc.category == CATEGORY[category]) & (alloc.phase == PHASE[phase])
    return bool((of_it & usage.on_device(trace)).any())


def _gradients_stay(trace: Trace) -> bool:
    """Whether gradients are in use while the forward has its most bytes."""
    alloc = allocations(trace)
    made = usage.on_device(trace) & (alloc.phase == PHASE["forward"])
    at = usage.highest_where(trace, made).position
    by_category = usage.bytes_by_category(trace, usage.alive_at(trace, at))
    return bool(by_category[CATEGORY["gradients"]])


# ---------------------------------------------------------------- checkpoints


def _plans(
    base: Trace, tries: _Tries, free: Changes, wanted: Wanted
) -> Iterator[tuple[Changes, float, str]]:
    """Plans by their cost, the cheapest that a replay shows to fit first, until one fits.

    If that fits, the next cheaper ones follow, because a replay may see too much.
    """
    plan = _checkpoint_plan(base, fits_room(base, tries.card), tries.problems)
    if plan is None:
        return
    steps = [one for one in plan.frontier if one.modules and one.time_ratio <= wanted.keep_time]
    if not steps:
        return

    def candidate(at: int) -> tuple[Changes, float, str]:
        names = tuple(module_text(name) for name in steps[at].modules)
        code = checkpoint_plans.code_of(steps[at].modules, plan.roots)
        return changed(free, checkpoint=names), steps[at].time_ratio, code

    at = next((i for i, one in enumerate(steps) if one == plan.chosen), len(steps) - 1)
    if wanted.minimise:
        at = min(range(len(steps)), key=lambda i: steps[i].peak_reserved or steps[i].peak)
    step, left = 0, _MOST_PLANS
    while 0 <= at < len(steps) and left:
        left -= 1
        yield candidate(at)
        if wanted.minimise:
            return
        does_fit = tries.tried[-1].fits_well
        if step and does_fit == (step > 0):
            return  # the cheapest that fits lies between the last two
        step = -1 if does_fit else 1
        at += step


def _checkpoint_plan(base: Trace, room: int, problems: list[str]) -> CheckpointPlan | None:
    device = usage.main_device(base)
    try:
        return checkpoint_plans.plan(base, room, 0, device, _SHOWN)
    except errors.UsageError as problem:  # no module can be checkpointed
        problems.append(str(problem))
        return None


def _fits(trace: Trace, card: int) -> Fits:
    return fits.fits(trace, card, None, None, _SHOWN)


def fits_room(base: Trace, card: int) -> int:
    """What the card has for torch's allocator, for sure."""
    fits = _fits(base, card)
    return max(card - max(fits.beside, fits.beside_at_most), 0)


def _stays(trace: Trace, changes: Changes) -> list[Stays]:
    """What the categories hold at the peak that no change here can move: all, if none moves any."""
    alive, category = usage.alive(trace), allocations(trace).category
    moves = changes.checkpoint or changes.micro_batches
    found = []
    for name in _STAYS if moves else CATEGORY:
        which = alive & (category == CATEGORY[name])
        modules = grouping.holders(trace, "module", which) if which.any() else []
        total = sum(row.bytes for row in modules)
        if total:
            most = max(modules, key=lambda row: row.bytes)
            found.append(Stays(name, total, most.name, most.bytes))
    return sorted(found, key=lambda one: -one.bytes)


# ---------------------------------------------------------------- without a program


def by_replay(trace: Trace, card: int, wanted: Wanted) -> Found:
    """The settings and the checkpoints that a replay of this trace shows, each for itself."""
    fits = _fits(trace, card)
    room = fits_room(trace, card)
    now = _tried(Changes(), trace, fits, (1.0, 1.0))
    tried = [now]
    for one in fits.choices:
        if not one.as_recorded and fits.settings_known:
            needs = fits.beside + one.smallest_room + fits.more
            runs = fits.surely_runs(one)
            verdict = replay.YES if runs else replay.NO
            changes = Changes(settings=one.settings)
            held = (now.peak, one.peak_reserved, needs)
            tried.append(Tried(changes, *held, 1.0, 1.0, runs, verdict))
    problems: list[str] = []
    plan = _checkpoint_plan(trace, 0 if wanted.minimise else room, problems)
    if plan is not None:
        tried += _replayed_plans(plan, room, card)
    best = _best(tried, wanted)
    stays = () if best.fits else tuple(_stays(trace, best.changes))
    return Found(card, tuple(tried), best, tuple(problems), stays, "replayed", room)


def _replayed_plans(plan: CheckpointPlan, room: int, card: int) -> Iterator[Tried]:
    """The frontier. Only of the chosen plan it was tried where segments may lie."""
    most = plan.reserved[1] if plan.reserved is not None and plan.is_known else None
    for one in plan.frontier:
        if not one.modules or one.peak_reserved is None:
            continue
        is_sure = one == plan.chosen and (bool(plan) or (most is not None and most <= room))
        may_fit = one.peak_reserved <= room
        verdict = replay.YES if is_sure else replay.PERHAPS if may_fit else replay.NO
        changes = Changes(checkpoint=tuple(map(module_text, one.modules)))
        yield Tried(
            changes,
            one.peak,
            one.peak_reserved,
            max(one.peak_reserved, most or 0 if is_sure else 0) + card - room,
            *_of_any_host(changes, one.time_ratio),
            is_sure,
            verdict,
            checkpoint_plans.code_of(one.modules, plan.roots),
        )
