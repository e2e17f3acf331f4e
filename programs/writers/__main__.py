"""Trains a step, and lets the named writers change the working directory, one after the other."""

import importlib
import os
import sys
from pathlib import Path

_PLACES = ("plain", "processes", "libraries", "frameworks")


def run(name: str, here: Path) -> None:
    """Runs one writer, named as in plain.csv_log, in the folder."""
    place, _, writer = name.partition(".")
    module = importlib.import_module(f"programs.writers.{place}")
    {**module.WRITERS, **getattr(module, "CONNECTS", {})}[writer](here)


def train() -> None:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Linear(4, 4).to(device)
    model(torch.ones(2, 4, device=device)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


if __name__ == "__main__":
    names = sys.argv[1:]
    if "--no-torch" in names:
        names.remove("--no-torch")
    else:
        train()
    top = Path.cwd()
    for name in names:
        # Each in a folder of its own, so that one does not meet what another has done.
        here = top / name if (top / name).is_dir() else top
        os.chdir(here)
        run(name, here)
        os.chdir(top)
