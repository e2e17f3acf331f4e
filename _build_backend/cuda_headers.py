"""Finds the CUDA headers for compiling the CUDA tracker, which needs nothing else of CUDA.

They come with a CUDA toolkit, or in NVIDIA's wheels. Torch installs the wheel of the runtime, but
not the small one with the compiler's `crt/` headers, which the runtime's headers include. Nothing
here imports torch: it reads version.py.
"""

import os
import re
import shutil
import sys
from pathlib import Path

NEEDED = ("cuda_runtime_api.h", "crt/host_defines.h")


def cuda_of(torch_folder: Path) -> str | None:
    """The CUDA version that this torch was built for, such as "13.0"; None without CUDA."""
    text = (torch_folder / "version.py").read_text()
    match = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else None


def wheels(cuda: str) -> list[str]:
    """The wheels on PyPI that hold the headers of this CUDA."""
    major, minor = cuda.split(".")[:2]
    names = ("nvidia-cuda-runtime", "nvidia-cuda-crt")
    if int(major) < 13:  # before, names carried the version and crt/ came with the compiler
        names = (f"nvidia-cuda-runtime-cu{major}", f"nvidia-cuda-nvcc-cu{major}")
    return [f"{name}=={major}.{minor}.*" for name in names]


def find(cuda: str) -> list[str]:
    """The include directories; [] if there is no complete set for this major version."""
    major = int(cuda.split(".")[0])
    # Wheels first: they have the very version that torch was built for.
    layout = [f"cu{major}"] if major >= 13 else ["cuda_runtime", "cuda_nvcc"]
    in_wheels = [Path(path, "nvidia", name, "include") for path in sys.path for name in layout]
    nvcc = shutil.which("nvcc")
    toolkits = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1]]
    in_toolkits = [[Path(home, "include")] for home in (*toolkits, "/usr/local/cuda") if home]
    for folders in ([path for path in in_wheels if path.is_dir()], *in_toolkits):
        homes = [
            next((path for path in folders if (path / name).is_file()), None) for name in NEEDED
        ]
        if None not in homes and _major(homes[0]) == major:
            return [str(path) for path in folders]
    return []


def _major(folder: Path) -> int | None:
    text = (folder / NEEDED[0]).read_text(errors="replace")
    match = re.search(r"^#define\s+CUDART_VERSION\s+(\d+)", text, re.MULTILINE)
    return int(match[1]) // 1000 if match else None
