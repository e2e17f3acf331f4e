"""Has another process of this user run a Python file: with `sys.remote_exec`, gdb or lldb.

`sys.remote_exec` came with Python 3.14. A debugger stops the process for a moment, writes one line of
Python into a page of its own there, and puts `PyRun_SimpleString` of that line on Python's list of
pending calls. Nothing else is called in the stopped process. Python's main thread makes the call between
two of its instructions, where signal handlers run too.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pytracer import errors

_PAGE = 0x7070_0000_0000  # an address that nobody uses; a later line takes the same page
_PAGE_BYTES = 4096
_MAP = f"(void *){_PAGE:#x}, {_PAGE_BYTES}, 3, 34, -1, 0"  # private, may be read and written
_LINE = "try:\n exec(compile(__import__('pathlib').Path({file!a}).read_bytes(), {file!a}, 'exec'), {names!a})\n"
_LINE += "except BaseException:\n pass\n"
_QUEUED = re.compile(r"^(queued it: 0|\(int\) \$\d+ = 0)$", re.MULTILINE)  # says gdb, or lldb
_PATIENCE = 60  # seconds for a debugger
_CALL = b"Py_AddPendingCall"

# The debugger reads the names of these libraries only: torch's take it seconds.
_GDB = """
set pagination off
set confirm off
set auto-solib-add off
attach {pid}
sharedlibrary libc\\.so
sharedlibrary libpython
set scheduler-locking on
set unwindonsignal on
{map}
restore line binary {page:#x}
printf "queued it: %d\\n", ((int (*)(void *, void *)) Py_AddPendingCall)((void *) PyRun_SimpleString, (void *) {page:#x})
detach
quit
"""
_GDB_MAP = f"""\
if ((void *(*)(void *, unsigned long, int, int, int, long)) mmap)({_MAP}) != (void *) {_PAGE:#x}
  quit 1
end"""
_LLDB = """
settings set target.preload-symbols false
process attach --pid {pid}
{map}
memory write --infile line {page:#x}
expression -- unsigned long $run = (unsigned long) &PyRun_SimpleString
expression -- ((int (*)(void *, void *)) &Py_AddPendingCall)((void *) $run, (void *) {page:#x})
process detach
quit
"""
_LLDB_MAP = f"""\
expression -- ((void *(*)(void *, unsigned long, int, int, int, long)) &mmap)({_MAP})"""


def execute(pid: int, file: Path, folder: Path, names: Mapping[str, str]) -> None:
    """Has the process execute the file, with these names as its globals. Does not wait until it has.

    Args:
        pid: of the process.
        file: Python.
        folder: an empty one, for what a debugger reads.
        names: the file's globals.

    Raises:
        errors.CaptureError: it cannot be; says why.
    """
    _refuse(pid)
    line = _LINE.format(file=str(file), names=dict(names))
    if sys.version_info >= (3, 14):
        _execute_remotely(pid, line, folder)
        return
    debugger = next(filter(None, map(shutil.which, ("gdb", "lldb"))), None)
    if debugger is None:
        raise errors.CaptureError(
            "attaching needs gdb or lldb with this Python: apt install gdb (Python 3.14 needs neither)"
        )
    encoded = line.encode() + b"\0"
    if len(encoded) > _PAGE_BYTES:
        raise errors.CaptureError(f"the path is too long: {file}")
    (folder / "line").write_bytes(encoded)
    _debug(pid, Path(debugger), folder)


def _refuse(pid: int) -> None:
    """Refuses a process that cannot be joined, before it is stopped."""
    place = Path("/proc", str(pid))
    try:
        owner = place.stat().st_uid
        if owner != os.geteuid():
            raise errors.CaptureError(f"process {pid} is another user's: run this as user {owner}")
        status = (place / "status").read_text()
        files = _files_of(place)
    except FileNotFoundError:
        raise errors.CaptureError(f"there is no process {pid}") from None
    except PermissionError:
        raise _forbidden(pid) from None
    if pid == os.getpid():
        raise errors.CaptureError("this process is pytracer itself: name the job's")
    tracer = re.search(r"^TracerPid:\s*([1-9]\d*)", status, re.MULTILINE)
    if tracer:
        raise errors.CaptureError(f"process {pid} is in a debugger: process {tracer[1]} traces it")
    if re.search(r"^State:\s*[TtZX]", status, re.MULTILINE):
        raise errors.CaptureError(f"process {pid} is stopped or has ended")
    if not any(_is_python(path) for path in files):
        raise errors.CaptureError(f"process {pid} is not Python")
    if not any(path.name.startswith("libtorch") for path in files):
        raise errors.CaptureError(f"process {pid} has not imported torch")


def _files_of(place: Path) -> list[Path]:
    """The program and the libraries that a process has loaded."""
    lines = (place / "maps").read_text().splitlines()
    paths = dict.fromkeys(fields[5] for line in lines if len(fields := line.split(maxsplit=5)) > 5)
    return [
        Path(os.path.realpath(place / "exe")),
        *(Path(path) for path in paths if path[0] == "/"),
    ]


def _is_python(path: Path) -> bool:
    """Whether the file has Python's interpreter in it: a program of its own may."""
    is_library = ".so" in path.name
    if is_library and not path.name.startswith("libpython"):
        return False
    try:
        return _CALL in path.read_bytes()
    except OSError:  # it was replaced meanwhile
        return False


def _forbidden(pid: int) -> errors.CaptureError:
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    why = "a container needs --cap-add=SYS_PTRACE"
    if scope.is_file() and scope.read_text().strip() != "0":
        why = f"as {scope} is {scope.read_text().strip()}, it needs sudo"
    return errors.CaptureError(f"ptrace of process {pid} is forbidden here: {why}")


def _execute_remotely(pid: int, line: str, folder: Path) -> None:
    script = folder / "line.py"
    script.write_text(line)
    try:
        sys.remote_exec(pid, str(script))  # type: ignore[attr-defined,unused-ignore]
    except PermissionError:
        raise _forbidden(pid) from None
    except (OSError, RuntimeError) as problem:  # another Python, or forbidden
        raise errors.CaptureError(f"process {pid} cannot be joined: {problem}") from None


def _debug(pid: int, debugger: Path, folder: Path) -> None:
    is_gdb = debugger.name == "gdb"
    has_page = f"{_PAGE:x}-{_PAGE + _PAGE_BYTES:x} rw-p" in Path(f"/proc/{pid}/maps").read_text()
    text = (_GDB if is_gdb else _LLDB).format(
        pid=pid, page=_PAGE, map="" if has_page else _GDB_MAP if is_gdb else _LLDB_MAP
    )
    (folder / "commands").write_text(text)
    batch = ("-nx", "-batch", "--readnever", "-x") if is_gdb else ("--no-lldbinit", "--batch", "-s")
    try:
        said = subprocess.run(
            [debugger, *batch, "commands"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            check=False,
        ).stdout
    except subprocess.TimeoutExpired:
        raise errors.CaptureError(
            f"{debugger.name} did not join process {pid} in a minute"
        ) from None
    if _QUEUED.search(said):
        return
    if "not permitted" in said or "ptrace" in said.lower():
        raise _forbidden(pid)
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "nothing")
    raise errors.CaptureError(
        f"{debugger.name} could not join process {pid}; it said: {last.strip()}"
    )
