"""What autograd keeps, read from the graph just before it runs.

Reading it changes nothing: `_raw_saved_*` hands a saved tensor out as it is, without unpacking it,
so no hook is called and no version compared.
"""

from collections.abc import Iterator
from typing import Any

import torch

from pytracer._native import C
from pytracer.capture.looking import is_a

# A walk takes about 2 us a node, so not every graph is walked. Which ones follows from what the
# program does and never from how fast: a structure (the nodes and their edges, whatever the sizes) is
# walked in the first two steps that have it, and then in its 16th, 64th, 256th ... pass.
_ALWAYS = 2
_MOST_STRUCTURES = 256  # then those that come no more are forgotten with the rest
_MOST_PASSES = 8  # of one step; a program may have no optimizer that says when it steps

_FUNCTION = ("_raw_saved_tensors",)  # what an autograd.Function saved
_NAMES: dict[Any, tuple[str, ...]] = {}  # what torch's own nodes save, by their class


class GraphWalks:
    """Notes what is saved before the backward passes of a step.

    Of a step with several passes all are walked, all from one on, or none: they are not alike.
    """

    def __init__(self) -> None:
        """No graph has been seen yet."""
        self._met: dict[int, int] = {}  # structures, and in how many passes
        self._passes = 0  # of this step
        self._walking = False

    def before_backward(self, outputs: Any, structure: int, *, must: bool = False) -> None:
        """`outputs` are what backward begins from. What is not seen otherwise must be walked."""
        if self._passes in (0, _MOST_PASSES):
            self._passes, self._walking = 0, False
        self._passes += 1
        self._walking = self._is_due(structure) or self._walking or must
        if self._walking:
            C.record_saved(list(saved_tensors(outputs)))

    def stepped(self) -> None:
        """An optimizer has: what comes is another step's."""
        self._passes = 0

    def _is_due(self, structure: int) -> bool:
        if len(self._met) > _MOST_STRUCTURES:
            self._met.clear()
        met = self._met[structure] = self._met.get(structure, 0) + 1
        return met <= _ALWAYS or (met >= 16 and _is_power_of_four(met))


def _is_power_of_four(number: int) -> bool:
    return number & (number - 1) == 0 and number.bit_length() % 2 == 1


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
    if issubclass(kind, torch._C._FunctionBase):
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
    functorch: Any = torch._C._functorch
    return functorch.peek_interpreter_stack() is not None


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Each level of a transform wraps what there is in memory once more."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor
