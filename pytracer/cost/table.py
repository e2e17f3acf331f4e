"""The table of costs, forward and backward: a row per module, operator or class.

Each row has three ratios of backward to forward: FLOPs, bytes and time. `cost/verdicts.py` compares
them with the textbook's.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from pytracer import errors
from pytracer.cost.measurements import CLASSES, PHASES, Direction, Measured, Rates, Record, measured
from pytracer.cost.verdicts import NONE, judge
from pytracer.data import frames
from pytracer.data.recorded import Trace

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Row:
    """A module, operator or class. Ratios are backward, with recomputation, divided by forward."""

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
    """The rows of the table. Every measured nanosecond is in exactly one row.

    Args:
        trace: a recording with cost=True.
        by: "module", "op" or "class".
        peaks: the peak rates of the device, used if the trace has none.

    Raises:
        errors.UsageError: the trace has no costs, or `by` is unknown.
    """
    costs = measured(trace)
    keys: dict[str, Callable[[Record], str]] = {
        "module": lambda record: record.module,
        "op": lambda record: record.pair,
        "class": lambda record: record.kind,
    }
    if by not in keys:
        listed = ", ".join(map(repr, keys))
        raise errors.UsageError(f"by={by!r} is not understood; it is one of {listed}")
    groups: dict[str, list[Record]] = {name: [] for name in CLASSES} if by == "class" else {}
    for record in costs.records:
        groups.setdefault(keys[by](record), []).append(record)
    return summarised(costs, groups, by, peaks)


def summarised(
    costs: Measured,
    groups: Mapping[str, Sequence[Record]],
    by: str,
    peaks: Mapping[str, Any] | None = None,
) -> list[Row]:
    """A row per group of records, the longest first. Classes keep their order."""
    rates = Rates(costs, peaks if costs.peaks is None else costs.peaks)
    table = [_row(name, list(group), by, costs, rates) for name, group in groups.items()]
    if by != "class":
        table.sort(key=lambda row: -row.time_ns)
    return table


def uncounted(trace: Trace) -> list[Uncounted]:
    """The operators without a FLOP formula or a model of their bytes, the longest first."""
    totals: dict[tuple[str, str], list[int]] = {}
    for record in measured(trace).records:
        missing = (("FLOPs", record.flops is None), ("bytes", record.bytes is None))
        for quantity, is_missing in missing:
            # An operator without a kernel of its own moves no bytes.
            if is_missing and not (
                quantity == "bytes" and record.flops == 0 and _only_calls(record)
            ):
                total = totals.setdefault((record.op, quantity), [0, 0])
                total[0] += record.calls
                total[1] += record.time_ns
    listed = [
        Uncounted(op, calls, time_ns, missing) for (op, missing), (calls, time_ns) in totals.items()
    ]
    return sorted(listed, key=lambda each: -each.time_ns)


def _only_calls(record: Record) -> bool:
    return record.launches == 0 and record.kind == "other"


def frame(
    trace: Trace, by: str = "module", peaks: Mapping[str, Any] | None = None
) -> "pd.DataFrame":
    """The table as a DataFrame, indexed by module, op or class. Missing values are NA."""
    costs = measured(trace)
    table = frames.of_rows(rows(trace, by, peaks), [f.name for f in fields(Row)])
    table = table.drop(columns="kind") if by == "class" else table
    for name in ("flop_ratio", "byte_ratio", "time_ratio", "expected_ratio", "flops_per_s"):
        table[name] = table[name].astype("Float64")
    for name in ("of_peak_flops", "bytes_per_s", "of_peak_bandwidth"):
        table[name] = table[name].astype("Float64")
    table["verdict"] = frames.without(table["verdict"], NONE)
    table = table.rename(columns={"name": by, "kind": "class"}).set_index(by)
    table.attrs = {
        "device": costs.device_name,
        "clock": costs.clock,
        "busy_ns": costs.busy_ns,
        "device_busy_ns": costs.device_busy_ns,
        "peaks": costs.peaks if costs.peaks is not None else peaks,
        "uncounted": [vars(each) for each in uncounted(trace)],
    }
    return table


# ---------------------------------------------------------------- one row


def _row(name: str, group: list[Record], by: str, costs: Measured, rates: Rates) -> Row:
    phases = {phase: [r for r in group if r.phase == phase] for phase in PHASES}
    sums = {phase: Direction.of(records) for phase, records in phases.items()}
    forward, again = sums["forward"], sums["recompute"]
    backward = Direction.of(phases["backward"] + phases["recompute"])
    total = sum(each.time_ns for each in sums.values())
    judged = judge(group, rates, costs.clock, whole=by == "class")
    flops = {p: sums[p].flops for p in PHASES}
    if by == "class":
        # A class also counts FLOPs by convention. In other tables only contractions count.
        for phase, records in phases.items():
            flops[phase] += sum(record.other_flops or 0 for record in records)
    flops_per_s, of_peak_flops = _computing(group, rates)
    bytes_per_s, of_peak_bandwidth = _moving(group, rates)
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
        time_share=total / costs.busy_ns if costs.busy_ns else 0.0,
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
        flops_per_s=flops_per_s,
        of_peak_flops=of_peak_flops,
        bytes_per_s=bytes_per_s,
        of_peak_bandwidth=of_peak_bandwidth,
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


def _computing(group: list[Record], rates: Rates) -> tuple[float | None, float | None]:
    """The FLOPs per second of the group's contractions, and their share of the device's peak."""
    contractions = [record for record in group if record.flops]
    time_ns = sum(record.time_ns for record in contractions)
    if not time_ns:
        return None, None
    flops = sum(record.flops or 0 for record in contractions)
    return flops / time_ns * 1e9, _of_peak(contractions, time_ns, rates)


def _moving(group: list[Record], rates: Rates) -> tuple[float | None, float | None]:
    """The bytes per second of the group's other kernels, and their share of a copy's rate."""
    movers = [r for r in group if r.kernel_bytes and r.kind != "contraction"]
    time_ns = sum(record.time_ns for record in movers)
    if not time_ns:
        return None, None
    rate = sum(record.kernel_bytes or 0 for record in movers) / time_ns * 1e9
    return rate, rate / rates.copy if rates.copy else None


def _of_peak(contractions: list[Record], time_ns: int, rates: Rates) -> float | None:
    """The time of these contractions at the device's peak, divided by their measured time."""
    best = 0.0
    for record in contractions:
        rate = rates.flops(record.dtype)
        if rate is None:
            return None
        best += (record.flops or 0) / rate * 1e9
    return best / time_ns
