"""Measures what tracing adds to an allocation, an operator or a call, in nanoseconds.

    python benchmarks/prices.py [--seconds 30] [--out DIR]

On a shared host, the ratio of a whole step is rough. Here each act runs some hundred times in a
block of a millisecond. Blocks of all modes alternate, and it keeps the median and the fastest tenth
of each. The operators run outside of modules, where `detail="category"` sees them, too.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

import pytracer  # noqa: E402
from benchmarks import kept, slug  # noqa: E402
from benchmarks.overhead import C, machine  # noqa: E402

MODES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "operators heard": None,
    "category": {"detail": "category"},
    "default": {},
    "stacks": {"stacks": True},
}
BLOCKS = 3  # in a row; each counts


def things(device: str) -> tuple[dict[str, tuple[int, Callable[[], Any]]], tuple[Any, Any]]:
    """Returns the acts by name: how often in a block, and the function."""
    x = torch.randn(4, 4, device=device)
    nothing = nn.Identity()
    nested = nn.Sequential(*(nn.Identity() for _ in range(100)))
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device == "cuda")
    model(x).sum().backward()
    return {
        "an operator that allocates nothing (`view`)": (1000, lambda: x.view(-1)),
        "an operator that allocates and frees (`empty`)": (
            1000,
            lambda: torch.empty(1, device=device),
        ),
        "an operator with a kernel (`x + 1`)": (300, lambda: x + 1),
        "100 modules in one": (10, lambda: nested(x)),
        "an outermost module": (300, lambda: nothing(x)),
        "forward and backward of 10 linear layers": (10, lambda: model(x).sum().backward()),
        "a step of AdamW": (10, optimizer.step),
    }, (model, optimizer)


def block_ns(device: str, times: int, do: Callable[[], Any]) -> float:
    """Returns the host's nanoseconds for one act. The device may still be at work."""
    if device == "cuda":
        torch.cuda.synchronize()
    before = time.perf_counter_ns()
    for _ in range(times):
        do()
    return (time.perf_counter_ns() - before) / times


def one_round(
    device: str,
    all_things: dict[str, tuple[int, Callable[[], Any]]],
    traced: tuple[Any, Any],
    took: dict[str, dict[str, list[float]]],
) -> None:
    """Runs each act in each mode."""
    for mode, options in MODES.items():
        tracing = None
        if options is not None:
            tracing = pytracer.trace(*traced, table=False, **options)
            tracing.__enter__()
        C.listen_to_operators(mode == "operators heard")
        for name, (times, do) in all_things.items():
            block_ns(device, times, do)
            samples = took.setdefault(name, {}).setdefault(mode, [])
            samples += [block_ns(device, times, do) for _ in range(BLOCKS)]
        C.listen_to_operators(False)
        if tracing is not None:
            tracing.__exit__(None, None, None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    all_things, traced = things(device)
    took: dict[str, dict[str, list[float]]] = {}
    end = time.monotonic() + options.seconds
    rounds = 0
    while time.monotonic() < end:
        one_round(device, all_things, traced, took)
        rounds += 1
    prices = {
        name: {
            mode: {
                "median_ns": statistics.median(samples),
                "fast_ns": sorted(samples)[len(samples) // 10],
            }
            for mode, samples in by_mode.items()
        }
        for name, by_mode in took.items()
    }
    here = machine()
    target = options.out / f"prices-{slug(here['device'] or 'cpu')}.json"
    document = {"machine": here, "rounds": rounds, "prices": prices}
    kept.write(target, document)
    for name, by_mode in prices.items():
        print(f"{name:48}" + "".join(f"{each['median_ns']:12.0f}" for each in by_mode.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
