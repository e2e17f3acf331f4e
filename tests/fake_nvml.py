"""An NVML of devices that a test makes up, for machines without one."""

# ruff: noqa: N802 - the names are pynvml's

from types import SimpleNamespace
from typing import Any

MIB = 2**20


class NVMLError(Exception):
    """As pynvml's."""


class FakeNvml:
    """An NVML of a few devices: what pynvml's functions of the same names would return."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 2  # noqa: N815 - pynvml's name

    def __init__(self, *uuids: str, v2: bool = True) -> None:
        self.devices = {
            uuid: {"used": 0, "reserved": 600 * MIB, "processes": {}, "migs": []} for uuid in uuids
        }
        self.v2 = v2
        self.hidden = False

    def nvmlDeviceGetCount(self) -> int:
        return sum(not uuid.startswith("MIG-") for uuid in self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return [uuid for uuid in self.devices if not uuid.startswith("MIG-")][index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.devices:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        if not self.devices[handle]["migs"]:
            raise NVMLError("Not Supported")
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        migs = self.devices[handle]["migs"]
        if index >= len(migs):
            raise NVMLError("Not Found")
        return str(migs[index])

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> Any:
        device = self.devices[handle]
        if version and not self.v2:
            raise NVMLError("Function Not Found")
        if version:
            total = 140_000 * MIB
            return SimpleNamespace(total=total, used=device["used"], reserved=device["reserved"])
        return SimpleNamespace(total=140_000 * MIB, used=device["used"] + device["reserved"])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        if self.hidden:
            raise NVMLError("No Permission")
        figures = self.devices[handle]["processes"]
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in figures.items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Any]:
        return self.nvmlDeviceGetComputeRunningProcesses(handle)[:1]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: str) -> list[Any]:
        raise NVMLError("Not Supported")

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        return "/usr/bin/python3 train.py --secret=7"
