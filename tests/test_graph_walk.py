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
        with trace(model, saved_tensors=mode, devices=device, report=False) as t:
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
    with trace(model, devices="cpu", report=False) as t:
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


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> "Pretended":
    return Pretended(monkeypatch)


class Pretended:
    """A clock, and walks that take what they are told to: of the clock, and of this thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.own = 0.0
        self.takes, self.own_part = 0.002, 1.0
        self.walked: list[float] = []
        monkeypatch.setattr(graph.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(graph.time, "thread_time", lambda: self.own)
        monkeypatch.setattr(graph, "saved_tensors", self.walk)
        self.walks = graph.GraphWalks()

    def walk(self, outputs: Any) -> list[torch.Tensor]:
        self.walked.append(self.now)
        self.now += self.takes
        self.own += self.takes * self.own_part
        return []


@pytest.mark.parametrize("steps", [True, False], ids=["with an optimizer", "without"])
@pytest.mark.parametrize("passes", [1, 3])
def test_after_the_first_graphs_walks_keep_to_their_share_of_the_time(
    pretended: Pretended, passes: int, steps: bool
) -> None:
    while pretended.now < 20:
        for _ in range(passes):
            pretended.walks.before_backward(())
        if steps:
            pretended.walks.stepped()
        pretended.now += 0.010  # the rest of the step
    assert len(pretended.walked) > 5 * passes
    assert pretended.walked[1] < 0.1
    assert 0.002 * len(pretended.walked) <= 0.01 * pretended.now


def test_all_passes_of_a_step_are_walked_or_none(pretended: Pretended) -> None:
    """As of a penalty on gradients: the first makes gradients, the second goes through those."""
    of_step: list[int] = []
    for _ in range(300):
        before = len(pretended.walked)
        for _ in range(3):
            pretended.walks.before_backward(())
        pretended.walks.stepped()
        of_step.append(len(pretended.walked) - before)
        pretended.now += 0.030
    assert of_step[:2] == [3, 3]
    assert set(of_step) == {0, 3}


def test_what_others_on_the_machine_take_is_not_held_against_a_walk(pretended: Pretended) -> None:
    pretended.takes, pretended.own_part = 0.5, 0.0001
    for _ in range(20):
        pretended.walks.before_backward(())
        pretended.walks.stepped()
        pretended.now += 0.03
    assert len(pretended.walked) == 20


def test_what_comes_now_and_then_is_walked_when_it_comes(pretended: Pretended) -> None:
    """A penalty in each eighth step begins otherwise than the loss: the budget is not asked."""
    x = torch.ones(3, requires_grad=True)
    loss, penalty = x.sum(), x.exp().square().mean()
    pretended.takes = 10.0  # no time is left after one
    seen: list[torch.Tensor] = []
    pretended.walks.before_backward((loss,))
    for step in range(1, 40):
        pretended.walks.stepped()
        before = len(pretended.walked)
        pretended.walks.before_backward((penalty if step % 8 == 7 else loss,))
        seen += [penalty if step % 8 == 7 else loss] * (len(pretended.walked) - before)
        pretended.now += 0.03
    assert [one is penalty for one in seen] == [False, True, True]
