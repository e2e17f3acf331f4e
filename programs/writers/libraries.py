"""Writers that use torch, numpy and what stands on them."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def torch_checkpoint(here: Path) -> None:
    model = nn.Linear(4, 4).to(_device())
    torch.save({"model": model.state_dict(), "step": 3}, "model.pt")
    with open(here / "by_file.pt", "wb") as file:
        torch.save(model.state_dict(), file)
    for name in ("by_file.pt", "model.pt"):
        assert (here / name).stat().st_size > 0
    loaded = torch.load(here / "model.pt", map_location=_device())
    assert loaded["step"] == 3
    assert loaded["model"]["weight"].shape == (4, 4)
    assert loaded["model"]["weight"].device.type == _device()
    model.load_state_dict(loaded["model"])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4, device=_device())).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), here / "optimizer.pt")
    optimizer.load_state_dict(torch.load(here / "optimizer.pt"))


def safetensors_checkpoint(here: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({"weight": torch.zeros(3, 5)}, here / "model.safetensors")
    assert load_file(here / "model.safetensors")["weight"].shape == (3, 5)


def numpy_arrays(here: Path) -> None:
    np.save(here / "results" / "deep" / "weights.npy", np.ones(3))
    np.savez("all.npz", a=np.zeros(2))
    np.savetxt("log.csv", np.ones((2, 2)))
    assert np.load(here / "results" / "deep" / "weights.npy").sum() == 3


def numpy_memmap(here: Path) -> None:
    array = np.memmap("map.bin", dtype="float32", mode="w+", shape=(100,))
    array[:] = 1
    array.flush()
    del array
    assert np.memmap("map.bin", dtype="float32", mode="r")[5] == 1
    assert (here / "map.bin").stat().st_size == 400


def tensorboard_events(here: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(here / "results" / "tb")
    writer.add_scalar("loss", 1.0, 0)
    writer.close()
    assert len(os.listdir(here / "results" / "tb")) == 1


class _Writes(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        Path(f"item{index}").write_text("loaded")
        return index


def dataloader_worker(here: Path) -> None:
    list(torch.utils.data.DataLoader(_Writes(), num_workers=1, batch_size=2))
    assert (here / "item3").read_text() == "loaded"


WRITERS = {
    each.__name__: each
    for each in (
        *(torch_checkpoint, safetensors_checkpoint, numpy_arrays, numpy_memmap),
        *(tensorboard_events, dataloader_worker),
    )
}
