"""An imagined run that counts what no card would take says so, and gives no verdict."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pytracer
from pytracer import errors
from pytracer.analysis.allocator.replay import NOT_KNOWN
from pytracer.analysis.facts.doubts import doubts
from pytracer.cli import main
from pytracer.export.fits_text import on_a_card
from pytracer.imagined.fake_mode import Mode

WIDTH = 256


def train(model: Any, sizes: tuple[int, ...] = (16, 16), **options: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for size in sizes:
        model(torch.randn(size, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def layers() -> nn.Sequential:
    return nn.Sequential(*(block() for _ in range(3))).to("cuda")


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def says(t: Any, words: str) -> None:
    """Every answer that rests on this run is not known, for that reason."""
    (reason,) = doubts(t.data)
    assert words in reason
    found = t.fits()
    assert found.verdict == found.basis == NOT_KNOWN
    assert not found
    assert found.helps is None
    assert on_a_card(found).startswith(f"not known: {reason.rstrip('.')}")
    assert "NOT KNOWN" in t.table()
    assert t.checkpoint_plan("79GiB").verdict == NOT_KNOWN
    assert t.what_if(batch=16).basis == NOT_KNOWN


def test_shapes_that_torch_computes_for_itself_are_noticed(monkeypatch: Any) -> None:
    """The guard that leaves them out is taken away: FSDP2's propagation then counts as memory."""
    monkeypatch.setattr(Mode, "computes_shapes", lambda self: False)
    with pytracer.imagine("H100", ranks=8) as t:
        dist.init_process_group("nccl")
        model = layers()
        fully_shard(model)
        train(model, foreach=False)
    if not t.data.meta["imagined"]["doubts"]:
        pytest.skip("this torch propagates shapes without tensors")
    says(t, "torch's own bookkeeping (distributed/tensor/")


def test_a_part_that_is_larger_than_the_ranks_share_is_noticed() -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    def squared(local_rows: int, placement: Any) -> Any:
        with pytracer.imagine("H100", ranks=4) as t:
            dist.init_process_group("nccl")
            mesh = init_device_mesh("cuda", (4,))
            whole = torch.ones(10, 4, device="cuda")
            distribute_tensor(whole, mesh, [placement]).square()
            local = torch.ones(local_rows, 4, device="cuda")
            shape = {"shape": torch.Size((10, 4)), "stride": (4, 1)}
            DTensor.from_local(local, mesh, [placement], run_check=False, **shape).square()
        return t

    assert not doubts(squared(3, Shard(0)).data), "the first ranks have three rows of ten"
    assert not doubts(squared(10, Replicate()).data)
    (reason,) = doubts(squared(10, Shard(0)).data)
    assert "has 160 B on this rank, and the rank's share is 48 B" in reason


class Once(nn.Module):
    """Takes more memory for a moment when it is first called."""

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self.layer, self.keeps, self.kept = layers(), keeps, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.ones(64 << 20, device=x.device)
            if not self.keeps:
                self.kept = x.new_empty(0)
        result: torch.Tensor = self.layer(x)
        return result


def test_a_first_step_that_takes_more_than_the_next_is_noticed() -> None:
    with pytracer.imagine("H100") as t:
        train(Once().to("cuda"))
    says(t, "the first step takes 186 MiB more than the next ones")


@pytest.mark.parametrize(
    "program",
    [
        lambda: train(Once(keeps=True).to("cuda")),
        lambda: train(Once().to("cuda"), sizes=(16,)),
        lambda: train(Once().to("cuda"), sizes=(4096, 16)),
        lambda: train(layers(), sizes=(16, 16, 16)),
        lambda: train(layers(), sizes=(16, 8), fused=True),
    ],
    ids=["kept", "one step", "other inputs", "optimizer states", "last batch"],
)
def test_a_first_step_that_is_explained_is_not_doubted(program: Callable[[], None]) -> None:
    with pytracer.imagine("H100") as t:
        program()
    assert doubts(t.data) == ()
    assert t.fits().verdict == "fits"


@pytest.mark.filterwarnings("ignore:TensorFloat32")  # Inductor's, of a card that could do better
def test_compiled_code_that_is_not_followed_has_no_verdict(tmp_path: Path, capsys: Any) -> None:
    """Nor a largest batch."""

    def run(batch: int) -> None:
        train(torch.compile(layers(), mode="reduce-overhead"), sizes=(batch, batch))

    with pytracer.imagine("H100") as t:
        run(16)
    (reason,) = doubts(t.data)
    assert "CUDA graphs keep a pool" in reason
    assert t.fits().verdict == NOT_KNOWN
    with pytest.raises(errors.CannotImagine, match="CUDA graphs keep a pool"):
        pytracer.largest_batch(run, "H100")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nlayer = torch.nn.Linear(8, 8).cuda()\n"
        "layer = torch.compile(layer, mode='reduce-overhead')\n"
        "layer(torch.ones(4, 8).cuda()).sum().backward()\n"
    )
    code = errors.BudgetExceeded.exit_code
    assert main(["imagine", "--on", "H100", "--json", str(script)]) == code
    card = json.loads(capsys.readouterr().out)["cards"][0]
    assert (card["verdict"], card["basis"], card["fits"]) == (NOT_KNOWN, NOT_KNOWN, False)
    assert "CUDA graphs keep a pool" in card["why"][0]


def test_a_file_of_an_earlier_release_counted_compiled_code_as_eager() -> None:
    with pytracer.imagine("H100") as t:
        train(layers())
    noted = {**t.data.meta, "imagined": {**t.data.meta["imagined"], "compiled": ["Net"]}}
    (why,) = doubts(dataclasses.replace(t.data, meta=noted))
    assert "torch.compile was not followed" in why


def test_a_file_with_damaged_doubts_is_read() -> None:
    """What is no doubt is left out."""
    from pytracer.data import meta

    with pytracer.imagine("H100") as t:
        train(layers())
    for row in (3, {}, {"bytes": "many"}, {"bytes": None, "share": 4}):
        noted = {**t.data.meta, "imagined": {**t.data.meta["imagined"], "doubts": [row]}}
        read = meta.of(dataclasses.replace(t.data, meta=noted)).imagined
        assert read is not None
        assert read.doubts == ()
