"""Does the trace say what the allocators counted? The proof that every trace carries with it."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from pytracer.analysis import matching
from pytracer.schema import DEVICE_TYPES
from pytracer.trace import Trace

_CUDA = DEVICE_TYPES.index("cuda")


def differences(trace: Trace) -> Iterator[tuple[str, int]]:
    """Devices on which the events' sum of what is alive is not the allocator's, and by how much.

    Where no snapshot began a device's recording (its allocator reports no events) there is
    nothing to compare.
    """
    counters = trace.meta.get("counters")
    end = counters.get("end") if isinstance(counters, dict) else None
    if not isinstance(end, dict):
        return
    found = matching.lifetimes(trace)
    alive = found.completed < 0
    for device, counted in end.items():
        expected = _requested(counted)
        index = device.removeprefix("cuda:")
        if expected is None or not index.isdigit() or trace.meta.get("cuda_problem"):
            continue
        places = (trace.places.device_type == _CUDA) & (trace.places.device_index == int(index))
        here = places[np.minimum(found.place, len(places) - 1)]
        difference = abs(int(found.bytes[alive & here].sum()) - expected)
        if difference:
            yield device, difference


def _requested(counted: Any) -> int | None:
    value = counted.get("requested_bytes.current") if isinstance(counted, dict) else None
    return value if isinstance(value, int) else None
