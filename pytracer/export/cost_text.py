"""The costs of forward and backward as text: measured ratios beside the textbook's."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pytracer.basics.names import layers_alike, numbers_text
from pytracer.basics.units import time_text
from pytracer.cost import measurements, table as cost_table
from pytracer.cost.table import Row
from pytracer.data.recorded import Trace
from pytracer.export.terminal import BOLD, DIM, GREEN, PLAIN, YELLOW, Terminal, cut_in_front

_NAME, _LEAST_NAME = 28, 16
_MOST_ROWS = 24
_MOST_EXPLAINED = 4  # rows that are named for each cause
_MUCH_OVER_PEAK = 1.05


def render(
    trace: Trace,
    by: str = "class",
    peaks: Mapping[str, Any] | None = None,
    *,
    each: bool = False,
    terminal: Terminal = PLAIN,
) -> str:
    """The table as text. Layers whose names differ only in a number share a row, unless `each`."""
    costs = measurements.measured(trace)
    rows = _rows(trace, by, peaks, each=each)
    shown = rows if by == "class" or each else rows[:_MOST_ROWS]
    total = sum(row.time_ns for row in rows)
    columns, name = _columns(rows, terminal.width)
    heads = "".join(f"{column.head:>{column.room}}" for column in columns)
    lines = [terminal.paint(f"{by:<{name}}{heads}  verdict", BOLD)]
    lines += [_line(row, columns, name, terminal) for row in shown]
    if len(shown) < len(rows):
        rest = sum(row.time_ns for row in rows[len(shown) :])
        more = f"{len(rows) - len(shown)} more"
        lines.append(f"{more:<{name}}  {rest / max(total, 1):.1%} of the time")
    left = [column.head for column in _COLUMNS if column not in columns]
    lines += ["", *_causes(shown, terminal), *_foot(trace, costs, rows, peaks, terminal)]
    if left:
        lines += terminal.paragraph("note", f"a wider terminal also shows {', '.join(left)}")
    return "\n".join(line.rstrip() for line in lines).rstrip()


class _Column(NamedTuple):
    head: str
    room: int
    text: Callable[[Row], str]
    order: int  # those with the highest number are left out first


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


_COLUMNS = (
    _Column("forward", 9, lambda row: _time(row.forward_ns), 3),
    _Column("backward", 10, lambda row: _time(row.backward_ns + row.recompute_ns), 4),
    _Column("share", 8, lambda row: f"{row.time_share:.1%}", 0),
    _Column("FLOPs", 7, lambda row: _ratio(row.flop_ratio), 5),
    _Column("bytes", 7, lambda row: _ratio(row.byte_ratio), 6),
    _Column("time", 7, lambda row: _ratio(row.time_ratio), 1),
    _Column("expect", 8, lambda row: _ratio(row.expected_ratio), 2),
    _Column("of peak", 9, lambda row: _percent(_of_peak(row)), 7),
)


def _columns(rows: list[Row], width: int) -> tuple[list[_Column], int]:
    """The columns that fit, and the room for names."""
    verdict = max([len("verdict"), *(len(row.verdict) for row in rows)]) + 2
    columns = list(_COLUMNS)
    while (name := width - verdict - sum(column.room for column in columns)) < _LEAST_NAME:
        columns.remove(max(columns, key=lambda column: column.order))
    return columns, min(name, _NAME)


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


_VERDICTS = {"confirmed": GREEN, "off": YELLOW}


def _line(row: Row, columns: list[_Column], room: int, terminal: Terminal) -> str:
    name = cut_in_front(row.name, room - 1)
    cells = "".join(f"{column.text(row):>{column.room}}" for column in columns)
    return f"{name:<{room}}{cells}  {terminal.paint(row.verdict, _VERDICTS.get(row.verdict, DIM))}"


def _of_peak(row: Row) -> float | None:
    """The share of the peak that limits the row: the matrix rate, or a copy's bandwidth."""
    return row.of_peak_flops if row.kind == "contraction" else row.of_peak_bandwidth


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _time(nanoseconds: int) -> str:
    return time_text(nanoseconds) if nanoseconds else ""


def _causes(rows: list[Row], terminal: Terminal) -> list[str]:
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
        lines += terminal.paragraph("explained", text)
    return lines


def _foot(
    trace: Trace,
    costs: measurements.Measured,
    rows: list[Row],
    peaks: Mapping[str, Any] | None,
    terminal: Terminal,
) -> list[str]:
    total = sum(row.time_ns for row in rows)
    unit = "kernels" if costs.clock == "kernels" else "operators"
    measured = f"{time_text(total)} of {unit} on {costs.device_name}"
    ratios = "FLOPs, bytes and time are backward's over forward's"
    if any(row.verdict == "off" for row in rows):
        ratios += (
            "; off: another ratio than expected, and no cause in this trace fits (docs/cost.md)"
        )
    lines = terminal.paragraph("ratios", ratios)
    lines += terminal.paragraph("measured", measured)
    lines += terminal.paragraph("besides", _besides(rows, total))
    lines += terminal.paragraph("peaks", _peaks(costs, peaks))
    if any((_of_peak(row) or 0) > _MUCH_OVER_PEAK for row in rows):
        text = (
            "over 100 % of a peak: a cache served it faster than memory, or the peak was measured "
            "while the device was busy (measure again: pytracer cost --measure-peaks)"
        )
        lines += terminal.paragraph("note", text)
    for missing in ("FLOPs", "bytes"):
        names = [
            f"{each.op} {each.time_ns / max(total, 1):.1%}"
            for each in cost_table.uncounted(trace)
            if each.missing == missing
        ]
        if names:
            more = f" and {len(names) - 6} more" if len(names) > 6 else ""
            lines += terminal.paragraph("uncounted", f"{missing} of {', '.join(names[:6])}{more}")
    inside = sum(r.time_ns for r in costs.records if r.phase == "optimizer" and r.node)
    if inside:
        text = f"the optimizer runs inside backward for {time_text(inside)}; its time counts as its own"
        lines += terminal.paragraph("note", text)
    if any(note.startswith("causal") for r in costs.records for note in r.notes):
        text = "causal attention is counted in full, though its kernels may skip half"
        lines += terminal.paragraph("note", text)
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
