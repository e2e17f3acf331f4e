"""Finds the program's variables that hold tensors when a trace ends, to name what a leak keeps.

It looks once, at the end, and keeps only names, addresses and counts. It changes neither the
variables, nor dictionaries that the program got from `locals()`, nor how long objects live.
"""

import contextlib
import inspect
import itertools
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch

from pytracer._native import HERE, C
from pytracer.capture import graph
from pytracer.capture.labels import contents
from pytracer.capture.looking import is_a

_MOST_ITEMS = 300  # of one container
_LAST = slice(-_MOST_ITEMS, None)
_MOST_VISITS = 3_000  # of one variable
_DEEPEST_CONTAINER = 3
_DEEPEST_ATTRIBUTE = 2  # self.buffer.rows
_MOST_LOOKS = 50_000  # of one frame, at variables, attributes and items
# Objects whose attributes are no data of the program's own.
_NO_RECORDS = (type, ModuleType, FunctionType, torch.nn.Module)
_MOST_NODES = 5_000  # of one variable's graph
_MOST_SAVED = 2_000  # tensors of one graph: enough to recognise it
_MOST_VARIABLES = 200
_DEEPEST = 30  # frames
# The folders of torch and pytracer, whole: a program may be in a folder of the same name.
_LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{HERE}{os.sep}", "<frozen ")
# A notebook's own code holds everything of the user's in dicts of its own. Part of the paths.
_NOTEBOOKS = tuple(f"{os.sep}{name}{os.sep}" for name in ("IPython", "ipykernel"))


def variables_of(frame: FrameType | None) -> list[dict[str, Any]]:
    """Returns the tensors that variables of the frame, its callers and the main program hold."""
    rows: list[dict[str, Any]] = []
    seen_globals: set[int] = set()
    for _ in range(_DEEPEST):
        if frame is None:
            break
        if not _is_of_a_library(frame.f_code.co_filename):
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # otherwise its locals are its globals
                rows += _held_by(C.locals_of(frame).items())
            if id(frame.f_globals) not in seen_globals:
                seen_globals.add(id(frame.f_globals))
                rows += _held_by(list(dict.items(frame.f_globals)))
        frame = frame.f_back
    main = vars(sys.modules["__main__"])  # where a notebook's cells keep their variables
    if id(main) not in seen_globals:
        rows += _held_by(list(dict.items(main)))
    return rows[:_MOST_VARIABLES]


def _is_of_a_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or any(part in file for part in _NOTEBOOKS)


def _held_by(variables: Iterable[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    looks, bounds = iter(range(_MOST_LOOKS)), dict[str, int]()
    for name, value in _with_attributes(variables):
        if type(value) is deque and value.maxlen is not None:
            bounds[name] = value.maxlen
        if name.startswith("__"):
            continue
        tensors = list(_tensors(value, looks))
        addresses, saved = _addresses(tensors), _saved_by_graph(tensors)
        if next(looks, None) is None:
            return
        if addresses or saved:
            yield {
                "name": name,
                "addresses": sorted(addresses),
                "graph_addresses": sorted(saved),
                "behind_numbers": sorted(_addresses(filter(_is_number_of_many, tensors))),
                "bound": bounds.get(name, 0),
            }


def _with_attributes(variables: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields the variables, attributes of their objects, and attributes of those.

    `self` is followed by `self.history`, and later by `self.buffer.rows`. Attributes of a module's
    attributes belong to the model.
    """
    level = [(name, value, _DEEPEST_ATTRIBUTE) for name, value in variables]
    while level:
        yield from ((name, value) for name, value, _ in level)
        level = [
            (f"{name}.{key}", attribute, 0 if is_a(value, torch.nn.Module) else depth - 1)
            for name, value, depth in level
            if depth and not is_a(value, (type, ModuleType, FunctionType, torch.Tensor))
            for key, attribute in _public(value)
        ]


def _public(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the object's public attributes, as far as its dictionary has them."""
    for key, attribute in list(C.attributes_of(value).items())[:_MOST_ITEMS]:
        if type(key) is str and not key.startswith("_"):
            yield key, attribute


def _tensors(value: Any, looks: Iterator[int]) -> Iterator[torch.Tensor]:
    """Yields the tensors in Python's own containers, and in objects that lie in these.

    A long container is read only at its end, where a leak would be.
    """
    todo = [(value, _DEEPEST_CONTAINER)]
    for _ in itertools.islice(looks, _MOST_VISITS):
        if not todo:
            return
        item, depth = todo.pop()
        if is_a(item, torch.Tensor):
            if not is_a(item, torch.nn.Parameter):
                yield item
        elif depth and is_a(item, dict):
            inner = itertools.islice(reversed(dict.values(item)), _MOST_ITEMS)
            todo.extend((part, depth - 1) for part in inner)
        elif depth and is_a(item, list):
            todo.extend((part, depth - 1) for part in list.__getitem__(item, _LAST))
        elif depth and is_a(item, tuple):
            todo.extend((part, depth - 1) for part in tuple.__getitem__(item, _LAST))
        elif depth and type(item) is deque:
            with contextlib.suppress(RuntimeError):  # another thread is putting something in
                last = itertools.islice(reversed(item), _MOST_ITEMS)
                todo.extend([(part, depth - 1) for part in last])
        elif depth and type(item).__name__.endswith("Cache"):  # transformers' keys and values
            todo.append((contents(item), depth))
        elif 0 < depth < _DEEPEST_CONTAINER and not is_a(item, _NO_RECORDS):
            todo.extend((part, depth - 1) for _, part in _public(item))


def _addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {C.memory_of(tensor)[0] for tensor in tensors} - {0}


def _is_number_of_many(tensor: torch.Tensor) -> bool:
    """Whether one element has the memory of many: some of torch's losses reduce in place."""
    address, storage_bytes, elements, element_bytes = C.memory_of(tensor)
    return bool(address and elements == 1 and storage_bytes > 64 * element_bytes)


def _saved_by_graph(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Returns the addresses of tensors that the graphs behind these tensors have saved."""
    ends = []
    for tensor in tensors:
        with contextlib.suppress(RuntimeError):  # a view whose base was changed in place
            if tensor.grad_fn is not None:
                ends.append(tensor)
    saved: set[int] = set()
    for node in itertools.islice(graph.nodes(ends), _MOST_NODES):
        if len(saved) >= _MOST_SAVED:
            break
        saved |= _addresses(graph.saved_by(node))
    return saved
