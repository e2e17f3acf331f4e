"""Random command lines for every command: none ends in a traceback or changes what it was not told."""

import os
import random
import subprocess
from pathlib import Path

import pytest

from pytracer import cli
from tests import option_fuzzer
from tests.test_table import training
from tests.tiers import by_tier

BLOCK = 400


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("block", range(by_tier(1, 4, 13)))
def test_random_command_lines_end_in_a_documented_way(block: int, tmp_path: Path) -> None:
    """No command line gives a traceback, a wrong exit code or a change in a file it does not name."""
    wrong = list(option_fuzzer.cases(block * BLOCK, BLOCK, tmp_path))
    assert not wrong, "\n\n".join(wrong)


def test_the_fuzzer_reaches_every_command_and_option(tmp_path: Path) -> None:
    """Each command and each option of the parser occurs in the first block of random lines."""
    (tmp_path / "run.pytrace").touch()
    generator = option_fuzzer.Generator(tmp_path)
    lines = [generator.line(random.Random(case)) for case in range(5 * BLOCK)]
    for words, parser in option_fuzzer.leaves():
        given = {word for line in lines if line[: len(words)] == words for word in line}
        for action in parser._actions:
            names = action.option_strings
            used = any(word.startswith(tuple(names)) for word in given)
            assert not names or action.dest == "help" or used, (words, names)
    assert {command.name for command in cli.COMMANDS} <= {line[0] for line in lines}


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (option_fuzzer.Outcome(None, "", "", crash="KeyError"), "KeyError"),
        (option_fuzzer.Outcome(9, "", ""), "exit code 9"),
        (option_fuzzer.Outcome(0, "", "Traceback (most recent call last):"), "Python's own words"),
        (option_fuzzer.Outcome(0, "", "/x/y.py:5: RuntimeWarning: z"), "Python's own words"),
        (option_fuzzer.Outcome(2, "", "line\n" * 9), "an error of 9 lines"),
        (option_fuzzer.Outcome(4, "", ""), "an error without a word"),
        (option_fuzzer.Outcome(0, "", "", changed={"run.pytrace"}), "'run.pytrace' was not named"),
        (option_fuzzer.Outcome(0, "", "", made={"x"}), "'x' was made"),
    ],
)
def test_the_fuzzer_sees_what_is_wrong(outcome: option_fuzzer.Outcome, problem: str) -> None:
    """Each rule of the fuzzer fails for an outcome that breaks it."""
    (found,) = option_fuzzer.problems(["report", "run.pytrace"], outcome)
    assert found.startswith(problem)


def test_a_failure_is_repeated_by_the_line_that_it_prints() -> None:
    """bash reads the printed words as they were, whatever is in them."""
    words = ["summary", *option_fuzzer.TEXTS, "a\\nb"]
    line = option_fuzzer.shell(words).replace("pytracer ", "printf '%s\\0' ", 1)
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=True)
    assert [
        word.decode(errors="surrogateescape") for word in done.stdout.split(b"\0")[:-1]
    ] == words


# ---------------------------------------------------------------- what it found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a trace, a folder of ranks and a pipe."""
    monkeypatch.chdir(tmp_path)
    training().trace().save("run.pytrace")
    Path("ranks").mkdir()
    training().trace().save("ranks/run.rank0.pytrace")
    os.mkfifo("pipe")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (["summary", "--by=--", "run.pytrace"], 2, "'--'"),
        (["check", "run.pytrace", "--max=--"], 2, "--max --: name a category"),
        (["gemm", "find-peak", "--seconds=--"], 2, "-- is not a positive number"),
        (["gemm", "find-peak", "--seconds", "nan"], 2, "nan is not a positive number"),
        (["gemm", "sweep", "--seconds", "0"], 2, "--seconds: 0 is not a positive number"),
        (["gemm", "advise", "--step-ms", "-1"], 2, "--step-ms: -1 is not a positive number"),
        (["imagine", "--on", "T4=nan", "x.py"], 2, "'nan' is no price"),
        (["query", "ranks", " "], 2, "the question is empty"),
    ],
)
def test_an_odd_value_is_one_line(
    line: list[str], code: int, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value that argparse or a library takes for nothing is refused in one line that names it."""
    outcome = option_fuzzer.run(line, here)
    assert (outcome.code, outcome.crash, outcome.out) == (code, "", "")
    assert said in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("suffix", [".html", ".pytrace", ".pftrace", ".json", ".pickle"])
def test_a_pipe_or_a_device_is_never_replaced(suffix: str, here: Path) -> None:
    """`-f` replaces a file, and leaves a pipe as it is."""
    Path("pipe").rename(f"out{suffix}")
    outcome = option_fuzzer.run(["export", "run.pytrace", "-f", "-o", f"out{suffix}"], here)
    assert outcome.code == 1
    assert outcome.err == f"pytracer: out{suffix} cannot be written: it is a device or a pipe\n"
    assert Path(f"out{suffix}").is_fifo()
