"""What a run needed, to compare later runs with: its peak, and the own peak of each category.

Each is a moment, with one row per category, module, op, line and phase. So a comparison names what
changed, and needs no trace of the run before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pytracer import errors
from pytracer.analysis.answers import diff, diff_rows
from pytracer.analysis.answers.diff import KEYS, Diff, Moment, Side
from pytracer.analysis.answers.diff_rows import Change
from pytracer.analysis.facts import usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.data.model_names import Roots
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORY, CATEGORY_ORDER

PEAK = "peak"
NAMES = (PEAK, *CATEGORY_ORDER)
Moments: TypeAlias = Mapping[str, Moment]


def moments(trace: Trace) -> Moments:
    """The moment of the peak, and that of the peak of each category that the trace has."""
    found = {PEAK: diff.moment(trace, KEYS, usage.peak(trace).position)}
    own, category = usage.on_device(trace), allocations(trace).category
    for name in CATEGORY_ORDER:
        which = own & (category == CATEGORY[name])
        if which.any():
            at = usage.highest_where(trace, which).position
            found[name] = diff.moment(trace, KEYS, at, which)
    return found


# ---------------------------------------------------------------- the comparison


@dataclass(frozen=True)
class Figure:
    """The peak, or a category's own peak, on both sides."""

    name: str
    diff: Diff
    is_over: bool  # it differs by more than is allowed

    @property
    def change(self) -> int:
        """How many bytes more."""
        return self.diff.after.bytes - self.diff.before.bytes


def compared(before: Moments, now: Moments, allowed: int) -> list[Figure]:
    """Each figure that either side has."""
    figures = []
    for name in NAMES:
        if name not in before and name not in now:
            continue
        old, new = _both(before.get(name), now.get(name), now[PEAK])
        between = diff.between(old, new, KEYS)
        over = abs(between.after.bytes - between.before.bytes) > allowed
        figures.append(Figure(name, between, over))
    return figures


def _both(old: Moment | None, new: Moment | None, like: Moment) -> tuple[Moment, Moment]:
    nothing = Side(0, like.side.device, None, None, dict.fromkeys(CATEGORY_ORDER, 0), None)
    empty = Moment(nothing, {}, like.roots, like.script)
    return old or empty, new or empty


def explained(figures: Sequence[Figure]) -> list[tuple[Diff, Change]]:
    """The changed rows of the figures that differ, each once.

    Those in the direction of the whole change come first, the largest before the others: where the
    peak has moved to another moment, other rows shrink.
    """
    largest: dict[tuple[str, ...], tuple[Diff, Change]] = {}
    for figure in figures:
        for one in diff_rows.changes(figure.diff).rows if figure.is_over else ():
            there = largest.get(one.row.key)
            if there is None or abs(there[1].row.change) < abs(one.row.change):
                largest[one.row.key] = figure.diff, one
    total = sum(figure.change for figure in figures)

    def order(one: tuple[Diff, Change]) -> tuple[bool, tuple[int, bool, int, tuple[str, ...]]]:
        row = one[1].row
        return row.change * total < 0, diff.by_change(row, total)

    return sorted(largest.values(), key=order)


# ---------------------------------------------------------------- the document


def document(found: Moments) -> dict[str, Any]:
    """The moments as JSON has them."""
    return {name: _written(moment) for name, moment in found.items()}


def _written(moment: Moment) -> dict[str, Any]:
    rows = ([*key, size, blocks] for key, (size, blocks) in sorted(moment.rows.items()))
    roots = moment.roots
    return {
        **vars(moment.side),
        "script": moment.script,
        "models": {"first": roots.plain, "models": roots.models, "others": sorted(roots.others)},
        "rows": list(rows),
    }


def read(found: Any) -> Moments:
    """The moments in a document.

    Raises:
        errors.UnreadableTrace: it is no such document.
    """
    try:
        read = {name: _read(found[name]) for name in NAMES if name in found}
    except (TypeError, KeyError, ValueError, AttributeError):
        read = {}
    if PEAK not in read:
        raise errors.UnreadableTrace("its figures are damaged")
    return read


def _read(one: Mapping[str, Any]) -> Moment:
    models = one["models"]
    roots = Roots(
        tuple(map(_text, models["models"])),
        frozenset(map(_text, models["others"])),
        _text(models["first"]),
    )
    step, phase, reserved = one["step"], one["phase"], one["reserved"]
    side = Side(
        _number(one["bytes"]),
        _text(one["device"]),
        None if step is None else _number(step),
        None if phase is None else _text(phase),
        {name: _number(one["by_category"][name]) for name in CATEGORY_ORDER},
        None if reserved is None else _number(reserved),
    )
    rows = {}
    for row in one["rows"]:
        *key, size, blocks = row
        if len(key) != len(KEYS):
            raise ValueError
        rows[tuple(map(_text, key))] = _number(size), _number(blocks)
    return Moment(side, rows, roots, _text(one["script"]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise TypeError
    return value
