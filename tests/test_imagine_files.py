"""An imagined run, a search for a batch and a verification change no file of the user's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import pytracer
from programs.writers import frameworks, libraries, plain, processes, user_files
from pytracer import errors, trace
from pytracer.cli import main
from pytracer.imagined import search
from pytracer.sandbox import launch
from tests.private_views import ENVIRONMENT, ROOT

PLACES = {"plain": plain, "processes": processes, "libraries": libraries, "frameworks": frameworks}
WRITERS = [f"{place}.{name}" for place, module in PLACES.items() for name in module.WRITERS]

TRAIN = """
import sys
import torch
from torch import nn
rows, device = int(sys.argv[1]), "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(2):
    with open("log.csv", "w") as log:
        loss = model(torch.randn(rows, 64, device=device)).square().mean()
        loss.backward()
        log.write(f"{loss.item()}")
    torch.save(model.state_dict(), "model.pt")
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


def prepare(here: Path, names: list[str]) -> dict[str, user_files.Entry]:
    for name in names:
        (here / name).mkdir()
        user_files.make(here / name)
    return user_files.record(here)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.usefixtures("way")
def test_imagined_writers_change_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files, libraries, processes and frameworks, in one run that reads back what it wrote."""
    pytest.importorskip("transformers")
    pytest.importorskip("lightning")
    before = prepare(here, WRITERS)
    command = ["imagine", "--on", "T4", "--steps", "999", "--json", "-m", "programs.writers"]
    main([*command, *WRITERS])
    card = json.loads(capsys.readouterr().out)["cards"][0]
    assert card["problem"] is None
    assert user_files.record(here) == before
    changed = {(one["path"], one["kind"]) for one in card["touched"]["changes"]}
    for name in (
        "libraries.torch_checkpoint/model.pt",
        "libraries.safetensors_checkpoint/model.safetensors",
        "frameworks.trainer/memory.jsonl",
        "frameworks.trainer/results/checkpoint-2/trainer_state.json",
    ):
        assert (str(here / name), "written") in changed


INSIDE = """
import os, sys
from pathlib import Path
import pytracer
from programs.writers.__main__ import run, train

if __name__ == "__main__":
    top = Path.cwd()
    with pytracer.imagine("T4") as t:
        train()
        for name in sys.argv[1:]:
            os.chdir(top / name)
            run(name, top / name)
        os.chdir(top)
    assert t.peak.bytes
    assert any(one.path.endswith("libraries.torch_checkpoint/model.pt") for one in t.touched)
"""


@pytest.mark.ci
@pytest.mark.slow
def test_a_block_of_writers_changes_nothing(here: Path, tmp_path: Path) -> None:
    """`pytracer.imagine()` in Python makes the same promise."""
    pytest.importorskip("transformers")
    pytest.importorskip("lightning")
    before = prepare(here, WRITERS)
    script = tmp_path / "inside.py"
    script.write_text(INSIDE)
    ran = subprocess.run(
        [sys.executable, script, *WRITERS], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert user_files.record(here) == before


@pytest.mark.ci
@pytest.mark.usefixtures("way")
def test_the_command_lists_and_keeps_what_was_written(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's files stay until --write says otherwise."""
    user_files.make(here)
    (here / "train.py").write_text(TRAIN)
    before = user_files.record(here)
    assert main(["imagine", "--on", "T4", "train.py", "4"]) == 0
    assert user_files.record(here) == before
    shown = " ".join(capsys.readouterr().out.split())
    assert "Nothing of yours was changed. The program would have written 2 files: log.csv" in shown
    assert "--write" in shown
    assert main(["imagine", "--on", "T4", "--write", "--json", "train.py", "4"]) == 0
    card = json.loads(capsys.readouterr().out)["cards"][0]
    assert card["touched"]["kept"]
    assert (here / "log.csv").read_text() == "1.0"
    assert (here / "model.pt").stat().st_size > 4 * 2 * 64 * 64


def test_write_is_for_one_run(here: Path) -> None:
    """Several runs would write over each other."""
    assert main(["imagine", "--on", "T4,A10", "--write", "train.py"]) == 2
    assert main(["imagine", "--on", "T4", "--write", "--largest-batch", "x.py", "{batch}"]) == 2


def test_unprotected_runs_write_for_real(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no view is possible, the command refuses, and names the option for it."""
    monkeypatch.setattr(launch, "WAYS", [])
    (here / "train.py").write_text(TRAIN)
    assert main(["imagine", "--on", "T4", "train.py", "4"]) == 1
    assert "--unprotected" in capsys.readouterr().err
    assert not (here / "log.csv").exists()
    assert main(["imagine", "--on", "T4", "--unprotected", "train.py", "4"]) == 0
    assert (here / "log.csv").exists()


@pytest.mark.ci
@pytest.mark.usefixtures("way")
def test_a_program_that_fails_writes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even with --write, because its files may be half of what they were to be."""
    user_files.make(here)
    (here / "train.py").write_text(TRAIN + "\nraise ValueError('half')\n")
    before = user_files.record(here)
    assert main(["imagine", "--on", "T4", "--write", "--steps", "9", "train.py", "4"]) == 1
    assert "ValueError: half" in capsys.readouterr().out
    assert user_files.record(here) == before


@pytest.mark.ci
def test_a_search_changes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch is a run of its own, with a view of its own."""
    monkeypatch.setattr(search, "_MOST_TRIES", 3)
    user_files.make(here)
    (here / "train.py").write_text(TRAIN)
    before = user_files.record(here)
    command = ["imagine", "--on", "T4", "--capacity", "1300MiB", "--largest-batch", "--json"]
    assert main([*command, "train.py", "{batch}"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cards"][0]["largest_batch"] > 1
    assert len(document["touched"]) == len(document["cards"][0]["tries"])
    assert document["touched"][0]["changes"]
    assert user_files.record(here) == before


@pytest.mark.ci
def test_a_verification_changes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program runs for real, and its files are private all the same."""
    user_files.make(here)
    (here / "train.py").write_text(TRAIN)
    record = [sys.executable, "-m", "pytracer", "run", "--device", "cpu", "-o"]
    for rows in (4, 8):
        words = [f"{rows}.pytrace", "train.py", str(rows)]
        subprocess.run([*record, *words], check=True, capture_output=True)
    before = user_files.record(here)
    words = ["what-if", "4.pytrace", "8.pytrace", "--batch", "16", "--verify", "--json"]
    assert main([*words, "--", "train.py", "16"]) == 0
    verified = json.loads(capsys.readouterr().out)["verified"]
    assert [Path(one["path"]).name for one in verified["touched"]] == ["log.csv", "model.pt"]
    after = user_files.record(here)
    own = after.pop("pytracer-verified.jsonl")
    assert own.size
    del before["."], after["."]
    assert after == before


def test_a_connection_is_refused_with_the_option_that_allows_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program fails with an error that the user can act on."""
    ask = "import socket\nsocket.create_connection(('203.0.113.7', 80), timeout=5)\n"
    (here / "train.py").write_text("import torch\n" + ask)
    assert main(["imagine", "--on", "T4", "train.py"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "does not reach 203.0.113.7; allow it with --allow-network" in shown


# ---------------------------------------------------------------- traces inside


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 10, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_trace_inside_is_the_runs(tmp_path: Path) -> None:
    """As a block, as a decorator, with a schedule and with a file that it reads back."""
    path = tmp_path / "inner.pytrace"
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with pytracer.imagine("T4") as outer:
        model = nn.Linear(10, 10).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        with trace(model, optimizer, path=path, table=False) as inner:
            for _ in range(3):
                step(model, optimizer)
        assert pytracer.load(path).peak == inner.peak
        traced = trace(table=False)(step)
        traced(model, optimizer)
        with trace(schedule=schedule, table=False) as some:
            for _ in range(3):
                step(model, optimizer)
                some.step()
    assert inner.peak.device == "cuda:0"
    assert len(inner.steps()) == 3
    assert inner.data.meta["imagined"]["card"] == "T4"
    assert traced.last.peak.bytes >= inner.peak.bytes  # type: ignore[attr-defined]
    assert some.peak.bytes >= inner.peak.bytes
    assert outer.peak.bytes >= some.peak.bytes
    assert not path.exists()
    with trace(table=False) as later:
        torch.zeros(1000)
    assert later.peak.bytes == 4000


@pytest.mark.ci
@pytest.mark.parametrize("variable", ["PYTRACER", "PYTRACER=steps=1"])
def test_a_program_that_traces_itself_is_imagined(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """With `with trace():` in it, and where the environment asks for a recording."""
    monkeypatch.setenv("PYTRACER", variable.partition("=")[2] or "1")
    text = TRAIN.replace("for step in range(2):", "for step in trace_each():")
    head = """
from pytracer import trace
def trace_each():
    with trace():
        yield from range(2)
"""
    (here / "train.py").write_text(head + text)
    assert main(["imagine", "--on", "T4", "train.py", "4"]) == 0
    assert "INTERNAL ASSERT" not in capsys.readouterr().out


def test_a_second_card_is_still_an_error() -> None:
    """One run has one card."""
    with pytracer.imagine("T4"), pytest.raises(errors.CaptureError, match="already"):
        pytracer.imagine("A10").__enter__()


def test_checkpoints_have_shapes_and_sizes(here: Path) -> None:
    """They load as stand-ins, which take memory on the card."""
    with pytracer.imagine("T4"):
        model = nn.Linear(1000, 100).cuda()
        torch.save({"model": model.state_dict(), "step": 7}, "model.pt")
        size = 4 * (1000 * 100 + 100)
        assert Path("model.pt").stat().st_size >= size
        before = torch.cuda.memory_allocated()
        loaded = torch.load("model.pt")
        assert torch.cuda.memory_allocated() >= before + size
        assert loaded["step"] == 7
        assert loaded["model"]["weight"].shape == (100, 1000)
        on_host = torch.load("model.pt", map_location="cpu")["model"]["weight"]
        assert on_host.device.type == "cpu"
        model.load_state_dict(loaded["model"])
    assert not (here / "model.pt").exists()
