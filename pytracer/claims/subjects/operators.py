"""What computing costs: backward and forward, alignment, autocast, compilers, experts, beams."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pytracer.analysis import cost, measured_costs
from pytracer.claims.claim import (
    CONFIRMED,
    DEPENDS,
    REFUTED,
    Claim,
    Measured,
    Verdict,
    change,
    confirmed_if,
    mib,
    on_gpu,
    ranged,
)
from pytracer.claims.experiment import Lab, experiment, ratio, spread
from pytracer.claims.subjects import models
from pytracer.gemm import shapes
from pytracer.gemm.device import pick
from pytracer.gemm.timer import Settings, Timer

# ---------------------------------------------------------------------- cost


def _costs(lab: Lab, label: str, by: str, step: Callable[[], Any], *targets: Any) -> list[cost.Row]:
    """The rows of a few warm steps."""
    for _ in range(3):
        step()
    lab.wait()
    with lab.traced(label, *targets, cost=True, detail="category") as t:
        for _ in range(5):
            step()
    return cost.rows(t.data, by)


def _shown(value: float | None) -> float:
    return float("nan") if value is None else value


@experiment("layer_cost")
def layer_cost(lab: Lab) -> dict[str, Any]:
    """Linear layers and convolutions, the first of which needs no gradient of its input."""
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
    found: dict[str, Any] = {}
    for label, (net, x) in nets.items():
        net.to(lab.device)

        def step(net: nn.Module = net, x: Tensor = x) -> None:
            net(x).sum().backward()
            net.zero_grad()

        layers = [r for r in _costs(lab, label, "module", step, net) if r.name[-1:].isdigit()]
        layers.sort(key=lambda row: row.name)
        first, inner = layers[0], layers[1:]
        found[f"{label}_first_flop_ratio"] = _shown(first.flop_ratio)
        found[f"{label}_first_time_ratio"] = _shown(first.time_ratio)
        found[f"{label}_flop_ratios"] = sorted({_shown(row.flop_ratio) for row in inner})
        found |= spread(f"{label}_time_ratio", [_shown(row.time_ratio) for row in inner])
    return found


@experiment("activation_cost")
def activation_cost(lab: Lab) -> dict[str, Any]:
    """Functions that read and write, on tensors that no cache holds."""
    shape = lab.pick((2048, 4096), (16384, 8192))
    x = torch.randn(shape, device=lab.device, requires_grad=True)
    gradient = torch.randn_like(x)
    found: dict[str, Any] = {"tensor_bytes": x.numel() * 4}
    kinds: dict[str, nn.Module] = {
        "relu": nn.ReLU(),
        "gelu": nn.GELU(),
        "softmax": nn.Softmax(-1),
        "layer_norm": nn.LayerNorm(shape[1]),
    }
    for label, module in kinds.items():
        # A module around it, so that it is one of several rows and not the whole.
        net = nn.Sequential(module).to(lab.device)

        def step(net: nn.Module = net) -> None:
            net(x).backward(gradient)
            x.grad = None
            net.zero_grad()

        row = next(r for r in _costs(lab, label, "module", step, net) if r.name[-1:] == "0")
        found[f"{label}_byte_ratio"] = _shown(row.byte_ratio)
        found[f"{label}_time_ratio"] = _shown(row.time_ratio)
        found[f"{label}_bytes_per_s"] = _shown(row.bytes_per_s)
    return found


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
    records = measured_costs.measured(t.data).records
    groups = {"contraction": "contraction", "normalisation": "normalisation"}
    groups["element_wise"] = "element-wise"
    time = sum(r.time_ns for r in records)
    flops = sum((r.flops or 0) + (r.other_flops or 0) for r in records)
    found: dict[str, Any] = {}
    for name, kind in groups.items():
        own = [r for r in records if r.kind == kind]
        own_flops = sum((r.flops or 0) + (r.other_flops or 0) for r in own)
        found[f"{name}_time_share"] = sum(r.time_ns for r in own) / time
        found[f"{name}_flop_share"] = own_flops / flops
        found[f"{name}_flops_per_byte"] = own_flops / max(sum(r.bytes or 0 for r in own), 1)
    return found


# ---------------------------------------------------------------------- matrix products


@experiment("alignment")
def alignment(lab: Lab) -> dict[str, Any]:
    """A product whose n is a multiple of 64, of 8, of 4, of 2 and odd, in the same rounds."""
    base = lab.pick(512, 4096)
    dtype = "bf16" if lab.cuda else "fp32"
    timer = Timer(pick(lab.device), Settings(seconds=lab.pick(4, 10)))
    sizes = {64: base, 8: base - 8, 4: base - 4, 2: base - 2, 1: base - 1}
    works = [shapes.Gemm(base, n, base, dtype, "forward") for n in sizes.values()]
    comparison = timer(works, null=True)
    found: dict[str, Any] = {"size": base, "dtype": dtype}
    best = comparison.timings[0]
    for multiple, timing in zip(sizes, comparison.timings, strict=True):
        # Per FLOP: the sizes differ by up to 8.
        slower = [
            (a / timing.work.flops) / (b / best.work.flops)
            for a, b in zip(timing.seconds, best.seconds, strict=True)
        ]
        found |= spread(f"multiple_of_{multiple}_slower", slower)
    assert comparison.null is not None
    return found | ratio("null", list(comparison.null.seconds), list(best.seconds))


# ---------------------------------------------------------------------- autocast


def _three_models(lab: Lab) -> dict[str, tuple[nn.Module, Tensor]]:
    width, side, batch = lab.pick((64, 48, 4), (64, 256, 16))
    layers, length, hidden = lab.pick((2, 64, 128), (12, 256, 768))
    return {
        "tiny": (models.feed_forward(width, 3), torch.randn(256, width)),
        "unet": (models.UNet(lab.pick(8, 64)), torch.randn(batch, 3, side, side)),
        "bert": (
            models.Encoder(1000, hidden, layers, length),
            torch.randint(1000, (2 * batch, length)),
        ),
    }


@experiment("autocast_models")
def autocast_models(lab: Lab) -> dict[str, Any]:
    """A tiny network, a U-Net and a BERT-like one, with and without autocast."""
    cast = torch.float16 if lab.cuda else torch.bfloat16
    found: dict[str, Any] = {}
    widths = lab.pick((64, 256, 1024), (64, 256, 1024, 4096))
    cases = _three_models(lab)
    for width in widths:
        cases[f"width_{width}"] = (models.feed_forward(width, 3), torch.randn(256, width))
    for label, (net, x) in cases.items():
        net.to(lab.device)
        x = x.to(lab.device)

        def step(mixed: bool, net: nn.Module = net, x: Tensor = x) -> None:
            with torch.autocast(lab.device, cast, enabled=mixed):
                loss = net(x).float().pow(2).mean()
            loss.backward()
            net.zero_grad()

        taken = lab.alternating(
            {"plain": partial(step, False), "mixed": partial(step, True)}, rounds=9
        )
        found |= ratio(f"{label}_faster", taken["plain"], taken["mixed"])
        if label.startswith("width"):
            continue
        for way, mixed in (("plain", False), ("mixed", True)):
            with lab.traced(f"{label}_{way}", net):
                step(mixed)
            found[f"{label}_{way}_peak"] = lab.traces[f"{label}_{way}"]["peak_bytes"]
    return found | {"widths": list(widths)}


# ---------------------------------------------------------------------- compilers

# As the documents name them.
NAMED_BACKENDS = (
    "eager",
    "aot_eager",
    "inductor",
    "nvfuser",
    "aot_nvfuser",
    "aot_cudagraphs",
    "ofi",
    "fx2trt",
    "onnxrt",
    "ipex",
)
_TRIED = ("eager", "aot_eager", "inductor", "cudagraphs")


@experiment("backends", seconds=(300, 300))
def backends(lab: Lab) -> dict[str, Any]:
    """Which of torch.compile's back ends there are, and what those for training do to a step."""
    there = sorted(torch._dynamo.list_backends(exclude_tags=None))
    found: dict[str, Any] = {
        "there": there,
        "gone": [name for name in NAMED_BACKENDS if name not in there],
    }
    width, layers, length = lab.pick((64, 1, 32), (768, 6, 256))
    base = models.Encoder(1000, width, layers, length).to(lab.device).eval()
    tokens = torch.randint(1000, (8, length), device=lab.device)
    steps: dict[str, Callable[[], Any]] = {}
    for name in ("plain", *(n for n in _TRIED if n in there)):
        if name == "cudagraphs" and not lab.cuda:
            continue

        def step(called: Any) -> None:
            functional.cross_entropy(called(tokens), tokens[:, 0] % 2).backward()
            base.zero_grad()

        called = base if name == "plain" else torch.compile(base, backend=name)
        try:
            for _ in range(3):
                step(called)
            with lab.traced(name, base):
                step(called)
        except Exception as error:  # a back end that cannot work here is a finding
            found[f"{name}_failed"] = " ".join(str(error).split())[:120]
            continue
        steps[name] = partial(step, called)
        found[f"{name}_peak"] = lab.traces[name]["peak_bytes"]
    taken = lab.alternating(steps, rounds=15)
    for name, samples in taken.items():
        found |= spread(f"{name}_s", samples)
        found |= ratio(f"{name}_faster", taken["plain"], samples)
    return found


# ---------------------------------------------------------------------- experts and beams


@experiment("experts")
def experts(lab: Lab) -> dict[str, Any]:
    """A mixture of 8 experts, of which each token uses one, beside one dense network."""
    width, tokens = lab.pick((128, 4096), (1024, 32768))
    x = torch.randn(tokens, width, device=lab.device)
    found: dict[str, Any] = {"experts": 8}
    steps: dict[str, Callable[[], Any]] = {}
    for label, count in (("dense", 1), ("mixture", 8)):
        net = models.Mixture(width, count).to(lab.device)
        optimizer = torch.optim.AdamW(net.parameters())

        def step(net: nn.Module = net, optimizer: Any = optimizer) -> None:
            net(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        with lab.traced(label, net, optimizer):
            step()
            step()
        found |= lab.figures(label, f"{label}_")
        steps[label] = step
    found["busiest_share"] = max(net.load) / tokens
    taken = lab.alternating(steps, rounds=7)
    return found | ratio("mixture_slower", taken["mixture"], taken["dense"])


@experiment("beams")
def beams(lab: Lab) -> dict[str, Any]:
    """Beam search: what its copies of the cache and of the tokens take."""
    width, layers, length = lab.pick((64, 2, 16), (1024, 12, 128))
    net = models.Decoder(500, width, layers).to(lab.device).eval()
    found: dict[str, Any] = {"counts": [1, 2, 4, 8]}
    for count in found["counts"]:
        label = f"beams_{count}"
        with lab.traced(label, net), torch.no_grad():
            held = _search(net, count, length, lab.device)
        found |= {
            f"{label}_functional": lab.traces[label]["categories"]["functional"]["at_end"],
            f"{label}_held": sum(x.numel() * x.element_size() for x in held),
            f"{label}_peak": lab.traces[label]["peak_bytes"],
        }
        del held
    return found


def _search(net: nn.Module, count: int, length: int, device: str) -> list[Tensor]:
    """The beams and their caches; each step keeps the best continuations of all beams."""
    tokens = torch.zeros(count, 1, dtype=torch.int64, device=device)
    scores = torch.zeros(count, device=device)
    cache: list[tuple[Tensor, Tensor]] = []
    for _ in range(length):
        logits, cache = net(tokens[:, -1:], cache)
        every = (scores.unsqueeze(1) + logits.log_softmax(-1)).flatten()
        scores, best = every.topk(count)
        beam = best // logits.shape[-1]
        tokens = torch.cat([tokens[beam], (best % logits.shape[-1]).unsqueeze(1)], 1)
        cache = [(key[beam], value[beam]) for key, value in cache]
    return [tokens, scores, *(x for pair in cache for x in pair)]


# ---------------------------------------------------------------------- verdicts


def _twice(measured: Measured) -> Verdict:
    found = measured["layer_cost"]
    kinds = ("linear", "conv")
    exact = all(found[f"{k}_flop_ratios"] == [2.0] for k in kinds)
    first = all(found[f"{k}_first_flop_ratio"] == 1.0 for k in kinds)
    times = [found[f"{k}_time_ratio"] for k in kinds]
    text = "; ".join(
        f"{k}: FLOPs {', '.join(f'{r:.3f}' for r in found[f'{k}_flop_ratios'])}x (first layer "
        f"{found[f'{k}_first_flop_ratio']:.3f}x), time {ranged(found, f'{k}_time_ratio')}x"
        for k in kinds
    )
    if not (exact and first):
        return Verdict(REFUTED, text)
    if all(time >= 1.5 for time in times):
        return Verdict(CONFIRMED, text)
    return Verdict(DEPENDS, text, "what bounds it: FLOPs are twice as many, time is not")


def _reads_twice(measured: Measured) -> Verdict:
    found = measured["activation_cost"]
    kinds = ("relu", "gelu", "softmax")
    text = ", ".join(
        f"{k} bytes {found[f'{k}_byte_ratio']:.2f}x time {ranged(found, f'{k}_time_ratio')}x"
        for k in (*kinds, "layer_norm")
    )
    bytes_so = all(abs(found[f"{k}_byte_ratio"] - 1.5) <= 0.05 for k in kinds)
    times = [found[f"{k}_time_ratio"] for k in kinds]
    if not bytes_so:
        return Verdict(REFUTED, text)
    if all(1.2 <= time <= 1.8 for time in times):
        return Verdict(CONFIRMED, text)
    return Verdict(DEPENDS, text, "what bounds it: not only bandwidth here")


def _groups(measured: Measured) -> Verdict:
    found = measured["operator_classes"]
    names = ("contraction", "normalisation", "element_wise")
    text = ", ".join(
        f"{n.replace('_', '-')} {found[f'{n}_flop_share']:.2%} of FLOPs, "
        f"{found[f'{n}_time_share']:.0%} of time"
        for n in names
    )
    intensity = [found[f"{n}_flops_per_byte"] for n in names]
    gap = found["contraction_flop_share"] >= 0.95 and found["contraction_time_share"] <= 0.95
    return confirmed_if(gap and intensity[0] > max(intensity[1:]), text)


def _multiples(measured: Measured) -> Verdict:
    found = measured["alignment"]
    slower = {m: found[f"multiple_of_{m}_slower"] for m in (8, 4, 2, 1)}
    text = f"{found['dtype']}, n below {found['size']}, time per FLOP: " + ", ".join(
        f"{'odd' if m == 1 else f'a multiple of {m}'} {ranged(found, f'multiple_of_{m}_slower')}x"
        for m in slower
    )
    if not on_gpu(found):
        return Verdict(DEPENDS, text, "a GPU: a CPU has no tensor cores to align for")
    if slower[1] < 1.1:
        return Verdict(REFUTED, text)
    if slower[8] <= 1.1:
        return Verdict(CONFIRMED, text)
    return Verdict(DEPENDS, text, "the generation: here 8 is not enough")


def _autocast(measured: Measured) -> Verdict:
    found = measured["autocast_models"]
    text = "; ".join(
        f"{n} {ranged(found, f'{n}_faster')}x as fast, memory "
        f"{change(found[f'{n}_mixed_peak'], found[f'{n}_plain_peak'])}"
        for n in ("tiny", "unet", "bert")
    )
    pays = [w for w in found["widths"] if found[f"width_{w}_faster_low"] > 1]
    text += f"; a feed-forward network gains from width {min(pays)}" if pays else ""
    if not on_gpu(found):
        return Verdict(DEPENDS, text, "a GPU with 16-bit units: this is a CPU's bf16")
    large = found["bert_faster"] >= 1.3 and found["bert_mixed_peak"] < found["bert_plain_peak"]
    return confirmed_if(large and found["tiny_faster"] <= 1.1, text)


def _backends(measured: Measured) -> Verdict:
    found = measured["backends"]
    tried = [n for n in _TRIED if f"{n}_faster" in found]
    text = ", ".join(
        f"{n} {ranged(found, f'{n}_faster')}x, peak {change(found[f'{n}_peak'], found['plain_peak'])}"
        for n in tried
    )
    failed = [n for n in _TRIED if f"{n}_failed" in found]
    text += f"; failed here: {', '.join(failed)}" if failed else ""
    if found.get("aot_eager_faster", 0.0) > 1.1:
        return Verdict(REFUTED, text)
    if found["gone"]:
        names = ", ".join(found["gone"])
        return Verdict(DEPENDS, text, f"torch's version: it has no {names}")
    return Verdict(CONFIRMED, text)


def _experts(measured: Measured) -> Verdict:
    found = measured["experts"]
    names = ("weights", "gradients", "optimizer_state")
    states = [sum(found[f"{k}_{n}_most"] for n in names) for k in ("mixture", "dense")]
    activations = found["mixture_activations_most"] / found["dense_activations_most"]
    times = states[0] / states[1]
    text = (
        f"weights, gradients and state {times:.2f}x for {found['experts']} experts, activations "
        f"{activations:.2f}x, time {ranged(found, 'mixture_slower')}x at equal FLOPs; the busiest "
        f"expert has {found['busiest_share']:.0%} of the tokens"
    )
    good = abs(times / found["experts"] - 1) <= 0.1 and activations <= 1.25
    because = "only of memory: 4-5x faster training is to equal quality, which is not run here"
    return confirmed_if(good, text, because)


def _copies(measured: Measured) -> Verdict:
    found = measured["beams"]
    counts = found["counts"]
    one = found["beams_1_held"]
    worst = max(abs(found[f"beams_{c}_held"] / (c * one) - 1) for c in counts)
    seen = min(found[f"beams_{c}_functional"] / found[f"beams_{c}_held"] for c in counts)
    text = (
        ", ".join(f"{c} beams {mib(found[f'beams_{c}_held'])}" for c in counts)
        + f": in proportion within {worst:.1%}; {seen:.0%} of it in the category functional"
    )
    return confirmed_if(worst <= 0.02 and seen >= 0.95, text)


_CPU_TIMES = "FLOPs and bytes are the same as on a GPU; times are this CPU's."

CLAIMS = (
    Claim(
        "R1",
        ("S0", "S1", "S2"),
        "convolutions and linear layers: 2x the FLOPs in backward, about 2x slower, sometimes more",
        "DeepSpeed's sample shows 1.41x",
        "REFUTED if FLOPs are not exactly 2x (first layer 1x); CONFIRMED if times are at least 1.5x; "
        "else DEPENDS",
        _twice,
        ("layer_cost",),
        without_gpu=_CPU_TIMES,
    ),
    Claim(
        "R2",
        ("S0", "S1", "S2"),
        "activation functions: forward reads 1 and writes 1, backward reads 2 and writes 1",
        "1.5x the bytes",
        "REFUTED if the bytes of ReLU, GELU, softmax are not 1.5x (0.05); CONFIRMED if times are 1.2 "
        "to 1.8x; else DEPENDS",
        _reads_twice,
        ("activation_cost",),
        without_gpu=_CPU_TIMES,
    ),
    Claim(
        "R3",
        ("S0", "S1", "S2"),
        "three groups by intensity: contractions, normalisations, element-wise",
        "Data Movement Is All You Need: 99.80, 0.17, 0.03 % of FLOPs, 61, 25.5, 13.5 % of time",
        "CONFIRMED if contractions have at least 95 % of the FLOPs, at most 95 % of the time, and "
        "the most FLOPs per byte; else REFUTED",
        _groups,
        ("operator_classes",),
        without_gpu=_CPU_TIMES,
    ),
    Claim(
        "T1",
        ("S1",),
        "sizes should be multiples of 8, on an A100 of 64; tile and wave quantisation",
        "588 to 592 is 3.53x on Hopper",
        "REFUTED if an odd size costs less than 1.1x per FLOP; CONFIRMED if a multiple of 8 costs at "
        "most 1.1x; else DEPENDS",
        _multiples,
        ("alignment",),
        without_gpu="What this CPU's library does; nothing of tensor cores.",
    ),
    Claim(
        "P1",
        ("S3",),
        "mixed precision on V100 and T4: tiny network 0.93x and 1.01x, U-Net 1.06x and 1.42x, BERT "
        "2.16x and 2.70x; memory 1.19 to 1.19, 4.33 to 3.71, 9.62 to 8.76 GB",
        "tiny models lose",
        "CONFIRMED if the tiny network gains at most 10 % and the BERT-like one at least 30 % with "
        "less memory; else REFUTED",
        _autocast,
        ("autocast_models",),
        without_gpu="bf16 on a CPU: what happens to memory, and nothing of GPUs' speed.",
    ),
    Claim(
        "X1",
        ("S1",),
        "dynamo's back ends: eager, aot_eager, inductor, nvfuser, aot_nvfuser, aot_cudagraphs, ofi, "
        "fx2trt, onnxrt, ipex; aot_eager is unlikely to give speedups",
        "",
        "REFUTED if aot_eager is over 1.1x as fast; CONFIRMED if all names are there; else DEPENDS",
        _backends,
        ("backends",),
        without_gpu="Those that work on a CPU.",
    ),
    Claim(
        "M1",
        ("S1",),
        "mixture of experts: 4-5x faster training, memory almost an order of magnitude larger",
        "",
        "CONFIRMED if weights, gradients and state grow as the number of experts (10 %) and "
        "activations by at most 25 %; else REFUTED",
        _experts,
        ("experts",),
        without_gpu=_CPU_TIMES,
    ),
    Claim(
        "BS",
        ("S0", "S1", "S2"),
        "beam search keeps multiple copies of inputs and outputs",
        "",
        "CONFIRMED if what the beams hold is in proportion to their number (2 %) and 95 % of it is "
        "in the category functional; else REFUTED",
        _copies,
        ("beams",),
        without_gpu="The same as on a GPU: these are bytes.",
    ),
)
