"""Runs a program that knows nothing of us, as Python itself would, and records it.

Recording begins when the program has imported torch, and not before: what it does to the
environment first (OMP_NUM_THREADS, CUDA_VISIBLE_DEVICES) then means what it means without us.
"""

import contextlib
import importlib.abc
import importlib.machinery
import io
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from pytracer import environment, errors
from pytracer.files import refuse_to_overwrite

if TYPE_CHECKING:
    from pytracer.capture.cycles import Recording

_MOST_EVENTS = 20_000_000  # about 250 MB of file; what comes after is counted


@dataclass(frozen=True)
class Plan:
    """What to run, and what to record of it."""

    program: tuple[str, ...]  # a script or a module's name, and its arguments
    as_module: bool = False
    output: Path | None = None
    force: bool = False
    skip: int = 0  # optimizer steps before recording begins
    steps: int | None = 5  # to keep; None: all
    watch: bool = True
    devices: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)  # of `trace`
    by_environment: bool = False  # the program was not started by `pytracer run`
    checkpoint: tuple[str, ...] = ()  # modules, to try a plan
    offload: tuple[str, ...] = ()  # likewise

    @property
    def name(self) -> str:
        """What the program is called."""
        last = self.program[0].rpartition(".")[2] if self.as_module else Path(self.program[0]).stem
        return last or "run"

    def file(self) -> Path:
        """The trace's file, one per rank."""
        path = self.output or Path(f"{self.name}.pytrace")
        if path.name in ("", ".."):
            raise errors.UsageError(f"-o {path} is a folder: name a file, as in -o run.pytrace")
        parts = [path.stem]
        if environment.world_size() > 1:
            parts.append(f"rank{environment.rank()}")
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if restart != "0":
            parts.append(f"restart{restart}")
        path = path.with_name(".".join(parts) + (path.suffix or ".pytrace"))
        return path if self.output or self.force else _not_there(path)


def _not_there(path: Path) -> Path:
    """train.pytrace, or train.1.pytrace, ...: a second run of a training must not end it."""
    stem, number = path.stem, 0
    while path.exists():
        number += 1
        path = path.with_name(f"{stem}.{number}{path.suffix}")
    return path


# ---------------------------------------------------------------------- the program


def prepare(plan: Plan, tell: "Teller") -> Callable[[], int]:
    """Makes ready to run; what the program raises leaves the returned function as it is.

    Raises:
        errors.PytracerError: it cannot be run or recorded; then nothing of it has run.
    """
    if not environment.working_directory():
        raise errors.UsageError("the working directory is gone: change to one that exists")
    path = plan.file()
    if not plan.as_module and _is_same_file(path, plan.program[0]):
        raise errors.UsageError(f"-o {path} is the script itself")
    refuse_to_overwrite(path, overwrite=plan.force)
    _refuse_launchers(plan)
    _refuse_missing_cuda(plan)
    execute = program(plan.program, as_module=plan.as_module)
    traced = Traced(plan, path, tell)

    def run() -> int:
        after_import("torch", traced.begin)
        try:
            execute()
        except SystemExit as stop:
            traced.end(None, gave_up=stop.code not in (None, 0))
            raise
        except BaseException as error:
            traced.end(error)
            _leave_traceback_to_the_program(error, traced.say_why)
            raise
        traced.end(None)
        return 0

    return run


def program(words: Sequence[str], *, as_module: bool) -> Callable[[], None]:
    """Runs a script or a module with its arguments, once, as `__main__`.

    Raises:
        errors.UsageError: it cannot be read.
    """
    return _prepare_module(words) if as_module else _prepare_script(words)


def _is_same_file(path: Path, script: str) -> bool:
    """Also False where one of them is not there."""
    with contextlib.suppress(OSError):
        return path.samefile(script)
    return False


# Programs that train nothing themselves: they start processes that do.
LAUNCHERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate": "accelerate launch",
    "accelerate.commands.launch": "accelerate launch",
    "accelerate.commands.accelerate_cli": "accelerate launch",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
}


def _refuse_launchers(plan: Plan) -> None:
    program = plan.program[0] if plan.as_module else Path(plan.program[0]).name
    if program not in LAUNCHERS:
        return
    launcher = LAUNCHERS[program]
    module = "--module pytracer" if launcher == "deepspeed" else "-m pytracer"
    raise errors.UsageError(
        f"{launcher} runs the training in processes of its own, which would not be recorded. "
        f"Put it in front:  {launcher} [its options] {module} run train.py"
    )


def _refuse_missing_cuda(plan: Plan) -> None:
    """Asked of another process: in this one torch is the program's to import."""
    if plan.devices != ("cuda",):
        return
    ask = "import sys, torch; sys.exit(3 if torch.cuda.device_count() == 0 else 0)"
    if subprocess.run([sys.executable, "-c", ask], capture_output=True).returncode == 3:
        raise errors.UsageError("--device cuda: there is no CUDA device here")


def _prepare_script(words: Sequence[str]) -> Callable[[], None]:
    script = words[0]
    if Path(script).is_dir():
        raise errors.UsageError(f"{Path(script).resolve()} is a folder: name its script, or use -m")
    try:
        with io.open_code(os.path.abspath(script)) as file:  # noqa: PTH100 - resolves no links
            source = file.read()
    except OSError as problem:
        raise errors.UsageError(f"cannot read {script}: {problem.strerror}") from None
    path = os.path.abspath(script)  # noqa: PTH100 - as Python names it
    _first_on_path(os.path.dirname(os.path.realpath(script)))  # noqa: PTH120
    sys.argv = list(words)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    names = {"__file__": path, "__cached__": None, "__spec__": None, "__loader__": loader}

    def execute() -> None:
        _execute(compile(source, path, "exec", dont_inherit=True), {**names, "__package__": None})

    return execute


def _prepare_module(words: Sequence[str]) -> Callable[[], None]:
    _first_on_path(str(Path.cwd()))
    sys.argv = ["-m", *words[1:]]

    def execute() -> None:
        details: Any = runpy._get_module_details  # type: ignore[attr-defined]
        try:
            _, spec, code = details(words[0])
        except ImportError as problem:
            raise SystemExit(f"pytracer: {problem}") from None
        sys.argv[0] = spec.origin
        names = {"__file__": spec.origin, "__cached__": spec.cached, "__spec__": spec}
        _execute(code, {**names, "__loader__": spec.loader, "__package__": spec.parent})

    return execute


def _first_on_path(folder: str) -> None:
    """In the place of the folder that Python put there for us, if it did."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _execute(code: CodeType, names: dict[str, Any]) -> None:
    """As `__main__`, and to stay: what it pickles or leaves to its threads is looked up there."""
    main = ModuleType("__main__")
    main.__dict__.update(names, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _leave_traceback_to_the_program(error: BaseException, afterwards: Callable[[], None]) -> None:
    """Python prints what we let pass; without our frames, and followed by what we have to say."""
    print_it = sys.excepthook

    def hook(
        kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        if value is error:
            traceback = _without_ours(traceback)
            value.__traceback__ = traceback
        print_it(kind, value, traceback)
        afterwards()

    sys.excepthook = hook


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """From the program's first frame on; None if it never got that far: a syntax error."""
    while traceback is not None and traceback.tb_frame.f_code is not _execute.__code__:
        traceback = traceback.tb_next
    return traceback and traceback.tb_next


# ---------------------------------------------------------------------- the import of torch


def after_import(name: str, then: Callable[[], None]) -> Callable[[], None]:
    """Calls it as soon as that module has been imported, which may be never, or already.

    What it returns forgets it.
    """
    if name in sys.modules:
        then()
        return lambda: None
    watcher = _Watcher(name, then)
    sys.meta_path.insert(0, watcher)
    return watcher.forget


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds nothing itself; learns that one module's execution is over."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As the other finders say."""
        if fullname != self._name:
            return None
        found = (
            finder.find_spec(fullname, path, target)
            for finder in tuple(sys.meta_path)
            if finder is not self and hasattr(finder, "find_spec")
        )
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._await(spec.loader)
        return spec

    def forget(self) -> None:
        """Waits no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _await(self, loader: importlib.abc.Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            self.forget()
            self._then()

        loader.exec_module = exec_module  # type: ignore[method-assign]


# ---------------------------------------------------------------------- the recording


class Teller(Protocol):
    """What a person is told; the command line's is the one that prints."""

    def line(self, text: str) -> None:
        """One line, on every rank."""

    def recorded(self, traced: Any, path: Path, file: Path, which: str) -> None:
        """The steps to keep are on disk; which they are, if the program goes on.

        `path` is the file as the person named it, `file` wherever the program has gone.
        """

    def finish(self) -> None:
        """The program is over: what was begun beside it is to be said before anything else."""

    def page(self, text: str) -> None:
        """An explanation."""


class Traced:
    """The program's recording, from when it has torch."""

    def __init__(self, plan: Plan, path: Path, tell: Teller) -> None:
        """Nothing is recorded until `begin`."""
        self._plan, self._path, self._tell = plan, path, tell
        self._file = _File(path.absolute())  # wherever the program goes
        self._recording: Recording | None = None
        self._counter: Any = None  # of the program's steps
        self._peak: Any = None  # of the steps to keep
        self._later = ""
        self._why = ""
        self._owner = os.getpid()

    def begin(self) -> None:
        """The program has imported torch."""
        from pytracer.capture.cycles import Recording
        from pytracer.capture.session import Held

        self._owner = os.getpid()
        if self._plan.checkpoint or self._plan.offload:
            _change_when_called(self._plan)
        recording = self._recording = Recording(
            self._trace,
            skip=self._plan.skip,
            steps=self._plan.steps,
            watch=self._plan.watch,
            keep={"path": self._file.path, "max_events": _MOST_EVENTS},
            ready=self._ready,
            problem=lambda text: self._tell.line(f"not recorded: {text}"),
            watched=self._watched,
        )
        recording.begin()

        def stepped() -> None:
            if not self._forked():
                recording.stepped()

        self._counter = Held()
        self._counter.count_steps(stepped)

    def end(self, error: BaseException | None, *, gave_up: bool = False) -> None:
        """The program is over, has failed, or gave up with an exit code of its own."""
        if self._forked():
            return
        well = error is None and not gave_up  # else it says itself why it came no further
        if self._recording is None:
            if well:
                self._tell.line("the program never imported torch: nothing is recorded")
            return
        self._counter.end()
        self._recording.end(error)
        self._tell.finish()
        recorded = _has_tensors(self._recording.first)
        self._file.settle(recorded=recorded)
        if recorded and error is not None:
            self._why = self._explanation(self._recording, error)
        elif self._later:
            self._tell.line(self._later)
        elif not recorded and well:
            self._say_why_not(self._recording)

    def say_why(self) -> None:
        """Below the traceback: what memory has to do with it."""
        if self._why:
            self._tell.page(self._why)

    def _forked(self) -> bool:
        """In a child of the program: the recording, its steps and its file are the parent's."""
        return self._owner != os.getpid()

    def _say_why_not(self, recording: "Recording") -> None:
        steps, skip = recording.steps_seen, self._plan.skip
        if steps < skip:
            self._tell.line(f"the program made {steps} steps of the {skip} to skip: no recording")
        elif recording.first is not None:  # else it was told as it began
            where = f" on {self._plan.devices[0]}" if self._plan.devices else ""
            self._tell.line(f"the program made no tensors{where}: nothing is recorded")

    def _ready(self, traced: Any) -> None:
        """The steps to keep are over, or the program is."""
        if not _has_tensors(traced):
            return
        self._file.settle(recorded=True)
        if environment.rank() == 0 and self._plan.watch:
            from pytracer.analysis.facts import usage

            self._peak = usage.highest_of_all(traced.data)
        self._tell.recorded(traced, self._path, self._file.path, self._which())

    def _which(self) -> str:
        """The steps to keep, if all have come: others may follow."""
        skip, steps = self._plan.skip, self._plan.steps
        if self._recording is None or steps is None or self._recording.steps_seen - skip < steps:
            return ""
        if steps == 1:
            return f"step {skip}" if skip else "the first step"
        return f"steps {skip} to {skip + steps - 1}" if skip else f"the first {steps} steps"

    def _watched(self, traced: Any, first_step: int) -> None:
        """Remembers the step that went highest, if that is higher than what was kept."""
        if self._peak is None:
            return
        from pytracer.analysis.facts import usage
        from pytracer.units import size_text

        found = usage.highest(traced.data, self._peak.device)
        if found.bytes <= self._peak.bytes:
            return
        self._peak, step = found, first_step + found.step
        # The CPU's blocks from before the window are not known to it.
        least = "at least " if found.device == "cpu" else ""
        skip = self._plan.skip
        if self._plan.by_environment:
            option = f"skip={skip},steps={step + 1 - skip}" if skip else f"steps={step + 1}"
        else:
            option = f"--schedule {skip},0,{step + 1 - skip}" if skip else f"--steps {step + 1}"
        self._later = (
            f"later, step {step} went to {least}{size_text(found.bytes)}; {option} keeps it"
        )

    def _trace(self, **more: Any) -> Any:
        import torch

        from pytracer.api import trace

        if "path" in more:
            self._file.make_room()
        # CUDA is not asked whether it is there: that would fix which devices it may use.
        devices = self._plan.devices or (("cpu", "cuda") if torch.version.cuda else ("cpu",))
        return trace(devices=devices, **self._plan.options, **more)

    def _explanation(self, recording: "Recording", error: BaseException) -> str:
        from pytracer.api import free_name, is_out_of_memory

        path, which = self._path, self._which()
        verb = "is" if self._plan.steps == 1 else "are"
        kept = f"{which.capitalize()} {verb} in {path}" if which else "Recorded until then"
        look = f"pytracer summary {shlex.quote(str(path))}"
        if not is_out_of_memory(error):
            later = f"\n{self._later}" if self._later else ""
            return f"{kept}; look at it:  {look}{later}"
        page = recording.last.post_mortem()
        if not page:
            return f"{self._not_traced(which)}\n{kept}; look at it:  {look}"
        if recording.watched:
            path = recording.last.save(free_name(f"{self._plan.name}-oom"))
            look = f"pytracer summary {shlex.quote(str(path))}"
        return f"{page}\nsaved     {path}; look again with:\n          {look}"

    def _not_traced(self, which: str) -> str:
        if which and not self._plan.watch:
            watch = "with watch=1" if self._plan.by_environment else "without --no-watch"
            return f"What failed came after {which} and was not traced: {watch} it is"
        return "What failed is not in the trace: it was on a device or a thread that is not traced"


def _change_when_called(plan: Plan) -> None:
    """The modules of the first model called that has them all, as the code of a plan does it."""
    from functools import partial

    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.utils.checkpoint import checkpoint

    from pytracer.offload import offload

    def called(model: Any, _: Any) -> None:
        known = dict(model.named_modules())
        if not known.keys() >= {*plan.checkpoint, *plan.offload}:
            return
        hook.remove()
        for name in plan.checkpoint:
            known[name].forward = partial(checkpoint, known[name].forward, use_reentrant=False)
        for name in plan.offload:
            offload(known[name])

    hook = register_module_forward_pre_hook(called)


def _has_tensors(traced: Any) -> bool:
    try:
        return traced is not None and traced.data.has_allocations
    except errors.PytracerError:  # it could not be kept, which was told
        return False


class _File:
    """Where the trace goes. What is there already comes back if nothing is recorded."""

    def __init__(self, path: Path) -> None:
        """Nothing is touched until `make_room`."""
        self.path = path
        self._before: Path | None = None
        self._is_ours = False  # what is there now

    def make_room(self) -> None:
        """Something is about to be written."""
        self._is_ours = True
        if self.path.exists():
            self._before = self.path.with_name(f"{self.path.name}.before")
            self.path.replace(self._before)

    def settle(self, *, recorded: bool) -> None:
        """It has been written; or there was nothing to write."""
        before, self._before = self._before, None
        if self._is_ours and not recorded:
            self.path.unlink(missing_ok=True)
        if before is not None and recorded:
            before.unlink(missing_ok=True)
        elif before is not None:
            before.replace(self.path)
