"""The file of step totals that a recorder writes while it is always on, and its reader.

After a header of 4 KiB, all rows have the same 96 bytes. A row is what one device did in one step, or
in several that were folded together. Rows are written through a memory map: a killed process leaves
all of them. A row is there once its last field, the number of its steps, is not 0.
"""

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytracer import errors
from pytracer.data import schema

if TYPE_CHECKING:
    import numpy as np

# In the folder of a recorder.
NAME = "steps.totals"
EVENTS = "events.jsonl"

_MAGIC = b"pytracer step totals 1\n"
_HEADER = 4096
_GROW = 1 << 16
_LEAST_ROOM = 1 << 13  # more than a step of 64 devices needs
_FOLDED = 8  # rows of a device that become one

# Name, kind in `struct` and in numpy. Folded rows: the least and the highest peak, and the middle one.
_FIELDS = (
    ("step", "Q", "<u8"),  # the first of its steps
    ("unix_ns", "q", "<i8"),  # when the last of them ended
    ("duration_ns", "Q", "<u8"),  # the middle one
    ("peak", "q", "<i8"),
    ("least_peak", "q", "<i8"),
    ("highest_peak", "q", "<i8"),
    ("now", "q", "<i8"),  # as the last of them ended
    ("reserved_peak", "q", "<i8"),  # the highest
    ("largest", "Q", "<u8"),  # request
    ("requests", "Q", "<u8"),  # the middle one
    ("failed", "I", "<u4"),  # requests, of all of them
    ("device_type", "B", "<u1"),
    ("device_index", "B", "<u1"),
    ("padding", "H", "<u2"),
    ("looked_at", "I", "<u4"),  # how many of them
    ("steps", "I", "<u4"),
)
# StepRow of csrc/core/step_rows.h.
ROW = struct.Struct("<" + "".join(kind for _, kind, _ in _FIELDS))


def name_of_look(first: int) -> str:
    """The file of the look that begins with this step."""
    return f"step-{first:06}.pytrace"


@dataclass(slots=True)
class StepRow:
    """What one device did in one step. Bytes are the requested ones and those reserved."""

    step: int
    unix_ns: int
    duration_ns: int
    looked_at: bool
    device: tuple[int, int]  # type and index
    now: int
    peak: int
    reserved_peak: int
    largest: int
    requests: int
    failed: int


class StepFile:
    """Has room for rows, which others write there. When the file is full, its older half is folded."""

    def __init__(self, path: Path, header: dict[str, Any], most_bytes: int) -> None:
        """Makes the file.

        Raises:
            OSError: it cannot be made, or is there already.
        """
        self._path, self._header = path, header
        self._most = max((most_bytes - _HEADER) // ROW.size, 4 * _FOLDED)
        self._file = path.open("x+b")
        self._rows = 0
        self._map = self._mapped(_HEADER + _GROW)
        self._write_header()

    def room(self, written: int = 0) -> memoryview:
        """Where the next rows go. Nothing may hold the room before.

        Args:
            written: how many rows were written into the room before.

        Raises:
            OSError: the disk is full.
        """
        self._rows += written
        if self._rows >= self._most:
            self._fold()
        begin = _HEADER + self._rows * ROW.size
        if begin + _LEAST_ROOM > len(self._map):
            self._map.close()
            self._map = self._mapped(begin + _GROW)
        end = max(_HEADER + self._most * ROW.size, begin + _LEAST_ROOM)
        return memoryview(self._map)[begin:end]

    def close(self, written: int = 0) -> None:
        """Ends the file after its last row; so many were written into the last room."""
        if not self._file.closed:
            self._rows += written
            self._map.close()
            with contextlib.suppress(OSError):
                self._file.truncate(_HEADER + self._rows * ROW.size)
            self._file.close()

    def _mapped(self, size: int) -> mmap.mmap:
        # Blocks of the disk are taken now: a full disk is an error here and no signal later.
        os.posix_fallocate(self._file.fileno(), 0, size)
        return mmap.mmap(self._file.fileno(), size)

    def _write_header(self) -> None:
        text = _MAGIC + json.dumps(self._header).encode()
        self._map[: len(text)] = text

    def _fold(self) -> None:
        """Writes a file with fewer rows in the place of this one."""
        import numpy as np

        rows = _rows_in(self._map, self._rows)
        older = len(rows) // 2
        folded = np.concatenate([fold(rows[:older]), rows[older:]])
        self.close()
        part = self._path.with_name(f"{self._path.name}.part")
        part.unlink(missing_ok=True)
        self._file, self._rows = part.open("x+b"), len(folded)
        self._map = self._mapped(_HEADER + folded.nbytes + _GROW)
        self._write_header()
        self._map[_HEADER : _HEADER + folded.nbytes] = folded.tobytes()
        part.replace(self._path)


def fold(rows: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Makes one row of each 8 of a device that follow each other, in the order of their steps."""
    import numpy as np

    kept = []
    devices = rows["device_type"].astype(int) * 256 + rows["device_index"]
    for device in np.unique(devices):
        own = rows[devices == device]
        starts = np.arange(0, len(own), _FOLDED)
        folded = own[starts].copy()  # the first step and the device
        ends = np.append(starts[1:], len(own)) - 1
        for name in ("unix_ns", "now"):
            folded[name] = own[name][ends]
        for name in ("highest_peak", "reserved_peak", "largest"):
            folded[name] = np.maximum.reduceat(own[name], starts)
        folded["least_peak"] = np.minimum.reduceat(own["least_peak"], starts)
        for name in ("failed", "looked_at", "steps"):
            folded[name] = np.add.reduceat(own[name], starts)
        for name in ("duration_ns", "peak", "requests"):
            folded[name] = [
                np.sort(part)[len(part) // 2] for part in np.split(own[name], starts[1:])
            ]
        kept.append(folded)
    together = np.concatenate(kept) if kept else rows
    return together[np.argsort(together["step"], kind="stable")]


@dataclass(frozen=True)
class StepTotals:
    """The rows of a file, as they were when it was read."""

    header: dict[str, Any]
    rows: "np.ndarray[Any, Any]" = field(repr=False)

    def by_device(self) -> "Iterator[tuple[str, np.ndarray[Any, Any]]]":
        """Each device's name and rows, accelerators first."""
        rows = self.rows
        pairs = {(int(row["device_type"]), int(row["device_index"])) for row in rows}
        for kind, index in sorted(pairs, key=lambda pair: (-pair[0], pair[1])):
            is_it = (rows["device_type"] == kind) & (rows["device_index"] == index)
            yield schema.device_name(kind, index), rows[is_it]

    @property
    def steps(self) -> int:
        """The number of steps that are over."""
        rows = self.rows
        return int((rows["step"] + rows["steps"]).max()) if len(rows) else 0


def read(path: Path) -> StepTotals:
    """Reads a file, also while it is written.

    Raises:
        errors.UnreadableTrace: it is missing or has another format.
    """
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise errors.UnreadableTrace(f"cannot read {path}: {problem.strerror}") from None
    end = data.find(b"\0", 0, _HEADER)
    try:
        if not data.startswith(_MAGIC) or len(data) < _HEADER:
            raise ValueError
        header = json.loads(data[len(_MAGIC) : _HEADER if end < 0 else end])
        if not isinstance(header, dict):
            raise ValueError
    except ValueError:
        raise errors.UnreadableTrace(
            f"{path} has no totals of steps, or of a newer pytracer"
        ) from None
    return StepTotals(header, _rows_in(data, (len(data) - _HEADER) // ROW.size))


def _rows_in(buffer: Any, most: int) -> "np.ndarray[Any, Any]":
    """A copy of the rows up to the first that is not whole."""
    import numpy as np

    kind = np.dtype([(name, of_numpy) for name, _, of_numpy in _FIELDS])
    rows = np.frombuffer(buffer, kind, count=most, offset=_HEADER)
    missing = np.flatnonzero(rows["steps"] == 0)
    return rows[: missing[0] if len(missing) else most].copy()
