"""Floating-point operations of a call, from the shapes of its arguments.

Contractions follow torch's own formulas (`torch.utils.flop_counter`: a multiplication and an
addition are two), with these corrections:

- the backward of a grouped convolution: torch 2.13 counts it as if it were not grouped;
- attention on the CPU, LSTM, GRU and RNN layers, and products with vectors: torch counts none;
- embeddings are look-ups: they count 0, and are not reported as uncounted.

Causal attention is counted in full, as in torch, even if the kernel skips half. Its rows have a note
about this. Other operators have a small count per element, by the conventions below.
"""

from collections.abc import Callable
from math import prod
from typing import TypeAlias

from torch.utils import flop_counter

from pytracer.cost import classes
from pytracer.cost.calls import Argument

Arguments: TypeAlias = tuple[Argument, ...]

# Gates of a recurrent layer by cuDNN's and oneDNN's mode: relu, tanh, LSTM, GRU.
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}


def contraction(op: str, arguments: Arguments) -> int | None:
    """FLOPs of a contraction. None if there is no formula, or if it does not fit the arguments."""
    name = op.removeprefix("aten::")
    formula = _FORMULAS.get(name)
    try:
        if formula is not None:
            return formula(arguments)
        return _registered(op, arguments)
    except (AssertionError, IndexError, TypeError, ValueError, KeyError):
        return None


def per_element(op: str, arguments: Arguments) -> int | None:
    """FLOPs by convention of an operator that is no contraction. None if there is no convention.

    An element-wise operator has 1 per element that it writes, a reduction 1 per element that it reads,
    a normalisation the number in `_PER_ELEMENT`, and data movement 0.
    """
    name = op.removeprefix("aten::")
    shapes = [argument.shape for argument in arguments if argument.dtype]
    if classes.computes_nothing(op):
        return 0
    kind = classes.class_of(op)
    if op.startswith("triton_") or kind is None or not shapes:
        return 0 if kind == "data movement" else None
    largest = max(prod(shape) for shape in shapes)
    if name in _PER_ELEMENT:
        return _PER_ELEMENT[name] * largest
    if name.startswith("nll_loss"):
        return prod(shapes[1 if name.endswith("backward") else 0][:1])
    if kind == "data movement":
        return 0
    if kind == "element-wise" or classes.is_reduction(op):
        return largest
    return None


# Counted by hand: softmax takes a maximum, subtracts and exponentiates, sums, divides. Layer norm
# sums, subtracts, squares and sums, scales by the deviation, by the weight, and shifts.
_PER_ELEMENT = {
    "_softmax": 4,
    "_log_softmax": 4,
    "_softmax_backward_data": 4,
    "_log_softmax_backward_data": 4,
    "native_layer_norm": 7,
    "native_layer_norm_backward": 14,
    "_fused_rms_norm": 4,
    "_fused_rms_norm_backward": 10,
    "native_batch_norm": 7,
    "native_batch_norm_backward": 14,
    "_native_batch_norm_legit": 7,
    "_batch_norm_with_update": 7,
    "batch_norm_backward": 14,
    "cudnn_batch_norm": 7,
    "cudnn_batch_norm_backward": 14,
    "native_group_norm": 7,
    "native_group_norm_backward": 14,
}


def is_causal(op: str, arguments: Arguments) -> bool:
    """Whether a forward of attention has `is_causal=True`."""
    place = _CAUSAL.get(op.removeprefix("aten::"))
    return place is not None and len(arguments) > place and arguments[place].value is True


_CAUSAL = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6,
}


# ---------------------------------------------------------------- formulas


def _mm(a: Arguments) -> int:
    return int(flop_counter.mm_flop(a[0].shape, a[1].shape))


def _addmm(a: Arguments) -> int:
    return int(flop_counter.addmm_flop(a[0].shape, a[1].shape, a[2].shape))


def _bmm(a: Arguments) -> int:
    return int(flop_counter.bmm_flop(a[0].shape, a[1].shape))


def _baddbmm(a: Arguments) -> int:
    return int(flop_counter.baddbmm_flop(a[0].shape, a[1].shape, a[2].shape))


def _mv(a: Arguments) -> int:
    return 2 * prod(a[0].shape)


def _addmv(a: Arguments) -> int:
    return 2 * prod(a[1].shape)


def _convolution(a: Arguments) -> int:
    x, weight = a[0].shape, a[1].shape
    transposed = a[6].value is True
    return _per_position(x, weight, x if transposed else convolution_output(a))


def convolution_output(a: Arguments) -> tuple[int, ...]:
    """The shape of the result of `aten::convolution`."""
    x, weight = a[0].shape, a[1].shape
    stride, padding, dilation = (each(a[i].value, len(x) - 2) for i in (3, 4, 5))
    groups = int(a[8].value)
    if a[6].value is True:
        extra = each(a[7].value, len(x) - 2)
        room = [
            (n - 1) * s - 2 * p + d * (k - 1) + more + 1
            for n, k, s, p, d, more in zip(
                x[2:], weight[2:], stride, padding, dilation, extra, strict=True
            )
        ]
        return (x[0], weight[1] * groups, *room)
    room = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(x[2:], weight[2:], stride, padding, dilation, strict=True)
    ]
    return (x[0], weight[0], *room)


def _convolution_backward(a: Arguments) -> int:
    """The input's gradient and the weight's each touch every pair that the forward multiplied."""
    grad, x, weight = (argument.shape for argument in a[:3])
    transposed, wanted = a[7].value is True, a[10].value
    once = _per_position(x, weight, x if transposed else grad)
    return once * (bool(wanted[0]) + bool(wanted[1]))


def _per_position(x: tuple[int, ...], weight: tuple[int, ...], positions: tuple[int, ...]) -> int:
    return 2 * x[0] * prod(weight) * prod(positions[2:])


def each(value: int | tuple[int, ...], count: int) -> tuple[int, ...]:
    """One number per dimension. torch also accepts a single number for all."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


def _attention(a: Arguments) -> int:
    return int(flop_counter.sdpa_flop_count(*(argument.shape for argument in a[:3])))


def _attention_backward(a: Arguments) -> int:
    return int(flop_counter.sdpa_backward_flop_count(*(argument.shape for argument in a[:4])))


def _onednn_rnn(a: Arguments) -> int:
    """One layer, one direction: input [time, batch, features], both weight matrices."""
    steps, batch = a[0].shape[:2]
    return 2 * steps * batch * (prod(a[1].shape) + prod(a[2].shape))


def _cudnn_rnn(a: Arguments) -> int:
    return _rnn(a, first_number=6)


def _cudnn_rnn_backward(a: Arguments) -> int:
    return 2 * _rnn(a, first_number=10)


def _rnn(a: Arguments, first_number: int) -> int:
    """All layers and directions. A deeper layer's inputs are the hidden features of the layer below."""
    mode, hidden, projected, layers = (int(a[first_number + i].value) for i in range(4))
    directions = 2 if a[first_number + 7].value is True else 1
    steps_and_batch, features = prod(a[0].shape[:-1]), a[0].shape[-1]
    out = projected or hidden
    total = 0
    for _ in range(layers):
        per_step = _GATES[mode] * hidden * (features + out) + hidden * projected
        total += 2 * steps_and_batch * per_step * directions
        features = out * directions
    return total


_FORMULAS: dict[str, Callable[[Arguments], int]] = {
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "addbmm": lambda a: _bmm(a[1:]),
    "mv": _mv,
    "addmv": _addmv,
    "dot": _mv,
    "vdot": _mv,
    "_scaled_mm": _mm,
    "convolution": _convolution,
    "convolution_overrideable": _convolution,
    "_convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "mkldnn_rnn_layer": _onednn_rnn,
    "mkldnn_rnn_layer_backward": lambda a: 2 * _onednn_rnn(a),
    "_cudnn_rnn": _cudnn_rnn,
    "_cudnn_rnn_backward": _cudnn_rnn_backward,
    "embedding": lambda _: 0,
}


def _registered(op: str, arguments: Arguments) -> int | None:
    """The FLOPs by a formula that the program registered for its own operator."""
    formula = None if op.startswith("aten::") else classes.registered_formula(op)
    if formula is None:
        return None
    given = [a.shape if a.dtype else a.value for a in arguments]
    return int(formula(*given, out_val=None))
