"""Imagined ranks take what real ones take, block by block. The real ones are processes that use gloo."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import distributed

import pytracer
from programs import parallel
from pytracer.analysis.facts.doubts import doubts
from tests.imagined_oracle import compare, peaks
from tests.tiers import first_of

ALL = {name: way for name, way in (parallel.WAYS | parallel.VARIANTS).items() if not way.needs}
# Ways that are not equal, and why.
_ELSEWHERE = {
    "sequence_parallel": "to propagate shapes, torch takes 8 bytes for a number on the host",
    "ddp_compressed": "gloo may still have a bucket when the next one is made",
}
# Whether another rank uses the parameters that a rank leaves out.
_OTHERS_USE = {
    "ddp_skips": False,
    "ddp_skips_views": False,
    "ddp_static": False,
    "ddp_by_rank": True,
}
_FIRST = (
    "fsdp2",
    "ddp",
    "pipeline",
    "fsdp1",
    "pipeline_interleaved",
    "ddp_zero",
    "experts",
    "ddp_skips",
    "ddp_by_rank",
)


_LASTING = ("weights", "gradients", "optimizer_state", "activations", "inputs")


def followed() -> list[Any]:
    """One in each run of the tests, seven in CI, all at night."""
    later = [name for name in ALL if name not in _FIRST and name not in _ELSEWHERE]
    first = first_of(_FIRST)
    return first + first_of(later, 0, later=pytest.mark.nightly)


def traces(folder: Path, way: str, name: str) -> list[pytracer.LoadedTrace]:
    """Each rank's trace, of three steps in a process of its own."""
    folder.mkdir()
    ranks = range(ALL[name].ranks)
    command = [sys.executable, "-m", __name__, str(folder), way, name]
    running = [subprocess.Popen([*command, str(rank)]) for rank in ranks]
    ended = [each.wait(300) for each in running]
    assert not any(ended)
    return [pytracer.load(folder / f"rank{rank}.pytrace") for rank in ranks]


@pytest.mark.parametrize("name", followed())
def test_a_rank_takes_what_it_is_imagined_to_take(name: str, tmp_path: Path) -> None:
    """Gloo's threads decide when temporary blocks end, and as imagined they end at the earliest."""
    both = (traces(tmp_path / way, way, name) for way in ("real", "imagined"))
    for there, imagined in zip(*both, strict=True):
        found = compare(there.data, imagined.data)
        assert not found.invented
        assert not found.missing
        highest, guessed = peaks(there.data), peaks(imagined.data)
        for category in _LASTING:
            assert highest.get(category) == guessed.get(category), category
        assert all(highest[category] >= guessed[category] for category in guessed)
        assert not doubts(imagined.data)


class Summed(torch.autograd.Function):
    """As DTensor does it: a collective between a Function and the operator that allocates."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x, "sum", distributed.group.WORLD) + 0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def test_a_collective_inside_a_function_is_communication() -> None:
    """The Function is the outermost operator, and a clone the innermost."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        x = torch.ones(1000, requires_grad=True)
        with pytracer.trace(devices="cpu", table=False) as t:
            Summed.apply(x)
    finally:
        distributed.destroy_process_group()
    rows = t.allocations()
    copies = rows[(rows.op == "aten::clone") & (rows.requested_bytes == 4000)]
    assert copies.category.tolist() == ["communication"]


def _backward() -> str:
    """The line of the programs' backward."""
    lines, first = inspect.getsourcelines(parallel.trained)
    at = next(at for at, line in enumerate(lines) if "loss.backward()" in line)
    return f"programs/parallel.py:{first + at}"


def main(folder: Path, way: str, name: str, rank: int) -> None:
    """One rank's three steps, real or imagined."""
    torch.set_num_threads(1)
    ranks = ALL[name].ranks
    if way == "real":
        recording: Any = pytracer.trace(devices="cpu", table=False)
    else:
        assume = {_backward(): _OTHERS_USE[name]} if name in _OTHERS_USE else None
        recording = pytracer.imagine("cpu", ranks=ranks, rank=rank, assume=assume)
    with recording as t:
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks
        )
        training = ALL[name].build(parallel.Place(rank, ranks, "cpu"))
        for _ in range(3):
            training.step()
        distributed.destroy_process_group()
    t.save(folder / f"rank{rank}.pytrace")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4]))
