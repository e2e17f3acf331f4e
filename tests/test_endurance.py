"""Long, large, killed and out of room: what a recording does when it does not end well."""

import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pytracer
from pytracer import errors
from pytracer.analysis.facts.lifetimes import lifetimes
from pytracer.capture.labels import Labels
from pytracer.data import schema
from pytracer.data._native import C
from pytracer.data.recorded import Trace

ROOT = Path(__file__).parents[1]
MIB = 1 << 20

# Pages in memory, of this process.
RSS = """
import os
def rss():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
"""

# A model whose step is a few dozen operators: quick, and with everything a step has.
TINY_STEPS = """
import torch
import pytracer
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
batch = torch.randn(2, 8)
def step():
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()
"""


def run_alone(program: str, *arguments: object, timeout: float = 300) -> str:
    """Runs a program in a process of its own: its memory and its limits are then its own."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def numbers(output: str) -> dict[str, float]:
    """`name value` lines."""
    return {name: float(value) for name, value in (line.split() for line in output.splitlines())}


def assert_consistent(data: Trace) -> None:
    """Whatever is there refers only to what is there, and every free has its alloc."""
    assert data.events.scope.max(initial=0) <= len(data.scopes.ticks)
    assert data.scopes.parent.max(initial=0) <= len(data.scopes.ticks)
    assert data.scopes.name.max(initial=0) < len(data.strings)
    # An end may come a moment before its begin is read: only in the last, unfinished, stretch.
    assert data.events.place.max(initial=0) < len(data.places.stream)
    assert data.events.thread.max(initial=0) < max(1, len(data.threads.native_id))
    counters = lifetimes(data).counters
    unknown = ("frees_from_before", "unmatched_labels", "implicit_frees", "unknown_places")
    for name in ("unmatched_frees", *unknown):
        assert counters[name] == 0, counters


@pytest.mark.ci
@pytest.mark.slow
def test_ten_thousand_steps_written_to_a_file_do_not_grow_the_process(tmp_path: Path) -> None:
    """Kept in memory, what these steps record would be forty times the tolerance."""
    output = run_alone(
        RSS
        + TINY_STEPS
        + """
import sys
with pytracer.trace(model, optimizer, path=sys.argv[1], table=False):
    for _ in range(2_000):  # every table and every spare chunk is there by then
        step()
    warm = rss()
    for _ in range(10_000):
        step()
    print("grown", rss() - warm)
    print("events", pytracer.data._native.C.status()["events"])
""",
        tmp_path / "run.pytrace",
    )
    found = numbers(output)
    assert found["events"] > 500_000
    assert found["grown"] < 8 * MIB


@pytest.mark.ci
@pytest.mark.slow
def test_ten_million_events_go_to_disk(tmp_path: Path) -> None:
    """Every event arrives, and no more memory is held than what is on its way."""
    path = tmp_path / "run.pytrace"
    output = run_alone(
        RSS
        + """
import sys, torch, pytracer
from pytracer.data._native import C
torch.set_num_threads(1)
empty = torch.empty
highest = before = rss()
with pytracer.trace(path=sys.argv[1], devices="cpu", detail="category", table=False):
    for _ in range(500):
        for _ in range(10_000):
            empty(64)
        highest = max(highest, rss())
    print("recorded", C.status()["events"])
print("held", highest - before)
""",
        path,
        timeout=600,
    )
    found = numbers(output)
    assert found["recorded"] >= 10_000_000
    # The logs of all of it would be 320 MB.
    assert found["held"] < 100 * MIB
    data = pytracer.load(path).data
    assert len(data.events.ticks) == found["recorded"]
    assert np.count_nonzero(data.events.action == schema.ACTION["alloc"]) == 5_000_000
    assert np.count_nonzero(data.events.action == schema.ACTION["free_completed"]) == 5_000_000
    assert not data.losses
    assert_consistent(data)
    assert path.stat().st_size / found["recorded"] < 12


# ---------------------------------------------------------------------------- bounded memory


def allocate(count: int) -> None:
    for _ in range(count):
        torch.empty(16)


def test_max_events_bounds_what_is_kept_and_names_what_is_lost() -> None:
    with pytracer.trace(devices="cpu", table=False) as whole:
        allocate(3_000)
    with pytracer.trace(devices="cpu", max_events=1_000, table=False) as bounded:
        allocate(3_000)
    kept, lost = bounded.data.events, bounded.data.losses
    assert not whole.data.losses
    assert len(kept.ticks) == 1_000
    assert {"lost_alloc", "lost_free_completed"} <= lost.keys()
    for action in ("alloc", "free_completed"):
        number = schema.ACTION[action]
        recorded = np.count_nonzero(kept.action == number)
        assert recorded + lost[f"lost_{action}"] == np.count_nonzero(
            whole.data.events.action == number
        )
    # Two allocations in one op, and the op of another: scopes are bounded and counted too.
    assert len(bounded.data.scopes.ticks) <= 1_000
    assert len(bounded.data.scopes.ticks) + lost["lost_scopes"] >= len(whole.data.scopes.ticks)


def test_a_trace_inside_a_full_one_records_its_own_and_blames_nobody() -> None:
    with pytracer.trace(devices="cpu", max_events=50, table=False) as outer:
        allocate(200)
        with pytracer.trace(devices="cpu", table=False) as inner:
            large = torch.ones(1_000_000)
            allocate(100)
        allocate(200)
    assert inner.peak.bytes >= large.nbytes
    assert len(inner.data.events.ticks) == 2 * 100 + 1
    assert inner.data.losses == {}
    assert len(outer.data.events.ticks) == 50 + 2 * 100 + 1
    assert outer.data.losses["lost_alloc"] == (200 - 25) + 200
    assert "lost_unfinished_rows" not in outer.data.losses


def test_losses_are_saved_with_the_trace(tmp_path: Path) -> None:
    with pytracer.trace(devices="cpu", max_events=100, table=False) as bounded:
        allocate(200)
    loaded = pytracer.load(bounded.save(tmp_path / "run.pytrace"))
    assert loaded.data.losses == bounded.data.losses != {}


def test_losses_are_streamed_with_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.pytrace"
    with pytracer.trace(devices="cpu", max_events=100, path=path, table=False) as bounded:
        allocate(200)
    loaded = pytracer.load(path)
    assert len(loaded.data.events.ticks) == 100
    assert loaded.data.losses == bounded.data.losses
    assert loaded.data.losses["lost_alloc"] == 150


@pytest.mark.ci
@pytest.mark.slow
def test_a_full_log_costs_no_more_memory() -> None:
    """Two million refused events need no room."""
    most = 100_000
    with pytracer.trace(devices="cpu", max_events=most, table=False):
        allocate(most)
        full = C.status()["host_bytes"]
        allocate(1_000_000)
        assert C.status()["host_bytes"] == full
    assert full <= 3 * 2 * 2 * MIB  # three logs of at most two chunks


# ---------------------------------------------------------------------------- no room on disk


def limited(program: str, path: Path, limit: int) -> dict[str, Any]:
    """Runs a program whose files may not grow beyond `limit` bytes, as on a full disk."""
    source = TINY_STEPS + textwrap.dedent(program)
    result = subprocess.run(
        [sys.executable, "-c", source, str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    return {"code": result.returncode, "out": result.stdout, "err": result.stderr}


PLAIN_LOSSES = """
print(*[step().hex() for _ in range(4_000)])
"""

TRACED_LOSSES = """
import sys
losses = []
with pytracer.trace(model, optimizer, path=sys.argv[1], table=False) as t:
    for _ in range(4_000):
        losses.append(step().hex())
print(*losses)
print(len(t.allocations()), "allocations", file=sys.stderr)
"""


@pytest.mark.ci
def test_a_full_disk_is_told_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.pytrace"
    plain = limited(PLAIN_LOSSES, path, 512 * 1024)
    traced = limited(TRACED_LOSSES, path, 512 * 1024)
    assert plain["code"] == 0, plain["err"]
    assert traced["code"] == 0, traced["err"]
    assert traced["out"] == plain["out"]
    # At the program's own line, which is of no file here.
    assert re.search(r"^<string>:\d+: RuntimeWarning: .*run\.pytrace.*no room", traced["err"], re.M)
    assert re.search(r"^[1-9]\d+ allocations$", traced["err"], re.MULTILINE)  # what came before
    assert path.stat().st_size <= 512 * 1024
    with pytest.warns(RuntimeWarning, match="the file ends before its"):
        loaded = pytracer.load(path)
    assert loaded.file_report["status"] == "truncated"
    assert len(loaded.data.events.ticks) > 0
    assert_consistent(loaded.data)


def test_a_file_that_cannot_be_made_is_told_at_once(tmp_path: Path) -> None:
    recorded = pytracer.trace(path=tmp_path / "nowhere" / "run.pytrace", devices="cpu")
    with pytest.raises(errors.CannotWrite, match="nowhere"), recorded:
        pass
    assert not C.status()["recording"]
    (tmp_path / "run.pytrace").write_text("somebody's")
    recorded = pytracer.trace(path=tmp_path / "run.pytrace", devices="cpu")
    with pytest.raises(errors.CannotWrite, match=r"run\.pytrace"), recorded:
        pass
    assert (tmp_path / "run.pytrace").read_text() == "somebody's"


@pytest.mark.ci
@pytest.mark.slow
def test_the_programs_own_exception_is_not_hidden_by_a_full_disk(tmp_path: Path) -> None:
    ended = limited(
        """
        import sys
        with pytracer.trace(model, optimizer, path=sys.argv[1], table=False):
            for _ in range(4_000):
                step()
            raise ZeroDivisionError("the program's own")
        """,
        tmp_path / "run.pytrace",
        512 * 1024,
    )
    assert ended["code"] == 1
    assert ended["err"].splitlines()[-1] == "ZeroDivisionError: the program's own"


@pytest.mark.ci
@pytest.mark.parametrize("way", ["ends the trace", "never ends it"])
def test_a_forked_child_does_not_wait_and_the_file_is_its_parents(way: str, tmp_path: Path) -> None:
    path = tmp_path / "run.pytrace"
    program = """
    import os, signal, sys, time
    import torch
    import pytracer
    t = pytracer.trace(devices="cpu", path=sys.argv[1], table=False)
    t.__enter__()
    torch.ones(1_000)
    time.sleep(0.2)  # the thread that writes waits for its next round
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends it if it hangs
        torch.ones(2_000)
        if sys.argv[2] == "ends the trace":
            t.__exit__(None, None, None)
        sys.exit()
    status = os.waitpid(child, 0)[1]
    torch.ones(3_000)
    t.__exit__(None, None, None)
    print(status)
    """
    assert run_alone(program, path, way, timeout=60) == "0\n"
    loaded = pytracer.load(path)
    assert loaded.file_report["status"] == "complete"
    allocated = loaded.data.events.action == schema.ACTION["alloc"]
    assert loaded.data.events.bytes[allocated].tolist() == [4_000, 12_000]


def test_interrupted_by_control_c_the_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.pytrace"

    def interrupted() -> None:
        with pytracer.trace(path=path, devices="cpu", table=False):
            allocate(10)
            signal.raise_signal(signal.SIGINT)
            time.sleep(10)

    # A shell starts what it puts in the background deaf to Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    signal.signal(signal.SIGINT, before)
    loaded = pytracer.load(path)
    assert loaded.file_report["status"] == "complete"
    assert np.count_nonzero(loaded.data.events.action == schema.ACTION["alloc"]) == 10


@pytest.mark.ci
def test_threads_that_train_for_long_do_not_meet_in_each_others_gradients() -> None:
    """A gradient that another thread's engine or zero_grad() is ending must not be looked at."""
    program = """
        import threading, torch, pytracer
        from torch import nn

        torch.set_num_threads(1)

        def train():
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(60):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()

        with pytracer.trace(devices="cpu", table=False) as t:
            threads = [threading.Thread(target=train) for _ in range(4)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
        gradients = t.allocations().query("category == 'gradients'")
        print(len(gradients), t.summary().loc["gradients", "own_peak"])
    """
    count, at_once = map(int, run_alone(program).split())

    assert count == 4 * 60 * 80  # every weight and bias, every step
    assert at_once <= 4 * 40 * 80


@pytest.mark.ci
@pytest.mark.slow
def test_threads_that_come_and_go_leave_next_to_nothing() -> None:
    """DataParallel starts one per replica in each forward."""
    grown = run_alone(
        RSS
        + """
import threading
import torch
import pytracer
model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
def run(count):
    for _ in range(count):
        thread = threading.Thread(target=lambda: model(x).sum())
        thread.start()
        thread.join()
with pytracer.trace(model, table=False, devices="cpu", max_events=100_000):
    run(200)
    before = rss()
    run(600)
    print((rss() - before) >> 20)
"""
    )
    assert int(grown) < 60  # MiB; it was one for each thread


def test_modules_made_for_one_call_do_not_make_the_models_be_walked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`nn.Softmax(dim=-1)(x)` in a forward: some programs make thousands."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.out(torch.nn.Softmax(dim=-1)(x))
            return result

    walks = 0
    walk = Labels._walk

    def counted(self: Labels, root: Any) -> None:
        nonlocal walks
        walks += root.name == "Attention"
        walk(self, root)

    monkeypatch.setattr(Labels, "_walk", counted)
    model = Attention()
    with pytracer.trace(model, table=False, devices="cpu") as t:
        for _ in range(20):
            model(torch.ones(2, 8)).sum().backward()
    assert walks <= 3
    assert {"out", "Softmax"} <= set(t.allocations().module.dropna())
