"""How data reach the device: worker processes and pinned memory."""

import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from pytracer.capture.device_memory import read_host
from pytracer.lab.claims.claim import (
    DEPENDS,
    Measured,
    Statement,
    Verdict,
    confirmed_if,
    mib,
    ranged,
)
from pytracer.lab.claims.experiment import Lab, experiment, ratio, spread

# ---------------------------------------------------------------------- D1: workers, pinned memory

D1 = Statement(
    "D1",
    sources=("S1",),
    quote="pin_memory=True and num_workers=4: faster loading",
)


class _Images(torch.utils.data.Dataset[torch.Tensor]):
    """Random images. Each takes some work to make."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        image = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(index))
        return image.sin().cos().exp().tanh()


def _loader(count: int, workers: int) -> Any:
    return torch.utils.data.DataLoader(
        _Images(count), batch_size=16, num_workers=workers, persistent_workers=workers > 0
    )


@experiment("data_loader")
def data_loader(lab: Lab) -> dict[str, Any]:
    """The speed and the memory of worker processes. On a GPU also the speed of pinned memory."""
    workers = min(4, len(os.sched_getaffinity(0)))
    count = lab.pick(1024, 8192)
    loaders = {number: _loader(count, number) for number in (0, workers)}
    seconds: dict[int, list[float]] = {number: [] for number in loaders}
    for turn in range(6):
        for number, loader in loaders.items():
            begin = time.perf_counter()
            for _batch in loader:
                pass
            if turn:  # the workers start in the first turn
                seconds[number].append(time.perf_counter() - begin)
    resident = [_resident(worker.pid) for worker in loaders[workers]._iterator._workers]
    figures: dict[str, Any] = {"workers": workers, "cores": len(os.sched_getaffinity(0))}
    figures |= ratio("faster_with_workers", seconds[0], seconds[workers])
    figures["worker_bytes"] = int(statistics.median(resident))
    figures["own_bytes"] = read_host().get("resident", 0)
    return figures | (_pinned(lab) if lab.cuda else {})


def _resident(pid: int) -> int:
    """The process's private memory. Pages shared with its parent cost nothing extra."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        wanted = "Private_"
    except OSError:  # the kernels of some containers hide this file; take all resident memory
        lines, wanted = (
            Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines(),
            "VmRSS",
        )
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(wanted))


def _pinned(lab: Lab) -> dict[str, Any]:
    """The speed of copies to the GPU from pinned and from pageable memory."""
    size = 256 << 20
    plain = torch.empty(size, dtype=torch.uint8)
    plain.fill_(1)
    fixed = plain.pin_memory()
    seconds = lab.alternating(
        {
            "plain": lambda: plain.to(lab.device),
            "pinned": lambda: fixed.to(lab.device, non_blocking=True),
        }
    )
    figures = spread("pinned_bytes_per_s", [size / each for each in seconds["pinned"]])
    figures |= spread("plain_bytes_per_s", [size / each for each in seconds["plain"]])
    return figures | ratio("faster_when_pinned", seconds["plain"], seconds["pinned"])


@D1.judged_by(
    "CONFIRMED if workers load at least 1.2x as fast and pinned memory is copied at least "
    "1.2x as fast; REFUTED if either is not; DEPENDS where there is no GPU to copy to",
    experiments=("data_loader",),
    without_gpu="Workers' speed and memory; not pinned copies.",
)
def workers_and_pinned_memory_are_faster(measured: Measured) -> Verdict:
    """Both must gain 20 %."""
    figures = measured["data_loader"]
    faster, workers = figures["faster_with_workers"], figures["workers"]
    times = ranged(figures, "faster_with_workers")
    text = f"{workers} workers load {times}x as fast, with {mib(figures['worker_bytes'])} each"
    if "faster_when_pinned" in figures:
        text += (
            f"; pinned {figures['pinned_bytes_per_s'] / 1e9:.1f} GB/s, "
            f"{ranged(figures, 'faster_when_pinned')}x pageable"
        )
        return confirmed_if(faster >= 1.2 and figures["faster_when_pinned"] >= 1.2, text)
    free = f"free cores, of which there are at most {figures['cores']}, and a GPU to copy to"
    return Verdict(DEPENDS, text, free)
