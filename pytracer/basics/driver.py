"""Reads from NVIDIA's driver, through NVML, the memory of devices and of their processes."""

import ctypes
import os
from collections.abc import Iterable
from typing import Any

Document = dict[str, Any]

_TRIES = 4  # to read a device and its processes without a change in between

_opened: Any = None


def open_nvml() -> Any:
    """The pynvml module, initialised once per process, or a text with the reason why there is none."""
    global _opened
    if _opened is None or _opened[0] != os.getpid():
        _opened = (os.getpid(), _open_nvml())
    return _opened[1]


def _open_nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return _without_driver() or "nvidia-ml-py is not installed: pip install nvidia-ml-py"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _without_driver() or f"NVML: {error}"
    return pynvml


def _without_driver() -> str:
    """A text if there is no driver, or else "". The driver has NVML's library even without pynvml."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "there is no NVIDIA driver here"
    return ""


def all_uuids(nvml: Any) -> list[str]:
    """The uuids of every GPU that NVML shows, and of every MIG instance."""
    uuids = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuids.append(nvml.nvmlDeviceGetUUID(handle))
        for instance in range(_ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            mig = _ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, instance)
            if mig is not None:
                uuids.append(nvml.nvmlDeviceGetUUID(mig))
    return [bare_uuid(uuid) for uuid in uuids]


def bare_uuid(uuid: str) -> str:
    """The uuid as CUDA has it, without NVML's GPU- or MIG-."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def read_gpus(nvml: Any, uuids: Iterable[str]) -> dict[str, Document]:
    """The figures of these devices. A device that NVML does not know has an empty document."""
    return {uuid: _read_gpu(nvml, uuid) for uuid in uuids}


def _read_gpu(nvml: Any, uuid: str) -> Document:
    handle = None
    for prefix in ("GPU-", "MIG-"):
        handle = handle or _ask(nvml, nvml.nvmlDeviceGetHandleByUUID, prefix + bare_uuid(uuid))
    if handle is None:
        return {}
    memory = _memory(nvml, handle)
    for _ in range(_TRIES):
        processes = _processes(nvml, handle)
        before, memory = memory, _memory(nvml, handle)
        if memory == before:
            break  # otherwise another process took or freed memory in between
    return {**memory, "processes": processes} if memory else {}


def _memory(nvml: Any, handle: Any) -> Document:
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    reserve = None if memory is None else int(memory.reserved)
    memory = memory or _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is None:
        return {}
    used = int(memory.used) + (reserve or 0)
    return {"total": int(memory.total), "used": used, "driver_reserve": reserve}


def _processes(nvml: Any, handle: Any) -> list[Document] | None:
    """The memory of each process; None if NVML lists no kind of process."""
    lists = (
        _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle),
        _ask(nvml, nvml.nvmlDeviceGetGraphicsRunningProcesses, handle),
        _ask(nvml, nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle),
    )
    if all(processes is None for processes in lists):
        return None
    # A process that computes and draws is in two lists, with the same figure in both.
    figures = {int(p.pid): p.usedGpuMemory for processes in lists for p in processes or ()}
    return [{"pid": pid, "bytes": figure} for pid, figure in sorted(figures.items())]


def name_processes(nvml: Any, gpus: dict[str, Document]) -> None:
    """Adds the processes' names: of the program only, because the rest of a command line is private."""
    for gpu in gpus.values():
        for process in gpu.get("processes") or ():
            name = _ask(nvml, nvml.nvmlSystemGetProcessName, process["pid"])
            process["name"] = os.fsdecode(name).split(" ")[0].rpartition("/")[2] if name else ""


def _ask(nvml: Any, function: Any, *arguments: Any) -> Any:
    """The function's answer; None if this driver or device has no answer."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None
