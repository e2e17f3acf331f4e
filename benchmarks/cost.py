"""Does backward cost what the textbook says? Shapes, operators and models, one unattended run.

    python benchmarks/cost.py                    # about 5 minutes on one GPU
    python benchmarks/cost.py --quick            # small sizes; what a machine without a GPU runs
    python benchmarks/cost.py --parts shapes,models --out DIR
    python benchmarks/cost.py --parts compiled --out DIR --resume earlier/cost-nvidia-h200.json

It has five parts. `shapes`: twenty linear and convolution layers, each as an inner and as a first
layer, and their products alone. `operators`: operators bound by bandwidth, on tensors of half a
gigabyte, beside the expected bytes and the measured copy. `phases`: forward, backward and optimizer
by CUDA events, by hand, in a trace, and in one that measures costs. `models`: BERT-large, GPT-2,
ResNet-50 and a Llama: the classes beside the published ones, sums beside the profiler's own, FLOPs
beside FlopCounterMode. `compiled`: the same models through torch.compile.

The JSON is written again after every result, so a run that is cut short keeps its results. Parts
that do not begin in time are listed as skipped. Results for this device and torch that the file
already has are not measured again without `--again`. `benchmarks/readme_tables.py` makes tables.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]  # from a checkout, wherever it is run

from benchmarks import architectures, kept, models, slug  # noqa: E402
from pytracer import trace  # noqa: E402
from pytracer.cost import (  # noqa: E402
    measurements,
    peaks,
    table as cost_table,
    verdicts,
)
from pytracer.export import cost_text  # noqa: E402
from pytracer.export.terminal import Terminal  # noqa: E402

PARTS = ("shapes", "operators", "phases", "models", "compiled")  # the longest last
WARM_UP, STEPS = 4, 5
CALLS = 5  # of a product by itself, in a graph

_RATIOS = ("time_ratio", "expected_ratio", "verdict", "cause")
_CHECKS = ("profiler", "flop_counter", "busy_ns", "sum_of_rows_ns")
KEPT = {  # in the file, of each part's results
    "shapes": ("id", "first_layer", "flop_ratio", *_RATIOS, "alone", "as_alone"),
    "operators": ("id", "operator", "expected", *_RATIOS, "within_0.15", "forward", "backward"),
    "models": ("id", "model", "compiled", "classes", "published", "whole_ratio", *_CHECKS),
}

# "Data Movement Is All You Need" (arXiv 2007.00072), table 1: BERT-large on a V100, in percent.
PUBLISHED = {
    "contraction": {"flops": 99.80, "time": 61.0},
    "normalisation": {"flops": 0.17, "time": 25.5},
    "element-wise": {"flops": 0.03, "time": 13.5},
}


# ---------------------------------------------------------------- running


def traced(step: Callable[[], Any], *targets: Any, device: str, steps: int = STEPS) -> trace:
    """Returns the trace of a few warm steps."""
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


def row_facts(row: cost_table.Row) -> dict[str, Any]:
    return {name: value for name, value in vars(row).items() if value not in (None, "", 0)}


def rates(
    records: Iterable[measurements.Record], found: measurements.Measured, phase: str
) -> dict[str, Any]:
    """Returns the bytes that kernels move, their time, and their share of a copy's bandwidth."""
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
    row = max(cost_table.rows(t.data, "op"), key=lambda row: row.forward_flops)
    found = measurements.measured(t.data)
    own = [record for record in found.records if record.pair == row.name]
    result = {"shape": shape.name, "first_layer": first, **row_facts(row)}
    result["kernels"] = kernel_times(own)
    result["notes"] = sorted({note for record in own for note in record.notes})
    if device == "cuda":
        result["alone"] = products_alone(module, x, gradient, row)
        expected = result["alone"]["ratio_of_first" if first else "ratio"]
        ratio = (row.time_ratio or 0) * (1 - bias_share(own))
        # Whether a ratio off the textbook is that of these products alone.
        result["as_alone"] = abs(ratio / expected - 1) <= 0.1
    return result


def bias_share(own: list[measurements.Record]) -> float:
    """Returns the share of backward that sums the bias's gradient, which is no product."""
    backward = [record for record in own if record.phase == "backward"]
    sums = sum(record.time_ns for record in backward if record.op == "aten::sum")
    return sums / max(sum(record.time_ns for record in backward), 1)


def products_alone(
    module: nn.Module, x: torch.Tensor, gradient: torch.Tensor, row: cost_table.Row
) -> dict[str, float]:
    """Times the three products without autograd, each alone, by CUDA events: a second opinion."""
    weight = module.weight.detach()
    x = x.detach()

    def convolution_gradient(of_input: bool) -> Any:
        settings = (module.stride, module.padding, module.dilation, False, [0, 0], module.groups)
        mask = [of_input, not of_input, False]
        return torch.ops.aten.convolution_backward(gradient, x, weight, None, *settings, mask)

    if isinstance(module, nn.Linear):
        ways: dict[str, Callable[[], Any]] = {
            "forward": lambda: functional.linear(x, weight, module.bias),
            "input_gradient": lambda: gradient @ weight,
            "weight_gradient": lambda: gradient.t() @ x,
        }
    else:
        ways = {
            "forward": lambda: module(x),
            "input_gradient": lambda: convolution_gradient(True),
            "weight_gradient": lambda: convolution_gradient(False),
        }
    with torch.no_grad():
        times = seconds_of(ways)
    flops = row.forward_flops / STEPS
    return {
        **{f"{way}_tflops": flops / taken / 1e12 for way, taken in times.items()},
        "ratio": (times["input_gradient"] + times["weight_gradient"]) / times["forward"],
        "ratio_of_first": times["weight_gradient"] / times["forward"],
    }


def seconds_of(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Returns the device's seconds for one call of each way: the median of some rounds.

    The ways take turns, so that a sinking clock slows all of them. Each call is the replay of a
    graph, because small products would otherwise wait for their launch.
    """
    graphs = {way: graph_of(run) for way, run in ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(12):
        for way, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number >= 3:
                times[way].append(begin.elapsed_time(end) / 1e3 / CALLS)
    return {way: statistics.median(taken) for way, taken in times.items()}


def graph_of(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Captures several calls. A call before lets the library choose its algorithm."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    return graph


def shapes(report: "Report", device: str, quick: bool) -> None:
    for shape in QUICK_SHAPES if quick else SHAPES:
        for first in (False, True):
            name = shape.name + (", first layer" if first else "")
            report.add("shapes", name, lambda s=shape, f=first: run_shape(s, device, f))


# ---------------------------------------------------------------- operators


Built = tuple[Callable[[], torch.Tensor], list[torch.Tensor]]


def operators(report: "Report", device: str, quick: bool) -> None:
    """Lists the operators, with the expected ratio of bytes where the facts give an exact one."""
    # 512 MiB in bfloat16, in rows that fit a block's registers.
    rows, columns = (512, 256) if quick else (2**18, 1024)

    def tensor(dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, dtype=dtype, requires_grad=True)

    def of_one(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.dtype], Any]:
        def build(dtype: torch.dtype) -> Built:
            x = tensor(dtype)
            return (lambda: function(x)), [x]

        return build

    def add(dtype: torch.dtype) -> Built:
        x, y = tensor(dtype), tensor(dtype)
        return (lambda: x + y), [x, y]

    def norm(dtype: torch.dtype) -> Built:
        x, module = tensor(dtype), nn.LayerNorm(columns).to(device, dtype)
        return (lambda: module(x)), [x, *module.parameters()]

    def cross_entropy(dtype: torch.dtype) -> Built:
        x, targets = tensor(dtype), torch.randint(columns, (rows,), device=device)
        return (lambda: functional.cross_entropy(x, targets)), [x]

    def embedding(dtype: torch.dtype) -> Built:
        module = nn.Embedding(50257 if not quick else 1000, columns).to(device, dtype)
        ids = torch.randint(module.num_embeddings, (rows,), device=device)
        return (lambda: module(ids)), list(module.parameters())

    cases: dict[str, tuple[Callable[[torch.dtype], Any], float | None]] = {
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


# The share of a copy's bandwidth that operators bound by bandwidth should reach.
ENOUGH = 0.75
_OTHER = {"forward": "backward", "backward": "forward"}


def run_operator(
    name: str,
    build: Callable[[torch.dtype], Any],
    expected: float | None,
    device: str,
) -> dict[str, Any]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made, main, found, own = one_operator(name, build, dtype, device)
    ratio = main.time_ratio
    within = None if expected is None or ratio is None else abs(ratio - expected) <= 0.15
    result = {
        "operator": name,
        "result_bytes": made,
        "expected": expected,
        "within_0.15": within,
        **row_facts(main),
        "forward": rates(own, found, "forward"),
        "backward": rates(own, found, "backward"),
        "kernels": kernel_times(own),
    }
    below = [way for way in ("forward", "backward") if result[way].get("of_copy", ENOUGH) < ENOUGH]
    if below:
        forget(device)
        wide = one_operator(name, build, torch.float32, device) if device == "cuda" else None
        for way in below:
            result[way]["below_because"] = why_below(way, own, found, wide)
    return result


def one_operator(
    name: str, build: Callable[[torch.dtype], Any], dtype: torch.dtype, device: str
) -> tuple[int, cost_table.Row, measurements.Measured, list[measurements.Record]]:
    """Returns the bytes it makes, its row, the measurement, and the operator's own records."""
    function, leaves = build(dtype)
    made = function()
    gradient = torch.randn_like(made)

    def step() -> None:
        function().backward(gradient)
        for leaf in leaves:
            leaf.grad = None

    t = traced(step, device=device)
    found = measurements.measured(t.data)
    main = next(row for row in cost_table.rows(t.data, "op") if row.forward_ns)
    own = [record for record in found.records if record.pair == main.name]
    own += [] if name != "embedding" else [r for r in found.records if r.node == "AccumulateGrad"]
    return made.nbytes, main, found, own


def kernel_times(records: Iterable[measurements.Record]) -> dict[str, dict[str, float]]:
    """Returns the milliseconds of each kernel in one step, by phase."""
    times: dict[str, dict[str, float]] = {}
    for record in records:
        of_phase = times.setdefault(record.phase, {})
        for kernel, taken in zip(record.kernels, record.kernel_ns, strict=True):
            of_phase[kernel] = of_phase.get(kernel, 0) + taken / 1e6 / STEPS
    return times


def why_below(
    way: str,
    own: list[measurements.Record],
    found: measurements.Measured,
    wide: tuple[int, cost_table.Row, measurements.Measured, list[measurements.Record]] | None,
) -> str:
    """Explains why an operator moves its bytes more slowly than a copy, if a measurement shows it.

    Either it is one operator among several, or arithmetic limits it: the other way moves as many
    bytes faster, or float32 moves twice the bytes in little more time.
    """
    of_way = [r for r in own if r.phase == way and r.kernel_bytes is not None]
    whole = sum(r.time_ns for r in of_way)
    for slow in sorted(of_way, key=lambda r: -r.time_ns):
        rest = rates([r for r in of_way if r is not slow], found, way)
        if rest.get("of_copy", 0) >= ENOUGH:
            alone = rates([slow], found, way)
            return (
                f"{slow.op} alone: {slow.time_ns / whole:.0%} of the time at "
                f"{alone['of_copy']:.0%} of the copy's bandwidth; the rest reaches "
                f"{rest['of_copy']:.0%}"
            )
    here, back = rates(own, found, way), rates(own, found, _OTHER[way])
    as_many = bool(here and back) and abs(back["bytes"] / here["bytes"] - 1) < 0.05
    if as_many and back.get("of_copy", 0) >= ENOUGH:
        return f"not the memory: {_OTHER[way]} moves as many bytes at {back['of_copy']:.0%}"
    if wide is None:
        return ""
    slower = rates(wide[3], wide[2], way).get("time_ns", 0) / max(whole, 1)
    if slower and slower < 1.6:
        return f"arithmetic per element: float32, twice the bytes, takes {slower:.2f}x the time"
    return ""


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


def run_models(report: "Report", device: str, quick: bool, *, compiled: bool = False) -> None:
    for name in MODELS:
        label = f"{name}, {'compiled' if compiled else 'eager'}"
        report.add("models", label, lambda n=name: run_model(n, device, quick, compiled))


def compiled_models(report: "Report", device: str, quick: bool) -> None:
    run_models(report, device, quick, compiled=True)


def run_model(name: str, device: str, quick: bool, compiled: bool) -> dict[str, Any]:
    model = build(name, device, quick)
    module = torch.compile(model.module) if compiled else model.module
    t = traced(lambda: model.step(module), model.module, model.optimizer, device=device, steps=3)
    found = measurements.measured(t.data)
    classes = cost_table.rows(t.data, "class")
    modules = cost_table.rows(t.data, "module")
    total = cost_table.summarised(found, {name: found.records}, "op")[0]
    wide = Terminal(120)
    tables = (cost_text.render(t.data, by, terminal=wide) for by in ("class", "module"))
    text = "\n\n".join(tables)
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
        "uncounted": [vars(each) for each in cost_table.uncounted(t.data)][:20],
        "table": text,
    }


def shares(classes: list[cost_table.Row]) -> dict[str, Any]:
    """Returns percent of FLOPs and of time, for forward, backward and both.

    The percentages are of the paper's three classes, and beside them of everything.
    """
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


def weigh_verdicts(rows: list[cost_table.Row]) -> dict[str, Any]:
    """Returns the number of rows and the share of the time of each verdict."""
    total = max(sum(row.time_ns for row in rows), 1)
    return {
        verdict or "none": {
            "rows": sum(row.verdict == verdict for row in rows),
            "time_share": sum(row.time_ns for row in rows if row.verdict == verdict) / total,
        }
        for verdict in (
            verdicts.CONFIRMED,
            verdicts.EXPLAINED,
            verdicts.OFF,
            verdicts.NONE,
        )
    }


def profiler_total(step: Callable[[], Any], device: str) -> dict[str, Any]:
    """Returns the device's time in a few steps: the profiler's sum, and that of our rows.

    Both come from the same records. Where the sums differ, it names the kernels.
    """
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
    document = measure.document(calls, kernels)
    averages = run.key_averages()
    # Skips user annotations on the device: their kernels are counted already.
    own = [event for event in averages if not event.is_user_annotation]
    if device == "cpu":
        # There, nodes and annotations have own time, which belongs to no operator.
        operators = [e for e in own if e.key.startswith("aten::") or e.key.startswith("detach")]
        theirs = {event.key: 1000 * event.self_cpu_time_total for event in operators}
        ours = theirs  # not by name: our rows are not the profiler's
    else:
        # Only the kernels' own rows. Operators and the driver's calls have the same times again.
        # A driver's call may have another one's time: each kind has numbers of its own.
        on_device = [event for event in own if event.device_type == DeviceType.CUDA]
        theirs = {event.key: 1000 * event.self_device_time_total for event in on_device}
        ours = {}
        for kernel in kernels:
            ours[kernel.name] = ours.get(kernel.name, 0) + kernel.end - kernel.start
    sum_of_theirs = sum(theirs.values())
    orphans = [
        (document["strings"][row["op"]], row["time_ns"])
        for row in (dict(zip(document["columns"], each, strict=True)) for each in document["rows"])
        if document["strings"][row["op"]].startswith("kernel ")
    ]
    result = {
        "theirs_ns": sum_of_theirs,
        "ours_ns": document["busy_ns"],
        "ratio": document["busy_ns"] / sum_of_theirs if sum_of_theirs else None,
        "device_busy_ns": document["device_busy_ns"],
        "differences": differences(ours, theirs, sum_of_theirs),
        "without_operator": sorted(orphans, key=lambda each: -each[1])[:10],
        "without_operator_share": sum(ns for _, ns in orphans) / max(document["busy_ns"], 1),
    }
    for name, (mine, other) in result["differences"].items():
        print(f"  differs: {name[:90]}  ours {mine / 1e6:.3f} ms, profiler {other / 1e6:.3f} ms")
    for name, taken in result["without_operator"]:
        print(f"  without an operator: {name[:90]}  {taken / 1e6:.3f} ms")
    return result


def differences(
    ours: dict[str, float], theirs: dict[str, float], total: float
) -> dict[str, tuple[float, float]]:
    """Returns the kernels whose sums differ by more than a ten-thousandth of the whole."""
    pairs = {name: (ours.get(name, 0), theirs.get(name, 0)) for name in {*ours, *theirs}}
    found = {name: pair for name, pair in pairs.items() if abs(pair[0] - pair[1]) > 1e-4 * total}
    return dict(sorted(found.items(), key=lambda each: -abs(each[1][0] - each[1][1]))[:20])


def flop_counter(model: Model, found: measurements.Measured) -> dict[str, Any]:
    """Returns torch's FLOPs of a step beside ours, forward and backward, and the differences."""
    try:
        with FlopCounterMode(display=False) as counter:
            model.forward().backward()
    except AssertionError as refusal:  # torch 2.11 has no formula for grouped attention
        return {"refused": str(refusal)}
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
        "modules": modules_flops(model, found),
    }


def modules_flops(model: Model, found: measurements.Measured) -> dict[str, Any]:
    """Compares the FLOPs of every module's forward by torch's count and by our rows.

    Returns how many modules are equal, and those that are not.
    """
    with FlopCounterMode(display=False, depth=99) as counter:
        model.forward()
    ours: dict[str, int] = {}
    for record in found.records:
        if record.flops and record.phase == "forward":
            parts = record.module.split(".")
            for count in range(1, len(parts) + 1):
                path = ".".join(parts[:count])
                ours[path] = ours.get(path, 0) + record.flops // 3
    compared, differ = 0, {}
    for name, by_op in counter.get_flop_counts().items():
        root, _, path = name.partition(".")
        if root == type(model.module).__name__ and path:
            compared += 1
            if ours.get(path, 0) != sum(by_op.values()):
                differ[path] = {"ours": ours.get(path, 0), "theirs": sum(by_op.values())}
    return {"compared": compared, "equal": compared - len(differ), "differences": differ}


# ---------------------------------------------------------------- phases


def phases(report: "Report", device: str, quick: bool) -> None:
    if device != "cuda":
        report.skip("phases", "gpt-2", "CUDA events need a GPU")
        return
    report.add("phases", "gpt-2", lambda: run_phases(build("gpt-2", device, quick)))


def run_phases(model: Model) -> dict[str, Any]:
    """Returns the medians of each phase's device time, measured in three ways.

    They are events put by hand into an untraced step, a trace's own times, and those of a trace
    that measures costs, which also has the sums of its kernels.
    """
    names = ("forward", "backward", "optimizer")

    def by_hand() -> dict[str, list[float]]:
        steps = [[torch.cuda.Event(enable_timing=True) for _ in range(4)] for _ in range(10)]
        for marks in steps:
            model.optimizer.zero_grad(set_to_none=True)
            marks[0].record()
            loss = model.forward()
            marks[1].record()
            loss.backward()
            marks[2].record()
            model.optimizer.step()
            marks[3].record()
        torch.cuda.synchronize()
        return {
            name: [marks[i].elapsed_time(marks[i + 1]) for marks in steps]
            for i, name in enumerate(names)
        }

    def by_trace(**options: Any) -> tuple[dict[str, list[float]], trace]:
        with trace(model.module, model.optimizer, table=False, **options) as t:
            for _ in range(10):
                model.step()
        steps = t.steps()
        return {name: [ns / 1e6 for ns in steps[f"device_{name}_ns"]] for name in names}, t

    by_hand()
    rounds: dict[str, dict[str, list[float]]] = {}
    for number in range(3):  # interleaved: clocks drift
        for kind, run in (
            ("by_hand_ms", by_hand),
            ("traced_ms", lambda: by_trace()[0]),
            ("with_cost_ms", lambda: by_trace(cost=True)[0]),
        ):
            for name, times in run().items():
                rounds.setdefault(kind, {}).setdefault(name, []).extend(times[2:])
        print(f"phases, round {number}", flush=True)
    t = by_trace(cost=True)[1]
    records = measurements.measured(t.data).records
    medians = {
        kind: {n: statistics.median(v) for n, v in each.items()} for kind, each in rounds.items()
    }
    return {
        "model": "gpt-2",
        **medians,
        "kernels_ms": {
            name: sum(r.time_ns for r in records if r.phase == name) / 10 / 1e6 for name in names
        },
        "with_cost_by_without": {
            name: medians["with_cost_ms"][name] / medians["traced_ms"][name] for name in names
        },
        "traced_by_hand": {
            name: medians["traced_ms"][name] / medians["by_hand_ms"][name] for name in names
        },
    }


# ---------------------------------------------------------------- the report


class Report:
    """The results, which are written to disk as they come."""

    def __init__(self, target: Path, deadline: float, facts: dict[str, Any], device: str) -> None:
        self.target, self.deadline, self.device = target, deadline, device
        self.document: dict[str, Any] = {"machine": facts, "skipped": [], "failed": []}
        self.known: set[tuple[str, str]] = set()

    def resume(self, earlier: dict[str, Any]) -> None:
        """Takes over the results for this device and torch from an earlier file."""
        facts = self.document["machine"]
        if any(earlier["machine"][name] != facts[name] for name in ("device", "torch")):
            raise SystemExit("--resume: that file is of another device or torch")
        for part in ("shapes", "operators", "phases", "models"):
            for result in earlier.get(part, ()):
                self.document.setdefault(part, []).append(result)
                self.known.add((part, result["id"]))

    def add(self, part: str, name: str, run: Callable[[], dict[str, Any]]) -> None:
        if (part, name) in self.known:
            return
        if time.monotonic() > self.deadline:
            self.skip(part, name, "no time left")
            return
        began = time.monotonic()
        try:
            result = run()
        except Exception as error:  # the other results must not be lost
            traceback.print_exc()
            self.document["failed"].append({"part": part, "name": name, "error": repr(error)[:500]})
        else:
            result["seconds"] = round(time.monotonic() - began, 2)
            row = {"id": name, **result}
            self.document.setdefault(part, []).append(row)
            print(line_of(part, row), flush=True)
        forget(self.device)
        self.write()

    def skip(self, part: str, name: str, why: str) -> None:
        self.document["skipped"].append({"part": part, "name": name, "why": why})
        self.write()

    def write(self) -> None:
        self.document["summary"] = summarise(self.document)
        parts = {part: self.document[part] for part in KEPT if part in self.document}
        shown = {part: kept.only(rows, *KEPT[part]) for part, rows in parts.items()}
        kept.write(self.target, self.document | shown)


def line_of(part: str, result: dict[str, Any]) -> str:
    def number(value: Any, form: str = ".2f") -> str:
        return "" if value is None else format(value, form)

    if part == "shapes":
        return (
            f"{result['id']:<64}FLOPs {number(result.get('flop_ratio')):>5}  "
            f"time {number(result.get('time_ratio')):>5}  {result.get('verdict', ''):<10}"
            f"{result.get('cause', '')}{alone_text(result)}"
        )
    if part == "operators":
        shares = [number(result[way].get("of_copy"), ".0%") for way in ("forward", "backward")]
        return (
            f"{result['operator']:<16}expected {number(result['expected']):>5}  "
            f"time {number(result.get('time_ratio')):>5}  of copy {shares[0]:>5} {shares[1]:>5}  "
            f"{result.get('verdict', ''):<10}{result.get('cause', '')}"
            + "".join(
                f"\n    {way} below {ENOUGH:.0%}: {result[way]['below_because'] or 'unexplained'}"
                for way in ("forward", "backward")
                if "below_because" in result[way]
            )
        )
    if part == "models":
        both = result["classes"]["both"]
        parts = ", ".join(f"{name} {both[name]['time']:.1f} %" for name in PUBLISHED)
        return (
            f"{result['model']}: ratio {number(result['whole_ratio'])}; of the three classes' time "
            f"{parts}; sums {number(result['profiler']['ratio'], '.4f')} of the profiler's"
        )
    return json.dumps(result)


def alone_text(result: dict[str, Any]) -> str:
    if "alone" not in result or result.get("verdict") == verdicts.CONFIRMED:
        return ""
    alone = result["alone"]
    rates = "/".join(
        f"{alone[f'{way}_tflops']:.0f}" for way in ("forward", "input_gradient", "weight_gradient")
    )
    agrees = "which is the ratio" if result["as_alone"] else "which is not the ratio"
    return f" [alone {rates} TFLOP/s, {agrees}]"


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
    """Returns the claims in numbers."""
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
        "outliers": [each["id"] for each in (*inner, *first) if is_outlier(each)],
        "outliers_unexplained": [
            each["id"]
            for each in (*inner, *first)
            if each.get("verdict") == verdicts.OFF and not each.get("as_alone")
        ],
        "operators_within_0.15": [e["operator"] for e in judged if e["within_0.15"]],
        "operators_outside": [e["operator"] for e in judged if e["within_0.15"] is False],
        "operators_below_unexplained": [
            f"{e['operator']}, {way}"
            for e in judged
            for way in ("forward", "backward")
            if e[way].get("below_because") == ""
        ],
        "phases": [
            {name: each[name] for name in ("with_cost_by_without", "traced_by_hand")}
            for each in document.get("phases", ())
        ],
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


def is_outlier(shape: dict[str, Any]) -> bool:
    """Whether backward does not take about twice as long, or once in a first layer."""
    ratio, textbook = shape.get("time_ratio"), 1.0 if shape["first_layer"] else 2.0
    return ratio is None or not verdicts.within(ratio, textbook, True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--minutes", type=float, default=8, help="begin nothing new after so many")
    parser.add_argument("--resume", type=Path, help="an earlier JSON: what it has is kept")
    parser.add_argument("--again", action="store_true", help="measure what --out has once more")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := {*parts} - {*PARTS}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.quick:
        parser.error("the full sizes need a GPU; --quick runs small ones here")
    began = time.monotonic()
    facts = machine(device)
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"cost-{'quick-' if options.quick else ''}{slug(facts['device'])}.json"
    report = Report(target, began + 60 * options.minutes, facts, device)
    earlier = options.resume or (target if target.exists() and not options.again else None)
    if earlier is not None:
        report.resume(kept.read(earlier))
    run = {
        "shapes": shapes,
        "operators": operators,
        "phases": phases,
        "models": run_models,
        "compiled": compiled_models,
    }
    for part in PARTS:
        if part in parts:
            run[part](report, device, options.quick)
    report.document["seconds"] = round(time.monotonic() - began, 1)
    report.write()
    print(json.dumps(report.document["summary"], indent=1))
    print(f"written: {target.name}, after {report.document['seconds']} s")
    return 1 if report.document["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
