"""Writes docs/api.md: every public name by its docstring, the tables' columns, the JSON documents.

python tools/api_page.py

A test fails if the page is not what this writes. The names are those that docs/stability.md promises, the columns those of pytracer/data/columns.py, the
documents those of docs/schemas.
"""

import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import pytracer  # noqa: E402 - ours, from this checkout
from pytracer import errors  # noqa: E402
from pytracer.data.columns import TABLES  # noqa: E402
from pytracer.reading.views import Views  # noqa: E402

PAGE = ROOT / "docs" / "api.md"
SCHEMAS = ROOT / "docs" / "schemas"
HEAD = """\
# API reference

What can I call, and which columns and documents do I get?

`python tools/api_page.py` writes this page. [stability.md](stability.md) says how long these names stay.
"""
_SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Attributes):$")


def text_of(thing: object) -> str:
    """The docstring as Markdown: sections such as `Args:` become lists."""
    lines, in_section = [], False
    for line in (inspect.getdoc(thing) or "").splitlines():
        entry = re.match(r"    (\*{0,2}[\w. ]+): (.*)", line)
        if line == "Example:":
            lines += [line, ""]  # its lines are indented: code
        elif found := _SECTION.match(line):
            in_section = True
            lines += [f"{found[1]}:", ""]
        elif in_section and entry:
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            in_section = in_section and (not line or line.startswith("    "))
            lines.append(line.removeprefix("      ") if in_section else line)
    return "\n".join(lines)


def signature(name: str, thing: Any) -> str:
    if not callable(thing):
        return name
    types = str(inspect.signature(thing)).replace("pytracer.", "")
    quoted = re.sub(
        r"'([^']*)'|\b(?:pathlib(?:\._local)?|typing|collections\.abc)\.",
        lambda found: found[1] or "",
        types,
    )
    return name + re.sub(r"\(self(, )?", "(", quoted)


def entry(name: str, thing: Any, level: int = 3) -> str:
    shown = thing.fget if isinstance(thing, property) else thing
    head = name if isinstance(thing, property) else signature(name, thing)
    return f"{'#' * level} {name}\n\n```text\n{head}\n```\n\n{text_of(shown)}\n"


def members(kind: type, but: type | None = None) -> Iterator[tuple[str, Any]]:
    """The public methods and properties, in the order of the source."""
    inherited = set(dir(but)) if but else set()
    for base in reversed(kind.__mro__):
        for name, thing in vars(base).items():
            if not name.startswith("_") and name not in inherited:
                yield name, getattr(kind, name) if inspect.isfunction(thing) else thing


def names() -> Iterator[str]:
    yield "## pytracer\n"
    for name in pytracer.__all__:
        thing = getattr(pytracer, name)
        if callable(thing):
            yield entry(f"pytracer.{name}", thing)
    yield f"## On a trace\n\n{text_of(Views)}\n"
    for name, thing in members(Views):
        yield entry(f"t.{name}", thing)
    for title, kind, prefix in (
        ("On a trace that records", pytracer.trace, "t"),
        ("On a loaded trace", pytracer.LoadedTrace, "t"),
        ("On a job", pytracer.Job, "job"),
        ("On a recorder that is always on", pytracer.always, "recorder"),
        ("On its history", pytracer.History, "history"),
    ):
        yield f"## {title}\n"
        for name, thing in members(kind, Views):
            yield entry(f"{prefix}.{name}", thing)
    yield "## Errors\n\n| error | exit code | meaning |\n|---|---|---|"
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and kind.__module__ == errors.__name__:
            meaning = " ".join(text_of(kind).split("\n\n")[0].split())
            yield f"| `errors.{name}` | {kind.exit_code} | {meaning} |"


def tables() -> Iterator[str]:
    yield "\n## Columns of the tables\n\nA column in bold is the index. NA stands for what is not known.\n"
    for title, columns in TABLES.items():
        yield f"### {title}\n\n| column | dtype | unit | meaning |\n|---|---|---|---|"
        for one in columns:
            name = f"**`{one.name}`**" if one.is_index else f"`{one.name}`"
            yield f"| {name} | {one.dtype} | {one.unit} | {one.meaning} |"
        yield ""


def documents() -> Iterator[str]:
    yield (
        "## JSON documents\n\nEach is one object, with the version of its form in `pytracer_json`. "
        "`demo` prints that of\n`summary` and `path`. `gemm`, `confirm` and `--largest-batch` have "
        "no schema yet.\n"
    )
    yield "| for example | JSON Schema |\n|---|---|"
    for path in sorted(SCHEMAS.glob("*.json")):
        command = json.loads(path.read_text())["title"]
        yield f"| `{command}` | [{path.name}](schemas/{path.name}) |"


def page() -> str:
    return "\n".join([HEAD, *names(), *tables(), *documents()]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
