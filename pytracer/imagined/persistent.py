"""How much scratch cuDNN's persistent kernels take to share tiles between blocks, on a card like the H100.

The kernels run as many blocks as the card holds at once. Tiles that do not fill a last round may each be
split among several blocks. Those leave partial sums in the scratch, and add them up as a tree. How many
blocks share a tile is what is cheapest by the kernel's own model.

cuDNN tells the plan without a card, but counts a card's blocks with the driver; without one it takes a card
of 18 multiprocessors. The rules here were found from its answers for such a card, and are held against
passes that were measured on an H100.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Rows and columns of a tile, by the number of cuDNN's knob.
TILES = {
    0: (128, 128), 1: (128, 64), 2: (128, 32), 3: (256, 128), 4: (256, 64), 5: (64, 64), 6: (128, 256),
    7: (64, 128), 9: (64, 256), 16: (256, 32), 18: (64, 192), 19: (128, 192), 20: (256, 96),
}  # fmt: skip
_LEAST = (
    1024  # elements of a row that are more than enough for one of many blocks that share a tile
)
_MANY = 9  # blocks, from which on that is the only limit
_LARGE = 32768  # elements of a tile
_LONG = 64  # elements of a row that one step of a product reads; short steps read half
_SUM = 4  # bytes of a partial sum, and of a counter
_COUNTED = 131  # bytes where blocks count their tiles, with alignment
_SHARED = 28  # more, where they share some
# What a level of the tree costs, in long steps of bfloat16: after whole tiles, and when none was before.
# Each is a fixed part, and one for how many such tiles are a large one.
_AFTER = ((26.5, 2.625), (24.875, 3.15), (18.875, 2.6125), (12.66, 1.85))
_FIRST = {"bfloat16": (47.0, 7.0), "float16": (48.0, 8.0), "float32": (48.0, 8.0)}
_FASTER = {"bfloat16": 1, "float16": 8, "float32": 8}  # long steps in the time of one
_BETWEEN = (
    (1.0, 0.0),
    (1.25, 0.40),
    (1.5, 0.70),
    (1.75, 0.855),
    (2.0, 1.0),
)  # of two powers of two
# Steps; costs that differ by less may be the other way round on the card.
_NEAR = {"float32": 0.05, "float16": 0.6, "bfloat16": 0.6}
_MOST_SHARING = 128  # blocks of a tile
TILE, LENGTH, SHARES, DOWN, ACROSS = 2, 13, 25, 27, 28  # the numbers of cuDNN's knobs


@dataclass(frozen=True)
class Kernel:
    """A persistent kernel and its product, as a plan has it."""

    operation: str  # forward, input, weight
    dtype: str
    knobs: Mapping[int, int]

    @property
    def cluster(self) -> int:
        """The blocks of a cluster."""
        return self.knobs[DOWN] * self.knobs[ACROSS]

    @property
    def is_short(self) -> bool:
        """Whether it reads short rows of a type of two bytes."""
        return self.dtype != "float32" and self.knobs[LENGTH] == 0

    def tiles(
        self, x: Sequence[int], w: Sequence[int], y: Sequence[int], groups: int = 1
    ) -> tuple[int, int]:
        """The tiles of its products, padded to whole clusters, and the steps of each."""
        rows, columns = TILES[self.knobs[TILE]]
        kernel = math.prod(w[2:])
        out, inside = w[0] // groups, w[1]
        if self.operation == "weight":
            down, right = out, inside
            steps = -(-_pixels(y) // self._step)
            across = -(-right // columns) * kernel
        else:
            is_forward = self.operation == "forward"
            down, right, deep = (
                (_pixels(y), out, inside) if is_forward else (_pixels(x), inside, out)
            )
            steps = -(-deep // self._step) * kernel
            across = -(-right // columns)
        down = _up(-(-down // rows), self.knobs[DOWN])
        return groups * down * _up(across, self.knobs[ACROSS]), steps

    def plain(self, tiles: int, blocks: int) -> int:
        """The bytes where no tile is shared."""
        return _COUNTED if tiles > 2 * blocks else 0

    def scratch(self, tiles: int, steps: int, blocks: int) -> tuple[int, int]:
        """The least and the most bytes for partial sums on a card that runs so many blocks at once."""
        rounds, left = divmod(tiles, blocks)
        plain = self.plain(tiles, blocks)
        if not left:
            return plain, plain
        tile = math.prod(TILES[self.knobs[TILE]]) * _SUM
        amounts = [
            left * one * tile + _SUM * (left * _tree(one) + (rounds > 1)) + _COUNTED + _SHARED
            if one > 1
            else plain
            for one in self._sharing(steps, blocks // left, rounds)
        ]
        return min(amounts), max(amounts)

    def at_most(self, blocks: int) -> int:
        """The most bytes for partial sums: a tile for each block."""
        return blocks * (math.prod(TILES[self.knobs[TILE]]) + 2) * _SUM + _COUNTED + _SHARED

    @property
    def _step(self) -> int:
        is_short = self.dtype == "float32" or self.knobs[LENGTH] == 0
        return _LONG // 2 if is_short else _LONG

    def _sharing(self, steps: int, most: int, rounds: int) -> list[int]:
        """How many blocks may share a tile, at most so many."""
        if not rounds:
            many = min(steps // (_LEAST // self._step + 1), most, _MOST_SHARING)
            if many >= _MANY:
                busy = -(-steps // -(-steps // many))  # the last ones may have nothing to do
                return [busy, many]
        unit = (
            _FASTER[self.dtype] * self._step / _LONG
        )  # steps in the time of a long one of bfloat16
        is_exact = rounds and self.dtype == "bfloat16"
        costs = {
            one: (steps / one if is_exact else -(-steps // one)) + self._adding(one, rounds) / unit
            for one in range(1, most + 1)
        }
        least = min(costs.values())
        best = min(one for one, cost in costs.items() if cost == least)
        return [
            one for one, cost in costs.items() if one == best or cost <= least + _NEAR[self.dtype]
        ]

    def _adding(self, blocks: int, rounds: int) -> float:
        """What it costs to add up so many partial sums."""
        if blocks == 1:
            return 0.0
        size = _LARGE / math.prod(TILES[self.knobs[TILE]])
        levels = (blocks - 1).bit_length()
        if not rounds:
            fixed, by_size = _FIRST[self.dtype]
            return (fixed + by_size * size) * levels - 0.1
        costs = [fixed + by_size * size for fixed, by_size in _AFTER]
        while len(costs) < levels:
            costs.append(costs[-1] * 0.6)
        share = _between(blocks / (1 << (levels - 1)))
        return sum(costs[: levels - 1]) + share * costs[levels - 1] - 0.3


def _between(at: float) -> float:
    for (low, below), (high, above) in itertools.pairwise(_BETWEEN):
        if at <= high:
            return below + (above - below) * (at - low) / (high - low)
    return 1.0


def _pixels(shape: Sequence[int]) -> int:
    return shape[0] * math.prod(shape[2:])


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _tree(leaves: int) -> int:
    """The nodes above so many leaves."""
    nodes = 0
    while leaves > 1:
        leaves = -(-leaves // 2)
        nodes += leaves
    return nodes
