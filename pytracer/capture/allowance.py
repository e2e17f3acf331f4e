"""What watching may cost: at most 3 % of the processor time of the thread that trains.

The rule: an account gets 2 % of the thread's processor time, and each watched window is paid from it
when it ends. While the account is overdrawn, no window begins. A tenth of a second is there from the
beginning, so that a short program is watched wholly. So the measured cost is never more than the 2 %,
the tenth of a second and one window. The third per cent is for what cannot be measured: the count of steps, garbage
that Python collects later, colder caches afterwards.

A window costs the processor time at its two ends, which is measured, and that of its steps. There
tracing times its long calls, and one in 61 of the short ones (csrc/core/own_time.h). What torch, Python
and the allocator do around short calls comes on top, and caches are colder. In instructions the whole is
1.2 to 2.6 times tracing's own part (docs/overhead.md); in processor time it was 3.3 times, in a loop of
small operators. So short calls count 4 times.

Thread time rather than process time: other threads may spin or load data, and the program waits for the
one that trains. The share of the process's time is smaller still.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pytracer.data._native import C

SHARE = 0.03
_PAID = 0.02  # of the thread's time, for the measured part
_AROUND = 4  # the whole over tracing's own part, in short calls
FIRST = 0.1  # seconds in the account at the beginning
_MOST = 0.5  # seconds in the account: a long quiet time does not pay for a long expensive one


class StepsTime:
    """Processor time that tracing takes in steps, in seconds since the process began."""

    def __init__(self) -> None:
        """Begins to learn how fast the processor's counter runs."""
        self._ticks, self._began = C.read_clock()  # the program may have changed Python's

    def __call__(self) -> float:
        """The time so far."""
        now, unix_ns = C.read_clock()
        ticks, ns = C.read_own_time()
        passed = now - self._ticks
        ns_per_tick = (unix_ns - self._began) / passed if passed > 0 else 0.0
        return float(_AROUND * ticks * ns_per_tick + ns) / 1e9


class Allowance:
    """The account of one recording's watching."""

    def __init__(
        self,
        clock: Callable[[], float] = time.thread_time,
        in_steps: Callable[[], float] | None = None,
        share: float = _PAID,
    ) -> None:
        """Has the first tenth of a second, and the share of the thread's time so far.

        Args:
            share: of the thread's time, for the measured part.
            clock: processor time of the calling thread, in seconds.
            in_steps: processor time that tracing takes in steps, in seconds.
        """
        self._clock, self._in_steps, self._share = clock, in_steps or StepsTime(), share
        self._thread, self._seen = threading.get_ident(), 0.0
        self._account = FIRST
        self._cost = self._steps_before = 0.0

    def allows(self) -> bool:
        """Whether a window may begin: the account is not overdrawn."""
        self._earn()
        return self._account >= 0

    def wait(self) -> float:
        """The least number of seconds until a window may begin; 0 if one may now."""
        if self.allows():
            return 0.0
        return -self._account / self._share if self._share else math.inf

    @contextmanager
    def begins(self) -> Iterator[None]:
        """Around the beginning of a window."""
        self._cost = 0.0
        with self._paid():
            yield
        self._steps_before = self._in_steps()

    @contextmanager
    def ends(self) -> Iterator[None]:
        """Around the end of a window. Pays for it."""
        self._cost += max(self._in_steps() - self._steps_before, 0.0)
        with self._paid():
            yield
        self._earn()
        self._account -= self._cost

    @contextmanager
    def _paid(self) -> Iterator[None]:
        before = self._clock()
        try:
            yield
        finally:
            self._cost += max(self._clock() - before, 0.0)

    def _earn(self) -> None:
        """Adds the share of the time since the last call. Another thread's clock says nothing."""
        thread, now = threading.get_ident(), self._clock()
        if thread == self._thread:
            self._account = min(self._account + self._share * max(now - self._seen, 0.0), _MOST)
        self._thread, self._seen = thread, now
