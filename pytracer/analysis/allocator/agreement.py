"""Does the trace say what the allocators counted? The proof that every trace carries with it."""

from collections.abc import Iterator

from pytracer import meta
from pytracer.analysis.facts import devices, lifetimes
from pytracer.recorded import Trace


def differences(trace: Trace) -> Iterator[tuple[str, int, int]]:
    """Devices on which the events' sum of what is alive (first) is not the allocator's (second).

    Where no snapshot began a device's recording (its allocator reports no events) there is
    nothing to compare.
    """
    if meta.of(trace).cuda_problem:
        return
    found = lifetimes.lifetimes(trace)
    alive = found.completed < 0
    for device in devices.counted_devices(trace):
        expected = devices.counted(trace, device, "requested_bytes.current")
        if expected is None or not device.startswith("cuda:"):
            continue
        here = devices.on(trace, device, found.place)
        total = int(found.bytes[alive & here].sum())
        if total != expected:
            yield device, total, expected
