"""Which of the program's variables hold tensors when a trace ends: names for what a leak keeps.

Looked at once, at the end, and only names, addresses and counts are kept. On Python 3.11 and 3.12
`frame.f_locals` leaves a copy of the variables behind in the frame, which would keep them alive:
the copy is emptied again, unless the program holds that very dictionary itself.
"""

import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from pytracer._native import C
from pytracer.capture.labels import tensors_in, unheard

_MOST_TENSORS = 1_000  # of one variable
_MOST_NODES = 5_000  # of one variable's graph; beyond that it is large enough to name
_MOST_VARIABLES = 200
_DEEPEST = 30  # frames
_LIBRARIES = ("/torch/", "/pytracer/", "<frozen ")


def variables_of(frame: FrameType | None) -> list[dict[str, Any]]:
    """The tensors that the frame's and its callers' variables hold, named."""
    try:
        return _variables_of(frame)
    except Exception:
        C.count_callback_error()
        return []


@unheard
def _variables_of(frame: FrameType | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    seen_globals: set[int] = set()
    for _ in range(_DEEPEST):
        if frame is None:
            break
        if not any(part in frame.f_code.co_filename for part in _LIBRARIES):
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                rows += _held_by(_locals_of(frame))
            if id(frame.f_globals) not in seen_globals:
                seen_globals.add(id(frame.f_globals))
                rows += _held_by(list(frame.f_globals.items()))
        frame = frame.f_back
    return rows[:_MOST_VARIABLES]


def _locals_of(frame: FrameType) -> list[tuple[str, Any]]:
    """Of a function; the variables of a module are its globals."""
    values = frame.f_locals
    found = list(values.items())
    # The frame, `values` and the call itself; anyone else who holds it got it from locals().
    if sys.version_info < (3, 13) and sys.getrefcount(values) <= 3:
        values.clear()
    return found


def _held_by(variables: list[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    for name, value in variables:
        if name.startswith("__") or not isinstance(value, torch.Tensor | dict | list | tuple):
            continue
        addresses, nodes = [], 0
        for tensor, _ in zip(tensors_in(value), range(_MOST_TENSORS), strict=False):
            if isinstance(tensor, torch.nn.Parameter):
                continue
            addresses.append(_address(tensor))
            if tensor.requires_grad and not tensor.is_leaf:
                nodes += _graph_nodes(tensor.grad_fn, _MOST_NODES - nodes)
        if any(addresses) or nodes:
            yield {"name": name, "addresses": [a for a in addresses if a], "graph_nodes": nodes}


def _address(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # sparse, meta, freed: no storage to speak of
        return 0


def _graph_nodes(root: Any, most: int) -> int:
    """How many autograd nodes a tensor keeps alive, counted as far as `most`."""
    seen: set[Any] = set()
    todo = [root]
    while todo and len(seen) < most:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo.extend(following for following, _ in node.next_functions)
    return len(seen)
