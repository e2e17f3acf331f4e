"""Sequences of operations on files, from a program's arguments: what a view must do as the system."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Operation = tuple[str, str, str]  # its name, a path, and another path or a text


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _append(path: str, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def _overwrite(path: str, text: str) -> None:
    with open(path, "r+") as file:
        file.write(text)


def _make_new(path: str, text: str) -> None:
    with open(path, "x") as file:
        file.write(text)


def _truncate(path: str, text: str) -> None:
    os.truncate(path, len(text))


def _chmod(path: str, text: str) -> None:
    os.chmod(path, 0o700 if len(text) % 2 else 0o750)


def _age(path: str, text: str) -> None:
    os.utime(path, (len(text), 1000 + len(text)))


def _list(path: str, _: str) -> list[str]:
    return sorted(os.listdir(path))


def _read(path: str, _: str) -> str:
    with open(path) as file:
        return file.read()


def _walk(path: str, _: str) -> Any:
    return sorted((top, sorted(folders), sorted(files)) for top, folders, files in os.walk(path))


def _look(path: str, _: str) -> Any:
    return os.path.isdir(path), os.path.islink(path), os.path.exists(path), os.path.lexists(path)


OPERATIONS: dict[str, Callable[[str, str], Any]] = {
    "write": _write,
    "append": _append,
    "overwrite": _overwrite,
    "make_new": _make_new,
    "truncate": _truncate,
    "chmod": _chmod,
    "age": _age,
    "list": _list,
    "read": _read,
    "walk": _walk,
    "look": _look,
    "real": lambda path, _: os.path.relpath(os.path.realpath(path)),
    "mkdir": lambda path, _: os.mkdir(path),
    "makedirs": lambda path, _: os.makedirs(path),
    "remove": lambda path, _: os.remove(path),
    "rmdir": lambda path, _: os.rmdir(path),
    "rmtree": lambda path, _: shutil.rmtree(path),
    "rename": lambda path, other: os.rename(path, other),
    "replace": lambda path, other: os.replace(path, other),
    "copy": lambda path, other: shutil.copy2(path, other),
    "copytree": lambda path, other: shutil.copytree(path, other, symlinks=True),
    "symlink": lambda path, other: os.symlink(other, path),
    "link": lambda path, other: os.link(path, other, follow_symlinks=False),
    "readlink": lambda path, _: os.readlink(path),
}


def run(operations: list[Operation]) -> list[Any]:
    """What each of them returns, or the number of its error."""
    answers: list[Any] = []
    for name, path, other in operations:
        try:
            answers.append(OPERATIONS[name](path, other))
        except shutil.Error:
            answers.append("several errors")
        except OSError as problem:
            answers.append(problem.errno)
    return answers


def listing(folder: Path) -> dict[str, Any]:
    """Kind, mode, content and, of files, whether the time is one that was set."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name, status = str(path.relative_to(folder)), path.lstat()
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_dir():
            found[name] = ("folder", status.st_mode)
        else:
            aged = status.st_mtime if status.st_mtime < 10_000 else 0
            found[name] = ("file", status.st_mode, aged, path.read_text())
    return found


if __name__ == "__main__":  # several sequences, each in a folder of its own
    sequences = json.loads(Path(sys.argv[1]).read_text())
    results = []
    top = os.getcwd()
    for number, sequence in enumerate(sequences):
        os.chdir(os.path.join(top, str(number)))
        results.append([run(sequence), listing(Path.cwd())])
        os.chdir(top)
    Path(sys.argv[2]).write_text(json.dumps(results))
