"""What commands have in common: how they print, write and complain."""

import argparse
import io
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from pytracer import errors

JSON_VERSION = 1


def ready_streams() -> None:
    """Printing works in any encoding; to a stream that is closed it fails as to a full disk."""
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Every command that prints has it."""
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def positive(text: str) -> int:
    """For argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)


def in_words(error: errors.PytracerError) -> str:
    """What is said to somebody who typed a command, and not to a program."""
    return error.at_the_command_line if isinstance(error, errors.FileIsThere) else str(error)


def tell(text: str) -> None:
    """To people, if there is a stderr: without one print() would take the program's stdout."""
    if sys.stderr is not None:
        print(text, file=sys.stderr)


@contextmanager
def patience(doing: str) -> Iterator[None]:
    """Says what takes so long, if it takes longer than two seconds."""
    timer = threading.Timer(2.0, lambda: tell(f"pytracer: {doing} ..."))
    timer.daemon = True
    with suppress(RuntimeError):  # no thread begins any more as Python 3.12 ends
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def print_json(document: dict[str, Any]) -> None:
    """The one document on stdout."""
    print(json_text(document))


def json_text(document: dict[str, Any]) -> str:
    """With the version of its form."""
    return json.dumps({"pytracer_json": JSON_VERSION, **document}, indent=2)


def write_json(path: Path | None, document: dict[str, Any]) -> None:
    """Whole or not at all: a reader never meets half a document."""
    if path is None:
        return
    from pytracer.files import write_whole

    def fill(file: BinaryIO) -> None:
        file.write((json_text(document) + "\n").encode())

    write_whole(path, fill, overwrite=True)


def add_anonymous(parser: argparse.ArgumentParser) -> None:
    """Where something is made that gets mailed."""
    parser.add_argument(
        "--anonymous",
        action="store_true",
        help="leave out host, process numbers, command, folders and paths",
    )


def read(file: Path, *, anonymous: bool = False) -> Any:
    """The trace in a file; if it is damaged, that is said."""
    from pytracer import reading

    loaded = reading.read(file)
    say_if_damaged(file, loaded)
    return loaded.anonymous() if anonymous else loaded


def say_if_damaged(file: Path, loaded: Any) -> None:
    """What is shown is then of a part, and nobody is to take it for the whole."""
    status = loaded.file_report.get("status")
    if status not in ("complete", None):
        notes = [f"  {note}" for note in loaded.file_report.get("notes", [])]
        print("\n".join((f"\n{file} is {status}:", *notes)), file=sys.stderr)


def summary_document(loaded: Any) -> dict[str, Any]:
    """What the table says, for programs."""
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
        "categories": json.loads(loaded.summary().reset_index().to_json(orient="records")),
        "meta": dict(loaded.data.meta),
        "findings": json.loads(loaded.findings().to_json(orient="records")),
        "file": dict(loaded.data.file_report),
    }
