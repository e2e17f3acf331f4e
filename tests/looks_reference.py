"""The plain reference of csrc/core/looks.h: which steps a recorder that is always on looks at."""

import itertools
from dataclasses import dataclass

FIRST, DEPARTS, GROWS, DUE = "first", "departs", "grows", "due"
STEPS = {FIRST: 2, DEPARTS: 1, GROWS: 6, DUE: 1}

_HIGHER_PART = 50  # a departure is above the highest peak before by more than a 50th of it,
_HIGHER_BYTES = 1 << 20  # and by more than these bytes
_WINDOWS = (16, 256)  # steps; the least bytes at the end of each window are compared
_RISES = 4  # windows in a row that are above the one before
_FIRST_GAP, _LONGEST_GAP = 8, 4096


@dataclass
class _Growth:
    """Whether what is alive as steps end rises, window by window."""

    window: int
    seen: int = 0
    least: int = 0  # of this window
    before: int | None = None  # the least of the window before
    rises: int = 0
    needed: int = _RISES

    def saw(self, now: int) -> bool:
        """Takes what was alive as a step ended. Returns whether it has risen long enough."""
        self.least = now if self.seen == 0 else min(self.least, now)
        self.seen += 1
        if self.seen < self.window:
            return False
        rose = self.before is not None and self.least > self.before
        self.rises = self.rises + 1 if rose else 0
        self.before, self.seen = self.least, 0
        return self.rises >= self.needed

    def was_looked_at(self) -> None:
        """Waits twice as long until the next look: the reason may be a harmless one."""
        self.rises, self.needed = 0, self.needed * 2


class Looks:
    """Decides for the next step. Give it each device's totals of each step."""

    def __init__(self) -> None:
        """Wants to look at the first step."""
        self._highest: dict[tuple[int, int], int] = {}
        self._growth: dict[tuple[int, int], list[_Growth]] = {}
        self._gap, self._due = _FIRST_GAP, _FIRST_GAP
        self._wanted = FIRST

    @property
    def wanted(self) -> str:
        """Why the next step should be looked at; "" if it should not."""
        return self._wanted

    def saw(self, step: int, device: tuple[int, int], peak: int, now: int) -> str:
        """Takes what a device did in a step. Returns DEPARTS or GROWS if it did, else ""."""
        found = ""
        highest = self._highest.get(device)
        if highest is None or peak > highest:
            self._highest[device] = peak
        is_settled = step >= STEPS[FIRST]  # states are made in the first steps
        if (
            is_settled
            and highest is not None
            and peak - highest > max(highest // _HIGHER_PART, _HIGHER_BYTES)
        ):
            found = DEPARTS
        if device not in self._growth:
            self._growth[device] = [_Growth(window) for window in _WINDOWS]
        rises = [growth.saw(now) for growth in self._growth[device]]
        if any(rises) and self._wanted != GROWS:
            found = GROWS
        if found:
            self._wanted = found
        elif not self._wanted and step + 1 >= self._due:
            self._wanted = DUE
        return found

    def looked(self, reason: str, step: int) -> None:
        """A look for this reason has ended with this step."""
        self._wanted = ""
        if reason == GROWS:
            for growth in itertools.chain.from_iterable(self._growth.values()):
                if growth.rises >= growth.needed:
                    growth.was_looked_at()
        if reason == DUE:
            self._gap = min(self._gap * 2, _LONGEST_GAP)
        self._due = step + 1 + self._gap
