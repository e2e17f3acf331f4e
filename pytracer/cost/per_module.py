"""The average cost of one call of a module, with the modules inside it, for pictures of calls.

The table of costs (`cost/table.py`) gives every nanosecond to the innermost module. Here a module
has its own costs and those of the modules that it calls, divided by its calls in forward, as
torch.profiler saw them. A module that several modules call counts in its first caller.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pytracer.cost import measurements
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.errors import PytracerError


@dataclass(frozen=True)
class ModuleCost:
    """The average cost of one call. Backward includes recomputation."""

    calls: int
    forward_flops: float
    backward_flops: float
    forward_bytes: float
    backward_bytes: float
    forward_ms: float
    backward_ms: float
    flop_ratio: float | None
    time_ratio: float | None


@once_per_trace
def per_call(trace: Trace) -> dict[str, ModuleCost]:
    """The cost of one call, by module path. Empty if the trace has no costs or damaged ones."""
    try:
        measured = measurements.measured(trace)
    except PytracerError:
        return {}
    calls = {module: count for module, count, _ in measured.module_calls}
    parents = {module: parent for module, _, parent in measured.module_calls}
    totals = {module: _Totals() for module in calls}
    for record in measured.records:
        for module in _around(record.module, parents):
            totals[module].add(record)
    return {module: totals[module].by(count) for module, count in calls.items() if count}


def _around(module: str, parents: dict[str, str]) -> Iterator[str]:
    """The module and its callers, the innermost first."""
    seen = set()
    while module in parents and module not in seen:
        seen.add(module)
        yield module
        module = parents[module]


@dataclass
class _Totals:
    """Sums over the trace: of forward, and of backward with its recomputation."""

    flops: list[int] = field(default_factory=lambda: [0, 0])
    bytes: list[int] = field(default_factory=lambda: [0, 0])
    time_ns: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, record: measurements.Record) -> None:
        side = {"forward": 0, "backward": 1, "recompute": 1}.get(record.phase)
        if side is not None:
            self.flops[side] += record.flops or 0
            self.bytes[side] += record.bytes or 0
            self.time_ns[side] += record.time_ns

    def by(self, calls: int) -> ModuleCost:
        return ModuleCost(
            calls=calls,
            forward_flops=self.flops[0] / calls,
            backward_flops=self.flops[1] / calls,
            forward_bytes=self.bytes[0] / calls,
            backward_bytes=self.bytes[1] / calls,
            forward_ms=self.time_ns[0] / calls / 1e6,
            backward_ms=self.time_ns[1] / calls / 1e6,
            flop_ratio=_ratio(*self.flops),
            time_ratio=_ratio(*self.time_ns),
        )


def _ratio(forward: int, backward: int) -> float | None:
    return backward / forward if forward and backward else None
