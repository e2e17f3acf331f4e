"""A comparison with a baseline: for the screen, and for a comment on a pull request."""

from collections.abc import Iterator, Sequence

from pytracer.analysis.answers import baselines
from pytracer.analysis.answers.baselines import PEAK, Figure
from pytracer.analysis.answers.diff import Diff
from pytracer.analysis.answers.diff_rows import Change
from pytracer.basics.units import size_text
from pytracer.export.diff import change_lines, change_texts, signed
from pytracer.export.terminal import PLAIN, RED, Terminal

_MOST_ON_SCREEN, _MOST_IN_COMMENT = 6, 3


def render(title: str, figures: Sequence[Figure], terminal: Terminal = PLAIN) -> str:
    """The figures, and what explains those that differ, the largest change first."""
    over = [figure for figure in figures if figure.is_over]
    lines = terminal.wrap(title)
    shown = over or [figure for figure in figures if figure.name == PEAK]
    lines += ["", f"{'':<20}{'baseline':>10}  {'now':>10}  {'change':>10}"]
    for figure in shown:
        before, now = figure.diff.before.bytes, figure.diff.after.bytes
        change = terminal.paint(f"{signed(now - before):>10}", RED if now > before else "")
        sizes = f"{size_text(before):>10}  {size_text(now):>10}  {change}"
        lines.append(f"{_named(figure):<20}{sizes}")
    rows = baselines.explained(figures)
    if rows:
        lines += ["", "The largest changes:"]
    for one in rows[:_MOST_ON_SCREEN]:
        lines += change_lines(*one, terminal)
    left = len(rows) - _MOST_ON_SCREEN
    if left > 0:
        lines.append(f"{'':>12}  and {left:,} smaller change{'s' * (left > 1)} (--json has all)")
    return "\n".join(line.rstrip() for line in lines)


def _named(figure: Figure) -> str:
    return figure.name if figure.name == PEAK else f"  {figure.name}"


def document(figures: Sequence[Figure]) -> dict[str, object]:
    """The figures and the changes for programs."""
    return {
        "figures": [
            {
                "name": figure.name,
                "before": figure.diff.before.bytes,
                "now": figure.diff.after.bytes,
                "over": figure.is_over,
            }
            for figure in figures
        ],
        "changes": [_change(*one) for one in baselines.explained(figures)],
    }


def _change(diff: Diff, change: Change) -> dict[str, object]:
    row = change.row
    return {
        **dict(zip(diff.keys, row.key, strict=True)),
        "before": row.before,
        "now": row.after,
        "change": row.change,
        "kind": row.kind,
    }


def comment(title: str, by_rank: Sequence[tuple[str, Sequence[Figure]]]) -> str:
    """The comparison as Markdown."""
    lines = [f"### {title}"]
    for name, figures in by_rank:
        lines += ["", *([f"**{name}**", ""] if name else []), *_table(figures)]
        rows = baselines.explained(figures)[:_MOST_IN_COMMENT]
        if rows:
            lines += ["", "The largest changes:", "", *(_item(*one) for one in rows)]
    return "\n".join(lines) + "\n"


def _table(figures: Sequence[Figure]) -> Iterator[str]:
    yield "| at its own peak | before | now | change |"
    yield "|---|---:|---:|---:|"
    for figure in figures:
        if figure.is_over or figure.name == PEAK:
            before, now = figure.diff.before.bytes, figure.diff.after.bytes
            name = "**all memory**" if figure.name == PEAK else figure.name
            change = signed(now - before) if figure.change else "none"
            yield f"| {name} | {size_text(before)} | {size_text(now)} | {change} |"


def _item(diff: Diff, change: Change) -> str:
    texts = (text.replace("`", "'") for text in change_texts(diff, change))
    named = ", ".join(f"`{text}`" for text in texts)
    return f"- {signed(change.row.change)} {change.row.kind}: {named}"
