"""Recordings that are killed at random instants, held against one that was not.

A kill leaves what had been written by then: some first bytes of the file. So each file is also
cut at random places, as if the kill had come while those bytes were written.

    python -m tests.kills FOLDER STEPS DELAY ...

records a whole run of so many steps, then kills one run for each delay (seconds from the moment
that its file exists).
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytracer.analysis.facts import timelines

if TYPE_CHECKING:
    import pandas as pd

ROOT = Path(__file__).parents[1]
WHOLE = "whole.pytrace"

# What a step is, to the byte. Its times are not the same twice.
TOTALS = ["peak_bytes", "growth_bytes", "start_bytes", "end_bytes", "allocations", "micro_steps"]


@dataclass
class Found:
    """One file that a kill left, or may have left."""

    name: str
    bytes: int
    finished_steps: int
    events: int
    wrong: list[str]  # how it differs from the whole recording, or keeps silent


def kill_recordings(folder: Path, delays: list[float], steps: int) -> None:
    """In a process of its own: that forks a recorder per kill."""
    subprocess.run(
        [sys.executable, "-m", "tests.kills", str(folder), str(steps), *map(str, delays)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )


def compare(folder: Path, cuts: int, seed: int) -> Iterator[Found]:
    """Every killed file, and as many cuts of each, beside the whole recording."""
    from pytracer.reading.views import read

    rng = random.Random(seed)
    truth = read(folder / WHOLE).steps()[TOTALS]
    for killed in sorted(folder.glob("killed-*.pytrace")):
        whole = killed.read_bytes()
        yield _compare(killed, truth)
        for _ in range(cuts):
            cut = killed.with_name("cut.pytrace")
            cut.write_bytes(whole[: rng.randrange(len(whole) + 1)])
            yield _compare(cut, truth)
            cut.unlink()


def _compare(path: Path, truth: "pd.DataFrame") -> Found:
    from pytracer import errors
    from pytracer.reading.views import read

    size = path.stat().st_size
    try:
        loaded = read(path)
    except errors.UnreadableTrace as refused:
        # Killed before the first flush. One line says so.
        return Found(path.name, size, 0, 0, ["several lines"] if "\n" in str(refused) else [])
    finished = len(timelines.timeline(loaded.data).step_ends)
    steps = loaded.steps()[TOTALS][:finished]
    wrong = [
        f"{name} of step {step} is {steps[name][step]} and not {truth[name][step]}"
        for name in TOTALS
        for step in steps.index[: len(truth)]
        if steps[name][step] != truth[name][step]
    ]
    if finished != len(steps):
        wrong.append(f"{finished} steps ended and {len(steps)} are shown")
    if loaded.file_report["status"] != "truncated":
        wrong.append(f"it is {loaded.file_report['status']}")
    # Every free has its allocation, and every reference leads somewhere.
    if list(loaded.health().index) != ["truncated_file"]:
        wrong.append(f"health: {list(loaded.health().index)}")
    wrong += [note for note in loaded.file_report["notes"] if "refer to" in note]
    return Found(path.name, size, finished, len(loaded.data.events.ticks), wrong)


# ---------------------------------------------------------------- the process that records


def _main(folder: Path, steps: int, delays: list[float]) -> None:
    import torch
    import torch._dynamo  # which optimizers import: once, and not in each child

    import pytracer.recording.api  # noqa: F401

    torch.set_num_threads(1)
    _in_child(folder / WHOLE, steps)
    for number, delay in enumerate(delays):
        path = folder / f"killed-{number:03}.pytrace"
        child = os.fork()
        if child == 0:
            _record(path, None)
        # From the moment the file exists: also while its first bytes are written.
        while not path.exists() and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.0005)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _in_child(path: Path, steps: int) -> None:
    child = os.fork()
    if child == 0:
        _record(path, steps)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        raise SystemExit(f"the recording to {path} failed")


def _record(path: Path, steps: int | None) -> None:
    """A step leaves something behind, another size each time: no two steps are alike."""
    import torch
    from torch import nn

    import pytracer

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    batch, kept = torch.randn(4, 32), []
    with pytracer.trace(model, optimizer, path=path, devices="cpu", stacks=True, table=False):
        while steps is None or len(kept) < steps:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(torch.empty(1000 + len(kept)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), [float(delay) for delay in sys.argv[3:]])
