"""The public face of recording: `trace()`. What it answers is in `pytracer/reading.py`."""

import contextlib
import dis
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import FrameType, FunctionType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from pytracer import environment, errors, meta, private_torch
from pytracer.capture.cycles import Cycles, Schedule, always, of_schedule
from pytracer.capture.looking import is_a
from pytracer.capture.session import (
    Held,
    Options,
    Session,
    Targets,
    default_devices,
    ends_always,
    ends_if_it_raises,
)
from pytracer.reading import Views
from pytracer.recorded import Trace

if TYPE_CHECKING:
    from typing_extensions import Self

    from pytracer.cost.measure import Measurement

P = ParamSpec("P")
R = TypeVar("R")


def _with_known_options(init: Callable[P, None]) -> Callable[P, None]:
    """An option that does not exist gets a sentence; the signature stays as it is."""
    known = inspect.signature(init).parameters.values()
    options = [option.name for option in known if option.kind is option.KEYWORD_ONLY]

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
    """Records memory from here to the end of the block; as a decorator, each call.

    Args:
        *targets: models and optimizers. Without any they are found as they are used.
        detail: "op" attributes every allocation to an operator; "category" only to modules and
            phases, at a third of the cost.
        stacks: also the Python line of every allocation.
        saved_tensors: "auto" infers what autograd keeps; "hooks" sees each save as it happens.
        cost: also what each operator cost, forward and backward, for `cost()`. torch.profiler
            measures it, so no other may run meanwhile, and steps take longer.
        schedule: what `torch.profiler.schedule(...)` returns: record only some steps. A step ends
            at `t.step()`, or with the optimizer's if that is never called: of several that take
            turns with the last one's. `steps()` counts those that were recorded: the first one is
            its step 0. Of a schedule that repeats the last cycle that was not cut short is kept;
            with `path=` each has a file.
        devices: "cpu", "cuda" or both; by default where the models are, else CUDA if there is one.
        path: write the trace to this file while recording. It can be read whatever happens. What
            the same trace records next (another call, block or cycle) goes to run.1.pytrace, ...
        max_events: how many events to keep in memory; more are counted and not kept.
        anonymous: leave out host, process numbers, command, folders and paths, in the file too.
        table: print the table at the end (to stderr). By default only for a `with trace():`
            that gives the trace no name; and when the block is left because an allocation failed,
            a page about that, with the trace saved. `table=False` does neither.
        report: the former name of `table`; deprecated.
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
        report: bool | None = None,
    ) -> None:
        """Refuses bad arguments. The recording starts when the block is entered."""
        if report is not None:
            if table is not None:
                raise errors.UsageError("report= is the former name of table=: drop report=")
            table = of_former_name(report)
        _check_targets(targets)
        if schedule is not None and not callable(schedule):
            raise errors.UsageError(
                f"schedule={schedule!r}: it takes the result of torch.profiler.schedule(...)"
            )
        if not isinstance(stacks, bool):
            raise errors.UsageError(f"stacks={stacks!r}: it is True or False")
        if not isinstance(anonymous, bool):
            raise errors.UsageError(f"anonymous={anonymous!r}: it is True or False")
        chosen = (devices,) if isinstance(devices, str) else tuple(devices or ())
        self._targets = Targets(targets)
        self._held = Held()  # what has been begun, and ends whatever happens
        self._options = Options(
            detail=detail,
            stacks=stacks,
            saved_tensors=saved_tensors,
            devices=chosen,
            # The program may move.
            path=None if path is None else str(Path(environment.working_directory(), path)),
            max_events=max_events,
            anonymous=anonymous,
        )
        self._cost = cost
        self._measurement: Measurement | None = None
        self._schedule = schedule
        self._table = table
        self._prints_table = bool(table)
        self._session: Session | None = None
        self._data: Trace | None = None
        self._entered = False
        self._has_run = False
        self._files: list[str] = []  # of all blocks, and of all calls: their copies share it
        self._user_steps = False
        self._is_whole = False  # what is kept: a schedule's cycle from its begin to its end
        self._cycles = self._new_cycles()
        self.first_step = 0  # how many steps the program had made when the block was entered
        self.waits = True  # at the end, until a GPU has come as far: for its last phases' times

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
        """Stops recording; what the block raised goes on unchanged."""
        self._entered = False
        failed = error is not None and is_out_of_memory(error)
        if failed and self._session is not None:
            self._session.failed = True
        try:
            self._cycles.end(error)
        except errors.CannotWrite as problem:
            if error is None:
                raise
            warnings.warn(str(problem), RuntimeWarning, stacklevel=2)
        if failed and self._table is not False and self._data is not None:
            self._explain_out_of_memory()
        elif self._prints_table and self._data is not None:
            self._print_table()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Traces each call of the function, each with a trace of its own.

        Raises:
            errors.UsageError: the function runs after its call: a generator, or `async`.
        """
        later = (
            inspect.isgeneratorfunction,
            inspect.iscoroutinefunction,
            inspect.isasyncgenfunction,
        )
        if any(is_such(function) for is_such in later):
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
            traced.last = again  # type: ignore[attr-defined]  # of a call that raises, too
            with again:
                return function(*args, **kwargs)

        return traced

    def step(self) -> None:
        """The user's word that a training step ends here."""
        if not self._entered:
            raise errors.CaptureError("step() belongs inside the `with trace():` block")
        # Until now optimizers' steps were taken for the user's. This is the end of the first.
        counted_optimizers = not self._user_steps and self._cycles.step > 0
        self._user_steps = True
        if self._session is not None:
            self._session.mark_step()
        self._cycles.count_from(1 if counted_optimizers else self._cycles.step + 1)

    @property
    def recording(self) -> bool:
        """Whether the block is still running; a schedule may have a pause just now."""
        return self._entered

    @property
    def data(self) -> Trace:
        """The recorded columns; while recording, what there is so far."""
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
        """Tells torch's own memory history what each block that is alive now is; returns how many.

        The annotations are in the next `torch.cuda.memory._dump_snapshot` of this process. They
        need a torch that can annotate live allocations and is recording its history.

        Raises:
            errors.UsageError: this torch cannot.
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
            # A block that is gone by now is not an error of the caller's.
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

        # Not is_available(): it may fix which devices the program can still choose.
        if self._options.devices == ("cuda",) and torch.cuda.device_count() == 0:
            warnings.warn(
                "devices='cuda', and torch finds no CUDA device here: nothing will be recorded. "
                "Leave devices= out, or say devices='cpu'",
                RuntimeWarning,
                stacklevel=3,
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
            # In the middle of a program a trace is no reason to end it.
            warnings.warn(f"{problem}. Recorded in memory", RuntimeWarning, stacklevel=2)
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
        is_whole = self._entered or self._schedule is None  # else the block ended before its cycle
        self._stop_measuring(session)
        data = session.stop(wait=self._entered or (error is None and self.waits))
        # A schedule may have opened a window in which nothing came any more, or too little.
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

    def _stop_measuring(self, session: Session) -> None:
        measurement, self._measurement = self._measurement, None
        if measurement is None or not session.running:
            return
        try:
            session.notes["cost"] = measurement.stop()
        except Exception as problem:  # the recording must end, whatever a profiler leaves
            warnings.warn(f"the costs could not be read: {problem!r}", RuntimeWarning, stacklevel=3)

    def _print_table(self) -> None:
        from pytracer.export import table

        # stderr, so that what the program prints to stdout stays its own.
        print(self.table(color=table.wants_color(sys.stderr)), file=sys.stderr)  # noqa: T201

    def _explain_out_of_memory(self) -> None:
        """To stderr, while the program's exception goes on as it is."""
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


def of_former_name(report: bool) -> bool:
    """Warns that `table=` was given by its former name, and returns its value."""
    errors.warn(f"report={report} is deprecated: write table={report}", DeprecationWarning)
    return report


def _check_targets(targets: Sequence[Any]) -> None:
    """Models, and whatever has what every optimizer has: not all are torch's."""
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
    """Whether it is an allocator's: CUDA's has a class of its own, the CPU's only its words."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def free_name(stem: str) -> Path:
    """A file in the working directory that is not there yet, named after the rank or process."""
    many = environment.world_size() > 1
    owner = f"rank{environment.rank()}" if many else str(os.getpid())
    for number in count():
        path = Path(f"{stem}-{owner}{f'.{number}' if number else ''}.pytrace")
        if not path.exists():
            break
    return path


def _next_file(path: str, written: int) -> str:
    """run.pytrace, run.1.pytrace, ...: a file for each cycle of a schedule, call and block.

    The first may be refused; later ones go around what is there, lest a program fail half-way.
    """
    if written == 0:
        return path
    whole = Path(path)
    names = (whole.with_name(f"{whole.stem}.{i}{whole.suffix}") for i in count(written))
    return str(next(name for name in names if not name.exists()))


def _has_no_name(frame: FrameType) -> bool:
    """Whether the `with` statement that is entering throws the trace away."""
    following = (i for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti)
    after = next((i for i in following if i.opname not in ("CACHE", "NOP")), None)
    return after is not None and after.opname == "POP_TOP"
