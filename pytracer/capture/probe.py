"""Measures the memory that CUDA itself takes here, by NVML, in a process of its own.

The stages add up the memory that a training process holds beyond its tensors: the bare context,
then cuBLAS (a matrix product) and cuDNN (a convolution), each with the kernels that it loads. The
child gets this process's environment, so CUDA_MODULE_LOADING and CUDA_VISIBLE_DEVICES are the same.
"""

import json
import os
import subprocess
import sys
from typing import Any

import torch

from pytracer import errors
from pytracer.basics.driver import bare_uuid, open_nvml, read_gpus
from pytracer.capture.device_memory import held_by_torch

_SECONDS = 120


def measure(**environment: str) -> dict[str, Any]:
    """Runs the probe on the first visible device, with these variables in its environment.

    Raises:
        errors.CaptureError: no CUDA device, no NVML, or the child failed.
    """
    if not torch.cuda.is_available():
        raise errors.CaptureError("there is no CUDA device here to probe")
    nvml = open_nvml()
    if isinstance(nvml, str):
        raise errors.CaptureError(f"the probe needs NVML: {nvml}")
    command = [sys.executable, "-c", "from pytracer.capture import probe; probe.child()"]
    try:
        child = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            timeout=_SECONDS,
            env={**os.environ, **environment},
        )
        result: dict[str, Any] = json.loads(child.stdout)
    except subprocess.TimeoutExpired:
        raise errors.CaptureError(f"the probe did not finish in {_SECONDS} s") from None
    except ValueError:
        reason = (child.stderr.strip().splitlines() or ["it printed no reason"])[-1]
        raise errors.CaptureError(f"the probe failed: {reason}") from None
    return result


def child() -> None:
    """Runs in the child: writes one JSON document to its standard output."""
    nvml = open_nvml()
    # Reading the device's properties initialises CUDA, but makes no context.
    uuid = bare_uuid(str(torch.cuda.get_device_properties(0).uuid))
    stages = [("nothing", _look(nvml, uuid))]
    x = torch.ones(512, 512, device="cuda:0")
    stages.append(("context", _look(nvml, uuid)))
    x @ x
    stages.append(("cublas", _look(nvml, uuid)))
    torch.nn.functional.conv2d(x.view(1, 1, 512, 512), x[:3, :3].reshape(1, 1, 3, 3))
    stages.append(("cudnn", _look(nvml, uuid)))
    document = {
        "device": torch.cuda.get_device_name(0),
        "uuid": uuid,
        "module_loading": os.environ.get("CUDA_MODULE_LOADING", ""),
        "stages": [_stage(name, look, stages[0][1]) for name, look in stages[1:]],
    }
    os.write(1, json.dumps(document).encode())


def _look(nvml: Any, uuid: str) -> tuple[int, int | None]:
    """Returns the bytes used beyond torch's allocator: on the device, and by this process."""
    held = held_by_torch().get("cuda:0", 0)
    if held:
        torch.cuda.synchronize()
    gpu = read_gpus(nvml, [uuid])[uuid]
    own = next((p["bytes"] for p in gpu["processes"] or () if p["pid"] == os.getpid()), None)
    return gpu["used"] - held, None if own is None else own - held


def _stage(
    name: str, now: tuple[int, int | None], before: tuple[int, int | None]
) -> dict[str, Any]:
    return {"up_to": name, "device_bytes": now[0] - before[0], "process_bytes": now[1]}
