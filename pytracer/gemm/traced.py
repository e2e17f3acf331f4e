"""The linear layers of a traced model, their sizes, and how many rows went through them.

Shapes of products are not recorded; but the shape of every parameter is, and so is every byte
that a product allocated for its result. Rows are those bytes over the layer's width, and they
count only if they come out whole and equal in every layer. What cannot be shown is asked for.
"""

import re
from collections import Counter
from dataclasses import dataclass
from math import prod

import numpy as np

from pytracer import errors
from pytracer.analysis.answers.breakdown import parameter_rows
from pytracer.analysis.answers.training_steps import step_rows
from pytracer.analysis.facts import phases, sanitized
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.categories import ROLE
from pytracer.analysis.facts.owners import layers_alike, numbers_text
from pytracer.analysis.facts.usage import main_device
from pytracer.recorded import Trace
from pytracer.schema import CATEGORY

_PRODUCTS = ("aten::addmm", "aten::mm", "aten::linear", "aten::_addmm_activation")
_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_ASK = "say how many rows there are with --batch and --seq, or the shapes with --vocab --hidden"


@dataclass(frozen=True)
class LinearLayer:
    """Layers of one shape: modules that differ only in their numbers are one."""

    name: str  # "blocks.*.mlp.up"; of a Sequential's children "[0, 2]"
    out: int
    inner: int
    count: int  # calls in a step's forward
    loss: bool  # its results go into a softmax as they are: classes


@dataclass(frozen=True)
class LinearLayers:
    """What a trace shows of them."""

    layers: tuple[LinearLayer, ...]
    batch: int
    seq: int
    itemsize: int  # bytes of an element, as the products were computed
    parameter_itemsize: int
    gradient_bytes: int  # of each parameter, at most
    state_bytes: int  # the optimizer's, of each parameter
    trained: bool  # there was a backward
    step_seconds: float | None  # the median of a traced step, the first left out
    device: str  # where: "cuda:0"

    @property
    def rows(self) -> int:
        """What went through every layer."""
        return self.batch * self.seq


@dataclass(frozen=True)
class _Call:
    """What a product allocated in one step's forward."""

    module: str
    bytes: int


def linear_layers(trace: Trace, rows: int | None = None) -> LinearLayers:
    """Reads them from the first step whose forward ran any.

    Args:
        trace: a recording with operators, so not of `detail="category"`.
        rows: how many there are, if the caller knows.

    Raises:
        errors.UsageError: the trace shows none, or does not show them exactly.
    """
    calls = _calls(trace)
    weights = _weights(trace)
    own = {call.module: found for call in calls if (found := _own(weights, call.module))}
    if not own:  # torch's attention on its own: it uses its parts' weights itself
        own = _widest_parts(calls, weights)
    if not own:
        raise errors.UsageError(
            "this trace shows no linear layer's forward: it needs a training step recorded with "
            'operators (detail="op") and not compiled, or describe the model: --vocab --hidden ...'
        )
    copies = _copied_itemsize(trace, weights)
    # Under autocast all are cast; a weight with two names has its copy under one of them.
    itemsizes = {copies[name] for name in own if name in copies} or {
        weight.itemsize for weight in own.values()
    }
    if len(itemsizes) != 1:
        raise errors.UsageError(f"linear layers of several element sizes, {itemsizes}: {_ASK}")
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
        trained=bool((allocations(trace).phase == phases.BACKWARD_PHASE).any()),
        step_seconds=_step_seconds(trace),
        device=device,
    )


def _calls(trace: Trace) -> list[_Call]:
    """Of the first step in which there are any."""
    rows = allocations(trace)
    ops = np.array([text in _PRODUCTS for text in trace.strings], np.bool_)
    chosen = ops[rows.op] & (rows.phase == phases.FORWARD)
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
    labels, found = sanitized.labels(trace), {}
    for i in np.flatnonzero(labels.category == CATEGORY["weights"]):
        size = re.fullmatch(r"(\d+)x(\d+)", trace.strings[labels.shape[i]])
        itemsize = _ITEMSIZES.get(trace.strings[labels.dtype[i]])
        if size and itemsize and trace.strings[labels.role[i]] == "parameter":
            found[trace.strings[labels.name[i]]] = _Weight(int(size[1]), int(size[2]), itemsize)
    return found


def _copied_itemsize(trace: Trace, weights: dict[str, _Weight]) -> dict[str, int]:
    """By module, the element size of autocast's copy of its weight, where there is one."""
    rows, labels = allocations(trace), sanitized.labels(trace)
    found = {}
    for i in np.flatnonzero(rows.role == ROLE["autocast_copy"]):
        name = trace.strings[labels.name[rows.label[i]]]
        weight = weights.get(name)
        if weight is not None:
            size = int(rows.requested_bytes[i]) // (weight.out * weight.inner)
            found[name.removesuffix(".weight")] = size
    return found


def _own(weights: dict[str, _Weight], module: str) -> _Weight | None:
    """A module's own weight; a layer that is the whole model is named by its type."""
    return weights.get(f"{module}.weight") or ("." not in module and weights.get("weight")) or None


def _rows(calls: list[_Call], own: dict[str, _Weight], itemsize: int) -> int:
    """The one number of rows that every layer's bytes allow."""
    possible: dict[str, set[int]] = {name: set() for name in own}
    for call in calls:
        if call.module in own:
            count, rest = divmod(call.bytes, own[call.module].out * itemsize)
            if rest == 0 and count > 0:
                possible[call.module].add(count)
    common = set.intersection(*possible.values())
    if len(common) != 1:
        found = sorted(set().union(*possible.values()))[:6]
        raise errors.UsageError(
            f"the layers' rows are not one number in this trace (they allow {found}); {_ASK}"
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
            # The last product before the loss: another layer may be as wide by chance.
            loss=name == last and bool({rows * out * size for size in (itemsize, 4)} & classes),
        )
        for (name, out, inner), count in counted.items()
    )


def _widest_parts(calls: list[_Call], weights: dict[str, _Weight]) -> dict[str, _Weight]:
    """Per module that made products, the part with the widest result."""
    found: dict[str, _Weight] = {}
    for call in calls:
        inside = [w for name, w in weights.items() if name.startswith(f"{call.module}.")]
        if inside:
            found[call.module] = max(inside, key=lambda weight: weight.out)
    return found


def _part(weights: dict[str, _Weight], module: str, out: int) -> tuple[str, _Weight] | None:
    """The one weight of its parts that a module can have used itself: torch's attention's."""
    found = [
        (re.sub(r"[._]weight$", "", name), weight)
        for name, weight in weights.items()
        if name.startswith(f"{module}.") and weight.out == out
    ]
    return found[0] if len(found) == 1 else None


def _tied(weights: dict[str, _Weight], out: int) -> _Weight | None:
    """The one shape of weight that a module without its own can have used: a tied output layer."""
    fitting = {weight for weight in weights.values() if weight.out == out}
    return fitting.pop() if len(fitting) == 1 else None


def _softmax_bytes(trace: Trace) -> set[int]:
    """What the forward's log-softmaxes allocated."""
    rows = allocations(trace)
    ops = np.array([text == "aten::_log_softmax" for text in trace.strings], np.bool_)
    chosen = ops[rows.op] & (rows.phase == phases.FORWARD)
    return {int(size) for size in rows.requested_bytes[chosen]}


def _batch_and_seq(trace: Trace, rows: int) -> tuple[int, int]:
    """From an input with as many elements as there are rows; else one batch of all."""
    labels = sanitized.labels(trace)
    for i in np.flatnonzero(labels.category == CATEGORY["inputs"]):
        shape = re.fullmatch(r"(\d+)x(\d+)(?:x\d+)*", trace.strings[labels.shape[i]])
        if shape and prod(map(int, shape.groups())) == rows:
            return int(shape[1]), int(shape[2])
    return 1, rows


def _step_seconds(trace: Trace) -> float | None:
    lasted = [(row.end_ns - row.start_ns) / 1e9 for row in step_rows(trace)[1:]]
    return float(np.median(lasted)) if lasted else None
