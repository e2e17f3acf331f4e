"""The cost of operators: backward against forward, bytes, classes of operators, aligned sizes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pytracer.basics.names import is_bare
from pytracer.cost import measurements, table as cost_table
from pytracer.lab.claims.claim import (
    CONFIRMED,
    CPU_TIMES,
    DEPENDS,
    REFUTED,
    Measured,
    Statement,
    Verdict,
    confirmed_if,
    on_gpu,
    ranged,
)
from pytracer.lab.claims.experiment import Lab, experiment, ratio, spread
from pytracer.lab.claims.subjects import models
from pytracer.lab.gemm import shapes
from pytracer.lab.gemm.device import pick
from pytracer.lab.gemm.timer import Settings, Timer

# ---------------------------------------------------------------------- what the experiments share


def _cost_rows(
    lab: Lab, label: str, step: Callable[[], Any], *targets: Any
) -> dict[str, cost_table.Row]:
    """The cost of each module in a few warm steps, by the module's name."""
    for _ in range(3):
        step()
    lab.wait()
    with lab.traced(label, *targets, cost=True, detail="category") as t:
        for _ in range(5):
            step()
    return {row.name: row for row in cost_table.rows(t.data, "module")}


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


# ---------------------------------------------------------------------- R1: layers

R1 = Statement(
    "R1",
    sources=("S0", "S1", "S2"),
    quote="convolutions and linear layers: 2x the FLOPs in backward, about 2x slower, sometimes more",
    arithmetic="DeepSpeed's sample shows 1.41x",
)


@experiment("layer_cost")
def layer_cost(lab: Lab) -> dict[str, Any]:
    """Linear layers and convolutions. The first of each computes no gradient of its input."""
    width, rows = lab.pick((512, 2048), (4096, 8192))
    channels, side = lab.pick((32, 32), (256, 56))
    nets = {
        "linear": (
            nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(6)]),
            torch.randn(rows, width, device=lab.device),
        ),
        "conv": (
            nn.Sequential(
                *[nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(6)]
            ),
            torch.randn(32, channels, side, side, device=lab.device),
        ),
    }
    figures: dict[str, Any] = {}
    for label, (net, x) in nets.items():
        net.to(lab.device)

        def step(net: nn.Module = net, x: Tensor = x) -> None:
            net(x).sum().backward()
            net.zero_grad()

        rows_by_name = _cost_rows(lab, label, step, net)
        first, *inner = (rows_by_name[name] for name in sorted(rows_by_name) if is_bare(name))
        figures[f"{label}_first_flop_ratio"] = _or_nan(first.flop_ratio)
        figures[f"{label}_first_time_ratio"] = _or_nan(first.time_ratio)
        figures[f"{label}_flop_ratios"] = sorted({_or_nan(row.flop_ratio) for row in inner})
        figures |= spread(f"{label}_time_ratio", [_or_nan(row.time_ratio) for row in inner])
    return figures


@R1.judged_by(
    "REFUTED if FLOPs are not exactly 2x (first layer 1x); CONFIRMED if times are at least 1.5x; "
    "else DEPENDS",
    experiments=("layer_cost",),
    without_gpu=CPU_TIMES,
)
def backward_costs_twice(measured: Measured) -> Verdict:
    """Twice the FLOPs exactly, and about twice the time."""
    figures = measured["layer_cost"]
    kinds = ("linear", "conv")
    exact = all(figures[f"{k}_flop_ratios"] == [2.0] for k in kinds)
    first = all(figures[f"{k}_first_flop_ratio"] == 1.0 for k in kinds)
    times = [figures[f"{k}_time_ratio"] for k in kinds]
    text = "; ".join(
        f"{k}: FLOPs {', '.join(f'{r:.3f}' for r in figures[f'{k}_flop_ratios'])}x (first layer "
        f"{figures[f'{k}_first_flop_ratio']:.3f}x), time {ranged(figures, f'{k}_time_ratio')}x"
        for k in kinds
    )
    if not (exact and first):
        return Verdict(REFUTED, text)
    if all(time >= 1.5 for time in times):
        return Verdict(CONFIRMED, text)
    return Verdict(DEPENDS, text, "what bounds it: FLOPs are twice as many, time is not")


# ---------------------------------------------------------------------- R2: activation functions

R2 = Statement(
    "R2",
    sources=("S0", "S1", "S2"),
    quote="activation functions: forward reads 1 and writes 1, backward reads 2 and writes 1",
    arithmetic="1.5x the bytes",
)


@experiment("activation_cost")
def activation_cost(lab: Lab) -> dict[str, Any]:
    """Functions that only read and write, on tensors larger than any cache."""
    shape = lab.pick((2048, 4096), (16384, 8192))
    x = torch.randn(shape, device=lab.device, requires_grad=True)
    gradient = torch.randn_like(x)
    figures: dict[str, Any] = {"tensor_bytes": x.numel() * 4}
    kinds: dict[str, nn.Module] = {
        "relu": nn.ReLU(),
        "gelu": nn.GELU(),
        "softmax": nn.Softmax(-1),
        "layer_norm": nn.LayerNorm(shape[1]),
    }
    for label, module in kinds.items():
        # Inside another module, so that it has a row of its own beside the whole.
        net = nn.Sequential(module).to(lab.device)

        def step(net: nn.Module = net) -> None:
            net(x).backward(gradient)
            x.grad = None
            net.zero_grad()

        rows_by_name = _cost_rows(lab, label, step, net)
        row = next(rows_by_name[name] for name in rows_by_name if is_bare(name))
        figures[f"{label}_byte_ratio"] = _or_nan(row.byte_ratio)
        figures[f"{label}_time_ratio"] = _or_nan(row.time_ratio)
        figures[f"{label}_bytes_per_s"] = _or_nan(row.bytes_per_s)
    return figures


@R2.judged_by(
    "REFUTED if the bytes of ReLU, GELU, softmax are not 1.5x (0.05); CONFIRMED if times are 1.2 "
    "to 1.8x; else DEPENDS",
    experiments=("activation_cost",),
    without_gpu=CPU_TIMES,
)
def backward_moves_half_as_much_again(measured: Measured) -> Verdict:
    """1.5x the bytes, and about that much time."""
    figures = measured["activation_cost"]
    kinds = ("relu", "gelu", "softmax")
    text = ", ".join(
        f"{k} bytes {figures[f'{k}_byte_ratio']:.2f}x time {ranged(figures, f'{k}_time_ratio')}x"
        for k in (*kinds, "layer_norm")
    )
    if not all(abs(figures[f"{k}_byte_ratio"] - 1.5) <= 0.05 for k in kinds):
        return Verdict(REFUTED, text)
    if all(1.2 <= figures[f"{k}_time_ratio"] <= 1.8 for k in kinds):
        return Verdict(CONFIRMED, text)
    return Verdict(DEPENDS, text, "what bounds it: not only bandwidth here")


# ---------------------------------------------------------------------- R3: classes of operators

R3 = Statement(
    "R3",
    sources=("S0", "S1", "S2"),
    quote="three groups by intensity: contractions, normalisations, element-wise",
    arithmetic="Data Movement Is All You Need: 99.80, 0.17, 0.03 % of FLOPs, 61, 25.5, 13.5 % of "
    "time",
)


@experiment("operator_classes")
def operator_classes(lab: Lab) -> dict[str, Any]:
    """A BERT-like network's training step: FLOPs, bytes and time of each class of operators."""
    width, layers, length, batch = lab.pick((256, 4, 128, 8), (1024, 6, 512, 8))
    net = models.Encoder(1000, width, layers, length).to(lab.device)
    tokens = torch.randint(1000, (batch, length), device=lab.device)

    def step() -> None:
        functional.cross_entropy(net(tokens), tokens[:, 0] % 2).backward()
        net.zero_grad()

    for _ in range(3):
        step()
    lab.wait()
    with lab.traced("training", net, cost=True, detail="category") as t:
        for _ in range(3):
            step()
    records = measurements.measured(t.data).records
    groups = {"contraction": "contraction", "normalisation": "normalisation"}
    groups["element_wise"] = "element-wise"
    time = sum(r.time_ns for r in records)
    flops = sum((r.flops or 0) + (r.other_flops or 0) for r in records)
    figures: dict[str, Any] = {}
    for name, kind in groups.items():
        own = [r for r in records if r.kind == kind]
        own_flops = sum((r.flops or 0) + (r.other_flops or 0) for r in own)
        figures[f"{name}_time_share"] = sum(r.time_ns for r in own) / time
        figures[f"{name}_flop_share"] = own_flops / flops
        figures[f"{name}_flops_per_byte"] = own_flops / max(sum(r.bytes or 0 for r in own), 1)
    return figures


@R3.judged_by(
    "CONFIRMED if contractions have at least 95 % of the FLOPs, at most 95 % of the time, and "
    "the most FLOPs per byte; else REFUTED",
    experiments=("operator_classes",),
    without_gpu=CPU_TIMES,
)
def contractions_have_the_flops_but_not_the_time(measured: Measured) -> Verdict:
    """Contractions must have nearly all FLOPs, a smaller share of the time, the most intensity."""
    figures = measured["operator_classes"]
    names = ("contraction", "normalisation", "element_wise")
    text = ", ".join(
        f"{n.replace('_', '-')} {figures[f'{n}_flop_share']:.2%} of FLOPs, "
        f"{figures[f'{n}_time_share']:.0%} of time"
        for n in names
    )
    intensity = [figures[f"{n}_flops_per_byte"] for n in names]
    gap = figures["contraction_flop_share"] >= 0.95 and figures["contraction_time_share"] <= 0.95
    return confirmed_if(gap and intensity[0] > max(intensity[1:]), text)


# ---------------------------------------------------------------------- T1: multiples of 8

T1 = Statement(
    "T1",
    sources=("S1",),
    quote="sizes should be multiples of 8, on an A100 of 64; tile and wave quantisation",
    arithmetic="588 to 592 is 3.53x on Hopper",
)


@experiment("alignment")
def alignment(lab: Lab) -> dict[str, Any]:
    """A product whose n is a multiple of 64, of 8, of 4, of 2 and odd, in the same rounds."""
    base = lab.pick(512, 4096)
    dtype = "bf16" if lab.cuda else "fp32"
    timer = Timer(pick(lab.device), Settings(seconds=lab.pick(4, 10)))
    sizes = {64: base, 8: base - 8, 4: base - 4, 2: base - 2, 1: base - 1}
    works = [shapes.Gemm(base, n, base, dtype, "forward") for n in sizes.values()]
    comparison = timer(works, null=True)
    figures: dict[str, Any] = {"size": base, "dtype": dtype}
    best = comparison.timings[0]
    for multiple, timing in zip(sizes, comparison.timings, strict=True):
        # Time per FLOP, because the sizes differ by up to 8.
        slower = [
            (a / timing.work.flops) / (b / best.work.flops)
            for a, b in zip(timing.seconds, best.seconds, strict=True)
        ]
        figures |= spread(f"multiple_of_{multiple}_slower", slower)
    assert comparison.null is not None
    return figures | ratio("null", list(comparison.null.seconds), list(best.seconds))


@T1.judged_by(
    "REFUTED if an odd size costs less than 1.1x per FLOP; CONFIRMED if a multiple of 8 costs at "
    "most 1.1x; else DEPENDS",
    experiments=("alignment",),
    without_gpu="What this CPU's library does; nothing of tensor cores.",
)
def sizes_should_be_multiples_of_8(measured: Measured) -> Verdict:
    """Odd sizes must cost more, and a multiple of 8 must be enough."""
    figures = measured["alignment"]
    slower = {m: figures[f"multiple_of_{m}_slower"] for m in (8, 4, 2, 1)}
    text = f"{figures['dtype']}, n below {figures['size']}, time per FLOP: " + ", ".join(
        f"{'odd' if m == 1 else f'a multiple of {m}'} {ranged(figures, f'multiple_of_{m}_slower')}x"
        for m in slower
    )
    if not on_gpu(figures):
        return Verdict(DEPENDS, text, "a GPU: a CPU has no tensor cores to align for")
    if slower[1] < 1.1:
        return Verdict(REFUTED, text)
    if slower[8] <= 1.1:
        return Verdict(CONFIRMED, text)
    return Verdict(DEPENDS, text, "the generation: here 8 is not enough")
