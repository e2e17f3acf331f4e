"""Reads and checks the document of costs that `pytracer/cost/measure.py` wrote into a trace."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytracer import errors
from pytracer.data import meta
from pytracer.data.model_names import Roots
from pytracer.data.recorded import Trace, once_per_trace

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

_ROWS_LIMIT = 2_000_000


@dataclass(frozen=True)
class Record:
    """Calls of one module, phase, operator and shapes. FLOPs and bytes are None if unknown."""

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
    kernels: tuple[str, ...]  # the longest ones
    kernel_ns: tuple[int, ...] = ()  # the time of each


@dataclass(frozen=True)
class Measured:
    """The checked document."""

    records: tuple[Record, ...]
    device: str
    device_name: str
    clock: str  # "kernels" or "operators"
    busy_ns: int
    device_busy_ns: int | None
    matmul_precision: str
    peaks: Mapping[str, Any] | None
    module_calls: tuple[tuple[str, int, str], ...] = ()  # path, calls in forward, caller


@once_per_trace
def measured(trace: Trace) -> Measured:
    """The costs in a trace.

    Raises:
        errors.UsageError: the trace has no costs.
        errors.UnreadableTrace: its costs are damaged.
    """
    document = trace.meta.get("cost")
    if document is None:
        raise errors.UsageError(
            "this trace has no costs: record with trace(cost=True), and read them after the block"
        )
    try:
        return _checked(document, meta.of(trace).roots)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise errors.UnreadableTrace("the costs in this trace are damaged") from None


def _checked(document: Mapping[str, Any], roots: Roots) -> Measured:
    strings, columns = document["strings"], document["columns"]
    if not all(isinstance(text, str) for text in (*strings, *columns)):
        raise TypeError
    if len(document["rows"]) > _ROWS_LIMIT:
        raise ValueError
    records = tuple(_record(columns, row, strings, roots) for row in document["rows"])
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
            (_module(strings, module, roots), _whole(calls), _module(strings, parent, roots))
            for module, calls, parent in document.get("modules", ())
        ),
    )


_TEXTS = ("phase", "op", "pair", "node", "class", "shapes", "dtype")
_COUNTS = ("calls", "time_ns", "host_ns", "launches")
_AMOUNTS = ("flops", "other_flops", "bytes", "kernel_bytes")


def _record(
    columns: Sequence[str], row: Sequence[Any], strings: Sequence[str], roots: Roots
) -> Record:
    values = dict(zip(columns, row, strict=True))
    texts = {name: _text(strings, values[name]) for name in _TEXTS}
    texts["module"] = _module(strings, values["module"], roots)
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


def _module(strings: Sequence[str], number: Any, roots: Roots) -> str:
    return roots.shown(_text(strings, number))


def _whole(number: Any) -> int:
    if not isinstance(number, int) or number < 0:
        raise ValueError
    return number


# ---------------------------------------------------------------- sums and peaks


class Rates:
    """The measured peak rates of the device."""

    def __init__(self, measured: Measured, peaks: Mapping[str, Any] | None) -> None:
        rates = peaks.get("flops_per_s") if peaks else None
        self._flops: Mapping[str, Any] = rates if isinstance(rates, dict) else {}
        self.copy = _rate(peaks.get("copy_bytes_per_s")) if peaks else None
        self._tf32 = measured.matmul_precision != "highest" and measured.device == "cuda"

    def flops(self, dtype: str) -> float | None:
        """Peak FLOP/s in this type; None if it was not measured."""
        name = "tf32" if dtype == "float32" and self._tf32 else dtype
        return _rate(self._flops.get(name))


def _rate(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and value > 0 else None


@dataclass(frozen=True)
class Direction:
    """Sums over records of one direction: forward, or backward with its recomputation."""

    time_ns: int
    flops: int
    bytes: int
    kernel_bytes: int
    without_bytes_ns: int

    @classmethod
    def of(cls, records: Iterable[Record]) -> "Direction":
        """The sums over these records."""
        time_ns = flops = amount = kernel_bytes = without = 0
        for record in records:
            time_ns += record.time_ns
            flops += record.flops or 0
            amount += record.bytes or 0
            kernel_bytes += record.kernel_bytes or 0
            without += record.time_ns if record.bytes is None else 0
        return cls(time_ns, flops, amount, kernel_bytes, without)
