"""A window of a growing trace says of its last whole step what the whole file says."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from programs.conformance import trainings
from programs.conformance.programs import PROGRAMS, Says, run
from pytracer import trace
from pytracer.analysis.answers.step_memory import StepMemory, step_memory
from pytracer.analysis.facts import timelines, usage
from pytracer.analysis.facts.window import Window
from pytracer.data.recorded import Trace, load
from pytracer.data.schema import ACTION
from tests.conformance.test_random_programs import Plan, Program, plans
from tests.tiers import by_tier, first_of

ROOT = Path(__file__).parents[1]
ROWS = ("events", "scopes", "scope_ends")

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def written_until(whole: Trace, tick: int) -> dict[str, Any]:
    """The columns of a file that ends at this tick."""
    columns = whole.to_columns()
    for name in ROWS:
        there = columns[f"{name}.ticks"] <= tick
        if name == "scopes":  # a scope's row is its number
            there = np.logical_and.accumulate(there)
        for key in [key for key in columns if key.startswith(f"{name}.")]:
            columns[key] = columns[key][there]
    return columns


class Replayed:
    """Writes a trace again, and lets go of what the window does not need after each step."""

    def __init__(self, whole: Trace) -> None:
        self.whole, self.window = whole, Window()
        ends = timelines.timeline(whole).step_ends
        self.ends = ends[ends <= whole.events.ticks[-1:].max(initial=0)]
        self._read = dict.fromkeys(ROWS, 0)

    def write(self, tick: int) -> dict[str, Any]:
        columns = written_until(self.whole, tick)
        new = {
            key: values[self._read[name] :]
            for key, values in columns.items()
            if (name := key.partition(".")[0]) in ROWS
        }
        self._read = {name: len(columns[f"{name}.ticks"]) for name in ROWS}
        self.window.add(new)
        return columns

    def steps(self) -> Iterator[tuple[StepMemory, StepMemory, int]]:
        """At each step's end: what the window says, what the file says, the rows of the window."""
        following = np.append(self.ends[1:], self.whole.events.ticks[-1:])
        begin = 0
        for i, (end, after) in enumerate(zip(self.ends.tolist(), following.tolist(), strict=True)):
            columns = self.write(end + (after - end) // 3)
            file, here = Trace.from_columns(columns), self.window.trace(columns)
            device = usage.main_device(file)
            yield (
                step_memory(here, device, begin, end),
                step_memory(file, device, begin, end),
                len(here.events.ticks) + len(here.scopes.ticks),
            )
            self.window.condense(columns, self.ends[: i + 1])
            begin = end


def is_what_the_file_says(whole: Trace) -> None:
    for number, (here, file, _) in enumerate(Replayed(whole).steps()):
        assert here.peak.by_category == file.peak.by_category, number
        assert here.end.by_category == file.end.by_category, number
        assert here.peak.phase == file.peak.phase, number
        assert (here.modules, here.lines) == (file.modules, file.lines), number


@pytest.mark.parametrize(
    "name", ["h200", "convnext-h100", "unet-h100", "plans-h200", "streamed-1.1"]
)
def test_a_recording_of_a_gpu_is_shown_as_its_file_is(name: str) -> None:
    """Its log begins with a snapshot of what was there."""
    is_what_the_file_says(load(ROOT / "tests" / "data" / f"{name}.pytrace"))


TRAININGS = [name for name in PROGRAMS if PROGRAMS[name].__module__ == trainings.__name__]


@pytest.mark.parametrize("mode", ["default", "category"])
@pytest.mark.parametrize("name", first_of(TRAININGS, 8))
def test_a_training_is_shown_as_its_file_is(name: str, mode: str) -> None:
    """The window and the file agree at every step, in each mode."""
    whole = run(name, mode).data
    assert whole is not None
    is_what_the_file_says(whole)


# Without operators, a block that a double backward makes is judged by the steps that were left out.
@settings(
    max_examples=by_tier(15, 40, 1000),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(plan=plans, mode=st.sampled_from(["default", "category"]))
def test_any_program_is_shown_as_its_file_is(plan: Plan, mode: str) -> None:
    """The window and the file agree at every step of a random program."""
    torch.manual_seed(0)
    says = Says("default" if plan.backward == "of a penalty" else mode, "cpu")
    Program(plan, says).run()
    assert says.data is not None
    is_what_the_file_says(says.data)


ROWS_OF_A_BATCH = 64  # a batch is as large as a weight, so sizes do not tell them apart


class Rotary(nn.Module):
    """Makes a table in its first call, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(64, 64), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(64 * 64.0).view(64, 64).cos()
        return self.inner(x) * self.table


def accumulates(out: torch.Tensor, kept: list[Any]) -> torch.Tensor:
    return out.square().mean()


def keeps_losses(out: torch.Tensor, kept: list[Any]) -> torch.Tensor:
    kept.append((out * 3).square().mean())
    return kept[-1]


class Hidden(nn.Module):
    """Shows what is between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        out: torch.Tensor = self.second(hidden)
        out.between = hidden  # type: ignore[attr-defined]
        return out


def keeps_slopes(out: Any, kept: list[Any]) -> torch.Tensor:
    loss: torch.Tensor = out.square().mean()
    kept.append(torch.autograd.grad(loss, out.between, retain_graph=True)[0])
    return loss


def linear() -> nn.Module:
    return nn.Linear(64, 64)


# What a loop does that asks for an earlier step: its model, its loss, what is around it.
LOOPS: dict[str, tuple[Any, Any, str]] = {
    "gradients_stay_under_autocast": (linear, accumulates, "autocast"),
    "losses_are_kept": (linear, keeps_losses, "all of it"),
    "slopes_are_kept": (Hidden, keeps_slopes, "all of it"),
    "a_module_keeps_a_table": (Rotary, accumulates, "all of it"),
    "no_module": (None, keeps_losses, "all of it"),
    "all_of_it_in_a_collective": (linear, keeps_losses, "nccl:all_gather"),
}


@pytest.mark.ci
@pytest.mark.parametrize("mode", ["default", "category"])
@pytest.mark.parametrize("name", LOOPS)
def test_what_an_earlier_step_shows_is_still_known(name: str, mode: str) -> None:
    """The evidence lies some steps back, where most of what happened is left out."""
    make, loss_of, around = LOOPS[name]
    torch.manual_seed(0)
    says, kept, weight = Says(mode, "cpu"), list[Any](), nn.Parameter(torch.randn(64, 64))
    model = make() if make else lambda x: torch.tanh(x @ weight)
    parameters = list(model.parameters()) if make else [weight]
    optimizer = torch.optim.AdamW(parameters)
    targets = [model, optimizer] if make else [optimizer]
    with says.traced(*targets), torch.profiler.record_function(around):
        for _ in range(20):
            with torch.autocast("cpu", torch.bfloat16, enabled=around == "autocast"):
                out = model(torch.randn(ROWS_OF_A_BATCH, 64))
            loss_of(out, kept).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert says.data is not None
    is_what_the_file_says(says.data)


def test_a_forward_may_wait_for_the_backward_of_the_next_step() -> None:
    """The program says where a step ends, and that is between the two."""
    model, kept = nn.Linear(64, 64), []
    with trace(model, devices="cpu", table=False) as t:
        for _ in range(20):
            kept.append((model(torch.randn(8, 64)) * 3).square().mean())
            t.step()
            kept[-1].backward()
            model.zero_grad()
    is_what_the_file_says(t.data)


def test_a_target_from_before_the_trace_stays_one() -> None:
    """The first event tells that the trace began outside of forward."""
    weight, x, y = nn.Parameter(torch.randn(64, 64)), torch.randn(8, 64), torch.randn(8, 64)
    optimizer = torch.optim.SGD([weight])
    with trace(devices="cpu", table=False) as t:
        torch.ones(3).sum()
        for _ in range(8):
            ((torch.tanh(x @ weight) - y) * y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    is_what_the_file_says(t.data)


def train(steps: int, *, keeps: bool = False) -> Trace:
    torch.manual_seed(0)
    model, kept = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 4)), []
    optimizer = torch.optim.AdamW(model.parameters())
    with trace(model, optimizer, devices="cpu", table=False) as t:
        for _ in range(steps):
            out = model(torch.randn(8, 64))
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept += [out.detach().clone()] * keeps
    return t.data


def test_the_window_grows_with_what_lives_and_not_with_the_steps() -> None:
    """After 60 steps it has about the rows that it had after 10.

    A kept block adds a few, and as many for the block that it was made from.
    """
    rows = [rows for _, _, rows in Replayed(train(60)).steps()]
    assert max(rows) < 1.2 * max(rows[:10])
    grown = [rows for _, _, rows in Replayed(train(60, keeps=True)).steps()]
    assert grown[-1] - grown[20] < 18 * (len(grown) - 21)


def test_a_program_without_steps_is_cut_but_what_lives_stays() -> None:
    """The window keeps the live blocks with their modules, and few of the other rows."""
    model, kept = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))), []
    with trace(model, devices="cpu", table=False) as t, torch.no_grad():
        for i in range(2000):
            out = model(torch.randn(2, 8))
            kept += [out] * (i % 500 == 0)
    whole, window = t.data, Window()
    columns = whole.to_columns()
    window.add({k: v for k, v in columns.items() if k.partition(".")[0] in ROWS})
    window.condense(columns, np.zeros(0, np.uint64))
    here, last = window.trace(columns), int(whole.events.ticks[-1])
    assert len(here.events.ticks) < len(whole.events.ticks) / 10
    assert window.complete_from == last
    there = step_memory(whole, "cpu", last, last)
    found = step_memory(here, "cpu", last, last)
    assert found.end.bytes == there.end.bytes
    assert found.modules == there.modules


def damaged(columns: Mapping[str, Any], seed: int) -> dict[str, Any]:
    random, result = np.random.default_rng(seed), dict(columns)
    for key in random.choice([k for k, v in columns.items() if isinstance(v, np.ndarray)], 4):
        values = result[key].copy()
        most = min(np.iinfo(values.dtype).max, 2**62) if random.random() < 0.5 else 50
        values[random.random(len(values)) < 0.1] = random.integers(0, most)
        result[key] = values
    if random.random() < 0.3:
        result["strings"] = result["strings"][: random.integers(20)]
    return result


@pytest.mark.parametrize("seed", range(30))
def test_rows_that_refer_to_nothing_raise_no_error(seed: int) -> None:
    """A damaged file may point anywhere; the window's sums stay sums."""
    whole = train(4)
    columns, ends = damaged(whole.to_columns(), seed), timelines.timeline(whole).step_ends
    window = Window()
    window.add({k: v for k, v in columns.items() if k.partition(".")[0] in ROWS})
    for begin, end in ((0, 1), (1, 2)):
        here = window.trace(columns)
        memory = step_memory(here, usage.main_device(here), int(ends[begin]), int(ends[end]))
        assert sum(memory.peak.by_category.values()) == memory.peak.bytes
        window.condense(columns, ends[: end + 1])


# Adds a category as a person would, but to copies: a row of the table, and a rule.
NEW_CATEGORY = """
import sys, types
from pathlib import Path
source = Path("pytracer/data/schema.py").read_text()
row = '    Category("plans", "#123456", 35, False, "what a plan needs"),\\n)\\nCATEGORIES = '
assert source.count(")\\nCATEGORIES = ") == 1
schema = types.ModuleType("pytracer.data.schema")
sys.modules["pytracer.data.schema"] = schema
exec(source.replace(")\\nCATEGORIES = ", row), vars(schema))
from pytracer.analysis.facts import categories
first = categories._choose_owned
def choose(trace, facts, out, label_role):
    out.choose(facts.lives.bytes == 96 * 64 * 4, "plans")
    return first(trace, facts, out, label_role)
categories._choose_owned = choose
from pytracer.cli.watch import catch_up
from pytracer.export.live import Following, screen
from pytracer.export.terminal import PLAIN
following = Following(Path(sys.argv[1]))
catch_up(following)
print("\\n".join(screen(following, (80, 40), paint=PLAIN.paint)))
print("pandas" in sys.modules)
"""


def test_watch_shows_a_category_that_only_the_table_and_a_rule_know(tmp_path: Path) -> None:
    """A new category is a row and a rule: the watcher needs no change, and no pandas."""
    path = train(3).save(tmp_path / "run.pytrace")
    shown = subprocess.run(
        [sys.executable, "-c", NEW_CATEGORY, str(path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    row = next(line for line in shown.splitlines() if line.startswith("  plans "))
    assert "24.0 KiB" in row or "96.0 KiB" in row
    assert shown.endswith("False\n")


def test_a_window_has_the_evidence_of_what_lives_once_or_twice() -> None:
    """The window keeps the first and the last of many labels of one parameter."""
    replayed = Replayed(train(30))
    for _ in replayed.steps():
        pass
    columns = replayed.write(int(replayed.whole.events.ticks[-1]))
    here = replayed.window.trace(columns)
    said = here.events.action == ACTION["label"]
    old = said & (here.events.ticks <= replayed.ends[10]) & (here.events.ticks > replayed.ends[2])
    assert not old.any()
