"""What a program would have changed, in a few lines."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from pytracer.basics.units import size_text
from pytracer.export.terminal import PLAIN, Terminal
from pytracer.sandbox.written import Change

_MOST_NAMES = 4  # of each kind of change
_KINDS = {
    "written": "written {} file{}",
    "folder": "made {} folder{}",
    "removed": "removed {} file{} or folder{}",
    "mode": "changed the mode or time of {} file{}",
}


def render(changes: Sequence[Change], *, kept: bool, keep: str, terminal: Terminal = PLAIN) -> str:
    """The changes in words; "" if there are none. `keep` says how to keep them."""
    by_path = {change.path: change for change in changes}  # of several runs, the last
    parts = []
    for kind, words in _KINDS.items():
        of_kind = [change for change in by_path.values() if change.kind == kind]
        if of_kind:
            many = "s" if len(of_kind) > 1 else ""
            parts.append(f"{words.format(len(of_kind), many, many)}: {_names(of_kind)}")
    if not parts:
        return ""
    if kept:
        text = f"Your files were changed, as --write says. The program has {'; '.join(parts)}"
    else:
        text = f"Nothing of yours was changed. The program would have {'; '.join(parts)}{keep}"
    return textwrap.fill(text, terminal.width, break_long_words=False, break_on_hyphens=False)


def _names(changes: Sequence[Change]) -> str:
    names = []
    for change in changes[:_MOST_NAMES]:
        size = f" ({size_text(change.size)})" if change.kind == "written" else ""
        names.append(f"{_shown(change.path)}{size}")
    more = len(changes) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _shown(path: str) -> str:
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path
