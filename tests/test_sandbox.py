"""A program in a private view changes no file of the user's, and sends nothing."""

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from programs.writers import operations, plain, processes, user_files
from pytracer import errors
from pytracer.sandbox import launch
from pytracer.sandbox.inside import Inside
from tests.private_views import ENVIRONMENT, ROOT, possible
from tests.tiers import by_tier

WRITERS = [
    *(f"plain.{name}" for name in plain.WRITERS),
    *(f"processes.{name}" for name in {**processes.WRITERS, **processes.CONNECTS}),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_the_library_makes_a_view_everywhere() -> None:
    """Whatever else a machine forbids, one way is there."""
    assert "preload" in possible()


# ---------------------------------------------------------------- typical writers


@pytest.mark.usefixtures("way")
def test_programs_that_write_change_nothing(here: Path) -> None:
    """Each reads back what it wrote, and no byte, mode or time of the user's files differs."""
    for name in WRITERS:
        (here / name).mkdir()
        user_files.make(here / name)
    before = user_files.record(here)
    command = [sys.executable, "-m", "programs.writers", "--no-torch", *WRITERS]
    ran = launch.run(command, ENVIRONMENT, launch.Wish())
    assert ran.returncode == 0, ran.stderr
    assert user_files.record(here) == before
    changed = {(one.path, one.kind) for one in ran.changes}
    for name, kind in (
        ("plain.csv_log/log.csv", "written"),
        ("plain.remove_files/model.pt", "removed"),
        ("plain.modes_and_times/secret", "mode"),
        ("plain.make_folders/made", "folder"),
        ("processes.shell/model.pt", "written"),
    ):
        assert (str(here / name), kind) in changed


@pytest.mark.usefixtures("way")
def test_what_is_kept_is_what_a_plain_run_does(here: Path, tmp_path: Path) -> None:
    """`--write` makes the real files equal to those of a run without a view."""
    plainly = tmp_path / "plainly"
    names = [f"plain.{name}" for name in plain.WRITERS if name != "temporary"]
    for name in names:
        (here / name).mkdir()
        user_files.make(here / name)
    shutil.copytree(here, plainly, symlinks=True)
    command = [sys.executable, "-m", "programs.writers", "--no-torch", *names]
    ran = launch.run(command, ENVIRONMENT, launch.Wish(write=True))
    assert ran.returncode == 0, ran.stderr
    assert ran.kept
    subprocess.run(command, env=ENVIRONMENT, cwd=plainly, check=True)
    assert contents(here) == contents(plainly)


def contents(folder: Path) -> dict[str, Any]:
    """Names, kinds and modes, and the bytes of files whose bytes are the same in two runs."""
    differ = (".db", ".db-wal", ".zip", ".gz", ".pyc")
    return {
        name: (one.mode, b"" if name.endswith(differ) or stat.S_ISDIR(one.mode) else one.content)
        for name, one in user_files.record(folder).items()
        if "__pycache__" not in name
    }


INSIDE = """
import os, sys
from pathlib import Path
from programs.writers.__main__ import run
from pytracer.sandbox.inside import Inside

if __name__ == "__main__":
    top = Path.cwd()
    view = Inside(allow_network=False, write=False)
    with view:
        for name in sys.argv[1:]:
            os.chdir(top / name)
            run(name, top / name)
        os.chdir(top)
    assert any(one.path.endswith("plain.csv_log/log.csv") for one in view.changes)
    assert not {"LD_PRELOAD", "PYTRACER_VIEW"} & os.environ.keys()
    (top / "after").write_text("the view is over")
"""


def test_a_block_that_writes_changes_nothing(here: Path, tmp_path: Path) -> None:
    """The same writers, in a process that was there before the view. Afterwards files are real."""
    for name in WRITERS:
        (here / name).mkdir()
        user_files.make(here / name)
    before = user_files.record(here)
    script = tmp_path / "inside.py"
    script.write_text(INSIDE)
    ran = subprocess.run(
        [sys.executable, script, *WRITERS], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert Path("after").exists()
    Path("after").unlink()
    after = user_files.record(here)
    del before["."], after["."]
    assert after == before


# ---------------------------------------------------------------- any operations


def _paths() -> st.SearchStrategy[str]:
    names = st.sampled_from(
        ["a", "b", "folder", "folder/a", "folder/in/x", "link", "link/a", "new"]
    )
    return st.one_of(
        names, st.sampled_from(["folder/in", "new/b", "dangling", "loop", "../up", "."])
    )


SEQUENCES = st.lists(
    st.tuples(st.sampled_from(sorted(operations.OPERATIONS)), _paths(), _paths()),
    min_size=3,
    max_size=14,
)


def files_before(folder: Path) -> None:
    (folder / "folder" / "in").mkdir(parents=True)
    (folder / "a").write_text("a of the user")
    (folder / "folder" / "a").write_text("another")
    (folder / "folder" / "in" / "x").write_text("deep")
    (folder / "link").symlink_to("folder")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    (folder / "b").write_text("bb")
    (folder / "b").chmod(0o640)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@settings(max_examples=by_tier(25, 200, 5000), suppress_health_check=[HealthCheck.too_slow])
@given(SEQUENCES)
def test_any_operations_of_a_block_are_as_without_a_view(
    tmp_path_factory: pytest.TempPathFactory, sequence: list[operations.Operation]
) -> None:
    """Every answer, every error and every file at the end; and the real files stay."""
    top = tmp_path_factory.mktemp("sequence")
    for name in ("real/x", "plain/x"):
        (top / name).mkdir(parents=True)
        files_before(top / name)
    before = user_files.record(top / "real")
    with inside(top / "plain" / "x"):
        expected = operations.run(sequence), operations.listing(Path.cwd())
    with inside(top / "real" / "x"), Inside(allow_network=False, write=False):
        found = operations.run(sequence), operations.listing(Path.cwd())
    assert found == expected
    assert user_files.record(top / "real") == before
    with inside(top / "real" / "x"), Inside(allow_network=False, write=True):
        operations.run(sequence)
    assert operations.listing(top / "real" / "x") == expected[1]
    shutil.rmtree(top)


@pytest.mark.usefixtures("way")
def test_any_operations_of_a_program_are_as_without_a_view(tmp_path: Path) -> None:
    """The same for both kinds of views of a process: many sequences in one program."""
    sequences: list[list[operations.Operation]] = []

    @settings(max_examples=by_tier(60, 300, 2000), database=None)
    @given(SEQUENCES)
    def collect(sequence: list[operations.Operation]) -> None:
        sequences.append(sequence)

    collect()
    order = tmp_path / "order.json"
    order.write_text(json.dumps(sequences))
    for name in ("real", "plain"):
        for number in range(len(sequences)):
            (tmp_path / name / str(number)).mkdir(parents=True)
            files_before(tmp_path / name / str(number))
    before = user_files.record(tmp_path / "real")
    command = [sys.executable, "-m", "programs.writers.operations", str(order)]
    answers, shared = tmp_path / "answers.json", tmp_path / "shared"
    shared.mkdir()
    subprocess.run([*command, str(answers)], env=ENVIRONMENT, cwd=tmp_path / "plain", check=True)
    with inside(tmp_path / "real"):
        ran = launch.run([*command, str(shared / "a")], ENVIRONMENT, launch.Wish(), [shared])
    assert ran.returncode == 0, ran.stderr
    expected, found = json.loads(answers.read_text()), json.loads((shared / "a").read_text())
    for sequence, one, other in zip(sequences, expected, found, strict=True):
        assert other == one, sequence
    assert user_files.record(tmp_path / "real") == before


# ---------------------------------------------------------------- the network


@pytest.mark.usefixtures("way", "here")
def test_an_address_of_another_machine_is_reached_only_if_allowed() -> None:
    """Without a route a connection fails at once; with --allow-network the machine's own rules hold."""
    code = (
        "import socket, sys; one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM);"
        "sys.exit(one.connect_ex(('192.0.2.9', 9)))"
    )
    command = [sys.executable, "-c", code]
    assert launch.run(command, ENVIRONMENT, launch.Wish()).returncode != 0
    plainly = subprocess.run(command).returncode
    assert launch.run(command, ENVIRONMENT, launch.Wish(network=True)).returncode == plainly


def test_a_refused_connection_names_the_option() -> None:
    """So that the user who needs it finds it."""
    with Inside(allow_network=False, write=False), pytest.raises(OSError, match="--allow-network"):
        __import__("socket").create_connection(("192.0.2.1", 80))


@pytest.mark.usefixtures("way", "here")
def test_loggers_and_hubs_are_off() -> None:
    """They would try for minutes what is refused. The user's own choice for a hub stays."""
    show = ["sh", "-c", "echo $WANDB_MODE $HF_HUB_OFFLINE >&2"]
    assert launch.run(show, {**ENVIRONMENT, "WANDB_MODE": "online"}, launch.Wish()).stderr == (
        "disabled 1\n"
    )
    allowed = launch.run(show, {**ENVIRONMENT, "HF_HUB_OFFLINE": "0"}, launch.Wish(network=True))
    assert allowed.stderr == "disabled 0\n"


# ---------------------------------------------------------------- the ways


@pytest.mark.usefixtures("way")
def test_what_a_program_leaves_running_is_ended(here: Path) -> None:
    """It would outlive its view."""
    ran = launch.run(["sh", "-c", "sleep 987 & echo $! >&2"], ENVIRONMENT, launch.Wish())
    assert not Path(f"/proc/{int(ran.stderr)}").exists()


def theirs_too(path: str) -> bool:
    """Whether everybody may use the file."""
    whole = Path(path).resolve()
    return whole.exists() and all(one.stat().st_mode & 0o1 for one in (whole, *whole.parents))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user to become")
def test_another_user_has_a_view_too(tmp_path: Path, way: str) -> None:
    """Without any rights on the machine, and beside files that others own."""
    nobody = 12345
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "a").write_text("a")
    os.chown(theirs, nobody, nobody)
    os.chown(theirs / "a", nobody, nobody)
    (tmp_path / "ours").write_text("of root")
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)
    code = f"""
import os, sys
os.setgid({nobody}); os.setgroups([]); os.setuid({nobody})
sys.path.insert(0, {str(ROOT)!r})
os.chdir({str(theirs)!r})
from pytracer.sandbox import launch
launch.WAYS = [{way!r}]
script = "echo new > a; rm a; mkdir b; echo x > ../ours; echo x > ../new; exit 7"
ran = launch.run(["sh", "-c", script], os.environ, launch.Wish())
assert ran.returncode == 7, ran.stderr
assert ran.stderr.count("denied") == 2, ran.stderr
print(sorted((one.path.rpartition("/")[2], one.kind) for one in ran.changes))
"""
    python = sys.executable if theirs_too(os.__file__) else "/usr/bin/python3"
    if not theirs_too(python) or not theirs_too(str(ROOT / "pytracer")):
        pytest.skip("Python is in a folder that others may not enter")
    ran = subprocess.run(
        [python, "-c", code],
        env={"TMPDIR": "/tmp", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert ran.stdout.strip() == "[('a', 'removed'), ('b', 'folder')]", ran.stderr
    assert (theirs / "a").read_text() == "a"
    assert (tmp_path / "ours").read_text() == "of root"


DIRECTLY = """
import ctypes, os, struct
call = ctypes.CDLL(None).syscall
here = -100
unlinkat, renameat, openat2 = {"x86_64": (263, 264, 437)}.get(os.uname().machine, (35, 38, 437))
assert call(unlinkat, here, b"gone", 0) == 0
assert not os.path.exists("gone")
assert call(renameat, here, b"old", here, b"new") == 0
assert os.path.exists("new")
how = struct.pack("QQQ", os.O_WRONLY | os.O_TRUNC, 0, 0)
assert call(openat2, here, b"kept", how, len(how)) == -1
"""


def test_system_calls_made_directly_do_not_pass_the_library(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are trapped and done in the view, or refused by Landlock."""
    if not _has_landlock():
        pytest.skip("this kernel has no Landlock")
    monkeypatch.setattr(launch, "WAYS", ["preload"])
    for name in ("gone", "old", "kept"):
        Path(name).write_text(name)
    before = user_files.record(here)
    ran = launch.run([sys.executable, "-c", DIRECTLY], ENVIRONMENT, launch.Wish())
    assert ran.returncode == 0, ran.stderr
    assert user_files.record(here) == before
    kinds = {(Path(one.path).name, one.kind) for one in ran.changes}
    assert kinds == {("gone", "removed"), ("old", "removed"), ("new", "written")}


def _has_landlock() -> bool:
    import ctypes

    return int(ctypes.CDLL(None).syscall(444, None, 0, 1)) > 0


def test_a_machine_without_a_view_is_an_error_that_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The user may run the program all the same, knowingly."""
    monkeypatch.setattr(launch, "WAYS", [])
    with pytest.raises(errors.CaptureError, match="--unprotected"):
        launch.run(["true"], {}, launch.Wish())
    command = ["/bin/sh", "-c", f"echo x > {tmp_path}/x"]
    assert launch.run(command, {}, launch.Wish(unprotected=True)).way == ""
    assert (tmp_path / "x").exists()


def test_blocks_follow_each_other(here: Path) -> None:
    """Each has a view of its own, and a thread from before stays outside."""
    import threading

    ask, told = threading.Event(), threading.Event()

    def outside() -> None:
        ask.wait()
        Path("by_a_thread").write_text("real")
        told.set()

    thread = threading.Thread(target=outside)
    thread.start()
    for number in range(3):
        view = Inside(allow_network=False, write=False)
        with view:
            assert not Path("mine").exists()
            Path("mine").write_text(str(number))
            ask.set()
            told.wait()
        assert [one.path for one in view.changes] == [str(here / "mine")]
    thread.join()
    assert sorted(path.name for path in here.iterdir()) == ["by_a_thread"]


def test_a_view_in_a_view_is_the_outer_one(here: Path) -> None:
    """A program that imagines inside an imagined run has one private view."""
    outer = Inside(allow_network=False, write=False)
    with outer:
        with Inside(allow_network=False, write=True):
            Path("one").write_text("1")
        assert Path("one").exists()
    assert not Path("one").exists()
    assert len(outer.changes) == 1
