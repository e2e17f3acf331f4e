"""What autograd keeps, read from the graph just before it runs.

Reading it changes nothing: `_raw_saved_*` hands a saved tensor out as it is, without unpacking it,
so no hook is called and no version compared. Which graphs are read, `csrc/torch/moments.h` says.
"""

from collections.abc import Iterator
from typing import Any

import torch

from pytracer import private_torch
from pytracer.capture.looking import is_a

_FUNCTION = ("_raw_saved_tensors",)  # what an autograd.Function saved
_NAMES: dict[Any, tuple[str, ...]] = {}  # what torch's own nodes save, by their class


def saved_tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """Every tensor that the graph behind the outputs has saved."""
    for node in nodes(outputs):
        yield from saved_by(node)


def saved_by(node: Any) -> Iterator[torch.Tensor]:
    """What this node has saved."""
    for name in _saved_names(node.__class__):
        yield from _tensors(node, name)


def nodes(outputs: Any) -> Iterator[Any]:
    """Every node of the graph behind the outputs, once."""
    left = _roots(outputs)
    seen = set()  # which also keeps a node's Python object, its identity, while we are here
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        left += [following for following, _ in node.next_functions]


def _roots(outputs: Any) -> list[Any]:
    if is_a(outputs, torch.Tensor):
        outputs = (outputs,)
    # Tensors, or gradient edges, which name a node.
    return [getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs]


def _saved_names(kind: Any) -> tuple[str, ...]:
    if issubclass(kind, private_torch.python_function):
        return _FUNCTION  # its class may hold whatever its author liked: it is not kept here
    names = _NAMES.get(kind)
    if names is None:
        _NAMES[kind] = names = tuple(n for n in dir(kind) if n.startswith("_raw_saved_"))
    return names


def _tensors(node: Any, name: str) -> Iterator[torch.Tensor]:
    try:
        saved = getattr(node, name)
    except RuntimeError:  # an earlier backward has given it up
        return
    for one in saved if isinstance(saved, tuple | list) else (saved,):
        tensor = getattr(one, "data", None)
        if is_a(tensor, torch.Tensor):  # else it is what the program's own hook packed
            yield _unwrapped(tensor)


def in_transform() -> bool:
    """Whether one of torch.func's is at work: it keeps saved-tensor hooks out."""
    is_inside: bool = private_torch.functorch.peek_interpreter_stack() is not None
    return is_inside


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Each level of a transform wraps what there is in memory once more."""
    functorch = private_torch.functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor
