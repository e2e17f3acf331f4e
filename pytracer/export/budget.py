"""The result of a check against a budget, as text."""

from collections.abc import Sequence

from pytracer.analysis.answers import training_steps
from pytracer.analysis.answers.budgets import Difference, Exceeded, seldom_growth
from pytracer.basics.units import size_text
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORY_ORDER


def exceeded_lines(rows: Sequence[Exceeded]) -> list[str]:
    """`over      peak 37.0 MiB, limit 30.0 MiB: 7.00 MiB too much`."""
    return [
        f"over      {row.name} {size_text(row.found)}{_own(row)}, limit {size_text(row.limit)}: "
        f"{size_text(row.found - row.limit)} too much"
        for row in rows
    ]


def kept_lines(rows: Sequence[Exceeded]) -> list[str]:
    """`activations 3.25 MiB of 10.0 MiB, at its own peak`: a line for each limit that holds."""
    return [
        f"  {row.name} {size_text(row.found)} of {size_text(row.limit)}{_own(row, ', ')}"
        for row in rows
    ]


def growth_note(trace: Trace) -> str:
    """A line about growth that is not counted as growth per step; "" if there is none."""
    total, steps = seldom_growth(trace)
    if not total:
        return ""
    first = training_steps.first_step(trace)
    named = ", ".join(str(first + step) for step in steps)
    return (
        f"But memory grew by {size_text(total)}, in step{'s' * (len(steps) > 1)} {named}: too seldom "
        "to tell whether it goes on. Record more steps, with pytracer run --steps all."
    )


def _own(row: Exceeded, before: str = " ") -> str:
    """Marks a category's own peak, because the table shows categories at the peak of all memory."""
    return f"{before}at its own peak" if row.name in CATEGORY_ORDER else ""


def difference_lines(rows: Sequence[Difference]) -> list[str]:
    """A row for each difference: before, now, and the change."""
    if not rows:
        return ["No category and no module differs from the baseline at the peak."]
    lines = [f"{'at the peak':<34}{'before':>12}{'now':>12}{'change':>13}"]
    modules = [row for row in rows if row.kind == "module"]
    lines += [_difference(row, row.name) for row in rows if row.kind != "module"]
    if modules:
        lines.append("modules")
    return [*lines, *(_difference(row, f"  {row.name[-31:]}") for row in modules)]


def _difference(row: Difference, name: str) -> str:
    change = row.now - row.before
    text = f"{'+' if change > 0 else ''}{size_text(change)}"
    return f"{name:<34}{size_text(row.before):>12}{size_text(row.now):>12}{text:>13}"
