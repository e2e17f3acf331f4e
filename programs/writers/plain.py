"""Writers that need only Python."""

import csv
import json
import logging
import mmap
import os
import pickle
import shutil
import sqlite3
import stat
import tarfile
import tempfile
import zipfile
from pathlib import Path


def open_binary(here: Path) -> None:
    with open(here / "model.pt", "wb") as file:
        file.write(b"new")
    assert (here / "model.pt").read_bytes() == b"new"


def csv_log(here: Path) -> None:
    with open("log.csv", "w", newline="") as file:
        csv.writer(file).writerows([["step", "loss"], [0, 1.5]])
    assert (here / "log.csv").read_text().splitlines() == ["step,loss", "0,1.5"]


def json_results(here: Path) -> None:
    with open(here / "latest" / "best.json", "w") as file:
        json.dump({"loss": 2}, file)
    assert json.loads((here / "best").read_text()) == {"loss": 2}


def pickled(here: Path) -> None:
    with open(here / "state.pkl", "wb") as file:
        pickle.dump([1, 2], file)
    assert pickle.loads((here / "state.pkl").read_bytes()) == [1, 2]


def sqlite_rows(here: Path) -> None:
    base = sqlite3.connect(here / "runs.db")
    base.execute("insert into runs values ('second')")
    base.execute("pragma journal_mode=wal")
    base.commit()
    assert base.execute("select count(*) from runs").fetchone() == (2,)
    base.close()
    made = sqlite3.connect(here / "made.db")
    made.execute("create table one (number int)")
    made.commit()
    made.close()


def make_folders(here: Path) -> None:
    os.mkdir("made")
    os.makedirs(here / "out" / "a" / "b")
    (here / "out" / "a" / "b" / "file").touch()
    assert sorted(os.listdir(here / "out" / "a")) == ["b"]
    assert "made" in os.listdir()


def rename_and_replace(here: Path) -> None:
    os.rename("notes.txt", "notes.old")
    (here / "notes.new").write_text("new")
    os.replace(here / "notes.new", here / "log.csv")
    os.rename("results", "moved")
    assert (here / "moved" / "best.json").exists()
    assert not (here / "results").exists()
    assert (here / "log.csv").read_text() == "new"
    os.rename("moved", "results")


def remove_files(here: Path) -> None:
    os.remove("model.pt")
    (here / "log.csv").unlink()
    os.rmdir(here / "empty")
    assert not os.path.exists("model.pt")
    assert "log.csv" not in os.listdir()
    (here / "log.csv").write_text("again")
    assert (here / "log.csv").read_text() == "again"


def remove_trees(here: Path) -> None:
    shutil.rmtree("results")
    assert not (here / "latest" / "best.json").exists()
    os.makedirs("results")
    assert os.listdir("results") == []


def truncated(here: Path) -> None:
    os.truncate("model.pt", 3)
    with open(here / "notes.txt", "r+") as file:
        file.truncate(1)
    assert (here / "model.pt").read_bytes() == b"tra"
    assert (here / "notes.txt").read_text() == "a"


def appended(here: Path) -> None:
    with open("log.csv", "a") as file:
        file.write("50,0.1\n")
    assert len((here / "log.csv").read_text().splitlines()) == 51


def logged(here: Path) -> None:
    handler = logging.FileHandler(here / "train.log")
    log = logging.getLogger("writers")
    log.addHandler(handler)
    log.warning("a line")
    log.removeHandler(handler)
    handler.close()
    assert (here / "train.log").read_text() == "a line\n"


def zipped(here: Path) -> None:
    with zipfile.ZipFile("all.zip", "w") as archive:
        archive.write("notes.txt")
    with tarfile.open(here / "all.tar.gz", "w:gz") as tar:
        tar.add("results")
    with zipfile.ZipFile("all.zip") as archive:
        archive.extractall(here / "unpacked")
    assert (here / "unpacked" / "notes.txt").read_text() == "a\nb\nc\n"


def linked(here: Path) -> None:
    os.symlink("model.pt", "newest")
    os.link(here / "model.pt", here / "another")
    os.remove("latest")
    os.symlink("empty", here / "latest")
    (here / "newest").write_bytes(b"by a link")
    assert (here / "model.pt").read_bytes() == b"by a link"
    assert (here / "another").read_bytes() == b"by a link"
    assert os.readlink("latest") == "empty"


def modes_and_times(here: Path) -> None:
    os.chmod("secret", 0o644)
    os.utime(here / "notes.txt", (1, 1))
    (here / "results").chmod(0o700)
    with open("run.sh") as file:
        os.fchmod(file.fileno(), 0o600)
    assert stat.S_IMODE(os.stat("secret").st_mode) == 0o644
    assert os.stat("notes.txt").st_mtime == 1
    assert stat.S_IMODE(os.stat("run.sh").st_mode) == 0o600


def temporary(here: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=here) as file, tempfile.TemporaryDirectory() as folder:
        file.write(b"x")
        Path(folder, "one").write_text("1")
    descriptor, name = tempfile.mkstemp(dir=here)
    os.write(descriptor, b"stays")
    os.close(descriptor)
    assert Path(name).read_bytes() == b"stays"
    with tempfile.TemporaryFile() as file:
        file.write(b"nowhere")


def descriptors(here: Path) -> None:
    folder = os.open(here, os.O_RDONLY)
    file = os.open("model.pt", os.O_WRONLY | os.O_TRUNC, dir_fd=folder)
    os.pwrite(file, b"12", 0)
    os.close(file)
    os.mkdir("by_descriptor", dir_fd=folder)
    os.unlink("log.csv", dir_fd=folder)
    assert "log.csv" not in os.listdir(folder)
    assert os.stat("model.pt", dir_fd=folder).st_size == 2
    os.close(folder)


def with_pathlib(here: Path) -> None:
    (here / "a.txt").write_text("a")
    (here / "a.txt").rename(here / "b.txt")
    (here / "c").mkdir()
    (here / "b.txt").replace(here / "c" / "b.txt")
    assert [one.name for one in here.glob("c/*")] == ["b.txt"]
    assert {"c", "model.pt"} <= {one.name for one in here.iterdir()}


def copied(here: Path) -> None:
    shutil.copytree("results", here / "copy")
    shutil.copy2("secret", "secret2")
    shutil.move("empty", here / "copy" / "empty")
    assert (here / "copy" / "deep" / "weights.npy").exists()
    assert not os.path.exists("empty")


def mapped(here: Path) -> None:
    with open("notes.txt", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[0:1] = b"X"
    assert (here / "notes.txt").read_bytes()[:1] == b"X"


def elsewhere(here: Path) -> None:
    os.chdir("results")
    with open("best.json", "w") as file:
        file.write("{}")
    os.makedirs("inside/deep")
    os.chdir("inside")
    assert os.getcwd() == os.path.join(os.path.realpath(here), "results", "inside")
    Path("../up").write_text("up")
    os.chdir(here)
    assert (here / "results" / "up").exists()


WRITERS = {
    each.__name__: each
    for each in (
        *(open_binary, csv_log, json_results, pickled, sqlite_rows, make_folders),
        *(rename_and_replace, remove_files, remove_trees, truncated, appended, logged, zipped),
        *(linked, modes_and_times, temporary, descriptors, with_pathlib, copied, mapped, elsewhere),
    )
}
