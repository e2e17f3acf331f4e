"""How much is in use, on which device and when: levels over time, their peak, who is alive then.

A device's memory is its own: every view is of one device, by default of the one that the program
trains on (the CUDA device with the highest peak; the CPU if there is none).
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pytracer import errors
from pytracer.analysis.facts import lifetimes, phases, scopes, timelines
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.devices import device_of_place
from pytracer.data import frames, sanitized
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import (
    CATEGORIES,
    CATEGORY,
    CATEGORY_ORDER,
    I32,
    I64,
    KEYS,
    PHASES,
    U64,
    Mask,
)

if TYPE_CHECKING:
    import pandas as pd

At: TypeAlias = Literal["peak", "end"] | int


BEFORE = -1  # an event position: before the first event


@once_per_trace
def devices(trace: Trace) -> tuple[str, ...]:
    """The devices that allocations were recorded on, the one that matters most first."""
    peaks = _peaks(trace)
    return tuple(sorted(peaks, key=lambda name: (name == "cpu", -peaks[name].bytes, name)))


@once_per_trace
def _peaks(trace: Trace) -> dict[str, "_Level"]:
    """The highest level of each device."""
    place, names = allocations(trace).place, device_of_place(trace)
    used = {str(name) for name in names[np.unique(place)]}
    return {name: highest_where(trace, (names == name)[place]) for name in used}


def main_device(trace: Trace) -> str:
    """The device that views show if the caller names none."""
    names = devices(trace)
    return names[0] if names else "cpu"


def on_device(trace: Trace, device: str | None = None) -> Mask:
    """Per allocation, whether it lies on the device.

    Raises:
        errors.UsageError: nothing was recorded on a device of that name.
    """
    if device is not None and device not in (*devices(trace), main_device(trace)):
        recorded = ", ".join(devices(trace)) or "none"
        raise errors.UsageError(f"nothing was recorded on {device!r}; there is: {recorded}")
    wanted = device_of_place(trace) == (device or main_device(trace))
    result: Mask = wanted[allocations(trace).place]
    return result


@dataclass(frozen=True)
class Peak:
    """The moment at which most bytes were allocated. Sizes are requested bytes."""

    bytes: int
    time_ns: int
    step: int | None  # None: before the first event
    phase: str | None
    by_category: dict[str, int]
    device: str
    position: int  # the event at which it was reached; -1: before the first


@dataclass(frozen=True)
class _Level:
    """A running sum's highest value, and the event at which it was first reached."""

    bytes: int
    position: int


def highest_where(trace: Trace, which: Mask) -> _Level:
    """The most bytes that these allocations had together."""
    positions, levels, at_start = levels_where(trace, which)
    highest = int(levels.argmax()) if len(levels) else -1
    if highest < 0 or levels[highest] <= at_start:
        return _Level(at_start, BEFORE)
    return _Level(int(levels[highest]), int(positions[highest]))


def levels_where(trace: Trace, which: Mask) -> tuple[I32, I64, int]:
    """These allocations' bytes: positions of changes, the level after each, the starting level."""
    positions, _, amounts = changes_where(trace, which)
    at_start = bytes_before_where(trace, which)
    levels = np.cumsum(amounts)
    levels += at_start
    return positions, levels, at_start


def changes_where(trace: Trace, which: Mask) -> tuple[I32, I32, I64]:
    """Positions, allocations and bytes of the changes to these allocations."""
    changes = lifetimes.changes(trace)
    if which.all():
        return changes.position, changes.allocation, changes.bytes
    own = which[changes.allocation]
    return changes.position[own], changes.allocation[own], changes.bytes[own]


def bytes_before_where(trace: Trace, which: Mask) -> int:
    """The bytes that these allocations had together when the trace began."""
    alloc = allocations(trace)
    return int(alloc.requested_bytes[which & (alloc.start < 0)].sum())


def alive(trace: Trace, at: At = "peak", device: str | None = None) -> Mask:
    """Which allocations of the device the allocator counts at that moment."""
    return alive_at(trace, position_of(trace, at, device)) & on_device(trace, device)


def alive_at(trace: Trace, position: int) -> Mask:
    """Which allocations the allocators of all devices count right after the event there."""
    alloc = allocations(trace)
    return (alloc.start <= position) & ((alloc.completed < 0) | (alloc.completed > position))


def position_of(trace: Trace, at: At = "peak", device: str | None = None) -> int:
    """The position of the last event before or at that moment; -1: before the first event.

    Raises:
        errors.UsageError: `at` is not a moment.
    """
    if at == "peak":
        return peak(trace, device).position
    if at == "end":
        return len(trace.events.ticks) - 1
    if isinstance(at, bool) or not isinstance(at, int | np.integer):
        raise _no_moment(at)
    times = trace.time_ns(trace.events.ticks)
    return int(np.searchsorted(times, at, side="right")) - 1


def _no_moment(at: object) -> errors.UsageError:
    several = '; several keys are one list, as in by(["module", "op"])' if at in KEYS else ""
    return errors.UsageError(
        f'at={at!r}: a moment is "peak", "end" or a time in nanoseconds{several}'
    )


def levels_of(trace: Trace, device: str | None = None) -> tuple[I32, I64, int]:
    """The device's bytes: positions of changes, the level after each, the starting level."""
    return levels_where(trace, on_device(trace, device))


def peak(trace: Trace, device: str | None = None) -> Peak:
    """The moment of greatest memory."""
    on_device(trace, device)  # raises if the device is not in the trace
    name = device or main_device(trace)
    level = _peaks(trace).get(name, _Level(0, BEFORE))
    return replace(moment(trace, level.position, name), bytes=level.bytes)


class Highest(NamedTuple):
    """The most bytes on a device, and in which step."""

    device: str
    bytes: int
    step: int


def highest(trace: Trace, device: str) -> Highest:
    """Like `peak`, but without its slow parts: for traces that nobody may ever look at."""
    lives, changes = lifetimes.lifetimes(trace), lifetimes.changes(trace)
    here = (device_of_place(trace) == device)[lives.place]
    own = here[changes.allocation]
    levels = np.cumsum(changes.bytes[own])
    start = int(lives.bytes[here & (lives.start < 0)].sum())
    at = int(levels.argmax()) if len(levels) else 0
    if len(levels) == 0 or levels[at] <= 0:
        return Highest(device, start, 0)
    tick = trace.events.ticks[changes.position[own][at]]
    step = timelines.timeline(trace).step_at(np.array([tick]))[0]
    return Highest(device, start + int(levels[at]), int(step))


def highest_of_all(trace: Trace) -> Highest:
    """Like `highest`, on the main device."""
    used = device_of_place(trace)[np.unique(lifetimes.lifetimes(trace).place)]
    each = [highest(trace, str(name)) for name in sorted(set(used))] or [Highest("cpu", 0, 0)]
    return max(each, key=lambda one: (one.device != "cpu", one.bytes))


def moment(trace: Trace, position: int, device: str) -> Peak:
    """The device's bytes by category, right after the event at that position."""
    there = (device_of_place(trace) == device)[allocations(trace).place]
    there &= alive_at(trace, position)
    time_ns, step, phase = 0, None, None
    if position >= 0:
        at = slice(position, position + 1)
        ticks, scope = trace.events.ticks[at], trace.events.scope[at]
        scope = sanitized.within(scope, len(scopes.tree(trace).kind))
        time_ns = int(trace.time_ns(ticks)[0])
        step = int(timelines.timeline(trace).step_at(ticks)[0])
        phase = PHASES[phases.of_events(trace, ticks, scope)[0]]
    by_category = in_order(bytes_by_category(trace, there))
    return Peak(
        bytes=sum(by_category.values()),
        time_ns=time_ns,
        step=step,
        phase=phase,
        by_category=by_category,
        device=device,
        position=position,
    )


def bytes_by_category(trace: Trace, which: Mask) -> I64:
    """The bytes of these allocations, indexed by the category's number."""
    alloc = allocations(trace)
    return sums(alloc.category[which], alloc.requested_bytes[which], len(CATEGORIES))


def sums(groups: NDArray[Any], values: NDArray[Any], count: int) -> I64:
    """The exact sum of each group; bincount alone would add in floating point."""
    low, high = values & np.uint64(0xFFFFFFFF), values >> np.uint64(32)
    total: I64 = np.bincount(groups, low, count).astype(np.int64)
    if high.any():
        total += np.bincount(groups, high, count).astype(np.int64) << 32
    return total


def in_order(per_category: NDArray[Any]) -> dict[str, int]:
    """The values by category name, in the order in which tables show them."""
    return {name: int(per_category[CATEGORY[name]]) for name in CATEGORY_ORDER}


def timeline(trace: Trace, by: str = "category", device: str | None = None) -> "pd.DataFrame":
    """Bytes after every change, a column per category (or phase, device); index: time_ns.

    Raises:
        errors.UsageError: `by` is none of "category", "phase", "device".
    """
    alloc = allocations(trace)
    if by == "category":
        groups, names = alloc.category.astype(np.int64), list(CATEGORIES)
        shown = list(CATEGORY_ORDER)
    elif by == "phase":
        # Blocks from before the trace have no phase.
        groups = np.minimum(alloc.phase, len(PHASES)).astype(np.int64)
        shown = names = [*PHASES, "before"]
    elif by == "device":
        names = sorted(devices(trace))
        number = {name: i for i, name in enumerate(names)}
        of_place = np.array([number.get(name, 0) for name in device_of_place(trace)])
        groups, shown = of_place[alloc.place], names
    else:
        raise errors.UsageError(f'by={by!r}: a timeline is by "category", "phase" or "device"')
    which = np.ones(len(alloc), np.bool_) if by == "device" else on_device(trace, device)
    positions, levels = level_columns(trace, which, groups, len(names))
    times = trace.time_ns(trace.events.ticks[positions])
    return frames.of_columns(
        {name: levels[names.index(name)] for name in shown}, index=("time_ns", times)
    )


def level_columns(
    trace: Trace, which: Mask, groups: NDArray[Any], count: int
) -> tuple[I32, list[I64]]:
    """The positions at which these allocations change, and each group's bytes after them."""
    positions, allocation, amounts = changes_where(trace, which)
    group_of_change = groups[allocation]
    starts = bytes_before(trace, which, groups, count)
    # If one event has two changes, show only the level after both.
    whole = np.append(positions[1:] != positions[:-1], True)[: len(positions)]
    twice = not whole.all()
    levels: list[I64] = []
    for number in range(count):
        at = np.flatnonzero(group_of_change == number)
        if len(at) == 0:
            level = np.broadcast_to(starts[number], len(positions))
        else:
            level = np.zeros(len(positions), np.int64)
            level[at] = amounts[at]
            level[0] += starts[number]
            np.cumsum(level, out=level)
        levels.append(level[whole] if twice else level)
    return positions[whole] if twice else positions, levels


def bytes_before(trace: Trace, which: Mask, groups: NDArray[Any], count: int) -> I64:
    """These allocations' bytes per group when the trace began."""
    alloc = allocations(trace)
    before = which & (alloc.start < 0)
    return sums(groups[before], alloc.requested_bytes[before], count)


def last_tick(trace: Trace) -> U64:
    """The end of the trace, as an array of one element."""
    columns = (trace.events.ticks, trace.scopes.ticks, trace.scope_ends.ticks)
    last = [column.max() for column in columns if len(column)]
    return np.array([max(last, default=0)], np.uint64)
