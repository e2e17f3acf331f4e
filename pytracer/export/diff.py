"""A diff as text: the changes, the largest first, and a line for all others."""

import textwrap
from collections.abc import Iterator

from pytracer.analysis.answers import diff_rows
from pytracer.analysis.answers.diff import Diff, Side
from pytracer.analysis.answers.diff_rows import Change, Changes
from pytracer.basics.units import size_text
from pytracer.export.terminal import BOLD, GREEN, PLAIN, RED, Terminal, cut_in_front

_MOST_ROWS = 6  # each takes one line or two


def render(
    diff: Diff, names: tuple[str, str] = ("before", "after"), terminal: Terminal = PLAIN
) -> str:
    """The screen as text, without a line break at its end."""
    lines = [
        *_sides(names, diff, terminal),
        *_change(diff, terminal),
        *_categories(diff, terminal),
        *terminal.wrap(diff.note),
        "",
        *_rows(diff, terminal),
    ]
    return "\n".join(line.rstrip() for line in lines)


def signed(amount: int) -> str:
    """Bytes with their sign, `+3.57 MiB`."""
    return size_text(amount) if amount <= 0 else f"+{size_text(amount)}"


def change_lines(diff: Diff, change: Change, terminal: Terminal, *, cut: bool = True) -> list[str]:
    """The lines of one change: the number, what happened, and every key."""
    return list(_colored(_row(diff, change, terminal, cut=cut), change, terminal))


def _sides(names: tuple[str, str], diff: Diff, terminal: Terminal) -> list[str]:
    texts = [_moment(side) for side in (diff.before, diff.after)]
    room = max(terminal.width - max(map(len, texts)) - 2, 8)
    shown = [cut_in_front(name, room) for name in names]
    if shown[0] == shown[1] and names[0] != names[1]:  # too narrow: their own lines
        both = zip(names, texts, strict=True)
        return [line for name, text in both for line in (*terminal.wrap(name), text)]
    column = max(map(len, shown))
    return [f"{name:<{column}}  {text}" for name, text in zip(shown, texts, strict=True)]


def _moment(side: Side) -> str:
    when = f" in step {side.step}" if side.step is not None else ""
    if side.phase not in (None, "other"):
        when += f", {side.phase}"
    return f"{size_text(side.bytes):>10}  {side.device}{when}"


def _change(diff: Diff, terminal: Terminal) -> Iterator[str]:
    """What changed in all, beside the bytes that the allocator reserves, if both sides know it."""
    change = terminal.paint(_from_to(diff.before.bytes, diff.after.bytes), BOLD)
    old, new = diff.before.reserved, diff.after.reserved
    if old is None or new is None:
        yield change
        return
    reserved = f"reserved {size_text(old)} -> {size_text(new)}, {_from_to(old, new)}"
    one_line = len(change) + 3 + len(reserved) <= terminal.width
    yield from (f"{change}   {reserved}",) if one_line else (change, reserved)


def _from_to(before: int, after: int) -> str:
    share = f" ({(after - before) / before:+.1%})" if before else ""
    return f"{signed(after - before)}{share}"


def _categories(diff: Diff, terminal: Terminal) -> Iterator[str]:
    """The categories that changed, the largest change first."""
    before, after = diff.before.by_category, diff.after.by_category
    changes = sorted(((after[c] - before[c], c) for c in after), key=lambda pair: -abs(pair[0]))
    return terminal.listed(f"{name} {signed(change)}" for change, name in changes if change)


def _rows(diff: Diff, terminal: Terminal) -> Iterator[str]:
    changes = diff_rows.changes(diff)
    moved = _moved(changes)
    if not changes.rows:
        differs = moved or diff.before.reserved != diff.after.reserved
        nothing = "nothing else differs" if differs else "nothing differs"
        nothing = nothing if diff.rows else "both are empty"
        yield from terminal.wrap(f"{nothing}: {moved}" if moved else nothing)
        return
    shown = changes.rows[:_MOST_ROWS]
    rows = [_row(diff, change, terminal) for change in shown]
    for change, row in zip(shown, rows, strict=True):
        if rows.count(row) > 1:  # what tells them apart was cut away
            row = _row(diff, change, terminal, cut=False)
        yield from _colored(row, change, terminal)
    left = [change.row.change for change in changes.rows[_MOST_ROWS:]]
    if left:
        both = sum(size for size in left if size > 0), sum(size for size in left if size < 0)
        first, *second = [signed(size) for size in both if size]
        more = " and ".join([f"{first:>12}", *second])
        space = " " if second else "  "
        yield f"{more}{space}in {len(left):,} other row{'s' if len(left) > 1 else ''}"
    if moved:
        yield from terminal.wrap(f"in {moved}", f"{size_text(0):>12}  ", " " * 14)


def _row(diff: Diff, change: Change, terminal: Terminal, *, cut: bool = True) -> list[str]:
    """The lines of one change: the number, what happened, and every key."""
    head = f"{signed(change.row.change):>12}  {change.row.kind:<7} "
    texts = change_texts(diff, change) or ["(not known)"]
    whole = head + "  ".join(texts)
    if len(whole) <= terminal.width:
        return [whole]
    # The category and the module stand beside the number, the rest below.
    room = terminal.width - len(head)
    first, *more = (
        line for part in (texts[:2], texts[2:]) for line in _packed(part, room, cut=cut)
    )
    return [head + first, *(" " * len(head) + line for line in more)]


def _colored(lines: list[str], change: Change, terminal: Terminal) -> Iterator[str]:
    """The lines with the number red if memory grew, and green if it shrank."""
    number = signed(change.row.change)
    color = RED if change.row.change > 0 else GREEN
    yield lines[0].replace(number, terminal.paint(number, color), 1)
    yield from lines[1:]


def _moved(changes: Changes) -> str:
    """The rows that have the same bytes in another place, "" if there are none."""
    count = changes.other_line + changes.other_layer
    places = [
        *(["another line"] if changes.other_line else []),
        *(["another layer"] if changes.other_layer else []),
    ]
    rows = "row that only moved to" if count == 1 else "rows that only moved to"
    return f"{count:,} {rows} {' or '.join(places)}" if count else ""


def change_texts(diff: Diff, change: Change) -> list[str]:
    """The known keys of a change: its category, module, op, line and phase."""
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


def _packed(texts: list[str], room: int, *, cut: bool) -> list[str]:
    """The texts in as few lines as hold them whole. One that is longer than a line is cut or broken."""
    lines: list[str] = []
    for text in texts:
        if lines and len(f"{lines[-1]}  {text}") <= room:
            lines[-1] += f"  {text}"
        elif cut or len(text) <= room:
            lines.append(cut_in_front(text, room))
        else:
            lines += textwrap.wrap(text, room)
    return lines
