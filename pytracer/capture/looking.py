"""Looks into the program's objects without running any of its code.

An object's kind is read from its type: `isinstance` would ask the object, and a proxy would answer.
Its contents are read where Python and torch keep them, so no override of the program is called.
"""

import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, overload

import torch

from pytracer.data._native import HERE, C

T = TypeVar("T")


def packages_on(path: Iterable[object]) -> Iterator[str]:
    """The folders on Python's path that packages are installed in: an environment may see another's."""
    for folder in path:
        if isinstance(folder, str) and Path(folder).name in ("site-packages", "dist-packages"):
            yield folder


# The folders of torch, of pytracer, of Python and of installed packages.
INSTALLED = tuple(
    {
        f"{folder}{os.sep}"
        for folder in (
            str(Path(torch.__file__).parent),
            str(HERE),
            *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
            *packages_on(sys.path),
        )
    }
)


@overload
def is_a(value: Any, kinds: type[T]) -> TypeGuard[T]: ...
@overload
def is_a(value: Any, kinds: tuple[type, ...]) -> bool: ...
def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether the value's type is one of these, whatever its `__class__` claims."""
    return issubclass(type(value), kinds)


def is_just(value: Any, *kinds: type) -> bool:
    """Whether the value's type is one of these, and none derived from it.

    Types are compared by identity: to compare them otherwise would ask the program's metaclass.
    """
    return any(type(value) is each for each in kinds)


def submodules_of(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Returns the direct submodules by name, without those that are None."""
    held = C.items_of(C.attributes_of(module).get("_modules"))
    return {name: one for name, one in held if one is not None}


def named_modules_of(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields each module once with its path, in the order of `root.named_modules()`."""
    left, seen = [("", root)], set()
    while left:
        path, one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield path, one
            inner = submodules_of(one).items()
            left += [(f"{path}.{name}" if path else name, sub) for name, sub in inner][::-1]


def modules_of(roots: Iterable[torch.nn.Module | None]) -> Iterator[torch.nn.Module]:
    """Yields each module once, in order. A module may contain one that contains it."""
    left, seen = [*roots][::-1], set()
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            left += [*submodules_of(one).values()][::-1]


def parameters_of(roots: Iterable[torch.nn.Module | None]) -> Iterator[torch.Tensor]:
    """Yields the parameters of these modules and all inside; a shared one may come twice."""
    return _tensors_of(roots, "_parameters")


def buffers_of(roots: Iterable[torch.nn.Module | None]) -> Iterator[torch.Tensor]:
    """Yields the buffers of these modules and all inside; a shared one may come twice."""
    return _tensors_of(roots, "_buffers")


def _tensors_of(roots: Iterable[torch.nn.Module | None], kind: str) -> Iterator[torch.Tensor]:
    for module in modules_of(roots):
        for _, tensor in C.items_of(C.attributes_of(module).get(kind)):
            if tensor is not None:
                yield tensor
