"""Programs that say what their tensors are, in every mode."""

import hashlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pytracer import trace
from pytracer.analysis import views
from tests.conformance import engines, trainings
from tests.conformance.cases import sums_hold
from tests.conformance.programs import MODES, ON_A_GPU, PROGRAMS, run

assert engines and trainings  # their programs are among PROGRAMS


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def everywhere() -> Iterator[Any]:
    for name in PROGRAMS:
        if name not in ON_A_GPU:
            yield pytest.param(name, "cpu", id=f"{name}-cpu")
        yield pytest.param(name, "cuda", id=f"{name}-cuda", marks=pytest.mark.cuda)


@pytest.mark.filterwarnings("ignore")  # torch's, of what these programs use
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "device"), list(everywhere()))
def test_tensors_are_what_the_program_says_they_are(name: str, mode: str, device: str) -> None:
    """Nothing is unknown, and at every event the categories sum to what is allocated."""
    says = run(name, mode, device)
    assert says.told
    assert says.wrong() == []
    assert says.data is not None
    rows = {row.category: row.own_peak for row in views.category_rows(says.data)}
    assert rows["unknown"] == 0
    assert sums_hold(says.data)


def categories_of_a_run(seconds: float) -> list[tuple[str, str, int]]:
    """Of each allocation, in order, from a program that rests between its steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64))
    optimizer = torch.optim.Adam(model.parameters())
    kept = []
    with trace(model, optimizer, report=False) as t:
        for step in range(24):
            x, y = torch.randn(33, 64), torch.randn(33, 64)
            kept.append(torch.randn(33, 64))
            (model(x) - y).abs().mean().backward()
            if step % 3 == 0:
                (model(x) * y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(seconds)
    rows = t.allocations().sort_values("start_ns", kind="stable")
    columns = (rows.category.astype(str), rows.role.astype(str), rows.requested_bytes)
    return list(zip(*columns, strict=True))


def test_the_same_program_has_the_same_categories_in_ten_runs_and_under_load() -> None:
    stop = threading.Event()

    def burn() -> None:
        while not stop.is_set():
            hashlib.sha256(bytes(1 << 20)).digest()

    runs = [categories_of_a_run(0.004 * (turn % 3)) for turn in range(5)]
    burning = [threading.Thread(target=burn) for _ in range(3)]
    for thread in burning:
        thread.start()
    try:
        runs += [categories_of_a_run(0.002 * (turn % 2)) for turn in range(5)]
    finally:
        stop.set()
        for thread in burning:
            thread.join()
    assert all(one == runs[0] for one in runs[1:])
