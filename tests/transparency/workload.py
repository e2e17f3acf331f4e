"""A program in a file of its own: tools that count lines, calls and branches have one to count."""

import threading
from collections.abc import Callable, Iterator

import torch
from torch import nn

KEPT: list[bytes] = []  # of the last training


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 2:
            x = self.first(x).relu() + x
        else:
            hidden = self.second(x)
            x = hidden.sigmoid() + x
        return x


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def batches(count: int, device: torch.device) -> Iterator[torch.Tensor]:
    for number in range(count):
        yield torch.full((2, 4), float(number), device=device)


def scale(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


def evaluate(model: nn.Module, into: list[float]) -> None:
    with torch.no_grad():
        into.append(float(model(torch.ones(2, 4, device=device_of(model))).sum()))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(Gate(), Gate(), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 3,
    *,
    threads: bool = True,
) -> list[float]:
    losses: list[float] = []
    KEPT.clear()
    for x in batches(steps, device_of(model)):
        optimizer.zero_grad()
        hidden = model(x)
        hidden.register_hook(scale)
        loss = hidden.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        KEPT.append(bytes(1000 * len(losses)))
        if threads:
            thread = threading.Thread(target=evaluate, args=(model, losses))
            thread.start()
            thread.join()
    try:
        model(torch.ones(2, 5, device=device_of(model)))
    except RuntimeError as error:
        losses.append(len(str(error)))
    return losses


def backward_only(
    model: nn.Module, steps: int, hook: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    for x in batches(steps, device_of(model)):
        hidden = model(x)
        hidden.register_hook(hook)
        hidden.square().mean().backward()
