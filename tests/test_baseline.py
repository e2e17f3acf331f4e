"""`pytracer baseline` and `pytracer check` of a program: memory in CI without a GPU."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from programs import regressions
from programs.regressions import Harmless, Regression
from pytracer import errors
from pytracer.analysis.answers import baselines, breakdown, diff
from pytracer.analysis.facts import usage
from pytracer.cli import main
from pytracer.imagined import baseline
from tests.test_check import a_trace

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
SCRIPT = """\
import sys
import torch
model = torch.nn.Linear(512, 512).to("cuda")
optimizer = torch.optim.SGD(model.parameters())
kept = []
for _ in range(2):
    x = torch.randn(1024, 512, device="cuda")
    model(x).sum().backward()
    optimizer.step()
"""


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = main(words)
    except SystemExit as end:
        code = int(end.code or 0)
    return code, *capsys.readouterr()


# ---------------------------------------------------------------- figures of a trace


def test_figures_are_the_peak_and_each_categorys_own() -> None:
    trace = a_trace(leak=MIB).trace()
    found = baselines.moments(trace)
    assert found["peak"].side.bytes == usage.peak(trace).bytes
    own = {row.category: row.own_peak for row in breakdown.category_rows(trace) if row.allocations}
    assert {name: one.side.bytes for name, one in found.items() if name != "peak"} == own
    for one in found.values():
        assert sum(size for size, _ in one.rows.values()) == one.side.bytes


def test_a_document_read_back_is_equal() -> None:
    found = baselines.moments(a_trace().trace())
    assert baselines.read(json.loads(json.dumps(baselines.document(found)))) == found


def test_a_comparison_has_the_rows_of_a_diff() -> None:
    """What a file says of the peak is what `diff` says of both traces."""
    before, after = a_trace().trace(), a_trace(activation=7 * MIB, leak=MIB).trace()
    figures = baselines.compared(baselines.moments(before), baselines.moments(after), 0)
    (peak,) = (figure for figure in figures if figure.name == "peak")
    assert peak.diff == diff.diff(before, after)
    assert peak.is_over
    assert peak.change == usage.peak(after).bytes - usage.peak(before).bytes


@pytest.mark.parametrize("more", [-MIB, 1, MIB])
def test_a_figure_is_over_beyond_what_is_allowed(more: int) -> None:
    before, after = (
        baselines.moments(a_trace(activation=each).trace()) for each in (5 * MIB, 5 * MIB + more)
    )
    changes = {one.name: abs(one.change) for one in baselines.compared(before, after, 0)}
    most = max(changes.values())
    assert most >= abs(more)
    for allowed in (0, most - 1, most):
        over = {one.name for one in baselines.compared(before, after, allowed) if one.is_over}
        assert over == {name for name, change in changes.items() if change > allowed}


def test_a_category_that_came_or_went_is_compared_with_nothing() -> None:
    leaky, other = (baselines.moments(a_trace(leak=each).trace()) for each in (MIB, 0))
    assert "unknown" in leaky.keys() ^ other.keys() or "functional" in leaky.keys() ^ other.keys()
    grown, shrunk = baselines.compared(other, leaky, 0), baselines.compared(leaky, other, 0)
    assert [one.change for one in grown] == [-one.change for one in shrunk]


# ---------------------------------------------------------------- the commands


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program and its baseline."""
    folder = tmp_path_factory.mktemp("baseline")
    (folder / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "pytracer",
        "baseline",
        "train.py",
        "--on",
        "T4",
        "-o",
        "m.json",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "on T4 with torch" in done.stdout
    return folder


@pytest.fixture
def here(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "m.json"):
        Path(name).write_text((written / name).read_text())
    return tmp_path


def test_the_same_program_has_no_difference(here: Path, capsys) -> None:
    code, out, _ = ran(capsys, "check", "train.py", "--baseline", "m.json")
    assert code == 0
    assert "train.py needs what the baseline says (on T4" in out


def test_a_tensor_that_is_kept_is_named_with_its_line(here: Path, capsys) -> None:
    text = SCRIPT.replace("    optimizer.step()", "    kept.append(x)\n    optimizer.step()")
    Path("train.py").write_text(text)
    command = ("check", "--baseline", "m.json", "--markdown", "out.md")
    code, out, _ = ran(capsys, *command, "train.py")
    assert code == errors.BudgetExceeded.exit_code
    assert "+2.00 MiB" in out
    assert "train.py:7" in out
    assert "`train.py:7`" in Path("out.md").read_text()
    code, out, _ = ran(capsys, *command, "--json", "--tolerance", "2MiB", "train.py")
    assert code == 0
    document = json.loads(out)
    figures = {one["name"]: one for one in document["ranks"][0]["figures"]}
    assert figures["peak"]["now"] - figures["peak"]["before"] == 2 * MIB
    assert not document["differs"]


BAD = [
    (["check", "train.py", "--baseline", "n.json"], 4, "there is no such file; did you mean 'm.json'"),
    (["check", "train.py", "--baseline", "train.py"], 4, "is no file of pytracer baseline"),
    (["check", "train.py", "--baseline", "."], 4, "is no file of pytracer baseline"),
    (["check", "train.py"], 2, "needs --baseline FILE"),
    (["check", "--baseline", "m.json", "train.py", "--batch", "8"], 2, "they were none, and are --batch 8"),
    (["check", "--max-peak", "1GiB", "train.py"], 2, "--max-peak is for a trace"),
    (["check", "m.pytrace", "--tolerance", "1%"], 2, "--tolerance is for a program"),
    (["check", "--baseline", "m.json", "--tolerance", "x%", "train.py"], 2, "is not a percentage"),
    (["check", "--baseline", "m.json", "--tolerance", "1XB", "train.py"], 2, "is not a size"),
    (["baseline", "train.py", "-o", "m.json"], 2, "m.json is of T4, and not of H100"),
    (["baseline", "train.py", "--on", "T4", "-o", "m.json"], 1, "-f writes it again"),
    (["baseline", "--on", "T4", "--steps", "3", "-o", "m.json", "train.py"], 2, "another steps"),
    (["baseline", "train.py", "-o", "train.py"], 1, "train.py exists; -f replaces it"),
    (["baseline", "train.py", "-o", "no/m.json"], 1, "there is no folder no"),
    (["baseline"], 2, "baseline needs a script"),
    (["baseline", "train.py", "--on", "H900"], 2, "no card is called 'H900'"),
    (["baseline", "-o", "new.json", "absent.py"], 1, "cannot read absent.py"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "says"), BAD, ids=lambda each: str(each)[:40])
def test_bad_input_is_one_clear_sentence(words, code, says, here: Path, capsys) -> None:
    before = {path: path.read_bytes() for path in here.iterdir()}
    found, _, err = ran(capsys, *words)
    assert (found, says in err) == (code, True), err
    assert len(err.splitlines()) == 1
    assert {path: path.read_bytes() for path in here.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(pytracer_baseline=2), "has format 2, and this pytracer reads 1"),
        (lambda d: d.pop("pytracer_baseline"), "is no file of pytracer baseline"),
        (lambda d: d.pop("card"), "is damaged"),
        (lambda d: d.update(steps="two"), "is damaged"),
        (lambda d: d.update(torch={"2.13.0": {}}), "is damaged"),
        (lambda d: d.update(torch={"2.13.0": {"0": {"peak": {"bytes": -1}}}}), "is damaged"),
        (lambda d: d.update(arguments=[1]), "is damaged"),
    ],
)
def test_a_damaged_file_is_refused_before_anything_runs(change, says, here: Path, capsys) -> None:
    Path("train.py").write_text("raise SystemExit(7)")
    document = json.loads(Path("m.json").read_text())
    change(document)
    Path("m.json").write_text(json.dumps(document))
    code, _, err = ran(capsys, "check", "train.py", "--baseline", "m.json")
    assert (code, says in err) == (4, True), err


def test_another_torch_is_named_and_gets_its_own_part(here: Path, capsys) -> None:
    found = baseline.read(Path("m.json"))
    ((torch, ranks),) = found.by_torch.items()
    dataclasses.replace(found, by_torch={"2.1.0": ranks}).write(Path("m.json"))
    code, _, err = ran(capsys, "check", "train.py", "--baseline", "m.json")
    assert code == errors.UsageError.exit_code
    assert f"m.json is of torch 2.1.0, and this is torch {torch}" in err
    assert ran(capsys, "baseline", "train.py", "--on", "T4", "-o", "m.json")[0] == 0
    assert baseline.read(Path("m.json")).by_torch == {"2.1.0": ranks, torch: ranks}


# ---------------------------------------------------------------- what is found, and what not


def tiered(values: Iterable[Any]) -> list[Any]:
    """The first two in each tier, six more from ci on, and all in the night."""
    found = []
    for at, one in enumerate(values):
        marks = [pytest.mark.ci] if 2 <= at < 8 else [pytest.mark.nightly] if at >= 8 else []
        found.append(pytest.param(one, id=f"{one.program}: {one.title}", marks=marks))
    return found


@pytest.fixture(scope="module")
def baselines_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a program's baseline once."""
    folder = tmp_path_factory.mktemp("regressions")

    def make(name: str) -> Path:
        file = folder / f"{name}.json"
        if not file.exists():
            script = folder / f"{name}.py"
            script.write_text(regressions.source(name))
            assert main(["baseline", str(script), "-o", str(file)]) == 0
        return file

    return make


@pytest.mark.slow
@pytest.mark.parametrize("planted", tiered(regressions.REGRESSIONS))
def test_a_planted_regression_is_found_with_its_line(
    planted: Regression, baselines_of, tmp_path: Path, monkeypatch, capsys
) -> None:
    """One of the three largest changes is at the line that makes the bytes."""
    monkeypatch.chdir(tmp_path)
    file, script = baselines_of(planted.program), f"{planted.program}.py"
    Path(script).write_text(planted.text())
    capsys.readouterr()
    code, out, err = ran(capsys, "check", "--json", "--baseline", str(file), script)
    assert code == errors.BudgetExceeded.exit_code, err
    changes = json.loads(out)["ranks"][0]["changes"]
    assert planted.line() in [one["line"] for one in changes[:3]]
    assert max(one["change"] for one in changes) >= MIB


@pytest.mark.slow
@pytest.mark.parametrize("harmless", tiered(regressions.harmless()))
def test_a_harmless_edit_raises_no_alarm(
    harmless: Harmless, baselines_of, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    file, script = baselines_of(harmless.program), f"{harmless.program}.py"
    text = harmless.text()
    assert text != regressions.source(harmless.program)
    Path(script).write_text(text)
    code, out, err = ran(capsys, "check", "--baseline", str(file), script)
    assert code == 0, out + err


def test_thirty_regressions_and_sixty_harmless_edits_are_tried() -> None:
    assert len(regressions.NAMES) == 10
    assert len(regressions.REGRESSIONS) == 30
    assert len(list(regressions.harmless())) == 60
    assert {one.program for one in regressions.REGRESSIONS} == set(regressions.NAMES)
