"""Budgets: limits on a trace's memory, and its growth since a saved trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytracer import errors
from pytracer.analysis.answers import breakdown, training_steps
from pytracer.analysis.answers.training_steps import StepRow
from pytracer.analysis.facts import grouping, usage
from pytracer.basics.units import parse_size
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORY_ORDER

_PART = 10  # a step with a tenth of the growth is worth naming
LIMITS = ("peak", *CATEGORY_ORDER, "growth_per_step")


@dataclass(frozen=True)
class Exceeded:
    """A limit that is exceeded (`measured` also returns those that are not). Sizes are bytes."""

    name: str
    limit: int
    found: int


def check(
    trace: Trace, limits: Mapping[str, int | str], device: str | None = None
) -> list[Exceeded]:
    """The limits that are exceeded, in the order given; see `measured`."""
    return [row for row in measured(trace, limits, device) if row.found > row.limit]


def measured(
    trace: Trace, limits: Mapping[str, int | str], device: str | None = None
) -> list[Exceeded]:
    """Each limit with the trace's figure, in the order given. A category's is its own peak.

    Raises:
        errors.UsageError: a limit or size does not exist, or the trace has too few steps.
    """
    own_peak = {row.category: row.own_peak for row in breakdown.category_rows(trace, device)}
    rows = []
    for name, size in limits.items():
        if name == "peak":
            amount = usage.peak(trace, device).bytes
        elif name == "growth_per_step":
            amount = growth_per_step(trace, device)
        elif name in own_peak:
            amount = own_peak[name]
        else:
            raise unknown(name)
        rows.append(Exceeded(name, parse_size(size), amount))
    return rows


def unknown(name: str) -> errors.UsageError:
    """The error about a limit that does not exist."""
    listed = errors.did_you_mean(name, LIMITS) or f"; there is: {', '.join(LIMITS)}"
    return errors.UsageError(f"no limit is called {name!r}{listed}")


def growth_per_step(trace: Trace, device: str | None = None) -> int:
    """The growth that goes on after the first step, which makes the optimizer's state.

    It is the median step's or, if more is left behind in every few steps, the median of such runs.
    """
    rows = training_steps.step_rows(trace, device)[1:]
    if len(rows) < 2:
        raise errors.UsageError(
            f"growth per step needs three steps, and this trace has {len(rows) + 1}; "
            "a step ends at optimizer.step() or t.step()"
        )
    return _per_step(rows)


def _per_step(rows: Sequence[StepRow]) -> int:
    return training_steps.steady_growth([row.growth_bytes for row in rows]).per_step


def seldom_growth(trace: Trace) -> tuple[int, list[int]]:
    """The bytes and the steps of growth that came too seldom to tell whether it goes on.

    No bytes if `growth_per_step` counts the growth, or if nothing of it is left.
    """
    rows = training_steps.step_rows(trace)[1:]
    total = sum(row.growth_bytes for row in rows)
    if total <= 0 or _per_step(rows) > 0:
        return 0, []
    return total, [row.step for row in rows if row.growth_bytes * _PART > total]


@dataclass(frozen=True)
class Difference:
    """One row of a comparison; sizes are bytes at the two peaks."""

    kind: str  # "category" or "module"
    name: str
    before: int
    now: int


def differences(trace: Trace, baseline: Trace, modules: int = 5) -> list[Difference]:
    """The differences in any category, and in the modules that changed most."""
    before, now = usage.peak(baseline).by_category, usage.peak(trace).by_category
    rows = [Difference("category", name, before[name], now[name]) for name in CATEGORY_ORDER]
    held = [
        {row.name: row.bytes for row in grouping.holders(each, "module", usage.alive(each))}
        for each in (baseline, trace)
    ]
    names = sorted({*held[0], *held[1]})
    changed = [Difference("module", n, held[0].get(n, 0), held[1].get(n, 0)) for n in names]
    changed.sort(key=lambda row: -abs(row.now - row.before))
    return [row for row in (*rows, *changed[:modules]) if row.now != row.before]
