"""Writes files that appear whole or not at all, and replace no other file by mistake."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from pytracer import errors


def write_whole(path: Path, write: Callable[[BinaryIO], None], *, overwrite: bool) -> Path:
    """Writes a file with `write`. The file gets its name only when it is finished.

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
    """Yields a path beside the file to write to. It replaces the file if the block succeeds."""
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
    """Checks that a file can be written, before any work is done that would be lost.

    Raises:
        errors.CannotWrite: the file exists, or its folder does not.
    """
    try:
        if path.is_dir():
            raise errors.CannotWrite(f"{path} cannot be written: it is a folder; name a file in it")
        if path.exists() and not overwrite:
            raise errors.FileIsThere(path)
        if not path.parent.is_dir():
            raise errors.CannotWrite(f"{path} cannot be written: there is no folder {path.parent}")
    except OSError as error:
        if isinstance(error, errors.CannotWrite):
            raise
        raise errors.CannotWrite(f"{path} cannot be written: {error.strerror}") from None
