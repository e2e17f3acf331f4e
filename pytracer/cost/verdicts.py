"""Compares measured ratios of backward to forward with the textbook's, and explains differences.

By the textbook, a contraction computes twice as much in backward and takes about twice as long.
Bandwidth limits every other operator, so its time follows its bytes. A row with another ratio is
`explained` only if a named cause in the same trace leads to the measured ratio. Otherwise it is `off`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytracer.cost.measurements import CLASSES, Direction, Rates, Record

CONFIRMED, EXPLAINED, OFF, NONE = "confirmed", "explained", "off", ""

TEXTBOOK_CONTRACTION = 2.0
# The allowed distance between a measured ratio and the expected one.
_CONTRACTION_BAND = (0.9, 1.2)
_BYTES_BAND, _BYTES_ROOM = 0.1, 0.15
_NEAR_A_COPY = 0.75  # of a copy's bandwidth
_SHORT_KERNEL_NS = 10_000  # in a shorter kernel, the launch takes as long as the kernel
_SHORT_OPERATOR_NS = 20_000  # the same for operators on the CPU
_MOST_WITHOUT_MODEL = 0.2  # of a row's forward time


@dataclass(frozen=True)
class Judged:
    """The textbook's ratio for a row, and the verdict on the measured one."""

    expected: float | None
    because: str
    verdict: str
    cause: str


@dataclass(frozen=True)
class _Expected:
    """The expected ratios of one operator, with its time in forward as the weight."""

    weight: int
    textbook: float
    counted: float
    is_contraction: bool


def judge(
    group: Sequence[Record], rates: Rates | None, clock: str, *, whole: bool = False
) -> Judged:
    """Judges a group of records. `whole`: the group is a class, so operators are not paired."""
    forward = [r for r in group if r.phase == "forward"]
    backward = [r for r in group if r.phase in ("backward", "recompute")]
    forward_ns, backward_ns = _time(forward), _time(backward)
    if not forward_ns or not backward_ns:
        return Judged(None, "", NONE, "")
    if whole and group[0].kind not in CLASSES[:3]:
        return Judged(None, "", NONE, "")
    expected, without = _expected(forward, backward, whole=whole)
    weight = sum(each.weight for each in expected)
    if not weight or without > _MOST_WITHOUT_MODEL * (weight + without):
        fused = _is_fused(group)
        reason = "compiled: forward and backward are fused differently" if fused else ""
        return Judged(None, "", EXPLAINED if fused else NONE, reason)
    textbook = sum(each.weight * each.textbook for each in expected) / weight
    counted = sum(each.weight * each.counted for each in expected) / weight
    contracts = 2 * sum(e.weight for e in expected if e.is_contraction) > weight
    because = "twice the FLOPs" if contracts else "bytes read and written"
    ratio = backward_ns / forward_ns
    if within(ratio, textbook, contracts):
        return Judged(textbook, because, CONFIRMED, "")
    cause = _cause(ratio, textbook, counted, contracts, forward, backward, rates, clock)
    return Judged(textbook, because, EXPLAINED if cause else OFF, cause)


def within(ratio: float, expected: float, contracts: bool) -> bool:
    """Whether a measured ratio is about the expected one."""
    if contracts:
        low, high = _CONTRACTION_BAND
        return low * expected <= ratio <= high * expected
    return abs(ratio - expected) <= max(_BYTES_BAND * expected, _BYTES_ROOM)


def _expected(
    forward: list[Record], backward: list[Record], *, whole: bool
) -> tuple[list[_Expected], int]:
    """The expected ratios of each operator, and the forward time of operators without a model."""
    names = {"": (forward, backward)} if whole else _by_pair(forward, backward)
    expected, without = [], 0
    for ahead, back in names.values():
        first, second = Direction.of(ahead), Direction.of(back)
        own = Direction.of(record for record in back if whole or not _is_extra(record))
        if not first.time_ns:
            continue
        if first.flops:
            counted = second.flops / first.flops
            expected.append(_Expected(first.time_ns, TEXTBOOK_CONTRACTION, counted, True))
        elif first.without_bytes_ns * 2 > first.time_ns:
            if any(record.flops is None or record.launches for record in ahead):
                without += first.time_ns
        elif first.bytes:
            by_kernel = own.kernel_bytes / max(first.kernel_bytes, 1)
            expected.append(_Expected(first.time_ns, own.bytes / first.bytes, by_kernel, False))
    return expected, without


def _by_pair(
    forward: list[Record], backward: list[Record]
) -> dict[str, tuple[list[Record], list[Record]]]:
    pairs: dict[str, tuple[list[Record], list[Record]]] = {}
    for side, records in enumerate((forward, backward)):
        for record in records:
            key = f"{record.module}\0{record.pair}"
            pairs.setdefault(key, ([], []))[side].append(record)
    return pairs


def _time(records: Iterable[Record]) -> int:
    return sum(record.time_ns for record in records)


def _cause(
    ratio: float,
    textbook: float,
    counted: float,
    contracts: bool,
    forward: list[Record],
    backward: list[Record],
    rates: Rates | None,
    clock: str,
) -> str:
    """The first named cause that leads to the measured ratio; "" if there is none."""
    if abs(counted - textbook) > 0.01 and within(ratio, counted, contracts):
        return _why_counted(counted, contracts, forward, backward)
    added = _added(backward)
    for without, name in added:
        less = (_time(backward) - without) / _time(forward)
        if within(less, textbook, contracts) or within(less, counted, contracts):
            return f"{name}: {without / _time(backward):.0%} of backward"
    everything = sum(without for without, _ in added)
    less = (_time(backward) - everything) / _time(forward)
    if len(added) > 1 and (within(less, textbook, contracts) or within(less, counted, contracts)):
        return " and ".join(name for _, name in added)
    for kind, in_kernels in _NO_ARITHMETIC.items():
        if _fits_without(in_kernels, textbook, contracts, forward, backward):
            shares = (_in_kernels(side, in_kernels) / _time(side) for side in (forward, backward))
            return "{}: {:.0%} of forward, {:.0%} of backward".format(kind, *shares)
    if (cast := _casts(textbook, contracts, forward, backward)) is not None:
        return cast
    bound = _roofline(ratio, contracts, forward, backward, rates)
    if bound:
        return bound
    slow = _slow_calls(ratio > counted, forward, backward, clock)
    return slow or _by_memory(contracts, forward, backward, rates)


def _why_counted(
    counted: float, contracts: bool, forward: list[Record], backward: list[Record]
) -> str:
    """The reason why the counted ratio differs from the textbook's."""
    if not contracts:
        return f"torch's kernels read more than once: {counted:.2f}x the bytes"
    reasons = []
    if any(record.phase == "recompute" for record in backward):
        reasons.append("checkpointing runs the forward again")
    if any("attention" in record.op for record in backward if record.flops):
        reasons.append("attention recomputes its scores (2.5x)")
    once = _one_gradient(forward, backward)
    if once:
        reasons.append(once)
    return f"{' and '.join(reasons) or 'FLOPs as counted'}: {counted:.2f}x the FLOPs"


def _one_gradient(forward: list[Record], backward: list[Record]) -> str:
    """A text if some contraction made only one of its two gradients, or else ""."""
    for ahead, back in _by_pair(forward, backward).values():
        made = sum(record.flops or 0 for record in back if record.phase == "backward")
        done = sum(record.flops or 0 for record in ahead)
        if done and made < 1.5 * done:
            return "only one gradient: a first layer, or frozen weights"
    return ""


def _added(backward: list[Record]) -> list[tuple[int, str]]:
    """Time in backward that belongs to no operator's own gradient."""
    sums = _time(record for record in backward if _is_bias_sum(record))
    adds = _time(record for record in backward if _is_gradient_sum(record))
    again = _time(record for record in backward if record.phase == "recompute")
    added = [
        (sums, "the bias gradient's reduction"),
        (adds, "gradients added up"),
        (again, "checkpointing runs the forward again"),
    ]
    return [(time_ns, name) for time_ns, name in added if time_ns]


# Kernels that do no arithmetic of the operator itself, by their names.
_PARTS = "parts of a product added up"
_NO_ARITHMETIC = {
    "tensors turned into another layout": re.compile(
        r"nchwToNhwc|nhwcToNchw|convertTensor|tensorTransform|transpose", re.IGNORECASE
    ),
    _PARTS: re.compile(r"splitK.*reduce|reduce_?(splitk|wgrad)", re.IGNORECASE),
}


def _in_kernels(records: Iterable[Record], names: re.Pattern[str]) -> int:
    """Nanoseconds in kernels with these names."""
    return sum(
        taken
        for record in records
        for name, taken in zip(record.kernels, record.kernel_ns, strict=False)
        if names.search(name)
    )


def _fits_without(
    names: re.Pattern[str],
    textbook: float,
    contracts: bool,
    forward: list[Record],
    backward: list[Record],
) -> bool:
    """Whether such kernels ran, and the ratio without them is the textbook's."""
    sides = (forward, backward)
    inside = [_in_kernels(side, names) for side in sides]
    left = [_time(side) - taken for side, taken in zip(sides, inside, strict=True)]
    return any(inside) and left[0] > 0 and within(left[1] / left[0], textbook, contracts)


def _casts(
    textbook: float, contracts: bool, forward: list[Record], backward: list[Record]
) -> str | None:
    """A text if the ratio without casts (autocast's, or a float32 loss's) is the textbook's."""
    times = [_time(forward), _time(backward)]
    casts = [
        _time(record for record in side if "cast" in record.notes) for side in (forward, backward)
    ]
    left = times[0] - casts[0]
    if not any(casts) or not left:
        return None
    if not within((times[1] - casts[1]) / left, textbook, contracts):
        return None
    return f"casts between types: {casts[0] / times[0]:.0%} of forward, {casts[1] / times[1]:.0%} of backward"


def _is_extra(record: Record) -> bool:
    """Whether the record is not part of the operator's own gradients."""
    return record.phase == "recompute" or _is_bias_sum(record) or _is_gradient_sum(record)


def _is_bias_sum(record: Record) -> bool:
    return record.op == "aten::sum" and record.pair != "aten::sum" and record.kind == "other"


def _is_gradient_sum(record: Record) -> bool:
    summed = record.kind in ("element-wise", "data movement")
    return record.node in ("AccumulateGrad", "gradient sum") and summed


def _roofline(
    ratio: float,
    contracts: bool,
    forward: list[Record],
    backward: list[Record],
    rates: Rates | None,
) -> str:
    """A text if the device's peaks allow the measured ratio, and memory limits a contraction."""
    sides = [_at_peaks(side, rates) for side in (forward, backward)] if contracts else []
    if not sides or not all(sides):
        return ""
    (ahead, moving), (back, moving_back) = sides
    if not (moving or moving_back) or not ahead or not within(ratio, back / ahead, True):
        return ""
    return f"bound by memory, not by arithmetic: {back / ahead:.2f}x at the device's peaks"


def _at_peaks(records: list[Record], rates: Rates | None) -> tuple[float, float]:
    """Seconds at the device's peaks: of all records, and of the contractions that memory limits.

    Both are 0 if a peak is unknown.
    """
    whole = moved = 0.0
    for record in records:
        rate = rates.flops(record.dtype) if rates else None
        if rates is None or rates.copy is None or (record.flops and rate is None):
            return 0.0, 0.0
        computing = record.flops / rate if record.flops and rate else 0.0
        moving = (record.kernel_bytes or 0) / rates.copy
        whole += max(computing, moving)
        moved += moving if record.flops and moving > computing else 0.0
    return whole, moved


def _by_memory(
    contracts: bool, forward: list[Record], backward: list[Record], rates: Rates | None
) -> str:
    """A text if contractions are nearly as fast as a copy of their bytes, on both sides."""
    if not contracts:
        return ""
    shares, added = [], _NO_ARITHMETIC[_PARTS]
    for side in (forward, backward):
        rest = _time(side) - _in_kernels(side, added)
        shares.append(_at_peaks(side, rates)[1] / rest * 1e9 if rest else 0.0)
    if min(shares) < _NEAR_A_COPY:
        return ""
    text = (
        f"bound by memory: {shares[0]:.0%} of a copy's bandwidth forward, {shares[1]:.0%} backward"
    )
    parts = _in_kernels(backward, added)
    return f"{text}, and {_PARTS}: {parts / _time(backward):.0%} of backward" if parts else text


def _slow_calls(is_slow: bool, forward: list[Record], backward: list[Record], clock: str) -> str:
    """The reason why calls are slow for their size, on the side that is slower than expected."""
    side = backward if is_slow else forward
    unaligned = [note for r in side for note in r.notes if note.startswith("unaligned: ")]
    if unaligned and clock == "kernels":  # only tensor cores need this alignment
        return unaligned[0]
    older = _older_kernels(side, forward if is_slow else backward)
    if older:
        return older
    both = [*forward, *backward]
    kernels = clock == "kernels"
    working = both if kernels else [r for r in both if r.kernel_bytes]  # views do no work
    launches = sum(r.launches if kernels else r.calls for r in working)
    limit = _SHORT_KERNEL_NS if kernels else _SHORT_OPERATOR_NS
    if launches and _time(working) < limit * launches:
        unit = "kernels" if kernels else "operators"
        return f"launch-bound: {unit} of {_time(working) / launches / 1e3:.1f} us"
    if _is_fused(both):
        return "compiled: forward and backward are fused differently"
    return ""


_GENERATION = re.compile(
    r"sm_?(\d\d\d?)|cutlass_(\d\d)_|(volta|turing|ampere|hopper)", re.IGNORECASE
)
_GENERATIONS = {"volta": 70, "turing": 75, "ampere": 80, "hopper": 90}
_WITHOUT_TENSOR_CORES = re.compile(r"depthwise|c1_k1|grouped_direct", re.IGNORECASE)


def _older_kernels(slow: list[Record], fast: list[Record]) -> str:
    """A text if the slower side's kernels are for an older chip, or use no tensor cores."""
    slowest, other = _longest_kernel(slow), _longest_kernel(fast)
    if _WITHOUT_TENSOR_CORES.search(slowest):
        return f"not on tensor cores: {slowest[:60]}"
    old, new = _generation(slowest), _generation(other)
    if old and new and old < new:
        return f"kernels for an older chip: sm{old} where the other side has sm{new}"
    return ""


def _longest_kernel(records: Iterable[Record]) -> str:
    """The name of the kernel that took longest, among those of contractions."""
    times = [
        (taken, name)
        for record in records
        if record.flops
        for name, taken in zip(record.kernels, record.kernel_ns, strict=False)
    ]
    return max(times, default=(0, ""))[1]


def _generation(kernel: str) -> int:
    match = _GENERATION.search(kernel)
    if match is None:
        return 0
    number = match[1] or match[2]
    return int(number) if number else _GENERATIONS[match[3].lower()]


def _is_fused(records: Iterable[Record]) -> bool:
    return any(r.op.startswith("triton_") or r.pair.startswith("CompiledFunction") for r in records)
