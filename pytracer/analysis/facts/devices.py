"""A trace's devices: the places on each, and the figures that its allocator counted."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer.data import meta
from pytracer.data.recorded import Trace
from pytracer.data.schema import ACTION, DEVICE_TYPES, Mask, device_name


def split(device: str) -> tuple[int, int]:
    """The device type's number and the index, from "cuda:1" or "cpu"."""
    kind, _, index = device.partition(":")
    # A damaged trace may have types that do not exist: "device127".
    number = DEVICE_TYPES.index(kind) if kind in DEVICE_TYPES else int(kind.removeprefix("device"))
    return number, int(index) if index.isdigit() else 0


def places_on(trace: Trace, device: str) -> Mask:
    """Per row of the table of places, whether it is on the device."""
    kind, index = split(device)
    is_there: Mask = (trace.places.device_type == kind) & (trace.places.device_index == index)
    return is_there


def on(trace: Trace, device: str, place: NDArray[np.uint16]) -> Mask:
    """Per place number, whether it is on the device. A damaged trace may lack some places."""
    there = places_on(trace, device)
    return there[np.minimum(place, min(len(there) - 1, np.iinfo(place.dtype).max))]


def counted(trace: Trace, device: str, name: str, when: str = "end") -> int | None:
    """A counter of the device's allocator when the trace began or ended; None if not recorded."""
    return meta.of(trace).counters.get(when, {}).get(device, {}).get(name)


def counted_devices(trace: Trace) -> tuple[str, ...]:
    """The devices whose allocator's counters were read when the trace ended."""
    return tuple(meta.of(trace).counters.get("end", ()))


def allowed(trace: Trace, device: str) -> int | None:
    """The bytes that the allocator may hold, if set_per_process_memory_fraction() limits them."""
    return meta.of(trace).device_memory.allowed.get(device)


# The setting that makes segments grow instead of leaving gaps.
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"


def expandable(trace: Trace, device: str) -> bool:
    """Whether the device's segments are expandable: events show it, or the program asked for it."""
    mapped = trace.events.action == ACTION["segment_map"]
    asked = meta.of(trace).alloc_conf.replace(" ", "").lower()
    return "expandable_segments:true" in asked or bool(
        (mapped & on(trace, device, trace.events.place)).any()
    )


def device_of_place(trace: Trace) -> NDArray[Any]:
    """The name of each place's device, such as `cpu` or `cuda:0`."""
    places = trace.places
    names = [
        device_name(kind, index)
        for kind, index in zip(places.device_type, places.device_index, strict=True)
    ]
    return np.array(names, dtype=object)


def device_of_event(trace: Trace, position: int) -> str:
    """The device of the event; a damaged trace may lack the event's place."""
    names = device_of_place(trace)
    return str(names[min(int(trace.events.place[position]), len(names) - 1)])


def pool_text(trace: Trace, place: int) -> str:
    """The id of the place's private pool; empty for the allocator's default pool."""
    high, low = trace.places.pool_high[place], trace.places.pool_low[place]
    return f"{high}.{low}" if high or low else ""
