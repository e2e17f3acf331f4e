"""The CTC loss, whose sizes depend on the lengths of its targets.

torch's operator reads the lengths by pointer, so it cannot run on fake tensors. `loss` takes the steps of
ATen/native/LossCTC.cpp with the lengths that are known.
"""

from collections.abc import Callable
from typing import Any

import torch

from pytracer import errors
from pytracer.basics.private_torch import FakeTensor, dispatch_keys, without_modes
from pytracer.imagined import scratch
from pytracer.imagined.known import Known
from pytracer.imagined.standins import where

aten = torch.ops.aten
KEYS = ("AutogradCPU", "AutogradCUDA")  # where operators of fake tensors arrive first
FORMULA = dispatch_keys.CompositeImplicitAutograd
_LONGEST_LABEL = 256  # for cuDNN
_MEAN, _SUM = 1, 2
_SMALL = 8 << 20


def place(library: Any, known: Known) -> None:
    """Takes the loss of fake tensors apart here."""
    for overload in ("IntList", "Tensor"):
        for key in KEYS:
            library.impl(f"ctc_loss.{overload}", _kernel(known, overload), key)


def _kernel(known: Known, overload: str) -> Callable[..., Any]:
    original = getattr(aten.ctc_loss, overload)

    def kernel(scores: Any, *rest: Any, **options: Any) -> Any:
        if not isinstance(scores, FakeTensor):
            return original._op_dk(FORMULA, scores, *rest, **options)
        return _loss(known, scores, *rest, **options)

    return kernel


def _loss(
    known: Known,
    scores: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Any:
    is_batched = scores.dim() == 3
    scores = scores if is_batched else scores.unsqueeze(1)
    inputs = _lengths(known, input_lengths, scores.shape[0])
    padded = targets.shape[-1] if targets.dim() == 2 or not is_batched else None
    labels = _lengths(known, target_lengths, padded)
    if _takes_cudnn(scores, targets, input_lengths, target_lengths, inputs, labels, blank):
        costs, _ = aten._cudnn_ctc_loss(
            scores, targets, inputs, labels, blank, False, zero_infinity
        )
    else:
        targets = targets.to(scores.device, torch.long)
        costs, _ = aten._ctc_loss(scores, targets, inputs, labels, blank, zero_infinity)
        if zero_infinity:
            costs = torch.where(costs == float("inf"), costs.new_zeros(()), costs)
    if reduction == _MEAN:
        return (
            costs / torch.tensor(labels, dtype=costs.dtype, device=costs.device).clamp_min(1)
        ).mean()
    if reduction == _SUM:
        return costs.sum()
    return costs if is_batched else costs.squeeze(0)


def _lengths(known: Known, given: Any, longest: int | None) -> list[int]:
    """The numbers. If they are unknown, each is as long as the padded rows."""
    if not isinstance(given, torch.Tensor):
        return [int(one) for one in given]
    given = given.to("cpu", torch.long).contiguous()
    values = known.value_of(given) if isinstance(given, FakeTensor) else given
    if values is not None and not (isinstance(given, FakeTensor) and known.is_guess(given)):
        with without_modes():
            return [int(one) for one in values.flatten().tolist()]
    if longest is None:
        raise errors.CannotImagine(
            f"{where()}: the sizes of this CTC loss depend on the lengths of its targets, and an "
            "imagined run has none: give targets of two dimensions, or lengths made by torch.full"
        )
    return [longest] * given.numel()


def _takes_cudnn(
    scores: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    inputs: list[int],
    labels: list[int],
    blank: int,
) -> bool:
    may = (
        scores.is_cuda
        and torch.backends.cudnn.enabled
        and blank == 0
        and targets.dim() == 1
        and scores.dtype == torch.float32
        and targets.dtype == torch.int32
        and targets.is_contiguous()
    )
    fits = all(
        label < _LONGEST_LABEL and label <= length
        for label, length in zip(labels, inputs, strict=False)
    )
    given = (input_lengths, target_lengths)
    if all(isinstance(one, torch.Tensor) and one.dtype == torch.int32 for one in given):
        return may and fits
    whole = all(length == scores.shape[0] for length in inputs)
    return may and fits and whole and not targets.is_cuda


def kernels(take: Callable[[scratch.Scratch], None]) -> dict[Any, Callable[..., Any]]:
    """Fake kernels of the loss's operators. `take`: takes the scratch of a call."""

    def lengths(scores: Any) -> int:
        """The bytes of both lengths, and of where each target begins, which a card needs."""
        return 3 * 8 * int(scores.shape[1]) if scores.is_cuda else 0

    def forward(scores: Any, targets: Any, inputs: Any, labels: Any, *_: Any, **__: Any) -> Any:
        sums = scores.new_empty((scores.shape[1], scores.shape[0], 2 * max(labels, default=0) + 1))
        take(scratch.Scratch(lengths(scores), lengths(scores)))
        return scores.new_empty(scores.shape[1]), sums

    def backward(gradient: Any, scores: Any, *rest: Any, **_: Any) -> Any:
        result = torch.empty_like(scores, memory_format=torch.contiguous_format)
        sums = rest[4]
        size = sums.numel() * sums.element_size() + lengths(scores)
        take(scratch.Scratch(size, size))
        return result

    def cudnn(scores: Any, *_: Any, **__: Any) -> Any:
        length, batch, classes = scores.shape
        most = 2 * 4 * length * batch * (2 * _LONGEST_LABEL + classes)
        take(scratch.Scratch(0, most + _SMALL))
        gradient = torch.empty_like(scores, memory_format=torch.contiguous_format)
        return scores.new_empty(batch), gradient

    return {
        aten._ctc_loss.default: forward,
        aten._ctc_loss_backward.default: backward,
        aten._cudnn_ctc_loss.default: cudnn,
    }
