"""Sizes that depend on a routing: how many rows each expert gets.

A router chooses `k` of `E` experts for each row. A mask of the rows of one expert then has a count
that nobody knows here, but two are of interest: all experts get the same ("balanced"), or as few
experts as possible get everything ("worst"). Counts of each expert's rows are known then, and what
follows from them: the experts that have any, and where each one's rows begin.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from pytracer.basics.private_torch import without_modes
from pytracer.imagined import batch_norms
from pytracer.imagined.known import Known
from pytracer.imagined.standins import is_asked_by, where

WAYS = ("balanced", "worst")

aten = torch.ops.aten
_CHOICES = (aten.topk.default, aten.argmax.default, aten.argmin.default)
_COPIES = (aten.clone.default, aten._to_copy.default, aten.sort.default, aten.sort.stable)
_MARKS = (aten.eq.Scalar, aten.eq.Tensor)  # the second by one-hot
_COUNTS = (aten.sum.dim_IntList, aten.histc.default)
_MASKED_WRITES = (aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)


@dataclass
class _Choice:
    """Numbers of experts, `each` for one row."""

    experts: int
    each: int
    rows: int
    asked: dict[tuple[int, int], int] = field(default_factory=dict)  # masks, in their order
    kept: list[Any] = field(default_factory=list)  # their storages, so that no number comes again


class Sizes:
    """Follows the choices of routers to the masks that are made from them."""

    def __init__(self, way: str | None) -> None:
        """`way`: one of WAYS, or None: no size is made up."""
        self.way = way
        self._choices = WeakIdKeyDictionary()
        self._marked = WeakIdKeyDictionary()  # the storages of masks, and not of numbers
        self._known: Known | None = None

    def knows(self, known: Known) -> None:
        """`known`: the values that are known, and that learn the counts."""
        self._known = known

    def are_needed(self, func: Any, needed: str) -> str:
        """Says that an operator's result depends on what is needed and not known."""
        experts = (
            'For the rows of experts, say sizes="balanced" or sizes="worst" (--sizes). Or skip'
        )
        if self.way is not None:  # it was said, and this follows from no choice of a router
            experts = "Skip"
        return (
            f"{where()}: {func} returns a result that depends on a tensor's values ({needed}), and "
            f"an imagined run has none. {experts} it while imagining: "
            "`if not pytracer.is_imagining():`"
        )

    def ran(self, func: Any, args: Any, result: Any) -> None:
        """Notes what an operator that ran has made of choices."""
        if self.way is None:
            return
        if func in _CHOICES:
            dim = args[2] if func is aten.topk.default and len(args) > 2 else -1
            if func is not aten.topk.default:
                dim = args[1] if len(args) > 1 and args[1] is not None else -1
            indices = result[1] if func is aten.topk.default else result
            each = args[1] if func is aten.topk.default else 1
            experts, rows = args[0].shape[dim], indices.numel() // max(each, 1)
            self._choices[indices.untyped_storage()] = _Choice(experts, each, rows)
        elif func in _COPIES:
            self._pass_on(args[0], result[0] if isinstance(result, tuple) else result)
        elif func in _MARKS:
            self._pass_on(args[0], result, marks=True)
        elif func is aten.scatter_.value:  # one-hot
            self._pass_on(args[2], args[0], marks=True)
        elif func in _COUNTS:
            self._count_rows(func, args[0], result)

    def _pass_on(self, source: Any, result: Any, *, marks: bool = False) -> None:
        choice = self._choices.get(source.untyped_storage())
        if choice is not None:
            self._choices[result.untyped_storage()] = choice
            if marks or source.untyped_storage() in self._marked:
                self._marked[result.untyped_storage()] = True

    def _count_rows(self, func: Any, source: Any, result: Any) -> None:
        """Learns how many rows each expert gets, if the operator counts them."""
        storage = source.untyped_storage()
        choice = self._choices.get(storage)
        counts_marks = func is aten.sum.dim_IntList
        if choice is None or counts_marks is not (storage in self._marked):
            return
        if result.dim() == 1 and result.numel() - choice.experts in (0, 1):
            self._learn(choice, result)

    def _learn(self, choice: _Choice, counts: Any) -> Any:
        total = choice.rows * choice.each
        if self.way == "balanced":
            rows = [(total + expert) // choice.experts for expert in range(choice.experts)][::-1]
        else:
            rows = [choice.rows if i < choice.each else 0 for i in range(choice.experts)]
        rows += [0] * (counts.numel() - len(rows))
        if self._known is not None:
            with without_modes():
                values = torch.tensor(rows, dtype=counts.dtype, device="cpu")
            self._known.learn(counts, values)
        return counts

    def result_of(self, func: Any, args: Any) -> Any:
        """What an operator returns whose size depends on a mask; None if the count is unknown."""
        if func is aten.nonzero.default:
            count = self._count(args[0])
            size = None if count is None else (count, args[0].dim())
            return None if size is None else args[0].new_empty(size, dtype=torch.long)
        if func is aten.masked_select.default:
            count = self._count(args[1])
            return None if count is None else args[0].new_empty(count)
        if func is aten.index.Tensor:
            return self._indexed(args[0], args[1])
        if self.way is None:
            return None
        if func in _MASKED_WRITES:
            return args[0] if func is not aten.index_put.default else torch.empty_like(args[0])
        if func is aten.bincount.default:
            choice = self._choices.get(args[0].untyped_storage())
            least = args[2] if len(args) > 2 else 0
            if choice is not None and not (len(args) > 1 and args[1] is not None):
                return self._learn(choice, args[0].new_empty(max(choice.experts, least)))
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
        known = None if self._known is None else self._known.value_of(mask)
        if known is not None and self._known is not None and not self._known.is_guess(mask):
            if self._known.is_assumed(mask):
                self._known.assumes()
            with without_modes():
                return int(known.count_nonzero())
        if is_asked_by(batch_norms.ASKS):  # no rank's batch is empty
            return int(mask.numel())
        if self.way is None:
            return None
        storage = mask.untyped_storage()
        choice = self._choices.get(storage)
        if choice is None:
            return mask.numel() if self.way == "worst" else None
        if mask.numel() * mask.element_size() == storage.nbytes() and choice.each != mask.numel():
            whole = storage.nbytes() // mask.element_size()
            if whole % choice.experts == 0 and mask.dim() > 2:
                return int(whole // choice.experts)  # each choice is marked once
        if self.way == "balanced":
            count: int = -(-mask.numel() // choice.experts)
            return count
        key = (id(storage), mask.storage_offset())
        if key not in choice.asked:
            choice.asked[key] = len(choice.asked)
            choice.kept.append(storage)
        rows: int = mask.numel() // choice.each
        return rows if choice.asked[key] < choice.each else 0
