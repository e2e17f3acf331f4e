"""Reads which tensors autograd keeps, from the graph just before it runs.

Reading changes nothing: `_raw_saved_*` returns a saved tensor as it is, without unpacking it, so no
hook is called and no version compared. `csrc/torch/moments.h` decides which graphs are read.
"""

from collections.abc import Iterator
from typing import Any

import torch

from pytracer.basics import private_torch
from pytracer.capture.looking import is_a
from pytracer.data._native import C

_FUNCTION = ("_raw_saved_tensors",)  # the attribute of an autograd.Function
_NAMES: dict[Any, tuple[str, ...]] = {}  # the attributes of torch's own nodes, by class


def saved_tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """Yields every tensor that the graph behind the outputs has saved."""
    for node in nodes(outputs):
        yield from saved_by(node)


def saved_by(node: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that this node has saved."""
    for name in _saved_names(node.__class__):
        yield from _tensors(node, name)


def nodes(outputs: Any) -> Iterator[Any]:
    """Yields every node of the graph behind the outputs, once."""
    left = _roots(outputs)
    seen = set()  # also keeps the nodes' Python objects alive, so that their identities last
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
    # Each is a tensor, or a gradient edge, which names a node.
    return [getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs]


def _saved_names(kind: Any) -> tuple[str, ...]:
    if issubclass(kind, private_torch.python_function):
        return _FUNCTION  # no entry in _NAMES: the class is the program's, and would stay alive
    names = _NAMES.get(kind)
    if names is None:
        _NAMES[kind] = names = tuple(n for n in dir(kind) if n.startswith("_raw_saved_"))
    return names


def _tensors(node: Any, name: str) -> Iterator[torch.Tensor]:
    try:
        saved = getattr(node, name)
    except RuntimeError:  # an earlier backward has freed it
        return
    for one in saved if isinstance(saved, tuple | list) else (saved,):
        tensor = getattr(one, "data", None)
        if is_a(tensor, torch.Tensor):
            yield unwrapped(tensor)
        elif tensor is not None:  # a hook of the program packed it, and will unpack it in the pass
            C.forbid_quiet_passes()


def in_transform() -> bool:
    """Whether a transform of torch.func is active, in which saved-tensor hooks do not run."""
    is_inside: bool = private_torch.functorch.peek_interpreter_stack() is not None
    return is_inside


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor inside; each level of a transform wraps it once."""
    functorch = private_torch.functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor
