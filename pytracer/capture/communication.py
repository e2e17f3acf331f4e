"""What torch knows about the job's communication: its groups, its collectives, and their libraries' memory.

All of it is read when a trace ends or looks at the device, so a collective costs nothing. torch's flight
recorder keeps the last collectives of this process by itself (2,000 by default). Nothing here raises.

`document` returns:

    {"groups": [{"name", "description", "backend", "ranks": [global ranks],
                 "enqueued", "completed": the last collective's number, or null}],
     "collectives": {"group": [rows of groups], "operation": [...], "sequence": [...],
                     "point_to_point": [...], "bytes": [...], "begin_ns": [Unix time], "end_ns": [... or 0]},
     "forgotten": collectives of this trace that torch no longer has,
     "memory": [{"group", "bytes"}]: device memory of a communicator, where its library tells}
"""

import contextlib
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import torch

from pytracer import errors
from pytracer.basics import private_torch

_KINDS_OF_SIZE = {
    16: ("ComplexDouble",),
    8: ("Double", "Long", "ComplexFloat", "UInt64"),
    4: ("Float", "Int", "UInt32", "ComplexHalf"),
    2: ("Half", "BFloat16", "Short", "UInt16"),
}
_SIZES = {kind: size for size, kinds in _KINDS_OF_SIZE.items() for kind in kinds}  # else 1
_DUMPS = ("nccl_flight_recorder", "flight_recorder")
_COLUMNS = ("group", "operation", "sequence", "point_to_point", "bytes", "begin_ns", "end_ns")


def is_there() -> bool:
    """Whether the program has a process group."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def document(since_ns: int) -> dict[str, Any]:
    """The document of the collectives since that Unix time; {} without a process group."""
    if not is_there():
        return {}
    groups = {group["name"]: group for group in _groups()}
    rows: list[tuple[Any, ...]] = []
    forgotten = 0
    for dump in _dumps():
        _read_status(dump, groups)
        entries = [one for one in dump.get("entries", []) if one["time_created_ns"] >= since_ns]
        # The oldest entry is not torch's first, so earlier ones of this trace may be gone.
        if entries and entries == dump["entries"]:
            forgotten += int(entries[0].get("record_id", 0))
        names = list(groups)
        rows += [row for one in entries if (row := _row(one, names)) is not None]
    rows.sort(key=lambda row: row[5])
    columns = zip(*rows, strict=True) if rows else ([] for _ in _COLUMNS)
    return {
        "groups": list(groups.values()),
        "collectives": {name: list(column) for name, column in zip(_COLUMNS, columns, strict=True)},
        "forgotten": forgotten,
        "memory": list(_memory()),
    }


def _groups() -> Iterator[dict[str, Any]]:
    world = private_torch.group_registry
    for group, name in list(world.pg_names.items()):
        ranks = world.pg_group_ranks.get(group) or {}
        yield {
            "name": str(name),
            "description": str(getattr(group, "group_desc", "")),
            "backend": str(world.pg_map[group][0]) if group in world.pg_map else "",
            "ranks": sorted(map(int, ranks)),
            "enqueued": None,
            "completed": None,
        }


def _dumps() -> Iterator[dict[str, Any]]:
    """What torch's flight recorders have: one is NCCL's, the other is of all other backends."""
    for name in _DUMPS:
        with contextlib.suppress(errors.CaptureError):  # this torch has no such recorder
            yield json.loads(getattr(private_torch, name)())


def _read_status(dump: dict[str, Any], groups: dict[str, dict[str, Any]]) -> None:
    """Notes each group's last collectives. torch lists groups by a number that entries have too."""
    named = {str(one["pg_id"]): one["process_group"][0] for one in dump.get("entries", [])}
    for number, status in (dump.get("pg_status") or {}).items():
        group = groups.get(named.get(number, ""))
        if group is not None:
            group["enqueued"] = int(status["last_enqueued_collective"])
            group["completed"] = int(status["last_completed_collective"])


def _row(entry: dict[str, Any], names: list[str]) -> tuple[Any, ...] | None:
    name = entry["process_group"][0]
    if name not in names:
        return None  # the program has destroyed the group
    direct = bool(entry.get("is_p2p"))
    return (
        names.index(name),
        re.sub(r"^\w+:", "", entry["profiling_name"]),
        int(entry["p2p_seq_id" if direct else "collective_seq_id"]),
        direct,
        _bytes(entry),
        int(entry["time_created_ns"]),
        int(entry.get("time_discovered_completed_ns") or 0),
    )


def _bytes(entry: dict[str, Any]) -> int:
    pairs = zip(entry.get("input_sizes", []), entry.get("input_dtypes", []), strict=False)
    return sum(math.prod(sizes) * _SIZES.get(kind, 1) for sizes, kind in pairs)


def _memory() -> Iterator[dict[str, Any]]:
    """The device memory that each communicator's library reports; NCCL does from 2.29.7 on."""
    if not torch.cuda.is_initialized():
        return
    device = torch.device("cuda", torch.cuda.current_device())
    world = private_torch.group_registry
    for group, name in list(world.pg_names.items()):
        try:
            figures = group._get_backend(device).memory_stats()
        except (RuntimeError, AttributeError, NotImplementedError):
            continue  # this backend or this version of it does not tell
        released = figures.get("suspend", 0) if figures.get("suspended") else 0
        title = str(getattr(group, "group_desc", "") or name)
        yield {"group": title, "bytes": int(figures.get("total", 0)) - int(released)}
