"""Moves the tensors that autograd saves in a module's calls to the host until their backward.

This carries out the plans of `checkpoint_plan(pinned=...)`. It needs no other part of pytracer.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


def offload(
    module: torch.nn.Module,
    device: str = "cuda",
    *,
    when_moved: Callable[[], None] = lambda: None,
) -> None:
    """Makes each later call's saved tensors wait in pinned memory.

    They come back together when the call's backward needs the first of them. Each is freed after its
    last use. The module's inputs and parameters stay on the device. Calls `when_moved` for each.
    """
    forward = module.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values(), *module.parameters(), *module.buffers())
        waiting = _Waiting([x for x in given if isinstance(x, torch.Tensor)], device, when_moved)
        with saved_tensors_hooks(waiting.pack, waiting.unpack):
            return forward(*args, **kwargs)

    module.forward = call


class _Waiting:
    """The saved tensors of one call. A storage with several saved views moves once."""

    def __init__(
        self, stays: list[torch.Tensor], device: str, when_moved: Callable[[], None] = lambda: None
    ) -> None:
        self._stays = {StorageWeakRef(x.untyped_storage()) for x in stays}
        self._device, self._when_moved = device, when_moved
        self._host: dict[Any, torch.Tensor] = {}
        self._uses: Counter[Any] = Counter()
        self._back: dict[Any, torch.Tensor] = {}
        self._left: Counter[Any] = Counter()

    def pack(self, x: torch.Tensor) -> Any:
        """Moves a tensor to the host, unless it stays. The weak reference keeps the key unique."""
        storage = x.untyped_storage()
        weak = StorageWeakRef(storage)
        if x.device.type != self._device or weak in self._stays:
            return x
        key = (weak, x._version)
        if key not in self._host:
            flat = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
            host = torch.empty_like(flat, device="cpu", pin_memory=torch.cuda.is_available())
            self._host[key] = host.copy_(flat, non_blocking=True)
            self._when_moved()
        self._uses[key] += 1
        return key, x.device, x.dtype, x.storage_offset(), x.size(), x.stride()

    def unpack(self, packed: Any) -> torch.Tensor:
        """Brings a tensor back. The first one brings back all tensors of the call."""
        if isinstance(packed, torch.Tensor):
            return packed
        key, device, dtype, *where = packed
        if key not in self._back:
            missing = self._host if not self._back else {key: self._host[key]}
            for name, host in missing.items():
                self._back[name] = host.to(device, non_blocking=True, copy=True)
                self._left[name] = self._uses[name]
        flat = self._back[key]
        self._left[key] -= 1
        if self._left[key] == 0:
            del self._back[key]
        return torch.empty(0, dtype=dtype, device=device).set_(flat.untyped_storage(), *where)
