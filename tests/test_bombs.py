"""Small files that decode to much memory: every reader refuses them at a stated limit."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import pytracer
from pytracer import errors
from pytracer.basics import files
from pytracer.data import recorded
from pytracer.data.schema import ACTION
from pytracer.export import snapshot
from tests import option_fuzzer
from tests.mutations import FLUSHES, HEADER, SYNC, chunk_of, meta_chunk, sealed, with_chain
from tests.test_table import training
from tests.trace_builder import TraceBuilder

MIB = 1 << 20
ROWS = 1 << 16
EVENTS = 9
WIDTHS = {1: 8, 2: 8, 3: 8, 4: 1, 5: 4, 6: 2, 7: 2}  # of the columns of events, by their number


def constant(value: int, size: int) -> bytes:
    """LZ4 of one repeated byte: a literal, a long match, twelve literals."""
    left = size - 32
    byte = bytes([value])
    return (
        b"\x1f"
        + byte
        + b"\1\0"
        + b"\xff" * (left // 255)
        + bytes([left % 255, 12 << 4])
        + byte * 12
    )


def column(number: int, value: int, width: int) -> bytes:
    """A column of `ROWS` equal numbers."""
    encoded = constant(value, ROWS * width)
    return struct.pack("<BBBBII", number, width, 0, 1, ROWS * width, len(encoded)) + encoded


def bomb(chunks: int) -> bytes:
    """A whole trace of so many chunks of events that say nothing."""
    action = {4: ACTION["label"]}
    payload = b"".join(column(one, action.get(one, 0), width) for one, width in WIDTHS.items())
    events = [
        sealed(
            SYNC
            + struct.pack("<HBBIQIII", EVENTS, 7, 0, ROWS, at * ROWS, len(payload), 0, 0)
            + payload
        )
        for at in range(chunks)
    ]
    return b"".join(with_chain([meta_chunk(b"{}"), *events, chunk_of(FLUSHES, 0, b"")]))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a bomb, the same as a rank, and a trace."""
    monkeypatch.chdir(tmp_path)
    training().trace().save("run.pytrace")
    content = Path("run.pytrace").read_bytes()[:HEADER] + bomb(300)
    for name in ("bomb.pytrace", "ranks/bomb.rank0.pytrace", "ranks/bomb.rank1.pytrace"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    return tmp_path


ANY = ["summary FILE", "summary FILE --json", "summary FILE --by module", "report FILE"]
ANY += ["report run.pytrace FILE -o both.html", "diff FILE run.pytrace", "diff run.pytrace FILE"]
ANY += ["check FILE --max-peak 1GiB", "fits FILE", "ledger FILE", "export FILE -o x.json"]
ANY += [f"export FILE -o x{suffix}" for suffix in (".pftrace", ".html", "/")]
ONE = ["what-if FILE --batch 2", "cost FILE", "watch FILE", "gemm advise FILE"]
ONE += ["export FILE -o x.pickle", "export FILE -o x.pytrace"]
LINES = [line.replace("FILE", file) for line in ANY for file in ("bomb.pytrace", "ranks")]
LINES += [line.replace("FILE", "bomb.pytrace") for line in ONE]


@pytest.mark.parametrize("line", LINES)
def test_every_command_refuses_a_file_whose_rows_exceed_the_limit(line: str, here: Path) -> None:
    """A file of 3 MB that decodes to 619 MiB is refused in a line that names the limit."""
    assert Path("bomb.pytrace").stat().st_size < 3 * MIB
    outcome = option_fuzzer.run(line.split(), here)
    assert (outcome.code, outcome.crash) == (4, "")
    last = outcome.err.splitlines()[-1]
    assert "of this size may take 512 MiB" in last
    assert f"{files.LIMIT}=1GiB" in last


def test_a_refused_file_takes_no_memory(here: Path) -> None:
    """Nothing is decoded before the limit is known to hold."""
    ask = (
        "import resource, pytracer, pytracer.errors\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: pytracer.load('bomb.pytrace')\n"
        "except pytracer.errors.UnreadableTrace: pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", ask],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 50 << 10


def test_the_limit_can_be_raised_and_lowered(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTRACER_READ_LIMIT is the memory that the rows may take."""
    small = Path("run.pytrace").read_bytes()[:HEADER] + bomb(1)
    Path("small.pytrace").write_bytes(small)
    with pytest.warns(RuntimeWarning):  # it has no end
        assert len(pytracer.load("small.pytrace").data.events.ticks) == ROWS
    monkeypatch.setenv(files.LIMIT, "1MiB")
    with pytest.raises(errors.UnreadableTrace, match="may take 1 MiB"):
        pytracer.load("small.pytrace")
    monkeypatch.setenv(files.LIMIT, "much")
    with pytest.raises(errors.UsageError, match=f"{files.LIMIT}: 'much' is not a size"):
        pytracer.load("small.pytrace")


def test_a_file_of_millions_of_steps_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps take more memory than their rows, so they have a limit of their own."""
    steps = len(pytracer.load("run.pytrace").steps())
    monkeypatch.setattr(recorded, "_MOST_STEPS", steps)
    assert len(pytracer.load("run.pytrace").steps()) == steps
    monkeypatch.setattr(recorded, "_MOST_STEPS", steps - 1)
    with pytest.raises(errors.UnreadableTrace, match=f"it has {steps} ends of steps"):
        pytracer.load("run.pytrace")
    monkeypatch.setenv(files.LIMIT, "1GiB")
    assert len(pytracer.load("run.pytrace").steps()) == steps


def test_a_snapshot_refuses_more_live_blocks_than_it_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block that is alive at the end takes memory while it is written, so there is a limit."""
    builder = TraceBuilder()
    for _ in range(3):
        builder.alloc(MIB)
    monkeypatch.setattr(snapshot, "_MOST_HELD", 3)
    snapshot.write(builder.trace(), tmp_path / "three.pickle")
    monkeypatch.setattr(snapshot, "_MOST_HELD", 2)
    with pytest.raises(errors.PytracerError, match="3 blocks are alive at the end"):
        snapshot.write(builder.trace(), tmp_path / "two.pickle")
    assert not (tmp_path / "two.pickle").exists()
