"""How results are kept: compact JSON, a row a line, and rows with the same names as a table."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_WIDE = 300  # what fits in a line of so many characters is one line
_DIGITS = 10  # of a measured figure; bytes and counts are whole numbers, and have all of theirs
_TABLE = {"columns", "rows"}


def write(path: Path, document: Any) -> None:
    """Writes results, for `read`."""
    path.write_text(_text(_packed(document)) + "\n")


def read(path: Path) -> Any:
    """Returns the results that `write` was given, with rounded figures."""
    return json.loads(path.read_text(), object_hook=_unpacked)


def only(found: Any, *names: str) -> Any:
    """Returns these entries of a dict; of a list, those of each dict."""
    if isinstance(found, list):
        return [only(each, *names) for each in found]
    return {name: found[name] for name in names if name in found}


def _packed(found: Any) -> Any:
    if isinstance(found, float):
        return float(f"{found:.{_DIGITS}g}")
    if isinstance(found, dict):
        return {name: _packed(each) for name, each in found.items()}
    if not isinstance(found, list | tuple):
        return found
    rows = [_packed(each) for each in found]
    names = list(rows[0]) if len(rows) > 1 and isinstance(rows[0], dict) else []
    if not names or any(not isinstance(row, dict) or list(row) != names for row in rows):
        return rows
    return {"columns": names, "rows": [list(row.values()) for row in rows]}


def _unpacked(found: dict[str, Any]) -> Any:
    if found.keys() != _TABLE:
        return found
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def _text(found: Any) -> str:
    text = json.dumps(found, separators=(",", ":"))
    if len(text) <= _WIDE or not isinstance(found, dict | list):
        return text
    parts: Iterable[str]
    if isinstance(found, list):
        parts, ends = map(_text, found), "[]"
    else:
        parts, ends = (f"{json.dumps(name)}:{_text(each)}" for name, each in found.items()), "{}"
    return f"{ends[0]}\n" + ",\n".join(parts) + f"\n{ends[1]}"
