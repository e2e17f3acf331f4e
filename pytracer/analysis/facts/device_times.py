"""How long the device worked on each phase, as CUDA's events at the phases' borders say.

The host only tells a GPU what to do, so its own clock (the phases of `phases.py`) says when that
was, and not how long it took there. `pytracer/csrc/torch/phase_times.h` leaves the events' times in
the trace. What a file says that cannot be is left out, as if it had not been measured.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer import meta
from pytracer.analysis.facts import phases
from pytracer.recorded import Trace, once_per_trace
from pytracer.schema import I64, PHASE, U8


@dataclass(frozen=True)
class DeviceTimes:
    """Row by row: one instance of a phase. Empty where nothing was measured."""

    phase: U8
    step: I64
    stretch: NDArray[np.intp]  # of the phases' timeline, in which most of it lies on the host
    device_ns: I64


@once_per_trace
def device_times(trace: Trace) -> DeviceTimes:
    """What was measured, each with the step that it belongs to."""
    rows = meta.of(trace).phase_times.rows
    phase, begin, end, device_ns = (
        np.array([row[i] for row in rows], kind)
        for i, kind in enumerate((np.uint8, np.uint64, np.uint64, np.int64))
    )
    line = phases.timeline(trace)
    # Borders lie just outside of the scopes that they belong to; the middle is inside.
    middle = begin + (end - begin) // np.uint64(2)
    return DeviceTimes(phase, line.step_at(middle), line.stretch_at(middle), device_ns)


def missing(trace: Trace) -> int:
    """How many phases began and ended, and have no time."""
    return meta.of(trace).phase_times.missing


def per_step(trace: Trace, phase: str, steps: int) -> list[int | None]:
    """The device's time in that phase, of each step; None for one of which none was measured.

    Evaluations' forwards are left out where there are others.
    """
    found = device_times(trace)
    those = (found.phase == PHASE[phase]) & (found.step < steps)
    those &= phases.timeline(trace).of_training[found.stretch]
    sums = np.zeros(steps, np.int64)
    np.add.at(sums, found.step[those], found.device_ns[those])
    known = np.zeros(steps, np.bool_)
    known[found.step[those]] = True
    return [int(each) if is_known else None for each, is_known in zip(sums, known, strict=True)]
