"""The files of a user, and a record of every byte, mode and time of them."""

import os
import sqlite3
import stat
from pathlib import Path
from typing import NamedTuple


class Entry(NamedTuple):
    """Everything that a program may have changed of a file or folder."""

    mode: int
    owner: int
    modified: int
    changed: int  # the inode, in any way
    size: int
    content: bytes  # a link's target


def make(folder: Path) -> None:
    """Puts a user's files into the folder."""
    (folder / "model.pt").write_bytes(b"trained for a week" * 1000)
    (folder / "log.csv").write_text("step,loss\n" * 50)
    (folder / "notes.txt").write_text("a\nb\nc\n")
    (folder / "results").mkdir()
    (folder / "results" / "best.json").write_text('{"loss": 0.1}')
    (folder / "results" / "deep").mkdir()
    (folder / "results" / "deep" / "weights.npy").write_bytes(b"\x93NUMPY weights")
    (folder / "empty").mkdir()
    (folder / "latest").symlink_to("results")
    (folder / "best").symlink_to("results/best.json")
    os.link(folder / "notes.txt", folder / "same_notes.txt")
    (folder / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "secret").write_text("0123")
    (folder / "secret").chmod(0o600)
    base = sqlite3.connect(folder / "runs.db")
    base.execute("create table runs (name text)")
    base.execute("insert into runs values ('first')")
    base.commit()
    base.close()


def record(folder: Path) -> dict[str, Entry]:
    """Every entry below the folder, and the folder itself."""
    found = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        status = path.lstat()
        content = b""
        if stat.S_ISLNK(status.st_mode):
            content = os.fsencode(path.readlink())
        elif stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        found[str(path.relative_to(folder))] = Entry(
            status.st_mode,
            status.st_uid,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_size,
            content,
        )
    return found
