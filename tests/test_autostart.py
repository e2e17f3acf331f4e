"""`PYTRACER=1 python train.py` is `pytracer run train.py`, and costs nothing where it is not set."""

import json
import os
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import pytracer
from pytracer import errors
from pytracer.cli import autostart, recording
from tests.test_run import ALLOCATE, TRAIN, WITH_TORCH
from tests.tiers import first_of

ROOT = Path(__file__).parents[1]
START = ROOT / "pytracer.pth"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that Python takes for one where packages are installed."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "pytracer.pth").write_text(f"{ROOT}\n{START.read_text()}")
    (folder / "sitecustomize.py").write_text(
        f"import site\nsite.addsitedir({str(folder)!r})\n"  # as if it were installed there
    )
    return folder


def python(
    *words: object, folder: Path, site: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(site), **environment},
        capture_output=True,
        text=True,
        timeout=180,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        check=False,
    )


def write(folder: Path, *parts: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text("".join(textwrap.dedent(part) for part in parts))
    return path


def test_a_program_is_recorded_that_knows_nothing_of_it(tmp_path: Path, site: Path) -> None:
    """Its first steps, the table, and the later step that went higher: as `pytracer run` has it."""
    write(tmp_path, TRAIN, """
        for number in range(12):
            step()
            if number == 10:  # between two steps: the next one's
                spike = torch.empty(1 << 24)
                del spike
        print("done")
    """)  # fmt: skip
    ran = python("train.py", folder=tmp_path, site=site, PYTRACER="1")
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr
    assert len(pytracer.load(tmp_path / "train.pytrace").steps()) == 5
    assert "The first 5 steps (PYTRACER=steps=all: every step):" in ran.stderr
    assert "Written to train.pytrace" in ran.stderr
    assert "step 11 went to" in ran.stderr
    assert "; PYTRACER=steps=12 records it too" in ran.stderr


def test_it_may_be_installed_twice(tmp_path: Path, site: Path) -> None:
    """For the user, and in an environment that also reads the user's packages."""
    write(tmp_path, ALLOCATE)
    (tmp_path / "second.pth").write_text(START.read_text())
    ran = python(
        *("-c", f"import site; site.addsitedir({str(tmp_path)!r}); import train"),
        folder=tmp_path, site=site, PYTRACER="1",
    )  # fmt: skip
    assert (ran.returncode, ran.stderr.count("\npeak ")) == (0, 1), ran.stderr
    assert [path.name for path in tmp_path.glob("*.pytrace")] == ["run.pytrace"]


def test_nothing_is_imported_before_the_program_asks(tmp_path: Path, site: Path) -> None:
    """numpy and torch read variables that the program may set first."""
    write(tmp_path, WITH_TORCH)
    ran = python("train.py", folder=tmp_path, site=site, PYTRACER="1")
    assert (ran.returncode, ran.stdout) == (0, "1 False 1.0\n"), ran.stderr


@pytest.mark.ci
def test_it_is_told_what_to_record(tmp_path: Path, site: Path) -> None:
    write(tmp_path, TRAIN, "for _ in range(6): step()\n")
    asked = "path=out/run.pytrace, steps=2, skip=3, watch=0, stacks=1, json=out/run.json"
    (tmp_path / "out").mkdir()
    ran = python("train.py", folder=tmp_path, site=site, PYTRACER=asked)
    assert ran.returncode == 0, ran.stderr
    loaded = pytracer.load(tmp_path / "out" / "run.pytrace")
    assert len(loaded.steps()) == 2
    assert loaded.by("line").index.str.contains("train.py").any()
    assert json.loads((tmp_path / "out" / "run.json").read_text())["peak"]["bytes"] > 0
    # The file stays what it is, and says how to replace it.
    write(tmp_path, ALLOCATE)
    again = python("train.py", folder=tmp_path, site=site, PYTRACER=asked)
    assert again.returncode == 0
    assert "not recorded: out/run.pytrace exists; force=1 in PYTRACER replaces it" in again.stderr


@pytest.mark.parametrize("value", ["", "0", "off", None])
def test_where_it_is_refused_nothing_happens(value: str | None, tmp_path: Path, site: Path) -> None:
    write(tmp_path, """
        import sys
        assert not [name for name in sys.modules if name.startswith("pytracer.recording.runner")]
        print(len(sys.meta_path))
    """)  # fmt: skip
    asked = {} if value is None else {"PYTRACER": value}
    ran = python("train.py", folder=tmp_path, site=site, **asked)
    plain = python("train.py", folder=tmp_path, site=tmp_path / "empty")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, plain.stdout, "")
    assert list(tmp_path.glob("*.pytrace")) == []


def test_what_is_not_understood_is_one_line_and_the_program_runs(
    tmp_path: Path, site: Path
) -> None:
    write(tmp_path, "import torch; print(torch.ones(3).sum().item())\n")
    ran = python("train.py", folder=tmp_path, site=site, PYTRACER="step=5")
    assert (ran.returncode, ran.stdout) == (0, "3.0\n")
    (line,) = ran.stderr.splitlines()
    assert line.startswith("pytracer: not recorded: PYTRACER=step=5: 'step=5' is not understood.")


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ("steps=few", 'steps is a positive number of steps, or "all"'),
        ("skip=-1", "skip is a number"),
        ("device=tpu", "device is cpu or cuda"),
        ("watch=maybe", "watch is 1 or 0"),
        ("path", "'path' is not understood"),
    ],
)
def test_a_value_that_is_none_names_the_allowed_ones(asked: str, problem: str) -> None:
    with pytest.raises(errors.UsageError, match=problem):
        recording.in_environment(asked)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("way", "code"),
    first_of(
        [
            ("raise ValueError('its own')", 1),
            ("sys.exit(7)", 7),
            ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
        ]
    ),
)
def test_a_program_that_fails_fails_as_it_would(
    way: str, code: int, tmp_path: Path, site: Path
) -> None:
    write(tmp_path, TRAIN, f"import signal\nstep()\n{way}\n")
    plain = python("train.py", folder=tmp_path, site=site)
    traced = python("train.py", folder=tmp_path, site=site, PYTRACER="1")
    assert (plain.returncode, traced.returncode) == (code, code)
    assert traced.stdout == plain.stdout
    assert traced.stderr.startswith(plain.stderr)
    assert len(pytracer.load(tmp_path / "train.pytrace").steps()) == 1


def test_memory_that_runs_out_is_explained_below_the_traceback(tmp_path: Path, site: Path) -> None:
    write(tmp_path, TRAIN, "for _ in range(9): step()\nkept = torch.empty(1 << 44)\n")
    ran = python("train.py", folder=tmp_path, site=site, PYTRACER="stacks=1")
    assert ran.returncode == 1
    page = ran.stderr.partition("Traceback")[2]
    assert "out of memory on cpu" in page
    assert "train.py:" in page.partition("asked")[2]
    assert list(tmp_path.glob("train-oom-*.pytrace"))


def test_programs_that_train_nothing_stay_silent(tmp_path: Path, site: Path) -> None:
    """Each Python process of a shell has PYTRACER: pip, a linter, a launcher, a loader's worker."""
    write(tmp_path, "print('no torch')\n")
    ran = python("train.py", folder=tmp_path, site=site, PYTRACER="1")
    assert (ran.stdout, ran.stderr) == ("no torch\n", "")
    write(tmp_path, "import torch\n")
    ran = python("train.py", folder=tmp_path, site=site, PYTRACER="1")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert list(tmp_path.glob("*.pytrace")) == []


def test_children_of_the_program_are_not_recorded(tmp_path: Path, site: Path) -> None:
    """As with `pytracer run`: the workers of a loader are no programs of their own."""
    write(tmp_path, """
        import multiprocessing
        import torch

        def work(queue):
            queue.put(torch.ones(100).sum().item())

        if __name__ == "__main__":
            for way in ("spawn", "fork"):
                context = multiprocessing.get_context(way)
                queue = context.SimpleQueue()
                child = context.Process(target=work, args=(queue,))
                child.start()
                print(queue.get())
                child.join()
            torch.ones(5)
    """)  # fmt: skip
    ran = python("train.py", folder=tmp_path, site=site, PYTRACER="1")
    assert (ran.returncode, ran.stdout) == (0, "100.0\n100.0\n"), ran.stderr
    assert [path.name for path in tmp_path.glob("*.pytrace")] == ["train.pytrace"]


def test_commands_of_ours_do_what_they_are_asked_and_no_more(tmp_path: Path, site: Path) -> None:
    write(tmp_path, ALLOCATE)
    ran = python("-m", "pytracer", "run", "-o", "asked.pytrace", "train.py",
                 folder=tmp_path, site=site, PYTRACER="1")  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert [path.name for path in tmp_path.glob("*.pytrace")] == ["asked.pytrace"]


@pytest.mark.parametrize(
    ("original", "arguments", "name"),
    [
        (["python", "train.py", "-m"], ["train.py", "-m"], "train.py"),
        (["python", "-W", "error", "-m", "package.train"], ["-m"], "train"),
        (["python", "-m", "package.train.__main__"], ["-m"], "train"),
        (["python", "folder"], ["folder/__main__.py"], "folder"),
        (["python", "-c", "import torch"], ["-c"], "run"),
        (["python"], [""], "run"),
        (["python", "-m", "torch.distributed.run", "train.py"], ["-m"], None),
        (["python", "/bin/torchrun", "train.py"], ["/bin/torchrun", "train.py"], None),
        (
            ["python", "-c", "from multiprocessing.spawn import spawn_main"],
            ["train.py"],
            "train.py",
        ),
        (["python", "-c", "from multiprocessing.resource_tracker import main"], ["-c"], None),
        (["python", "/x/ray/_private/workers/default_worker.py", "--port=1"], ["-"], "ray"),
    ],
)
def test_a_program_gives_its_file_its_name_and_helpers_have_none(
    original: list[str], arguments: list[str], name: str | None
) -> None:
    assert autostart.program_of(original, arguments) == name


def test_it_costs_a_tenth_of_a_millisecond_where_it_is_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a file with a bare `import os`, which Python reads as well."""
    import site

    monkeypatch.delenv("PYTRACER", raising=False)
    (tmp_path / START.name).write_text(START.read_text())
    (tmp_path / "bare.pth").write_text("import os")
    spent: dict[str, list[float]] = {START.name: [], "bare.pth": []}
    known: set[Any] = set()
    for _ in range(200):
        for name, times in spent.items():
            began = time.thread_time()
            site.addpackage(str(tmp_path), name, known)
            times.append(time.thread_time() - began)
    # The rest met a busy machine.
    ours, bare = (statistics.quantiles(times, n=4)[0] for times in spent.values())
    assert ours - bare < 100e-6, f"{1e6 * ours:.0f} us, and {1e6 * bare:.0f} us for a bare line"


def test_the_line_is_installed_beside_the_package() -> None:
    """One line, as Python's site wants it; the wheel's own test sees that it is in there."""
    (line,) = START.read_text().splitlines()
    assert line.startswith("import os; ")
    assert "pytracer.pth" in (ROOT / "MANIFEST.in").read_text()
