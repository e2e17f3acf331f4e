"""What NVIDIA's driver says of its devices, by NVML: how much is in use, and by whom."""

import ctypes
import os
from collections.abc import Iterable
from typing import Any

Document = dict[str, Any]

_TRIES = 4  # to read a device and its processes while nothing changes

_opened: Any = None


def open_nvml() -> Any:
    """The pynvml module, initialised once per process; or a text that says why there is none."""
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
    """NVML's library comes with NVIDIA's driver, whether or not Python can talk to it."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "there is no NVIDIA driver here"
    return ""


def all_uuids(nvml: Any) -> list[str]:
    """Every GPU of the machine that NVML shows, and every MIG instance."""
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        found.append(nvml.nvmlDeviceGetUUID(handle))
        for instance in range(_ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            mig = _ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, instance)
            if mig is not None:
                found.append(nvml.nvmlDeviceGetUUID(mig))
    return [bare_uuid(uuid) for uuid in found]


def bare_uuid(uuid: str) -> str:
    """NVML writes GPU-... or MIG-... before what CUDA knows."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def read_gpus(nvml: Any, uuids: Iterable[str]) -> dict[str, Document]:
    """What NVML says of these devices; of one that it does not know, nothing."""
    return {uuid: _read_gpu(nvml, uuid) for uuid in uuids}


def _read_gpu(nvml: Any, uuid: str) -> Document:
    handle = None
    for prefix in ("GPU-", "MIG-"):
        handle = handle or _ask(nvml, nvml.nvmlDeviceGetHandleByUUID, prefix + bare_uuid(uuid))
    if handle is None:
        return {}
    found = _memory(nvml, handle)
    for _ in range(_TRIES):
        processes = _processes(nvml, handle)
        before, found = found, _memory(nvml, handle)
        if found == before:
            break  # else another process took or gave back some between the questions
    return {**found, "processes": processes} if found else {}


def _memory(nvml: Any, handle: Any) -> Document:
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    reserve = None if memory is None else int(memory.reserved)
    memory = memory or _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is None:
        return {}
    used = int(memory.used) + (reserve or 0)
    return {"total": int(memory.total), "used": used, "driver_reserve": reserve}


def _processes(nvml: Any, handle: Any) -> list[Document] | None:
    """Who holds how much; None where NVML does not tell of any kind of process."""
    lists = (
        _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle),
        _ask(nvml, nvml.nvmlDeviceGetGraphicsRunningProcesses, handle),
        _ask(nvml, nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle),
    )
    if all(found is None for found in lists):
        return None
    # A process that computes and draws is in two lists, with the same figure in both.
    figures = {int(p.pid): p.usedGpuMemory for found in lists for p in found or ()}
    return [{"pid": pid, "bytes": figure} for pid, figure in sorted(figures.items())]


def name_processes(nvml: Any, gpus: dict[str, Document]) -> None:
    """The program's name only: what else is on its command line is nobody's business."""
    for gpu in gpus.values():
        for process in gpu.get("processes") or ():
            name = _ask(nvml, nvml.nvmlSystemGetProcessName, process["pid"])
            process["name"] = os.fsdecode(name).split(" ")[0].rpartition("/")[2] if name else ""


def _ask(nvml: Any, function: Any, *arguments: Any) -> Any:
    """What the function says, None where this driver or device does not."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None
