"""What leaves the house says nothing of who recorded it, and no file is more open than a log."""

import getpass
import gzip
import json
import os
import pickle
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import pytracer
from pytracer.cli import main
from pytracer.data import anonymous

ROOT = Path(__file__).parents[1]

# It trains with stacks, in a folder and a file whose names nobody else may learn.
HOST = "machine-of-ann"  # a real name may be two letters, which any bytes may have
PROGRAM = (
    f"""
import platform
import sys
import torch
import pytracer

platform.node = lambda: {HOST!r}
"""
    """\

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
options = {"path": sys.argv[1]} if len(sys.argv) > 1 else {}
t = pytracer.trace(model, optimizer, stacks=True, devices="cpu", table=False, cost=not options,
                   anonymous="plain" not in sys.argv[0], **options)
with t:
    for _ in range(2):
        with torch.profiler.record_function(f"load {__file__}, twice"):
            loss = model(torch.ones(8, 64)).sum()
        loss.backward()
        optimizer.step()
    if options:
        print("recorded", flush=True)
        import time
        time.sleep(60)
t.save("saved.pytrace")
"""
)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a secret name, and in it a trace with everything and one without."""
    folder = tmp_path_factory.mktemp("x") / "secret-customer" / "project of ann"
    folder.mkdir(parents=True)
    for name in ("plain", "shy"):
        train(folder, name)
        (folder / "saved.pytrace").rename(folder / f"{name}.pytrace")
    return folder


def train(folder: Path, name: str) -> None:
    (folder / f"{name}_script.py").write_text(PROGRAM)
    ran = subprocess.run(
        [sys.executable, f"{name}_script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def secrets(folder: Path) -> Iterator[str]:
    """No export may have any of these in it."""
    yield from (str(folder), "secret-customer", str(ROOT), str(Path(sys.prefix)), sys.prefix)
    yield from (str(Path.home()), HOST)
    if len(getpass.getuser()) > 4:  # "root" is a word of its own
        yield getpass.getuser()


def contents(path: Path) -> Iterator[bytes]:
    """Of a file or a folder, as they lie there and unpacked."""
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        whole = file.read_bytes()
        yield whole
        if file.suffix == ".gz":
            yield gzip.decompress(whole)
        if file.suffix == ".parquet":
            import pandas as pd

            yield pd.read_parquet(file).to_json().encode()
        if file.suffix == ".pytrace":  # its columns are packed
            yield repr(pytracer.load(file).data).encode()
            yield repr((pytracer.load(file).data.strings, pytracer.load(file).data.meta)).encode()


def told(path: Path, folder: Path) -> set[str]:
    everything = list(contents(path))
    return {s for s in secrets(folder) if s and any(s.encode() in part for part in everything)}


EXPORTS = (
    "run.pftrace",
    "run.json",
    "run.json.gz",
    "run.pickle",
    "run.html",
    "run.parquet",
    "run.pytrace",
)


@pytest.mark.ci
@pytest.mark.parametrize("name", EXPORTS)
def test_an_anonymous_export_has_no_byte_of_host_user_and_paths(
    name: str, house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / name
    assert main(["export", "--anonymous", str(house / "plain.pytrace"), "-o", str(out)]) == 0
    assert told(out, house) == set()
    capsys.readouterr()


def test_without_being_asked_a_trace_says_where_it_was_recorded(house: Path) -> None:
    """Else the tests here would prove nothing."""
    found = told(house / "plain.pytrace", house)
    assert {str(house), "secret-customer", HOST} <= found


def test_an_anonymous_recording_has_none_of_it_from_the_start(house: Path) -> None:
    assert told(house / "shy.pytrace", house) == set()
    meta = pytracer.load(house / "shy.pytrace").data.meta
    assert not {"host", "pid", "command", "directory", "torch_folder"} & meta.keys()
    assert meta["device_memory"]["pid"] == 0


def test_a_killed_anonymous_recording_has_none_of_it_either(house: Path, tmp_path: Path) -> None:
    """Its file is anonymous while it is written, and not made so at the end."""
    file = tmp_path / "killed.pytrace"
    running = subprocess.Popen(
        [sys.executable, "shy_script.py", str(file)],
        cwd=house,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert running.stdout is not None
    running.stdout.readline()
    time.sleep(0.5)  # a flush comes every 0.1 s
    running.send_signal(signal.SIGKILL)
    running.communicate()
    with pytest.warns(RuntimeWarning, match="truncated|ends"):
        killed = pytracer.load(file)
    assert len(killed.steps()) >= 2
    assert any(text == "shy_script.py" for text in killed.data.strings)
    with pytest.warns(RuntimeWarning, match="truncated|ends"):
        assert told(file, house) == set()


def test_anonymous_summaries_have_none_of_it(
    house: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(house)
    for options in ([], ["--json"]):
        assert main(["summary", "--anonymous", "plain.pytrace", *options]) == 0
        said = capsys.readouterr().out
        assert [secret for secret in secrets(house) if secret in said] == []
    assert "host" not in json.loads(said)["meta"]


def test_an_anonymous_trace_answers_as_the_whole_one_does(house: Path) -> None:
    """To the byte; and lines are those of the program, below the folder that it ran in."""
    plain = pytracer.load(house / "plain.pytrace")
    shy = plain.anonymous()
    assert shy.peak.by_category == plain.peak.by_category
    assert shy.summary().equals(plain.summary())
    assert shy.by("module").equals(plain.by("module"))
    assert shy.by("line").equals(plain.by("line"))
    assert any(line.startswith("plain_script.py:") for line in shy.by("line").index)
    assert shy.anonymous().data.strings == shy.data.strings


def test_the_way_to_what_is_kept_stays_and_keys_go() -> None:
    ways = {
        "src/a.py:3 model[1].rows -> list -> tensor": "src/a.py:3 model[1].rows -> list -> tensor",
        "a.py:3 by_user -> dict['ann -> b'] -> tensor": "a.py:3 by_user -> dict[...] -> tensor",
        "a.py:3 c -> dict[('ann', 3)]": "a.py:3 c -> dict[...]",
        "keep -> generator run (src/a.py:9): w -> dict[7]": "keep -> generator run (src/a.py:9): w -> dict[7]",
    }
    document = {"variables": [{"name": "x", "path": way} for way in ways]}
    plain = anonymous.meta(document, "/home/ann")["variables"]
    assert [row["path"] for row in plain] == [*ways.values()]


def test_processes_and_gpus_become_numbers() -> None:
    """The same one has the same number everywhere: the ledger still knows which is its own."""
    uuid = "12345678-1234-1234-1234-123456789abc"
    gpu = {"processes": [{"pid": 77, "bytes": 5, "name": "ann"}, {"pid": 42, "bytes": 6}]}
    document = {
        "pid": 42,
        "device_memory": {
            "pid": 42,
            "devices": {"cuda:0": uuid},
            "readings": [{"gpus": {uuid: gpu}}],
        },
    }
    found = anonymous.meta(document, "")["device_memory"]
    assert found["pid"] == 0
    assert found["devices"] == {"cuda:0": "gpu-0"}
    assert found["readings"][0]["gpus"]["gpu-0"]["processes"] == [
        {"pid": 1, "bytes": 5},
        {"pid": 0, "bytes": 6},
    ]


# ---------------------------------------------------------------------- who may read the files


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_files_are_nobody_elses_where_the_umask_says_so(
    house: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.chdir(tmp_path)
    loaded = pytracer.load(house / "plain.pytrace")
    for name in EXPORTS:
        main(["export", str(house / "plain.pytrace"), "-o", name])
    with pytracer.trace(path="streamed.pytrace", devices="cpu", table=False):
        torch.ones(10)
    loaded.save("saved.pytrace")
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"), pytracer.trace(devices="cpu"):
        torch.empty(1 << 44)
    made = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(made) >= len(EXPORTS) + 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o600}


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_a_file_that_is_replaced_stays_as_open_as_it_was(
    mode: int, house: Path, tmp_path: Path
) -> None:
    loaded = pytracer.load(house / "plain.pytrace")
    for name in ("run.html", "run.pytrace", "run.json", "run.pickle"):
        path = tmp_path / name
        path.touch()
        path.chmod(mode)
        main(["export", str(house / "plain.pytrace"), "-f", "-o", str(path)])
        assert path.stat().st_size > 0
        assert stat.S_IMODE(path.stat().st_mode) == mode, name
    assert loaded.peak.bytes > 0


def test_an_anonymous_snapshot_and_chrome_trace_are_readable(house: Path, tmp_path: Path) -> None:
    shy = pytracer.load(house / "plain.pytrace").anonymous()
    shy.export_chrome_trace(tmp_path / "run.json")
    shy.export_memory_snapshot(tmp_path / "run.pickle")
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert pickle.loads((tmp_path / "run.pickle").read_bytes())["pytracer"]


def test_an_exceptions_text_stays_at_home(tmp_path: Path) -> None:
    """It may name hosts and users; the class remains."""
    with (
        pytest.raises(RuntimeError),
        pytracer.trace(devices="cpu", table=False, anonymous=True) as t,
    ):
        raise RuntimeError("no route to node-17.example.com")
    assert t.data.meta["ended_by"] == "RuntimeError"
    with pytest.raises(RuntimeError), pytracer.trace(devices="cpu", table=False) as t:
        raise RuntimeError("no route to node-17.example.com")
    assert t.data.meta["ended_by"] == "RuntimeError: no route to node-17.example.com"
    assert t.anonymous().data.meta["ended_by"] == "RuntimeError"
