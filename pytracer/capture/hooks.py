"""What Python of ours is told while something records.

The hooks themselves are in `csrc/torch` (see `session.h`): they are put in place and taken away by
one call each. They tell the one instance here, `HOOKS`, which keeps what a recording knows.
"""

import atexit
import os
import sys
import warnings
from typing import Any, Protocol

import torch

from pytracer._native import C
from pytracer.capture.device_memory import DeviceMemory
from pytracer.capture.graph import GraphWalks, in_transform
from pytracer.capture.labels import Labels
from pytracer.capture.phase_times import PhaseTimes


class Listening(Protocol):
    """What is asked of a session that records."""

    by_hooks: bool  # each save is seen as it happens
    memory: DeviceMemory
    phases: PhaseTimes

    @property
    def running(self) -> bool:
        """Whether it still does."""

    def end_at_exit(self) -> None:
        """Ends it, for the interpreter goes away."""


class Hooks:
    """What the process's recording knows, and who listens. Use the one instance, `HOOKS`."""

    def __init__(self) -> None:
        """Nothing is known."""
        self.labels = Labels()
        self.walks = GraphWalks()
        # Kept while they record: a program may enter a trace and hold it nowhere.
        self._sessions: list[Listening] = []
        self._awaits_exit = False

    # ---------------------------------------------------------------- sessions

    def session_begins(self, session: Listening) -> None:
        """It is about to record. The first one knows nothing of earlier ones."""
        self.tidy()
        self.await_exit()
        self._sessions.append(session)

    def await_exit(self) -> None:
        """What is registered with atexit after this is called before sessions are ended."""
        if not self._awaits_exit:
            self._awaits_exit = True
            atexit.register(self._end_all)

    def tidy(self) -> None:
        """Forgets sessions that are over; with the last one, all that was known."""
        self._sessions = self.sessions()
        if not self._sessions:
            self.labels = Labels()
            self.walks = GraphWalks()

    def sessions(self) -> list[Listening]:
        """Those that record."""
        return [session for session in self._sessions if session.running]

    def _end_all(self) -> None:
        """The interpreter ends: files become whole, and nobody is told of anything."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for session in self.sessions():
                C.quietly(session.end_at_exit)
        self.tidy()

    # ---------------------------------------------------------------- what C tells

    def name_of_module(self, module: torch.nn.Module) -> str:
        """Asked once per module."""
        return self.labels.name_of_module(module)

    def before_root(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """An outermost module is entered."""
        sessions = self.sessions()
        for session in sessions:
            session.memory.called()
        self.labels.before_root(module, args, kwargs)
        for session in sessions:
            session.phases.root_entered(module)

    def after_root(self) -> None:
        """It has been left without an exception."""
        for session in self.sessions():
            session.phases.root_left()

    def before_backward(self, outputs: Any, structure: int, must: bool) -> None:
        """Where each save is seen as it happens, by hooks, the graph need not be read."""
        sessions = self.sessions()
        by_hooks = any(session.by_hooks for session in sessions)
        try:
            if not by_hooks or in_transform():
                self.walks.before_backward(outputs, structure, must=must or by_hooks)
        finally:  # where the pass begins: not before the graph has been read
            for session in sessions:
                session.phases.backward_begins(outputs)

    def after_backward(self) -> None:
        """An outermost backward pass has ended without an exception."""
        for session in self.sessions():
            session.phases.backward_ends()
        self.labels.after_backward()

    def before_step(self, optimizer: Any) -> None:
        """An optimizer's step begins; None where it is not known whose."""
        if optimizer is not None:
            self.labels.before_optimizer(optimizer)
        for session in self.sessions():
            session.phases.step_begins()

    def after_step(self, optimizer: Any) -> None:
        """It has ended without an exception."""
        sessions = self.sessions()
        for session in sessions:
            session.phases.step_ends()
        if optimizer is not None:
            self.labels.after_optimizer(optimizer)
        self.walks.stepped()
        for session in sessions:
            session.memory.stepped()

    # ---------------------------------------------------------------- forks

    def after_fork_in_child(self) -> None:
        """The child records nothing: it inherited hooks, and gets rid of them."""
        C.after_fork_in_child()
        self._sessions.clear()
        self.tidy()


HOOKS = Hooks()
C.set_listeners(
    name_of_module=HOOKS.name_of_module,
    before_root=HOOKS.before_root,
    after_root=HOOKS.after_root,
    before_backward=HOOKS.before_backward,
    after_backward=HOOKS.after_backward,
    before_step=HOOKS.before_step,
    after_step=HOOKS.after_step,
    sessions_over=HOOKS.tidy,
)
if sys.platform != "win32":
    os.register_at_fork(after_in_child=HOOKS.after_fork_in_child)

__all__ = ["HOOKS", "Hooks"]
