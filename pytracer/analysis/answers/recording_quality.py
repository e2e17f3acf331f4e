"""How good the recording is: its losses and blind spots, and its cost for the program."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pytracer import frames, health as counters, meta
from pytracer.analysis.allocator import agreement
from pytracer.analysis.answers import misuse
from pytracer.analysis.facts import device_times, lifetimes
from pytracer.recorded import Trace, once_per_trace

if TYPE_CHECKING:
    import pandas as pd

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
    for name, count in lifetimes.lifetimes(trace).counters.items():
        counts[name] = counts.get(name, 0) + count
    counts["allocator_disagrees"] = sum(
        abs(total - counted) for _, total, counted in agreement.differences(trace)
    )
    counts.update(misuse.counts(trace))
    counts["untimed_phases"] = device_times.missing(trace)
    noted = meta.of(trace)
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
