"""Why the figures of an imagined run may be wrong, so that no answer may rest on them."""

import numpy as np

from pytracer.analysis.facts import timelines, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.basics.units import size_text
from pytracer.data import meta
from pytracer.data.meta import Imagined
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import CATEGORY, I64

_MATTERS = 0.001  # of the peak: what is less changes no answer
_COMPILED = (
    "torch.compile was not followed: compiled code is counted as eager, and takes other memory"
)
_NOT_FOLLOWED = "what torch.compile made takes other memory on a card: {why}"
_PADDED = (
    "torch.compile pads a product with an operand of {bytes} where that is faster, which only the "
    "card knows: this is a guess"
)
_ASKED = (
    "torch's own bookkeeping ({places}) asked for {bytes} here, which it would not do on a card. "
    "Please report it with the trace"
)
_OVERSIZED = (
    "a tensor that is sharded has {bytes} on this rank, and the rank's share is {share}. Please "
    "report it with the trace"
)
_LEFT_OUT = (
    "{line}: this rank leaves out parameters of {bytes}, and gets their gradients if another rank uses "
    'them. Say whether one does: assume={{"{line}": True}}, or --assume {line}=true'
)
_FIRST_STEP = (
    "the first step takes {bytes} more than the next ones with the same inputs, and nothing that "
    "stays explains it. Please report it with the trace"
)


@once_per_trace
def doubts(trace: Trace) -> tuple[str, ...]:
    """A sentence for each reason; none for a run that was not imagined."""
    imagined = meta.of(trace).imagined
    if imagined is None or not trace.has_allocations:
        return ()
    peak = max(usage.peak(trace).bytes, 1)
    found = [_COMPILED] if imagined.compiled else []
    found += [_NOT_FOLLOWED.format(why=why) for why in imagined.not_followed]
    if imagined.padded > _MATTERS * peak:
        found.append(_PADDED.format(bytes=size_text(imagined.padded)))
    found += _bookkeeping(imagined, peak)
    found += _oversized(imagined)
    found += [
        _LEFT_OUT.format(line=one.left_out, bytes=size_text(one.bytes))
        for one in imagined.doubts
        if one.left_out
    ]
    found += [one.says for one in imagined.doubts if one.says]
    more = _more_in_first_step(trace)
    if more > _MATTERS * peak:
        found.append(_FIRST_STEP.format(bytes=size_text(more)))
    return tuple(found)


def _oversized(imagined: Imagined) -> list[str]:
    large = [(one.bytes, one.share) for one in imagined.doubts if one.share is not None]
    if not large:
        return []
    most, share = max(large)
    return [_OVERSIZED.format(bytes=size_text(most), share=size_text(share))]


def _bookkeeping(imagined: Imagined, peak: int) -> list[str]:
    asked = {one.asked_by: one.bytes for one in imagined.doubts if one.asked_by}
    total = sum(asked.values())
    if total <= _MATTERS * peak:
        return []
    return [_ASKED.format(places=", ".join(sorted(asked)), bytes=size_text(total))]


def _more_in_first_step(trace: Trace) -> int:
    """By how much its peak exceeds that of each later step that had the same inputs."""
    device = usage.main_device(trace)
    ends = timelines.timeline(trace).step_ends
    if len(ends) < 2:
        return 0
    positions, levels, _ = usage.levels_of(trace, device)
    step = np.searchsorted(ends, trace.events.ticks[positions])
    whole = step < len(ends)
    peaks = np.zeros(len(ends), np.int64)
    np.maximum.at(peaks, step[whole], levels[whole])
    given = _inputs(trace, device, len(ends))
    alike = np.flatnonzero(given[1:] == given[0]) + 1
    return int(peaks[0] - peaks[alike].max()) if len(alike) else 0


def _inputs(trace: Trace, device: str, steps: int) -> I64:
    """The bytes of the inputs that each step was given."""
    alloc = allocations(trace)
    given = usage.on_device(trace, device) & (alloc.category == CATEGORY["inputs"])
    given &= (alloc.step >= 0) & (alloc.step < steps)
    return usage.sums(alloc.step[given], alloc.requested_bytes[given], steps)
