"""The list of changes as text. Every place that shows changes has its words from here."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pytracer.analysis.facts import usage
from pytracer.analysis.forecasts import changes
from pytracer.analysis.forecasts.changes import Change
from pytracer.basics.units import size_text
from pytracer.data import meta
from pytracer.data.recorded import Trace
from pytracer.export.terminal import BOLD, GREEN, Terminal, plain

if TYPE_CHECKING:
    import pandas as pd

HEADS = {
    "mistake": "Mistakes",
    "free": "Free savings",
    "trade": "Savings at a price",
    "noticed": "Noticed; whether it is needed is not known",
}
_MOST = 3  # on the screen


def saves(row: Change) -> str:
    """The saving in words; "" if no replay shows it."""
    return "" if row.saves is None else f"saves {size_text(row.saves)}"


def body(row: Change) -> str:
    """The change, its price, and whether it is enough for an allocation that failed."""
    text = row.change
    if row.kind != "noticed":
        text += f" Price: {row.price}. Results: {row.numbers}."
    enough = {True: "Enough", False: "Not enough"}
    return text if row.enough is None else f"{text} {enough[row.enough]} for what failed."


def said(row: Change) -> str:
    """The change as one paragraph."""
    return ": ".join(filter(None, (saves(row), body(row))))


def best(trace: Trace, device: str) -> Iterator[tuple[str, str]]:
    """The first changes, each with its kind, and how to see the others."""
    found = changes.changes(trace, device)
    for row in found[:_MOST]:
        yield row.kind, ": ".join(filter(None, (saves(row), row.change)))
    if len(found) > _MOST:
        command = "pytracer summary --advice"
        if meta.of(trace).imagined:  # a file is kept only where it is asked for
            command = "--keep FOLDER, then pytracer summary --advice FOLDER/CARD.pytrace"
        yield "more", f"{len(found) - _MOST} more: {command}, or t.advice()"


def text(loaded: Any, terminal: Terminal) -> str:
    """The list for this terminal."""
    trace, peak = loaded.data, loaded.peak
    found = changes.changes(trace, peak.device)
    return _listed(found, together(trace, peak.device), peak.bytes, terminal)


def of_table(table: "pd.DataFrame") -> str:
    """The list as `t.advice()` prints it: from its rows, so that those which are left are shown."""
    columns = [name for name in Change.__dataclass_fields__ if name != "edit"]
    if not {*columns} <= {*table.columns}:
        return str(table.to_string())
    rows = []
    for row in table[columns].to_dict("records"):
        of_row: dict[str, Any] = {k: None if str(v) == "<NA>" else v for k, v in row.items()}
        rows.append(Change(**of_row))
    peak = table.attrs["peak"]
    after = table.attrs["peak_after_all"] if len(rows) > 1 else None
    return _listed(rows, _together(after, peak), peak, plain())


def _listed(found: list[Change], together: str, peak: int, terminal: Terminal) -> str:
    lines = [f"The peak is {size_text(peak)}."]
    if not found:
        none = f"{lines[0]} No change is known that lowers it by a hundredth."
        return "\n".join(terminal.wrap(none))
    for kind, head in HEADS.items():
        rows = [one for one in found if one.kind == kind]
        lines += ["", terminal.paint(head, BOLD)] if rows else []
        for i, row in enumerate(rows):
            lines += [""] if i and rows[i - 1].code else []  # the code ends there
            lines += _row(row, terminal)
    if together:
        lines += ["", *terminal.wrap(together)]
    return "\n".join(lines)


def together(trace: Trace, device: str) -> str:
    """What all mistakes and free savings do together; "" if there is one change, or none."""
    if len(changes.changes(trace, device)) < 2:
        return ""
    return _together(changes.together(trace, device), usage.peak(trace, device).bytes)


def _together(after: int | None, peak: int) -> str:
    if after is None or after >= peak:
        return ""
    return f"All mistakes and free savings together: the peak is {size_text(after)}."


def _row(row: Change, terminal: Terminal) -> list[str]:
    saved = saves(row)
    start = f"  {saved:<17}"
    lines = terminal.wrap(body(row), start, " " * len(start))
    if saved:
        lines[0] = lines[0].replace(saved, terminal.paint(saved, GREEN), 1)
    if row.code:  # in lines of its own, so that it can be copied
        lines += ["", *terminal.code(row.code)]
    return lines
