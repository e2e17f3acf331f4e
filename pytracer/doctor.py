"""Does capture hold with this torch, this build and these allocators? Small proofs, for `doctor`.

A trace proves itself as it goes (its sums are held against the allocator's counters, see
`health()`), without allocating anything. What is here allocates, so it runs only when asked for.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from pytracer import errors, schema
from pytracer._native import facts
from pytracer.analysis import agreement
from pytracer.capture.session import Options, Session
from pytracer.trace import Trace

TESTED_TORCH = ("2.11", "2.12", "2.13")
_ODD_SIZE = 1000  # no allocator rounds to it


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report."""

    name: str
    verdict: str  # "ok", "off" (not available, and why) or "failed"
    detail: str


def checks() -> Iterator[Check]:
    """Every check, as it is made."""
    yield Check("extension", "ok", f"built for torch {facts['torch']}, {facts['compiler']}")
    yield _torch_is_tested()
    yield _device("cpu")
    if torch.cuda.is_available():
        yield _device("cuda")
    elif torch.version.cuda is None:
        yield Check("cuda events", "off", "this torch is built without CUDA")
    else:
        yield Check("cuda events", "off", "no CUDA device is visible")
    yield _nvml()


def _torch_is_tested() -> Check:
    release = ".".join(str(torch.__version__).split(".")[:2])
    if release in TESTED_TORCH:
        return Check("torch", "ok", f"{torch.__version__}, a tested release")
    return Check(
        "torch",
        "off",
        f"{torch.__version__} has not been tested (tested: {', '.join(TESTED_TORCH)}); "
        "the checks below tell whether it works",
    )


def _device(device: str) -> Check:
    name = f"{device} events"
    try:
        trace = _record(device)
    except errors.PytracerError as error:
        return Check(name, "off", str(error))
    problem = trace.meta["cuda_problem"]
    if problem:
        return Check(name, "off", f"{problem}. {_statistics()}")
    wrong = "; ".join(_wrong(trace, device))
    if wrong:
        return Check(name, "failed", wrong)
    return Check(name, "ok", "sizes, order and sums are the allocator's own")


def _record(device: str) -> Trace:
    """Allocates and frees an odd number of bytes under a trace of its own."""
    session = Session(Options(devices=(device,)))
    if device == "cuda":
        torch.cuda.init()
    session.start()
    try:
        torch.empty(_ODD_SIZE, dtype=torch.uint8, device=device)
    finally:
        trace = session.stop()
    assert trace is not None
    return trace


def _wrong(trace: Trace, device: str) -> Iterator[str]:
    events = trace.events
    ours = np.flatnonzero((events.action == schema.ACTION["alloc"]) & (events.bytes == _ODD_SIZE))
    if len(ours) != 1:
        yield f"one allocation of {_ODD_SIZE} bytes was seen {len(ours)} times"
        return
    later = events.address[ours[0] :] == events.address[ours[0]]
    order = [schema.ACTIONS[a] for a in events.action[ours[0] :][later]]
    expected = ["alloc", "free_completed"]
    if device == "cuda":
        expected.insert(1, "free_requested")
    if order != expected:
        yield f"it was seen as {', '.join(order)} instead of {', '.join(expected)}"
    for where, total, counted in agreement.differences(trace):
        yield f"{where}: {total:,} bytes alive by the events, {counted:,} by the allocator"


def _statistics() -> str:
    if not torch.cuda.is_initialized():
        return ""
    stats = torch.cuda.memory_stats()
    if not stats:
        return "This allocator keeps no statistics either"
    return f"Its own count of allocated bytes is {stats.get('allocated_bytes.all.current', 0):,}"


def _nvml() -> Check:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return Check("nvml", "off", "no NVIDIA driver here")
    try:
        import pynvml
    except ImportError:
        return Check("nvml", "off", "pip install nvidia-ml-py to see what the device itself says")
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as error:
        return Check("nvml", "failed", str(error))
    return Check("nvml", "ok", f"driver {version}")
