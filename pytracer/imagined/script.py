"""A script that knows nothing of us, run on a card that is not there. In a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytracer import errors, runner
from pytracer.reading import LoadedTrace, read

_TELLS = "PYTRACER_IMAGINES"  # what a child is to do; only we set it, for a process that we start
# With this very package, wherever it is; a program's folder takes the first place later.
_CHILD = f"""import sys
sys.path[0] = {str(Path(__file__).parents[2])!r}
from pytracer.imagined.script import main
sys.exit(main())"""
_MOST_LINES = 3  # of what a program said before it failed


@dataclass(frozen=True)
class Plan:
    """What to run, and where."""

    program: tuple[str, ...]  # a script or a module's name, and its arguments
    as_module: bool
    card: str
    capacity: int | None = None
    steps: int = 2  # of the optimizer; then it is stopped
    stacks: bool = False
    assume: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Imagined:
    """What came of it: a trace, or why there is none."""

    card: str
    trace: LoadedTrace | None
    problem: str


def imagine(plan: Plan, keep: Path) -> Imagined:
    """Runs it in another process and reads what that leaves in the folder `keep`."""
    path = keep / f"{plan.card}.pytrace"
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "problem"
        told = {**vars(plan), "path": str(path), "problem": str(said)}
        child = subprocess.run(
            [sys.executable, "-c", _CHILD],
            env={**os.environ, _TELLS: json.dumps(told), "PYTRACER": ""},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        problem = said.read_text() if said.exists() else ""
    if not problem and not path.exists():
        last = " / ".join(child.stderr.strip().splitlines()[-_MOST_LINES:])
        problem = f"it ended with exit code {child.returncode}: {last}"
    return Imagined(plan.card, None if problem else read(path), problem)


# ---------------------------------------------------------------- in the child


class _Enough(BaseException):
    """The program has made as many steps as were asked for."""


class _Run:
    """The block, from when the program has torch."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._block: Any = None
        self._left = plan.steps

    def begin(self) -> None:
        from pytracer.imagined.run import imagine as block

        plan = self._plan
        self._block = block(plan.card, plan.capacity, stacks=plan.stacks, assume=plan.assume)
        self._block.__enter__()
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self._left -= 1
        if self._left <= 0:
            raise _Enough

    def end(self, path: str) -> str:
        """Why there is no trace, or nothing."""
        if self._block is None:
            return "the program never imported torch"
        self._block.__exit__(None, None, None)
        if not self._block.data.has_allocations:
            return (
                "the program put nothing on the card: does it check torch.cuda.is_available(), or "
                "does it run on the CPU?"
            )
        self._block.save(path, overwrite=True)
        return ""


def main() -> int:
    """For a process that `imagine` has started."""
    told = json.loads(os.environ.pop(_TELLS))
    path, said = told.pop("path"), Path(told.pop("problem"))
    plan = Plan(**{**told, "program": tuple(told["program"])})
    run = _Run(plan)
    problem = ""
    try:
        execute = runner.program(plan.program, as_module=plan.as_module)
        runner.after_import("torch", run.begin)
        with suppress(_Enough):
            execute()
    except SystemExit as stop:
        if stop.code not in (None, 0):
            problem = f"the program gave up with {stop.code!r}"
    except errors.PytracerError as error:
        problem = str(error)
    except Exception as error:
        problem = _in_one_line(error)
    if not problem:
        problem = run.end(path)
    if problem:
        said.write_text(problem)
    sys.stdout.flush()
    sys.stderr.flush()
    return 0


def _in_one_line(error: Exception) -> str:
    """What it was, and the program's line."""
    cause: BaseException | None = error
    while cause is not None:  # what a framework has wrapped
        if isinstance(cause, errors.PytracerError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    line, traceback = "", error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if "site-packages" not in file and not file.startswith(
            (str(Path(__file__).parents[1]), "<")
        ):
            line = f"{Path(file).name}:{traceback.tb_lineno}: "
        traceback = traceback.tb_next
    text = str(error).strip().partition("\n")[0]
    return f"{line}{type(error).__name__}: {text}"
