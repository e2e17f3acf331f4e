"""A mixture of experts beside a dense network of the same FLOPs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pytracer.lab.claims.claim import CPU_TIMES, Measured, Statement, Verdict, confirmed_if, ranged
from pytracer.lab.claims.experiment import Lab, experiment, ratio
from pytracer.lab.claims.subjects import models

# ---------------------------------------------------------------------- M1: eight experts

M1 = Statement(
    "M1",
    sources=("S1",),
    quote="mixture of experts: 4-5x faster training, memory almost an order of magnitude larger",
)


@experiment("experts")
def experts(lab: Lab) -> dict[str, Any]:
    """A mixture of 8 experts, of which each token uses one, beside one dense network."""
    width, tokens = lab.pick((128, 4096), (1024, 32768))
    x = torch.randn(tokens, width, device=lab.device)
    figures: dict[str, Any] = {"experts": 8}
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
        figures |= lab.figures(label, f"{label}_")
        steps[label] = step
    figures["busiest_share"] = max(net.load) / tokens
    seconds = lab.alternating(steps, rounds=7)
    return figures | ratio("mixture_slower", seconds["mixture"], seconds["dense"])


@M1.judged_by(
    "CONFIRMED if weights, gradients and state grow as the number of experts (10 %) and "
    "activations by at most 25 %; else REFUTED",
    experiments=("experts",),
    without_gpu=CPU_TIMES,
)
def experts_multiply_the_states(measured: Measured) -> Verdict:
    """The states must grow with the number of experts, and the activations must not."""
    figures = measured["experts"]
    names = ("weights", "gradients", "optimizer_state")
    mixture, dense = (sum(figures[f"{k}_{n}_most"] for n in names) for k in ("mixture", "dense"))
    activations = figures["mixture_activations_most"] / figures["dense_activations_most"]
    times = mixture / dense
    text = (
        f"weights, gradients and state {times:.2f}x for {figures['experts']} experts, activations "
        f"{activations:.2f}x, time {ranged(figures, 'mixture_slower')}x at equal FLOPs; the busiest "
        f"expert has {figures['busiest_share']:.0%} of the tokens"
    )
    good = abs(times / figures["experts"] - 1) <= 0.1 and activations <= 1.25
    because = "only of memory: 4-5x faster training is to equal quality, which is not run here"
    return confirmed_if(good, text, because)
