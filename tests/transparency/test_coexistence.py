"""Beside other tools that watch a program: each records of it what it records without a trace.

The tool starts and stops in every order relative to the trace. What is compared is everything that
the tool recorded of the program: of calls that its own file made, and of what those called. Left
out are frames in pytracer's files with what they called, and frames of Python's `threading`, whose
way depends on which thread is faster.
"""

import bdb
import contextlib
import cProfile
import faulthandler
import os
import pstats
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import pytracer
from tests.tiers import first_of
from tests.transparency import workload
from tests.transparency.observe import (
    AUTO,
    HOOKS_MODE,
    MODES,
    UNTRACED,
    Block,
    Program,
    assert_unchanged,
    observe,
)
from tests.transparency.processes import ROOT

PROGRAM = workload.__file__
# The plainest mode, and at night the others too.
BY_TIER = first_of(["default", HOOKS_MODE, "category", AUTO], later=pytest.mark.nightly)
OURS = f"{Path(pytracer.__file__).parent}{os.sep}"


class Nothing:
    """The tool that is none: what a trace records beside it is what it records alone."""

    needs = ""
    marks: tuple[Any, ...] = ()
    threads = True  # the program may have some

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def seen(self) -> Any:
        """What it recorded of the program, as plain data."""
        return []


class NothingWithoutThreads(Nothing):
    threads = False


# -------------------------------------------------------------------------- Python's own


def is_of_the_program(frame: FrameType | None) -> bool:
    """The program's file is below it, and no frame of ours."""
    if frame is not None and frame.f_code.co_filename == threading.__file__:
        return False
    found = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OURS):
            return False
        found = found or file == PROGRAM
        frame = frame.f_back
    return found


class Frames(Nothing):
    """Writes down what a trace function or a profile function is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def hear(self, frame: FrameType, event: str, argument: Any) -> Any:
        if is_of_the_program(frame):
            what = getattr(argument, "__qualname__", "") if event.startswith("c_") else ""
            code = frame.f_code
            self.heard.append(f"{event} {code.co_filename}:{frame.f_lineno} {code.co_name} {what}")
        return self.hear

    def seen(self) -> Any:
        return self.heard


class TraceFunction(Frames):
    def start(self) -> None:
        sys.settrace(self.hear)

    def stop(self) -> None:
        sys.settrace(None)


class ProfileFunction(Frames):
    def start(self) -> None:
        sys.setprofile(self.hear)

    def stop(self) -> None:
        sys.setprofile(None)


class TraceFunctionOfThreads(Frames):
    def start(self) -> None:
        threading.settrace(self.hear)

    def stop(self) -> None:
        threading.settrace(None)  # type: ignore[arg-type]


class ProfileFunctionOfThreads(Frames):
    def start(self) -> None:
        threading.setprofile(self.hear)

    def stop(self) -> None:
        threading.setprofile(None)


class Monitoring(Nothing):
    """PEP 669, of Python 3.12 and later."""

    EVENTS = ("PY_START", "PY_RETURN", "PY_YIELD", "LINE", "CALL", "C_RETURN", "RAISE", "JUMP")

    def __init__(self) -> None:
        self.heard: dict[bool, list[str]] = {True: [], False: []}  # on the main thread or not

    def start(self) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        monitoring.use_tool_id(monitoring.PROFILER_ID, "a tool of the program's")
        wanted = 0
        for name in self.EVENTS:
            event = getattr(monitoring.events, name)
            wanted |= event if name != "C_RETURN" else 0  # comes with CALL
            monitoring.register_callback(monitoring.PROFILER_ID, event, self.hear(name))
        monitoring.set_events(monitoring.PROFILER_ID, wanted)

    def stop(self) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        monitoring.set_events(monitoring.PROFILER_ID, 0)
        monitoring.free_tool_id(monitoring.PROFILER_ID)

    def hear(self, name: str) -> Callable[..., None]:
        def heard(code: Any, *rest: Any) -> None:
            if is_of_the_program(sys._getframe(1)):
                called = [getattr(v, "__qualname__", "") for v in rest if callable(v)]
                is_main = threading.current_thread() is threading.main_thread()
                where = f"{code.co_filename} {code.co_name} {rest[0]}"
                self.heard[is_main].append(f"{name} {where} {called}")

        return heard

    def seen(self) -> Any:
        return self.heard


class CProfile(Nothing):
    """How often each of the program's functions called whom.

    Since Python 3.12 it hears all threads, and takes their calls for those of one.
    """

    threads = False

    def __init__(self) -> None:
        self.profile = cProfile.Profile()

    def start(self) -> None:
        self.profile.enable()

    def stop(self) -> None:
        self.profile.disable()

    def seen(self) -> Any:
        stats: Any = pstats.Stats(self.profile)
        return {
            f"{caller} called {callee}": counts[:2]
            for callee, (*_, callers) in stats.stats.items()
            for caller, counts in callers.items()
            if caller[0] == PROGRAM and not callee[0].startswith(OURS)
        }


class Tracemalloc(Nothing):
    """Memory of Python's that is alive at the end, by the program's line that asked for it.

    Small objects are served from lists of freed ones, whoever made those: they are left out.
    """

    def start(self) -> None:
        tracemalloc.start()

    def stop(self) -> None:
        snapshot = tracemalloc.take_snapshot()
        tracemalloc.stop()
        mine = snapshot.filter_traces([tracemalloc.Filter(True, PROGRAM)])
        blocks = [(block.traceback[0].lineno, block.size) for block in mine.traces]
        self.blocks = sorted((line, size) for line, size in blocks if size > 512)

    def seen(self) -> Any:
        assert self.blocks
        return self.blocks


class Debugger(bdb.Bdb, Nothing):
    """Stops at breakpoints in a forward and in a hook, and steps from there for a while."""

    STEPS = 25

    def __init__(self) -> None:
        super().__init__(skip=["threading", "pytracer.*"])
        self.stops: list[str] = []
        self.left = 0

    def start(self) -> None:
        for function in (workload.Gate.forward, workload.scale):
            problem = self.set_break(PROGRAM, function.__code__.co_firstlineno + 1)
            assert problem is None, problem
        self.reset()
        self.botframe = sys._getframe(1)
        sys.settrace(self.trace_dispatch)

    def stop(self) -> None:
        sys.settrace(None)
        self.clear_all_breaks()

    def user_line(self, frame: FrameType) -> None:
        if not is_of_the_program(frame):
            return
        if self.break_here(frame):
            self.left = self.STEPS
        names = sorted(name for name in frame.f_locals if not name.startswith("@"))
        code = frame.f_code
        self.stops.append(f"{code.co_filename}:{frame.f_lineno} {code.co_name} {names}")
        self.left -= 1
        if self.left > 0:
            self.set_step()
        else:
            self.set_continue()
            sys.settrace(self.trace_dispatch)

    def seen(self) -> Any:
        return self.stops


# -------------------------------------------------------------------------- other people's


class Coverage(Nothing):
    needs = "coverage"

    def start(self) -> None:
        import coverage

        self.coverage = coverage.Coverage(data_file=None, branch=True, include=[PROGRAM])
        self.coverage.start()

    def stop(self) -> None:
        self.coverage.stop()

    def seen(self) -> Any:
        data = self.coverage.get_data()
        return sorted(data.lines(PROGRAM) or []), sorted(data.arcs(PROGRAM) or [])


class LineProfiler(Nothing):
    needs = "line_profiler"

    def start(self) -> None:
        import line_profiler

        functions = (workload.train, workload.Gate.forward, workload.scale, workload.evaluate)
        self.profiler = line_profiler.LineProfiler(*functions)
        self.profiler.enable()

    def stop(self) -> None:
        self.profiler.disable()

    def seen(self) -> Any:
        timings = self.profiler.get_stats().timings
        return {
            str(function): [(line, hits) for line, hits, _ in lines]
            for function, lines in timings.items()
        }


class Viztracer(Nothing):
    """It loses events in a process that has run many other tests, with and without a trace."""

    needs = "viztracer"
    marks = (pytest.mark.nightly,)

    def start(self) -> None:
        import viztracer

        self.cpus = os.sched_getaffinity(0)
        run_on({min(self.cpus)})  # it reads the processor's own counter, and each has another
        self.tracer = viztracer.VizTracer(verbose=0, log_torch=False)
        self.tracer.start()

    def stop(self) -> None:
        self.tracer.stop()
        run_on(self.cpus)
        self.tracer.parse()
        self.events = [e for e in self.tracer.data["traceEvents"] if e["ph"] == "X"]
        self.tracer.terminate()

    def seen(self) -> Any:
        """Names in the order of their beginnings, thread by thread."""
        heard: list[str] = []
        for thread in sorted({event["tid"] for event in self.events}):
            heard += named_within(
                (event["ts"], event["ts"] + event["dur"], event["name"])
                for event in self.events
                if event["tid"] == thread
            )
        return sorted(heard)  # threads have other numbers in another run


def run_on(cpus: set[int]) -> None:
    """Has all threads of this process run on these processors."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(task.name), cpus)


def named_within(spans: Iterator[tuple[float, float, str]]) -> list[str]:
    """The names of those that lie in one of the program's, and in none of ours."""
    kept: list[str] = []
    around: list[tuple[float, str]] = []
    for start, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        around = [(until, outer) for until, outer in around if until > start]
        around.append((end, name))
        if is_path_of_the_program([outer for _, outer in around]):
            kept.append(name)
    return kept


def is_path_of_the_program(names: list[str]) -> bool:
    """Of functions with their files, outside in."""
    mine = [at for at, name in enumerate(names) if PROGRAM in name]
    return bool(mine) and not any(
        OURS in name or (at > mine[-1] and threading.__file__ in name)
        for at, name in enumerate(names)
    )


# -------------------------------------------------------------------------- torch's


class TorchProfiler(Nothing):
    options: dict[str, Any] = {"record_shapes": True, "profile_memory": True}  # noqa: RUF012

    def __init__(self) -> None:
        cpu = [torch.profiler.ProfilerActivity.CPU]
        self.profile = torch.profiler.profile(activities=cpu, **self.options)

    def start(self) -> None:
        self.profile.start()

    def stop(self) -> None:
        self.profile.stop()

    def seen(self) -> Any:
        """Operators with what they were given, and what was allocated, in order.

        Not what was freed: torch counts that by address, also of blocks from before.
        """
        events = sorted(self.profile.events(), key=lambda event: event.time_range.start)
        assert self.profile.profiler is not None
        results: Any = self.profile.profiler.kineto_results
        sizes = [event.nbytes() for event in results.events() if event.name() == "[memory]"]
        return [size for size in sizes if size > 0], [
            f"{event.name} {event.input_shapes} {event.sequence_nr >= 0} {event.scope}"
            for event in events
            if event.name != "[memory]"
        ]


class TorchProfilerWithStacks(TorchProfiler):
    options: dict[str, Any] = {"with_stack": True, "with_modules": True}  # noqa: RUF012

    def seen(self) -> Any:
        """Each event with the Python calls around it, from the program's on."""
        assert self.profile.profiler is not None
        results: Any = self.profile.profiler.kineto_results
        found: Counter[str] = Counter()

        def walk(event: Any, path: str) -> None:
            name = re.sub(r" at 0x[0-9a-f]+", "", event.name)
            if "pytracer" in name and Path(PROGRAM).name not in name:
                return
            if path and name.startswith("threading.py("):
                return
            if path or Path(PROGRAM).name in name:
                path = f"{path} > {name}"
                found[path] += 1
            for child in event.children:
                walk(child, path)

        for event in results.experimental_event_tree():
            walk(event, "")
        return dict(found)


class AutogradProfiler(Nothing):
    def __init__(self) -> None:
        self.profile = torch.autograd.profiler.profile(record_shapes=True)

    def start(self) -> None:
        self.profile.__enter__()

    def stop(self) -> None:
        self.profile.__exit__(None, None, None)

    def seen(self) -> Any:
        rows = self.profile.key_averages(group_by_input_shape=True)
        return sorted((row.key, row.count, str(row.input_shapes)) for row in rows)


class ExecutionTrace(Nothing):
    """torch's record of operators with their inputs, for replaying."""

    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.file = Path(self.folder.name) / "trace.json"
        self.observer = torch.profiler.ExecutionTraceObserver()
        self.observer.register_callback(str(self.file))
        self.observer.start()

    def stop(self) -> None:
        self.observer.stop()
        self.observer.unregister_callback()
        import json

        self.nodes = json.loads(self.file.read_text())["nodes"]
        self.folder.cleanup()

    def seen(self) -> Any:
        return [(node["name"], str(node["inputs"]["shapes"])) for node in self.nodes]


class MemoryHistory(Nothing):
    marks = (pytest.mark.cuda,)
    # A thread gives its cuBLAS handle back after join() has returned. So the next thread may or
    # may not get a handle of its own, with a workspace of 33 MiB.
    threads = False

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=100_000)

    def stop(self) -> None:
        self.snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)

    def seen(self) -> Any:
        """What the allocator did, with the program's frames."""
        return [
            (
                entry["action"],
                entry["size"],
                [f"{f['name']}:{f['line']}" for f in entry["frames"] if f["filename"] == PROGRAM],
            )
            for entries in self.snapshot["device_traces"]
            for entry in entries
            if entry["action"] != "snapshot"
        ]


# -------------------------------------------------------------------------- in every order


def around(tool: Nothing, block: Block, work: Callable[[], Any]) -> list[Any]:
    tool.start()
    with block():
        result = work()
    tool.stop()
    return [result]


def inside(tool: Nothing, block: Block, work: Callable[[], Any]) -> list[Any]:
    with block():
        results = [work()]
        tool.start()
        results.append(work())
        tool.stop()
        results.append(work())
    return results


def begins_first_and_ends_first(tool: Nothing, block: Block, work: Callable[[], Any]) -> list[Any]:
    tool.start()
    with block():
        results = [work()]
        tool.stop()
        results.append(work())
    return results


def begins_last_and_ends_last(tool: Nothing, block: Block, work: Callable[[], Any]) -> list[Any]:
    with block():
        tool.start()
        results = [work()]
    results.append(work())
    tool.stop()
    return results


def between_two_traces(tool: Nothing, block: Block, work: Callable[[], Any]) -> list[Any]:
    tool.start()
    with block():
        results = [work()]
    results.append(work())
    with block():
        results.append(work())
    tool.stop()
    return results


ORDERS = [
    around,
    inside,
    between_two_traces,
    begins_first_and_ends_first,
    begins_last_and_ends_last,
]
TOOLS: list[type[Nothing]] = [
    TraceFunction,
    ProfileFunction,
    TraceFunctionOfThreads,
    ProfileFunctionOfThreads,
    *([Monitoring] if sys.version_info >= (3, 12) else []),
    CProfile,
    Tracemalloc,
    Debugger,
    Coverage,
    LineProfiler,
    Viztracer,
    TorchProfiler,
    TorchProfilerWithStacks,
    AutogradProfiler,
    ExecutionTrace,
    MemoryHistory,
]


def beside(kind: type[Nothing], order: Callable[..., list[Any]]) -> Program:
    def run(device: str, block: Block) -> Any:
        model, optimizer = workload.make()
        workload.train(model.to(device), optimizer, 1)  # what is first is over
        tool = kind()
        results = order(tool, block, lambda: workload.train(model, optimizer, threads=kind.threads))
        return results, model, tool.seen()

    run.__name__ = f"{kind.__name__}-{order.__name__}"
    return Program(run, own_block=True)


PAIRS = {
    (kind, order): beside(kind, order)
    for kind in [Nothing, NothingWithoutThreads, *TOOLS]
    for order in ORDERS
}


@pytest.mark.parametrize("mode", BY_TIER)
@pytest.mark.parametrize("order", first_of(ORDERS, 3, later=pytest.mark.nightly))
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=kind.marks) for kind in TOOLS])
def test_a_tool_sees_of_the_program_what_it_sees_without_a_trace(
    kind: type[Nothing], order: Callable[..., list[Any]], mode: str, tmp_path: Path
) -> None:
    if kind.needs:
        pytest.importorskip(kind.needs)
    device = "cuda" if kind is MemoryHistory else "cpu"

    assert_unchanged(PAIRS[kind, order], device, mode, tmp_path)


@pytest.mark.parametrize("mode", BY_TIER)
@pytest.mark.parametrize("order", first_of(ORDERS, 3, later=pytest.mark.nightly))
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=kind.marks) for kind in TOOLS])
def test_a_trace_beside_a_tool_records_what_it_records_alone(
    kind: type[Nothing], order: Callable[..., list[Any]], mode: str
) -> None:
    if kind.needs:
        pytest.importorskip(kind.needs)
    device = "cuda" if kind is MemoryHistory else "cpu"
    none = Nothing if kind.threads else NothingWithoutThreads
    alone = observe(PAIRS[none, order], device, mode)
    beside_it = observe(PAIRS[kind, order], device, mode)

    for one, other in zip(alone.traces, beside_it.traces, strict=True):
        assert set(one["names"]) <= set(other["names"])
        assert one["allocated"] == other["allocated"]


# -------------------------------------------------------------------------- from a hook


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [TraceFunction, ProfileFunction, CProfile, Debugger])
def test_a_tool_may_begin_inside_a_hook_and_end_after_the_backward(
    kind: type[Nothing], mode: str, tmp_path: Path
) -> None:
    """Not torch's profilers: what a hook starts ends with its node, traced or not."""

    def run(device: str, block: Block) -> Any:
        model, tool, calls = workload.Gate(), kind(), [0]

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            if calls[0] == 5:
                tool.start()
            return gradient.exp()

        with block():
            workload.backward_only(model, 6, hook)
            tool.stop()
        return model, tool.seen()

    assert_unchanged(Program(run, own_block=True), "cpu", mode, tmp_path)


def advice_on_a_profile(device: str, block: Block) -> Any:
    from torch.profiler._pattern_matcher import Conv2dBiasFollowedByBatchNorm2dPattern

    model = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 3), torch.nn.BatchNorm2d(3))
    with block(), torch.profiler.profile(with_stack=True, record_shapes=True) as profile:
        model(torch.ones(1, 3, 8, 8))
    return len(Conv2dBiasFollowedByBatchNorm2dPattern(profile).matched_events())


@pytest.mark.parametrize("mode", first_of(MODES))
def test_torch_gives_the_same_advice_on_a_profile(mode: str, tmp_path: Path) -> None:
    """It looks for modules that follow one another: a frame of ours between them hides that."""
    program = Program(advice_on_a_profile, own_block=True, fresh=True)
    assert_unchanged(program, "cpu", mode, tmp_path)


# -------------------------------------------------------------------------- faulthandler


class Dumps(torch.nn.Module):
    """Writes down where every thread is, in the middle of a forward or of a backward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.how = how
        self.dumps: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dump()
        y = self.inner(x)
        y.register_hook(lambda gradient: self.dump())
        return y

    def dump(self) -> None:
        with tempfile.TemporaryFile("w+") as file:
            if self.how == "asked":
                faulthandler.dump_traceback(file, all_threads=False)
            else:
                faulthandler.register(signal.SIGUSR1, file, all_threads=False)
                os.kill(os.getpid(), signal.SIGUSR1)
                faulthandler.unregister(signal.SIGUSR1)
            file.seek(0)
            lines = file.read().splitlines()
            here = next(i for i, line in enumerate(lines) if line.endswith("in run"))
            self.dumps.append("\n".join(lines[1:here]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["asked", "signalled"])
def test_faulthandler_shows_the_programs_frames_only(how: str, mode: str, tmp_path: Path) -> None:
    def run(device: str, block: Block) -> Any:
        model = Dumps(how)
        with block():
            model(torch.ones(2, 4)).sum().backward()
        return model.dumps, faulthandler.is_enabled()

    assert_unchanged(Program(run, own_block=True), "cpu", mode, tmp_path)


SCRIPT = """
import contextlib, sys
import torch
import pytracer
mode = sys.argv[1]
def block():
    return contextlib.nullcontext() if mode == "untraced" else pytracer.trace(table=False)
torch.manual_seed(0)
"""


def script(folder: Path, body: str, mode: str, *before: str, stdin: str = "") -> tuple[int, ...]:
    """Exit status, stdout and stderr of a program in a file."""
    file = folder / "program.py"
    file.write_text(SCRIPT + textwrap.dedent(body))
    ended = subprocess.run(
        [sys.executable, *before, str(file), mode],
        input=stdin,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    "crash",
    first_of(["ctypes.string_at(0)", "os.abort()", "os.kill(os.getpid(), signal.SIGFPE)"]),
)
def test_a_crash_inside_a_trace_is_reported_as_without_one(crash: str, tmp_path: Path) -> None:
    body = f"""
        import ctypes, faulthandler, os, signal
        faulthandler.enable()
        class Crashes(torch.nn.Module):
            def forward(self, x):
                {crash}
        with block():
            torch.nn.Sequential(torch.nn.Linear(4, 4), Crashes())(torch.ones(2, 4))
    """
    untraced = script(tmp_path, body, UNTRACED)
    assert untraced[0] < 0
    assert "in forward" in untraced[2]

    traced = script(tmp_path, body, "default")
    assert traced[:2] == untraced[:2]
    assert without_modules(traced[2]) == without_modules(untraced[2])


def without_modules(dump: str) -> list[str]:
    """Without addresses, and without the last line: which compiled modules had been imported."""
    lines = re.sub(r"0x[0-9a-f]+", "", dump).splitlines()
    return [line for line in lines if not line.startswith("Extension modules")]


# -------------------------------------------------------------------------- pdb

TO_DEBUG = """
    class Gate(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)
        def forward(self, x):
            doubled = x * 2
            y = self.inner(doubled)
            return y.relu()
    def scale(gradient):
        larger = gradient * 3
        return larger
    def train(model, optimizer):
        x = torch.ones(2, 4)
        out = model(x)
        out.register_hook(scale)
        loss = out.sum()
        loss.backward()
        optimizer.step()
        return loss.item()
    model = torch.nn.Sequential(Gate(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with block():
        print(train(model, optimizer))
        print(train(model, optimizer))
    print("done")
"""
# Stops in a forward, in a hook and before a backward; looks up and down; steps into torch.
SESSION = """
b Gate.forward
b scale
b train
c
n
n
s
w
c
args
p x.shape, sorted(locals())
where
up
p type(self).__name__
down
n
s
where
return
return
c
p gradient
where
n
p sorted(locals())
c
until
disable 1 2
n
n
n
n
s
where
c
p "at the end"
c
q
"""


@pytest.mark.ci
def test_a_session_of_pdb_reads_the_same(tmp_path: Path) -> None:
    untraced = script(tmp_path, TO_DEBUG, UNTRACED, "-m", "pdb", stdin=SESSION)
    assert "(Pdb)" in untraced[1]
    assert "scale()" in untraced[1]

    assert script(tmp_path, TO_DEBUG, "default", "-m", "pdb", stdin=SESSION) == untraced
