"""What a comparison of a job's ranks shows: who is missing, who stands out, and where.

Ranks are compared with their like: those that hold the same modules. A rank stands out if it is far
from the typical rank, measured by how far its like are from each other.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pytracer.data.meta import ClockReading
from pytracer.data.schema import CATEGORY_ORDER
from pytracer.ranks import clocks
from pytracer.ranks.digest import Digest, GroupState, Holder

_SHARE = 0.02  # of the typical peak: smaller differences of sizes are no news
_TIME_SHARE = 0.2  # of the typical time
_OFTEN = 0.75
_LATE_SHARE = 0.05  # of a step
_SIGMAS = 6
_SIGMA_OF_MEDIAN = 1.4826  # a normal distribution's deviation over its median deviation
TIMES = ("step", "forward")
_CUT = ("truncated", "damaged")


class Spread(NamedTuple):
    """A figure over all ranks that have it."""

    name: str  # "peak", a category, "reserved", "step", "forward"
    lowest: int
    median: int
    highest: int
    ranks: tuple[int, ...]  # that have the highest
    of: int  # how many have a figure


class Outlier(NamedTuple):
    """A rank far from its like."""

    rank: int
    name: str  # of the figure, as in Spread; or "growth" per step
    value: int
    typical: int
    since_step: int | None  # the first step that shows it
    holder: Holder | None  # where most of the difference is; its bytes are the difference


class Shared(NamedTuple):
    """A finding that some ranks have."""

    kind: str
    line: str
    module: str
    bytes: int  # of the rank that has most
    ranks: tuple[int, ...]
    change: str


class Part(NamedTuple):
    """Ranks that hold the same modules."""

    ranks: tuple[int, ...]
    median_peak: int


class ShareRow(NamedTuple):
    """What each rank has of the parameters that are spread in one way."""

    how: str
    global_bytes: int
    lowest: int
    highest: int

    @property
    def part(self) -> float:
        """The largest share of one rank; 1.0 if each has all."""
        return self.highest / self.global_bytes if self.global_bytes else 1.0


class Late(NamedTuple):
    """A rank for which its group waits: the last to begin a collective, in most steps."""

    rank: int
    group: str
    wait_ns: int  # from the last but one to begin until it does; the median over steps
    steps: int  # in which it was the last
    of: int


class Stuck(NamedTuple):
    """A collective that some ranks of a group have begun and others never did."""

    group: str
    operation: str
    sequence: int
    waiting: tuple[int, ...]
    absent: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """A job in one look."""

    digests: tuple[Digest, ...]
    world_size: int
    missing: tuple[int, ...]
    spreads: tuple[Spread, ...]
    parts: tuple[Part, ...]
    outliers: tuple[Outlier, ...]
    findings: tuple[Shared, ...]
    shares: tuple[ShareRow, ...]
    behind: Mapping[int, int]  # ranks that made fewer steps than the others: how many
    late: tuple[Late, ...]
    stuck: tuple[Stuck, ...]
    clocks: Mapping[str, clocks.Offset]  # by host, relative to the first rank's

    @property
    def readable(self) -> tuple[Digest, ...]:
        """The ranks with figures."""
        return tuple(one for one in self.digests if one.is_readable)

    @property
    def worst(self) -> Digest:
        """The rank with the highest peak; among equals the first."""
        return max(self.readable or self.digests, key=lambda one: (one.peak, -one.rank))

    @property
    def typical(self) -> Digest:
        """The rank whose peak is nearest to the median of those that hold the same as the worst."""
        like = [one for one in self.readable if one.part == self.worst.part]
        middle = lower_median([one.peak for one in like])
        return min(like, key=lambda one: (abs(one.peak - middle), one.rank))

    @property
    def steps(self) -> int:
        """The most steps that a rank made."""
        return max((len(one.steps) for one in self.digests), default=0)


def compare(digests: Sequence[Digest]) -> Comparison:
    """Compares the ranks of one job."""
    readable = [one for one in digests if one.is_readable]
    present = {one.rank for one in digests}
    # A snapshot of torch's does not say how many ranks there were.
    size = max((one.world_size for one in readable), default=1)
    size = max(size, *(one.rank + 1 for one in readable), 1)
    parts = _parts(readable)
    between = _clocks(readable)
    most = max((len(one.steps) for one in readable), default=0)
    return Comparison(
        tuple(digests),
        size,
        tuple(rank for rank in range(size) if rank not in present),
        tuple(_spreads(readable)),
        tuple(Part(tuple(o.rank for o in p), lower_median([o.peak for o in p])) for p in parts),
        tuple(sorted(_outliers(_ended(parts)), key=_importance)),
        tuple(_findings(readable)),
        tuple(_shares(readable)),
        {one.rank: len(one.steps) for one in readable if len(one.steps) < most},
        tuple(_late(readable, between)),
        tuple(_stuck(readable)),
        between,
    )


def _clocks(digests: Sequence[Digest]) -> dict[str, clocks.Offset]:
    """Each host's offset; of its ranks one has readings. Processes of one host share its clock."""
    hosts: dict[str, list[ClockReading]] = {}
    for one in digests:
        hosts.setdefault(one.host, []).extend(one.clock_readings)
    return clocks.offsets(hosts, digests[0].host) if digests else {}


def lower_median(values: Sequence[int]) -> int:
    """The middle value; of two the lower, so that it is always some rank's own."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0


def _parts(digests: Sequence[Digest]) -> list[list[Digest]]:
    parts: dict[str, list[Digest]] = {}
    for one in digests:
        parts.setdefault(one.part, []).append(one)
    return list(parts.values())


# ---------------------------------------------------------------- figures


def figure(one: Digest, name: str) -> int | None:
    """The rank's figure of that name; None if it has none."""
    if name == "peak":
        return one.peak
    if name == "reserved":
        return one.reserved
    if name == "gathered":
        return one.gathered
    if name == "growth":
        return one.growth_per_step
    if name in TIMES:
        # The first step makes the optimizer's state and loads kernels.
        steps = one.steps[1:] or one.steps
        times = [step.duration_ns if name == "step" else step.forward_ns for step in steps]
        return lower_median(times) if any(times) else None
    return one.own_peak.get(name, 0)


def _spreads(digests: Sequence[Digest]) -> Iterator[Spread]:
    for name in ("peak", CATEGORY_ORDER[0], "gathered", *CATEGORY_ORDER[1:], "reserved", *TIMES):
        known = [(value, one.rank) for one in digests if (value := figure(one, name)) is not None]
        values = [value for value, _ in known]
        top = max(values, default=0)
        if values and (top or name == "unknown"):
            ranks = tuple(rank for value, rank in known if value == top)
            yield Spread(name, min(values), lower_median(values), top, ranks, len(values))


# ---------------------------------------------------------------- outliers


def _importance(one: Outlier) -> tuple[bool, int]:
    """Bytes come before times, and large differences before small ones."""
    return one.name in TIMES, -abs(one.value - one.typical)


def _ended(parts: Sequence[Sequence[Digest]]) -> list[list[Digest]]:
    """The ranks whose files end well: the blocks that a cut file leaves alive have no free."""
    return [[one for one in like if one.status not in _CUT] for like in parts]


def _outliers(parts: Sequence[Sequence[Digest]]) -> Iterator[Outlier]:
    for like in parts:
        found = [one for name in CATEGORY_ORDER for one in _far(like, name)]
        yield from found
        explained = {one.rank for one in found}
        for name in ("peak", "reserved"):
            yield from (one for one in _far(like, name) if one.rank not in explained)
        leaks = {one.rank for one in like if any(note.kind == "growth" for note in one.notes)}
        yield from (one for one in _far(like, "growth") if one.rank not in leaks)
        for name in TIMES:
            yield from _far(like, name)


def _far(like: Sequence[Digest], name: str) -> Iterator[Outlier]:
    """The ranks whose figure is far from that of their like; of two ranks the higher."""
    known = [(one, value) for one in like if (value := figure(one, name)) is not None]
    if len(known) < 2:
        return
    values = np.array([value for _, value in known], np.float64)
    middle = lower_median([value for _, value in known])
    spread = _SIGMA_OF_MEDIAN * float(np.median(np.abs(values - middle)))
    if len(known) == 2:
        spread = 0.0
    limit = max(_SIGMAS * spread, _least(like, name, middle))
    typical = min(known, key=lambda each: (abs(each[1] - middle), each[0].rank))[0]
    for one, value in known:
        if abs(value - middle) > limit and (len(known) > 2 or value > middle):
            sized = name in CATEGORY_ORDER or name == "peak"
            yield Outlier(
                one.rank,
                name,
                value,
                middle,
                _since(one, typical, name, limit) if sized else None,
                _where(one, typical, name) if sized else None,
            )


def _least(like: Sequence[Digest], name: str, middle: int) -> float:
    """The smallest difference that is worth a line."""
    if name in TIMES:
        return _TIME_SHARE * middle
    peak = lower_median([one.peak for one in like])
    return _SHARE * peak if name != "growth" else _SHARE * peak / 10


def _since(one: Digest, typical: Digest, name: str, limit: float) -> int | None:
    """The first step in which the rank is far from the typical one."""
    for number, (step, other) in enumerate(zip(one.steps, typical.steps, strict=False)):
        mine, theirs = (
            each.peak if name == "peak" else each.by_category.get(name, 0) for each in (step, other)
        )
        if abs(mine - theirs) > limit:
            return number
    return None


def _where(one: Digest, typical: Digest, name: str) -> Holder | None:
    """The module, op and line with the most of the difference. A category's are at its own peak."""
    mine, theirs = (_held(each, name) for each in (one, typical))
    sign = 1 if (figure(one, name) or 0) > (figure(typical, name) or 0) else -1
    change = {key: sign * (mine.get(key, 0) - theirs.get(key, 0)) for key in {**mine, **theirs}}
    key = max(change, key=lambda key: (change[key], key), default=None)
    return None if key is None or change[key] <= 0 else Holder(*key, sign * change[key])


def _held(one: Digest, name: str) -> dict[tuple[str, str, str, str], int]:
    if name == "peak":
        return {held[:4]: held.bytes for held in one.holders}
    return {held[:4]: held.bytes for held in one.own_holders if held.category == name}


# ---------------------------------------------------------------- collectives


def _late(digests: Sequence[Digest], between: Mapping[str, clocks.Offset]) -> Iterator[Late]:
    """The ranks that are last in three of four collectives at least, and by how much."""
    began: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for one in digests:
        lead = between[one.host].ns
        for each in one.entered[1:]:  # the first step makes the optimizer's state
            began.setdefault((each.group, each.sequence), []).append(
                (each.unix_ns - lead, one.rank)
            )
    gaps: dict[str, list[tuple[int, int]]] = {}
    for (group, _), times in began.items():
        if len(times) > 1:
            times.sort()
            gaps.setdefault(group, []).append((times[-1][1], times[-1][0] - times[-2][0]))
    doubt = max((offset.uncertainty_ns or 0 for offset in between.values()), default=0)
    duration = lower_median([figure(one, "step") or 0 for one in digests])
    for group, rows in gaps.items():
        last = Counter(rank for rank, _ in rows)
        rank, count = last.most_common(1)[0]
        wait = lower_median([gap for each, gap in rows if each == rank])
        is_often = count >= max(_OFTEN * len(rows), 2)
        if is_often and wait > max(_LATE_SHARE * duration, 2 * doubt):
            yield Late(rank, group, wait, count, len(rows))


def _stuck(digests: Sequence[Digest]) -> Iterator[Stuck]:
    """What ranks waited for as the job died. The file of a killed rank does not tell its last ones."""
    if all(one.status == "whole" for one in digests):
        return
    groups: dict[tuple[str, tuple[int, ...]], dict[int, GroupState]] = {}
    for one in digests:
        if one.status in ("whole", "failed", "out of memory"):
            for group in one.groups:
                groups.setdefault((group.name, group.ranks), {})[one.rank] = group
    for states in groups.values():
        most = max(states.values(), key=lambda each: each.enqueued)
        absent = [rank for rank, each in states.items() if each.enqueued < most.enqueued]
        waiting = [rank for rank, each in states.items() if each.completed < each.enqueued]
        waiting = [rank for rank in waiting if rank not in absent]
        if waiting and absent:
            title = most.description or most.name
            yield Stuck(title, most.operation, most.enqueued, tuple(waiting), tuple(absent))


# ---------------------------------------------------------------- findings, shares


def _findings(digests: Sequence[Digest]) -> list[Shared]:
    """One row per kind and place, those of fewer ranks first: they explain why ranks differ."""
    rows: dict[tuple[str, str, str], list[tuple[int, int, str]]] = {}
    for one in digests:
        for note in one.notes:
            key = (note.kind, note.line, note.module)
            rows.setdefault(key, []).append((note.bytes, one.rank, note.change))
    shared = [
        Shared(*key, max(each)[0], tuple(sorted({rank for _, rank, _ in each})), max(each)[2])
        for key, each in rows.items()
    ]
    return sorted(shared, key=lambda one: (len(one.ranks), -one.bytes))


def _shares(digests: Sequence[Digest]) -> Iterator[ShareRow]:
    rows: dict[str, list[tuple[int, int]]] = {}
    for one in digests:
        for share in one.shares:
            rows.setdefault(share.how, []).append((share.local_bytes, share.global_bytes))
    for how, each in rows.items():
        local = [local for local, _ in each]
        yield ShareRow(how, max(whole for _, whole in each), min(local), max(local))


def ranks_text(ranks: Sequence[int], most: int = 6) -> str:
    """Ranks as people write them: "0-3, 7"; of many ranges the first ones."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more
