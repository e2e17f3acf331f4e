"""The tree of scopes: which module, op and line enclose an event.

Scopes are numbered from 1; number 0 is "none", so every column here has one row more than the
scope table. A parent has a smaller number than its children.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer.data import meta, sanitized
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import SCOPE_KIND, U8, U16, U32, U64, Mask

NEVER = np.uint64(np.iinfo(np.uint64).max)
NO_KIND = 255

OP = SCOPE_KIND["op"]
NODE = SCOPE_KIND["node"]
MODULE = SCOPE_KIND["module"]
BACKWARD = SCOPE_KIND["backward"]
OPTIMIZER = SCOPE_KIND["optimizer"]
USER = SCOPE_KIND["user"]
STEP = SCOPE_KIND["step"]


@dataclass(frozen=True)
class Tree:
    """The scopes by number, and the scopes around each."""

    begin: U64  # ticks
    end: U64  # ticks; NEVER for a scope that was open when the trace ended
    parent: U32
    forward: U32
    name: U32
    thread: U16
    kind: U8
    flags: U8
    stack: U32
    op: U32  # the innermost op at or around each scope, 0 for none
    module: U32
    node: U32
    contexts: "Contexts"

    def nearest_context(self, marked: Mask) -> U32:
        """The innermost marked scope at or around each scope; marks on ops do not count."""
        return self.contexts.nearest(marked)

    @property
    def made_nodes(self) -> Mask:
        """Per scope, whether a node of the graph that a backward ran was made in it."""
        made = np.zeros(len(self.kind), np.bool_)
        made[self.forward] = True
        made[0] = False
        return made


@dataclass(frozen=True)
class Contexts:
    """The tree without its ops. Most scopes are ops, so this tree is much quicker to climb."""

    numbers: U32  # the scopes that are no ops, rising; the first is 0
    outer: U32  # the context around each of them, as a position in `numbers`
    of_scope: U32  # per scope, the context at or around it, as a position in `numbers`

    @classmethod
    def of(cls, parent: U32, kind: U8) -> "Contexts":
        """Leaves out the ops."""
        is_context = kind != OP
        numbers = np.flatnonzero(is_context).astype(np.uint32)
        place = np.cumsum(is_context, dtype=np.uint32)
        place -= 1
        of_scope = place[nearest(parent, is_context)]
        return cls(numbers, of_scope[parent[numbers]], of_scope)

    def nearest(self, marked: Mask) -> U32:
        """The innermost marked scope at or around each scope."""
        innermost: U32 = self.numbers[nearest(self.outer, marked[self.numbers])][self.of_scope]
        return innermost


def nearest(parent: U32, marked: Mask) -> U32:
    """The innermost marked scope at or above each scope, 0 for none."""
    up = np.where(marked, np.arange(len(parent), dtype=np.uint32), parent)
    while True:
        # Each round doubles the distance upwards; marked scopes stay where they are.
        further = up[up]
        if np.array_equal(further, up):
            return up
        up = further


@once_per_trace
def tree(trace: Trace) -> Tree:
    """Reads the scope tables; numbers that point nowhere become 0."""
    begins, ends = trace.scopes, trace.scope_ends
    count = len(begins.ticks) + 1
    numbers = np.arange(count, dtype=np.uint32)
    parent = _with_none(begins.parent)
    parent[parent >= numbers] = 0  # a damaged file must not make a loop
    forward = sanitized.within(_with_none(begins.forward), count)
    kind = _with_none(begins.kind, NO_KIND)
    end = np.full(count, NEVER)
    stack = np.broadcast_to(np.uint32(0), count)  # takes no memory
    left = sanitized.within(ends.scope, count)
    end[left] = ends.ticks
    end[0] = NEVER
    if (stacks := len(sanitized.stacks(trace).parent)) > 1:
        stack = np.zeros(count, np.uint32)
        stack[left] = sanitized.within(ends.stack, stacks)
        stack[0] = 0
    _end_inner_ops(end, parent, kind == OP)
    contexts = Contexts.of(parent, kind)
    return Tree(
        begin=_with_none(begins.ticks),
        end=end,
        parent=parent,
        forward=forward,
        name=_with_none(sanitized.within(begins.name, len(trace.strings))),
        thread=_with_none(begins.thread),
        kind=kind,
        flags=_with_none(begins.flags),
        stack=stack,
        op=nearest(parent, kind == OP),
        module=contexts.nearest(kind == MODULE),
        node=contexts.nearest(kind == NODE),
        contexts=contexts,
    )


@once_per_trace
def called_modules(trace: Trace) -> frozenset[str]:
    """The paths of all modules that were called."""
    all_scopes = tree(trace)
    names = np.unique(all_scopes.name[all_scopes.kind == MODULE])
    return frozenset(trace.strings[row] for row in names)


def outermost_op(tree: Tree) -> U32:
    """Per scope, the outermost op of those nested around it: the one that the program called."""
    inner = (tree.kind == OP) & (tree.kind[tree.parent] == OP)
    return nearest(tree.parent, ~inner)


@once_per_trace
def has_operators(trace: Trace) -> bool:
    """Whether all operators were recorded; with detail="category" they are not."""
    if meta.of(trace).options.detail == "category":
        return False
    return bool((tree(trace).kind == OP).any())


def _end_inner_ops(end: U64, parent: U32, is_op: Mask) -> None:
    """Gives ops inside ops an end: they record none, and are over when the outermost op is."""
    inner = is_op & is_op[parent]
    outermost = nearest(parent, ~inner)
    end[inner] = np.minimum(end[inner], end[outermost[inner]])


def _with_none(column: NDArray[Any], none: int = 0) -> NDArray[Any]:
    return np.concatenate([np.array([none], column.dtype), column])


def names_where(trace: Trace, test: Callable[[str], bool]) -> Mask:
    """Per row of the string table, whether the text passes. Texts are few; scopes are many."""
    return np.fromiter((test(text) for text in trace.strings), np.bool_, len(trace.strings))


def scopes_named(trace: Trace, test: Callable[[str], bool]) -> Mask:
    """Per scope number, whether its name passes."""
    passes = names_where(trace, test)
    names = tree(trace).name
    result = passes[names]
    result[0] = False
    return result
