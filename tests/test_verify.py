"""Answers that prove themselves: the program is run again, and both are shown side by side."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pytracer
from pytracer import errors
from pytracer.analysis.forecasts.verified import Figure, Verified
from pytracer.cli import main

H200 = Path(__file__).parent / "data" / "h200.pytrace"

TRAIN = """
import sys
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        for layer in self.h:
            x = layer(x)
        return x

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for step in range(int(sys.argv[2])):
    x = torch.randn(int(sys.argv[1]), 16, 32)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    del x
print("the end")
"""


pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The first two steps of the program, by its batch."""
    folder = tmp_path_factory.mktemp("recordings")
    (folder / "train.py").write_text(TRAIN)
    own = [sys.executable, "-m", "pytracer", "run", "--steps", "2", "--no-watch", "--device", "cpu"]
    found = {}
    for batch in (4, 8):
        found[batch] = folder / f"{batch}.pytrace"
        subprocess.run(
            [*own, "-o", str(found[batch]), "train.py", str(batch), "4"],
            check=True,
            capture_output=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the program is, and where the file of errors appears."""
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


@pytest.mark.ci
def test_a_plan_is_run_with_its_modules_checkpointed_and_needs_what_was_foretold(
    folder: Path, recordings: dict[int, Path]
) -> None:
    t = pytracer.load(recordings[8])
    found = t.checkpoint_plan(1, verify=["train.py", "8", "4"])
    assert found.modules
    assert found.verified
    (peak,) = found.verified.figures
    assert (peak.lowest, peak.error) == (found.chosen.peak, pytest.approx(0, abs=0.001))
    assert "predicted" in str(found)
    assert "no limit" in found.verified.notes[0]


@pytest.mark.ci
def test_what_if_is_held_against_the_program_with_that_batch(
    folder: Path, recordings: dict[int, Path]
) -> None:
    small, larger = (pytracer.load(file) for file in recordings.values())
    assert small.what_if(larger, batch=24, verify="train.py 24 4").verified
    wrong = small.what_if(larger, batch=24, verify="train.py 48 4").verified
    assert wrong is not None
    assert not wrong
    assert wrong.figures[0].error < -0.2


@pytest.mark.ci
def test_each_verification_is_a_line_with_what_it_holds_for(
    folder: Path, recordings: dict[int, Path]
) -> None:
    small, larger = (pytracer.load(file) for file in recordings.values())
    for _ in range(2):
        small.what_if(larger, batch=12, verify="train.py 12 2")
    lines = [json.loads(line) for line in Path("pytracer-verified.jsonl").read_text().splitlines()]
    assert [line["question"] for line in lines] == ["what_if"] * 2
    assert lines[0]["held"] is True
    assert lines[0]["peak"]["error"] == 0
    assert lines[0].keys() >= {"torch", "cuda", "cudnn", "device", "date", "pytracer"}


@pytest.mark.ci
def test_the_program_ends_with_the_steps_of_the_trace(
    folder: Path, recordings: dict[int, Path]
) -> None:
    """A training of days is run for as many steps as were recorded."""
    small, larger = (pytracer.load(file) for file in recordings.values())
    assert small.what_if(larger, batch=12, verify=["train.py", "12", "100000000"]).verified


@pytest.mark.ci
def test_the_command_shows_both_side_by_side(
    folder: Path, recordings: dict[int, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file, larger = str(recordings[4]), str(recordings[8])
    program = ["--verify", "--", "train.py", "12", "2"]
    assert main(["what-if", file, larger, "--batch", "12", *program]) == 0
    said = capsys.readouterr().out
    assert "predicted      measured       error" in said
    assert "it held" in said
    budget = ["fits", file, "--plan", "--on", "1KiB"]
    assert main([*budget, "--verify", "--", "train.py", "4", "2"]) == 3
    assert "no plan fits in 1.00 KiB" in capsys.readouterr().out
    assert main([*budget, "--json", "--verify", "--", "train.py", "4", "2"]) == 3
    assert json.loads(capsys.readouterr().out)["verified"]["held"] is True
    assert (
        main(["what-if", file, larger, "--batch", "12", "--verify", "--", "train.py", "40", "2"])
        == 1
    )


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (True, r"needs the program to run again \(it was train.py, the trace says\)"),
        ([], "needs the program to run again"),
        ("nothing.py", "recorded nothing: .*cannot read nothing.py"),
        ("train.py 0 x", "train.py 0 x recorded nothing|train.py 0 x failed"),
    ],
)
def test_what_cannot_be_run_gets_one_clear_line(
    folder: Path, recordings: dict[int, Path], program: object, says: str
) -> None:
    t = pytracer.load(recordings[4])
    with pytest.raises(errors.UsageError, match=says):
        t.checkpoint_plan(1, verify=program)  # type: ignore[arg-type]


def test_a_program_without_the_modules_of_the_plan_is_said(
    folder: Path, recordings: dict[int, Path]
) -> None:
    t = pytracer.load(recordings[4])
    Path("other.py").write_text(TRAIN.replace("self.h", "self.layers"))
    with pytest.raises(
        errors.UsageError, match=r"other.py 4 2 .*no module of this name: --checkpoint h\.0"
    ):
        t.checkpoint_plan(1, verify=["other.py", "4", "2"])


def test_the_answer_is_shown_where_it_cannot_be_verified(
    folder: Path, recordings: dict[int, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    code = main(["fits", str(H200), "--on", "24GiB", "--verify", "--", "train.py", "4", "2"])
    shown = capsys.readouterr()
    assert code == errors.UsageError.exit_code
    assert shown.out.startswith("fits      yes, on 24.0 GiB")
    assert "about a CUDA device, and there is none here" in shown.err
    assert "Traceback" not in shown.err


def test_an_interval_holds_with_what_is_inside_of_it() -> None:
    assert Figure("peak", 90, 110, 100).error == 0
    assert Figure("peak", 90, 110, 120).error == pytest.approx(110 / 120 - 1)
    machine = {"device": "cpu", "torch": "2"}

    def verified(figure: Figure, ran: bool = True) -> Verified:
        return Verified("fits", None, True, ran, (figure,), machine, "file")

    assert verified(Figure("peak", 90, 110, 100))
    assert not verified(Figure("peak", 90, 110, 120))
    assert not verified(Figure("peak", 90, 110, 100), ran=False)
