"""Who holds the memory: by category, by any of the keys, per parameter, and one row per block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pytracer import errors
from pytracer.analysis.allocator import blocks
from pytracer.analysis.facts import compiled, grouping, owners, usage
from pytracer.analysis.facts.allocations import MISSING_TIME, allocations, times_ns
from pytracer.analysis.facts.casts import elements
from pytracer.analysis.facts.devices import device_of_place
from pytracer.analysis.facts.usage import At
from pytracer.data import frames, meta, sanitized
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORIES, CATEGORY, CATEGORY_ORDER, KEYS

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class CategoryRow:
    """A category in numbers; sizes are bytes."""

    category: str
    at_peak: int
    own_peak: int
    at_end: int
    allocations: int


def category_rows(trace: Trace, device: str | None = None) -> list[CategoryRow]:
    """One row per category, in the order in which tables show them."""
    alloc, here = allocations(trace), usage.on_device(trace, device)
    at_peak = usage.bytes_by_category(trace, usage.alive(trace, "peak", device))
    at_end = usage.bytes_by_category(trace, usage.alive(trace, "end", device))
    count = np.bincount(alloc.category[here], minlength=len(CATEGORIES))
    rows = []
    for name in CATEGORY_ORDER:
        number = CATEGORY[name]
        own = (
            usage.highest_where(trace, here & (alloc.category == number)).bytes
            if count[number]
            else 0
        )
        rows.append(
            CategoryRow(name, int(at_peak[number]), own, int(at_end[number]), int(count[number]))
        )
    return rows


def summary(trace: Trace, device: str | None = None) -> "pd.DataFrame":
    """One row per category: bytes at the peak, at its own peak, at the end; allocations."""
    return frames.of_rows(category_rows(trace, device)).set_index("category")


def allocations_frame(trace: Trace) -> "pd.DataFrame":
    """One row per allocation on any device; missing values are NA."""
    alloc = allocations(trace)
    texts, labels, places = grouping.Texts(trace), sanitized.labels(trace), trace.places
    device_names = device_of_place(trace)
    columns: dict[str, Any] = {
        "id": np.arange(len(alloc)),
        "device": texts.of(alloc.place, lambda place: str(device_names[place])),
        "address": alloc.address,
        "requested_bytes": alloc.requested_bytes.astype(np.int64),
        "allocated_bytes": frames.numbers(blocks.allocated_bytes(trace), blocks.UNKNOWN),
        "start_ns": frames.numbers(times_ns(trace, alloc.start), MISSING_TIME),
        "end_ns": frames.numbers(times_ns(trace, alloc.end), MISSING_TIME),
        "step": frames.numbers(alloc.step, -1),
        "phase": texts.phases(alloc.phase),
        "category": frames.categorical(alloc.category.astype(np.int8), CATEGORIES),
        "role": texts.roles(alloc.role),
        "name": texts.strings(labels.name[alloc.label]),
        "module": texts.strings(alloc.module),
        "op": texts.strings(alloc.op),
        "line": texts.lines(alloc.line),
        "forward_module": texts.strings(alloc.forward_module),
        "forward_op": texts.strings(alloc.forward_op),
        "forward_line": texts.lines(alloc.forward_line),
        "free_phase": texts.phases(alloc.free_phase),
        "stream": places.stream[alloc.place],
        "pool": texts.pools(alloc.place),
        "thread": alloc.thread,
        "shape": texts.strings(labels.shape[alloc.label]),
        "dtype": texts.strings(grouping.dtype_rows(trace)),
        "values": texts.of(
            compiled.places(trace, alloc.scope), lambda place: owners.values_text(trace, place)
        ),
    }
    return frames.of_columns(
        {
            name: column.categorical() if isinstance(column, grouping.Group) else column
            for name, column in columns.items()
        }
    )


def by(
    trace: Trace, keys: str | Sequence[str], at: At = "peak", device: str | None = None
) -> "pd.DataFrame":
    """Bytes and allocations alive at a moment by "module", "op", "line", "phase", "role", ...

    A module holds the blocks that it and its backward made, and its own weights, gradients and
    optimizer state. The same holds for op and line. A block from a backward counts for the forward
    that caused it; a block that checkpointing makes again, for the op that made it again.

    Raises:
        errors.UsageError: a key does not exist.
    """
    wanted = [keys] if isinstance(keys, str) else list(keys)
    if not wanted:
        raise errors.UsageError(f"by() needs a key to group by; there is: {', '.join(KEYS)}")
    there, position = usage.alive(trace, at, device), usage.position_of(trace, at, device)
    columns = {key: grouping.group(trace, key, there, position).categorical() for key in wanted}
    size = allocations(trace).requested_bytes[there].astype(np.int64)
    frame = frames.of_columns({**columns, "bytes": size, "allocations": 1})
    grouped = frame.groupby(wanted, dropna=False, observed=True, sort=False)
    return grouped.sum().sort_values("bytes", ascending=False, kind="stable")


@dataclass(frozen=True)
class PerParameter:
    """A category's bytes per parameter of the model; NaN if no parameter is known."""

    category: str
    bytes: int  # at the category's own peak
    per_parameter: float
    textbook: str  # not last: pandas leaves out middle columns on a narrow screen
    at_peak: float  # per_parameter at the peak of all memory, and when the trace ended
    at_rest: float


# The figures of papers and courses for mixed precision with Adam, and for fp32.
_TEXTBOOK = {
    "weights": "4 (fp32), 6 (mixed: fp32 and a 16-bit copy), 2 (pure 16-bit)",
    "gradients": "4 (fp32), 2 (16-bit)",
    "optimizer_state": "8 (Adam), 4 (momentum), 2 (8-bit Adam), 0 (SGD)",
}


def parameters(trace: Trace, device: str | None = None) -> int:
    """The number of the model's parameters: all elements of tensors labelled "parameter"."""
    alloc, labels = allocations(trace), sanitized.labels(trace)
    is_parameter = np.array([trace.strings[r] == "parameter" for r in labels.role], np.bool_)
    is_parameter &= labels.category == CATEGORY["weights"]
    rows = np.unique(alloc.label[usage.on_device(trace, device)])
    by_name = {
        int(labels.name[r]): elements(trace.strings[labels.shape[r]])
        for r in rows
        if is_parameter[r]
    }
    return sum(by_name.values())


def parameter_rows(trace: Trace, device: str | None = None) -> list[PerParameter]:
    """Weights, gradients and optimizer state per parameter: at most, at the peak, at rest."""
    count = parameters(trace, device) or float("nan")
    rows = {row.category: row for row in category_rows(trace, device)}
    return [
        PerParameter(
            category=name,
            bytes=rows[name].own_peak,
            per_parameter=rows[name].own_peak / count,
            at_peak=rows[name].at_peak / count,
            at_rest=rows[name].at_end / count,
            textbook=textbook,
        )
        for name, textbook in _TEXTBOOK.items()
    ]


def parameter_shares(trace: Trace) -> "pd.DataFrame":
    """The parameters of a job's model: how each is placed, its bytes, and this rank's part of them."""
    rows = [
        {
            "name": one.name,
            "placement": one.how or "whole",
            "mesh_dim": one.over,
            "local_bytes": one.local_bytes,
            "global_bytes": one.global_bytes,
        }
        for one in meta.of(trace).sharding.parameters
    ]
    names = ["name", "placement", "mesh_dim", "local_bytes", "global_bytes"]
    return frames.of_rows(rows, names).set_index("name")


def bytes_per_parameter(trace: Trace, device: str | None = None) -> "pd.DataFrame":
    """Weights, gradients and optimizer state per parameter, beside the textbook's rule."""
    return frames.of_rows(parameter_rows(trace, device)).set_index("category")
