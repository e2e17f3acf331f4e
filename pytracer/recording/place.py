"""The file of a program's recording: where it was asked for, else in a temporary folder, else none."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

_ROOM = 1 << 20  # bytes that a folder must have for a recording
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")  # after TMPDIR
_CANNOT_TELL = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def unused(path: Path) -> Path:
    """Returns train.pytrace, train.1.pytrace, ...: a second run must not end with an error."""
    stem, number = path.stem, 0
    while os.path.lexists(path):  # False where nobody may look
        number += 1
        path = path.with_name(f"{stem}.{number}{path.suffix}")
    return path


class Place:
    """Has no file until `reserve`. An older file in its place comes back if nothing is recorded."""

    def __init__(self, path: Path, *, force: bool, numbered: bool) -> None:
        """Makes the path absolute, because the program may change its working directory.

        Args:
            path: where the file is wanted.
            force: whether it may replace another.
            numbered: whether it gets another number if it exists.
        """
        self.shown = path  # as the user named it
        self._force, self._numbered = force, numbered
        self._wanted = _absolute(path)
        self.path: Path | None = self._wanted
        self._before: Path | None = None
        self._is_ours = False  # whether this run wrote the file that exists now

    def reserve(self) -> str:
        """Makes the file, still empty. Returns why it is not where it was wanted; "" if it is.

        `path` is None afterwards if there is no folder for it.
        """
        problem = "" if self._wanted else "the working directory is gone"
        for path in self._candidates():
            try:
                self.path = self._make(path)
            except OSError as error:
                problem = problem or os.strerror(error.errno or errno.EIO)
                continue
            self._is_ours = True
            if path is self._wanted:
                self.shown = self.shown.with_name(self.path.name)
            else:
                self.shown = self.path
            return problem
        self.path = None
        return problem

    def unused(self) -> Path:
        """The file that `reserve` would make here."""
        return unused(self.shown) if self._numbered else self.shown

    def _candidates(self) -> Iterator[Path]:
        if self._wanted is not None:
            yield self._wanted
        for folder in (os.environ.get("TMPDIR"), *_TEMPORARY):
            if folder and Path(folder).is_absolute():
                yield Path(folder, self.shown.name)

    def _make(self, path: Path) -> Path:
        is_wanted = path is self._wanted
        if is_wanted and self._force and path.exists():
            before = path.with_name(f"{path.name}.before")
            path.replace(before)
            self._before = before
        while True:
            path = unused(path) if self._numbered or not is_wanted else path
            try:
                # In a temporary folder others may read what is not private.
                _make_room(path, 0o666 if is_wanted else 0o600)
            except FileExistsError:
                if is_wanted and not self._numbered:
                    raise
            else:
                return path

    def rename(self, name: str) -> None:
        """Gives the file another name."""
        if self.path is not None:
            path = self.path.with_name(name)
            path = path if self._force else unused(path)
            self.path = self.path.replace(path)
            self.shown = self.shown.with_name(path.name)

    def settle(self, *, recorded: bool) -> None:
        """Removes the older file if the trace was recorded; else puts it back."""
        before, self._before = self._before, None
        if self._is_ours and not recorded and self.path is not None:
            self.path.unlink(missing_ok=True)
        if before is not None and recorded:
            before.unlink(missing_ok=True)
        elif before is not None and self._wanted is not None:
            before.replace(self._wanted)


def _absolute(path: Path) -> Path | None:
    try:
        return path.absolute()
    except OSError:  # the working directory has been deleted
        return None


def _make_room(path: Path, mode: int) -> None:
    """Makes an empty file. Its disk has some room for what will be written.

    Raises:
        OSError: the file exists, or cannot be made, or the disk is full.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.posix_fallocate(file, 0, _ROOM)
        os.ftruncate(file, 0)
    except OSError as error:
        if error.errno not in _CANNOT_TELL:
            path.unlink()
            raise
    finally:
        os.close(file)
