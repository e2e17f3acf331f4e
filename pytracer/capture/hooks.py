"""What Python of ours is told while something records.

The hooks themselves are in `csrc/torch` (see `session.h` and `moments.h`): they are put in place and
taken away by one call each, and look at the program by themselves. What is new to them they tell the
one instance here, `HOOKS`, which keeps what a recording knows.
"""

import atexit
import os
import sys
import warnings
from typing import Any, Protocol

import torch

from pytracer._native import C
from pytracer.capture.graph import in_transform, saved_tensors
from pytracer.capture.labels import Labels, cache_positions, tensors_of_caches


class Listening(Protocol):
    """What is asked of a session that records."""

    @property
    def running(self) -> bool:
        """Whether it still does."""

    def count_and_read_memory(self) -> None:
        """Learns how often the model was called and stepped, and reads the device if that is due."""

    def end_at_exit(self) -> None:
        """Ends it, for the interpreter goes away."""


class Hooks:
    """What the process's recording knows, and who listens. Use the one instance, `HOOKS`."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._forget()
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
            self._forget()

    def _forget(self) -> None:
        self.labels = Labels()
        C.use_moments(self.labels.moments)

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

    def look_again(self) -> None:
        """Somebody unknown stands where a parameter stood, or nobody does."""
        self.labels.look_again()

    def note_attributes(self, module: torch.nn.Module) -> None:
        """An outermost module is entered, and may have got tensors."""
        self.labels.note_attributes(module)

    def cache_positions(self, module: torch.nn.Module) -> tuple[int, ...]:
        """Which of its arguments are caches. Asked once per class."""
        return cache_positions(module)

    def tensors_of_caches(self, caches: list[Any]) -> list[torch.Tensor]:
        """Of caches that an outermost module is given."""
        return tensors_of_caches(caches)

    def read_graph(self, outputs: Any) -> None:
        """A backward pass begins: what the graph behind these has saved."""
        C.record_saved(list(saved_tensors(outputs)))

    def read_graph_of_func(self, outputs: Any) -> None:
        """The same, where only torch.func's saves are not seen as they happen."""
        if in_transform():
            self.read_graph(outputs)

    def label_engines(self) -> None:
        """Of libraries that keep a model's parameters to themselves."""
        self.labels.label_engines()

    def meet_optimizer(self, optimizer: Any) -> None:
        """Its step begins; it is new, or its groups have grown."""
        self.labels.meet_optimizer(optimizer)

    def label_state(self, optimizer: Any) -> None:
        """Some of its state is new."""
        self.labels.label_state(optimizer)

    def read_memory(self) -> None:
        """Some session's reading of the device is due."""
        for session in self.sessions():
            session.count_and_read_memory()

    # ---------------------------------------------------------------- forks

    def after_fork_in_child(self) -> None:
        """The child records nothing: it inherited hooks, and gets rid of them."""
        C.after_fork_in_child()
        self._sessions.clear()
        self.tidy()


HOOKS = Hooks()
C.set_listeners(HOOKS)
if sys.platform != "win32":
    os.register_at_fork(after_in_child=HOOKS.after_fork_in_child)

__all__ = ["HOOKS", "Hooks"]
