"""What recording itself took: the last line of the table."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import pytracer
from pytracer.analysis.answers import recording_quality
from pytracer.data._native import C
from tests.test_table import training

STEPS = 60
# A loaded machine has colder caches and slower clocks: more than this is not computing.
FACTOR = 4


def traced(steps: int = STEPS) -> Any:
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(20)))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytracer.trace(model, optimizer, devices="cpu", table=False) as t:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(8, 32)).square().mean().backward()
            optimizer.step()
    return t


def own_time(t: Any) -> recording_quality.OwnTime:
    found = recording_quality.own_time(t.data)
    assert found is not None
    return found


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """As many programs that compute, all on the one core that this thread may use meanwhile."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    code = "print(flush=True)\nwhile True: pass"
    processes = [
        subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline(), "it computes by now"
        yield
    finally:
        for process in processes:
            with process:
                process.kill()
        os.sched_setaffinity(0, cores)


@pytest.mark.ci
@pytest.mark.slow
def test_other_programs_on_the_machine_do_not_make_recording_look_dearer() -> None:
    traced()  # what is made once
    alone = [own_time(traced()) for _ in range(3)]
    with busy_neighbours(4):
        loaded = [own_time(traced()) for _ in range(5)]
    usual = sorted(one.ns for one in alone)[1]
    assert all(usual / FACTOR < one.ns < usual * FACTOR for one in loaded), (alone, loaded)
    part = sorted(one.share for one in alone)[1]
    beside = sorted(one.share for one in loaded)[2]
    assert part / FACTOR < beside < part * FACTOR, (alone, loaded)
    assert all(0 < one.share <= 1 for one in loaded)


def compute() -> None:
    until = time.thread_time_ns() + 50_000_000
    while time.thread_time_ns() < until:
        pass


def test_what_recording_waits_for_it_did_not_take() -> None:
    """As for the GIL, or for another program that has the core."""
    assert noted(lambda: time.sleep(0.3))["ns"] < 100_000_000


def test_what_recording_computes_it_took() -> None:
    assert noted(compute)["ns"] >= 50_000_000


def test_what_is_done_after_the_last_step_is_none_of_the_steps() -> None:
    assert noted(compute, between=False)["ns"] < 50_000_000


@pytest.mark.slow
def test_waits_after_the_last_step_are_none_of_the_steps() -> None:
    """Else nothing is left of a short stretch, and recording took all of it."""
    model = torch.nn.Linear(2, 2)
    with busy_neighbours(4), pytracer.trace(model, devices="cpu", table=False) as t:
        for _ in range(3):
            model(torch.ones(1, 2))
        compute()
    own, clock = t.data.meta["own_time"], t.data.clock
    ns_per_tick = int(clock.unix_ns[-1] - clock.unix_ns[0]) / int(clock.ticks[-1] - clock.ticks[0])
    assert own["waited_ns"] <= own["of_ticks"] * ns_per_tick


def noted(ours: Any, *, between: bool = True) -> Any:
    """What the trace says of a program in which this was done by ours, between two calls."""
    model = torch.nn.Linear(2, 2)
    with pytracer.trace(model, devices="cpu", table=False) as t:
        model(torch.ones(1, 2))
        if between:
            C.quietly(ours)
        model(torch.ones(1, 2))
        if not between:
            C.quietly(ours)
    return t.data.meta["own_time"]


numbers = st.one_of(st.integers(-5, 2**70), st.none(), st.text(max_size=3), st.booleans())


@given(
    st.fixed_dictionaries(
        {"ticks": numbers, "ns": numbers, "of_ticks": numbers, "waited_ns": numbers}
    )
)
def test_the_share_is_never_more_than_all_of_it(own: dict[str, Any]) -> None:
    """Whatever a file says."""
    b = training(steps=20)
    b.meta["own_time"] = own
    found = recording_quality.own_time(b.trace())
    assert found is None or 0 <= found.share <= 1


# ---------------------------------------------------------------- our Python in the program's steps


class Layers(nn.Module):
    """As many layers as wanted, and a loss that `forward` ends with."""

    def __init__(self, count: int, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(count))
        self.loss = loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.loss(x)


def made_anew(x: torch.Tensor) -> torch.Tensor:
    return nn.MSELoss()(x, torch.zeros_like(x))  # as the models of transformers do


def our_calls(model: nn.Module, detail: Any, **options: Any) -> Counter[str]:
    """The calls of our own Python functions in one step of training, once nothing is new."""
    ours = str(Path(pytracer.__file__).parent)
    optimizer = torch.optim.AdamW(model.parameters())
    calls: Counter[str] = Counter()

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 8)).mean().backward()
        optimizer.step()

    def hear(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            calls[frame.f_code.co_name] += 1

    with pytracer.trace(model, optimizer, devices="cpu", table=False, detail=detail, **options):
        for _ in range(11):
            step()
        sys.setprofile(hear)
        step()
        sys.setprofile(None)
    return calls


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Layers(3, torch.square),
    "normalised": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
    "recurrent": lambda: Layers(2, nn.RNNCell(8, 8)),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "recomputed": lambda: Layers(2, lambda x: checkpoint(torch.tanh, x, use_reentrant=False)),
}


@pytest.mark.parametrize("detail", ["category", "op"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_once_nothing_is_new_a_step_runs_none_of_our_python(program: str, detail: str) -> None:
    assert our_calls(PROGRAMS[program](), detail) == {}


def test_a_module_made_in_each_step_takes_as_long_in_a_model_of_any_size() -> None:
    few, many = (our_calls(Layers(count, made_anew), "category") for count in (2, 40))
    assert few == many
    assert 0 < few.total() < 100
