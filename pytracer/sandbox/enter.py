"""Runs a command in a private view of the files.

Python runs this in a process of its own, which enters the view and then starts the command.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytracer.sandbox import namespaces, preload
from pytracer.sandbox.order import Impossible, Order

NAMESPACES, PRELOAD = "namespaces", "preload"
_VIEWS: dict[str, Any] = {NAMESPACES: namespaces.View, PRELOAD: preload.View}
_SUBREAPER = 36


def main() -> int:
    """Runs the order on the command line, and writes a report. Returns the exit code."""
    order = Order(**json.loads(sys.argv[1]))
    report: dict[str, Any] = {"impossible": {}}
    code = 1
    for way in order.ways:
        try:
            view = _VIEWS[way](order)
        except (Impossible, OSError) as problem:
            report["impossible"][way] = str(problem)
            continue
        code = _run(order.command, view)
        changes = view.changes()
        report |= {"way": way, "changes": [vars(one) for one in changes]}
        failed = code != 0 or (order.problem and Path(order.problem).exists())
        if order.write and not failed:
            view.write(changes)
            report["kept"] = True
        break
    Path(order.report).write_text(json.dumps(report))
    return code if code >= 0 else 128 - code


def _run(command: list[str], view: Any) -> int:
    """Runs the command in the view, and ends what it leaves running. Returns the exit code."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        environment = {**os.environ, **view.variables}
        return subprocess.run(command, preexec_fn=view.enter, env=environment).returncode
    finally:
        _end_children()


def _end_children() -> None:
    """Ends what the command has left running: it would outlive its view."""
    while True:
        children = Path("/proc/thread-self/children").read_text().split()
        if not children:
            return
        for child in map(int, children):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
