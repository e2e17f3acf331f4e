"""Reading the graph before backward tells what saved-tensor hooks tell, and changes nothing."""

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytracer import trace
from pytracer.capture import graph
from pytracer.data._native import C


class Cube(torch.autograd.Function):
    """Saves its input and its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x**3
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, _ = ctx.saved_tensors
        return 3 * x**2 * gradient


def a_variable_keeps_what_is_saved(model: nn.Module) -> None:
    hidden = model(torch.ones(16, 32))
    loss = nn.functional.cross_entropy(hidden, torch.zeros(16, dtype=torch.long))
    loss.backward()


def the_graph_is_kept(model: nn.Module) -> None:
    loss = model(torch.ones(16, 32)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def the_gradient_has_a_gradient(model: nn.Module) -> None:
    x = torch.ones(16, 32, requires_grad=True)
    (first,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    first.square().sum().backward()


def a_function_of_their_own(model: nn.Module) -> None:
    Cube.apply(model(torch.ones(16, 32))).sum().backward()


def lists_of_tensors_are_saved(model: nn.Module) -> None:
    parts = [model(torch.ones(16, 32)) for _ in range(3)]
    torch.einsum("ij,ij->", torch.cat(parts), torch.stack(parts).flatten(0, 1)).backward()


def checkpointed(model: nn.Module) -> None:
    kept = checkpoint(model, torch.ones(16, 32), use_reentrant=False)
    kept.square().sum().backward()


class Wasteful(torch.autograd.Function):
    """Makes a graph in its backward that leads nowhere, as some of torch's own do on CUDA."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gradient.exp().mul(x).sum()
        return gradient * x


def a_gradient_has_a_branch_that_dies(model: nn.Module) -> None:
    x = torch.ones(16, 32, requires_grad=True)
    out = Wasteful.apply(model(x)).tanh().sum()
    (first,) = torch.autograd.grad(out, x, create_graph=True)
    first.square().sum().backward()


def recurrent(model: nn.Module) -> None:
    out, _ = nn.LSTM(32, 8)(torch.ones(5, 16, 32))
    (out.sum() + model(torch.ones(16, 32)).sum()).backward()


PROGRAMS = (
    a_variable_keeps_what_is_saved,
    the_graph_is_kept,
    the_gradient_has_a_gradient,
    a_gradient_has_a_branch_that_dies,
    a_function_of_their_own,
    lists_of_tensors_are_saved,
    checkpointed,
    recurrent,
)


def what_is_kept(program: Callable[[nn.Module], None], mode: Any, device: str) -> pd.Series:
    """Bytes by what they are for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 10))
    with torch.device(device):
        model.to(device)
        program(model)  # what is made only once (workspaces, caches) is made here
        model.zero_grad()
        with trace(model, saved_tensors=mode, devices=device, table=False) as t:
            program(model)
    assert t.health().empty
    kept = t.allocations().query("category in ['activations', 'inputs', 'weights', 'gradients']")
    return kept.groupby(["category", "role", "op"], observed=True)["requested_bytes"].sum()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_auto_says_what_hooks_say(program: Callable[[nn.Module], None], device: str) -> None:
    pd.testing.assert_series_equal(
        what_is_kept(program, "auto", device), what_is_kept(program, "hooks", device)
    )


def test_what_a_variable_holds_and_autograd_does_not_need_is_held() -> None:
    model = nn.Linear(1000, 500)
    with trace(model, devices="cpu", table=False) as t:
        hidden = model(torch.ones(200, 1000))
        needless = hidden * 2  # whose backward needs the number alone
        loss = needless.sum()
        loss.backward()
    sizes = (
        t.allocations()
        .query("category == 'activations'")
        .groupby("role", observed=True)
        .requested_bytes.sum()
    )

    assert sizes["held"] >= 2 * 200 * 500 * 4  # both results
    assert sizes.get("saved", 0) <= 8  # the number 2


def test_no_hook_of_the_programs_own_is_called_by_looking() -> None:
    called: list[str] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        called.append("pack")
        return tensor

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        called.append("unpack")
        return packed

    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = (x * x).exp().sum()
    before = len(called)
    found = list(graph.saved_tensors(loss))

    assert len(found) == before == len(called)


def test_a_tensor_changed_in_place_is_read_and_still_refused_by_autograd() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    loss = y.sum()
    y.mul_(2)

    assert len(list(graph.saved_tensors(loss))) == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_that_was_used_up_has_nothing_left() -> None:
    x = torch.ones(3, requires_grad=True)
    loss = x.exp().sum()
    loss.backward()

    assert list(graph.saved_tensors(loss)) == []


def test_a_structure_is_walked_in_its_first_passes_and_then_at_powers_of_four() -> None:
    walks, walked = C.GraphWalks(), []
    for step in range(1, 300):
        walked += [step] if walks.is_due(7) else []
        walks.stepped()
    assert walked == [1, 2, 16, 64, 256]


def test_all_passes_of_a_step_are_walked_or_none() -> None:
    """As of a penalty on gradients: the first makes gradients, the second goes through those."""
    walks = C.GraphWalks()
    of_step: list[list[int]] = []
    for _ in range(300):
        passes = enumerate((1, 2, 2))
        of_step.append([turn for turn, structure in passes if walks.is_due(structure)])
        walks.stepped()
    assert of_step[:2] == [[0, 1, 2]] * 2
    assert all(turns in ([], [2], [1, 2], [0, 1, 2]) for turns in of_step)  # from one on
    assert sum(len(turns) for turns in of_step) < 25


def test_what_comes_now_and_then_is_walked_when_it_comes() -> None:
    """A penalty in each eighth step has another graph than the loss."""
    walks, walked = C.GraphWalks(), []
    for step in range(1, 16):
        walked += [step] if walks.is_due(1 if step % 8 == 7 else 0) else []
        walks.stepped()
    assert walked == [1, 2, 7, 15]


def structure_of(program: Callable[[], torch.Tensor]) -> int:
    """As the engine's call tells it."""
    return C.structure_of((program(),))


def test_a_structure_is_of_nodes_and_edges_and_not_of_sizes() -> None:
    w = torch.ones(3, requires_grad=True)
    longer = torch.ones(5, requires_grad=True)

    assert structure_of(lambda: w.exp().sum()) == structure_of(lambda: longer.exp().sum())
    assert structure_of(lambda: w.exp().sum()) != structure_of(lambda: w.sin().sum())
    assert structure_of(lambda: (w * w).sum()) != structure_of(lambda: (w * 2).sum())
    shared = structure_of(lambda: (lambda y: (y * y).sum())(w.exp()))
    assert shared != structure_of(lambda: (w.exp() * w.exp()).sum())
