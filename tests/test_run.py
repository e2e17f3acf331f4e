"""`pytracer run`: the program is run as Python would run it, and recorded."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import pytracer
from pytracer.analysis.answers import training_steps
from pytracer.cli import _parsers, main, messages
from pytracer.cli.command import without_program
from tests.tiers import first_of

ROOT = Path(__file__).parents[1]

# What a program can see of how it was run. It must be the same with and without us.
WITH_TORCH = """
import os, sys
early = {"torch", "numpy", "pandas"} & sys.modules.keys()
assert not early, f"{early} were imported before the program asked for them"
os.environ["OMP_NUM_THREADS"] = "1"  # counts only if torch is not there yet
import torch
print(torch.get_num_threads(), torch.cuda.is_initialized(), torch.ones(1).item())
"""

LOOK_AROUND = """
import pickle
import sys

class Mine:
    value = 3

print(__name__, __file__, __spec__ and __spec__.name, __package__)
print(sys.argv, sys.path[0])
print(pickle.loads(pickle.dumps(Mine())).value, sys.modules["__main__"].Mine is Mine)
print(sorted(name for name in vars(sys.modules["__main__"]) if not name.startswith("_")))
"""

TRAIN = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
optimizer = torch.optim.AdamW(model.parameters())

def step():
    optimizer.zero_grad()
    model(torch.ones(256, 64)).square().mean().backward()
    optimizer.step()
"""


RECORDED = "pytracer: recorded the first {} steps; watching the rest (not with --no-watch)\n"
# The first optimizer of a process imports torch._dynamo, which takes a second: where it is not needed.
ALLOCATE = "import torch\nkept = torch.ones(1000)\n"


def python(*words: object, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may mute it
    )


def write(folder: Path, name: str, *parts: str) -> Path:
    path = folder / name
    path.write_text(textwrap.dedent("".join(parts)))
    return path


def test_a_script_sees_what_python_would_show_it(tmp_path: Path) -> None:
    write(tmp_path, "look.py", WITH_TORCH, LOOK_AROUND)
    plain = python("look.py", "--steps", 7, "-o", "x", folder=tmp_path)
    traced = python("-m", "pytracer", "run", "look.py", "--steps", 7, "-o", "x", folder=tmp_path)
    assert plain.returncode == 0, plain.stderr
    assert traced.stdout == plain.stdout, traced.stderr
    assert (tmp_path / "look.pytrace").exists()


def test_a_module_sees_what_python_would_show_it(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    write(tmp_path, "package/look.py", LOOK_AROUND)
    plain = python("-m", "package.look", "-f", folder=tmp_path)
    traced = python("-m", "pytracer", "run", "-o", "t.pytrace", "-m", "package.look", "-f",
                    folder=tmp_path)  # fmt: skip
    assert plain.returncode == 0, plain.stderr
    assert traced.stdout == plain.stdout, traced.stderr


def test_a_program_that_fails_fails_as_it_would(tmp_path: Path) -> None:
    ways = {
        "raise ValueError('the program\\'s own')": 1,
        "sys.exit(7)": 7,
        "sys.exit('a message')": 1,
        "sys.exit()": 0,
        "signal.raise_signal(signal.SIGINT)": -signal.SIGINT,
        "os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
        "x = (": 1,
    }
    for number, (way, code) in enumerate(ways.items()):
        write(tmp_path, f"fail{number}.py", f"import os, signal, sys\n{way}\n")
        plain = python(f"fail{number}.py", folder=tmp_path)
        traced = python("-m", "pytracer", "run", f"fail{number}.py", folder=tmp_path)
        assert (plain.returncode, traced.returncode) == (code, code), way
        ours = [line for line in traced.stderr.splitlines() if not line.startswith("pytracer: ")]
        assert "\n".join(ours).rstrip() == plain.stderr.rstrip(), way


def test_a_program_that_knows_nothing_of_us_gives_the_same_categories(tmp_path: Path) -> None:
    """And its table, its file and its summary, although it has left its folder meanwhile."""
    leaves = "import os\nos.mkdir('there')\nos.chdir('there')\n"
    write(tmp_path, "plain.py", TRAIN, leaves, "for _ in range(8): step()\n")
    ran = python("-m", "pytracer", "run", "--json", "run.json", "plain.py", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "\nThe first 5 steps (--steps all: every step):\npeak " in ran.stderr
    assert "pytracer summary plain.pytrace" in ran.stderr
    assert ran.stdout == ""
    program: dict[str, Any] = {}
    exec(TRAIN, program)
    targets = program["model"], program["optimizer"]
    with pytracer.trace(*targets, devices="cpu", table=False) as theirs:
        for _ in range(5):
            program["step"]()
    ours = pytracer.load(tmp_path / "plain.pytrace")
    assert ours.peak.by_category == theirs.peak.by_category
    assert ours.peak.by_category["unknown"] == 0
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["peak"]["bytes"] == ours.peak.bytes
    # The first five steps are kept; the others are watched and thrown away.
    assert len(ours.steps()) == 5


@pytest.mark.ci
def test_a_second_run_of_a_training_is_not_refused_and_keeps_the_first_ones_file(
    tmp_path: Path,
) -> None:
    """A loop that starts a training again after a crash must not be ended by us."""
    write(tmp_path, "train.py", TRAIN, "step()\n")
    for name in ("train.pytrace", "train.1.pytrace", "train.2.pytrace"):
        ran = python("-m", "pytracer", "run", "train.py", folder=tmp_path)
        assert ran.returncode == 0
        assert f"Written to {name}." in ran.stderr
        assert f"pytracer summary {name}" in ran.stderr
    first = (tmp_path / "train.pytrace").read_bytes()
    refused = python("-m", "pytracer", "run", "-o", "train.pytrace", "train.py", folder=tmp_path)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "pytracer: train.pytrace exists; -f replaces it\n"
    assert (tmp_path / "train.pytrace").read_bytes() == first
    assert python("-m", "pytracer", "run", "-f", "train.py", folder=tmp_path).returncode == 0
    assert (tmp_path / "train.pytrace").read_bytes() != first
    assert len(list(tmp_path.glob("*.pytrace*"))) == 3


@pytest.mark.ci
@pytest.mark.parametrize("force", [[], ["-f"]])
def test_a_program_that_makes_no_tensors_leaves_no_file_and_replaces_none(
    force: list[str], tmp_path: Path
) -> None:
    """`train.py --help` imports torch, too."""
    write(tmp_path, "train.py", "import argparse, sys, torch\n"
          "if len(sys.argv) > 1: argparse.ArgumentParser().parse_args()\n"
          "torch.ones(3)\n")  # fmt: skip
    asked = python("-m", "pytracer", "run", *force, "train.py", "--help", folder=tmp_path)
    assert (asked.returncode, asked.stdout[:6]) == (0, "usage:")
    assert asked.stderr == "pytracer: this process made no tensors: nothing of it is recorded\n"
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    python("-m", "pytracer", "run", "train.py", folder=tmp_path)
    good = (tmp_path / "train.pytrace").read_bytes()
    for word in ("--help", "--no-such-option"):
        python("-m", "pytracer", "run", *force, "train.py", word, folder=tmp_path)
        assert (tmp_path / "train.pytrace").read_bytes() == good
        assert sorted(p.name for p in tmp_path.iterdir()) == ["train.py", "train.pytrace"]


def test_a_file_stays_where_a_run_ends_before_it_records_anything(tmp_path: Path) -> None:
    """Though -f would have let it be replaced."""
    write(tmp_path, "train.py", ALLOCATE)
    (tmp_path / "train.pytrace").write_text("an earlier run's")
    python("-m", "pytracer", "run", "-f", "--schedule", "9,0,2", "train.py", folder=tmp_path)
    assert (tmp_path / "train.pytrace").read_text() == "an earlier run's"


@pytest.mark.ci
def test_a_spike_after_the_kept_steps_is_named_with_its_step(tmp_path: Path) -> None:
    write(tmp_path, "train.py", TRAIN,
          "for i in range(11):\n    step()\n    if i in (7, 9): torch.empty(i << 20)\n")  # fmt: skip
    ran = python("-m", "pytracer", "run", "train.py", folder=tmp_path)
    assert "\nThe first 5 steps (--steps all: every step):\npeak " in ran.stderr
    last = ran.stderr.splitlines()[-1]
    # Made after the optimizer's tenth step, in what will be step 10.
    assert re.fullmatch(r"pytracer: later, step 10 went to at least 36.\d MiB; "
                        r"--steps 11 records it too", last)  # fmt: skip
    ran = python("-m", "pytracer", "run", "--schedule", "2,1,2", "train.py", folder=tmp_path)
    assert "\nSteps 3 to 4 (--steps all: every step):\npeak " in ran.stderr
    assert ran.stderr.endswith("; --schedule 3,0,8 records it too\n")
    ran = python("-m", "pytracer", "run", "--steps", 11, "train.py", folder=tmp_path)
    assert re.search(r"\npeak 36\.\d MiB on cpu   step 10, ", ran.stderr)
    assert "later, step" not in ran.stderr
    ran = python("-m", "pytracer", "run", "--steps", "all", "train.py", folder=tmp_path)
    assert "(--steps all" not in ran.stderr


# The table's process begins once the program has ended its steps: whoever waited would wait for ever.
BEGINS_LATE = f"""#!/bin/sh
for _ in $(seq 600); do
  [ -e over ] && exec {sys.executable} "$@"
  sleep 0.1
done
touch gave-up
exit 1
"""

STEPS_FIRST = """
import json, pathlib
sys.executable = f"{pathlib.Path.cwd()}/python-late"
for _ in range(10): step()
json.dump([name for name in sys.modules if name.startswith(("pytracer.analysis.answers", "pandas"))],
          open("over", "w"))
"""


def test_no_step_of_the_program_waits_for_the_table(tmp_path: Path) -> None:
    """Another process makes it: the program's own does not even import what makes a table."""
    write(tmp_path, "train.py", TRAIN, STEPS_FIRST)
    late = tmp_path / "python-late"
    late.write_text(BEGINS_LATE)
    late.chmod(0o755)
    ran = python("-m", "pytracer", "run", "-f", "--steps", 3, "train.py", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.startswith(RECORDED.format("3"))
    assert ran.stderr.count("\nThe first 3 steps (--steps all: every step):\npeak ") == 1
    assert json.loads((tmp_path / "over").read_text()) == []
    assert not (tmp_path / "gave-up").exists()


@pytest.mark.slow
def test_a_recorded_step_ends_before_the_recording_is_written(tmp_path: Path) -> None:
    """Other programs only ever add time: the first of three runs that holds counts."""
    write(tmp_path, "train.py", TRAIN, "for _ in range(5): step()\n")
    tried = []
    for _ in range(3):
        ran = python("-m", "pytracer", "run", "-f", "--steps", 4, "train.py", folder=tmp_path)
        assert ran.returncode == 0, ran.stderr
        loaded = pytracer.load(tmp_path / "train.pytrace")
        lasted = [row.end_ns - row.start_ns for row in training_steps.step_rows(loaded.data)]
        assert len(lasted) == 4
        tried.append(lasted)
        if lasted[3] < 3 * max(lasted[1:3]):
            return
    pytest.fail(f"how long steps lasted: {tried}")


def test_where_no_process_can_be_started_the_table_comes_at_the_end(tmp_path: Path) -> None:
    write(tmp_path, "train.py", TRAIN, "sys.executable = '/not/there'\n",
          "for _ in range(6): step()\nprint('over', file=sys.stderr)\n")  # fmt: skip
    ran = python("-m", "pytracer", "run", "train.py", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.startswith(RECORDED.format("5") + "over\n\nThe")


def test_a_summary_that_cannot_be_written_does_not_end_the_training(tmp_path: Path) -> None:
    takes_its_place = "import os\nos.mkdir('late')\n"
    steps = "for _ in range(9):\n    step()\nprint('trained')\n"
    write(tmp_path, "train.py", TRAIN, takes_its_place, steps)
    (tmp_path / "there").mkdir()
    for words, said in (
        (("--json", "no/run.json"), "pytracer: no/run.json cannot be written: there is no folder"),
        (
            ("-o", "no/run.pytrace"),
            "pytracer: no/run.pytrace cannot be written: there is no folder",
        ),
        (("-f", "-o", "train.py"), "pytracer: -o train.py is the script itself"),
        (("-f", "--json", "there"), "pytracer: there cannot be written: it is a folder"),
    ):
        refused = python("-m", "pytracer", "run", *words, "train.py", folder=tmp_path)
        assert (refused.returncode != 0, refused.stdout) == (True, "")
        assert refused.stderr.startswith(said)
    done = python("-m", "pytracer", "run", "--json", "late", "train.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert f"pytracer: {tmp_path / 'late'} cannot be written: it is a folder" in done.stderr
    assert (tmp_path / "train.pytrace").exists()


# Otherwise a slow machine would leave steps out, as watching may take but a share of the time.
WATCHES_ALL = """
import sys
from pytracer import cli
from pytracer.capture import allowance

allowance.FIRST = allowance._MOST = 60.0
sys.exit(cli.main())
"""


def test_memory_that_runs_out_after_the_kept_steps_is_explained(tmp_path: Path) -> None:
    """The page counts steps from the program's first."""
    write(tmp_path, "train.py", TRAIN, "kept = []\nfor i in range(60):\n"
          "    step()\n    kept.append(torch.ones(1 << 18))\ntorch.empty(1 << 44)\n")  # fmt: skip
    ran = python("-c", WATCHES_ALL, "run", "--stacks", "train.py", folder=tmp_path)
    assert ran.returncode == 1
    _, traceback, page = re.split("(?=Traceback )|(?=\nout of memory)", ran.stderr)
    assert traceback.count("  File ") == 1  # the program's own frame and none of ours
    assert "DefaultCPUAllocator: can't allocate" in traceback
    assert "out of memory on cpu   after step 59, between phases" in page
    assert "for aten::empty, train.py:" in page
    # Of 60 MiB these windows know 15: which is said.
    assert "before    Allocations from before step 45 are missing on this page" in page
    (saved,) = tmp_path.glob("train-oom-*.pytrace")
    assert f"pytracer summary {saved.name}" in page
    loaded = pytracer.load(saved)
    assert loaded.data.meta["failed"]
    assert loaded.post_mortem() in ran.stderr
    assert " on cpu   after step 59, " in loaded.table().splitlines()[0]
    assert len(pytracer.load(tmp_path / "train.pytrace").steps()) == 5


def test_without_a_watch_a_late_failure_says_how_to_have_it_explained(tmp_path: Path) -> None:
    write(tmp_path, "train.py", TRAIN, "for _ in range(8): step()\ntorch.empty(1 << 44)\n")
    ran = python("-m", "pytracer", "run", "--no-watch", "train.py", folder=tmp_path)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-2:] == [
        "The failure came after the first 5 steps and was not traced: run without --no-watch",
        "The first 5 steps are in train.pytrace; look at it:  pytracer summary train.pytrace",
    ]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("steps", "asked", "kept"),
    first_of(
        [
            (3, (), "Recorded until then"),
            (3, ("--steps", "1", "--no-watch"), "The first step is in"),
            (8, (), "The first 5 steps are in"),
        ],
        2,
    ),
)
def test_a_program_that_fails_is_told_what_is_in_the_file(
    steps: int, asked: tuple[str, ...], kept: str, tmp_path: Path
) -> None:
    write(tmp_path, "my train.py", TRAIN, f"for _ in range({steps}): step()\nraise ValueError\n")
    ran = python("-m", "pytracer", "run", *asked, "my train.py", folder=tmp_path)
    last = ran.stderr.splitlines()[-1]
    assert last.startswith(kept)
    assert last.endswith("pytracer summary 'my train.pytrace'")  # a shell takes it as it is


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused_before_the_program_runs(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "print('runs')\n", TRAIN)
    ran = python("-m", "pytracer", "run", "--device", "cuda", "train.py", folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "pytracer: --device cuda: there is no CUDA device here\n"


def test_a_killed_program_leaves_a_readable_file(tmp_path: Path) -> None:
    write(tmp_path, "train.py", TRAIN,
          "import os, signal, time\nstep()\ntime.sleep(0.5)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )  # fmt: skip
    ran = python("-m", "pytracer", "run", "train.py", folder=tmp_path)
    assert ran.returncode == -signal.SIGKILL
    with pytest.warns(RuntimeWarning, match="the file ends before its"):
        loaded = pytracer.load(tmp_path / "train.pytrace")
    assert loaded.file_report["status"] == "truncated"
    assert loaded.peak.bytes > 0


@pytest.mark.parametrize("closed", first_of([">&- 2>&-", "2>&-", ">&-"]))
def test_a_program_without_a_screen_runs_as_it_would(closed: str, tmp_path: Path) -> None:
    write(tmp_path, "train.py", ALLOCATE, "print('done')\n")
    command = f"{sys.executable} -m pytracer run train.py {closed}"
    ran = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0
    assert ran.stdout == ("" if ">&-" in closed.split() else "done\n")
    assert "Traceback" not in ran.stderr
    assert pytracer.load(tmp_path / "train.pytrace").peak.bytes > 0


def test_spawned_processes_find_the_programs_classes(tmp_path: Path) -> None:
    write(tmp_path, "spawn.py", """
        import multiprocessing

        class Box:
            def __init__(self, value):
                self.value = value

        def larger(box):
            return Box(box.value + 1)

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.apply(larger, (Box(1),)).value)
        """)  # fmt: skip
    ran = python("-m", "pytracer", "run", "spawn.py", folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "2\n"), ran.stderr


FORKED_TRAINING = """
import multiprocessing, os, signal, sys

def child():
    signal.alarm(30)  # ends it if it hangs
    for _ in range(40):
        step()

def forked():
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    print("exit code", process.exitcode, flush=True)
"""


@pytest.mark.parametrize("which", first_of(["--schedule=3,0,5", "--steps=5"]))
def test_a_forked_child_trains_on_and_the_steps_kept_are_its_parents(
    which: str, tmp_path: Path
) -> None:
    write(tmp_path, "train.py", TRAIN, FORKED_TRAINING,
          "step()\nforked()\n[step() for _ in range(4)]\nforked()\n[step() for _ in range(5)]\n")  # fmt: skip
    write(tmp_path, "train.pytrace", "somebody's")
    ran = python("-m", "pytracer", "run", "-f", which, "train.py",
                 folder=tmp_path, OMP_NUM_THREADS="1")  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "exit code 0\n" * 2), ran.stderr
    assert ran.stderr.count("\npeak ") == 1
    loaded = pytracer.load(tmp_path / "train.pytrace")
    assert loaded.file_report["status"] == "complete"
    assert len(loaded.steps()) == 5
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "train.pytrace"}


def test_a_forked_child_that_runs_to_the_end_says_nothing_of_ours(tmp_path: Path) -> None:
    write(tmp_path, "train.py", TRAIN, """
import os, signal
step()
child = os.fork()
if child == 0:
    signal.alarm(30)  # ends it if it hangs
    [step() for _ in range(9)]
else:
    print("status", os.waitpid(child, 0)[1], flush=True)
""")  # fmt: skip
    ran = python("-m", "pytracer", "run", "train.py", folder=tmp_path, OMP_NUM_THREADS="1")
    assert (ran.returncode, ran.stdout) == (0, "status 0\n"), ran.stderr
    assert ran.stderr.count("\npeak ") == 1
    assert "nothing is recorded" not in ran.stderr


def test_rank_0_names_the_other_ranks_files() -> None:
    assert messages._other_ranks("train.rank0.pytrace", 1) == ""
    files, command = messages._other_ranks("train.rank0.pytrace", 4).splitlines()[1:]
    assert "train.rank1.pytrace to train.rank3.pytrace" in files
    assert command == "  pytracer summary 'train.rank*.pytrace'"


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_a_program_without_a_launcher_passes_its_options_on(ranks, tmp_path) -> None:
    """It may start ranks of its own. What a rank starts are helpers, and these stay unrecorded."""
    write(tmp_path, "train.py", "import os; print(os.environ.get('PYTRACER'))")
    ran = python("-m", "pytracer", "run", "--steps", 3, "train.py", folder=tmp_path,
                 RANK="0", WORLD_SIZE=str(ranks))  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    asked = ran.stdout.strip()
    assert asked == "None" if ranks > 1 else {"only=children", "steps=3"} <= {*asked.split(",")}


def assert_each_rank_has_a_file_and_rank_0_talks(
    ran: subprocess.CompletedProcess[str], folder: Path
) -> None:
    assert ran.returncode == 0, ran.stderr
    for rank in (0, 1):
        loaded = pytracer.load(folder / f"out.rank{rank}.pytrace")
        assert loaded.data.meta["rank"] == rank
        assert loaded.peak.by_category["weights"] >= (32 * 32 + 32) * 4
        assert loaded.peak.by_category["communication"] > 0  # the buckets: both ranks train
    assert ran.stderr.count("\npeak ") == 1


@pytest.mark.ci
@pytest.mark.slow
def test_under_torchrun_each_rank_has_a_file_and_rank_0_talks(tmp_path: Path) -> None:
    write(tmp_path, "ddp.py", """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(8, 32)).sum().backward()
            optimizer.step()
        dist.destroy_process_group()
        """)  # fmt: skip
    ran = python("-m", "torch.distributed.run", "--nproc-per-node", 2, "--standalone", "-m",
                 "pytracer", "run", "-o", "out.pytrace", "ddp.py",
                 folder=tmp_path, OMP_NUM_THREADS="1")  # fmt: skip
    assert_each_rank_has_a_file_and_rank_0_talks(ran, tmp_path)


@pytest.mark.ci
def test_under_accelerate_launch_too(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    write(tmp_path, "train.py", """
        import torch
        from accelerate import Accelerator
        accelerator = Accelerator()
        assert accelerator.num_processes == 2, accelerator.state
        model = torch.nn.Linear(32, 32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            accelerator.backward(model(torch.ones(8, 32)).sum())
            optimizer.step()
        accelerator.end_training()
        """)  # fmt: skip
    # Without a GPU it would not join the processes unless it is told to use the CPU.
    ran = python("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", 2,
                 "--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no",
                 "-m", "pytracer", "run", "-o", "out.pytrace", "train.py",
                 folder=tmp_path, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true")  # fmt: skip
    assert_each_rank_has_a_file_and_rank_0_talks(ran, tmp_path)


@pytest.mark.parametrize(
    ("given", "ours", "program"),
    [
        (["run", "a.py", "--steps", "3"], ["run"], ["a.py", "--steps", "3"]),
        (["run", "--steps", "3", "a.py"], ["run", "--steps", "3"], ["a.py"]),
        (["run", "-f", "-m", "a.b", "-f"], ["run", "-f"], ["-m", "a.b", "-f"]),
        (["run", "--steps=3", "--", "-a.py"], ["run", "--steps=3"], ["-a.py"]),
        (["run", "-h"], ["run", "-h"], []),
        # deepspeed's launcher puts the rank before all arguments.
        (
            ["--local_rank=1", "run", "-f", "a.py", "-b"],
            ["run", "-f"],
            ["a.py", "--local_rank=1", "-b"],
        ),
        (["--local_rank=1", "run", "-m", "a.b"], ["run"], ["-m", "a.b", "--local_rank=1"]),
        (["summary", "-m", "x"], ["summary", "-m", "x"], []),
    ],
)
def test_the_programs_options_are_its_own(given, ours, program) -> None:
    assert without_program(given, _parsers()[1].choices) == (ours, program)


def test_what_cannot_be_run_is_said_in_a_line(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run"]) == 2
    assert main(["run", "nowhere.py"]) == 2
    assert main(["run", "."]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["pytracer"] * 3
    assert f"{tmp_path} is a folder" in lines[-1]


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["-f", "-o", "there.pytrace", "missing.py"], 2, "cannot read missing.py"),
        (["-o", ".", "ok.py"], 2, "-o . is a folder: name a file"),
        (["-o", "..", "ok.py"], 2, "-o .. is a folder: name a file"),
        (["-o", "/", "ok.py"], 2, "-o / is a folder: name a file"),
        (["-f", "-o", "folder.pytrace", "ok.py"], 1, "folder.pytrace cannot be written: it is a"),
        (["-f", "-o", "x" * 300, "ok.py"], 1, "cannot be written: File name too long"),
        (["-f", "--json", ".", "ok.py"], 1, ". cannot be written: it is a folder"),
        (["-o", "ok.py", "-f", "ok.py"], 2, "is the script itself"),
    ],
)
def test_where_nothing_can_be_written_is_said_in_a_line_before_anything_runs(
    options, code, said, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.pytrace").mkdir()
    (tmp_path / "there.pytrace").write_text("mine")
    write(tmp_path, "ok.py", "raise AssertionError('it ran')")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["run", *options]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pytracer: ")
    assert said in line
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_in_a_folder_that_is_gone_a_run_is_recorded_elsewhere(tmp_path, monkeypatch, capfd) -> None:
    """The program runs, and one line says where its trace is."""
    write(tmp_path, "ok.py", "import torch\nkept = torch.empty(1 << 20)")
    (tmp_path / "gone").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))
    (tmp_path / "gone").rmdir()
    assert main(["run", str(tmp_path / "ok.py")]) == 0
    said = [line for line in capfd.readouterr().err.splitlines() if "cannot be written" in line]
    assert len(said) == 1
    assert "the working directory is gone" in said[0]
    assert pytracer.load(tmp_path / "elsewhere" / "ok.pytrace").peak.bytes >= 4 << 20


@pytest.mark.parametrize(
    "launcher",
    first_of(
        [
            {"RANK": "3", "WORLD_SIZE": "4"},
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
            {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"},
        ]
    ),
)
def test_a_ranks_file_is_named_and_says_as_its_launcher_does(launcher, tmp_path) -> None:
    write(tmp_path, "train.py", ALLOCATE)
    ran = python("-m", "pytracer", "run", "train.py", folder=tmp_path, **launcher)
    assert ran.returncode == 0, ran.stderr
    meta = pytracer.load(tmp_path / "train.rank3.pytrace").data.meta
    assert (meta["rank"], meta["world_size"]) == (3, 4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--epochs", "3", "args.py"], "--epochs; the script's own options go after the script"),
        (["--steps", "x", "args.py"], 'x is not a positive number of steps, or "all"'),
        (["--steps", "0", "args.py"], "0 is not a positive number of steps"),
        (["--schedule", "a", "args.py"], "a is not WAIT,WARMUP,ACTIVE"),
        (["--steps", "5", "--schedule", "1,1,1", "args.py"], "not allowed with argument --steps"),
    ],
)
def test_a_wrong_option_is_told_in_the_users_words(given, said, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", *given])
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.endswith(said) or said in told
    assert "_steps" not in told.replace("--steps", "")
    assert "invalid" not in told


@pytest.mark.parametrize(
    ("program", "instead"),
    [
        (["accelerate", "launch", "train.py"], "accelerate launch [its options] -m pytracer run"),
        (["/venv/bin/torchrun", "train.py"], "torchrun [its options] -m pytracer run"),
        (["-m", "torch.distributed.run", "train.py"], "torchrun [its options] -m pytracer run"),
        (["deepspeed", "train.py"], "deepspeed [its options] --module pytracer run"),
    ],
)
def test_a_launcher_goes_in_front_and_is_told_so_before_anything_runs(
    program, instead, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch.pytrace").write_text("mine")
    assert main(["run", *program]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert instead in line
    assert "in processes of its own" in line
    assert [path.name for path in tmp_path.iterdir()] == ["launch.pytrace"]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("x = (", False),
        ("import no_such_module", False),
        ("raise SystemExit(3)", False),
        ("print(1)", True),
        ("raise SystemExit", True),
    ],
)
def test_only_a_program_that_ends_well_is_told_that_it_never_imported_torch(
    code: str, told: bool, tmp_path: Path
) -> None:
    write(tmp_path, "program.py", code)
    ran = python("-m", "pytracer", "run", "program.py", folder=tmp_path)
    assert ("never imported torch" in ran.stderr) == told
    if code == "x = (":
        assert "SyntaxError" in ran.stderr
    missing = python("-m", "pytracer", "run", "-m", "no_such_module", folder=tmp_path)
    assert missing.stderr == "pytracer: No module named no_such_module\n"


@pytest.mark.parametrize("schedule", [(2, 0, 2), (0, 1, 2), (1, 1, 1)])
def test_a_schedule_counts_the_optimizers_steps_where_nobody_calls_step(schedule) -> None:
    """Windows begin and end inside the optimizer's own hooks, which must not mind."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    wait, warmup, active = schedule

    def action(step: int) -> torch.profiler.ProfilerAction:
        if step < wait + warmup or step >= wait + warmup + active:
            return torch.profiler.ProfilerAction.NONE
        last = step == wait + warmup + active - 1
        return getattr(torch.profiler.ProfilerAction, "RECORD_AND_SAVE" if last else "RECORD")

    with pytracer.trace(model, optimizer, schedule=action, devices="cpu", table=False) as t:
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    assert len(t.steps()) == active
