"""What plans need of calls of modules: their backwards' nodes, and the blocks that they made."""

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.facts.scopes import NODE, Tree
from pytracer.data.schema import U32, Mask

_NOTHING = np.zeros(0, np.intp)


class ModuleCalls:
    """Calls of modules, the nodes of their backwards, and the blocks that their forwards made.

    A trace may have a million calls, so each scope and block is looked at once.
    """

    def __init__(self, tree: Tree, calls: NDArray[np.intp], scope: U32, made: Mask) -> None:
        """`scope` is that of each block; `made` tells which blocks a forward made."""
        marked = np.zeros(len(tree.kind), np.bool_)
        marked[calls] = True
        self.around = tree.nearest_context(marked)  # the call around each scope, 0 for none
        nodes = np.flatnonzero(tree.kind == NODE)
        self._nodes = grouped(self.around[tree.forward[nodes]], nodes)
        blocks = np.flatnonzero(made)
        self._blocks = grouped(self.around[scope[blocks]], blocks)

    def nodes(self, call: int) -> NDArray[np.intp]:
        """The nodes of the call's backward."""
        return self._nodes.get(call, _NOTHING)

    def blocks(self, call: int) -> NDArray[np.intp]:
        """The blocks that the call made."""
        return self._blocks.get(call, _NOTHING)


def has_inside(name: str, in_order: list[str]) -> bool:
    """Whether one of these sorted names is that of a module inside this one."""
    place = bisect_left(in_order, f"{name}.")
    return place < len(in_order) and in_order[place].startswith(f"{name}.")


def grouped(key: U32, rows: NDArray[np.intp]) -> dict[int, NDArray[np.intp]]:
    """The rows of each key, in their order."""
    order = np.argsort(key, kind="stable")
    keys, first = np.unique(key[order], return_index=True)
    parts = np.split(rows[order], first[1:])
    return dict(zip(keys.tolist(), parts, strict=False))
