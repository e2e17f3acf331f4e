"""Lists what a program has changed in its private view, and makes the same changes for real."""

import filecmp
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GONE = "/.pytracer-gone"  # where a link of this target lies, the file is removed
OPAQUE = ".pytracer-opaque"  # a folder with this file shows nothing of the real one
_OVERLAYS_OPAQUE = "user.overlay.opaque"
_NOT_THE_PROGRAMS = "__pycache__"  # Python's own


@dataclass(frozen=True)
class Change:
    """A file or folder that the program has changed in its view."""

    path: str
    kind: str  # "written", "removed", "folder" (made), "mode" (or time)
    size: int = 0  # of a written file


def changes(mine: Path, real: Path, others: Collection[str] = ()) -> Iterator[Change]:
    """The changes of a private folder, which hides a real one. `others` are names to pass over."""
    names = {one.name for one in mine.iterdir()}
    if _is_opaque(mine) and real.is_dir() and not real.is_symlink():
        for name in sorted({one.name for one in real.iterdir()} - names):
            yield Change(str(real / name), "removed")
    for name in sorted(names - {OPAQUE, _NOT_THE_PROGRAMS, *others}):
        yield from _one(mine / name, real / name)


def _one(mine: Path, real: Path) -> Iterator[Change]:
    status = mine.lstat()
    before = real.lstat() if os.path.lexists(real) else None
    if _is_gone(mine, status):
        if before is not None:
            yield Change(str(real), "removed")
    elif stat.S_ISDIR(status.st_mode):
        if before is None or not stat.S_ISDIR(before.st_mode):
            yield Change(str(real), "folder")
        elif stat.S_IMODE(before.st_mode) != stat.S_IMODE(status.st_mode):
            yield Change(str(real), "mode")
        yield from changes(mine, real)
    elif before is None or not _are_equal(mine, real, status, before):
        yield Change(str(real), "written", status.st_size)
    elif not stat.S_ISLNK(status.st_mode) and _mode_of(status) != _mode_of(before):
        yield Change(str(real), "mode")


def _mode_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_mode, status.st_mtime_ns


def _is_gone(path: Path, status: os.stat_result) -> bool:
    if stat.S_ISCHR(status.st_mode):
        return status.st_rdev == 0
    return stat.S_ISLNK(status.st_mode) and str(path.readlink()) == GONE


def _is_opaque(folder: Path) -> bool:
    if (folder / OPAQUE).exists():
        return True
    with suppress(OSError):
        return os.getxattr(folder, _OVERLAYS_OPAQUE) == b"y"
    return False


def _are_equal(mine: Path, real: Path, status: os.stat_result, before: os.stat_result) -> bool:
    if stat.S_IFMT(status.st_mode) != stat.S_IFMT(before.st_mode):
        return False
    if stat.S_ISLNK(status.st_mode):
        return mine.readlink() == real.readlink()
    if not stat.S_ISREG(status.st_mode) or os.path.samestat(status, before):
        return True
    if status.st_size != before.st_size:
        return False
    return filecmp.cmp(mine, real, shallow=False)


def write(found: list[Change], at: Callable[[Path], Path]) -> None:
    """Makes the changes in the user's files. `at` is where the view has a path."""
    for change in found:
        real = Path(change.path)
        mine = at(real)
        if change.kind == "removed" or (change.kind == "folder" and os.path.lexists(real)):
            _remove(real)
        if change.kind == "folder":
            real.mkdir(parents=True)
        if change.kind in ("folder", "mode"):
            shutil.copystat(mine, real, follow_symlinks=False)
        elif change.kind == "written":
            _replace(mine, real)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _replace(mine: Path, real: Path) -> None:
    """Puts a copy in the place of the real file, which is never seen half written."""
    if real.is_dir() and not real.is_symlink():
        shutil.rmtree(real)
    copy = real.with_name(f".{real.name}.pytracer")
    copy.unlink(missing_ok=True)
    shutil.copy2(mine, copy, follow_symlinks=False)
    copy.replace(real)
