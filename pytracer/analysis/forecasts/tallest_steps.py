"""The steps that a change has to lower: those with the highest peaks, one of each that are alike."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.facts import scopes, timelines, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import I32, I64, Mask

_MOST_STEPS = 6  # of different ones


@dataclass(frozen=True)
class Part:
    """Some modules and some steps of a trace."""

    modules: frozenset[str]
    steps: tuple[int, ...]

    @property
    def before_and_in(self) -> list[int]:
        """These steps, and those before them, whose blocks may end in them."""
        return sorted({step for each in self.steps for step in (each - 1, each) if step >= 0})

    def blocks(self, trace: Trace) -> Mask:
        """The allocations that were made there."""
        return np.isin(allocations(trace).step, self.before_and_in)

    def calls(
        self, trace: Trace, by_name: dict[str, NDArray[np.intp]]
    ) -> dict[str, NDArray[np.intp]]:
        """The calls of these modules there."""
        begin, line = scopes.tree(trace).begin, timelines.timeline(trace)
        own = {name: its for name, its in by_name.items() if name in self.modules}
        own = {
            name: its[np.isin(line.step_at(begin[its]), self.before_and_in)]
            for name, its in own.items()
        }
        return {name: its for name, its in own.items() if len(its)}

    def highest(self, trace: Trace, device: str, edits: tuple[I64, I64, I64]) -> int:
        """The highest level in these steps after edits, given by positions, orders and bytes."""
        position, order, delta = (each[np.argsort(edits[0], kind="stable")] for each in edits)
        sums = np.append(0, np.cumsum(delta))
        later, levels, at_start = _levels(trace, device)
        levels = np.append(at_start, levels)
        bounds, highest = timelines.bounds(trace), 0
        for step in self.steps:
            first, last = np.searchsorted(later, bounds[step : step + 2])
            begin, end = np.searchsorted(position, bounds[step : step + 2])
            own = np.diff(levels[first : last + 1])
            where = np.concatenate([later[first:last], position[begin:end]])
            turn = np.concatenate([np.where(own < 0, 1, 2), order[begin:end]])
            change = np.concatenate([own, delta[begin:end]])[np.lexsort((turn, where))]
            level = int(levels[first] + sums[begin])
            highest = max(highest, level + int(np.cumsum(change).max(initial=0)))
        return highest


@once_per_trace
def tallest_steps(trace: Trace, device: str, but: int | None = None) -> tuple[int, ...]:
    """The steps with the highest peaks, but for one.

    Of those with the same changes in the same order, it is the highest.
    """
    later, levels, at_start = _levels(trace, device)
    if len(later) == 0:
        return ()
    first = np.searchsorted(later, timelines.bounds(trace))
    change = np.diff(levels, prepend=at_start).astype(np.uint64)
    lengths = np.diff(first)
    steps = np.flatnonzero(lengths)
    begins, lengths = first[steps], lengths[steps]
    place = np.arange(len(later)) - np.repeat(begins, lengths)
    factors = np.random.default_rng(0).integers(0, 1 << 63, int(lengths.max()), np.uint64)
    signs = np.add.reduceat(change * (2 * factors + 1)[place], begins)  # modulo 2**64
    peaks = np.maximum.reduceat(levels, begins)
    found: list[int] = []
    seen: set[tuple[int, int]] = set()
    for row in np.argsort(-peaks, kind="stable").tolist():
        sign = int(signs[row]), int(lengths[row])
        if sign not in seen and int(steps[row]) != but:
            seen.add(sign)
            found.append(int(steps[row]))
    return tuple(found[:_MOST_STEPS])


@once_per_trace
def _levels(trace: Trace, device: str) -> tuple[I32, I64, int]:
    return usage.levels_of(trace, device)
