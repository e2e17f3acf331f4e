"""`stacks=True` names the right lines, and keeps nothing of the program alive."""

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch

import pytracer

SOURCE = "def {name}(empty, elements):\n    return empty(elements)\n"


def a_trace() -> pytracer.trace:
    return pytracer.trace(devices="cpu", stacks=True, table=False)


def code_of(name: str, file: str, *, first_line: int = 1) -> CodeType:
    """The code of a function that calls `empty(elements)` in its second line."""
    source = "\n" * (first_line - 1) + SOURCE.format(name=name)
    (code,) = (
        constant
        for constant in compile(source, file, "exec").co_consts
        if isinstance(constant, CodeType)
    )
    return code


def run(code: CodeType, elements: int) -> None:
    FunctionType(code, {})(torch.empty, elements)


def calls(t: pytracer.trace) -> Iterator[tuple[int, tuple[str, str, int]]]:
    """Of each allocation the bytes, and the file, function and line that called it."""
    trace = t.data
    stack_of = dict(
        zip(trace.scope_ends.scope.tolist(), trace.scope_ends.stack.tolist(), strict=True)
    )
    for bytes_, scope in zip(trace.events.bytes.tolist(), trace.events.scope.tolist(), strict=True):
        row = stack_of.get(scope, 0)
        file, function, line = (
            int(column[row])
            for column in (trace.stacks.file, trace.stacks.function, trace.stacks.line)
        )
        yield bytes_, (trace.strings[file], trace.strings[function], line)


def from_source(i: int) -> CodeType:
    return code_of(f"f{i % 5}", f"file{i % 7}.py", first_line=1 + i % 11)


BASE = code_of("base", "base.py")


def renamed(i: int) -> CodeType:
    """Code that shares its table of lines with all others of its kind."""
    qualified = {"co_qualname": f"f{i}"} if sys.version_info >= (3, 11) else {}
    changes: list[dict[str, Any]] = [
        {"co_name": f"f{i}", **qualified},
        {"co_filename": f"file{i}.py"},
        {"co_firstlineno": 100 + i},
    ]
    return BASE.replace(**changes[i % 3])


@pytest.mark.parametrize("make", [from_source, renamed])
def test_code_at_the_address_of_code_that_died_has_lines_of_its_own(
    make: Callable[[int], CodeType],
) -> None:
    for _ in range(2):  # the second trace learns all lines anew
        expected: dict[int, tuple[str, str, int]] = {}
        at_address: dict[int, tuple[str, str, int]] = {}
        taken_over = 0
        with a_trace() as t:
            for i in range(300):
                code = make(i)
                called = (code.co_filename, code.co_name, code.co_firstlineno + 1)
                taken_over += at_address.get(id(code), called) != called
                at_address[id(code)] = called
                expected[4 * (10_001 + i)] = called
                run(code, 10_001 + i)
                del code
        assert taken_over > 100
        found = dict(calls(t))
        assert {bytes_: found[bytes_] for bytes_ in expected} == expected


def test_code_dies_in_the_block_when_it_dies_without_one() -> None:
    with a_trace():
        code = code_of("f", "file.py")
        run(code, 3)
        died = weakref.ref(code)
        del code
        assert died() is None


def test_a_graph_and_its_tensors_die_with_the_code_that_was_made_of_them() -> None:
    with a_trace():
        model = torch.nn.Linear(4, 4)
        graph = torch.fx.symbolic_trace(model)
        graph(torch.ones(2, 4))
        died = [weakref.ref(each) for each in (graph, graph.forward.__code__, model.weight)]
        del graph, model
        gc.collect()
        assert [reference() for reference in died] == [None, None, None]


@pytest.mark.ci
def test_what_torch_compile_made_dies_with_the_program_it_compiled() -> None:
    from torch._dynamo.testing import EagerAndRecordGraphs

    with a_trace():
        backend = EagerAndRecordGraphs()
        torch.compile(lambda x: x.sin() + torch.ones(3), backend=backend)(torch.ones(3))
        died = weakref.ref(backend.graphs[0])
        del backend
        torch.compiler.reset()
        gc.collect()
        assert died() is None


class Name(str):
    """May hold anything, and may be referred to weakly."""


def test_names_of_a_class_of_the_programs_are_read_and_not_kept() -> None:
    with a_trace() as t:
        code = BASE.replace(co_filename=Name("named.py"))
        run(code, 10_001)
        run(code, 10_002)
        died = weakref.ref(code.co_filename)
        del code
        assert died() is None
    found = dict(calls(t))
    assert found[40_004] == found[40_008] == ("named.py", "base", 2)


def test_after_the_block_nothing_of_the_program_is_referred_to() -> None:
    # Nobody else has these names: other tests' garbage may hold the name of BASE.
    code = code_of("only_this_test_has_it", "only_this_test_has_it.py")
    parts = (code.co_linetable, code.co_filename, code.co_name)
    before = [sys.getrefcount(part) for part in parts]
    with a_trace():
        run(code, 3)
        assert [sys.getrefcount(part) for part in parts] != before
    assert [sys.getrefcount(part) for part in parts] == before


@pytest.mark.ci
def test_a_program_that_makes_code_for_ever_needs_no_more_memory_for_ever() -> None:
    """The cache of code objects is emptied when it is full. Lines stay right."""
    lines = BASE.co_linetable
    most = 0
    with a_trace() as t:
        for i in range(70_000):
            run(BASE.replace(co_firstlineno=1 + i), 10_001 + i)
            most = max(most, sys.getrefcount(lines))
        assert 60_000 < most < 66_000
        assert sys.getrefcount(lines) < 10_000
    found = dict(calls(t))
    assert all(found[4 * (10_001 + i)] == ("base.py", "base", 2 + i) for i in range(70_000))


def test_a_forked_child_traces_with_lines_of_its_own() -> None:
    with a_trace() as t:
        run(BASE, 10_001)
        child = os.fork()
        if child == 0:
            with a_trace() as its_own:
                run(code_of("g", "child.py"), 10_001)
            os._exit(dict(calls(its_own)).get(40_004) != ("child.py", "g", 2))
        assert os.waitpid(child, 0)[1] == 0
        run(BASE, 10_002)
    assert dict(calls(t))[40_008] == ("base.py", "base", 2)
