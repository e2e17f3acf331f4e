"""Sizes that depend on a routing: how many rows each expert gets.

A router chooses `k` of `E` experts for each row. A mask of the rows of one expert then has a count
that nobody knows here, but two are of interest: all experts get the same ("balanced"), or as few
experts as possible get everything ("worst").
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

WAYS = ("balanced", "worst")

aten = torch.ops.aten
_CHOICES = (aten.topk.default, aten.argmax.default, aten.argmin.default)
_COPIES = (aten.clone.default, aten._to_copy.default)
_MARKS = (aten.eq.Scalar, aten.eq.Tensor)  # the second by one-hot
_MASKED_WRITES = (aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)


@dataclass
class _Choice:
    """Numbers of experts, `each` for one row."""

    experts: int
    each: int
    asked: dict[tuple[int, int], int] = field(default_factory=dict)  # masks, in their order
    kept: list[Any] = field(default_factory=list)  # their storages, so that no number comes again


class Sizes:
    """Follows the choices of routers to the masks that are made from them."""

    def __init__(self, way: str | None) -> None:
        """`way`: one of WAYS, or None: no size is made up."""
        self._way = way
        self._choices = WeakIdKeyDictionary()

    def ran(self, func: Any, args: Any, result: Any) -> None:
        """Notes what an operator that ran has made of choices."""
        if self._way is None:
            return
        if func in _CHOICES:
            dim = args[2] if func is aten.topk.default and len(args) > 2 else -1
            if func is not aten.topk.default:
                dim = args[1] if len(args) > 1 and args[1] is not None else -1
            indices = result[1] if func is aten.topk.default else result
            each = args[1] if func is aten.topk.default else 1
            self._choices[indices.untyped_storage()] = _Choice(args[0].shape[dim], each)
        elif func in _COPIES or func in _MARKS:
            self._pass_on(args[0], result)
        elif func is aten.scatter_.value:  # one-hot
            self._pass_on(args[2], args[0])

    def _pass_on(self, source: Any, result: Any) -> None:
        choice = self._choices.get(source.untyped_storage())
        if choice is not None:
            self._choices[result.untyped_storage()] = choice

    def result_of(self, func: Any, args: Any) -> Any:
        """What an operator returns for a mask with a made-up count; None if there is no count."""
        if self._way is None:
            return None
        if func is aten.nonzero.default:
            count = self._count(args[0])
            size = None if count is None else (count, args[0].dim())
            return None if size is None else args[0].new_empty(size, dtype=torch.long)
        if func is aten.masked_select.default:
            count = self._count(args[1])
            return None if count is None else args[0].new_empty(count)
        if func in _MASKED_WRITES:
            return args[0] if func is not aten.index_put.default else torch.empty_like(args[0])
        if func is aten.index.Tensor:
            return self._indexed(args[0], args[1])
        return None

    def _indexed(self, tensor: Any, indices: Any) -> Any:
        plain: list[Any] = []
        for one in indices:
            if one is None or one.dtype not in (torch.bool, torch.uint8):
                plain.append(one)
                continue
            count = self._count(one)
            if count is None:
                return None
            plain += [one.new_empty(count, dtype=torch.long) for _ in range(one.dim())]
        return aten.index.Tensor(tensor, plain)

    def _count(self, mask: Any) -> int | None:
        storage = mask.untyped_storage()
        choice = self._choices.get(storage)
        if choice is None:
            return mask.numel() if self._way == "worst" else None
        if mask.numel() * mask.element_size() == storage.nbytes() and choice.each != mask.numel():
            whole = storage.nbytes() // mask.element_size()
            if whole % choice.experts == 0 and mask.dim() > 2:
                return int(whole // choice.experts)  # each choice is marked once
        if self._way == "balanced":
            count: int = -(-mask.numel() // choice.experts)
            return count
        key = (id(storage), mask.storage_offset())
        if key not in choice.asked:
            choice.asked[key] = len(choice.asked)
            choice.kept.append(storage)
        rows: int = mask.numel() // choice.each
        return rows if choice.asked[key] < choice.each else 0
