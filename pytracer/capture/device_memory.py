"""Reads from the driver and the operating system how much memory is in use, a few times a trace.

The allocator's events cannot see the CUDA context, loaded kernels, libraries' own memory, other
processes and the driver's reserve. NVML can, but it knows only the present. So pytracer reads NVML
when a trace begins, after the first, second, fourth, eighth, ... optimizer step, and when the trace
ends. If the program never steps, it reads at the second, fourth, ... call of the model instead. The
readings go into the trace's `meta["device_memory"]`:

    {"pid": 1234, "problem": "", "devices": {"cuda:0": UUID},
     "allowed": {"cuda:0": bytes that set_per_process_memory_fraction allows, if it was called},
     "readings": [{"when": "begin" | "step" | "call" | "end", "unix_ns": ..., "took_ns": ...,
                   "steps": optimizer steps counted so far, "cuda_initialized": true,
                   "reserved": {"cuda:0": bytes held by torch's allocator at this moment},
                   "gpus": {UUID: {"total", "used", "driver_reserve", "used_as_cuda_says",
                                 "processes": [{"pid", "bytes", "name"}] or null}},
                   "host": {"resident", "anonymous", "file", "shared", "peak_resident"}}]}

`used` contains `driver_reserve`. A figure that NVML does not give is null. The UUID identifies a
GPU, because CUDA_VISIBLE_DEVICES renumbers them. Before CUDA is up, it is unknown which GPUs this
process will use, so all are read. Nothing here initialises CUDA or raises.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from pytracer.basics.driver import Document, all_uuids, name_processes, open_nvml, read_gpus

_HOST = {
    "VmRSS": "resident",
    "RssAnon": "anonymous",
    "RssFile": "file",
    "RssShmem": "shared",
    "VmHWM": "peak_resident",
}


class DeviceMemory:
    """The readings of one session."""

    def __init__(self, *, cuda: bool) -> None:
        """Starts without readings. NVML is opened only if `cuda` is traced."""
        self._cuda = cuda
        self._document: Document = {
            "pid": os.getpid(),
            "problem": "",
            "devices": {},
            "allowed": {},
            "readings": [],
        }
        self._steps = self._calls = 0

    def begin(self) -> None:
        """Takes the first reading, possibly before CUDA is up."""
        self._read("begin")

    def stepped(self, steps: int = 1) -> bool:
        """Counts training steps, and reads after 1, 2, 4, 8, ...: kernels are loaded early.

        Returns whether this was such a step, also if no GPU is read.
        """
        self._steps += steps
        is_due = _is_power_of_two(self._steps)
        if self._cuda and is_due:
            self._read("step")
        return is_due

    def called(self, calls: int = 1) -> None:
        """Counts calls of the outermost module, and reads at calls 2, 4, 8, ... until a step ends.

        The first call is not read, because nothing has run by then.
        """
        self._calls += calls
        if self._cuda and not self._steps and self._calls > 1 and _is_power_of_two(self._calls):
            self._read("call")

    def end(self) -> None:
        """Takes the reading that closes the ledger. It replaces an earlier one of this kind."""
        self._read("end")

    def document(self) -> Document:
        """Returns the document for the trace's meta, as the module describes it."""
        return self._document

    def _read(self, when: str) -> None:
        began = time.perf_counter_ns()
        reading: Document = {"when": when, "steps": self._steps, "unix_ns": time.time_ns()}
        reading["host"] = read_host()
        if self._cuda:
            try:
                self._read_gpus(reading)
            except Exception as error:  # the program goes on, whatever a driver does
                self._document["problem"] = f"{type(error).__name__}: {error}"
        reading["took_ns"] = time.perf_counter_ns() - began
        readings = self._document["readings"]
        if readings and readings[-1]["when"] == "end":
            readings.pop()  # from a look at the trace while it was recorded
        readings.append(reading)

    def _read_gpus(self, reading: Document) -> None:
        uuids: dict[str, str] = self._document["devices"]
        reading["cuda_initialized"] = torch.cuda.is_initialized()
        reading["reserved"] = held_by_torch()
        for device, held in reading["reserved"].items():
            if held and device not in uuids:
                uuids[device] = str(torch.cuda.get_device_properties(device).uuid)
        nvml = open_nvml()
        if isinstance(nvml, str):
            self._document["problem"] = nvml
            reading["gpus"] = {uuid: {} for uuid in uuids.values()}
        elif uuids:
            reading["gpus"] = read_gpus(nvml, uuids.values())
        else:
            reading["gpus"] = read_gpus(nvml, all_uuids(nvml))
        if reading["when"] == "end":
            self._document["allowed"] = allowed_to_torch(uuids)
            for device, uuid in uuids.items():
                # CUDA's own figure, as a second opinion; only where this process has a context.
                free, total = torch.cuda.mem_get_info(device)
                reading["gpus"].setdefault(uuid, {})["used_as_cuda_says"] = total - free
            if not isinstance(nvml, str):
                name_processes(nvml, reading["gpus"])


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def held_by_torch() -> dict[str, int]:
    """Returns the bytes that torch's allocator reserves, by device; empty before CUDA is up."""
    if not torch.cuda.is_initialized():
        return {}
    devices = range(torch.cuda.device_count())
    return {f"cuda:{index}": torch.cuda.memory_reserved(index) for index in devices}


def allowed_to_torch(devices: Iterable[str]) -> dict[str, int]:
    """Returns the bytes that torch's allocator may hold, for the devices that have a limit."""
    fractions = {device: torch.cuda.get_per_process_memory_fraction(device) for device in devices}
    return {
        device: int(fraction * torch.cuda.get_device_properties(device).total_memory)
        for device, fraction in fractions.items()
        if fraction < 1
    }


# ---------------------------------------------------------------- the host


def read_host() -> dict[str, int]:
    """Returns this process's resident memory and its parts; empty without /proc."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    sizes = {}
    for line in lines:
        name, _, rest = line.partition(":")
        if name in _HOST:
            sizes[_HOST[name]] = int(rest.split()[0]) * 1024
    return sizes
