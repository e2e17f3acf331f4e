"""A diff as text: growth and new rows, the largest first."""

from collections.abc import Iterator

from pytracer.analysis.answers.diff import Diff, Row, Side
from pytracer.analysis.facts import owners
from pytracer.units import size_text

_MOST_ROWS = 6  # each takes one line or two


def render(diff: Diff, names: tuple[str, str] = ("before", "after"), width: int = 80) -> str:
    """The screen as text, without a line break at its end."""
    lines = [
        *_sides(names, diff, width),
        _change(diff),
        *_categories(diff, width),
        *([diff.note] if diff.note else []),
        "",
        *_rows(diff, width),
    ]
    return "\n".join(line.rstrip() for line in lines)


def signed(amount: int) -> str:
    """Bytes with their sign, `+3.57 MiB`."""
    return size_text(amount) if amount <= 0 else f"+{size_text(amount)}"


def _sides(names: tuple[str, str], diff: Diff, width: int) -> list[str]:
    texts = [_moment(side) for side in (diff.before, diff.after)]
    room = max(width - max(map(len, texts)) - 2, 8)
    shown = [_short(name, room) for name in names]
    column = max(map(len, shown))
    return [f"{name:<{column}}  {text}" for name, text in zip(shown, texts, strict=True)]


def _moment(side: Side) -> str:
    when = f" in step {side.step}" if side.step is not None else ""
    if side.phase not in (None, "other"):
        when += f", {side.phase}"
    return f"{size_text(side.bytes):>10}  {side.device}{when}"


def _change(diff: Diff) -> str:
    change = diff.after.bytes - diff.before.bytes
    share = f" ({change / diff.before.bytes:+.1%})" if diff.before.bytes else ""
    return f"{signed(change)}{share}"


def _categories(diff: Diff, width: int) -> Iterator[str]:
    """The categories that changed, the largest change first."""
    before, after = diff.before.by_category, diff.after.by_category
    changes = sorted(((after[c] - before[c], c) for c in after), key=lambda pair: -abs(pair[0]))
    parts = [f"{name} {signed(change)}" for change, name in changes if change]
    while len(", ".join(parts)) > width:
        parts.pop()
    if parts:
        yield ", ".join(parts)


def _rows(diff: Diff, width: int) -> Iterator[str]:
    rows = [row for row in diff.rows if row.change]
    if not rows:
        yield "nothing else differs" if diff.rows else "both are empty"
        return
    for row in rows[:_MOST_ROWS]:
        head = f"{signed(row.change):>12}  {row.kind:<7}"
        texts = _texts(diff, row) or ["(not known)"]
        if len(f"{head} {'  '.join(texts)}") <= width:
            yield f"{head} {'  '.join(texts)}"
            continue
        # The category and the module stand beside the number, the rest below.
        yield f"{head} {_short('  '.join(texts[:2]), width - len(head) - 1)}"
        yield f"{'':>{len(head)}} {_short('  '.join(texts[2:]), width - len(head) - 1)}"
    left = rows[_MOST_ROWS:]
    if left:
        more = signed(sum(row.change for row in left))
        yield f"{more:>12}  in {len(left):,} other row{'s' if len(left) > 1 else ''}"


def _texts(diff: Diff, row: Row) -> list[str]:
    shown = (
        module_text(text) if key == "module" else text
        for key, text in zip(diff.keys, row.key, strict=True)
    )
    return [text for text in shown if text]


def module_text(name: str) -> str:
    """The name of a module. A child of a Sequential is a number, shown as `[0]` as in the table."""
    return owners.numbers_text([name]) if name.isdecimal() else name


def _short(text: str, width: int) -> str:
    """The text, or its end if it is too long, because names differ at the end."""
    return text if len(text) <= width else "..." + text[len(text) - width + 3 :]
