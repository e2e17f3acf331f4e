"""Finds tensors that the program could let go of as a backward pass begins.

A variable is spare if no way through the program's code, from here on, reads it before it gets
another value. A tensor that only a spare variable refers to can go: `del` frees its memory, and
nothing misses it. This is read from bytecode and reference counts, and none of the program runs.
"""

import dis
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from pytracer.capture.looking import INSTALLED
from pytracer.data._native import C

_DEEPEST = 30  # frames
_LONGEST_CODE = 20_000  # bytes: reading it takes about 20 ms
# Functions that may read any variable. `model.eval()` is none of them.
_READ_ALL = {"builtins", "dir", "eval", "exec", "globals", "locals", "vars"}
# In LOAD_FAST_LOAD_FAST and STORE_FAST_LOAD_FAST: what is done with each of the two names.
_USES = re.compile(r"(LOAD|STORE|DELETE)_(?:FAST|NAME|GLOBAL|DEREF|CLASSDEREF|CLOSURE)")
_ENDS = re.compile(r"RETURN_|RAISE_VARARGS|RERAISE|JUMP_(?:FORWARD|BACKWARD|ABSOLUTE)")


def spare_tensors(frame: FrameType | None) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yields each spare variable of the frame and its callers, with what it alone keeps."""
    for _ in range(_DEEPEST):
        if frame is None:
            return
        if _is_the_programs(frame.f_code):
            of_module = not frame.f_code.co_flags & inspect.CO_OPTIMIZED
            held = frame.f_globals if of_module else C.locals_of(frame)
            # A copy of a function's variables is made here; a module's dictionary is its own.
            copies = 0 if of_module else 1
            kept = {name: C.kept_alone(held, name, copies) for name in [*dict.keys(held)]}
            if any(kept.values()):
                later = read_later(frame.f_code, frame.f_lasti)
                yield from ((name, own) for name, own in kept.items() if own and name not in later)
        frame = frame.f_back


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


def _steps(code: CodeType) -> tuple[dict[int, _Step], tuple[int, ...]]:
    """The code's instructions by offset, and where its exceptions are caught."""
    instructions, steps, handlers = [*dis.get_instructions(code)], dict[int, _Step](), list[int]()
    for one, following in zip(instructions, [*instructions[1:], None], strict=True):
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        uses = [*zip(_USES.findall(one.opname), names, strict=False)]
        after = [following.offset] if following and not _ENDS.match(one.opname) else []
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            after.append(one.argval)
        if one.opname.startswith("SETUP_"):  # until Python 3.10
            handlers.append(one.argval)
        if one.opname == "PUSH_EXC_INFO":
            handlers.append(one.offset)
        steps[one.offset] = _Step(
            frozenset(name for use, name in uses if use == "LOAD"),
            frozenset(name for use, name in uses if use != "LOAD"),
            tuple(after),
        )
    return steps, tuple(handlers)


def read_later(code: CodeType, at: int) -> frozenset[str]:
    """The code's variables that may be read after the instruction at this offset.

    Variables of inner functions count as read; beside `locals()` or `exec`, all variables do.
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
    inside = {*_read_inside(code)}
    shared = {*code.co_cellvars, *code.co_freevars} | inside
    # Inner functions have a module's variables in globals(), but none of a function's.
    asked = names if code.co_flags & inspect.CO_OPTIMIZED else names | inside
    by_name = {*code.co_varnames, *code.co_names} if _READ_ALL & asked else set[str]()
    return frozenset(later | shared | by_name)


def _read_inside(code: CodeType) -> Iterator[str]:
    """Names in the functions and classes that the code defines."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from inner.co_names
            yield from _read_inside(inner)
