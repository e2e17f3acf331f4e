"""Optimizers, and the size of their state by the formula each one's authors give."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

SCALAR = 4  # a step count, float32


@dataclass(frozen=True)
class Kind:
    """How to make one, and the bytes of its state on a device for one parameter."""

    make: Callable[[Sequence[Tensor]], Any]
    state: Callable[[Tensor, str], int]
    once: int = 0  # shared by all parameters


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def adam_state(tensor: Tensor, device: str, *, step_on_device: bool = False) -> int:
    """Two averages like the parameter; the step count is on the CPU unless the step is fused."""
    step = SCALAR if step_on_device or device == "cpu" else 0
    return 2 * nbytes(tensor) + step


def adafactor_state(tensor: Tensor, device: str) -> int:
    """A row and a column of the second moment; of a vector, all of it."""
    step = SCALAR if device == "cpu" else 0
    if tensor.dim() < 2:
        return nbytes(tensor) + step
    rows, columns = prod(tensor.shape[:-1]), prod(tensor.shape[:-2]) * tensor.shape[-1]
    return (rows + columns) * tensor.element_size() + step


def torchao_state(tensor: Tensor, device: str) -> int:
    """Two averages of a byte each, a scale for every 256, and a code book of 256 floats for each."""
    step = SCALAR if device == "cpu" else 0
    if tensor.numel() < 4096 or tensor.numel() % 256:
        return 2 * nbytes(tensor) + step
    return 2 * (tensor.numel() + 4 * (tensor.numel() // 256) + 4 * 256) + step


def make_torchao(parameters: Sequence[Tensor]) -> Any:
    pytest.importorskip("torchao", reason="8-bit Adam needs torchao", exc_type=ImportError)
    return importlib.import_module("torchao.optim").AdamW8bit(parameters)


def bitsandbytes_state(tensor: Tensor, device: str) -> int:
    """The same, with the code books shared by all parameters; small tensors stay float32."""
    if tensor.numel() < 4096:
        return 2 * 4 * tensor.numel()
    return 2 * (tensor.numel() + 4 * -(-tensor.numel() // 256))


def make_bitsandbytes(parameters: Sequence[Tensor]) -> Any:
    pytest.importorskip("bitsandbytes", reason="8-bit Adam needs bitsandbytes")
    return importlib.import_module("bitsandbytes").optim.AdamW8bit(parameters)


OPTIMIZERS: dict[str, Kind] = {
    "sgd": Kind(lambda p: torch.optim.SGD(p, lr=0.01), lambda p, d: 0),
    "momentum": Kind(lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), lambda p, d: nbytes(p)),
    "adam_loop": Kind(lambda p: torch.optim.Adam(p, lr=1e-3, foreach=False), adam_state),
    "adamw": Kind(lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True), adam_state),
    "adamw_fused": Kind(
        lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        lambda p, d: adam_state(p, d, step_on_device=True),
    ),
    "adafactor": Kind(lambda p: torch.optim.Adafactor(p), adafactor_state),
    "adam8_torchao": Kind(make_torchao, torchao_state),
    "adam8_bitsandbytes": Kind(make_bitsandbytes, bitsandbytes_state, once=2 * 4 * 256),
}
