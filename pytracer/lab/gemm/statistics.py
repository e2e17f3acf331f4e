"""Medians with intervals that hold for any distribution of the samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A median with its 95 % confidence interval."""

    median: float
    low: float
    high: float

    @property
    def noise(self) -> float:
        """Half the interval's width, as a share of the median."""
        return (self.high - self.low) / 2 / abs(self.median) if self.median else math.inf

    def __contains__(self, value: float) -> bool:
        """Whether the interval holds this value."""
        return self.low <= value <= self.high


def median(samples: Sequence[float]) -> Interval:
    """The median, and two samples that enclose it with at least 95 % confidence.

    The number of samples below the true median is binomial for any distribution. With fewer than
    six samples no pair reaches 95 %, and the interval is the whole range.
    """
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("there are no samples")
    rank = _rank(len(ordered))
    return Interval(float(np.median(ordered)), ordered[rank], ordered[-1 - rank])


@cache
def _rank(count: int) -> int:
    """The innermost rank from both ends whose interval still has 95 % confidence."""
    outside, rank = 0.0, 0
    for below in range(count // 2):
        outside += math.comb(count, below) / 2**count
        if 2 * outside > 1 - CONFIDENCE:
            break
        rank = below
    return rank


def ratio(first: Sequence[float], second: Sequence[float]) -> Interval:
    """The first divided by the second, from samples taken in pairs.

    A device that slows down for a while slows both of a pair, so the ratio hardly changes.
    """
    return median([a / b for a, b in zip(first, second, strict=True)])


def sum_of_medians(
    groups: Sequence[tuple[int, NDArray[np.float64]]], draws: int = 1000
) -> Interval:
    """The weighted sum of the medians of several measurements, with an interval by bootstrap.

    The same samples give the same interval.
    """
    random = np.random.default_rng(0)
    middle, sums = 0.0, np.zeros(draws)
    for times, samples in groups:
        drawn = samples[random.integers(0, len(samples), (draws, len(samples)))]
        middle += times * float(np.median(samples))
        sums += times * np.median(drawn, axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(sums, [tail, 1 - tail])
    return Interval(middle, float(low), float(high))
