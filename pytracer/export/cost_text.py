"""The costs of forward and backward as text: measured ratios beside the textbook's."""

import textwrap
from collections.abc import Mapping
from typing import Any

from pytracer.basics.names import layers_alike, numbers_text
from pytracer.basics.units import time_text
from pytracer.cost import measurements, table as cost_table
from pytracer.cost.table import Row
from pytracer.data.recorded import Trace

_NAME = 28
_MOST_ROWS = 24
_MOST_EXPLAINED = 4  # rows that are named for each cause
_MUCH_OVER_PEAK = 1.05


def render(
    trace: Trace,
    by: str = "class",
    peaks: Mapping[str, Any] | None = None,
    *,
    each: bool = False,
    width: int = 100,
) -> str:
    """The table as text. Layers whose names differ only in a number share a row, unless `each`."""
    costs = measurements.measured(trace)
    rows = _rows(trace, by, peaks, each=each)
    shown = rows if by == "class" or each else rows[:_MOST_ROWS]
    total = sum(row.time_ns for row in rows)
    head = f"{by:<{_NAME}}{'forward':>9}{'backward':>10}{'share':>8}"
    lines = [head + f"{'FLOPs':>7}{'bytes':>7}{'time':>7}{'expect':>8}{'of peak':>9}  verdict"]
    lines += [_line(row) for row in shown]
    if len(shown) < len(rows):
        rest = sum(row.time_ns for row in rows[len(shown) :])
        name = f"{len(rows) - len(shown)} more"
        lines.append(f"{name:<{_NAME}}{'':>19}{rest / max(total, 1):>8.1%}")
    lines += ["", *_causes(shown, width), *_foot(trace, costs, rows, peaks, width)]
    return "\n".join(line.rstrip() for line in lines).rstrip()


def _rows(trace: Trace, by: str, peaks: Mapping[str, Any] | None, *, each: bool) -> list[Row]:
    if by != "module" or each:
        return cost_table.rows(trace, by, peaks)
    costs = measurements.measured(trace)
    groups: dict[str, list[measurements.Record]] = {}
    for record in costs.records:
        groups.setdefault(layers_alike(record.module), []).append(record)
    if bare := groups.pop("*", []):
        groups[numbers_text(record.module for record in bare)] = bare
    return cost_table.summarised(costs, groups, by, peaks)


def _line(row: Row) -> str:
    name = row.name if len(row.name) < _NAME else "..." + row.name[-(_NAME - 4) :]
    backward = row.backward_ns + row.recompute_ns
    ratios = "".join(
        f"{'' if ratio is None else f'{ratio:.2f}':>{room}}"
        for ratio, room in (
            (row.flop_ratio, 7),
            (row.byte_ratio, 7),
            (row.time_ratio, 7),
            (row.expected_ratio, 8),
        )
    )
    share = _of_peak(row)
    of_peak = "" if share is None else f"{share:.0%}"
    return (
        f"{name:<{_NAME}}{_time(row.forward_ns):>9}{_time(backward):>10}"
        f"{row.time_share:>8.1%}{ratios}{of_peak:>9}  {row.verdict}"
    )


def _of_peak(row: Row) -> float | None:
    """The share of the peak that limits the row: the matrix rate, or a copy's bandwidth."""
    return row.of_peak_flops if row.kind == "contraction" else row.of_peak_bandwidth


def _time(nanoseconds: int) -> str:
    return time_text(nanoseconds) if nanoseconds else ""


def _causes(rows: list[Row], width: int) -> list[str]:
    """A paragraph for each cause, with the rows that it explains and their details."""
    named: dict[str, list[str]] = {}
    for row in rows:
        cause, _, detail = row.cause.partition(": ")
        if cause:
            named.setdefault(cause, []).append(f"{row.name} ({detail})" if detail else row.name)
    lines = []
    for cause, who in named.items():
        more = f" and {len(who) - _MOST_EXPLAINED} more" if len(who) > _MOST_EXPLAINED else ""
        text = f"{cause}: {', '.join(who[:_MOST_EXPLAINED])}{more}"
        lines += _paragraph("explained", text, width)
    return lines


def _foot(
    trace: Trace,
    costs: measurements.Measured,
    rows: list[Row],
    peaks: Mapping[str, Any] | None,
    width: int,
) -> list[str]:
    total = sum(row.time_ns for row in rows)
    unit = "kernels" if costs.clock == "kernels" else "operators"
    measured = f"{time_text(total)} of {unit} on {costs.device_name}"
    ratios = "FLOPs, bytes and time are backward's over forward's"
    if any(row.verdict == "off" for row in rows):
        ratios += (
            "; off: another ratio than expected, and no cause in this trace fits (docs/cost.md)"
        )
    lines = _paragraph("ratios", ratios, width)
    lines += _paragraph("measured", measured, width)
    lines += _paragraph("besides", _besides(rows, total), width)
    lines += _paragraph("peaks", _peaks(costs, peaks), width)
    if any((_of_peak(row) or 0) > _MUCH_OVER_PEAK for row in rows):
        text = (
            "over 100 % of a peak: a cache served it faster than memory, or the peak was measured "
            "while the device was busy (measure again: pytracer cost --measure-peaks)"
        )
        lines += _paragraph("note", text, width)
    for missing in ("FLOPs", "bytes"):
        names = [
            f"{each.op} {each.time_ns / max(total, 1):.1%}"
            for each in cost_table.uncounted(trace)
            if each.missing == missing
        ]
        if names:
            more = f" and {len(names) - 6} more" if len(names) > 6 else ""
            lines += _paragraph("uncounted", f"{missing} of {', '.join(names[:6])}{more}", width)
    inside = sum(r.time_ns for r in costs.records if r.phase == "optimizer" and r.node)
    if inside:
        text = f"the optimizer runs inside backward for {time_text(inside)}; its time counts as its own"
        lines += _paragraph("note", text, width)
    if any(note.startswith("causal") for r in costs.records for note in r.notes):
        text = "causal attention is counted in full, though its kernels may skip half"
        lines += _paragraph("note", text, width)
    return lines


def _besides(rows: list[Row], total: int) -> str:
    """The times that are in the shares but in no column of times."""
    sums = {
        "the optimizer": sum(row.optimizer_ns for row in rows),
        "elsewhere": sum(row.other_ns for row in rows),
    }
    parts = [f"{name} {time_text(ns)} ({ns / total:.1%})" for name, ns in sums.items() if ns]
    return f"forward and backward: {', '.join(parts)}" if parts else ""


def _peaks(costs: measurements.Measured, peaks: Mapping[str, Any] | None) -> str:
    peaks = costs.peaks if costs.peaks is not None else peaks
    if not peaks:
        return "not measured here yet: pytracer cost --measure-peaks"
    return peaks_text(peaks)


def peaks_text(peaks: Mapping[str, Any]) -> str:
    """The peak rates of a device, in vendors' units: `bfloat16 790 TFLOP/s, copy 4.17 TB/s`."""
    rates = [f"{name} {_rate(rate, 'FLOP')}" for name, rate in peaks["flops_per_s"].items()]
    return ", ".join([*rates, f"copy {_rate(peaks['copy_bytes_per_s'], 'B')}"])


def _rate(rate: float, unit: str) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= size:
            return f"{rate / size:.3g} {prefix}{unit}/s"
    return f"{rate:.3g} {unit}/s"


def _paragraph(title: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=f"{title:<10}",
        subsequent_indent=" " * 10,
        break_long_words=False,
    )
