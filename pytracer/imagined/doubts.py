"""Signs that an imagined run counts memory that no card would take.

Torch runs operators for its own bookkeeping: to propagate shapes and placements, to take an operator
apart, to know a result's shape. On a card those make no memory. Whoever asked for a tensor stands on
the stack, between the operator and the program.

A sharded tensor must not be larger on this rank than the rank's share of it.
"""

import contextlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from pytracer.basics.private_torch import of_this_rank, tree_iter

_TORCH, _OURS = (f"{Path(file).parent}/" for file in (torch.__file__, Path(__file__).parent))
# Where torch computes what a result would be.
_BOOKKEEPING = (
    "_decomp/",
    "_dynamo/",
    "_export/",
    "_higher_order_ops/",
    "_inductor/",
    "_meta_registrations.py",
    "_prims/",
    "_prims_common/",
    "_refs/",
    "_subclasses/",
    "distributed/tensor/_op_schema.py",
    "distributed/tensor/_sharding_prop.py",
    "export/",
    "fx/experimental/",
    "fx/passes/",
)
# They run the operators that the program asked for.
_WRAPPERS = (
    "_dynamo/eval_frame.py",
    "_dynamo/external_utils.py",
    "_inductor/utils.py",
    "_prims/rng_prims.py",
)
_SHARDED = "torch.distributed.tensor"  # the module of the class of sharded tensors


class Doubts:
    """What an imagined run has seen that no card would do."""

    def __init__(self) -> None:
        """Nothing is doubtful yet."""
        self._bookkeeping: dict[str, int] = {}  # bytes by the file of torch that asked
        self._oversized: dict[tuple[int, int], int] = {}  # how often, by bytes here and the share
        self._places: dict[CodeType, str | None] = {}
        self._are_asked = True

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What a compiler does inside the block it does for the program."""
        self._are_asked = False
        try:
            yield
        finally:
            self._are_asked = True

    def made(self, tensors: list[Any]) -> None:
        """Looks who asked for the tensors that an operator has just made."""
        if not self._are_asked:
            return
        frame: Any = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code not in self._places:
                self._places[code] = _place(code.co_filename)
            place = self._places[code]
            if place is None:  # the program
                return
            if place:
                size = sum(one.untyped_storage().nbytes() for one in tensors)
                self._bookkeeping[place] = self._bookkeeping.get(place, 0) + size
                return
            frame = frame.f_back

    def given(self, arguments: Any) -> None:
        """Looks at the sharded tensors among the arguments of an operator."""
        sharded = getattr(sys.modules.get(_SHARDED), "DTensor", None)
        if sharded is None:
            return
        for one in tree_iter(arguments):
            if isinstance(one, sharded):
                here, share = of_this_rank(one).numel(), _share(one)
                if here > share:
                    size = one.element_size()
                    key = (here * size, share * size)
                    self._oversized[key] = self._oversized.get(key, 0) + 1

    def document(self) -> list[dict[str, Any]]:
        """What was seen, for the trace."""
        asked = [{"asked_by": place, "bytes": size} for place, size in self._bookkeeping.items()]
        large = [{"bytes": here, "share": share} for here, share in self._oversized]
        return asked + large


def _place(file: str) -> str | None:
    """The file of torch's bookkeeping; "" for other code of torch's or ours, None for the program."""
    if file.startswith(_OURS):
        return ""
    if not file.startswith(_TORCH):
        return None
    inside = file.removeprefix(_TORCH)
    return inside if inside.startswith(_BOOKKEEPING) and not inside.startswith(_WRAPPERS) else ""


def _share(tensor: Any) -> int:
    """The most elements of the tensor that one rank has. The first ranks' shares are the largest."""
    sizes = list(tensor.shape)
    for ranks, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        at = getattr(placement, "dim", None)  # only a shard has it
        if at is not None:
            sizes[at] = math.ceil(sizes[at] / ranks)
    return math.prod(sizes)
