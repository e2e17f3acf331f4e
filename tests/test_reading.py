"""A saved trace can be looked at where there is no torch: on a laptop, in a small container."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRACE = ROOT / "tests" / "data" / "h200.pytrace"

# Whoever imports torch, by whatever detour, fails as where it is not installed.
WITHOUT_TORCH = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Absent())
"""


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    (cwd / "sitecustomize.py").write_text(WITHOUT_TORCH)
    path = os.pathsep.join([str(cwd), str(ROOT)])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_trace_is_loaded_and_asked_without_torch(tmp_path: Path) -> None:
    code = f"""
import pytracer, sys
t = pytracer.load({str(TRACE)!r})
assert t.summary().at_peak.sum() == t.peak.bytes > 0
t.allocations(), t.timeline(), t.by("module"), t.steps(), t.findings(), t.health()
t.ledger(), t.fragmentation(), t.bytes_per_parameter(), t.check(peak="1 GiB"), t.diff(t)
t.save("again.pytrace")
assert pytracer.load("again.pytrace").peak == t.peak
print(t)
assert "torch" not in sys.modules
"""
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("peak ")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("summary h.pytrace", 0),
        ("summary --json h.pytrace", 0),
        ("diff h.pytrace h.pytrace", 0),
        ("export h.pytrace -o h.json.gz", 0),
        ("export h.pytrace -o h.html", 0),
        ("export h.pytrace -o h.pickle", 0),
        ("check h.pytrace --max-peak 1KiB", 3),
        ("check h.pytrace --max-peak 1TiB", 0),
        ("ledger h.pytrace", 0),
    ],
)
def test_the_commands_that_read_need_no_torch(tmp_path: Path, command: str, code: int) -> None:
    shutil.copy(TRACE, tmp_path / "h.pytrace")
    done = python("-m", "pytracer", *command.split(), cwd=tmp_path)
    assert done.returncode == code, done.stderr


def test_a_memory_snapshot_of_torch_is_read_without_torch(tmp_path: Path) -> None:
    packed = ROOT / "tests" / "data" / "snapshot-plain.pickle.gz"
    code = f"""
import gzip, pytracer
open("s.pickle", "wb").write(gzip.open({str(packed)!r}).read())
print(pytracer.load("s.pickle").peak.bytes)
"""
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_recording_without_torch_is_refused_in_one_sentence(tmp_path: Path) -> None:
    done = python("-c", "from pytracer import trace", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "pytracer.errors.BuildMissing: recording needs torch, and there is none here (reading "
        f"traces needs none). Install it: {sys.executable} -m pip install torch"
    )


def test_the_doctor_says_what_works_without_torch(tmp_path: Path) -> None:
    done = python("-m", "pytracer", "doctor", "--json", cwd=tmp_path)
    assert done.returncode == 1
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["reading"]["verdict"] == "ok"
    assert checks["recording"]["verdict"] == "failed"
    assert "pip install torch" in checks["recording"]["detail"]
