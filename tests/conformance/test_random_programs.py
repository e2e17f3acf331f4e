"""Training programs that nobody wrote, each held to what Python says of its tensors at that instant."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.conformance.programs import LOSSES, MODES, Says
from tests.tiers import by_tier

WIDTH, OUT = 24, 16

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "relu": lambda: nn.ReLU(),
    "relu in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "gelu": lambda: nn.GELU(),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.01),
    "momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
}


@dataclass(frozen=True)
class Plan:
    """What a program does."""

    layers: tuple[str, ...]
    loss: str
    optimizer: str
    steps: int
    micro_batches: int
    rows: int
    raw: bool  # batches are made of raw ones
    recomputes: bool
    keeps_hidden: bool
    keeps_batches: bool
    keeps_outputs: bool
    evaluates: bool
    clips: bool
    drops_gradients: bool  # a hook steps with each and lets it go
    two_models: bool
    to_none: bool


plans = st.builds(
    Plan,
    layers=st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=4).map(tuple),
    loss=st.sampled_from([name for name in LOSSES if name != "product"]),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    steps=st.integers(2, 5),
    micro_batches=st.integers(1, 3),
    rows=st.integers(3, 40),
    raw=st.booleans(),
    recomputes=st.booleans(),
    keeps_hidden=st.booleans(),
    keeps_batches=st.booleans(),
    keeps_outputs=st.booleans(),
    evaluates=st.booleans(),
    clips=st.booleans(),
    drops_gradients=st.booleans(),
    two_models=st.booleans(),
    to_none=st.booleans(),
)


class Random(nn.Module):
    """The layers that were drawn, between two that are always there."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(*(LAYERS[name]() for name in plan.layers))
        self.last = nn.Linear(WIDTH, OUT)
        self.recomputes, self.keeps = plan.recomputes, plan.keeps_hidden
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = checkpoint(self.layers, h, use_reentrant=False) if self.recomputes else self.layers(h)
        if self.keeps:
            self.hidden = h.detach() * 2
        out: Tensor = self.last(h)
        return out


def run_plan(plan: Plan, says: Says) -> None:
    model = Random(plan)
    second = Random(plan) if plan.two_models else None
    models = [one for one in (model, second) if one is not None]
    trained = [p for one in models for p in one.parameters()]
    optimizer = OPTIMIZERS[plan.optimizer](trained)
    if plan.drops_gradients:
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(dropping(says))
    kept: list[Any] = []
    with says.traced(*models, optimizer):
        for _ in range(plan.steps):
            for _ in range(plan.micro_batches):
                train(plan, model, second, says, kept)
            gradients = [p.grad for p in trained]
            says.are("gradients", *gradients)
            if plan.clips and any(g is not None for g in gradients):
                nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        says.are(f"optimizer_state/{key}", value)
                says.are("weights/parameter", parameter)
            optimizer.zero_grad(set_to_none=plan.to_none)
            if plan.evaluates:
                model.eval()
                with torch.no_grad():
                    kept.append(model(torch.randn(plan.rows, WIDTH)))
                says.are("functional/output", kept[-1])
                model.train()
        for one in models:
            says.are("weights", *one.parameters(), *one.buffers())


def train(plan: Plan, model: nn.Module, second: nn.Module | None, says: Says, kept: Any) -> None:
    raw = torch.randn(plan.rows, WIDTH)
    x = raw * 2 if plan.raw else raw
    y = torch.randn(plan.rows, OUT)
    says.are("inputs/batch", x)
    says.are("inputs/target", y)
    if plan.raw:
        says.are("inputs/raw", raw)
    out = model(x)
    if second is not None:
        out = out + second(x)
    if isinstance(model.hidden, Tensor):
        says.are("activations/held", model.hidden)
    LOSSES[plan.loss](out, y).backward()
    if plan.keeps_batches:
        kept.append((x, y))
    if plan.keeps_outputs:
        kept.append(out.detach())
        says.are("activations", out)


def dropping(says: Says) -> Callable[[Tensor], None]:
    def drop(parameter: Tensor) -> None:
        assert parameter.grad is not None
        says.are("gradients", parameter.grad)
        with torch.no_grad():
            parameter -= 0.01 * parameter.grad
        parameter.grad = None

    return drop


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def hold(plan: Plan, mode: str, device: str) -> None:
    torch.manual_seed(0)
    says = Says(mode, device)
    with torch.device(device):
        run_plan(plan, says)
    assert says.wrong() == []


def drawn(examples: int) -> Any:
    slow = [HealthCheck.too_slow]
    return settings(max_examples=examples, deadline=None, suppress_health_check=slow)


@drawn(by_tier(20, 100, 2000))
@given(plan=plans, mode=st.sampled_from(list(MODES)))
def test_any_programs_tensors_are_what_python_says_they_are(plan: Plan, mode: str) -> None:
    hold(plan, mode, "cpu")


@pytest.mark.cuda
@drawn(by_tier(20, 100, 500))
@given(plan=plans, mode=st.sampled_from(list(MODES)))
def test_any_programs_tensors_are_what_python_says_they_are_on_a_gpu(plan: Plan, mode: str) -> None:
    hold(plan, mode, "cuda")
