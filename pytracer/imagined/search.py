"""The largest batch that fits, by bisection.

Each batch is imagined. The next one follows from the line through the two that came nearest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pytracer import errors
from pytracer.analysis.allocator.replay import NOT_KNOWN
from pytracer.analysis.forecasts.fits import Fits

MOST = 1 << 20
_MOST_TRIES = 24
_LEAP = 32  # where the batch has changed nothing so far


@dataclass(frozen=True)
class Try:
    """A batch that was imagined."""

    batch: int
    fits: bool
    needs: int  # the bytes of the smallest card on which it surely runs
    peak: int
    beside: int = 0  # of them, what is counted beside torch's allocator


def tried(batch: int, fits: Fits, peak: int) -> Try:
    """The batch as it was imagined.

    Raises:
        errors.CannotImagine: it is not known whether it fits.
    """
    if fits.verdict == NOT_KNOWN:
        raise errors.CannotImagine(fits.replay.notes[0])
    return Try(batch, bool(fits), fits.surely_needs, peak, fits.beside_at_most)


@dataclass(frozen=True)
class Largest:
    """The largest batch that fits, and the batches that were imagined. It is false if none fits."""

    batch: int  # 0: not even one row fits
    card: str
    capacity: int
    tries: tuple[Try, ...]

    def __bool__(self) -> bool:
        """Whether any batch fits."""
        return self.batch > 0

    def __int__(self) -> int:
        """The batch."""
        return self.batch

    @property
    def peak(self) -> int:
        """The peak of the largest batch; of one row, if none fits."""
        return next(one.peak for one in self.tries if one.batch == max(self.batch, 1))


def search(run: Callable[[int], Try], capacity: int) -> tuple[int, tuple[Try, ...]]:
    """The largest batch that fits into the capacity, and all tries. Memory grows with the batch.

    Raises:
        errors.UsageError: the batch changes nothing.
    """
    tries = [run(1)]
    if not tries[0].fits:
        return 0, tuple(tries)
    below, above, guess = tries[0], None, 2
    while len(tries) < _MOST_TRIES and below.batch < MOST:
        one = run(guess)
        tries.append(one)
        if one.fits:
            below = one
        else:
            above = one
        if above is not None and above.batch == below.batch + 1:
            break
        guess = _next(tries, below, above, capacity)
    if above is None and len({one.peak for one in tries}) == 1:
        raise errors.UsageError(
            f"a batch of {below.batch:,} needs what a batch of 1 needs: the program does not use the "
            "number"
        )
    return below.batch, tuple(tries)


def _next(tries: list[Try], below: Try, above: Try | None, capacity: int) -> int:
    """Where the line through two tries meets the capacity; the middle, if that brought little."""
    first, second = (tries[-2], below) if above is None else (below, above)
    slope = (second.needs - first.needs) / max(second.batch - first.batch, 1)
    at = first.batch + (capacity - first.needs) / slope if slope > 0 else _LEAP * below.batch
    guess = int(min(at, MOST))
    if above is None:
        return max(guess, below.batch + 1)
    if len({one.fits for one in tries[-2:]}) == 1:  # one bound has not moved
        return (below.batch + above.batch) // 2
    return min(max(guess, below.batch + 1), above.batch - 1)


def largest_batch(
    run: Callable[[int], Any], on: str, capacity: int | str | None = None, **options: Any
) -> Largest:
    """The largest batch with which `run(batch)` fits on an imagined card.

    Args:
        run: builds the model and trains a step or two with so many rows. It is called once for each
            batch that is imagined, about five times.
        on: the card.
        capacity: the card's memory, if it is not the usual one.
        options: those of `imagine`.
    """
    from pytracer.imagined.run import imagine

    card: Any = imagine(on, capacity, **options).card
    if card is None:
        raise errors.UsageError(
            "the host has no limit: name a card, as in largest_batch(run, 'T4')"
        )

    def attempt(batch: int) -> Try:
        with imagine(on, capacity, **options) as t:
            run(batch)
        return tried(batch, t.fits(), t.peak.bytes)

    batch, tries = search(attempt, card.capacity)
    return Largest(batch, card.name, card.capacity, tries)
