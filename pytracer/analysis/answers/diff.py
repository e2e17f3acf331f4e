"""Compares two runs, two steps of one run, or two ranks.

Addresses and numbers mean nothing beyond their own run. So blocks are compared by purpose and
origin: category, module, op, line and phase. Each side is taken at its own moment, by default its
peak, on the device that it trains on.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from pytracer import errors
from pytracer.analysis.allocator.blocks import device_bytes
from pytracer.analysis.answers import training_steps
from pytracer.analysis.facts import grouping, timelines, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.usage import At
from pytracer.data import frames, meta
from pytracer.data.model_names import Roots
from pytracer.data.recorded import Trace
from pytracer.data.schema import WRAPPER_LEVELS, Mask

if TYPE_CHECKING:
    import pandas as pd

KEYS = ("category", "module", "op", "line", "phase")
Kind = Literal["new", "gone", "grew", "shrank", "same"]
_KINDS: tuple[Kind, ...] = get_args(Kind)

# Bytes and number of blocks, by their common keys.
Rows: TypeAlias = dict[tuple[str, ...], tuple[int, int]]


@dataclass(frozen=True)
class Side:
    """One of the two compared moments."""

    bytes: int
    device: str
    step: int | None
    phase: str | None
    by_category: dict[str, int]
    reserved: int | None  # bytes that the allocator held from the driver; None: unknown


@dataclass(frozen=True)
class Moment:
    """All that a comparison needs of one side, without its trace."""

    side: Side
    rows: Rows
    roots: Roots
    script: str  # the name of the program's file, "" if unknown


@dataclass(frozen=True)
class Row:
    """Blocks that are alike in all keys, on both sides; sizes are bytes."""

    key: tuple[str, ...]  # a text per key, "" if it is unknown
    before: int
    after: int
    change: int
    blocks_before: int
    blocks_after: int

    @property
    def kind(self) -> Kind:
        """The change in one word."""
        if self.blocks_before == 0:
            return "new"
        if self.blocks_after == 0:
            return "gone"
        return "grew" if self.change > 0 else "shrank" if self.change < 0 else "same"


@dataclass(frozen=True)
class Diff:
    """Both sides and every row, the largest change first."""

    keys: tuple[str, ...]
    before: Side
    after: Side
    rows: tuple[Row, ...]
    note: str = ""  # the requested key that could not be compared
    one_run: bool = False  # two steps of one trace: its lines cannot have moved
    scripts: tuple[str, str] = ("", "")  # the names of the programs' files, "" if unknown


def diff(
    before: Trace,
    after: Trace,
    by: str | Sequence[str] = KEYS,
    at: At = "peak",
    steps: tuple[int, int] | None = None,
    names: tuple[str, str] = ("the trace", "the trace"),
) -> Diff:
    """Compares two traces, or two steps: of one trace or of two.

    Args:
        before: the trace to compare with.
        after: the trace that changed; for two steps of one run, the same trace.
        by: the keys that distinguish blocks.
        at: the moment of each trace; with steps, the peak within the step.
        steps: the step of each trace.
        names: names of the traces for the error about a missing step.

    Raises:
        errors.UsageError: a key, a moment or a step does not exist.
    """
    keys = (by,) if isinstance(by, str) else tuple(by)
    if not keys:
        raise errors.UsageError("a diff needs at least one key by which blocks differ")
    note = ""
    if "line" in keys and len(keys) > 1 and _has_lines(before) != _has_lines(after):
        keys = tuple(key for key in keys if key != "line")
        note = "only one of them has Python lines: compared without lines"
    wanted = steps or (None, None)
    positions = (
        _moment(before, at, wanted[0], names[0]),
        _moment(after, at, wanted[1], names[1]),
    )
    old, new = (
        moment(trace, keys, position)
        for trace, position in zip((before, after), positions, strict=True)
    )
    return between(old, new, keys, note=note, one_run=before is after)


def moment(trace: Trace, keys: tuple[str, ...], position: int, which: Mask | None = None) -> Moment:
    """The blocks that are alive at a position, on the device that the trace trains on.

    `which` leaves out others.
    """
    there = usage.alive_at(trace, position) & usage.on_device(trace)
    there = there if which is None else there & which
    rows = _by_key(trace, keys, there)
    return Moment(_side(trace, position, there), rows, meta.of(trace).roots, _script(trace))


def between(
    before: Moment, after: Moment, keys: tuple[str, ...], *, note: str = "", one_run: bool = False
) -> Diff:
    """Compares two moments, whose rows have these keys."""
    first = _comparable(before, keys, after.roots)
    second = _comparable(after, keys, before.roots)
    if "line" in keys:
        first = _with_lines_of(first, second, keys.index("line"))
    rows = []
    for key in {**first, **second}:
        old, new = first.get(key, (0, 0)), second.get(key, (0, 0))
        rows.append(Row(key, old[0], new[0], new[0] - old[0], old[1], new[1]))
    total = after.side.bytes - before.side.bytes
    rows.sort(key=lambda row: by_change(row, total))
    scripts = before.script, after.script
    return Diff(keys, before.side, after.side, tuple(rows), note, one_run, scripts)


def by_change(row: Row, total: int) -> tuple[int, bool, int, tuple[str, ...]]:
    """Sorts rows: the largest change first, among equals those in the direction of the total."""
    return -abs(row.change), row.change * total < 0, -row.after, row.key


def frame(diff: Diff) -> "pd.DataFrame":
    """The rows as a table; unknown keys are NA."""
    columns: dict[str, Any] = {
        name: frames.texts(row.key[i] for row in diff.rows) for i, name in enumerate(diff.keys)
    }
    for name in ("before", "after", "change", "blocks_before", "blocks_after"):
        columns[name] = np.array([getattr(row, name) for row in diff.rows], np.int64)
    codes = np.array([_KINDS.index(row.kind) for row in diff.rows], np.int64)
    columns["kind"] = frames.categorical(codes, _KINDS)
    return frames.of_columns(columns)


def _moment(trace: Trace, at: At, step: int | None, name: str) -> int:
    """The position of the event right after which the trace is compared."""
    if step is None:
        return usage.position_of(trace, at)
    if at != "peak":
        raise errors.UsageError(f"at={at!r}: steps are compared at their peaks")
    positions, levels, at_start = usage.levels_of(trace)
    of_position = timelines.timeline(trace).step_at(trace.events.ticks[positions])
    own = np.flatnonzero(of_position == step)
    count = len(training_steps.step_rows(trace))
    if not 0 <= step < count or isinstance(step, bool):
        there = f"{count}, from 0" if count else "none"
        raise errors.UsageError(f"there is no step {step}: {name} has {there}")
    before = int(own[0]) - 1 if len(own) else int(np.searchsorted(of_position, step)) - 1
    start = int(levels[before]) if before >= 0 else at_start
    if len(own) == 0 or levels[own].max() <= start:
        return int(positions[before]) if before >= 0 else usage.BEFORE
    return int(positions[own[levels[own].argmax()]])


def _side(trace: Trace, position: int, there: Mask) -> Side:
    device = usage.main_device(trace)
    moment = usage.moment(trace, position, device)
    in_a_step = moment.step is not None and moment.step < len(training_steps.step_rows(trace))
    step = moment.step if in_a_step else None  # None: after the last step
    by_category = usage.in_order(usage.bytes_by_category(trace, there))
    reserved = device_bytes(trace, there, position, device).reserved
    return Side(sum(by_category.values()), device, step, moment.phase, by_category, reserved)


def _script(trace: Trace) -> str:
    """The name of the program's file, without folders."""
    words = meta.of(trace).command.split()
    return PurePath(words[0]).name if words else ""


def _has_lines(trace: Trace) -> bool:
    return bool(allocations(trace).line.any())


def _by_key(trace: Trace, keys: tuple[str, ...], which: Mask) -> Rows:
    """Bytes and blocks per key."""
    groups = [grouping.group(trace, key, which) for key in keys]
    distinct, row = grouping.together(groups)
    total = usage.sums(row, allocations(trace).requested_bytes[which], len(distinct))
    count = np.bincount(row, minlength=len(distinct))
    names = [group.names for group in groups]

    def key_of(codes: list[int]) -> tuple[str, ...]:
        pairs = zip(names, codes, strict=True)
        return tuple(text[code] if code >= 0 else "" for text, code in pairs)

    amounts = zip(total.tolist(), count.tolist(), strict=True)
    return _summed(zip(map(key_of, distinct.tolist()), amounts, strict=True))


def _comparable(moment: Moment, keys: tuple[str, ...], others: Roots) -> Rows:
    """The rows without the parts of names that differ between runs. `others`: models there."""
    new: list[dict[str, str]] = []
    for at, key in enumerate(keys):
        names = list(dict.fromkeys(row[at] for row in moment.rows if row[at]))
        shown = comparable(key, names, moment.roots, others)
        new.append({"": "", **dict(zip(names, shown, strict=True))})
    return _summed(
        (tuple(one[text] for one, text in zip(new, row, strict=True)), amount)
        for row, amount in moment.rows.items()
    )


def _summed(rows: Iterable[tuple[tuple[str, ...], tuple[int, int]]]) -> Rows:
    """The rows with those of one key as one."""
    found: Rows = {}
    for key, (size, blocks) in rows:
        size_so_far, blocks_so_far = found.get(key, (0, 0))
        found[key] = size_so_far + size, blocks_so_far + blocks
    return found


def _with_lines_of(rows: Rows, other: Rows, at: int) -> Rows:
    """The rows with their lines named as on the other side.

    A recording without its working directory has absolute paths. Then two lines are the same if
    the longest possible ends of their paths agree, and only one line has this end.
    """
    theirs = {key[at] for key in other}
    ours = {key[at] for key in rows}
    ends: dict[str, list[str]] = {}
    for name in theirs - ours:
        for end in _ends(name):
            ends.setdefault(end, []).append(name)
    renamed = {}
    for name in ours - theirs:
        candidates = next((ends[end] for end in _ends(name) if end in ends), [])
        if len(candidates) == 1 and (name.startswith("/") or candidates[0].startswith("/")):
            renamed[name] = candidates[0]
    return _summed(
        ((*key[:at], renamed.get(key[at], key[at]), *key[at + 1 :]), amount)
        for key, amount in rows.items()
    )


def _ends(path: str) -> list[str]:
    """The path, then the path without its first folder, without its first two, and so on."""
    parts = path.strip("/").split("/")
    return ["/".join(parts[i:]) for i in range(len(parts))]


def comparable(key: str, names: list[str], own: Roots, others: Roots) -> list[str]:
    """The names without the parts that differ between runs, such as wrappers of modules.

    If only the other side has several models, the paths get the class of its model of this name, or
    else of its first.
    """
    if key == "module":
        parts = [[p for p in name.split(".") if p not in WRAPPER_LEVELS] for name in names]
        # DistributedDataParallel calls its wrapped module "module".
        if parts and all(path[:1] == ["module"] for path in parts):
            parts = [path[1:] for path in parts]
        paths = [".".join(path) for path in parts]
        if own.several or not others.several:
            return paths
        same = next((name for name in own.models if name in others.models), others.models[0])
        return [path if own.has(path) else others.whole(path, same) for path in paths]
    return names
