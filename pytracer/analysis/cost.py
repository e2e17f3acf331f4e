"""What each part cost, forward and backward, and whether that is what the textbook says.

Reads the document that `pytracer/cost/measure.py` left in the trace. Three ratios of backward to
forward are compared: FLOPs, bytes and time. The textbook: a contraction computes twice as much in
backward and takes about twice as long; everything else is bound by bandwidth and takes as long as
it moves bytes. What departs from it is `explained` only where a named cause, seen in this trace,
leads to the ratio that was measured, and `off` otherwise.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from pytracer import errors
from pytracer.analysis.once import once_per_trace
from pytracer.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

CLASSES = (
    "contraction",
    "normalisation",
    "element-wise",
    "optimizer",
    "data movement",
    "communication",
    "other",
)
PHASES = ("forward", "backward", "recompute", "optimizer", "other")
CONFIRMED, EXPLAINED, OFF, NONE = "confirmed", "explained", "off", ""

TEXTBOOK_CONTRACTION = 2.0
# How far from an expected ratio a measured one may be.
_CONTRACTION_BAND = (0.9, 1.2)
_BYTES_BAND, _BYTES_ROOM = 0.1, 0.15
_NEAR_A_COPY = 0.75  # of its bandwidth
_SHORT_KERNEL_NS = 10_000  # below, a launch costs as much as its kernel does
_SHORT_OPERATOR_NS = 20_000  # the same of operators on the CPU
_MOST_WITHOUT_MODEL = 0.2  # of a row's forward time

_ROWS_LIMIT = 2_000_000


@dataclass(frozen=True)
class Record:
    """Calls alike: one module, phase, operator and shapes. FLOPs and bytes are None if unknown."""

    module: str
    phase: str
    op: str
    pair: str
    node: str
    kind: str  # the class
    shapes: str
    dtype: str
    calls: int
    time_ns: int
    host_ns: int
    launches: int
    flops: int | None
    other_flops: int | None
    bytes: int | None
    kernel_bytes: int | None
    notes: tuple[str, ...]
    kernels: tuple[str, ...]  # those that took longest
    kernel_ns: tuple[int, ...] = ()  # how long each did


@dataclass(frozen=True)
class Measured:
    """The document, checked."""

    records: tuple[Record, ...]
    device: str
    device_name: str
    clock: str  # "kernels" or "operators"
    busy_ns: int
    device_busy_ns: int | None
    matmul_precision: str
    peaks: Mapping[str, Any] | None
    module_calls: tuple[tuple[str, int, str], ...] = ()  # path, calls in forward, called by


@dataclass(frozen=True)
class Row:
    """A module, an operator or a class. Ratios are backward, recomputation included, by forward."""

    name: str
    kind: str  # the class of most of its forward time
    calls: int
    forward_ns: int
    backward_ns: int
    recompute_ns: int
    optimizer_ns: int
    other_ns: int
    time_ns: int
    time_share: float
    forward_flops: int
    backward_flops: int
    recompute_flops: int
    forward_bytes: int
    backward_bytes: int
    recompute_bytes: int
    flop_ratio: float | None
    byte_ratio: float | None
    time_ratio: float | None
    expected_ratio: float | None
    expected_because: str
    flops_per_s: float | None
    of_peak_flops: float | None
    bytes_per_s: float | None
    of_peak_bandwidth: float | None
    verdict: str
    cause: str
    uncounted_calls: int  # without a FLOP formula
    without_bytes_ns: int  # time without a model of its bytes


@dataclass(frozen=True)
class Uncounted:
    """An operator without a FLOP formula, or without a model of its bytes."""

    op: str
    calls: int
    time_ns: int
    missing: str  # "FLOPs" or "bytes"


def rows(trace: Trace, by: str = "module", peaks: Mapping[str, Any] | None = None) -> list[Row]:
    """The table: every nanosecond that was measured is in exactly one row.

    Args:
        trace: one that was recorded with cost=True.
        by: "module", "op" or "class".
        peaks: what the device can do at most, where the trace does not say.

    Raises:
        errors.UsageError: nothing was measured, or no such table.
    """
    found = measured(trace)
    keys: dict[str, Callable[[Record], str]] = {
        "module": lambda record: record.module,
        "op": lambda record: record.pair,
        "class": lambda record: record.kind,
    }
    if by not in keys:
        listed = ", ".join(map(repr, keys))
        raise errors.UsageError(f"by={by!r} is not understood; it is one of {listed}")
    groups: dict[str, list[Record]] = {name: [] for name in CLASSES} if by == "class" else {}
    for record in found.records:
        groups.setdefault(keys[by](record), []).append(record)
    return summarised(found, groups, by, peaks)


def summarised(
    found: Measured,
    groups: Mapping[str, Sequence[Record]],
    by: str,
    peaks: Mapping[str, Any] | None = None,
) -> list[Row]:
    """A row per group of records, the longest first; classes stay in their order."""
    rates = _Rates(found, peaks if found.peaks is None else found.peaks)
    table = [_row(name, list(group), by, found, rates) for name, group in groups.items()]
    if by != "class":
        table.sort(key=lambda row: -row.time_ns)
    return table


def uncounted(trace: Trace) -> list[Uncounted]:
    """What has no FLOP formula, and what has no model of its bytes, the longest first."""
    totals: dict[tuple[str, str], list[int]] = {}
    for record in measured(trace).records:
        missing = (("FLOPs", record.flops is None), ("bytes", record.bytes is None))
        for what, is_missing in missing:
            # Without a kernel of its own there is nothing that could have moved bytes.
            if is_missing and not (what == "bytes" and record.flops == 0 and _only_calls(record)):
                total = totals.setdefault((record.op, what), [0, 0])
                total[0] += record.calls
                total[1] += record.time_ns
    found = [
        Uncounted(op, calls, time_ns, missing) for (op, missing), (calls, time_ns) in totals.items()
    ]
    return sorted(found, key=lambda each: -each.time_ns)


def _only_calls(record: Record) -> bool:
    return record.launches == 0 and record.kind == "other"


def frame(
    trace: Trace, by: str = "module", peaks: Mapping[str, Any] | None = None
) -> "pd.DataFrame":
    """The table as a DataFrame, indexed by module, op or class; missing is NA."""
    import pandas as pd

    found = measured(trace)
    table = pd.DataFrame(
        [vars(row) for row in rows(trace, by, peaks)], columns=[f.name for f in fields(Row)]
    )
    table = table.drop(columns="kind") if by == "class" else table
    for name in ("flop_ratio", "byte_ratio", "time_ratio", "expected_ratio", "flops_per_s"):
        table[name] = table[name].astype("Float64")
    for name in ("of_peak_flops", "bytes_per_s", "of_peak_bandwidth"):
        table[name] = table[name].astype("Float64")
    table["verdict"] = table["verdict"].replace(NONE, pd.NA)
    table = table.rename(columns={"name": by, "kind": "class"}).set_index(by)
    table.attrs = {
        "device": found.device_name,
        "clock": found.clock,
        "busy_ns": found.busy_ns,
        "device_busy_ns": found.device_busy_ns,
        "peaks": found.peaks if found.peaks is not None else peaks,
        "uncounted": [vars(each) for each in uncounted(trace)],
    }
    return table


# ---------------------------------------------------------------- the document


@once_per_trace
def measured(trace: Trace) -> Measured:
    """What was measured.

    Raises:
        errors.UsageError: the trace has no costs.
        errors.UnreadableTrace: what it has is damaged.
    """
    document = trace.meta.get("cost")
    if document is None:
        raise errors.UsageError(
            "this trace has no costs: record it with trace(cost=True), and ask after the block"
        )
    try:
        return _checked(document)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise errors.UnreadableTrace("the costs in this trace are damaged") from None


def _checked(document: Mapping[str, Any]) -> Measured:
    strings, columns = document["strings"], document["columns"]
    if not all(isinstance(text, str) for text in (*strings, *columns)):
        raise TypeError
    if len(document["rows"]) > _ROWS_LIMIT:
        raise ValueError
    records = tuple(_record(columns, row, strings) for row in document["rows"])
    if sum(record.time_ns for record in records) != document["busy_ns"]:
        raise ValueError
    peaks = document.get("peaks")
    return Measured(
        records,
        str(document["device"]),
        str(document["device_name"]),
        str(document["clock"]),
        _whole(document["busy_ns"]),
        None if document.get("device_busy_ns") is None else _whole(document["device_busy_ns"]),
        str(document.get("matmul_precision", "highest")),
        peaks if isinstance(peaks, dict) else None,
        tuple(
            (_text(strings, module), _whole(calls), _text(strings, parent))
            for module, calls, parent in document.get("modules", ())
        ),
    )


_TEXTS = ("module", "phase", "op", "pair", "node", "class", "shapes", "dtype")
_COUNTS = ("calls", "time_ns", "host_ns", "launches")
_AMOUNTS = ("flops", "other_flops", "bytes", "kernel_bytes")


def _record(columns: Sequence[str], row: Sequence[Any], strings: Sequence[str]) -> Record:
    values = dict(zip(columns, row, strict=True))
    texts = {name: _text(strings, values[name]) for name in _TEXTS}
    if texts["phase"] not in PHASES or texts["class"] not in CLASSES:
        raise ValueError
    counts = {name: _whole(values[name]) for name in _COUNTS}
    amounts = {name: None if values[name] == -1 else _whole(values[name]) for name in _AMOUNTS}
    texts["kind"] = texts.pop("class")
    given: dict[str, Any] = {**texts, **counts, **amounts}
    return Record(
        **given,
        notes=tuple(_text(strings, number) for number in values["notes"]),
        kernels=tuple(_text(strings, number) for number in values["kernels"]),
        kernel_ns=tuple(_whole(number) for number in values.get("kernel_ns", ())),
    )


def _text(strings: Sequence[str], number: Any) -> str:
    return strings[_whole(number)]


def _whole(number: Any) -> int:
    if not isinstance(number, int) or number < 0:
        raise ValueError
    return number


# ---------------------------------------------------------------- one row


class _Rates:
    """What the device can do at most, as far as that has been measured."""

    def __init__(self, found: Measured, peaks: Mapping[str, Any] | None) -> None:
        rates = peaks.get("flops_per_s") if peaks else None
        self._flops: Mapping[str, Any] = rates if isinstance(rates, dict) else {}
        self.copy = _rate(peaks.get("copy_bytes_per_s")) if peaks else None
        self._tf32 = found.matmul_precision != "highest" and found.device == "cuda"

    def flops(self, dtype: str) -> float | None:
        name = "tf32" if dtype == "float32" and self._tf32 else dtype
        return _rate(self._flops.get(name))


def _rate(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and value > 0 else None


@dataclass(frozen=True)
class _Direction:
    """Forward, or backward with what it recomputes, of some records."""

    time_ns: int
    flops: int
    bytes: int
    kernel_bytes: int
    without_bytes_ns: int

    @classmethod
    def of(cls, records: Iterable[Record]) -> "_Direction":
        time_ns = flops = amount = kernel_bytes = without = 0
        for record in records:
            time_ns += record.time_ns
            flops += record.flops or 0
            amount += record.bytes or 0
            kernel_bytes += record.kernel_bytes or 0
            without += record.time_ns if record.bytes is None else 0
        return cls(time_ns, flops, amount, kernel_bytes, without)


def _row(name: str, group: list[Record], by: str, found: Measured, rates: _Rates) -> Row:
    phases = {phase: [r for r in group if r.phase == phase] for phase in PHASES}
    sums = {phase: _Direction.of(records) for phase, records in phases.items()}
    forward, again = sums["forward"], sums["recompute"]
    backward = _Direction.of(phases["backward"] + phases["recompute"])
    total = sum(each.time_ns for each in sums.values())
    judged = judge(group, rates, found.clock, whole=by == "class")
    flops = {p: sums[p].flops for p in PHASES}
    if by == "class":
        # Each class by its own arithmetic; elsewhere FLOPs are those of contractions.
        for phase, records in phases.items():
            flops[phase] += sum(record.other_flops or 0 for record in records)
    contractions = [record for record in group if record.flops]
    flop_time = sum(record.time_ns for record in contractions)
    movers = [r for r in group if r.kernel_bytes and r.kind != "contraction"]
    mover_time = sum(record.time_ns for record in movers)
    moved = sum(record.kernel_bytes or 0 for record in movers)
    bytes_per_s = moved / mover_time * 1e9 if mover_time else None
    return Row(
        name=name,
        kind=_main_class(group),
        calls=sum(record.calls for record in group),
        forward_ns=forward.time_ns,
        backward_ns=sums["backward"].time_ns,
        recompute_ns=again.time_ns,
        optimizer_ns=sums["optimizer"].time_ns,
        other_ns=sums["other"].time_ns,
        time_ns=total,
        time_share=total / found.busy_ns if found.busy_ns else 0.0,
        forward_flops=flops["forward"],
        backward_flops=flops["backward"],
        recompute_flops=flops["recompute"],
        forward_bytes=forward.bytes,
        backward_bytes=sums["backward"].bytes,
        recompute_bytes=again.bytes,
        flop_ratio=_ratio(flops["backward"] + flops["recompute"], flops["forward"]),
        byte_ratio=_ratio(backward.bytes, forward.bytes),
        time_ratio=_ratio(backward.time_ns, forward.time_ns),
        expected_ratio=judged.expected,
        expected_because=judged.because,
        flops_per_s=(
            sum(record.flops or 0 for record in contractions) / flop_time * 1e9
            if flop_time
            else None
        ),
        of_peak_flops=_of_peak(contractions, flop_time, rates),
        bytes_per_s=bytes_per_s,
        of_peak_bandwidth=(
            bytes_per_s / rates.copy if bytes_per_s is not None and rates.copy else None
        ),
        verdict=judged.verdict,
        cause=judged.cause,
        uncounted_calls=sum(record.calls for record in group if record.flops is None),
        without_bytes_ns=sum(each.without_bytes_ns for each in sums.values()),
    )


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None


def _main_class(group: Iterable[Record]) -> str:
    times: dict[str, int] = {}
    for record in group:
        if record.phase in ("forward", "optimizer", "backward"):
            times[record.kind] = times.get(record.kind, 0) + record.time_ns
    return max(times, key=lambda kind: times[kind]) if times else "other"


def _of_peak(contractions: list[Record], time_ns: int, rates: _Rates) -> float | None:
    """The time that these would take at the device's best, by the time that they took."""
    best = 0.0
    for record in contractions:
        rate = rates.flops(record.dtype)
        if rate is None:
            return None
        best += (record.flops or 0) / rate * 1e9
    return best / time_ns if time_ns else None


# ---------------------------------------------------------------- the verdict


@dataclass(frozen=True)
class Judged:
    """What the textbook expects of a row, and how what was measured stands to it."""

    expected: float | None
    because: str
    verdict: str
    cause: str


@dataclass(frozen=True)
class _Expected:
    """Ratios of one operator's backward to its forward, weighed by its time in forward."""

    weight: int
    textbook: float
    counted: float
    is_contraction: bool


def judge(
    group: Sequence[Record], rates: "_Rates | None", clock: str, *, whole: bool = False
) -> Judged:
    """Confirmed, explained, off, or nothing to say. `whole`: a class, which is its own backward."""
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
    """Whether a measured ratio is what was expected: "about", as the textbook says."""
    if contracts:
        low, high = _CONTRACTION_BAND
        return low * expected <= ratio <= high * expected
    return abs(ratio - expected) <= max(_BYTES_BAND * expected, _BYTES_ROOM)


def _expected(
    forward: list[Record], backward: list[Record], *, whole: bool
) -> tuple[list[_Expected], int]:
    """What each operator's backward should take, and how much forward time has no model."""
    names = {"": (forward, backward)} if whole else _by_pair(forward, backward)
    found, without = [], 0
    for ahead, back in names.values():
        first, second = _Direction.of(ahead), _Direction.of(back)
        own = _Direction.of(record for record in back if whole or not _is_extra(record))
        if not first.time_ns:
            continue
        if first.flops:
            counted = second.flops / first.flops
            found.append(_Expected(first.time_ns, TEXTBOOK_CONTRACTION, counted, True))
        elif first.without_bytes_ns * 2 > first.time_ns:
            if any(record.flops is None or record.launches for record in ahead):
                without += first.time_ns
        elif first.bytes:
            by_kernel = own.kernel_bytes / max(first.kernel_bytes, 1)
            found.append(_Expected(first.time_ns, own.bytes / first.bytes, by_kernel, False))
    return found, without


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
    rates: "_Rates | None",
    clock: str,
) -> str:
    """The first named cause that leads to the ratio that was measured; nothing if none does."""
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
    """What makes the count differ from the textbook's."""
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
    """Whether some contraction made only one of its two gradients."""
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
    found = [
        (sums, "the bias gradient's reduction"),
        (adds, "gradients added up"),
        (again, "checkpointing runs the forward again"),
    ]
    return [(time_ns, name) for time_ns, name in found if time_ns]


# Kernels that compute nothing of the operator's own, by what they are called.
_PARTS = "parts of a product added up"
_NO_ARITHMETIC = {
    "tensors turned into another layout": re.compile(
        r"nchwToNhwc|nhwcToNchw|convertTensor|tensorTransform|transpose", re.IGNORECASE
    ),
    _PARTS: re.compile(r"splitK.*reduce|reduce_?(splitk|wgrad)", re.IGNORECASE),
}


def _in_kernels(records: Iterable[Record], names: re.Pattern[str]) -> int:
    """Nanoseconds in kernels that are called so."""
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
    """Whether there are such kernels, and the ratio of everything else is the textbook's."""
    sides = (forward, backward)
    inside = [_in_kernels(side, names) for side in sides]
    left = [_time(side) - taken for side, taken in zip(sides, inside, strict=True)]
    return any(inside) and left[0] > 0 and within(left[1] / left[0], textbook, contracts)


def _casts(
    textbook: float, contracts: bool, forward: list[Record], backward: list[Record]
) -> str | None:
    """Whether the ratio is the textbook's without the casts: autocast's, or of a loss in float32."""
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
    """Whether it is no part of the operator's own gradients."""
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
    rates: "_Rates | None",
) -> str:
    """What the slower of arithmetic and memory allows each contraction, at the measured peaks."""
    sides = [_at_peaks(side, rates) for side in (forward, backward)] if contracts else []
    if not sides or not all(sides):
        return ""
    (ahead, moving), (back, moving_back) = sides
    if not (moving or moving_back) or not ahead or not within(ratio, back / ahead, True):
        return ""
    return f"bound by memory, not by arithmetic: {back / ahead:.2f}x at the device's peaks"


def _at_peaks(records: list[Record], rates: "_Rates | None") -> tuple[float, float]:
    """Seconds at the device's peaks: of all, and of those contractions that memory bounds.

    Zeros where a peak is not known.
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
    contracts: bool, forward: list[Record], backward: list[Record], rates: "_Rates | None"
) -> str:
    """Contractions that are nearly as fast as a copy of their bytes, one side more than the other."""
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
    """What makes calls slow for their size, on the side that is slower than expected."""
    side = backward if is_slow else forward
    unaligned = [note for r in side for note in r.notes if note.startswith("unaligned: ")]
    if unaligned and clock == "kernels":  # an alignment of tensor cores'
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
        what = "kernels" if kernels else "operators"
        return f"launch-bound: {what} of {_time(working) / launches / 1e3:.1f} us"
    if _is_fused(both):
        return "compiled: forward and backward are fused differently"
    return ""


_GENERATION = re.compile(
    r"sm_?(\d\d\d?)|cutlass_(\d\d)_|(volta|turing|ampere|hopper)", re.IGNORECASE
)
_GENERATIONS = {"volta": 70, "turing": 75, "ampere": 80, "hopper": 90}
_WITHOUT_TENSOR_CORES = re.compile(r"depthwise|c1_k1|grouped_direct", re.IGNORECASE)


def _older_kernels(slow: list[Record], fast: list[Record]) -> str:
    """Whether the slower side runs kernels of an older kind of chip, or not on tensor cores."""
    slowest, other = _longest_kernel(slow), _longest_kernel(fast)
    if _WITHOUT_TENSOR_CORES.search(slowest):
        return f"not on tensor cores: {slowest[:60]}"
    old, new = _generation(slowest), _generation(other)
    if old and new and old < new:
        return f"kernels for an older chip: sm{old} where the other side has sm{new}"
    return ""


def _longest_kernel(records: Iterable[Record]) -> str:
    """Of the contractions among these."""
    times = [
        (taken, name)
        for record in records
        if record.flops
        for name, taken in zip(record.kernels, record.kernel_ns, strict=False)
    ]
    return max(times, default=(0, ""))[1]


def _generation(kernel: str) -> int:
    found = _GENERATION.search(kernel)
    if found is None:
        return 0
    number = found[1] or found[2]
    return int(number) if number else _GENERATIONS[found[3].lower()]


def _is_fused(records: Iterable[Record]) -> bool:
    return any(r.op.startswith("triton_") or r.pair.startswith("CompiledFunction") for r in records)
