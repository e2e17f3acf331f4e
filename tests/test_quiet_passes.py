"""RecordFunction is off in a backward pass that runs nothing but torch's own nodes.

The recording must say the same of it, and a pass that runs more is never quiet: not the first of its
kind, and not the first after a thousand others.
"""

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

from programs.conformance.models import MODELS, Batch, Recipe
from pytracer import trace
from pytracer.data._native import C

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
DETAILS = ["op", "category"]
STEPS = 5
# What a row says, but for when, where in memory and how often.
SAYS = ["requested_bytes", "phase", "category", "role", "module", "op", "forward_module"]
SAYS += ["forward_op", "free_phase", "pool"]


def traced(
    step: Callable[[], object], *targets: Any, steps: int = STEPS, detail: str = "op"
) -> tuple[Any, int]:
    with trace(*targets, table=False, detail=detail) as t:
        for _ in range(steps):
            step()
        quiet = C.status()["quiet_passes"]
    return t, quiet


def said_of(frame: pd.DataFrame, step: int, *, but: str = "") -> dict[Any, int]:
    rows = (
        frame[frame.step == step][[name for name in SAYS if name != but]].astype(object).fillna("")
    )
    counts: dict[Any, int] = rows.value_counts(sort=False).to_dict()
    return counts


def small(device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(device)
    return model, torch.optim.AdamW(model.parameters())


def made(name: str, device: str) -> tuple[Recipe, nn.Module, torch.optim.Optimizer, Batch]:
    """A small model of this name. It learns nothing, so that experts get the same words each time."""
    torch.manual_seed(0)
    with torch.device(device):
        recipe = MODELS[name]("tiny")
    model = recipe.model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0, weight_decay=0)
    torch.manual_seed(1)
    return recipe, model, optimizer, recipe.batch(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt2", "t5", "experts"])
def test_a_pass_with_a_hook_says_what_it_says_when_torch_tells_of_every_operator(
    name: str, device: str
) -> None:
    """Inside a node that runs no Python, torch skips the operators unless somebody else listens."""
    recipe, model, optimizer, batch = made(name, device)

    def step() -> None:
        optimizer.zero_grad()
        loss = recipe.loss(model(*batch.inputs), batch.target)
        loss.register_hook(lambda gradient: gradient * 1)
        loss.backward()
        optimizer.step()

    step()
    t, quiet = traced(step, model, optimizer)
    assert quiet == 0
    C.listen_to_operators(True)
    try:
        told, _ = traced(step, model, optimizer)
    finally:
        C.listen_to_operators(False)
    for number in range(1, STEPS - 1):
        assert said_of(t.allocations(), number) == said_of(told.allocations(), number)


class TestDataParallel:
    """DistributedDataParallel's hooks are torch's own, but for one that sends its buckets."""

    @pytest.mark.parametrize("views", [False, True], ids=["buckets", "views"])
    def test_its_quiet_pass_says_what_one_with_operators_says(
        self, views: bool, group: None
    ) -> None:
        model, _ = small()
        parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
        optimizer = torch.optim.AdamW(parallel.parameters())
        steps = iter(range(STEPS + 2))

        def step() -> None:
            optimizer.zero_grad()
            loss = parallel(torch.randn(8, 64)).square().mean()
            if next(steps) <= 3:  # with a hook, which may run anything
                loss.register_hook(lambda gradient: None)
            loss.backward()
            optimizer.step()

        step()
        step()  # it makes new buckets
        t, quiet = traced(step, parallel, optimizer)
        assert quiet == STEPS - 2
        frame = t.allocations()
        # What a hook makes counts as its node's, as all that a node makes does.
        with_operators = said_of(frame, 1, but="op")
        assert with_operators
        for later in range(2, STEPS - 1):
            assert said_of(frame, later, but="op") == with_operators

    def test_no_pass_is_quiet_with_a_hook_that_sends_its_buckets(self, group: None) -> None:
        parallel = nn.parallel.DistributedDataParallel(small()[0])
        made: list[torch.Tensor] = []

        def send(_: object, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
            made.append(bucket.buffer().clone())
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        def step() -> None:
            parallel(torch.randn(8, 64)).sum().backward()

        step()
        parallel.register_comm_hook(None, send)
        _, quiet = traced(step, parallel)
        assert len(made) == STEPS
        assert quiet == 0

    def test_a_wrapper_that_is_not_known_is_not_trusted(self, group: None) -> None:
        """Its module is called and it is not: nobody can say whether it has such a hook."""
        model, _ = small()
        parallel = nn.parallel.DistributedDataParallel(model)
        parallel(torch.randn(8, 64)).sum().backward()
        _, quiet = traced(lambda: model(torch.randn(8, 64)).sum().backward(), model)
        assert quiet == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", ["mlp", "resnet", "lstm", "gpt2", "t5", "experts", "recommender"])
def test_a_quiet_pass_says_what_one_with_operators_says(name: str, cast: bool, device: str) -> None:
    recipe, model, optimizer, batch = made(name, device)
    try:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=cast):
            model(*batch.inputs)
    except RuntimeError as error:
        if "primitive descriptor for the LSTM" not in str(error):
            raise
        pytest.skip(f"torch cannot run an LSTM in bfloat16 on this processor: {error}")
    steps = iter(range(STEPS + 1))

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=cast):
            loss = recipe.loss(model(*batch.inputs), batch.target)
        if next(steps) <= 2:  # with a hook, which may run anything
            loss.register_hook(lambda gradient: None)
        loss.backward()
        optimizer.step()

    step()
    t, quiet = traced(step, model, optimizer)
    assert quiet == STEPS - 2
    frame = t.allocations()
    with_operators = said_of(frame, 1)
    assert with_operators
    for later in range(2, STEPS - 1):  # what is alive at the very end is freed in no phase
        assert said_of(frame, later) == with_operators


@pytest.mark.parametrize("device", DEVICES)
def test_every_event_of_a_quiet_pass_is_in_a_node_and_nodes_are_left(device: str) -> None:
    model, optimizer = small(device)
    x = torch.randn(32, 64, device=device)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    t, quiet = traced(step, model, optimizer)
    assert quiet == STEPS
    frame = t.allocations()
    backward = frame[(frame.phase == "backward") & (frame.requested_bytes > 4)]
    assert backward.op.str.contains("Backward0|AccumulateGrad").all()
    assert backward.forward_module.notna().sum() > 0
    begun = {i + 1 for i, kind in enumerate(t.data.scopes.kind) if kind == 1}
    assert begun <= set(t.data.scope_ends.scope.tolist())


def test_no_event_lies_before_or_after_its_scope() -> None:
    model, _ = small()
    x = torch.randn(32, 64)
    t, quiet = traced(lambda: model(x).sum().backward(), model)
    assert quiet == STEPS
    events, scopes, ends = t.data.events, t.data.scopes, t.data.scope_ends
    begin = dict(enumerate(scopes.ticks.tolist(), 1))
    end = dict(zip(ends.scope.tolist(), ends.ticks.tolist(), strict=True))
    for ticks, scope in zip(events.ticks.tolist(), events.scope.tolist(), strict=True):
        assert begin.get(scope, 0) <= ticks <= end.get(scope, ticks)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def a_function_of_the_programs(model: nn.Module, x: torch.Tensor) -> None:
    Twice.apply(model(x)).sum().backward()


def a_reentrant_checkpoint(model: nn.Module, x: torch.Tensor) -> None:
    checkpoint(model, x.requires_grad_(), use_reentrant=True).sum().backward()


def a_checkpoint(model: nn.Module, x: torch.Tensor) -> None:
    checkpoint(model, x, use_reentrant=False).sum().backward()


def a_checkpoint_of_a_function(model: nn.Module, x: torch.Tensor) -> None:
    checkpoint(lambda x: x.sin().exp(), model(x), use_reentrant=False).sum().backward()


def an_annotation_in_a_hook(model: nn.Module, x: torch.Tensor) -> None:
    def hook(gradient: torch.Tensor) -> None:
        with torch.profiler.record_function("mine"):
            gradient.clone()

    out = model(x)
    out.register_hook(hook)
    out.sum().backward()


def a_hook_of_a_parameter(model: nn.Module, x: torch.Tensor) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    model(x).sum().backward()


@pytest.mark.parametrize(
    "step",
    [
        a_function_of_the_programs,
        a_reentrant_checkpoint,
        a_checkpoint,
        a_checkpoint_of_a_function,
        an_annotation_in_a_hook,
        a_hook_of_a_parameter,
    ],
    ids=lambda step: step.__name__,
)
@pytest.mark.parametrize("detail", DETAILS)
def test_a_pass_that_runs_more_than_nodes_is_not_quiet(
    step: Callable[..., None], detail: str
) -> None:
    model, _ = small()
    x = torch.randn(32, 64)
    _, quiet = traced(lambda: step(model, x), model, detail=detail)
    assert quiet == 0


def test_with_less_detail_a_pass_of_nodes_is_quiet_and_is_one_scope() -> None:
    model, optimizer = small()
    x = torch.randn(32, 64)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    t, quiet = traced(step, model, optimizer, detail="category")
    assert quiet == STEPS
    frame = t.allocations()
    assert set(frame[frame.phase == "backward"].op.dropna()) <= {"backward", "aten::ones_like"}
    assert (frame.category == "gradients").any()


def test_a_pass_that_makes_a_graph_is_not_quiet_and_one_through_that_graph_is() -> None:
    model, _ = small()
    x = torch.randn(32, 64, requires_grad=True)

    def step() -> None:
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first.sum().backward()

    _, quiet = traced(step, model)
    assert quiet == STEPS


def test_the_first_pass_that_runs_more_is_not_quiet_however_many_were() -> None:
    """Gradient accumulation hides what only each last pass does from every sampling."""
    model, _ = small()
    x = torch.randn(32, 64)
    passes = iter(range(100))

    def step() -> None:
        out = model(x)
        if next(passes) == 99:
            out.register_hook(lambda gradient: an_annotated_buffer())
        out.sum().backward()

    def an_annotated_buffer() -> None:
        with torch.profiler.record_function("all_reduce_like"):
            torch.zeros(12345)

    t, quiet = traced(step, model, steps=100)
    assert quiet == 99
    (buffer,) = t.allocations().query("requested_bytes == 12345 * 4").itertuples()
    assert buffer.op == "aten::zeros"


def test_a_profiler_in_a_hook_records_however_many_passes_were_quiet() -> None:
    x = torch.ones(4, requires_grad=True)
    recorded = []

    def hook(gradient: torch.Tensor) -> None:
        with torch.profiler.profile() as profiler:
            gradient.exp()
        recorded.append({row.key for row in profiler.key_averages()})

    with trace(table=False):
        for i in range(6):
            out = x * 2
            if i >= 3:
                out.register_hook(hook)
            out.sum().backward()
    assert recorded == [{"aten::exp"}] * 3


@pytest.mark.parametrize("detail", DETAILS)
def test_what_a_checkpoint_runs_again_is_recomputed_in_the_first_pass_that_has_one(
    detail: str,
) -> None:
    model, optimizer = small()
    x = torch.randn(32, 64)
    ways = iter([False, False, False, True, True, True])

    def step() -> None:
        out = checkpoint(model, x, use_reentrant=False) if next(ways) else model(x)
        out.sum().backward()
        optimizer.step()

    t, quiet = traced(step, model, optimizer, steps=6, detail=detail)
    # Without operators, the first module that runs again in a pass says so.
    assert quiet == (3 if detail == "op" else 4)
    frame = t.allocations()
    recomputed = [said_of(frame[frame.phase == "recompute"], step) for step in range(6)]
    assert recomputed[:3] == [{}, {}, {}]
    assert recomputed[3]
    assert recomputed[3] == recomputed[4]
    assert not (frame.category == "unknown").any()


def test_a_pass_in_which_optimizers_step_is_not_quiet() -> None:
    model, _ = small()
    x = torch.randn(32, 64)
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step_now(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    steps = iter(range(8))

    def step() -> None:
        if next(steps) == 3:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(step_now)
        model(x).sum().backward()

    t, quiet = traced(step, *optimizers.values(), model, steps=8)
    assert quiet == 3
    state = t.allocations().query("category == 'optimizer_state' and role == 'momentum_buffer'")
    assert len(state) == len(optimizers)


@pytest.mark.parametrize("detail", DETAILS)
def test_what_an_operator_reads_is_known_each_time_it_runs(detail: str) -> None:
    """Inside of an operator that has many others, torch is stopped from the second time on."""
    model, optimizer = small()

    def step() -> None:
        optimizer.zero_grad()
        raw = torch.rand(32, 64)
        x = raw - torch.logsumexp(raw, 1, keepdim=True)
        targets, weights = torch.randint(64, (32,)), torch.rand(64)
        out = model(x)
        nn.functional.cross_entropy(out, targets, weights, label_smoothing=0.1).backward()
        optimizer.step()

    def heard_by_a_profiler() -> dict[str, int]:
        with torch.profiler.profile() as profiler:
            step()
        return {row.key: row.count for row in profiler.key_averages()}

    step()
    plain = heard_by_a_profiler()
    with trace(model, optimizer, table=False, detail=detail) as t:
        step()
        step()
        assert heard_by_a_profiler() == plain
        step()
        step()
    frame = t.allocations()
    first = said_of(frame, 1)
    assert any("inputs" in row for row in first)
    for later in range(2, STEPS - 1):
        assert said_of(frame, later) == first


@pytest.mark.parametrize("detail", DETAILS)
def test_operators_left_out_inside_of_others_change_nothing_that_is_said(detail: str) -> None:
    """The reference has torch tell of each operator inside of an outermost one."""
    model, optimizer = small()

    def step() -> None:
        optimizer.zero_grad()
        with torch.no_grad():
            chances = torch.distributions.Categorical(logits=model(torch.rand(32, 64)))
            chosen = chances.sample()[:, None] + torch.rand(64, 32).T.sum(1).reshape(32, 1).int()
        raw = torch.rand(32, 1, 64)
        mixed = torch.bmm(raw, torch.rand(64, 64).expand(32, 64, 64))[:, 0]
        out = model(mixed).softmax(1).gather(1, chosen % 64)
        (out - torch.rand(32, 1)).square().mean().backward()
        optimizer.step()

    def said(leave_out: bool) -> list[dict[Any, int]]:
        torch.manual_seed(0)
        with trace(model, optimizer, table=False, detail=detail) as t:
            C.leave_out_inner_operators(leave_out)
            for _ in range(STEPS):
                step()
        return [said_of(t.allocations(), number) for number in range(1, STEPS)]

    step()
    reference = said(False)
    assert any("inputs" in row for row in reference[-1])
    assert said(True) == reference


@pytest.mark.parametrize("detail", DETAILS)
def test_an_annotation_that_a_checkpoint_runs_again_is_recorded(detail: str) -> None:
    model, _ = small()
    x = torch.randn(32, 64)

    def annotated(x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("mine"):
            return x.sin().exp()

    def step() -> None:
        checkpoint(annotated, model(x), use_reentrant=False).sum().backward()

    t, _ = traced(step, model, detail=detail)
    names = [t.data.strings[name] for name in t.data.scopes.name]
    assert names.count("mine") == 2 * STEPS


@pytest.mark.parametrize("detail", DETAILS)
def test_a_profiler_hears_every_operator_of_a_traced_backward(detail: str) -> None:
    model, optimizer = small()
    x = torch.randn(32, 64)

    def heard_by_the_profiler() -> dict[str, int]:
        for _ in range(3):
            model(x).sum().backward()
        with torch.profiler.profile() as profiler:
            model(x).sum().backward()
        optimizer.zero_grad()
        return {row.key: row.count for row in profiler.key_averages()}

    plain = heard_by_the_profiler()
    with trace(model, optimizer, table=False, detail=detail):
        assert heard_by_the_profiler() == plain
        assert C.status()["quiet_passes"] == 3
        assert torch._C._get_tracing_state() is None
    assert heard_by_the_profiler() == plain


def test_an_exception_leaves_record_function_on() -> None:
    model, _ = small()
    x = torch.randn(32, 64)
    with trace(model, table=False) as t:
        out = model(x)
        with torch.no_grad():
            model[2].weight.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        model(x)
        assert C.status()["quiet_passes"] == 1
    assert (t.allocations().op == "aten::addmm").sum() > 0
    with torch.profiler.profile() as profiler:
        model(x)
    assert "aten::addmm" in {row.key for row in profiler.key_averages()}
