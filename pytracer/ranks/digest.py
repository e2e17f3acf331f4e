"""One rank of a job in numbers: small enough that one process holds thousands of ranks.

A digest has the rank's peak, its steps, who held the memory at the peak, the findings and the ledger.
Its rows are those of the Parquet dataset (`dataset.py`); `of_rows` is the way back.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from pytracer import meta
from pytracer.analysis.allocator import blocks, ledger
from pytracer.analysis.answers import breakdown, findings, training_steps
from pytracer.analysis.facts import grouping, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.meta import ClockReading, Communication
from pytracer.recorded import Trace
from pytracer.schema import CATEGORIES, CATEGORY, CATEGORY_ORDER, I64, ROLE, Mask

FORMAT = 1  # of the rows
_MOST_HOLDERS = 100  # further ones are added up, by category
_MOST_OF_CATEGORY = 8
_OWNER_KEYS = ("category", "module", "op", "line")


def ranges_text(ranks: Iterable[int]) -> str:
    """Ranks in as few ranges as possible: "0-3,8-56:8" (every eighth from 8 to 56)."""
    texts: list[str] = []
    left = sorted(ranks)
    while left:
        step = left[1] - left[0] if len(left) > 1 else 1
        count = next((n for n in range(1, len(left)) if left[n] - left[n - 1] != step), len(left))
        last = left[count - 1]
        if count == 1:
            texts.append(str(left[0]))
        else:
            texts.append(f"{left[0]}-{last}" + (f":{step}" if step > 1 else ""))
        left = left[count:]
    return ",".join(texts)


def ranks_of(text: str) -> Iterator[int]:
    """The ranks in `ranges_text`."""
    for part in filter(None, text.split(",")):
        ends, _, step = part.partition(":")
        first, _, last = ends.partition("-")
        yield from range(int(first), int(last or first) + 1, int(step or 1))


class Row(NamedTuple):
    """A row of the dataset. What it says of depends on `fact`; see docs/ranks.md."""

    # "rank", "step", "category", "own_peak", "owner", "own_owner", "finding", "ledger", "sharded",
    # "group", "entered", "clock"
    fact: str
    name: str = ""
    step: int | None = None
    category: str = ""
    module: str = ""
    op: str = ""
    line: str = ""
    bytes: int | None = None
    ns: int | None = None
    text: str = ""


class Step(NamedTuple):
    """A training step of the rank."""

    peak: int
    growth: int
    duration_ns: int
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
    ledger: tuple[tuple[str, int], ...] = ()
    shares: tuple[Share, ...] = ()
    groups: tuple[GroupState, ...] = ()
    entered: tuple[Entered, ...] = ()
    clock_readings: tuple[ClockReading, ...] = ()

    @property
    def is_readable(self) -> bool:
        """Whether there are figures to compare."""
        return self.status != "unreadable"

    def rows(self) -> Iterator[Row]:
        """The digest as rows."""
        yield from self._facts()
        for number, step in enumerate(self.steps):
            yield Row("step", "peak", number, bytes=step.peak, ns=step.duration_ns)
            yield Row("step", "forward", number, ns=step.forward_ns)
            yield Row("step", "growth", number, bytes=step.growth)
            for category, size in step.by_category.items():
                yield Row("step", "category", number, category, bytes=size)
        for category, size in self.at_peak.items():
            yield Row("category", category=category, bytes=size)
        for category, size in self.own_peak.items():
            yield Row("own_peak", category=category, bytes=size)
        for held in self.holders:
            yield Row("owner", "", self.peak_step, *held[:4], held.bytes)
        for held in self.own_holders:
            yield Row("own_owner", "", None, *held[:4], held.bytes)
        for note in self.notes:
            yield Row(
                "finding",
                note.kind,
                None,
                "",
                note.module,
                "",
                note.line,
                note.bytes,
                text=f"{note.evidence}\n{note.change}",
            )
        for name, size in self.ledger:
            yield Row("ledger", name, bytes=size)
        for share in self.shares:
            yield Row("sharded", "local", bytes=share.local_bytes, text=share.how)
            yield Row("sharded", "global", bytes=share.global_bytes, text=share.how)
        yield from self._communication()

    def _communication(self) -> Iterator[Row]:
        for group in self.groups:
            ranks = ranges_text(group.ranks)
            yield Row("group", group.name, op=group.operation, text=group.description, line=ranks)
            yield Row("group", group.name, op="enqueued", bytes=group.enqueued)
            yield Row("group", group.name, op="completed", bytes=group.completed)
        for one in self.entered:
            yield Row("entered", one.group, one.step, bytes=one.sequence, ns=one.unix_ns)
        for reading in self.clock_readings:
            took = reading.after_ns - reading.before_ns
            yield Row("clock", bytes=reading.number, ns=reading.before_ns, text=str(took))

    def _facts(self) -> Iterator[Row]:
        for name in _TEXTS:
            if text := getattr(self, name):
                yield Row("rank", name, text=text)
        for name in _NUMBERS:
            if (number := getattr(self, name)) is not None:
                yield Row("rank", name, bytes=number)
        for name in self.wrappers:
            yield Row("rank", "wrapper", text=name)


_TEXTS = (
    "status",
    "error",
    "file",
    "host",
    "device",
    "program",
    "peak_phase",
    "last_phase",
    "part",
    "problem",
)
_NUMBERS = (
    "world_size",
    "began_unix_ns",
    "ended_unix_ns",
    "first_step",
    "peak",
    "peak_step",
    "reserved",
    "gathered",
    "growth_per_step",
)


def of_rows(rank: int, rows: Iterable[Row]) -> Digest:
    """The digest that these rows were made of. Rows of an unknown fact are ignored."""
    facts: dict[str, object] = {}
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row.fact, []).append(row)
    for row in parts.get("rank", ()):
        if row.name in _TEXTS:
            facts[row.name] = row.text
        elif row.name in _NUMBERS and row.bytes is not None:
            facts[row.name] = row.bytes
    return Digest(
        rank,
        **facts,  # type: ignore[arg-type]
        wrappers=tuple(row.text for row in parts.get("rank", ()) if row.name == "wrapper"),
        at_peak={row.category: row.bytes or 0 for row in parts.get("category", ())},
        own_peak={row.category: row.bytes or 0 for row in parts.get("own_peak", ())},
        steps=_steps_of_rows(parts.get("step", ())),
        holders=_holders_of_rows(parts.get("owner", ())),
        own_holders=_holders_of_rows(parts.get("own_owner", ())),
        notes=tuple(
            Note(row.name, row.bytes or 0, row.module, row.line, *_two_texts(row.text))
            for row in parts.get("finding", ())
        ),
        ledger=tuple((row.name, row.bytes or 0) for row in parts.get("ledger", ())),
        shares=_shares_of_rows(parts.get("sharded", ())),
        groups=tuple(_groups_of_rows(parts.get("group", ()))),
        entered=tuple(
            Entered(row.name, row.step or 0, row.bytes or 0, row.ns or 0)
            for row in parts.get("entered", ())
        ),
        clock_readings=tuple(
            ClockReading(row.bytes or 0, row.ns or 0, (row.ns or 0) + int(row.text or 0))
            for row in parts.get("clock", ())
        ),
    )


def _groups_of_rows(rows: Iterable[Row]) -> Iterator[GroupState]:
    named: dict[str, list[Row]] = {}
    for row in rows:
        named.setdefault(row.name, []).append(row)
    for name, (first, *figures) in named.items():
        last = {row.op: row.bytes or 0 for row in figures}
        ranks = tuple(ranks_of(first.line))
        counts = (last.get("enqueued", 0), last.get("completed", 0))
        yield GroupState(name, first.text, ranks, *counts, first.op)


def _holders_of_rows(rows: Iterable[Row]) -> tuple[Holder, ...]:
    return tuple(Holder(row.category, row.module, row.op, row.line, row.bytes or 0) for row in rows)


def _two_texts(text: str) -> tuple[str, str]:
    evidence, _, change = text.partition("\n")
    return evidence, change


def _steps_of_rows(rows: Iterable[Row]) -> tuple[Step, ...]:
    steps: dict[int, dict[str, Row]] = {}
    categories: dict[int, dict[str, int]] = {}
    for row in rows:
        number = row.step or 0
        if row.name == "category":
            categories.setdefault(number, {})[row.category] = row.bytes or 0
        else:
            steps.setdefault(number, {})[row.name] = row
    empty = Row("step")
    return tuple(
        Step(
            named.get("peak", empty).bytes or 0,
            named.get("growth", empty).bytes or 0,
            named.get("peak", empty).ns or 0,
            named.get("forward", empty).ns or 0,
            categories.get(number, {}),
        )
        for number, named in sorted(steps.items())
    )


def _shares_of_rows(rows: Iterable[Row]) -> tuple[Share, ...]:
    shares: dict[str, dict[str, int]] = {}
    for row in rows:
        shares.setdefault(row.text, {})[row.name] = row.bytes or 0
    return tuple(
        Share(how, sizes.get("local", 0), sizes.get("global", 0)) for how, sizes in shares.items()
    )


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
            (row.name, row.bytes) for row in ledger.ledger(trace).rows if row.bytes is not None
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
    for row, levels in zip(rows, _categories_at(trace, positions), strict=True):
        forward = row.forward_ns if row.device_forward_ns is None else row.device_forward_ns
        held = {name: size for name in CATEGORY_ORDER if (size := levels[name])}
        yield Step(row.peak_bytes, row.growth_bytes, row.end_ns - row.start_ns, forward, held)


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
    table = np.column_stack([group.codes for group in groups])
    distinct, of_row = np.unique(table, axis=0, return_inverse=True)
    size = allocations(trace).requested_bytes[which]
    total = usage.sums(of_row.reshape(-1), size, len(distinct))
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
