"""Owners: the module, op and Python line that made an allocation, and its forward counterpart."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pytracer.analysis.facts import compiled, phases, scopes
from pytracer.basics.names import is_installed, short_path
from pytracer.data import meta, sanitized
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import SCOPE_RECOMPUTE, U32

# Files of torch's or of ours. They act for the line that called them.
_LIBRARY = re.compile(
    r"(^|/)(site-packages|dist-packages)/(torch|pytracer(?!/(cli/)?demo\.py))/"
    r"|(^|/)torch/(_\w+|ao|autograd|cuda|distributed|fx|func|nn|optim|profiler|utils)/"
    r"|(^|/)torch/(_\w+|functional|hub|overrides|random|serialization|storage)\.py$"
    r"|(^|/)pytracer/(basics|capture|cli(?!/demo\.py)|cost|imagined|integrations|lab|reading|recording)/"
    r"|(^|/)pytracer/__main__\.py$|(^|/)bin/pytracer$"
    r"|(^|/)torchinductor_[^/]*/|^<eval_with_key>"
    r"|^<frozen |(^|/)(contextlib|functools|runpy)\.py$|(^|/)lib/python[\d.]+/copy\.py$"
    r"|^(\?\?)?$|\.(c|cc|cpp|cu|cuh|h|hpp|o|pyx|S)$"  # the C++ frames of another tool's recording
)
# Ops that only allocate. If the program itself calls one, the op still owns its block.
_FACTORY = re.compile(r"aten::((new_)?empty(_like|_strided|_permuted)?|resize_)$")


@dataclass(frozen=True)
class Owners:
    """Per allocation: rows of the string table (module, op) and of the stack table (line)."""

    module: U32
    op: U32
    line: U32
    forward_module: U32
    forward_op: U32
    forward_line: U32


@once_per_trace
def owners(trace: Trace, position: int = compiled.LAST) -> Owners:
    """Finds each allocation's innermost module and op, and the user's innermost frame.

    Compiled code reuses blocks. Such a block's owner is that of the value at this event, or of its last.
    """
    tree = scopes.tree(trace)
    made = phases.moments(trace).made_scope
    caused = _forward_op(trace)[made]
    line = _user_lines(trace)
    lines, forward_lines = (
        # Zeros that take no memory, if no stack was recorded.
        line[rows] if tree.stack.any() else np.broadcast_to(np.uint32(0), len(rows))
        for rows in (made, caused)
    )
    plain = Owners(
        module=_modules(trace)[made],
        op=tree.name[_owning_op(trace)[made]],
        line=lines,
        forward_module=tree.name[tree.module][caused],
        forward_op=tree.name[caused],
        forward_line=forward_lines,
    )
    return _of_compiled_code(trace, plain, made, position)


def _of_compiled_code(trace: Trace, plain: Owners, made: U32, position: int) -> Owners:
    """The owners with those that compiled code names instead of its call."""
    found = compiled.values(trace)
    if found is None:
        return plain
    tree = scopes.tree(trace)
    value = found.alive(trace, made, position)
    backward = (tree.node[made] != 0) & (value != 0)
    around = np.where(backward, plain.forward_module, compiled.caller(trace)[made])
    module = compiled.modules(trace, found, value, around)
    line = _user_frames(trace)[found.stack[value]]
    # An operator that generated code calls has its own name, and no other forward is known.
    op = np.where(compiled.is_line(trace)[made] & (found.op[value] != 0), found.op[value], plain.op)
    forward = (value != 0) & ~backward
    return Owners(
        module=np.where(forward, module, plain.module),
        op=op,
        line=np.where(forward & (line != 0), line, plain.line),
        forward_module=np.where(backward, module, plain.forward_module),
        forward_op=np.where(backward, 0, plain.forward_op).astype(np.uint32),
        forward_line=np.where(backward & (line != 0), line, plain.forward_line),
    )


def values_text(trace: Trace, place: int) -> str:
    """What a block of this place in compiled code holds, one after the other; "" for one value."""
    found = compiled.values(trace)
    if found is None or found.count[place] < 2:
        return ""
    frames, texts = _user_frames(trace), []
    for value in range(first := int(found.first[place]), first + int(found.count[place])):
        source, line = found.source[value], line_text(trace, int(frames[found.stack[value]]))
        again = "(recomputed)" if source.recomputed else ""
        texts.append(" ".join(filter(None, (source.op or "?", again, line))))
    return ", then ".join(texts)


@dataclass(frozen=True)
class FreedBy:
    """Per allocation: rows of the string table; 0 if it was not freed, or freed in no scope."""

    module: U32
    op: U32


@once_per_trace
def freed_by(trace: Trace) -> FreedBy:
    """The innermost module and op in which each allocation was given back."""
    tree, freed = scopes.tree(trace), phases.moments(trace).freed_scope
    return FreedBy(_modules(trace)[freed], tree.name[_owning_op(trace)[freed]])


@once_per_trace
def _modules(trace: Trace) -> U32:
    """Per scope, the name of the module around it.

    A checkpoint that runs `layer.forward` again makes no call of the layer. Its operators' owner is
    then the innermost module around all modules that run again with them.
    """
    tree = scopes.tree(trace)
    name = tree.name[tree.module]
    again = (tree.kind == scopes.OP) & (tree.flags & SCOPE_RECOMPUTE != 0)
    again &= (tree.module == 0) & (tree.node != 0)
    if not again.any():
        return name
    inside: dict[int, set[str]] = {}
    for number in np.flatnonzero((tree.kind == scopes.MODULE) & (tree.node != 0)).tolist():
        inside.setdefault(int(tree.node[number]), set()).add(trace.strings[tree.name[number]])
    rows = {text: row for row, text in enumerate(trace.strings)}
    of_node = np.zeros(len(name), np.uint32)
    for node, paths in inside.items():
        of_node[node] = rows.get(_what_all_are_in(paths), 0)
    source = scopes.nearest(tree.parent, again)
    return np.where((tree.module == 0) & (source != 0), of_node[tree.node[source]], name)


def _what_all_are_in(paths: set[str]) -> str:
    """The innermost module around all of these."""
    levels = [path.split(".")[:-1] for path in paths]
    common = 0
    while all(len(one) > common and one[common] == levels[0][common] for one in levels):
        common += 1
    return ".".join(levels[0][:common])


def _owning_op(trace: Trace) -> U32:
    """Per scope, the innermost op that is no factory: factories allocate for others.

    Torch's own nodes count as ops, because the ops inside them are not recorded.
    """
    tree = scopes.tree(trace)
    is_op = (tree.kind == scopes.OP) | (tree.kind == scopes.NODE)
    computes = is_op & ~scopes.scopes_named(trace, lambda text: bool(_FACTORY.match(text)))
    computes &= ~compiled.is_line(trace)
    computing = scopes.nearest(tree.parent, computes)
    return np.where(computing != 0, computing, tree.op)


def _forward_op(trace: Trace) -> U32:
    """Per scope, the op that made the innermost node around it, among nodes with a known op."""
    tree = scopes.tree(trace)
    node = tree.nearest_context((tree.kind == scopes.NODE) & (tree.forward != 0))
    forward: U32 = tree.forward[node]
    return forward


def _user_lines(trace: Trace) -> U32:
    """Per scope, the row of the user's innermost frame in the stack of the op around it.

    Only the outermost op has a stack, because Python called that one.
    """
    tree = scopes.tree(trace)
    if not tree.stack.any():
        return np.zeros(len(tree.stack), np.uint32)
    line = _user_frames(trace)[tree.stack]  # a line of generated code is none of the user's
    return line[scopes.nearest(tree.parent, line != 0)]


def _user_frames(trace: Trace) -> U32:
    """Per row of the stack table, the user's innermost frame at or above it."""
    return _frames_in(trace, _is_users(trace))


@once_per_trace
def own_frames(trace: Trace) -> U32:
    """The same for the program's own frames: the line that called a library, not a line of it."""
    is_users = _is_users(trace)
    return _frames_in(trace, lambda path: is_users(path) and not is_installed(path))


def _is_users(trace: Trace) -> Callable[[str], bool]:
    generated = {one.file for one in meta.of(trace).compiled}
    return lambda path: is_users_file(path) and path not in generated


def _frames_in(trace: Trace, wanted: Callable[[str], bool]) -> U32:
    stacks = sanitized.stacks(trace)
    found = scopes.names_where(trace, wanted)[stacks.file]
    found[0] = False
    return scopes.nearest(stacks.parent, found)


def is_users_file(path: str) -> bool:
    """Whether the file is the user's: not torch's, not ours, not Python's own plumbing."""
    return not _LIBRARY.search(path)


def line_text(trace: Trace, row: int) -> str:
    """`path:line` of a row of the stack table; of a notebook's cell `In[3]:line`.

    The path is relative to where packages are installed, or to where the program ran.
    """
    if row == 0:
        return ""
    stacks, noted = sanitized.stacks(trace), meta.of(trace)
    file = trace.strings[stacks.file[row]]
    return f"{noted.cells.get(file) or short_path(file, noted.directory)}:{stacks.line[row]}"


@dataclass(frozen=True)
class Place:
    """Where something happened, as text; "" if unknown."""

    module: str
    op: str
    line: str
    in_backward_of: bool  # it happened in a backward; module and line are those of its forward


def place_of(trace: Trace, scope: int) -> Place:
    """The owner of an event in this scope; in a backward, the forward that caused it.

    A forward that checkpointing runs again owns its own events.
    """
    tree = scopes.tree(trace)
    if scope >= len(tree.kind):
        return Place("", "", "", False)
    again = tree.op[scope] != 0 and tree.flags[tree.op[scope]] & SCOPE_RECOMPUTE
    caused = 0 if again else int(_forward_op(trace)[scope])
    at, op = caused or scope, int(_owning_op(trace)[scope])
    module, name, line = (
        int(column[i])
        for column, i in ((tree.name, tree.module[at]), (tree.name, op), (_user_lines(trace), at))
    )
    found = compiled.values(trace)
    if found is not None and (value := int(found.first[found.place[scope]])):
        module = module if caused else int(compiled.caller(trace)[scope])
        pair = np.array([value], np.uint32), np.array([module], np.uint32)
        module = int(compiled.modules(trace, found, *pair)[0])
        name = int(found.op[value]) if compiled.is_line(trace)[scope] and found.op[value] else name
        line = int(_user_frames(trace)[found.stack[value]]) or line
    return Place(
        module=trace.strings[module] if module else "",
        op=trace.strings[name] if op else "",
        line=line_text(trace, line),
        in_backward_of=caused != 0,
    )
