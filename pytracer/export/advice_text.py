"""The list of changes as text."""

import textwrap
from typing import Any

from pytracer.analysis.forecasts import changes
from pytracer.units import size_text

_HEADS = {
    "mistake": "Mistakes",
    "free": "Free savings",
    "trade": "Savings at a price",
    "noticed": "Noticed, and not proved to be in vain",
}


def text(loaded: Any, width: int) -> str:
    """The list for a screen of this width."""
    trace, peak = loaded.data, loaded.peak
    found = changes.changes(trace, peak.device)
    lines = [f"The peak is {size_text(peak.bytes)}."]
    if not found:
        none = f"{lines[0]} No change is known that lowers it by a hundredth."
        return textwrap.fill(none, width)
    for kind, head in _HEADS.items():
        rows = [one for one in found if one.kind == kind]
        lines += ["", head] if rows else []
        for row in rows:
            lines += _row(row, width)
    after = changes.together(trace, peak.device)
    if after < peak.bytes and len(found) > 1:
        together = f"All mistakes and free savings together: the peak is {size_text(after)}."
        lines += ["", *textwrap.wrap(together, width)]
    return "\n".join(lines)


def _row(row: changes.Change, width: int) -> list[str]:
    saves = "" if row.saves is None else f"saves {size_text(row.saves)}"
    start = f"  {saves:<17}"
    body = row.change
    if row.kind != "noticed":
        body += f" Price: {row.price}. Results: {row.numbers}."
    indent = " " * len(start)
    lines = textwrap.wrap(body, width, initial_indent=start, subsequent_indent=indent)
    if row.code:  # in lines of its own, so that it can be copied
        lines += ["", *textwrap.indent(row.code, "    ").splitlines()]
    return lines
