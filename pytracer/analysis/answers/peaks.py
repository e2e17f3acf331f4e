"""The peak of each kind of work: training, evaluation, generation.

A loop of reinforcement learning generates, scores without gradients, and trains. Which of these
needs most memory decides what to change. The kinds are read from the trace:

- `generation`: calls without a backward that hand a cache of keys and values to the next call.
- `evaluation`: other calls without a backward: of a reward or reference model, on a test set.
- `training`: forward, backward and optimizer.

What lies between two calls of one kind is of that kind as well: choosing the next word, for example.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.facts import timelines, usage
from pytracer.analysis.facts.categories import handed_caches
from pytracer.analysis.facts.scopes import NEVER
from pytracer.analysis.facts.usage import Peak
from pytracer.data import frames
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import CATEGORIES

if TYPE_CHECKING:
    import pandas as pd

KINDS = ("generation", "evaluation", "training")
_GENERATION, _EVALUATION, _TRAINING, _BETWEEN = range(4)
_NO_BYTES = np.zeros(len(CATEGORIES), np.int64)


def peaks(trace: Trace, device: str | None = None) -> "pd.DataFrame":
    """One row per kind of work that the program did: its peak, when, and by category."""
    rows = [
        {
            "kind": kind,
            "peak_bytes": peak.bytes,
            "step": peak.step,
            "phase": peak.phase,
            "time_ns": peak.time_ns,
            **peak.by_category,
        }
        for kind, peak in by_kind(trace, device).items()
    ]
    fields = ["kind", "peak_bytes", "step", "phase", "time_ns", *usage.in_order(_NO_BYTES)]
    return frames.of_rows(rows, fields).set_index("kind")


def by_kind(trace: Trace, device: str | None = None) -> dict[str, Peak]:
    """The peak of each kind of work that the program did, the largest first."""
    name = device or usage.main_device(trace)
    positions, levels, _ = usage.levels_of(trace, name)
    if len(levels) == 0:
        return {}
    kind = _kind_of_stretch(trace)[
        timelines.timeline(trace).stretch_at(trace.events.ticks[positions])
    ]
    highest = {}
    for number, word in enumerate(KINDS):
        own = np.flatnonzero(kind == number)
        if len(own):
            highest[word] = int(own[levels[own].argmax()])
    ordered = sorted(highest, key=lambda word: -int(levels[highest[word]]))
    return {word: usage.moment(trace, int(positions[highest[word]]), name) for word in ordered}


def kind_at(trace: Trace, position: int) -> str:
    """The kind of work at that event; "" between them."""
    tick = trace.events.ticks[position : position + 1]
    number = int(_kind_of_stretch(trace)[timelines.timeline(trace).stretch_at(tick)[0]])
    return "" if number == _BETWEEN else KINDS[number]


@once_per_trace
def _kind_of_stretch(trace: Trace) -> NDArray[np.uint8]:
    """The kind of each piece of the timeline."""
    line = timelines.timeline(trace)
    alone = (line.phase == timelines.FORWARD) & (line.kept_from[line.interval] == NEVER)
    kind = np.full(len(line.phase), _TRAINING, np.uint8)
    kind[line.phase == timelines.OTHER] = _BETWEEN
    kind[alone] = _EVALUATION
    cached = line.stretch_at(handed_caches(trace))
    # A call's arguments are looked at just before it begins.
    cached = np.minimum(cached + (line.phase[cached] == timelines.OTHER), len(kind) - 1)
    kind[cached[alone[cached]]] = _GENERATION
    said = np.flatnonzero(kind != _BETWEEN)
    if len(said) == 0:
        return kind
    after = np.searchsorted(said, np.arange(len(kind)))
    before = np.maximum(after - 1, 0)
    inside = (kind == _BETWEEN) & (after > 0) & (after < len(said))
    after = np.minimum(after, len(said) - 1)
    inside &= kind[said[before]] == kind[said[after]]
    kind[inside] = kind[said[before[inside]]]
    return kind
