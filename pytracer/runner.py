"""Runs an unchanged program as Python itself would, and records it.

Recording begins when the program has imported torch, and not before. So variables that the program
sets first (OMP_NUM_THREADS, CUDA_VISIBLE_DEVICES) have the same effect as without pytracer.
"""

import ast
import contextlib
import importlib.abc
import importlib.machinery
import io
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from pytracer import environment, errors
from pytracer.files import refuse_to_overwrite

if TYPE_CHECKING:
    from pytracer.capture.cycles import Recording

_MOST_EVENTS = 20_000_000  # about 250 MB of file; later events are only counted
_BYTES_PER_EVENT = 13  # in a file, with its scopes; small programs need less


@dataclass(frozen=True)
class Plan:
    """Which program to run, and what to record of it."""

    program: tuple[str, ...]  # a script's or a module's name, then its arguments
    as_module: bool = False
    output: Path | None = None
    force: bool = False
    skip: int = 0  # optimizer steps before recording begins
    steps: int | None = 5  # to keep; None for all
    watch: bool = True  # also the steps after those to keep
    devices: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)  # of `trace`
    by_environment: bool = False  # the program was not started by `pytracer run`
    is_child: bool = False  # a process that the program started: kept if it makes a step
    checkpoint: tuple[str, ...] = ()  # modules to checkpoint, to try a plan
    offload: tuple[str, ...] = ()  # modules to offload, to try a plan
    ranks: tuple[int, ...] = ()  # to record; () for all
    max_size: int | None = None  # bytes of the file, about

    @property
    def max_events(self) -> int:
        """The most events in the file; later ones are only counted."""
        if self.max_size is None:
            return _MOST_EVENTS
        return max(self.max_size // _BYTES_PER_EVENT, 1)

    @property
    def records_this_rank(self) -> bool:
        """Whether this process is to be recorded, as far as its rank is known."""
        return not self.ranks or environment.rank() in self.ranks

    @property
    def name(self) -> str:
        """The program's name, for its files."""
        last = self.program[0].rpartition(".")[2] if self.as_module else Path(self.program[0]).stem
        return last or "run"

    @property
    def stem(self) -> str:
        """The name of its files, without rank and suffix."""
        return self.output.stem if self.output else self.name

    @property
    def suffix(self) -> str:
        """The end of its files' names."""
        return (self.output.suffix if self.output else "") or ".pytrace"

    def last_file(self) -> Path | None:
        """The file of the steps watched last, for a rank of a job: it survives if the rank is killed."""
        if environment.world_size() == 1:
            return None
        name = f"{self.stem}-last.rank{environment.rank()}{self.suffix}"
        return self.output.with_name(name) if self.output else Path(name)

    def file(self) -> Path:
        """Returns the path of the trace's file, one per rank."""
        path = self.output or Path(self.name)
        if path.name in ("", ".."):
            raise errors.UsageError(f"-o {path} is a folder: name a file, as in -o run.pytrace")
        path = path.with_name(self.file_name())
        return path if self.output or self.force else _unused(path)

    def file_name(self) -> str:
        """The name of this process's file, with the rank as far as it is known."""
        parts = [self.stem]
        if environment.world_size() > 1:
            parts.append(f"rank{environment.rank()}")
        elif self.is_child:
            parts.append(f"process{os.getpid()}")
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if restart != "0":
            parts.append(f"restart{restart}")
        return ".".join(parts) + self.suffix


def _unused(path: Path) -> Path:
    """Returns train.pytrace, train.1.pytrace, ...: a second run must not end with an error."""
    stem, number = path.stem, 0
    while path.exists():
        number += 1
        path = path.with_name(f"{stem}.{number}{path.suffix}")
    return path


# ---------------------------------------------------------------------- the program


def prepare(plan: Plan, tell: "Teller") -> Callable[[], int]:
    """Returns a function that runs and records the program, and passes its exceptions on.

    Raises:
        errors.PytracerError: the program cannot be run or recorded. None of it has run.
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


def program(
    words: Sequence[str], *, as_module: bool, values: Mapping[str, int] | None = None
) -> Callable[[], None]:
    """Returns a function that runs a script or a module with its arguments, once, as `__main__`.

    Args:
        words: the script or the module, and its arguments.
        as_module: whether it is a module.
        values: numbers for variables of the script, in place of those that it assigns to them.

    Raises:
        errors.UsageError: the script cannot be read, or assigns to no such variable.
    """
    if as_module and values:
        raise errors.UsageError("--set is for a script, and this is a module (-m)")
    return _prepare_module(words) if as_module else _prepare_script(words, values or {})


def _is_same_file(path: Path, script: str) -> bool:
    """Whether both are one file. False if one of them does not exist."""
    with contextlib.suppress(OSError):
        return path.samefile(script)
    return False


# Programs that do not train but start processes that do.
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
    """Asks another process for a CUDA device: in this one, only the program imports torch."""
    if plan.devices != ("cuda",):
        return
    ask = "import sys, torch; sys.exit(3 if torch.cuda.device_count() == 0 else 0)"
    if subprocess.run([sys.executable, "-c", ask], capture_output=True).returncode == 3:
        raise errors.UsageError("--device cuda: there is no CUDA device here")


def _prepare_script(words: Sequence[str], values: Mapping[str, int]) -> Callable[[], None]:
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

    code = _with_values(source, script, values) if values else source

    def execute() -> None:
        _execute(compile(code, path, "exec", dont_inherit=True), {**names, "__package__": None})

    return execute


def _with_values(source: bytes, script: str, values: Mapping[str, int]) -> ast.Module:
    """The script, which assigns these numbers to its variables."""
    try:
        tree = ast.parse(source)
    except SyntaxError as problem:
        raise errors.UsageError(f"{script}:{problem.lineno}: {problem.msg}") from None
    left = set(values)
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in targets:
            if isinstance(target, ast.Name) and target.id in values:
                node.value = ast.copy_location(ast.Constant(values[target.id]), node.value)
                left.discard(target.id)
    if left:
        raise errors.UsageError(f"--set {min(left)}: {script} assigns to no variable of this name")
    return tree


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
    """Puts the folder first on sys.path, in place of the one that Python put there."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _execute(code: CodeType, names: dict[str, Any]) -> None:
    """Runs the code as `__main__`, which stays: its pickles and threads look names up there."""
    main = ModuleType("__main__")
    main.__dict__.update(names, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _leave_traceback_to_the_program(error: BaseException, afterwards: Callable[[], None]) -> None:
    """Has Python print the exception without our frames, and then calls `afterwards`."""
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
    """Returns the traceback from the program's first frame on; None after a syntax error."""
    while traceback is not None and traceback.tb_frame.f_code is not _execute.__code__:
        traceback = traceback.tb_next
    return traceback and traceback.tb_next


# ---------------------------------------------------------------------- the import of torch


def after_import(name: str, then: Callable[[], None]) -> Callable[[], None]:
    """Calls `then` as soon as the module is imported: at once if it is already, perhaps never.

    Returns a function that cancels the call.
    """
    if name in sys.modules:
        then()
        return lambda: None
    watcher = _Watcher(name, then)
    sys.meta_path.insert(0, watcher)
    return watcher.forget


class _Watcher(importlib.abc.MetaPathFinder):
    """Notices when one module has been executed. It finds modules by the other finders."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then
        self._asks = False  # another watcher that this one asks would ask it in turn

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the module's spec from the other finders."""
        if fullname != self._name or self._asks:
            return None
        specs = (
            finder.find_spec(fullname, path, target)
            for finder in tuple(sys.meta_path)
            if finder is not self and hasattr(finder, "find_spec")
        )
        self._asks = True
        try:
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self._asks = False
        if spec is not None and spec.loader is not None:
            self._await(spec.loader)
        return spec

    def forget(self) -> None:
        """Stops waiting for the module."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _await(self, loader: importlib.abc.Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            self.forget()
            self._then()

        loader.exec_module = exec_module  # type: ignore[method-assign]


# ---------------------------------------------------------------------- the recording


class Teller(Protocol):
    """Takes messages for the user. The command line's class prints them."""

    rank: int  # of this process

    def line(self, text: str) -> None:
        """Takes one line, on every rank."""

    def recorded(self, traced: Any, path: Path, file: Path, which: str) -> None:
        """Takes the trace of the steps to keep, which is on disk.

        `path` is the file as the user named it. `file` is its absolute path. `which` names the
        steps, or is "" if the program ended before all of them.
        """

    def finish(self) -> None:
        """Completes messages in progress: the program is over, and others follow."""

    def page(self, text: str) -> None:
        """Takes an explanation of several lines."""


class Traced:
    """The program's recording, from its import of torch on."""

    def __init__(self, plan: Plan, path: Path, tell: Teller) -> None:
        """Records nothing until `begin`."""
        self._plan, self._path, self._tell = plan, path, tell
        self._file = _File(path.absolute())  # the program may change its working directory
        self._plan_name = self._file_name = plan.file_name()
        self._last_file: Path | None = None
        self._recording: Recording | None = None
        self._counter: Any = None  # of the program's steps
        self._peak: Any = None  # of the steps to keep
        self._later = ""
        self._why = ""
        self._owner = os.getpid()

    def begin(self) -> None:
        """Begins to record: the program has imported torch."""
        from pytracer.capture.cycles import Recording
        from pytracer.capture.session import Held

        self._owner = os.getpid()
        if self._plan.checkpoint or self._plan.offload:
            _change_when_called(self._plan)
        if environment.world_size() > 1 and not self._plan.records_this_rank:
            return
        recording = self._recording = Recording(
            self._trace,
            skip=self._plan.skip,
            steps=self._plan.steps,
            watch=self._plan.watch,
            keep={"path": self._file.path, "max_events": self._plan.max_events},
            watch_file=self._place_for_last_steps,
            ready=self._ready,
            problem=lambda text: self._tell.line(f"not recorded: {text}"),
            watched=self._watched,
        )
        recording.begin()

        def stepped() -> None:
            if not self._forked():
                if recording.steps_seen == 0:
                    self._learn_rank()
                recording.stepped()

        self._counter = Held()
        self._counter.count_steps(stepped)

    def end(self, error: BaseException | None, *, gave_up: bool = False) -> None:
        """Ends the recording: the program is over, has failed, or exited with a code."""
        if self._forked():
            return
        well = error is None and not gave_up  # otherwise the program gives its own reason
        if self._recording is None:
            if well and self._plan.records_this_rank:
                self._tell.line("the program never imported torch: nothing is recorded")
            return
        self._learn_rank()
        self._counter.end()
        self._recording.end(error)
        self._tell.finish()
        recorded = self._is_wanted and _has_tensors(self._recording.first)
        self._settle(recorded=recorded)
        if not self._is_wanted:
            return
        if recorded and error is not None:
            self._why = self._explanation(self._recording, error)
        elif self._later:
            self._tell.line(self._later)
        elif not recorded and well:
            self._say_why_not(self._recording)

    def say_why(self) -> None:
        """Explains below the traceback how memory was involved."""
        if self._why:
            self._tell.page(self._why)

    def _forked(self) -> bool:
        """Whether this is a forked child: the recording and its file belong to the parent."""
        return self._owner != os.getpid()

    def _learn_rank(self) -> None:
        """Asks for the rank while the program knows it: it may start its ranks itself."""
        if environment.world_size() > 1:
            self._file_name, self._tell.rank = self._plan.file_name(), environment.rank()

    @property
    def _is_wanted(self) -> bool:
        """Whether the recording is kept. A process that the program started must have trained."""
        ranks, steps = self._plan.ranks, self._recording.steps_seen if self._recording else 0
        return (not ranks or self._tell.rank in ranks) and (not self._plan.is_child or steps > 0)

    def _settle(self, *, recorded: bool) -> None:
        """Finishes the file. Its name gets the rank that the program has learned meanwhile."""
        self._file.settle(recorded=recorded)
        if recorded and self._file_name != self._plan_name:
            place = self._file.path.with_name(self._file_name)
            self._file.rename(place if self._plan.force else _unused(place))
            self._path = self._path.with_name(self._file.path.name)
            self._plan_name = self._file_name

    def _place_for_last_steps(self) -> Path | None:
        """The absolute path of the plan's last file."""
        last = self._plan.last_file()
        self._last_file = None if last is None else self._file.path.with_name(last.name)
        return self._last_file

    def _say_why_not(self, recording: "Recording") -> None:
        steps, skip = recording.steps_seen, self._plan.skip
        if steps < skip:
            self._tell.line(f"the program made {steps} steps of the {skip} to skip: no recording")
        elif recording.first is not None:  # otherwise the reason was shown at the begin
            where = f" on {self._plan.devices[0]}" if self._plan.devices else ""
            self._tell.line(f"this process made no tensors{where}: nothing of it is recorded")

    def _ready(self, traced: Any) -> None:
        """Finishes the file: the steps to keep are over, or the program is."""
        if not self._is_wanted or not _has_tensors(traced):
            return
        self._settle(recorded=True)
        if self._tell.rank == 0 and self._plan.watch:
            from pytracer.analysis.facts import usage

            self._peak = usage.highest_of_all(traced.data)
        self._tell.recorded(traced, self._path, self._file.path, self._which())

    def _which(self) -> str:
        """Names the steps to keep if all of them are over; "" otherwise."""
        skip, steps = self._plan.skip, self._plan.steps
        if self._recording is None or steps is None or self._recording.steps_seen - skip < steps:
            return ""
        if steps == 1:
            return f"step {skip}" if skip else "the first step"
        return f"steps {skip} to {skip + steps - 1}" if skip else f"the first {steps} steps"

    def _watched(self, traced: Any, first_step: int) -> None:
        """Remembers the highest step so far, if it is higher than the kept ones."""
        if self._peak is None:
            return
        from pytracer.analysis.facts import usage
        from pytracer.units import size_text

        highest = usage.highest(traced.data, self._peak.device)
        if highest.bytes <= self._peak.bytes:
            return
        self._peak, step = highest, first_step + highest.step
        # A window does not know the CPU's blocks from before it.
        least = "at least " if highest.device == "cpu" else ""
        skip = self._plan.skip
        if self._plan.by_environment:
            option = f"skip={skip},steps={step + 1 - skip}" if skip else f"steps={step + 1}"
        else:
            option = f"--schedule {skip},0,{step + 1 - skip}" if skip else f"--steps {step + 1}"
        self._later = (
            f"later, step {step} went to {least}{size_text(highest.bytes)}; {option} keeps it"
        )

    def _trace(self, **more: Any) -> Any:
        import torch

        from pytracer.api import trace

        if more.get("path") == self._file.path:
            self._file.make_room()
        # Does not ask CUDA for devices: after that, the program could not choose them any more.
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
            if recording.watched and self._last_file is not None:
                last = path.with_name(self._last_file.name)
                later += f"\nThe steps before the failure are in {last}"
            return f"{kept}; look at it:  {look}{later}"
        page = recording.last.post_mortem()
        if not page:
            return f"{self._not_traced(which)}\n{kept}; look at it:  {look}"
        if recording.watched:
            path = recording.last.save(free_name(path.with_name(f"{self._plan.stem}-oom")))
            recording.drop_watched()
            look = f"pytracer summary {shlex.quote(str(path))}"
        return f"{page}\nsaved     {path}; look again with:\n          {look}"

    def _not_traced(self, which: str) -> str:
        if which and not self._plan.watch:
            watch = "with watch=1" if self._plan.by_environment else "without --no-watch"
            return f"The failure came after {which} and was not traced: run {watch}"
        return "The failure is not in the trace: its device or thread is not traced"


def _change_when_called(plan: Plan) -> None:
    """Checkpoints and offloads modules of called models, as the code of a plan does.

    Paths without a class belong to the first called model that has all of them.
    """
    from functools import partial

    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.utils.checkpoint import checkpoint

    from pytracer.model_names import in_code
    from pytracer.offload import offload

    left = {*plan.checkpoint, *plan.offload}

    def called(model: Any, _: Any) -> None:
        modules, own = dict(model.named_modules()), f"{type(model).__name__}."
        inside = {path: in_code(path.removeprefix(own)) for path in left}
        has = {path for path in left if inside[path] in modules}
        plain = {path for path in left if inside[path] == in_code(path)}
        has -= plain if plain - has else set()
        left.difference_update(has)
        for path in has & {*plan.checkpoint}:
            module = modules[inside[path]]
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        for path in has & {*plan.offload}:
            offload(modules[inside[path]])
        if not left:
            hook.remove()

    hook = register_module_forward_pre_hook(called)


def _has_tensors(traced: Any) -> bool:
    try:
        return traced is not None and traced.data.has_allocations
    except errors.PytracerError:  # it could not be kept; the user has read why
        return False


class _File:
    """The trace's file. An older file in its place comes back if nothing is recorded."""

    def __init__(self, path: Path) -> None:
        """Touches nothing until `make_room`."""
        self.path = path
        self._before: Path | None = None
        self._is_ours = False  # whether this run wrote the file that exists now

    def make_room(self) -> None:
        """Moves an older file away, before the trace is written."""
        self._is_ours = True
        if self.path.exists():
            self._before = self.path.with_name(f"{self.path.name}.before")
            self.path.replace(self._before)

    def rename(self, path: Path) -> None:
        """Gives the trace another path."""
        self.path.replace(path)
        self.path = path

    def settle(self, *, recorded: bool) -> None:
        """Removes the older file if the trace was recorded; else puts it back."""
        before, self._before = self._before, None
        if self._is_ours and not recorded:
            self.path.unlink(missing_ok=True)
        if before is not None and recorded:
            before.unlink(missing_ok=True)
        elif before is not None:
            before.replace(self.path)
