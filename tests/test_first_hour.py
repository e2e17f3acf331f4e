"""What a newcomer types: help, a command without a file, a second run, a narrow terminal."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytracer import cli, load
from pytracer.analysis.answers import diff
from pytracer.cli import messages
from pytracer.cli.command import commands_of
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORIES
from pytracer.reading import views
from tests import option_fuzzer
from tests.test_table import training
from tests.test_watch import Terminal
from tests.trace_builder import TraceBuilder

LEAVES = [words for words, _ in option_fuzzer.leaves()]
# How each command that reads one trace is called with as little as possible.
READERS = {
    "check": ["--max-peak", "1TiB"],
    "diff": ["--steps", "0,1"],
    "ledger": None,
    "query": None,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and a screen of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def saved(name: str, age: int = 0) -> Path:
    """A trace in the working folder that was written so many seconds ago."""
    path = training().trace().save(name)
    now = path.stat().st_mtime
    os.utime(path, (now - age, now - age))
    return path


# ---------------------------------------------------------------- help


@pytest.mark.parametrize("words", [[], ["gemm"], *LEAVES], ids=" ".join)
def test_help_of_a_command_is_its_help_page(
    words: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`pytracer help CMD` prints what `pytracer CMD --help` prints."""
    with pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    page = capsys.readouterr().out
    assert cli.main(["help", *words]) == 0
    assert capsys.readouterr().out == page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["summaryx"], "'summaryx' is none; did you mean 'summary'?"),
        (["run", "train.py"], "'train.py' is none"),
    ],
)
def test_help_of_what_is_no_command_is_one_line(words: list[str], said: str, here: Path) -> None:
    """Nothing runs, and a similar command is named."""
    outcome = option_fuzzer.run(["help", *words], here)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err
    assert outcome.err.count("\n") == 1


# ---------------------------------------------------------------- the newest trace


def readers() -> list[str]:
    """The commands whose help says that they take the newest trace.

    The ledger shows the devices of now, where it can read them: tests/test_ledger.py has its rule.
    """
    pages = commands_of(cli._parsers()[0])
    return [
        name
        for name, one in pages.items()
        if "the newest .pytrace here" in " ".join(one.format_help().split()) and name != "ledger"
    ]


def test_all_commands_that_read_one_trace_take_the_newest() -> None:
    """The list is complete: the others need two traces, a folder, or show the devices of now."""
    expected = {"summary", "watch", "check", "fits", "diff", "export", "report", "cost"}
    assert set(readers()) == expected


@pytest.mark.parametrize("name", readers())
def test_a_command_without_a_file_takes_the_newest_trace(name: str, here: Path) -> None:
    """It says which file that is, and answers as if it had been named."""
    saved("old.pytrace", age=100)
    saved("new.pytrace")
    Path("folder.pytrace").mkdir()
    Path("newer.txt").write_text("no trace")
    line = [name, *(READERS.get(name) or [])]
    outcome = option_fuzzer.run(line, here)
    for made in outcome.made:
        Path(made).unlink()
    named = option_fuzzer.run([name, "new.pytrace", *line[1:]], here)
    first, _, rest = outcome.err.partition("\n")
    assert first == "pytracer: new.pytrace is the newest trace here"
    assert (outcome.code, outcome.out, rest) == (named.code, named.out, named.err)
    assert outcome.crash == ""
    assert {Path(made).stem for made in outcome.made} <= {"new"}


@pytest.mark.parametrize("name", readers())
def test_a_folder_without_a_trace_says_how_to_record_one(name: str, here: Path) -> None:
    """One line, with the next command."""
    outcome = option_fuzzer.run([name, *(READERS.get(name) or [])], here)
    assert (outcome.code, outcome.out) == (4, "")
    assert outcome.err == (
        "pytracer: there is no .pytrace file here; record one:  pytracer run train.py\n"
    )


def test_the_newest_of_many_ranks_names_the_command_for_all(here: Path) -> None:
    """A rank's file is not the whole job."""
    saved("train.rank0.pytrace", age=9)
    saved("train.rank11.pytrace")
    outcome = option_fuzzer.run(["summary"], here)
    assert outcome.err.startswith(
        "pytracer: train.rank11.pytrace is the newest trace here; all ranks:  "
        "pytracer summary 'train.rank*.pytrace'\n"
    )


# ---------------------------------------------------------------- misspelt


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["summary", "trainx.pytrace"], "no such file; did you mean 'train.pytrace'?"),
        (["summary", "train"], "no such file; did you mean 'train.pytrace'?"),
        (["report", "sub/trainx.pytrace"], "no such file; did you mean 'train.pytrace'?"),
        (["summary", "other.pytrace"], "no such file; see whether the path is right"),
        (["summary", "train.py"], "train.py is a program: record it with pytracer run train.py"),
        (["run", "trainx.py"], "No such file or directory; did you mean 'train.py'?"),
        (["summary", "train.pytrace", "--by", "modulex"], "did you mean 'module'?"),
        (["check", "train.pytrace", "--max", "activation=1GiB"], "did you mean 'activations'?"),
    ],
)
def test_a_misspelt_name_is_answered_by_the_right_one(
    line: list[str], said: str, here: Path
) -> None:
    """Files, programs, keys and limits have names, and the most similar one is named."""
    saved("train.pytrace")
    Path("sub").mkdir()
    saved("sub/train.pytrace")
    Path("train.py").write_text("print('hello')\n")
    outcome = option_fuzzer.run(line, here)
    assert (outcome.crash, outcome.out) == ("", "")
    assert outcome.code in (2, 4)
    assert outcome.err.endswith(f"{said}\n")
    assert outcome.err.count("\n") == 1


@pytest.mark.ci
def test_a_refused_trial_leaves_no_trace(here: Path) -> None:
    """`--checkpoint nope` ends before the first step, so its file would hold nothing."""
    Path("train.py").write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 8))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    model(torch.ones(2, 8)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    command = [sys.executable, "-m", "pytracer", "run", "--checkpoint", "nope", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Stopped before the first step" in done.stderr
    assert not list(Path().glob("*.pytrace"))


# ---------------------------------------------------------------- a second run


@pytest.mark.parametrize(
    ("there", "name", "before"),
    [
        (["a.pytrace", "a.1.pytrace"], "a.1.pytrace", "a.pytrace"),
        (["a.1.pytrace", "a.2.pytrace"], "a.2.pytrace", "a.1.pytrace"),
        (["a.1.pytrace"], "a.1.pytrace", ""),
        (["a.pytrace"], "a.pytrace", ""),
        (["x/a b.pytrace", "x/a b.1.pytrace"], "x/a b.1.pytrace", "x/a b.pytrace"),
    ],
)
def test_a_run_names_the_diff_with_the_run_before(
    there: list[str], name: str, before: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The commands have the names of the files that were written."""
    for path in there:
        Path(path).parent.mkdir(exist_ok=True)
        training().trace().save(path)
    shown = messages.Shown(name, str(here / name), "", "")
    messages.show(views.read(Path(name)), shown)
    lines = [line.strip() for line in capfd.readouterr().err.splitlines()]
    quoted = f"'{name}'" if " " in name else name
    assert f"pytracer summary {quoted}" in lines
    found = [line for line in lines if line.startswith("pytracer diff")]
    was = f"'{before}'" if " " in before else before
    assert found == ([f"pytracer diff {was} {quoted}    since the run before"] if before else [])


# ---------------------------------------------------------------- the diff on a terminal


def wide(layers: int, size: int) -> Trace:
    """A trace of modules with long names, with every category in its difference."""
    b = TraceBuilder()
    for category in CATEGORIES:
        module = f"transformer_encoder_backbone.layers.{layers}.feed_forward_network.{category}"
        with b.module(module), b.op("aten::_scaled_dot_product_flash_attention"):
            block = b.alloc(size)
            if category != "unknown":
                b.label(block, category, "", f"{module}.weight", str(size // 4), "float32")
    return b.trace()


@pytest.fixture
def screen(here: Path) -> Callable[[int], list[str]]:
    """The diff of two traces as a terminal of some columns shows it."""
    wide(1, 1 << 20).save("before.pytrace")
    wide(1, 1 << 24).save("after.pytrace")

    def shown(columns: int) -> list[str]:
        os.environ.pop("COLUMNS", None)
        command = [sys.executable, "-m", "pytracer", "diff", "before.pytrace", "after.pytrace"]
        terminal = Terminal(command, columns=columns, lines=60)
        assert terminal.finish() == 0
        lines = re.sub(r"\x1b\[\d+m|\x1b\[m", "", terminal.written.decode()).splitlines()
        assert [line for line in terminal.text if line] == [line for line in lines if line]
        return lines  # none of them wraps

    return shown


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_a_diff_keeps_its_categories_whole(
    columns: int, screen: Callable[[int], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long names of modules give way; no line wraps, and no category is cut or left out."""
    monkeypatch.setenv("COLUMNS", "80")  # restored after the test
    lines = screen(columns)
    rows = [line.split() for line in lines if " grew " in f"{line} "]
    assert len(rows) == 6
    assert {row[3] for row in rows} <= set(CATEGORIES)
    sides = diff.diff(load("before.pytrace").data, load("after.pytrace").data)
    changed = {
        name
        for name, size in sides.after.by_category.items()
        if size != sides.before.by_category[name]
    }
    assert len(changed) >= 5
    total = " ".join(lines[2 : lines.index(next(line for line in lines if " grew " in line))])
    assert {word for word in total.replace(",", " ").split() if word in CATEGORIES} == changed
    assert max(map(len, lines)) <= columns
    if columns == 120:
        assert max(map(len, lines)) > 80
