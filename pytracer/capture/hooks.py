"""Everything of torch's that is hooked while something records, put in place and taken back.

One set of hooks serves all sessions of the process: it is what the most demanding one asks for,
and it is gone when the last one ends.
"""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from pytracer import errors
from pytracer._native import C
from pytracer.capture.dynamo import Shelter
from pytracer.capture.graph import GraphWalks, in_transform
from pytracer.capture.labels import Labels
from pytracer.capture.phase_times import PhaseTimes

R = TypeVar("R")

_OPTIMIZER_FILE = Optimizer.profile_hook_step.__code__.co_filename


@dataclass(frozen=True)
class Wants:
    """What a session needs hooked."""

    ops: bool = False
    cpu: bool = False
    cuda: bool = False
    stacks: bool = False
    saved_tensors: bool = False

    def __or__(self, other: "Wants") -> "Wants":
        """What both need."""
        return Wants(**{name: getattr(self, name) or getattr(other, name) for name in vars(self)})


class Hooks:
    """The process's hooks. Use the one instance, `HOOKS`."""

    def __init__(self) -> None:
        """Nothing is hooked."""
        self._lock = threading.RLock()
        self._wanted: dict[int, Wants] = {}
        self._installed: Wants | None = None
        self.labels = Labels()
        self.walks = GraphWalks()
        self.step_listeners: list[Callable[[], None]] = []
        self.root_listeners: list[Callable[[], None]] = []
        self.phase_times: list[PhaseTimes] = []
        self._python = _PythonHooks(self)
        self._saved = _SavedTensorHooks()
        self._cuda = _Cuda()

    def add(self, session: int, wants: Wants) -> None:
        """Hooks what the session needs; on failure nothing is left hooked for it."""
        with self._lock:
            self._wanted[session] = wants
            try:
                self._apply()
            except BaseException:
                self.remove(session)
                raise

    def remove(self, session: int) -> None:
        """Unhooks what no other session needs."""
        with self._lock:
            self._wanted.pop(session, None)
            self._apply()

    def _apply(self) -> None:
        wants: Wants | None = None
        for wanted in self._wanted.values():
            wants = wanted if wants is None else wants | wanted
        before, self._installed = self._installed, wants
        if wants == before:
            return
        if wants is None:
            self._uninstall_all()
            return
        C.install_ops(C.Detail.op if wants.ops else C.Detail.category)
        (C.install_stacks if wants.stacks else C.uninstall_stacks)()
        if wants.cpu:
            problem = C.install_cpu()
            if problem:
                raise errors.CaptureError(f"CPU memory cannot be traced: {problem}")
        else:
            C.uninstall_cpu()
        if wants.cuda:
            self._cuda.attach_when_ready()
        else:
            self._cuda.stop_waiting()
        self._saved.switch(on=wants.saved_tensors)
        self._python.install()

    def _uninstall_all(self) -> None:
        self._python.uninstall()
        self._saved.switch(on=False)
        self._cuda.stop_waiting()
        C.uninstall_stacks()
        C.uninstall_cpu()
        C.uninstall_ops()
        self.labels = Labels()
        self.walks = GraphWalks()

    def before_backward(self, outputs: Any) -> None:
        """Where each save is seen as it happens, by hooks, the graph need not be read."""
        try:
            if self._installed is not None:
                by_hooks = self._installed.saved_tensors
                if not by_hooks or in_transform():
                    self.walks.before_backward(outputs, must=by_hooks)
        finally:  # where the pass begins: not before the graph has been read
            for times in self.phase_times:
                times.backward_begins(outputs)

    def after_backward(self) -> None:
        """An outermost backward pass has ended."""
        for times in self.phase_times:
            times.backward_ends()
        self.labels.after_backward()

    def cuda_problem(self) -> str:
        """Why CUDA memory is not recorded event by event, or nothing."""
        return self._cuda.problem

    def seed_cuda(self) -> None:
        """Writes down what the device holds, when it is up already."""
        self._cuda.seed_if_ready()

    def after_fork_in_child(self) -> None:
        """The child records nothing: it inherited hooks, and gets rid of them."""
        self._lock = threading.RLock()
        if self._installed is not None:
            self._wanted.clear()
            self._installed = None
            self._uninstall_all()
        self.step_listeners.clear()
        self.root_listeners.clear()
        self.phase_times.clear()


class _StandIn:
    """A callable of ours in the place of one of torch's."""

    def __init__(self, holder: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._holder, self._name, self._make = holder, name, make
        self._original: Any = None
        self._ours: Any = None

    def put_in_place(self) -> None:
        if self._ours is None:
            self._original = vars(self._holder)[self._name]
            self._ours = self._make(self._original)
            setattr(self._holder, self._name, self._ours)

    def take_away(self) -> None:
        # Somebody may have wrapped ours meanwhile; then theirs stays, and ours passes through.
        if self._ours is not None and vars(self._holder)[self._name] is self._ours:
            setattr(self._holder, self._name, self._original)
        self._ours = None


class _PythonHooks:
    """torch's Python functions: module calls, the engine, optimizers."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._shelter = Shelter(self._take_away, self._put_in_place)
        self._installed = False
        self._stand_ins = (
            _StandIn(torch.nn.Module, "__call__", C.make_module_call),
            _StandIn(torch.autograd, "_engine_run_backward", C.make_engine_call),
            _StandIn(Optimizer, "_optimizer_step_code", C.make_step_code_call),
        )

    def install(self) -> None:
        if self._installed:
            return
        self._installed = True
        C.set_callbacks(
            lambda module: self._hooks.labels.name_of_module(module),
            self._before_root,
            self._after_root,
            self._hooks.before_backward,
            self._hooks.after_backward,
            self._before_step,
            self._after_step,
        )
        self._put_in_place()
        self._shelter.install()

    def uninstall(self) -> None:
        if not self._installed:
            return
        self._installed = False
        self._shelter.uninstall()
        self._take_away()
        C.set_callbacks()

    def _put_in_place(self) -> None:
        if self._installed:
            for stand_in in self._stand_ins:
                stand_in.put_in_place()

    def _take_away(self) -> None:
        for stand_in in self._stand_ins:
            stand_in.take_away()

    def _before_root(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        for listener in tuple(self._hooks.root_listeners):
            listener()
        self._hooks.labels.before_root(module, args, kwargs)
        for times in self._hooks.phase_times:
            times.root_entered(module)

    def _after_root(self) -> None:
        for times in self._hooks.phase_times:
            times.root_left()

    def _before_step(self) -> None:
        optimizer = _stepping_optimizer(sys._getframe())
        if optimizer is not None:
            self._hooks.labels.before_optimizer(optimizer)
        for times in self._hooks.phase_times:
            times.step_begins()

    def _after_step(self, optimizer: Any) -> None:
        for times in self._hooks.phase_times:
            quietly(times.step_ends)
        quietly(self._hooks.labels.after_optimizer, optimizer)
        self._hooks.walks.stepped()
        for listener in tuple(self._hooks.step_listeners):
            listener()


def _stepping_optimizer(frame: FrameType | None) -> Optimizer | None:
    """Whose step has just been entered. Torch's wrapper around it is a few frames further up."""
    for _ in range(12):
        if frame is None:
            return None
        if frame.f_code.co_name == "wrapper" and frame.f_code.co_filename == _OPTIMIZER_FILE:
            optimizer = frame.f_locals.get("self")
            return optimizer if isinstance(optimizer, Optimizer) else None
        frame = frame.f_back
    return None


def quietly(label: Callable[..., R], *arguments: Any) -> R | None:
    """What goes wrong in our own bookkeeping is counted and not the program's to see."""
    try:
        return label(*arguments)
    except Exception:
        C.count_callback_error()
        return None


class _SavedTensorHooks:
    """Our default saved-tensor hooks on the thread that traces, out of torch's way where it asks.

    torch.func refuses to run while hooks are active. It announces itself by disabling them, so
    that is where ours step aside. Where the program has hooks of its own, only those count.
    """

    def __init__(self) -> None:
        self._hooks: tuple[Any, Any] | None = None  # ours, while they are on the stack
        self._thread = 0  # the stack is this thread's
        self._originals: tuple[Any, Any] | None = None

    def switch(self, *, on: bool) -> None:
        if on == (self._originals is not None):
            return
        autograd = torch._C._autograd
        if on:
            self._originals = (
                autograd._saved_tensors_hooks_disable,
                autograd._saved_tensors_hooks_enable,
            )
            autograd._saved_tensors_hooks_disable = self._disable
            autograd._saved_tensors_hooks_enable = self._enable
            self._thread = threading.get_ident()
            self._push()
        else:
            self._pop()
            assert self._originals is not None
            (
                autograd._saved_tensors_hooks_disable,
                autograd._saved_tensors_hooks_enable,
            ) = self._originals
            self._originals = None

    def _push(self) -> None:
        autograd: Any = torch._C._autograd
        if autograd._saved_tensors_hooks_is_enabled() and _top_hooks() is None:
            self._hooks = C.saved_tensor_hooks()
            autograd._push_saved_tensors_default_hooks(*self._hooks)

    def _pop(self) -> None:
        """Takes ours from the stack, also from under hooks that the program has yet to pop."""
        if self._hooks is None or threading.get_ident() != self._thread:
            return
        autograd = torch._C._autograd
        above = []
        while (top := _top_hooks()) is not None:
            autograd._pop_saved_tensors_default_hooks()
            if top[0] is self._hooks[0]:
                break
            above.append(top)
        for hooks in reversed(above):
            autograd._push_saved_tensors_default_hooks(*hooks)
        self._hooks = None

    def _disable(self, *args: Any, **kwargs: Any) -> Any:
        assert self._originals is not None
        top = _top_hooks()
        ours_on_top = top is not None and self._hooks is not None and top[0] is self._hooks[0]
        if ours_on_top:
            self._pop()
        try:
            return self._originals[0](*args, **kwargs)
        except BaseException:
            if ours_on_top:
                self._push()
            raise

    def _enable(self, *args: Any, **kwargs: Any) -> Any:
        assert self._originals is not None
        result = self._originals[1](*args, **kwargs)
        if self._hooks is None and threading.get_ident() == self._thread:
            self._push()
        return result


def _top_hooks() -> tuple[Any, Any] | None:
    """The calling thread's active pair, if it has one."""
    top: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top


class _Cuda:
    """Attaches to CUDA's allocator when CUDA comes up; never brings it up."""

    def __init__(self) -> None:
        self._attached = False
        self._waiting = False
        self.problem = ""

    def attach_when_ready(self) -> None:
        self.problem = self._why_not()
        if self.problem or self._attached:
            return
        if torch.cuda.is_initialized() and C.device_ready():
            self._attach()
        elif not self._waiting:
            self._waiting = True
            torch.cuda._lazy_call(self._came_up)

    def stop_waiting(self) -> None:
        self._waiting = False
        queue = torch.cuda._queued_calls
        queue[:] = [entry for entry in queue if entry[0] != self._came_up]

    def seed_if_ready(self) -> None:
        if self._attached:
            C.seed_device()

    def _came_up(self) -> None:
        # An exception here would reach the user as CUDA's.
        if self._waiting:
            self._waiting = False
            self._attach()
            self.seed_if_ready()

    def _attach(self) -> None:
        problem = C.attach_device()
        self.problem = problem
        self._attached = not problem

    def _why_not(self) -> str:
        if not C.has_device_tracker():
            return "this build of pytracer has no CUDA tracker; rebuild it beside a CUDA torch"
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            return (
                f"the CUDA allocator is {backend}, which reports no events; "
                "unset backend: in PYTORCH_ALLOC_CONF to see each allocation"
            )
        if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
            return "PYTORCH_NO_CUDA_MEMORY_CACHING is set: uncached allocations report no events"
        return ""


HOOKS = Hooks()
if sys.platform != "win32":
    os.register_at_fork(after_in_child=lambda: HOOKS.after_fork_in_child())

__all__ = ["HOOKS", "Hooks", "Wants"]
