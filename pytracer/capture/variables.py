"""Finds the program's variables that hold tensors when a trace ends, and the way to what they hold.

It looks once, at the end, and keeps only names, addresses and counts. It changes neither the
variables, nor dictionaries that the program got from `locals()`, nor how long objects live. The
search goes from all variables at once, one step after the other: so it finds the shortest way.
"""

import dis
import gc
import inspect
import itertools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from pytracer.basics import private_torch
from pytracer.capture import referents
from pytracer.capture.looking import INSTALLED, is_a
from pytracer.capture.referents import Link, Referents
from pytracer.data._native import HERE, C

_MOST_OBJECTS = 100_000  # in one search
_MOST_SECONDS = 2.0
_MOST_PLACES = 20_000
_MOST_SAVED = 2_000  # addresses of one place: enough to recognise it
_MOST_VARIABLES = 200
_DEEPEST = 30  # frames
_MOST_THREADS = 64
_LONGEST_CODE = 20_000  # bytes: reading it takes about 20 ms
# The folders of torch and pytracer, whole: a program may be in a folder of the same name.
_LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{HERE}{os.sep}", "<frozen ")
_CYCLE = "a cycle: "  # before the name of what no variable leads to
# A notebook's own code holds everything of the user's in dicts of its own. Part of the paths.
_NOTEBOOKS = tuple(f"{os.sep}{name}{os.sep}" for name in ("IPython", "ipykernel"))


def variables_of(frame: FrameType | None) -> dict[str, Any]:
    """Returns the program's variables that hold tensors, and how the search for them ended."""
    # What the search makes would hasten the end of the program's cycles.
    return C.without_collector(lambda: _found_from(frame))


def _found_from(frame: FrameType | None) -> dict[str, Any]:
    search = _Search(_Program(frame))
    try:
        search.run()
        return {"variables": search.rows(), "search_cut": search.cut}
    finally:
        search.let_go()


# ---------------------------------------------------------------- where the search begins


class _Root(NamedTuple):
    """A variable of the program, without its value: places refer to each other in circles."""

    name: str
    where: str  # before its name: "thread loader: "
    file: str
    code: CodeType | None  # that gives it its value, if that is known


class _Program:
    """The program's frames and modules."""

    def __init__(self, frame: FrameType | None) -> None:
        self._frame = frame
        modules = [(n, C.attributes_of(m)) for n, m in [*sys.modules.items()] if _is_module(m)]
        self._own = [(name, held) for name, held in modules if _is_own(held)]
        self._codes = dict[int, CodeType]()  # by the identity of a module's globals
        self._seen = set[int]()

    def names(self) -> list[str]:
        """The names of the program's own modules."""
        return ["__main__", *(name for name, _ in self._own)]

    def roots(self) -> Iterator[tuple[_Root, Any]]:
        """The variables and their values, those of the innermost frames first and those of libraries last."""
        frames = [*_frames_of_failure(), *_frames(self._frame)]
        self._codes |= {id(f.f_globals): f.f_code for f in frames if not _is_function(f)}
        own = [f for f in frames if not f.f_code.co_filename.startswith(INSTALLED)]
        for frame in own:
            yield from self._of_frame(frame)
        main = C.attributes_of(sys.modules.get("__main__"))  # where a notebook's variables are
        yield from self._of_globals(main, "")
        for name, held in self._own:
            yield from self._of_globals(held, f"{name.rpartition('.')[2]}.")
        yield from self._of_threads()
        yield from _registered()
        for frame in frames:
            if frame not in own:
                yield from self._of_frame(frame)

    def unreached(self, seen: dict[int, Any]) -> Iterator[tuple[_Root, Any]]:
        """What no variable leads to: objects of the program's that keep each other alive.

        They are functions with a closure, what a Function's ctx has, and instances of the program's
        own classes. All are left out if each tensor was seen.
        """
        objects, of_tensors = gc.get_objects(), _kinds_of_tensors()
        if all(id(one) in seen for one in C.exactly_of(objects, of_tensors)):
            return
        kinds = [*map(id, map(type, objects))]  # a type's own hash may be the program's
        of_kind = dict(zip(kinds, map(type, objects), strict=True))
        tensors = {*map(id, of_tensors)}
        own = {"__main__", *(name for name, _ in self._own)}
        functions = {k for k, kind in of_kind.items() if issubclass(kind, FunctionType)}
        contexts = {k for k, kind in of_kind.items() if _is_context(kind)}
        others = {k for k, kind in of_kind.items() if referents.module_of(kind) in own}
        for one in _chosen(objects, kinds, contexts):
            function = referents.name_of(type(one)).removesuffix("Backward")
            for name, value in [*dict.items(C.attributes_of(one))]:
                yield _Root(f"{function}'s ctx.{name}", _CYCLE, "", None), value
        for one in _chosen(objects, kinds, functions):
            keeps = one.__closure__ is not None or one.__defaults__ is not None
            if keeps and id(one.__globals__) in self._seen and id(one) not in seen:
                yield _Root(one.__name__, _CYCLE, one.__code__.co_filename, one.__code__), one
        for one in _chosen(objects, kinds, others - tensors - functions - contexts):
            yield _Root(referents.name_of(type(one)), _CYCLE, "", None), one

    def _of_frame(self, frame: FrameType, where: str = "") -> Iterator[tuple[_Root, Any]]:
        code = frame.f_code
        if _is_function(frame):  # otherwise its locals are its globals
            for name, value in C.locals_of(frame).items():
                yield _Root(name, where, code.co_filename, code), value
        yield from self._of_globals(frame.f_globals, "")

    def _of_globals(self, held: dict[str, Any], prefix: str) -> Iterator[tuple[_Root, Any]]:
        if id(held) in self._seen:
            return
        self._seen.add(id(held))
        file = dict.get(held, "__file__", "")
        code = self._codes.get(id(held))
        for name, value in list(dict.items(held)):
            if type(name) is str and not name.startswith("__"):
                where = file if type(file) is str else ""
                yield _Root(f"{prefix}{name}", "", where, code), value

    def _of_threads(self) -> Iterator[tuple[_Root, Any]]:
        own = threading.get_ident()
        active = [*threading._active.items()]  # type: ignore[attr-defined] # enumerate() would lock
        names = {ident: C.attributes_of(thread).get("_name") for ident, thread in active}
        for ident, innermost in itertools.islice(sys._current_frames().items(), _MOST_THREADS):
            if ident != own:
                name = names.get(ident)
                where = f"thread {name if type(name) is str else ident}: "
                for frame in _frames(innermost):
                    if not frame.f_code.co_filename.startswith(INSTALLED):
                        yield from self._of_frame(frame, where)


def _frames_of_failure() -> list[FrameType]:
    """The frames that the exception has left that ends the recording, innermost first."""
    traceback, found = sys.exc_info()[2], list[FrameType]()
    while traceback is not None:
        found += itertools.islice(_frames(traceback.tb_frame), 1)
        traceback = traceback.tb_next
    return found[::-1][:_DEEPEST]


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_DEEPEST):
        if frame is None:
            return
        module = dict.get(frame.f_globals, "__name__")
        if not _is_of_a_library(frame.f_code.co_filename) and not referents.is_machinery(module):
            yield frame
        frame = frame.f_back


def _is_function(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def _is_of_a_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or any(part in file for part in _NOTEBOOKS)


def _is_module(value: object) -> bool:
    return is_a(value, ModuleType)


def _is_context(kind: type) -> bool:
    return issubclass(kind, private_torch.python_function)


def _kinds_of_tensors() -> tuple[type, ...]:
    """torch.Tensor and all types that are derived from it."""
    kinds: list[type] = [torch.Tensor]
    for kind in kinds:  # which grows
        kinds += type.__subclasses__(kind)
    return tuple(dict(zip(map(id, kinds), kinds, strict=True)).values())


def _chosen(objects: list[Any], kinds: list[int], chosen: set[int]) -> Iterator[Any]:
    """The objects of these types, which are given by their identities."""
    return itertools.compress(objects, map(chosen.__contains__, kinds))


def _is_own(held: dict[str, Any]) -> bool:
    file = dict.get(held, "__file__")
    return type(file) is str and not file.startswith(INSTALLED)


def _registered() -> Iterator[tuple[_Root, Any]]:
    """What Python itself keeps for the program: loggers, and the exception shown last."""
    for name in ("last_value", "last_exc"):
        yield _Root(f"sys.{name}", "", "", None), sys.__dict__.get(name)
    yield _Root("logging.getLogger()", "", "", None), logging.root
    for name, logger in [*logging.Logger.manager.loggerDict.items()]:
        yield _Root(f"logging.getLogger({name!r})", "", "", None), logger


def _line_of(code: CodeType, name: str) -> int:
    """The first line that gives the variable a value, or the code's own."""
    arguments = code.co_argcount + code.co_kwonlyargcount
    if name in code.co_varnames[:arguments] or len(code.co_code) > _LONGEST_CODE:
        return code.co_firstlineno
    for one in dis.get_instructions(code):
        stored = one.argval if type(one.argval) is tuple else (one.argval,)
        if "STORE" in one.opname and name in stored:
            lines = (line for begin, end, line in code.co_lines() if begin <= one.offset < end)
            return next(filter(None, lines), code.co_firstlineno)
    return code.co_firstlineno


# ---------------------------------------------------------------- the search


_Key = tuple[str, str, int, int]  # a link's how, word and bound, and the owner's type


class _Place:
    """All objects that are reached in the same way, whatever item of a container each one is."""

    __slots__ = (
        *("addresses", "behind", "bound", "children", "is_open", "key"),
        *("name", "parent", "saved", "weights", "word"),
    )

    def __init__(self, parent: "_Place | _Root", word: str, name: str, bound: int) -> None:
        self.parent, self.word, self.name, self.bound = parent, word, name, bound
        self.is_open = True  # whether the program can write the name to get here
        self.weights: _Place | None = None  # where the outermost module is, inside of one
        self.key: _Key | None = None  # among its parent's children
        self.children: dict[_Key, _Place] = {}
        self.addresses: dict[int, int] = {}  # and the bytes of each
        self.saved: dict[int, int] = {}
        self.behind: set[int] = set()

    def after(self, link: Link, owner: object) -> "_Place":
        """The place that the link leads to."""
        how, word, _, bound = link
        if how == referents.SAME or (how == referents.SUBMODULE and not self.is_open):
            return self
        if how == referents.WEIGHT and self.weights is not None:
            return self.weights.after(link._replace(how=referents.ITEM), owner)
        key = how, word, bound, id(type(owner)) if how == referents.ATTRIBUTE else 0
        if how == referents.ATTRIBUTE and key == self.key:
            return self  # the next record of a chain of records
        known = self.children.get(key)
        if known is None:
            known = self.children[key] = self._make(how, word, bound, owner)
            known.key = key
        return known

    def _make(self, how: str, word: str, bound: int, owner: object) -> "_Place":
        goes_on = how in (referents.ATTRIBUTE, referents.SUBMODULE)
        if how == referents.VARIABLE:
            place = _Place(self, f" -> {word}", word.rpartition(": ")[2], bound)
        elif goes_on and self.is_open:
            part = f"[{word}]" if word.isdigit() else f".{word}"
            place = _Place(self, part, f"{self.name}{part}", bound or self.bound)
        else:
            word = f"{referents.name_of(type(owner))}.{word}" if goes_on else word
            place = _Place(self, f" -> {word}", self.name, bound or self.bound)
            place.is_open = False
        if how != referents.VARIABLE:
            place.weights = self.weights
        return place

    def path(self, lines: dict[_Root, int]) -> str:
        """The way from the root. `lines` keeps where roots get their values."""
        words, at = list[str](), self
        while not isinstance(at.parent, _Root):
            words.append(at.word)
            at = at.parent
        root = at.parent
        if root.code is not None and root not in lines:
            lines[root] = _line_of(root.code, root.name)
        line = f":{lines[root]}" if root in lines else ""
        place = f"{referents.name_of_file(root.file)}{line} " if root.file else ""
        return f"{root.where}{place}{root.name}{''.join(reversed(words))}"


_TENSOR = Link(referents.ITEM, "tensor", None)


class _Search:
    """A search that goes in breadth: whatever it has seen it has reached by the shortest way."""

    def __init__(self, program: _Program) -> None:
        self._referents = Referents(program.names())
        self._todo = deque[tuple[Any, _Place]]()
        self._seen = dict[int, Any]()  # keeps what it has seen, so that identities last
        self._places = list[_Place]()  # those that have tensors, in the order they were reached
        self.cut = ""
        self._program = program
        self._begin(program.roots())

    def _begin(self, roots: Iterator[tuple[_Root, Any]]) -> None:
        for root, value in roots:
            if self._referents.handler(value) is not None:
                self._reach(value, _Place(root, "", root.name, 0))

    def run(self) -> None:
        """Looks at everything, or at as much as the bounds let it."""
        until = time.monotonic() + _MOST_SECONDS
        self._go_on(until)
        if not self.cut:
            self._begin(self._program.unreached(self._seen))
            self._go_on(until)

    def _go_on(self, until: float) -> None:
        while self._todo:
            if len(self._seen) > _MOST_OBJECTS or len(self._places) > _MOST_PLACES:
                self.cut = f"after {_MOST_OBJECTS:,} objects"
                break
            if time.monotonic() > until:
                self.cut = f"after {_MOST_SECONDS:.0f} seconds"
                break
            value, place = self._todo.popleft()
            handler = self._referents.handler(value)
            if handler is None:
                continue
            if place.weights is None and is_a(value, torch.nn.Module):
                place.weights = place
            for link in handler(value):
                if link.how == referents.SAVED:
                    self._note(link.value, place.after(link, value), saved=True)
                else:
                    self._reach(link.value, place, link, value)

    def _reach(
        self, value: Any, place: _Place, link: Link | None = None, owner: object = None
    ) -> None:
        if referents.is_nothing(value) or id(value) in self._seen:
            return
        if self._referents.handler(value) is None:
            return
        self._seen[id(value)] = value
        if link is not None:
            place = place.after(link, owner)
        if is_a(value, torch.Tensor):
            if link is None or link.how != referents.WEIGHT:
                place = place.after(_TENSOR, value)
            self._note(value, place)
        self._todo.append((value, place))

    def _note(self, tensor: torch.Tensor, place: _Place, *, saved: bool = False) -> None:
        address, size, elements, element_bytes = C.memory_of(tensor)
        held = place.saved if saved else place.addresses
        if address == 0 or len(held) >= _MOST_SAVED:
            return
        if not (place.addresses or place.saved):
            self._places.append(place)
        held[address] = size
        # One element has the memory of many: some of torch's losses reduce in place.
        is_plain = not saved and place.weights is None and not is_a(tensor, torch.nn.Parameter)
        if is_plain and elements == 1 and size > 64 * element_bytes:
            place.behind.add(address)

    def rows(self) -> list[dict[str, Any]]:
        """The places that hold most, in the order in which they were reached."""
        size = [sum({**p.addresses, **p.saved}.values()) for p in self._places]
        most = sorted(range(len(size)), key=lambda i: -size[i])[:_MOST_VARIABLES]
        lines = dict[_Root, int]()
        return [_row(self._places[i], lines) for i in sorted(most)]

    def let_go(self) -> None:
        """Keeps none of the program's objects any longer."""
        self._seen.clear()
        self._todo.clear()
        self._referents.let_go()


def _row(place: _Place, lines: dict[_Root, int]) -> dict[str, Any]:
    return {
        "name": place.name,
        "addresses": sorted(place.addresses),
        "graph_addresses": sorted(place.saved),
        "behind_numbers": sorted(place.behind),
        "bound": place.bound,
        "path": place.path(lines),
    }
