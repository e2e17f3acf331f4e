"""Replays a trace's requests and frees in torch's CUDA caching allocator, with other settings.

`csrc/core/allocator_replay.h` is the allocator. `steps` turns events into its steps, and this module
turns its figures into answers: how much it reserves, which request fails first, and who holds memory
then.

Of free blocks of equal size the allocator takes the one with the lowest address. The basis of an
answer says what that means for it:

- "exact": with the recorded settings, segments lie where the recording shows them, and each block is
  compared with the recorded one. Or no choice between equal blocks depends on addresses. Or all
  orders of segments were tried.
- "interval": nobody knows where the driver would put the segments. The answer lies between the least
  and the most of several orders of them.
- "not known": the recording began late or is incomplete, or the allocator did something else than the
  model.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pytracer.analysis.allocator import repeated, settings as allocator_settings
from pytracer.analysis.allocator.settings import MIB, Settings
from pytracer.analysis.allocator.steps import (
    ALLOC,
    ATTEMPT,
    FREE_COMPLETED,
    REFUSED,
    SEED,
    Steps,
    recorded_settings,
    recorded_steps,
    steps,
)
from pytracer.analysis.facts import devices, doubts, grouping, lifetimes, owners, usage
from pytracer.basics.units import parse_size
from pytracer.data import frames
from pytracer.data._native import core
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import ACTION, Mask

if TYPE_CHECKING:
    import pandas as pd

LIMIT_STEP = 2 * MIB  # the precision of the smallest limit
EXACT, INTERVAL, NOT_KNOWN = "exact", "interval", "not known"
ORDERS, FEW_ORDERS = 64, 12  # of segments, that are tried for one answer, and for one of many
_STEPS_AT_MOST = 2_000_000  # in all orders together

_LATE = (
    "The recording began late, so blocks alive then are placed without gaps. To be exact, start it "
    "before the model is on the GPU."
)
_DEPARTED = (
    "From event {:,} on the allocator placed blocks otherwise than its model, so a rule is missing "
    "here, and the answer may be wrong. Please report it with the trace."
)


YES, PERHAPS, NO = "fits", "may fit", "does not fit"


def verdict(basis: str, *, surely: bool, perhaps: bool, proves_failure: bool = True) -> str:
    """YES, PERHAPS, NO or NOT_KNOWN.

    Args:
        basis: what the figures rest on.
        surely: with the most that the run may take.
        perhaps: with the least.
        proves_failure: the run takes at least what was recorded.
    """
    if not perhaps and proves_failure:
        return NO
    if basis == NOT_KNOWN:
        return NOT_KNOWN
    return YES if surely else PERHAPS


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
    peak_reserved: int  # in the likeliest order of segments
    reserved: tuple[int, int]  # the least and the most of all orders tried
    peak_allocated: int
    fragmentation: int  # reserved and not in use, when most was reserved
    retries: int
    failed: FailedRequest | None  # in any order
    basis: str  # EXACT, INTERVAL or NOT_KNOWN
    orders: int  # of segments, that were tried
    are_all: bool  # no other order has another outcome
    failing_orders: int
    notes: tuple[str, ...]  # why the answer is not known
    _trace: Trace
    _rules: dict[str, Any]
    _steps: Steps
    _longer: Steps  # of an imagined run, whose last step repeats
    _failed_step: int

    def __bool__(self) -> bool:
        """Whether the program runs to the end, in every order tried."""
        return self.failed is None

    @property
    def may_run(self) -> bool:
        """Whether the program runs to the end in some order."""
        return self.failing_orders < self.orders

    @property
    def proves_failure(self) -> bool:
        """Whether a replay that fails in every order proves that the program fails."""
        return not wrong(self._trace, self.device)

    def __repr__(self) -> str:
        """The main fields, without the trace."""
        fields = ("device", "settings", "limit", "peak_reserved", "peak_allocated", "retries")
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in (*fields, "basis"))
        return f"<Replay {shown}, {'runs' if self else 'fails'}>"

    def alive_at_failure(self) -> Mask:
        """Which allocations were alive when the first request failed."""
        return _alive_before(self._trace, self._steps, max(self._failed_step, 0))

    @cached_property
    def smallest_limit(self) -> int:
        """The smallest limit that runs to the end with these settings, to 2 MiB, in every order."""
        return _smallest(self._steps, self._rules, "limit", self.orders)

    @cached_property
    def smallest_room(self) -> int:
        """The least memory that the driver must have for this allocator, likewise."""
        return _smallest(self._longer, self._rules, "capacity", self.orders)

    def later_retries(self, capacity: int) -> int:
        """How often a longer run gives the cache back after the recorded steps, with so much memory.

        Each takes time.
        """
        rules = {**self._rules, "capacity": capacity}
        all_, recorded = (
            core.replay(own.columns, rules, False)["retries"] for own in (self._longer, self._steps)
        )
        return int(all_) - int(recorded)

    def timeline(self) -> "pd.DataFrame":
        """Reserved, in use, and the largest free block, after each event; index: time_ns."""
        own_steps = self._steps
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
    orders: int = ORDERS,
) -> Replay:
    """Replays the trace's requests with these settings.

    Args:
        trace: a trace of a CUDA device.
        settings: a value of PYTORCH_ALLOC_CONF; "" is torch's default. By default the recorded one.
        limit: as `set_per_process_memory_fraction` would set it. By default the recorded one.
        device: by default the device that the program trains on.
        capacity: the memory that the driver has for this allocator; by default enough.
        unlimited: the allocator may hold all that the driver has, whatever limit was recorded.
        orders: of segments, at most, where no recording shows their addresses.

    Raises:
        errors.UsageError: the settings or the device do not exist, or the trace is not of a GPU.
    """
    name = device or usage.main_device(trace)
    recorded = allocator_settings.parse(recorded_settings(trace, name))
    chosen = recorded if settings is None else allocator_settings.parse(settings)
    bound = None if unlimited else _limit(trace, name, chosen, settings is None, limit)
    is_alone = bound == devices.allowed(trace, name) and capacity is None and not unlimited
    own_steps = _steps(trace, name, follows=chosen == recorded, with_refusals=is_alone)
    rules = chosen.rules(bound, capacity)
    counted = core.replay(own_steps.columns, rules, False)
    tried = in_orders(own_steps.columns, rules, orders, recorded_is_enough=is_alone)
    failure = counted if counted["failed_step"] >= 0 else tried["failure"]
    more, repeats = repeated.longer(trace, own_steps)
    failing = tried["failed"]
    if failure is None and capacity is not None and more is not own_steps:
        later = in_orders(more.columns, rules, orders)
        failing, failure = later["failed"], later["failure"]
        if failure is not None:
            failure = {**failure, "failed_step": int(repeats[failure["failed_step"]])}
    reserved = (tried["lowest_peak"], tried["highest_peak"])
    basis, why = _basis(trace, own_steps, tried)
    return Replay(
        device=name,
        settings=chosen.text,
        limit=bound,
        peak_reserved=counted["peak_reserved"],
        reserved=reserved if reserved[1] else (counted["peak_reserved"],) * 2,
        peak_allocated=counted["peak_allocated"],
        fragmentation=_at_peak(own_steps, rules, counted),
        retries=counted["retries"],
        failed=_failed(trace, own_steps, failure),
        basis=basis,
        orders=tried["orders"],
        are_all=tried["are_all"],
        failing_orders=failing,
        notes=why,
        _trace=trace,
        _rules=rules,
        _steps=own_steps,
        _longer=more,
        _failed_step=-1 if failure is None else failure["failed_step"],
    )


def _steps(trace: Trace, device: str, *, follows: bool, with_refusals: bool) -> Steps:
    """The steps; with those of the recorded driver, if its settings are replayed.

    What it refused says nothing of another card.
    """
    plain, recorded = steps(trace, device), None
    if follows:
        recorded = recorded_steps(trace, device)
    if recorded is None or with_refusals:
        return recorded or plain
    return recorded.without(REFUSED)


def _basis(trace: Trace, own_steps: Steps, tried: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """How the answer is known, and why it is not known."""
    why = wrong(trace, own_steps.device) + missing(trace, own_steps.device)
    why += [] if "address" in own_steps.columns else late(trace, own_steps.device)
    if why:
        return NOT_KNOWN, tuple(why)
    if tried["are_all"] and tried["lowest_peak"] == tried["highest_peak"]:
        return EXACT, ()
    return INTERVAL, ()


@once_per_trace
def _departures(trace: Trace) -> dict[str, int]:
    """Per device, the event at which a block first lies elsewhere than the model puts it."""
    found = {}
    for device in usage.devices(trace):
        own_steps = None if device == "cpu" else recorded_steps(trace, device)
        if own_steps is None:
            continue
        rules = recorded_rules(trace, device, devices.allowed(trace, device))
        at = core.replay(own_steps.columns, rules, False)["departed_step"]
        if at >= 0 and own_steps.columns["kind"][at] != ATTEMPT:
            found[device] = int(own_steps.position[at])
    return found


def in_orders(
    columns: dict[str, Any], rules: dict[str, Any], most: int, *, recorded_is_enough: bool = False
) -> dict[str, Any]:
    """The figures in up to so many orders of segments; in fewer if there are many steps.

    The recorded order is enough for questions about the recorded run itself.
    """
    affordable = max(_STEPS_AT_MOST // max(len(columns["kind"]), 1), 4)
    most = min(most, affordable)
    found: dict[str, Any] = core.replay_orders(columns, rules, most, recorded_is_enough)
    return found


def counted_as_recorded(
    trace: Trace, device: str, columns: dict[str, Any], limit: int | None = None
) -> dict[str, Any]:
    """What the model counts for these steps, with the recorded settings and that limit."""
    counted: dict[str, Any] = core.replay(columns, recorded_rules(trace, device, limit), False)
    return counted


def recorded_rules(trace: Trace, device: str, limit: int | None = None) -> dict[str, Any]:
    """The recorded settings with that limit, for `core.replay`."""
    return allocator_settings.parse(recorded_settings(trace, device)).rules(limit, None)


def _limit(
    trace: Trace, device: str, settings: Settings, as_recorded: bool, limit: int | str | None
) -> int | None:
    if limit is not None:
        return parse_size(limit)
    total = devices.counted(trace, device, "limit_bytes")
    if settings.memory_fraction < 1 and total is not None and not as_recorded:
        return int(settings.memory_fraction * total)
    return devices.allowed(trace, device)


# ---------------------------------------------------------------- the answers


def _smallest(steps: Steps, rules: dict[str, Any], bound: str, orders: int) -> int:
    """The smallest limit or capacity with which the program runs in each of so many orders."""
    free = {**rules, "limit": 2**64 - 1, "capacity": 2**64 - 1}
    counted = core.replay(steps.columns, free, False)
    high: int = -(-counted["peak_reserved"] // LIMIT_STEP) * LIMIT_STEP
    low: int = counted["peak_allocated"] // LIMIT_STEP * LIMIT_STEP - LIMIT_STEP
    smallest = _smallest_in(steps, free, bound, low, high)
    if not counted["order_matters"]:
        return smallest
    for order in range(1, orders):
        tried = {**free, "order": order}
        if not _runs(steps, tried, bound, smallest):
            most = core.replay(steps.columns, tried, False)["peak_reserved"]
            high = -(-most // LIMIT_STEP) * LIMIT_STEP
            smallest = _smallest_in(steps, tried, bound, smallest, max(high, smallest))
    return smallest


def _smallest_in(steps: Steps, rules: dict[str, Any], bound: str, low: int, high: int) -> int:
    """The same in one order of segments, by bisection."""
    while low > 0 and _runs(steps, rules, bound, low):
        # Blocks keep a smaller uncut rest if memory is short.
        high, low = low, low * 7 // 8 // LIMIT_STEP * LIMIT_STEP
    while high - low > LIMIT_STEP:
        middle = (low + high) // 2 // LIMIT_STEP * LIMIT_STEP
        runs = _runs(steps, rules, bound, middle)
        low, high = (low, middle) if runs else (middle, high)
    return high


def _runs(steps: Steps, rules: dict[str, Any], bound: str, amount: int) -> bool:
    tried = core.replay(steps.columns, {**rules, bound: amount}, False)
    return bool(tried["failed_step"] < 0)


def _at_peak(steps: Steps, rules: dict[str, Any], counted: dict[str, Any]) -> int:
    """The bytes reserved and not in use when most was reserved."""
    at = counted["peak_reserved_step"]
    if at < 0:
        return 0
    there = core.replay(steps.until(at + 1).columns, rules, False)
    return int(there["reserved"] - there["active"])


def _failed(trace: Trace, steps: Steps, counted: dict[str, Any] | None) -> FailedRequest | None:
    if counted is None:
        return None
    at = counted["failed_step"]
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
    alive[block[(kind == ALLOC) | (kind == SEED)]] = True
    alive[block[kind == FREE_COMPLETED]] = False
    return alive


def missing(trace: Trace, device: str) -> list[str]:
    """Why the program takes more than was recorded; nothing for the CPU, which is not replayed."""
    texts: list[str] = []
    if device == "cpu":
        return texts
    if (trace.events.action == ACTION["oom"]).any():
        texts.append("The recording ends where a request failed; the later requests are unknown.")
    if trace.losses.get("lost_alloc"):
        texts.append("Some allocations did not fit into the recording; record fewer steps.")
    return texts


def wrong(trace: Trace, device: str) -> list[str]:
    """Why the program may take less than was recorded, or the allocator place it otherwise."""
    return [*doubts.doubts(trace), *departed(trace, device)]


def departed(trace: Trace, device: str) -> list[str]:
    """Why the model of the allocator is wrong here."""
    at = _departures(trace).get(device)
    return [] if at is None or trace.losses.get("lost_alloc") else [_DEPARTED.format(at)]


def late(trace: Trace, device: str) -> list[str]:
    """Why it is not known where blocks lay, unless a replay follows the recording."""
    return [_LATE] if device != "cpu" and steps(trace, device).late_bytes else []


def gaps(trace: Trace, device: str) -> int | None:
    """The bytes between the blocks that were alive when the recording began; None: not known.

    A replay places those blocks without gaps. At worst no later block fits into the real gaps.
    """
    if not late(trace, device):
        return 0
    reserved = devices.counted(trace, device, "reserved_bytes.current", "begin")
    return None if reserved is None else max(reserved - steps(trace, device).late_bytes, 0)


def reasons(trace: Trace, device: str) -> tuple[str, ...]:
    """All reasons why a replay with other steps is not known, not even between two ends."""
    began = late(trace, device) if gaps(trace, device) is None else []
    return (*wrong(trace, device), *missing(trace, device), *began)
