"""The questions people ask of a trace. Free functions; the public face delegates to them.

A device's memory is its own: every view is of one device, by default of the one that the program
trains on (the CUDA device with the highest peak; the CPU if there is none).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pytracer import errors, health as counters
from pytracer.analysis.allocator import agreement, blocks
from pytracer.analysis.answers import misuse
from pytracer.analysis.facts import device_times, lifetimes, owners, phases, sanitized, scopes
from pytracer.analysis.facts.allocations import MISSING_TIME, allocations, times_ns
from pytracer.analysis.facts.casts import elements
from pytracer.analysis.facts.categories import ROLE, role_text
from pytracer.analysis.facts.scopes import Mask
from pytracer.recorded import Trace, once_per_trace
from pytracer.schema import (
    CATEGORIES,
    CATEGORY,
    CATEGORY_ORDER,
    DEVICE_TYPES,
    I64,
    PHASE,
    PHASES,
    U8,
    U64,
)

if TYPE_CHECKING:
    import pandas as pd

At: TypeAlias = Literal["peak", "end"] | int

# What allocations can be grouped by.
KEYS = tuple(
    "module op line phase free_phase category role name shape dtype step pool".split()  # noqa: SIM905
)

BEFORE = -1  # an event position: before the first event


# ---------------------------------------------------------------- devices


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
    return {name: _highest(trace, (names == name)[place]) for name in used}


def main_device(trace: Trace) -> str:
    """The device that views are of when none is named."""
    found = devices(trace)
    return found[0] if found else "cpu"


def device_of_place(trace: Trace) -> NDArray[Any]:
    """Per place, `cpu` or `cuda:0`."""
    places = trace.places
    names = []
    for kind, index in zip(places.device_type, places.device_index, strict=True):
        name = DEVICE_TYPES[kind] if kind < len(DEVICE_TYPES) else f"device{kind}"
        names.append("cpu" if name == "cpu" else f"{name}:{index}")
    return np.array(names, dtype=object)


def device_of_event(trace: Trace, position: int) -> str:
    """The device that the event is of; a damaged trace may lack its place."""
    names = device_of_place(trace)
    return str(names[min(int(trace.events.place[position]), len(names) - 1)])


def on_device(trace: Trace, device: str | None = None) -> Mask:
    """Per allocation, whether it lies on the device.

    Raises:
        errors.UsageError: nothing was recorded on a device of that name.
    """
    if device is not None and device not in (*devices(trace), main_device(trace)):
        known = ", ".join(devices(trace)) or "none"
        raise errors.UsageError(f"nothing was recorded on {device!r}; there is: {known}")
    wanted = device_of_place(trace) == (device or main_device(trace))
    result: Mask = wanted[allocations(trace).place]
    return result


# ---------------------------------------------------------------- the peak


@dataclass(frozen=True)
class Peak:
    """The moment at which most bytes were allocated. Sizes are what was asked for."""

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


def _highest(trace: Trace, which: Mask) -> _Level:
    positions, levels, at_start = _levels_of(trace, which)
    highest = int(levels.argmax()) if len(levels) else -1
    if highest < 0 or levels[highest] <= at_start:
        return _Level(at_start, BEFORE)
    return _Level(int(levels[highest]), int(positions[highest]))


def _levels_of(trace: Trace, which: Mask) -> tuple[NDArray[np.intp], I64, int]:
    """The sum over these allocations: where it changes, what it is then, and what it starts from."""
    positions, _, amounts = _changes_of(trace, which)
    at_start = _bytes_before(trace, which)
    levels = np.cumsum(amounts)
    levels += at_start
    return positions, levels, at_start


def _changes_of(trace: Trace, which: Mask) -> tuple[NDArray[np.intp], I64, I64]:
    """Positions, allocations and bytes of the changes that are about these allocations."""
    changes = lifetimes.changes(trace)
    if which.all():
        return changes.position, changes.allocation, changes.bytes
    own = which[changes.allocation]
    return changes.position[own], changes.allocation[own], changes.bytes[own]


def _bytes_before(trace: Trace, which: Mask) -> int:
    alloc = allocations(trace)
    return int(alloc.requested_bytes[which & (alloc.start < 0)].sum())


def alive(trace: Trace, at: At = "peak", device: str | None = None) -> Mask:
    """Which allocations of the device the allocator counts at that moment."""
    return alive_at(trace, position_of(trace, at, device)) & on_device(trace, device)


def alive_at(trace: Trace, position: int) -> Mask:
    """Which allocations of all devices are counted right after the event at that position."""
    alloc = allocations(trace)
    return (alloc.start <= position) & ((alloc.completed < 0) | (alloc.completed > position))


def position_of(trace: Trace, at: At = "peak", device: str | None = None) -> int:
    """The event after which it is that moment; -1: before the first.

    Raises:
        errors.UsageError: no moment.
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


def levels_of(trace: Trace, device: str | None = None) -> tuple[NDArray[np.intp], I64, int]:
    """The device's bytes: where they change, what they are then, and what they start from."""
    return _levels_of(trace, on_device(trace, device))


def peak(trace: Trace, device: str | None = None) -> Peak:
    """The moment of greatest memory."""
    on_device(trace, device)  # a device that is not there is the caller's mistake
    name = device or main_device(trace)
    level = _peaks(trace).get(name, _Level(0, BEFORE))
    return replace(moment(trace, level.position, name), bytes=level.bytes)


def first_step(trace: Trace) -> int:
    """How many steps the program had made when the trace began; 0 where that is not known."""
    known = trace.meta.get("first_step")
    return known if isinstance(known, int) and 0 < known < 1 << 31 else 0


def when(trace: Trace, peak: Peak) -> str:
    """`step 3, in backward`; of what follows the last step, `after step 3, in evaluation`."""
    step, line = peak.step or 0, phases.timeline(trace)
    over = 0 < len(line.step_ends) <= step and not phases.trains_on(trace)
    name = (
        f"after step {first_step(trace) + step - 1}" if over else f"step {first_step(trace) + step}"
    )
    if peak.phase is None or peak.phase == "other":
        return f"{name}, between phases"
    stretch = line.stretch_at(trace.events.ticks[peak.position : peak.position + 1])
    evaluates = peak.phase == "forward" and not line.of_training[stretch].all()
    return f"{name}, in {'evaluation' if evaluates else peak.phase}"


def updates_by_hand(trace: Trace) -> bool:
    """Whether a program trains, by several backwards, and nothing says where its steps end."""
    backwards = int((scopes.tree(trace).kind == scopes.BACKWARD).sum())
    return backwards > 1 and len(phases.timeline(trace).step_ends) == 0


class Highest(NamedTuple):
    """The most bytes on a device, and in which step."""

    device: str
    bytes: int
    step: int


def highest(trace: Trace, device: str) -> Highest:
    """As `peak`, without what takes long: for traces that nobody may ever look at."""
    found, changes = lifetimes.lifetimes(trace), lifetimes.changes(trace)
    here = (device_of_place(trace) == device)[found.place]
    own = here[changes.allocation]
    levels = np.cumsum(changes.bytes[own])
    start = int(found.bytes[here & (found.start < 0)].sum())
    at = int(levels.argmax()) if len(levels) else 0
    if len(levels) == 0 or levels[at] <= 0:
        return Highest(device, start, 0)
    tick = trace.events.ticks[changes.position[own][at]]
    step = phases.timeline(trace).step_at(np.array([tick]))[0]
    return Highest(device, start + int(levels[at]), int(step))


def highest_of_all(trace: Trace) -> Highest:
    """As `highest`, on the main device."""
    used = device_of_place(trace)[np.unique(lifetimes.lifetimes(trace).place)]
    each = [highest(trace, str(name)) for name in sorted(set(used))] or [Highest("cpu", 0, 0)]
    return max(each, key=lambda one: (one.device != "cpu", one.bytes))


def moment(trace: Trace, position: int, device: str) -> Peak:
    """What there is on the device right after the event at that position."""
    there = (device_of_place(trace) == device)[allocations(trace).place]
    there &= alive_at(trace, position)
    time_ns, step, phase = 0, None, None
    if position >= 0:
        at = slice(position, position + 1)
        ticks, scope = trace.events.ticks[at], trace.events.scope[at]
        scope = sanitized.within(scope, len(scopes.tree(trace).kind))
        time_ns = int(trace.time_ns(ticks)[0])
        step = int(phases.timeline(trace).step_at(ticks)[0])
        phase = PHASES[phases.of_events(trace, ticks, scope)[0]]
    by_category = _in_order(_bytes_by_category(trace, there))
    return Peak(
        bytes=sum(by_category.values()),
        time_ns=time_ns,
        step=step,
        phase=phase,
        by_category=by_category,
        device=device,
        position=position,
    )


def _bytes_by_category(trace: Trace, which: Mask) -> I64:
    alloc = allocations(trace)
    return sums(alloc.category[which], alloc.requested_bytes[which], len(CATEGORIES))


def sums(groups: NDArray[Any], values: NDArray[Any], count: int) -> I64:
    """The sum of each group, exactly: bincount alone adds in floating point."""
    low, high = values & np.uint64(0xFFFFFFFF), values >> np.uint64(32)
    total: I64 = np.bincount(groups, low, count).astype(np.int64)
    if high.any():
        total += np.bincount(groups, high, count).astype(np.int64) << 32
    return total


def _in_order(per_category: NDArray[Any]) -> dict[str, int]:
    return {name: int(per_category[CATEGORY[name]]) for name in CATEGORY_ORDER}


# ---------------------------------------------------------------- tables


@dataclass(frozen=True)
class CategoryRow:
    """A category in numbers; sizes are bytes."""

    category: str
    at_peak: int
    own_peak: int
    at_end: int
    allocations: int


def category_rows(trace: Trace, device: str | None = None) -> list[CategoryRow]:
    """One row per category, in the order in which people see them."""
    alloc, here = allocations(trace), on_device(trace, device)
    at_peak = _bytes_by_category(trace, alive(trace, "peak", device))
    at_end = _bytes_by_category(trace, alive(trace, "end", device))
    count = np.bincount(alloc.category[here], minlength=len(CATEGORIES))
    rows = []
    for name in CATEGORY_ORDER:
        number = CATEGORY[name]
        own = _highest(trace, here & (alloc.category == number)).bytes if count[number] else 0
        rows.append(
            CategoryRow(name, int(at_peak[number]), own, int(at_end[number]), int(count[number]))
        )
    return rows


def summary(trace: Trace, device: str | None = None) -> "pd.DataFrame":
    """One row per category: bytes at the peak, at its own peak, at the end; allocations."""
    import pandas as pd

    rows = category_rows(trace, device)
    return pd.DataFrame(rows).set_index("category")


def allocations_frame(trace: Trace) -> "pd.DataFrame":
    """One row per allocation, every device; missing is NA."""
    import pandas as pd

    alloc = allocations(trace)
    texts, labels, places = _Texts(trace), sanitized.labels(trace), trace.places
    columns: dict[str, Any] = {
        "id": np.arange(len(alloc)),
        "device": pd.Categorical(device_of_place(trace)[alloc.place]),
        "address": alloc.address,
        "requested_bytes": alloc.requested_bytes.astype(np.int64),
        "allocated_bytes": _or_na(blocks.allocated_bytes(trace), blocks.UNKNOWN),
        "start_ns": _or_na(times_ns(trace, alloc.start), MISSING_TIME),
        "end_ns": _or_na(times_ns(trace, alloc.end), MISSING_TIME),
        "step": _or_na(alloc.step, -1),
        "phase": texts.phases(alloc.phase),
        "category": pd.Categorical.from_codes(
            alloc.category.astype(np.int8), categories=list(CATEGORIES)
        ),
        "role": texts.roles(alloc.role),
        "name": texts.strings(labels.name[alloc.label]),
        "module": texts.strings(alloc.module),
        "op": texts.strings(alloc.op),
        "line": texts.lines(alloc.line),
        "forward_module": texts.strings(alloc.forward_module),
        "forward_op": texts.strings(alloc.forward_op),
        "forward_line": texts.lines(alloc.forward_line),
        "free_phase": texts.phases(alloc.free_phase),
        "stream": places.stream[alloc.place],
        "pool": texts.pools(alloc.place),
        "thread": alloc.thread,
        "shape": texts.strings(labels.shape[alloc.label]),
        "dtype": texts.strings(_dtype_rows(trace)),
    }
    return pd.DataFrame(
        {
            name: column.categorical() if isinstance(column, Group) else column
            for name, column in columns.items()
        }
    )


def _dtype_rows(trace: Trace) -> NDArray[Any]:
    """Rows of the string table. A cast's label is the weight's; what type it became is not known."""
    alloc = allocations(trace)
    cast = alloc.role == ROLE["autocast_copy"]
    return np.where(cast, 0, sanitized.labels(trace).dtype[alloc.label])


def pool_text(trace: Trace, place: int) -> str:
    """A private pool's id; empty for the allocator's own."""
    high, low = trace.places.pool_high[place], trace.places.pool_low[place]
    return f"{high}.{low}" if high or low else ""


def _or_na(values: NDArray[Any], missing: int) -> Any:
    import pandas as pd

    return (
        pd.array(values, dtype="Int64").copy()
        if not (values == missing).any()
        else (pd.arrays.IntegerArray(values.astype(np.int64), values == missing))
    )


@dataclass(frozen=True)
class Group:
    """Texts as codes: row i is `names[codes[i]]`; -1 is "not known"."""

    codes: I64
    names: list[str]

    def categorical(self) -> Any:
        """As pandas wants it; -1 becomes NA."""
        import pandas as pd

        return pd.Categorical.from_codes(self.codes, categories=self.names)


class _Texts:
    """Turns columns of numbers into texts; an empty text is "not known"."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def of(self, numbers: NDArray[Any], text: Callable[[int], str]) -> Group:
        return grouped(numbers, text)

    def strings(self, rows: NDArray[Any]) -> Group:
        return self.of(rows, lambda row: self._trace.strings[row])

    def lines(self, rows: NDArray[Any]) -> Group:
        return self.of(rows, lambda row: owners.line_text(self._trace, row))

    def phases(self, numbers: U8) -> Group:
        return self.of(numbers, lambda phase: PHASES[phase] if phase < len(PHASES) else "")

    def roles(self, numbers: NDArray[Any]) -> Group:
        return self.of(numbers, lambda role: role_text(self._trace, role))

    def pools(self, places: NDArray[Any]) -> Group:
        return self.of(places, lambda place: pool_text(self._trace, place))


# ---------------------------------------------------------------- who holds it


def by(
    trace: Trace, keys: str | Sequence[str], at: At = "peak", device: str | None = None
) -> "pd.DataFrame":
    """Bytes and allocations alive at a moment by "module", "op", "line", "phase", "role", ...

    A module holds what it made, what its backward made, and its own weights, gradients and
    optimizer state. Likewise for op and line: what backward made counts for the forward that
    caused it; what checkpointing made again, for where it was made again.

    Raises:
        errors.UsageError: a key that does not exist.
    """
    import pandas as pd

    wanted = [keys] if isinstance(keys, str) else list(keys)
    if not wanted:
        raise errors.UsageError(f"by() needs a key to group by; there is: {', '.join(KEYS)}")
    there = alive(trace, at, device)
    columns = {key: group(trace, key, there).categorical() for key in wanted}
    frame = pd.DataFrame(
        {
            **columns,
            "bytes": allocations(trace).requested_bytes[there].astype(np.int64),
            "allocations": 1,
        }
    )
    grouped = frame.groupby(wanted, dropna=False, observed=True, sort=False)
    return grouped.sum().sort_values("bytes", ascending=False, kind="stable")


@dataclass(frozen=True)
class Holder:
    """Who holds how much."""

    name: str
    bytes: int
    allocations: int


def holders(trace: Trace, key: str, which: Mask) -> list[Holder]:
    """As `by` with one key, of any allocations, largest first; what is not known is left out."""
    found = group(trace, key, which)
    known = found.codes >= 0
    size = allocations(trace).requested_bytes[which][known]
    totals = sums(found.codes[known], size, len(found.names))
    counts = np.bincount(found.codes[known], minlength=len(found.names))
    rows = [Holder(n, int(t), int(c)) for n, t, c in zip(found.names, totals, counts, strict=True)]
    return sorted(rows, key=lambda row: -row.bytes)


def grouped(numbers: NDArray[Any], text: Callable[[int], str]) -> Group:
    """Numbers as the texts they stand for; the text of each distinct one is asked for once."""
    distinct, codes = np.unique(numbers, return_inverse=True)
    texts = [text(int(number)) for number in distinct]
    names = sorted(set(texts) - {""})
    place = {name: code for code, name in enumerate(names)} | {"": -1}
    to_code = np.array([place[name] for name in texts], np.int64)
    return Group(to_code[codes], names)


def group(trace: Trace, key: str, which: Mask | NDArray[np.intp]) -> Group:
    """The key's value of each of these allocations."""
    alloc, texts = allocations(trace), _Texts(trace)
    if key == "module":
        return texts.of(*_holding_modules(trace, which))
    if key == "op":
        return texts.strings(alloc.cause("op")[which])
    if key == "line":
        return texts.lines(alloc.cause("line")[which])
    if key in ("phase", "free_phase"):
        return texts.phases(getattr(alloc, key)[which])
    if key == "category":
        return texts.of(alloc.category[which], lambda number: CATEGORIES[number])
    if key == "role":
        return texts.roles(alloc.role[which])
    if key == "dtype":
        return texts.strings(_dtype_rows(trace)[which])
    if key in ("name", "shape"):
        return texts.strings(getattr(sanitized.labels(trace), key)[alloc.label[which]])
    if key == "step":
        return texts.of(alloc.step[which], lambda step: "" if step < 0 else str(step))
    if key == "pool":
        return texts.pools(alloc.place[which])
    raise errors.UsageError(f"cannot group by {key!r}; there is: {', '.join(KEYS)}")


def _holding_modules(
    trace: Trace, which: Mask | NDArray[np.intp]
) -> tuple[NDArray[Any], Callable[[int], str]]:
    """A number per allocation, and the module path that the number stands for."""
    alloc = allocations(trace)
    module = alloc.cause("module")[which]
    name = sanitized.labels(trace).name[alloc.label[which]].astype(np.int64)
    kept = np.isin(
        alloc.category[which],
        [CATEGORY[c] for c in ("weights", "gradients", "optimizer_state")],
    )
    count = len(trace.strings)
    root = _first_root(trace)
    # Numbers from `count` on: the module that the tensor of this name belongs to.
    numbers = np.where(kept & (name != 0), name + count, module)

    def path(number: int) -> str:
        if number < count:
            return trace.strings[number]
        return trace.strings[number - count].rpartition(".")[0] or root

    return numbers, path


def _first_root(trace: Trace) -> str:
    """What the first model is called: its own tensors' names have no path."""
    tree = scopes.tree(trace)
    roots = np.flatnonzero((tree.kind == scopes.MODULE) & (tree.module[tree.parent] == 0))
    names = (trace.strings[row] for row in tree.name[roots])
    return next((name for name in names if "." not in name), "")


# ---------------------------------------------------------------- over time


def timeline(trace: Trace, by: str = "category", device: str | None = None) -> "pd.DataFrame":
    """Bytes after every change, a column per category (or phase, device); index: time_ns.

    Raises:
        errors.UsageError: `by` is none of "category", "phase", "device".
    """
    import pandas as pd

    alloc = allocations(trace)
    if by == "category":
        groups, names = alloc.category.astype(np.int64), list(CATEGORIES)
        shown = list(CATEGORY_ORDER)
    elif by == "phase":
        # What was there before the trace has no phase.
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
    index = pd.Index(times, name="time_ns")
    return pd.DataFrame({name: levels[names.index(name)] for name in shown}, index=index)


def level_columns(
    trace: Trace, which: Mask, groups: NDArray[Any], count: int
) -> tuple[NDArray[np.intp], list[I64]]:
    """The positions at which these allocations change, and each group's bytes after them."""
    positions, allocation, amounts = _changes_of(trace, which)
    group_of_change = groups[allocation]
    starts = bytes_before(trace, which, groups, count)
    # Of two changes at one event only the sum after both is shown.
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
    """Each group's bytes of these allocations when the trace began."""
    alloc = allocations(trace)
    before = which & (alloc.start < 0)
    return sums(groups[before], alloc.requested_bytes[before], count)


# ---------------------------------------------------------------- steps


def steps(trace: Trace, device: str | None = None) -> "pd.DataFrame":
    """One row per step: its peak, what it began and ended with, how long its phases took.

    What comes after the last step's end is a step of its own if training went on; an evaluation is not.
    A phase has two times: the host's, and on CUDA the device's, which is the one to look at: the
    host runs ahead. The device's are NA where none were measured.
    """
    import pandas as pd

    rows = [vars(row) for row in step_rows(trace, device)]
    names = list(StepRow.__dataclass_fields__)
    table = pd.DataFrame(rows, columns=names).set_index("step")
    return table.astype({f"device_{phase}_ns": "Int64" for phase in TIMED})


@dataclass(frozen=True)
class StepRow:
    """A step in numbers; sizes are bytes."""

    # pandas leaves out middle columns where the screen is narrow: so what says most is outside.
    step: int
    peak_bytes: int
    growth_bytes: int  # end_bytes less the previous step's; of the first, less what it began with
    start_bytes: int
    end_bytes: int
    allocations: int
    micro_steps: int  # backwards that a forward preceded
    start_ns: int
    end_ns: int
    device_forward_ns: int | None  # by CUDA's events, on the stream that was current
    device_backward_ns: int | None
    device_optimizer_ns: int | None
    forward_ns: int  # by the host's clock; of training, where there is evaluation as well
    backward_ns: int
    optimizer_ns: int


TIMED = ("forward", "backward", "optimizer")


def step_rows(trace: Trace, device: str | None = None) -> list[StepRow]:
    """See `steps`."""
    events, line = trace.events, phases.timeline(trace)
    if len(events.ticks) == 0:
        return []
    which = on_device(trace, device)
    positions, levels, at_start = _levels_of(trace, which)
    # Where each step ends: as a time, and as a number of changes.
    ends = (
        np.append(line.step_ends, events.ticks[-1]) if phases.trains_on(trace) else line.step_ends
    )
    ends = np.maximum.accumulate(ends)  # the last may have begun after the last event
    count = len(ends)
    if count == 0:
        return []
    cuts = np.searchsorted(events.ticks[positions], ends, side="right")
    firsts = np.append(0, cuts[:-1])
    level = np.concatenate([[at_start], levels])[: cuts[-1] + 1]
    # A step of views and the like may end before the first event.
    bounds = np.append(np.minimum(events.ticks[0], ends[0]), ends)
    times = trace.time_ns(bounds)
    made = allocations(trace).step[which]
    columns: dict[str, Iterable[int | None]] = {
        "peak_bytes": np.maximum(np.maximum.reduceat(level, firsts), level[cuts]).tolist(),
        "growth_bytes": np.diff(level[cuts], prepend=level[0]).tolist(),
        "start_bytes": level[firsts].tolist(),
        "end_bytes": level[cuts].tolist(),
        "allocations": np.bincount(made[made >= 0], minlength=count)[:count].tolist(),
        "micro_steps": _micro_steps(line, bounds).tolist(),
        "start_ns": times[:-1].tolist(),
        "end_ns": times[1:].tolist(),
    }
    for phase in TIMED:
        columns[f"device_{phase}_ns"] = device_times.per_step(trace, phase, count)
        columns[f"{phase}_ns"] = np.diff(_time_until(trace, phase, bounds)).tolist()
    rows = zip(*columns.values(), strict=True)
    return [StepRow(step, **dict(zip(columns, row, strict=True))) for step, row in enumerate(rows)]


@dataclass(frozen=True)
class PhaseMedians:
    """How long a step's phases take, each the median of the steps that have it."""

    by_phase: dict[str, int]  # nanoseconds
    of_device: bool  # else of the host


def phase_medians(trace: Trace) -> PhaseMedians | None:
    """The device's times, or on the CPU the program's; None where no step was seen to end."""
    count = len(phases.timeline(trace).step_ends)
    of_device = main_device(trace).startswith("cuda")
    by_phase = {}
    for phase in TIMED:
        times = (device_times.per_step if of_device else _host_times)(trace, phase, count)
        known = [each for each in times if each]
        if known:
            # The first step loads kernels and makes the optimizer's state.
            by_phase[phase] = int(np.median(known[1:] if len(known) > 2 else known))
    return PhaseMedians(by_phase, of_device) if by_phase else None


def _host_times(trace: Trace, phase: str, steps: int) -> list[int]:
    line, durations = phases.timeline(trace), _durations(trace)
    step = line.step_at(line.ticks)
    those = np.flatnonzero((line.phase == PHASE[phase]) & line.of_training & (step < steps))
    sums = np.zeros(steps, np.int64)
    np.add.at(sums, step[those], durations[those])
    return [int(each) for each in sums]


def _durations(trace: Trace) -> I64:
    """Of each stretch of the timeline on the host, in ns; the last one ends with the last event."""
    line = phases.timeline(trace)
    last = trace.events.ticks[-1:] if len(trace.events.ticks) else line.ticks[-1:]
    found: I64 = np.maximum(np.diff(trace.time_ns(np.append(line.begins, last))), 0)
    return found


_FEWEST_CALLS = 20 * 61  # a guess from fewer than twenty samples says nothing


class OwnTime(NamedTuple):
    """What recording computed, and its share of the time from the first moment to the last.

    Without the time in which other programs had the core: so the share is the same beside them.

    A moment is a call of an outermost module, a backward pass or a step. Processor time: nothing
    that its threads waited, for each other or for other programs. Without torch's own price for
    telling of every operator.
    """

    ns: int
    share: float


def own_time(trace: Trace) -> OwnTime | None:
    """None where it was not measured: in files by others, by killed programs, of too few calls."""
    noted = trace.meta.get("own_time")
    ticks, ns, lasted, waited = _whole_numbers(noted, "ticks", "ns", "of_ticks", "waited_ns")
    clock = trace.clock.ticks
    is_whole = trace.file_report.get("status", "complete") == "complete"
    calls = len(trace.events.ticks) + len(trace.scopes.ticks)  # at least
    if not is_whole or calls < _FEWEST_CALLS or len(clock) < 2 or clock[-1] <= clock[0]:
        return None
    if ticks + ns <= 0 or lasted <= 0:
        return None
    ns_per_tick = int(trace.clock.unix_ns[-1] - trace.clock.unix_ns[0]) / int(clock[-1] - clock[0])
    taken, whole = ticks * ns_per_tick + ns, lasted * ns_per_tick - waited
    # One thread computes no longer than it lasts. Of several side by side, it is all of it at most.
    return OwnTime(round(taken), taken / max(taken, whole))


def _whole_numbers(noted: object, *names: str) -> list[int]:
    """Zeros where one of them is none: a file may say anything."""
    found = [noted.get(name) for name in names] if isinstance(noted, dict) else []
    numbers = [one for one in found if type(one) is int and 0 <= one < 2**63]
    return numbers if len(numbers) == len(names) else [0] * len(names)


def _time_until(trace: Trace, phase: str, ticks: U64) -> I64:
    """How long the program had been in the phase, of training, by each of these times."""
    line = phases.timeline(trace)
    begins = trace.time_ns(line.ticks)
    counts = (line.phase == PHASE[phase]) & line.of_training
    before = np.append(0, np.cumsum(np.diff(begins) * counts[:-1]))
    at = line.stretch_at(ticks)
    found: I64 = before[at] + (trace.time_ns(ticks) - begins[at]) * counts[at]
    return found


def _micro_steps(line: phases.Timeline, bounds: U64) -> NDArray[np.intp]:
    """Between each of these times and the next, the backwards that a forward preceded."""
    turns = np.flatnonzero(np.isin(line.phase, (phases.FORWARD, phases.BACKWARD_PHASE)))
    forward = line.phase[turns] == phases.FORWARD
    pairs = np.flatnonzero(forward[:-1] & ~forward[1:])
    at = line.stretch_at(bounds)
    ended = np.searchsorted(turns[pairs + 1], at[1:], side="right")
    found: NDArray[np.intp] = np.maximum(ended - np.searchsorted(turns[pairs], at[:-1]), 0)
    return found


# ---------------------------------------------------------------- parameters


@dataclass(frozen=True)
class PerParameter:
    """A category beside the model's parameters; NaN where no parameter is known."""

    category: str
    bytes: int  # the most there were
    per_parameter: float
    textbook: str  # not last: pandas leaves out middle columns where the screen is narrow
    at_peak: float  # per_parameter at the peak of all memory, and when the trace ended
    at_rest: float


# What papers and courses say for mixed precision with Adam, and for fp32.
_TEXTBOOK = {
    "weights": "4 (fp32), 6 (mixed: fp32 and a 16-bit copy), 2 (pure 16-bit)",
    "gradients": "4 (fp32), 2 (16-bit)",
    "optimizer_state": "8 (Adam), 4 (momentum), 2 (8-bit Adam), 0 (SGD)",
}


def parameters(trace: Trace, device: str | None = None) -> int:
    """How many parameters the model has: the elements of every tensor labelled as one."""
    alloc, labels = allocations(trace), sanitized.labels(trace)
    is_parameter = np.array([trace.strings[r] == "parameter" for r in labels.role], np.bool_)
    is_parameter &= labels.category == CATEGORY["weights"]
    rows = np.unique(alloc.label[on_device(trace, device)])
    by_name = {
        int(labels.name[r]): elements(trace.strings[labels.shape[r]])
        for r in rows
        if is_parameter[r]
    }
    return sum(by_name.values())


def parameter_rows(trace: Trace, device: str | None = None) -> list[PerParameter]:
    """Weights, gradients and optimizer state per parameter: at most, at the peak, at rest."""
    count = parameters(trace, device) or float("nan")
    rows = {row.category: row for row in category_rows(trace, device)}
    return [
        PerParameter(
            category=name,
            bytes=rows[name].own_peak,
            per_parameter=rows[name].own_peak / count,
            at_peak=rows[name].at_peak / count,
            at_rest=rows[name].at_end / count,
            textbook=textbook,
        )
        for name, textbook in _TEXTBOOK.items()
    ]


def bytes_per_parameter(trace: Trace, device: str | None = None) -> "pd.DataFrame":
    """Weights, gradients and optimizer state per parameter, beside the textbook's rule."""
    import pandas as pd

    return pd.DataFrame(parameter_rows(trace, device)).set_index("category")


# ---------------------------------------------------------------- health


@dataclass(frozen=True)
class HealthRow:
    """One thing that makes the trace less than whole."""

    name: str
    severity: counters.Severity
    count: int
    meaning: str
    advice: str


@once_per_trace
def health_rows(trace: Trace) -> list[HealthRow]:
    """Everything that was lost or did not match, the worst first; empty if nothing was."""
    counts = dict(trace.losses)
    for name, count in lifetimes.lifetimes(trace).counters.items():
        counts[name] = counts.get(name, 0) + count
    counts["allocator_disagrees"] = sum(
        abs(total - counted) for _, total, counted in agreement.differences(trace)
    )
    counts.update(misuse.counts(trace))
    counts["untimed_phases"] = device_times.missing(trace)
    errors_counted = trace.meta.get("callback_errors")
    counts["callback_errors"] = errors_counted if isinstance(errors_counted, int) else 0
    worst = ("loss", "warning", "info")
    rows = []
    for name, count in counts.items():
        if count and name not in counters.HARMLESS:
            known = counters.counter(name)
            rows.append(HealthRow(name, known.severity, count, known.meaning, known.advice))
    for key, name in (("cuda_problem", "no_cuda_events"), ("calls_problem", "no_calls")):
        if problem := str(trace.meta.get(key) or ""):
            known = counters.counter(name)
            rows.append(HealthRow(known.name, known.severity, 1, problem, known.advice))
    return sorted(rows, key=lambda row: (worst.index(row.severity), row.name))


def health(trace: Trace) -> "pd.DataFrame":
    """What was lost or could not be seen, and what to do about it."""
    import pandas as pd

    # Texts inside: pandas leaves out middle columns where the screen is narrow.
    names = ["name", "severity", "meaning", "advice", "count"]
    rows = [vars(row) for row in health_rows(trace)]
    return pd.DataFrame(rows, columns=names).set_index("name")
