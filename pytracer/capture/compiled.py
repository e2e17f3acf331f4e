"""What torch.compile made of a program: what each allocating line of the code that it wrote holds.

Inductor writes a Python file whose lines allocate, and a graph of torch.fx has its code as a text. A
recording has such a line's file and number. While a graph is compiled, Inductor knows which node of
the graph each of its buffers stands for; `GraphLowering.save_output_code`, its own hook, tells us. As a
recording ends, `places` joins the two. Code that comes from Inductor's cache was never compiled here:
then the file's comments and Inductor's map of lines tell the line, and Dynamo's graph the modules.
"""

import gc
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pytracer.basics import private_torch
from pytracer.data._native import C
from pytracer.data.model_names import Roots

_MOST_FILES = 4096  # of generated code whose buffers are known; the oldest are forgotten
_MOST_ALIKE = 256  # nodes of one name, in different graphs
_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')
_ROOT = re.compile(r"^\w+\['[^']*'\]")  # how Dynamo writes a variable: L['self'], G['model']
_KEY = re.compile(r"\._modules\['([^']+)'\]|\[(\d+)\]")
_MADE = re.compile(r"\s*(\w+)(?: : [^=]+)? = ")
_REUSED = re.compile(r"\s*(\w+) = (?:reinterpret_tensor\()?(\w+)\b.*# reuse")
_NODES = re.compile(r"\s*# Topologically Sorted Source Nodes: \[(.*?)\], Original ATen: \[(.*?)\]")
_GRAPH_FILE = "<eval_with_key>."
_INDUCTOR, _CODE = "torch._inductor.graph", "torch._inductor.codecache"


class Value(NamedTuple):
    """What a buffer holds: a node of a graph, as the program wrote it."""

    op: str = ""  # "aten::addmm"
    trace: str = ""  # the program's frames, as torch.fx writes them
    # The modules around it, by Dynamo's path and class, the outermost first. Of code from the cache,
    # each of several nodes may be the one.
    modules: tuple[tuple[tuple[str, str], ...], ...] = ()
    recomputed: bool = False


# By a digest of the text, each buffer's value. Kept from when a file is written to the end of the process.
_written: dict[str, dict[str, Value]] = {}
# By the name that Dynamo gave it, the nodes of all graphs.
_traced: dict[str, list[Value]] = {}


def listen() -> None:
    """Notes graphs from now on, as they are compiled. It costs nothing when they run."""
    C.tell_of_graphs(torch.fx.GraphModule.__init__, _meet)


def expect() -> None:
    """Records lines of generated code if something may have been compiled already."""
    if "torch._dynamo" in sys.modules:
        C.expect_generated(True)


def _meet(module: torch.fx.GraphModule) -> None:
    """Notes a graph that was made. The compiler has come so far that Inductor is imported."""
    expect()
    inductor = getattr(sys.modules.get(_INDUCTOR), "GraphLowering", None)
    if inductor is not None and inductor.save_output_code is None:
        inductor.save_output_code = _save
    if any(node.op == "placeholder" and "grapharg" in node.meta for node in module.graph.nodes):
        for node in module.graph.nodes:  # Dynamo's own
            if node.op in ("call_function", "call_method", "call_module"):
                alike = _traced.setdefault(node.name, [])
                alike[:-_MOST_ALIKE] = []
                alike.append(_value(node))


def _save(text: str) -> None:
    """Notes the buffers of a file that Inductor is about to write."""
    C.quietly(_note_buffers, text)


def _note_buffers(text: str) -> None:
    lowering = private_torch.inductor_state.graph
    order = {node: place for place, node in enumerate(lowering.graph.nodes)}
    buffers = lowering.name_to_buffer.items()
    nodes = {name: _node_of(buffer, order) for name, buffer in buffers}
    backward = bool(lowering.is_backward)
    known = {
        name: _value(node, backward)
        for name, node in nodes.items()
        if node is not None and node.op != "placeholder"  # an input in another layout
    }
    _written[_digest(text)] = known
    if len(_written) > _MOST_FILES:
        del _written[next(iter(_written))]


def _node_of(buffer: Any, order: Mapping[Any, int]) -> Any:
    """The node whose result the buffer holds: the last that computes something, not a view of it."""
    own = buffer.get_origin_node()
    nodes = [node for node in buffer.get_origins() if node in order and not _is_view(node)]
    if own in nodes or not nodes:
        return own
    return max(nodes, key=order.__getitem__)


def _is_view(node: Any) -> bool:
    return getattr(node.target, "is_view", False) is True


def _value(node: Any, in_backward: bool = False) -> Value:
    meta = node.meta
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    modules = tuple((str(path), _class_name(kind)) for path, kind in stack.values())
    again = in_backward and meta.get("partitioner_tag") == "is_forward"
    op = meta.get("original_aten") or node.target
    return Value(_op_name(op), str(meta.get("stack_trace") or ""), (modules,), again)


def _class_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]


def _op_name(op: Any) -> str:
    return op.name().partition(".")[0] if isinstance(op, private_torch.operator_overload) else ""


def _digest(text: str) -> str:
    return sha256(text.strip().encode()).hexdigest()


# ---------------------------------------------------------------- as a recording ends


def places(names: Mapping[str, str], roots: Roots, *, stacks: bool) -> list[dict[str, Any]]:
    """Returns what is known of the generated lines that the recording has.

    Args:
        names: the class of each module that the recording knows, by its path.
        roots: the outermost modules.
        stacks: whether the recording has lines of the program.
    """
    lines = sorted(C.recorded_lines()) if "torch._dynamo" in sys.modules else []
    sources: dict[str, _Wrapper | _Graph] = {source.file: source for source in _wrappers()}
    if any(file.startswith(_GRAPH_FILE) for file, _ in lines):
        sources |= {source.file: source for source in _graphs()}
    known = _Modules(names, roots)
    found = []
    for file, line in lines:
        if file not in sources:
            continue
        values = list(sources[file].values_at(line))
        rows = [known.row(value, stacks=stacks) | {"from": begin} for begin, value in values]
        found.append({"file": file, "line": line, "values": rows})
    return found


def _wrappers() -> "Iterator[_Wrapper]":
    cache = getattr(sys.modules.get(_CODE), "PyCodeCache", None)
    for path in list(cache.linemaps) if cache is not None else ():
        yield _Wrapper(path, cache)


def _graphs() -> "Iterator[_Graph]":
    """The graphs that are there. Some are copies, of whose making nobody tells."""
    for found in gc.get_objects():
        if issubclass(type(found), torch.fx.GraphModule):
            code = getattr(getattr(type(found), "forward", None), "__code__", None)
            if code is not None and code.co_filename.startswith(_GRAPH_FILE):
                yield _Graph(code.co_filename, found)


class _Graph:
    """The code of a torch.fx graph that runs as it is: each line is a node."""

    def __init__(self, file: str, module: torch.fx.GraphModule) -> None:
        self.file, self._module = file, module

    def values_at(self, line: int) -> Iterator[tuple[int, Value]]:
        lines = self._module.code.split("\n")
        made = _MADE.match(lines[line - 1]) if line <= len(lines) else None
        for node in self._module.graph.nodes if made else ():
            if made and node.name == made[1]:
                yield line, _value(node, self._is_backward())

    def _is_backward(self) -> bool:
        return any(node.meta.get("autograd_backward") for node in self._module.graph.nodes)


class _Wrapper:
    """A file that Inductor wrote."""

    def __init__(self, file: str, cache: Any) -> None:
        self.file, self._cache = file, cache
        self._lines: list[str] | None = None
        self._buffers: dict[str, Value] = {}

    def values_at(self, line: int) -> Iterator[tuple[int, Value]]:
        """What the block of this line holds, with the line from which on: a buffer is reused."""
        if self._lines is None:
            text = _text(self.file)
            self._lines, self._buffers = text.split("\n"), _written.get(_digest(text), {})
        lines = self._lines
        made = _MADE.match(lines[line - 1]) if line <= len(lines) else None
        if made is None:
            return
        buffer = made[1]
        yield line, self._value(buffer, line)
        for number in range(line + 1, len(lines) + 1):
            text = lines[number - 1]
            if text.strip().startswith("return "):
                return
            if "# reuse" in text and (reused := _REUSED.match(text)) and reused[2] == buffer:
                buffer = reused[1]
                yield number, self._value(buffer, number)

    def _value(self, buffer: str, line: int) -> Value:
        """What the graph says of a buffer. A copy that no node makes is its user's."""
        if buffer in self._buffers or not self._buffers:
            return self._buffers.get(buffer) or self._from_comments(line)
        uses = re.compile(rf"\s*(\w+) = .*\b{buffer}\b")
        for text in (self._lines or [])[line:]:
            if (user := uses.match(text)) and user[1] in self._buffers and "# reuse" not in text:
                return self._buffers[user[1]]
        return self._from_comments(line)

    def _from_comments(self, line: int) -> Value:
        """What the file itself says of a line, where the graph was not compiled in this process."""
        numbers, traces = (*self._cache.linemaps.get(self.file, ()), (), ())[:2]
        before = [row for row, number in enumerate(numbers) if number <= line]
        trace = str(traces[before[-1]] or "") if before else ""
        names, op = self._kernel_after(line)
        alike = [value for name in names or _traced for value in _traced.get(name, ())]
        alike = [value for value in alike if value.trace == trace and trace]
        modules = tuple({modules: None for value in alike for modules in value.modules})
        return Value(op, trace, modules)

    def _kernel_after(self, line: int) -> tuple[list[str], str]:
        """The source nodes and the last operator of the kernel that a line allocates for."""
        for text in (self._lines or [])[line:]:
            if comment := _NODES.match(text):
                ops = comment[2].split(", ")
                return comment[1].split(", "), ops[-1].replace(".", "::", 1)
            if "(" in text and " = " not in text and not text.strip().startswith(("#", "assert_")):
                break  # a kernel without a comment
        return [], ""


def _text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


class _Modules:
    """The modules that the recording knows, and which of them a node is in."""

    def __init__(self, names: Mapping[str, str], roots: Roots) -> None:
        self._names, self._roots = names, roots

    def row(self, value: Value, *, stacks: bool) -> dict[str, Any]:
        """The value as the trace's document has it."""
        C.intern_text(value.op)
        whole, below = self._place(value.modules)
        frames = [(file, name, int(line)) for file, line, name in _FRAME.findall(value.trace)]
        row = {
            "op": value.op,
            "module": self._shown(whole),
            "below": below,
            "stack": C.intern_stack(frames) if stacks and frames else 0,
        }
        return row | ({"recomputed": True} if value.recomputed else {})

    def _place(self, stacks: Iterable[tuple[tuple[str, str], ...]]) -> tuple[str, str | None]:
        """The path, if only one module can be meant, and the path inside the module that ran the code.

        Of several candidates, what all of them are in.
        """
        each = [self._place_of(stack) for stack in stacks]
        if len(each) == 1:
            return each[0]
        whole = _common([path for path, _ in each])
        below = [path for _, path in each if path is not None]
        return whole, _common(below) if below and len(below) == len(each) else None

    def _place_of(self, stack: tuple[tuple[str, str], ...]) -> tuple[str, str | None]:
        if not stack:
            return "", ""
        (outer, outer_kind), (inner, kind) = stack[0], stack[-1]
        inside = _inside(inner)
        for name in self._ending_with(inside):
            C.intern_text(self._shown(name))
        below = inside if _inside(outer) else None
        if below is not None:
            named = [name for name in self._ending_with(inside) if self._names[name] == kind]
            return (named[0] if len(named) == 1 else ""), below
        models = [name for name, its in self._names.items() if its == outer_kind]
        if len(models) != 1:
            return "", None
        model = models[0]
        return (inside if self._roots.has(model) and inside else _joined(model, inside)), None

    def _ending_with(self, inside: str) -> list[str]:
        return [n for n in self._names if n == inside or n.endswith(f".{inside}")] if inside else []

    def _shown(self, name: str) -> str:
        shown = self._roots.shown(name) if name else ""
        C.intern_text(shown)
        return shown


def _inside(path: str) -> str:
    """The path in the variable that Dynamo found it by."""
    plain = _KEY.sub(lambda key: f".{key[1] or key[2]}", _ROOT.sub("", path))
    return plain.removeprefix(".")


def _joined(outer: str, inner: str) -> str:
    return f"{outer}.{inner}" if inner else outer


def _common(paths: list[str]) -> str:
    """The innermost path around all of these, or each of them if they are equal."""
    if len(set(paths)) <= 1:
        return paths[0] if paths else ""
    levels = [path.split(".") for path in paths]
    shared = []
    for level in zip(*levels, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)
