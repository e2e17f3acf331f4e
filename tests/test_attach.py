"""`pytracer attach` joins a job that runs, changes none of its results, and leaves it as it was."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pytracer
from pytracer import History
from pytracer.cli import attach
from tests.tiers import by_tier

_ROOT = Path(pytracer.__file__).parents[1]

# Trains until a file says stop, and writes each loss to the bit.
_TRAIN = """
import sys, threading, torch
from pathlib import Path
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters())
names, steps = set(globals()), int(sys.argv[1])
with open("losses", "w") as losses:
    step = 0
    while not Path("stop").exists() if steps == 0 else step < steps:
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.write(loss.item().hex() + "\\n")
        losses.flush()
        step += 1
new = set(globals()) - names - {"names", "steps", "losses", "step", "loss"}
print(new or "no new names", threading.active_count())
"""
_GENERATE = """
import time, torch
model = torch.nn.Linear(64, 64)
while True:
    with torch.no_grad():
        model(torch.ones(8, 64))
    time.sleep(0.001)
"""


def why_not() -> str:
    """Why nothing can be attached here; "" if it can."""
    if sys.version_info < (3, 14) and shutil.which("gdb") is None:
        return "needs gdb"
    process = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); input()"], **_PIPES)
    process.stdout.readline()
    debugger = ["gdb", "-nx", "-batch", "-p", str(process.pid)]
    said = subprocess.run(debugger, capture_output=True, text=True, check=False).stderr
    process.kill()
    process.communicate()
    return "ptrace is forbidden here" if "not permitted" in said else ""


_PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
_WHY_NOT = why_not()
can_attach = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "it can")
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts Python in a folder that knows no pytracer."""
    monkeypatch.chdir(tmp_path)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    started = []

    def begin(code: str, *words: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", code, *words]
        started.append(subprocess.Popen(command, env=environment, stderr=2, **_PIPES))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def pytracer_(*words: object, **more: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), **more}
    command = [sys.executable, "-m", "pytracer", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def wait_for_steps(count: int) -> None:
    losses, until = Path("losses"), time.monotonic() + 120
    while not (losses.exists() and losses.read_text().count("\n") >= count):
        assert time.monotonic() < until
        time.sleep(0.02)


@can_attach
@pytest.mark.slow
@pytest.mark.parametrize("debugger", ["gdb", "lldb"])
def test_losses_stay_bit_equal_however_often_one_attaches(start: Start, debugger: str) -> None:
    found = shutil.which(debugger)
    if found is None and sys.version_info < (3, 14):
        pytest.skip(f"needs {debugger}")
    Path("only").mkdir()
    Path("only", debugger).symlink_to(found or "/nowhere")
    job = start(_TRAIN, "0")
    wait_for_steps(3)
    for number in range(by_tier(2, 10, 100)):
        steps = ["--steps", "2"] if number % 2 else []
        ended = pytracer_(
            "attach", job.pid, "-o", f"{number}", *steps, PATH=str(Path("only").absolute())
        )
        assert ended.returncode == 0, ended.stderr
        left = pytracer_("detach", job.pid)
        assert left.returncode == bool(steps), left.stderr
    Path("stop").touch()
    assert job.communicate()[0] == "no new names 1\n"
    disturbed = Path("losses").read_text()
    assert History("0").step_count >= 0
    start(_TRAIN, str(disturbed.count("\n"))).wait()
    assert Path("losses").read_text() == disturbed


@can_attach
@pytest.mark.slow
def test_a_trace_of_some_steps_knows_every_byte(start: Start) -> None:
    job = start(_TRAIN, "0")
    wait_for_steps(3)
    ended = pytracer_("attach", job.pid, "--steps", 3, "--stacks", "-o", "run.pytrace")
    assert ended.returncode == 0, ended.stderr
    assert "Left the job after 3 steps." in ended.stdout
    found = pytracer.load("run.pytrace")
    parameters = (16 * 64 + 64 + 64 * 4 + 4) * 4
    assert found.peak.by_category["weights"] == parameters
    assert found.peak.by_category["gradients"] == parameters
    assert found.peak.by_category["unknown"] == 0
    assert len(found.steps()) >= 3
    assert "is not attached" in pytracer_("detach", job.pid).stderr


@can_attach
@pytest.mark.slow
def test_always_on_goes_on_until_detach(start: Start) -> None:
    job = start(_TRAIN, "0")
    wait_for_steps(3)
    began = pytracer_("attach", job.pid, "-o", "mine", "--max-size", "1MiB")
    assert began.returncode == 0, began.stderr
    assert "attached to this job already" in pytracer_("attach", job.pid, "-o", "two").stderr
    time.sleep(0.5)
    assert pytracer_("detach", job.pid).returncode == 0
    history = History("mine")
    assert history.step_count > 0
    assert history.look(0).peak.by_category["unknown"] == 0
    assert not Path("two").exists()


@can_attach
@pytest.mark.slow
def test_a_job_without_steps_is_joined_within_one(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = start(_GENERATE)
    while "libtorch" not in Path(f"/proc/{job.pid}/maps").read_text():
        time.sleep(0.05)
    time.sleep(3)
    monkeypatch.setattr(attach, "_FOR_A_STEP", 0.5)
    options = {"devices": ["cpu"]}
    about = {"path": str(Path("mine").absolute()), "options": options, "steps": None}
    assert attach._begin(job.pid, about) == 0
    assert "no step has ended" in capsys.readouterr().err
    assert pytracer_("detach", job.pid).returncode == 0
    assert History("mine").look(0).peak.bytes > 0


@can_attach
@pytest.mark.slow
def test_a_job_that_ends_completes_its_recording(start: Start) -> None:
    job = start(_TRAIN, "0")
    wait_for_steps(3)
    assert pytracer_("attach", job.pid, "-o", "mine").returncode == 0
    Path("stop").touch()
    assert job.communicate()[0] == "no new names 1\n"
    assert job.returncode == 0
    assert History("mine").step_count > 0


def refusal_of(pid: int, **more: str) -> str:
    ended = pytracer_("attach", pid, **more)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    return ended.stderr


def test_what_cannot_be_joined_is_refused_in_one_line(start: Start) -> None:
    sleep = subprocess.Popen(["sleep", "60"])
    plain = start("import time; print('up', flush=True); time.sleep(60)")
    plain.stdout.readline()
    try:
        assert "is not Python" in refusal_of(sleep.pid)
        assert "has not imported torch" in refusal_of(plain.pid)
        plain.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        assert "is stopped" in refusal_of(plain.pid)
        sleep.kill()
        sleep.wait()
        assert "there is no process" in refusal_of(sleep.pid)
    finally:
        sleep.kill()
        sleep.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_job_is_refused() -> None:
    process = subprocess.Popen(["sleep", "60"], user=65534)
    try:
        assert "is another user's: run this as user 65534" in refusal_of(process.pid)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python needs no debugger")
def test_no_debugger_and_no_ptrace_are_refused(start: Start, tmp_path: Path) -> None:
    job = start(_TRAIN, "0")
    wait_for_steps(3)
    assert "needs gdb or lldb" in refusal_of(job.pid, PATH=str(tmp_path))
    (tmp_path / "gdb").write_text("#!/bin/sh\necho 'ptrace: Operation not permitted.'\n")
    (tmp_path / "gdb").chmod(0o755)
    assert "is forbidden here" in refusal_of(job.pid, PATH=f"{tmp_path}:{os.environ['PATH']}")


@can_attach
@pytest.mark.slow
def test_a_job_with_another_pytracer_is_refused(start: Start) -> None:
    Path("beside").mkdir()
    Path("beside/pytracer.py").write_text("")
    job = start(f"import sys; sys.path.append('beside')\n{_TRAIN}", "0")
    wait_for_steps(3)
    assert "has another pytracer" in refusal_of(job.pid)
