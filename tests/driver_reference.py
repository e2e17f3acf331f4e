"""Where a driver puts segments, in plain Python: the oracle of csrc/core/segment_order.h."""

from collections.abc import Sequence

MIB = 1 << 20
SMALL_BUFFER, CHUNK = 2 * MIB, 32 * MIB
ADDRESSES = 1 << 57


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class Departed(Exception):
    """The recording shows something else."""


class Driver:
    """Says where segments lie: (address, rank)."""

    MIDDLE = 1 << 60

    def __init__(self, order: int, ranks: Sequence[int] | None = None) -> None:
        self.order, self.ranks, self.ranked = order, ranks, 0
        self.next_chunk = ADDRESSES
        self.holes: dict[int, int] = {}
        self.follows = False
        self.refuses = False
        self.given: list[tuple[int, int]] = []

    def place(self, size: int) -> tuple[int, int]:
        """A new segment's place."""
        if self.follows:
            return self.as_recorded(self.next_given(size))
        address = self.from_the_top(size)
        return address, self.rank(address)

    def rank(self, address: int) -> int:
        self.ranked += 1
        if self.ranks is not None:
            return self.ranks[self.ranked - 1]
        if self.order == 0:
            return address
        if self.order in (1, 2):
            return self.MIDDLE + (self.ranked if self.order == 1 else -self.ranked)
        z = (self.order * 0x9E3779B97F4A7C15 + self.ranked) % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    def from_the_top(self, size: int) -> int:
        """The lowest hole that is large enough, else a chunk below all others."""
        size = round_up(size, 2 * MIB)
        for address in sorted(self.holes):
            if self.holes[address] >= size:
                rest = self.holes.pop(address) - size
                break
        else:
            chunk = round_up(size, CHUNK)
            self.next_chunk -= chunk
            address, rest = self.next_chunk, chunk - size
        if rest >= SMALL_BUFFER:
            self.holes[address + size] = rest
        return address

    # The recording

    def as_recorded(self, address: int) -> tuple[int, int]:
        return address, self.rank(self.MIDDLE + address % self.MIDDLE)

    def next_given(self, size: int) -> int:
        if not self.given or self.given[0][1] != size:
            raise Departed
        return self.given.pop(0)[0]

    def leave_recording(self) -> None:
        self.follows = self.refuses = False
        self.given = []
