"""The rules: bytes per parameter, optimizers, batches, checkpoints, number formats, variables."""

import copy
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pytracer.capture.device_memory import read_host
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
    ranged,
)
from pytracer.claims.experiment import Lab, experiment, ratio, spread
from pytracer.claims.subjects import models
from pytracer.gemm import shapes
from pytracer.gemm.device import facts, pick
from pytracer.gemm.timer import Settings, Timer

# ---------------------------------------------------------------------- bytes per parameter


def _net(lab: Lab, depth: int = 6) -> nn.Module:
    return models.feed_forward(lab.pick(512, 4096), depth).to(lab.device)


def _batch(lab: Lab, net: nn.Module, rows: int = 64) -> Tensor:
    parameter = next(net.parameters())
    return torch.randn(rows, parameter.shape[1], device=lab.device, dtype=parameter.dtype)


def _train(lab: Lab, net: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for _ in range(steps):
        net(_batch(lab, net)).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _per_parameter(lab: Lab, label: str, count: int) -> dict[str, float]:
    found = lab.traces[label]["categories"]
    names = ("weights", "gradients", "optimizer_state")
    flat = {f"{label}_{name}": found[name]["most"] / count for name in names}
    flat[f"{label}_held"] = sum(found[name]["at_end"] for name in names) / count
    return flat


@experiment("bytes_per_parameter")
def bytes_per_parameter(lab: Lab) -> dict[str, Any]:
    """AdamW in fp32, under autocast, and on 16-bit weights with an fp32 master."""
    found: dict[str, Any] = {}
    cast = torch.float16 if lab.cuda else torch.bfloat16
    for label in ("fp32", "autocast", "master", "inference"):
        net = _net(lab)
        count = sum(p.numel() for p in net.parameters())
        if label == "master":
            found |= _with_master(lab, net, count)
            continue
        optimizer = torch.optim.AdamW(net.parameters())
        with lab.traced(label, net, optimizer):
            mixed = label != "fp32"
            if label == "inference":
                with torch.no_grad(), torch.autocast(lab.device, cast):
                    net(_batch(lab, net))
            for _ in range(3 * (label != "inference")):
                with torch.autocast(lab.device, cast, enabled=mixed):
                    loss = net(_batch(lab, net)).float().pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        found |= _per_parameter(lab, label, count)
        del net, optimizer
        lab.forget()
    return found


def _with_master(lab: Lab, net: nn.Module, count: int) -> dict[str, Any]:
    """Half weights compute; the optimizer has fp32 copies of them, with fp32 gradients."""
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
    return _per_parameter(lab, "master", count)


# ---------------------------------------------------------------------- optimizers


@experiment("optimizer_state")
def optimizer_state(lab: Lab) -> dict[str, Any]:
    """What each optimizer keeps, in bytes per parameter."""
    found: dict[str, Any] = {}
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
    for label, make in makers.items():
        net = _net(lab)
        count = sum(p.numel() for p in net.parameters())
        optimizer = make(net.parameters())
        with lab.traced(label, net, optimizer):
            _train(lab, net, optimizer)
        state = lab.traces[label]["categories"]["optimizer_state"]["at_end"]
        found[label] = state / count
        del net, optimizer
        lab.forget()
    return found


@experiment("eight_bit_state", needs=("bitsandbytes",), gpus=1)
def eight_bit_state(lab: Lab) -> dict[str, Any]:
    """The AdamW of bitsandbytes beside torch's; which of its states stay in 32 bits."""
    import bitsandbytes

    found: dict[str, Any] = {}
    for label, make in (
        ("adamw", torch.optim.AdamW),
        ("adam8bit", bitsandbytes.optim.AdamW8bit),
    ):
        net = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 8))
        net.to(lab.device)
        count = sum(p.numel() for p in net.parameters())
        optimizer = make(net.parameters())
        with lab.traced(label, net, optimizer):
            _train(lab, net, optimizer)
        found[label] = lab.traces[label]["categories"]["optimizer_state"]["at_end"] / count
    whole = [s for s in optimizer.state.values() if s["state1"].dtype == torch.float32]
    found["tensors_in_32_bits"] = len(whole)
    found["largest_in_32_bits"] = max((s["state1"].numel() for s in whole), default=0)
    return found


@experiment("t5_3b", needs=("transformers",))
def t5_3b(lab: Lab) -> dict[str, Any]:
    """How many parameters it has: made on the meta device, which holds none of them."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32128, d_model=1024, d_kv=128, d_ff=16384, num_layers=24, num_heads=32
    )
    with torch.device("meta"):
        return {
            "parameters": sum(p.numel() for p in T5ForConditionalGeneration(config).parameters())
        }


@experiment("optimizer_speed")
def optimizer_speed(lab: Lab) -> dict[str, Any]:
    """AdamW one tensor at a time, in lists, and in one kernel: time and temporary bytes."""
    ways = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    width, layers = lab.pick((128, 64), (1024, 200))
    steps, found = {}, {}
    for label, options in ways.items():
        net = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).to(lab.device)
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        optimizer = torch.optim.AdamW(net.parameters(), **options)  # type: ignore[arg-type]
        with lab.traced(label, net, optimizer):
            optimizer.step()
            optimizer.step()
        found[f"{label}_temporaries"] = lab.traces[label]["categories"]["temporaries"]["most"]
        steps[label] = optimizer.step
    taken = lab.alternating(steps, rounds=lab.pick(15, 30))
    for label, samples in taken.items():
        found |= spread(f"{label}_s", samples)
    found |= ratio("fused_faster_than_foreach", taken["foreach"], taken["fused"])
    return found | ratio("foreach_faster_than_loop", taken["loop"], taken["foreach"])


# ---------------------------------------------------------------------- batches


@experiment("accumulated_gradients")
def accumulated_gradients(lab: Lab) -> dict[str, Any]:
    """The gradients of one batch of 8 beside those of 4 batches of 2 and 2 of 4, in float64."""
    found = {}
    for label, normalised in (("plain", False), ("normalised", True)):
        net = models.feed_forward(64, 3, normalised=normalised).double().to(lab.device)
        x = torch.randn(8, 64, device=lab.device, dtype=torch.float64)
        whole = _gradient(net, [x])
        for parts in (2, 4):
            other = _gradient(net, list(x.chunk(parts)))
            found[f"{label}_{parts}"] = float((other - whole).norm() / whole.norm())
    return found


def _gradient(net: nn.Module, batches: list[Tensor]) -> Tensor:
    own = copy.deepcopy(net)
    for batch in batches:
        (own(batch).pow(2).mean() / len(batches)).backward()
    return torch.cat([p.grad.flatten() for p in own.parameters() if p.grad is not None])


# ---------------------------------------------------------------------- checkpointing


@experiment("checkpoint_curve")
def checkpoint_curve(lab: Lab) -> dict[str, Any]:
    """Attention and GELU checkpointed, at one batch size and at a larger one."""
    width, layers, length = lab.pick((128, 2, 128), (768, 12, 512))
    small, large = lab.pick((8, 32), (24, 132))
    net = models.Encoder(1000, width, layers, length).to(lab.device)
    optimizer = torch.optim.AdamW(net.parameters())

    def step(batch: int, checkpointed: bool) -> None:
        for block in net.blocks:
            assert isinstance(block, models.Block)
            block.checkpointed = checkpointed
        tokens = torch.randint(1000, (batch, length), device=lab.device)
        functional.cross_entropy(net(tokens), tokens[:, 0] % 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    found: dict[str, Any] = {"batch": small, "larger_batch": large}
    ways = {"plain": (small, False), "checkpointed": (small, True), "larger": (large, True)}
    for label, way in ways.items():
        step(*way)
        with lab.traced(label, net, optimizer):
            step(*way)
        found[f"{label}_peak"] = lab.traces[label]["peak_bytes"]
        found[f"{label}_activations"] = lab.traces[label]["categories"]["activations"]["most"]
    taken = lab.alternating(
        {label: partial(step, *way) for label, way in ways.items()}, warm=1, rounds=5
    )
    found |= ratio("slower", taken["checkpointed"], taken["plain"])
    for label, samples in taken.items():
        batch = ways[label][0]
        found |= spread(f"{label}_samples_per_s", [batch / each for each in samples])
    return found


@experiment("checkpoint_cautions")
def checkpoint_cautions(lab: Lab) -> dict[str, Any]:
    """The input layer, dropout and batch normalisation under a checkpoint."""
    found: dict[str, Any] = {}
    width = lab.pick(128, 2048)
    for reentrant in (True, False):
        found |= _saved_by(lab, width, reentrant)
    found["dropout_same_kept"] = _same_dropout(lab, keep=True)
    found["dropout_same_not_kept"] = _same_dropout(lab, keep=False)
    norm = nn.BatchNorm1d(8).to(lab.device)
    x = torch.randn(16, 8, device=lab.device, requires_grad=True)
    checkpoint(norm, x, use_reentrant=False).sum().backward()
    found["batch_norm_updates"] = int(norm.num_batches_tracked)  # type: ignore[arg-type]
    return found


def _saved_by(lab: Lab, width: int, reentrant: bool) -> dict[str, Any]:
    """Bytes of activations that a checkpoint around the first layer saves, and if it still learns."""
    kind = "reentrant" if reentrant else "not_reentrant"
    kept, learns = {}, True
    for used in (False, True):
        first, second = (
            nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))
            for _ in range(2)
        )
        net = nn.ModuleList([first, second]).to(lab.device)
        x = torch.randn(256, width, device=lab.device)
        label = f"{kind}_{'with' if used else 'without'}"
        with lab.traced(label, net):
            x = checkpoint(first, x, use_reentrant=reentrant) if used else first(x)
            second(x).pow(2).sum().backward()
        kept[used] = lab.traces[label]["categories"]["activations"]["most"]
        learns = all(p.grad is not None for p in first.parameters())
    return {f"{kind}_first_saved": kept[False] - kept[True], f"{kind}_first_learns": learns}


def _same_dropout(lab: Lab, *, keep: bool) -> bool:
    """Whether the gradients are those of the run without a checkpoint, with the same seed."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64)).to(lab.device)
    x = torch.randn(32, 64, device=lab.device, requires_grad=True)
    gradients = []
    for used in (False, True):
        net.zero_grad()
        torch.manual_seed(1)
        out = checkpoint(net, x, use_reentrant=False, preserve_rng_state=keep) if used else net(x)
        out.pow(2).sum().backward()
        gradients.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    return all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# ---------------------------------------------------------------------- number formats


@experiment("number_formats")
def number_formats(lab: Lab) -> dict[str, Any]:
    """What torch says of them."""
    return {
        "fp16_max": torch.finfo(torch.float16).max,
        "bf16_max": torch.finfo(torch.bfloat16).max,
    }


@experiment("tf32_products", gpus=1)
def tf32_products(lab: Lab) -> dict[str, Any]:
    """One product in fp32 and in tf32: error against float64, and speed."""
    size = lab.pick(2048, 8192)
    works = [shapes.Gemm(size, size, size, dtype, "forward") for dtype in ("fp32", "tf32")]
    timer = Timer(pick(lab.device), Settings(seconds=10))
    full, reduced = timer(works, null=False).timings
    found = {"size": size, "fp32_error": full.error, "tf32_error": reduced.error}
    found |= {"fp32_tflops": full.tflops, "tf32_tflops": reduced.tflops}
    torch.set_float32_matmul_precision("high")
    found["bits_kept"] = _bits_kept(lab.device)
    return found | ratio("faster", list(full.seconds), list(reduced.seconds))


def _bits_kept(device: str) -> int:
    """After how many bits a number no longer comes through a product with one as it was."""
    one = torch.eye(256, device=device)
    for bits in range(1, 24):
        x = torch.full((256, 256), 1 + 2.0**-bits, device=device)
        if not torch.equal((x @ one)[0, 0], x[0, 0]):
            return bits - 1
    return 23


@experiment("capability", gpus=1)
def capability(lab: Lab) -> dict[str, Any]:
    """What this GPU's generation is, and which formats its units do."""
    major, minor = torch.cuda.get_device_capability()
    found = facts(pick(lab.device))
    return {
        "name": found.name,
        "capability": major + minor / 10,
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
        "tf32_rounds": _tf32_rounds(lab.device),
    }


def _tf32_rounds(device: str) -> bool:
    """Whether allowing it changes a product: older GPUs ignore the wish."""
    x = torch.randn(512, 512, device=device)
    torch.set_float32_matmul_precision("highest")
    exact = x @ x
    torch.set_float32_matmul_precision("high")
    return not torch.equal(exact, x @ x)


# ---------------------------------------------------------------------- what a variable keeps


# A program of its own, so that a line of it can be named and not one of ours.
_LOOP = """\
def loop(net, optimizer, batch, steps, backward, add):
    total_loss = 0.0
    for _ in range(steps):
        loss = net(batch()).pow(2).mean()
        if backward:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        total_loss = add(total_loss, loss)
    return total_loss
"""
_ADDS: dict[str, Callable[[Any, Tensor], Any]] = {
    "tensor": lambda total, loss: total + loss,
    "item": lambda total, loss: total + loss.item(),
    "detach": lambda total, loss: total + loss.detach(),
}


@experiment("total_loss")
def total_loss(lab: Lab) -> dict[str, Any]:
    """`total_loss += loss`, `.item()` and `.detach()`, where backward runs and where it does not.

    Tensors are seen in the trace. What is left where backward has freed them are autograd's nodes,
    which are host memory and in no allocator's book: so the process is measured as well.
    """
    net = models.feed_forward(32, 2).to(lab.device)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    program: dict[str, Any] = {}
    exec(compile(_LOOP, "training_loop.py", "exec"), program)

    def summed(label: str, steps: int, backward: bool) -> Any:
        def batch() -> Tensor:
            return torch.randn(8, 32, device=lab.device)

        return program["loop"](net, optimizer, batch, steps, backward, _ADDS[label])

    found: dict[str, Any] = {}
    # First, while the process has no freed memory that nodes could go into unseen.
    for label in ("item", "tensor"):
        summed(label, 200, True)
        before = read_host().get("anonymous", 0)
        kept = summed(label, 3000, True)
        found[f"host_{label}_growth"] = (read_host().get("anonymous", 0) - before) / 3000
        del kept
    for backward, where in ((True, "after_backward"), (False, "no_backward")):
        for label in _ADDS:
            name = f"{where}_{label}"
            with lab.traced(name, net, optimizer, stacks=True) as t:
                kept = summed(label, 30, backward)
            grown = [row for row in t.findings().itertuples() if row.kind == "growth"]
            found[f"{name}_growth"] = sum(row.bytes for row in grown)
            found[f"{name}_line"] = grown[0].line if grown else ""
            del kept
    return found


@experiment("names_of_intermediates")
def names_of_intermediates(lab: Lab) -> dict[str, Any]:
    """A chain of results under names of their own, and under one, with and without autograd."""
    rows, width = lab.pick((1024, 256), (16384, 4096))
    layer = nn.Linear(width, width).to(lab.device)
    x = torch.randn(rows, width, device=lab.device)
    found: dict[str, Any] = {"intermediate_bytes": rows * width * 4, "intermediates": 6}
    for label, record in (("recording", True), ("not_recording", False)):
        for own_names in (True, False):
            name = f"{label}_{'own_names' if own_names else 'one_name'}"
            with lab.traced(name, layer), torch.set_grad_enabled(record):
                _chain(layer, x, found["intermediates"], own_names)
            found[name] = lab.traces[name]["peak_bytes"]
    return found


def _chain(layer: nn.Module, x: Tensor, count: int, own_names: bool) -> Tensor:
    """Sigmoids, each of which saves its result for the backward."""
    names = []
    value: Tensor = layer(x)
    for _ in range(count):
        value = torch.sigmoid(value)
        if own_names:
            names.append(value)
    return value


@experiment("validation")
def validation(lab: Lab) -> dict[str, Any]:
    """A forward pass with and without no_grad."""
    found: dict[str, Any] = {}
    net = _net(lab)
    for label, record in (("recording", True), ("no_grad", False)):
        with lab.traced(label, net), torch.set_grad_enabled(record):
            loss = net(_batch(lab, net)).pow(2).mean()
        found[f"{label}_activations"] = lab.traces[label]["categories"]["activations"]["most"]
        found[f"{label}_peak"] = lab.traces[label]["peak_bytes"]
        del loss
    return found


# ---------------------------------------------------------------------- verdicts


def _near(value: float, expected: float, share: float = 0.01) -> bool:
    return abs(value - expected) <= share * expected


def _eighteen(measured: Measured) -> Verdict:
    found = measured["bytes_per_parameter"]
    names = ("weights", "gradients", "optimizer_state")
    most = {k: sum(found[f"{k}_{n}"] for n in names) for k in ("fp32", "autocast", "master")}
    held = found["autocast_held"]
    text = (
        f"B per parameter: fp32 {most['fp32']:.2f}; autocast {most['autocast']:.2f} with the 16-bit "
        f"copies of a forward and {held:.2f} between steps; 16-bit weights with a master "
        f"{found['master_held']:.2f}; inference under autocast {found['inference_weights']:.2f}"
    )
    if not _near(most["autocast"], 18, 0.03):
        return Verdict(REFUTED, text)
    if _near(held, 18, 0.03):
        return Verdict(CONFIRMED, text)
    return Verdict(DEPENDS, text, "the moment: torch frees autocast's copies after each forward")


def _states(measured: Measured) -> Verdict:
    found = measured["optimizer_state"]
    text = (
        f"AdamW {found['adamw']:.3f}, SGD {found['sgd']:.3f}, with momentum "
        f"{found['sgd_momentum']:.3f} B per parameter"
    )
    good = _near(found["adamw"], 8) and _near(found["sgd_momentum"], 4)
    if "adam8bit" in found:
        text += f", 8-bit Adam {found['adam8bit']:.3f}"
        return confirmed_if(good and _near(found["adam8bit"], 2, 0.05), text)
    return confirmed_if(good, text, "8-bit Adam was not measured: it needs bitsandbytes and a GPU")


def _adafactor(measured: Measured) -> Verdict:
    found = measured["optimizer_state"]
    if "adafactor" not in found:
        name, plain, first = "torch's Adafactor", found["adafactor_torch"], None
    else:
        name, plain, first = "Adafactor", found["adafactor"], found["adafactor_beta1"]
    with_first = "" if first is None else f"; with beta1 {first:.3f}"
    text = f"{name} {plain:.3f} B per parameter{with_first}"
    if 4 <= plain <= 5:
        return Verdict(CONFIRMED, text)
    if first is not None and 4 <= first <= 5:
        return Verdict(REFUTED, text, "of the default, which has no first moment; true with beta1")
    return Verdict(REFUTED, text)


def _t5(measured: Measured) -> Verdict:
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
    wrong = [name for name, (said, size) in sizes.items() if not _near(size, said, 0.1)]
    if not wrong:
        return Verdict(CONFIRMED, text)
    if wrong == ["Adafactor"]:
        return Verdict(DEPENDS, text, "whether Adafactor has a first moment (beta1)")
    return Verdict(REFUTED, text)


def _quarter(measured: Measured) -> Verdict:
    found = measured["eight_bit_state"]
    share = 1 - found["adam8bit"] / found["adamw"]
    text = (
        f"{found['adam8bit']:.3f} instead of {found['adamw']:.3f} B per parameter: {share:.1%} less; "
        f"{found['tensors_in_32_bits']} tensors stay in 32 bits, the largest of "
        f"{found['largest_in_32_bits']} elements"
    )
    return confirmed_if(_near(share, 0.75, 0.03), text)


def _fused(measured: Measured) -> Verdict:
    found = measured["optimizer_speed"]
    fused, foreach = found["fused_faster_than_foreach"], found["foreach_faster_than_loop"]
    times = ", ".join(
        f"{n} {found[f'{n}_s'] * 1e3:.2f} ms and {mib(found[f'{n}_temporaries'])} of temporaries"
        for n in ("loop", "foreach", "fused")
    )
    text = (
        f"{times}; torch's fused is {ranged(found, 'fused_faster_than_foreach')}x foreach's speed, "
        f"which is {ranged(found, 'foreach_faster_than_loop')}x the loop's"
    )
    if found["fused_faster_than_foreach_low"] > 1 and foreach >= 1.2:
        return Verdict(CONFIRMED, text, "apex itself was not measured: torch has the same kernel")
    if fused > 1 or foreach >= 1.2:
        return Verdict(DEPENDS, text, "the device, and how many small tensors there are")
    return Verdict(REFUTED, text)


def _batch_norm(measured: Measured) -> Verdict:
    found = measured["accumulated_gradients"]
    plain = max(found["plain_2"], found["plain_4"])
    normalised = min(found["normalised_2"], found["normalised_4"])
    text = (
        f"relative difference of gradients: {plain:.1e} without batch normalisation, at least "
        f"{normalised:.2f} with it"
    )
    return confirmed_if(plain <= 1e-10 and normalised >= 1e-3, text)


def _curve(measured: Measured) -> Verdict:
    found = measured["checkpoint_curve"]
    memory = change(found["checkpointed_peak"], found["plain_peak"])
    activations = found["checkpointed_activations"] / found["plain_activations"] - 1
    gain = found["larger_samples_per_s"] / found["checkpointed_samples_per_s"]
    text = (
        f"memory {memory} (activations {activations:+.0%}), time {ranged(found, 'slower')}x; at "
        f"batch size {found['larger_batch']} {mib(found['larger_peak'])} and {gain:.2f}x the "
        f"checkpointed speed at {found['batch']}"
    )
    saves = found["checkpointed_peak"] <= 0.75 * found["plain_peak"]
    if not saves:
        return Verdict(REFUTED, text)
    if gain >= 1.05:
        return Verdict(CONFIRMED, text)
    return Verdict(DEPENDS, text, "the device: this one is busy already at the smaller batch size")


def _cautions(measured: Measured) -> Verdict:
    found = measured["checkpoint_cautions"]
    holds = {
        "useless on the input layer": not found["reentrant_first_learns"]
        or found["reentrant_first_saved"] <= 0,
        "useless there without reentry": found["not_reentrant_first_saved"] <= 0,
        "unsafe for dropout": not found["dropout_same_kept"],
        "unsafe for batch normalisation": found["batch_norm_updates"] != 1,
    }
    learns = "learns" if found["reentrant_first_learns"] else "gets no gradient"
    text = (
        f"an input layer in a reentrant checkpoint {learns}, in the other kind "
        f"{mib(found['not_reentrant_first_saved'])} are saved; dropout's gradients are "
        f"{'the same' if found['dropout_same_kept'] else 'other ones'}; running statistics are "
        f"updated {found['batch_norm_updates']} times"
    )
    if all(holds.values()):
        return Verdict(CONFIRMED, text)
    if not any(holds.values()):
        return Verdict(REFUTED, text)
    true = ", ".join(name for name, held in holds.items() if held)
    return Verdict(DEPENDS, text, f"what of it: true is only {true}")


def _largest(measured: Measured) -> Verdict:
    found = measured["number_formats"]
    text = f"fp16 {found['fp16_max']:.0f}, bf16 {found['bf16_max']:.3g}"
    good = found["fp16_max"] == 65535 and _near(found["bf16_max"], 3.39e38)
    return confirmed_if(good, text)


def _tf32(measured: Measured) -> Verdict:
    found = measured["tf32_products"]
    text = (
        f"{ranged(found, 'faster')}x fp32 ({found['tf32_tflops']:.0f} and {found['fp32_tflops']:.0f} "
        f"TFLOP/s at {found['size']}), {found['bits_kept']} bits of precision kept, error "
        f"{found['tf32_error']:.1e} instead of {found['fp32_error']:.1e}"
    )
    whole, plain = measured.get("trainer_tf32"), measured.get("trainer_vanilla")
    if whole and plain:
        text += f"; training BERT-large {whole['samples_per_s'] / plain['samples_per_s']:.2f}x"
    if found["bits_kept"] != 10 or found["faster"] <= 1:
        return Verdict(REFUTED, text)
    if found["faster"] <= 3.3:
        return Verdict(CONFIRMED, text)
    return Verdict(DEPENDS, text, "the GPU: here a pure product gains more than 3x")


def _ampere(measured: Measured) -> Verdict:
    found = measured["capability"]
    new = found["capability"] >= 8
    text = (
        f"{found['name']}, compute capability {found['capability']}: bf16 "
        f"{'yes' if found['bf16'] else 'no'}, tf32 {'yes' if found['tf32_rounds'] else 'no'}"
    )
    return confirmed_if(found["bf16"] == new and found["tf32_rounds"] == new, text)


def _leak(measured: Measured) -> Verdict:
    found = measured["total_loss"]
    after, without = found["after_backward_tensor_growth"], found["no_backward_tensor_growth"]
    ends = all(
        found[f"{where}_{label}_growth"] <= 0
        for where in ("after_backward", "no_backward")
        for label in ("item", "detach")
    )
    text = (
        f"tensors grow {after:,} B per step where backward has run and {without:,} B where it has "
        f"not ({found['no_backward_tensor_line'] or 'no line'}), "
        f"{'0' if ends else 'more than 0'} B with .item() or .detach(); autograd's nodes add "
        f"{found['host_tensor_growth']:,.0f} B of host memory per step, with .item() "
        f"{found['host_item_growth']:,.0f} B"
    )
    if not (without > 0 and found["no_backward_tensor_line"] and ends):
        return Verdict(REFUTED, text)
    if after > 0:
        return Verdict(CONFIRMED, text)
    return Verdict(DEPENDS, text, "backward: it frees what the graph holds, all but its nodes")


def _names(measured: Measured) -> Verdict:
    found = measured["names_of_intermediates"]
    size = found["intermediate_bytes"]
    saved = {
        label: (found[f"{label}_own_names"] - found[f"{label}_one_name"]) / size
        for label in ("recording", "not_recording")
    }
    text = (
        f"one name instead of {found['intermediates']} frees {saved['recording']:.1f} intermediates "
        f"while autograd records, {saved['not_recording']:.1f} under no_grad"
    )
    frees = {label: amount >= 1 for label, amount in saved.items()}
    if all(frees.values()):
        return Verdict(CONFIRMED, text)
    if frees["not_recording"]:
        return Verdict(
            DEPENDS, text, "autograd: in training it keeps them whatever they are called"
        )
    return Verdict(REFUTED, text)


def _no_grad(measured: Measured) -> Verdict:
    found = measured["validation"]
    text = (
        f"activations {mib(found['recording_activations'])} while recording, "
        f"{found['no_grad_activations']:,} B under no_grad; peak "
        f"{change(found['no_grad_peak'], found['recording_peak'])}"
    )
    kept = found["recording_activations"] > 0
    return confirmed_if(kept and found["no_grad_activations"] == 0, text)


_EXACT = "The same as on a GPU: these are bytes and values, not times."

CLAIMS = (
    Claim(
        "A1",
        ("S0", "S1", "S2"),
        "18 B per parameter for mixed-precision AdamW, 6 B for inference; weights 4 or 6, "
        "gradients 4",
        "6 + 4 + 8",
        "REFUTED if weights, gradients and state under autocast are never 18 B per parameter "
        "(3 %); CONFIRMED if also between steps; else DEPENDS",
        _eighteen,
        ("bytes_per_parameter",),
        without_gpu=_EXACT,
    ),
    Claim(
        "O1",
        ("S0", "S1", "S2"),
        "AdamW 8 B per parameter, SGD with momentum 4, 8-bit AdamW 2",
        "bitsandbytes saved 5.83 to 5.98 B per parameter, of 6",
        "CONFIRMED if the states are that within 1 % (8-bit: 5 %, where it can be measured); else "
        "REFUTED",
        _states,
        ("optimizer_state",),
        without_gpu=_EXACT + " 8-bit Adam needs one.",
    ),
    Claim(
        "O2",
        ("S1", "S4"),
        "Adafactor: slightly more than 4 B per parameter",
        "it saved 7.55 to 8.30 B per parameter of 8: its state was 0 to 0.5",
        "CONFIRMED if the default's state is 4 to 5 B per parameter; else REFUTED",
        _adafactor,
        ("optimizer_state",),
        without_gpu=_EXACT,
    ),
    Claim(
        "O3",
        ("S1", "S4"),
        "t5-3b's optimizer: 24 GB, Adafactor 12 GB, 8-bit 6 GB",
        "2851 M parameters: 22.8 GB and 5.7 GB",
        "CONFIRMED if parameters times measured state are each within 10 %; DEPENDS if only "
        "Adafactor is not; else REFUTED",
        _t5,
        ("t5_3b", "optimizer_state"),
        without_gpu=_EXACT,
    ),
    Claim(
        "O7",
        ("S1", "S4"),
        "bitsandbytes can save 3/4 of AdamW's memory",
        "2 of 8 B per parameter; of the optimizer's memory only",
        "CONFIRMED if the optimizer's state is 75 % less (3 %); else REFUTED",
        _quarter,
        ("eight_bit_state",),
        without_gpu="Nothing: its optimizers are measured on a GPU.",
    ),
    Claim(
        "O8",
        ("S1",),
        "apex's fused is the fastest AdamW; _multi_tensor significantly speeds up",
        "",
        "CONFIRMED if fused is faster than foreach by more than the spread and foreach at least "
        "1.2x a loop; DEPENDS if one of them; else REFUTED",
        _fused,
        ("optimizer_speed",),
        without_gpu="What it does on a CPU, where there are no launches to save.",
    ),
    Claim(
        "B1",
        ("S3",),
        "accumulation equals a large batch without batch normalisation (0.3770 = 0.3770 mAP) and "
        "not with it (73.85, 73.25, 73.19)",
        "",
        "CONFIRMED if gradients are equal to 1e-10 without batch normalisation, and differ by more "
        "than 1e-3 with it; else REFUTED",
        _batch_norm,
        ("accumulated_gradients",),
        without_gpu=_EXACT + " Training the two networks to their scores is not repeated.",
    ),
    Claim(
        "C2",
        ("S3",),
        "checkpointing attention and GELU at batch size 24: 10972 to 3944 MB, 27m05 to 36m50; at "
        "132: 10212 MB, 31m20",
        "-64 % memory, +36 % time; at the larger batch only +15.7 %",
        "REFUTED if the peak falls by less than 25 %; CONFIRMED if a larger batch is at least 1.05x "
        "as fast; else DEPENDS",
        _curve,
        ("checkpoint_curve",),
        without_gpu="A CPU is busy at any batch size, so that a larger one pays back is a GPU's.",
    ),
    Claim(
        "C3",
        ("S3",),
        "checkpointing is useless on the input layer and unsafe for dropout and batch normalisation",
        "",
        "CONFIRMED if all of it is so, REFUTED if nothing is; DEPENDS on which otherwise",
        _cautions,
        ("checkpoint_cautions",),
        without_gpu=_EXACT,
    ),
    Claim(
        "F3",
        ("S1",),
        "for fp16 the biggest number is 65535; bf16 3.39e+38",
        "",
        "CONFIRMED if both are so; else REFUTED",
        _largest,
        ("number_formats",),
        without_gpu=_EXACT,
    ),
    Claim(
        "F4",
        ("S1",),
        "TF32 has 10 bits of precision and is up to 3x as fast",
        "",
        "REFUTED if a product does not keep 10 bits or is no faster; CONFIRMED up to 3.3x; DEPENDS "
        "above",
        _tf32,
        ("tf32_products",),
        welcome=("trainer_vanilla", "trainer_tf32"),
        without_gpu="Nothing: CPUs have no TF32.",
    ),
    Claim(
        "F5",
        ("S1",),
        "bf16 and TF32 only since Ampere",
        "",
        "CONFIRMED if this GPU has both exactly if its compute capability is at least 8; else REFUTED",
        _ampere,
        ("capability",),
        without_gpu="Nothing: it is about GPUs.",
    ),
    Claim(
        "L1",
        ("S3",),
        "total_loss += loss grows over 10 000 steps",
        "",
        "REFUTED if tensors do not grow with a line to blame where backward does not run, or do with "
        ".item() and .detach(); CONFIRMED if also where backward runs; else DEPENDS",
        _leak,
        ("total_loss",),
        without_gpu=_EXACT,
    ),
    Claim(
        "L2",
        ("S3",),
        "a name for every intermediate costs memory; del and local scopes free it",
        "",
        "CONFIRMED if one name instead of many frees intermediates with and without autograd; "
        "DEPENDS if only without; else REFUTED",
        _names,
        ("names_of_intermediates",),
        without_gpu=_EXACT,
    ),
    Claim(
        "L3",
        ("S3",),
        "torch.no_grad() in validation saves memory",
        "",
        "CONFIRMED if there are activations without it and none with it; else REFUTED",
        _no_grad,
        ("validation",),
        without_gpu=_EXACT,
    ),
)
