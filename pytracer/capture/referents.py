"""What an object refers to, read from where Python and torch keep it: none of the program runs.

Each link has the word by which the program would reach the object: an attribute, an item, a variable
of a closure or of a frame. Weak references refer to nothing.
"""

import contextlib
import functools
import gc
import itertools
import queue
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePath
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any, NamedTuple

import numpy as np
import torch

from pytracer.basics import private_torch
from pytracer.basics.names import short_path
from pytracer.capture import graph
from pytracer.capture.looking import is_a, is_just
from pytracer.data._native import HERE, C

MOST_ITEMS = 300  # of one container: its last
_LAST = slice(-MOST_ITEMS, None)
_FEW_KEYS = 16  # a dictionary with so few names is a record: each name is told apart
_LONGEST_KEY = 40
_LONGEST_ARRAY = 10_000  # of an array of objects: its last

# How a link goes on from the name that the program has for the object before.
ATTRIBUTE = "attribute"  # the name with a dot
SUBMODULE = "submodule"  # the same for a module in a module, by its name or number
WEIGHT = "weight"  # a tensor that belongs to the outermost module
ITEM = "item"  # of a container: the name is still the container's
VARIABLE = "variable"  # a name of its own
SAVED = "saved"  # what a node of a graph has saved
SAME = "same"  # no step worth a word


class Link(NamedTuple):
    """One step from an object to one that it refers to."""

    how: str
    word: str
    value: Any
    bound: int = 0  # how many such objects it may refer to; 0: any number


_Links = Iterator[Link]
_Handler = Callable[[Any], _Links]

# They refer to nothing that a program keeps there; modules and types of others are no data.
_NOTHING = (
    *(bool, int, float, complex, str, bytes, bytearray, range, slice, type(None), type(...)),
    *(CodeType, ModuleType, weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, np.generic, np.dtype),
)
# What runs the program (a test, a notebook, a recording) holds all of it, and names nothing of it.
_MACHINERY = ("pytracer", "_pytest", "pytest", "pluggy", "hypothesis", "IPython", "ipykernel")
name_of: Callable[[type], str] = type.__dict__["__name__"].__get__
module_of: Callable[[type], Any] = type.__dict__["__module__"].__get__
_bases_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_flags_of: Callable[[type], int] = type.__dict__["__flags__"].__get__
_dict_of: Callable[[type], int] = type.__dict__["__dictoffset__"].__get__
_names_of: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__
_FRAMES: dict[type, tuple[str, str]] = {
    GeneratorType: ("generator", "gi_frame"),
    CoroutineType: ("coroutine", "cr_frame"),
    AsyncGeneratorType: ("generator", "ag_frame"),
}
_OF_EXCEPTIONS = ("__traceback__", "__context__", "__cause__", "args")


_SLOTS: dict[int, tuple[type, list[tuple[str, Any]]]] = {}  # by the type's identity, in a search
_ATOMS = frozenset(map(id, (bool, int, float, str, bytes, type(None))))
# They say themselves, and at once, whether they are empty.
_CONTAINERS = frozenset(map(id, (dict, OrderedDict, defaultdict, list, tuple, set, frozenset)))


def is_nothing(value: Any) -> bool:
    """Whether it is a number, a text, or one of Python's own containers without anything in it."""
    kind = id(type(value))
    return kind in _ATOMS or (kind in _CONTAINERS and not value)


def is_machinery(module: object) -> bool:
    """Whether the module of this name runs the program, and is no part of it."""
    return type(module) is str and module.partition(".")[0] in _MACHINERY


class Referents:
    """Lists what objects refer to. `own` are the names of the program's own modules."""

    def __init__(self, own: Iterable[str]) -> None:
        self._own = frozenset(own)
        self._handlers: dict[int, tuple[type, _Handler | None]] = {}  # by the type's identity

    def handler(self, value: object) -> _Handler | None:
        """The function that lists what such an object refers to; None if that is nothing."""
        kind = type(value)
        known = self._handlers.get(id(kind))
        if known is None:
            known = self._handlers[id(kind)] = kind, self._handler_of(kind)
        return known[1]

    def let_go(self) -> None:
        """Keeps none of the program's types any longer."""
        self._handlers.clear()
        _SLOTS.clear()

    def _handler_of(self, kind: type) -> _Handler | None:
        if issubclass(kind, torch.Tensor):
            return _of_tensor
        if issubclass(kind, _NOTHING) or is_machinery(module_of(kind)):
            return None
        if issubclass(kind, type):
            return self._of_class
        for base, handler in (
            *((torch.nn.Module, _of_module), (FunctionType, _of_function)),
            *((dict, _of_dict), (list, _of_list), (tuple, _of_tuple), (deque, _of_deque)),
            *((queue.Queue, _of_queue), (BaseException, _of_exception), (np.ndarray, _of_array)),
            *((TracebackType, _of_traceback), (FrameType, _of_frame), (MethodType, _of_method)),
            *((functools.partial, _of_partial), (BuiltinFunctionType, _of_builtin)),
            (threading.local, _of_thread_local),
        ):
            if issubclass(kind, base):
                return handler
        if any(kind is each for each in _FRAMES):
            return _of_generator
        if kind is type(functools.lru_cache(len)):
            return _of_lru_cache
        if any(base is weakref.WeakKeyDictionary for base in _bases_of(kind)):
            return _of_weak_dict  # an abstract base would hash the program's class
        return _of_node if _is_node(kind) else self._of_object

    def _is_own(self, kind: type) -> bool:
        module = module_of(kind)
        return type(module) is str and module in self._own

    def _of_class(self, kind: Any) -> _Links:
        if self._is_own(kind):
            for name, value in list(_names_of(kind).items()):
                if not (name.startswith("__") and name.endswith("__")):
                    yield Link(ATTRIBUTE, name, value)

    def _of_object(self, value: Any) -> _Links:
        yield from _attributes(value)
        kind = type(value)
        if self._is_own(kind):
            yield Link(VARIABLE, f"class: {name_of(kind)}", kind)
        if not _dict_of(kind) or any(not _flags_of(b) & _HEAP for b in _bases_of(kind)[:-1]):
            # An iterator, a property, a set: what a type of Python's own keeps in C.
            for inner in gc.get_referents(value)[_LAST]:
                yield Link(ITEM, name_of(kind), inner)


_HEAP = 1 << 9  # the flag of types that were made by a class statement


def _attributes(value: Any) -> _Links:
    for name, inner in list(dict.items(C.attributes_of(value))):
        if type(name) is str and not is_nothing(inner):
            yield Link(ATTRIBUTE, name, inner)
    kind = type(value)
    known = _SLOTS.get(id(kind)) or _SLOTS.setdefault(id(kind), (kind, [*_slots_of(kind)]))
    for name, slot in known[1]:
        with contextlib.suppress(AttributeError):  # it is empty
            yield Link(ATTRIBUTE, name, slot.__get__(value))


def _slots_of(kind: type) -> Iterator[tuple[str, Any]]:
    for base in _bases_of(kind):
        for name, slot in list(_names_of(base).items()):
            if type(slot) is MemberDescriptorType and _flags_of(base) & _HEAP:
                yield name, slot


def _of_dict(value: Any) -> _Links:
    word, names = _container(value, dict), dict.__len__(value) <= _FEW_KEYS
    last = None
    with contextlib.suppress(RuntimeError):  # another thread is putting something in
        for key, inner in [*itertools.islice(reversed(dict.items(value)), MOST_ITEMS)]:
            if is_nothing(inner) and is_nothing(key):
                continue
            if names and type(key) is str:
                yield Link(ITEM, f"{word}[{_text_of(key)}]", inner)
                continue
            last = last or f"{word}[{_text_of(key)}]"
            yield Link(ITEM, last, inner)
            yield Link(ITEM, f"key of {word}", key)
    if type(value) is not dict:
        yield from _attributes(value)


def _text_of(key: Any) -> str:
    """The key as the program writes it, if that calls nothing of the program's; else its type."""
    if is_just(key, str, int, float, bool, type(None), torch.dtype, torch.device):
        text = repr(key)
    elif is_just(key, tuple, torch.Size):
        text = f"({', '.join(map(_text_of, key))})"
    else:
        text = name_of(type(key))
    return text if len(text) <= _LONGEST_KEY else f"{text[:_LONGEST_KEY]}..."


def _container(value: object, kind: type) -> str:
    return name_of(kind if type(value) is kind else type(value))


def _of_list(value: Any) -> _Links:
    word = _container(value, list)
    for inner in list.__getitem__(value, _LAST):
        yield Link(ITEM, word, inner)
    if type(value) is not list:
        yield from _attributes(value)


def _of_tuple(value: Any) -> _Links:
    word = _container(value, tuple)
    for inner in tuple.__getitem__(value, _LAST):
        yield Link(ITEM, word, inner)
    if type(value) is not tuple:
        yield from _attributes(value)


def _of_deque(value: Any) -> _Links:
    bound: int = deque.__dict__["maxlen"].__get__(value) or 0
    with contextlib.suppress(RuntimeError):  # another thread is putting something in
        for inner in [*itertools.islice(deque.__reversed__(value), MOST_ITEMS)]:
            yield Link(ITEM, _container(value, deque), inner, bound)
    if type(value) is not deque:
        yield from _attributes(value)


def _of_queue(value: Any) -> _Links:
    bound = C.attributes_of(value).get("maxsize")
    for link in _attributes(value):
        yield link._replace(bound=bound if type(bound) is int and bound > 0 else 0)


def _of_module(module: Any) -> _Links:
    for name, inner in list(dict.items(C.attributes_of(module))):
        if type(name) is not str or is_nothing(inner):
            continue
        if name == "_modules":
            yield from _named(SUBMODULE, inner)
        elif name == "_parameters":
            yield from (Link(WEIGHT, "parameter", tensor) for _, tensor in C.items_of(inner))
        elif name == "_buffers":
            yield from _named(ATTRIBUTE, inner)
        else:
            yield Link(ATTRIBUTE, name, inner)


def _named(how: str, container: Any) -> _Links:
    for name, inner in C.items_of(container):
        if type(name) is str:
            yield Link(how, name, inner)


def _of_function(function: Any) -> _Links:
    code, name = function.__code__, function.__qualname__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # it is empty
            yield Link(VARIABLE, f"closure of {name}: {variable}", cell.cell_contents)
    if function.__defaults__:
        names = code.co_varnames[: code.co_argcount][-len(function.__defaults__) :]
        for variable, value in zip(names, function.__defaults__, strict=False):
            yield Link(VARIABLE, f"default of {name}: {variable}", value)
    for variable, value in dict.items(function.__kwdefaults__ or {}):
        yield Link(VARIABLE, f"default of {name}: {variable}", value)
    # To ask for its attributes would make a dictionary for them.
    others = (function.__globals__, function.__builtins__, function.__kwdefaults__)
    for held in gc.get_referents(function):
        if type(held) is dict and not any(held is each for each in others):
            for attribute, value in list(held.items()):
                if type(attribute) is str:
                    yield Link(ATTRIBUTE, attribute, value)


def _of_method(method: Any) -> _Links:
    yield Link(ATTRIBUTE, "__self__", method.__self__)
    yield Link(ATTRIBUTE, "__func__", method.__func__)


def _of_builtin(function: Any) -> _Links:
    yield Link(ATTRIBUTE, "__self__", function.__self__)


def _of_partial(value: Any) -> _Links:
    for name in ("args", "keywords", "func"):
        yield Link(ATTRIBUTE, name, functools.partial.__dict__[name].__get__(value))
    yield from _attributes(value)


def _of_lru_cache(function: Any) -> _Links:
    bound = _size_of(function)
    attributes = C.attributes_of(function)
    wrapped = attributes.get("__wrapped__")
    for inner in gc.get_referents(function)[_LAST]:
        if inner is not wrapped and inner is not attributes and not is_a(inner, type):
            yield Link(ITEM, "lru_cache", inner, bound)
    yield from _attributes(function)


def _size_of(function: Any) -> int:
    """The size that the cache was given, where functools keeps it; 0 for no bound."""
    told = C.attributes_of(function).get("cache_parameters")
    if type(told) is FunctionType and told.__code__.co_filename == functools.__file__:
        named = dict(zip(told.__code__.co_freevars, told.__closure__ or (), strict=False))
        with contextlib.suppress(KeyError, ValueError):
            size = named["maxsize"].cell_contents
            return size if type(size) is int else 0
    return 0


def _of_generator(value: Any) -> _Links:
    word, name = _FRAMES[type(value)]
    frame = getattr(value, name)
    if frame is not None:
        for variable, inner in C.locals_of(frame).items():
            yield Link(VARIABLE, f"{word} {_place_of(frame)}: {variable}", inner)


def _of_exception(value: Any) -> _Links:
    for name in _OF_EXCEPTIONS:
        inner = BaseException.__dict__[name].__get__(value)
        if inner is not None:
            yield Link(ITEM, f"{name_of(type(value))}.{name}", inner)
    yield from _attributes(value)


def _of_traceback(value: Any) -> _Links:
    yield Link(SAME, "", value.tb_frame)
    yield Link(SAME, "", value.tb_next)


def _of_frame(frame: Any) -> _Links:
    """A frame is kept with its callers', also after these have returned."""
    if not frame.f_code.co_filename.startswith(f"{HERE}"):
        for variable, inner in C.locals_of(frame).items():
            yield Link(ITEM, f"frame of {_place_of(frame)}: {variable}", inner)
    yield Link(SAME, "", frame.f_back)


def _place_of(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} ({name_of_file(code.co_filename)}:{frame.f_lineno})"


def name_of_file(path: str) -> str:
    """The file relative to where the program runs, or else its bare name."""
    short = short_path(path, "")
    return PurePath(short).name if PurePath(short).is_absolute() else short


def _of_array(value: Any) -> _Links:
    yield Link(ATTRIBUTE, "base", np.ndarray.__dict__["base"].__get__(value))
    if np.ndarray.__dict__["dtype"].__get__(value).hasobject:
        items = _items_of_array(value)
        for inner in itertools.islice((one for one in items if not is_nothing(one)), MOST_ITEMS):
            yield Link(ITEM, "ndarray", inner)
    if type(value) is not np.ndarray:
        yield from _attributes(value)


def _items_of_array(value: Any) -> Iterator[Any]:
    """The objects in an array, its last ones first: a log that was made once is empty at its end."""
    flat = np.ndarray.__dict__["flat"].__get__(value)
    yield from np.ndarray.tolist(flat[-_LONGEST_ARRAY:])[::-1]


def _of_weak_dict(value: Any) -> _Links:
    """Its keys or its values may go, but what the others refer to stays."""
    word = name_of(type(value))
    for inner in dict.values(C.attributes_of(value).get("data") or {}):
        yield Link(ITEM, word, inner)


def _of_thread_local(value: Any) -> _Links:
    """The attributes that each thread has of its own."""
    for threads in gc.get_referents(value):
        if type(threads) is dict:
            for own in list(threads.values()):
                yield from _named(ATTRIBUTE, own if type(own) is dict else {})


# ---------------------------------------------------------------- torch


def _of_tensor(tensor: Any) -> _Links:
    kind = type(tensor)
    attributes = C.attributes_of(tensor)
    # torch's own kinds have attributes that are no data of the program's, but the tensors inside.
    is_own = is_just(tensor, *_PLAIN) or not _is_of_torch(kind)
    for name, value in list(dict.items(attributes)):
        if type(name) is str and (is_own or is_a(value, torch.Tensor)):
            yield Link(ATTRIBUTE, name, value)
    yield Link(ATTRIBUTE, "grad", C.gradient_of(tensor))
    for hooks in gc.get_referents(tensor):
        if is_a(hooks, dict) and hooks is not attributes:
            yield Link(ATTRIBUTE, "hooks", hooks)
    yield Link(ITEM, "grad_fn", grad_fn_of(tensor))


def _is_of_torch(kind: type) -> bool:
    module = module_of(kind)
    return type(module) is str and module.startswith("torch.")


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_GRAD_FN: Any = torch.Tensor.grad_fn


def grad_fn_of(tensor: Any) -> Any:
    """The node that made the tensor, whatever a subclass would say."""
    with contextlib.suppress(RuntimeError):  # a view whose base was changed in place
        if is_just(tensor, *_PLAIN):
            return tensor.grad_fn
        with private_torch.without_torch_function():
            return _GRAD_FN.__get__(tensor)
    return None


def _is_node(kind: type) -> bool:
    return any(
        type(_names_of(base).get("next_functions")) is GetSetDescriptorType
        for base in _bases_of(kind)
    )


def _of_node(node: Any) -> _Links:
    for following, _ in node.next_functions:
        yield Link(SAME, "", following)
    for tensor in graph.saved_by(node):
        yield Link(SAVED, "saved tensor", tensor)
    kind = type(node)
    if issubclass(kind, private_torch.python_function):
        for name, value in list(dict.items(C.attributes_of(node))):
            if type(name) is str:
                word = f"{name_of(kind).removesuffix('Backward')}'s ctx.{name}"
                yield Link(ITEM, word, value)
    elif name_of(kind) == "AccumulateGrad":
        yield Link(ITEM, "leaf", node.variable)
