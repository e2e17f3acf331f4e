"""Where the recording of a program goes if it cannot go where it was wanted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pytracer
from pytracer.recording import place
from pytracer.recording.place import Place

ROOT = Path(__file__).parents[1]
NOWHERE = Path("/proc")  # nobody makes files there, not even root


def reserved(path: Path, *, force: bool = False, numbered: bool = True) -> tuple[Place, str]:
    wanted = Place(path, force=force, numbered=numbered)
    return wanted, wanted.reserve()


def test_a_folder_that_takes_files_gets_it(tmp_path: Path) -> None:
    wanted, problem = reserved(tmp_path / "run.pytrace")
    assert (wanted.path, problem) == (tmp_path / "run.pytrace", "")
    again, problem = reserved(tmp_path / "run.pytrace")
    assert (again.path, problem) == (tmp_path / "run.1.pytrace", "")


def test_otherwise_a_temporary_folder_gets_it_for_its_owners_eyes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    wanted, problem = reserved(NOWHERE / "run.pytrace")
    assert problem
    assert wanted.path == wanted.shown == tmp_path / "run.pytrace"
    assert wanted.path.stat().st_mode & 0o077 == 0


def test_a_link_that_somebody_has_put_there_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "run.pytrace").symlink_to(tmp_path / "elsewhere")
    wanted, _ = reserved(NOWHERE / "run.pytrace", force=True, numbered=False)
    assert wanted.path == tmp_path / "run.1.pytrace"
    assert not (tmp_path / "elsewhere").exists()


def test_without_any_folder_there_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(NOWHERE))
    monkeypatch.setattr(place, "_TEMPORARY", ())
    wanted, problem = reserved(NOWHERE / "run.pytrace")
    assert wanted.path is None
    assert problem
    wanted.settle(recorded=False)


def test_a_disk_without_room_is_refused_and_keeps_no_empty_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(place, "_TEMPORARY", ())
    monkeypatch.delenv("TMPDIR", raising=False)
    wanted, problem = reserved(tmp_path / "run.pytrace")
    assert (wanted.path, problem) == (None, "No space left on device")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recorded", [True, False])
def test_an_older_file_comes_back_if_nothing_was_recorded(recorded: bool, tmp_path: Path) -> None:
    (tmp_path / "run.pytrace").write_text("older")
    wanted, _ = reserved(tmp_path / "run.pytrace", force=True, numbered=False)
    assert wanted.path is not None
    wanted.path.write_text("newer")
    wanted.settle(recorded=recorded)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pytrace"]
    assert (tmp_path / "run.pytrace").read_text() == ("newer" if recorded else "older")


def test_a_program_in_a_folder_that_takes_no_files_runs_and_says_where_its_trace_is(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text("import torch\nkept = torch.ones(9)\nprint('ended')\n")
    (tmp_path / "elsewhere").mkdir()
    command = [sys.executable, "-m", "pytracer", "run", str(tmp_path / "train.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "elsewhere")}
    ran = subprocess.run(
        command, cwd=NOWHERE, env=environment, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "ended\n"), ran.stderr
    file = tmp_path / "elsewhere" / "train.pytrace"
    first = ran.stderr.splitlines()[0]
    assert first.startswith("pytracer: train.pytrace cannot be written (")
    assert first.endswith(f"): recorded in {file}")
    assert pytracer.load(file).peak.bytes > 0
