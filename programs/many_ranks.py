"""A folder with the files of many ranks, made from recordings of one real training.

Every rank has the recording of a healthy, a leaking or a more loaded program, with sizes and times of its own.
Four ranks have a planted fault: `Faults` says which.
"""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from pytracer import trace
from pytracer.data.recorded import Trace

RANKS_PER_HOST = 8
_STEPS = 8


class Faults(NamedTuple):
    """The ranks with a fault."""

    leaking: int
    imbalanced: int
    truncated: int
    missing: int

    @classmethod
    def among(cls, ranks: int) -> "Faults":
        return cls(ranks // 5, ranks // 3, ranks // 2, 3 * ranks // 4)


class Net(nn.Module):
    """A few layers, so that a rank's file has modules to name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        y: torch.Tensor = self.head(x)
        return y


def recorded(
    rows: int = 64, *, leaks: bool = False, path: Path | None = None, pause: float = 0
) -> Trace:
    """A real training of `Net`, with a pause after each step."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    kept = []
    options: dict[str, Any] = {} if path is None else {"path": path}
    with trace(net, optimizer, devices="cpu", stacks=True, table=False, **options) as t:
        for _ in range(_STEPS):
            loss = net(torch.randn(rows, 128)).logsumexp(1).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(pause)
            if leaks:
                kept.append(torch.zeros(100_000))
    del kept
    return t.data


def write(folder: Path, ranks: int, seed: int = 0) -> Faults:
    """Writes a file for each rank but the missing one."""
    faults = Faults.among(ranks)
    recorded()  # the first training in a process imports what it needs
    healthy, leaking, loaded = recorded(), recorded(leaks=True), recorded(rows=256)
    chance = np.random.default_rng(seed)
    for rank in range(ranks):
        which = {faults.leaking: leaking, faults.imbalanced: loaded}.get(rank, healthy)
        if rank == faults.missing:
            continue
        path = folder / f"train.rank{rank}.pytrace"
        if rank == faults.truncated:
            _write_cut(path, rank, ranks)
        else:
            _varied(which, rank, ranks, chance).save(path)
    return faults


def _write_cut(path: Path, rank: int, ranks: int) -> None:
    """A file as a killed rank leaves it: written while it recorded, without its end."""
    before = dict(os.environ)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    try:
        recorded(path=path, pause=0.15)
    finally:
        os.environ.clear()
        os.environ.update(before)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4])


def _varied(base: Trace, rank: int, ranks: int, chance: np.random.Generator) -> Trace:
    """The recording as another rank of the job would have made it."""
    size = 1 + 0.004 * chance.random()
    events = base.events
    # Equal sizes stay equal, so that a free still fits its allocation.
    sizes = np.round(events.bytes * size).astype(events.bytes.dtype)
    later = int(chance.integers(0, 2_000_000))
    document: dict[str, Any] = {
        **base.meta,
        "rank": rank,
        "world_size": ranks,
        "host": f"node-{rank // RANKS_PER_HOST}",
        "pid": 1000 + rank,
    }
    return replace(
        base,
        events=events._replace(bytes=sizes),
        clock=base.clock._replace(unix_ns=base.clock.unix_ns + later),
        meta=json.loads(json.dumps(document)),
    )
