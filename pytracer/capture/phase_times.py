"""How long the device works on each phase; see `csrc/torch/phase_times.h`.

What is left is `meta["phase_times"]`:

    {"problem": "", "missing": pairs that could not be read,
     "phase": [numbers of schema.PHASES], "device": [indices], "device_ns": [...],
     "begin": [ticks of the host at the borders], "end": [...]}
"""

import time
from typing import Any, Protocol

import torch

from pytracer._native import C

_MOST_PENDING = 512  # pairs that wait; of more those that have passed are read
_MOST_CALLS = 256  # of models, since the last backward: a forward of more begins later
_MOST_KEPT = 300_000  # pairs of a trace: as many as 100,000 steps have
_LONGEST_WAIT = 10.0  # seconds for the device at the end; a collective may hang for ever


class Stopwatch(Protocol):
    """What a device offers, if it is not CUDA's `C.cuda_stopwatch()`."""

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """Which of its devices the tensor is on, if it is on one."""

    def mark(self, device: int, again: Any) -> Any:
        """An event in the current stream, an old one if given; None where there may be none."""

    def has_passed(self, event: Any) -> bool:
        """Whether the device has come to it."""

    def elapsed_ns(self, begin: Any, end: Any) -> int:
        """The device's time between two events that it has passed."""


class PhaseTimes(C.PhaseTimes):
    """The borders that one session passes, on the thread that trains."""

    def __init__(self, stopwatch: Stopwatch | C.Stopwatch | None) -> None:
        """Without a stopwatch (on the CPU, whose own clock is right) nothing is measured."""
        super().__init__(stopwatch, pending=_MOST_PENDING, calls=_MOST_CALLS, kept=_MOST_KEPT)

    def finish(self, *, wait: bool) -> None:
        """The trace ends. `wait`: until the device has come so far, where that takes no age."""
        self.end_calls()
        give_up = time.monotonic() + _LONGEST_WAIT
        self.look()
        while wait and self.waiting and time.monotonic() < give_up:
            time.sleep(0.0002)  # where Ctrl-C is heard, as it is not inside of a synchronisation
            self.look()
        self.give_up()
