"""What an operator returns takes the memory that it really takes, also where fake tensors differ."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pytracer

LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "mse": functional.mse_loss,
    "smooth l1": functional.smooth_l1_loss,
    "soft margin": functional.soft_margin_loss,
    "binary cross entropy": lambda x, y, **options: functional.binary_cross_entropy(
        torch.sigmoid(x), torch.sigmoid(y), **options
    ),
    "l1": functional.l1_loss,
    "huber": functional.huber_loss,
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_reduced_loss_keeps_what_it_really_keeps(name: str, reduction: str) -> None:
    """Some keep the storage of all elements, on every device, though their shape is one number."""

    def bytes_of_loss(device: str) -> int:
        x, y = torch.ones(32, 8, device=device), torch.ones(32, 8, device=device)
        return LOSSES[name](x, y, reduction=reduction).untyped_storage().nbytes()

    with pytracer.imagine("H100"):
        imagined = bytes_of_loss("cuda")
    assert imagined == bytes_of_loss("cpu")


def test_a_deep_copy_has_its_own_memory_once() -> None:
    """A teacher, an average, a target network: neither a view nor a call takes the weights again."""
    with pytracer.imagine("H100") as t:
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).to("cuda")
        model.steps = torch.zeros(1000, device="cuda")
        model.window = model.steps[:10]
        before = torch.cuda.memory_allocated()
        twin = copy.deepcopy(model)
        own = torch.cuda.memory_allocated() - before
        weights = [one.untyped_storage() for one in twin.parameters()]
        with torch.no_grad():
            twin(torch.empty(4, 64, device="cuda"))
    assert own == before
    assert twin.steps.untyped_storage() is twin.window.untyped_storage()
    assert not {id(one) for one in weights} & {id(p.untyped_storage()) for p in model.parameters()}
    assert isinstance(twin[0].weight, nn.Parameter)
    assert twin[0].weight.detach().untyped_storage() is weights[0]
    sizes = t.allocations()["requested_bytes"].tolist()
    assert sizes.count(4 * 64 * 64) == 2, "the model's and its twin's"


def test_a_checkpoint_on_the_host_keeps_the_generators_state() -> None:
    """As the real one does; on a card it lies on the host."""
    from torch.utils.checkpoint import checkpoint

    def run(device: str) -> None:
        x = torch.ones(100, requires_grad=True, device=device)
        checkpoint(torch.sin, x, use_reentrant=False).sum().backward()

    def states(t: Any) -> int:
        return t.allocations()["requested_bytes"].tolist().count(torch.get_rng_state().nbytes)

    with pytracer.trace(devices="cpu", table=False) as real:
        run("cpu")
    with pytracer.imagine("cpu") as imagined:
        run("cpu")
    with pytracer.imagine("H100") as card:
        run("cuda")
    assert states(real) == states(imagined) > 0
    assert states(card) == 0
