"""Measures how much of the peak pytracer, torch.profiler and MemTracker attribute correctly.

    python benchmarks/attribution.py                               # a few cases, small, on the CPU
    python benchmarks/attribution.py --device cuda --out FILE      # real sizes; results as JSON
    python benchmarks/attribution.py --all                         # every case of the conformance suite
    python benchmarks/attribution.py --programs --out FILE         # its programs

The truth comes from programs/conformance: formulas give weights, gradients, optimizer state and
inputs (a case without one of these is left out), the slow reference gives activations, and the rest
is left. Each tool gives its bytes per category at its own peak. *right* is the sum, over
categories, of the bytes that tool and truth have in common. The remainder of the larger peak is
unknown or wrong. Every tool runs the same steps of the same model, made anew, in this process.

Programs show all weights, all gradients or all of the optimizer's state at many instants. At each
of them, a tool gives the same sum. Its difference is wrong, as a share of all bytes shown.
"""

import argparse
import bisect
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _pytest.outcomes import Skipped

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import kept  # noqa: E402
from programs.conformance.cases import CASES, STEPS, Case, Result, conform, make  # noqa: E402
from programs.conformance.engines import ON_A_GPU, PROGRAMS  # noqa: E402  the last to add its own
from programs.conformance.expected import storages  # noqa: E402
from programs.conformance.programs import Says, run  # noqa: E402
from programs.conformance.techniques import TECHNIQUES  # noqa: E402

DEFAULT = (
    "mlp-fp32-adamw",
    "resnet-fp32-adamw",
    "lstm-clipping-adamw",
    "unet-ema_module-adamw",
    "bert-autocast_bf16-adamw",
    "gpt2-autocast_bf16-adamw",
    "gpt2-checkpoint-adamw",
    "llama-fp32-adamw",
    "llama-bf16_masters-adamw",
    "llama-lora_autocast-adamw",
    "vit-inference-adamw",
    "recommender-fp32-adamw",
)
KINDS = ("weights", "gradients", "optimizer_state", "inputs", "activations", "rest", "unknown")
NO_OWN_ROW = ("temporaries", "workspaces", "functional", "communication", "graph_pools")


def ours(at_peak: dict[str, int]) -> dict[str, int]:
    """Returns our categories, reduced to those that all tools have."""
    found = {name: at_peak[name] for name in (*KINDS[:5], "unknown")}
    return {**found, "rest": sum(at_peak[name] for name in NO_OWN_ROW)}


def truth(result: Result) -> dict[str, int]:
    """Returns the true bytes: those of formulas, the reference's activations, and the rest."""
    found = {**ours(result.hooks), "unknown": 0, "activations": result.reference_activations}
    found["rest"] = 0
    found["rest"] = result.peak_bytes - sum(found.values())
    return found


def profiler(case: Case, size: str, device: str) -> dict[str, int]:
    """Returns the categories of torch.profiler's memory timeline at its highest point."""
    training = make(case, size, device)
    with profiling(training.kind) as profile:
        for _ in range(STEPS):
            TECHNIQUES[case.technique].step(training)
    _, sizes = coalesced(profile, training.kind)
    highest = max(sizes, key=sum)
    found = dict.fromkeys(KINDS, 0)
    for index, kind in profiler_kinds():
        found[kind] += highest[index + 1]
    return found


def profiling(device: str) -> torch.profiler.profile:
    """Returns a profiler with all options that its memory timeline needs."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities, profile_memory=True, record_shapes=True, with_stack=True
    )


def coalesced(profile: torch.profiler.profile, device: str) -> tuple[list[int], list[list[int]]]:
    """Returns times, and bytes by the profiler's categories."""
    from torch.profiler import _memory_profiler as timeline

    memory: Any = timeline.MemoryProfileTimeline(profile._memory_profile())
    times, sizes = memory._coalesce_timeline("cuda:0" if device == "cuda" else "cpu")
    return list(times), sizes


def profiler_kinds() -> list[tuple[int, str]]:
    """Returns the columns of the profiler's categories, by our names."""
    from torch.profiler import _memory_profiler as timeline

    kinds = {
        timeline.Category.PARAMETER: "weights",
        timeline.Category.OPTIMIZER_STATE: "optimizer_state",
        timeline.Category.INPUT: "inputs",
        timeline.Category.ACTIVATION: "activations",
        timeline.Category.GRADIENT: "gradients",
        timeline.Category.TEMPORARY: "rest",
        timeline.Category.AUTOGRAD_DETAIL: "rest",
        None: "unknown",
    }
    columns = timeline._CATEGORY_TO_INDEX.items()
    return [(index, kinds[category]) for category, index in columns]


def mem_tracker(case: Case, size: str, device: str) -> dict[str, int]:
    """Returns the categories of torch.distributed's tracker at its peak."""
    from torch.distributed._tools.mem_tracker import MemTracker

    training = make(case, size, device)
    tracker = MemTracker()
    tracked = (training.model, training.average, training.optimizer)
    tracker.track_external(*(part for part in tracked if part is not None))
    with tracker:
        for _ in range(STEPS):
            TECHNIQUES[case.technique].step(training)
            tracker.reset_mod_stats()
    return tracked(tracker.get_tracker_snapshot("peak"), training.kind)


def tracked(snapshots: dict[torch.device, dict[Any, int]], device: str) -> dict[str, int]:
    """Returns the tracker's bytes on a device, by our names."""
    peak = next(snapshot for where, snapshot in snapshots.items() if where.type == device)
    kinds = {
        "Parameter": "weights",
        "Buffer": "weights",
        "Gradient": "gradients",
        "Activation": "activations",
        "Optstate": "optimizer_state",
        "Temp": "rest",
        "Other": "unknown",
    }
    found = dict.fromkeys(KINDS, 0)
    for kind, amount in peak.items():
        name = getattr(kind, "value", kind)
        if name in kinds:
            found[kinds[name]] += amount
    return found


# -------------------------------------------------------------------------- programs


@dataclass
class Asked(Says):
    """Runs a program under another tool, and asks the tool for the sums that the program shows."""

    shown: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)

    def are(self, word: str, *tensors: torch.Tensor | None, name: str = "") -> None:
        pass

    def only(self, category: str, tensors: Iterable[torch.Tensor]) -> None:
        here = [tensor for tensor in tensors if tensor.device.type == self.device]
        self.shown.append(storages(here))
        self.ask(category)

    def ask(self, category: str) -> None:
        raise NotImplementedError


class ByProfiler(Asked):
    """Reads the profiler's timeline afterwards, at the times of the questions."""

    asked: list[tuple[int, str]]

    @contextmanager
    def traced(self, *targets: Any) -> Iterator[None]:
        self.asked = []
        with profiling(self.device) as profile:
            yield
        times, sizes = coalesced(profile, self.device)
        for at, category in self.asked:
            row = sizes[max(bisect.bisect_right(times, at) - 1, 0)]
            self.found.append(sum(row[i + 1] for i, kind in profiler_kinds() if kind == category))

    def ask(self, category: str) -> None:
        self.asked.append((time.time_ns() // 1000, category))  # its times are in us


class ByMemTracker(Asked):
    """Asks the tracker at the time of each question."""

    @contextmanager
    def traced(self, *targets: Any) -> Iterator[None]:
        from torch.distributed._tools.mem_tracker import MemTracker

        self.tracker = MemTracker()
        self.tracker.track_external(*targets)
        with self.tracker:
            yield

    def ask(self, category: str) -> None:
        there = tracked(self.tracker.get_tracker_snapshot("current"), self.device)
        self.found.append(there[category])
        if category == "gradients" and self.shown[-1]:  # or it refuses the next pass
            self.tracker.reset_mod_stats()


def off(shown: list[int], found: list[int]) -> float:
    """Returns the difference from the shown bytes, as a share of them."""
    wrong = sum(abs(a - b) for a, b in zip(shown, found, strict=True))
    return wrong / max(sum(shown), 1)


def measure_program(name: str, device: str) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name}
    ours = run(name, "default", device)
    row["instants"] = len(ours.totals)
    row["pytracer"] = {"wrong": off([shown for *_, shown in ours.totals], ours.said())}
    if not ours.totals:
        return row
    for tool, kind in (("torch.profiler", ByProfiler), ("MemTracker", ByMemTracker)):
        asked = kind("default", device)
        try:
            torch.manual_seed(0)
            with torch.device(device):
                PROGRAMS[name](asked)
            row[tool] = {"wrong": off(asked.shown, asked.found)}
        except Exception as error:
            row[tool] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return row


def measure_programs(device: str, names: list[str]) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        if device == "cpu" and name in ON_A_GPU:
            continue
        row = measure_program(name, device)
        if row["instants"]:
            rows.append(row)
            print({key: row[key] for key in ("name", "pytracer", *PEERS)}, flush=True)
    return rows


# -------------------------------------------------------------------------- judging


def judged(found: dict[str, int], true: dict[str, int]) -> dict[str, Any]:
    """Returns the share of bytes whose category is wrong or unknown in a tool."""
    right = sum(min(found[kind], true[kind]) for kind in KINDS[:-1])
    total = max(sum(found.values()), sum(true.values()), 1)
    return {
        "wrong_or_unknown": 1 - right / total,
        "unknown": found["unknown"] / max(sum(found.values()), 1),
    }


PEERS: dict[str, Callable[[Case, str, str], dict[str, int]]] = {
    "torch.profiler": profiler,
    "MemTracker": mem_tracker,
}


def measure(case: Case, size: str, device: str) -> dict[str, Any]:
    result = conform(case, size, device)
    if result.without_inputs("found") != result.without_inputs("expected"):
        return {"name": case.name, "error": "the formulas do not confirm this case"}
    true = truth(result)
    row: dict[str, Any] = {"name": case.name, "peak_bytes": result.peak_bytes}
    row["pytracer"] = judged(ours(result.auto), true)
    return row | {name: asked(ask, case, size, device, true) for name, ask in PEERS.items()}


def asked(
    ask: Callable[[Case, str, str], dict[str, int]],
    case: Case,
    size: str,
    device: str,
    true: dict[str, int],
) -> dict[str, Any]:
    try:
        return judged(ask(case, size, device), true)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def shown(part: dict[str, Any]) -> str:
    if "error" in part:
        return f"failed: {part['error'][:40]}"
    return f"{part['wrong_or_unknown']:7.2%} ({part['unknown']:.2%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=("tiny", "real"), help="default: real on CUDA")
    parser.add_argument("--all", action="store_true", help="every case of the conformance suite")
    parser.add_argument("--programs", action="store_true", help="not the cases, the programs")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, help="all numbers, as JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    size = options.size or ("tiny" if options.device == "cpu" else "real")
    names = [n for n in (CASES if options.all else DEFAULT) if options.only in n]
    hardware = torch.cuda.get_device_name() if options.device != "cpu" else platform.machine()
    facts = {"torch": torch.__version__, "hardware": hardware, "size": size}
    facts["measured"] = time.strftime("%F")
    tools = ("pytracer", *PEERS)
    if options.programs:
        rows = measure_programs(options.device, [n for n in PROGRAMS if options.only in n])
        if options.out:
            kept.write(options.out, {**facts, "programs": rows})
        return
    print("bytes at the peak that are unknown or wrong (unknown alone)")
    print(f"{'case':<34}" + "".join(f"{tool:>24}" for tool in tools))
    rows = []
    for name in names:
        try:
            row = measure(CASES[name], size, options.device)
        except Skipped as reason:
            row = {"name": name, "error": str(reason)}
        rows.append(row)
        cells = [shown(row[tool]) for tool in tools] if "error" not in row else [row["error"]]
        print(f"{name:<34}" + "".join(f"{cell:>24}" for cell in cells), flush=True)
        if options.device != "cpu":
            torch.cuda.empty_cache()
        if options.out:  # after every case, so that a time limit loses only cases not measured
            kept.write(options.out, {**facts, "cases": rows})


if __name__ == "__main__":
    main()
