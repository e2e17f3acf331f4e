"""A finished recording: frozen columns, and the file that keeps them."""

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from pytracer import errors
from pytracer.basics.files import LIMIT, most_memory, unfinished
from pytracer.data import model_names, schema
from pytracer.data._native import core

# Readings of the two clocks that are closer together than this show no rate.
_SHORTEST_SPAN_NS = 1_000_000
_LONGEST_TICKS = 2**60  # decades: no recording is longer
_LONGEST_NS = 2**61  # so that differences of times do not overflow

Result = TypeVar("Result")
Others = ParamSpec("Others")


@dataclass(frozen=True)
class Trace:
    """The columns of a recording. Nothing here is interpreted yet."""

    events: schema.Events
    scopes: schema.Scopes
    scope_ends: schema.ScopeEnds
    stacks: schema.Stacks
    places: schema.Places
    labels: schema.Labels
    threads: schema.Threads
    clock: schema.Clock
    strings: tuple[str, ...]
    losses: Mapping[str, int]  # counts of rows that could not be kept, by name
    meta: Mapping[str, Any]
    file_report: Mapping[str, Any] = field(default_factory=dict)  # of a loaded trace

    @classmethod
    def from_columns(
        cls, columns: Mapping[str, Any], file_report: Mapping[str, Any] | None = None
    ) -> "Trace":
        """Makes a Trace of the columns that the native side returns.

        An incomplete file counts among the losses, so a trace that is saved again still has it.
        """
        report, losses = file_report or {}, dict(columns["losses"])
        if (status := report.get("status", "complete")) != "complete":
            losses[f"{status}_file"] = 1
        meta = _parse_meta(columns["meta"])
        if meta is None:
            losses["unreadable_meta"] = 1
        tables = {name: _table(name, columns) for name in schema.TABLES}
        roots = model_names.roots_of(meta or {})
        strings, tables["scopes"], tables["labels"] = model_names.spelled(
            roots, tuple(columns["strings"]), tables["scopes"], tables["labels"]
        )
        meta = model_names.spelled_document(roots, meta or {})
        return cls(**tables, strings=strings, losses=losses, meta=meta, file_report=report)

    def to_columns(self) -> dict[str, Any]:
        """Returns the columns for the native side: the reverse of `from_columns`."""
        columns: dict[str, Any] = {
            f"{name}.{column}": values
            for name in schema.TABLES
            for column, values in getattr(self, name)._asdict().items()
        }
        columns["strings"] = list(self.strings)
        columns["losses"] = dict(self.losses)
        columns["meta"] = json.dumps(dict(self.meta))
        return columns

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Writes a finished `.pytrace` file, and returns its path.

        Raises:
            errors.PytracerError: the file exists already, or cannot be written.
        """
        target = Path(path)
        if not overwrite and target.exists():
            raise errors.FileIsThere(path)
        # A replaced file stays until its successor is whole. A pipe is written to directly.
        place = unfinished(target) if target.is_file() else nullcontext(target)
        beside = target
        try:
            with place as beside:
                core.write_file(os.fsencode(beside), self.to_columns(), overwrite)
        except (core.FileError, OSError) as error:
            raise errors.CannotWrite(str(error).replace(str(beside), str(target))) from None
        return target

    def time_ns(self, ticks: schema.U64) -> schema.I64:
        """Converts ticks to nanoseconds since the trace began."""
        return unix_ns(self.clock, ticks) - self.began_unix_ns

    @property
    def has_allocations(self) -> bool:
        """Whether there is any allocation."""
        return bool(np.any(self.events.action == schema.ACTION["alloc"]))

    @property
    def began_unix_ns(self) -> int:
        """The begin of the trace on the wall clock, in nanoseconds."""
        return int(self.clock.unix_ns[0]) if len(self.clock.unix_ns) else 0


def once_per_trace(
    function: Callable[Concatenate[Trace, Others], Result],
) -> Callable[Concatenate[Trace, Others], Result]:
    """Caches the function's results in the trace and for its life. A Trace never changes.

    Other arguments (a device, for example) have to be hashable.
    """
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def kept(trace: Trace, /, *others: Others.args, **named: Others.kwargs) -> Result:
        results: dict[Any, Any] = vars(trace).setdefault("_results", {})
        key = (name, others, *named.items()) if others or named else name
        if key not in results:
            results[key] = function(trace, *others, **named)
        return results[key]  # type: ignore[no-any-return]

    return kept


def unix_ns(clock: schema.Clock, ticks: schema.U64) -> schema.I64:
    """Converts ticks to the wall clock, by the line through the first and the last reading."""
    if len(clock.ticks) == 0:
        return ticks.astype(np.int64)
    first_ticks, first_ns = int(clock.ticks[0]), int(clock.unix_ns[0])
    span_ticks = int(clock.ticks[-1]) - first_ticks
    span_ns = int(clock.unix_ns[-1]) - first_ns
    rate = span_ns / span_ticks if span_ticks > 0 and span_ns > _SHORTEST_SPAN_NS else 1.0
    # Unsigned differences wrap without complaint; a damaged file may hold any number at all.
    since = (ticks - np.uint64(first_ticks)).view(np.int64).clip(-_LONGEST_TICKS, _LONGEST_TICKS)
    return first_ns + np.round(since * rate).clip(-_LONGEST_NS, _LONGEST_NS).astype(np.int64)


_MOST_STEPS = 2_000_000  # each takes up to 2 KB in an answer; see docs/trace-format.md, "Limits"
_ENDS_OF_STEPS = [schema.SCOPE_KIND["optimizer"], schema.SCOPE_KIND["step"]]


def load(path: str | Path) -> Trace:
    """Reads a `.pytrace` file, as far as it was written.

    Raises:
        errors.UnreadableTrace: the file is missing, no trace, damaged beyond reading, or of a newer
            format.
    """
    limit = most_memory()
    try:
        columns, report = core.read_file(os.fsencode(path), limit)
    except core.FileError as error:
        raise errors.UnreadableTrace(str(error)) from None
    trace = Trace.from_columns(columns, report)
    steps = int(np.isin(trace.scopes.kind, _ENDS_OF_STEPS).sum())
    if steps > _MOST_STEPS and not limit:
        raise errors.UnreadableTrace(
            f"{path}: it has {steps:,} ends of steps, and up to {_MOST_STEPS:,} are read; if you trust "
            f"the file, set {LIMIT}=8GiB"
        )
    if report["status"] != "complete" and not len(trace.events.ticks) + len(trace.scopes.ticks):
        raise errors.UnreadableTrace(
            f"{path}: the file is {report['status']} and nothing that happened is left in it; use "
            "another copy of it, or record again"
        )
    return trace


def _table(name: str, columns: Mapping[str, Any]) -> Any:
    row_type, dtypes = schema.TABLES[name]
    values = []
    for column, dtype in zip(row_type._fields, dtypes, strict=True):
        array = np.asarray(columns[f"{name}.{column}"], dtype=dtype)
        array.flags.writeable = False
        values.append(array)
    return row_type(*values)


def _parse_meta(text: str) -> dict[str, Any] | None:
    """Parses the meta document of a file, which may be anything; None if it is no object."""
    try:
        meta = json.loads(text) if text else {}
    except ValueError:
        return None
    if not isinstance(meta, dict):
        return None
    if not _HALF.search(text):
        return meta
    return {_utf8(key): meta[key] if key in _FILE_NAMES else _utf8(meta[key]) for key in meta}


_HALF = re.compile(r"\\u[dD]")  # how JSON writes the half of a character

# Entries that Python read from the file system. A name that is not UTF-8 works only unchanged.
_FILE_NAMES = frozenset({"command", "directory"})


def _utf8(document: Any) -> Any:
    r"""Returns the document with halves of characters (`"\udcff"`, legal in JSON) written out."""
    if isinstance(document, str):
        return document.encode("utf-8", "backslashreplace").decode()
    if isinstance(document, list):
        return [_utf8(each) for each in document]
    if isinstance(document, dict):
        return {_utf8(key): _utf8(value) for key, value in document.items()}
    return document
