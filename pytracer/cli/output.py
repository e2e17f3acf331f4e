"""Output of all commands: printing, writing, and error texts."""

import argparse
import difflib
import io
import json
import os
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from pytracer import errors
from pytracer.basics import units
from pytracer.cli import progress

JSON_VERSION = 1


def ready_streams() -> None:
    """Makes printing work in any encoding. A closed stdout fails like a full disk."""
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`, which every printing command has."""
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def positive(text: str) -> int:
    """The type of arguments that are at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)


def size(text: str) -> int:
    """The type of arguments that are sizes: 200MiB."""
    try:
        return units.parse_size(text)
    except errors.UsageError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def size_or_share(flag: str, text: str, whole: int) -> int:
    """The bytes of a size, or of a percentage of the whole: 200MiB, 5%.

    Raises:
        errors.UsageError: it is neither.
    """
    if not text.endswith("%"):
        return units.parse_size(text)
    try:
        return int(whole * float(text[:-1]) / 100)
    except (ValueError, OverflowError):  # inf%
        raise errors.UsageError(f"{flag} {text}: this is not a percentage") from None


def add_trace(
    parser: argparse.ArgumentParser, what: str = "a .pytrace file or a memory snapshot of torch"
) -> None:
    """Adds the trace to read, for commands that read one. See `trace_or_newest`."""
    parser.add_argument(
        "file", type=Path, nargs="?", help=f"{what} (default: the newest .pytrace here)"
    )


def trace_or_newest(file: Path | None) -> Path:
    """The file, or the newest trace in the working folder. Says which it is.

    Raises:
        errors.UnreadableTrace: no file is given, and there is no trace.
    """
    if file is not None:
        return file
    found = []
    for path in Path().glob("*.pytrace"):
        with suppress(OSError):  # it may end meanwhile
            if path.is_file():
                found.append((path.stat().st_mtime_ns, path))
    if not found:
        raise errors.UnreadableTrace(
            "there is no .pytrace file here; record one:  pytracer run train.py"
        )
    newest = max(found)[1]
    all_ranks = re.sub(r"\.rank\d+\b", ".rank*", newest.name)
    others = f"; all ranks:  pytracer summary {shlex.quote(all_ranks)}"
    tell(f"pytracer: {newest} is the newest trace here{others if '*' in all_ranks else ''}")
    return newest


def in_words(error: errors.PytracerError) -> str:
    """The error's message for the command line."""
    return error.at_the_command_line if isinstance(error, errors.FileIsThere) else str(error)


def card(name: str, capacity: int | None = None, *, other: str) -> Any:
    """The card of this name. `other` tells what to write for a card that is not in the table.

    Raises:
        errors.UsageError: there is no such card; the message names the options.
    """
    from pytracer.imagined import cards

    try:
        return cards.find(name, capacity)
    except errors.UsageError:
        pass
    names = {card.name.lower(): card.name for card in cards.known()}
    similar = difflib.get_close_matches(name.lower(), names, n=1)
    question = f"; did you mean {names[similar[0]]!r}? There are" if similar else "; there are"
    raise errors.UsageError(
        f"no card is called {name!r}{question} {', '.join(names.values())}. For another {other}"
    )


def tell(text: str) -> None:
    """Prints to stderr, if there is one. Without it print() would use the program's stdout."""
    if sys.stderr is not None:
        progress.hide()
        print(text, file=sys.stderr)


def print_json(document: dict[str, Any]) -> None:
    """Prints the document to stdout."""
    print(json_text(document))


def json_text(document: dict[str, Any]) -> str:
    """The document as JSON, with the version of its form."""
    return json.dumps({"pytracer_json": JSON_VERSION, **document}, indent=2)


def write_json(path: Path | None, document: dict[str, Any]) -> None:
    """Writes the document whole or not at all, so a reader never meets half of one."""
    if path is None:
        return
    from pytracer.basics.files import write_whole

    def fill(file: BinaryIO) -> None:
        file.write((json_text(document) + "\n").encode())

    write_whole(path, fill, overwrite=True)


def add_anonymous(parser: argparse.ArgumentParser) -> None:
    """Adds `--anonymous`, for commands whose output people send to others."""
    parser.add_argument(
        "--anonymous",
        action="store_true",
        help="leave out host, process numbers, command, folders and paths",
    )


def read(file: Path, *, anonymous: bool = False) -> Any:
    """Reads the trace in a file; of a folder of ranks the one with the highest peak.

    Prints a note if the file is damaged.
    """
    from pytracer.reading import loading

    with progress.doing(f"reading {file}"):
        loaded = loading.read(file)
    if loading.is_job(file):
        there: Any = loaded.comparison  # type: ignore[attr-defined]
        tell(f"rank {there.worst.rank} of {there.world_size}, which has the highest peak:")
    note_damage(file, loaded)
    return loaded.anonymous() if anonymous else loaded


def note_damage(file: Path, loaded: Any) -> None:
    """Prints a note about a damaged file, whose figures are of a part only."""
    status = loaded.file_report.get("status")
    if status not in ("complete", None):
        notes = [f"  {note}" for note in loaded.file_report.get("notes", [])]
        tell("\n".join((f"\n{file} is {status}:", *notes)))


def summary_document(loaded: Any) -> dict[str, Any]:
    """The contents of the table, for programs."""
    from pytracer.analysis.answers import training_steps

    peak = loaded.peak
    return {
        "peak": {
            "bytes": peak.bytes,
            "time_ns": peak.time_ns,
            "step": None
            if peak.step is None
            else peak.step + training_steps.first_step(loaded.data),
            "phase": peak.phase,
            "by_category": dict(peak.by_category),
        },
        "peaks": json.loads(loaded.peaks().reset_index().to_json(orient="records")),
        "categories": json.loads(loaded.summary().reset_index().to_json(orient="records")),
        "meta": dict(loaded.data.meta),
        "findings": json.loads(loaded.findings().to_json(orient="records")),
        "advice": json.loads(loaded.advice().to_json(orient="records")),
        "file": dict(loaded.data.file_report),
    }
