"""Functions in processes of their own, each forked from one that has imported torch and run nothing.

The import takes longer than what most of them do. An optimizer imports torch._dynamo, which takes
as long again: there may be a parent that has done that, too.
"""

import atexit
import functools
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LOOK_S = 0.005  # how long nobody asks whether a process has ended


class Running:
    """A function that runs in a process of its own, with arguments that can be pickled."""

    def __init__(
        self, folder: Path, function: Callable[..., Any], *arguments: Any, imports: str = "torch"
    ) -> None:
        descriptor, file = tempfile.mkstemp(dir=folder)
        os.close(descriptor)
        self._file = Path(file)
        self._file.write_bytes(pickle.dumps((function, arguments)))
        self._ended = Path(f"{file}.ended")
        self._parent = _parent(imports)
        _ask(self._parent, "run", file)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ended.exists():
            _ask(self._parent, "kill", str(self._file))
            self._wait(10)

    def finish(self, timeout: float = 120) -> Any:
        """What the function returns."""
        self._wait(timeout)
        status = self._ended.read_text() if self._ended.exists() else f"none after {timeout} s"
        if status != "0":
            output = Path(f"{self._file}.output").read_text(errors="replace")
            raise AssertionError(f"exit status {status}:\n{output}")
        return pickle.loads(self._file.read_bytes())

    def _wait(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while not self._ended.exists() and time.monotonic() < limit:
            assert self._parent.poll() is None, "the process that starts the others has ended"
            time.sleep(LOOK_S)


def in_a_process(folder: Path, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns there; an error if that process dies of anything."""
    with Running(folder, function, *arguments) as running:
        return running.finish()


@functools.cache
def _parent(imports: str) -> "subprocess.Popen[bytes]":
    code = f"import tests.transparency.observe, {imports}; tests.transparency.processes.serve()"
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        # Where an import asks for CUDA, the children of one that the driver has answered have none.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        stdin=subprocess.PIPE,
        bufsize=0,
    )
    atexit.register(parent.communicate)  # the end of its input is its own
    return parent


def _ask(parent: "subprocess.Popen[bytes]", what: str, file: str) -> None:
    assert parent.stdin is not None
    parent.stdin.write(f"{what} {file}\n".encode())


# -------------------------------------------------------------------------- in the parent


def serve() -> None:
    """Forks for each file that somebody names, and writes down how the child ended.

    A child returns from here, and so ends as any other process does.
    """
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "no child would have that thread"
    running: dict[int, Path] = {}
    with open(0, "rb", buffering=0, closefd=False) as asked:
        while True:
            if select.select([asked], [], [], LOOK_S if running else None)[0]:
                what, _, file = asked.readline().decode().rstrip("\n").partition(" ")
                if what == "run":
                    child = os.fork()
                    if child == 0:
                        break
                    running[child] = Path(file)
                    continue
                for child, known in running.items():
                    if not what or known == Path(file):
                        os.kill(child, signal.SIGKILL)
                if not what:
                    return
            _write_down_what_ended(running)
    _call(Path(file))


def _write_down_what_ended(running: dict[int, Path]) -> None:
    for child, file in list(running.items()):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            del running[child]
            note = Path(f"{file}.status")
            note.write_text(str(os.waitstatus_to_exitcode(status)))
            note.rename(f"{file}.ended")  # whole from the moment that it is there


def _call(file: Path) -> None:
    """In the child: the file says what to call, and gets what that returned."""
    output = Path(f"{file}.output")
    with Path(os.devnull).open("rb") as nothing, output.open("wb") as written:
        for descriptor, now in enumerate((nothing, written, written)):
            os.dup2(now.fileno(), descriptor)
    function, arguments = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(function(*arguments)))
