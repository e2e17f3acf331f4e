"""The lab of an experiment, which turns traces and times into figures.

An experiment is a function from a `Lab` to a flat dictionary of figures. It runs in a process of
its own. The lab saves its traces beside its figures, and explains each trace by category.
"""

import gc
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pytracer.analysis.allocator import ledger
from pytracer.analysis.answers import breakdown
from pytracer.analysis.facts import usage
from pytracer.data import meta
from pytracer.data.schema import CATEGORY_ORDER
from pytracer.lab.gemm.statistics import Interval, median
from pytracer.reading.views import Views, load
from pytracer.recording.api import trace

Run = Callable[["Lab"], dict[str, Any]]

# Packages whose name on PyPI is not the name they are imported by.
_DISTRIBUTIONS = {"pynvml": "nvidia-ml-py"}


def how_to_install(package: str) -> str:
    """The command that installs a package."""
    return f"pip install {_DISTRIBUTIONS.get(package, package)}"


class Missing(Exception):
    """The machine lacks something. The text names it, and says how to get it."""


@dataclass(frozen=True)
class Experiment:
    """A function, its needs, and the seconds it may take at small and at full scale."""

    run: Run
    needs: tuple[str, ...] = ()
    gpus: int = 0
    seconds: tuple[int, int] = (120, 240)
    several: bool = False  # sees every GPU; otherwise only the first, on which a Trainer trains

    def missing(self, device: str) -> str:
        """The reason why it cannot run on this machine; "" if it can."""
        if self.gpus and device == "cpu":
            return "needs a CUDA device: run it on a machine with an NVIDIA GPU"
        if self.gpus > 1 and torch.cuda.device_count() < self.gpus:
            return f"needs {self.gpus} GPUs; {torch.cuda.device_count()} visible here"
        for package in self.needs:
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed: {how_to_install(package)}"
        return ""


EXPERIMENTS: dict[str, Experiment] = {}


def experiment(
    name: str,
    *,
    needs: tuple[str, ...] = (),
    gpus: int = 0,
    seconds: tuple[int, int] = (120, 240),
    several: bool = False,
) -> Callable[[Run], Run]:
    """Registers the decorated function under this name."""

    def add(run: Run) -> Run:
        EXPERIMENTS[name] = Experiment(run, needs, gpus, seconds, several)
        return run

    return add


@dataclass
class Lab:
    """The device, the scale and the folder of an experiment, and what its traces hold."""

    device: str
    scale: str  # "small" or "full"
    folder: Path
    name: str
    traces: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device != "cpu"

    def pick(self, small: Any, full: Any) -> Any:
        """The value for the scale of this run."""
        return full if self.scale == "full" else small

    @contextmanager
    def traced(self, label: str, *targets: Any, **options: Any) -> Iterator[trace]:
        """Records a block. Saves the trace to the folder, and its explanation to `traces`."""
        path = self.path(label)
        path.unlink(missing_ok=True)
        kind = torch.device(self.device).type
        if self.cuda and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        with trace(*targets, devices=kind, table=False, **options) as recorded:
            yield recorded
            self.wait()
        recorded.save(path)
        self.traces[label] = explained(recorded, self.device, path.name)

    def read(self, label: str, path: Path) -> None:
        """Explains a trace that another process wrote, as `traced` does."""
        self.traces[label] = explained(load(path), self.device, path.name)

    def path(self, label: str) -> Path:
        """The file of a trace."""
        return self.folder / f"{self.name}.{label}.pytrace"

    def figures(self, label: str, prefix: str = "") -> dict[str, Any]:
        """A trace's sizes, flat: peak_bytes, activations_bytes at the peak, activations_most, ..."""
        explanation = self.traces[label]
        flat: dict[str, Any] = {f"{prefix}peak_bytes": explanation["peak_bytes"]}
        for name, row in explanation["categories"].items():
            flat[f"{prefix}{name}_bytes"] = row["at_peak"]
            flat[f"{prefix}{name}_most"] = row["most"]
            flat[f"{prefix}{name}_end"] = row["at_end"]
        for name in ("parameters", "allocated_peak", "reserved_peak", "nvml_used"):
            if explanation.get(name) is not None:
                flat[f"{prefix}{name}"] = explanation[name]
        return flat

    def seconds(self, step: Callable[[], Any], *, warm: int = 2, rounds: int = 7) -> list[float]:
        """The seconds of each call, without a trace."""
        for _ in range(warm):
            step()
        self.wait()
        taken = []
        for _ in range(rounds):
            begin = time.perf_counter()
            step()
            self.wait()
            taken.append(time.perf_counter() - begin)
        return taken

    def alternating(
        self, steps: Mapping[str, Callable[[], Any]], *, warm: int = 2, rounds: int = 7
    ) -> dict[str, list[float]]:
        """The seconds of several steps, each once per round, so slow moments hit all of them."""
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(warm):
            for step in steps.values():
                step()
        for _ in range(rounds):
            for name, step in steps.items():
                taken[name] += self.seconds(step, warm=0, rounds=1)
        return taken

    def wait(self) -> None:
        """Waits until the device is idle."""
        if self.cuda:
            torch.cuda.synchronize()

    def forget(self) -> None:
        """Frees unused memory."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


def spread(name: str, samples: list[float]) -> dict[str, Any]:
    """A median with its interval: name, name_low, name_high, name_samples."""
    interval: Interval = median(samples)
    return {
        name: interval.median,
        f"{name}_low": interval.low,
        f"{name}_high": interval.high,
        f"{name}_samples": len(samples),
    }


def ratio(name: str, above: list[float], below: list[float]) -> dict[str, Any]:
    """The spread of quotients of samples from the same rounds."""
    return spread(name, [a / b for a, b in zip(above, below, strict=True)])


def explained(traced: Views, device: str, file: str) -> dict[str, Any]:
    """A trace in numbers: its peak by category, the unknown share, and the device's view."""
    kind = torch.device(device).type
    held = [name for name in usage.devices(traced.data) if name.startswith(kind)]
    name = device if device in held else held[0] if held else None
    peak = usage.peak(traced.data, name)
    rows = {row.category: row for row in breakdown.category_rows(traced.data, name)}
    found: dict[str, Any] = {
        "file": file,
        "device": name or device,
        "peak_bytes": peak.bytes,
        "peak_step": peak.step,
        "peak_phase": peak.phase,
        "unknown_share": peak.by_category["unknown"] / peak.bytes if peak.bytes else 0.0,
        "parameters": breakdown.parameters(traced.data, name),
        "categories": {
            each: {
                "at_peak": rows[each].at_peak,
                "most": rows[each].own_peak,
                "at_end": rows[each].at_end,
            }
            for each in CATEGORY_ORDER
        },
        "ledger": _ledger(traced, name),
    }
    return found | (_allocator(traced, name) if kind == "cuda" else {})


def _ledger(traced: Views, device: str | None) -> dict[str, Any]:
    """From the tensors to what nvidia-smi shows, when the trace ended."""
    found = ledger.ledger(traced.data, "end", device)
    rows = [{"name": row.name, "bytes": row.bytes, "level": row.level} for row in found.rows]
    return {"rows": rows, "residual": found.residual, "closes": found.closes}


def _allocator(traced: Views, device: str | None) -> dict[str, Any]:
    """The most that torch's allocator held, and NVML's figure at the end of the trace."""
    figures = {
        "allocated_peak": torch.cuda.max_memory_allocated(device),
        "reserved_peak": torch.cuda.max_memory_reserved(device),
    }
    memory = meta.of(traced.data).device_memory
    gpus = memory.readings[-1].gpus if memory.readings else {}
    gpu = gpus.get(memory.uuids.get(device or "", ""))
    if gpu is not None and gpu.used is not None:
        # As nvidia-smi shows it: without the driver's reserve.
        figures["nvml_used"] = gpu.used - (gpu.driver_reserve or 0)
    return figures
