"""Chooses the kernel that `scaled_dot_product_attention` would run on the imagined card.

The kernel decides which tensors are saved for backward, and torch chooses it by asking the card. The
rules here are those of ATen/native/transformers/cuda/sdp_utils.cpp for plain tensors. The steps
around the kernels are those of ATen/native/transformers/attention.cpp. They serve every build of
torch: with CUDA, without a driver, or without CUDA.
"""

from typing import Any

import torch

from pytracer import private_torch
from pytracer.imagined.cards import Card

_FLASH_MOST = 256  # the most elements of a head that flash attention takes
_ALIGNED = 16  # elements of a mask's row, for memory-efficient attention

aten = torch.ops.aten


class Attention:
    """The operator as the card would run it."""

    def __init__(self, card: Card) -> None:
        """Replaces nothing; `library` does."""
        self._card = card

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Does what the composite operator does for CUDA tensors."""
        options = {"scale": scale}
        if self._takes_flash(query, key, value, attn_mask, is_causal, enable_gqa):
            head = query.shape[-1]
            scale = scale if scale is not None else head**-0.5
            padded = [_padded(tensor, 8) for tensor in (query, key, value)]
            result = aten._scaled_dot_product_flash_attention(
                *padded, dropout_p, is_causal, False, scale=scale
            )
            return _cut(_first(result), head)
        if self._takes_efficient(query, key, value, attn_mask, is_causal, enable_gqa):
            bias = None if attn_mask is None else _bias(attn_mask, query, key)
            wants_sums = torch.is_grad_enabled() and any(
                tensor.requires_grad for tensor in (query, key, value)
            )
            return _first(
                aten._scaled_dot_product_efficient_attention(
                    query, key, value, bias, wants_sums, dropout_p, is_causal, **options
                )
            )
        results = aten._scaled_dot_product_attention_math(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            None,
            enable_gqa=enable_gqa,
            **options,
        )
        return _first(results)

    def _takes_flash(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
        enable_gqa: bool,
    ) -> bool:
        same_heads = query.shape[-3] == key.shape[-3] == value.shape[-3]
        return (
            torch.backends.cuda.flash_sdp_enabled()
            and self._card.capability >= (8, 0)
            and query.dtype in (torch.float16, torch.bfloat16)
            and mask is None
            and _are_alike(query, key, value)
            and query.shape[-1] == key.shape[-1] == value.shape[-1] <= _FLASH_MOST
            and (same_heads or enable_gqa)
            and not (is_causal and query.shape[-2] != key.shape[-2])
        )

    def _takes_efficient(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
        enable_gqa: bool,
    ) -> bool:
        dtypes = [torch.float32, torch.float16]
        if self._card.has_bfloat16:
            dtypes.append(torch.bfloat16)
        is_half = query.dtype != torch.float32
        aligned = 8 if is_half else (4 if self._card.has_bfloat16 else 1)
        return (
            torch.backends.cuda.mem_efficient_sdp_enabled()
            and query.dtype in dtypes
            and _are_alike(query, key, value)
            and query.shape[-3] == key.shape[-3] == value.shape[-3]
            and not enable_gqa
            and query.shape[-1] == key.shape[-1]
            and query.shape[-1] % aligned == 0
            and value.shape[-1] % aligned == 0
            and not (is_causal and mask is not None)
            and (mask is None or mask.stride(-1) == 1 or mask.shape[-1] == 1)
        )


def _first(results: Any) -> torch.Tensor:
    first: torch.Tensor = results[0]
    return first


def _cut(result: torch.Tensor, head: int) -> torch.Tensor:
    return result[..., :head] if result.shape[-1] != head else result


def _are_alike(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        query.dim() == key.dim() == value.dim() == 4
        and query.dtype == key.dtype == value.dtype
        and query.shape[0] == key.shape[0] == value.shape[0]
        and min(query.shape[-2], key.shape[-2]) > 0
        and all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    )


def _padded(tensor: torch.Tensor, to: int) -> torch.Tensor:
    missing = -tensor.shape[-1] % to
    return torch.nn.functional.pad(tensor, [0, missing]) if missing else tensor


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mask in the form of memory-efficient attention: numbers, expanded, with aligned rows."""
    if mask.dtype == torch.bool:
        inverse = mask.logical_not()
        filled = torch.zeros_like(mask, dtype=query.dtype)
        mask = filled.masked_fill_(inverse, float("-inf"))
    batch, heads, rows = query.shape[:3]
    columns = key.shape[-2]
    if columns % _ALIGNED:
        whole = torch.nn.functional.pad(mask, [0, -mask.shape[-1] % _ALIGNED])
        mask = whole[..., : mask.shape[-1]]
    expanded: torch.Tensor = mask.expand(batch, heads, rows, columns)
    return expanded


def library(operator: Attention) -> Any:
    """Replaces the operator for CUDA tensors, until `_destroy()` of the returned library."""
    placed = torch.library.Library("aten", "IMPL")
    composite = private_torch.dispatch_keys.CompositeImplicitAutograd
    original = aten.scaled_dot_product_attention.default

    def kernel(query: Any, *arguments: Any, **options: Any) -> Any:
        if is_fake(query):
            return operator(query, *arguments, **options)
        return original._op_dk(composite, query, *arguments, **options)

    placed.impl("scaled_dot_product_attention", kernel, "AutogradCUDA")
    return placed


def is_fake(tensor: Any) -> bool:
    """Whether the tensor is fake."""
    return hasattr(tensor, "fake_mode")
