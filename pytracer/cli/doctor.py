"""Checks that recording works with this torch, this build and these allocators, for `doctor`.

Each trace checks itself without allocating: `health()` compares its sums with the allocator's
counters. The checks here allocate, so they run only when asked for. If something cannot be loaded,
that is one line of the report, and the other checks follow.
"""

import ctypes
import importlib
import importlib.util
import os
import platform
import site
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pytracer import errors
from pytracer.basics import private_torch
from pytracer.basics.version import TESTED_TORCH
from pytracer.data import _native, meta, schema

if TYPE_CHECKING:
    from pytracer.data.recorded import Trace

_ODD_SIZE = 1000  # a size to which no allocator rounds


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report."""

    name: str
    verdict: str  # "ok", "new" (not tested yet), "off" (not available, and why) or "failed"
    detail: str


def machine() -> dict[str, Any]:
    """Returns the versions and devices of this machine, whether or not they work."""
    torch = _torch()
    cuda = torch is not None and torch.cuda.is_available()
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")
    return {
        "python": platform.python_version(),
        "torch": None if torch is None else str(torch.__version__),
        "cuda": None if torch is None else torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if torch is not None and cuda
        else [],
        "allocator_settings": settings or "",
    }


def _torch() -> Any:
    """Returns torch, or None if it cannot be imported."""
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError):
        return None


def checks() -> Iterator[Check]:
    """Makes the checks, and yields each result as it comes."""
    reading = _reading()
    yield reading
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        yield _free_threaded()
    recording = _recording()
    yield recording
    if "failed" in (reading.verdict, recording.verdict):
        return
    yield _torch_is_tested()
    yield from _private_torch()
    yield _device("cpu")
    torch = _torch()
    if torch.cuda.is_available():
        yield _device("cuda")
    elif torch.version.cuda is None:
        yield Check("cuda events", "off", "this torch is built without CUDA")
    else:
        yield Check("cuda events", "off", "no CUDA device is visible")
    if torch.version.cuda is not None:
        yield _tracker()
    yield _nvml()
    yield _environment_variable()


def _environment_variable() -> Check:
    """Whether Python reads `pytracer.pth` as it starts, without which PYTRACER=1 does nothing."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    for folder in folders:
        if Path(folder, "pytracer.pth").is_file():
            return Check("PYTRACER=1", "ok", f"pytracer.pth is in {folder}")
    return Check(
        "PYTRACER=1",
        "off",
        "pytracer.pth is not in site-packages: install with pip, or use `pytracer run`",
    )


def _reading() -> Check:
    try:
        name = _native.core.__name__
    except errors.PytracerError as error:
        return Check("reading", "failed", str(error))
    return Check("reading", "ok", f"{name} reads and writes traces, also without torch")


def _free_threaded() -> Check:
    if sys._is_gil_enabled():  # type: ignore[attr-defined,unused-ignore]
        return Check(
            "free threading", "off", "this Python can do without the GIL; pytracer turns it on"
        )
    return Check(
        "free threading", "new", "the GIL is off, and pytracer was never tested without it"
    )


def _recording() -> Check:
    try:
        facts = _native.facts
    except errors.PytracerError as error:
        return Check("recording", "failed", str(error))
    except (ImportError, OSError) as error:
        return Check("recording", "failed", f"torch cannot be imported: {error}")
    return Check("recording", "ok", f"built for torch {facts['torch']}, {facts['compiler']}")


def _tracker() -> Check:
    if _native.no_tracker:
        return Check("cuda tracker", "failed", _native.no_tracker)
    return Check("cuda tracker", "ok", "opened beside this torch")


def _torch_is_tested() -> Check:
    version = _native.torch_version()
    if _native.release_of(version) in TESTED_TORCH:
        return Check("torch", "ok", f"{version}, a tested release")
    return Check(
        "torch",
        "new",
        f"{version} is newer than the tested releases ({TESTED_TORCH[0]} to {TESTED_TORCH[-1]}); "
        "the checks below show whether it works",
    )


def _private_torch() -> Iterator[Check]:
    """A line for each private thing of torch that is missing, or one line for all of them."""
    of_cxx = _native.C.private_torch()
    missing = private_torch.missing()
    missing += [f"{name}: {problem}; {use} needs it" for name, use, problem in of_cxx if problem]
    for sentence in missing:
        yield Check("private torch", "failed", sentence)
    if not missing:
        count = len(private_torch.NAMES) + len(private_torch.MEMBERS)
        yield Check("private torch", "ok", f"{count} names for Python and {len(of_cxx)} for C++")


def _device(device: str) -> Check:
    name = f"{device} events"
    try:
        trace = _record(device)
    except errors.PytracerError as error:
        return Check(name, "off", str(error))
    problem = meta.of(trace).cuda_problem
    if problem:
        return Check(name, "off", f"{problem}. {_statistics()}")
    wrong = "; ".join(_wrong(trace, device))
    if wrong:
        return Check(name, "failed", wrong)
    return Check(name, "ok", "sizes, order and sums are the allocator's own")


def _record(device: str) -> "Trace":
    """Allocates and frees an odd number of bytes under a trace of its own."""
    from pytracer.capture.session import Options, Session

    torch = _torch()
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


def _wrong(trace: "Trace", device: str) -> Iterator[str]:
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
    from pytracer.analysis.answers import recording_quality

    for where, total, counted in recording_quality.differences(trace):
        yield f"{where}: {total:,} bytes alive by the events, {counted:,} by the allocator"


def _statistics() -> str:
    torch = _torch()
    if not torch.cuda.is_initialized():
        return ""
    stats = torch.cuda.memory_stats()
    if not stats:
        return "This allocator has no statistics either"
    return f"Its own count of allocated bytes is {stats.get('allocated_bytes.all.current', 0):,}"


def _nvml() -> Check:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return Check("nvml", "off", "no NVIDIA driver here")
    try:
        import pynvml
    except ImportError:
        return Check("nvml", "off", "pip install nvidia-ml-py to see the device's own figures")
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as error:
        return Check("nvml", "failed", str(error))
    return Check("nvml", "ok", f"driver {version}")
