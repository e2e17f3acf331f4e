"""Measures how long the device works on each phase; see `csrc/torch/phase_times.h`.

The result is `meta["phase_times"]`:

    {"problem": "", "missing": pairs that could not be read,
     "phase": [numbers of schema.PHASES], "device": [indices], "device_ns": [...],
     "begin": [ticks of the host at the borders], "end": [...]}
"""

import time
from typing import Any, Protocol

import torch

from pytracer.data._native import C

_MOST_PENDING = 512  # pairs not read yet; beyond this, pairs that the device has passed are read
_MOST_CALLS = 256  # calls since the last backward; beyond this, the forward begins later
_MOST_OTHERS = 4  # calls after a backward that are timed although they begin no forward
_MOST_KEPT = 300_000  # pairs in a trace: enough for 100,000 steps
_LONGEST_WAIT = 10.0  # seconds to wait for the device at the end: a collective may hang


class Stopwatch(Protocol):
    """A device's clock. CUDA's is `C.cuda_stopwatch()`."""

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the index of the device that holds the tensor; None if another kind does."""

    def mark(self, device: int, again: Any) -> Any:
        """Puts an event (`again`, if given) into the current stream; None where none may be."""

    def has_passed(self, event: Any) -> bool:
        """Whether the device has reached the event."""

    def elapsed_ns(self, begin: Any, end: Any) -> int:
        """Returns the device's time between two events that it has passed."""


class PhaseTimes(C.PhaseTimes):
    """The borders of phases that one session passes, on the thread that trains."""

    def __init__(self, stopwatch: Stopwatch | C.Stopwatch | None) -> None:
        """Measures nothing without a stopwatch: for the CPU, the host's clock is right."""
        super().__init__(
            stopwatch,
            pending=_MOST_PENDING,
            calls=_MOST_CALLS,
            others=_MOST_OTHERS,
            kept=_MOST_KEPT,
        )

    def finish(self, *, wait: bool) -> None:
        """Reads the last events as the trace ends. `wait`: for the device, at most 10 seconds."""
        self.end_calls()
        give_up = time.monotonic() + _LONGEST_WAIT
        self.look()
        while wait and self.waiting and time.monotonic() < give_up:
            time.sleep(0.0002)  # Ctrl-C works here; it would not inside a synchronisation
            self.look()
        self.give_up()
