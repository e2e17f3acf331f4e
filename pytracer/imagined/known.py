"""What is small and known of fake tensors: positions, masks of ones, rates by layer, step numbers.

Models decide by such values. They are computed beside the fake ones, on the CPU, as long as
everything that goes into them is known; nothing that is random is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

MOST = 1 << 16  # elements

aten = torch.ops.aten
_RANDOM = torch.Tag.nondeterministic_seeded
_ORDERS = frozenset((aten.randperm.default, aten.randperm.generator))
_NO_VALUES = frozenset(
    (
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    )
)


class Known:
    """The values beside the fake tensors, under their attribute `known_value`."""

    def __init__(self, is_fake: Callable[[Any], bool]) -> None:
        """Nothing is known."""
        self._is_fake = is_fake
        self._spoiled: set[int] = set()  # memory that something unknown was written to

    def value_of(self, tensor: Any) -> torch.Tensor | None:
        """The tensor's values on the CPU, if they are known."""
        known: torch.Tensor | None = vars(tensor).get("known_value")
        if known is None or known.untyped_storage()._cdata in self._spoiled:
            return None
        return known

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator has run on fakes: the same on what is known of them."""
        fresh = [one for one in tree_iter(result) if self._is_fake(one)]
        if func in _ORDERS:  # one order of the rows of a data set is as good as another
            with _disable_current_modes():
                _give(fresh, [torch.arange(args[0], device="cpu")])
            return
        given = [one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)]
        writes = func._schema.is_mutable
        if not self._can_run(func, given, fresh):
            if writes:
                self._spoil(given)
            return
        with _disable_current_modes(), torch.no_grad():
            try:
                values = func(*tree_map(self._plain, args), **tree_map(self._plain, kwargs))
            except Exception:  # a kernel that the CPU does not have
                self._spoil(given)
                return
        _give(fresh, [one for one in tree_iter(values) if isinstance(one, torch.Tensor)])

    def _can_run(self, func: Any, given: list[Any], fresh: list[Any]) -> bool:
        if func in _NO_VALUES or _RANDOM in func.tags or not fresh:
            return False
        if any(one.numel() > MOST for one in (*given, *fresh)):
            return False
        return all(not self._is_fake(one) or self.value_of(one) is not None for one in given)

    def _plain(self, one: Any) -> Any:
        if self._is_fake(one):
            return self.value_of(one)
        if isinstance(one, torch.device):
            return torch.device("cpu")
        return one

    def _spoil(self, given: list[Any]) -> None:
        for one in given:
            known = vars(one).get("known_value") if self._is_fake(one) else None
            if known is not None:
                self._spoiled.add(known.untyped_storage()._cdata)


def _give(fresh: list[Any], values: list[torch.Tensor]) -> None:
    if len(fresh) == len(values):
        for tensor, value in zip(fresh, values, strict=True):
            tensor.known_value = value
