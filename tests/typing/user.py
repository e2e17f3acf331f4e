"""A program of somebody who types everything; `mypy --strict` has nothing to say about it."""

from pathlib import Path

import torch
from torch import nn

import pytracer
from pytracer import LoadedTrace, load, trace


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """One step."""
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    optimizer.step()
    return loss.item()


@trace(table=False)
def evaluated(model: nn.Module, batch: torch.Tensor) -> int:
    """Its types are those of the function."""
    with torch.no_grad():
        return int(model(batch).numel())


def main(folder: Path) -> None:
    """Every view that has a type of its own."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with trace(model, optimizer, detail="category", devices=["cpu"], table=False) as t:
        value: float = train(model, optimizer, torch.ones(2, 4))
        t.step()
    peak: int = t.peak.bytes
    by_category: dict[str, int] = dict(t.peak.by_category)
    over = t.check(peak="2 GiB", growth_per_step=0)
    names: list[str] = [exceeded.name for exceeded in over]
    growth: int = t.growth_per_step()
    path: Path = t.save(folder / "run.pytrace", overwrite=True)
    again: LoadedTrace = load(path)
    shared: LoadedTrace = again.anonymous()
    page: Path = shared.export_html(folder / "run.html")
    text: str = t.table(width=80) + t.post_mortem()
    count: int = evaluated(model, torch.ones(2, 4))
    print(value, peak, by_category, names, growth, page, text, count, pytracer.__version__)  # noqa: T201
