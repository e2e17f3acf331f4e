"""Optimizers: bytes per parameter in mixed precision, the state of each optimizer, fused kernels."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pytracer.lab.claims.claim import (
    CONFIRMED,
    DEPENDS,
    EXACT,
    REFUTED,
    Measured,
    Statement,
    Verdict,
    confirmed_if,
    mib,
    near,
    ranged,
)
from pytracer.lab.claims.experiment import Lab, experiment, ratio, spread
from pytracer.lab.claims.subjects import models

# ---------------------------------------------------------------------- what the experiments share


def _net(lab: Lab) -> nn.Module:
    return models.feed_forward(lab.pick(512, 4096), 6).to(lab.device)


def _batch(lab: Lab, net: nn.Module) -> Tensor:
    parameter = next(net.parameters())
    return torch.randn(64, parameter.shape[1], device=lab.device, dtype=parameter.dtype)


def _count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def _state_per_parameter(lab: Lab, label: str, net: nn.Module, optimizer: Any) -> float:
    """Bytes of optimizer state per parameter after three traced steps."""
    with lab.traced(label, net, optimizer):
        for _ in range(3):
            net(_batch(lab, net)).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    state: int = lab.traces[label]["categories"]["optimizer_state"]["at_end"]
    return state / _count(net)


# ---------------------------------------------------------------------- A1: 18 bytes per parameter

A1 = Statement(
    "A1",
    sources=("S0", "S1", "S2"),
    quote="18 B per parameter for mixed-precision AdamW, 6 B for inference; weights 4 or 6, "
    "gradients 4",
    arithmetic="6 + 4 + 8",
)


@experiment("bytes_per_parameter")
def bytes_per_parameter(lab: Lab) -> dict[str, Any]:
    """AdamW in fp32, under autocast, and on 16-bit weights with an fp32 master."""
    figures: dict[str, Any] = {}
    for label in ("fp32", "autocast", "master", "inference"):
        net = _net(lab)
        if label == "master":
            _with_master(lab, net)
        else:
            _with_autocast(lab, label, net)
        figures |= _per_parameter(lab, label, _count(net))
        del net
        lab.forget()
    return figures


def _with_autocast(lab: Lab, label: str, net: nn.Module) -> None:
    """Trains for three steps, with autocast except for "fp32"; for "inference" runs one forward."""
    cast = torch.float16 if lab.cuda else torch.bfloat16
    optimizer = torch.optim.AdamW(net.parameters())
    with lab.traced(label, net, optimizer):
        if label == "inference":
            with torch.no_grad(), torch.autocast(lab.device, cast):
                net(_batch(lab, net))
            return
        for _ in range(3):
            with torch.autocast(lab.device, cast, enabled=label == "autocast"):
                loss = net(_batch(lab, net)).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def _with_master(lab: Lab, net: nn.Module) -> None:
    """The 16-bit weights compute. The optimizer has fp32 copies of them, with fp32 gradients."""
    net = net.half() if lab.cuda else net.bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in net.parameters()]
    optimizer = torch.optim.AdamW(masters)
    with lab.traced("master", net, optimizer):
        for _ in range(3):
            net(_batch(lab, net)).float().pow(2).mean().backward()
            for master, own in zip(masters, net.parameters(), strict=True):
                assert own.grad is not None
                master.grad = own.grad.float()
                own.grad = None
            optimizer.step()
            with torch.no_grad():
                for master, own in zip(masters, net.parameters(), strict=True):
                    own.copy_(master)


def _per_parameter(lab: Lab, label: str, count: int) -> dict[str, float]:
    categories = lab.traces[label]["categories"]
    names = ("weights", "gradients", "optimizer_state")
    figures = {f"{label}_{name}": categories[name]["most"] / count for name in names}
    figures[f"{label}_held"] = sum(categories[name]["at_end"] for name in names) / count
    return figures


@A1.judged_by(
    "REFUTED if weights, gradients and state under autocast are never 18 B per parameter "
    "(3 %); CONFIRMED if also between steps; else DEPENDS",
    experiments=("bytes_per_parameter",),
    without_gpu=EXACT,
)
def mixed_precision_needs_18_bytes(measured: Measured) -> Verdict:
    """18 B at the most must be seen. Autocast's copies need not last until the next step."""
    figures = measured["bytes_per_parameter"]
    names = ("weights", "gradients", "optimizer_state")
    most = {k: sum(figures[f"{k}_{n}"] for n in names) for k in ("fp32", "autocast", "master")}
    held = figures["autocast_held"]
    text = (
        f"B per parameter: fp32 {most['fp32']:.2f}; autocast {most['autocast']:.2f} with the 16-bit "
        f"copies of a forward and {held:.2f} between steps; 16-bit weights with a master "
        f"{figures['master_held']:.2f}; inference under autocast {figures['inference_weights']:.2f}"
    )
    if not near(most["autocast"], 18, 0.03):
        return Verdict(REFUTED, text)
    if near(held, 18, 0.03):
        return Verdict(CONFIRMED, text)
    return Verdict(DEPENDS, text, "the moment: torch frees autocast's copies after each forward")


# ---------------------------------------------------------------------- O1, O2, O3: the states

O1 = Statement(
    "O1",
    sources=("S0", "S1", "S2"),
    quote="AdamW 8 B per parameter, SGD with momentum 4, 8-bit AdamW 2",
    arithmetic="bitsandbytes saved 5.83 to 5.98 B per parameter, of 6",
)


@experiment("optimizer_state")
def optimizer_state(lab: Lab) -> dict[str, Any]:
    """The state of each optimizer, in bytes per parameter. O2 and O3 read it too."""
    makers: dict[str, Callable[[Any], Any]] = {
        "adamw": torch.optim.AdamW,
        "sgd": lambda p: torch.optim.SGD(p, 1e-3),
        "sgd_momentum": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9),
        "adafactor_torch": torch.optim.Adafactor,
    }
    if importlib.util.find_spec("transformers"):
        from transformers.optimization import Adafactor

        makers["adafactor"] = lambda p: Adafactor(p, lr=1e-3, relative_step=False)
        makers["adafactor_beta1"] = lambda p: Adafactor(p, lr=1e-3, relative_step=False, beta1=0.9)
    if lab.cuda and importlib.util.find_spec("bitsandbytes"):
        import bitsandbytes

        makers["adam8bit"] = bitsandbytes.optim.Adam8bit
    figures: dict[str, Any] = {}
    for label, make in makers.items():
        net = _net(lab)
        optimizer = make(net.parameters())
        figures[label] = _state_per_parameter(lab, label, net, optimizer)
        del net, optimizer
        lab.forget()
    return figures


@O1.judged_by(
    "CONFIRMED if the states are that within 1 % (8-bit: 5 %, where it can be measured); else "
    "REFUTED",
    experiments=("optimizer_state",),
    without_gpu=EXACT + " 8-bit Adam needs one.",
)
def states_are_8_4_and_2_bytes(measured: Measured) -> Verdict:
    """Each state must be as large as the documents say."""
    figures = measured["optimizer_state"]
    text = (
        f"AdamW {figures['adamw']:.3f}, SGD {figures['sgd']:.3f}, with momentum "
        f"{figures['sgd_momentum']:.3f} B per parameter"
    )
    good = near(figures["adamw"], 8) and near(figures["sgd_momentum"], 4)
    if "adam8bit" in figures:
        text += f", 8-bit Adam {figures['adam8bit']:.3f}"
        return confirmed_if(good and near(figures["adam8bit"], 2, 0.05), text)
    return confirmed_if(good, text, "8-bit Adam was not measured: it needs bitsandbytes and a GPU")


O2 = Statement(
    "O2",
    sources=("S1", "S4"),
    quote="Adafactor: slightly more than 4 B per parameter",
    arithmetic="it saved 7.55 to 8.30 B per parameter of 8: its state was 0 to 0.5",
)


@O2.judged_by(
    "CONFIRMED if the default's state is 4 to 5 B per parameter; else REFUTED",
    experiments=("optimizer_state",),
    without_gpu=EXACT,
)
def adafactor_has_4_bytes(measured: Measured) -> Verdict:
    """The default Adafactor's state must be 4 to 5 B, of transformers or else of torch."""
    figures = measured["optimizer_state"]
    if "adafactor" not in figures:
        name, plain, with_beta1 = "torch's Adafactor", figures["adafactor_torch"], None
    else:
        name, plain, with_beta1 = "Adafactor", figures["adafactor"], figures["adafactor_beta1"]
    text = f"{name} {plain:.3f} B per parameter"
    text += "" if with_beta1 is None else f"; with beta1 {with_beta1:.3f}"
    if 4 <= plain <= 5:
        return Verdict(CONFIRMED, text)
    if with_beta1 is not None and 4 <= with_beta1 <= 5:
        return Verdict(REFUTED, text, "of the default, which has no first moment; true with beta1")
    return Verdict(REFUTED, text)


O3 = Statement(
    "O3",
    sources=("S1", "S4"),
    quote="t5-3b's optimizer: 24 GB, Adafactor 12 GB, 8-bit 6 GB",
    arithmetic="2851 M parameters: 22.8 GB and 5.7 GB",
)


@experiment("t5_3b", needs=("transformers",))
def t5_3b(lab: Lab) -> dict[str, Any]:
    """Counts the parameters on the meta device, which holds no data."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32128, d_model=1024, d_kv=128, d_ff=16384, num_layers=24, num_heads=32
    )
    with torch.device("meta"):
        return {"parameters": _count(T5ForConditionalGeneration(config))}


@O3.judged_by(
    "CONFIRMED if parameters times measured state are each within 10 %; DEPENDS if only "
    "Adafactor is not; else REFUTED",
    experiments=("t5_3b", "optimizer_state"),
    without_gpu=EXACT,
)
def t5_3b_needs_24_gigabytes(measured: Measured) -> Verdict:
    """t5-3b's parameters times O1's states must give the documents' sizes."""
    count, state = measured["t5_3b"]["parameters"], measured["optimizer_state"]
    sizes = {
        "AdamW": (24, count * state["adamw"] / 1e9),
        "Adafactor": (12, count * state.get("adafactor", state["adafactor_torch"]) / 1e9),
        "8-bit Adam": (6, count * state.get("adam8bit", 2.0) / 1e9),
    }
    text = f"{count / 1e6:.0f} M parameters: " + ", ".join(
        f"{name} {size:.1f} GB ({said})" for name, (said, size) in sizes.items()
    )
    if "adam8bit" not in state:
        text += "; 8-bit Adam at 2 B per parameter, not measured here"
    wrong = [name for name, (said, size) in sizes.items() if not near(size, said, 0.1)]
    if not wrong:
        return Verdict(CONFIRMED, text)
    if wrong == ["Adafactor"]:
        return Verdict(DEPENDS, text, "whether Adafactor has a first moment (beta1)")
    return Verdict(REFUTED, text)


# ---------------------------------------------------------------------- O7: 8-bit states

O7 = Statement(
    "O7",
    sources=("S1", "S4"),
    quote="bitsandbytes can save 3/4 of AdamW's memory",
    arithmetic="2 of 8 B per parameter; of the optimizer's memory only",
)


@experiment("eight_bit_state", needs=("bitsandbytes",), gpus=1)
def eight_bit_state(lab: Lab) -> dict[str, Any]:
    """The AdamW of bitsandbytes and torch's. Counts the states that stay in 32 bits."""
    import bitsandbytes

    figures: dict[str, Any] = {}
    for label, make in (
        ("adamw", torch.optim.AdamW),
        ("adam8bit", bitsandbytes.optim.AdamW8bit),
    ):
        net = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 8))
        net.to(lab.device)
        optimizer = make(net.parameters())
        figures[label] = _state_per_parameter(lab, label, net, optimizer)
    whole = [s for s in optimizer.state.values() if s["state1"].dtype == torch.float32]
    figures["tensors_in_32_bits"] = len(whole)
    figures["largest_in_32_bits"] = max((s["state1"].numel() for s in whole), default=0)
    return figures


@O7.judged_by(
    "CONFIRMED if the optimizer's state is 75 % less (3 %); else REFUTED",
    experiments=("eight_bit_state",),
    without_gpu="Nothing: its optimizers are measured on a GPU.",
)
def eight_bit_states_save_three_quarters(measured: Measured) -> Verdict:
    """The 8-bit state must be a quarter of torch's."""
    figures = measured["eight_bit_state"]
    share = 1 - figures["adam8bit"] / figures["adamw"]
    text = (
        f"{figures['adam8bit']:.3f} instead of {figures['adamw']:.3f} B per parameter: {share:.1%} "
        f"less; {figures['tensors_in_32_bits']} tensors stay in 32 bits, the largest of "
        f"{figures['largest_in_32_bits']} elements"
    )
    return confirmed_if(near(share, 0.75, 0.03), text)


# ---------------------------------------------------------------------- O8: the fastest AdamW

O8 = Statement(
    "O8",
    sources=("S1",),
    quote="apex's fused is the fastest AdamW; _multi_tensor significantly speeds up",
)


@experiment("optimizer_speed")
def optimizer_speed(lab: Lab) -> dict[str, Any]:
    """AdamW one tensor at a time, in lists, and in one kernel: time and temporary bytes."""
    ways = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    width, layers = lab.pick((128, 64), (1024, 200))
    steps, figures = {}, {}
    for label, options in ways.items():
        net = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).to(lab.device)
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        optimizer = torch.optim.AdamW(net.parameters(), **options)  # type: ignore[arg-type]
        with lab.traced(label, net, optimizer):
            optimizer.step()
            optimizer.step()
        figures[f"{label}_temporaries"] = lab.traces[label]["categories"]["temporaries"]["most"]
        steps[label] = optimizer.step
    seconds = lab.alternating(steps, rounds=lab.pick(15, 30))
    for label, samples in seconds.items():
        figures |= spread(f"{label}_s", samples)
    figures |= ratio("fused_faster_than_foreach", seconds["foreach"], seconds["fused"])
    return figures | ratio("foreach_faster_than_loop", seconds["loop"], seconds["foreach"])


@O8.judged_by(
    "CONFIRMED if fused is faster than foreach by more than the spread and foreach at least "
    "1.2x a loop; DEPENDS if one of them; else REFUTED",
    experiments=("optimizer_speed",),
    without_gpu="What it does on a CPU, where there are no launches to save.",
)
def fused_is_the_fastest(measured: Measured) -> Verdict:
    """Fused must be faster than foreach, and foreach faster than a loop."""
    figures = measured["optimizer_speed"]
    fused, foreach = figures["fused_faster_than_foreach"], figures["foreach_faster_than_loop"]
    times = ", ".join(
        f"{n} {figures[f'{n}_s'] * 1e3:.2f} ms and {mib(figures[f'{n}_temporaries'])} of temporaries"
        for n in ("loop", "foreach", "fused")
    )
    text = (
        f"{times}; torch's fused is {ranged(figures, 'fused_faster_than_foreach')}x foreach's speed, "
        f"which is {ranged(figures, 'foreach_faster_than_loop')}x the loop's"
    )
    if figures["fused_faster_than_foreach_low"] > 1 and foreach >= 1.2:
        return Verdict(CONFIRMED, text, "apex itself was not measured: torch has the same kernel")
    if fused > 1 or foreach >= 1.2:
        return Verdict(DEPENDS, text, "the device, and how many small tensors there are")
    return Verdict(REFUTED, text)
