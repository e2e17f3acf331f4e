"""The file of `pytracer baseline`: which run was imagined, and what it needed under each torch."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from pytracer import errors
from pytracer.analysis.answers import baselines
from pytracer.analysis.answers.baselines import Moments
from pytracer.basics import files
from pytracer.imagined.script import Plan

_KEY, _FORMAT = "pytracer_baseline", 1
_LARGEST = 64 << 20  # bytes of a file; one of a large model has less than one
# What decides the bytes, beside the program and torch.
_OF_RUN = ("capacity", "steps", "assume", "ranks", "sizes", "values", "model")
_NEW = "write a new one: pytracer baseline"


@dataclass(frozen=True)
class Baseline:
    """A run on a card, and the moments of each rank by the release of torch."""

    card: str
    arguments: tuple[str, ...]  # of the program, without its name
    run: Mapping[str, Any]
    by_torch: Mapping[str, Mapping[int, Moments]] = field(default_factory=dict)

    def with_ranks(self, torch: str, ranks: Mapping[int, Moments]) -> "Baseline":
        """The same, and what the ranks needed under this torch."""
        return replace(self, by_torch={**self.by_torch, torch: ranks})

    def under(self, torch: str, path: Path) -> Mapping[int, Moments]:
        """The moments under this release of torch.

        Raises:
            errors.UsageError: the file has none.
        """
        if torch not in self.by_torch:
            there = " and ".join(sorted(self.by_torch))
            raise errors.UsageError(
                f"{path} is of torch {there}, and this is torch {torch}, which may need other bytes; "
                f"add it to the file: pytracer baseline -o {path}, with the program as before"
            )
        return self.by_torch[torch]

    def plan(self, asked: Plan) -> Plan:
        """The plan, which names the program, with the settings of this run."""
        model = self.run["model"]
        if model is not None and asked.model is not None:
            model = {**model, "folder": asked.model["folder"]}
        return replace(asked, **{**self.run, "model": model}, card=self.card, stacks=True)

    def write(self, path: Path) -> None:
        """Writes the file whole or not at all."""
        by_torch = {
            torch: {str(rank): baselines.document(found) for rank, found in ranks.items()}
            for torch, ranks in self.by_torch.items()
        }
        document = {
            _KEY: _FORMAT,
            "card": self.card,
            "arguments": list(self.arguments),
            **self.run,
            "torch": by_torch,
        }

        def fill(file: BinaryIO) -> None:
            file.write((_lines(document) + "\n").encode())

        files.write_whole(path, fill, overwrite=True)


def release(version: str) -> str:
    """The release of a torch: it decides the bytes, and not for which CUDA it was built."""
    return version.partition("+")[0]


def of(plan: Plan, card: str) -> Baseline:
    """The baseline of this plan, without figures."""
    run = {name: getattr(plan, name) for name in _OF_RUN}
    if plan.model is not None:
        run["model"] = {name: value for name, value in plan.model.items() if name != "folder"}
    return Baseline(card, plan.program[1:], {**run, "assume": dict(plan.assume)})


def refuse_others(before: Baseline, now: Baseline, path: Path) -> None:
    """Refuses a program that is run in another way than the file's.

    Raises:
        errors.UsageError: the arguments, the card or a setting differ.
    """
    if before.arguments != now.arguments:
        was, are = (" ".join(each.arguments) or "none" for each in (before, now))
        raise errors.UsageError(
            f"{path} is of the program with other arguments: they were {was}, and are {are}"
        )
    if before.card != now.card:
        raise errors.UsageError(f"{path} is of {before.card}, and not of {now.card}; {_NEW}")
    different = [name for name in _OF_RUN if before.run[name] != now.run[name]]
    if different:
        raise errors.UsageError(f"{path} is of a run with another {different[0]}; {_NEW}")


def read(path: Path) -> Baseline:
    """Reads a file of `pytracer baseline`.

    Raises:
        errors.UnreadableTrace: there is no such file, or it is not one of these.
    """
    if not path.exists():
        raise errors.UnreadableTrace(
            f"{path}: there is no such file{files.similar(str(path), '.json')}; write it first: "
            f"pytracer baseline train.py --on H100 -o {path}"
        )
    if not path.is_file():
        raise errors.UnreadableTrace(f"{path} is no file of pytracer baseline")
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST + 1)
        document = json.loads(text) if len(text) <= _LARGEST else None
    except OSError as problem:
        raise errors.UnreadableTrace(f"{path} cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or _KEY not in document:
        trace = ": it is a trace, for pytracer check FILE" if path.suffix == ".pytrace" else ""
        raise errors.UnreadableTrace(f"{path} is no file of pytracer baseline{trace}; {_NEW}")
    if document[_KEY] != _FORMAT:
        raise errors.UnreadableTrace(
            f"{path} has format {document[_KEY]!r}, and this pytracer reads {_FORMAT}; {_NEW}"
        )
    try:
        return _baseline(document)
    except (TypeError, KeyError, ValueError, AttributeError, errors.UnreadableTrace):
        raise errors.UnreadableTrace(f"{path} is damaged; {_NEW}") from None


def _baseline(document: Mapping[str, Any]) -> Baseline:
    run = {name: document[name] for name in _OF_RUN}
    _require(run["capacity"], int, None)
    _require(run["steps"], int)
    _require(run["assume"], dict)
    _require(run["ranks"], int, None)
    _require(run["sizes"], str, None)
    _require(run["values"], dict)
    _require(run["model"], dict, None)
    _require(document["card"], str)
    arguments = tuple(document["arguments"])
    for each in (*arguments, *run["values"].values()):
        _require(each, str)
    by_torch = {
        torch: {int(rank): baselines.read(found) for rank, found in ranks.items()}
        for torch, ranks in document["torch"].items()
    }
    if not all(by_torch.values()):
        raise ValueError
    return Baseline(document["card"], arguments, run, by_torch)


def _require(value: Any, kind: type, other: None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, kind | type(other)):
        raise TypeError


def _lines(document: Mapping[str, Any]) -> str:
    """The document with a row on each line, so that a review shows what has changed."""
    text = json.dumps(document, indent=1)
    return _rows_on_one_line(text.splitlines())


def _rows_on_one_line(lines: Iterable[str]) -> str:
    out: list[str] = []
    row: list[str] | None = None
    for line in lines:
        word = line.strip()
        if word == "[" and row is None:
            row = [line]
        elif row is not None:
            row.append(word)
            if word.startswith("]"):
                out.append(row[0] + " ".join(row[1:-1]) + row[-1])
                row = None
        else:
            out.append(line)
    return "\n".join(out)
