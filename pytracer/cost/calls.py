"""Turns a profiler's records into rows that add up, one per module, phase, operator and shapes.

This module takes and returns plain data. `measure.py` reads it from torch.profiler.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Kind = Literal["op", "module", "node", "call", "annotation", "compile"]

_OPTIMIZERS = ("Optimizer.step#", "Optimizer.zero_grad#")
# People call each of these one operator, but autograd sees several inside. All of them share a pair.
_WHOLES = frozenset(
    f"aten::{name}"
    for name in ("cross_entropy_loss", "dropout", "scaled_dot_product_attention", "lstm", "gru")
)
COMPILING = "torch.compile"  # the operators that compiling runs, mostly on tensors without data
GRADIENT_SUM = "gradient sum"  # the engine adds gradients that reach one node from several others


class Argument(NamedTuple):
    """The facts that a profiler keeps about one argument of a call."""

    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dtype: str = ""  # a C++ type's name; "" if it is not a tensor
    value: Any = None  # a number, a tuple of numbers, or the shapes of a list of tensors


@dataclass(slots=True)
class Call:
    """An operator, an autograd node, a module's call or an annotation. Times are nanoseconds."""

    name: str
    kind: Kind  # "node" is the engine's evaluation of a node, "call" the node's own code inside it
    thread: int
    start: int
    end: int
    id: int  # calls are numbered as they begin
    sequence: int = -1
    forward_thread: int = 0
    arguments: tuple[Argument, ...] = ()


class Kernel(NamedTuple):
    """Work of a device: a kernel, a copy or a fill."""

    name: str
    start: int
    end: int
    caller: int  # the call's id; 0 if unknown


@dataclass(frozen=True, slots=True)
class Key:
    """The properties that calls share if they belong to one row."""

    module: str | None  # None: outside all modules
    phase: str
    op: str
    pair: str  # the operator whose forward and backward belong together
    node: str  # the autograd node around it; "" in forward
    arguments: tuple[Argument, ...]
    forward: tuple[Argument, ...]  # in backward: the arguments of the forward operator


@dataclass(slots=True)
class Sum:
    """The sums over the calls of a row."""

    calls: int = 0
    host_ns: int = 0  # in the operator, without calls inside that have rows of their own
    kernel_ns: int = 0
    launches: int = 0
    launching_calls: int = 0  # the calls that launched at least one kernel
    kernels: dict[str, int] = field(default_factory=dict)  # nanoseconds of each, by name
    is_leaf: bool = (
        False  # worked itself: launched a kernel, or called no operator of a known class
    )


@dataclass(slots=True)
class _Frame:
    """A call, with the facts that it takes over from the calls around it."""

    call: Call
    parent: "_Frame | None"
    module: str | None = None
    module_is_inside_node: bool = False
    node: "_Frame | None" = None  # the innermost evaluated node around it
    optimizer: bool = False
    owner: "_Frame | None" = None  # the operator whose row its time goes to
    whole: str = ""  # see `_WHOLES`; a node takes its maker's
    inner_ns: int = 0
    calls_others: bool = False  # whether it called operators of a known class
    maker: Call | None = None  # for a node: the forward operator that made it
    # For a node: the operators directly inside.
    top_ops: list["_Frame"] = field(default_factory=list)
    recompute: bool = False
    compiling: bool = False


def join(
    calls: Iterable[Call], kernels: Iterable[Kernel], class_of: Callable[[str], str | None]
) -> dict[Key, Sum]:
    """Adds up the rows. Every nanosecond of an operator, and every kernel, is in exactly one row.

    An operator belongs to the row of the outermost operator around it that has a known class.
    `linear` has none, so its `addmm` has a row of its own. `convolution` has one, so all operators
    that it calls belong to its row.
    """
    ordered = sorted(calls, key=lambda call: (call.start, call.id))
    makers = _makers(ordered)
    frames = _nest(ordered, makers, class_of)
    for frame in frames:
        if frame.call.kind == "call":
            _find_recomputation(frame)
    ran = {id(frame.maker) for frame in frames if frame.maker is not None}
    forward = _with_callers(frames, ran)
    rows: dict[Key, Sum] = defaultdict(Sum)
    by_id = {frame.call.id: frame for frame in frames}
    keys: dict[int, Key] = {}

    def row_of(frame: _Frame) -> Sum:
        owner = frame.owner or frame
        if id(owner) not in keys:
            keys[id(owner)] = _key(owner, ran, forward)
        return rows[keys[id(owner)]]

    launched: set[int] = set()
    for frame in frames:
        if frame.call.kind == "op":
            row = row_of(frame)
            row.host_ns += max(frame.call.end - frame.call.start - frame.inner_ns, 0)
            row.calls += (frame.owner or frame) is frame
            row.is_leaf |= not frame.calls_others
    for kernel in kernels:
        caller = by_id.get(kernel.caller)
        row = row_of(caller) if caller is not None else rows[_orphan(kernel)]
        owner = id(caller.owner or caller) if caller is not None else 0
        row.launching_calls += owner not in launched or not owner
        launched.add(owner)
        taken = max(kernel.end - kernel.start, 0)
        row.kernel_ns += taken
        row.launches += 1
        row.kernels[kernel.name] = row.kernels.get(kernel.name, 0) + taken
        row.is_leaf = True
    return dict(rows)


def busy(kernels: Iterable[Kernel]) -> int:
    """The nanoseconds in which at least one kernel ran."""
    total = last = 0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(kernel.end - max(kernel.start, last), 0)
        last = max(last, kernel.end)
    return total


def module_calls(calls: Iterable[Call]) -> dict[str, tuple[int, str]]:
    """For each module: its calls in forward, and the module around its first call."""
    stacks: dict[int, list[Call]] = defaultdict(list)
    modules: dict[str, tuple[int, str]] = {}
    wanted = (call for call in calls if call.kind in ("module", "node"))
    for call in sorted(wanted, key=lambda call: (call.start, call.id)):
        stack = stacks[call.thread]
        while stack and stack[-1].end <= call.start:
            stack.pop()
        around = [open_call.name for open_call in stack if open_call.kind == "module"]
        again = around[-1:] == [call.name]  # a wrapper with the same name as the wrapped module
        if call.kind == "module" and not again:
            count, parent = modules.get(call.name, (0, around[-1] if around else ""))
            in_backward = any(open_call.kind == "node" for open_call in stack)
            modules[call.name] = (count + (not in_backward), parent)
        stack.append(call)
    return modules


def _makers(ordered: list[Call]) -> dict[tuple[int, int], Call]:
    """The operator that made each autograd node, by thread and sequence number.

    All operators that begin before a node is made carry its number. The last of them made it.
    """
    return {
        (call.thread, call.sequence): call
        for call in ordered
        if call.kind == "op" and call.sequence >= 0
    }


def _nest(
    ordered: list[Call],
    makers: dict[tuple[int, int], Call],
    class_of: Callable[[str], str | None],
) -> list[_Frame]:
    """A frame for each call, in the same order."""
    stacks: dict[int, list[_Frame]] = defaultdict(list)
    by_call: dict[int, _Frame] = {}
    frames = []
    for call in ordered:
        stack = stacks[call.thread]
        while stack and stack[-1].call.end <= call.start:
            stack.pop()
        frame = _frame(call, stack[-1] if stack else None, makers, by_call, class_of)
        stack.append(frame)
        by_call[id(call)] = frame
        frames.append(frame)
    return frames


def _frame(
    call: Call,
    parent: _Frame | None,
    makers: dict[tuple[int, int], Call],
    by_call: dict[int, _Frame],
    class_of: Callable[[str], str | None],
) -> _Frame:
    frame = _Frame(call, parent)
    if parent is not None:
        frame.module = parent.module
        frame.module_is_inside_node = parent.module_is_inside_node
        frame.node, frame.optimizer, frame.maker = parent.node, parent.optimizer, parent.maker
        frame.whole, frame.compiling = parent.whole, parent.compiling
        parent.inner_ns += call.end - call.start
    if call.kind == "compile":
        frame.compiling = True
    elif call.kind == "module":
        frame.module = call.name
        frame.module_is_inside_node = frame.node is not None
    elif call.kind == "node":
        frame.node, frame.module_is_inside_node = frame, False
        frame.maker = makers.get((call.forward_thread, call.sequence))
        made = by_call.get(id(frame.maker))
        frame.module = made.module if made is not None else None
        frame.whole = made.whole if made is not None else ""
    elif call.kind == "annotation":
        frame.optimizer = frame.optimizer or call.name.startswith(_OPTIMIZERS)
    elif call.kind == "op":
        _own(frame, parent, class_of)
    return frame


def _own(frame: _Frame, parent: _Frame | None, class_of: Callable[[str], str | None]) -> None:
    if not frame.whole and frame.call.name in _WHOLES:
        frame.whole = frame.call.name
    if parent is not None and parent.call.kind == "op":
        frame.owner = parent.owner
    if frame.owner is None and class_of(frame.call.name) is not None:
        frame.owner = frame
        for around in _callers(frame):
            around.calls_others |= around is not frame
    if parent is not None and parent.call.kind in ("node", "call"):
        parent.top_ops.append(frame)


def _with_callers(frames: list[_Frame], ran: set[int]) -> set[int]:
    """The operators whose nodes ran in backward, and the operators that called them."""
    ids = set()
    for frame in frames:
        if id(frame.call) in ran:
            ids |= {id(around.call) for around in _callers(frame)}
    return ids


def _callers(frame: _Frame) -> Iterator[_Frame]:
    """The operator and the operators around it, up to the nearest module or node."""
    around: _Frame | None = frame
    while around is not None and around.call.kind in ("op", "annotation"):
        if around.call.kind == "op":
            yield around
        around = around.parent


def _find_recomputation(node: _Frame) -> None:
    """Marks the operators that recompute a forward inside a node.

    They run with grad mode on, and the node's own code after them runs with it off. If a backward is
    itself differentiated, grad mode stays on to the last operator, and no operator is marked.
    """
    last_without = max(
        (place for place, frame in enumerate(node.top_ops) if frame.call.sequence < 0), default=-1
    )
    for frame in node.top_ops[: last_without + 1]:
        frame.recompute = frame.call.sequence >= 0


def _key(frame: _Frame, ran: set[int], in_forward: set[int]) -> Key:
    if frame.compiling:
        return Key(None, "other", COMPILING, COMPILING, "", (), ())
    phase = _phase(frame, in_forward)
    own = frame.call
    name = own.name
    pair = name
    forward: tuple[Argument, ...] = ()
    if phase == "backward":
        pair = frame.maker.name if frame.maker is not None else _node_name(frame)
        forward = frame.maker.arguments if frame.maker is not None else ()
    elif phase in ("forward", "recompute"):
        made = (around.call.name for around in _callers(frame) if id(around.call) in ran)
        pair = next(made, name)
    if frame.whole and phase != "optimizer":
        pair = frame.whole
    node = _node_name(frame) if frame.node is not None else ""
    return Key(frame.module, phase, name, pair, node, own.arguments, forward)


def _node_name(frame: _Frame) -> str:
    context: _Frame | None = frame
    while context is not None and context.call.kind == "op":
        context = context.parent
    if context is not None and context is frame.node:
        return GRADIENT_SUM  # the engine ran it, not the node's own code
    name = frame.node.call.name if frame.node is not None else ""
    return name.rpartition("::")[2]


def _phase(frame: _Frame, in_forward: set[int]) -> str:
    if frame.optimizer:
        return "optimizer"
    if frame.node is not None:
        around: _Frame | None = frame
        while around is not None and around is not frame.node:
            if around.recompute:
                return "recompute"
            around = around.parent
        return "recompute" if frame.module_is_inside_node else "backward"
    if frame.module is not None:
        return "forward"
    is_forward = any(id(around.call) in in_forward for around in _callers(frame))
    return "forward" if is_forward else "other"


def _orphan(kernel: Kernel) -> Key:
    return Key(None, "other", f"kernel {kernel.name}", "", "", (), ())
