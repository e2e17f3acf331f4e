"""The rows of a diff as people count them: layers that are alike, and lines that only moved.

    exact rows                                   for people
    -2 MiB  gone  h.0  aten::mm  train.py:311
    -2 MiB  gone  h.1  aten::mm  train.py:311    +2 MiB  grew  h.* (2 layers)  aten::mm
    +3 MiB  new   h.0  aten::mm  train.py:312                  train.py:312 (was 311)
    +3 MiB  new   h.1  aten::mm  train.py:312

First, rows that differ only in the numbers of their modules become one row. Then the lines of a
file are paired with those of the other side, among rows that are alike in all other keys. The
changes of these rows have the same sum as those of the exact rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple, TypeAlias

from pytracer.analysis.answers.diff import Diff, Row, by_change
from pytracer.basics.names import is_bare, layers_alike, numbers_text

LAYERED = ("module", "name")  # keys with numbers of layers
_MOST_APART = 8  # children of a Sequential that keep their own rows, as in the table
_MOST_COMPARED = 250_000  # pairs of lines


class Change(NamedTuple):
    """One row: its sum over the layers that changed."""

    row: Row  # "*" in its key stands for the numbers of several layers
    layers: int  # how many changed
    old_line: str  # the line's number before, "" if it did not move


@dataclass(frozen=True)
class Changes:
    """The rows that changed, the largest change first, and how many only moved."""

    rows: tuple[Change, ...]
    other_line: int  # rows that have the same bytes on another line
    other_layer: int  # rows that have the same bytes in another layer


_Key: TypeAlias = tuple[str, ...]
# Bytes and blocks of one side, by key with stars, then by the texts behind the stars.
_Members: TypeAlias = dict[_Key, tuple[int, int]]
_Side: TypeAlias = dict[_Key, _Members]


def changes(diff: Diff) -> Changes:
    """The changed rows of a diff, with alike layers as one row and moved lines as unmoved."""
    before, after = _folded(diff)
    old_keys = {} if diff.one_run else _pairs(diff.keys, before, after, diff.scripts)
    moved_away = set(old_keys.values()) - after.keys()
    rows = []
    other_line = other_layer = 0
    for key in {**after, **before}:
        if key in moved_away:
            continue
        old_key = old_keys.get(key, key)
        old_line = _old_line(diff.keys, old_key, key)
        row, layers = _row(diff.keys, key, before.get(old_key, {}), after.get(key, {}))
        if row.change:
            rows.append(Change(row, layers, old_line))
        elif old_line:
            other_line += 1
        elif layers:
            other_layer += 1
    total = diff.after.bytes - diff.before.bytes
    rows.sort(key=lambda change: by_change(change.row, total))
    return Changes(tuple(rows), other_line, other_layer)


def moved_lines(diff: Diff) -> dict[str, str]:
    """The lines before that are other lines after, if all their rows agree about it."""
    if diff.one_run or "line" not in diff.keys:
        return {}
    at = diff.keys.index("line")
    pairs = _pairs(diff.keys, *_folded(diff), diff.scripts)
    olds: dict[str, set[str]] = {}
    news: dict[str, set[str]] = {}
    for new, old in pairs.items():
        olds.setdefault(old[at], set()).add(new[at])
        news.setdefault(new[at], set()).add(old[at])
    return {
        old: new
        for old, (new, *others) in olds.items()
        if not others and len(news[new]) == 1 and old != new
    }


def _folded(diff: Diff) -> tuple[_Side, _Side]:
    """Both sides, with rows that differ only in the numbers of layers together."""
    layered = [diff.keys.index(key) for key in LAYERED if key in diff.keys]
    bare = {row.key[i] for row in diff.rows for i in layered if is_bare(row.key[i])}
    apart = bare if len(bare) <= _MOST_APART else set()
    before: _Side = {}
    after: _Side = {}
    for row in diff.rows:
        texts = tuple(row.key[i] for i in layered)
        key = tuple(
            layers_alike(text) if i in layered and text not in apart else text
            for i, text in enumerate(row.key)
        )
        if row.blocks_before:
            before.setdefault(key, {})[texts] = row.before, row.blocks_before
        if row.blocks_after:
            after.setdefault(key, {})[texts] = row.after, row.blocks_after
    return before, after


def _row(keys: _Key, key: _Key, before: _Members, after: _Members) -> tuple[Row, int]:
    """The sum of the layers that changed, and their number."""
    nothing = (0, 0)
    pairs = {
        texts: (before.get(texts, nothing), after.get(texts, nothing))
        for texts in {**before, **after}
    }
    changed = {texts: (old, new) for texts, (old, new) in pairs.items() if old[0] != new[0]}
    shown = list(key)
    for number, i in enumerate(keys.index(name) for name in LAYERED if name in keys):
        if changed:
            shown[i] = _pattern({texts[number] for texts in changed})
    old_bytes, new_bytes, old_blocks, new_blocks = (
        sum(sizes[side][what] for sizes in changed.values()) for what in (0, 1) for side in (0, 1)
    )
    change = new_bytes - old_bytes
    row = Row(tuple(shown), old_bytes, new_bytes, change, old_blocks, new_blocks)
    return row, len(changed)


def _pattern(names: set[str]) -> str:
    """The names as one, with a star for each number in which they differ."""
    if len(names) > 1 and all(map(is_bare, names)):
        return numbers_text(names)
    levels = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in levels)


def _old_line(keys: _Key, old_key: _Key, key: _Key) -> str:
    """The number of the line before the change, "" if it is the same."""
    if old_key == key:
        return ""
    old, new = (each[keys.index("line")].rpartition(":")[2] for each in (old_key, key))
    return old if old != new else ""


# ---------------------------------------------------------------- lines that moved


class _Line(NamedTuple):
    """A row of one side in an order by lines."""

    number: int
    bytes: int
    key: _Key


def _pairs(keys: _Key, before: _Side, after: _Side, scripts: tuple[str, str]) -> dict[_Key, _Key]:
    """Keys after the change, and the keys that the same rows had before.

    A row is the same if only its line differs, in the same file or in the other side's script.
    """
    if "line" not in keys:
        return {}
    at = keys.index("line")
    renamed = _other_script(at, before, after, scripts)
    lines: dict[tuple[_Key, str], tuple[list[_Line], list[_Line]]] = {}
    for which, side in enumerate((before, after)):
        for key, members in side.items():
            file, _, number = key[at].rpartition(":")
            if not number.isdecimal():
                continue
            file = renamed.get(file, file) if which == 0 else file
            rest = key[:at] + key[at + 1 :]
            line = _Line(int(number), sum(size for size, _ in members.values()), key)
            lines.setdefault((rest, file), ([], []))[which].append(line)
    names = keys[:at] + keys[at + 1 :]
    pairs: list[tuple[_Line, _Line]] = []
    for (rest, _), (old, new) in lines.items():
        made_by = [text for key, text in zip(names, rest, strict=True) if key in ("module", "op")]
        pairs += _paired(sorted(old), sorted(new), anonymous=not any(made_by))
    return {new.key: old.key for old, new in pairs}


def _other_script(at: int, before: _Side, after: _Side, scripts: tuple[str, str]) -> dict[str, str]:
    """The file before, and the file after, that are two versions of one script."""
    old, new = ({key[at].rpartition(":")[0] for key in side} - {""} for side in (before, after))
    gone, came = old - new, new - old
    if len(gone) != 1 or len(came) != 1:
        gone = {file for file in gone if PurePath(file).name == scripts[0]}
        came = {file for file in came if PurePath(file).name == scripts[1]}
    return {gone.pop(): came.pop()} if len(gone) == len(came) == 1 else {}


def _paired(
    old: Sequence[_Line], new: Sequence[_Line], *, anonymous: bool
) -> list[tuple[_Line, _Line]]:
    """The lines before, each with its line after.

    A line that is on both sides did not move, unless less has changed if all lines moved together.
    Lines of no known module and op are the same only if their bytes are.
    """
    there = {line.number: line for line in new}
    unmoved = [(line, there[line.number]) for line in old if line.number in there]
    stays = {line.number for line, _ in unmoved}
    left, right = ([line for line in side if line.number not in stays] for side in (old, new))
    if anonymous or len(left) * len(right) > _MOST_COMPARED:
        return unmoved + _same_bytes(left, right)
    apart = unmoved + _in_order(left, right)
    together = list(zip(old, new, strict=False))
    all_moved = left and right and len(old) == len(new) and _changed(together) < _changed(apart)
    return together if all_moved else apart


def _changed(pairs: Sequence[tuple[_Line, _Line]]) -> int:
    return sum(abs(new.bytes - old.bytes) for old, new in pairs)


def _same_bytes(old: Sequence[_Line], new: Sequence[_Line]) -> list[tuple[_Line, _Line]]:
    """Pairs of equal bytes, in the order of lines."""
    waiting: dict[int, list[_Line]] = {}
    for line in reversed(new):
        waiting.setdefault(line.bytes, []).append(line)
    return [(line, waiting[line.bytes].pop()) for line in old if waiting.get(line.bytes)]


def _in_order(old: Sequence[_Line], new: Sequence[_Line]) -> list[tuple[_Line, _Line]]:
    """All lines of the shorter side, each with one of the longer, so that least has changed."""
    if len(old) > len(new):
        return [(line, other) for other, line in _in_order(new, old)]
    # least[i][j]: the change if the first i lines have partners among the first j of the others.
    least = [[0] * (len(new) + 1) for _ in range(len(old) + 1)]
    for i in range(len(old) + 1):
        for j in range(i, len(new) + 1):
            if i:
                least[i][j] = least[i - 1][j - 1] + abs(new[j - 1].bytes - old[i - 1].bytes)
            if j > i:
                without = least[i][j - 1] + new[j - 1].bytes
                least[i][j] = min(least[i][j], without) if i else without
    pairs = []
    i, j = len(old), len(new)
    while i:
        with_last = least[i - 1][j - 1] + abs(new[j - 1].bytes - old[i - 1].bytes)
        if least[i][j] == with_last:
            pairs.append((old[i - 1], new[j - 1]))
            i -= 1
        j -= 1
    return pairs
