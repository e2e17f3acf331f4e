"""A budget that was exceeded, and what grew, as text."""

from collections.abc import Sequence

from pytracer.analysis.budgets import Difference, Exceeded
from pytracer.export.table import size_text


def exceeded_lines(rows: Sequence[Exceeded]) -> list[str]:
    """`over      peak 37.0 MiB, limit 30.0 MiB: 7.00 MiB too much`."""
    return [
        f"over      {row.name} {size_text(row.found)}, limit {size_text(row.limit)}: "
        f"{size_text(row.found - row.limit)} too much"
        for row in rows
    ]


def difference_lines(rows: Sequence[Difference]) -> list[str]:
    """Before, now and the change, one row each."""
    if not rows:
        return ["No category and no module differs from the baseline at the peak."]
    lines = [f"{'at the peak':<34}{'before':>12}{'now':>12}{'change':>13}"]
    for row in rows:
        change = row.now - row.before
        text = f"{'+' if change > 0 else ''}{size_text(change)}"
        lines.append(
            f"{row.name[-33:]:<34}{size_text(row.before):>12}{size_text(row.now):>12}{text:>13}"
        )
    return lines
