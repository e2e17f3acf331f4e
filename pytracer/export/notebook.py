"""Answers as a notebook shows them: a sentence, and a table that fits a narrow frame."""

import html
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pytracer.analysis.allocator.replay import NO, YES
from pytracer.analysis.forecasts.checkpoint_plans import CheckpointPlan
from pytracer.analysis.forecasts.fits import Fits
from pytracer.basics.names import short_line
from pytracer.basics.units import size_text, time_text
from pytracer.data.model_names import module_text
from pytracer.export import fits_text
from pytracer.export.html import printable, without_folders

if TYPE_CHECKING:
    import pandas as pd

_MOST_ROWS = 30
_COLORS = {YES: "#2a8a3e", NO: "#c62f2f"}
_PERHAPS = "#a86b00"
_KINDS = dict.fromkeys(("module", "op", "line", "name"), "path")
_LINE = "border-top:1px solid rgba(128,128,128,.3)"


# How a column breaks its lines: numbers and words nowhere, paths anywhere, sentences between words.
_STYLES = {
    "number": "text-align:right;white-space:nowrap",
    "word": "text-align:left;white-space:nowrap",
    "path": "text-align:left;overflow-wrap:anywhere",
    "sentence": "text-align:left",
}


class Column(NamedTuple):
    """A column of a table: its head, and how its values are written."""

    head: str
    text: Callable[[Any], str]
    kind: str = "number"


def _name(value: Any) -> str:
    return without_folders(str(value))


def _signed(value: Any) -> str:
    return ("+" if value > 0 else "") + size_text(int(value))


def _size(value: Any) -> str:
    return size_text(int(value))


def _time(value: Any) -> str:
    return time_text(int(value)) if value else ""


def _share(value: Any) -> str:
    return f"{value:.1%}"


def _ratio(value: Any) -> str:
    return f"{value:.2f}"


# ---------------------------------------------------------------- tables


def changed(table: "pd.DataFrame") -> str:
    """A diff: what changed, and how many rows did not."""
    if "change" not in table or "kind" not in table:
        return _of_frame(table, {name: Column(str(name), _name, "path") for name in table.columns})
    rows = table[table["change"] != 0]
    numbers = ("before", "after", "change", "blocks_before", "blocks_after", "kind")
    columns = {"change": Column("change", _signed), "kind": Column("", _name, "word")}
    columns |= {
        name: Column(str(name), _name, _KINDS.get(name, "word"))
        for name in table.columns
        if name not in numbers
    }
    columns |= {"before": Column("before", _size), "after": Column("after", _size)}
    same = len(table) - len(rows)
    note = (
        f"{same:,} row{'s have' if same != 1 else ' has'} the same bytes on both sides."
        if same
        else ""
    )
    return _of_frame(rows, columns, note)


def advised(table: "pd.DataFrame") -> str:
    """The list of changes, each with its price, and the code below it."""
    columns = {
        "kind": Column("", _name, "word"),
        "saves": Column("saves", _size),
        "peak_after": Column("peak then", _size),
        "change": Column("change", _name, "sentence"),
        "price": Column("price", _name, "sentence"),
        "numbers": Column("results", _name, "word"),
    }
    codes = [code for code in table.get("code", ()) if code]
    return _of_frame(table, columns) + "".join(map(_code, codes))


def costs(table: "pd.DataFrame") -> str:
    """The costs: the ratios and the verdict of each part. The DataFrame has all columns."""
    columns = {
        "forward_ns": Column("forward", _time),
        "backward_ns": Column("backward", _time),
        "time_share": Column("share", _share),
        "flop_ratio": Column("FLOPs", _ratio),
        "byte_ratio": Column("bytes", _ratio),
        "time_ratio": Column("time", _ratio),
        "expected_ratio": Column("expected", _ratio),
        "verdict": Column("verdict", _name, "word"),
        "cause": Column("because", _name, "sentence"),
    }
    hidden = len(set(table.columns) - set(columns))
    note = "FLOPs, bytes and time are backward's over forward's."
    if hidden:
        note += f" {hidden} more columns: list(t.cost().columns)."
    name = str(table.index.name or "")
    with_names = table.reset_index() if name else table
    return _of_frame(with_names, {name: Column(name, _name, "path"), **columns}, note)


# ---------------------------------------------------------------- answers


def fits(found: Fits) -> str:
    """Whether a run fits, and what each setting of the allocator needs."""
    text = fits_text.answer(found)
    parts = [_answer(text, found.verdict), _paragraph(fits_text.beside(found))]
    if found.replay.failed is not None and found.holders:
        rows = [
            (size_text(one.bytes), one.category, one.module, short_line(one.line))
            for one in found.holders
        ]
        parts.append(
            _table(
                ("held at the failure", "category", "module", "line"),
                rows,
                ("number", "word", "path", "path"),
            )
        )
    choices = [
        (
            size_text(choice.smallest_room + found.beside),
            choice.settings or "torch's defaults",
            "as recorded" if choice.as_recorded else "",
            "fits" if found.card is not None and found.surely_runs(choice) else "",
        )
        for choice in found.choices
    ]
    parts.append(
        _table(
            (fits_text.of_settings(found), "setting of the allocator", "", ""),
            choices,
            ("number", "path", "word", "word"),
        )
    )
    return "".join([*parts, *map(_paragraph, found.notes)])


def plan(found: CheckpointPlan) -> str:
    """The modules to checkpoint, the other plans beside it, and the code to paste."""
    rows, chosen = [], None
    for i, one in enumerate(found.frontier):
        chosen = i if one == found.chosen else chosen
        modules = (*one.modules, *(f"{name} (offloaded)" for name in one.offloaded))
        rows.append(
            (
                size_text(one.peak_reserved or one.peak),
                f"{one.time_ratio - 1:+.0%}",
                "fits" if one.fits else "",
                ", ".join(map(module_text, modules)) or "none",
            )
        )
    heads = ("needs", "time", "", "modules to checkpoint")
    parts = [
        _answer(fits_text.answer_of_plan(found), found.verdict),
        _table(heads, rows, ("number", "number", "word", "path"), bold=chosen),
        *map(_paragraph, (*found.warnings, *found.notes)),
    ]
    return "".join([*parts, _code(found.code) if found.code else ""])


# ---------------------------------------------------------------- HTML


def _of_frame(table: "pd.DataFrame", columns: Mapping[Any, Column], note: str = "") -> str:
    """The named columns of the first rows, those that have any value."""
    shown = table.head(_MOST_ROWS)
    there = {name: column for name, column in columns.items() if name in shown}
    there = {name: column for name, column in there.items() if _has_values(shown[name])}
    texts = [
        ["" if _is_missing(value) else column.text(value) for value in shown[name]]
        for name, column in there.items()
    ]
    heads = [column.head for column in there.values()]
    kinds = [column.kind for column in there.values()]
    left = len(table) - len(shown)
    notes = [f"{left:,} more row{'s' if left > 1 else ''}."] if left else []
    notes += [note] if note else []
    body = _table(heads, zip(*texts, strict=True), kinds) if len(shown) else "nothing"
    return f"<div>{body}{_paragraph(' '.join(notes)) if notes else ''}</div>"


def _is_missing(value: Any) -> bool:
    return value is None or str(value) in ("<NA>", "nan")


def _has_values(values: Iterable[Any]) -> bool:
    return any(not _is_missing(value) and value != "" for value in values)


def _table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    kinds: Sequence[str],
    bold: int | None = None,
) -> str:
    """A table as wide as its frame at most, without the columns in which no row has anything."""
    rows = list(rows)
    there = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    of_there = [[row[i] for i in there] for row in rows]
    heads, kinds = [heads[i] for i in there], [kinds[i] for i in there]
    return "".join(_lines_of_table(heads, of_there, kinds, bold))


def _lines_of_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], kinds: Sequence[str], bold: int | None
) -> Iterator[str]:
    yield '<table style="border-collapse:collapse;max-width:100%;margin:4px 0;font-size:13px">'
    yield f"<tr>{''.join(map(partial(_cell, 'th'), heads, kinds))}</tr>"
    for number, row in enumerate(rows):
        weight = ";font-weight:600" if number == bold else ""
        cells = "".join(map(partial(_cell, "td"), row, kinds))
        yield f'<tr style="{_LINE}{weight}">{cells}</tr>'
    yield "</table>"


def _cell(tag: str, text: str, kind: str) -> str:
    written = _with_breaks(text) if kind == "path" else _safe(text)
    return f'<{tag} style="padding:2px 8px;vertical-align:top;{_STYLES[kind]}">{written}</{tag}>'


def _answer(text: str, verdict: str) -> str:
    color = _COLORS.get(verdict, _PERHAPS)
    return (
        f'<div style="border-left:4px solid {color};padding:2px 10px;margin:4px 0;'
        f'font-weight:600">{_safe(text)}</div>'
    )


def _paragraph(text: str) -> str:
    return f'<div style="margin:4px 0;max-width:72ch;font-size:13px">{_safe(text)}</div>'


def _code(text: str) -> str:
    style = "background:rgba(128,128,128,.12);padding:8px;overflow-x:auto;font-size:12px"
    return f'<pre style="{style}">{_safe(text)}</pre>'


def _safe(text: str) -> str:
    return html.escape(printable(text))


def _with_breaks(path: str) -> str:
    """The path, in which a line may end behind each part."""
    return _safe(path).replace(".", ".<wbr>").replace("::", "::<wbr>").replace("/", "/<wbr>")
