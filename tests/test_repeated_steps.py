"""What a longer run asks the allocator for, from an imagined run of two steps."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import pytracer
from pytracer.analysis.allocator import repeated, replay
from pytracer.analysis.allocator.steps import Steps, steps
from pytracer.data.recorded import Trace

DEVICE = "cuda:0"


def imagined(train: Callable[[int], None], count: int) -> Trace:
    with pytracer.imagine("H100") as t:
        train(count)
    data: Trace = t.data
    return data


def plain(count: int) -> None:
    """Keeps its batch, its loss and its gradients into the next step."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(count):
        x = torch.randn(64, 512, device="cuda")
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()


def carried(count: int) -> None:
    """A recurrent state, and an average of weights that is made anew."""
    cell = torch.nn.GRUCell(64, 128, device="cuda")
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1, momentum=0.9)
    state = torch.zeros(32, 128, device="cuda")
    average = [one.detach().clone() for one in cell.parameters()]
    for _ in range(count):
        state = cell(torch.randn(32, 64, device="cuda"), state.detach())
        state.square().sum().backward()
        optimizer.step()
        average = [
            0.9 * a + 0.1 * b.detach() for a, b in zip(average, cell.parameters(), strict=True)
        ]
        optimizer.zero_grad()


def grows(count: int) -> None:
    """Keeps more with each step."""
    model, kept = torch.nn.Linear(256, 256).cuda(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        loss = model(torch.randn(64, 256, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        kept.append(loss)


def asked(of: Steps) -> list[tuple[int, ...]]:
    """The steps, with blocks numbered as they first appear."""
    numbers: dict[int, int] = {}
    names = ("kind", "block", "bytes", "lane")
    rows = zip(*(of.columns[name].tolist() for name in names), strict=True)
    return [
        (kind, numbers.setdefault(block, len(numbers)), size, lane)
        for kind, block, size, lane in rows
    ]


@pytest.mark.parametrize("train", [plain, carried])
def test_a_longer_run_asks_for_the_same_again(train, monkeypatch) -> None:
    monkeypatch.setattr(repeated, "_TIMES", 3)
    short, long = imagined(train, 3), imagined(train, 6)
    more, source = repeated.longer(short, steps(short, DEVICE))
    assert asked(more) == asked(steps(long, DEVICE))
    assert (steps(short, DEVICE).position[source] == more.position).all()


def test_steps_that_do_not_pair_are_not_repeated() -> None:
    data = imagined(grows, 3)
    own = steps(data, DEVICE)
    more, source = repeated.longer(data, own)
    assert more is own
    assert source.tolist() == np.arange(len(own.position)).tolist()


def test_a_card_must_have_room_for_the_longer_run() -> None:
    data = imagined(plain, 2)
    replayed = replay.replay(data, capacity=1 << 40, unlimited=True)
    assert len(replayed._longer.position) > len(replayed._steps.position)
    recorded = replay._smallest(replayed._steps, replayed._rules, "capacity", replayed.orders)
    assert replayed.smallest_room >= recorded


def alternating(count: int) -> None:
    """Asks for blocks of 24 and of 64 MiB in turns."""
    model = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        for rows in (6144, 16384):
            model(torch.randn(rows, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_later_steps_of_a_tight_card_wait_for_the_allocator() -> None:
    """Large blocks are not split there, so that none serves the other size."""
    data, plenty = imagined(alternating, 2), 1 << 40
    split, whole = (
        replay.replay(data, settings, capacity=plenty, unlimited=True)
        for settings in ("", "max_split_size_mb:21")
    )
    for one, waits in ((split, 0), (whole, repeated._TIMES)):
        assert one.later_retries(plenty) == 0
        assert one.later_retries(one.smallest_room) == waits
