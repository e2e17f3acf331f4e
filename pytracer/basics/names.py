"""Names of modules, files and lines as people read them."""

import contextlib
import re
from collections.abc import Collection, Iterable
from pathlib import PurePath

from pytracer.basics import environment

_INSTALLED = re.compile(r"^.*/((site|dist)-packages|lib/python3\.\d+)/")
_LAYER = re.compile(r"(?<![^.])(\d+|\[\d+\])(?![^.])")
_MOST_NUMBERS = 8
_LONG_LINE = 40


def short_path(path: str, directory: str) -> str:
    """The path relative to where packages or Python are installed, or to where the program ran."""
    path = _INSTALLED.sub("", path)
    home = directory or environment.working_directory()
    with contextlib.suppress(ValueError):
        path = str(PurePath(path).relative_to(home))
    return path


def is_installed(path: str) -> bool:
    """Whether the file is a library's or Python's own."""
    return _INSTALLED.match(path) is not None


def short_line(text: str) -> str:
    """A line for a screen: a long absolute path is cut to its last two parts."""
    is_long = text.startswith("/") and len(text) > _LONG_LINE
    return f".../{'/'.join(text.split('/')[-2:])}" if is_long else text


def first_layer(path: str) -> str:
    """A module's path up to its first number, or all of it."""
    first = _LAYER.search(path)
    return path[: first.end()] if first else path


def called_layer(path: str, called: Collection[str]) -> str:
    """The outermost module at or below the path's layer that is called, or all of the path.

    A layer that is a ModuleList is never called itself, but its members are. An encoder in a
    Sequential is no layer, but has layers.
    """
    end = len(first_layer(path))
    while path[:end] not in called and end < len(path):
        further = path.find(".", end + 1)
        end = further if further >= 0 else len(path)
    return _layer_inside(path, end, called) if is_bare(path[:end]) else path[:end]


def _layer_inside(path: str, end: int, called: Collection[str]) -> str:
    """The layer inside a Sequential's child that is a whole stack, such as an encoder.

    The layers of a stack have modules of their own. A layer may have modules with numbers, too, such
    as those of an inner Sequential, but they have none.
    """
    inner = _LAYER.search(path, end + 1)
    layer = path[: inner.end()] if inner else ""
    is_stack = layer in called and any(name.startswith(f"{layer}.") for name in called)
    return layer if is_stack else path[:end]


def layers_alike(path: str) -> str:
    """The path with a star for each layer's number: alike in all layers of a stack."""
    return _LAYER.sub("*", path)


def is_nameless(pattern: str) -> bool:
    """Whether a pattern has numbers only, as `*.*` for the layers of Sequentials in a Sequential."""
    return "*" in pattern and not pattern.strip("*.")


def is_bare(path: str) -> bool:
    """Whether it is the path of a Sequential's child, `[0]`, or a pattern of several."""
    return layers_alike(path) == "*"


def numbers_text(paths: Iterable[str]) -> str:
    """Children of a Sequential, which have only numbers as names, `[0]` and `[2]`: `[0, 2]`."""
    numbers = sorted({int(path.strip("[]")) for path in paths})
    whole = len(numbers) <= _MOST_NUMBERS
    return f"[{', '.join(map(str, numbers)) if whole else f'{numbers[0]} ... {numbers[-1]}'}]"
