"""The columns of a snapshot's tables, and what is done with them alone."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer.data.schema import ACTION, I64, U64

SPACING = 8  # least nanoseconds between events, so that scopes can begin and end in between
COLUMNS = {
    "device": np.uint32,
    "action": np.uint8,
    "address": np.uint64,
    "bytes": np.uint64,
    "stream": np.uint64,
    "pool_high": np.uint64,
    "pool_low": np.uint64,
    "stack": np.uint32,
    "category": np.uint32,
    "metadata": np.uint32,
}


@dataclass(frozen=True)
class Rows:
    """The columns of one of the snapshot's tables."""

    columns: dict[str, NDArray[Any]]

    def __getattr__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def __len__(self) -> int:
        """How many rows there are."""
        return len(next(iter(self.columns.values())))

    def take(self, rows: NDArray[Any]) -> "Rows":
        """The rows at these positions."""
        return Rows({name: column[rows] for name, column in self.columns.items()})


def table(columns: dict[str, Any], name: str) -> Rows:
    """One table of the file."""
    prefix = f"{name}."
    return Rows({k[len(prefix) :]: v for k, v in columns.items() if k.startswith(prefix)})


def keys(device: NDArray[Any], address: NDArray[Any]) -> U64:
    """Device and address as one number: addresses never use their highest byte."""
    found: U64 = address ^ (device.astype(np.uint64) << np.uint64(56))
    return found


def firsts(device: NDArray[Any], address: NDArray[Any], step: int = 1) -> NDArray[np.intp]:
    """Where each block occurs first; where last, if `step` is -1 and arrays reversed."""
    _, first = np.unique(keys(device, address), return_index=True)
    if step < 0:
        first = len(address) - 1 - first
    return np.sort(first)


def joined(*parts: Rows) -> Rows:
    """The rows of several tables, with the columns of entries."""
    return Rows({name: np.concatenate([part.columns[name] for part in parts]) for name in COLUMNS})


def entry_rows(action: str, rows: list[tuple[int, int, int]]) -> Rows:
    """Entries of one action, from devices, addresses and sizes."""
    columns = {name: np.zeros(len(rows), dtype) for name, dtype in COLUMNS.items()}
    columns["action"][:] = ACTION[action]
    for i, name in enumerate(("device", "address", "bytes")):
        columns[name][:] = [row[i] for row in rows]
    return Rows(columns)


def times(entries: Rows) -> I64:
    """Times in nanoseconds. They never fall within a device: its entries are in order."""
    time = entries.time_us.clip(-1, 2**53) * 1000
    if (time < 0).any():
        time = np.arange(len(time), dtype=np.int64) * 1000
    for device in np.unique(entries.device):
        own = entries.device == device
        time[own] = np.maximum.accumulate(time[own])
    result: I64 = time
    return result


def spread(time: I64) -> I64:
    """The same times, at least SPACING apart."""
    room = SPACING * np.arange(len(time), dtype=np.int64)
    return np.maximum.accumulate(time - room) + room if len(time) else time


def numbered(*columns: NDArray[Any]) -> I64:
    """A number for each row of these columns; equal rows have the same."""
    number = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        _, each = np.unique(column, return_inverse=True)
        both = number * (int(each.max(initial=0)) + 1) + each.reshape(-1)
        number = np.unique(both, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return number


def runs(values: NDArray[Any]) -> list[tuple[int, int]]:
    """The first and last position of each run of equal values."""
    if len(values) == 0:
        return []
    cuts = np.flatnonzero(values[1:] != values[:-1])
    begins = np.append(0, cuts + 1)
    return list(zip(begins.tolist(), np.append(cuts, len(values) - 1).tolist(), strict=True))
