"""Parameters and buffers of lazy modules, which get their shape in the first call."""

from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy as is_lazy

from pytracer.basics.private_torch import FakeTensor

KINDS = (UninitializedParameter, UninitializedBuffer)


class _Parameter(UninitializedParameter, FakeTensor):
    cls_to_become = FakeTensor
    shape = torch.Tensor.shape  # torch's own would raise where fake kernels ask


class _Buffer(UninitializedBuffer, FakeTensor):
    cls_to_become = FakeTensor
    shape = torch.Tensor.shape


def make(
    cls: type,
    requires_grad: bool = True,
    device: Any = None,
    dtype: Any = None,
    persistent: bool = True,
) -> Any:
    """A new one of the class. Torch's own would be a subclass that a fake tensor is not."""
    made: Any = torch.empty(0, device=device, dtype=dtype)
    if issubclass(cls, UninitializedParameter):
        made.requires_grad_(requires_grad)._is_param = True
        made.__class__ = _Parameter
    else:
        made.persistent, made._is_buffer = persistent, True
        made.__class__ = _Buffer
    return made
