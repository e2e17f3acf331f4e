"""Measures what tracing costs in two checkouts, in turns on one machine.

    python benchmarks/before_after.py OTHER --cases gpt2-host-bound,compiled-gpt2 --rounds 3

OTHER is another checkout of this project with its extension built in place. Each round runs each
checkout in a process of its own, in alternating order. In a process, each block of traced steps is
between blocks of plain ones. A mode's cost is the median ratio of its blocks to their neighbours.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODES: dict[str, dict[str, Any]] = {
    "category": {"detail": "category"},
    "default": {},
    "stacks": {"stacks": True},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-host-bound": ("gpt2", {"device": "cuda", "batch": 1, "length": 64}),
    "compiled-gpt2": ("compiled_gpt2", {"device": "cuda"}),
    "tiny-cpu": ("tiny", {}),
}


def load_models() -> Any:
    """Loads this checkout's workloads, whichever checkout's tracer runs them."""
    spec = importlib.util.spec_from_file_location("workloads", ROOT / "benchmarks" / "models.py")
    assert spec is not None
    assert spec.loader is not None
    models = importlib.util.module_from_spec(spec)
    sys.modules["workloads"] = models
    spec.loader.exec_module(models)
    return models


def measure(case: str, seconds: float, steps: int) -> dict[str, Any]:
    """Returns ratios of traced to plain blocks, by the clock and by processor time."""
    import torch

    import pytracer

    builder, arguments = CASES[case]
    workload = getattr(load_models(), builder)(**arguments)

    def block(options: dict[str, Any] | None) -> tuple[float, float]:
        traced = options is not None
        tracing = pytracer.trace(workload.model, workload.optimizer, table=False, **(options or {}))
        if traced:
            tracing.__enter__()
        workload.step()
        synchronize()
        clock, own = time.perf_counter(), time.process_time()
        for _ in range(steps):
            workload.step()
        synchronize()
        took = time.perf_counter() - clock, time.process_time() - own
        if traced:
            tracing.__exit__(None, None, None)
        return took

    def synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    for _ in range(3):
        block(None)
    for options in MODES.values():
        block(options)
    ratios: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    plain = [block(None)]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for mode, options in MODES.items():
            traced = block(options)
            plain.append(block(None))
            ratios[mode].append(
                (
                    2 * traced[0] / (plain[-2][0] + plain[-1][0]),
                    2 * traced[1] / (plain[-2][1] + plain[-1][1]),
                )
            )
    return {
        "plain_step_ms": 1000 * statistics.median(clock for clock, _ in plain) / steps,
        "blocks": len(plain),
        "wall": {mode: [wall for wall, _ in rows] for mode, rows in ratios.items()},
        "process": {mode: [own for _, own in rows] for mode, rows in ratios.items()},
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def in_checkout(folder: Path, case: str, seconds: float, steps: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", case, "--seconds", str(seconds)]
    done = subprocess.run(
        [*command, "--steps", str(steps), "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(other: Path, case: str, rounds: int, seconds: float, steps: int) -> dict[str, Any]:
    """Returns the medians of all blocks of each checkout."""
    checkouts = {"before": other, "after": ROOT}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    for turn in range(rounds):
        for name in sorted(checkouts, reverse=bool(turn % 2)):
            runs[name].append(in_checkout(checkouts[name], case, seconds, steps))
    result: dict[str, Any] = {"rounds": rounds}
    for name, found in runs.items():
        result[name] = {
            "plain_step_ms": round(statistics.median(run["plain_step_ms"] for run in found), 3),
            **{
                kind: {
                    mode: summary([ratio for run in found for ratio in run[kind][mode]])
                    for mode in MODES
                }
                for kind in ("wall", "process")
            },
        }
    result["torch"], result["device"] = runs["after"][0]["torch"], runs["after"][0]["device"]
    return result


def summary(ratios: list[float]) -> dict[str, float]:
    quarters = statistics.quantiles(ratios, n=4)
    return {
        "median": round(statistics.median(ratios), 4),
        "q1": round(quarters[0], 4),
        "q3": round(quarters[2], 4),
        "blocks": len(ratios),
    }


def commit_of(folder: Path) -> str:
    done = subprocess.run(
        ["git", "-C", folder, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def print_case(case: str, result: dict[str, Any]) -> None:
    print(f"{case} on {result['device']}")
    for kind in ("wall", "process"):
        for mode in MODES:
            before, after = (result[name][kind][mode] for name in ("before", "after"))
            print(
                f"  {kind:8} {mode:9} before {before['median']:.3f}"
                f" ({before['q1']:.3f}-{before['q3']:.3f})  after {after['median']:.3f}"
                f" ({after['q1']:.3f}-{after['q3']:.3f})  of {after['blocks']} blocks"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--cases", default="gpt2-host-bound,compiled-gpt2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15, help="for each process")
    parser.add_argument("--steps", type=int, default=12, help="in a block")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.seconds, options.steps)))
        return
    document = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "before": commit_of(options.other),
        "after": commit_of(ROOT),
        "cases": {},
    }
    for case in options.cases.split(","):
        result = compare(
            options.other.resolve(), case, options.rounds, options.seconds, options.steps
        )
        document["cases"][case] = result
        print_case(case, result)
        if options.out:
            options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
