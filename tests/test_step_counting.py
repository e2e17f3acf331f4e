"""Steps are counted while nothing records, and no operator or backward node pays for it."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from pytracer.capture.session import Held
from pytracer.data._native import C


@pytest.fixture
def counted() -> Iterator[list[int]]:
    steps: list[int] = []
    held = Held()
    held.count_steps(lambda: steps.append(1))
    yield steps
    held.end()
    assert not C.status()["ops_installed"]


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters())


def test_nobody_listens_between_steps(counted: list[int]) -> None:
    model, optimizer = parts()
    listened = []
    optimizer.register_step_pre_hook(lambda *_: listened.append(C.status()["ops_installed"]))
    for number in range(5):
        output = model(torch.ones(2, 4)).sum()
        output.register_hook(lambda gradient: listened.append(C.status()["ops_installed"]))
        output.backward()
        optimizer.step()
        assert len(counted) == number + 1
        assert not C.status()["ops_installed"]
    assert listened == [False, True] * 5  # within the step, its end is awaited


def test_a_step_that_fails_is_not_counted(counted: list[int]) -> None:
    model, optimizer = parts()

    def fails(*_: object) -> None:
        raise RuntimeError("mine")

    hook = optimizer.register_step_pre_hook(fails)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="mine"):
        optimizer.step()
    assert counted == []
    assert not C.status()["ops_installed"]
    hook.remove()
    optimizer.step()
    assert counted == [1]


def test_annotations_of_the_program_are_no_steps(counted: list[int]) -> None:
    with torch.autograd.profiler.record_function("mine"):
        assert not C.status()["ops_installed"]
    assert counted == []


def test_steps_in_several_threads_are_all_counted(counted: list[int]) -> None:
    def train() -> None:
        model, optimizer = parts()
        for _ in range(200):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    train()
    assert len(counted) == 200
    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Four optimizers that take turns are one training, so a step may be that of all of them.
    assert len(counted) >= 400


def test_torch_finds_its_own_method_again() -> None:
    kind = torch.autograd.profiler.record_function
    before = vars(kind)["__enter__"]
    held = Held()
    held.count_steps(lambda: None)
    assert vars(kind)["__enter__"] is before
    assert before.__code__.co_filename.endswith("profiler.py")
    held.end()
    with kind("mine") as entered:
        assert isinstance(entered, kind)
