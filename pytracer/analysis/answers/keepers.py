"""Which variable keeps blocks, and by which way."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pytracer.analysis.answers.situation import Situation
from pytracer.analysis.facts.allocations import allocations
from pytracer.data import meta
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import U64, Mask

_MANY = 250  # blocks in one variable; the trace has only the last 300 of a longer list
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Keeper:
    """A variable of the program; "" if none is known."""

    name: str = ""
    path: str = field(default="", compare=False)  # the way to most of what it keeps
    bound: int = field(default=0, compare=False)  # of its items; 0: any number
    has_graph: bool = field(default=False, compare=False)  # which still has its saved tensors

    def __bool__(self) -> bool:
        return bool(self.name)

    @property
    def way(self) -> str:
        """The path in brackets, if it tells more than the name."""
        return f" ({self.path})" if self.path else ""


def keeper_of(now: Situation, own: Mask, kind: U64) -> Keeper:
    """The variable that held most blocks like these at the end, itself or in its graph.

    Each step overwrites its variables, so the last step's blocks identify the variable. If no such
    block is left at the end, the variable is gone, too. The same attribute of the layers of a stack
    is one variable, and so are attributes with a number in their names.
    """
    alloc = allocations(now.trace)
    own = (alloc.completed < 0) & np.isin(kind, np.unique(kind[own]))
    if not own.any():
        return Keeper()
    size = dict(zip(alloc.address[own].tolist(), alloc.requested_bytes[own].tolist(), strict=True))
    return _keeper(now, size, str) or _keeper(now, size, lambda name: _NUMBER.sub("*", name))


def _keeper(now: Situation, size: dict[int, int], named: Callable[[str], str]) -> Keeper:
    """The keeper of most of these bytes by address, where equally named variables are one."""
    rows = dict[str, list[meta.Variable]]()
    for variable in meta.of(now.trace).variables:
        rows.setdefault(named(variable.name), []).append(variable)
    held = {
        name: set[int]().union(*map(_addresses, own)) & size.keys() for name, own in rows.items()
    }
    amount = {name: sum(map(size.__getitem__, those)) for name, those in held.items()}
    most = max(amount, key=amount.__getitem__, default="")
    if not most or (amount[most] <= sum(size.values()) // 2 and len(held[most]) < _MANY):
        return Keeper()
    row = max(rows[most], key=lambda each: sum(size.get(one, 0) for one in _addresses(each)))
    return Keeper(most, row.path, row.bound, any(each.graph_addresses for each in rows[most]))


def _addresses(variable: meta.Variable) -> set[int]:
    return {*variable.addresses, *variable.graph_addresses}


@once_per_trace
def kinds(trace: Trace, *, sizes: bool = True) -> U64:
    """A number per allocation: equal for two blocks that are alike."""
    alloc = allocations(trace)
    kind = alloc.requested_bytes.astype(np.uint64) * np.uint64(sizes)
    for column in (alloc.line, alloc.module, alloc.op, alloc.category):
        kind = kind * np.uint64(0x9E3779B97F4A7C15) + column.astype(np.uint64)
    return kind


def in_graphs_alone(trace: Trace) -> Mask:
    """Blocks like those that graphs had saved at the end, and no variable held, or fewer of them."""
    alloc, kind, variables = allocations(trace), kinds(trace), meta.of(trace).variables
    held = {address for each in variables for address in each.addresses}
    saved = {address for each in variables for address in each.graph_addresses} - held
    there = alloc.completed < 0
    of_graphs, of_variables = (
        kind[there & np.isin(alloc.address, np.array([*those], np.uint64))]
        for those in (saved, held)
    )
    most = {each: int((of_variables == each).sum()) for each in np.unique(of_graphs)}
    alone = [each for each, others in most.items() if (of_graphs == each).sum() > others]
    is_alike: Mask = np.isin(kind, np.array(alone, np.uint64))
    return is_alike
