"""Refuses recurrent layers. On a card cuDNN runs them, with a reserve whose size only cuDNN knows."""

from typing import Any

import torch

from pytracer import errors, private_torch
from pytracer.imagined.standins import where

_LAYERS = ("lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_relu.input")


def refuse(library: Any, is_fake: Any) -> None:
    """Makes recurrent layers on CUDA tensors raise, because another kernel's memory would be wrong."""
    for name in _LAYERS:
        library.impl(name, _refusing(name, is_fake), "AutogradCUDA")


def _refusing(name: str, is_fake: Any) -> Any:
    layer, _, overload = name.partition(".")
    original = getattr(getattr(torch.ops.aten, layer), overload)
    composite = private_torch.dispatch_keys.CompositeImplicitAutograd

    def kernel(first: Any, *arguments: Any, **options: Any) -> Any:
        if not is_fake(first):
            return original._op_dk(composite, first, *arguments, **options)
        raise errors.CannotImagine(
            f"{where()}: {layer} is run by cuDNN, which keeps a reserve for backward whose size only "
            "cuDNN knows; record this program on a card with `pytracer run`"
        )

    return kernel
