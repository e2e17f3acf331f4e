"""What torch computes for its shapes only takes no imagined memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import pytracer

RANKS, ROWS, COLUMNS = 4, 64, 48


def requested(t: Any) -> list[int]:
    return [int(one) for one in t.allocations()["requested_bytes"]]


@pytest.mark.parametrize("find", [FakeTensorMode, detect_fake_mode])
def test_who_enters_a_fake_mode_asks_for_shapes_only(find: Callable[[], Any]) -> None:
    """A mode of its own, or the one that torch's `detect_fake_mode` finds: outside of it all counts."""
    with pytracer.imagine("H100") as t:
        kept = [torch.empty(100, device="cuda")]
        with find(), find():
            shape = (torch.empty(1 << 20, device="cuda") + 1).shape
        kept.append(torch.empty(300, device="cuda"))
    assert shape == (1 << 20,)
    assert requested(t) == [400, 1200]


OPERATORS: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda x: (x * 2 + x).sigmoid(),
    "in place": lambda x: x.add_(1).mul_(x),
    "reduction": lambda x: x.sum(0),
    "reduction of the other": lambda x: x.softmax(1),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "product": lambda x: x @ x.t(),
    "views": lambda x: x.reshape(RANKS, -1, COLUMNS).transpose(0, 1).contiguous(),
    "made like": lambda x: torch.zeros_like(x) + torch.ones_like(x),
    "whole": lambda x: x.full_tensor(),
    "cut otherwise": lambda x: x.redistribute(placements=[Shard(1)]),
    "foreach": lambda x: torch._foreach_add([x, x], [x, x]),
    "foreach in place": lambda x: torch._foreach_mul_([x, x], 2.0),
    "layer": lambda x: nn.functional.layer_norm(x, (COLUMNS,)),
}
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_distributed_operator_takes_at_first_what_it_takes_again(placement: str) -> None:
    """DTensor computes the whole result's shape once and then remembers it."""
    with pytracer.imagine("H100", ranks=RANKS) as t:
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (RANKS,))
        rows = ROWS // RANKS if placement == "rows" else ROWS
        columns = COLUMNS // RANKS if placement == "columns" else COLUMNS
        local = torch.empty(rows, columns, device="cuda")
        local @ local.t()  # cuBLAS takes its workspace
        x = DTensor.from_local(local, mesh, [PLACEMENTS[placement]], run_check=False)
        for name, run in OPERATORS.items():
            taken = []
            for _ in range(2):
                before = len(t.allocations())
                run(x)
                taken.append([one for one in requested(t)[before:] if one > 1024])
            assert taken[0] == taken[1], name


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW, loop": partial(torch.optim.AdamW, foreach=False),
    "AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "SGD, loop": partial(torch.optim.SGD, momentum=0.9, foreach=False),
    "SGD, foreach": partial(torch.optim.SGD, momentum=0.9, foreach=True),
    "Adagrad, foreach": partial(torch.optim.Adagrad, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_over_shards_takes_no_more_than_the_shards(name: str) -> None:
    """Fused, foreach and in a loop: no block of a step is larger than a rank's largest share."""
    with pytracer.imagine("H100", ranks=RANKS) as t:
        dist.init_process_group("nccl")
        model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 512)).to("cuda")
        for layer in model:
            fully_shard(layer)
        optimizer = OPTIMIZERS[name](model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(8, 256, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    taken = t.allocations()
    taken = taken[taken["phase"] == "optimizer"]
    assert taken["requested_bytes"].max() <= 4 * 512 * 512 // RANKS
    first, second = (taken[taken["step"] == step]["requested_bytes"].tolist() for step in (0, 1))
    states = taken[taken["category"] == "optimizer_state"]["requested_bytes"].tolist()
    assert sorted(first) == sorted([*second, *states])


def test_parameters_that_are_cut_while_they_are_made_take_a_share() -> None:
    """`distribute_tensor` scatters a tensor that one rank has."""
    with pytracer.imagine("H100", ranks=RANKS) as t:
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (RANKS,))
        kept = distribute_tensor(torch.empty(ROWS, COLUMNS, device="cuda"), mesh, [Shard(0)])
    assert kept.to_local().shape == (ROWS // RANKS, COLUMNS)
    share = 4 * ROWS * COLUMNS // RANKS
    assert t.summary()["at_end"].sum() == share
