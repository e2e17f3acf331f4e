"""A diff as text: the changes, the largest first, and a line for all others."""

from collections.abc import Iterator

from pytracer.analysis.answers import diff_rows
from pytracer.analysis.answers.diff import Diff, Side
from pytracer.analysis.answers.diff_rows import Change, Changes
from pytracer.export.table import cut_in_front
from pytracer.units import size_text

_MOST_ROWS = 6  # each takes one line or two
_LEAST_TEXT = 15  # the longest category, `optimizer_state`


def render(diff: Diff, names: tuple[str, str] = ("before", "after"), width: int = 80) -> str:
    """The screen as text, without a line break at its end."""
    lines = [
        *_sides(names, diff, width),
        *_change(diff, width),
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
    shown = [cut_in_front(name, room) for name in names]
    if shown[0] == shown[1] and names[0] != names[1]:  # too narrow: their own lines
        return [line for name, text in zip(names, texts, strict=True) for line in (name, text)]
    column = max(map(len, shown))
    return [f"{name:<{column}}  {text}" for name, text in zip(shown, texts, strict=True)]


def _moment(side: Side) -> str:
    when = f" in step {side.step}" if side.step is not None else ""
    if side.phase not in (None, "other"):
        when += f", {side.phase}"
    return f"{size_text(side.bytes):>10}  {side.device}{when}"


def _change(diff: Diff, width: int) -> Iterator[str]:
    """What changed in all, beside the bytes that the allocator reserves, if both sides know it."""
    change = _from_to(diff.before.bytes, diff.after.bytes)
    old, new = diff.before.reserved, diff.after.reserved
    if old is None or new is None:
        yield change
        return
    reserved = f"reserved {size_text(old)} -> {size_text(new)}, {_from_to(old, new)}"
    one_line = f"{change}   {reserved}"
    yield from (one_line,) if len(one_line) <= width else (change, reserved)


def _from_to(before: int, after: int) -> str:
    share = f" ({(after - before) / before:+.1%})" if before else ""
    return f"{signed(after - before)}{share}"


def _categories(diff: Diff, width: int) -> Iterator[str]:
    """The categories that changed, the largest change first."""
    before, after = diff.before.by_category, diff.after.by_category
    changes = sorted(((after[c] - before[c], c) for c in after), key=lambda pair: -abs(pair[0]))
    parts = [f"{name} {signed(change)}" for change, name in changes if change]
    line = ""
    for part in parts:
        if line and len(f"{line}, {part},") > width:
            yield f"{line},"
            line = ""
        line = f"{line}, {part}" if line else part
    if line:
        yield line


def _rows(diff: Diff, width: int) -> Iterator[str]:
    changes = diff_rows.changes(diff)
    moved = _moved(changes)
    if not changes.rows:
        nothing = "nothing else differs" if diff.rows else "both are empty"
        yield f"{nothing}: {moved}" if moved else nothing
        return
    for change in changes.rows[:_MOST_ROWS]:
        head = f"{signed(change.row.change):>12}  {change.row.kind:<7}"
        texts = _texts(diff, change) or ["(not known)"]
        if len(f"{head} {'  '.join(texts)}") <= width:
            yield f"{head} {'  '.join(texts)}"
            continue
        # The category and the module stand beside the number, the rest below.
        room = width - len(head) - 1
        for text in (*_fitted(texts[:2], room), *_fitted(texts[2:], room)):
            yield f"{head} {text}"
            head = " " * len(head)
    left = [change.row.change for change in changes.rows[_MOST_ROWS:]]
    if left:
        both = sum(size for size in left if size > 0), sum(size for size in left if size < 0)
        first, *second = [signed(size) for size in both if size]
        more = " and ".join([f"{first:>12}", *second])
        space = " " if second else "  "
        yield f"{more}{space}in {len(left):,} other row{'s' if len(left) > 1 else ''}"
    if moved:
        yield f"{size_text(0):>12}  in {moved}"


def _moved(changes: Changes) -> str:
    """The rows that have the same bytes in another place, "" if there are none."""
    count = changes.other_line + changes.other_layer
    places = [
        *(["another line"] if changes.other_line else []),
        *(["another layer"] if changes.other_layer else []),
    ]
    rows = "row that only moved to" if count == 1 else "rows that only moved to"
    return f"{count:,} {rows} {' or '.join(places)}" if count else ""


def _texts(diff: Diff, change: Change) -> list[str]:
    texts = [_text(key, text, change) for key, text in zip(diff.keys, change.row.key, strict=True)]
    return [text for text in texts if text]


def _text(key: str, text: str, change: Change) -> str:
    if key == "line" and change.old_line:
        return f"{text} (was {change.old_line})"
    shown = text
    if key in diff_rows.LAYERED and change.layers > 1 and ("*" in text or text.startswith("[")):
        # A pattern with two numbers, as in `h.*.mlp.*`, counts more than layers.
        shown += f" ({change.layers:,} {'layers' if text.count('*') < 2 else 'modules'})"
    return shown


def _fitted(texts: list[str], width: int) -> list[str]:
    """The texts in one line, in which the longest gives way; in a line each if that is too narrow."""
    fitted = list(texts)
    while (over := len("  ".join(fitted)) - width) > 0:
        length, longest = max((len(text), i) for i, text in enumerate(fitted))
        if length <= _LEAST_TEXT:
            return [cut_in_front(text, width) for text in texts]
        fitted[longest] = cut_in_front(fitted[longest], max(length - over, _LEAST_TEXT))
    return ["  ".join(fitted)] if fitted else []
