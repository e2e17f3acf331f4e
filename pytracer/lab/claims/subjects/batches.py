"""Batches: a batch in several parts (B1), and checkpoints that make room for a larger one (C2, C3)."""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pytracer.lab.claims.claim import (
    CONFIRMED,
    DEPENDS,
    EXACT,
    REFUTED,
    Measured,
    Statement,
    Verdict,
    change,
    confirmed_if,
    mib,
    ranged,
)
from pytracer.lab.claims.experiment import Lab, experiment, ratio, spread
from pytracer.lab.claims.subjects import models

# ---------------------------------------------------------------------- B1: accumulation, BatchNorm

B1 = Statement(
    "B1",
    sources=("S3",),
    quote="accumulation equals a large batch without batch normalisation (0.3770 = 0.3770 mAP) and "
    "not with it (73.85, 73.25, 73.19)",
)


@experiment("accumulated_gradients")
def accumulated_gradients(lab: Lab) -> dict[str, Any]:
    """The gradients of one batch of 8, of 4 batches of 2 and of 2 batches of 4, in float64."""
    figures = {}
    for label, normalised in (("plain", False), ("normalised", True)):
        net = models.feed_forward(64, 3, normalised=normalised).double().to(lab.device)
        x = torch.randn(8, 64, device=lab.device, dtype=torch.float64)
        whole = _gradient(net, [x])
        for parts in (2, 4):
            accumulated = _gradient(net, list(x.chunk(parts)))
            figures[f"{label}_{parts}"] = float((accumulated - whole).norm() / whole.norm())
    return figures


def _gradient(net: nn.Module, batches: list[Tensor]) -> Tensor:
    """The mean gradient over the batches, of a copy of the network, as one vector."""
    own = copy.deepcopy(net)
    for batch in batches:
        (own(batch).pow(2).mean() / len(batches)).backward()
    return torch.cat([p.grad.flatten() for p in own.parameters() if p.grad is not None])


@B1.judged_by(
    "CONFIRMED if gradients are equal to 1e-10 without batch normalisation, and differ by more "
    "than 1e-3 with it; else REFUTED",
    experiments=("accumulated_gradients",),
    without_gpu=EXACT + " Training the two networks to their scores is not repeated.",
)
def only_batch_normalisation_tells_parts_from_a_batch(measured: Measured) -> Verdict:
    """The gradients must be equal without batch normalisation and differ with it."""
    figures = measured["accumulated_gradients"]
    plain = max(figures["plain_2"], figures["plain_4"])
    normalised = min(figures["normalised_2"], figures["normalised_4"])
    text = (
        f"relative difference of gradients: {plain:.1e} without batch normalisation, at least "
        f"{normalised:.2f} with it"
    )
    return confirmed_if(plain <= 1e-10 and normalised >= 1e-3, text)


# ---------------------------------------------------------------------- C2: a larger batch

C2 = Statement(
    "C2",
    sources=("S3",),
    quote="checkpointing attention and GELU at batch size 24: 10972 to 3944 MB, 27m05 to 36m50; at "
    "132: 10212 MB, 31m20",
    arithmetic="-64 % memory, +36 % time; at the larger batch only +15.7 %",
)


@experiment("checkpoint_curve")
def checkpoint_curve(lab: Lab) -> dict[str, Any]:
    """Attention and GELU with a checkpoint around each, at one batch size and at a larger one."""
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

    figures: dict[str, Any] = {"batch": small, "larger_batch": large}
    ways = {"plain": (small, False), "checkpointed": (small, True), "larger": (large, True)}
    for label, way in ways.items():
        step(*way)
        with lab.traced(label, net, optimizer):
            step(*way)
        figures[f"{label}_peak"] = lab.traces[label]["peak_bytes"]
        figures[f"{label}_activations"] = lab.traces[label]["categories"]["activations"]["most"]
    seconds = lab.alternating(
        {label: partial(step, *way) for label, way in ways.items()}, warm=1, rounds=5
    )
    figures |= ratio("slower", seconds["checkpointed"], seconds["plain"])
    for label, samples in seconds.items():
        batch = ways[label][0]
        figures |= spread(f"{label}_samples_per_s", [batch / each for each in samples])
    return figures


@C2.judged_by(
    "REFUTED if the peak falls by less than 25 %; CONFIRMED if a larger batch is at least 1.05x "
    "as fast; else DEPENDS",
    experiments=("checkpoint_curve",),
    without_gpu="A CPU is busy at any batch size, so that a larger one pays back is a GPU's.",
)
def a_larger_batch_pays_for_checkpoints(measured: Measured) -> Verdict:
    """The peak must fall by a quarter. The larger batch must then be faster than the small one."""
    figures = measured["checkpoint_curve"]
    memory = change(figures["checkpointed_peak"], figures["plain_peak"])
    activations = figures["checkpointed_activations"] / figures["plain_activations"] - 1
    gain = figures["larger_samples_per_s"] / figures["checkpointed_samples_per_s"]
    text = (
        f"memory {memory} (activations {activations:+.0%}), time {ranged(figures, 'slower')}x; at "
        f"batch size {figures['larger_batch']} {mib(figures['larger_peak'])} and {gain:.2f}x the "
        f"checkpointed speed at {figures['batch']}"
    )
    if figures["checkpointed_peak"] > 0.75 * figures["plain_peak"]:
        return Verdict(REFUTED, text)
    if gain >= 1.05:
        return Verdict(CONFIRMED, text)
    return Verdict(DEPENDS, text, "the device: this one is busy already at the smaller batch size")


# ---------------------------------------------------------------------- C3: where not to checkpoint

C3 = Statement(
    "C3",
    sources=("S3",),
    quote="checkpointing is useless on the input layer and unsafe for dropout and batch normalisation",
)


@experiment("checkpoint_cautions")
def checkpoint_cautions(lab: Lab) -> dict[str, Any]:
    """A checkpoint around the input layer, around dropout and around batch normalisation."""
    figures: dict[str, Any] = {}
    width = lab.pick(128, 2048)
    for reentrant in (True, False):
        figures |= _saved_by(lab, width, reentrant)
    figures["dropout_same_kept"] = _same_dropout(lab, keep=True)
    figures["dropout_same_not_kept"] = _same_dropout(lab, keep=False)
    norm = nn.BatchNorm1d(8).to(lab.device)
    x = torch.randn(16, 8, device=lab.device, requires_grad=True)
    checkpoint(norm, x, use_reentrant=False).sum().backward()
    figures["batch_norm_updates"] = int(norm.num_batches_tracked)  # type: ignore[arg-type]
    return figures


def _saved_by(lab: Lab, width: int, reentrant: bool) -> dict[str, Any]:
    """The activations that a checkpoint saves at the first layer, and if that layer still learns."""
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
    """Whether dropout gives the same gradients with and without a checkpoint, for one seed."""
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


@C3.judged_by(
    "CONFIRMED if all of it is so, REFUTED if nothing is; DEPENDS on which otherwise",
    experiments=("checkpoint_cautions",),
    without_gpu=EXACT,
)
def checkpoints_have_three_dangers(measured: Measured) -> Verdict:
    """All of the cautions must hold. The first is judged for each kind of checkpoint."""
    figures = measured["checkpoint_cautions"]
    holds = {
        "useless on the input layer": not figures["reentrant_first_learns"]
        or figures["reentrant_first_saved"] <= 0,
        "useless there without reentry": figures["not_reentrant_first_saved"] <= 0,
        "unsafe for dropout": not figures["dropout_same_kept"],
        "unsafe for batch normalisation": figures["batch_norm_updates"] != 1,
    }
    learns = "learns" if figures["reentrant_first_learns"] else "gets no gradient"
    text = (
        f"an input layer in a reentrant checkpoint {learns}, in the other kind "
        f"{mib(figures['not_reentrant_first_saved'])} are saved; dropout's gradients are "
        f"{'the same' if figures['dropout_same_kept'] else 'other ones'}; running statistics are "
        f"updated {figures['batch_norm_updates']} times"
    )
    if all(holds.values()):
        return Verdict(CONFIRMED, text)
    if not any(holds.values()):
        return Verdict(REFUTED, text)
    true = ", ".join(name for name, held in holds.items() if held)
    return Verdict(DEPENDS, text, f"what of it: true is only {true}")
