"""The steps of the program: their peaks, their growth, and the duration of their phases."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.answers import peaks
from pytracer.analysis.facts import device_times, phases, scopes, timelines, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.usage import Peak
from pytracer.data import frames, meta
from pytracer.data.recorded import Trace
from pytracer.data.schema import I32, I64, PHASE, U64

if TYPE_CHECKING:
    import pandas as pd


def first_step(trace: Trace) -> int:
    """How many steps the program had made when the trace began; 0 if unknown."""
    return meta.of(trace).first_step


def when(trace: Trace, peak: Peak) -> str:
    """`step 3, in backward`; after the last step, `after step 3, in evaluation`."""
    step, line = peak.step or 0, timelines.timeline(trace)
    over = 0 < len(line.step_ends) <= step and not phases.trains_on(trace)
    name = (
        f"after step {first_step(trace) + step - 1}" if over else f"step {first_step(trace) + step}"
    )
    if peak.phase is None or peak.phase == "other":
        return f"{name}, between phases"
    stretch = line.stretch_at(trace.events.ticks[peak.position : peak.position + 1])
    evaluates = peak.phase == "forward" and not line.of_training[stretch].all()
    return f"{name}, in {peaks.kind_at(trace, peak.position) if evaluates else peak.phase}"


def updates_by_hand(trace: Trace) -> bool:
    """Whether a program trains (it has several backwards) without marks where its steps end."""
    backwards = int((scopes.tree(trace).kind == scopes.BACKWARD).sum())
    return backwards > 1 and len(timelines.timeline(trace).step_ends) == 0


def steps(trace: Trace, device: str | None = None) -> "pd.DataFrame":
    """One row per step: its peak, its bytes at begin and end, the duration of its phases.

    If training continued after the last step's end, the rest is a step of its own. An evaluation is
    not. A phase has two times: the host's, and on CUDA the device's. On CUDA, use the device's,
    because the host runs ahead. The device's times are NA if they were not measured.
    """
    rows = (row._asdict() for row in step_rows(trace, device))
    table = frames.of_rows(rows, StepRow._fields).set_index("step")
    return table.astype({f"device_{phase}_ns": "Int64" for phase in TIMED})


class StepRow(NamedTuple):
    """A step in numbers; sizes are bytes. A tuple, because a trace may have many thousands."""

    # pandas leaves out middle columns on a narrow screen, so the main columns come first and last.
    step: int
    peak_bytes: int
    growth_bytes: int  # end_bytes less the previous step's; in the first step, less start_bytes
    start_bytes: int
    end_bytes: int
    allocations: int
    micro_steps: int  # backwards that a forward preceded
    start_ns: int
    end_ns: int
    device_forward_ns: int | None  # by CUDA's events, on the current stream
    device_backward_ns: int | None
    device_optimizer_ns: int | None
    forward_ns: int  # by the host's clock; without the forwards of evaluations beside training
    backward_ns: int
    optimizer_ns: int


@dataclass(frozen=True)
class Growth:
    """Memory that equal runs of steps leave behind: `amounts` has one figure per run."""

    steps: int  # in a run
    amounts: list[int]

    @cached_property
    def per_step(self) -> int:
        """The median run's, divided by its steps; of ups and downs no more than what they leave."""
        median = float(np.median(self.amounts))
        least = median if self.goes_on else min(median, float(np.mean(self.amounts)))
        return int(least / self.steps)

    @cached_property
    def goes_on(self) -> bool:
        """Whether each run grows, and by at least half of their median."""
        return min(self.amounts) > 0 and 2 * min(self.amounts) >= float(np.median(self.amounts))


_NEARLY = 0.9  # of the fastest growth: shorter runs say the same more plainly
_ALIKE = 0.005  # of their growth: so little do equal runs differ


def steady_growth(growth: Sequence[int]) -> Growth:
    """The growth that goes on, from the growth of each step; that of single steps if there is none.

    A leak may come once per rollout or epoch: in every eighth step, for example. So runs of several
    steps count as well, if there are at least three: those that grow alike and leave the fewest
    steps out, else the shortest that explain nearly the fastest growth. Random ups and downs rarely
    go on like that, and a single large allocation never does. A leak may begin late: steps before
    it do not count.
    """
    until = np.cumsum([0, *growth])
    best = Growth(1, list(growth))
    if not best.goes_on:
        best = _late_growth(growth, until) or best
    runs = [
        run
        for run in _runs(until)
        if (not best.goes_on or _NEARLY * run.per_step > best.per_step) and _has_risen(until, run)
    ]
    if not runs:
        return best if best.goes_on else _in_the_last_half(growth, until) or best
    fastest = max(run.per_step for run in runs)
    alike = [run for run in runs if run.is_alike]
    chosen = max(alike, key=lambda run: (run.runs * run.steps, -run.steps), default=None)
    chosen = chosen or next(run for run in runs if run.per_step >= _NEARLY * fastest)
    amounts = _amounts(until, chosen.runs, np.array([chosen.steps]))[:, 0]
    return Growth(chosen.steps, amounts.tolist())


def _in_the_last_half(growth: Sequence[int], until: I64) -> Growth | None:
    """The same of the last half of the steps, if it is to levels that were never reached before."""
    half = len(growth) // 2
    if half < _LEAST_LATE or not _is_new(until, half):
        return None
    late = steady_growth(growth[half:])
    return late if late.goes_on else None


def _is_new(until: I64, first: int) -> bool:
    """Whether most of what grew from this step on is above all levels before it."""
    return bool(2 * (until[-1] - until[: first + 1].max()) > until[-1] - until[first])


class _Run(NamedTuple):
    """Runs of so many steps, each of which grows."""

    steps: int
    runs: int
    per_step: int
    is_alike: bool  # whether all grow by the same


def _has_risen(until: I64, run: _Run) -> bool:
    """Whether the last level is above all levels before the runs."""
    return bool(until[-1] > until[: len(until) - run.runs * run.steps].max())


def _runs(until: I64) -> list[_Run]:
    """The lengths of runs that all grow, shortest first."""
    found, steps = list[_Run](), len(until) - 1
    shortest = 2
    while shortest <= steps // 3:
        count = steps // shortest
        # All lengths that give as many runs at once: a trace may have many thousands of steps.
        lengths = np.arange(shortest, steps // count + 1)
        amounts = _amounts(until, count, lengths)
        least, median = amounts.min(axis=0), np.median(amounts, axis=0)
        alike = amounts.max(axis=0) - least <= _ALIKE * median
        for i in np.flatnonzero((least > 0) & (2 * least >= median)).tolist():
            length = int(lengths[i])
            found.append(_Run(length, count, int(median[i] / length), bool(alike[i])))
        shortest = int(lengths[-1]) + 1
    return found


def _amounts(until: I64, count: int, lengths: NDArray[Any]) -> I64:
    """By run and length: how much the last `count` runs of each length grew."""
    ends = len(until) - 1 - np.outer(np.arange(count, -1, -1), lengths)
    amounts: I64 = np.diff(until[ends], axis=0)
    return amounts


_LEAST_LATE = 5  # steps that grow until the end


def _late_growth(growth: Sequence[int], until: I64) -> Growth | None:
    """The growth of the last steps, to levels that were never reached before; None if there is none."""
    flat = np.flatnonzero(np.asarray(growth) <= 0)
    first = int(flat[-1]) + 1 if len(flat) else 0
    while len(growth) - first >= _LEAST_LATE:
        late = Growth(1, list(growth[first:]))
        if late.goes_on and _is_new(until, first):
            return late
        first += max((len(growth) - first) // 2, 1)
    return None


TIMED = ("forward", "backward", "optimizer")


def step_rows(trace: Trace, device: str | None = None) -> list[StepRow]:
    """See `steps`."""
    events, line = trace.events, timelines.timeline(trace)
    levels = _levels_of_steps(trace, device)
    if levels is None:
        return []
    level, firsts, cuts, ends, _ = levels
    count = len(ends)
    # A step that allocates nothing (views, for example) may end before the first event.
    bounds = np.append(np.minimum(events.ticks[0], ends[0]), ends)
    times = trace.time_ns(bounds)
    made = allocations(trace).step[usage.on_device(trace, device)]
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
    in_order = [columns[name] for name in StepRow._fields[1:]]
    return list(map(StepRow, range(count), *in_order))


class _StepLevels(NamedTuple):
    """The device's level over time, cut into steps."""

    level: I64  # at the start, and after each change
    firsts: NDArray[np.intp]  # per step, the change that it begins with
    cuts: NDArray[np.intp]  # per step, the number of changes until its end
    ends: U64  # per step, its end in ticks
    positions: I32  # of the changes


def _levels_of_steps(trace: Trace, device: str | None = None) -> _StepLevels | None:
    """None if there is no step."""
    events, line = trace.events, timelines.timeline(trace)
    if len(events.ticks) == 0:
        return None
    positions, levels, at_start = usage.levels_of(trace, device)
    ends = (
        np.append(line.step_ends, events.ticks[-1]) if phases.trains_on(trace) else line.step_ends
    )
    ends = np.maximum.accumulate(ends)  # the last step may have begun after the last event
    if len(ends) == 0:
        return None
    cuts = np.searchsorted(events.ticks[positions], ends, side="right")
    firsts = np.append(0, cuts[:-1])
    level = np.concatenate([[at_start], levels])[: cuts[-1] + 1]
    return _StepLevels(level, firsts, cuts, ends, positions)


def peak_positions(trace: Trace, device: str | None = None) -> list[int]:
    """For each of `step_rows`, the event at which its peak was first reached."""
    levels = _levels_of_steps(trace, device)
    if levels is None:
        return []
    places = np.append(usage.BEFORE, levels.positions)
    return [
        int(places[first + levels.level[first : cut + 1].argmax()])
        for first, cut in zip(levels.firsts, levels.cuts, strict=True)
    ]


@dataclass(frozen=True)
class PhaseMedians:
    """The duration of a step's phases: for each, the median of the steps that have it."""

    by_phase: dict[str, int]  # nanoseconds
    of_device: bool  # whether by the device's clock; otherwise by the host's


def phase_medians(trace: Trace) -> PhaseMedians | None:
    """The device's times, or on the CPU the host's; None if no phase of a whole step has a time."""
    count = len(timelines.timeline(trace).step_ends)
    of_device = usage.main_device(trace) != "cpu"
    by_phase = {}
    for phase in TIMED:
        times = (device_times.per_step if of_device else _host_times)(trace, phase, count)
        measured = [each for each in times if each]
        if measured:
            # The first step loads kernels and makes the optimizer's state.
            by_phase[phase] = int(np.median(measured[1:] if len(measured) > 2 else measured))
    return PhaseMedians(by_phase, of_device) if by_phase else None


def _host_times(trace: Trace, phase: str, steps: int) -> list[int]:
    line, durations = timelines.timeline(trace), _durations(trace)
    step = line.step_at(line.ticks)
    those = np.flatnonzero((line.phase == PHASE[phase]) & line.of_training & (step < steps))
    sums = np.zeros(steps, np.int64)
    np.add.at(sums, step[those], durations[those])
    return [int(each) for each in sums]


def _durations(trace: Trace) -> I64:
    """The duration of each stretch of the host's timeline, in ns. The last event ends the last."""
    line = timelines.timeline(trace)
    last = trace.events.ticks[-1:] if len(trace.events.ticks) else line.ticks[-1:]
    durations: I64 = np.maximum(np.diff(trace.time_ns(np.append(line.begins, last))), 0)
    return durations


def _time_until(trace: Trace, phase: str, ticks: U64) -> I64:
    """How long the program had been in the phase, in training, by each of these times."""
    line = timelines.timeline(trace)
    begins = trace.time_ns(line.ticks)
    counts = (line.phase == PHASE[phase]) & line.of_training
    before = np.append(0, np.cumsum(np.diff(begins) * counts[:-1]))
    at = line.stretch_at(ticks)
    total: I64 = before[at] + (trace.time_ns(ticks) - begins[at]) * counts[at]
    return total


def _micro_steps(line: timelines.Timeline, bounds: U64) -> NDArray[np.intp]:
    """How many backwards followed a forward, between each of these times and the next."""
    turns = np.flatnonzero(np.isin(line.phase, (timelines.FORWARD, timelines.BACKWARD_PHASE)))
    forward = line.phase[turns] == timelines.FORWARD
    pairs = np.flatnonzero(forward[:-1] & ~forward[1:])
    at = line.stretch_at(bounds)
    ended = np.searchsorted(turns[pairs + 1], at[1:], side="right")
    count: NDArray[np.intp] = np.maximum(ended - np.searchsorted(turns[pairs], at[:-1]), 0)
    return count
