"""Where DeepSpeed's ZeRO keeps weights, gradients and buckets: not where modules and torch's optimizers do.

Its engine is a module whose `optimizer` holds them. Nothing of DeepSpeed is imported; what another
version of it calls otherwise is not found here, and is then what other evidence says.
"""

from collections.abc import Iterator
from typing import Any

import torch

# Attributes of its optimizers, of stages 1 to 3, and what the tensors in them are.
_HELD = {
    "bit16_groups_flat": ("weights", "parameter"),
    "fp16_partitioned_groups_flat": ("weights", "parameter"),  # this rank's part
    "single_partition_of_fp32_groups": ("weights", "master"),
    "fp32_partitioned_groups_flat": ("weights", "master"),
    "grad_partitions_flat_buffer": ("gradients", "parameter"),
    "averaged_gradients": ("gradients", "parameter"),
    "ipg_buckets": ("communication", "bucket"),
}


def optimizer_of(module: torch.nn.Module) -> Any:
    """An engine's, or None of any other module."""
    found = vars(module).get("optimizer")
    return found if type(found).__module__.startswith("deepspeed.") else None


def tensors_of(optimizer: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Category, role and tensor of all that it holds now."""
    held = vars(optimizer)
    for name, (category, role) in _HELD.items():
        for tensor in _tensors_in(held.get(name)):
            yield category, role, tensor
            if role == "master" and tensor.grad is not None:
                yield "gradients", role, tensor.grad


def _tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth == 0:
        return
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()), depth - 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item, depth - 1)
    else:  # a bucket
        yield from _tensors_in(getattr(value, "buffer", None), depth - 1)
