"""One rank of a job in numbers: small enough that one process holds thousands of ranks.

A digest has the rank's peak, its steps, who held the memory at the peak, the findings and the ledger.
`dataset.py` stores it as it is: each field is a column, and each tuple a list.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from pytracer.analysis.allocator import blocks, ledger
from pytracer.analysis.answers import breakdown, findings, training_steps
from pytracer.analysis.facts import grouping, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.data import meta
from pytracer.data.meta import ClockReading, Communication
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORIES, CATEGORY, CATEGORY_ORDER, I64, ROLE, Mask

_MOST_HOLDERS = 100  # further ones are added up, by category
_MOST_OF_CATEGORY = 8
_OWNER_KEYS = ("category", "module", "op", "line")


class Step(NamedTuple):
    """A training step of the rank."""

    peak: int
    growth: int
    duration_ns: int  # 0 where the run was imagined
    forward_ns: int  # the device's time on CUDA, if it was measured; else the host's
    by_category: Mapping[str, int]  # at the step's peak, without zeros


class Holder(NamedTuple):
    """Bytes of one category, module, op and line at one moment; "" where unknown."""

    category: str
    module: str
    op: str
    line: str
    bytes: int


class Note(NamedTuple):
    """A finding, in the words of `analysis/answers/findings.py`."""

    kind: str
    bytes: int
    module: str
    line: str
    evidence: str
    change: str


class Amount(NamedTuple):
    """A row of the ledger (`analysis/allocator/ledger.py`)."""

    name: str
    bytes: int


class Share(NamedTuple):
    """What a rank has of the parameters that are sharded in one way."""

    how: str  # "Shard(0) over fsdp=4"
    local_bytes: int
    global_bytes: int


class GroupState(NamedTuple):
    """A process group of the rank, with its last collectives."""

    name: str
    description: str  # "mesh_shard"
    ranks: tuple[int, ...]
    enqueued: int
    completed: int
    operation: str  # of the last one


class Entered(NamedTuple):
    """The last collective of a group in a step, and when this rank began it, by its own clock."""

    group: str
    step: int
    sequence: int
    unix_ns: int


@dataclass(frozen=True)
class Digest:
    """One rank. The sizes of a file that cannot be read are 0, and `status` says so."""

    rank: int
    world_size: int = 1
    status: str = "whole"  # "truncated", "damaged", "out of memory", "failed", "unreadable"
    error: str = ""  # the exception that ended it
    file: str = ""
    host: str = ""
    device: str = ""
    program: str = ""
    began_unix_ns: int = 0
    ended_unix_ns: int = 0
    first_step: int = 0
    peak: int = 0
    peak_step: int | None = None
    peak_phase: str = ""
    last_phase: str = ""
    reserved: int | None = None  # at the peak
    gathered: int = 0  # the most bytes of weights that were put together from all ranks' shards
    growth_per_step: int | None = None
    part: str = ""  # equal for ranks that hold the same part of the model
    wrappers: tuple[str, ...] = ()
    problem: str = ""
    at_peak: Mapping[str, int] = field(default_factory=dict)  # by category, without zeros
    own_peak: Mapping[str, int] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    holders: tuple[Holder, ...] = ()  # at the peak
    own_holders: tuple[Holder, ...] = ()  # of each category at its own peak, the largest
    notes: tuple[Note, ...] = ()
    ledger: tuple[Amount, ...] = ()
    shares: tuple[Share, ...] = ()
    groups: tuple[GroupState, ...] = ()
    entered: tuple[Entered, ...] = ()
    clock_readings: tuple[ClockReading, ...] = ()

    @property
    def is_readable(self) -> bool:
        """Whether there are figures to compare."""
        return self.status != "unreadable"


# ---------------------------------------------------------------- from a trace


def of(trace: Trace, rank: int | None = None, file: str = "") -> Digest:
    """The digest of a rank's trace. `rank` is for traces that do not say which rank they are."""
    facts = meta.of(trace)
    peak = usage.peak(trace)
    alive = usage.alive(trace)
    rows = training_steps.step_rows(trace)
    categories = breakdown.category_rows(trace)
    gathered = allocations(trace).role == ROLE["unsharded"]
    gathered &= allocations(trace).category == CATEGORY["weights"]
    end = usage.moment(trace, len(trace.events.ticks) - 1, peak.device)
    return Digest(
        rank=facts.rank if rank is None else rank,
        world_size=facts.world_size,
        status=_status(trace),
        file=file,
        host=facts.host,
        device=peak.device,
        program=PurePath(facts.command.split()[0]).name if facts.command else "",
        error=facts.ended_by,
        began_unix_ns=trace.began_unix_ns,
        ended_unix_ns=trace.began_unix_ns + int(trace.time_ns(usage.last_tick(trace))[0]),
        first_step=facts.first_step,
        peak=peak.bytes,
        peak_step=peak.step,
        peak_phase=peak.phase or "",
        last_phase=end.phase or "",
        reserved=blocks.device_bytes(trace, alive, peak.position, peak.device).reserved,
        gathered=usage.highest_where(trace, gathered & usage.on_device(trace)).bytes,
        growth_per_step=_growth(rows),
        part=_part(trace),
        wrappers=facts.sharding.wrappers,
        at_peak={name: size for name, size in peak.by_category.items() if size},
        own_peak={row.category: row.own_peak for row in categories if row.own_peak},
        steps=tuple(_steps(trace, rows)),
        holders=_holders(trace, alive),
        own_holders=_own_holders(trace),
        notes=tuple(
            Note(each.kind, each.bytes, each.module, each.line, each.evidence, each.change)
            for each in findings.findings(trace)
        ),
        ledger=tuple(
            Amount(row.name, row.bytes)
            for row in ledger.ledger(trace).rows
            if row.bytes is not None
        )
        if peak.device != "cpu"
        else (),
        shares=tuple(Share(*share) for share in facts.sharding.shares),
        groups=tuple(_groups(facts.communication)),
        entered=tuple(_entered(trace, facts.communication, rows)),
        clock_readings=facts.clock_readings,
    )


def _groups(communication: Communication) -> Iterator[GroupState]:
    """Each group's last collectives. NCCL may count one as completed before it counts it begun."""
    for number, group in enumerate(communication.groups):
        own = [
            one
            for one in communication.collectives
            if one.group == number and not one.point_to_point
        ]
        numbers = [one.sequence for one in own]
        completed = group.completed or 0
        enqueued = max([*numbers, group.enqueued or 0, completed])
        operation = own[-1].operation if own else ""
        yield GroupState(group.name, group.description, group.ranks, enqueued, completed, operation)


def _entered(
    trace: Trace, communication: Communication, rows: list[training_steps.StepRow]
) -> Iterator[Entered]:
    ends = np.array([row.end_ns for row in rows], np.int64) + trace.began_unix_ns
    last: dict[tuple[str, int], Entered] = {}
    for one in communication.collectives:
        step = int(np.searchsorted(ends, one.begin_ns))
        if step < len(rows) and not one.point_to_point:
            group = communication.groups[one.group].name
            last[group, step] = Entered(group, step, one.sequence, one.begin_ns)
    yield from last.values()


def _status(trace: Trace) -> str:
    if meta.of(trace).failed:
        return "out of memory"
    if meta.of(trace).ended_by:
        return "failed"
    if trace.losses.get("corrupt_file"):
        return "damaged"
    return "truncated" if trace.losses.get("truncated_file") else "whole"


def _steps(trace: Trace, rows: list[training_steps.StepRow]) -> Iterator[Step]:
    positions = np.array(training_steps.peak_positions(trace), np.int64)
    is_timed = meta.of(trace).imagined is None  # else its times are those of the host that imagined
    for row, levels in zip(rows, _categories_at(trace, positions), strict=True):
        forward = row.forward_ns if row.device_forward_ns is None else row.device_forward_ns
        held = {name: size for name in CATEGORY_ORDER if (size := levels[name])}
        times = (row.end_ns - row.start_ns, forward) if is_timed else (0, 0)
        yield Step(row.peak_bytes, row.growth_bytes, *times, held)


def _categories_at(trace: Trace, positions: I64) -> list[dict[str, int]]:
    """The bytes by category right after each of these events, which are in order."""
    which = usage.on_device(trace)
    category = allocations(trace).category
    at, allocation, amounts = usage.changes_where(trace, which)
    begins = usage.bytes_before(trace, which, category.astype(np.int64), len(CATEGORIES))
    # Changes after the last of the events are in a stretch of their own.
    stretch = np.searchsorted(positions, at, side="left")
    changes = np.zeros((len(positions) + 1, len(CATEGORIES)), np.int64)
    np.add.at(changes, (stretch, category[allocation]), amounts)
    levels = begins + np.cumsum(changes, axis=0)
    return [usage.in_order(level) for level in levels[:-1]]


def _growth(rows: list[training_steps.StepRow]) -> int | None:
    """The growth that goes on after the first step; None if there are too few steps."""
    if len(rows) < 3:
        return None
    return training_steps.steady_growth([row.growth_bytes for row in rows[1:]]).per_step


def _holders(trace: Trace, alive: Mask) -> tuple[Holder, ...]:
    """Who holds the peak: the largest, then what is left of each category."""
    every = _all_holders(trace, alive)
    rest: dict[str, int] = {}
    for held in every[_MOST_HOLDERS:]:
        rest[held.category] = rest.get(held.category, 0) + held.bytes
    others = (Holder(category, "", "", "", size) for category, size in rest.items())
    return (*every[:_MOST_HOLDERS], *others)


def _own_holders(trace: Trace) -> tuple[Holder, ...]:
    """The largest holders of each category, at the category's own peak."""
    alloc, here = allocations(trace), usage.on_device(trace)
    found: list[Holder] = []
    for name in CATEGORY_ORDER:
        of_category = here & (alloc.category == CATEGORY[name])
        if of_category.any():
            there = usage.alive_at(trace, usage.highest_where(trace, of_category).position)
            found += _all_holders(trace, of_category & there)[:_MOST_OF_CATEGORY]
    return tuple(found)


def _all_holders(trace: Trace, which: Mask) -> list[Holder]:
    """The bytes of these allocations by category, module, op and line, the largest first."""
    groups = [grouping.group(trace, key, which) for key in _OWNER_KEYS]
    distinct, of_row = grouping.together(groups)
    size = allocations(trace).requested_bytes[which]
    total = usage.sums(of_row, size, len(distinct))
    holders = []
    for row in np.argsort(-total, kind="stable"):
        category, module, op, line = (
            group.names[code] if code >= 0 else ""
            for group, code in zip(groups, distinct[row], strict=True)
        )
        holders.append(Holder(category, module, op, line, int(total[row])))
    return holders


def _part(trace: Trace) -> str:
    """A short text for the modules that hold weights: ranks with the same modules are alike."""
    alloc = allocations(trace)
    weights = alloc.category == CATEGORY["weights"]
    modules = grouping.group(trace, "module", np.flatnonzero(weights)).names
    return hashlib.blake2b("\n".join(modules).encode(), digest_size=6).hexdigest()
