"""Memory that variables keep: a sum of losses, names of intermediates, a pass without no_grad."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pytracer.capture.device_memory import read_host
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
)
from pytracer.lab.claims.experiment import Lab, experiment
from pytracer.lab.claims.subjects import models

# ---------------------------------------------------------------------- L1: a sum of losses

L1 = Statement(
    "L1",
    sources=("S3",),
    quote="total_loss += loss grows over 10 000 steps",
)

# A program of its own: the trace blames the program's lines, never the lines of pytracer.
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
    """`total_loss += loss`, `.item()` and `.detach()`, with and without a backward pass.

    The trace sees the tensors. After backward only autograd's nodes are left. They are host memory
    that no allocator knows, so the experiment also reads the memory of the process.
    """
    net = models.feed_forward(32, 2).to(lab.device)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    program: dict[str, Any] = {}
    exec(compile(_LOOP, "training_loop.py", "exec"), program)

    def summed(label: str, steps: int, backward: bool) -> Any:
        def batch() -> Tensor:
            return torch.randn(8, 32, device=lab.device)

        return program["loop"](net, optimizer, batch, steps, backward, _ADDS[label])

    figures: dict[str, Any] = {}
    # This comes first: later the process has freed memory, and nodes in it would not be seen.
    for label in ("item", "tensor"):
        summed(label, 200, True)
        before = read_host().get("anonymous", 0)
        kept = summed(label, 3000, True)
        figures[f"host_{label}_growth"] = (read_host().get("anonymous", 0) - before) / 3000
        del kept
    for backward, where in ((True, "after_backward"), (False, "no_backward")):
        for label in _ADDS:
            name = f"{where}_{label}"
            with lab.traced(name, net, optimizer, stacks=True) as t:
                kept = summed(label, 30, backward)
            growths = [row for row in t.findings().itertuples() if row.kind == "growth"]
            figures[f"{name}_growth"] = sum(row.bytes for row in growths)
            figures[f"{name}_line"] = growths[0].line if growths else ""
            del kept
    return figures


@L1.judged_by(
    "REFUTED if tensors do not grow with a line to blame where backward does not run, or do with "
    ".item() and .detach(); CONFIRMED if also where backward runs; else DEPENDS",
    experiments=("total_loss",),
    without_gpu=EXACT,
)
def a_sum_of_losses_grows(measured: Measured) -> Verdict:
    """Tensors must grow with the plain sum, and must not grow with .item() or .detach()."""
    figures = measured["total_loss"]
    after = figures["after_backward_tensor_growth"]
    without = figures["no_backward_tensor_growth"]
    ends = all(
        figures[f"{where}_{label}_growth"] <= 0
        for where in ("after_backward", "no_backward")
        for label in ("item", "detach")
    )
    text = (
        f"tensors grow {after:,} B per step where backward has run and {without:,} B where it has "
        f"not ({figures['no_backward_tensor_line'] or 'no line'}), "
        f"{'0' if ends else 'more than 0'} B with .item() or .detach(); autograd's nodes add "
        f"{figures['host_tensor_growth']:,.0f} B of host memory per step, with .item() "
        f"{figures['host_item_growth']:,.0f} B"
    )
    if not (without > 0 and figures["no_backward_tensor_line"] and ends):
        return Verdict(REFUTED, text)
    if after > 0:
        return Verdict(CONFIRMED, text)
    return Verdict(DEPENDS, text, "backward: it frees what the graph holds, all but its nodes")


# ---------------------------------------------------------------------- L2: names of intermediates

L2 = Statement(
    "L2",
    sources=("S3",),
    quote="a name for every intermediate costs memory; del and local scopes free it",
)


@experiment("names_of_intermediates")
def names_of_intermediates(lab: Lab) -> dict[str, Any]:
    """A chain of results, each with its own name or all with one, with and without autograd."""
    rows, width = lab.pick((1024, 256), (16384, 4096))
    layer = nn.Linear(width, width).to(lab.device)
    x = torch.randn(rows, width, device=lab.device)
    figures: dict[str, Any] = {"intermediate_bytes": rows * width * 4, "intermediates": 6}
    for label, record in (("recording", True), ("not_recording", False)):
        for own_names in (True, False):
            name = f"{label}_{'own_names' if own_names else 'one_name'}"
            with lab.traced(name, layer), torch.set_grad_enabled(record):
                _chain(layer, x, figures["intermediates"], own_names)
            figures[name] = lab.traces[name]["peak_bytes"]
    return figures


def _chain(layer: nn.Module, x: Tensor, count: int, own_names: bool) -> Tensor:
    """Sigmoids. Each saves its result for the backward."""
    names = []
    value: Tensor = layer(x)
    for _ in range(count):
        value = torch.sigmoid(value)
        if own_names:
            names.append(value)
    return value


@L2.judged_by(
    "CONFIRMED if one name instead of many frees intermediates with and without autograd; "
    "DEPENDS if only without; else REFUTED",
    experiments=("names_of_intermediates",),
    without_gpu=EXACT,
)
def names_keep_intermediates(measured: Measured) -> Verdict:
    """One name must save at least one intermediate."""
    figures = measured["names_of_intermediates"]
    size = figures["intermediate_bytes"]
    saved = {
        label: (figures[f"{label}_own_names"] - figures[f"{label}_one_name"]) / size
        for label in ("recording", "not_recording")
    }
    text = (
        f"one name instead of {figures['intermediates']} frees {saved['recording']:.1f} "
        f"intermediates while autograd records, {saved['not_recording']:.1f} under no_grad"
    )
    frees = {label: amount >= 1 for label, amount in saved.items()}
    if all(frees.values()):
        return Verdict(CONFIRMED, text)
    if frees["not_recording"]:
        return Verdict(
            DEPENDS, text, "autograd: in training it keeps them whatever they are called"
        )
    return Verdict(REFUTED, text)


# ---------------------------------------------------------------------- L3: no_grad

L3 = Statement(
    "L3",
    sources=("S3",),
    quote="torch.no_grad() in validation saves memory",
)


@experiment("validation")
def validation(lab: Lab) -> dict[str, Any]:
    """A forward pass with and without no_grad."""
    figures: dict[str, Any] = {}
    width = lab.pick(512, 4096)
    net = models.feed_forward(width, 6).to(lab.device)
    for label, record in (("recording", True), ("no_grad", False)):
        with lab.traced(label, net), torch.set_grad_enabled(record):
            loss = net(torch.randn(64, width, device=lab.device)).pow(2).mean()
        figures[f"{label}_activations"] = lab.traces[label]["categories"]["activations"]["most"]
        figures[f"{label}_peak"] = lab.traces[label]["peak_bytes"]
        del loss
    return figures


@L3.judged_by(
    "CONFIRMED if there are activations without it and none with it; else REFUTED",
    experiments=("validation",),
    without_gpu=EXACT,
)
def no_grad_saves_activations(measured: Measured) -> Verdict:
    """A recording pass must keep activations, and a pass under no_grad must keep no byte of them."""
    figures = measured["validation"]
    text = (
        f"activations {mib(figures['recording_activations'])} while recording, "
        f"{figures['no_grad_activations']:,} B under no_grad; peak "
        f"{change(figures['no_grad_peak'], figures['recording_peak'])}"
    )
    kept = figures["recording_activations"] > 0
    return confirmed_if(kept and figures["no_grad_activations"] == 0, text)
