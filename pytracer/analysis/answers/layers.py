"""Layers that are alike: who holds memory, with all layers of a stack as one."""

from dataclasses import dataclass

import numpy as np

from pytracer.analysis.facts import grouping, scopes
from pytracer.analysis.facts.allocations import allocations
from pytracer.basics.names import called_layer, is_nameless, layers_alike, numbers_text
from pytracer.data.recorded import Trace
from pytracer.data.schema import PHASE, Mask

_MOST_APART = 8  # children of a Sequential


@dataclass(frozen=True)
class Repeated:
    """Modules whose paths differ only in numbers: the layers of a stack."""

    pattern: str  # "h.*.mlp"; of a Sequential's children "[0, 2, 4]"
    names: tuple[str, ...]
    bytes: int

    @property
    def modules(self) -> int:
        """How many they are."""
        return len(self.names)

    @property
    def text(self) -> str:
        """The pattern as people read it. Stars alone say nothing, so they are `all layers`."""
        return "all layers" if is_nameless(self.pattern) else self.pattern


def repeated_modules(
    trace: Trace, which: Mask, depth: bool = True, at: int | None = None
) -> list[Repeated]:
    """The holders of these allocations, with all layers of a stack as one, largest first.

    With `depth`, modules inside a layer count for the layer (`h.3.mlp.0` for `h.*`), because people
    checkpoint or move whole layers.
    """
    totals: dict[str, int] = {}
    members: dict[str, dict[str, None]] = {}
    rows = grouping.holders(trace, "module", which, at)
    called = scopes.called_modules(trace)
    names = [called_layer(row.name, called) if depth else row.name for row in rows]
    bare = {name for name in names if layers_alike(name) == "*"}
    for row, name in zip(rows, names, strict=True):
        pattern = layers_alike(name)
        if pattern == "*":
            # These children have no other name: name each if they are few, unless layers count.
            alone = not depth and len(bare) <= _MOST_APART
            pattern = numbers_text([name] if alone else bare)
        totals[pattern] = totals.get(pattern, 0) + row.bytes
        members.setdefault(pattern, {})[name] = None
    repeated = [Repeated(p, tuple(members[p]), total) for p, total in totals.items()]
    return sorted(repeated, key=lambda each: -each.bytes)


def not_recomputed(trace: Trace, which: Mask) -> Mask:
    """These allocations without those of layers that already run their forward a second time."""
    layers, called = recomputed_layers(trace), scopes.called_modules(trace)
    result = which.copy()
    if layers:
        groups = grouping.group(trace, "module", which)
        again = np.array(
            [called_layer(name, called) in layers for name in groups.names] + [False], np.bool_
        )
        result[which] = ~again[groups.codes]  # code -1, no module, is the last
    return result


def recomputed_layers(trace: Trace) -> set[str]:
    """The layers that checkpointing runs again, anywhere in the trace."""
    alloc = allocations(trace)
    modules = np.unique(alloc.module[alloc.phase == PHASE["recompute"]])
    called = scopes.called_modules(trace)
    return {called_layer(trace.strings[module], called) for module in modules if module}
