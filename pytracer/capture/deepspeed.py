"""Finds the weights, gradients and buckets that DeepSpeed keeps outside modules and optimizers.

DeepSpeed's engine is a module whose `optimizer` holds them. Nothing of DeepSpeed is imported and
none of its code runs. An attribute with another name in some version is not found here. Its
tensors then get their category from other evidence.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from pytracer.capture.looking import is_a
from pytracer.data._native import C

Held = tuple[str, str, torch.Tensor]  # category, role, tensor

# Attributes of its optimizers, with the category and role of the tensors in them.
_ATTRIBUTES = {
    # ZeRO stages 1 and 2
    "bit16_groups_flat": ("weights", "parameter"),
    "single_partition_of_fp32_groups": ("weights", "master"),
    # ZeRO stage 3
    "fp16_partitioned_groups_flat": ("weights", "parameter"),  # this rank's part
    "fp32_partitioned_groups_flat": ("weights", "master"),
    "grad_partitions_flat_buffer": ("gradients", "parameter"),
    # ZeRO stages 1, 2 and 3
    "averaged_gradients": ("gradients", "parameter"),
    "ipg_buckets": ("communication", "bucket"),
    # BF16_Optimizer
    "bf16_groups_flat": ("weights", "parameter"),
    "fp32_groups_flat_partition": ("weights", "master"),
    "fp32_groups_gradients_flat": ("gradients", "master"),
}


class Engines:
    """The DeepSpeed engines that were met, held by weak references."""

    def __init__(self) -> None:
        """Starts without engines."""
        self._engines: list[weakref.ref[torch.nn.Module]] = []

    def add(self, module: torch.nn.Module) -> list[Held]:
        """Returns the tensors of a new engine; [] for an engine met before or another module."""
        self._engines = [engine for engine in self._engines if engine() is not None]
        if _optimizer_of(module) is None or any(engine() is module for engine in self._engines):
            return []
        self._engines.append(weakref.ref(module))
        return list(_held_by(module))

    @property
    def were_met(self) -> bool:
        """Whether any engine was met, even if it holds nothing yet."""
        return bool(self._engines)

    def tensors(self) -> Iterator[Held]:
        """Yields every tensor that the engines hold now."""
        for reference in self._engines:
            engine = reference()
            if engine is not None:
                yield from _held_by(engine)


# Classes of DeepSpeed's optimizers, and what they shard.
_STAGES = {
    "DeepSpeedZeroOptimizer": "ZeRO 1 or 2",
    "DeepSpeedZeroOptimizer_Stage3": "ZeRO 3",
    "BF16_Optimizer": "ZeRO 1",
}


def zero_stage(module: torch.nn.Module) -> str:
    """The stage of ZeRO that an engine of DeepSpeed runs; "" for another module."""
    return _STAGES.get(type(_optimizer_of(module)).__name__, "")


def _optimizer_of(module: torch.nn.Module) -> Any:
    optimizer = C.attributes_of(module).get("optimizer")
    return optimizer if type(optimizer).__module__.startswith("deepspeed.") else None


def _held_by(engine: torch.nn.Module) -> Iterator[Held]:
    held = C.attributes_of(_optimizer_of(engine))
    for name, (category, role) in _ATTRIBUTES.items():
        for tensor in _tensors_in(held.get(name)):
            yield category, role, tensor
            if role == "master" and (gradient := C.gradient_of(tensor)) is not None:
                yield "gradients", role, gradient


def _tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    if is_a(value, torch.Tensor):
        yield value
    elif depth == 0:
        return
    elif is_a(value, dict):
        yield from _tensors_in(list(dict.values(value)), depth - 1)
    elif type(value) in (list, tuple):
        for item in value:
            yield from _tensors_in(item, depth - 1)
    else:  # a bucket
        yield from _tensors_in(C.attributes_of(value).get("buffer"), depth - 1)
