"""Measures how long it takes to make categories and a timeline from a trace.

    python benchmarks/analysis.py [--events 1000000 10000000]

The trace is synthetic: training steps of a transformer, with ops, nodes, modules, labels and
frees in the order in which torch makes them. Targets: 1 million events in 0.5 s, 10 million in
5 s, on 2 cores.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, not installed

from pytracer.analysis.facts import (
    allocations,
    categories,
    lifetimes,
    owners,
    phases,
    scopes,
    usage,
)
from pytracer.data.recorded import Trace
from pytracer.data.schema import ACTION, CATEGORY, SCOPE_GRAD, SCOPE_KIND, TABLES

TARGET_SECONDS_PER_MILLION = 0.5


class Step:
    """One training step as rows to repeat. Positions and scopes count from its start."""

    def __init__(self, layers: int) -> None:
        self.events: list[tuple[int, int, int, int, int, int, int]] = []
        self.scopes: list[tuple[int, int, int, int, int, int, int]] = []
        self.ends: list[tuple[int, int, int]] = []
        self._open: list[int] = []
        self._tick = 0
        self._next_address = 1
        self._strings = [""]
        weights = [self._alloc_address() for _ in range(layers)]
        self._write(layers, weights)

    def _write(self, layers: int, weights: list[int]) -> None:
        saved: list[tuple[int, int]] = []
        gradients: list[int] = []
        self._begin("module", "model")
        for weight in weights:
            self._event("label", weight, 1)
        for layer in range(layers):
            self._begin("module", f"h.{layer}")
            for op in ("aten::linear", "aten::gelu", "aten::layer_norm", "aten::add"):
                outer = self._begin("op", op, flags=SCOPE_GRAD)
                if op == "aten::linear":  # autocast casts the weight
                    cast = self._begin("op", "aten::_to_copy", flags=SCOPE_GRAD)
                    saved.append((cast, self._alloc(2048)))
                    self._end()
                self._begin("op", f"{op}_out", flags=SCOPE_GRAD)
                saved.append((outer, self._alloc(4096)))
                self._free(self._alloc(512))
                self._end()
                self._end(stack=1)
            self._end()
        self._end()
        self._begin("backward", "backward")
        for number, (forward, block) in enumerate(reversed(saved)):
            self._begin("node", "LinearBackward0", forward=forward)
            self._begin("op", "aten::mm")
            passed_on = self._alloc(4096)
            if number % 4 == 3:
                gradients.append(self._alloc(8192))
            self._end()
            self._free(block)
            self._free(passed_on)
            self._end()
        self._end()
        for gradient in gradients:
            self._event("label", gradient, 2)
        self._begin("optimizer", "Optimizer.step#AdamW.step")
        for _ in gradients:
            self._begin("op", "aten::_foreach_add_")
            self._free(self._alloc(8192))
            self._end(stack=2)
        self._end()
        for gradient in gradients:
            self._free(gradient)

    def _alloc_address(self) -> int:
        self._next_address += 512
        return self._next_address

    def _alloc(self, size: int) -> int:
        address = self._alloc_address()
        self._event("alloc", address, size)
        return address

    def _free(self, address: int) -> None:
        self._event("free_completed", address, 0)

    def _event(self, action: str, address: int, size: int) -> None:
        scope = self._open[-1] if self._open else 0
        self.events.append((self._now(), address, size, ACTION[action], scope, 1, 0))

    def _begin(self, kind: str, name: str, forward: int = 0, flags: int = 0) -> int:
        parent = self._open[-1] if self._open else 0
        if name not in self._strings:
            self._strings.append(name)
        text = self._strings.index(name)
        self.scopes.append((self._now(), parent, forward, text, 0, SCOPE_KIND[kind], flags))
        self._open.append(len(self.scopes))
        return self._open[-1]

    def _end(self, stack: int = 0) -> None:
        self.ends.append((self._now(), self._open.pop(), stack))

    def _now(self) -> int:
        self._tick += 1000
        return self._tick

    def trace(self, events: int) -> Trace:
        """Makes a trace that repeats the step until it has that many events."""
        repeats = max(1, round(events / len(self.events)))
        later = {
            "events": _repeat(self.events, repeats, {0: self._tick, 4: len(self.scopes)}),
            "scopes": _repeat(
                self.scopes, repeats, {0: self._tick, 1: len(self.scopes), 2: len(self.scopes)}
            ),
            "scope_ends": _repeat(self.ends, repeats, {0: self._tick, 1: len(self.scopes)}),
            "clock": [[0, 0], [self._tick * repeats] * 2],
            "stacks": [[0, 0, 0, 0], [0, 1, 0, 9], [0, 1, 0, 12]],
            "places": [[0] * 5, [0, 0, 0, 1, 0]],
            "labels": [
                [0] * 5,
                [CATEGORY["weights"], 0, 0, 0, 0],
                [CATEGORY["gradients"], 0, 0, 0, 0],
            ],
            "threads": [[1, 0]],
        }
        columns = {
            f"{table}.{column}": np.array(later[table], np.int64).T[i].astype(dtype)
            for table, (row_type, dtypes) in TABLES.items()
            for i, (column, dtype) in enumerate(zip(row_type._fields, dtypes, strict=True))
        }
        more = {"strings": self._strings, "losses": {}, "meta": json.dumps({})}
        return Trace.from_columns({**columns, **more})


def _repeat(
    rows: list[tuple[int, ...]], repeats: int, growing: dict[int, int]
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Repeats the rows. A growing column adds so much each time, except to a 0."""
    block = np.array(rows, np.int64)
    result = np.tile(block, (repeats, 1))
    turn = np.repeat(np.arange(repeats), len(block))
    for column, amount in growing.items():
        result[:, column] += turn * amount * (result[:, column] != 0)
    return result


STAGES: dict[str, Callable[[Trace], object]] = {
    "lifetimes": lifetimes.lifetimes,
    "scope tree": scopes.tree,
    "phases": phases.moments,
    "categories": categories.categories,
    "owners": owners.owners,
    "allocations": allocations.allocations,
    "timeline by category": lambda trace: usage.level_columns(
        trace,
        usage.on_device(trace),
        allocations.allocations(trace).category,
        len(categories.CATEGORY),
    ),
    "peak": usage.peak,
}


def measure(events: int) -> bool:
    """Prints each stage's time. Returns False if the target is missed.

    It measures processor time, so that other programs do not count. All stages run in one thread.
    """
    trace = Step(layers=12).trace(events)
    count = len(trace.events.ticks)
    print(f"\n{count:,} events, {len(trace.scopes.ticks):,} scopes")
    total = 0.0
    for name, stage in STAGES.items():
        began = time.process_time()
        stage(trace)
        seconds = time.process_time() - began
        total += seconds
        print(f"  {name:<22}{seconds:8.3f} s")
    target = TARGET_SECONDS_PER_MILLION * count / 1e6
    print(f"  {'all':<22}{total:8.3f} s   target {target:.2f} s")
    return total <= target


def main() -> int:
    """Measures each size. Returns exit code 3 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, nargs="+", default=[1_000_000, 10_000_000])
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, numpy {np.__version__}")
    held = [measure(events) for events in arguments.events]
    return 0 if all(held) else 3


if __name__ == "__main__":
    raise SystemExit(main())
