"""How long the device worked on each phase, measured by CUDA events at the phases' borders.

The host only queues work for a GPU. Its clock (the phases of `phases.py`) shows when it did so, but
not how long the work took. `pytracer/csrc/torch/phase_times.h` leaves the events' times in the
trace. Impossible times in a file are ignored, as if they had not been measured.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.facts import timelines
from pytracer.data import meta
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import I64, PHASE, U8


@dataclass(frozen=True)
class DeviceTimes:
    """One row per measured instance of a phase."""

    phase: U8
    step: I64
    stretch: NDArray[np.intp]  # the stretch of the host's timeline in which its middle lies
    device_ns: I64


@once_per_trace
def device_times(trace: Trace) -> DeviceTimes:
    """The measured phases, each with its step."""
    rows = meta.of(trace).phase_times.rows
    phase, begin, end, device_ns = (
        np.array([row[i] for row in rows], kind)
        for i, kind in enumerate((np.uint8, np.uint64, np.uint64, np.int64))
    )
    line = timelines.timeline(trace)
    # The borders lie just outside of their scope; the middle lies inside.
    middle = begin + (end - begin) // np.uint64(2)
    return DeviceTimes(phase, line.step_at(middle), line.stretch_at(middle), device_ns)


def per_step(trace: Trace, phase: str, steps: int) -> list[int | None]:
    """The device's time in that phase for each step; None if the step has no measured time.

    The forwards of evaluations do not count if there are training forwards.
    """
    times = device_times(trace)
    rows = (times.phase == PHASE[phase]) & (times.step < steps)
    rows &= timelines.timeline(trace).of_training[times.stretch]
    sums = np.zeros(steps, np.int64)
    np.add.at(sums, times.step[rows], times.device_ns[rows])
    measured = np.zeros(steps, np.bool_)
    measured[times.step[rows]] = True
    return [int(time) if has else None for time, has in zip(sums, measured, strict=True)]
