"""A trace without the machine it was recorded on: for files that leave the house.

Host, process numbers, command, folders and paths are left out. What the program itself is called by
stays: modules, operators, functions, variables, and files by their names.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pytracer._native import core
from pytracer.recorded import Trace

# What says who recorded, and where.
_IDENTITY = frozenset({"host", "pid", "command", "directory", "torch_folder"})
# The number of a GPU is unique in the world.
_GPU = re.compile(r"(GPU-|MIG-)?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def of(trace: Trace) -> Trace:
    """The same trace, and who recorded it is not in it."""
    root = str(trace.meta.get("directory") or "")
    return replace(
        trace,
        # The main thread's number is the process's.
        threads=trace.threads._replace(
            native_id=np.arange(len(trace.threads.native_id), dtype=np.uint64)
        ),
        strings=tuple(_text(text, root) for text in trace.strings),
        meta=meta(trace.meta, root),
        file_report=_plain(dict(trace.file_report), root, _Numbers()),
    )


def meta(document: Mapping[str, Any], root: str) -> dict[str, Any]:
    """The meta of a trace that ran in `root`, without who recorded it."""
    kept = {key: value for key, value in document.items() if key not in _IDENTITY}
    found: dict[str, Any] = _plain(kept, root, _Numbers())
    return {**found, "anonymous": True}


class _Numbers:
    """Counted in the order they are met: this process is the first of its kind."""

    def __init__(self) -> None:
        self._given: dict[tuple[str, Any], int] = {}

    def of(self, kind: str, value: Any) -> int:
        same_kind = sum(known == kind for known, _ in self._given)
        return self._given.setdefault((kind, value), same_kind)


def _plain(value: Any, root: str, numbers: _Numbers) -> Any:
    """A document of JSON, all the way down."""
    if isinstance(value, str):
        return f"gpu-{numbers.of('gpu', value)}" if _GPU.fullmatch(value) else _text(value, root)
    if isinstance(value, list | tuple):
        return [_plain(item, root, numbers) for item in value]
    if not isinstance(value, dict):
        return value
    if (
        "pid" in value
    ):  # this process, or another on the device: what runs there is nobody's business
        told = {key: item for key, item in value.items() if key not in ("pid", "name")}
        return {"pid": numbers.of("pid", value["pid"]), **_plain(told, root, numbers)}
    return {_plain(key, root, numbers): _plain(item, root, numbers) for key, item in value.items()}


def _text(text: str, root: str) -> str:
    # What is no UTF-8 came from the names of files.
    clean, below = (part.encode("utf-8", "replace").decode() for part in (text, root))
    return core.without_paths(clean, below)
