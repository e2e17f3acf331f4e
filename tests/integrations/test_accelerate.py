"""Accelerate, unmodified but for `MemoryTrace(accelerator, model)`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pytracer

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("default")


def test_a_prompt_shows_the_options_of_memory_trace() -> None:
    import inspect

    from pytracer.integrations.accelerate import MemoryTrace

    shown = inspect.signature(MemoryTrace).parameters
    assert {"steps", "skip", "path", "watch", "table", "writer", "log"} <= set(shown)
    assert "write the trace there" in str(MemoryTrace.__doc__)


def test_steps_are_the_optimizers_also_where_gradients_accumulate(tmp_path, capsys) -> None:
    from pytracer.integrations.accelerate import MemoryTrace

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.DataLoader(torch.ones(64, 64), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    memory = MemoryTrace(accelerator, model, devices="cpu", path=tmp_path / "run.pytrace")
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    memory.end()
    steps = memory.trace.steps()
    assert steps.micro_steps.tolist() == [2, 2, 2]
    found = memory.trace.summary().own_peak
    weights = (64 * 64 + 64) * 4
    assert found["weights"] == found["gradients"] == weights
    shown = capsys.readouterr().err
    assert "on cpu   step" in shown
    assert f"Written to {tmp_path / 'run.pytrace'}." in shown


@pytest.mark.parametrize("watch", [False, True])
def test_it_traces_on_after_its_steps_if_it_watches_and_until_its_end(watch: bool) -> None:
    from pytracer.data._native import C
    from pytracer.integrations.accelerate import MemoryTrace

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    memory = MemoryTrace(
        accelerate.Accelerator(cpu=True), devices="cpu", steps=2, watch=watch, table=False
    )
    for _ in range(2):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    assert len(memory.trace.steps()) == 2
    assert C.status()["recording"] == watch
    memory.end()
    assert not C.status()["recording"]


def test_a_failure_in_the_block_is_explained(tmp_path, capsys, monkeypatch) -> None:
    from pytracer.integrations.accelerate import MemoryTrace

    monkeypatch.chdir(tmp_path)
    accelerator = accelerate.Accelerator(cpu=True)
    with (
        pytest.raises(RuntimeError, match="DefaultCPUAllocator"),
        MemoryTrace(accelerator, devices="cpu"),
    ):
        torch.empty(1 << 44)
    assert "out of memory on cpu" in capsys.readouterr().err
    assert list(tmp_path.glob("pytracer-oom-*.pytrace"))


@pytest.mark.ci
@pytest.mark.slow
def test_the_launcher_runs_a_script_that_knows_nothing_of_us(tmp_path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(64, 64)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "model(torch.ones(4, 64)).sum().backward()\n"
        "optimizer.step()\n"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=1"]
    command += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    command += ["-m", "pytracer", "run", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(pytracer.__file__).parents[1])}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = pytracer.load(tmp_path / "train.pytrace").summary().own_peak
    assert found["weights"] == found["gradients"] == (64 * 64 + 64) * 4
