"""One experiment, in a process of its own: `python -m pytracer.lab.claims.worker NAME ...`.

The worker writes a result even if the experiment fails. If the worker itself is killed, the runner
writes the result.
"""

import argparse
import contextlib
import json
import os
import platform
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pytracer.basics.version import __version__
from pytracer.lab.claims import catalog
from pytracer.lab.claims.experiment import Lab, Missing
from pytracer.recording.api import is_out_of_memory

RESULT_VERSION = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the experiment and writes its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--device", required=True)
    parser.add_argument("--scale", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    lab = Lab(options.device, options.scale, options.out, options.name)
    write(options.out, conduct(lab))


def conduct(lab: Lab) -> dict[str, Any]:
    """The result of the lab's experiment, even if it fails."""
    torch.manual_seed(0)
    began = time.monotonic()
    result = identity(lab.name, lab.device, lab.scale)
    try:
        figures = catalog.experiments()[lab.name].run(lab)
        result |= {"status": "done", "reason": "", "figures": figures}
    except Missing as missing:
        result |= {"status": "skipped", "reason": str(missing), "figures": {}}
    except Exception as error:  # an error of any kind costs only the rows that need this
        traceback.print_exc()
        result |= {"status": "failed", "reason": _reason(error), "figures": {}}
    result["traces"] = lab.traces
    result["seconds"] = round(time.monotonic() - began, 1)
    result["device_name"] = torch.cuda.get_device_name() if lab.cuda else _processor()
    return result


def identity(name: str, device: str, scale: str) -> dict[str, Any]:
    """The keys that must be equal before a result is used again."""
    return {
        "version": RESULT_VERSION,
        "experiment": name,
        "device": device,
        "scale": scale,
        "torch": str(torch.__version__),
        "pytracer": __version__,
    }


def write(folder: Path, result: dict[str, Any]) -> None:
    """Writes the whole file or nothing, even if the process is killed meanwhile."""
    path = folder / f"{result['experiment']}.json"
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def _reason(error: Exception) -> str:
    """The error in one line."""
    text = " ".join(str(error).split())[:300]
    if is_out_of_memory(error):
        return f"out of memory: {text}"
    return f"{type(error).__name__}: {text}"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    return platform.machine()


if __name__ == "__main__":
    main()
