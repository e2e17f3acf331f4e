"""Recorders of a job that are always on: which rank departs, which grows, which fell behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytracer.cli import main
from pytracer.data import step_totals
from pytracer.data.history import Steps, histories_in, ranks_in_short
from pytracer.data.step_totals import StepFile, StepRow
from tests.step_files import add

MIB = 1 << 20


def a_rank(folder: Path, rank: int, peaks: list[int], *events: dict[str, object]) -> None:
    path = folder / f"train.rank{rank}.always"
    path.mkdir()
    header = {"command": "train.py", "rank": rank, "pid": os.getpid(), "host": "elsewhere"}
    file = StepFile(path / step_totals.NAME, header, 1 << 20)
    add(
        file,
        (StepRow(n, n, 1, False, (0, 0), peak, peak, 0, 1, 1, 0) for n, peak in enumerate(peaks)),
    )
    file.close()
    lines = [json.dumps({"step": 0, "unix_ns": 0, **event}) for event in events]
    (path / step_totals.EVENTS).write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    ended = {"kind": "ended"}
    grew = {"kind": "grows", "step": 60, "peak": 1, "now": 1, "device": "cpu"}
    alarm = {"kind": "alarm", "step": 70, "text": "`kept` keeps what each step makes"}
    a_rank(tmp_path, 0, [100 * MIB] * 100, ended)
    a_rank(tmp_path, 1, [100 * MIB] * 100, ended)
    a_rank(tmp_path, 2, [130 * MIB] * 100, ended)
    a_rank(tmp_path, 3, [100 * MIB] * 100, grew, alarm, ended)
    a_rank(tmp_path, 10, [100 * MIB] * 50, ended)
    return tmp_path


def test_each_rank_has_a_row_that_says_what_is_odd(job: Path) -> None:
    rows = ranks_in_short([Steps(folder) for folder in histories_in(job)])
    assert [row.rank for row in rows] == [0, 1, 2, 3, 10]
    assert [row.rank for row in rows if row.departs] == [2]
    assert [row.rank for row in rows if row.behind] == [10]
    assert {row.rank: row.grows for row in rows if row.grows} == {
        3: "`kept` keeps what each step makes"
    }


@pytest.mark.parametrize("name", [".", "train.rank*.always"])
def test_summary_and_watch_compare_the_ranks(
    job: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(job)
    for command in ("summary", "watch"):
        assert main([command, name]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "5 ranks of train.py" in shown
        assert "departs rank 2: 130 MiB, where the middle rank has 100 MiB" in shown
        assert "behind rank 10: 50 steps" in shown
        assert "grows rank 3: `kept` keeps what each step makes" in shown
    assert main(["summary", "--json", name]) == 0
    assert [row["rank"] for row in json.loads(capsys.readouterr().out)["ranks"]] == [0, 1, 2, 3, 10]


def test_ranks_that_are_alike_are_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(3):
        a_rank(tmp_path, rank, [100 * MIB] * 10, {"kind": "ended"})
    assert main(["summary", str(tmp_path)]) == 0
    assert "All ranks are alike, and none grows." in capsys.readouterr().out


_TRAIN = """
import torch
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters())
for number in range(20):
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_each_rank_of_a_job_makes_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    root = str(Path(step_totals.__file__).parents[2])
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": root}
        command = [sys.executable, "-m", "pytracer", "run", "--always", "train.py"]
        subprocess.run(command, cwd=tmp_path, env={**os.environ, **place}, check=True)
    ranks = [Steps(folder) for folder in histories_in(tmp_path)]
    assert [one.folder.name for one in ranks] == ["train.rank0.always", "train.rank1.always"]
    assert [(one.rank, one.step_count, one.is_over) for one in ranks] == [
        (0, 20, True),
        (1, 20, True),
    ]
