"""Training programs that nobody wrote, each held to what Python says of its tensors at that instant.

Drawn are layers, losses, optimizers and what people do around them. At each pass and step the
program says which blocks are parameters, buffers, `.grad`, `optimizer.state`, a batch, a target,
what autograd has saved (read from the graph, in Python, before every pass), and what it keeps.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from programs.conformance.programs import LOSSES, MODES, Says, saved
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.grouping import role_text
from pytracer.data.schema import CATEGORIES
from tests.tiers import by_tier

WIDTH, OUT = 24, 16


class Lambda(nn.Module):
    """A function of what comes in, and of a linear layer of its own."""

    def __init__(self, function: Callable[[Tensor, nn.Linear], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.inner)


class Cube(torch.autograd.Function):
    """A function of the program's own, in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * x * x * slope


def attention(x: Tensor, inner: nn.Linear) -> Tensor:
    heads = inner(x).view(1, len(x), 3, WIDTH // 3).transpose(1, 2)
    seen = nn.functional.scaled_dot_product_attention(heads, heads, heads)
    return seen.transpose(1, 2).reshape(len(x), WIDTH)


def without_gradient(x: Tensor, inner: nn.Linear) -> Tensor:
    with torch.no_grad():
        scale = inner(x).abs().mean(-1, keepdim=True)
    return x * scale


def gated(x: Tensor, inner: nn.Linear) -> Tensor:
    gate, value = inner(x).chunk(2, dim=-1)
    return torch.cat([gate.sigmoid() * value, value], -1)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "relu": lambda: nn.ReLU(),
    "relu in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "gelu": lambda: nn.GELU(),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "residual": lambda: Lambda(lambda x, inner: x + inner(x).tanh()),
    "in place": lambda: Lambda(lambda x, inner: inner(x).mul_(2).add_(x)),
    "gated": lambda: Lambda(gated),
    "attention": lambda: Lambda(attention),
    "twice the same": lambda: Lambda(lambda x, inner: inner(inner(x).relu())),
    "without gradient": lambda: Lambda(without_gradient),
    "detached": lambda: Lambda(lambda x, inner: x + inner(x).detach()),
    "function in Python": lambda: Lambda(lambda x, inner: Cube.apply(inner(x)) + x),
    "transposed": lambda: Lambda(lambda x, inner: (x.t().contiguous() * 2).t() + inner(x)),
}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.01),
    "momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


# What a loss does to its target before it reads it.
TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda y: y * 2,
    "shifted": lambda y: y - 0.5,
    "copied": lambda y: y.clone(),
    "precise": lambda y: y.double().float(),
    "positive": lambda y: (y > 0).float(),
    "likely": lambda y: y.softmax(-1),
    "stacked": lambda y: torch.cat([y[:1], y[1:]]),
}


def here(work: Callable[[], None]) -> None:
    work()


def in_a_new_thread(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def in_whichever_is_idle() -> Callable[[Callable[[], None]], None]:
    """A worker of three: torch's own order decides, and the program does not know it."""
    pool = ThreadPoolExecutor(3)
    return lambda work: pool.submit(work).result()


@dataclass(frozen=True)
class Plan:
    """What a program does."""

    layers: tuple[str, ...]
    loss: str
    optimizer: str
    steps: int
    micro_batches: int
    rows: int
    batches: str
    recomputes: str
    backward: str
    gradients: str
    keeps: frozenset[str]
    evaluates: str
    autocasts: bool
    clips: bool
    two_models: bool
    taught: bool  # targets are what another model says
    frozen: bool  # the first layer
    averages: bool
    zeroes_first: bool
    to_none: bool
    turns: tuple[str, ...] = ()  # of the target, one after another
    thread: str = "one"  # in which the steps run

    @property
    def is_possible(self) -> bool:
        """Torch refuses the others."""
        once = "reentrant" in self.recomputes or "attention" in self.layers
        if self.backward == "of a penalty" and once:
            return False
        changes_weights = self.gradients in ("a hook drops", "a hook steps")
        return not (changes_weights and self.backward != "once")


plans = st.builds(
    Plan,
    layers=st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=5).map(tuple),
    loss=st.sampled_from([name for name in LOSSES if name != "product"]),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    steps=st.integers(2, 5),
    micro_batches=st.integers(1, 3),
    rows=st.integers(3, 40),
    batches=st.sampled_from(["made", "made from raw ones", "picked", "before"]),
    recomputes=st.sampled_from(
        ["no", "no", "yes", "reentrant", "in the script", "in the script, reentrant"]
    ),
    backward=st.sampled_from(["once", "once", "twice", "of a penalty"]),
    gradients=st.sampled_from(["stay", "stay", "a hook drops", "a hook steps", "a hook looks"]),
    keeps=st.frozensets(st.sampled_from(["hidden", "batches", "outputs", "losses", "unused"])),
    evaluates=st.sampled_from(["no", "no_grad", "inference_mode"]),
    autocasts=st.booleans(),
    clips=st.booleans(),
    two_models=st.booleans(),
    taught=st.booleans(),
    frozen=st.booleans(),
    averages=st.booleans(),
    zeroes_first=st.booleans(),
    to_none=st.booleans(),
    turns=st.lists(st.sampled_from(list(TURNS)), max_size=4).map(tuple),
    thread=st.sampled_from(["one", "one", "a new one per step", "whichever is idle"]),
).filter(lambda plan: plan.is_possible)


class Random(nn.Module):
    """The layers that were drawn, between two that are always there."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH).requires_grad_(not plan.frozen)
        self.layers = nn.Sequential(*(LAYERS[name]() for name in plan.layers))
        self.last = nn.Linear(WIDTH, OUT)
        self.recomputes, self.keeps = plan.recomputes, "hidden" in plan.keeps
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Called as a module, or by the script, which then calls each part itself."""
        h = self.first(x)
        if self.recomputes == "no":
            h = self.layers(h)
        else:
            h = checkpoint(self.layers, h, use_reentrant="reentrant" in self.recomputes)
        if self.keeps:
            self.hidden = h.detach() * 2
        out: Tensor = self.last(h)
        return out


@dataclass
class Program:
    """A plan, run."""

    plan: Plan
    says: Says
    models: list[Random] = field(default_factory=list)
    trained: list[nn.Parameter] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def run(self) -> None:
        plan = self.plan
        self.models = [Random(plan) for _ in range(1 + plan.two_models)]
        self.trained = [p for one in self.models for p in one.parameters() if p.requires_grad]
        self.data = torch.randn(100, WIDTH), torch.randn(100, OUT)
        self.teacher = nn.Linear(WIDTH, OUT)
        own: list[torch.optim.Optimizer] = []
        if plan.gradients == "a hook steps":
            own = [OPTIMIZERS[plan.optimizer]([p]) for p in self.trained]
        self.optimizer = OPTIMIZERS[plan.optimizer](self.trained)
        hooks = []
        for number, parameter in enumerate(self.trained):
            if plan.gradients != "stay":
                hook = self.hook(own[number] if own else None)
                hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        with self.says.traced(*self.models, self.teacher, self.optimizer, *own):
            self.average = [p.detach().clone() for p in self.trained if plan.averages]
            if plan.batches == "picked":
                self.data = torch.randn(100, WIDTH), torch.randn(100, OUT)
            turn = {"one": here, "a new one per step": in_a_new_thread}.get(plan.thread)
            turn = turn or in_whichever_is_idle()
            for _ in range(plan.steps):
                turn(self.step_here)
            self.look()
        for hook in hooks:  # Python never collects a parameter that its own hook holds
            hook.remove()

    def step_here(self) -> None:
        """A step on the program's device; each thread has a default device of its own."""
        with torch.device(self.says.device):
            self.step()

    def hook(self, own: torch.optim.Optimizer | None) -> Callable[[Tensor], None]:
        def dropped(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.says.are("gradients", parameter.grad)
            if self.plan.gradients == "a hook looks":
                return
            if own is not None:
                own.step()
                self.say_state(own)
            else:
                with torch.no_grad():
                    parameter -= 0.01 * parameter.grad
            parameter.grad = None

        return dropped

    # ------------------------------------------------------------ what Python says

    def look(self) -> None:
        """At what anybody can see."""
        for one in self.models:
            self.says.are("weights/parameter", *one.parameters())
            self.says.are("weights/buffer", *one.buffers())
        self.says.are("gradients", *(p.grad for p in self.trained))
        self.say_state(self.optimizer)
        self.says.are("functional", *self.average)

    def say_state(self, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    self.says.are(f"optimizer_state/{key}", value)

    def say_saved(self, loss: Tensor, given: list[Tensor]) -> None:
        """What autograd keeps and nobody else knows is an activation."""
        known = [*given, *self.data, *self.average]
        for one in self.models:
            known += [*one.parameters(), *one.buffers()]
        places = {tensor.untyped_storage().data_ptr() for tensor in known}
        by_size = "category" in self.says.mode
        weights = {p.nbytes for one in self.models for p in one.parameters() if by_size}
        for tensor in saved(loss):
            is_copy = self.plan.autocasts and tensor.dtype == torch.bfloat16
            # Torch shows no hook the numbers in a formula, as `3 * x` has one.
            is_number = tensor.dim() == 0 and tensor.dtype in (torch.int64, torch.float64)
            # Without operators a block of that size may be a copy of a weight (docs/categories.md).
            is_copy |= self.plan.autocasts and 2 * tensor.nbytes in weights
            other = is_copy or (is_number and "hooks" in self.says.mode)
            if tensor.untyped_storage().data_ptr() not in places and not other:
                self.says.are("activations", tensor)

    # ------------------------------------------------------------ what the program does

    def step(self) -> None:
        plan = self.plan
        if plan.zeroes_first:
            self.optimizer.zero_grad(set_to_none=plan.to_none)
        for _ in range(plan.micro_batches):
            self.train()
        if plan.clips and any(p.grad is not None for p in self.trained):
            nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.look()
        self.optimizer.step()
        self.look()
        if not plan.zeroes_first:
            self.optimizer.zero_grad(set_to_none=plan.to_none)
        with torch.no_grad():
            for mean, parameter in zip(self.average, self.trained, strict=bool(self.average)):
                mean.lerp_(parameter, 0.1)
        if plan.evaluates != "no":
            self.evaluate()

    def batch(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        rows = self.plan.rows
        if self.plan.batches == "before":
            self.says.are("inputs/batch", self.data[0])
            if not self.plan.turns:  # only a label tells of what was there before the trace
                self.says.are("inputs/target", self.data[1])
            return self.data[0][:rows], self.data[1][:rows], []
        if self.plan.batches == "picked":
            rows_of = torch.randint(0, 100, (rows,))
            self.says.are("functional", *self.data)
            return self.data[0][rows_of], self.data[1][rows_of], []
        raw, y = torch.randn(rows, WIDTH), torch.randn(rows, OUT)
        if self.plan.batches == "made":
            return raw, y, []
        self.says.are("inputs/raw", raw)
        return raw * 2, y, [raw]

    def train(self) -> None:
        plan, says = self.plan, self.says
        x, y, raw = self.batch()
        if plan.taught and plan.batches == "made":
            with torch.no_grad():
                y = self.teacher(x)
        if plan.batches != "before":
            says.are("inputs/batch", x)
            says.are("inputs" if plan.turns else "inputs/target", y)
        if "unused" in plan.keeps:
            self.kept.append(torch.randn(plan.rows, OUT))
            says.are("functional", self.kept[-1])
        if plan.backward == "of a penalty":
            x = x.detach().requires_grad_()
        autocast = torch.autocast(says.device, torch.bfloat16) if plan.autocasts else nullcontext()
        with autocast:
            in_script = "script" in plan.recomputes
            outs = [one.forward(x) if in_script else one(x) for one in self.models]
        out = sum(outs[1:], outs[0]).float()
        says.are("activations/held", *(one.hidden for one in self.models))
        target = y
        for name in plan.turns:
            target = TURNS[name](target)
        loss = LOSSES[plan.loss](out, target)
        if plan.backward == "of a penalty":
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
            del slope
        self.say_saved(loss, [x, y, *raw])
        loss.backward(retain_graph=plan.backward == "twice")
        if plan.backward == "twice":
            loss.backward()
        if "batches" in plan.keeps:
            self.kept.append((x, y))
        if "outputs" in plan.keeps:
            self.kept.append(out.detach())
            says.are("activations", out)
        if "losses" in plan.keeps:
            self.kept.append(loss)

    def evaluate(self) -> None:
        model = self.models[0].eval()
        without = torch.no_grad if self.plan.evaluates == "no_grad" else torch.inference_mode
        labels = torch.randn(self.plan.rows, OUT)
        with without():
            self.kept.append(model(torch.randn(self.plan.rows, WIDTH)))
            self.kept.append(float((self.kept[-1] - labels).square().mean()))
        self.says.are("functional/output", self.kept[-2])
        self.kept.append(labels)
        self.says.are("inputs/target", labels)
        model.train()


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
        Program(plan, says).run()
    assert says.wrong() == []


# A checkpoint of what needs no gradient warns that it is of no use.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


def drawn(examples: int) -> Any:
    slow = [HealthCheck.too_slow]
    return settings(max_examples=examples, deadline=None, suppress_health_check=slow)


@drawn(by_tier(20, 40, 2000))
@given(plan=plans, mode=st.sampled_from(list(MODES)))
def test_any_programs_tensors_are_what_python_says_they_are(plan: Plan, mode: str) -> None:
    hold(plan, mode, "cpu")


def words(plan: Plan, mode: str) -> list[tuple[int, str, str]]:
    """The size and word of each allocation in order; none for what is alive at the end."""
    torch.manual_seed(0)
    says = Says(mode, "cpu")
    Program(plan, says).run()
    assert says.data is not None
    found = allocations(says.data)
    rows = zip(found.requested_bytes, found.category, found.role, found.end, strict=True)
    return [
        (int(size), CATEGORIES[category] if end >= 0 else "", role_text(says.data, int(role)))
        for size, category, role, end in rows
    ]


@drawn(by_tier(10, 20, 1000))
@given(plan=plans, mode=st.sampled_from(list(MODES)))
def test_a_longer_trace_says_the_same_of_its_first_steps(plan: Plan, mode: str) -> None:
    short, long = words(plan, mode), words(replace(plan, steps=2 * plan.steps), mode)
    for one, other in zip(short, long, strict=False):
        assert one[0] == other[0]
        assert one == other or one[1] in ("", "unknown")


@pytest.mark.cuda
@drawn(by_tier(20, 40, 500))
@given(plan=plans, mode=st.sampled_from(list(MODES)))
def test_any_programs_tensors_are_what_python_says_they_are_on_a_gpu(plan: Plan, mode: str) -> None:
    hold(plan, mode, "cuda")
