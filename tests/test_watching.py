"""What watching the later steps costs: it records little, and rests where it would cost too much."""

import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from pytracer.capture import cycles
from pytracer.capture.allowance import FIRST, SHARE, Allowance, StepsTime
from tests.tiers import by_tier

ROOT = Path(__file__).parents[1]


class Time:
    """A processor whose time passes as the test says."""

    def __init__(self) -> None:
        self.now = self.in_steps = 0.0

    def allowance(self) -> Allowance:
        return Allowance(lambda: self.now, lambda: self.in_steps)


class Traced:
    """Stands in for `trace`: its ends take time, and steps inside of it take longer."""

    made: list["Traced"]
    at_ends = 0.0
    time: Time

    def __init__(self, **options: Any) -> None:
        self.options, self.recording, self.steps = options, False, 0
        Traced.made.append(self)

    def __enter__(self) -> "Traced":
        self.recording = True
        Traced.time.now += Traced.at_ends
        return self

    def __exit__(self, *_: object) -> None:
        self.recording = False
        Traced.time.now += Traced.at_ends


def train(
    costs: list[tuple[float, float]], at_ends: float = 0.0, **plan: Any
) -> tuple[float, float, int]:
    """Trains steps, each with its time and the time that watching adds to it.

    Returns the program's own time, what watching has cost, and how many steps were watched.
    """
    Traced.made, Traced.time, Traced.at_ends = [], Time(), at_ends
    recording = cycles.Recording(
        Traced,
        skip=0,
        steps=1,
        watch=True,
        keep={},
        ready=lambda traced: None,
        problem=pytest.fail,
        allowance=Traced.time.allowance(),
        **plan,
    )
    recording.begin()
    recording.stepped()  # the step to keep
    start, watched, plain = Traced.time.now, 0, 0.0
    for seconds, extra in costs:
        Traced.time.now += seconds
        plain += seconds
        if Traced.made[-1].recording:
            Traced.time.now += extra
            Traced.time.in_steps += extra
            watched += 1
        recording.stepped()
    recording.end()
    return plain, Traced.time.now - start - plain, watched


def test_a_cheap_watch_never_rests() -> None:
    steps = [(0.1, 0.001)] * 500
    assert train(steps, at_ends=0.005)[2] == 500


def test_a_dear_watch_costs_its_share_and_goes_on_now_and_then() -> None:
    plain, cost, watched = train([(0.01, 0.003)] * 10_000, at_ends=0.02)
    window = 20 * 0.003 + 2 * 0.02
    assert cost <= SHARE * (plain + cost) + window
    assert cost >= SHARE * plain / 2
    assert 0 < watched < 2_000


def test_the_time_at_the_ends_of_windows_counts_as_well() -> None:
    plain, cost, _ = train([(0.001, 0.0)] * 20_000, at_ends=0.01)
    assert cost <= SHARE * (plain + cost) + 0.02


def test_a_long_quiet_time_does_not_pay_for_a_long_dear_one() -> None:
    quiet, dear = [(1.0, 0.0)] * 2_000, [(0.01, 0.01)] * 10_000
    _, cost, _ = train(quiet + dear)
    assert cost <= SHARE * 0.01 * 2 * 10_000 + 0.5 + 20 * 0.01


@settings(max_examples=by_tier(30, 100, 1_000))
@given(
    st.lists(st.tuples(st.floats(1e-4, 2.0), st.floats(0.0, 0.5), st.integers(1, 300)), max_size=8),
    st.floats(0.0, 0.3),
)
def test_whatever_steps_cost_watching_costs_its_share_and_a_window(
    phases: list[tuple[float, float, int]], at_ends: float
) -> None:
    costs = [(seconds, extra) for seconds, extra, count in phases for _ in range(count)]
    plain, cost, _ = train(costs, at_ends)
    window = 20 * max((extra for _, extra in costs), default=0.0) + 2 * at_ends
    assert cost <= FIRST + SHARE * (plain + cost + 2 * at_ends) + window + 1e-9


def test_another_threads_clock_earns_nothing() -> None:
    from threading import Thread

    time = Time()
    allowance = time.allowance()
    with allowance.begins(), allowance.ends():
        time.now += 1.0
    time.now += 1_000.0
    answers: list[bool] = []
    thread = Thread(target=lambda: answers.append(allowance.allows()))
    thread.start()
    thread.join()
    assert answers == [False]


@pytest.mark.parametrize(
    ("asked", "watched"),
    [
        ({}, "category"),
        ({"detail": "op", "saved_tensors": "hooks", "cost": True}, "category"),
        ({"stacks": True, "detail": "op"}, "op"),  # lines are read where operators end
    ],
)
def test_watching_records_what_a_page_about_a_failure_needs_and_no_more(
    asked: dict[str, Any], watched: str
) -> None:
    train([(0.1, 0.0)] * 3, options=asked)
    kept, later = (traced.options for traced in Traced.made)
    assert {name: kept[name] for name in asked} == asked
    assert later.get("detail", "op") == watched
    assert (later["saved_tensors"], later["cost"]) == ("auto", False)


def test_steps_time_grows_with_what_is_recorded() -> None:
    """It is what the rule believes that watching costs."""
    import torch

    import pytracer

    def added(rounds: int) -> float:
        clock = StepsTime()
        model = torch.nn.Linear(4, 4)
        with pytracer.trace(model, devices="cpu", table=False):
            before = clock()
            for _ in range(rounds):
                model(torch.ones(2, 4)).sum().backward()
            return clock() - before

    added(10)
    few, many = added(300), added(6_000)
    assert few > 0
    assert many > 3 * few


RL = """
import sys, time, torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
actor, critic = (nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, n)) for n in (4, 1))
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-3)

def update(state):
    logs, values, rewards = [], [], []
    for _ in range(16):
        choice = torch.distributions.Categorical(logits=actor(state), validate_args=False)
        logs.append(choice.log_prob(choice.sample()))
        values.append(critic(state).squeeze(-1))
        state = state * 0.9 + 0.1 * torch.randn(8)
        rewards.append(state.sum())
    wins, values = torch.stack(rewards), torch.stack(values)
    loss = (values - wins).pow(2).mean() - (torch.stack(logs) * (wins - values.detach())).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return state

state = torch.randn(8)
for _ in range(30):
    state = update(state)
before = time.process_time()
for _ in range(int(sys.argv[1])):
    state = update(state)
print("took", time.process_time() - before)
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytracer", "run", "-f", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def took(folder: Path, updates: int, *options: str) -> float:
    found = re.search(r"took ([\d.]+)", run(folder, *options, "rl.py", str(updates)).stdout)
    assert found is not None
    return float(found[1])


STEPS = """
import torch
from pytracer.data._native import C
from pytracer.capture.allowance import Allowance
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
def steps(count):
    for _ in range(count):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("options", [["--no-watch"], []])
def test_without_watching_nothing_listens_after_the_steps_to_keep(
    options: list[str], tmp_path: Path
) -> None:
    """Torch announces to nobody. While steps are watched, somebody listens."""
    (tmp_path / "train.py").write_text(f"{STEPS}steps(6)\nprint(C.status()['ops_installed'])\n")
    assert run(tmp_path, *options, "train.py").stdout == f"{not options}\n"


@pytest.mark.slow
@pytest.mark.ci
def test_a_failure_in_a_step_that_was_not_watched_is_said_to_be_so(tmp_path: Path) -> None:
    rests = "Allowance.allows = lambda self: False\nsteps(9)\ntorch.empty(1 << 44)\n"
    (tmp_path / "train.py").write_text(STEPS + rests)
    ran = run(tmp_path, "train.py")
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-2:] == [
        (
            "The failure came in a step that was not watched: to watch each step costs more than 3% of "
            "the processor time here. --steps all records each one"
        ),
        "The first 5 steps are in train.pytrace; look at it:  pytracer summary train.pytrace",
    ]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_watched_loop_of_small_operators_takes_no_more_processor_time(tmp_path: Path) -> None:
    """Without the rule it takes half as much again. Another 3 % are for the machine's noise."""
    (tmp_path / "rl.py").write_text(RL)
    rounds = [(took(tmp_path, 3_000, "--no-watch"), took(tmp_path, 3_000)) for _ in range(7)]
    plain, watched = (statistics.median(times) for times in zip(*rounds, strict=True))
    assert watched < (1 + 2 * SHARE) * plain, rounds
