"""Beam search: the memory of its copies."""

from typing import Any

import torch
from torch import Tensor, nn

from pytracer.lab.claims.claim import Measured, Statement, Verdict, confirmed_if, mib
from pytracer.lab.claims.experiment import Lab, experiment
from pytracer.lab.claims.subjects import models

# ---------------------------------------------------------------------- BS: copies for each beam

BS = Statement(
    "BS",
    sources=("S0", "S1", "S2"),
    quote="beam search keeps multiple copies of inputs and outputs",
)


@experiment("beams")
def beams(lab: Lab) -> dict[str, Any]:
    """Beam search with 1, 2, 4 and 8 beams: the bytes of its cache and its tokens."""
    width, layers, length = lab.pick((64, 2, 16), (1024, 12, 128))
    net = models.Decoder(500, width, layers).to(lab.device).eval()
    figures: dict[str, Any] = {"counts": [1, 2, 4, 8]}
    for count in figures["counts"]:
        label = f"beams_{count}"
        with lab.traced(label, net), torch.no_grad():
            held = _search(net, count, length, lab.device)
        figures |= {
            f"{label}_functional": lab.traces[label]["categories"]["functional"]["at_end"],
            f"{label}_held": sum(x.numel() * x.element_size() for x in held),
            f"{label}_peak": lab.traces[label]["peak_bytes"],
        }
        del held
    return figures


def _search(net: nn.Module, count: int, length: int, device: str) -> list[Tensor]:
    """The beams and their caches. Each step keeps the best continuations of all beams."""
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


@BS.judged_by(
    "CONFIRMED if what the beams hold is in proportion to their number (2 %) and 95 % of it is "
    "in the category functional; else REFUTED",
    experiments=("beams",),
    without_gpu="The same as on a GPU: these are bytes.",
)
def each_beam_has_its_copy(measured: Measured) -> Verdict:
    """The beams' bytes must be proportional to their number, and the trace must see them."""
    figures = measured["beams"]
    counts = figures["counts"]
    one = figures["beams_1_held"]
    worst = max(abs(figures[f"beams_{c}_held"] / (c * one) - 1) for c in counts)
    seen = min(figures[f"beams_{c}_functional"] / figures[f"beams_{c}_held"] for c in counts)
    text = (
        ", ".join(f"{c} beams {mib(figures[f'beams_{c}_held'])}" for c in counts)
        + f": in proportion within {worst:.1%}; {seen:.0%} of it in the category functional"
    )
    return confirmed_if(worst <= 0.02 and seen >= 0.95, text)
