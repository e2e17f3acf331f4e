"""How sizes grow with a program's batch and length: laws that traces show, and bounds without them.

A law is the simplest that gives a block's size in every trace to the byte. First come laws with one
term: a constant, the batch, the length, products of them. Then each of these beside a constant. A law
holds if at least one trace more than it has terms agrees. It is proved if no other law that holds
gives another size.

No trace shows what happens beyond the largest one: the program may split, pad or cap there what it
did not before. Such a size is a whole number of pieces, so it grows at most in proportion, by one
piece more. A piece divides all sizes that were seen.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

_STEEPEST = 3  # the highest power of the batch by which a bound grows
_NEARLY = 1e-6


@dataclass(frozen=True)
class Shape:
    """The batch and length of a model's input."""

    batch: int
    length: int | None

    @property
    def volume(self) -> int:
        """The number of elements."""
        return self.batch * (self.length or 1)

    def is_within(self, other: "Shape") -> bool:
        """Whether neither of its sizes is larger."""
        return self.batch <= other.batch and (self.length or 1) <= (other.length or 1)


_Size: TypeAlias = Callable[[Shape], int]


def is_between(shapes: Sequence[Shape], wanted: Shape) -> bool:
    """Whether traces enclose the wanted shape, in steps that it is a multiple of.

    A size that is padded to a multiple follows a plain law at all multiples, and only there.
    """
    ends = any(shape.is_within(wanted) for shape in shapes)
    ends &= any(wanted.is_within(shape) for shape in shapes)
    batches = math.gcd(*(shape.batch for shape in shapes))
    lengths = math.gcd(*(shape.length or 1 for shape in shapes))
    return ends and wanted.batch % batches == 0 and (wanted.length or 1) % lengths == 0


# ---------------------------------------------------------------- laws


def predictions(seen: Sequence[int], shapes: Sequence[Shape], wanted: Shape) -> set[int]:
    """The sizes that the simplest laws give that hold in all traces: several if they differ."""
    return next((sizes for sizes in _by_simplicity(seen, shapes, wanted) if sizes), set())


def is_proved(seen: Sequence[int], shapes: Sequence[Shape], wanted: Shape) -> bool:
    """Whether all laws that hold in all traces, simple or not, give the same size."""
    return len(set().union(*_by_simplicity(seen, shapes, wanted))) == 1


def _by_simplicity(
    seen: Sequence[int], shapes: Sequence[Shape], wanted: Shape
) -> Iterator[set[int]]:
    """The sizes that laws give: with one term, beside a constant, and that with a square."""
    at, to = [_terms(shape) for shape in shapes], _terms(wanted)
    columns = [([row[term] for row in at], to[term]) for term in range(len(to))]
    distinct = len(set(shapes))
    if distinct > 1:
        yield _told(_in_proportion(seen, *column) for column in columns)
    if distinct > 2:
        yield _told(_beside_a_constant(seen, *column) for column in columns[:-_SQUARES])
        yield _told(_beside_a_constant(seen, *column) for column in columns[-_SQUARES:])


def _told(sizes: Iterable[int | None]) -> set[int]:
    return {size for size in sizes if size is not None}


def _terms(shape: Shape) -> tuple[int, ...]:
    batch, length = shape.batch, shape.length or 1
    both = batch * length
    squares = (batch**2, both**2)
    return (1, batch, length, both, both * length, length**2, *squares)


_SQUARES = 2  # terms with a square of the batch


def _in_proportion(seen: Sequence[int], at: Sequence[int], to: int) -> int | None:
    """The size by the law c * x, if all traces agree and it is a whole number."""
    if any(size * at[0] != seen[0] * x for size, x in zip(seen, at, strict=True)):
        return None
    return seen[0] * to // at[0] if seen[0] * to % at[0] == 0 else None


def _beside_a_constant(seen: Sequence[int], at: Sequence[int], to: int) -> int | None:
    """The size by the law a + c * x, if all traces agree and it is a whole number."""
    run = max(at) - min(at)
    if run == 0:
        return None
    rise = seen[at.index(max(at))] - seen[at.index(min(at))]
    pairs = zip(seen, at, strict=True)
    if any((size - seen[0]) * run != rise * (x - at[0]) for size, x in pairs):
        return None
    grown = rise * (to - at[0])
    return seen[0] + grown // run if grown % run == 0 else None


# ---------------------------------------------------------------- bounds


def bound(size: int, seen: Sequence[int], growth: float, predicted: set[int]) -> int:
    """The most that a block may have, which has `size` in the largest trace.

    Args:
        size: its bytes there.
        seen: its bytes in every trace.
        growth: by which factor it grows at most, but for one piece.
        predicted: what laws say.
    """
    piece = math.gcd(*seen)
    return max(math.ceil(size * growth) + piece, *predicted, size)


def is_bounded(seen: Sequence[int], shapes: Sequence[Shape]) -> bool:
    """Whether the sizes may be pieces of one share of the volume, rounded up, or meet a bound."""
    shares = [size / shape.volume for size, shape in zip(seen, shapes, strict=True)]
    if all(a >= b for a, b in pairwise(shares)):
        return True
    piece = math.gcd(*seen)
    least = max((size - piece) / shape.volume for size, shape in zip(seen, shapes, strict=True))
    return least < min(shares)


def growth(totals: Sequence[int], shapes: Sequence[Shape], wanted: Shape) -> float:
    """The factor from the largest trace to the wanted shape, for blocks with these totals.

    It is in proportion to the batch and to the square of the length, as in attention, unless the
    totals grow faster.
    """
    last = shapes[-1]
    by_batch, by_length = wanted.batch / last.batch, (wanted.length or 1) / (last.length or 1)
    batch_power = _power(totals, shapes, _batch, _length, least=1)
    length_power = _power(totals, shapes, _length, _batch, least=2)
    return max(by_batch, 1.0) ** batch_power * max(by_length, 1.0) ** length_power


def _batch(shape: Shape) -> int:
    return shape.batch


def _length(shape: Shape) -> int:
    return shape.length or 1


def _power(
    totals: Sequence[int], shapes: Sequence[Shape], size: _Size, other: _Size, least: int
) -> int:
    """The power of one size by which the totals grow most, between traces alike in the other."""
    powers = [
        math.log(b / a) / math.log(size(to) / size(at))
        for (a, at), (b, to) in _pairs(totals, shapes)
        if other(at) == other(to) and size(to) > size(at) and b > a > 0
    ]
    return min(max(least, math.ceil(max(powers, default=0) - _NEARLY)), _STEEPEST)


def _pairs(
    totals: Sequence[int], shapes: Sequence[Shape]
) -> Iterator[tuple[tuple[int, Shape], tuple[int, Shape]]]:
    rows = list(zip(totals, shapes, strict=True))
    return ((a, b) for a in rows for b in rows if a is not b)
