"""Finds tensors that the program could let go of as a backward pass begins.

A variable is spare if no way through the program's code, from here on, reads it before it gets
another value. A tensor that only a spare variable refers to can go: `del` frees its memory, and
nothing misses it. This is read from bytecode and reference counts, and none of the program runs.
"""

import builtins
import dis
import gc
import inspect
import operator
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import NamedTuple

import torch

from pytracer.capture.looking import INSTALLED
from pytracer.data._native import C

_DEEPEST = 30  # frames
_LONGEST_CODE = 20_000  # bytes: reading it takes about 20 ms
# Functions that may read any variable. `model.eval()` is none of them.
_READ_ALL = {"builtins", "dir", "eval", "exec", "globals", "locals", "vars"}
_RUN_AT_ONCE = {"<listcomp>", "<setcomp>", "<dictcomp>"}  # until Python 3.11, code of their own
# In LOAD_FAST_LOAD_FAST and STORE_FAST_LOAD_FAST: what is done with each of the two names.
_USES = re.compile(r"(LOAD|STORE|DELETE)_(?:FAST|NAME|GLOBAL|DEREF|CLASSDEREF|CLOSURE)")
_ENDS = re.compile(r"RETURN_|RAISE_VARARGS|RERAISE|JUMP_(?:FORWARD|BACKWARD|ABSOLUTE)")


class OtherReaders:
    """Who may read a module's variables by name, after its code has called exec() or globals().

    It is asked once per module: what could make another reader must be over by then.
    """

    def __init__(self) -> None:
        self._known = dict[tuple[int, int], frozenset[str] | None]()

    def names(self, frame: FrameType, inner: list[FrameType]) -> frozenset[str] | None:
        """The names that other functions read in this module's frame. None: they may read any."""
        key = id(frame.f_code), id(frame.f_globals)
        if key not in self._known:
            self._known[key] = None if _have_globals(frame, inner) else _read_elsewhere(frame)
        return self._known[key]


def _have_globals(module: FrameType, inner: list[FrameType]) -> bool:
    """Whether a function that runs now has the module's variables, as a dictionary, in one of its own."""
    frames = [*inner]
    for ident, innermost in sys._current_frames().items():
        one = None if ident == threading.get_ident() else innermost
        while one is not None:
            frames.append(one)
            one = one.f_back
    for each in frames:
        is_function = each.f_code.co_flags & inspect.CO_OPTIMIZED
        if each is module or not is_function or each.f_code.co_filename.startswith(INSTALLED):
            continue
        if each.f_code.co_name in _RUN_AT_ONCE and each.f_globals is module.f_globals:
            return True  # it may ask again
        if any(map(partial(operator.is_, module.f_globals), C.locals_of(each).values())):
            return True
    return False


def _read_elsewhere(module: FrameType) -> frozenset[str] | None:
    """What functions with the module's variables read that its code does not have: exec() made them.

    Whatever else refers to these variables may read any of them. So may what an alias of exec() runs.
    """
    code, names = module.f_code, set[str]()
    own = {code, *_codes_inside(code)}
    readers = {id(getattr(builtins, name)) for name in _READ_ALL - {"builtins"}}
    if readers & {*map(id, dict.values(module.f_globals))}:
        return None
    for one in gc.get_referrers(module.f_globals):
        if type(one) is FunctionType and one.__globals__ is module.f_globals:
            if one.__code__ not in own:
                made = [one.__code__, *_codes_inside(one.__code__)]
                if any(map(_asks_for_all, made)):
                    return None
                names |= {name for each in made for name in each.co_names}
        elif type(one) is not ModuleType:
            return None
    return frozenset(names)


def spare_tensors(
    frame: FrameType | None, others: OtherReaders | None = None
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yields each spare variable of the frame and its callers, with what it alone keeps."""
    others, inner = others or OtherReaders(), list[FrameType]()
    for _ in range(_DEEPEST):
        if frame is None:
            return
        if _is_the_programs(frame.f_code):
            kept = _kept_alone(frame)
            if any(kept.values()):
                elsewhere = partial(others.names, frame, inner)
                later = read_later(frame.f_code, frame.f_lasti, elsewhere)
                yield from ((name, own) for name, own in kept.items() if own and name not in later)
        inner.append(frame)
        frame = frame.f_back


def _kept_alone(frame: FrameType) -> dict[str, list[torch.Tensor]]:
    """The tensors that nothing but a variable of this frame refers to, by its name."""
    of_module = not frame.f_code.co_flags & inspect.CO_OPTIMIZED
    held = frame.f_globals if of_module else C.locals_of(frame)
    # A copy of a function's variables is made here; a module's dictionary is its own.
    copies = 0 if of_module else 1
    return {name: C.kept_alone(held, name, copies) for name in [*dict.keys(held)]}


def _is_the_programs(code: CodeType) -> bool:
    """Whether it is a file of the program's own, whose code is all there is to read.

    A cell of a notebook is not: the next cell may read every variable.
    """
    file = code.co_filename
    is_own = not file.startswith((*INSTALLED, "<")) and len(code.co_code) <= _LONGEST_CODE
    return is_own and not sys.flags.interactive and Path(file).is_file()


class _Step(NamedTuple):
    """One instruction."""

    reads: frozenset[str]
    writes: frozenset[str]
    next: tuple[int, ...]  # offsets
    asks: bool = False  # for all variables, here or in a comprehension that runs here
    keeps: bool = False  # the function that reads all: it is not called here


def _steps(code: CodeType) -> tuple[dict[int, _Step], tuple[int, ...]]:
    """The code's instructions by offset, and where its exceptions are caught."""
    instructions, steps, handlers = [*dis.get_instructions(code)], dict[int, _Step](), list[int]()
    before = [None, *instructions[:-1]]
    for last, one, following in zip(before, instructions, [*instructions[1:], None], strict=True):
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        uses = [*zip(_USES.findall(one.opname), names, strict=False)]
        after = [following.offset] if following and not _ENDS.match(one.opname) else []
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            after.append(one.argval)
        if one.opname.startswith("SETUP_"):  # until Python 3.10
            handlers.append(one.argval)
        if one.opname == "PUSH_EXC_INFO":
            handlers.append(one.offset)
        reads = frozenset(name for use, name in uses if use == "LOAD")
        imports = one.opname.startswith("IMPORT_") and one.argval in _READ_ALL
        asks = bool(reads & _READ_ALL) or imports
        # From Python 3.11 on, a NULL beside a function says that it is called.
        beside = following if sys.version_info >= (3, 13) else last
        is_called = "NULL" in one.argrepr or (beside and beside.opname == "PUSH_NULL")
        keeps = asks and (not is_called or "builtins" in reads or imports)
        if isinstance(one.argval, CodeType) and one.argval.co_name in _RUN_AT_ONCE:
            within = _steps(one.argval)[0].values()
            asks, keeps = any(step.asks for step in within), any(step.keeps for step in within)
        writes = frozenset(name for use, name in uses if use != "LOAD")
        steps[one.offset] = _Step(reads, writes, tuple(after), asks, keeps)
    return steps, tuple(handlers)


def read_later(
    code: CodeType, at: int, elsewhere: Callable[[], frozenset[str] | None] = lambda: None
) -> frozenset[str]:
    """The code's variables that may be read after the instruction at this offset.

    Variables of inner functions count as read. Where `locals()` or `exec` may still be called, all
    variables do. If a module has called them, `elsewhere` says what others read; None: anything.
    """
    steps, handlers = _steps(code)
    # While a call runs, some versions of Python point behind it, to its inline cache.
    running = max(offset for offset in steps if offset <= max(at, 0))
    begin = [*steps[running].next, *handlers]
    later, names = set[str](), {name for step in steps.values() for name in step.reads}
    for name in names:
        left, seen = [*begin], set[int]()
        while left:
            offset = left.pop()
            if offset in seen:
                continue
            seen.add(offset)
            step = steps[offset]
            if name in step.reads:
                later.add(name)
                break
            if name not in step.writes:
                left += step.next
    inside = {name for each in _codes_inside(code) for name in each.co_names}
    shared = {*code.co_cellvars, *code.co_freevars} | inside
    others = _read_by_others(code, steps, _reached(steps, begin), elsewhere)
    if others is None:
        return frozenset({*code.co_varnames, *code.co_names, *later, *shared})
    return frozenset(later | shared | others)


def _reached(steps: dict[int, _Step], begin: Iterable[int]) -> set[int]:
    """The offsets of all instructions that may still run."""
    left, seen = [*begin], set[int]()
    while left:
        offset = left.pop()
        if offset not in seen:
            seen.add(offset)
            left += steps[offset].next
    return seen


def _read_by_others(
    code: CodeType,
    steps: dict[int, _Step],
    reached: set[int],
    elsewhere: Callable[[], frozenset[str] | None],
) -> frozenset[str] | None:
    """The variables that may be read by name beside the code itself. None: all of them.

    Inner functions have a module's variables in globals(), but none of a function's.
    """
    of_module = not code.co_flags & inspect.CO_OPTIMIZED
    asking = [offset for offset, step in steps.items() if step.asks]
    later = (one for one in _codes_inside(code) if one.co_name not in _RUN_AT_ONCE)
    if of_module and any(map(_asks_for_all, later)):
        return None
    if any(offset in reached or steps[offset].keeps for offset in asking):
        return None
    return elsewhere() if of_module and asking else frozenset()


def _asks_for_all(code: CodeType) -> bool:
    """Whether it calls or names a function that may read any variable. `model.eval()` is none."""
    named = _READ_ALL & {*code.co_names}
    return bool(named) and any(step.asks for step in _steps(code)[0].values())


def _codes_inside(code: CodeType) -> Iterator[CodeType]:
    """The functions, classes and comprehensions that the code defines."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _codes_inside(inner)
