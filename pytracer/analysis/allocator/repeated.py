"""An imagined run's last step, made again some times: what a longer run asks the allocator for.

An imagined run stops after two steps. A longer run asks for the same again, but its blocks lie elsewhere
in each step: gaps grow for a few steps until the places repeat. So whether a run fits is asked of more
steps than there are.

A block that the last step frees and did not make stands for one that it makes and does not free: of
the same size and stream, in the order in which they were made. If these do not pair, the step is no step
that repeats.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.allocator.steps import (
    ALLOC,
    ATTEMPT,
    FREE_COMPLETED,
    SEED,
    Steps,
    steps as plain,
)
from pytracer.analysis.facts import timelines
from pytracer.data import meta
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import I64

_TIMES = 8
_MOST = 400_000  # steps of the allocator's model that are added, at most


def longer(trace: Trace, steps: Steps) -> tuple[Steps, I64]:
    """The steps with the last one made again, and for each the step that it repeats."""
    if meta.of(trace).imagined is None:
        return steps, np.arange(len(steps.position))
    return _longer(trace, steps.device)


@once_per_trace
def _longer(trace: Trace, device: str) -> tuple[Steps, I64]:
    """The same for an imagined run, which has the same steps under all settings."""
    steps = plain(trace, device)
    same = np.arange(len(steps.position))
    ends = timelines.timeline(trace).step_ends
    if len(ends) < 2:
        return steps, same
    ticks = trace.events.ticks[np.maximum(steps.position, 0)]
    first, last = np.searchsorted(ticks, ends[-2:], side="right").tolist()
    times = min(_TIMES, _MOST // max(last - first, 1))
    kind, block = steps.columns["kind"], steps.columns["block"].astype(np.int64)
    pairs = _pairs(steps, first, last)
    if pairs is None or not times or (kind[first:last] == ATTEMPT).any():
        return steps, same
    before, after = pairs
    count = int(block.max(initial=0)) + 1
    made = np.unique(block[first:last][kind[first:last] == ALLOC])
    number = np.arange(count)  # what each block is called in the step that was made last
    parts = [block[:last]]
    for again in range(times):
        renamed = number.copy()
        renamed[before] = number[after]
        number[made] = count + again * len(made) + np.arange(len(made))
        renamed[made] = number[made]
        parts.append(renamed[block[first:last]])
    parts.append(number[block[last:]])
    source = np.concatenate([same[:last], *[same[first:last]] * times, same[last:]])
    columns = {
        name: values if name == "lanes" else values[source]
        for name, values in steps.columns.items()
    }
    columns["block"] = np.concatenate(parts).astype(np.uint32)
    return replace(steps, columns=columns, position=steps.position[source]), source


def _pairs(
    steps: Steps, first: int, last: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Blocks from before these steps that they free, and those that they leave for the next."""
    kind, block = steps.columns["kind"], steps.columns["block"].astype(np.int64)
    born = np.flatnonzero((kind == ALLOC) | (kind == SEED))
    order = np.full(int(block.max(initial=0)) + 1, -1)
    order[block[born]] = born
    done = block[first:last][kind[first:last] == FREE_COMPLETED]
    made = born[born >= first]
    made = block[made[made < last]]
    before, after = np.setdiff1d(done, made), np.setdiff1d(made, done)
    found = []
    for blocks in (before, after):
        size, lane = (steps.columns[name][order[blocks]] for name in ("bytes", "lane"))
        by_size = np.lexsort((order[blocks], lane, size))
        found.append((blocks[by_size], size[by_size], lane[by_size]))
    (before, *one), (after, *other) = found
    alike = all(map(np.array_equal, one, other))
    return (before, after) if alike else None
