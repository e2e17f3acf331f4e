"""A device's events as the steps that the allocator's model takes (`csrc/core/allocator_replay.h`).

The events leave three questions open. This module decides them so:

- Blocks from before the trace come first, by address.
- If segments were given back while memory was not short, then `empty_cache()` did it, or the end of
  a CUDA graph's pool. The replay does so at the same step, under all settings.
- A request that failed in the recording is tried at its step. The later requests are unknown.

With the recorded settings there are also steps for what the driver did: the segments that it gave
and their addresses, those that were there before, and its refusals.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer import errors
from pytracer.analysis.allocator import segments, settings as allocator_settings
from pytracer.analysis.allocator.blocks import ROUND, SMALL
from pytracer.analysis.allocator.segments import GROWS, SHRINKS
from pytracer.analysis.allocator.settings import Settings
from pytracer.analysis.facts import devices, lifetimes, usage
from pytracer.data import meta
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import ACTION, I64, Mask

ALLOC, FREE_REQUESTED, FREE_COMPLETED, ATTEMPT, TRIM, HELD, SEED, GIVEN, REFUSED = range(9)
# Of kinds at one event. A block that ended unseen ends before the block that begins there.
_RANK = np.array([5, 0, 1, 6, 2, 0, 0, 4, 3])
_BEFORE = -1  # the position of what was there before the trace
_SHORT = 0.95  # of the limit: a request that goes beyond it may have been refused


@dataclass(frozen=True)
class Steps:
    """The steps of a device, in order."""

    device: str
    columns: dict[str, Any]
    position: I64  # rows of the event table; -1: before the trace
    late_bytes: int  # alive when the trace began

    def until(self, end: int) -> "Steps":
        """The steps before that one."""
        return self._at(np.arange(len(self.position)) < end)

    def without(self, kind: int) -> "Steps":
        """The steps of all other kinds."""
        return self._at(self.columns["kind"] != kind)

    def _at(self, which: Mask) -> "Steps":
        columns = {
            name: values if name == "lanes" else values[which]
            for name, values in self.columns.items()
        }
        return replace(self, columns=columns, position=self.position[which])


def steps(trace: Trace, device: str) -> Steps:
    """The device's steps, for any settings.

    Raises:
        errors.UsageError: it is not a CUDA device, or the trace has no allocation on it.
    """
    by_device = _by_device(trace)
    if device not in by_device:
        here = usage.devices(trace)
        also = f"; it has {', '.join(here)}" if here else ""
        if device == "cpu" and here:
            raise errors.UsageError(
                "fits and replay model CUDA's allocator, but this trace is of the CPU: record on a GPU, "
                "or imagine one and read that trace: pytracer imagine --on RTX4090 --keep traces train.py"
            )
        raise errors.UsageError(f"the trace has no allocation on {device}{also}")
    return by_device[device].plain


def recorded_steps(trace: Trace, device: str) -> Steps | None:
    """The steps with what the driver did; None if the trace does not show it."""
    return _by_device(trace)[device].recorded


def recorded_settings(trace: Trace, device: str) -> str:
    """The recorded PYTORCH_ALLOC_CONF, with expandable segments if the events show them."""
    text = meta.of(trace).alloc_conf
    if devices.expandable(trace, device) and "expandable_segments" not in text:
        text = f"{text},expandable_segments:True".lstrip(",")
    return text


@once_per_trace
def _by_device(trace: Trace) -> "dict[str, _Device]":
    return {name: _Device(trace, name) for name in usage.devices(trace) if name != "cpu"}


@dataclass(frozen=True)
class _Rows:
    """Steps; the columns are equally long."""

    kind: NDArray[Any]
    position: NDArray[Any]
    block: NDArray[Any]
    bytes: NDArray[Any]
    lane: NDArray[Any]
    address: NDArray[Any]

    def at(self, order: NDArray[Any]) -> "_Rows":
        return _Rows(*(getattr(self, each.name)[order] for each in fields(self)))


def _together(*parts: _Rows) -> _Rows:
    return _Rows(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(_Rows)))


class _Device:
    """A device's events, from which its steps are joined."""

    def __init__(self, trace: Trace, device: str) -> None:
        self.trace, self.device = trace, device
        self.lives, self.events = lifetimes.lifetimes(trace), trace.events
        self.own = np.flatnonzero(devices.on(trace, device, self.lives.place))
        self.here = devices.on(trace, device, self.events.place)
        self.lanes, self._lane_of_place = _lanes(trace, device)
        seeds = self.own[self.lives.start[self.own] < 0]
        self.seeds = seeds[np.argsort(self.lives.address[seeds], kind="stable")]

    @cached_property
    def plain(self) -> Steps:
        return self._sorted(self._of_blocks(ALLOC, _BEFORE, self.seeds), self._later)

    @cached_property
    def recorded(self) -> Steps | None:
        changes = segments.changes(self.trace, self.device)
        is_real = meta.of(self.trace).imagined is None and self._settings is not None
        if not is_real or not len(changes.row):
            return None
        before = self._before(changes.row[changes.is_seed])
        if before is None:
            return None
        action = self.events.action[changes.row]
        grows = np.isin(action, [ACTION[name] for name in GROWS])
        given = self._of_events(GIVEN, changes.row[grows])
        refused = self._of_bursts(REFUSED, self._bursts.refused)
        return self._sorted(before, self._later, given, refused)

    @cached_property
    def _later(self) -> _Rows:
        """The steps in the trace, under any settings."""
        lives, own = self.lives, self.own
        made, asked = own[lives.start[own] >= 0], own[lives.end[own] >= 0]
        done = own[lives.completed[own] >= 0]
        failures = np.flatnonzero(self.here & (self.events.action == ACTION["oom"]))
        return _together(
            self._of_blocks(FREE_REQUESTED, lives.end[asked], asked),
            self._of_blocks(FREE_COMPLETED, lives.completed[done], done),
            self._of_blocks(ALLOC, lives.start[made], made),
            self._of_events(ATTEMPT, failures),
            self._of_bursts(TRIM, self._bursts.trims),
        )

    # ------------------------------------------------------------ rows

    def _of_blocks(self, kind: int, position: Any, block: NDArray[Any]) -> _Rows:
        lives, count = self.lives, len(block)
        lane = self._lane(lives.place[block])
        position = np.broadcast_to(position, count)
        return _Rows(
            np.full(count, kind), position, block, lives.bytes[block], lane, lives.address[block]
        )

    def _of_events(self, kind: int, rows: NDArray[Any], position: Any = None) -> _Rows:
        """Steps that are about no allocation. Each has a number beyond those of allocations."""
        events, count = self.events, len(rows)
        position = rows if position is None else np.broadcast_to(position, count)
        block, lane = len(self.lives.start) + rows, self._lane(events.place[rows])
        return _Rows(
            np.full(count, kind), position, block, events.bytes[rows], lane, events.address[rows]
        )

    def _of_bursts(self, kind: int, bursts: Sequence[tuple[int, int]]) -> _Rows:
        rows = np.array([row for row, _ in bursts], np.intp)
        steps = self._of_events(kind, rows)
        return replace(steps, lane=np.array([lane for _, lane in bursts], np.intp))

    def _lane(self, place: NDArray[Any]) -> NDArray[np.intp]:
        last = len(self._lane_of_place) - 1  # a damaged trace may lack some places
        lanes: NDArray[np.intp] = self._lane_of_place[np.minimum(place, last)]
        return lanes

    def _sorted(self, *parts: _Rows) -> Steps:
        rows = _together(*parts)
        rows = rows.at(np.lexsort((_RANK[rows.kind], rows.position)))  # stable
        columns = {
            "kind": rows.kind.astype(np.uint8),
            "block": rows.block.astype(np.uint32),
            "bytes": rows.bytes.astype(np.uint64),
            "lane": rows.lane.astype(np.uint32),
            "lanes": self.lanes,
        }
        if np.isin(rows.kind, (HELD, GIVEN)).any():
            columns["address"] = rows.address.astype(np.uint64)
        late = int(self.lives.bytes[self.seeds].sum())
        return Steps(self.device, columns, rows.position.astype(np.int64), late)

    # ------------------------------------------------------------ before the trace

    def _before(self, rows: NDArray[np.intp]) -> _Rows | None:
        """The segments from before, and the blocks in them, by address.

        None if the sizes of the blocks do not follow from the next block or the segment's end: where
        settings cut or round otherwise, or segments are missing.
        """
        events, lives, seeds = self.events, self.lives, self.seeds
        rows = rows[np.argsort(events.address[rows], kind="stable")]
        held = self._of_events(HELD, rows, _BEFORE)
        if not len(seeds):
            return held
        start, end = events.address[rows], events.address[rows] + events.bytes[rows]
        of = np.searchsorted(start, lives.address[seeds], "right").astype(np.intp) - 1
        if (of < 0).any() or not self._cuts_as_usual:
            return None
        blocks = self._of_blocks(SEED, _BEFORE, seeds)
        following = np.append(blocks.address[1:], np.iinfo(np.uint64).max)
        room = (np.minimum(following, end[of]) - blocks.address).astype(np.int64)
        needed = np.maximum(-(-blocks.bytes.astype(np.int64) // ROUND) * ROUND, ROUND)
        # A rest of at most 1 MiB stays with a large block.
        keeps_rest = (needed > SMALL) & (room >= needed) & (room <= needed + SMALL)
        blocks = replace(blocks, bytes=np.where(keeps_rest, room, needed))
        both = _together(held, blocks)
        return both.at(np.argsort(both.address, kind="stable"))  # a segment before its first block

    @cached_property
    def _settings(self) -> Settings | None:
        return allocator_settings.parsed(recorded_settings(self.trace, self.device))

    @property
    def _cuts_as_usual(self) -> bool:
        chosen, usual = self._settings, Settings()
        return (
            chosen is not None
            and not chosen.expandable_segments
            and chosen.max_split_size == usual.max_split_size
            and chosen.roundup_divisions == usual.roundup_divisions
        )

    # ------------------------------------------------------------ segments given back

    @cached_property
    def _bursts(self) -> "_Bursts":
        """The places where the program gave cached memory back, and where the driver had none."""
        events = self.events
        found = _Bursts()
        acts = np.flatnonzero(self.here & (events.action < ACTION["label"]))
        back = np.isin(events.action[acts], [ACTION[name] for name in SHRINKS])
        reserved = _reserved_before(self.trace, acts)
        starts = np.flatnonzero(back & ~np.concatenate([[False], back[:-1]]))
        for start in starts.tolist():
            stop = start
            while stop < len(acts) and back[stop]:
                stop += 1
            places = events.place[acts[start:stop]]
            made_room = stop < len(acts) and self._makes_room(int(acts[stop]), int(reserved[start]))
            lanes = {self.lanes[lane][1]: lane for lane in self._lane(places).tolist()}
            if not made_room:
                # Private pools first; pool 0 trims all.
                pools = sorted(lanes, reverse=True)
                found.trims.extend((int(acts[start]), lanes[pool]) for pool in pools)
            elif self._limit is None:
                found.refused.append((int(acts[start]), next(iter(lanes.values()))))
        return found

    def _makes_room(self, row: int, reserved: int) -> bool:
        """Whether segments were given back for the event there: memory was short."""
        action = int(self.events.action[row])
        if action == ACTION["oom"]:
            return True
        if action not in [ACTION[name] for name in GROWS]:
            return False
        bound = self._limit or devices.counted(self.trace, self.device, "limit_bytes")
        needed = reserved + int(self.events.bytes[row])
        collects = "garbage_collection_threshold" in recorded_settings(self.trace, self.device)
        return collects or (bound is not None and needed > _SHORT * bound)

    @cached_property
    def _limit(self) -> int | None:
        return devices.allowed(self.trace, self.device)


@dataclass(frozen=True)
class _Bursts:
    """Rows of events, each with a lane."""

    trims: list[tuple[int, int]] = field(default_factory=list)
    refused: list[tuple[int, int]] = field(default_factory=list)


def _lanes(trace: Trace, device: str) -> tuple[list[tuple[int, int]], NDArray[np.intp]]:
    """Each lane's stream and pool number (0: the default pool), and the lane of each place."""
    places = trace.places
    there = np.flatnonzero(devices.places_on(trace, device))
    pools = {(0, 0): 0}
    lanes: dict[tuple[int, int], int] = {}
    lane_of_place = np.zeros(len(places.stream), np.intp)
    for place in there.tolist():
        name = (int(places.pool_high[place]), int(places.pool_low[place]))
        pool = pools.setdefault(name, len(pools))
        key = (int(places.stream[place]), pool)
        lane_of_place[place] = lanes.setdefault(key, len(lanes))
    return list(lanes), lane_of_place


def _reserved_before(trace: Trace, rows: NDArray[np.intp]) -> I64:
    """The bytes that the allocator held before each of these events of one device."""
    action, size = trace.events.action[rows], trace.events.bytes[rows].astype(np.int64)
    grows = np.isin(action, [ACTION[name] for name in (*GROWS, "seed_segment")])
    shrinks = np.isin(action, [ACTION[name] for name in SHRINKS])
    change = np.where(grows, size, np.where(shrinks, -size, 0))
    before: I64 = np.cumsum(change) - change
    return before
