"""The public face of recording: `trace()`. Its views are in `pytracer/reading/views.py`."""

import contextlib
import dis
import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import FrameType, FunctionType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from pytracer import errors
from pytracer.basics import environment, private_torch
from pytracer.capture.cycles import Cycles, Schedule, always, of_schedule
from pytracer.capture.looking import is_a
from pytracer.capture.session import (
    Held,
    Inner,
    Options,
    Session,
    Targets,
    default_devices,
    ends_always,
    ends_if_it_raises,
    imagined,
)
from pytracer.data import meta
from pytracer.data.recorded import Trace
from pytracer.reading.views import Views

if TYPE_CHECKING:
    from typing_extensions import Self

    from pytracer.cost.measure import Measurement

_LONGEST_TEXT = 200  # of an exception's

P = ParamSpec("P")
R = TypeVar("R")


def _with_known_options(init: Callable[P, None]) -> Callable[P, None]:
    """Explains an unknown option in a sentence, and keeps the signature."""
    parameters = inspect.signature(init).parameters.values()
    options = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name not in options:
                similar = errors.did_you_mean(name, options)
                raise errors.UsageError(f"trace() has no option {name!r}{similar or _all(options)}")
        init(*args, **kwargs)

    return checked


def _all(options: Sequence[str]) -> str:
    return f"; it has {', '.join(options)}"


class trace(Views):  # noqa: N801 - reads as a verb: `with trace():`
    """Records the memory of a block: which bytes are live, what they are for, and who made them.

    As a decorator, `@trace()` records each call of the function, and `function.last` is the trace
    of its last call.

    Example:
        with trace(model, optimizer) as t:
            train_step(batch)

        print(t)

    Args:
        *targets: models and optimizers. Without them, pytracer finds them as they are used.
        detail: "op" attributes every allocation to an operator. "category" attributes it only to
            a module and a phase, at a third of the cost.
        stacks: also record the Python line of every allocation.
        saved_tensors: "auto" infers which tensors autograd keeps. "hooks" sees each save as it
            happens.
        cost: also measure each operator, forward and backward, for `cost()`. torch.profiler does
            this, so no other profiler may run meanwhile, and steps take longer.
        schedule: the result of `torch.profiler.schedule(...)`, to record only some steps. A step
            ends at `t.step()`. If the program never calls it, a step ends with the optimizer's
            step; if optimizers take turns, with the last one's. `steps()` counts from 0 at the
            first recorded step. If the schedule repeats, the last complete cycle is kept. With
            `path=`, each cycle has a file.
        devices: "cpu", "cuda" or both. By default the devices of the models, else CUDA if there is
            a GPU.
        path: write the trace to this file while recording. The file is readable whatever happens.
            Later recordings of the same trace (another call, block or cycle) go to run.1.pytrace,
            run.2.pytrace, ...
        max_events: the number of events to keep in memory. Further events are only counted.
        anonymous: leave host, process numbers, command, folders and paths out of the trace and of
            its file.
        table: whether to print the table to stderr at the end. By default only a `with trace():`
            without a name prints it. If a failed allocation ends the block, a page explains it,
            and the trace is saved. `table=False` turns off both.

    Raises:
        errors.UsageError: an option or a target is not valid.
        errors.CaptureError: the recording cannot start; raised as the block is entered.
        errors.CannotWrite: the file of `path` exists or cannot be written.
    """

    @_with_known_options
    def __init__(
        self,
        *targets: Any,
        detail: Literal["op", "category"] = "op",
        stacks: bool = False,
        saved_tensors: Literal["auto", "hooks"] = "auto",
        cost: bool = False,
        schedule: Schedule | None = None,
        devices: str | Sequence[str] | None = None,
        path: str | Path | None = None,
        max_events: int | None = None,
        table: bool | None = None,
        anonymous: bool = False,
    ) -> None:
        """Checks the arguments. The recording starts when the block is entered."""
        _check_targets(targets)
        _check_schedule(schedule)
        _check_switches(stacks=stacks, anonymous=anonymous)
        chosen = (devices,) if isinstance(devices, str) else tuple(devices or ())
        self._targets = Targets(targets)
        self._held = Held()  # ends sessions and counters even if Python is interrupted
        self._options = Options(
            detail=detail,
            stacks=stacks,
            saved_tensors=saved_tensors,
            devices=chosen,
            # Absolute, because the program may change its working directory.
            path=None if path is None else str(Path(environment.working_directory(), path)),
            max_events=max_events,
            anonymous=anonymous,
        )
        self._cost = cost
        self._measurement: Measurement | None = None
        self._schedule = schedule
        self._table = table
        self._prints_table = bool(table)
        self._session: Session | Inner | None = None
        self._data: Trace | None = None
        self._entered = False
        self._has_run = False
        self._files: list[str] = []  # of all blocks and calls: the copies for calls share it
        self._user_steps = False
        self._is_whole = False  # whether the kept cycle of the schedule reached its end
        self._cycles = self._new_cycles()
        self.first_step = 0  # steps that the program had made when the block was entered
        # Whether somebody reads it if it ends well. Else it neither waits for the GPU, so that the
        # last phases have times, nor looks for variables.
        self.is_read = True

    # ---------------------------------------------------------------- the block

    @ends_if_it_raises
    def __enter__(self) -> "Self":
        """Starts recording."""
        if self._entered:
            raise errors.CaptureError(
                "this trace is recording already; make another with trace() to nest them"
            )
        self._warn_without_cuda()
        self._entered = True
        self._data = None
        self._cycles = self._new_cycles()
        self._has_run = True
        self._user_steps = self._is_whole = False
        if self._table is None:
            self._prints_table = _has_no_name(sys._getframe(1))
        try:
            if self._schedule is not None:
                self._held.count_steps(self._optimizer_stepped)
            self._cycles.begin()
            return self
        except BaseException:
            self._entered = False
            raise

    @ends_always
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops recording. An exception of the block goes on unchanged."""
        self._entered = False
        failed = error is not None and is_out_of_memory(error)
        if error is not None and self._session is not None:
            self._session.failed = failed
            self._session.notes["ended_by"] = _in_words(error)
        try:
            self._cycles.end(error)
        except errors.CannotWrite as problem:
            if error is None:
                raise
            errors.warn(str(problem))
        if failed and self._table is not False and self._data is not None:
            self._explain_out_of_memory()
        elif self._prints_table and self._data is not None:
            self._print_table()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Returns the function, made to record each of its calls in a trace of its own.

        Raises:
            errors.UsageError: the function is a generator or `async`, so its body runs later.
        """
        runs_later = (
            inspect.isgeneratorfunction,
            inspect.iscoroutinefunction,
            inspect.isasyncgenfunction,
        )
        if any(test(function) for test in runs_later):
            raise errors.UsageError(
                "@trace() of a generator or an async function would end before its body runs: "
                "write `with trace():` in it"
            )

        @functools.wraps(function)
        def traced(*args: P.args, **kwargs: P.kwargs) -> R:
            again = trace.__new__(trace)
            again.__dict__.update(self.__dict__, _held=Held())
            again._table = True if self._table is None else self._table
            again._prints_table = bool(again._table)
            traced.last = again  # type: ignore[attr-defined]  # also if the call raises
            with again:
                return function(*args, **kwargs)

        return traced

    def step(self) -> None:
        """Marks the end of a training step.

        Needed only where no optimizer steps, or where a step ends elsewhere.

        Raises:
            errors.CaptureError: the block is not running.
        """
        if not self._entered:
            raise errors.CaptureError("step() belongs inside the `with trace():` block")
        # Until now the optimizers' steps counted. This call ends the user's first step.
        counted_optimizers = not self._user_steps and self._cycles.step > 0
        self._user_steps = True
        if self._session is not None:
            self._session.mark_step()
        self._cycles.count_from(1 if counted_optimizers else self._cycles.step + 1)

    @property
    def recording(self) -> bool:
        """Whether the block is still running, even if its schedule records nothing just now."""
        return self._entered

    @property
    def data(self) -> Trace:
        """The recorded columns; while recording, the columns so far.

        Raises:
            errors.CaptureError: nothing has been recorded yet, or the trace goes to a file.
        """
        if self._session is not None and self._session.running:
            return self._session.peek()
        if self._data is None:
            raise errors.CaptureError(
                "nothing has been recorded yet: the block has not run"
                if self._schedule is None
                else "nothing has been recorded yet: the schedule's first active step has not come"
            )
        return self._data

    def annotate_memory_history(self) -> int:
        """Annotates each live block in torch's own memory history, and returns their number.

        The next `torch.cuda.memory._dump_snapshot` of this process contains the annotations. They
        need a torch that can annotate live allocations and is recording its history.

        Raises:
            errors.UsageError: this torch cannot annotate live allocations.
        """
        from pytracer.export.snapshot import annotations

        try:
            annotate = private_torch.NAMES["annotate_memory"].find()
        except errors.CaptureError:
            raise errors.UsageError(
                "this torch cannot annotate live allocations (torch.cuda.memory._annotate_memory); "
                "export_memory_snapshot() writes a snapshot with the same words"
            ) from None
        count = 0
        for address, text in annotations(self.data):
            # A block may be gone by now. That is no error of the caller.
            with contextlib.suppress(RuntimeError, ValueError):
                annotate(address, text)
                count += 1
        return count

    # ---------------------------------------------------------------- parts

    def _in_short(self) -> str:
        if self._entered:
            return "recording"
        if self._data is None:
            return "nothing was recorded" if self._has_run else "not started"
        return super()._in_short()

    def _warn_without_cuda(self) -> None:
        import torch

        # Not is_available(): after it, the program may no longer be able to choose its devices.
        if self._options.devices == ("cuda",) and torch.cuda.device_count() == 0:
            errors.warn(
                "devices='cuda', and torch finds no CUDA device here: nothing will be recorded. "
                "Leave devices= out, or say devices='cpu'"
            )

    def _new_cycles(self) -> Cycles:
        windows = always if self._schedule is None else of_schedule(self._schedule)
        return Cycles(windows, self._start, self._stop)

    def _optimizer_stepped(self) -> None:
        if self._user_steps:
            return
        try:
            self._cycles.stepped()
        except errors.PytracerError as problem:  # in the middle of the program's step
            errors.warn(str(problem))

    def _start(self, _window: int) -> None:
        options = self._options
        if imagined:
            if options.path is not None:
                options = replace(options, path=_next_file(options.path, len(self._files)))
                self._files.append(str(options.path))
            self._session = Inner(options, imagined[-1])
            self._session.start()
            return
        if not options.devices:
            options = replace(options, devices=default_devices(self._targets.alive()))
        if options.path is not None:
            options = replace(options, path=_next_file(options.path, len(self._files)))
        session = Session(options, self._targets, self._held)
        try:
            session.start()
        except errors.CannotWrite as problem:
            if self._cycles.step == 0:
                raise
            # A trace must not end a program that is already training.
            errors.warn(f"{problem}. Recorded in memory")
            options = replace(options, path=None)
            session = Session(options, self._targets, self._held)
            session.start()
        if self.first_step:
            session.notes["first_step"] = self.first_step
        self._session = session
        if options.path is not None:
            self._files.append(options.path)
        if self._cost:
            self._start_measuring(session)

    def _stop(self, _window: int, error: BaseException | None) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        is_whole = self._entered or self._schedule is None  # else the block cut the cycle short
        self._stop_measuring(session)
        data = session.stop(
            wait=self._entered or (error is None and self.is_read),
            variables=self.is_read or error is not None,
        )
        # The last window of a schedule may be empty or cut short. Then the one before it is kept.
        is_better = data is not None and data.has_allocations and (is_whole or not self._is_whole)
        if data is not None and (self._data is None or session.failed or is_better):
            self._data = data
        self._is_whole = self._is_whole or is_whole

    def _start_measuring(self, session: Session) -> None:
        from pytracer.cost.measure import Measurement

        self._measurement = Measurement()
        try:
            self._measurement.start()
        except BaseException:
            self._session = self._measurement = None
            session.stop()
            raise

    def _stop_measuring(self, session: Session | Inner) -> None:
        measurement, self._measurement = self._measurement, None
        if measurement is None or not session.running:
            return
        try:
            session.notes["cost"] = measurement.stop()
        except Exception as problem:  # the recording must end even if the profiler fails
            errors.warn(f"the costs could not be read: {problem!r}")

    def _print_table(self) -> None:
        from pytracer.export import table, terminal

        # stderr, so that stdout has only the program's own output.
        print(table.render(self.data, terminal.here(sys.stderr)), file=sys.stderr)  # noqa: T201

    def _explain_out_of_memory(self) -> None:
        """Prints a page to stderr and saves the trace. The program's exception goes on as it is."""
        try:
            page = self.post_mortem()
            streamed = meta.of(self.data).options.path != ""
            path = self._files[-1] if streamed else ""
            if not streamed:
                path = str(self.save(free_name("pytracer-oom")))
            with contextlib.suppress(ValueError):
                path = str(Path(path).relative_to(environment.working_directory()))
            look = f"look again with:\n          pytracer summary {path}"
            self._say(f"{page}\nsaved     {path}; {look}\n")
        except Exception as problem:  # the program's own exception is what matters
            self._say(f"pytracer: the failed allocation could not be explained: {problem}\n")

    @staticmethod
    def _say(text: str) -> None:
        sys.stderr.write("\n" + text)


def _check_schedule(schedule: Schedule | None) -> None:
    if schedule is not None and not callable(schedule):
        raise errors.UsageError(
            f"schedule={schedule!r}: it takes the result of torch.profiler.schedule(...)"
        )


def _check_switches(**switches: bool) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise errors.UsageError(f"{name}={value!r}: it is True or False")


def _check_targets(targets: Sequence[Any]) -> None:
    """Checks for models and optimizers. An optimizer need not be one of torch's classes."""
    import torch

    for target in targets:
        if is_a(target, (torch.nn.Module, torch.optim.Optimizer)) or _is_optimizer(target):
            continue
        if isinstance(target, FunctionType):
            raise errors.UsageError("as a decorator trace is called: write @trace()")
        kind = "a class" if isinstance(target, type) else f"of type {type(target).__name__}"
        raise errors.UsageError(
            "trace() takes models and optimizers, one by one, as in trace(model, optimizer); it "
            f"got an argument {kind}"
        )


def _is_optimizer(target: Any) -> bool:
    has_parts = hasattr(target, "param_groups") and hasattr(target, "state")
    return has_parts and not isinstance(target, type)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed. On CUDA the class of the error says so, on the CPU its text."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _in_words(error: BaseException) -> str:
    """The exception's kind and the first line of its text. Runs no code of the exception's own."""
    texts = BaseException.args.__get__(error)  # type: ignore[attr-defined]
    kind = type(error).__name__
    if not texts or type(texts[0]) is not str:
        return kind
    first = texts[0].strip().partition("\n")[0]
    return f"{kind}: {first[:_LONGEST_TEXT]}"


def free_name(stem: str | Path) -> Path:
    """Returns the name of a new file in the working directory, with the rank or process."""
    many = environment.world_size() > 1
    owner = f"rank{environment.rank()}" if many else str(os.getpid())
    for number in count():
        path = Path(f"{stem}-{owner}{f'.{number}' if number else ''}.pytrace")
        if not path.exists():
            break
    return path


def _next_file(path: str, written: int) -> str:
    """Returns run.pytrace, run.1.pytrace, ...: a file for each cycle of a schedule, call and block.

    The first file must not exist. Later names skip existing files, so that no program fails
    half-way.
    """
    if written == 0:
        return path
    whole = Path(path)
    names = (whole.with_name(f"{whole.stem}.{i}{whole.suffix}") for i in count(written))
    return str(next(name for name in names if not name.exists()))


def _has_no_name(frame: FrameType) -> bool:
    """Whether the `with` statement of this frame gives the trace no name."""
    following = (i for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti)
    after = next((i for i in following if i.opname not in ("CACHE", "NOP")), None)
    return after is not None and after.opname == "POP_TOP"
