"""The scratch of reductions: a block of partial results for each part of the card.

If each output has many inputs, torch divides them among blocks of threads, which meet in memory
that the allocator serves. The rules are those of ATen/native/cuda/Reduce.cuh. The scratch is large
where neighbours in memory are different outputs, as in the gradient of a bias: up to 132 MiB on an
H200.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pytracer.imagined.cards import Card

aten = torch.ops.aten
# The bytes of a partial result of float32; of 16 bits the same.
_SUMS: dict[Any, int] = {
    aten.sum.dim_IntList: 4,
    aten.mean.dim: 4,
    aten.amax.default: 4,
    aten.amin.default: 4,
    aten.linalg_vector_norm.default: 4,
    aten.var.correction: 16,
    aten.var_mean.correction: 16,
}
_MOST_THREADS = 512
_WARP = 32
_LEAST_VALUES, _MOST_VALUES = 16, 256  # per thread
_LARGEST = 1 << 31  # bytes that torch indexes in one piece


class _Work(NamedTuple):
    """A reduction, as torch's iterator sees it: neighbouring dimensions are one."""

    outputs: int
    inputs: int  # per output
    vector: int  # outputs that one thread loads at once


class Reductions:
    """The scratch of reductions on a card."""

    def __init__(self, card: Card) -> None:
        """Reads the card's number of threads."""
        self._processors = card.processors
        self._threads = card.threads_per_processor

    def scratch(self, func: Any, args: Sequence[Any]) -> tuple[int, int]:
        """The bytes of the partial results, and of the counters of blocks; (0, 0) if none."""
        size = _SUMS.get(func)
        if size is None or not args or not isinstance(args[0], torch.Tensor):
            return 0, 0
        work = _work(args[0], args[2] if func is _NORM and len(args) > 2 else args[1:2])
        if work is None:
            return 0, 0
        wide = 2 if args[0].element_size() == 8 else 1
        return self._of(work, size * wide)

    def _of(self, work: _Work, size: int) -> tuple[int, int]:
        most = _MOST_THREADS // work.vector
        across, deep = _power(work.outputs // work.vector, most), _power(work.inputs, most)
        width = min(across, _WARP)
        height = min(deep, most // width)
        width = min(across, most // height)
        if work.inputs < min(height * 16, _MOST_VALUES):
            return 0, 0  # one warp for each output
        values = -(-work.inputs // height)
        grid = -(-(work.outputs // work.vector) // width)
        target = self._processors * (self._threads // (width * height))
        if values < _MOST_VALUES or grid > target:
            return 0, 0
        parts = min(-(-target // grid), -(-values // _LEAST_VALUES))
        parts = max(parts, -(-values // _MOST_VALUES))
        if parts == 1:
            return 0, 0
        return size * work.outputs * parts * width * work.vector, 4 * grid


_NORM = aten.linalg_vector_norm.default


def _power(number: int, most: int) -> int:
    """The largest power of two that is not above the number, at most `most`."""
    return most if number >= most else 1 << max(number.bit_length() - 1, 0)


def _work(tensor: Any, dims: Any) -> _Work | None:
    """The reduction over these dimensions, if neighbours in memory are different outputs."""
    over = dims[0] if dims and isinstance(dims[0], list | tuple) else dims
    rank = tensor.dim()
    reduced = {one % rank for one in over if isinstance(one, int)} if rank else set()
    if not reduced or len(reduced) == rank or tensor.numel() == 0:
        return None
    if tensor.numel() * tensor.element_size() >= _LARGEST:
        return None
    inside = _joined(tensor, reduced)
    outside = _joined(tensor, set(range(rank)) - reduced)
    if not inside or not outside or inside[0][0] < outside[0][0] or outside[0][0] != 1:
        return None
    vector = 4
    strides = [stride for stride, _ in (*inside, *outside[1:])]
    for number in (outside[0][1], *strides):
        vector = math.gcd(vector, number)
    outputs = math.prod(size for _, size in outside)
    return _Work(outputs, tensor.numel() // outputs, vector)


def _joined(tensor: Any, dims: set[int]) -> list[tuple[int, int]]:
    """Strides and sizes of these dimensions, the fastest first; those that continue are one."""
    joined: list[tuple[int, int]] = []
    for stride, size in sorted((tensor.stride(dim), tensor.shape[dim]) for dim in dims):
        if size == 1:
            continue
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = (joined[-1][0], joined[-1][1] * size)
        else:
            joined.append((stride, size))
    return joined
