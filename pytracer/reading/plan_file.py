"""A plan's file, `plan.toml`: changes of a program that need no edit of it.

The file has one KEY = VALUE per line, each as TOML and JSON both write it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

from pytracer import errors
from pytracer.analysis.allocator import settings as allocator_settings
from pytracer.basics import files
from pytracer.data.changes import OPTIMIZERS, Changes, changes_of

_LARGEST = 1 << 20  # bytes of a file
_LEAST_PARTS = 2  # of a batch
_LINE = re.compile(r"(\w+)\s*=\s*(.+)")


@dataclass(frozen=True)
class Saved:
    """A plan's file: its changes, and what was promised of them."""

    changes: Changes
    promised: Mapping[str, int | float | str] = field(default_factory=dict)

    def text(self, title: str) -> str:
        """The file's text."""
        lines = [f"# {title}", *_lines({k: v for k, v in asdict(self.changes).items() if v})]
        if self.promised:
            lines += ["", "[promised]", *_lines(self.promised)]
        return "\n".join(lines) + "\n"


def _lines(values: Mapping[str, Any]) -> Iterator[str]:
    """Text that both TOML and JSON read: TOML has no surrogates, and DEL only escaped."""
    for key, value in values.items():
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        yield f"{key} = {text}"


def read(path: Path) -> Saved:
    """Reads a plan's file.

    Raises:
        errors.UsageError: there is no such file, or a line of it is not understood.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST + 1).decode()
    except OSError as problem:
        question = files.similar(str(path), ".toml")
        raise errors.UsageError(f"cannot read {path}: {problem.strerror}{question}") from None
    except UnicodeDecodeError:
        text = ""
    if not text or len(text) > _LARGEST:
        raise errors.UsageError(f"{path} is no plan: pytracer fit train.py -o plan.toml writes one")
    values: dict[str, dict[str, Any]] = {"": {}}
    table = ""
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if line.startswith("[") and line.endswith("]"):
            table = line.strip("[] ")
            values.setdefault(table, {})
        elif line and not line.startswith("#"):
            key, value = _pair(line, f"{path}:{number}")
            values[table][key] = value
    return Saved(_changes(values[""], path), values.get("promised", {}))


def _pair(line: str, where: str) -> tuple[str, Any]:
    match = _LINE.fullmatch(line)
    try:
        if match is not None:
            return match[1], json.loads(match[2])
    except (ValueError, RecursionError):
        pass
    raise errors.UsageError(f'{where}: write one KEY = VALUE per line, as in checkpoint = ["h.0"]')


def _changes(values: Mapping[str, Any], path: Path) -> Changes:
    known = {each.name: type(each.default) for each in fields(Changes)}
    for key, value in values.items():
        if key not in known:
            question = errors.did_you_mean(key, known) or f"; there are {', '.join(known)}"
            raise errors.UsageError(f"{path} has {key!r}, which is no change{question}")
        kind = list if known[key] is tuple else known[key]
        names = value if kind is list and isinstance(value, list) else []
        if type(value) is not kind or not all(isinstance(name, str) and name for name in names):
            wanted = {
                list: 'a list of modules, as in ["h.0"]',
                bool: "true or false",
                int: "a number",
            }
            raise errors.UsageError(f"{path}: {key} is {wanted.get(kind, 'a text')}")
    found = changes_of(values)
    if found.optimizer and found.optimizer not in OPTIMIZERS:
        raise errors.UsageError(f"{path}: optimizer is {', '.join(OPTIMIZERS[:-1])} or loop")
    if "micro_batches" in values and found.micro_batches < _LEAST_PARTS:
        raise errors.UsageError(f"{path}: micro_batches is {_LEAST_PARTS} or more")
    allocator_settings.parse(found.settings)
    return found


def write(path: Path, saved: Saved, title: str) -> None:
    """Writes the file whole or not at all."""
    text = saved.text(title)

    def fill(file: BinaryIO) -> None:
        file.write(text.encode())

    files.write_whole(path, fill, overwrite=True)
