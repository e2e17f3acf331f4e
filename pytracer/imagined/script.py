"""Runs an unchanged script on an imagined card, in a process of its own."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.data.changes import Changes, changes_of
from pytracer.data.recorded import Trace
from pytracer.imagined import others
from pytracer.reading.views import LoadedTrace, read
from pytracer.recording import runner
from pytracer.recording.start import after_import
from pytracer.sandbox import launch, network

_ORDER = "PYTRACER_IMAGINES"  # the child's order, set by pytracer only for the process it starts
# Imports this copy of the package. The program's folder takes the first place later.
_CHILD = f"""import sys
sys.path[0] = {str(Path(__file__).parents[2])!r}
from pytracer.imagined.script import main
sys.exit(main())"""
BATCH = "{batch}"  # stands for the number of rows, in arguments and in the environment
_MOST_LINES = 3  # of a failed program's stderr


@dataclass(frozen=True)
class Plan:
    """The program to run, and the card."""

    program: tuple[str, ...]  # a script or a module's name, and its arguments
    as_module: bool
    card: str
    capacity: int | None = None
    steps: int = 2  # of the optimizer; the program is stopped after them
    stacks: bool = False
    assume: Mapping[str, Any] = field(default_factory=dict)
    ranks: int | None = None
    rank: int = 0
    values: Mapping[str, str] = field(default_factory=dict)  # for variables of the script
    model: Mapping[str, Any] | None = None  # an order for `huggingface.train`, and no program
    sizes: str | None = None  # for the rows of experts
    batch: int | None = None  # what {batch} stands for
    wish: launch.Wish = field(default_factory=launch.Wish)
    changes: Changes = field(default_factory=Changes)  # as `pytracer run --apply` makes them

    def file(self) -> str:
        """The name of the trace's file."""
        return f"{self.card}.pytrace" if not self.rank else f"{self.card}.rank{self.rank}.pytrace"

    def filled(self) -> "Plan":
        """The same with the batch in the place of {batch}."""
        if self.batch is None:
            return self
        words = tuple(word.replace(BATCH, str(self.batch)) for word in self.program)
        values = {name: text.replace(BATCH, str(self.batch)) for name, text in self.values.items()}
        model = None if self.model is None else {**self.model, "batch": self.batch}
        return replace(self, program=words, values=values, model=model)

    def environment(self) -> dict[str, str]:
        """The environment of the program."""
        variables = {**os.environ, **self.changes.environment}
        if self.batch is None:
            return variables
        return {name: text.replace(BATCH, str(self.batch)) for name, text in variables.items()}

    def uses_batch(self) -> bool:
        """Whether anything depends on the batch."""
        places = (*self.program, *self.values.values(), *os.environ.values())
        return self.model is not None or any(BATCH in text for text in places)


@dataclass(frozen=True)
class Imagined:
    """The trace of the run, or the reason why there is none."""

    card: str
    trace: LoadedTrace | None
    problem: str
    ran: launch.Ran  # with what it would have changed


def imagine(plan: Plan, keep: Path) -> Imagined:
    """Runs the plan in another process, and reads the trace that it writes into the folder `keep`.

    If other ranks may use parameters that this one leaves out, the plan runs once more as if they did.
    """
    found = _once(plan, keep)
    lines = [] if found.trace is None else others.left_out(found.trace.data)
    if found.trace is None or not lines:
        return found
    assumed = {**plan.assume, **dict.fromkeys(lines, True)}
    with tempfile.TemporaryDirectory(prefix="pytracer-") as folder:
        more = _once(replace(plan, assume=assumed), Path(folder))
        if more.trace is None:
            return found
        both = others.between(found.trace.data, more.trace.data)
    return changed(found, keep / plan.file(), both)


def changed(imagined: Imagined, path: Path, data: Trace) -> Imagined:
    """The run with another trace, which replaces the file."""
    data.save(path, overwrite=True)
    return replace(imagined, trace=read(path))


def _once(plan: Plan, keep: Path) -> Imagined:
    path = keep / plan.file()
    environment = plan.environment()
    plan = plan.filled()
    with tempfile.TemporaryDirectory(prefix="pytracer-") as folder:
        trace, report = Path(folder, "trace"), Path(folder, "problem")
        parts = {"wish": vars(plan.wish), "changes": vars(plan.changes)}
        order = {**vars(plan), **parts, "path": str(trace), "problem": str(report)}
        ran = launch.run(
            [sys.executable, "-c", _CHILD],
            {**environment, _ORDER: json.dumps(order), "PYTRACER": ""},
            plan.wish,
            [Path(folder)],
            report,
        )
        problem = report.read_text() if report.exists() else ""
        if not problem and not trace.exists():
            last = " / ".join(ran.stderr.strip().splitlines()[-_MOST_LINES:])
            problem = f"the program ended with exit code {ran.returncode}: {last}"
        if not problem:
            shutil.move(trace, path)
    return Imagined(plan.card, None if problem else read(path), problem, ran)


# ---------------------------------------------------------------- in the child


class _Enough(BaseException):
    """Stops the program after the planned steps."""


class _Run:
    """The imagined block of a program. It begins when the program has imported torch."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._block: Any = None
        self._left = plan.steps
        self._trials: list[Any] = []

    def begin(self) -> None:
        from pytracer.imagined.run import imagine as block

        plan = self._plan
        self._block = block(
            plan.card,
            plan.capacity,
            stacks=plan.stacks,
            assume=plan.assume,
            ranks=plan.ranks,
            rank=plan.rank,
            sizes=plan.sizes,
        )
        self._block.__enter__()
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._stepped)
        self._begin_changes()

    def _begin_changes(self) -> None:
        from pytracer.recording.applied import Applied
        from pytracer.recording.trial import Trial

        changes = self._plan.changes
        if changes.checkpoint or changes.offload:
            trial = Trial(changes.checkpoint, changes.offload, stop=_ignore, tell=_ignore)
            self._trials.append(trial)
        own = (
            changes if self._plan.model is None else replace(changes, lora=0)
        )  # it makes the model
        self._trials.append(Applied(own))
        for each in self._trials:
            each.begin()

    def _stepped(self, *_: Any) -> None:
        self._left -= 1
        if self._left <= 0:
            raise _Enough

    def end(self, path: str) -> str:
        """Ends the block and saves its trace. Returns the reason if there is no trace, or else ""."""
        if self._block is None:
            return "the program never imported torch"
        problems = [trial.end() for trial in self._trials]
        self._block.__exit__(None, None, None)
        if problem := next(filter(None, problems), ""):
            return problem
        if not self._block.data.has_allocations:
            return str(errors.NothingOnTheCard())
        self._block.save(path, overwrite=True)
        return ""


def _ignore(_: str) -> None:
    pass


def main() -> int:
    """The main function of the process that `imagine` starts."""
    order = json.loads(os.environ.pop(_ORDER))
    path, report = order.pop("path"), Path(order.pop("problem"))
    wish = launch.Wish(**order.pop("wish"))
    changes = changes_of(order.pop("changes"))
    plan = Plan(**{**order, "program": tuple(order["program"]), "wish": wish, "changes": changes})
    run = _Run(plan)
    if not wish.network and not wish.unprotected:
        network.refuse()
    problem = ""
    try:
        execute = _program(plan)
        after_import("torch", run.begin)
        with suppress(_Enough):
            execute()
    except SystemExit as stop:
        if stop.code not in (None, 0):
            problem = f"the program exited with {stop.code!r}"
    except errors.PytracerError as error:
        problem = str(error)
    except Exception as error:
        problem = _in_one_line(error)
    if not problem:
        problem = run.end(path)
    if problem:
        report.write_text(problem)
    sys.stdout.flush()
    sys.stderr.flush()
    return 0


def _program(plan: Plan) -> Callable[[], None]:
    if plan.model is not None:
        order = plan.model

        def execute() -> None:
            import torch  # noqa: F401  the block begins here

            from pytracer.imagined import huggingface

            lora = {"lora": plan.changes.lora} if plan.changes.lora else {}
            huggingface.train(huggingface.Order(**{**order, **lora}), plan.steps)

        return execute
    values = {name: _whole(name, text) for name, text in plan.values.items()}
    return runner.program(plan.program, as_module=plan.as_module, values=values)


def _whole(name: str, text: str) -> int:
    if not text.isdecimal():
        raise errors.UsageError(f"--set {name}={text}: write a whole number, or {BATCH}")
    return int(text)


def _in_one_line(error: Exception) -> str:
    """The error on one line, with the innermost line of the program."""
    cause: BaseException | None = error
    while cause is not None:  # a framework may have wrapped ours
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
