"""How long a step would take: for comparisons of runs on one card, and not by itself.

A call costs the host some microseconds, and the card the time of its FLOPs or bytes. The card works
behind the host, which waits where the program reads a value. How fast a host is, nobody knows before
the run. So a step's time is worked out for several, and a ratio of two runs is an interval.

The host's costs were measured with the models of transformers, their tensors tiny, and fit hosts of
GPU servers within the factors of HOSTS. The rates are those of an H100.
"""

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from pytracer.basics import private_torch
from pytracer.basics.private_torch import tree_iter
from pytracer.cost import classes, flops, traffic
from pytracer.cost.calls import Argument

aten = torch.ops.aten

HOSTS = (0.0, 1.0, 2.0, 3.0)  # 0: calls cost nothing, as if a graph were replayed
PRODUCTS = ((1.0, 1.0), (1.0, 0.5), (0.5, 0.5))  # of the best rate: in the forward, and of autograd
WIRES = (0.0, 50e9)  # bytes a second between ranks; 0: all of it beside other work
_VARIANTS = tuple(product(HOSTS, PRODUCTS, WIRES))

# Nanoseconds of the host.
_KERNEL, _VIEW = 11_000, 5_000  # called by the program
_KERNEL_OF_NODE, _VIEW_OF_NODE = 8_000, 2_000  # called by autograd, or by generated code
_LIBRARY = 15_000  # more, for convolutions and batch norms, which ask a library
_PER_TENSOR = 500  # of a list, as optimizers call it
_COLLECTIVE = 30_000
_REMADE = 26_000  # hooks of a checkpoint for each tensor that it makes again

_KERNEL_STARTS = 3_000  # nanoseconds of the card
_BYTES = 2.9e12  # a second
_BUS = 25e9
_RATES = {"bfloat16": 700e12, "float16": 700e12, "tf32": 380e12, "float32": 49e12}
_SLOW = 25e12  # other types

_CPP = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.int64: "long int",
    torch.int32: "int",
    torch.int16: "short int",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.bool: "bool",
}
_LIBRARIES = ("convolution", "native_batch_norm", "cudnn_batch_norm", "_batch_norm_with_update")
_CONVOLUTION = "convolution"


class _Call(NamedTuple):
    """What a call costs. The card's nanoseconds are for its products, for the rest, and for the wire."""

    host: float
    products: float = 0.0
    rest: float = 0.0
    wire: float = 0.0  # bytes
    in_node: bool = False
    waits: bool = False  # the host for the card, and nothing else


class Durations:
    """The calls after the first step of an optimizer, which makes its state, and where steps end."""

    def __init__(self) -> None:
        """Knows no call yet."""
        self._calls: list[_Call] = []
        self._steps: list[int] = []
        self._known: dict[Any, tuple[float, float]] = {}

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Notes an operator that ran."""
        name = func.name().partition(".")[0]
        if not self._steps:
            return
        in_node = private_torch.backward_pass_number() != -1 and not torch.is_grad_enabled()
        if func is aten.detach.default and _is_remade():
            self._calls.append(_Call(_REMADE))
        elif classes.class_of(name) == "communication":
            self.exchanged((args, kwargs))
        elif classes.computes_nothing(name):
            self._calls.append(_Call(_VIEW_OF_NODE if in_node else _VIEW))
        else:
            tensors = [one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)]
            host = _KERNEL_OF_NODE if in_node else _KERNEL
            if name.removeprefix("aten::").startswith(_LIBRARIES):
                host += _LIBRARY
            elif "_foreach_" in name or "_fused_" in name:
                host += _PER_TENSOR * len(tensors)
            card = self._of_card(name, args, tensors, result)
            self._calls.append(_Call(host, *card, in_node=in_node))

    def exchanged(self, args: Any) -> None:
        """Notes a collective."""
        if not self._steps:
            return
        sizes = [one.nbytes for one in tree_iter(args) if isinstance(one, torch.Tensor)]
        self._calls.append(_Call(_COLLECTIVE, wire=float(sum(sizes))))

    def generated(self, tensors: list[torch.Tensor]) -> None:
        """Notes a kernel that a compiler wrote, with what it reads and writes."""
        if self._steps:
            moved = 1e9 * sum(one.nbytes for one in tensors) / _BYTES
            self._calls.append(_Call(_KERNEL_OF_NODE, rest=_KERNEL_STARTS + moved))

    def waited(self) -> None:
        """The program waited for the card."""
        if self._steps:
            self._calls.append(_Call(0.0, waits=True))

    def stepped(self, *_: Any) -> None:
        """An optimizer has stepped."""
        self._steps.append(len(self._calls))

    def step_ns(self) -> list[int]:
        """A step's time in each of the variants; none if the run had no whole step."""
        if len(self._steps) < 2 or self._steps[0] == self._steps[-1]:
            return []
        step = self._calls[self._steps[0] : self._steps[-1]]
        host, products, rest, wire, in_node, waits = map(np.array, zip(*step, strict=True))
        ends = np.flatnonzero(waits)
        found = []
        for scale, parts, rate in _VARIANTS:
            card = rest + products / np.where(in_node, parts[1], parts[0])
            card += 1e9 * wire / rate if rate else 0.0
            found.append(_steady(scale * host, card, ends))
        return found

    def _of_card(
        self, name: str, args: Any, tensors: list[Any], result: Any
    ) -> tuple[float, float]:
        """Nanoseconds of the card: for products at their best rate, and for all else."""
        made = [one for one in tree_iter(result) if isinstance(one, torch.Tensor)]
        kinds = {one.device.type for one in (*tensors, *made)}
        if "cuda" not in kinds:
            return 0.0, 0.0
        if "cpu" in kinds and max((one.dim() for one in tensors if one.is_cpu), default=0):
            return 0.0, 1e9 * sum(one.nbytes for one in made) / _BUS
        given = tuple(map(_argument, args))
        key = (name, given, tuple((one.shape, one.dtype) for one in (*tensors, *made)))
        if key not in self._known:
            work = flops.contraction(name, given) or 0
            moved = traffic.traffic(name, given)
            size = sum(map(_bytes, (*tensors, *made))) if moved is None else moved.kernels
            by_bytes = 1e9 * size / _BYTES
            by_work = 1e9 * work / _rate(name, tensors)
            is_product = by_work > by_bytes
            rest = _KERNEL_STARTS + (0.0 if is_product else by_bytes)
            self._known[key] = (by_work if is_product else 0.0, rest)
        return self._known[key]


def _steady(host: Any, card: Any, waits: Any) -> int:
    """Nanoseconds of a step among others that are like it: the second of two."""
    ready = free = before = 0.0  # when the host goes on, and when the card has nothing left
    for _ in range(2):
        before, start = free, 0
        for end in [*waits.tolist(), len(host)]:
            given = ready + np.cumsum(host[start:end])
            done = np.cumsum(card[start:end])
            if len(given):
                idle = np.maximum.accumulate(np.maximum(given - done + card[start:end], free))
                ready, free = float(given[-1]), float(idle[-1] + done[-1])
            if end < len(host):
                ready = max(ready, free)
            start = end
    return round(free - before)


def _is_remade() -> bool:
    """Whether a checkpoint makes its tensors again."""
    return private_torch.backward_pass_number() != -1 and (
        private_torch.top_saved_hooks(False) is not None
    )


def _rate(name: str, tensors: list[Any]) -> float:
    kind = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    if kind == "float32":
        is_convolution = _CONVOLUTION in name
        rules: Any = torch.backends.cudnn if is_convolution else torch.backends.cuda.matmul
        kind = "tf32" if rules.allow_tf32 else kind
    return _RATES.get(kind, _SLOW)


def _argument(one: Any) -> Argument:
    if isinstance(one, torch.Tensor):
        return Argument(tuple(one.shape), tuple(one.stride()), _CPP.get(one.dtype, "other"))
    if isinstance(one, list | tuple):
        numbers = all(isinstance(each, int | float) for each in one)
        return Argument(value=tuple(one) if numbers else None)
    return Argument(value=one if isinstance(one, int | float) else None)


def _bytes(one: Any) -> int:
    """Bytes in memory. An expanded dimension counts once."""
    size = one.element_size()
    for length, stride in zip(one.shape, one.stride(), strict=True):
        size *= length if stride or not length else 1
    return int(size)
