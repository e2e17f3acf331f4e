"""Ranges of addresses that come and go, each with a value."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Ranges(Generic[Value]):
    """Sorted ranges. The time of a change depends on the ranges it touches, not on all ranges."""

    def __init__(self) -> None:
        self._sorted: list[tuple[int, int, int]] = []  # begin, end, index in _values
        self._values: list[Value] = []

    def __iter__(self) -> Iterator[tuple[int, int, Value]]:
        """Yields begin, end and value of each range, by address."""
        return ((begin, end, self._values[at]) for begin, end, at in self._sorted)

    def __len__(self) -> int:
        """The number of ranges."""
        return len(self._sorted)

    def add(self, begin: int, end: int, value: Value) -> None:
        """Adds a range."""
        self._values.append(value)
        insort(self._sorted, (begin, end, len(self._values) - 1))

    def remove(self, begin: int, end: int) -> None:
        """Cuts these addresses out of the ranges that contain them."""
        first = self._first(begin)
        last = first
        rests = []
        while last < len(self._sorted) and self._sorted[last][0] < end:
            old_begin, old_end, at = self._sorted[last]
            rests += [
                (one, other, at)
                for one, other in ((old_begin, min(old_end, begin)), (max(old_begin, end), old_end))
                if one < other
            ]
            last += 1
        self._sorted[first:last] = rests

    def touches(self, begin: int, end: int) -> bool:
        """Whether any of these addresses is in a range."""
        at = self._first(begin)
        return at < len(self._sorted) and self._sorted[at][0] < end

    def covers(self, begin: int, end: int) -> bool:
        """Whether one range contains all of these addresses."""
        at = self._first(begin)
        return (
            at < len(self._sorted) and self._sorted[at][0] <= begin and end <= self._sorted[at][1]
        )

    def _first(self, address: int) -> int:
        """Returns the index of the first range that ends after the address.

        The ranges must not overlap.
        """
        at = bisect_left(self._sorted, (address,))
        return at - 1 if at > 0 and self._sorted[at - 1][1] > address else at
