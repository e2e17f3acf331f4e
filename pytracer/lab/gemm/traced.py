"""Reads the linear layers of a model from its trace: their sizes, and the rows of their inputs.

A trace has the shape of every parameter and the bytes of every product's result, but not the shapes
of products. The number of rows is a result's bytes divided by the layer's width. It counts only if
it is a whole number, the same in every layer. If it is not, the error asks for the sizes.
"""

import re
from collections import Counter
from dataclasses import dataclass
from math import prod

import numpy as np

from pytracer import errors
from pytracer.analysis.answers.breakdown import parameter_rows
from pytracer.analysis.answers.training_steps import step_rows
from pytracer.analysis.facts import timelines
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.usage import main_device
from pytracer.basics.names import layers_alike, numbers_text
from pytracer.data import sanitized
from pytracer.data.model_names import module_text
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORY, ROLE

_PRODUCTS = ("aten::addmm", "aten::mm", "aten::linear", "aten::_addmm_activation")
_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_ASK = "give the number of rows with --batch and --seq, or the shapes with --vocab --hidden"


@dataclass(frozen=True)
class LinearLayer:
    """Layers of one shape. Modules whose names differ only in their numbers count as one."""

    name: str  # "blocks.*.mlp.up", or "[0, 2]" for children of a Sequential
    out: int
    inner: int
    count: int  # calls in a step's forward
    loss: bool  # whether its outputs are classes, so a softmax takes them directly


@dataclass(frozen=True)
class LinearLayers:
    """The linear layers of a trace, with the facts that advice needs."""

    layers: tuple[LinearLayer, ...]
    batch: int
    seq: int
    itemsize: int  # bytes of an element in the products
    parameter_itemsize: int
    gradient_bytes: int  # of one parameter, at most
    state_bytes: int  # of the optimizer's state, for one parameter
    trained: bool  # whether the trace has a backward
    step_seconds: float | None  # the median step without the first one
    device: str  # such as "cuda:0"

    @property
    def rows(self) -> int:
        """The number of rows in every layer's input."""
        return self.batch * self.seq


@dataclass(frozen=True)
class _Call:
    """A product in one step's forward, and the bytes of its result."""

    module: str
    bytes: int


def linear_layers(trace: Trace, rows: int | None = None) -> LinearLayers:
    """Reads the layers from the first step whose forward runs linear layers.

    Args:
        trace: a recording with operators, so not with `detail="category"`.
        rows: the number of rows, if the caller knows it.

    Raises:
        errors.UsageError: the trace has no linear layer, or leaves their sizes open.
    """
    calls = _calls(trace)
    weights = _weights(trace)
    own = {call.module: weight for call in calls if (weight := _own(weights, call.module))}
    if not own:  # torch's attention alone: it uses the weights of its submodules itself
        own = _widest_parts(calls, weights)
    if not own:
        raise errors.UsageError(
            "this trace shows no linear layer's forward: record a training step with operators "
            '(detail="op") and without torch.compile, or describe the model: --vocab --hidden ...'
        )
    copies = _copied_itemsize(trace, weights)
    # Autocast copies every weight. A weight with two names has its copy under one of them.
    itemsizes = {copies[name] for name in own if name in copies} or {
        weight.itemsize for weight in own.values()
    }
    if len(itemsizes) != 1:
        raise errors.UsageError(
            f"the linear layers have several element sizes, {sorted(itemsizes)}: {_ASK}"
        )
    itemsize = itemsizes.pop()
    if rows is None:
        rows = _rows(calls, own, itemsize)
    layers = _layers(trace, calls, weights, rows, itemsize)
    batch, seq = _batch_and_seq(trace, rows)
    device = main_device(trace)
    bytes_of = {row.category: row.per_parameter for row in parameter_rows(trace, device)}
    return LinearLayers(
        layers=layers,
        batch=batch,
        seq=seq,
        itemsize=itemsize,
        parameter_itemsize=next(iter(own.values())).itemsize,
        gradient_bytes=round(bytes_of["gradients"]),
        state_bytes=round(bytes_of["optimizer_state"]),
        trained=bool((allocations(trace).phase == timelines.BACKWARD_PHASE).any()),
        step_seconds=_step_seconds(trace),
        device=device,
    )


def _calls(trace: Trace) -> list[_Call]:
    """The products of the first step that has any."""
    rows = allocations(trace)
    ops = np.array([text in _PRODUCTS for text in trace.strings], np.bool_)
    chosen = ops[rows.op] & (rows.phase == timelines.FORWARD)
    if not chosen.any():
        return []
    chosen &= rows.step == rows.step[chosen].min()
    return [
        _Call(trace.strings[rows.module[i]], int(rows.requested_bytes[i]))
        for i in np.flatnonzero(chosen)
    ]


@dataclass(frozen=True)
class _Weight:
    out: int
    inner: int
    itemsize: int


def _weights(trace: Trace) -> dict[str, _Weight]:
    """Parameters of two dimensions, by name."""
    labels, weights = sanitized.labels(trace), {}
    for i in np.flatnonzero(labels.category == CATEGORY["weights"]):
        size = re.fullmatch(r"(\d+)x(\d+)", trace.strings[labels.shape[i]])
        itemsize = _ITEMSIZES.get(trace.strings[labels.dtype[i]])
        if size and itemsize and trace.strings[labels.role[i]] == "parameter":
            name = module_text(trace.strings[labels.name[i]])
            weights[name] = _Weight(int(size[1]), int(size[2]), itemsize)
    return weights


def _copied_itemsize(trace: Trace, weights: dict[str, _Weight]) -> dict[str, int]:
    """The element size of autocast's copy of a weight, by module, if there is a copy."""
    rows, labels = allocations(trace), sanitized.labels(trace)
    itemsizes = {}
    for i in np.flatnonzero(rows.role == ROLE["autocast_copy"]):
        name = module_text(trace.strings[labels.name[rows.label[i]]])
        weight = weights.get(name)
        if weight is not None:
            size = int(rows.requested_bytes[i]) // (weight.out * weight.inner)
            itemsizes[name.removesuffix(".weight")] = size
    return itemsizes


def _own(weights: dict[str, _Weight], module: str) -> _Weight | None:
    """A module's own weight. A layer that is the whole model has its type as its name."""
    return weights.get(f"{module}.weight") or ("." not in module and weights.get("weight")) or None


def _rows(calls: list[_Call], own: dict[str, _Weight], itemsize: int) -> int:
    """The number of rows that fits the bytes of every layer."""
    possible: dict[str, set[int]] = {name: set() for name in own}
    for call in calls:
        if call.module in own:
            count, rest = divmod(call.bytes, own[call.module].out * itemsize)
            if rest == 0 and count > 0:
                possible[call.module].add(count)
    common = set.intersection(*possible.values())
    if len(common) != 1:
        seen = sorted(set().union(*possible.values()))[:6]
        raise errors.UsageError(
            f"the layers of this trace have no common number of rows (possible: {seen}); {_ASK}"
        )
    return common.pop()


def _layers(
    trace: Trace, calls: list[_Call], weights: dict[str, _Weight], rows: int, itemsize: int
) -> tuple[LinearLayer, ...]:
    classes = _softmax_bytes(trace)
    counted: Counter[tuple[str, int, int]] = Counter()
    members: dict[tuple[str, int, int], set[str]] = {}
    last = ""
    for call in calls:
        out, rest = divmod(call.bytes, rows * itemsize)
        name, weight = call.module, _own(weights, call.module)
        if weight is None and rest == 0:
            name, weight = _part(weights, call.module, out) or (name, _tied(weights, out))
        if weight is not None and rest == 0 and out == weight.out:
            last = layers_alike(name)
            counted[last, out, weight.inner] += 1
            members.setdefault((last, out, weight.inner), set()).add(name)
    return tuple(
        LinearLayer(
            numbers_text(members[name, out, inner]) if name == "*" else name,
            out,
            inner,
            count,
            # Only the last product before the loss: another layer may have the same width by chance.
            loss=name == last and bool({rows * out * size for size in (itemsize, 4)} & classes),
        )
        for (name, out, inner), count in counted.items()
    )


def _widest_parts(calls: list[_Call], weights: dict[str, _Weight]) -> dict[str, _Weight]:
    """The widest weight among the submodules of each module that runs products."""
    widest: dict[str, _Weight] = {}
    for call in calls:
        inside = [w for name, w in weights.items() if name.startswith(f"{call.module}.")]
        if inside:
            widest[call.module] = max(inside, key=lambda weight: weight.out)
    return widest


def _part(weights: dict[str, _Weight], module: str, out: int) -> tuple[str, _Weight] | None:
    """The submodule whose weight the module used itself, if only one fits. Attention does so."""
    fitting = [
        (re.sub(r"[._]weight$", "", name), weight)
        for name, weight in weights.items()
        if name.startswith(f"{module}.") and weight.out == out
    ]
    return fitting[0] if len(fitting) == 1 else None


def _tied(weights: dict[str, _Weight], out: int) -> _Weight | None:
    """The weight that a tied output layer used, if all weights that fit have one shape."""
    fitting = {weight for weight in weights.values() if weight.out == out}
    return fitting.pop() if len(fitting) == 1 else None


def _softmax_bytes(trace: Trace) -> set[int]:
    """The sizes that the forward's log-softmaxes allocated."""
    rows = allocations(trace)
    ops = np.array([text == "aten::_log_softmax" for text in trace.strings], np.bool_)
    chosen = ops[rows.op] & (rows.phase == timelines.FORWARD)
    return {int(size) for size in rows.requested_bytes[chosen]}


def _batch_and_seq(trace: Trace, rows: int) -> tuple[int, int]:
    """The sizes of an input with one element for each row, or else one sequence of all rows."""
    labels = sanitized.labels(trace)
    for i in np.flatnonzero(labels.category == CATEGORY["inputs"]):
        shape = re.fullmatch(r"(\d+)x(\d+)(?:x\d+)*", trace.strings[labels.shape[i]])
        if shape and prod(map(int, shape.groups())) == rows:
            return int(shape[1]), int(shape[2])
    return 1, rows


def _step_seconds(trace: Trace) -> float | None:
    lasted = [(row.end_ns - row.start_ns) / 1e9 for row in step_rows(trace)[1:]]
    return float(np.median(lasted)) if lasted else None
