"""Training in threads is told as the same training in one thread."""

import asyncio
import queue
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import pytracer
from tests.tiers import by_tier

MODES: list[dict[str, Any]] = [{}, {"detail": "category"}, {"saved_tensors": "hooks"}]
STEPS = 6
Work = Callable[[], None]


class Training:
    """One training, of which each part may run in another thread."""

    def __init__(self, outputs: int = 8) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, outputs))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.outputs = outputs
        self.loss = torch.zeros(())
        self.seen: list[float] = []

    def forward(self) -> None:
        x, y = torch.randn(32, 16), torch.randint(0, self.outputs, (32,))
        self.loss = nn.functional.cross_entropy(self.model(x), y)

    def backward(self) -> None:
        self.loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen.append(float(self.loss.detach()))

    def step(self) -> None:
        self.forward()
        self.backward()
        self.update()


def here(training: Training) -> None:
    for _ in range(STEPS):
        training.step()


def in_a_new_thread(work: Work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def a_thread_per_step(training: Training) -> None:
    for _ in range(STEPS):
        in_a_new_thread(training.step)


def whichever_worker_is_idle(training: Training) -> None:
    with ThreadPoolExecutor(3) as pool:
        for _ in range(STEPS):
            pool.submit(training.step).result()


def awaited(training: Training) -> None:
    async def train() -> None:
        for _ in range(STEPS):
            await asyncio.to_thread(training.step)

    asyncio.run(train())


def a_thread_per_part(training: Training) -> None:
    for _ in range(STEPS):
        for part in (training.forward, training.backward, training.update):
            in_a_new_thread(part)


def backward_in_another_thread(training: Training) -> None:
    with ThreadPoolExecutor(1) as pool:
        for _ in range(STEPS):
            training.forward()
            pool.submit(training.backward).result()
            training.update()


WAYS = (
    a_thread_per_step,
    whichever_worker_is_idle,
    awaited,
    a_thread_per_part,
    backward_in_another_thread,
)


def told(run: Callable[[Training], None], mode: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Each allocation's category and role, and the steps, in the order of making."""
    training = Training()
    with pytracer.trace(devices="cpu", table=False, **mode) as t:
        run(training)
    rows = t.allocations()
    columns = [rows[name].astype(str) for name in ("category", "role", "phase", "step")]
    steps = t.steps()[["peak_bytes", "growth_bytes"]].itertuples(index=False, name=None)
    assert "training_threads" not in t.health().index
    return [*zip(rows.requested_bytes, *columns, strict=True), *steps, *training.seen]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_steps_one_after_another_are_those_of_one_thread(
    way: Callable[[Training], None], mode: dict[str, Any]
) -> None:
    for _ in range(by_tier(1, 3, 10)):
        assert told(way, mode) == told(here, mode)


def words_of(t: pytracer.trace, training: Training) -> list[tuple[str, str]]:
    """The category and role of what only this training's losses and their gradients have."""
    rows = t.allocations()
    rows = rows[rows.requested_bytes == 32 * training.outputs * 4]
    return sorted(zip(rows.category.astype(str), rows.role.astype(str), strict=True))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_models_trained_at_once_have_each_their_phases(mode: dict[str, Any]) -> None:
    def run(trainings: list[Training], start: Callable[[list[Work]], None]) -> list[Any]:
        works = [lambda one=one: here(one) for one in trainings]  # type: ignore[misc]
        with pytracer.trace(devices="cpu", table=False, **mode) as t:
            start(works)
        assert len(t.steps()) == STEPS * len(trainings)
        return [words_of(t, one) for one in trainings]

    def one_after_another(works: list[Work]) -> None:
        for work in works:
            work()

    def at_once(works: list[Work]) -> None:
        threads = [threading.Thread(target=work) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def three() -> list[Training]:
        return [Training(1000 + 8 * number) for number in range(3)]

    alone = run(three(), one_after_another)
    for _ in range(by_tier(1, 3, 10)):
        assert run(three(), at_once) == alone


class Turns:
    """Threads that work one at a time. Which is next after each piece of work is drawn."""

    def __init__(self, seed: int, works: list[Callable[[Work], None]]) -> None:
        self.random = random.Random(seed)
        self.may_go = [threading.Semaphore(0) for _ in works]
        self.at_work = list(range(len(works)))
        threads = [
            threading.Thread(target=self.work, args=(number, work))
            for number, work in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        self.let_one_go()
        for thread in threads:
            thread.join()

    def work(self, number: int, work: Callable[[Work], None]) -> None:
        def wait() -> None:
            self.let_one_go()
            self.may_go[number].acquire()

        self.may_go[number].acquire()
        try:
            work(wait)
        finally:
            self.at_work.remove(number)
            self.let_one_go()

    def let_one_go(self) -> None:
        if self.at_work:
            self.may_go[self.random.choice(self.at_work)].release()


def in_pieces(training: Training, wait: Work) -> None:
    for _ in range(STEPS):
        wait()
        x, y = torch.randn(32, 16), torch.randint(0, training.outputs, (32,))
        wait()
        logits = training.model(x)
        wait()
        training.loss = nn.functional.cross_entropy(logits, y)
        del x, y, logits
        wait()
        training.backward()
        wait()
        training.update()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_models_that_take_turns_have_each_their_phases(mode: dict[str, Any]) -> None:
    def run(start: Callable[[list[Callable[[Work], None]]], Any]) -> list[Any]:
        trainings = [Training(1000 + 8 * number) for number in range(3)]
        with pytracer.trace(devices="cpu", table=False, **mode) as t:
            start([partial(in_pieces, training) for training in trainings])
        return [words_of(t, training) for training in trainings]

    alone = run(lambda works: [work(lambda: None) for work in works])
    for seed in range(by_tier(3, 10, 100)):
        assert run(partial(Turns, seed)) == alone, seed


def fed(batches: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches that a thread makes from raw bytes, ahead of the training."""
    ready: queue.Queue[tuple[torch.Tensor, torch.Tensor] | None] = queue.Queue(2)

    def feed() -> None:
        for _ in range(batches):
            raw = torch.randint(0, 255, (48, 16), dtype=torch.uint8)
            ready.put(((raw.float() - 128) / 255, torch.randint(0, 8, (48,))))
        ready.put(None)

    thread = threading.Thread(target=feed)
    thread.start()
    yield from iter(ready.get, None)
    thread.join()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_feeders_blocks_do_not_depend_on_when_it_runs(mode: dict[str, Any]) -> None:
    def words() -> list[Any]:
        training = Training()
        with pytracer.trace(devices="cpu", table=False, **mode) as t:
            for x, y in fed(12):
                nn.functional.cross_entropy(training.model(x), y).backward()
                training.update()
        rows = t.allocations()
        rows = rows[rows.thread != rows.thread.mode()[0]]
        columns = [rows[name].astype(str) for name in ("requested_bytes", "category", "role")]
        return sorted(zip(*columns, strict=True))

    first = words()
    assert {category for size, category, _ in first if size == "384"} == {"inputs"}
    for _ in range(by_tier(2, 5, 20)):
        assert words() == first


def test_an_evaluation_in_another_thread_is_one_of_this_thread() -> None:
    def run(evaluate: Callable[[Work], None]) -> list[Any]:
        training = Training()

        def evaluation() -> None:
            with torch.no_grad():
                training.model(torch.randn(40, 16))

        with pytracer.trace(devices="cpu", table=False) as t:
            for _ in range(STEPS):
                training.step()
                evaluate(evaluation)
        rows = t.allocations()
        columns = [rows[name].astype(str) for name in ("requested_bytes", "category", "phase")]
        return list(zip(*columns, strict=True))

    assert run(in_a_new_thread) == run(lambda work: work())
