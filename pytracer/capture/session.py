"""A session: one stretch of recording, from start to the Trace it leaves."""

import json
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from pytracer import environment, errors
from pytracer._native import C, facts
from pytracer.capture.device_memory import DeviceMemory
from pytracer.capture.hooks import HOOKS, Wants, quietly
from pytracer.capture.phase_times import CudaEvents, PhaseTimes
from pytracer.capture.variables import variables_of
from pytracer.trace import Trace
from pytracer.version import __version__

# 640 MB of host memory; with `path` the log is written away and this bounds nothing.
DEFAULT_MAX_EVENTS = 20_000_000
_MOST_EVENTS = 2**63 - 1  # that anything can count

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

    def __post_init__(self) -> None:
        """Refuses what is not understood, before anything is hooked."""
        _check("detail", self.detail, DETAILS)
        _check("saved_tensors", self.saved_tensors, SAVED_TENSORS)
        for device in self.devices:
            _check("devices", device, ("cpu", "cuda"))
        _check_max_events(self.max_events)
        if self.stacks and self.detail != "op":
            raise errors.UsageError(
                'stacks=True needs detail="op": lines are taken as operators end'
            )

    def wants(self) -> Wants:
        """What has to be hooked for this."""
        return Wants(
            ops=self.detail == "op",
            cpu="cpu" in self.devices,
            cuda="cuda" in self.devices,
            stacks=self.stacks,
            saved_tensors=self.saved_tensors == "hooks",
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
    """CUDA where there is one, unless what is traced is on the CPU; else the CPU."""
    found = {
        parameter.device.type
        for target in targets
        if isinstance(target, torch.nn.Module)
        for parameter in target.parameters()
    }
    found &= {"cpu", "cuda"}
    if found:
        return tuple(sorted(found))
    return ("cuda",) if torch.cuda.is_available() else ("cpu",)


@dataclass
class Session:
    """Starts recording, and turns what was recorded into a Trace."""

    options: Options
    targets: tuple[Any, ...] = ()
    failed: bool = False  # an allocation failed, and the block was left because of it
    notes: dict[str, Any] = field(default_factory=dict)  # what else belongs into the trace's meta
    _id: int = 0
    _pid: int = 0
    _streamer: Any = None
    _clock: list[tuple[int, int]] = field(default_factory=list)
    _counters: dict[str, Any] = field(default_factory=dict)
    _variables: list[dict[str, Any]] = field(default_factory=list)
    _ddp_buckets: list[int] = field(default_factory=list)
    _frozen: list[str] = field(default_factory=list)
    _renamed: dict[str, str] = field(default_factory=dict)
    _before: dict[str, Any] = field(default_factory=dict)
    _memory: DeviceMemory = field(init=False)
    _phases: PhaseTimes = field(init=False)

    @property
    def running(self) -> bool:
        """Started, not stopped, and in the process that started it."""
        return self._id != 0 and self._pid == os.getpid()

    def start(self) -> None:
        """Hooks what is needed and records from here on."""
        self._pid = os.getpid()
        self._memory = DeviceMemory(cuda="cuda" in self.options.devices)
        self._memory.begin()
        self._phases = PhaseTimes(CudaEvents() if "cuda" in self.options.devices else None)
        self._before = C.status()
        self._clock = [C.read_clock()]
        self._id = C.begin_session(self._max_events())
        try:
            self._open_file()
            HOOKS.add(self._id, self.options.wants())
            self._learn_targets()
            if "cuda" in self.options.devices:
                HOOKS.seed_cuda()
            HOOKS.labels.session_begins()
            if "cuda" in self.options.devices and torch.cuda.is_initialized():
                HOOKS.labels.label_from_before()
            self._counters["begin"] = _allocator_counters(self.options.devices)
        except BaseException:
            self._abandon()
            raise
        HOOKS.step_listeners.append(self._memory.stepped)
        HOOKS.root_listeners.append(self._memory.called)
        HOOKS.phase_times.append(self._phases)

    def mark_step(self) -> None:
        """The user says that a step ends here."""
        C.mark_step("step")
        self._memory.stepped()

    def stop(self, *, wait: bool = True) -> Trace | None:
        """Ends the recording. None in a forked child, which recorded nothing.

        `wait`: until a GPU has come as far as the program, so that its last phases have times.
        """
        if not self.running:
            self._forget_in_child()
            return None
        try:
            self._phases.finish(wait=wait and not self.failed)
            self._look_once_more()
            self._variables = variables_of(sys._getframe(1))
        except BaseException:  # Ctrl-C, while it waited
            self._stop_listening()
            self._abandon()
            raise
        self._stop_listening()
        session, self._id = self._id, 0
        HOOKS.remove(session)
        try:
            return self._finish(session)
        finally:
            self._streamer = None
            C.clear()

    def peek(self) -> Trace:
        """What is there so far; the recording goes on."""
        if self._streamer is not None:
            raise errors.CaptureError(
                f"this trace is being written to {self.options.path}: load() that file to see "
                "what is there so far"
            )
        self._look_once_more()
        self._phases.look()
        return self._trace(C.read_session(self._id))

    # ---------------------------------------------------------------- parts

    def _look_once_more(self) -> None:
        """What is read and labelled at the end, or when somebody looks: the end so far."""
        self._memory.end()
        self._counters["end"] = _allocator_counters(self.options.devices)
        quietly(HOOKS.labels.label_everything)
        self._ddp_buckets = quietly(HOOKS.labels.bucket_sizes) or []
        self._frozen = quietly(HOOKS.labels.frozen_modules) or []
        self._renamed = HOOKS.labels.renamed

    def _stop_listening(self) -> None:
        if self._memory.stepped in HOOKS.step_listeners:
            HOOKS.step_listeners.remove(self._memory.stepped)
            HOOKS.root_listeners.remove(self._memory.called)
            HOOKS.phase_times.remove(self._phases)

    def _max_events(self) -> int:
        if self.options.max_events is not None:
            return self.options.max_events
        return 2**32 if self.options.path else DEFAULT_MAX_EVENTS

    def _open_file(self) -> None:
        if self.options.path is None:
            return
        if Path(self.options.path).exists():
            raise errors.CannotWrite(
                f"{self.options.path} exists, and path= replaces no file: delete it, or name another"
            )
        try:
            self._streamer = C.Streamer(
                self._id, os.fsencode(self.options.path), False, self._meta()
            )
        except C.FileError as error:
            raise errors.CannotWrite(str(error)) from None

    def _learn_targets(self) -> None:
        labels = HOOKS.labels
        for target in self.targets:
            if isinstance(target, torch.nn.Module):
                labels.add_root(target)
        for target in self.targets:
            if not isinstance(target, torch.nn.Module):
                labels.add_optimizer(target)

    def _finish(self, session: int) -> Trace:
        if self._streamer is None:
            return self._trace(C.end_and_read_session(session))
        C.end_session(session)
        self._clock.append(C.read_clock())
        problem = ""
        try:
            self._streamer.finish(self._meta())
        except C.FileError as error:  # a full disk: what came before it is there
            problem = str(error)
        try:
            columns, report = C.read_file(os.fsencode(str(self.options.path)))
        except C.FileError as error:
            raise errors.CannotWrite(problem or str(error)) from None
        if problem:
            errors.warn(problem)
        return Trace.from_columns(columns, report)

    def _trace(self, columns: dict[str, Any]) -> Trace:
        clock = [*self._clock, C.read_clock()]
        columns["clock.ticks"] = [ticks for ticks, _ in clock]
        columns["clock.unix_ns"] = [unix_ns for _, unix_ns in clock]
        columns["meta"] = self._meta()
        return Trace.from_columns(columns)

    def _meta(self) -> str:
        return json.dumps(
            {
                **self.notes,
                "pytracer": __version__,
                "torch": str(torch.__version__),
                "torch_git": facts.get("torch_git"),
                "python": platform.python_version(),
                "host": platform.node(),
                "pid": self._pid,
                "rank": environment.rank(),
                "world_size": environment.world_size(),
                "command": Path(sys.argv[0]).name if sys.argv else "",
                "directory": environment.working_directory(),
                "torch_folder": str(Path(torch.__file__).parent),
                "options": asdict(self.options),
                "targets": [type(target).__name__ for target in self.targets],
                "allocator_settings": allocator_settings(),
                "counters": self._counters,
                "ddp_buckets": self._ddp_buckets,
                "frozen_modules": self._frozen,
                "renamed": self._renamed,
                "device_memory": self._memory.document(),
                "phase_times": self._phases.document(),
                "cuda_problem": HOOKS.cuda_problem() if "cuda" in self.options.devices else "",
                "variables": self._variables,
                "failed": self.failed,
                "callback_errors": C.status()["callback_errors"] - self._before["callback_errors"],
                "own_ticks": C.status()["own_ticks"] - self._before["own_ticks"],
            }
        )

    def _abandon(self) -> None:
        """Starting failed, or ending was interrupted: as if it had never been tried."""
        session, self._id = self._id, 0
        HOOKS.remove(session)
        C.end_session(session)
        self._streamer = None
        C.clear()

    def _forget_in_child(self) -> None:
        self._streamer = None  # which in a child ends nothing: the file is its parent's


def allocator_settings() -> str:
    """What the environment asks of CUDA's allocator; of two names the older one counts."""
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF", "")


def _allocator_counters(devices: tuple[str, ...]) -> dict[str, Any]:
    """What the allocators themselves count, to hold the trace against."""
    if "cuda" not in devices or not torch.cuda.is_initialized():
        return {}
    wanted = ("allocated_bytes", "requested_bytes", "active_bytes", "reserved_bytes")
    counters = {}
    for index in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats(index)
        counters[f"cuda:{index}"] = {
            f"{name}.{which}": stats.get(f"{name}.all.{which}", 0)
            for name in wanted
            for which in ("current", "peak")
        }
        total = torch.cuda.get_device_properties(index).total_memory
        allowed = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(index)
        counters[f"cuda:{index}"]["limit_bytes"] = int(total * allowed)
    return counters
