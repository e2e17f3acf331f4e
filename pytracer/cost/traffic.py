"""The bytes that a call reads and writes, from its arguments.

There are two figures. The *operator's* traffic follows from its definition: each input is read once,
each output is written once. The *kernels'* traffic adds the further reads and writes of torch's CUDA
kernels, where they are known. A layer norm's backward runs two kernels, and each reads the gradient
and the input.
"""

from collections.abc import Callable
from math import prod
from typing import NamedTuple, TypeAlias

from pytracer.cost import classes, flops
from pytracer.cost.calls import Argument

Arguments: TypeAlias = tuple[Argument, ...]

# Bytes of an element, by the C++ type that the profiler names.
SIZES = {
    "float": 4,
    "double": 8,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "long int": 8,
    "long": 8,
    "int": 4,
    "short int": 2,
    "short": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
}
_FLOATS = frozenset({"float", "double", "c10::Half", "c10::BFloat16"})
_SCALAR_TYPES = {5: 2, 6: 4, 7: 8, 15: 2}  # at::ScalarType: half, float, double, bfloat16


class Traffic(NamedTuple):
    """The bytes by the operator's definition, and those that torch's CUDA kernels move."""

    operator: int
    kernels: int


def traffic(op: str, arguments: Arguments) -> Traffic | None:
    """The bytes of one call. None if there is no model, or if it does not fit the arguments."""
    name = op.removeprefix("aten::")
    if classes.computes_nothing(op):
        return Traffic(0, 0)
    model = _MODELS.get(name)
    if model is None and not op.startswith("triton_"):
        if classes.class_of(op) == "element-wise" and not name.startswith("_foreach"):
            model = _element_wise
        elif classes.is_reduction(op):
            model = _reduction
    if model is None:
        return None
    try:
        moved = model(arguments, name)
    except (AssertionError, IndexError, TypeError, ValueError, KeyError):
        return None
    return moved if isinstance(moved, Traffic) else Traffic(moved, moved)


def element_size(argument: Argument) -> int:
    """Bytes of one element of a tensor."""
    return SIZES[argument.dtype]


def size(argument: Argument) -> int:
    """Bytes of a tensor in memory. An expanded dimension counts once."""
    if not argument.dtype:
        return 0
    strides = argument.strides
    if len(strides) != len(argument.shape):
        return prod(argument.shape) * element_size(argument)
    there = (n for n, stride in zip(argument.shape, strides, strict=True) if stride or n == 0)
    return prod(there) * element_size(argument)


def full(argument: Argument) -> int:
    """Bytes of a contiguous tensor of the same shape and type."""
    return prod(argument.shape) * element_size(argument)


# ---------------------------------------------------------------- models


_TO_BOOL = frozenset(
    (
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_not",
        "logical_xor",
        "isnan",
        "isinf",
        "isfinite",
        "signbit",
    )
)


def _element_wise(a: Arguments, name: str) -> int:
    """Reads each input, and writes an output of the inputs' broadcast shape."""
    tensors = [argument for argument in a if argument.dtype]
    read = sum(size(tensor) for tensor in tensors)
    if name.endswith("_"):
        return read + full(tensors[0])
    width = 1 if name in _TO_BOOL else _promoted(tensors)
    return read + prod(_broadcast([tensor.shape for tensor in tensors])) * width


def _promoted(tensors: list[Argument]) -> int:
    """Bytes of the result's type: floats win over integers, and plain numbers do not count."""
    shaped = [tensor for tensor in tensors if tensor.shape] or tensors
    floats = [tensor for tensor in shaped if tensor.dtype in _FLOATS]
    return max(element_size(tensor) for tensor in floats or shaped)


def _broadcast(shapes: list[tuple[int, ...]]) -> list[int]:
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return [max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True)]


def _reduction(a: Arguments, _name: str) -> int:
    """Reads the input, and writes it without the dimensions that are summed over."""
    dims = a[1].value if len(a) > 1 else None
    shape = a[0].shape
    over = range(len(shape)) if not isinstance(dims, tuple) or not dims else dims
    left = prod(shape) // max(prod(shape[dim] for dim in over), 1)
    return size(a[0]) + left * element_size(a[0])


def _random(a: Arguments, _name: str) -> int:
    return full(a[0])


def _copy(a: Arguments, _name: str) -> int:
    return full(a[0]) + size(a[1])


def _clone(a: Arguments, _name: str) -> int:
    return size(a[0]) + full(a[0])


def _dropout(a: Arguments, _name: str) -> int:
    """Reads, writes, and writes a mask of one byte per element."""
    return size(a[0]) + full(a[0]) + prod(a[0].shape)


def _softmax(a: Arguments, _name: str) -> int:
    written = 4 if a[2].value is True else element_size(a[0])
    return size(a[0]) + prod(a[0].shape) * written


def _softmax_backward(a: Arguments, name: str) -> Traffic:
    """For softmax, torch's kernels first write the product of gradient and result; not for its log."""
    written = prod(a[0].shape) * _SCALAR_TYPES.get(a[3].value, element_size(a[0]))
    by_definition = size(a[0]) + size(a[1]) + written
    product = full(a[0]) if name == "_softmax_backward_data" else 0
    again = 2 * product + size(a[1]) if product else 0
    return Traffic(by_definition, by_definition + again)


def _nll(a: Arguments, _name: str) -> int:
    """Reads one logit per target."""
    return prod(a[1].shape) * (element_size(a[0]) + 8)


def _nll_backward(a: Arguments, _name: str) -> int:
    """Zeroes a gradient for every logit, and writes one per target."""
    return full(a[1]) + prod(a[2].shape) * (element_size(a[1]) + 8)


def _layer_norm(a: Arguments, _name: str) -> int:
    rows = prod(a[0].shape) // max(int(prod(a[1].value)), 1)
    return size(a[0]) + full(a[0]) + size(a[2]) + size(a[3]) + 8 * rows


def _layer_norm_backward(a: Arguments, _name: str) -> Traffic:
    grad, x, wants = a[0], a[1], a[7].value
    dx = full(x) if wants[0] else 0
    weights = sum(size(argument) for argument in a[5:7])
    stats = size(a[3]) + size(a[4])
    once = size(grad) + size(x) + stats + weights
    written = dx + (weights if wants[1] or wants[2] else 0)
    passes = bool(wants[0]) + bool(wants[1] or wants[2])
    return Traffic(once + written, passes * (size(grad) + size(x) + stats) + weights + written)


def _rms_norm(a: Arguments, _name: str) -> int:
    rows = prod(a[0].shape) // max(int(prod(a[1].value)), 1)
    return size(a[0]) + full(a[0]) + size(a[2]) + 4 * rows


def _rms_norm_backward(a: Arguments, _name: str) -> Traffic:
    grad, x, wants = a[0], a[1], a[5].value
    both = size(grad) + size(x) + size(a[3])
    written = (full(x) if wants[0] else 0) + (size(a[4]) if wants[1] else 0)
    passes = bool(wants[0]) + bool(wants[1])
    return Traffic(both + size(a[4]) + written, max(passes, 1) * both + size(a[4]) + written)


def _batch_norm(a: Arguments, name: str) -> Traffic:
    """Training reads the input twice: once for the moments, once to apply them."""
    training = a[5].value is True or name == "_batch_norm_with_update"
    once = size(a[0]) + full(a[0])
    return Traffic(once, once + (size(a[0]) if training else 0))


def _batch_norm_backward(a: Arguments, _name: str) -> Traffic:
    """Gradient and input are read for the sums, and again for the result."""
    both = size(a[0]) + full(a[1])
    written = full(a[1])
    return Traffic(both + written, 2 * both + written)


def _group_norm(a: Arguments, _name: str) -> Traffic:
    once = size(a[0]) + full(a[0])
    return Traffic(once, once + size(a[0]))


def _group_norm_backward(a: Arguments, _name: str) -> Traffic:
    both = size(a[0]) + size(a[1])
    return Traffic(both + full(a[1]), 2 * both + full(a[1]))


def _matmul(a: Arguments, name: str) -> int:
    """Reads both factors and the addend, and writes the product."""
    first = 1 if name in ("addmm", "baddbmm", "addmv", "addbmm") else 0
    left, right = a[first], a[first + 1]
    columns = right.shape[-1] if len(right.shape) > 1 else 1
    written = prod(left.shape[:-1]) * columns * element_size(left)
    return size(left) + size(right) + written + (size(a[0]) if first else 0)


def _convolution(a: Arguments, _name: str) -> int:
    made = prod(flops.convolution_output(a)) * element_size(a[0])
    return size(a[0]) + size(a[1]) + size(a[2]) + made


def _convolution_backward(a: Arguments, _name: str) -> int:
    grad, x, weight = a[:3]
    wants = a[10].value
    total = size(grad) + size(weight) + full(x) if wants[0] else 0
    total += size(grad) + size(x) + full(weight) if wants[1] else 0
    return total + (size(grad) if wants[2] else 0)


def _attention(a: Arguments, _name: str) -> int:
    query, key, value = a[:3]
    written = prod(query.shape[:-1]) * value.shape[-1] * element_size(query)
    sums = 4 * prod(query.shape[:-1])
    return size(query) + size(key) + size(value) + written + sums


def _attention_backward(a: Arguments, _name: str) -> int:
    """Reads query, key, value, result and its gradient; writes three gradients."""
    grad, query, key, value = a[:4]
    read = full(grad) + full(grad) + size(query) + size(key) + size(value)
    return read + full(query) + full(key) + full(value) + 4 * prod(query.shape[:-1])


def _embedding(a: Arguments, _name: str) -> int:
    rows = prod(a[1].shape)
    return 2 * rows * a[0].shape[-1] * element_size(a[0]) + size(a[1])


def _embedding_backward(a: Arguments, _name: str) -> Traffic:
    """Zeroes the whole dense gradient, and then adds the rows that were used."""
    grad, rows = a[0], int(a[2].value)
    width = grad.shape[-1] * element_size(grad)
    by_definition = size(grad) + size(a[1]) + rows * width
    return Traffic(by_definition, by_definition + prod(a[1].shape) * width)


def _max_pool(a: Arguments, _name: str) -> int:
    """Reads the input, and writes the result and an index of eight bytes for each maximum."""
    x = a[0]
    count = len(a[1].value)
    kernel, padding, dilation = (flops.each(a[i].value, count) for i in (1, 3, 4))
    stride = flops.each(a[2].value or a[1].value, count)
    room = [
        (n + 2 * p - d * (k - 1) - 1 + (s - 1 if a[5].value is True else 0)) // s + 1
        for n, k, s, p, d in zip(x.shape[-count:], kernel, stride, padding, dilation, strict=True)
    ]
    made = prod(x.shape[:-count]) * prod(room)
    return size(x) + made * (element_size(x) + 8)


def _max_pool_backward(a: Arguments, _name: str) -> int:
    return size(a[0]) + 8 * prod(a[0].shape) + full(a[1])


_Model: TypeAlias = Callable[[Arguments, str], int | Traffic]

_MODELS: dict[str, _Model] = {
    **dict.fromkeys(("bernoulli_", "normal_", "uniform_", "random_", "fill_", "zero_"), _random),
    "copy_": _copy,
    "clone": _clone,
    "native_dropout": _dropout,
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax_backward),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _nll_backward),
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    **dict.fromkeys(
        ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit"), _batch_norm
    ),
    "_batch_norm_with_update": _batch_norm,
    **dict.fromkeys(
        ("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward"),
        _batch_norm_backward,
    ),
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_scaled_mm"), _matmul),
    **dict.fromkeys(("convolution", "convolution_overrideable", "_convolution"), _convolution),
    "convolution_backward": _convolution_backward,
    **{
        f"_scaled_dot_product_{kind}": _attention
        for kind in (
            "flash_attention",
            "flash_attention_for_cpu",
            "efficient_attention",
            "cudnn_attention",
        )
    },
    **{
        f"_scaled_dot_product_{kind}_backward": _attention_backward
        for kind in (
            "flash_attention",
            "flash_attention_for_cpu",
            "efficient_attention",
            "cudnn_attention",
        )
    },
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "max_pool2d_with_indices": _max_pool,
    "max_pool2d_with_indices_backward": _max_pool_backward,
}
