"""`pytracer attach` and `pytracer detach`: a recording of a job that runs already."""

import argparse
import json
import os
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.cli import autostart, output, progress, recording
from pytracer.cli.command import Command
from pytracer.recording import injection
from pytracer.recording.place import unused

_FOR_PYTHON = 60.0  # seconds to wait until the job's main thread runs Python
_FOR_A_STEP = 30.0  # seconds to wait until a step ends, before the recording begins within one
_EVERY = 0.02  # seconds between two looks for an answer
_OBEY = Path(injection.__file__).with_name("obey.py")


class Attach(Command):
    """Record a job that runs already.

    Joins a process that trains, without a change to it: totals of every step and a
    look at some, as `pytracer run --always`; or a trace of a few steps. It begins
    as a step ends. The job's results stay the same, bit for bit.

      pytracer attach 4711                        until pytracer detach 4711
      pytracer attach 4711 --steps 5 --stacks     five steps, then it leaves
      pytracer summary train.4711.always          while it runs, and afterwards

    It needs gdb or lldb, or Python 3.14. This pytracer must fit the job's Python
    and torch; the job needs none.
    """

    name = "attach"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_pid(parser)
        recording.add_to(parser, when_attached=True)

    def run(self, options: argparse.Namespace) -> int:
        pid: int = options.pid
        settings = recording.given(options)
        plan = recording.plan(
            settings if "steps" in settings else {"always": True, **settings}, (_name_of(pid),)
        )
        kind = "always" if plan.always else "pytrace"
        path = plan.output or unused(Path(f"{plan.name}.{pid}.{kind}"))
        order: dict[str, Any] = {"path": str(path.absolute()), "steps": None}
        if plan.always:
            order["options"] = {"devices": plan.devices}
            if plan.max_size is not None:
                order["options"]["size"] = plan.max_size
        else:
            order["steps"] = plan.steps
            order["options"] = {
                **plan.options,
                "devices": plan.devices,
                "max_events": plan.max_events,
            }
        return _begin(pid, order)


class Detach(Command):
    """Leave a job that pytracer attach has joined.

    Ends the recording at once, and says where it is. The job goes on.

      pytracer detach 4711
      pytracer detach 4712    another rank of the same job
    """

    name = "detach"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_pid(parser)

    def run(self, options: argparse.Namespace) -> int:
        with _Order(options.pid, "end") as order:
            ended = order.answer("over", wait=_FOR_PYTHON)
        _say(ended)
        return 0


def _add_pid(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pid", type=output.positive, metavar="PID", help="of the job's process")


def _begin(pid: int, about: dict[str, Any]) -> int:
    with _Order(pid, "begin", **about, now=False) as order:
        begun = order.answer("waits", "begun", "over", wait=_FOR_PYTHON)
        if begun["state"] == "waits":
            with progress.doing("waiting for the end of a step"):
                begun = order.answer("begun", "over", wait=_FOR_A_STEP, otherwise=begun)
        if begun["state"] != "waits":
            return _after(pid, order, begun, about["steps"])
    with _Order(pid, "begin", **about, now=True) as order:
        begun = order.answer("begun", wait=_FOR_PYTHON)
        output.tell("pytracer: no step has ended: the recording begins within one")
        return _after(pid, order, begun, about["steps"])


def _after(pid: int, order: "_Order", begun: dict[str, Any], steps: int | None) -> int:
    """Waits for a trace of some steps. A recording that goes on for weeks needs nobody."""
    path = shlex.quote(str(begun["path"]))
    if steps is None:
        print(f"Always on in process {pid}. Look at it:  pytracer summary {path}")
        print(f"End it:  pytracer detach {pid}")
        return 0
    try:
        with progress.doing(f"recording {steps} steps of process {pid}"):
            ended = order.answer("over", wait=None)
    except KeyboardInterrupt:
        with _Order(pid, "end") as early:
            ended = early.answer("over", wait=_FOR_PYTHON)
    _say(ended)
    return 0


def _say(ended: dict[str, Any]) -> None:
    from pytracer.data import history
    from pytracer.export import terminal

    path, steps = Path(ended["path"]), ended["steps"]
    if not path.exists():
        print("Left the job, which had made no tensors meanwhile: there is no recording.")
        return
    if not history.is_history(path):
        from pytracer.export import table

        print(table.render(output.read(path).data, terminal.here()))
        print()
    print(
        f"Left the job after {steps:,} steps. Look again:  pytracer summary {shlex.quote(str(path))}"
    )


def _name_of(pid: int) -> str:
    """The name of the program of a process; "run" if it cannot be seen."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # the refusal comes later, with its reason
        return "run"
    words = [os.fsdecode(word) for word in data.split(b"\0")[:-1]]
    scripts = [word for word in words[1:] if word.endswith(".py")]
    return autostart.program_of(words, scripts) or "run"


class _Order:
    """A folder with an order for the job, and with its answer."""

    def __init__(self, pid: int, do: str, **about: Any) -> None:
        """Gives the order as the block begins."""
        self._pid, self._order = pid, {"do": do, "package": str(_OBEY.parents[1]), **about}
        self._folder = tempfile.TemporaryDirectory(prefix="pytracer-")

    def __enter__(self) -> "_Order":
        folder = Path(self._folder.name)
        (folder / "order").write_text(json.dumps(self._order), encoding="utf-8")
        try:
            names = {"__name__": "ordered", "folder": self._folder.name}
            injection.execute(self._pid, _OBEY, folder, names)
        except BaseException:
            self._folder.cleanup()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Takes the order back if the job has not seen it."""
        self._folder.cleanup()

    def answer(
        self, *states: str, wait: float | None, otherwise: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The job's answer, as soon as it is one of these states.

        Args:
            *states: that are waited for.
            wait: seconds; None for as long as the job lives.
            otherwise: the answer if that takes longer.

        Raises:
            errors.CaptureError: the job refuses, ends or does not answer.
        """
        began = time.monotonic()
        while wait is None or time.monotonic() - began < wait:
            lives = Path(f"/proc/{self._pid}").exists()
            found = self._read()
            if found.get("state") == "refused":
                raise errors.CaptureError(f"process {self._pid}: {found['text']}")
            if found.get("state") in states:
                return found
            if not lives:
                raise errors.CaptureError(f"process {self._pid} has ended{self._so_far(found)}")
            time.sleep(_EVERY)
        if otherwise is not None:
            return otherwise
        raise errors.CaptureError(
            f"process {self._pid} has not answered in {wait:.0f} s: its main thread runs no Python "
            "now, or it sees other files"
        )

    def _read(self) -> dict[str, Any]:
        try:
            text = Path(self._folder.name, "answer").read_text("utf-8")
        except FileNotFoundError:
            return {}
        found: dict[str, Any] = json.loads(text)
        return found

    @staticmethod
    def _so_far(found: dict[str, Any]) -> str:
        return f"; what was recorded is in {found['path']}" if "path" in found else ""
