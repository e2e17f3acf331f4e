"""Steps as people count them, and no hint that is made up of what a trace has lost."""

import contextlib
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import pytracer
from pytracer import errors, trace


class Work:
    """A model in training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def learn(self, rows: int = 32) -> None:
        x = torch.randn(rows, 64)
        (self.model(x) - x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def recorded(run: Callable[[trace], object], **options: object) -> trace:
    with trace(devices="cpu", table=False, **options) as t:  # type: ignore[arg-type]
        run(t)
    return t


def test_an_evaluation_after_the_last_update_is_no_further_step() -> None:
    work = Work()

    def run(_: trace) -> None:
        for _step in range(3):
            work.learn()
        with torch.no_grad():
            work.model(torch.randn(4096, 64))

    t = recorded(run)
    assert "on cpu   after step 2, in evaluation, " in str(t)
    assert len(t.steps()) == 3


def test_an_evaluation_between_two_steps_is_called_one() -> None:
    work = Work()

    def run(_: trace) -> None:
        work.learn()
        with torch.no_grad():
            work.model(torch.randn(4096, 64))
        work.learn()

    assert "on cpu   step 1, in evaluation, " in str(recorded(run))


def test_a_step_that_fails_in_its_backward_is_the_next_step() -> None:
    work = Work()

    def run(_: trace) -> None:
        work.learn()
        work.model(torch.randn(4096, 64)).sum().backward()

    t = recorded(run)
    assert "on cpu   step 1, in " in str(t)
    assert len(t.steps()) == 2


class Gan:
    """Two models with an optimizer each, which take turns."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(8, 16), nn.Linear(16, 1)
        models = (self.critic, self.generator)
        self.optimizers = [torch.optim.Adam(model.parameters()) for model in models]

    def learn(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            self.critic(self.generator(torch.randn(32, 8))).sum().backward()
            optimizer.step()


def test_a_gans_two_optimizers_are_one_step() -> None:
    gan = Gan()

    def run(_: trace) -> None:
        for _step in range(4):
            gan.learn()

    t = recorded(run)
    assert len(t.steps()) == 4
    assert set(t.steps()["micro_steps"]) == {2}


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize("wait", [0, 2, 3])
def test_a_schedule_counts_a_gans_two_optimizers_once(wait: int) -> None:
    """In the first step nobody knows of the second one: what waits for one step begins within it."""
    gan = Gan()
    schedule = torch.profiler.schedule(wait=wait, warmup=0, active=3, repeat=1)
    with trace(devices="cpu", table=False, schedule=schedule) as t:
        for _ in range(wait + 5):
            gan.learn()
    assert len(t.steps()) == 3
    assert set(t.steps()["micro_steps"]) == {2}


@pytest.mark.parametrize("before", [1, 2, 3])
def test_a_schedule_does_not_count_what_stepped_before_it(before: int) -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    work, other = Work(), Work()  # both live on
    recorded(lambda _: [work.learn() for _ in range(before)])
    t = recorded(lambda _: [other.learn() for _ in range(4)], schedule=schedule)
    assert len(t.steps()) == 2


def test_no_optimizer_is_referred_to_when_its_steps_are_counted_no_more() -> None:
    gan = Gan()
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)
    for options in ({}, {"schedule": schedule}):
        recorded(lambda _: [gan.learn() for _ in range(4)], **options)
        assert [weakref.getweakrefcount(optimizer) for optimizer in gan.optimizers] == [0, 0]


def updated_by_hand(work: Work, t: trace, *, marked: bool) -> None:
    for _ in range(3):
        work.model(torch.randn(32, 64)).sum().backward()
        with torch.no_grad():
            for p in work.model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        if marked:
            t.step()


def test_a_program_that_updates_by_hand_is_told_what_to_call() -> None:
    """Once it does, it has its steps, and the line is gone."""
    plain = recorded(lambda t: updated_by_hand(Work(), t, marked=False))
    assert "steps     none: " in str(plain)
    assert "t.step() after each update" in " ".join(str(plain).split())
    marked = recorded(lambda t: updated_by_hand(Work(), t, marked=True))
    assert "steps     none" not in str(marked)
    assert len(marked.steps()) == 3


@pytest.mark.parametrize("room", [20, 40, 60, 80, 100, 150, 200])
def test_a_trace_that_lost_events_has_no_hint_that_comes_of_it(room: int) -> None:
    work = Work()
    t = recorded(lambda _: [work.learn() for _step in range(4)], max_events=room, stacks=True)
    assert t.data.losses
    assert len(t.findings()) == 0
    assert "\nhint " not in str(t)
    assert "\nlost " in str(t)


def test_a_file_that_ends_within_a_step_accuses_nobody(tmp_path: Path) -> None:
    """Two forwards that wait for one backward, wherever the file is cut."""
    path = tmp_path / "whole.pytrace"

    def pairs(t: trace) -> None:
        work = Work()
        for _ in range(400):
            work.model(torch.randn(64, 64)).sub(work.model(torch.randn(64, 64))).sum().backward()
            work.optimizer.step()
            work.optimizer.zero_grad()

    assert len(recorded(pairs, path=path, stacks=True).findings()) == 0
    whole, cuts = path.read_bytes(), 0
    for part in range(1, 40):
        cut = tmp_path / "cut.pytrace"
        cut.write_bytes(whole[: len(whole) * part // 40])
        with warnings.catch_warnings(), contextlib.suppress(errors.UnreadableTrace):
            warnings.simplefilter("ignore")
            t = pytracer.load(cut)
            cuts += 1
            assert t.findings().to_dict("records") == []
    assert cuts > 5
