"""Chooses the kernel that `scaled_dot_product_attention` would run on the imagined card.

The kernel decides which tensors are saved for backward, and torch chooses it by asking the card. The
rules here are those of ATen/native/transformers/cuda/sdp_utils.cpp for plain tensors. The steps
around the kernels are those of ATen/native/transformers/attention.cpp. They serve every build of
torch: with CUDA, without a driver, or without CUDA.

cuDNN's kernel takes scratch that only cuDNN knows, so there the peak is an interval.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pytracer.basics import private_torch
from pytracer.imagined import attention_scratch, scratch
from pytracer.imagined.cards import Card
from pytracer.imagined.ctc import KEYS
from pytracer.imagined.fake_mode import Mode

_FLASH_MOST = 256  # the most elements of a head
_ALIGNED = 8  # elements of a mask's row, for memory-efficient attention
_MATH, _FLASH, _EFFICIENT, _CUDNN = range(4)  # torch's numbers
_FIRST_ON = (9, 10)  # the architectures on which cuDNN comes first

aten = torch.ops.aten
_COMPOSITE = private_torch.dispatch_keys.CompositeImplicitAutograd


class _Call(NamedTuple):
    """The arguments of one call."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    is_causal: bool
    enable_gqa: bool

    @property
    def wants_gradients(self) -> bool:
        given = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(one.requires_grad for one in given)


class Attention:
    """The operator as the card would run it."""

    def __init__(self, card: Card) -> None:
        """Replaces nothing; `library` does."""
        self._card = card
        self.processors, self.capability = card.processors, card.capability
        self.is_measured = card.capability == (9, 0)  # cuDNN's scratch is
        self.is_open = False  # whether a compiler has asked for a kernel that is not known

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
        call = _Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        kernel, options = self.chosen(call), {"scale": scale}
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = _as_numbers(attn_mask, query.dtype)
        if kernel == _CUDNN:
            wants = call.wants_gradients
            return _first(
                aten._scaled_dot_product_cudnn_attention(
                    query, key, value, attn_mask, wants, dropout_p, is_causal, False, **options
                )
            )
        if kernel == _FLASH:
            head = query.shape[-1]
            scale = scale if scale is not None else head**-0.5
            padded = [_padded(tensor, 8) for tensor in (query, key, value)]
            result = aten._scaled_dot_product_flash_attention(
                *padded, dropout_p, is_causal, False, scale=scale
            )
            return _cut(_first(result), head)
        if kernel == _EFFICIENT:
            if attn_mask is not None:
                attn_mask = _bias(attn_mask, query, key)
            wants = call.wants_gradients
            return _first(
                aten._scaled_dot_product_efficient_attention(
                    query, key, value, attn_mask, wants, dropout_p, is_causal, **options
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

    def chosen(self, call: _Call) -> int:
        """The number of the first kernel that can run."""
        can_run = {
            _CUDNN: self._can_run_cudnn,
            _FLASH: self._can_run_flash,
            _EFFICIENT: self._can_run_efficient,
        }
        for kernel in self._order():
            if kernel in can_run and can_run[kernel](call):
                return kernel
            if kernel == _MATH and torch.backends.cuda.math_sdp_enabled():
                return kernel
        return _MATH

    def _order(self) -> list[int]:
        """The order in which torch asks: the program's, or the default one for this card."""
        order = [int(one) for one in private_torch.attention_order()]
        is_default = order[:3] == [_FLASH, _EFFICIENT, _MATH]
        first = self._card.capability[0] in _FIRST_ON
        if is_default and first and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1":
            return [_CUDNN, _FLASH, _EFFICIENT, _MATH]
        return order

    def _can_run_cudnn(self, call: _Call) -> bool:
        strict = torch.are_deterministic_algorithms_enabled()
        heads = (call.query.shape[-1], call.value.shape[-1])
        most = 256 if self._card.capability == (9, 0) else 128
        return (
            torch.backends.cuda.cudnn_sdp_enabled()
            and self._card.capability >= (8, 0)
            and call.query.dtype in (torch.float16, torch.bfloat16)
            and _are_alike(call)
            and _has_fitting_heads(call)
            and _has_fitting_mask(call)
            and (not strict or torch.is_deterministic_algorithms_warn_only_enabled())
            and max(heads) <= most
            and not any(head % 8 for head in heads)
            and call.key.shape[-2] != 1
            and not (call.dropout and call.query.shape[-2] == 1)
        )

    def _can_run_flash(self, call: _Call) -> bool:
        head = call.query.shape[-1]
        return (
            torch.backends.cuda.flash_sdp_enabled()
            and self._card.capability >= (8, 0)
            and call.query.dtype in (torch.float16, torch.bfloat16)
            and call.mask is None
            and _are_alike(call)
            and head == call.key.shape[-1] == call.value.shape[-1] <= _FLASH_MOST
            and not (call.wants_gradients and self._refuses_to_train(head, call.dropout))
            and _has_fitting_heads(call)
            and not (call.is_causal and call.query.shape[-2] != call.key.shape[-2])
        )

    def _refuses_to_train(self, head: int, dropout: float) -> bool:
        """Whether the card has too little shared memory for the backward pass of wide heads."""
        is_small = (8, 6) <= self._card.capability <= (8, 9) or self._card.capability[0] == 12
        return is_small and not (head <= 192 or (head > 224 and not dropout))

    def _can_run_efficient(self, call: _Call) -> bool:
        dtypes = [torch.float32, torch.float16]
        if self._card.has_bfloat16:
            dtypes.append(torch.bfloat16)
        query, value, mask = call.query, call.value, call.mask
        is_half = query.dtype != torch.float32
        aligned = 8 if is_half else (4 if self._card.has_bfloat16 else 1)
        return (
            torch.backends.cuda.mem_efficient_sdp_enabled()
            and query.dtype in dtypes
            and _are_alike(call)
            and query.shape[-3] == call.key.shape[-3] == value.shape[-3]
            and not call.enable_gqa
            and query.shape[-1] == call.key.shape[-1]
            and query.shape[-1] % aligned == 0
            and value.shape[-1] % aligned == 0
            and not (call.is_causal and mask is not None)
            and (mask is None or mask.stride(-1) == 1 or mask.shape[-1] == 1)
        )


def _first(results: Any) -> torch.Tensor:
    first: torch.Tensor = results[0]
    return first


def _cut(result: torch.Tensor, head: int) -> torch.Tensor:
    return result[..., :head] if result.shape[-1] != head else result


def _are_alike(call: _Call) -> bool:
    query, key, value = call.query, call.key, call.value
    return (
        query.dim() == key.dim() == value.dim() == 4
        and query.dtype == key.dtype == value.dtype
        and query.shape[0] == key.shape[0] == value.shape[0]
        and min(query.shape[-2], key.shape[-2]) > 0
        and all(one.stride(-1) == 1 or one.shape[-1] == 1 for one in (query, key, value))
    )


def _has_fitting_heads(call: _Call) -> bool:
    many, keys, values = (one.shape[-3] for one in (call.query, call.key, call.value))
    return many == keys == values or (call.enable_gqa and not (many % keys or many % values))


def _has_fitting_mask(call: _Call) -> bool:
    """Whether cuDNN takes the mask: one without gradient that spreads over the scores."""
    mask, query = call.mask, call.query
    if mask is None:
        return True
    wanted = (query.shape[0], query.shape[1], query.shape[2], call.key.shape[2])
    if call.is_causal or mask.requires_grad or mask.dim() not in (2, 4):
        return False
    sizes = zip(reversed(mask.shape), reversed(wanted), strict=False)
    return all(size in (1, whole) for size, whole in sizes)


def _padded(tensor: torch.Tensor, to: int) -> torch.Tensor:
    missing = -tensor.shape[-1] % to
    return torch.nn.functional.pad(tensor, [0, missing]) if missing else tensor


def _as_numbers(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask of truths as numbers that are added."""
    zero, never = (mask.new_full((), one, dtype=dtype) for one in (0.0, float("-inf")))
    return torch.where(mask, zero, never)


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mask in the form of memory-efficient attention: expanded, with aligned rows."""
    batch, heads, rows = query.shape[:3]
    columns = key.shape[-2]
    if columns % _ALIGNED:
        whole = torch.nn.functional.pad(mask, [0, -mask.shape[-1] % _ALIGNED])
        mask = whole[..., : mask.shape[-1]]
    expanded: torch.Tensor = mask.expand(batch, heads, rows, columns)
    return expanded


def kernels(
    take: Callable[[scratch.Scratch], None], operator: Any
) -> dict[Any, Callable[..., Any]]:
    """Fake kernels. `take` takes the scratch of a call; `operator` is an Attention, if there is a card."""
    is_measured = operator is not None and operator.is_measured

    def cudnn(
        query: Any, key: Any, value: Any, bias: Any, wants_sums: bool, *_: Any, **__: Any
    ) -> Any:
        shape = (*query.shape[:-1], value.shape[-1])
        order = sorted(range(4), key=query.stride, reverse=True)
        ordered = query.new_empty([shape[one] for one in order])
        result = ordered.permute([order.index(one) for one in range(4)])
        sums = query.new_empty((*query.shape[:-1], 1), dtype=torch.float) if wants_sums else None
        seed, offset = (query.new_empty((), dtype=torch.long) for _ in range(2))
        take(
            attention_scratch.of_cudnn_attention(
                query, key, value, backward=False, known=is_measured
            )
        )
        return result, sums, None, None, query.shape[2], key.shape[2], seed, offset, None

    def cudnn_backward(
        gradient: Any, query: Any, key: Any, value: Any, result: Any, *_: Any, **__: Any
    ) -> Any:
        gradients = tuple(torch.empty_like(one) for one in (query, key, value))
        copied = 0 if gradient.stride() == result.stride() else result.nbytes
        own = attention_scratch.of_cudnn_attention(
            query, key, value, backward=True, known=is_measured
        )
        take(scratch.Scratch(own.least, own.most, beside=(copied,)))
        return gradients

    def flash(
        query: Any, key: Any, value: Any, dropout: float = 0.0, *rest: Any, **options: Any
    ) -> Any:
        results = aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout, *rest, **options
        )
        if operator is not None:
            size = attention_scratch.of_flash_attention(query, key, dropout, operator.processors)
            take(scratch.Scratch(size, size))
        return results

    def flash_backward(
        gradient: Any, query: Any, key: Any, value: Any, result: Any, *rest: Any, **options: Any
    ) -> Any:
        results = aten._scaled_dot_product_flash_attention_backward.default(
            gradient, query, key, value, result, *rest, **options
        )
        size = attention_scratch.of_flash_backward(query, key)
        for one in (gradient, result):  # the kernel wants rows, and in each of them the heads
            size += 0 if one.transpose(1, 2).is_contiguous() else one.nbytes
        take(scratch.Scratch(size, size))
        return results

    def efficient(*args: Any, **options: Any) -> Any:
        result, sums, *_ = aten._scaled_dot_product_efficient_attention.default(*args, **options)
        size = attention_scratch.of_efficient_attention(args[0], args[2])
        take(scratch.Scratch(size, size))
        seed, offset = (torch.empty((), dtype=torch.long, device="cpu") for _ in range(2))
        return result, sums, seed, offset

    def efficient_backward(gradient: Any, query: Any, key: Any, *rest: Any, **options: Any) -> Any:
        results = aten._scaled_dot_product_efficient_attention_backward.default(
            gradient, query, key, *rest, **options
        )
        known = operator is not None and operator.capability >= (8, 0)
        take(attention_scratch.of_efficient_backward(query, key, known=known))
        return results

    return {
        aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
        aten._scaled_dot_product_cudnn_attention.default: cudnn,
        aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
        aten._scaled_dot_product_flash_attention.default: flash,
        aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
        aten._scaled_dot_product_efficient_attention.default: efficient,
    }


class Composites:
    """Operators made of others, which add in place, but not where a dispatch mode is there.

    The plain kernel of attention adds its mask so, and a linear layer its bias to a product of rows
    that are not contiguous.
    """

    def __init__(self) -> None:
        """Replaces nothing; `place` does."""
        self.is_running = False

    def place(self, library: Any) -> None:
        """Notes while one of the operators runs."""
        for operator in (aten._scaled_dot_product_attention_math.default, aten.linear.default):
            self._place(library, operator)

    def _place(self, library: Any, operator: Any) -> None:
        def kernel(*arguments: Any, **options: Any) -> Any:
            self.is_running = True
            try:
                return operator._op_dk(_COMPOSITE, *arguments, **options)
            finally:
                self.is_running = False

        for key in KEYS:
            library.impl(operator.name().removeprefix("aten::"), kernel, key)


_REAL = (torch.Tensor, torch.nn.Parameter)
_CAUSAL = 4  # the argument after the query


def library(operator: Attention) -> Any:
    """Replaces the operator for CUDA tensors, until `_destroy()` of the returned library."""
    placed = torch.library.Library("aten", "IMPL")
    original = aten.scaled_dot_product_attention.default

    def kernel(query: Any, *arguments: Any, **options: Any) -> Any:
        of_rank = private_torch.of_this_rank(query)
        if type(of_rank) not in _REAL:
            if not isinstance(getattr(of_rank, "fake_mode", None), Mode):  # a compiler's
                is_causal = options.get("is_causal", any(arguments[_CAUSAL : _CAUSAL + 1]))
                operator.is_open |= not is_causal
            return operator(query, *arguments, **options)
        return original._op_dk(_COMPOSITE, query, *arguments, **options)

    placed.impl("scaled_dot_product_attention", kernel, "AutogradCUDA")
    return placed


def is_fake(tensor: Any) -> bool:
    """Whether the tensor is fake."""
    return hasattr(tensor, "fake_mode")
