"""Random command lines for every command, and what must be true of each.

    python -m tests.option_fuzzer FIRST COUNT       runs so many cases, and prints what is wrong

Commands and options are read from the parser, so a new option needs no edit here. The commands run
in this process. Whatever would start a program, measure the machine or open a connection is stood
in for: see `no_programs`. What must hold is in `problems`.
"""

import argparse
import contextlib
import gzip
import io
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from pytracer import cli, errors
from pytracer.cli.command import commands_of

DATA = Path(__file__).parent / "data"
HANG_SECONDS = 60
MOST_LINES = 8  # of an error
DOCUMENTED = {0, 1, 2, 3, 4}


def _words(text: str) -> list[str]:
    return text.split()


_BIG = "9" * 30
NUMBERS = _words(f"0 1 2 -1 007 1e3 0.5 {_BIG} -{_BIG} nan inf -inf 1_000 1e999 0x10 ٣ ²")
NUMBERS += ["9" * 5000, str(2**31), str(2**63)]
TEXTS = _words("- -- --- = , ,, a,,b a=b % %s {} {batch} * ä \\ ' \" . .. / ~ @ @run.pytrace [ ?")
TEXTS += _words("-x --nope -h --help --version \udcff \U0001f600")
TEXTS += ["", " ", "\n", "a\nb", "\x1b[31m", "x" * 300, "x" * 5000]
VALUES = _words(f"24GiB 5% nan% inf% 1GB 1XB {_BIG}TiB H100 RTX4090 T4=0.3 T4=nan module module,op")
VALUES += _words("module,module 1,3 3,1 0,8-15 9-1 cpu cuda cuda:7 meta all h.0 h.0,h.1 bf16 K1")
VALUES += _words("category=1GiB activations=1MiB fsdp2:64 ddp:0 1,1,3 expandable_segments:True")
VALUES += _words("max_split_size_mb:x dask train.py:12=false batch_size={batch} gpt2 4088:4104")
NEW = _words("out.html out.json out.json.gz out.pickle out.pftrace out.pytrace out.svg out.xyz")
NEW += _words("out/ new/out.html run.pytrace/out.html out.parquet pipe.pytrace .")
# Commands and options whose program comes last.
PROGRAMS = [
    "prog.py --epochs 1",
    "prog.py",
    "-m prog",
    "-- prog.py",
    "missing.py",
    "-m",
    "folder.pytrace",
]


# ---------------------------------------------------------------- the files


def fill(folder: Path) -> None:
    """Puts files of every kind there."""
    from pytracer.cli.demo import run
    from tests.test_snapshot import recorded_bytes
    from tests.test_table import training
    from tests.trace_builder import TraceBuilder

    run(2, "cpu").save(folder / "run.pytrace")
    training().trace().save(folder / "small.pytrace")
    training(steps=3, device="cuda:0").trace().save(folder / "gpu.pytrace")
    TraceBuilder().trace().save(folder / "nothing.pytrace")
    (folder / "snapshot.pickle").write_bytes(recorded_bytes("plain"))
    (folder / "cost.pytrace").write_bytes(_with_costs(folder))
    (folder / "h200.pytrace").write_bytes((DATA / "h200.pytrace").read_bytes())
    whole = (folder / "small.pytrace").read_bytes()
    for name in ("a b.pytrace", "ä.pytrace", "-o.pytrace", "a\nb.pytrace", "\udcff.pytrace"):
        (folder / name).write_bytes(whole)
    (folder / "cut.pytrace").write_bytes(whole[:-20])
    (folder / "half.pytrace").write_bytes(whole[: len(whole) // 2])
    (folder / "zeros.pytrace").write_bytes(whole[:8] + bytes(len(whole) - 8))
    (folder / "cut.pickle").write_bytes(recorded_bytes("plain")[:-40])
    (folder / "empty").write_bytes(b"")
    (folder / "text.txt").write_text("hello\n")
    (folder / "page.gz").write_bytes(gzip.compress(b"hello"))
    (folder / "prog.py").write_text("raise SystemExit('the fuzzer runs no program')\n")
    (folder / "folder.pytrace").mkdir()
    os.mkfifo(folder / "pipe.pytrace")
    (folder / "loop.pytrace").symlink_to("loop.pytrace")
    (folder / "link.pytrace").symlink_to("small.pytrace")
    for name in ("ranks", "mixed"):
        (folder / name).mkdir()
        for rank in range(3):
            training().trace().save(folder / name / f"train.rank{rank}.pytrace")
    (folder / "mixed" / "train.rank1.pytrace").write_bytes(whole[: len(whole) // 2])
    (folder / "mixed" / "other.pytrace").write_bytes(whole)


def _with_costs(folder: Path) -> bytes:
    import torch

    from pytracer import trace

    model = torch.nn.Linear(8, 8)
    with trace(model, cost=True, table=False) as traced:
        model(torch.ones(4, 8)).sum().backward()
    return traced.save(folder / "cost.pytrace").read_bytes()


# ---------------------------------------------------------------- the command lines


def leaves() -> list[tuple[list[str], argparse.ArgumentParser]]:
    """Every command with its parser, such as `gemm sweep`."""
    found: list[tuple[list[str], argparse.ArgumentParser]] = []
    todo: list[tuple[list[str], Any]] = [([], cli._parsers()[0])]
    while todo:
        words, parser = todo.pop()
        below = commands_of(parser)
        todo += [([*words, name], one) for name, one in below.items()]
        if not below:
            found.append((words, parser))
    return sorted(found, key=lambda one: one[0])


class Generator:
    """Makes command lines for the files of a folder."""

    def __init__(self, folder: Path) -> None:
        """Reads the parser and the names of the files."""
        self._leaves = leaves()
        self._files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        self._traces = [
            "run.pytrace",
            "small.pytrace",
            "gpu.pytrace",
            "h200.pytrace",
            "cost.pytrace",
        ]
        self._traces += ["ranks"]
        self._wild = 0.0  # the share of values that make no sense

    def line(self, rng: random.Random) -> list[str]:
        """One command line."""
        self._wild = rng.choice((0.02, 0.1, 0.4))
        words, parser = rng.choice(self._leaves)
        words = [self._misspelt(word, rng) if rng.random() < 0.02 else word for word in words]
        parts: list[list[str]] = []
        options = [action for action in parser._actions if action.option_strings]
        usual = [action for action in options if action.dest != "help"]
        for action in rng.choices(usual or options, k=rng.choice((0, 1, 1, 2, 2, 3, 5))):
            parts.append(self._option(action, parser, rng))
            if rng.random() < 0.1:
                parts.append(self._option(action, parser, rng))
        for action in parser._actions:
            if not action.option_strings:
                parts += [
                    [self._value(action, parser, rng)] for _ in range(self._count(action, rng))
                ]
        if rng.random() < self._wild / 4:
            parts.append([rng.choice(TEXTS)])
        if rng.random() < 0.3:
            rng.shuffle(parts)
        flat = [word for part in parts for word in part]
        if (
            words[0] in ("run", "imagine", "baseline", "fit")
            or "--verify" in flat
            or rng.random() < self._wild / 8
        ):
            flat += rng.choice(PROGRAMS).split()
        return [*words, *flat]

    def _count(self, action: argparse.Action, rng: random.Random) -> int:
        if rng.random() < self._wild / 4:
            return rng.randrange(4)
        many = {None: (1,), "?": (0, 1, 1), "*": (0, 1, 2), "+": (1, 2, 3)}
        return rng.choice(many.get(action.nargs, (1,)))  # type: ignore[call-overload, no-any-return]

    def _option(self, action: argparse.Action, parser: Any, rng: random.Random) -> list[str]:
        name = rng.choice(action.option_strings)
        if name.startswith("--") and rng.random() < 0.15:
            name = name[: rng.randint(3, len(name))]  # an abbreviation
        elif rng.random() < 0.03:
            name = self._misspelt(name, rng)
        if action.nargs == 0:
            return [f"{name}={rng.choice(TEXTS)}" if rng.random() < 0.03 else name]
        if rng.random() < self._wild / 4:
            return [rng.choice((name, f"{name}=", f"{name}=--"))]
        value = self._value(action, parser, rng)
        how = rng.random()
        if how < 0.4:
            return [f"{name}={value}" if name.startswith("--") else name + value]
        return [name, value]

    def _value(self, action: argparse.Action, parser: Any, rng: random.Random) -> str:
        """A value: mostly one that could be right, else any."""
        if rng.random() >= self._wild:
            return rng.choice(self._good(action, parser))
        return rng.choice([rng.choice(pool) for pool in (NUMBERS, TEXTS, VALUES, self._files, NEW)])

    def _good(self, action: argparse.Action, parser: Any) -> list[str]:
        """Values that could be right: choices, files, numbers, or those of the help's examples."""
        named = " ".join(map(str, (action.metavar, action.dest)))
        if action.choices:
            return list(map(str, action.choices))
        if action.type is Path or re.search("FILE|FOLDER|file|folder|output", named):
            return [*NEW, *self._traces] if action.option_strings else self._traces
        if action.type in (int, float, cli.output.positive):
            return ["1", "2", "3", "8", "1000"]
        if "SIZE" in named:
            return ["0", "1MiB", "24GiB", "1.5 GB"]
        page, values = parser.description or "", []
        for name in action.option_strings:
            values += re.findall(rf"{re.escape(name)}[ =](\S+)", page)
        if not action.option_strings:
            values += re.findall(r"'([^']+)'", page)
        return [
            *values * 10,
            *re.findall(r"[\w.,:=%-]+", (action.help or "") % vars_of(action)),
            *VALUES,
        ]

    def _misspelt(self, word: str, rng: random.Random) -> str:
        at = rng.randrange(len(word))
        return word[:at] + rng.choice(["", "x", "é", "-"]) + word[at + 1 :]


def vars_of(action: argparse.Action) -> Any:
    """What argparse fills into a help text."""
    return {**vars(action), "prog": "pytracer"}


# ---------------------------------------------------------------- one case


@dataclass
class Outcome:
    """How a command ended."""

    code: int | None
    out: str
    err: str
    crash: str = ""
    changed: set[str] = field(default_factory=set)
    made: set[str] = field(default_factory=set)


class Hang(BaseException):
    """The command takes too long."""


@contextlib.contextmanager
def no_programs() -> Iterator[None]:
    """Stands in for whatever starts a program, measures the machine, connects or waits.

    A program that would start is `false`, which ends at once with code 1.
    """
    import torch

    from pytracer import load
    from pytracer.cli import demo, doctor
    from pytracer.cost import peaks
    from pytracer.lab.gemm import timer
    from pytracer.recording import traced_program

    real, prepare, small = subprocess.Popen, traced_program.prepare, load("small.pytrace")

    class Ends(real):  # type: ignore[misc, valid-type]
        def __init__(self, command: Any, *_: Any, **options: Any) -> None:
            options = {k: v for k, v in options.items() if k not in ("executable", "shell")}
            super().__init__(["false"], **options)

    def prepared(*given: Any) -> Any:
        prepare(*given)
        return lambda: 0

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("the fuzzer connects nobody")

    def no_time(*_: Any) -> Any:
        raise errors.PytracerError("the fuzzer times nothing")

    rates = {"copy_bytes_per_s": 1e9, "flops_per_s": {"float32": 1e9}, "torch": torch.__version__}
    checks = [doctor.Check("cpu", "passed", "")]
    with contextlib.ExitStack() as stack:
        patch = lambda *a: stack.enter_context(mock.patch.object(*a))  # noqa: E731
        patch(subprocess, "Popen", Ends)
        patch(traced_program, "prepare", prepared)
        patch(demo, "run", lambda *_: small)
        patch(doctor, "checks", lambda: checks)
        patch(peaks, "measure", lambda *_: rates)
        patch(timer, "prepare", no_time)
        with contextlib.suppress(ImportError):
            from dask import distributed

            patch(distributed, "Client", refuse)
        yield


def run(line: Sequence[str], folder: Path) -> Outcome:
    """Runs a command line in the folder, which must be the working one."""
    before, environment = state(folder), dict(os.environ)
    streams = sys.stdout, sys.stderr
    handler = signal.signal(signal.SIGALRM, _hang)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        outcome = Outcome(None, "", "")
        sys.stdout = io.TextIOWrapper(os.fdopen(os.dup(out.fileno()), "wb"), "utf-8")
        sys.stderr = io.TextIOWrapper(
            os.fdopen(os.dup(err.fileno()), "wb"), "utf-8", "backslashreplace"
        )
        signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                outcome.code = cli.main(list(line))
        except SystemExit as end:
            outcome.code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:  # a hang too
            outcome.crash = traceback.format_exc()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.close()
            sys.stdout, sys.stderr = streams
            os.environ.clear()
            os.environ.update(environment)
        outcome.out, outcome.err = (_text(one) for one in (out, err))
    after = state(folder)
    outcome.made = set(after) - set(before)
    outcome.changed = {name for name in before if after.get(name) != before[name]}
    return outcome


def _hang(*_: Any) -> None:
    raise Hang(f"no answer within {HANG_SECONDS} s")


def _text(file: Any) -> str:
    file.seek(0)
    text: str = file.read().decode("utf-8", "replace")
    return text


def state(folder: Path) -> dict[str, tuple[int, ...]]:
    """Maps each path to what shows a change of its file; a folder is only there or not."""
    found = {}
    for path in folder.rglob("*"):
        seen = path.lstat()
        more = () if path.is_dir() else (seen.st_size, seen.st_mtime_ns, seen.st_ino)
        found[str(path.relative_to(folder))] = (seen.st_mode, *more)
    return found


def problems(line: Sequence[str], outcome: Outcome) -> list[str]:
    """What is wrong with this outcome."""
    found = []
    if outcome.crash:
        found.append(outcome.crash)
    elif outcome.code not in DOCUMENTED:
        found.append(f"exit code {outcome.code}")
    if "Traceback (most recent call last)" in outcome.err or re.search(
        r"\.py:\d+: \w*Warning", outcome.err
    ):
        found.append("Python's own words on stderr")
    lines = outcome.err.splitlines()
    failed = outcome.code in (1, 2, 4)
    if (
        failed
        and not outcome.out
        and len(lines) > MOST_LINES + sum(word.count("\n") for word in line)
    ):
        found.append(f"an error of {len(lines)} lines")
    if failed and line[0] != "run" and not lines and not outcome.out:
        found.append("an error without a word")
    found += [f"{name!r} was not named and changed" for name in outcome.changed - allowed(line)]
    for name in outcome.made:
        if not _is_named(name, line):
            found.append(f"{name!r} was made and not named")
    return found


def allowed(line: Sequence[str]) -> set[str]:
    """The files that the command may replace: values of options, if the line has -f or --force."""
    forced = any(word.startswith(("-f", "--f")) for word in line)
    return _values(line) if forced else set()


def _values(line: Sequence[str]) -> set[str]:
    """The values of options, as paths."""
    names = set()
    for before, word in zip(["", *line], line, strict=False):
        values = [word] if before.startswith("-") else []
        if word.startswith("-"):
            values += [word.partition("=")[2], word[2:]]
        names |= {os.path.normpath(value) for value in values if value}
    return names


def _is_named(name: str, line: Sequence[str]) -> bool:
    """Whether a new file is an output that was named, or one beside a trace of the same stem."""
    named = _values(line) | {
        "pytracer-demo.pytrace",
        "pytracer-confirm",
        "plan.toml",
        "memory.json",
    }
    around = [Path(name), *Path(name).parents]
    below = any(one.startswith(f"{name}/") for one in named)  # a folder that was made for it
    if below or named.intersection(map(str, around)):
        return True
    inputs = [Path(word.replace("*", "")) for word in line]
    stems = {one.name for one in inputs} | {one.stem for one in inputs} | {"job", "prog"}
    return any(one.name.startswith(f"{stem}.") for stem in stems for one in around)


def shell(line: Sequence[str]) -> str:
    """The command line for bash, whatever is in it."""
    return " ".join(["pytracer", *(_quoted(word) for word in line)])


def _quoted(word: str) -> str:
    if re.fullmatch(r"[\w.,:=/%-]+", word, re.ASCII):
        return word
    text = "".join(
        chr(b) if 32 <= b < 127 else f"\\x{b:02x}" for b in os.fsencode(word.replace("\\", "\\\\"))
    )
    return "$'" + text.replace("'", "\\'") + "'"


def cases(first: int, count: int, folder: Path) -> Iterator[str]:
    """Runs these cases in the folder, and yields a text for each that is wrong.

    The folder is filled again after each case that changed something.
    """
    pristine = folder / "pristine"
    pristine.mkdir(parents=True)
    fill(pristine)
    here = folder / "here"
    copied(pristine, here)
    generator = Generator(pristine)
    cwd = Path.cwd()
    homes = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "80"}
    os.chdir(here)
    try:
        with mock.patch.dict(os.environ, homes), no_programs():
            for case in range(first, first + count):
                line = generator.line(random.Random(case))
                outcome = run(line, here)
                if found := problems(line, outcome):
                    yield (
                        f"case {case}:  {shell(line)}\n"
                        + "\n".join(found)
                        + "\n"
                        + outcome.err[-2000:]
                    )
                if outcome.changed or outcome.made:
                    copied(pristine, here)
    finally:
        os.chdir(cwd)


def copied(source: Path, target: Path) -> None:
    """Makes the target a copy of the source, and keeps the folder itself."""
    target.mkdir(exist_ok=True)
    for path in target.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in source.iterdir():
        if path.is_symlink():
            (target / path.name).symlink_to(os.readlink(path))  # noqa: PTH115
        elif path.is_fifo():
            os.mkfifo(target / path.name)
        elif path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copy2(path, target / path.name)


def main() -> int:
    """Runs the cases that the command line names."""
    first, count = map(int, sys.argv[1:3])
    with tempfile.TemporaryDirectory() as folder:
        wrong = list(cases(first, count, Path(folder)))
    sys.stdout.write("\n\n".join([*wrong, f"{count} command lines, {len(wrong)} wrong\n"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
