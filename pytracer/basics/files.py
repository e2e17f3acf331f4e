"""Writes files whole or not at all, replaces none by mistake, and limits what reading may take."""

import contextlib
import errno
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from pytracer import errors
from pytracer.basics import units

LIMIT = "PYTRACER_READ_LIMIT"


def most_memory() -> int:
    """The bytes of memory that the rows of a trace may take; 0 for the default.

    `MemoryLimit` in csrc/core/trace_file.h has the default.

    Raises:
        errors.UsageError: the environment variable is not a size.
    """
    try:
        return units.parse_size(os.environ.get(LIMIT) or 0)
    except errors.UsageError as problem:
        raise errors.UsageError(f"{LIMIT}: {problem}") from None


_EXPORTS = (".json", ".json.gz", ".pftrace", ".html", ".htm", ".parquet")


def why_no_trace(path: str | Path) -> str:
    """Why a file that cannot be read is no trace, and what to do; "" if its name does not show it."""
    name = os.fspath(path)
    if not os.path.lexists(name):
        question = similar(name, ".pytrace", ".pickle")
        return f"{name}: there is no such file{question}" if question else ""
    if not os.path.isfile(name):  # noqa: PTH113
        return ""
    if name.endswith(".pytrace.gz"):
        return f"{name} is compressed: gunzip it first"
    if name.endswith(".py"):
        return f"{name} is a program: record it with pytracer run {shlex.quote(name)}"
    if name.endswith(_EXPORTS):
        return (
            f"{name} looks like an export, which cannot be read back: name the .pytrace file that it "
            "was made from"
        )
    return ""


def similar(name: str, *suffixes: str) -> str:
    """A question with the most similar file with one of these suffixes, or ""."""
    path = Path(name)
    with contextlib.suppress(OSError):
        there = [one.name for one in path.parent.iterdir() if one.suffix in suffixes]
        word = path.name if path.suffix in suffixes else path.name + suffixes[0]
        return errors.did_you_mean(word, there, least=0.8)
    return ""


def write_whole(path: Path, write: Callable[[BinaryIO], None], *, overwrite: bool) -> Path:
    """Lets `write` fill a file, which gets its name only when it is finished.

    Raises:
        errors.CannotWrite: the file exists already, or cannot be written.
    """
    refuse_to_overwrite(path, overwrite=overwrite)
    try:
        with unfinished(path) as beside, beside.open("xb") as file:
            write(file)
    except OSError as error:
        reason = os.strerror(error.errno or errno.EIO)
        raise errors.CannotWrite(f"{path} cannot be written: {reason}") from None
    return path


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`. It replaces `path` if the block ends without an error."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        with contextlib.suppress(FileNotFoundError):  # usually there is no file to replace
            beside.chmod(path.stat().st_mode)
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def refuse_to_overwrite(path: Path, *, overwrite: bool) -> None:
    """Checks that the file can be written. Call it before work that would be lost.

    Raises:
        errors.CannotWrite: the file exists already, or its folder does not.
    """
    try:
        if path.is_dir():
            raise errors.CannotWrite(f"{path} cannot be written: it is a folder; name a file in it")
        if path.exists() and not path.is_file():  # a rename would replace /dev/null
            raise errors.CannotWrite(f"{path} cannot be written: it is a device or a pipe")
        if path.exists() and not overwrite:
            raise errors.FileIsThere(path)
        if not path.parent.is_dir():
            raise errors.CannotWrite(f"{path} cannot be written: there is no folder {path.parent}")
    except OSError as error:
        if isinstance(error, errors.CannotWrite):
            raise
        raise errors.CannotWrite(f"{path} cannot be written: {error.strerror}") from None
