"""How good the recording is: losses, blind spots, mistakes in its use, and its cost.

`pytracer.data.health` has the meaning of each name, and the advice.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.facts import devices, lines, scopes, timelines
from pytracer.analysis.facts.lifetimes import lifetimes
from pytracer.analysis.facts.scopes import BACKWARD, MODULE, OPTIMIZER
from pytracer.data import frames, health as counters, meta, sanitized
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import ACTION, CATEGORY, DEVICE_TYPES, SCOPE_GRAD, U32, Mask

if TYPE_CHECKING:
    import pandas as pd

_OF_AN_OPTIMIZER = "param_groups["  # how the capture names parameters that are in no module
_FEWEST_CALLS = 20 * 61  # an estimate needs at least twenty samples


class OwnTime(NamedTuple):
    """The processor time of recording, and its share of the time from the first to the last moment.

    A moment is a call of an outermost module, a backward pass or a step. Both times exclude the
    time in which other programs had the core, so the share does not depend on them. They also
    exclude the time in which threads waited for each other. torch's own cost of reporting every
    operator is not included.
    """

    ns: int
    share: float


def own_time(trace: Trace) -> OwnTime | None:
    """The time of recording; None in files by other tools, by killed programs, of too few calls."""
    ticks, ns, lasted, waited = meta.of(trace).own_time
    clock = trace.clock.ticks
    is_whole = trace.file_report.get("status", "complete") == "complete"
    calls = len(trace.events.ticks) + len(trace.scopes.ticks)  # at least
    if not is_whole or calls < _FEWEST_CALLS or len(clock) < 2 or clock[-1] <= clock[0]:
        return None
    if ticks + ns <= 0 or lasted <= 0:
        return None
    ns_per_tick = int(trace.clock.unix_ns[-1] - trace.clock.unix_ns[0]) / int(clock[-1] - clock[0])
    taken, whole = ticks * ns_per_tick + ns, lasted * ns_per_tick - waited
    # One thread computes no longer than the program runs. Several threads together may; then the
    # share is 1.
    return OwnTime(round(taken), taken / max(taken, whole))


@dataclass(frozen=True)
class HealthRow:
    """One way in which the trace is incomplete."""

    name: str
    severity: counters.Severity
    count: int
    meaning: str
    advice: str


@once_per_trace
def health_rows(trace: Trace) -> list[HealthRow]:
    """All losses and mismatches, the worst first; empty if there are none."""
    counts = dict(trace.losses)
    for name, count in lifetimes(trace).counters.items():
        counts[name] = counts.get(name, 0) + count
    counts["allocator_disagrees"] = sum(
        abs(total - counted) for _, total, counted in differences(trace)
    )
    counts.update(mistakes(trace))
    noted = meta.of(trace)
    counts["untimed_phases"] = noted.phase_times.missing
    counts["callback_errors"] = noted.callback_errors
    worst = ("loss", "warning", "info")
    rows = []
    for name, count in counts.items():
        if count and name not in counters.HARMLESS:
            entry = counters.counter(name)
            rows.append(HealthRow(name, entry.severity, count, entry.meaning, entry.advice))
    problems = {"no_cuda_events": noted.cuda_problem, "no_calls": noted.calls_problem}
    for name, problem in problems.items():
        if problem:
            entry = counters.counter(name)
            rows.append(HealthRow(entry.name, entry.severity, 1, problem, entry.advice))
    return sorted(rows, key=lambda row: (worst.index(row.severity), row.name))


def health(trace: Trace) -> "pd.DataFrame":
    """All losses and blind spots, with advice for each."""
    # Texts inside: pandas leaves out middle columns on a narrow screen.
    names = ["name", "severity", "meaning", "advice", "count"]
    return frames.of_rows(health_rows(trace), names).set_index("name")


# ---------------------------------------------------------------- the allocators' own counters


def differences(trace: Trace) -> Iterator[tuple[str, int, int]]:
    """Devices on which the live bytes by the events (first) differ from the allocator's (second).

    Without a snapshot at the beginning of a device's recording (the allocator reports no events)
    there is nothing to compare. Nor is there if a block came or went while the counters were read.
    """
    if meta.of(trace).cuda_problem:
        return
    lives = lifetimes(trace)
    for device in devices.counted_devices(trace):
        expected = devices.counted(trace, device, "requested_bytes.current")
        if expected is None or device == "cpu":
            continue
        here = devices.on(trace, device, lives.place)
        alive = _alive_when_counted(trace, device, here)
        if alive is None:
            continue
        total = int(lives.bytes[alive & here].sum())
        if total != expected:
            yield device, total, expected


def _alive_when_counted(trace: Trace, device: str, here: Mask) -> Mask | None:
    """The blocks that were alive as the counters were read; None if one of them changed meanwhile."""
    lives, ticks = lifetimes(trace), trace.events.ticks
    before, after = (
        devices.counted(trace, device, f"ticks.{moment}") for moment in ("before", "after")
    )
    if before is None or after is None or not 0 <= before <= after < 2**64:
        return lives.completed < 0  # an older file: they were read right before its end
    changes = np.concatenate([lives.start[here], lives.completed[here]])
    times = ticks[changes[changes >= 0]]
    if ((times >= before) & (times <= after)).any():
        return None
    made = (lives.start < 0) | (ticks[np.maximum(lives.start, 0)] < before)
    gone = (lives.completed >= 0) & (ticks[np.maximum(lives.completed, 0)] < before)
    alive: Mask = made & ~gone
    return alive


# ---------------------------------------------------------------- mistakes


def mistakes(trace: Trace) -> dict[str, int]:
    """How often the trace shows each mistake in how the program traces or trains, by name."""
    return {
        "training_threads": lines.training_at_once(trace),
        "weights_elsewhere": _weights_elsewhere(trace),
        "foreign_parameters": _foreign_parameters(trace),
        "steps_without_backward": _steps_without_backward(trace),
    }


def _weights_elsewhere(trace: Trace) -> int:
    """Weights that lie on a device whose memory is not recorded."""
    recorded = meta.of(trace).options.devices
    if not recorded:
        return 0
    events, (positions, _) = trace.events, _weight_labels(trace)
    place = sanitized.within(events.place[positions], len(trace.places.device_type))
    kind = trace.places.device_type[place]
    missing = [i for i, name in enumerate(DEVICE_TYPES) if name not in recorded]
    return len(np.unique(events.address[positions[np.isin(kind, missing)]]))


def _weight_labels(trace: Trace) -> tuple[NDArray[np.intp], U32]:
    """Positions of the events that label weights, and their rows of the label table."""
    events, labels = trace.events, sanitized.labels(trace)
    positions = np.flatnonzero(events.action == ACTION["label"])
    row = sanitized.within(events.bytes[positions], len(labels.category)).astype(np.uint32)
    are_weights = labels.category[row] == CATEGORY["weights"]
    return positions[are_weights], row[are_weights]


def _foreign_parameters(trace: Trace) -> int:
    """Parameters of an optimizer that are in no module, although modules have parameters."""
    labels, strings = sanitized.labels(trace), trace.strings
    names = {
        strings[labels.name[row]]
        for row in np.unique(_weight_labels(trace)[1])
        if strings[labels.role[row]] == "parameter"
    }
    foreign = sum(_OF_AN_OPTIMIZER in name for name in names)
    return foreign if foreign < len(names) else 0


def _steps_without_backward(trace: Trace) -> int:
    """Optimizer steps with a forward but no backward since the previous step.

    A forward without grad mode does not count, since it needs no backward: an evaluation between
    two optimizers' steps, or gradients that were estimated without one.
    """
    tree = scopes.tree(trace)
    modules = tree.kind == MODULE
    tells = timelines.tells_of_grad_mode(trace)
    if tells is not None:
        with_grad = tree.module[tells & (tree.flags & SCOPE_GRAD != 0)]
        modules &= np.isin(np.arange(len(modules)), with_grad)
    own = lines.on_main_line(trace, tree.thread)
    steps = np.sort(tree.begin[own & (tree.kind == OPTIMIZER)])

    def since_last_step(which: Mask) -> NDArray[np.intp]:
        before = np.searchsorted(np.sort(tree.begin[which]), steps)
        return np.diff(before, prepend=0)

    forwards = since_last_step(own & modules)
    backwards = since_last_step(tree.kind == BACKWARD)
    return int(((forwards > 0) & (backwards == 0)).sum())
