"""Checkpoint plans: what is predicted of a plan is what happens when it is run."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pytracer import errors, load, trace
from pytracer.analysis.forecasts.checkpoint_plans import of_layers
from pytracer.analysis.forecasts.planned import Work
from pytracer.analysis.forecasts.tallest_steps import tallest_steps
from tests.trace_builder import TraceBuilder

DATA = Path(__file__).parent / "data"
Program = Callable[[tuple[str, ...]], trace]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Residual(nn.Module):
    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, 2 * channels, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(2 * channels)
        self.b = nn.Conv2d(channels, 2 * channels, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.norm(self.a(x)) + self.b(x))


class Stack(nn.Module):
    """Layers in a list, as most transformers have them."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = layer(x)
        return self.head(x)


def checkpoint_all(model: nn.Module, chosen: tuple[str, ...]) -> None:
    for name in chosen:
        module = model.get_submodule(name)
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]


def run(model: nn.Module, x: torch.Tensor, chosen: tuple[str, ...], cast: bool = False) -> trace:
    """Three steps with these modules checkpointed."""
    checkpoint_all(model, chosen)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with trace(model, optimizer, devices="cpu", table=False) as t:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return t


def transformer(chosen: tuple[str, ...] = (), cast: bool = False) -> trace:
    torch.manual_seed(0)
    return run(Stack(5, 64), torch.randn(8, 32, 64), chosen, cast)


def autocast(chosen: tuple[str, ...] = ()) -> trace:
    return transformer(chosen, cast=True)


def convolutions(chosen: tuple[str, ...] = ()) -> trace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *(Residual(8 << i, 1 + i % 2) for i in range(3)))
    return run(model, torch.randn(4, 3, 24, 24), chosen)


def dropout(chosen: tuple[str, ...] = ()) -> trace:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return run(model, torch.randn(4, 16, 32), chosen)


class InASequential(nn.Module):
    """Layers in a Sequential, as many vision transformers have them."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def sequential(chosen: tuple[str, ...] = ()) -> trace:
    torch.manual_seed(0)
    return run(InASequential(4, 64), torch.randn(8, 32, 64), chosen)


def logits_of_the_step_before(chosen: tuple[str, ...] = ()) -> trace:
    """They are the largest block while the next step's layers run, and no input of them."""
    torch.manual_seed(0)
    model = Stack(3, 64)
    model.head = nn.Linear(64, 2000)
    checkpoint_all(model, chosen)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with trace(model, optimizer, devices="cpu", table=False) as t:
        for _ in range(3):
            logits = model(torch.randn(8, 32, 64))
            loss = functional.cross_entropy(
                logits.flatten(0, 1), torch.zeros(256, dtype=torch.long)
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return t


class ListsInLists(nn.Module):
    """As U-Nets have them: a level is a ModuleList, which is never called itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.downs = nn.ModuleList(nn.ModuleList([Block(width), Block(width)]) for _ in range(3))
        self.head = nn.Linear(width, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in self.downs:
            x = second(first(x))
        return self.head(x)


def lists_in_lists(chosen: tuple[str, ...] = ()) -> trace:
    torch.manual_seed(0)
    return run(ListsInLists(64), torch.randn(8, 32, 64), chosen)


class Stages(nn.Module):
    """Stacks of layers that keep nothing but their results, which the next layer reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(*self._stage(width))
        self.second = nn.Sequential(*self._stage(width))

    def _stage(self, width: int) -> list[nn.Module]:
        return [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def stages(chosen: tuple[str, ...] = ()) -> trace:
    torch.manual_seed(0)
    return run(Stages(256), torch.randn(512, 256), chosen)


PROGRAMS: list[Program] = [
    lists_in_lists,
    stages,
    transformer,
    autocast,
    convolutions,
    dropout,
    sequential,
    logits_of_the_step_before,
]


@pytest.mark.ci
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_the_peak_of_a_plan_is_the_peak_of_the_run(program: Program) -> None:
    """Within half a percent, for the first plan of the frontier and the last."""
    found = program(()).checkpoint_plan(1)
    assert found.now.peak == program(()).peak.bytes
    frontier = [plan for plan in found.frontier if plan.modules]
    for plan in (frontier[0], frontier[-1]):
        measured = program(plan.modules).peak.bytes
        assert plan.peak == pytest.approx(measured, rel=0.005)


def test_a_plan_and_a_hint_name_modules_that_are_called() -> None:
    t = lists_in_lists()
    plan = t.checkpoint_plan(1)
    assert plan.modules
    assert all(re.fullmatch(r"downs\.\d\.\d", name) for name in plan.modules)
    assert "downs.*.* hold" in " ".join(str(t).split())
    assert set(stages().checkpoint_plan(1).frontier[-1].modules) <= {"first", "second"}
    assert max(map(len, plan.code.splitlines())) <= 80


def test_layers_that_keep_only_their_results_are_told_so() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with trace(model, devices="cpu", table=False) as t:
        model(torch.randn(32, 64)).mean().backward()
    with pytest.raises(errors.UsageError, match=r"more than its own result.*_sequential"):
        t.checkpoint_plan(1)


# What torch counted on an H200, of eight encoder layers with these checkpointed: allocated and reserved.
MEASURED = {
    (): (2860003368, None),
    (3, 4): (2424451112, 2665480192),
    (2, 3, 4, 5, 6): (1836884008, 2011168768),
    (0, 2, 3, 4, 5, 6): (1601806376, None),
    (0, 1, 2, 3, 4, 5, 6): (1429962752, 1740636160),
}


@pytest.mark.parametrize("layers", MEASURED)
def test_plans_of_a_recording_of_an_h200_needed_that_to_the_byte(layers: tuple[int, ...]) -> None:
    """cuBLAS took scratch for the backward's thread, and what a layer was given went before its bias."""
    work = Work(load(DATA / "plans-h200.pytrace").data, "cuda:0")
    plan = work.judge(tuple(f"layers.{number}" for number in layers), (), 1)
    peak, reserved = MEASURED[layers]
    assert plan.peak == peak
    assert plan.peak_reserved == (reserved or plan.peak_reserved)


def test_a_plan_that_failed_in_its_budget_on_an_h200_is_not_called_fitting() -> None:
    """Its replay ran, but only by giving the cache back, and the run had not that much to give."""
    t = load(DATA / "plans-h200.pytrace")
    budget = 1734931906
    failed = tuple(f"layers.{number}" for number in range(1, 7))
    assert not Work(t.data, "cuda:0").judge(failed, (), budget).fits
    found = t.checkpoint_plan(budget)
    assert found
    assert len(found.modules) > len(failed)
    assert found.chosen.peak_reserved is not None
    assert found.chosen.peak_reserved <= budget


def test_the_plan_that_fits_at_the_least_time_is_chosen() -> None:
    base = transformer()
    smallest, largest = base.checkpoint_plan(1).chosen.peak, base.peak.bytes
    budget = (smallest + largest) // 2
    found = base.checkpoint_plan(budget)
    assert found
    assert found.chosen.peak <= budget < found.now.peak
    cheaper = [p for p in found.frontier if p.time_ratio < found.chosen.time_ratio]
    assert all(plan.peak > budget for plan in cheaper)
    assert transformer(found.modules).peak.bytes <= budget


def test_a_budget_that_holds_anyway_needs_no_plan() -> None:
    base = transformer()
    assert base.checkpoint_plan(base.peak.bytes).modules == ()


def test_a_budget_that_no_plan_reaches_gets_the_smallest_and_does_not_fit() -> None:
    found = transformer().checkpoint_plan("1 KiB")
    assert not found
    assert "no plan fits in 1.00 KiB; the smallest needs" in str(found)
    assert not found.chosen.fits
    assert found.chosen.peak == min(plan.peak for plan in found.frontier)


def test_the_code_does_what_was_planned() -> None:
    """Run as it is printed, on a model of the same kind."""
    found = transformer().checkpoint_plan(1)
    model = Stack(5, 64)
    exec(found.code, {"model": model})
    wrapped = {name for name, module in model.named_modules() if "forward" in vars(module)}
    assert wrapped == set(found.modules)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    assert optimizer
    model(torch.randn(2, 4, 64)).sum().backward()


def test_what_makes_a_second_forward_another_one_is_said() -> None:
    assert any("BatchNorm" in text for text in convolutions().checkpoint_plan(1).warnings)
    assert any("random" in text for text in dropout().checkpoint_plan(1).warnings)
    assert transformer().checkpoint_plan(1).warnings == ()


def test_the_frontier_is_a_table_in_which_less_memory_takes_more_time() -> None:
    table = transformer().checkpoint_plan(1).table()
    assert table["peak"].is_monotonic_decreasing
    assert table["time_ratio"].is_monotonic_increasing
    assert table["count"].iloc[0] == 0


def test_every_block_that_a_plan_makes_is_freed_once() -> None:
    """What the edits add to what is in use is nothing in the end, but for what is kept at the end."""
    base = transformer()
    for unit in Work(base.data, "cpu").units.values():
        made = sum(size for size in unit.edits.bytes if size > 0)
        freed = -sum(size for size in unit.edits.bytes if size < 0)
        assert made == freed


def test_a_trace_without_a_backward_gets_one_clear_line() -> None:
    b = TraceBuilder()
    with b.module("model"), b.op("aten::mm"):
        b.free(b.alloc(100))
    from pytracer.reading.views import LoadedTrace

    with pytest.raises(errors.UsageError, match="nothing to checkpoint"):
        LoadedTrace(b.trace()).checkpoint_plan("1GiB")


def test_layers_of_a_stack_are_candidates_and_not_what_is_inside_of_them() -> None:
    assert set(Work(transformer().data, "cpu").units) == {f"h.{i}" for i in range(5)}


@pytest.mark.parametrize("varies", [True, False])
def test_a_plan_of_layers_is_that_of_all_steps(varies: bool) -> None:
    """Only the steps with the highest peaks are replayed, and one of those that are alike."""
    torch.manual_seed(0)
    model = Stack(4, 32)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with trace(model, optimizer, devices="cpu", table=False) as t:
        for _ in range(30):
            for _ in range(2):  # gradients accumulate
                rows = int(torch.randint(8, 256, ())) if varies else 64
                model(torch.randn(rows, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    layers = tuple(f"h.{number}" for number in range(4))
    found, work = of_layers(t.data, "cpu", layers), Work(t.data, "cpu")
    assert found is not None
    assert found.peak == work.peak(layers)
    assert found.time_ratio == pytest.approx(work.time_ratio(layers))
    assert len(tallest_steps(t.data, "cpu")) < 31 / 2
