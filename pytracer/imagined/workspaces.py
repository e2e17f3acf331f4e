"""The workspaces that libraries take from torch's allocator beside tensors."""

import os
import re
from typing import Any

import torch

from pytracer.basics import private_torch
from pytracer.data import schema
from pytracer.data._native import C
from pytracer.imagined.cards import Card

aten = torch.ops.aten

_CUBLAS = frozenset(
    (
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.mv.default,
        aten.addmv.default,
        aten.dot.default,
        aten.addbmm.default,
        aten.mm.out,
        aten.addmm.out,
        aten.bmm.out,
        aten.baddbmm.out,
        aten._addmm_activation.default,
    )
)
_GROUPED = aten._grouped_mm.default
_LT = frozenset((aten.addmm.default, aten.addmm.out, aten._addmm_activation.default))
_LT_BYTES = 1 << 20
# Later releases share cuBLAS's workspace with cuBLASLt (CublasHandlePool.cpp).
_LT_HAS_ITS_OWN = tuple(map(int, torch.__version__.split(".")[:2])) <= (2, 11)


class Workspaces:
    """cuBLAS takes a workspace per thread and stream at its first call. torch never frees it."""

    def __init__(self, card: Card, device: Any) -> None:
        """`device`: the imagined device that holds the workspaces."""
        self._device = device
        self._has_grouped_products = card.capability[0] in (9, 10)
        self._bytes = _asked() or card.cublas_workspace
        self._there: set[tuple[str, bool]] = set()

    def used_by(self, func: Any, args: Any) -> None:
        """Takes the workspaces of an operator that ran. On a card, backward has a thread of its own."""
        if func not in _CUBLAS and not (func is _GROUPED and self._is_one_by_one(args)):
            return
        backward = private_torch.backward_pass_number() != -1
        self._take("cublas", backward, self._bytes)
        if func in _LT and _LT_HAS_ITS_OWN:
            self._take("cublaslt", backward, _LT_BYTES)

    def _is_one_by_one(self, args: Any) -> bool:
        """Whether a product of groups is one of cuBLAS for each group (native/cuda/GroupedBlas.cpp)."""
        is_bfloat16 = all(one.dtype == torch.bfloat16 for one in args[:2])
        return not (is_bfloat16 and self._has_grouped_products)

    def _take(self, library: str, backward: bool, amount: int) -> None:
        if (library, backward) not in self._there:
            self._there.add((library, backward))
            self._device.keep(amount, C.intern_label(schema.CATEGORY["workspaces"], library))


def _asked() -> int:
    """The bytes in CUBLAS_WORKSPACE_CONFIG, such as ":4096:2:16:8" in KiB; 0 if it is not set."""
    text = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    return sum(int(size) * int(count) for size, count in re.findall(r":(\d+):(\d+)", text)) << 10
