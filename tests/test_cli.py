"""The command line: the same screens every day, and one clear line for whatever goes wrong."""

import contextlib
import errno
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytracer import cli, errors, load
from pytracer.basics import private_torch
from pytracer.cli import doctor, main, output
from pytracer.cli.command import without_program
from pytracer.data import schema
from pytracer.data.recorded import Trace
from pytracer.data.schema import ACTION, TABLES
from tests.csrc.make_snapshot_corpus import Calls, snapshot
from tests.golden import same_as_golden
from tests.mutations import HEADER, meta_chunk
from tests.test_diff import training
from tests.test_snapshot import recorded_bytes
from tests.trace_builder import TraceBuilder

MIB = 1 << 20


@pytest.fixture(autouse=True)
def plain_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns, no colours, whoever runs it."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of every kind in the folder where the command runs."""
    monkeypatch.chdir(tmp_path)
    training().trace().save("run.pytrace")
    training(activation=6 * MIB, layers=5).trace().save("later.pytrace")
    TraceBuilder().trace().save("stepless.pytrace")
    whole = Path("run.pytrace").read_bytes()
    Path("corrupt.pytrace").write_bytes(whole[:8] + bytes(len(whole) - 8))
    Path("cut.pytrace").write_bytes(whole[:-20])
    Path("gone.pytrace").write_bytes(whole[: len(whole) // 2])
    for name, beginning in (("sparse.pytrace", b""), ("sparse.pickle", b"\x80\x04")):
        Path(name).write_bytes(beginning)
        os.truncate(name, 50 << 30)
    Path("empty").write_bytes(b"")
    Path("foreign.txt").write_text("hello\n")
    Path("foreign.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    Path("folder.pytrace").mkdir()
    Path("snapshot.pickle").write_bytes(recorded_bytes("plain"))
    Path("code.pickle").write_bytes(snapshot(extra=Calls()))
    Path("cut.pickle").write_bytes(snapshot()[:-40])
    Path("list.pickle").write_bytes(b"\x80\x04].")
    os.mkfifo("pipe.pytrace")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(arguments)
    except SystemExit as error:  # argparse's own
        code = int(error.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


# ---------------------------------------------------------------- golden screens


@pytest.mark.parametrize("command", ["", "summary", "diff", "export", "report", "doctor", "demo"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *([command] if command else []), "--help")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "usage: pytracer" in out
    # Later versions of Python lay it out differently.
    if command in ("summary", "diff", "export") and sys.version_info < (3, 13):
        same_as_golden(f"help-{command}", out)


HELPS = [(command.name,) for command in cli.COMMANDS]
HELPS += [("gemm", what) for what in ("sweep", "find-peak", "advise")]


@pytest.mark.parametrize("command", HELPS, ids=" ".join)
def test_the_help_of_every_command_teaches_it_by_examples_that_work(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, *command, "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    begin = f"  pytracer {command[0]}"
    # What follows two spaces explains the example; what follows a bar is another program.
    examples = [
        re.split(r"  | \| ", line.strip())[0] for line in out.splitlines() if line.startswith(begin)
    ]
    assert len(examples) >= 2
    for example in examples:
        words = shlex.split(example)[1:]
        arguments, _ = without_program(words, cli._parsers()[1].choices)
        parser, _ = cli._parsers()
        options, unknown = parser.parse_known_args(arguments)
        assert (options.command, unknown) == (command[0], []), example


@pytest.mark.parametrize(
    "arguments",
    [
        "summary run.pytrace",
        "summary cut.pytrace",
        "summary snapshot.pickle",
        "summary run.pytrace --by category",
        "summary run.pytrace --by module,line",
        "diff run.pytrace later.pytrace",
        "diff run.pytrace --steps 0,1",
        "diff run.pytrace later.pytrace --by category",
        "export run.pytrace -o out.html",
        "export run.pytrace -o out.pickle",
        "export run.pytrace -o out.json",
    ],
)
def test_screens(arguments: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *arguments.split())
    assert code == 0
    name = arguments.replace(" --", "-").replace(" -o", "").replace(" ", "-").replace(".", "-")
    same_as_golden(name, out + ("\n" + err if err else ""))


def test_the_doctors_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    found = [
        doctor.Check("cpu allocations", "passed", "3 blocks, to the byte"),
        doctor.Check("cuda allocations", "skipped", "torch was built without CUDA"),
        doctor.Check("stacks", "failed", "no line was seen"),
    ]
    monkeypatch.setattr(doctor, "checks", lambda: found)
    monkeypatch.setattr(cli.show, "__version__", "1.2.3")
    monkeypatch.setattr(platform, "python_version", lambda: "3.12.0")
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    code, out, err = run(capsys, "doctor")
    assert (code, err) == (1, "")
    same_as_golden("doctor", out)


def test_every_option_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    _, commands = cli._parsers()
    for name in ("run", "demo", "diff", "check", "ledger", "export", "summary"):
        for option in commands.choices[name]._actions:
            assert option.help, (name, option.dest)
    text = run(capsys, "diff", "-h")[1]
    assert all(key in text for key in schema.KEYS)


def test_snapshots_are_taken_where_the_help_says_so(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, *more in (["check", "--max-peak", "1GiB"], ["ledger"]):
        assert "or a memory snapshot" in " ".join(run(capsys, command, "-h")[1].split())
        assert run(capsys, command, "snapshot.pickle", *more)[0] == 0


def test_a_second_demo_replaces_its_own_file_and_no_other(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        code, out, _ = run(capsys, "demo", "--steps", "1", "--device", "cpu")
        assert code == 0
        assert "pytracer summary pytracer-demo.pytrace" in out
    for name in ("pytracer-demo.pytrace", "run.pytrace"):
        code, _, err = run(capsys, "demo", "-o", name)
        assert (code, err) == (1, f"pytracer: {name} exists; -f replaces it\n")


def test_json_is_one_versioned_document(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        "summary run.pytrace --json",
        "summary snapshot.pickle --json",
        "diff run.pytrace later.pytrace --json",
        "export run.pytrace -o out.html --json",
        "export run.pytrace -o out.json --json",
    ):
        code, out, err = run(capsys, *arguments.split())
        assert (code, err) == (0, ""), arguments
        assert json.loads(out)["pytracer_json"] == 1


# ---------------------------------------------------------------- what goes wrong

# Files that are no trace, and what the one line says of them.
UNREADABLE = {
    "missing.pytrace": "no such file",
    "missing.pickle": "no such file",
    "corrupt.pytrace": "",
    "gone.pytrace": "nothing that happened is left",
    "sparse.pytrace": "not a pytracer trace",
    "sparse.pickle": "not like that",
    "empty": "",
    "foreign.txt": "not a pytracer trace",
    "foreign.png": "not a pytracer trace",
    "folder.pytrace": "directory",
    "pipe.pytrace": "not a regular file",
    "code.pickle": "wants to run code",
    "cut.pickle": "cut short",
    "list.pickle": "",
}
READERS: dict[str, Callable[[str], list[str]]] = {
    "summary": lambda file: ["summary", file],
    "summary json": lambda file: ["summary", file, "--json"],
    "export": lambda file: ["export", file, "-o", "out.json.gz"],
    "export snapshot": lambda file: ["export", file, "-o", "out.pickle"],
    "export html": lambda file: ["export", file, "-o", "out.html"],
    "diff before": lambda file: ["diff", file, "run.pytrace"],
    "diff after": lambda file: ["diff", "run.pytrace", file],
    "diff steps": lambda file: ["diff", file, "--steps", "0,1"],
    "check": lambda file: ["check", file, "--max-peak", "1GiB"],
    "ledger": lambda file: ["ledger", file],
    "cost": lambda file: ["cost", file],
}


@pytest.mark.parametrize("file", [name for name in UNREADABLE if name != "list.pickle"])
@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_no_trace(
    reader: str, file: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(here)
    code, out, err = run(capsys, *READERS[reader](file))
    assert code == 4, err
    assert out == ""
    assert_one_line(err)
    assert file in err
    assert UNREADABLE[file] in err
    assert everything(here) == before


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_trace_whose_meta_document_nests_without_end(
    opening: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Path("run.pytrace").read_bytes()
    deep = meta_chunk(opening.encode() * 100_000)
    Path("deep.pytrace").write_bytes(whole[:HEADER] + deep + whole[HEADER:])
    for command in (["summary"], ["summary", "--json"], ["export", "-o", "out.json"]):
        code, _, err = run(capsys, command[0], "deep.pytrace", *command[1:])
        assert code == 0
        assert "Traceback" not in err


def test_a_trace_is_not_replaced_by_its_own_export(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(here)
    os.link("run.pytrace", "linked.html")
    for target in ("run.pytrace", "./run.pytrace", "linked.html"):
        code, _, err = run(capsys, "export", "run.pytrace", "-f", "--format", "html", "-o", target)
        assert code == 2
        assert "is the trace itself" in err
        assert_one_line(err)
    Path("linked.html").unlink()
    assert everything(here) == before


@pytest.mark.parametrize("folder", [".", "..", "../inner/"])
def test_a_folder_without_traces_is_no_job_also_where_it_has_no_name(
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    code, out, err = run(capsys, "export", folder)
    assert (code, out) == (4, "")
    assert "directory" in err
    assert_one_line(err)


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """Root may read everything, so it is nobody for a while."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_file_that_may_not_be_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here.chmod(0o755)
    for name in ("run.pytrace", "snapshot.pickle"):
        assert run(capsys, "summary", name)[0] == 0  # and all that it takes has been imported
        Path(name).chmod(0)
        with without_privileges():
            code, _, err = run(capsys, "summary", name)
        assert code == 4
        assert_one_line(err)


# Outputs that cannot be written, and what the one line says of them.
UNWRITABLE = {
    "there{}": "exists; -f replaces it",
    "missing/out{}": "cannot be written",
    "folder{}": "",
    "run.pytrace/out{}": "",
}


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".pickle", ".html", ".parquet"])
@pytest.mark.parametrize("output", UNWRITABLE)
def test_an_output_that_cannot_be_written(
    output: str, suffix: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
        if output.startswith("missing"):
            return  # folders are made
    (here / f"there{suffix}").write_text("mine")
    (here / f"folder{suffix}").mkdir()
    (here / f"folder{suffix}" / "mine").write_text("mine")
    before = everything(here)
    code, out, err = run(capsys, "export", "run.pytrace", "-o", output.format(suffix))
    assert code == 1, err
    assert out == ""
    assert_one_line(err)
    if suffix != ".parquet":
        assert UNWRITABLE[output] in err
    assert "overwrite=True" not in err  # that is Python
    assert everything(here) == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "usage"),
        ("summary run.pytrace --colour", "unrecognized arguments"),
        ("frobnicate", "there is no command 'frobnicate'; there are demo, summary,"),
        ("ledgr run.pytrace", "there is no command 'ledgr'; did you mean 'ledger'?"),
        ("train.py", "did you mean pytracer run train.py?"),
        ("run.pytrace", "did you mean pytracer summary run.pytrace?"),
        ("summary run.pytrace --wrods", "--wrods; did you mean '--words'?"),
        ("check run.pytrace --max-paek 4GiB", "did you mean '--max-peak'?"),
        ("export run.pytrace --format perfeto", "'perfeto'; did you mean 'perfetto'?"),
        ("run --stack train.py", "pytracer run: unrecognized arguments: --stack; did you mean"),
        ("check run.pytrace --max-peak 40", "'40' has no unit: say 40GiB, 40MiB or 40B"),
        ("export run.pytrace -o out.doc", "say --format"),
        ("export run.pytrace -o out.json --max-events 0", "not a positive number"),
        ("export run.pytrace -o out.json --max-events x", "x is not a positive number"),
        ("export run.pytrace -o out.html --max-events 5", "--format chrome"),
        ("export run.pytrace --format pdf", "invalid choice"),
        ("export run.pytrace -o out.html --format chrome", ".json"),
        ("diff run.pytrace", "second trace, or --steps"),
        ("diff run.pytrace --steps 1", "not two steps"),
        ("diff run.pytrace --steps 0,7", "no step 7: run.pytrace has 2, from 0"),
        ("diff run.pytrace stepless.pytrace --steps 0,0", "no step 0: stepless.pytrace has none"),
        ("diff run.pytrace --steps -1,0", ""),
        ("diff run.pytrace later.pytrace --by colour", "cannot group by 'colour'"),
        ("diff run.pytrace later.pytrace --by ,", "cannot group by ''"),
        ("diff run.pytrace later.pytrace --at noon", "invalid choice"),
        ("diff run.pytrace --steps 0,1 --at end", "--at end: steps are compared"),
    ],
)
def test_arguments_that_make_no_sense(
    arguments: str, says: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(here)
    code, out, err = run(capsys, *arguments.split())
    assert code == 2
    assert says in out + err
    assert "Traceback" not in err
    assert everything(here) == before


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lit.json.gz", "lit.json.gz looks like an export"),
        ("lit.pftrace", "name the .pytrace file that it was made from"),
        ("lit.html", "looks like an export"),
        ("run.pytrace.gz", "run.pytrace.gz is compressed: gunzip it first"),
        ("notes.txt", "not a"),
    ],
)
def test_an_export_is_not_a_trace(
    name: str, says: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / name).write_bytes(b"some other bytes, and enough of them for a header" * 4)
    code, _, err = run(capsys, "summary", name)
    assert code == 4
    assert says in err
    assert_one_line(err)


def test_a_snapshot_that_holds_nothing_is_an_empty_trace(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "summary", "list.pickle")
    assert code == 0
    assert out == "empty     the snapshot has no allocation\n"


def test_a_document_that_cannot_be_written_leaves_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a file of the user's touched that has a name like that of half a document."""
    (here / "out.json.part").write_text("mine")
    before = everything(here)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(errors.CannotWrite, match=r"out\.json cannot be written: No space left"):
        output.write_json(Path("out.json"), {})
    assert everything(here) == before


def test_force_replaces_and_leaves_nothing_else(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for suffix in (".json", ".json.gz", ".pickle", ".html"):
        output = here / f"there{suffix}"
        output.write_text("old")
        before = set(everything(here))
        assert run(capsys, "export", "run.pytrace", "-o", output.name, "-f")[0] == 0
        assert output.read_bytes() != b"old"
        assert set(everything(here)) == before


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        if path.is_file() and path.stat().st_size < 1 << 30
        else b""
        for path in sorted(folder.rglob("*"))
    }


def assert_one_line(err: str) -> None:
    assert err.startswith("pytracer: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


# ---------------------------------------------------------------- speed


def large(events: int) -> Trace:
    """As many allocations and frees as asked for, with a thousand of them alive."""
    columns: dict[str, Any] = {"strings": [""], "losses": {}, "meta": "{}"}
    for name, (row_type, dtypes) in TABLES.items():
        for column, dtype in zip(row_type._fields, dtypes, strict=True):
            columns[f"{name}.{column}"] = np.zeros(int(name not in ("scopes", "scope_ends")), dtype)
    order = np.arange(events, dtype=np.uint64)
    columns["clock.ticks"], columns["clock.unix_ns"] = np.array([0, 10**9]), np.array([0, 10**9])
    columns["events.ticks"] = order * np.uint64(1000)
    columns["events.address"] = np.uint64(1 << 20) + order // np.uint64(2) % np.uint64(
        1000
    ) * np.uint64(4096)
    columns["events.bytes"] = order // np.uint64(2) % np.uint64(1000)
    freed = order % np.uint64(2) == 0
    columns["events.action"] = np.where(freed, ACTION["free_completed"], ACTION["alloc"])
    columns["events.action"][:2000:2] = ACTION["label"]
    for name in ("scope", "place", "thread"):
        columns[f"events.{name}"] = np.zeros(events)
    return Trace.from_columns(columns)


@pytest.mark.slow
def test_a_million_events_are_summarised_in_a_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bound has room for a busy machine; it is CPU time."""
    path = large(1_000_000).save(tmp_path / "large.pytrace")
    load(path)  # imports are not what is measured
    began = time.process_time()
    code, out, _ = run(capsys, "summary", str(path))
    took = time.process_time() - began
    assert code == 0
    assert "1,000,000 events" in out
    assert took < 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_screen_that_cannot_be_written_is_one_line(here: Path, more: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "pytracer", "summary", "run.pytrace", *more],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == "pytracer: the output: No space left on device"
    assert "Traceback" not in ran.stderr


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """As typed, with `pytracer` for the command."""
    return subprocess.run(
        ["bash", "-c", command.replace("pytracer", f"{sys.executable} -m pytracer", 1)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment},
        capture_output=True,
    )


@pytest.mark.parametrize("command", ["summary run.pytrace", "export run.pytrace -f"])
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_screen_that_is_closed_is_one_line(closed: str, command: str, here: Path) -> None:
    ran = shell(f"pytracer {command} {closed}")
    assert ran.returncode == 1
    expected = b"" if "2>" in closed else b"pytracer: the output: Bad file descriptor\n"
    assert ran.stderr[-len(expected) :] == expected
    assert b"Traceback" not in ran.stderr


# What a terminal may speak.
ENCODINGS = {
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_bars_are_of_what_the_screen_can_show(encoding: str, here: Path) -> None:
    ran = shell("pytracer summary run.pytrace", **ENCODINGS[encoding])
    assert (ran.returncode, ran.stdout.isascii()) == (0, True), ran.stderr
    shown = (Path(__file__).parent / "golden" / "summary-run-pytrace.txt").read_text()
    assert ran.stdout.decode() in shown.replace("\N{FULL BLOCK}", "#")


def test_names_of_files_may_be_any_bytes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(b"na\xefve")
    Path("run.pytrace").rename(f"{name}.pytrace")
    commands = {
        f"summary {name}.pytrace": 0,
        f"summary {name}.pytrace --json": 0,
        f"check {name}.pytrace --max-peak 1TiB": 0,
        f"check {name}.pytrace --max-peak 1B": 3,
        f"diff {name}.pytrace --steps 0,1": 0,
        f"export {name}.pytrace": 0,
        f"export {name}.pytrace --format snapshot": 0,
        f"export {name}.pytrace --format html": 0,
        f"summary {name}.pickle": 0,
        f"summary {name}.missing": 4,
        f"export {name}.pytrace --format html ": 1,  # which is there
    }
    for command, code in commands.items():
        assert run(capsys, *command.split())[0] == code, command
    ran = shell(f"pytracer summary {name}.pytrace", **ENCODINGS["C"])
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("columns", [1, 40, 66])
def test_the_table_is_as_wide_as_the_screen(
    columns: int, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Down to 40: a narrower one cannot hold a row."""
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run(capsys, "summary", "run.pytrace")
    assert code == 0
    assert max(map(len, out.splitlines())) <= max(columns, 40)
    assert max(map(len, str(load("run.pytrace")).splitlines())) <= max(columns, 40)


def test_doctor_names_each_private_name_that_torch_has_dropped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = private_torch.Private("torch.cuda:_gone", "counting sheep")
    monkeypatch.setitem(private_torch.NAMES, "gone", gone)
    assert main(["doctor"]) != 0
    said = " ".join(capsys.readouterr().out.split())  # over as many lines as it needs
    assert "private torch failed this torch has no torch.cuda._gone, " in said
    assert "torch.cuda._gone, which counting sheep needs" in said


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["train.py"], "pytracer run train.py"),
        (["run.pytrace"], "pytracer summary run.pytrace"),
        (["summary", "x.pytrace", "--wrods"], "--words"),
        (["check", "x.pytrace", "--max-paek", "1GiB"], "--max-peak"),
        (["run", "--stack", "train.py"], "--stacks"),
    ],
)
def test_what_was_meant_is_named(
    typed: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(typed)
    assert meant in capsys.readouterr().err.partition("did you mean ")[2]


@pytest.mark.parametrize(
    ("program", "late"),
    [
        (
            "train.py --stacks --steps=3 --lr 1",
            "--stacks and --steps came after train.py, which got",
        ),
        ("-m training.main --stacks", "--stacks came after training.main, which got it"),
        ("train.py --rank 3 --lr 1", ""),  # the script's own
        ("absent.py --lr 1", ""),
        ("", ""),
    ],
)
def test_an_option_of_ours_behind_the_program_is_named(
    program: str, late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pytracer.cli import imagine
    from pytracer.cli.command import Parser

    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text('parser.add_argument("--rank")')
    parser = Parser()
    imagine.Imagine().add_arguments(parser)
    said = parser.given_too_late(program.split())
    assert said.startswith(late) if late else not said


@pytest.mark.parametrize("command", ["run", "imagine"])
def test_a_program_that_refuses_an_option_of_ours_gets_a_note(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()")
    words = [sys.executable, "-m", "pytracer", command, "train.py", "--stacks"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode in (1, 2)
    assert "pytracer: --stacks came after train.py, which got it" in ended.stderr
