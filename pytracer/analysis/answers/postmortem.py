"""An allocation that failed: who asked, who held the memory, which changes would have made room."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pytracer.analysis.allocator import advice as allocator_advice, blocks
from pytracer.analysis.answers import findings, growth, hints
from pytracer.analysis.answers.situation import Finding, Situation
from pytracer.analysis.facts import devices, grouping, owners, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.names import short_line
from pytracer.recorded import Trace
from pytracer.schema import ACTION, Mask

_MIB = 1 << 20
_MOST_BYTES = (1 << 48) - 1  # the most that an event holds; a larger request is recorded as this
_WORTH = 0.01  # of the live bytes: a change must free more
_BATCHES = ("forward", "recompute", "backward")
_OUT_OF_NOTHING = re.compile(
    r"(aten::(empty|zeros|ones|full|rand|randn|randint|randperm|arange|range|linspace|eye)"
    r"(_strided|_permuted)?)?$"
)


@dataclass(frozen=True)
class Failure:
    """The last allocation that failed. Sizes are bytes; None means unknown."""

    asked: int
    place: owners.Place
    moment: usage.Peak  # the live bytes at the failure
    alive: Mask
    allocated: int | None
    reserved: int | None
    limit: int | None  # the bytes that the allocator may hold
    device_free: int | None
    missing: int | None  # the bytes by which it failed

    @property
    def asked_is_least(self) -> bool:
        """Whether the request may be larger than an event can record."""
        return self.asked >= _MOST_BYTES

    @property
    def fragmented(self) -> int | None:
        """Bytes that the allocator reserves, in pieces that could not serve the request."""
        if self.reserved is None or self.allocated is None:
            return None
        return self.reserved - self.allocated


def failure(trace: Trace) -> Failure | None:
    """The last allocation that failed; None if all succeeded."""
    events = trace.events
    failures = np.flatnonzero(events.action == ACTION["oom"])
    if len(failures) == 0:
        return None
    at = int(failures[-1])
    device = devices.device_of_event(trace, at)
    here = devices.on(trace, device, allocations(trace).place)
    alive = here & usage.alive_at(trace, at)
    size = blocks.device_bytes(trace, alive, at, device)
    asked = int(events.bytes[at])
    limit = devices.counted(trace, device, "limit_bytes")
    free = int(events.address[at]) if device != "cpu" and events.address[at] else None
    return Failure(
        asked=asked,
        place=owners.place_of(trace, int(events.scope[at])),
        moment=usage.moment(trace, at, device),
        alive=alive,
        allocated=size.allocated,
        reserved=size.reserved,
        limit=limit,
        device_free=free,
        missing=_missing(asked, size.reserved, limit, free),
    )


def _missing(asked: int, reserved: int | None, limit: int | None, free: int | None) -> int | None:
    """The bytes that the allocator asked the driver for, less those that it could still get.

    The allocator asks only after it has given back every segment that it could.
    """
    rooms = [] if free is None else [free]
    if limit is not None and reserved is not None:
        rooms.append(limit - reserved)
    return max(_segment(asked) - min(rooms), 1) if rooms else None


def _segment(asked: int) -> int:
    """The segment that torch's CUDA allocator takes from the driver for a block."""
    if asked <= _MIB:
        return 2 * _MIB
    if asked < 10 * _MIB:
        return 20 * _MIB
    return -(-asked // (2 * _MIB)) * 2 * _MIB


# ---------------------------------------------------------------- who holds memory


@dataclass(frozen=True)
class Held:
    """Blocks that are alike."""

    bytes: int
    blocks: int
    category: str
    role: str
    name: str
    module: str
    op: str
    line: str
    shape: str
    dtype: str


_KEYS = ("category", "role", "name", "module", "op", "line", "shape", "dtype")


def largest(trace: Trace, alive: Mask, most: int | None = 8) -> list[Held]:
    """The largest holders; blocks of the same origin are one holder."""
    size = allocations(trace).requested_bytes
    if not alive.any():
        return []
    groups = [grouping.group(trace, key, alive) for key in _KEYS]
    distinct, which = grouping.together(groups)
    total = usage.sums(which, size[alive], len(distinct))
    count = np.bincount(which, minlength=len(distinct))
    rows = []
    for i in np.argsort(-total, kind="stable")[:most]:
        texts = (
            group.names[code] if code >= 0 else ""
            for group, code in zip(groups, distinct[i], strict=True)
        )
        rows.append(Held(int(total[i]), int(count[i]), *texts))
    return rows


def needless(trace: Trace, failed: Failure) -> list[Finding]:
    """Findings about memory that was alive at that moment and need not have been."""
    if not failed.alive.any():
        return []  # the first allocation on its device
    now = _situation(trace, failed)
    rows = findings.needless(now) + growth.kept_results(now)
    largest = [row for row in rows if row.at_peak > _WORTH * failed.moment.bytes]
    return sorted(largest, key=lambda row: -row.at_peak)


def _situation(trace: Trace, failed: Failure) -> Situation:
    moment = failed.moment
    return Situation(trace, moment.device, moment.position, moment.phase, failed.alive)


# ---------------------------------------------------------------- changes that make room


@dataclass(frozen=True)
class Change:
    """A change, the bytes it frees, and whether they are enough for this allocation."""

    text: str
    bytes: int
    at_most: bool  # whether the bytes are an upper bound
    fits: bool | None  # None: it is unknown by how much the allocation failed


def changes(trace: Trace, failed: Failure) -> list[Change]:
    """Changes that would have been enough, smallest first; then the others, largest first."""
    now = _situation(trace, failed)
    rows = [(row.change, row.at_peak, False) for row in needless(trace, failed)]
    for rule in (_defragment, _smaller_batch, _checkpoint, _twins, _optimizer, _pieces):
        rows += rule(now, failed)
    worth = _WORTH * max(failed.moment.bytes, failed.asked)
    options = [
        Change(text, amount, at_most, _fits(failed, amount))
        for text, amount, at_most in rows
        if amount > worth
    ]
    return sorted(options, key=lambda row: (not row.fits, row.bytes if row.fits else -row.bytes))


def _fits(failed: Failure, amount: int) -> bool | None:
    return None if failed.missing is None else amount >= failed.missing


_Rows = Iterator[tuple[str, int, bool]]


def _defragment(now: Situation, failed: Failure) -> _Rows:
    """A setting of the allocator, if a replay shows that it is enough and it is not on already."""
    if not failed.fragmented or failed.reserved is None or now.device == "cpu":
        return
    rooms = [failed.limit] if failed.limit is not None else []
    if failed.device_free is not None:
        rooms.append(failed.reserved + failed.device_free)
    advice = allocator_advice.to_run_in(now.trace, now.device, min(rooms)) if rooms else None
    if advice is not None:
        yield advice.text, max(advice.bytes, failed.missing or 0), False


def _smaller_batch(now: Situation, failed: Failure) -> _Rows:
    """Activations, temporaries, inputs and perhaps the request shrink with the batch."""
    if failed.moment.phase not in _BATCHES:
        return
    batch = _batch_size(now)
    if batch < 2:
        return
    scales = sum(failed.moment.by_category[name] for name in ("activations", "temporaries"))
    scales += failed.moment.by_category["inputs"]
    scales += failed.asked if _asks_for_a_batch(failed) else 0
    smaller = batch // 2
    if failed.missing is not None and failed.missing < scales:
        smaller = min(batch - 1, int(batch * (1 - failed.missing / scales)))
    if smaller >= 1:
        saved = scales * (batch - smaller) // batch
        yield f"a batch of {smaller} instead of {batch}", saved, False


def _asks_for_a_batch(failed: Failure) -> bool:
    """Whether a module or an op of the loss asked, not an op that makes a tensor from no other.

    In backward, the request does not count.
    """
    if failed.moment.phase == "backward":
        return False
    return bool(failed.place.module) or not _OUT_OF_NOTHING.match(failed.place.op)


def _batch_size(now: Situation) -> int:
    """The first dimension that most input bytes share; 0 if unknown."""
    sizes: dict[int, int] = {}
    for row in grouping.holders(now.trace, "shape", now.of_category("inputs")):
        first = row.name.partition("x")[0]
        if first.isdigit():
            sizes[int(first)] = sizes.get(int(first), 0) + row.bytes
    return max(sizes, key=lambda first: sizes[first], default=0)


def _checkpoint(now: Situation, failed: Failure) -> _Rows:
    """Checkpoints all layers, which saves the activations of all but one of them.

    This is an upper bound, because each layer's input is still kept.
    """
    if failed.moment.phase not in _BATCHES:
        return
    kept = hints.not_recomputed(now.trace, now.of_category("activations"))
    repeated = hints.repeated_modules(now.trace, kept)
    if repeated and repeated[0].modules > 1:
        most = repeated[0]
        saved = most.bytes - most.bytes // most.modules
        how = hints.advised(now.trace, "checkpoint").removesuffix(" on them")
        yield f"{how} on the {most.modules} modules {most.pattern}", saved, True


def _twins(now: Situation, failed: Failure) -> _Rows:
    for row in findings.twins(now):
        yield row.change, row.at_peak, False


def _optimizer(now: Situation, failed: Failure) -> _Rows:
    state = now.bytes(now.of_category("optimizer_state"))
    if state:
        how = hints.advised(now.trace, "8 bits")
        yield f"{how} (a quarter of float32 state)", state * 3 // 4, True
    if failed.moment.phase == "optimizer":
        scratch = now.bytes(now.of_category("temporaries"))
        if "_foreach_" in failed.place.op:
            scratch += failed.asked
        if scratch:
            yield "fused=True or foreach=False in the optimizer: no temporaries", scratch, True
        gradients = now.bytes(now.of_category("gradients"))
        yield "gradients in bfloat16 (with the weights)", gradients // 2, True


def _pieces(now: Situation, failed: Failure) -> _Rows:
    if failed.asked_is_least or failed.moment.phase == "optimizer":
        return
    where = short_line(failed.place.line) or failed.place.op or failed.place.module
    if where and failed.asked > failed.moment.bytes // 4:
        unknown = ", if half fits" if failed.missing is None else ""
        yield f"half of the request at a time, at {where}{unknown}", failed.asked // 2, False
