"""Where DeepSpeed keeps weights, gradients and buckets: not in modules and torch's optimizers.

Its engine is a module whose `optimizer` holds them. Nothing of DeepSpeed is imported and none of
its code is run; what a version of it calls otherwise is not found here, and is then what other
evidence says.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from pytracer._native import C
from pytracer.capture.looking import is_a

Held = tuple[str, str, torch.Tensor]  # category, role, tensor

# Attributes of its optimizers, and what the tensors in them are.
_ATTRIBUTES = {
    # ZeRO of stages 1 and 2
    "bit16_groups_flat": ("weights", "parameter"),
    "single_partition_of_fp32_groups": ("weights", "master"),
    # and of stage 3
    "fp16_partitioned_groups_flat": ("weights", "parameter"),  # this rank's part
    "fp32_partitioned_groups_flat": ("weights", "master"),
    "grad_partitions_flat_buffer": ("gradients", "parameter"),
    # of all three
    "averaged_gradients": ("gradients", "parameter"),
    "ipg_buckets": ("communication", "bucket"),
    # BF16_Optimizer
    "bf16_groups_flat": ("weights", "parameter"),
    "fp32_groups_flat_partition": ("weights", "master"),
    "fp32_groups_gradients_flat": ("gradients", "master"),
}


class Engines:
    """The engines that were met, by weak references."""

    def __init__(self) -> None:
        """None yet."""
        self._known: list[weakref.ref[torch.nn.Module]] = []

    def add(self, module: torch.nn.Module) -> list[Held]:
        """What a new one holds; nothing of other modules and of one that is known."""
        self._known = [known for known in self._known if known() is not None]
        if _optimizer_of(module) is None or any(known() is module for known in self._known):
            return []
        self._known.append(weakref.ref(module))
        return list(_held_by(module))

    @property
    def some_are_known(self) -> bool:
        """Also of those that hold nothing yet."""
        return bool(self._known)

    def tensors(self) -> Iterator[Held]:
        """All that they hold now."""
        for reference in self._known:
            engine = reference()
            if engine is not None:
                yield from _held_by(engine)


def _optimizer_of(module: torch.nn.Module) -> Any:
    found = C.attributes_of(module).get("optimizer")
    return found if type(found).__module__.startswith("deepspeed.") else None


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
