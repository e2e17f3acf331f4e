"""Which variable keeps blocks."""

import numpy as np

from pytracer import meta
from pytracer.analysis.answers.situation import Situation
from pytracer.analysis.facts.allocations import allocations
from pytracer.recorded import Trace, once_per_trace
from pytracer.schema import U64, Mask

_MANY = 250  # blocks in one variable; the trace has only the last 300 of a longer list


def keeper_of(now: Situation, own: Mask, kind: U64) -> str:
    """The variable that held most blocks like these at the end, itself or in its graph; or "".

    Each step overwrites its variables, so the last step's blocks identify the variable. If no such
    block is left at the end, the variable is gone, too.
    """
    alloc = allocations(now.trace)
    own = (alloc.completed < 0) & np.isin(kind, np.unique(kind[own]))
    if not own.any():
        return ""
    size = dict(zip(alloc.address[own].tolist(), alloc.requested_bytes[own].tolist(), strict=True))
    held: dict[str, int] = {}
    count: dict[str, int] = {}
    for variable in meta.of(now.trace).variables:
        distinct = {*variable.addresses, *variable.graph_addresses}
        held[variable.name] = sum(size.get(address, 0) for address in distinct)
        count[variable.name] = len(distinct & size.keys())
    most = max(held, key=lambda name: held[name], default="")
    if most and (held[most] > sum(size.values()) // 2 or count[most] >= _MANY):
        return most
    return ""


def has_graph(now: Situation, variable: str) -> bool:
    """Whether the variable's graph still has its saved tensors."""
    variables = meta.of(now.trace).variables
    return any(each.graph_addresses for each in variables if each.name == variable)


def bound_of(now: Situation, variable: str) -> int:
    """How many items the variable may hold at most; 0 if nothing says so."""
    variables = meta.of(now.trace).variables
    return max((each.bound for each in variables if each.name == variable), default=0)


@once_per_trace
def kinds(trace: Trace, *, sizes: bool = True) -> U64:
    """A number per allocation: equal for two blocks that are alike."""
    alloc = allocations(trace)
    kind = alloc.requested_bytes.astype(np.uint64) * np.uint64(sizes)
    for column in (alloc.line, alloc.module, alloc.op, alloc.category):
        kind = kind * np.uint64(0x9E3779B97F4A7C15) + column.astype(np.uint64)
    return kind
