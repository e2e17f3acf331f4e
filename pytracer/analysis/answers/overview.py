"""The figures of the one screen. `pytracer/export/table.py` writes them as text."""

from dataclasses import dataclass

from pytracer.analysis.allocator.blocks import DeviceBytes, device_bytes
from pytracer.analysis.answers import hints, layers, peaks, recording_quality, training_steps
from pytracer.analysis.facts import doubts, grouping, usage
from pytracer.data import meta
from pytracer.data.recorded import Trace


@dataclass(frozen=True)
class Overview:
    """The memory at a device's peak: when, what for, who holds it, and what would help."""

    peak: usage.Peak
    when: str  # the step and phase of the peak; "" before the first event
    other_devices: dict[str, int]  # their peaks in bytes
    by_kind: dict[str, int]  # the peaks of training, evaluation and generation, if several
    modules: list[layers.Repeated]  # the holders, the layers of a stack as one
    lines: list[grouping.Holder]
    memory: DeviceBytes
    updates_by_hand: bool
    medians: training_steps.PhaseMedians | None
    notes: list[str]  # what to know before the changes
    health: list[recording_quality.HealthRow]
    own_time: recording_quality.OwnTime | None
    doubts: tuple[str, ...]  # why the figures of an imagined run may be wrong
    events: int
    scopes: int
    meta: meta.Meta


def overview(trace: Trace, device: str | None = None) -> Overview:
    """Asks each answer that the screen shows."""
    peak = usage.peak(trace, device)
    alive = usage.alive(trace, "peak", peak.device)
    others = [name for name in usage.devices(trace) if name != peak.device]
    noted = meta.of(trace)
    nothing_ran = noted.imported or noted.imagined is not None  # so no time is a step's
    return Overview(
        peak=peak,
        when="" if peak.phase is None else training_steps.when(trace, peak),
        other_devices={name: usage.peak(trace, name).bytes for name in others},
        by_kind=_by_kind(trace, peak.device),
        modules=layers.repeated_modules(trace, alive, depth=False, at=peak.position),
        lines=grouping.holders(trace, "line", alive, peak.position),
        memory=device_bytes(trace, alive, peak.position, peak.device),
        updates_by_hand=training_steps.updates_by_hand(trace),
        medians=None if nothing_ran else training_steps.phase_medians(trace),
        notes=hints.notes(trace, peak.device),
        health=recording_quality.health_rows(trace),
        own_time=recording_quality.own_time(trace),
        doubts=doubts.doubts(trace),
        events=len(trace.events.ticks),
        scopes=len(trace.scopes.ticks),
        meta=noted,
    )


def _by_kind(trace: Trace, device: str) -> dict[str, int]:
    each = {kind: peak.bytes for kind, peak in peaks.by_kind(trace, device).items()}
    return each if len(each) > 1 else {}
