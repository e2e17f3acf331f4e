"""A session: one stretch of recording, from its start to its Trace."""

import json
import os
import platform
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from pytracer import errors
from pytracer.basics import environment
from pytracer.basics.version import __version__
from pytracer.capture import communication, compiled
from pytracer.capture.clocks import Clocks
from pytracer.capture.device_memory import DeviceMemory
from pytracer.capture.frameworks import frameworks_of, notebook_cells
from pytracer.capture.hooks import HOOKS
from pytracer.capture.looking import is_a, parameters_of
from pytracer.capture.phase_times import PhaseTimes
from pytracer.capture.variables import variables_of
from pytracer.data import anonymous
from pytracer.data._native import C, core, facts, no_tracker
from pytracer.data.model_names import roots_of
from pytracer.data.recorded import Trace

# 640 MB of host memory. With `path` the log goes to the file, and there is no such limit.
DEFAULT_MAX_EVENTS = 20_000_000
_MOST_EVENTS = 2**63 - 1  # the largest count there is

# For pytracer/recording/api.py; see csrc/torch/ensure.h.
Held = C.Held
ends_always = C.ends_always
ends_if_it_raises = C.ends_if_it_raises

_OWN_TIME = ("ticks", "ns", "of_ticks", "waited_ns")
DETAILS = ("op", "category")
SAVED_TENSORS = ("auto", "hooks")


@dataclass(frozen=True)
class Options:
    """What to record; see `pytracer.trace` for their meaning."""

    detail: str = "op"
    stacks: bool = False
    saved_tensors: str = "auto"
    devices: tuple[str, ...] = ()
    path: str | None = None
    max_events: int | None = None
    anonymous: bool = False

    def __post_init__(self) -> None:
        """Checks the options, before anything is hooked."""
        _check("detail", self.detail, DETAILS)
        _check("saved_tensors", self.saved_tensors, SAVED_TENSORS)
        for device in self.devices:
            _check("devices", device, ("cpu", "cuda"))
        _check_max_events(self.max_events)
        if self.stacks and self.detail != "op":
            raise errors.UsageError(
                'stacks=True needs detail="op": lines are read when operators end'
            )


def _check(option: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        listed = ", ".join(repr(choice) for choice in allowed)
        raise errors.UsageError(f"{option}={value!r} is not understood; it is one of {listed}")


def _check_max_events(count: object) -> None:
    if count is not None and not (isinstance(count, int) and 1 <= count <= _MOST_EVENTS):
        raise errors.UsageError(
            f"max_events is {count!r}; it must be a whole number, at least 1 and below 2**63"
        )


def default_devices(targets: Iterable[Any]) -> tuple[str, ...]:
    """Returns the devices of the given models; without models, CUDA if there is any, else CPU."""
    modules = [target for target in targets if is_a(target, torch.nn.Module)]
    devices = {C.device_of(parameter)[0] for parameter in parameters_of(modules)} & {"cpu", "cuda"}
    if devices:
        return tuple(sorted(devices))
    return ("cuda",) if torch.cuda.is_available() else ("cpu",)


def all_devices() -> tuple[str, ...]:
    """The devices that this torch may use. Does not ask CUDA: then the program could not choose them."""
    return ("cpu", "cuda") if torch.version.cuda else ("cpu",)


class Targets:
    """The models and optimizers given to a trace, held by weak references."""

    def __init__(self, targets: Iterable[Any] = ()) -> None:
        """Keeps a target itself only if it allows no weak reference."""
        self._references = [_reference_to(target) for target in targets]
        self.kinds = [type(target).__name__ for target in targets]

    def alive(self) -> list[Any]:
        """Returns the targets that the program still has."""
        targets = (reference() for reference in self._references)
        return [target for target in targets if target is not None]


def _reference_to(target: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(target)
    except TypeError:  # such as an optimizer of the program whose class has slots
        return lambda: target


class Session:
    """Starts recording, and turns what was recorded into a Trace."""

    def __init__(self, options: Options, targets: Targets | None = None, held: Any = None) -> None:
        """Hooks nothing yet. `held` ends the session even if its Python is interrupted."""
        self.options = options
        self.failed = False  # whether a failed allocation ended the block
        self.notes: dict[str, Any] = {}  # further entries of the trace's meta
        cuda = "cuda" in options.devices
        self.memory = DeviceMemory(cuda=cuda)
        self.clocks = Clocks()
        self.phases = PhaseTimes(C.cuda_stopwatch() if cuda else None)
        self._targets = targets or Targets()
        self._native = (held or C.Held()).session()
        self._pid = 0
        self._rank, self._world_size = environment.rank(), environment.world_size()
        self._clock: list[tuple[int, int]] = []
        self._counters: dict[str, Any] = {}
        self._learned: dict[str, Any] = {
            "ddp_buckets": [],
            "ddp_hooked": [],
            "roots": {},
            "frozen_modules": [],
            "unstepped": [],
            "left_behind": [],
            "renamed": {},
            "variables": [],
            "frameworks": None,
        }
        self._before: dict[str, Any] = {}
        self._own_time: list[int] = []
        self._cuda_problem = ""

    @property
    def running(self) -> bool:
        """Whether it was started, not stopped, and this process started it."""
        return bool(self._native.is_open)

    def start(self) -> None:
        """Installs the hooks and starts to record."""
        options = self.options
        self._refuse_file()
        self._pid = os.getpid()
        self.memory.begin()
        self._before = C.status()
        self._clock = [C.read_clock()]
        HOOKS.session_begins(self)
        compiled.expect()
        cuda = "cuda" in options.devices
        self._cuda_problem = _why_no_cuda_events() if cuda else ""
        try:
            problem = self._native.begin(
                max_events=self._max_events(),
                ops=options.detail == "op",
                cpu="cpu" in options.devices,
                device=cuda and not self._cuda_problem,
                stacks=options.stacks,
                saved_tensors=options.saved_tensors == "hooks",
                phases=self.phases,
            )
            if problem:
                raise errors.CaptureError(problem)
            self._learn(cuda=cuda)
            self._counters["begin"] = self._allocator_counters()
            self._learn_rank()
            self._open_file()  # last: Ctrl-C before it leaves no file
        except BaseException:
            self.abandon()
            raise

    def mark_step(self) -> None:
        """Marks the end of a step, as the user says."""
        C.mark_step("step")
        if self._native.count_step():
            self.count_and_read_memory()

    def count_and_read_memory(self) -> None:
        """Counts new calls and optimizer steps, and reads the device if that is due."""
        calls, steps = self._native.new_counts()
        if calls:
            self.memory.called(calls)
        if steps and self._learned["frameworks"] is None:
            self._note_frameworks(sys._getframe(1))
        if steps:
            C.quietly(HOOKS.labels.learn_buckets)  # the third step is the first that knows all
        if steps and self.memory.stepped(steps):
            self.clocks.read()  # ranks are near each other at the end of a step
            if self.options.path is not None:
                self._note_progress()

    def _note_frameworks(self, frame: FrameType) -> None:
        """Learns with which frameworks the code of this frame and its callers trains."""
        found = C.quietly(frameworks_of, frame) or []
        self._learned["frameworks"] = found or self._learned["frameworks"] or []

    def note_models(self) -> None:
        """Writes the models' names into the file, as soon as there is a second one."""
        if self.options.path is not None:
            self._learned["roots"] = HOOKS.labels.root_names
            self._native.note(self._meta())

    def stop(self, *, wait: bool = True, variables: bool = True) -> Trace | None:
        """Ends the recording and returns its Trace; None in a forked child, which records nothing.

        Args:
            wait: the GPU first finishes the program's work, so that the last phases have times.
            variables: look for the variables that hold tensors, which takes a tenth of a second.
        """
        if not self.running:
            self._native.end()
            return None
        self._own_time = self._native.own_time()  # without the waiting below
        try:
            self.phases.finish(wait=wait and not self.failed)
            self._look_once_more()
            if variables:
                self._learned |= C.quietly(variables_of, sys._getframe(1)) or {"variables": []}
            self._note_frameworks(sys._getframe(1))
            self._learned["cells"] = C.quietly(notebook_cells) or {}
            return self._finish()
        finally:  # also after Ctrl-C while it waited
            self.abandon()

    def abandon(self) -> None:
        """Ends the recording without a Trace. A file stays as far as it was written."""
        self._native.end()
        HOOKS.tidy()

    def end_at_exit(self) -> None:
        """Ends the recording as the interpreter exits. Only a file is completed."""
        if self.options.path is not None:
            self.stop(wait=False)
        self.abandon()

    def peek(self) -> Trace:
        """Returns the Trace so far. The recording goes on."""
        if self.options.path is not None:
            raise errors.CaptureError(
                f"this trace is being written to {self.options.path}: load() that file to see the "
                "events so far"
            )
        self._look_once_more()
        self.phases.look()
        return self._trace(self._native.read())

    # ---------------------------------------------------------------- parts

    def _look_once_more(self) -> None:
        """Reads and labels what the end of a trace needs, at the end or for a look before it."""
        self.count_and_read_memory()
        self.memory.end()
        self._counters["end"] = self._allocator_counters()
        labels = HOOKS.labels
        C.quietly(labels.label_everything)
        self._learned |= {
            "ddp_buckets": C.quietly(labels.learn_buckets) or [],
            "ddp_hooked": sorted(labels.hooked_buckets),
            "roots": labels.root_names,
            "frozen_modules": C.quietly(labels.frozen_modules) or [],
            "unstepped": C.quietly(labels.unstepped) or [],
            "left_behind": C.quietly(labels.left_behind) or [],
            "renamed": labels.renamed,
            "compiled": C.quietly(self._compiled_places) or [],
        }
        self._learn_about_job()

    def _compiled_places(self) -> list[dict[str, Any]]:
        labels = HOOKS.labels
        roots = roots_of({"roots": labels.root_names})
        return compiled.places(labels.named_modules(), roots, stacks=self.options.stacks)

    def _learn_about_job(self) -> None:
        """Reads how the job's ranks share the model, and what they told each other."""
        self._learn_rank()
        if self._world_size > 1:
            began_unix_ns = self._clock[0][1]
            self._learned |= {
                "sharding": C.quietly(HOOKS.labels.sharding) or {},
                "communication": C.quietly(communication.document, began_unix_ns) or {},
                "clock_readings": self.clocks.readings,
            }

    def _note_progress(self) -> None:
        """Writes what is known so far into the file: a killed process leaves it."""
        self._learned["roots"] = HOOKS.labels.root_names
        self._learn_about_job()
        self._native.note(self._meta())

    def _learn_rank(self) -> None:
        """Asks torch, because a program may spawn its ranks without a launcher's environment."""
        told = C.quietly(environment.place_in_group)
        if told is not None:
            self._rank, self._world_size = told

    def _allocator_counters(self) -> dict[str, Any]:
        """Returns the allocators' own counters, to compare the trace with."""
        return _counted_by_cuda() if "cuda" in self.options.devices else {}

    def _max_events(self) -> int:
        if self.options.max_events is not None:
            return self.options.max_events
        return 2**32 if self.options.path else DEFAULT_MAX_EVENTS

    def _refuse_file(self) -> None:
        """Checks that the file holds nothing. An empty one is a name that was reserved."""
        path = Path(self.options.path or "")
        if self.options.path is not None and os.path.lexists(path) and not _is_empty(path):
            raise errors.CannotWrite(
                f"{self.options.path} exists, and path= replaces no file: delete it, or name another"
            )

    def _open_file(self) -> None:
        if self.options.path is not None:
            try:
                # Anonymous from the first write: a killed process cannot rewrite its file.
                root = environment.working_directory() if self.options.anonymous else None
                self._native.stream_to(os.fsencode(self.options.path), self._meta(), root)
            except core.FileError as error:
                raise errors.CannotWrite(str(error)) from None

    def _learn(self, *, cuda: bool) -> None:
        """Learns what exists as the recording begins: models, optimizers, memory."""
        labels, targets = HOOKS.labels, self._targets.alive()
        for target in targets:
            if is_a(target, torch.nn.Module):
                C.quietly(labels.add_root, target)
        for target in targets:
            if not is_a(target, torch.nn.Module):
                C.quietly(labels.add_optimizer, target)
        if cuda:
            C.seed_device()
        C.quietly(labels.session_begins)
        if cuda and torch.cuda.is_initialized():
            C.quietly(labels.label_from_before)

    def _finish(self) -> Trace:
        path = self.options.path
        if path is None:
            return self._trace(self._native.end_and_read())
        self._clock.append(C.read_clock())
        problem = ""
        try:
            self._native.end_and_write(self._meta())
        except core.FileError as error:  # such as a full disk; earlier rows are in the file
            problem = str(error)
        try:
            columns, report = core.read_file(os.fsencode(path), core.NO_LIMIT)
        except core.FileError as error:
            raise errors.CannotWrite(problem or str(error)) from None
        if problem:
            errors.warn(problem)
        return Trace.from_columns(columns, report)

    def _trace(self, columns: dict[str, Any]) -> Trace:
        clock = [*self._clock, C.read_clock()]
        columns["clock.ticks"] = [ticks for ticks, _ in clock]
        columns["clock.unix_ns"] = [unix_ns for _, unix_ns in clock]
        columns["meta"] = self._meta()
        recorded = Trace.from_columns(columns)
        return anonymous.of(recorded) if self.options.anonymous else recorded

    def _meta(self) -> str:
        whole = self._whole_meta()
        if self.options.anonymous and self.options.path is not None:
            whole = anonymous.meta(whole, str(whole["directory"]))
        return json.dumps(whole)

    def _whole_meta(self) -> dict[str, Any]:
        own_time = self._own_time or self._native.own_time()
        return {
            **self.notes,
            "pytracer": __version__,
            "torch": str(torch.__version__),
            "torch_git": facts.get("torch_git"),
            "python": platform.python_version(),
            "host": platform.node(),
            "pid": self._pid,
            "rank": self._rank,
            "world_size": self._world_size,
            "command": Path(sys.argv[0]).name if sys.argv else "",
            "directory": environment.working_directory(),
            "torch_folder": str(Path(torch.__file__).parent),
            "options": asdict(self.options),
            "thread_names": True,  # the file names the autograd engine's own threads
            "module_modes": True,  # module scopes record whether grad mode and autocast were on
            "targets": self._targets.kinds,
            "allocator_settings": allocator_settings(),
            "counters": self._counters,
            **self._learned,
            "device_memory": self.memory.document(),
            "phase_times": self.phases.document(),
            "cuda_problem": self._problem_with_cuda(),
            "calls_problem": C.status()["calls_problem"],
            "failed": self.failed,
            "callback_errors": C.status()["callback_errors"] - self._before["callback_errors"],
            "own_time": dict(zip(_OWN_TIME, own_time, strict=True)),
        }

    def _problem_with_cuda(self) -> str:
        if "cuda" not in self.options.devices:
            return ""
        return str(self._cuda_problem or C.status()["device_problem"])


# The imagined run that is going on, if any. Traces inside of it are parts of its recording.
imagined: list[Session] = []


class Inner:
    """The session of a trace inside an imagined run: its trace is the run's, as far as it has come."""

    def __init__(self, options: Options, outer: Session) -> None:
        """Records nothing by itself."""
        self.options, self._outer = options, outer
        self.failed = self.running = False
        self.notes: dict[str, Any] = {}

    def start(self) -> None:
        """Begins to count as running."""
        self.running = True

    def mark_step(self) -> None:
        """Marks the end of a step in the run's recording."""
        self._outer.mark_step()

    def stop(self, *, wait: bool = True, variables: bool = True) -> Trace | None:
        """Returns the run's trace, and writes the file that was asked for."""
        self.running = False
        trace = self._outer.peek()
        if self.options.path is not None:
            trace.save(self.options.path)
        return trace

    def peek(self) -> Trace:
        """Returns the run's trace so far."""
        return self._outer.peek()


def _is_empty(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == 0


def allocator_settings() -> str:
    """Returns the environment's settings for CUDA's allocator. The older variable wins."""
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF", "")


def _why_no_cuda_events() -> str:
    if not C.has_device_tracker():
        return no_tracker
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        return (
            f"the CUDA allocator is {backend}, which reports no events; "
            "unset backend: in PYTORCH_ALLOC_CONF to see each allocation"
        )
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return "PYTORCH_NO_CUDA_MEMORY_CACHING is set: uncached allocations report no events"
    return ""


def _counted_by_cuda() -> dict[str, Any]:
    if not torch.cuda.is_initialized():
        return {}
    wanted = ("allocated_bytes", "requested_bytes", "active_bytes", "reserved_bytes")
    counters = {}
    for index in range(torch.cuda.device_count()):
        before = C.read_clock()[0]
        stats = torch.cuda.memory_stats(index)
        counters[f"cuda:{index}"] = {
            f"{name}.{which}": stats.get(f"{name}.all.{which}", 0)
            for name in wanted
            for which in ("current", "peak")
        }
        # Another thread may free blocks meanwhile and afterwards: the engine's, for example.
        counters[f"cuda:{index}"] |= {"ticks.before": before, "ticks.after": C.read_clock()[0]}
        total = torch.cuda.get_device_properties(index).total_memory
        allowed = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(index)
        counters[f"cuda:{index}"]["limit_bytes"] = int(total * allowed)
    return counters
