"""Replays a trace's requests and frees in torch's CUDA caching allocator, with other settings.

`csrc/core/allocator_replay.h` is the allocator. This module turns events into its steps, and its
figures into answers: how much it reserves, which request fails first, and who holds memory then.

The events leave three questions open. This module decides them so:

- Blocks from before the trace come first, by address. If the recording began late, the gaps between
  those blocks are unknown, and a note says so.
- If segments were given back while memory was not short, then `empty_cache()` did it, or the end of
  a CUDA graph's pool. The replay does so at the same step, under all settings.
- A request that failed in the recording is tried at its step. The later requests are unknown.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pytracer import errors, frames, meta
from pytracer._native import core
from pytracer.analysis.allocator import settings as allocator_settings
from pytracer.analysis.allocator.segments import GROWS, SHRINKS
from pytracer.analysis.allocator.settings import MIB, Settings
from pytracer.analysis.facts import devices, grouping, lifetimes, owners, usage
from pytracer.recorded import Trace, once_per_trace
from pytracer.schema import ACTION, I64, Mask
from pytracer.units import parse_size

if TYPE_CHECKING:
    import pandas as pd

_ALLOC, _FREE_REQUESTED, _FREE_COMPLETED, _ATTEMPT, _TRIM = range(5)
LIMIT_STEP = 2 * MIB  # the precision of the smallest limit


@dataclass(frozen=True)
class Steps:
    """A device's events as the allocator's model takes them."""

    device: str
    columns: dict[str, Any]
    position: I64  # rows of the event table; -1: before the trace
    late_bytes: int  # alive when the trace began


@dataclass(frozen=True)
class FailedRequest:
    """The first request that the allocator could not serve. Sizes are bytes."""

    bytes: int  # the block it needed
    time_ns: int | None  # None: it was alive before the trace
    step: int | None
    phase: str
    module: str
    op: str
    line: str
    reserved: int
    allocated: int
    free: int  # reserved, and in no block in use
    largest_free: int  # the largest free block of the request's stream and pool
    by_category: dict[str, int]  # the live bytes of each category


@dataclass(frozen=True)
class Replay:
    """The outcome of a replay. Sizes are bytes."""

    device: str
    settings: str
    limit: int | None  # the bytes that the allocator may hold
    peak_reserved: int
    peak_allocated: int
    fragmentation: int  # reserved and not in use, when most was reserved
    retries: int
    failed: FailedRequest | None
    notes: tuple[str, ...]  # why the answer is not exact
    _trace: Trace
    _rules: dict[str, Any]

    def __bool__(self) -> bool:
        """Whether the program runs to the end."""
        return self.failed is None

    def __repr__(self) -> str:
        """The main fields, without the trace."""
        fields = ("device", "settings", "limit", "peak_reserved", "peak_allocated", "retries")
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in fields)
        return f"<Replay {shown}, {'runs' if self else 'fails'}>"

    def alive_at_failure(self) -> Mask:
        """Which allocations were alive when the first request failed."""
        own_steps = steps(self._trace, self.device)
        at = core.replay(own_steps.columns, self._rules, False)["failed_step"]
        return _alive_before(self._trace, own_steps, max(at, 0))

    @cached_property
    def smallest_limit(self) -> int:
        """The smallest limit that runs to the end with these settings, to 2 MiB."""
        return _smallest(steps(self._trace, self.device), self._rules, "limit")

    @cached_property
    def smallest_room(self) -> int:
        """The least memory that the driver must have for this allocator, to 2 MiB."""
        return _smallest(steps(self._trace, self.device), self._rules, "capacity")

    def timeline(self) -> "pd.DataFrame":
        """Reserved, in use, and the largest free block, after each event; index: time_ns."""
        own_steps = steps(self._trace, self.device)
        curves = core.replay(own_steps.columns, self._rules, True)
        count = len(curves["reserved_after"])
        in_trace = own_steps.position[:count] >= 0
        ticks = self._trace.events.ticks[own_steps.position[:count][in_trace]]
        columns = {
            "reserved": curves["reserved_after"][in_trace].astype(np.int64),
            "active": curves["active_after"][in_trace].astype(np.int64),
            "largest_free": curves["largest_free_after"][in_trace].astype(np.int64),
        }
        columns["unused"] = columns["reserved"] - columns["active"]
        return frames.of_columns(columns, index=("time_ns", self._trace.time_ns(ticks)))


def replay(
    trace: Trace,
    settings: str | None = None,
    limit: int | str | None = None,
    device: str | None = None,
    capacity: int | None = None,
    *,
    unlimited: bool = False,
) -> Replay:
    """Replays the trace's requests with these settings.

    Args:
        trace: a trace of a CUDA device.
        settings: a value of PYTORCH_ALLOC_CONF; "" is torch's default. By default the recorded one.
        limit: as `set_per_process_memory_fraction` would set it. By default the recorded one.
        device: by default the device that the program trains on.
        capacity: the memory that the driver has for this allocator; by default enough.
        unlimited: the allocator may hold all that the driver has, whatever limit was recorded.

    Raises:
        errors.UsageError: the settings or the device do not exist, or the trace is not of a GPU.
    """
    name = device or usage.main_device(trace)
    own_steps = steps(trace, name)
    chosen = allocator_settings.parse(
        recorded_settings(trace, name) if settings is None else settings
    )
    bound = None if unlimited else _limit(trace, name, chosen, settings is None, limit)
    rules = chosen.rules(bound, capacity)
    counted = core.replay(own_steps.columns, rules, False)
    at_peak = _at_peak(own_steps, rules, counted)
    return Replay(
        device=name,
        settings=chosen.text,
        limit=bound,
        peak_reserved=counted["peak_reserved"],
        peak_allocated=counted["peak_allocated"],
        fragmentation=at_peak,
        retries=counted["retries"],
        failed=_failed(trace, own_steps, counted),
        notes=tuple(notes(trace, name)),
        _trace=trace,
        _rules=rules,
    )


def recorded_settings(trace: Trace, device: str) -> str:
    """The recorded PYTORCH_ALLOC_CONF, with expandable segments if the events show them."""
    text = meta.of(trace).alloc_conf
    if devices.expandable(trace, device) and "expandable_segments" not in text:
        text = f"{text},expandable_segments:True".lstrip(",")
    return text


def counted_as_recorded(
    trace: Trace, device: str, columns: dict[str, Any], limit: int | None = None
) -> dict[str, Any]:
    """What the model counts for these steps, with the recorded settings and that limit."""
    rules = allocator_settings.parse(recorded_settings(trace, device)).rules(limit, None)
    counted: dict[str, Any] = core.replay(columns, rules, False)
    return counted


def _limit(
    trace: Trace, device: str, settings: Settings, as_recorded: bool, limit: int | str | None
) -> int | None:
    if limit is not None:
        return parse_size(limit)
    total = devices.counted(trace, device, "limit_bytes")
    if settings.memory_fraction < 1 and total is not None and not as_recorded:
        return int(settings.memory_fraction * total)
    return devices.allowed(trace, device)


# ---------------------------------------------------------------- the steps


def steps(trace: Trace, device: str) -> Steps:
    """The device's events as steps.

    Raises:
        errors.UsageError: it is not a CUDA device, or the trace has no allocation on it.
    """
    by_device = _steps_by_device(trace)
    if device not in by_device:
        here = usage.devices(trace)
        also = f"; it has {', '.join(here)}" if here else ""
        if device == "cpu" and here:
            raise errors.UsageError(
                "fits and replay model CUDA's allocator, but this trace is of the CPU: record on a GPU, "
                "or imagine one: pytracer imagine --on RTX4090 train.py"
            )
        raise errors.UsageError(f"the trace has no allocation on {device}{also}")
    return by_device[device]


@once_per_trace
def _steps_by_device(trace: Trace) -> dict[str, Steps]:
    return {name: _steps(trace, name) for name in usage.devices(trace) if name != "cpu"}


def _steps(trace: Trace, device: str) -> Steps:
    lives, events = lifetimes.lifetimes(trace), trace.events
    own = np.flatnonzero(devices.on(trace, device, lives.place))
    lanes, lane_of_place = _lanes(trace, device)
    last = len(lane_of_place) - 1  # a damaged trace may lack some places
    seeds = own[lives.start[own] < 0]
    seeds = seeds[np.argsort(lives.address[seeds], kind="stable")]
    rows = [_Rows(np.full(len(seeds), -1), _ALLOC, seeds)]
    made = own[lives.start[own] >= 0]
    asked = own[lives.end[own] >= 0]
    done = own[lives.completed[own] >= 0]
    rows.append(_Rows(lives.end[asked], _FREE_REQUESTED, asked))
    rows.append(_Rows(lives.completed[done], _FREE_COMPLETED, done))
    rows.append(_Rows(lives.start[made], _ALLOC, made))
    position = np.concatenate([each.position for each in rows])
    kind = np.concatenate([np.full(len(each.position), each.kind) for each in rows])
    block = np.concatenate([each.block for each in rows])
    size, lane = lives.bytes[block], lane_of_place[np.minimum(lives.place[block], last)]
    # Requests that failed, and segments given back while memory was not short.
    here = devices.on(trace, device, events.place)
    failures = np.flatnonzero(here & (events.action == ACTION["oom"]))
    trims, trimmed = _trims(trace, device, here, lanes, lane_of_place)
    more = len(lives.start) + np.arange(len(failures) + len(trims))
    position = np.concatenate([position, failures, trims])
    kind = np.concatenate([kind, np.full(len(failures), _ATTEMPT), np.full(len(trims), _TRIM)])
    size = np.concatenate([size, events.bytes[failures], np.zeros(len(trims), np.uint64)])
    lane = np.concatenate([lane, lane_of_place[np.minimum(events.place[failures], last)], trimmed])
    block = np.concatenate([block, more])
    # A block that ended unseen ends before the block that begins at the same event.
    order = np.lexsort((_RANK[kind], position))
    order = np.concatenate([np.arange(len(seeds)), order[len(seeds) :]])
    columns = {
        "kind": kind[order].astype(np.uint8),
        "block": block[order].astype(np.uint32),
        "bytes": size[order].astype(np.uint64),
        "lane": lane[order].astype(np.uint32),
        "lanes": lanes,
    }
    return Steps(device, columns, position[order].astype(np.int64), int(lives.bytes[seeds].sum()))


@dataclass(frozen=True)
class _Rows:
    position: NDArray[Any]
    kind: int
    block: NDArray[np.intp]


_RANK = np.array([3, 0, 1, 4, 2])  # of kinds at one event


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


def _trims(
    trace: Trace,
    device: str,
    here: Mask,
    lanes: list[tuple[int, int]],
    lane_of_place: NDArray[np.intp],
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The events at which the program gave cached memory back, and a lane of the memory's pool."""
    events = trace.events
    numbers = {
        name: [ACTION[each] for each in each_of]
        for name, each_of in (("back", SHRINKS), ("taken", GROWS))
    }
    acts = np.flatnonzero(here & (events.action < ACTION["label"]))
    back = np.isin(events.action[acts], numbers["back"])
    if not back.any():
        return np.zeros(0, np.intp), np.zeros(0, np.intp)
    bound = devices.allowed(trace, device) or devices.counted(trace, device, "limit_bytes")
    collects = "garbage_collection_threshold" in recorded_settings(trace, device)
    reserved = _reserved_before(trace, acts)
    position, lane = [], []
    starts = np.flatnonzero(back & ~np.concatenate([[False], back[:-1]]))
    for start in starts.tolist():
        stop = start
        while stop < len(acts) and back[stop]:
            stop += 1
        if stop < len(acts):
            action = int(events.action[acts[stop]])
            needed = int(events.bytes[acts[stop]]) if action in numbers["taken"] else 0
            short = bound is not None and int(reserved[start]) + needed > 0.95 * bound
            if action == ACTION["oom"] or (needed and (short or collects)):
                continue  # the allocator itself made room
        of_burst = {
            lanes[lane][1]: lane
            for lane in lane_of_place[
                np.minimum(events.place[acts[start:stop]], len(lane_of_place) - 1)
            ]
        }
        for pool in sorted(of_burst, reverse=True):  # private pools first; pool 0 trims all
            position.append(int(acts[start]))
            lane.append(int(of_burst[pool]))
    return np.array(position, np.intp), np.array(lane, np.intp)


def _reserved_before(trace: Trace, rows: NDArray[np.intp]) -> I64:
    """The bytes that the allocator held before each of these events of one device."""
    action, size = trace.events.action[rows], trace.events.bytes[rows].astype(np.int64)
    grows = np.isin(action, [ACTION[name] for name in (*GROWS, "seed_segment")])
    shrinks = np.isin(action, [ACTION[name] for name in SHRINKS])
    change = np.where(grows, size, np.where(shrinks, -size, 0))
    before: I64 = np.cumsum(change) - change
    return before


# ---------------------------------------------------------------- the answers


def _smallest(steps: Steps, rules: dict[str, Any], bound: str) -> int:
    """The smallest limit or capacity with which the program runs, by bisection."""
    free = {**rules, "limit": 2**64 - 1, "capacity": 2**64 - 1}

    def runs(amount: int) -> bool:
        tried = core.replay(steps.columns, {**free, bound: amount}, False)
        return bool(tried["failed_step"] < 0)

    counted = core.replay(steps.columns, free, False)
    high: int = -(-counted["peak_reserved"] // LIMIT_STEP) * LIMIT_STEP
    low: int = counted["peak_allocated"] // LIMIT_STEP * LIMIT_STEP - LIMIT_STEP
    while low > 0 and runs(low):  # blocks keep a smaller uncut rest if memory is short
        high, low = low, low * 7 // 8 // LIMIT_STEP * LIMIT_STEP
    while high - low > LIMIT_STEP:
        middle = (low + high) // 2 // LIMIT_STEP * LIMIT_STEP
        low, high = (low, middle) if runs(middle) else (middle, high)
    return high


def _at_peak(steps: Steps, rules: dict[str, Any], counted: dict[str, Any]) -> int:
    """The bytes reserved and not in use when most was reserved."""
    at = counted["peak_reserved_step"]
    if at < 0:
        return 0
    head = {name: steps.columns[name][: at + 1] for name in ("kind", "block", "bytes", "lane")}
    there = core.replay({**steps.columns, **head}, rules, False)
    return int(there["reserved"] - there["active"])


def _failed(trace: Trace, steps: Steps, counted: dict[str, Any]) -> FailedRequest | None:
    at = counted["failed_step"]
    if at < 0:
        return None
    position = int(steps.position[at])
    place = owners.place_of(trace, int(trace.events.scope[position]) if position >= 0 else 0)
    moment = usage.moment(trace, max(position, 0), steps.device)
    by_category = dict.fromkeys(moment.by_category, 0)
    for row in grouping.holders(trace, "category", _alive_before(trace, steps, at)):
        by_category[row.name] = row.bytes
    return FailedRequest(
        bytes=counted["failed_bytes"],
        time_ns=moment.time_ns if position >= 0 else None,
        step=moment.step if position >= 0 else None,
        phase=(moment.phase or "") if position >= 0 else "",
        module=place.module,
        op=place.op,
        line=place.line,
        reserved=counted["reserved"],
        allocated=counted["allocated"],
        free=counted["reserved"] - counted["active"],
        largest_free=counted["largest_free_of_lane"],
        by_category=by_category,
    )


def _alive_before(trace: Trace, steps: Steps, at: int) -> Mask:
    """Which allocations were alive just before that step."""
    kind, block = steps.columns["kind"][:at], steps.columns["block"][:at]
    alive = np.zeros(len(lifetimes.lifetimes(trace).start), np.bool_)
    alive[block[kind == _ALLOC]] = True
    alive[block[kind == _FREE_COMPLETED]] = False
    return alive


def notes(trace: Trace, device: str) -> list[str]:
    """Why a replay is not exact; empty for the CPU, which is not replayed."""
    if device == "cpu":
        return []
    own_steps, texts = steps(trace, device), []
    if own_steps.late_bytes:
        texts.append(
            "The recording began late, so blocks alive then are placed without gaps. To be exact, "
            "start it before the model is on the GPU."
        )
    failures = np.flatnonzero(trace.events.action == ACTION["oom"])
    if len(failures):
        texts.append("The recording ends where a request failed; the later requests are unknown.")
    if trace.losses.get("lost_alloc"):
        texts.append("Some allocations did not fit into the recording; record fewer steps.")
    return texts
