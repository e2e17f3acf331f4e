"""Whether the trace agrees with the allocators' own counters: a proof that every trace carries."""

from collections.abc import Iterator

from pytracer import meta
from pytracer.analysis.facts import devices, lifetimes
from pytracer.recorded import Trace


def differences(trace: Trace) -> Iterator[tuple[str, int, int]]:
    """Devices on which the live bytes by the events (first) differ from the allocator's (second).

    Without a snapshot at the beginning of a device's recording (the allocator reports no events)
    there is nothing to compare.
    """
    if meta.of(trace).cuda_problem:
        return
    lives = lifetimes.lifetimes(trace)
    alive = lives.completed < 0
    for device in devices.counted_devices(trace):
        expected = devices.counted(trace, device, "requested_bytes.current")
        if expected is None or device == "cpu":
            continue
        here = devices.on(trace, device, lives.place)
        total = int(lives.bytes[alive & here].sum())
        if total != expected:
            yield device, total, expected
