"""Our work in a process beside the program's, at low priority."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pytracer.recording.start import where_packages_are

# Silent about what goes wrong: its caller sees the exit code.
_CALL = """
import os, sys
sys.path[:] = {folders!r}
try:
    from {module} import {function}
    os.nice(10)
    {function}({words!r})
except BaseException:
    os._exit(1)
"""


def call(
    module: str, function: str, words: Sequence[str], *, output: int = subprocess.DEVNULL
) -> "subprocess.Popen[bytes] | None":
    """Calls one of our functions with words; None if there can be no process.

    It imports nothing of the program's, and neither reads PYTHON... nor runs the site's code.
    """
    python = sys.executable
    if hasattr(sys, "frozen") or not python or not Path(python).name.startswith("python"):
        return None  # the program itself would start again
    code = _CALL.format(
        folders=where_packages_are(), module=module, function=function, words=tuple(words)
    )
    try:
        return subprocess.Popen(
            [python, "-I", "-S", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=2 if sys.__stderr__ is not None else subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is meant for the program
        )
    except Exception:  # no memory, no more processes, or the program forbids it
        return None
