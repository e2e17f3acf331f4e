"""Measures the price of being always on, by samples of whose code runs, on a GPU.

    python benchmarks/always_price.py                             # the cases that run here
    python benchmarks/always_price.py --cases generate --seconds 20 --out DIR

Each case runs plain, then always on, then plain again, and counts samples as whose_time.py does. A case
ends after 2,000 steps or its seconds. `generate` marks its steps itself, because it has no optimizer's;
`ddp` is one rank on one GPU: its hooks and buckets are there, and nothing is sent. The time that our
code takes includes its looks.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # from a checkout, wherever it is run

import pytracer  # noqa: E402
from benchmarks import kept, slug, whose_time  # noqa: E402
from benchmarks.overhead import CASES, Case, machine, synchronize  # noqa: E402

WANTED = ("gpt2-host-bound", "bert-large", "compiled-gpt2", "resnet50", "generate", "reinforcement")
DDP = "ddp"
STEPS, BLOCK, PLAIN_BLOCKS = 2000, 25, 4
MOST = 0.01  # of the samples


def measure(case: Case, seconds: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    work = case.build()
    for _ in range(whose_time.WARM_UP):
        work.step()
    synchronize(case.device)
    clocks = [whose_time.Samples(thread) for thread in whose_time.threads()]
    found: dict[str, Counter[int]] = {"plain": Counter(), "always": Counter()}
    steps: Counter[str] = Counter()
    wall: Counter[str] = Counter()

    def block(name: str, mark: Any = None) -> None:
        for clock in clocks:
            clock.count(True)
        began = time.perf_counter()
        for _ in range(BLOCK):
            work.step()
            if mark is not None:
                mark()
        synchronize(case.device)
        wall[name] += time.perf_counter() - began
        for clock in clocks:
            clock.count(False)
            found[name].update(clock.take())
        steps[name] += BLOCK

    for _ in range(PLAIN_BLOCKS):
        block("plain")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run.always"
        deadline = time.monotonic() + seconds
        with pytracer.always(folder) as recorder:
            mark = recorder.mark_step if case.name == "generate" else None
            while steps["always"] < STEPS and time.monotonic() < deadline:
                block("always", mark)
        history = pytracer.History(folder)
        looks = [(look.step, look.steps, look.reason) for look in history.looks]
        counted = history.step_count
    for _ in range(PLAIN_BLOCKS):
        block("plain")
    rows = {name: whose_time.by_owner(found[name], steps[name]) for name in found}
    of = {name: sum(row["owners_ms"].values()) for name, row in rows.items()}
    return {
        "case": case.name,
        "description": work.description,
        "steps": dict(steps),
        "counted": counted,
        "looks": looks,
        "ours": rows["always"]["owners_ms"][whose_time.OURS] / of["always"],
        "thread_ratio": of["always"] / of["plain"],
        "wall_ratio": (wall["always"] / steps["always"]) / (wall["plain"] / steps["plain"]),
        "modes": rows,
    }


def alone(case: Case) -> Case:
    """The case of several ranks in this process alone."""
    from torch import distributed

    store = distributed.HashStore()
    distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    return case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=[*WANTED, DDP], choices=[*WANTED, DDP])
    parser.add_argument("--seconds", type=float, default=25.0, help="of being on, for each case")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"machine": machine(), "cases": []}
    target = options.out / f"always-price-{slug(document['machine']['device'] or 'cpu')}.json"
    for case in CASES:
        if case.name in options.cases:
            result = measure(alone(case) if case.name == DDP else case, options.seconds)
            document["cases"].append(result)
            print(
                f"{case.name:18} ours {result['ours']:.2%}  thread x{result['thread_ratio']:.3f}  "
                f"wall x{result['wall_ratio']:.3f}  {result['steps']}  looks {result['looks']}",
                flush=True,
            )
            kept.write(target, document)
            gc.collect()
    return int(any(result["ours"] > MOST for result in document["cases"]))


if __name__ == "__main__":
    sys.exit(main())
