"""Optimizers that keep their state in odd places, held against what is reachable from them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytracer import trace

WIDTH = 128
SIZE = WIDTH * WIDTH * 4
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"detail": "category"},
    {"saved_tensors": "hooks"},
    {"stacks": True},
)


@dataclasses.dataclass
class Factors:
    """As Shampoo keeps its factors."""

    matrices: tuple[Tensor, ...]
    step: int = 0


@dataclasses.dataclass(slots=True)
class InSlots:
    """Without a dictionary of attributes."""

    matrices: tuple[Tensor, ...]


class Plain:
    """An object of a class that nobody knows."""

    def __init__(self, matrices: tuple[Tensor, ...]) -> None:
        self.inner = {"matrices": [*matrices]}


class Shampoo(torch.optim.Optimizer):
    """Makes two factors for each parameter, and keeps them in an object."""

    def __init__(self, parameters: Any, kind: Callable[[tuple[Tensor, ...]], Any]) -> None:
        super().__init__(parameters, {})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["factors"] = self.kind((torch.eye(WIDTH), torch.eye(WIDTH)))
                p -= 0.01 * p.grad


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization: two passes for each step, and no step of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, 0.01)

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.detach().clone()
                p.add_(p.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old_p"])
        self.base.step()


class Lookahead:
    """Is no Optimizer, and keeps slow weights in a state of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state.setdefault(p, {}).setdefault("slow", p.detach().clone())
                slow.lerp_(p, 0.5)


def trained(model: nn.Module, step: Callable[[], None], **options: Any) -> dict[str, int]:
    """The bytes of each category at the end of the trace."""
    with trace(devices="cpu", table=False, **options) as t:
        for _ in range(3):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            step()
            model.zero_grad()
    return {name: int(amount) for name, amount in t.summary().at_end.items() if amount}


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("kind", [tuple, list, Factors, InSlots, Plain])
def test_state_in_an_object_is_the_optimizers(kind: Any, mode: dict[str, Any]) -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = Shampoo(model.parameters(), kind)
    at_end = trained(model, optimizer.step, **mode)
    assert at_end == {"weights": SIZE, "optimizer_state": 2 * SIZE}


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_old_weights_of_two_passes_are_state_from_the_first_step_on(mode: dict[str, Any]) -> None:
    """Also where the program names neither the model nor the optimizer."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = Sam(model.parameters())

    def step() -> None:
        optimizer.first_step()
        model.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.second_step()

    assert trained(model, step, **mode) == {"weights": SIZE, "optimizer_state": SIZE}


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_slow_weights_of_a_wrapper_are_state(mode: dict[str, Any]) -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), 0.01))
    at_end = trained(model, optimizer.step, **mode)
    assert at_end == {"weights": SIZE, "optimizer_state": SIZE}


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("inside", [False, True])
def test_a_main_gradient_is_a_gradient(inside: bool, mode: dict[str, Any]) -> None:
    """As in Megatron-LM: float32 gradients lie in one buffer for all parameters."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def add_buffer() -> None:
        model.weight.main_grad = torch.zeros(SIZE // 4).view(WIDTH, WIDTH)

    def step() -> None:
        if not hasattr(model.weight, "main_grad"):
            add_buffer()
        model.weight.main_grad.add_(model.weight.grad)
        optimizer.step()

    if not inside:
        add_buffer()
    assert trained(model, step, **mode) == {"weights": SIZE, "gradients": SIZE}
