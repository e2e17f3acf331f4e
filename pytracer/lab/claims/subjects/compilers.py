"""torch.compile's back ends: those that the documents name, and those that there are."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from pytracer.lab.claims.claim import (
    CONFIRMED,
    DEPENDS,
    REFUTED,
    Measured,
    Statement,
    Verdict,
    change,
    ranged,
)
from pytracer.lab.claims.experiment import Lab, experiment, ratio, spread
from pytracer.lab.claims.subjects import models

# ---------------------------------------------------------------------- X1: the back ends

X1 = Statement(
    "X1",
    sources=("S1",),
    quote="dynamo's back ends: eager, aot_eager, inductor, nvfuser, aot_nvfuser, aot_cudagraphs, ofi, "
    "fx2trt, onnxrt, ipex; aot_eager is unlikely to give speedups",
)

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
    """The back ends that torch has. Trains a step with each that can train."""
    there = sorted(torch.compiler.list_backends(exclude_tags=None))
    figures: dict[str, Any] = {
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
        except Exception as error:  # the verdict names a back end that fails here
            figures[f"{name}_failed"] = " ".join(str(error).split())[:120]
            continue
        steps[name] = partial(step, called)
        figures[f"{name}_peak"] = lab.traces[name]["peak_bytes"]
    seconds = lab.alternating(steps, rounds=15)
    for name, samples in seconds.items():
        figures |= spread(f"{name}_s", samples)
        figures |= ratio(f"{name}_faster", seconds["plain"], samples)
    return figures


@X1.judged_by(
    "REFUTED if aot_eager is over 1.1x as fast; CONFIRMED if all names are there; else DEPENDS",
    experiments=("backends",),
    without_gpu="Those that work on a CPU.",
)
def aot_eager_gives_no_speedup(measured: Measured) -> Verdict:
    """aot_eager must not be faster, and torch must have all the back ends."""
    figures = measured["backends"]
    tried = [n for n in _TRIED if f"{n}_faster" in figures]
    text = ", ".join(
        f"{n} {ranged(figures, f'{n}_faster')}x, "
        f"peak {change(figures[f'{n}_peak'], figures['plain_peak'])}"
        for n in tried
    )
    failed = [n for n in _TRIED if f"{n}_failed" in figures]
    text += f"; failed here: {', '.join(failed)}" if failed else ""
    if figures.get("aot_eager_faster", 0.0) > 1.1:
        return Verdict(REFUTED, text)
    if figures["gone"]:
        names = ", ".join(figures["gone"])
        return Verdict(DEPENDS, text, f"torch's version: it has no {names}")
    return Verdict(CONFIRMED, text)
