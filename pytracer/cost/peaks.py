"""Measures the peaks of a device once and keeps them: matrix rates and copy bandwidth."""

import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pytracer import errors

_COPY_CACHES = 8  # the copy is this many times as large as the cache
_SMALLEST_COPY = 512 * 2**20
_LARGEST_COPY = 2 * 2**30
_CPU_COPY = 256 * 2**20
_ROUNDS = 7
_CUDA_SIZES = ((8192, 8192, 8192), (4096, 4096, 4096), (8192, 8192, 4096))
_CPU_SIZES = ((1024, 1024, 1024), (2048, 2048, 2048))


def device_name(device: str) -> str:
    """The name under which the peaks of the device are kept."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' * (threads > 1)}"


def _processor() -> str:
    """The processor's name in /proc/cpuinfo. platform.processor() would start `uname`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine() or "cpu")


def cache_bytes(device: str) -> int | None:
    """The size of the device's last-level cache; None if torch does not know it."""
    if device != "cuda":
        return None
    size = getattr(torch.cuda.get_device_properties(), "L2_cache_size", 0)
    return int(size) or None


def cached(name: str) -> dict[str, Any] | None:
    """The kept peaks of a device with this name, measured on this machine with this torch."""
    measured = _read().get(_key(name))
    return measured if isinstance(measured, dict) and _is_sound(measured) else None


def measure(device: str) -> dict[str, Any]:
    """Measures, keeps and returns the peaks. On a GPU this takes a second or two and some GB.

    Raises:
        errors.CaptureError: there is no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise errors.CaptureError("there is no CUDA device to measure")
    with torch.no_grad():
        measured = {
            "copy_bytes_per_s": _copy_rate(device),
            "flops_per_s": _matrix_rates(device),
            "torch": str(torch.__version__),
        }
    _write(_key(device_name(device)), measured)
    return measured


# ---------------------------------------------------------------- measuring


def _copy_rate(device: str) -> float:
    """Bytes read and written per second by a copy too large for the cache."""
    wanted = max(_SMALLEST_COPY, _COPY_CACHES * (cache_bytes(device) or 0))
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        wanted = min(wanted, _LARGEST_COPY, free // 4)
    else:
        wanted = _CPU_COPY
    source = torch.ones(wanted // 4, device=device)
    target = torch.empty_like(source)
    seconds = _seconds(lambda: target.copy_(source), device)
    return 2 * source.nbytes / seconds


def _matrix_rates(device: str) -> dict[str, float]:
    """The best rate of a few large products, by type. Random numbers, because zeros take less power."""
    if device == "cpu":
        return {"float32": _best(torch.float32, _CPU_SIZES, device)}
    rates = {
        "bfloat16": _best(torch.bfloat16, _CUDA_SIZES, device),
        "half": _best(torch.float16, _CUDA_SIZES, device),
    }
    before = torch.get_float32_matmul_precision()
    try:
        for name, precision in (("float32", "highest"), ("tf32", "high")):
            torch.set_float32_matmul_precision(precision)
            rates[name] = _best(torch.float32, _CUDA_SIZES[1:2], device)
    finally:
        torch.set_float32_matmul_precision(before)
    return rates


def _best(dtype: torch.dtype, sizes: tuple[tuple[int, int, int], ...], device: str) -> float:
    rates = []
    for m, n, k in sizes:
        left = torch.randn(m, k, device=device, dtype=dtype)
        right = torch.randn(n, k, device=device, dtype=dtype)
        made = torch.empty(m, n, device=device, dtype=dtype)
        seconds = _seconds(partial(torch.mm, left, right.t(), out=made), device)
        rates.append(2 * m * n * k / seconds)
    return max(rates)


def _seconds(run: Callable[[], Any], device: str) -> float:
    """The median time of one call, after a few calls to warm up."""
    repeat = 5 if device == "cuda" else 1
    for _ in range(3):
        run()
    times = []
    for _ in range(_ROUNDS):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeat):
                run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / repeat)
        else:
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
    return float(median(times))


# ---------------------------------------------------------------- keeping


def _file() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "pytracer" / "peaks.json"


def _key(name: str) -> str:
    # Peaks of one thread have always been kept in the plural, and older traces name them so.
    kept_as = f"{name}s" if name.endswith(", 1 thread") else name
    return f"{kept_as}, torch {torch.__version__}"


def _read() -> dict[str, Any]:
    try:
        document = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _write(key: str, measured: dict[str, Any]) -> None:
    """Adds to the file. If the file cannot be written, the next run measures again."""
    path = _file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps({**_read(), key: measured}, indent=1), encoding="utf-8")
        beside.replace(path)
    except OSError:
        pass


def _is_sound(measured: dict[str, Any]) -> bool:
    rates = measured.get("flops_per_s")
    numbers = [
        measured.get("copy_bytes_per_s"),
        *(rates.values() if isinstance(rates, dict) else ()),
    ]
    return isinstance(rates, dict) and all(
        isinstance(number, int | float) and number > 0 for number in numbers
    )
