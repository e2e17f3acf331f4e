"""The device under measurement: its facts, its datasheet, and its clock, power and heat."""

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pytracer import errors
from pytracer.lab.gemm.shapes import DTYPES


@dataclass(frozen=True)
class Peaks:
    """The datasheet's rates: dense TFLOP/s by dtype (never with sparsity), and TB/s."""

    name: str
    tflops: dict[str, float]
    tb_per_s: float
    source: str


def _peaks(
    name: str,
    half: float,
    tf32: float,
    fp32: float,
    eight: float | None,
    memory: float,
    source: str,
) -> Peaks:
    rates = {"bf16": half, "fp16": half, "tf32": tf32, "fp32": fp32}
    if eight is not None:
        rates |= {"fp8": eight, "int8": eight}
    return Peaks(name, rates, memory, source)


# A device has the first row whose name its own name contains, so longer names come first. Datasheets
# print rates with sparsity; these are half of them.
DATASHEETS = (
    _peaks("GH200", 989.4, 494.7, 66.9, 1978.9, 4.0, "NVIDIA GH200 datasheet"),
    _peaks("H200 NVL", 835.5, 417.5, 60, 1671, 4.8, "NVIDIA H200 datasheet, NVL column"),
    _peaks("H200", 989.4, 494.7, 66.9, 1978.9, 4.8, "NVIDIA H200 datasheet, SXM column"),
    _peaks("H100 NVL", 835.5, 417.5, 60, 1671, 3.9, "NVIDIA H100 datasheet, NVL column"),
    _peaks("H100 PCIe", 756, 378, 51, 1513, 2.0, "NVIDIA H100 datasheet, PCIe column"),
    _peaks("H100", 989.4, 494.7, 66.9, 1978.9, 3.35, "NVIDIA H100 datasheet, SXM column"),
    _peaks("A100-SXM4-40GB", 312, 156, 19.5, None, 1.555, "NVIDIA A100 datasheet"),
    _peaks("A100-PCIE-40GB", 312, 156, 19.5, None, 1.555, "NVIDIA A100 datasheet"),
    _peaks("A100 80GB PCIe", 312, 156, 19.5, None, 1.935, "NVIDIA A100 datasheet"),
    _peaks("A100", 312, 156, 19.5, None, 2.039, "NVIDIA A100 datasheet, SXM 80 GB"),
    _peaks("L40S", 362, 183, 91.6, 733, 0.864, "NVIDIA L40S datasheet"),
    _peaks("RTX 4090", 165.2, 82.6, 82.6, 330.3, 1.008, "NVIDIA Ada whitepaper, appendix A"),
)


def datasheet(name: str) -> Peaks | None:
    """The datasheet of a device with this name, or None if the table has no such row."""
    return next((peaks for peaks in DATASHEETS if peaks.name in name), None)


@dataclass(frozen=True)
class Facts:
    """The facts of a device and of the software on it."""

    kind: str  # "cpu" or "cuda"
    name: str
    capability: tuple[int, int] | None  # of a CUDA device
    multiprocessors: int  # of a CPU: the threads torch uses
    cache_bytes: int  # the last cache before memory
    memory_bytes: int
    torch: str
    cuda: str | None
    cublas: int | None
    uuid: str | None

    def document(self) -> dict[str, Any]:
        """The facts for JSON, with the datasheet's rates."""
        peaks = datasheet(self.name)
        return {**asdict(self), "datasheet": asdict(peaks) if peaks else None}


def pick(name: str | None) -> torch.device:
    """The device to measure: the named one, or else the GPU, or else the CPU.

    Raises:
        errors.UsageError: the device does not exist.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise errors.UsageError(f"no device {name!r}; there are cpu, cuda and cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise errors.UsageError(f"cannot time on {device}: only on cpu and cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise errors.UsageError("there is no CUDA device here; --device cpu measures the CPU")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise errors.UsageError(f"there is no {device}: {torch.cuda.device_count()} CUDA devices")
    return device


def facts(device: torch.device) -> Facts:
    """The facts of this device."""
    if device.type == "cpu":
        return Facts(
            kind="cpu",
            name=_cpu_name(),
            capability=None,
            multiprocessors=torch.get_num_threads(),
            cache_bytes=_cpu_cache(),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            torch=str(torch.__version__),
            cuda=None,
            cublas=None,
            uuid=None,
        )
    properties = torch.cuda.get_device_properties(device)
    return Facts(
        kind="cuda",
        name=properties.name,
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        cache_bytes=getattr(properties, "L2_cache_size", 0) or 64 << 20,
        memory_bytes=properties.total_memory,
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        cublas=_cublas_version(),
        uuid=str(getattr(properties, "uuid", "")) or None,
    )


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_cache() -> int:
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(path.read_text(encoding="utf-8").strip().removesuffix("K")) << 10)
    return max(sizes[1:], default=sizes[0])


def _cublas_version() -> int | None:
    """The version number of the loaded cuBLAS, such as 130200."""
    import ctypes

    torch.cuda.synchronize()  # makes the context first; otherwise torch warns that it has to make one
    torch.cuda.current_blas_handle()
    for name in ("libcublas.so.13", "libcublas.so.12"):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(name, mode=getattr(os, "RTLD_NOLOAD", 4))
            number = ctypes.c_int()
            parts = []
            for which in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
                library.cublasGetProperty(which, ctypes.byref(number))
                parts.append(number.value)
            return parts[0] * 10_000 + parts[1] * 100 + parts[2]
    return None


def free_bytes(device: torch.device) -> int:
    """The bytes that can still be allocated there, with the free part of torch's cache."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def dtypes(device: Facts) -> tuple[str, ...]:
    """The dtypes that the device multiplies in its own units."""
    if device.capability is None:
        return ("bf16", "fp16", "fp32", "int8")
    least = {"bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9), "int8": (7, 5), "fp16": (7, 0)}
    return tuple(name for name in DTYPES if device.capability >= least.get(name, (0, 0)))


def require_dtypes(device: Facts, wanted: Sequence[str]) -> None:
    """Checks that the device has units for these dtypes.

    Raises:
        errors.UsageError: a dtype does not exist.
        errors.PytracerError: the device has no units for a dtype.
    """
    for name in wanted:
        if name not in DTYPES:
            raise errors.UsageError(f"no dtype {name!r}; there are {', '.join(DTYPES)}")
        if name not in dtypes(device):
            raise errors.PytracerError(
                f"{device.name} does not multiply {name}; it has {', '.join(dtypes(device))}"
            )


# NVML's bits for the reasons that hold a clock down.
_HELD_BY = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


class Gauges:
    """Reads the device's clock, power and temperature while it works, if NVML is there."""

    def __init__(self, device: torch.device) -> None:
        """Finds the device in NVML by its uuid, because torch and NVML may number devices differently."""
        self._nvml: Any = None
        self.problem = ""
        if device.type != "cuda":
            return  # NVML knows only GPUs
        try:
            import pynvml
        except ImportError:
            self.problem = "clocks unknown: pip install nvidia-ml-py"
            return
        try:
            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._nvml = pynvml
        except (pynvml.NVMLError, AttributeError) as error:
            self.problem = f"clocks unknown: {error}"

    def read(self) -> dict[str, Any] | None:
        """One reading: sm_mhz, watts, celsius and the reasons that hold the clock down, or None."""
        nvml = self._nvml
        if nvml is None:
            return None
        try:
            bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
            return {
                "sm_mhz": nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM),
                "watts": nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000,
                "celsius": nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU),
                "held_by": [word for bit, word in _HELD_BY.items() if bits & bit],
            }
        except nvml.NVMLError as error:
            self.problem = f"clocks unknown: {error}"
            self._nvml = None
            return None
