"""Mixed precision: which models autocast makes faster and smaller."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pytracer.lab.claims.claim import (
    DEPENDS,
    Measured,
    Statement,
    Verdict,
    change,
    confirmed_if,
    on_gpu,
    ranged,
)
from pytracer.lab.claims.experiment import Lab, experiment, ratio
from pytracer.lab.claims.subjects import models

# ---------------------------------------------------------------------- P1: three models

P1 = Statement(
    "P1",
    sources=("S3",),
    quote="mixed precision on V100 and T4: tiny network 0.93x and 1.01x, U-Net 1.06x and 1.42x, BERT "
    "2.16x and 2.70x; memory 1.19 to 1.19, 4.33 to 3.71, 9.62 to 8.76 GB",
    arithmetic="tiny models lose",
)


@experiment("autocast_models")
def autocast_models(lab: Lab) -> dict[str, Any]:
    """A tiny network, a U-Net and a BERT-like one, with and without autocast."""
    cast = torch.float16 if lab.cuda else torch.bfloat16
    figures: dict[str, Any] = {}
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

        seconds = lab.alternating(
            {"plain": partial(step, False), "mixed": partial(step, True)}, rounds=9
        )
        figures |= ratio(f"{label}_faster", seconds["plain"], seconds["mixed"])
        if label.startswith("width"):
            continue
        for way, mixed in (("plain", False), ("mixed", True)):
            with lab.traced(f"{label}_{way}", net):
                step(mixed)
            figures[f"{label}_{way}_peak"] = lab.traces[f"{label}_{way}"]["peak_bytes"]
    return figures | {"widths": list(widths)}


def _three_models(lab: Lab) -> dict[str, tuple[nn.Module, Tensor]]:
    """Each model with its input."""
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


@P1.judged_by(
    "CONFIRMED if the tiny network gains at most 10 % and the BERT-like one at least 30 % with "
    "less memory; else REFUTED",
    experiments=("autocast_models",),
    without_gpu="bf16 on a CPU: what happens to memory, and nothing of GPUs' speed.",
)
def only_large_models_gain(measured: Measured) -> Verdict:
    """BERT must gain time and memory, and the tiny network must not gain time."""
    figures = measured["autocast_models"]
    text = "; ".join(
        f"{n} {ranged(figures, f'{n}_faster')}x as fast, memory "
        f"{change(figures[f'{n}_mixed_peak'], figures[f'{n}_plain_peak'])}"
        for n in ("tiny", "unet", "bert")
    )
    gaining = [w for w in figures["widths"] if figures[f"width_{w}_faster_low"] > 1]
    text += f"; a feed-forward network gains from width {min(gaining)}" if gaining else ""
    if not on_gpu(figures):
        return Verdict(DEPENDS, text, "a GPU with 16-bit units: this is a CPU's bf16")
    smaller = figures["bert_mixed_peak"] < figures["bert_plain_peak"]
    large_gains = figures["bert_faster"] >= 1.3 and smaller
    return confirmed_if(large_gains and figures["tiny_faster"] <= 1.1, text)
