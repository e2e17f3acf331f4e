"""The parts of a batch norm over several ranks, which only a card has.

The rules are those of ATen/native/cuda/Normalization.cu and .cuh. Where channels lie last, blocks of
threads meet in memory that the allocator serves, if there are enough rows.
"""

from collections.abc import Callable
from typing import Any

import torch

from pytracer.basics import private_torch
from pytracer.imagined.scratch import Scratch

aten = torch.ops.aten
ASKS: str = private_torch.norm_over_ranks.__file__  # torch's code for several ranks
_THREADS = 512  # of a block
_TILE = 32  # channels
_ROWS = 16  # of a thread
_LEAST_BLOCKS, _MOST_BLOCKS = 8, 128  # that share the rows of a channel
_LASTING = (torch.channels_last, torch.channels_last_3d)
_NUMBER = 4  # bytes


def kernels(wants: Callable[[Scratch], None]) -> dict[Any, Callable[..., Any]]:
    """Returns fake kernels. They call `wants` with the scratch that a card takes."""

    def statistics(x: Any, epsilon: float) -> Any:
        if _is_last(x):
            wants(_shared(x, 4))
        dtype = torch.float32 if x.element_size() == 2 else x.dtype
        return tuple(x.new_empty(x.shape[1], dtype=dtype) for _ in range(2))

    def gathered(x: Any, mean: Any, *_: Any) -> Any:
        dtype = torch.float32 if mean.element_size() == 2 else mean.dtype
        return tuple(mean.new_empty(mean.shape[1], dtype=dtype) for _ in range(2))

    def sums(grad: Any, x: Any, mean: Any, invstd: Any, weight: Any, *wanted: bool) -> Any:
        channels = x.shape[1]
        if _is_last(grad) and _is_last(x):
            wants(_shared(x, 2))
            wanted = (True, weight is not None, weight is not None)
        of_input, of_weight, of_bias = wanted
        both = [mean.new_empty(channels) if of_input else None for _ in range(2)]
        return *both, *(weight.new_empty(channels) if one else None for one in (of_weight, of_bias))

    def elements(x: Any, *_: Any) -> Any:
        return _like(x)

    def gradient(grad: Any, x: Any, *_: Any) -> Any:
        return _like(x) if _is_last(grad) else x.new_empty(x.shape)

    return {
        aten.batch_norm_stats.default: statistics,
        aten.batch_norm_gather_stats_with_counts.default: gathered,
        aten.batch_norm_elemt.default: elements,
        aten.batch_norm_backward_reduce.default: sums,
        aten.batch_norm_backward_elemt.default: gradient,
    }


def _is_last(x: Any) -> bool:
    """Whether the kernels for channels that lie last run."""
    last = any(x.is_contiguous(memory_format=one) for one in _LASTING if x.dim() == _RANK[one])
    return last or bool(x.is_contiguous() and x.stride(1) == 1)


_RANK = {torch.channels_last: 4, torch.channels_last_3d: 5}


def _like(x: Any) -> Any:
    return torch.empty_like(x, memory_format=torch.preserve_format)


def _shared(x: Any, numbers: int) -> Scratch:
    """The partial results of blocks that share the rows of a channel, and the counters of blocks."""
    channels = x.shape[1]
    rows = x.numel() // channels
    across = min(_power(channels), _TILE)
    down = min(_power(-(-rows // _ROWS)), _THREADS // across)
    if across * down != _THREADS:
        across = min(_power(channels), _THREADS // down)
    blocks = min(-(-rows // (down * _ROWS)), _MOST_BLOCKS)
    if blocks < _LEAST_BLOCKS:
        return Scratch(0, 0)
    partial = numbers * channels * blocks * (8 if x.element_size() == 8 else _NUMBER)
    return Scratch(partial, partial, beside=(_NUMBER * -(-channels // across),))


def _power(number: int) -> int:
    """The largest power of two that is not above the number."""
    return 1 << max(number.bit_length() - 1, 0)
