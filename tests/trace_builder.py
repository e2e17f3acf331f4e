"""Writes a Trace by hand: say what happened, in order, and get the columns.

    b = TraceBuilder()
    with b.module("model"), b.op("aten::mm", grad=True) as mm:
        x = b.alloc(100)
    with b.backward(), b.node("MmBackward0", forward=mm):
        b.free(x)
    trace = b.trace()

Every event and every scope's begin and end takes one microsecond.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pytracer.data.recorded import Trace
from pytracer.data.schema import (
    ACTION,
    CATEGORY,
    DEVICE_TYPES,
    SCOPE_GRAD,
    SCOPE_KIND,
    SCOPE_RECOMPUTE,
    TABLES,
)

TICK = 1000  # nanoseconds; ticks are nanoseconds here


@dataclass(frozen=True)
class Block:
    """A block as the program knows it."""

    address: int
    size: int
    place: int


class TraceBuilder:
    """Collects rows; `trace()` makes them columns."""

    def __init__(self) -> None:
        self.now = 0
        self.thread_number = 0
        self._rows: dict[str, list[tuple[int, ...]]] = {name: [] for name in TABLES}
        self._rows["stacks"].append((0, 0, 0, 0))
        self._rows["labels"].append((0, 0, 0, 0, 0))
        self._rows["places"].append((0, 0, 0, 0, 0))
        self._strings = [""]
        self._open: dict[int, list[int]] = {}
        self._next_address = 0x10000
        self.losses: dict[str, int] = {}
        self.meta: dict[str, Any] = {"directory": "/home/user"}

    # ------------------------------------------------------------ blocks

    def alloc(self, size: int, *, address: int | None = None, **place: Any) -> Block:
        block = self._block(size, address, **place)
        self._event("alloc", block, size)
        return block

    def seed(self, size: int, **place: Any) -> Block:
        """A block that was alive before the trace."""
        block = self._block(size, None, **place)
        self._event("seed", block, size)
        return block

    def free(self, block: Block, *, requested: bool = False) -> None:
        if requested:
            self.request_free(block)
        self._event("free_completed", block, block.size)

    def request_free(self, block: Block) -> None:
        """The program gives it back while a stream may still use it."""
        self._event("free_requested", block, block.size)

    def snapshot(self, **place: Any) -> None:
        self._event("snapshot", self._block(0, 0, **place), 0)

    def oom(self, size: int, **place: Any) -> None:
        self._event("oom", self._block(0, 0, **place), size)

    def saved(self, block: Block) -> None:
        self._event("saved", block, block.size)

    def label(
        self,
        block: Block,
        category: str,
        role: str = "",
        name: str = "",
        shape: str = "",
        dtype: str = "",
    ) -> None:
        texts = (self.string(text) for text in (role, name, shape, dtype))
        row = self._intern("labels", (CATEGORY[category], *texts))
        self._event("label", block, row)

    def _block(
        self,
        size: int,
        address: int | None,
        device: str = "cpu",
        stream: int = 0,
        pool: int = 0,
    ) -> Block:
        kind, _, index = device.partition(":")
        place = (stream, 0, pool, DEVICE_TYPES.index(kind), int(index or 0))
        if address is None:
            address = self._next_address
            self._next_address += size + 64
        return Block(address, size, self._intern("places", place))

    def _event(self, action: str, block: Block, size: int) -> None:
        stack = self._open.get(self.thread_number, [])
        scope = stack[-1] if stack else 0
        self._rows["events"].append(
            (
                self._tick(),
                block.address,
                size,
                ACTION[action],
                scope,
                block.place,
                self.thread_number,
            )
        )

    # ------------------------------------------------------------ scopes

    def begin(self, kind: str, name: str, *, forward: int = 0, flags: int = 0) -> int:
        stack = self._open.setdefault(self.thread_number, [])
        parent = stack[-1] if stack else 0
        row = (
            self._tick(),
            parent,
            forward,
            self.string(name),
            self.thread_number,
            SCOPE_KIND[kind],
            flags,
        )
        self._rows["scopes"].append(row)
        stack.append(len(self._rows["scopes"]))
        return stack[-1]

    def end(self, stack: int = 0) -> None:
        scope = self._open[self.thread_number].pop()
        self._rows["scope_ends"].append((self._tick(), scope, stack))

    def depth(self) -> int:
        return len(self._open.get(self.thread_number, []))

    @contextmanager
    def _scope(self, kind: str, name: str, stack: int = 0, **more: int) -> Iterator[int]:
        number = self.begin(kind, name, **more)
        yield number
        self.end(stack)

    def op(
        self,
        name: str,
        *,
        grad: bool = False,
        recompute: bool = False,
        at: tuple[str, ...] = (),
    ) -> Any:
        """An operator; `at` is its Python stack, outermost first: `("/x/train.py:12",)`."""
        flags = SCOPE_GRAD * grad + SCOPE_RECOMPUTE * recompute
        return self._scope("op", name, self.stack(*at), flags=flags)

    def node(self, name: str, *, forward: int = 0) -> Any:
        return self._scope("node", name, forward=forward)

    def module(self, name: str) -> Any:
        return self._scope("module", name)

    def backward(self) -> Any:
        return self._scope("backward", "backward")

    def optimizer(self, name: str = "Optimizer.step#Adam.step") -> Any:
        return self._scope("optimizer", name)

    def user(self, name: str) -> Any:
        return self._scope("user", name)

    def data(self) -> Any:
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        return self._scope("user", name)

    def step(self) -> None:
        row = (self._tick(), 0, 0, self.string("step"), self.thread_number, SCOPE_KIND["step"], 0)
        self._rows["scopes"].append(row)

    @contextmanager
    def thread(self, number: int) -> Iterator[None]:
        before, self.thread_number = self.thread_number, number
        yield
        self.thread_number = before

    def name_thread(self, number: int, name: str) -> None:
        """What torch calls the thread. Those before it have no name."""
        rows = self._rows["threads"]
        rows += [(0, 0)] * (number + 1 - len(rows))
        rows[number] = (number, self.string(name))

    # ------------------------------------------------------------ texts

    def string(self, text: str) -> int:
        if text not in self._strings:
            self._strings.append(text)
        return self._strings.index(text)

    def stack(self, *frames: str) -> int:
        """`path:line` of each frame, outermost first."""
        row = 0
        for frame in frames:
            path, _, line = frame.rpartition(":")
            row = self._intern("stacks", (row, self.string(path), 0, int(line)))
        return row

    def _intern(self, table: str, row: tuple[int, ...]) -> int:
        rows = self._rows[table]
        if row not in rows:
            rows.append(row)
        return rows.index(row)

    def _tick(self) -> int:
        self.now += TICK
        return self.now

    # ------------------------------------------------------------ the result

    def trace(self) -> Trace:
        """What was said so far."""
        clock = [(0, 0), (max(self.now, 2_000_000), max(self.now, 2_000_000))]
        rows = {**self._rows, "clock": clock}
        columns: dict[str, Any] = {"strings": list(self._strings), "losses": self.losses}
        for name, (row_type, dtypes) in TABLES.items():
            for i, (column, dtype) in enumerate(zip(row_type._fields, dtypes, strict=True)):
                columns[f"{name}.{column}"] = np.array([row[i] for row in rows[name]], dtype)
        columns["meta"] = json.dumps(self.meta)
        return Trace.from_columns(columns)


def training_step(
    b: TraceBuilder,
    weight: Block,
    *,
    layers: int = 2,
    activation: int = 1000,
    optimizer: bool = True,
) -> None:
    """A forward, a loss, a backward and an optimizer's step, as torch would do them."""
    batch = b.alloc(100)
    saved = []
    ops = []
    b.label(batch, "inputs", "batch", shape="10x10", dtype="uint8")
    with b.module("model"):
        for layer in range(layers):
            with (
                b.module(f"h.{layer}"),
                b.op("aten::linear", grad=True, at=("/home/user/train.py:9",)),
                b.op("aten::addmm", grad=True) as op,
            ):
                scratch = b.alloc(10)
                saved.append(b.alloc(activation))
                b.free(scratch)
                ops.append(op)
    with b.op("aten::mse_loss", grad=True, at=("/home/user/train.py:10",)) as op:
        loss = b.alloc(4)
    gradients = []
    with b.backward():
        for op, block in zip(reversed(ops), reversed(saved), strict=True):
            with b.node("AddmmBackward0", forward=op):
                with b.op("aten::mm"):
                    gradients.append(b.alloc(weight.size))
                    passed_on = b.alloc(activation)
                b.free(block)
                b.free(passed_on)
    for gradient in gradients:
        b.label(gradient, "gradients", "parameter", "h.0.weight")
    if optimizer:
        with b.optimizer(), b.op("aten::_foreach_add_", at=("/home/user/train.py:12",)):
            b.free(b.alloc(weight.size))
    for gradient in gradients:
        b.free(gradient)
    b.free(batch)
    b.free(loss)
