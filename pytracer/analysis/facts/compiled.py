"""What blocks of compiled code hold: the node of the graph that a line of the generated code makes.

A place is such a line that allocates. Its block may hold several values, one after the other, because
Inductor reuses buffers. Each value has an operator, a module and a line of the program.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.facts import scopes
from pytracer.data import meta, sanitized
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import COMPILED, GENERATED_LINE, U32, Mask

LAST = -1  # as a position: when the block is given back


@dataclass(frozen=True)
class Values:
    """The values of all places, those of a place together and in order. Row 0: none."""

    place: U32  # per scope: its place, 0 for none
    first: U32  # per place: its first value
    count: U32
    file: U32  # per place: a row of the string table
    begin: U32  # per value: the line of the generated code that makes it
    op: U32  # a row of the string table
    stack: U32  # a row of the stack table
    source: tuple[meta.CompiledValue, ...]

    def alive(self, trace: Trace, made: U32, position: int = LAST) -> U32:
        """The value of each block at that event, by the scope that made it; 0 for none."""
        place = self.place[made]
        chosen = self.first[place] + np.maximum(self.count[place], 1) - 1
        chosen[place == 0] = 0
        if position != LAST and (reached := self._reached(trace, position)) is not None:
            around, line = reached
            tree = scopes.tree(trace)
            # What this very call of the generated code has made and may still reuse.
            for row in np.flatnonzero((self.count[place] > 1) & (tree.parent[made] == around)):
                values = slice(first := self.first[place[row]], first + self.count[place[row]])
                chosen[row] = first + max(int((self.begin[values] <= line).sum()) - 1, 0)
        return chosen.astype(np.uint32)

    def _reached(self, trace: Trace, position: int) -> tuple[int, int] | None:
        """The call of generated code that runs at that event, and the line that it has reached."""
        tree, events = scopes.tree(trace), trace.events
        scope = int(sanitized.within(events.scope[position : position + 1], len(tree.kind))[0])
        if self.place[scope] == 0:
            return None
        return int(tree.parent[scope]), int(self.begin[self.first[self.place[scope]]])


@once_per_trace
def values(trace: Trace) -> Values | None:
    """The values of the places that the trace has; None if it has none."""
    noted = [one for one in meta.of(trace).compiled if one.values]
    stacks, tree = sanitized.stacks(trace), scopes.tree(trace)
    rows = {text: row for row, text in enumerate(trace.strings)}
    if not noted or not tree.stack.any():
        return None
    number = {(rows.get(one.file, 0), one.line): i for i, one in enumerate(noted, 1)}
    files = np.unique([file for file, _ in number])
    of_frame = np.zeros(len(stacks.parent), np.uint32)  # per row of the stack table
    for row in np.flatnonzero(np.isin(stacks.file, files) & (stacks.file != 0)).tolist():
        of_frame[row] = number.get((int(stacks.file[row]), int(stacks.line[row])), 0)
    of_stack = of_frame[scopes.nearest(stacks.parent, of_frame != 0)]
    with_stack = scopes.nearest(tree.parent, tree.stack != 0)
    listed = [value for one in noted for value in one.values]
    count = np.array([0, *(len(one.values) for one in noted)], np.uint32)
    return Values(
        place=of_stack[tree.stack[with_stack]],
        first=(1 + np.cumsum(count) - count).astype(np.uint32),
        count=count,
        file=np.array([0, *(rows.get(one.file, 0) for one in noted)], np.uint32),
        begin=np.array([0, *(value.begin for value in listed)], np.uint32),
        op=np.array([0, *(rows.get(value.op, 0) for value in listed)], np.uint32),
        stack=sanitized.within(
            np.array([0, *(value.stack for value in listed)], np.uint32), len(stacks.parent)
        ),
        source=(meta.CompiledValue(), *listed),
    )


def places(trace: Trace, made: U32) -> U32:
    """The place of each block, by the scope that made it; 0 for none."""
    found = values(trace)
    return np.zeros(len(made), np.uint32) if found is None else found.place[made]


@once_per_trace
def caller(trace: Trace) -> U32:
    """Per scope, the name of the module that runs the compiled code around it.

    With some back ends, a graph is a module of its own. It lies inside a Function of torch's.
    """
    tree = scopes.tree(trace)
    named = scopes.scopes_named(trace, lambda text: text.startswith(COMPILED))
    run = scopes.nearest(tree.parent, named & (tree.kind == scopes.OP))
    name: U32 = tree.name[tree.module[np.where(run != 0, run, np.arange(len(run)))]]
    return name


@once_per_trace
def is_line(trace: Trace) -> Mask:
    """Per scope, whether it is a line of generated code that allocates without an operator."""
    return scopes.scopes_named(trace, GENERATED_LINE.__eq__)


def modules(trace: Trace, found: Values, value: U32, around: U32) -> U32:
    """The module of each value, by the module that ran its code; that one if no more is known."""
    rows = {text: row for row, text in enumerate(trace.strings)}
    roots = meta.of(trace).roots
    pairs, which = np.unique(np.stack([value, around]), axis=1, return_inverse=True)
    result = np.zeros(pairs.shape[1], np.uint32)
    for i, (number, outer) in enumerate(pairs.T.tolist()):
        source, name = found.source[number], trace.strings[outer]
        below = _path(name, source.below, is_root=roots.has(name), several=roots.several)
        known = rows.get(below, 0) if below else 0
        result[i] = known or rows.get(source.module, 0) or outer
    chosen: NDArray[np.uint32] = result[which.reshape(-1)]
    return chosen


def _path(outer: str, inside: str | None, *, is_root: bool, several: bool) -> str:
    """The path of a module inside another. In the only model, paths begin below it."""
    if not inside or not outer:
        return ""
    return inside if is_root and not several else f"{outer}.{inside}"
