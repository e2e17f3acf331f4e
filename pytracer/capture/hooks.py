"""The Python side of the hooks: the methods that C++ calls while a session records.

The hooks are in `csrc/torch` (see `session.h` and `moments.h`). One call installs them, one removes
them, and they look at the program by themselves. When they meet something new, they call a method
of the one instance here, `HOOKS`. It keeps the labels of the recording.
"""

import atexit
import os
import sys
from typing import Any, Protocol

import torch

from pytracer import errors
from pytracer.capture import compiled
from pytracer.capture.graph import in_transform, saved_tensors
from pytracer.capture.labels import Labels, cache_positions, tensors_of_caches
from pytracer.data._native import C


class Listening(Protocol):
    """A session, as the hooks see it."""

    @property
    def running(self) -> bool:
        """Whether the session still records."""

    def count_and_read_memory(self) -> None:
        """Counts calls of the model and optimizer steps, and reads the device if that is due."""

    def note_models(self) -> None:
        """Writes that there are several models into the file, because paths then need a class."""

    def end_at_exit(self) -> None:
        """Ends the session, because the interpreter exits."""


class Hooks:
    """The sessions of this process and their labels. Use the one instance, `HOOKS`."""

    def __init__(self) -> None:
        """Starts without sessions and labels."""
        self._forget()
        # Holds running sessions: a program may enter a trace without keeping a reference to it.
        self._sessions: list[Listening] = []
        self._awaits_exit = False

    # ---------------------------------------------------------------- sessions

    def session_begins(self, session: Listening) -> None:
        """Adds a session that is about to record. If no other runs, the labels start anew."""
        self.tidy()
        self.await_exit()
        self._sessions.append(session)

    def await_exit(self) -> None:
        """Registers the end of all sessions with atexit; later registrations run before it."""
        if not self._awaits_exit:
            self._awaits_exit = True
            atexit.register(self._end_all)

    def tidy(self) -> None:
        """Forgets sessions that are over, and after the last one also the labels."""
        self._sessions = self.sessions()
        if not self._sessions:
            self._forget()

    def _forget(self) -> None:
        self.labels = Labels()
        C.use_moments(self.labels.moments)

    def sessions(self) -> list[Listening]:
        """Returns the sessions that record."""
        return [session for session in self._sessions if session.running]

    def _end_all(self) -> None:
        """Ends all sessions as the interpreter exits: completes their files, without warnings."""
        with errors.collected_warnings():
            for session in self.sessions():
                C.quietly(session.end_at_exit)
        self.tidy()

    # ---------------------------------------------------------------- called from C++

    def name_of_module(self, module: torch.nn.Module) -> str:
        """Returns the module's path in the user's model. Called once per module."""
        models = self.labels.model_count
        name = self.labels.name_of_module(module)
        if self.labels.model_count > max(models, 1):
            for session in self.sessions():
                C.quietly(session.note_models)
        return name

    def look_again(self) -> None:
        """Learns names again: a parameter was replaced or removed."""
        self.labels.look_again()

    def note_attributes(self, module: torch.nn.Module) -> None:
        """Labels plain tensors in attributes of an outermost module, which is being entered."""
        self.labels.note_attributes(module)

    def cache_positions(self, module: torch.nn.Module) -> tuple[int, ...]:
        """Returns which of the module's arguments are caches. Called once per class."""
        return cache_positions(module)

    def tensors_of_caches(self, caches: list[Any]) -> list[torch.Tensor]:
        """Returns the tensors of the caches that an outermost module gets as arguments."""
        return tensors_of_caches(caches)

    def read_graph(self, outputs: Any) -> None:
        """Records what the graph behind the outputs has saved, as a backward pass begins."""
        C.record_saved(list(saved_tensors(outputs)))

    def read_graph_of_func(self, outputs: Any) -> None:
        """Like `read_graph`, if a transform of torch.func is active: hooks miss its saves."""
        if in_transform():
            self.read_graph(outputs)

    def note_variables(self) -> None:
        """Labels what the program could let go of, as a backward pass begins."""
        self.labels.note_spare(sys._getframe(1))

    def label_engines(self) -> None:
        """Labels the tensors of DeepSpeed's engines, which keep parameters to themselves."""
        self.labels.label_engines()

    def meet_optimizer(self, optimizer: Any) -> None:
        """Learns an optimizer that is new, or whose groups have grown, as its step begins."""
        self.labels.meet_optimizer(optimizer)

    def label_state(self, optimizer: Any) -> None:
        """Labels the state of an optimizer, some of which is new."""
        self.labels.label_state(optimizer)

    def read_memory(self) -> None:
        """Reads the device for each session whose reading is due."""
        for session in self.sessions():
            session.count_and_read_memory()

    # ---------------------------------------------------------------- forks

    def after_fork_in_child(self) -> None:
        """Removes the hooks that a forked child inherited. It records nothing."""
        C.after_fork_in_child()
        self._sessions.clear()
        self.tidy()


HOOKS = Hooks()
C.set_listeners(HOOKS)
compiled.listen()
if sys.platform != "win32":
    os.register_at_fork(after_in_child=HOOKS.after_fork_in_child)

__all__ = ["HOOKS", "Hooks"]
