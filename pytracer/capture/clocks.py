"""Readings that tell, afterwards, how far the clocks of a job's hosts are apart.

A reading adds one to a counter in the store of the program's process group, and notes this host's time before
and after. The store numbers the readings of all hosts in one order, so each pair of readings bounds the
difference of two clocks (`pytracer/ranks/clocks.py`). Nobody waits for another rank.

Only one rank of each host reads, only in a job of several hosts, and only at steps 1, 2, 4, 8, ...
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from pytracer.basics import environment, private_torch
from pytracer.capture import communication

_KEY = "pytracer/clock"
_MOST = 64  # readings at one moment
_LONGEST_NS = 5_000_000
_TIMEOUT = timedelta(seconds=1)


class Clocks:
    """The readings of one session."""

    def __init__(self, now: Callable[[], int] = time.time_ns) -> None:
        """Reads nothing yet. `now` is this host's clock."""
        self._now = now
        self._store: Any = None
        self._gave_up = False
        # The store's number, and this host's times before and after.
        self.readings: list[tuple[int, int, int]] = []

    def read(self) -> None:
        """Reads for up to five milliseconds, if this rank is the one of its host that does."""
        if self._gave_up or not is_leader_of_several() or not communication.is_there():
            return
        try:
            self._read_often()
        except Exception:  # whatever a store does, the program goes on
            self._gave_up = True

    def _read_often(self) -> None:
        store = self._store = self._store or _own_connection()
        until = self._now() + _LONGEST_NS
        for _ in range(_MOST):
            before = self._now()
            number = store.add(_KEY, 1)
            after = self._now()
            self.readings.append((number, before, after))
            if not before <= after < until:
                break


def is_leader_of_several() -> bool:
    """Whether this is the first rank of its host, in a job of several hosts."""
    local = environment.local_world_size()
    return environment.local_rank() == 0 and local is not None and local < environment.world_size()


def _own_connection() -> Any:
    """A connection of our own, so that neither its timeout nor its waiting is the program's."""
    store = private_torch.default_store().clone()
    store.set_timeout(_TIMEOUT)
    return store
