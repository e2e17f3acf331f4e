"""Records a program from its import of torch to its end.

Recording begins when the program has imported torch, and not before. So variables that the program
sets first (OMP_NUM_THREADS, CUDA_VISIBLE_DEVICES) have the same effect as without pytracer.
"""

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pytracer import errors
from pytracer.basics import environment
from pytracer.basics.files import refuse_to_overwrite
from pytracer.recording import runner
from pytracer.recording.place import Place
from pytracer.recording.start import after_import, our_name_is_taken, safely

if TYPE_CHECKING:
    from pytracer.capture.cycles import Recording
    from pytracer.data.changes import Changes
    from pytracer.recording.applied import Applied
    from pytracer.recording.trial import Trial

_MOST_EVENTS = 20_000_000  # about 250 MB of file; later events are only counted
_BYTES_PER_EVENT = 13  # in a file, with its scopes; small programs need less
_MOST_EVENTS_IN_MEMORY = 1_000_000  # 44 MB
_LONGEST_NAME = 100  # of a program, in its files' names


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
    changes: "Changes | None" = None  # of a saved plan, whose modules are in the two above
    ranks: tuple[int, ...] = ()  # to record; () for all
    max_size: int | None = None  # bytes of the file, about
    always: bool = False  # totals of every step and some looks, see always.py

    @property
    def tries(self) -> bool:
        """Whether the program is changed, to try a plan."""
        return bool(self.checkpoint or self.offload or self.changes)

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
        return last[:_LONGEST_NAME] or "run"

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

    def place(self) -> Place:
        """Returns the place of the trace's file, one per rank.

        Raises:
            errors.PytracerError: the program's user has asked for a place where no file can be.
        """
        path = self.output or Path(self.name)
        if path.name in ("", ".."):
            raise errors.UsageError(f"-o {path} is a folder: name a file, as in -o run.pytrace")
        path = path.with_name(self.file_name())
        if (self.output or self.force) and _may_be_searched(path.parent):
            refuse_to_overwrite(path, overwrite=self.force)
        return Place(path, force=self.force, numbered=not (self.output or self.force))

    def file_name(self) -> str:
        """The name of this process's file, with the rank as far as it is known."""
        parts = [self.stem]
        if environment.world_size() > 1:
            parts.append(f"rank{environment.rank()}")
        elif self.is_child:
            parts.append(f"process{os.getpid()}")
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if restart.isdecimal() and restart != "0":
            parts.append(f"restart{restart}")
        return ".".join(parts) + self.suffix


def _may_be_searched(folder: Path) -> bool:
    try:
        (folder / ".").stat()
    except OSError as problem:
        return not isinstance(problem, PermissionError)
    return True


def recorder(plan: Plan, tell: "Messages") -> "Traced":
    """What records a program by this plan.

    Raises:
        errors.PytracerError: the program's user has asked for a place where no file can be.
    """
    place = plan.place()
    if not plan.as_module and _is_same_file(place.shown, plan.program[0]):
        raise errors.UsageError(f"-o {place.shown} is the script itself")
    return Traced(plan, place, tell)


class Recorder(Protocol):
    """Records a program. Whatever goes wrong in it is one line, and the program goes on."""

    exit_code: int  # of a program that has ended well

    def begin(self) -> None:
        """Begins to record: the program has imported torch."""

    def end(self, error: BaseException | None, *, gave_up: bool = False) -> None:
        """Ends the recording: the program is over, has failed, or exited with a code."""

    def say_why(self) -> None:
        """Explains below the traceback how memory was involved."""


def prepare(plan: Plan, traced: Recorder) -> Callable[[], int]:
    """Returns a function that runs and records the program, and passes its exceptions on.

    Raises:
        errors.PytracerError: the program cannot be run or recorded. None of it has run.
    """
    _refuse_launchers(plan)
    _refuse_missing_cuda(plan)
    if plan.changes is not None:
        os.environ.update(plan.changes.environment)  # torch reads it when the program imports it
    execute = runner.program(plan.program, as_module=plan.as_module)

    def run() -> int:
        after_import("torch", traced.begin)
        try:
            execute()
        except SystemExit as stop:
            well = stop.code is None or (type(stop.code) in (int, bool) and not stop.code)
            traced.end(None, gave_up=not well)
            if traced.exit_code:
                raise SystemExit(traced.exit_code) from None
            raise
        except BaseException as error:
            traced.end(error)
            runner.leave_traceback_to_the_program(error, traced.say_why)
            raise
        traced.end(None)
        return traced.exit_code

    return run


def _is_same_file(path: Path, script: str) -> bool:
    """Whether both are one file. False if one of them does not exist."""
    with contextlib.suppress(OSError):
        return path.samefile(script)
    return False


def _refuse_launchers(plan: Plan) -> None:
    program = plan.program[0] if plan.as_module else Path(plan.program[0]).name
    if program not in runner.LAUNCHERS:
        return
    launcher = runner.LAUNCHERS[program]
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


class Messages(Protocol):
    """Takes messages for the user. The command line's class prints them."""

    rank: int  # of this process

    def line(self, text: str) -> None:
        """Takes one line, on every rank."""

    def recorded(
        self, traced: Any, path: Path, file: Path | None, which: str, problem: str = ""
    ) -> None:
        """Takes the trace of the steps to keep.

        `path` is the file as the user named it. `file` is its absolute path, or None if there is
        none. `which` names the steps, or is "" if the program ended before all of them. `problem`
        is what is wrong with the trial so far.
        """

    def finish(self) -> None:
        """Completes messages in progress: the program is over, and others follow."""

    def page(self, text: str) -> None:
        """Takes an explanation of several lines."""

    def stop(self, text: str) -> None:
        """Takes a line and ends the program: what the user has asked for cannot be done."""


class Traced:
    """The program's recording, from its import of torch on.

    Whatever goes wrong in its public methods is one line, and the program goes on.
    """

    def __init__(self, plan: Plan, place: Place, tell: Messages) -> None:
        """Records nothing until `begin`."""
        self._plan, self._file, self._tell = plan, place, tell
        self._plan_name = self._file_name = plan.file_name()
        self._last_file: Path | None = None
        self._recording: Recording | None = None
        self._trials: list[Trial | Applied] = []
        self._has_failed = False
        self._counter: Any = None  # of the program's steps
        self._peak: Any = None  # of the steps to keep
        self._later = ""
        self._why = ""
        self._owner = os.getpid()
        self.exit_code = 0  # of a program that has ended well

    def begin(self) -> None:
        """Begins to record: the program has imported torch."""
        self._owner = os.getpid()
        self._has_failed = our_name_is_taken()
        if not self._has_failed:
            self._try(self._begin)

    def end(self, error: BaseException | None, *, gave_up: bool = False) -> None:
        """Ends the recording: the program is over, has failed, or exited with a code."""
        if not self._forked() and not self._has_failed:
            well = error is None and not gave_up  # otherwise the program gives its own reason
            self._try(self._end, error, well)

    def say_why(self) -> None:
        """Explains below the traceback how memory was involved."""
        if self._why:
            self._try(self._tell.page, self._why)

    def _try(self, work: Callable[..., None], *arguments: Any) -> None:
        if not safely(work, *arguments):
            self._has_failed = True
            safely(self._drop)

    def _drop(self) -> None:
        """Stops recording without a result."""
        if self._counter is not None:
            self._counter.end()
        if self._recording is not None:
            self._recording.drop()

    def _begin(self) -> None:
        try:
            self._record()
        except errors.PytracerError as problem:
            self._has_failed = True
            self._tell.line(f"not recorded: {problem}")

    def _record(self) -> None:
        from pytracer.capture.cycles import Recording
        from pytracer.capture.session import Held

        self._begin_trial()
        if environment.world_size() > 1 and not self._plan.records_this_rank:
            return
        recording = self._recording = Recording(
            self._trace,
            skip=self._plan.skip,
            steps=self._plan.steps,
            watch=self._plan.watch,
            options=self._plan.options,
            keep={"keeps": True},
            watch_file=self._place_for_last_steps,
            ready=self._ready,
            problem=lambda text: self._tell.line(f"not recorded: {text}"),
            watched=self._watched,
        )
        recording.begin()

        self._counter = Held()
        self._counter.count_steps(self._stepped)

    def _begin_trial(self) -> None:
        plan = self._plan
        if plan.checkpoint or plan.offload:
            from pytracer.recording.trial import Trial

            self._trials.append(
                Trial(plan.checkpoint, plan.offload, stop=self._stop, tell=self._tell.line)
            )
        if plan.changes is not None:
            from pytracer.recording.applied import Applied

            self._trials.append(Applied(plan.changes))
        for trial in self._trials:
            trial.begin()

    def _stop(self, reason: str) -> None:
        """Ends the program without a recording: what the user has asked for cannot be done."""
        self._drop()
        self._settle(recorded=False)
        self._tell.stop(reason)

    def _stepped(self) -> None:
        recording = self._recording
        if recording is None or self._forked() or self._has_failed:
            return
        if recording.steps_seen == 0:
            self._learn_rank()
        if recording.changes_next:
            self._try(recording.stepped)
        else:
            recording.stepped()  # only counts: the guard would cost more
        if recording.is_over:
            self._counter.end()

    def _end(self, error: BaseException | None, well: bool) -> None:
        problems = [trial.end() for trial in self._trials]
        for problem in filter(None, problems if well else []):
            self._tell.line(problem)
            self.exit_code = errors.UsageError.exit_code
        if self._recording is None:
            if well and self._plan.records_this_rank:
                self._tell.line("the program never imported torch: nothing is recorded")
            if well and self._plan.tries and not self._trials:
                self.exit_code = errors.UsageError.exit_code
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
            self._file.rename(self._file_name)
            self._plan_name = self._file_name

    def _place_for_last_steps(self) -> Path | None:
        """The absolute path of the plan's last file."""
        last, place = self._plan.last_file(), self._file.path
        self._last_file = None if last is None or place is None else place.with_name(last.name)
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
        problem = next(filter(None, (trial.problem() for trial in self._trials)), "")
        self._tell.recorded(traced, self._file.shown, self._file.path, self._which(), problem)

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
        from pytracer.basics.units import size_text

        highest = usage.highest(traced.data, self._peak.device)
        if highest.bytes <= self._peak.bytes:
            return
        self._peak, step = highest, first_step + highest.step
        # A window does not know the CPU's blocks from before it.
        least = "at least " if highest.device == "cpu" else ""
        skip = self._plan.skip
        if self._plan.by_environment:
            option = "PYTRACER=" + (f"skip={skip}," if skip else "") + f"steps={step + 1 - skip}"
        else:
            option = f"--schedule {skip},0,{step + 1 - skip}" if skip else f"--steps {step + 1}"
        self._later = (
            f"later, step {step} went to {least}{size_text(highest.bytes)}; {option} records it too"
        )

    def _trace(self, *, keeps: bool = False, **more: Any) -> Any:
        from pytracer.capture.session import all_devices
        from pytracer.recording.api import trace

        if keeps:
            more |= self._reserve()
        return trace(devices=self._plan.devices or all_devices(), **more)

    def _reserve(self) -> dict[str, Any]:
        """Makes the file of the steps to keep, and returns the arguments of `trace` for it."""
        problem = self._file.reserve()
        if problem:
            where = self._file.path or "memory; the table is all that stays"
            name = self._plan.file_name()
            self._tell.line(f"{name} cannot be written ({problem}): recorded in {where}")
        if self._file.path is None:
            return {"max_events": min(self._plan.max_events, _MOST_EVENTS_IN_MEMORY)}
        return {"path": self._file.path, "max_events": self._plan.max_events}

    def _explanation(self, recording: "Recording", error: BaseException) -> str:
        from pytracer.recording.api import free_name, is_out_of_memory

        path, which = self._file.shown, self._which()
        verb = "is" if self._plan.steps == 1 else "are"
        kept = f"{which.capitalize()} {verb} in {path}" if which else "Recorded until then"
        look = f"{kept}; look at it:  pytracer summary {shlex.quote(str(path))}"
        if self._file.path is None:
            look = "No file could be written"
        if not is_out_of_memory(error):
            later = f"\n{self._later}" if self._later else ""
            if self._last_file is not None and (recording.watched or recording.rests):
                which = "last watched steps" if recording.rests else "steps before the failure"
                later += f"\nThe {which} are in {path.with_name(self._last_file.name)}"
            return f"{look}{later}"
        page = recording.last.post_mortem()
        if not page:
            return f"{self._not_traced(which, rests=recording.rests)}\n{look}"
        if recording.watched and self._file.path is not None:
            oom = free_name(self._file.path.with_name(f"{self._plan.stem}-oom"))
            path = path.with_name(recording.last.save(oom).name)
            recording.drop_watched()
        if self._file.path is None:
            return f"{page}\n{look}"
        again = f"pytracer summary {shlex.quote(str(path))}"
        return f"{page}\nsaved     {path}; look again with:\n          {again}"

    def _not_traced(self, which: str, *, rests: bool) -> str:
        if rests:
            from pytracer.capture.cycles import NOT_WATCHED

            option = "PYTRACER=steps=all" if self._plan.by_environment else "--steps all"
            return f"{NOT_WATCHED}. {option} records each one"
        if which and not self._plan.watch:
            watch = "with PYTRACER=watch=1" if self._plan.by_environment else "without --no-watch"
            return f"The failure came after {which} and was not traced: run {watch}"
        return "The failure is not in the trace: its device or thread is not traced"


def _has_tensors(traced: Any) -> bool:
    try:
        return traced is not None and traced.data.has_allocations
    except errors.PytracerError:  # it could not be kept; the user has read why
        return False
