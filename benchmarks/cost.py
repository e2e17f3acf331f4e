"""Does backward cost what the textbook says? Shapes, operators and whole models, one unattended run.

    python benchmarks/cost.py                    # about 5 minutes on one GPU
    python benchmarks/cost.py --quick            # small sizes; what a machine without a GPU runs
    python benchmarks/cost.py --parts shapes,models --out DIR

Four parts. `shapes`: twenty linear and convolution layers, each as an inner and as a first layer.
`operators`: what is bound by bandwidth, on tensors of half a gigabyte, against the expected bytes
and the measured copy. `models`: BERT-large, GPT-2, ResNet-50 and a Llama, eager and compiled: the
classes beside the published ones, sums against the profiler's own, FLOPs against FlopCounterMode.
`phases`: what measuring does to the step: forward, backward and optimizer by CUDA events, traced
and plain. The JSON is written again after every result, so a run that is cut short leaves what it
had; what does not begin in time is listed as skipped.
"""

import argparse
import gc
import json
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]  # from a checkout, wherever it is run

from benchmarks import architectures, models  # noqa: E402
from pytracer import trace  # noqa: E402
from pytracer.analysis import cost  # noqa: E402
from pytracer.cost import peaks  # noqa: E402
from pytracer.export import cost_text  # noqa: E402

PARTS = ("shapes", "operators", "models", "phases")
WARM_UP, STEPS = 4, 5

# "Data Movement Is All You Need" (arXiv 2007.00072), table 1: BERT-large on a V100, in percent.
PUBLISHED = {
    "contraction": {"flops": 99.80, "time": 61.0},
    "normalisation": {"flops": 0.17, "time": 25.5},
    "element-wise": {"flops": 0.03, "time": 13.5},
}


# ---------------------------------------------------------------- running


def traced(step: Callable[[], Any], *targets: Any, device: str, steps: int = STEPS) -> trace:
    """The trace of a few warm steps."""
    for _ in range(WARM_UP):
        step()
    synchronize(device)
    with trace(*targets, cost=True, devices=device, detail="category") as t:
        for _ in range(steps):
            step()
        synchronize(device)
    return t


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def forget(device: str) -> None:
    gc.collect()
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()


def row_facts(row: cost.Row) -> dict[str, Any]:
    return {name: value for name, value in vars(row).items() if value not in (None, "", 0)}


def rates(records: Iterable[cost.Record], found: cost.Measured, phase: str) -> dict[str, Any]:
    """Bytes that the kernels move, their time, and what share of the copy's bandwidth that is."""
    those = [r for r in records if r.phase == phase and r.kernel_bytes is not None]
    time_ns = sum(r.time_ns for r in those)
    moved = sum(r.kernel_bytes or 0 for r in those)
    if not time_ns:
        return {}
    per_second = moved / time_ns * 1e9
    copy = found.peaks["copy_bytes_per_s"] if found.peaks else None
    share = {"of_copy": per_second / copy} if copy else {}
    return {"bytes": moved, "time_ns": time_ns, "bytes_per_s": per_second, **share}


# ---------------------------------------------------------------- shapes


@dataclass(frozen=True)
class Shape:
    name: str
    module: Callable[[], nn.Module]
    x: tuple[int, ...]


def linear(rows: int, inner: int, outer: int, *, bias: bool = True) -> Shape:
    name = f"linear {rows}x{inner} -> {outer}{'' if bias else ', no bias'}"
    return Shape(name, lambda: nn.Linear(inner, outer, bias=bias), (rows, inner))


def convolution(
    batch: int, inner: int, outer: int, size: int, kernel: int, stride: int = 1, groups: int = 1
) -> Shape:
    name = (
        f"conv{kernel}x{kernel}/{stride} {batch}x{inner}x{size}x{size} -> {outer}, {groups} groups"
    )

    def module() -> nn.Module:
        return nn.Conv2d(inner, outer, kernel, stride, kernel // 2, groups=groups, bias=False)

    return Shape(name, module, (batch, inner, size, size))


SHAPES = (
    linear(8192, 1024, 1024),
    linear(8192, 1024, 4096),
    linear(8192, 4096, 1024),
    linear(8192, 4096, 4096),
    linear(8192, 4096, 4096, bias=False),
    linear(16384, 2048, 5632, bias=False),
    linear(16384, 768, 3072),
    linear(8192, 768, 50304, bias=False),
    linear(8192, 768, 50257, bias=False),
    linear(8191, 4096, 4096),
    linear(8192, 4095, 4096),
    linear(128, 4096, 4096),
    convolution(128, 64, 64, 56, 1),
    convolution(128, 64, 64, 56, 3),
    convolution(128, 128, 128, 28, 3),
    convolution(128, 256, 256, 14, 3),
    convolution(128, 512, 512, 7, 3),
    convolution(128, 256, 512, 56, 1, 2),
    convolution(128, 256, 256, 14, 3, groups=256),
    convolution(128, 256, 256, 14, 3, groups=32),
)
QUICK_SHAPES = (
    linear(256, 64, 128),
    linear(255, 63, 65, bias=False),
    convolution(4, 8, 16, 14, 3),
    convolution(4, 8, 8, 14, 3, groups=8),
)


def run_shape(shape: Shape, device: str, first: bool) -> dict[str, Any]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    module = shape.module().to(device, dtype)
    x = torch.randn(shape.x, device=device, dtype=dtype, requires_grad=not first)
    gradient = torch.randn_like(module(x))

    def step() -> None:
        module(x).backward(gradient)
        x.grad = None
        for parameter in module.parameters():
            parameter.grad = None

    t = traced(step, module, device=device)
    row = max(cost.rows(t.data, "op"), key=lambda row: row.forward_flops)
    found = cost.measured(t.data)
    kernels = sorted(
        {kernel for r in found.records if r.flops for kernel in (*r.kernels, *r.notes)}
    )
    return {"shape": shape.name, "first_layer": first, **row_facts(row), "kernels": kernels}


def shapes(report: "Report", device: str, quick: bool) -> None:
    for shape in QUICK_SHAPES if quick else SHAPES:
        for first in (False, True):
            report.add("shapes", shape.name, lambda s=shape, f=first: run_shape(s, device, f))


# ---------------------------------------------------------------- operators


def operators(report: "Report", device: str, quick: bool) -> None:
    """Expected: bytes of backward by bytes of forward, where the facts give an exact figure."""
    # 512 MiB in bfloat16; rows that fit a block's registers.
    rows, columns = (512, 256) if quick else (2**18, 1024)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def tensor() -> torch.Tensor:
        return torch.randn(rows, columns, device=device, dtype=dtype, requires_grad=True)

    def of_one(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
        def build() -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
            x = tensor()
            return (lambda: function(x)), [x]

        return build

    def add() -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
        x, y = tensor(), tensor()
        return (lambda: x + y), [x, y]

    def norm() -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
        x, module = tensor(), nn.LayerNorm(columns).to(device, dtype)
        return (lambda: module(x)), [x, *module.parameters()]

    def cross_entropy() -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
        x, targets = tensor(), torch.randint(columns, (rows,), device=device)
        return (lambda: functional.cross_entropy(x, targets)), [x]

    def embedding() -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
        module = nn.Embedding(50257 if not quick else 1000, columns).to(device, dtype)
        ids = torch.randint(module.num_embeddings, (rows,), device=device)
        return (lambda: module(ids)), list(module.parameters())

    cases: dict[str, tuple[Callable[[], Any], float | None]] = {
        "relu": (of_one(torch.relu), 1.5),
        "gelu": (of_one(functional.gelu), 1.5),
        "silu": (of_one(functional.silu), 1.5),
        "tanh": (of_one(torch.tanh), 1.5),
        "dropout": (of_one(lambda x: functional.dropout(x, 0.1)), 1.0),
        "softmax": (of_one(lambda x: x.softmax(-1)), 1.5),
        "layer norm": (norm, 2.5 if device == "cuda" else 1.5),
        "residual add": (add, None),
        "cross-entropy": (cross_entropy, 2.0),
        "embedding": (embedding, None),
    }
    for name, (build, expected) in cases.items():
        report.add(
            "operators", name, lambda n=name, b=build, e=expected: run_operator(n, b, e, device)
        )


def run_operator(
    name: str, build: Callable[[], Any], expected: float | None, device: str
) -> dict[str, Any]:
    function, leaves = build()
    made = function()
    gradient = torch.randn_like(made)

    def step() -> None:
        function().backward(gradient)
        for leaf in leaves:
            leaf.grad = None

    t = traced(step, device=device)
    found = cost.measured(t.data)
    # The operator's own: not what the step around it does.
    main = next(row for row in cost.rows(t.data, "op") if row.forward_ns)
    own = [record for record in found.records if record.pair == main.name]
    own += [] if name != "embedding" else [r for r in found.records if r.node == "AccumulateGrad"]
    ratio = main.time_ratio
    within = None if expected is None or ratio is None else abs(ratio - expected) <= 0.15
    return {
        "operator": name,
        "result_bytes": made.nbytes,
        "expected": expected,
        "within_0.15": within,
        **row_facts(main),
        "forward": rates(own, found, "forward"),
        "backward": rates(own, found, "backward"),
        "kernels": sorted({kernel for record in own for kernel in record.kernels}),
    }


# ---------------------------------------------------------------- models


@dataclass
class Model:
    name: str
    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    optimizer: torch.optim.Optimizer
    device: str
    autocast: bool = True

    def forward(self, module: nn.Module | None = None) -> torch.Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.autocast):
            loss: torch.Tensor = (self.module if module is None else module)(*self.inputs)
        return loss

    def step(self, module: nn.Module | None = None) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.forward(module).backward()
        self.optimizer.step()


def build(name: str, device: str, quick: bool) -> Model:
    torch.manual_seed(0)
    if name == "resnet-50":
        batch, size = (2, 64) if quick else (128, 224)
        module: nn.Module = architectures.ResNet50(stages=(1, 1, 1, 1) if quick else (3, 4, 6, 3))
        inputs = (torch.randn(batch, 3, size, size), torch.randint(1000, (batch,)))
    else:
        small = architectures.Sizes(1000, 64, 256, 2, 4, 32, 2)
        sizes = {
            "bert-large": architectures.BERT_LARGE,
            "llama": architectures.LLAMA,
            "gpt-2": architectures.Sizes(models.GPT2.vocabulary, 0, 0, 0, 0, 1024),
        }[name]
        sizes = small if quick else sizes
        batch = 2 if quick else {"bert-large": 8, "llama": 4, "gpt-2": 16}[name]
        if name == "gpt-2":
            module = models.Transformer(models.TINY if quick else models.GPT2)
        else:
            module = {"bert-large": architectures.Bert, "llama": architectures.Llama}[name](sizes)
        vocabulary = models.TINY.vocabulary if quick and name == "gpt-2" else sizes.vocabulary
        ids = torch.randint(vocabulary, (2, batch, sizes.length))
        inputs = (ids[0], ids[1])
    dtype = torch.bfloat16 if name == "llama" and device == "cuda" else None
    module = module.to(device, dtype) if dtype else module.to(device)
    inputs = (inputs[0].to(device), inputs[1].to(device))
    fused = {"fused": True} if device == "cuda" else {}
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, **fused)
    autocast = device == "cuda" and dtype is None
    return Model(name, module, inputs, optimizer, device, autocast)


MODELS = ("bert-large", "gpt-2", "resnet-50", "llama")


def run_models(report: "Report", device: str, quick: bool) -> None:
    for compiled in (False, True):
        for name in MODELS:
            label = f"{name}, {'compiled' if compiled else 'eager'}"
            report.add("models", label, lambda n=name, c=compiled: run_model(n, device, quick, c))


def run_model(name: str, device: str, quick: bool, compiled: bool) -> dict[str, Any]:
    model = build(name, device, quick)
    module = torch.compile(model.module) if compiled else model.module
    t = traced(lambda: model.step(module), model.module, model.optimizer, device=device, steps=3)
    found = cost.measured(t.data)
    classes = cost.rows(t.data, "class")
    modules = cost.rows(t.data, "module")
    total = cost.summarised(found, {name: found.records}, "op")[0]
    text = cost_text.render(t.data, "class") + "\n\n" + cost_text.render(t.data, "module")
    print(f"\n{name}, {'compiled' if compiled else 'eager'}\n{text}\n", flush=True)
    return {
        "model": name,
        "compiled": compiled,
        "parameters": sum(p.numel() for p in model.module.parameters()),
        "classes": shares(classes),
        "published": PUBLISHED,
        "class_rows": [row_facts(row) for row in classes],
        "module_rows": [row_facts(row) for row in modules[:60]],
        "verdicts": weigh_verdicts(modules),
        "whole_ratio": total.time_ratio,
        "whole_flop_ratio": total.flop_ratio,
        "busy_ns": found.busy_ns,
        "device_busy_ns": found.device_busy_ns,
        "sum_of_rows_ns": sum(row.time_ns for row in classes),
        "profiler": profiler_total(lambda: model.step(module), device),
        "flop_counter": None if compiled else flop_counter(model, found),
        "uncounted": [vars(each) for each in cost.uncounted(t.data)][:20],
        "table": text,
    }


def shares(classes: list[cost.Row]) -> dict[str, Any]:
    """Percent of FLOPs and of time, of forward and backward and both; the three classes only, as
    the paper has it, and beside it of everything."""
    three = [row for row in classes if row.name in PUBLISHED]
    document: dict[str, Any] = {}
    for phase in ("forward", "backward", "both"):
        parts = ("forward", "backward", "recompute") if phase == "both" else (phase,)
        everything = sum(getattr(row, f"{part}_ns") for row in classes for part in parts)
        of_three = {
            what: sum(getattr(row, f"{part}_{what}") for row in three for part in parts)
            for what in ("flops", "ns")
        }
        document[phase] = {
            row.name: {
                "flops": 100
                * sum(getattr(row, f"{p}_flops") for p in parts)
                / max(of_three["flops"], 1),
                "time": 100 * sum(getattr(row, f"{p}_ns") for p in parts) / max(of_three["ns"], 1),
                "time_of_all": 100
                * sum(getattr(row, f"{p}_ns") for p in parts)
                / max(everything, 1),
            }
            for row in classes
        }
    total = max(sum(row.time_ns for row in classes), 1)
    document["of_busy"] = {row.name: 100 * row.time_ns / total for row in classes}
    return document


def weigh_verdicts(rows: list[cost.Row]) -> dict[str, Any]:
    """How many rows, and how much of the time, each verdict has."""
    total = max(sum(row.time_ns for row in rows), 1)
    return {
        verdict or "none": {
            "rows": sum(row.verdict == verdict for row in rows),
            "time_share": sum(row.time_ns for row in rows if row.verdict == verdict) / total,
        }
        for verdict in (cost.CONFIRMED, cost.EXPLAINED, cost.OFF, cost.NONE)
    }


def profiler_total(step: Callable[[], Any], device: str) -> dict[str, Any]:
    """The profiler's own sum of what the device did in as many steps, in a run of its own, and what
    share of it our join attributes when given the same events."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from pytracer.cost import measure

    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device == "cuda" else []
    with profile(activities=activities, record_shapes=True) as run:
        for _ in range(3):
            step()
        synchronize(device)
    calls, kernels = measure._read(run.profiler.kineto_results.events())
    ours = measure.document(calls, kernels)["busy_ns"]
    averages = run.key_averages()
    # User annotations are shown on the device too, around kernels that are counted already.
    own = [event for event in averages if not event.is_user_annotation]
    # Of a kernel its own row has the time, and the operator's that launched it once more.
    theirs = 1000 * sum(
        event.self_device_time_total for event in own if event.device_type == DeviceType.CUDA
    )
    if device == "cpu":
        # Nodes and annotations have time of their own there, which is no operator's.
        theirs = sum(
            event.self_cpu_time_total * 1000
            for event in own
            if event.key.startswith("aten::") or event.key in ("detach", "detach_")
        )
    return {"theirs_ns": theirs, "ours_ns": ours, "ratio": ours / theirs if theirs else None}


def flop_counter(model: Model, found: cost.Measured) -> dict[str, Any]:
    """Per step, forward and backward, as torch counts; beside ours, and where they differ."""
    with FlopCounterMode(display=False) as counter:
        model.forward().backward()
    theirs = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    ours: dict[str, int] = {}
    for record in found.records:
        if record.flops and record.phase in ("forward", "backward", "recompute"):
            name = record.op.replace("::", ".")
            ours[name] = ours.get(name, 0) + record.flops // 3
    differ = {
        name: {"ours": ours.get(name, 0), "theirs": theirs.get(name, 0)}
        for name in sorted({*ours, *theirs})
        if ours.get(name, 0) != theirs.get(name, 0)
    }
    return {
        "theirs": counter.get_total_flops(),
        "ours": sum(ours.values()),
        "differences": differ,
    }


# ---------------------------------------------------------------- phases


def phases(report: "Report", device: str, quick: bool) -> None:
    if device != "cuda":
        report.skip("phases", "gpt-2", "CUDA events need a GPU")
        return
    report.add("phases", "gpt-2", lambda: run_phases(build("gpt-2", device, quick)))


def run_phases(model: Model) -> dict[str, Any]:
    """Medians of each phase's device time, plain and while cost=True measures."""

    def rounds() -> dict[str, list[float]]:
        times: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
        for _ in range(10):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
            model.optimizer.zero_grad(set_to_none=True)
            marks[0].record()
            loss = model.forward()
            marks[1].record()
            loss.backward()
            marks[2].record()
            model.optimizer.step()
            marks[3].record()
            torch.cuda.synchronize()
            for name, (begin, end) in zip(times, pairwise(marks), strict=True):
                times[name].append(begin.elapsed_time(end))
        return times

    rounds()
    plain = {name: statistics.median(each) for name, each in rounds().items()}
    with trace(model.module, model.optimizer, cost=True) as t:
        measured = {name: statistics.median(each) for name, each in rounds().items()}
    records = cost.measured(t.data).records
    kernels = {
        phase: sum(r.time_ns for r in records if r.phase == phase) / 10 / 1e6 for phase in plain
    }
    again = {name: statistics.median(each) for name, each in rounds().items()}
    return {
        "plain_ms": plain,
        "with_cost_ms": measured,
        "kernels_ms": kernels,
        "plain_again_ms": again,
        "ratio": {name: measured[name] / plain[name] for name in plain},
    }


# ---------------------------------------------------------------- the report


class Report:
    """Results, on disk as they come."""

    def __init__(self, target: Path, deadline: float, facts: dict[str, Any], device: str) -> None:
        self.target, self.deadline, self.device = target, deadline, device
        self.document: dict[str, Any] = {"machine": facts, "skipped": [], "failed": []}

    def add(self, part: str, name: str, run: Callable[[], dict[str, Any]]) -> None:
        if time.monotonic() > self.deadline:
            self.skip(part, name, "no time left")
            return
        began = time.monotonic()
        try:
            result = run()
        except Exception as error:  # one failure must not cost the others
            traceback.print_exc()
            self.document["failed"].append({"part": part, "name": name, "error": repr(error)[:500]})
        else:
            result["seconds"] = round(time.monotonic() - began, 2)
            self.document.setdefault(part, []).append(result)
            print(line_of(part, result), flush=True)
        forget(self.device)
        self.write()

    def skip(self, part: str, name: str, why: str) -> None:
        self.document["skipped"].append({"part": part, "name": name, "why": why})
        self.write()

    def write(self) -> None:
        self.target.write_text(json.dumps(self.document, indent=1) + "\n")


def line_of(part: str, result: dict[str, Any]) -> str:
    def number(value: Any, form: str = ".2f") -> str:
        return "" if value is None else format(value, form)

    if part == "shapes":
        first = ", first layer" if result["first_layer"] else ""
        return (
            f"{result['shape'] + first:<64}FLOPs {number(result.get('flop_ratio')):>5}  "
            f"time {number(result.get('time_ratio')):>5}  {result.get('verdict', ''):<10}"
            f"{result.get('cause', '')}"
        )
    if part == "operators":
        shares = [number(result[way].get("of_copy"), ".0%") for way in ("forward", "backward")]
        return (
            f"{result['operator']:<16}expected {number(result['expected']):>5}  "
            f"time {number(result.get('time_ratio')):>5}  of copy {shares[0]:>5} {shares[1]:>5}  "
            f"{result.get('verdict', ''):<10}{result.get('cause', '')}"
        )
    if part == "models":
        both = result["classes"]["both"]
        parts = ", ".join(f"{name} {both[name]['time']:.1f} %" for name in PUBLISHED)
        return (
            f"{result['model']}: ratio {number(result['whole_ratio'])}; of the three classes' time "
            f"{parts}; sums {number(result['profiler']['ratio'], '.4f')} of the profiler's"
        )
    return json.dumps(result)


def machine(device: str) -> dict[str, Any]:
    measured = peaks.measure(device)
    return {
        "device": peaks.device_name(device),
        "cache_bytes": peaks.cache_bytes(device),
        "peaks": measured,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def summarise(document: dict[str, Any]) -> dict[str, Any]:
    """The claims in numbers."""
    inner = [each for each in document.get("shapes", ()) if not each["first_layer"]]
    first = [each for each in document.get("shapes", ()) if each["first_layer"]]
    ratios = [each["time_ratio"] for each in inner if "time_ratio" in each]
    judged = document.get("operators", [])
    return {
        "shapes": len(inner),
        "flop_ratio_is_2": sum(each.get("flop_ratio") == 2 for each in inner),
        "first_layers": len(first),
        "flop_ratio_is_1": sum(each.get("flop_ratio") == 1 for each in first),
        "median_time_ratio": statistics.median(ratios) if ratios else None,
        "shapes_off": [each["shape"] for each in inner if each.get("verdict") == cost.OFF],
        "operators_within_0.15": [e["operator"] for e in judged if e["within_0.15"]],
        "operators_outside": [e["operator"] for e in judged if e["within_0.15"] is False],
        "models": {
            f"{each['model']}, {'compiled' if each['compiled'] else 'eager'}": {
                "time_ratio": each["whole_ratio"],
                "time_of_three": {
                    name: share["time"]
                    for name, share in each["classes"]["both"].items()
                    if name in PUBLISHED
                },
                "of_profiler": each["profiler"]["ratio"],
            }
            for each in document.get("models", ())
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--minutes", type=float, default=5, help="begin nothing new after so many")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := {*parts} - {*PARTS}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.quick:
        parser.error("the full sizes need a GPU; --quick runs small ones here")
    began = time.monotonic()
    facts = machine(device)
    slug = re.sub(r"[^a-z0-9]+", "-", facts["device"].lower()).strip("-")
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"cost-{'quick-' if options.quick else ''}{slug}.json"
    report = Report(target, began + 60 * options.minutes, facts, device)
    run = {"shapes": shapes, "operators": operators, "models": run_models, "phases": phases}
    for part in ("shapes", "operators", "phases", "models"):  # models last: they take longest
        if part in parts:
            run[part](report, device, options.quick)
    report.document["summary"] = summarise(report.document)
    report.document["seconds"] = round(time.monotonic() - began, 1)
    report.write()
    print(json.dumps(report.document["summary"], indent=1))
    print(f"written: {target.name}, after {report.document['seconds']} s")
    return 1 if report.document["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
