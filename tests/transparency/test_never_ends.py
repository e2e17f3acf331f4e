"""A trace ends cleanly, however it ends: and what it records ends where the program ends it.

Annotations may end on other threads, children may be forked, Ctrl-C may come at any line, and a
process may end while a trace is open. What could crash runs in a process of its own.
"""

import concurrent.futures
import ctypes
import json
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.profiler import record_function

import pytracer
from tests.tiers import by_tier, first_of
from tests.transparency import interrupts
from tests.transparency.observe import (
    MODES,
    Block,
    Program,
    assert_unchanged,
)
from tests.transparency.processes import ROOT, Running, in_a_process

DETAILS = ["op", "category"]


def reuse_memory() -> None:
    """What was freed too early gets another content, of whatever size it was, and no UTF-8."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    sizes = [size for size in range(16, 512, 16) for _ in range(20)]
    taken = [libc.malloc(size) for size in sizes]
    for address, size in zip(taken, sizes, strict=True):
        ctypes.memset(address, 0x9F, size)
    for address in taken:
        libc.free(ctypes.c_void_p(address))


def on_a_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


# -------------------------------------------------------------------------- annotations


def ended_by_another_thread(name: str) -> None:
    annotation = record_function(name)
    annotation.__enter__()
    on_a_thread(lambda: annotation.__exit__(None, None, None))
    annotation.record = None


def annotations_ended_by_other_threads(device: str, block: Block) -> Any:
    kept = []
    with block():
        for i in range(50):
            ended_by_another_thread(f"block {i} " + "é" * 60)
            reuse_memory()
            kept.append(torch.ones(10, device=device))
        ended_by_another_thread("x" * (1 << 20))  # its memory goes back to the system
        kept.append(torch.ones(10, device=device))
    return kept


def annotations_ended_by_futures(device: str, block: Block) -> Any:
    kept = []
    with block():
        for i in range(50):
            future: Any = torch.futures.Future()
            with record_function(f"waiting for the answer to request number {i}") as annotation:
                annotation._call_end_callbacks_on_future(future)
            on_a_thread(lambda future=future: future.set_result(1))
            future.wait()
            del annotation, future
            reuse_memory()
            kept.append(torch.ones(10, device=device))
    return kept


def annotated_generators_drained_by_executors(device: str, block: Block) -> Any:
    def batches(number: int) -> Iterator[Any]:
        with record_function(f"loading the shard number {number} in the background"):
            yield "header"  # nothing is allocated before it changes threads
            yield torch.zeros(3, device=device)

    kept = []
    with block():
        for i in range(20):
            generator = batches(i)
            kept.append(next(generator))
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                kept += pool.submit(list, generator).result()
            del generator
            reuse_memory()
            kept.append(torch.ones(10, device=device))
    return kept


def annotations_inside_jit_forks(device: str, block: Block) -> Any:
    def annotated(x: torch.Tensor) -> torch.Tensor:
        with record_function("in the fork"):
            return x * 2

    def waits(x: torch.Tensor) -> Any:
        with record_function("around the fork"):
            y = torch.jit._wait(torch.jit._fork(inner, x))
            with record_function("after the fork"):
                return y * 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        x = torch.ones(3, 4, device=device)
        inner = torch.jit.trace(annotated, x)
        outer = torch.jit.trace(waits, x)
        for _ in range(20):
            with block():
                results = [outer(x) for _ in range(10)]
    return results


def annotations_across_the_ends_of_traces(device: str, block: Block) -> Any:
    kept, before, after = [], record_function("before"), record_function("after")
    before.__enter__()
    with block():
        kept.append(torch.ones(10, device=device))
        on_a_thread(lambda: before.__exit__(None, None, None))
        kept.append(torch.ones(10, device=device))
        after.__enter__()
        kept.append(torch.ones(10, device=device))
    on_a_thread(lambda: after.__exit__(None, None, None))
    with block():
        kept.append(torch.ones(10, device=device))
    return kept


def collectives_nobody_waits_for(device: str, block: Block) -> Any:
    """torch.distributed ends its annotations on the threads of the back end."""
    import tempfile

    from torch import distributed

    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        kept = []
        with block():
            for _ in range(50):
                x = torch.ones(4, device=device)
                work = distributed.all_reduce(x, async_op=True)
                work.wait()
                del work
                reuse_memory()
                kept.append(x + 1)
        distributed.destroy_process_group()
    return kept


@pytest.mark.ci
@pytest.mark.parametrize("mode", first_of(MODES))
@pytest.mark.parametrize(
    "run",
    [
        annotations_ended_by_other_threads,
        annotations_ended_by_futures,
        annotated_generators_drained_by_executors,
        annotations_inside_jit_forks,
        annotations_across_the_ends_of_traces,
        collectives_nobody_waits_for,
    ],
)
def test_an_annotation_may_end_on_any_thread(
    run: Callable[..., Any], mode: str, tmp_path: Path
) -> None:
    assert_unchanged(Program(run, own_block=True, fresh=True), "cpu", mode, tmp_path)


def around_an_allocation(recorded: pytracer.trace, size: int) -> list[str]:
    """The names of the scopes that an allocation of this size was made in, inside out."""
    data = recorded.data
    (row,) = (row for row, bytes_ in enumerate(data.events.bytes.tolist()) if bytes_ == size)
    scope, names = int(data.events.scope[row]), []
    while scope:
        names.append(data.strings[data.scopes.name[scope - 1]])
        scope = int(data.scopes.parent[scope - 1])
    return names


def scopes_after_an_annotation(detail: Any) -> list[list[str]]:
    kept = []
    with pytracer.trace(detail=detail, devices="cpu", table=False) as recorded:
        annotation = record_function("FSDP::all_gather")
        annotation.__enter__()
        kept.append(annotation.record)  # alive, and ended all the same
        on_a_thread(lambda: annotation.__exit__(None, None, None))
        kept.append(torch.zeros(1001))
        ended_by_another_thread("another one, which dies")
        reuse_memory()
        kept.append(torch.zeros(1002))
    return [around_an_allocation(recorded, size) for size in (4004, 4008)]


@pytest.mark.parametrize("detail", DETAILS)
def test_what_follows_an_annotation_that_ended_elsewhere_is_outside_of_it(
    detail: str, tmp_path: Path
) -> None:
    ops = ["aten::zeros"]  # outside of modules they are recorded with either detail
    assert in_a_process(tmp_path, scopes_after_an_annotation, detail) == [ops, ops]


def scopes_of_later_traces(detail: Any) -> list[list[str]]:
    with pytracer.trace(detail=detail, devices="cpu", table=False):
        ended_by_another_thread("a block of some length, of the first trace")
    reuse_memory()
    found = []
    for _ in range(3):
        with pytracer.trace(detail=detail, devices="cpu", table=False) as recorded:
            kept = torch.zeros(1001)
        found.append(around_an_allocation(recorded, 4004))
        del kept
    return found


@pytest.mark.parametrize("detail", DETAILS)
def test_an_annotation_that_ended_elsewhere_is_in_no_later_trace(
    detail: str, tmp_path: Path
) -> None:
    ops = ["aten::zeros"]
    assert in_a_process(tmp_path, scopes_of_later_traces, detail) == [ops, ops, ops]


# -------------------------------------------------------------------------- forks


class First(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


class Second(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.second = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x)


def what_a_child_records(traced_parent: bool) -> Any:
    """A child is forked, after its parent called both models, and traces them in turn."""
    torch.set_num_threads(1)
    models = [First(), Second()]

    def use(order: list[torch.nn.Module]) -> None:
        for model in order:
            model(torch.randn(4, 16)).sum().backward()

    def child() -> Any:
        with pytracer.trace(*models[::-1], devices="cpu", stacks=True, table=False) as recorded:
            use(models[::-1])
        rows = recorded.allocations()[["requested_bytes", "module", "op", "line", "phase"]]
        return [[str(value) for value in row] for row in rows.itertuples(index=False)]

    if not traced_parent:
        use(models)
        return interrupts.in_a_child(child)
    with pytracer.trace(*models, devices="cpu", stacks=True, table=False):
        use(models)
        return interrupts.in_a_child(child)


def test_a_child_forked_inside_a_trace_records_its_own(tmp_path: Path) -> None:
    """Its modules' names and Python lines are what they are in a child of an untraced parent."""
    status, expected = in_a_process(tmp_path, what_a_child_records, False)
    assert status == 0, expected
    assert any("Second" in row[1] or "second" in row[1] for row in expected)

    assert in_a_process(tmp_path, what_a_child_records, True) == (0, expected)


def grandchildren() -> list[Any]:
    """A trace in a child of a child, each forked inside a trace; and the parent's goes on."""

    def child() -> Any:
        with pytracer.trace(devices="cpu", table=False) as recorded:
            kept = [torch.empty(2001)]
            answer = interrupts.in_a_child(lambda: sizes_of_a_trace(3001))
            kept.append(torch.empty(2002))
        return [answer, sizes_in(recorded)]

    with pytracer.trace(devices="cpu", table=False) as recorded:
        kept = [torch.empty(1001)]
        answer = interrupts.in_a_child(child)
        kept.append(torch.empty(1002))
    return [answer, sizes_in(recorded)]


def sizes_of_a_trace(elements: int) -> list[int]:
    with pytracer.trace(devices="cpu", table=False) as recorded:
        kept = torch.empty(elements)
    del kept
    return sizes_in(recorded)


def sizes_in(recorded: pytracer.trace) -> list[int]:
    ours = {4 * elements for elements in (1001, 1002, 2001, 2002, 3001)}
    return sorted(ours & set(recorded.data.events.bytes.tolist()))


def test_each_process_of_a_family_records_its_own(tmp_path: Path) -> None:
    child, parent = in_a_process(tmp_path, grandchildren)

    assert parent == [4004, 4008]
    assert child == (0, [[0, [12004]], [8004, 8008]])


# -------------------------------------------------------------------------- Ctrl-C


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "times"),
    [(name, 2 if name == "two steps" else 1) for name in interrupts.PROGRAMS],
)
def test_ctrl_c_at_any_line_of_ours_arrives_and_leaves_nothing(
    name: str, times: int, tmp_path: Path
) -> None:
    """The program gets that very KeyboardInterrupt, nothing stays hooked, the next trace works.

    `make test` takes every eighth line, `.ci/run` every sixth, and `make nightly` each time that
    a line runs, which takes an hour. A look has so many lines that the first two take fewer.
    """
    times = by_tier(times, times, 0)
    shares = by_tier(48, 64, 2) if name == "a look meanwhile" else by_tier(8, 12, 2)
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                Running(
                    tmp_path,
                    interrupts.interrupted,
                    *(name, times, share, shares),
                    imports="torch._dynamo",
                )
            )
            for share in range(by_tier(1, 2, 2))
        ]
        results = [process.finish(timeout=7200) for process in processes]

    assert sum(count for count, _ in results) > by_tier(4, 5, 20)
    problems = {line: found for _, wrong in results for line, found in wrong.items()}
    assert not problems, "\n".join(f"{line}: {found}" for line, found in sorted(problems.items()))


@pytest.mark.nightly
@pytest.mark.slow
def test_ctrl_c_while_dynamo_is_imported_arrives_and_leaves_nothing(tmp_path: Path) -> None:
    """The first optimizer of a process imports it, for seconds. What torch leaves is torch's."""
    untraced, traced = in_a_process(tmp_path, interrupts.interrupted_imports, 6)
    assert traced == untraced


# -------------------------------------------------------------------------- the interpreter ends first

BEGINNING = """
import atexit, contextlib, os, sys, threading
import torch
import pytracer
mode, path = sys.argv[1:]
options = {"default": {}, "a file": {"path": path}}.get(mode)
def block():
    return contextlib.nullcontext() if options is None else pytracer.trace(table=False, **options)
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def step():
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    optimizer.step()
    return loss.item()
"""

OPEN_AT_THE_END = {
    "a generator holds it": """
        def steps():
            with block():
                while True:
                    yield step()
        held = steps()
        print(next(held), next(held))
    """,
    "nobody left it": """
        held = block()
        held.__enter__()
        print(step(), step())
    """,
    "nobody left it, and nobody holds it": """
        block().__enter__()
        print(step(), step())
    """,
    "a status": """
        held = block()
        held.__enter__()
        print(step(), step())
        sys.exit(3)
    """,
    "an exception": """
        held = block()
        held.__enter__()
        print(step(), step())
        raise ValueError("the program's own")
    """,
    "Ctrl-C": """
        held = block()
        held.__enter__()
        print(step(), step())
        raise KeyboardInterrupt
    """,
    "a thread holds it": """
        entered = threading.Event()
        def work():
            with block():
                print(step(), step())
                entered.set()
                threading.Event().wait()
        threading.Thread(target=work, daemon=True).start()
        entered.wait()
    """,
    "the program still has something to do": """
        held = block()
        held.__enter__()
        print(step(), step())
        atexit.register(lambda: print("at the end", step()))
    """,
    "a class holds it until modules go": """
        class Holder:
            def __init__(self):
                self.held = block()
                self.held.__enter__()
            def __del__(self):
                self.held.__exit__(None, None, None)
        holder = Holder()
        print(step(), step())
    """,
}


def ends(program: str, mode: str, path: Path) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    file = path.with_name("program.py")
    file.write_text(BEGINNING + textwrap.dedent(program))
    ended = subprocess.run(
        [sys.executable, str(file), mode, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.ci
@pytest.mark.parametrize("name", first_of(OPEN_AT_THE_END))
def test_a_trace_that_is_open_when_the_process_ends_says_nothing(name: str, tmp_path: Path) -> None:
    """The exit status and both outputs are those of the untraced program; its file is whole."""
    path = tmp_path / "run.pytrace"
    untraced = ends(OPEN_AT_THE_END[name], "untraced", path)
    assert json.loads(f"[{untraced[1].split()[0]}]"), "the program has trained"

    assert ends(OPEN_AT_THE_END[name], "default", path) == untraced
    assert ends(OPEN_AT_THE_END[name], "a file", path) == untraced
    loaded = pytracer.load(path)
    assert loaded.file_report["status"] == "complete"
    assert len(loaded.steps()) >= 2
