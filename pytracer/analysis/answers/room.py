"""Changes that make room for an allocation that failed, beside those that lower the peak."""

import re
from collections.abc import Iterator

import numpy as np

from pytracer.analysis.allocator import advice as allocator_advice
from pytracer.analysis.answers import postmortem
from pytracer.analysis.answers.edits import Edit
from pytracer.analysis.answers.hints import FREE, OTHER_NUMBERS, TRADE, Hint
from pytracer.analysis.answers.postmortem import Failure
from pytracer.analysis.facts import grouping
from pytracer.analysis.facts.allocations import allocations
from pytracer.basics.names import short_line
from pytracer.basics.units import size_text
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORY

_BATCHES = ("forward", "recompute", "backward")
_SHRINK = ("activations", "temporaries", "inputs")  # with the batch
_OUT_OF_NOTHING = re.compile(
    r"(aten::(empty|zeros|ones|full|rand|randn|randint|randperm|arange|range|linspace|eye)"
    r"(_strided|_permuted)?)?$"
)


def hints(trace: Trace, device: str) -> Iterator[Hint]:
    """The changes for the last allocation that failed, if one did on this device."""
    failed = postmortem.failure(trace)
    if failed is not None and failed.moment.device == device:
        for rule in (_defragment, _smaller_batch, _pieces):
            yield from rule(trace, failed)


def _defragment(trace: Trace, failed: Failure) -> Iterator[Hint]:
    """A setting of the allocator, if a replay shows that it is enough and it is not on already."""
    device = failed.moment.device
    if not failed.fragmented or failed.reserved is None or device == "cpu":
        return
    rooms = [failed.limit] if failed.limit is not None else []
    if failed.device_free is not None:
        rooms.append(failed.reserved + failed.device_free)
    advice = allocator_advice.to_run_in(trace, device, min(rooms)) if rooms else None
    if advice is not None:
        text = f"{advice.text} would have served the request that failed, as a replay shows."
        yield Hint(text, advice.bytes, FREE, serves=True)


def _smaller_batch(trace: Trace, failed: Failure) -> Iterator[Hint]:
    """Activations, temporaries, inputs and perhaps the request shrink with the batch."""
    if failed.moment.phase not in _BATCHES:
        return
    batch = _batch_size(trace, failed)
    if batch < 2:
        return
    kept = sum(failed.moment.by_category[name] for name in _SHRINK)
    scales = kept + (failed.asked if _asks_for_a_batch(failed) else 0)
    smaller = batch // 2
    if failed.missing is not None and failed.missing < scales:
        smaller = min(batch - 1, int(batch * (1 - failed.missing / scales)))
    if smaller >= 1:
        which = np.isin(allocations(trace).category, [CATEGORY[name] for name in _SHRINK])
        yield Hint(
            f"A batch of {smaller} instead of {batch}: activations, temporaries and inputs shrink "
            "with it.",
            kept * (batch - smaller) // batch,
            TRADE,
            Edit(which, share=smaller / batch),
            "more steps",
            OTHER_NUMBERS,
            serves=None
            if failed.missing is None
            else scales * (batch - smaller) // batch >= failed.missing,
        )


def _asks_for_a_batch(failed: Failure) -> bool:
    """Whether a module or an op of the loss asked, not an op that makes a tensor from no other.

    In backward, the request does not count.
    """
    if failed.moment.phase == "backward":
        return False
    return bool(failed.place.module) or not _OUT_OF_NOTHING.match(failed.place.op)


def _batch_size(trace: Trace, failed: Failure) -> int:
    """The first dimension that most input bytes share; 0 if unknown."""
    sizes: dict[int, int] = {}
    inputs = failed.alive & (allocations(trace).category == CATEGORY["inputs"])
    for row in grouping.holders(trace, "shape", inputs):
        first = row.name.partition("x")[0]
        if first.isdigit():
            sizes[int(first)] = sizes.get(int(first), 0) + row.bytes
    return max(sizes, key=lambda first: sizes[first], default=0)


def _pieces(trace: Trace, failed: Failure) -> Iterator[Hint]:
    if failed.asked_is_least or failed.moment.phase == "optimizer":
        return
    where = short_line(failed.place.line) or failed.place.op or failed.place.module
    if where and failed.asked > failed.moment.bytes // 4:
        half = failed.asked // 2
        yield Hint(
            f"The request that failed is {size_text(failed.asked)}, at {where}: work on it in "
            "pieces.",
            half,
            TRADE,
            price="more and smaller kernels",
            serves=None if failed.missing is None else half >= failed.missing,
        )
