"""What kernels of attention take from torch's allocator beside their results.

The formulas of flash attention are those of torch's source. Those of cuDNN's and of memory-efficient
attention were made from measurements on an H100 with torch 2.11 and cuDNN 9.19
(benchmarks/attention.py), and a test holds every measured row to them.
"""

import math
from typing import Any

from pytracer.imagined.scratch import Scratch

_WORKSPACE = 256  # bytes of cuDNN's
_RANDOM_STATE = 16  # bytes
_WIDEST_MEASURED = 192
_MOST_SPLITS = 200  # of the keys of all heads


def of_cudnn_attention(query: Any, key: Any, value: Any, *, backward: bool, known: bool) -> Scratch:
    """The scratch of cuDNN's attention.

    In backward it is the query's gradient in 32 bits and a sum for each row. Where several heads
    share a key, it is also each one's gradients. `known`: it was measured on this architecture.
    """
    if not backward:
        taken = _WORKSPACE if query.shape[2] > 1 else 0
        return Scratch(taken, taken) if known else Scratch(0, _WORKSPACE)
    rows = query.numel() // query.shape[-1]
    most = 4 * (query.numel() + rows) + _WORKSPACE
    heads = query.shape[1]
    for one in (key, value):
        if one.shape[1] != heads:
            most += one.numel() // one.shape[1] * heads * one.element_size()
    return Scratch(most if known else 0, most if known else 2 * most)


def of_flash_attention(query: Any, key: Any, dropout: float, processors: int) -> int:
    """The scratch of flash attention: a result of each split, where few blocks would fill the card.

    The rules are those of `set_params_splitkv` in flash_attn/flash_api.cpp.
    """
    if dropout:
        return _RANDOM_STATE
    batch, heads, rows, head = query.shape
    wide = 256 if head <= 64 else 128 if head <= 128 else 64
    splits = _splits(batch * heads * -(-rows // 64), 2 * processors, -(-key.shape[2] // wide))
    return 4 * splits * batch * heads * rows * (_rounded_head(head) + 1) if splits > 1 else 0


def _splits(blocks: int, places: int, keys: int) -> int:
    """Into how many parts the keys are split: the fewest that fill nearly the most of the card."""
    if blocks >= 0.8 * places:
        return 1
    filled = {}
    for many in range(1, min(128, places, keys) + 1):
        if many == 1 or -(-keys // many) != -(-keys // (many - 1)):
            waves = blocks * many / places
            filled[many] = waves / math.ceil(waves)
    enough = 0.85 * max(filled.values())
    return min(many for many, part in filled.items() if part >= enough)


def _rounded_head(head: int) -> int:
    step = 32 if head <= 128 else 64
    return head + -head % step


def of_flash_backward(query: Any, key: Any) -> int:
    """The scratch of flash attention's backward: the query's gradient in 32 bits and a sum for each row."""
    batch, heads, rows, head = query.shape
    size: int = 4 * batch * heads * (rows + -rows % 128) * (_rounded_head(head) + 1)
    if key.shape[1] != heads:  # each head's own gradients of key and value
        size += 2 * batch * heads * key.shape[2] * head * key.element_size()
    return size


def of_efficient_attention(query: Any, value: Any) -> int:
    """The scratch of memory-efficient attention: the result in 32 bits, if it is wide and in 16."""
    if query.element_size() == 4 or value.shape[-1] <= 128:
        return 0
    size: int = 4 * math.prod(query.shape[:-1]) * value.shape[-1]
    return size


def of_efficient_backward(query: Any, key: Any, *, known: bool) -> Scratch:
    """The scratch of its backward: a sum for each row, and gradients in 32 bits block by block.

    In 32 bits the sums come first, from a product as large as the result. In 16 bits and with wide
    heads it also stages the gradients of keys, whose splits are not known. `known`: the architecture
    has the kernels that were measured.
    """
    batch, heads, rows, head = query.shape
    is_half = query.element_size() == 2
    sums = 4 * batch * heads * rows
    product = 0 if is_half else 4 * query.numel() + 2 * sums
    numbers = _block_by_block(rows, head, is_half=is_half)
    least = max(product, sums + 4 * batch * heads * numbers)
    if not is_half or head <= 128:
        return Scratch(least if known else max(product, sums), least)
    splits = min(-(-key.shape[2] // 64), max(_MOST_SPLITS // (batch * heads), 1))
    most = least + 4 * batch * heads * splits * 2 * 128 * 256
    return Scratch(least if known and head == _WIDEST_MEASURED else sums, most)


def _block_by_block(rows: int, head: int, *, is_half: bool) -> int:
    """Numbers for each head of a batch. Each block of them has a few more."""
    if head <= 64:
        return -(-rows // 64) * (64 * 64 + 4)
    blocks, wide = -(-rows // 128), -(-head // 64)
    if not is_half:
        return blocks * (128 * 64 * wide + 4 * wide)
    if head <= 128:
        return blocks * (128 * 128 + 4)
    return blocks * 2 * (128 * 64 * wide + 2 * wide)
