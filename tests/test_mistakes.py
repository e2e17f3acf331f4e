"""Mistakes in tracing or training that a trace shows: each has one clear line, and no other case."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytracer import trace
from pytracer.analysis.answers import recording_quality
from pytracer.capture.hooks import HOOKS
from pytracer.data._native import C


def named(t: Any) -> dict[str, int]:
    """The warnings of a trace and their counts."""
    return {
        row.name: row.count
        for row in recording_quality.health_rows(t.data)
        if row.severity != "info"
    }


def train(model: nn.Module, optimizer: Any, steps: int = 2, *, backward: bool = True) -> None:
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        if backward:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_threads_that_train_at_once_are_told_that_a_trace_is_of_the_process() -> None:
    together = threading.Barrier(2)
    found = {}

    def work(number: int) -> None:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        together.wait()
        with trace(model, optimizer, table=False) as t:
            together.wait()
            train(model, optimizer)
            together.wait()  # so that both train before and after it
            train(model, optimizer)
            together.wait()
        found[number] = named(t), str(t)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [rows for rows, _ in found.values()] == [{"training_threads": 2}] * 2
    assert "a trace records the whole process" in " ".join(found[0][1].split())


@pytest.mark.filterwarnings("ignore:devices='cuda':RuntimeWarning")  # where there is none
def test_a_model_on_a_device_that_is_not_recorded_is_named() -> None:
    model = nn.Linear(8, 8)
    with trace(model, devices="cuda", table=False) as t:
        model(torch.randn(4, 8)).sum().backward()
    assert named(t)["weights_elsewhere"] == 2
    assert len(t.allocations()) == 0  # nor is its memory


@pytest.mark.cuda
def test_a_model_on_the_cpu_beside_a_recorded_gpu_is_named() -> None:
    model = nn.Linear(8, 8)
    with trace(devices="cuda", table=False) as t:
        torch.ones(8, device="cuda")
        model(torch.randn(4, 8)).sum().backward()
    assert named(t) == {"weights_elsewhere": 2}


def test_an_optimizer_of_another_model_is_named() -> None:
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with trace(model, optimizer, table=False) as t:
        train(model, optimizer)
    assert named(t) == {"foreign_parameters": 2}
    assert "make the optimizer from the model" in " ".join(str(t).split())


def test_steps_that_never_call_backward_are_counted() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace(model, optimizer, table=False) as t:
        train(model, optimizer, 3, backward=False)
        train(model, optimizer, 2)
    assert named(t) == {"steps_without_backward": 3}
    assert "loss.backward()" in " ".join(str(t).split())


def tensors_alone() -> None:
    weight = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        weight.square().sum().backward()
        optimizer.step()


def closure() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.ones(4, 8)).square().mean()
        value.backward()
        return value

    for _ in range(2):
        optimizer.step(loss)


def two_optimizers() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    for _ in range(2):
        second(first(torch.ones(4, 8))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def masters() -> None:
    model = nn.Linear(8, 8).bfloat16()
    copies = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1)
    model(torch.ones(4, 8, dtype=torch.bfloat16)).sum().backward()
    for copy, weight in zip(copies, model.parameters(), strict=True):
        assert weight.grad is not None
        copy.grad = weight.grad.float()
    optimizer.step()


def gradients_asked_for() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = list(model.parameters())
    found = torch.autograd.grad(model(torch.ones(4, 8)).sum(), weights)
    for weight, gradient in zip(weights, found, strict=True):
        weight.grad = gradient
    optimizer.step()


def evaluation() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    with torch.no_grad():
        model(torch.ones(4, 8))


@pytest.mark.parametrize(
    "run",
    [tensors_alone, closure, two_optimizers, masters, gradients_asked_for, evaluation],
    ids=lambda run: run.__name__,
)
def test_what_is_no_mistake_is_not_called_one(run: Callable[[], None]) -> None:
    with trace(table=False) as t:
        run()
    assert named(t) == {}


def test_an_optimizer_given_without_its_model_finds_it_when_it_is_called() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    with trace(optimizer, table=False) as t:
        train(model, optimizer)
    assert named(t) == {}
    state = t.allocations().query("category == 'optimizer_state'")
    assert set(state.name) == {"weight", "bias"}


# ---------------------------------------------------------------- what goes wrong in the middle


def test_what_goes_wrong_in_the_last_look_is_counted_and_leaves_nothing_hooked() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace(model, optimizer, table=False) as t:
        train(model, optimizer)
        HOOKS.labels._roots = None  # a mistake of ours
    assert t.health()["count"]["callback_errors"] >= 1
    status = C.status()
    assert (status["sessions"], status["ops_installed"], status["cpu_installed"]) == (
        0,
        False,
        False,
    )


def test_a_program_that_changes_its_directory_still_finds_its_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with trace(path="run.pytrace", table=False) as t:
        os.chdir("elsewhere")
        torch.ones(100)
    assert t.peak.bytes >= 400
    assert (tmp_path / "run.pytrace").exists()


def test_the_trace_of_a_call_that_raises_is_kept() -> None:
    @trace(table=False)
    def fails() -> None:
        torch.ones(100)
        raise KeyError("x")

    with pytest.raises(KeyError):
        fails()
    assert fails.last.peak.bytes >= 400  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:devices='cuda'")
def test_hooks_that_only_an_inner_trace_wanted_go_with_it() -> None:
    with trace(devices="cuda", table=False):
        with trace(devices="cpu", table=False):
            assert C.status()["cpu_installed"]
        assert not C.status()["cpu_installed"]
