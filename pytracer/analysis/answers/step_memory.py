"""What the memory of one step is for: at its peak and at its end, by category, module and line."""

from dataclasses import dataclass

import numpy as np

from pytracer.analysis.facts import grouping, usage
from pytracer.analysis.facts.grouping import Holder
from pytracer.analysis.facts.usage import Peak
from pytracer.data.recorded import Trace


@dataclass(frozen=True)
class StepMemory:
    """One step's memory on one device."""

    peak: Peak  # its `step` counts from the beginning of the trace
    end: Peak
    modules: list[Holder]  # at the peak, the largest first
    lines: list[Holder]


def step_memory(trace: Trace, device: str, begin: int, end: int) -> StepMemory:
    """The memory of the step between these ticks; the end still belongs to it."""
    ticks = trace.events.ticks
    here = usage.on_device(trace, device if device in usage.devices(trace) else None)
    positions, levels, _ = usage.levels_where(trace, here)
    first, last = np.searchsorted(ticks[positions], [begin, end], side="right")
    first = max(first - 1, 0)  # the level with which the step begins
    at = usage.BEFORE
    if last > first:
        at = int(positions[first + levels[first:last].argmax()])
    at_end = int(np.searchsorted(ticks, end, side="right")) - 1
    alive = here & usage.alive_at(trace, at)
    return StepMemory(
        usage.moment(trace, at, device),
        usage.moment(trace, at_end, device),
        grouping.holders(trace, "module", alive),
        grouping.holders(trace, "line", alive),
    )
