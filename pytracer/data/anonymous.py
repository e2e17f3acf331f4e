"""Removes the machine from a trace, for files that leave the house.

It leaves out host, process numbers, command, folders and paths. The program's own names stay:
modules, operators, functions, variables, and files without their folders.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pytracer.data._native import core
from pytracer.data.recorded import Trace

# Entries that name the recording machine, process or folder.
_IDENTITY = frozenset({"host", "pid", "command", "directory", "torch_folder"})
# What a dictionary has as a key is no name of the program's: it may be anybody's.
_KEY = re.compile(r"""\[['"(].*?\](?= -> |$)""")
# The UUID of a GPU is unique in the world.
_GPU = re.compile(r"(GPU-|MIG-)?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def of(trace: Trace) -> Trace:
    """Returns the same trace without the entries that identify its machine."""
    root = str(trace.meta.get("directory") or "")
    return replace(
        trace,
        # The number of the main thread is that of the process.
        threads=trace.threads._replace(
            native_id=np.arange(len(trace.threads.native_id), dtype=np.uint64)
        ),
        strings=tuple(_text(text, root) for text in trace.strings),
        meta=meta(trace.meta, root),
        file_report=_plain(dict(trace.file_report), root, _Numbers()),
    )


def meta(document: Mapping[str, Any], root: str) -> dict[str, Any]:
    """Returns the meta of a trace that ran in `root`, without the machine."""
    kept = {key: value for key, value in document.items() if key not in _IDENTITY}
    if isinstance(error := kept.get("ended_by"), str):
        kept["ended_by"] = kind_of(error)
    if isinstance(variables := kept.get("variables"), list):
        kept["variables"] = [_without_keys(row) for row in variables]
    plain: dict[str, Any] = _plain(kept, root, _Numbers())
    return {**plain, "anonymous": True}


def _without_keys(variable: Any) -> Any:
    """A variable whose path names no key."""
    path = variable.get("path") if isinstance(variable, dict) else None
    return {**variable, "path": _KEY.sub("[...]", path)} if isinstance(path, str) else variable


def kind_of(error: str) -> str:
    """The class in "ValueError: text", because a text may name hosts and users."""
    return error.partition(":")[0]


class _Numbers:
    """Numbers for processes and GPUs, in the order in which they occur. This process is 0."""

    def __init__(self) -> None:
        self._given: dict[tuple[str, Any], int] = {}

    def of(self, kind: str, value: Any) -> int:
        same_kind = sum(other == kind for other, _ in self._given)
        return self._given.setdefault((kind, value), same_kind)


def _plain(value: Any, root: str, numbers: _Numbers) -> Any:
    """Returns a document of JSON without paths, processes and UUIDs, on all its levels."""
    if isinstance(value, str):
        return f"gpu-{numbers.of('gpu', value)}" if _GPU.fullmatch(value) else _text(value, root)
    if isinstance(value, list | tuple):
        return [_plain(item, root, numbers) for item in value]
    if not isinstance(value, dict):
        return value
    if "pid" in value:  # a process on the device, which may be another user's
        kept = {key: item for key, item in value.items() if key not in ("pid", "name")}
        return {"pid": numbers.of("pid", value["pid"]), **_plain(kept, root, numbers)}
    return {_plain(key, root, numbers): _plain(item, root, numbers) for key, item in value.items()}


def _text(text: str, root: str) -> str:
    # Text that is no UTF-8 came from names of files.
    clean, below = (part.encode("utf-8", "replace").decode() for part in (text, root))
    return core.without_paths(clean, below)
