"""Builds `pytracer._C` against the torch that is installed here.

Everything that never changes is in pyproject.toml. What is left needs a program:

* The extension is bound to one torch (its C++ ABI, its CUDA, its Python). It is therefore compiled
  against the torch that this interpreter imports, and never against a downloaded one.
* The CUDA tracker is a set of additional source files. It calls the CUDA runtime's host functions
  only, so headers are enough: no nvcc, no GPU.
* What it was built for is written beside the binary (`_build.json`), where `pytracer._native`
  reads it before it loads anything, and into the binary as macros.

Environment: PYTRACER_BUILD_EXT=1|0 (0: leave the extension out), PYTRACER_CUDA=auto|1|0, and
torch's own MAX_JOBS, CXX, CUDA_HOME.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

from setuptools import Extension, __version__ as setuptools_version, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "_build_backend"))
import cuda_headers  # noqa: E402 - ours, and not on the path before
from start_line import BuildPython  # noqa: E402

try:
    import torch
    from torch.utils import cpp_extension

    torch_problem = ""
except (ImportError, OSError) as error:
    # Metadata and source distributions are made without torch; only compiling needs it.
    torch = None
    torch_problem = str(error)

CSRC = ROOT / "csrc"
MODULE = "pytracer._C"

ADVICE_WITHOUT_TORCH = """\
pytracer is compiled against your torch, and this build cannot import one ({problem}).
  torch is not installed yet:  pip install torch, then install pytracer again
  torch is installed, pip:     pip install --no-build-isolation .   (needs setuptools and ninja)
  torch is installed, uv:      uv pip install --no-build-isolation .
  torch is somewhere else:     PYTRACER_TORCH_PATH=/its/site-packages pip install .
PYTRACER_BUILD_EXT=0 leaves the extension out, but both the tracer and the reader of saved traces \
are in it."""


def give_up(message: str) -> NoReturn:
    raise SystemExit(f"\nerror: {message}\n")


def choice(name: str, allowed: tuple[str, ...]) -> str:
    """An environment switch; the first allowed value is its default."""
    value = os.environ.get(name) or allowed[0]
    if value not in allowed:
        give_up(f"{name}={value} is not understood; it is one of {', '.join(allowed)}")
    return value


def sources(*patterns: str) -> list[str]:
    # Sorted, so that two builds of one tree are the same; relative, as setuptools asks.
    return [
        str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(CSRC.glob(pattern))
    ]


def find_cuda() -> list[str] | None:
    """The CUDA include directories, or None to build without the CUDA tracker."""
    wanted = choice("PYTRACER_CUDA", ("auto", "1", "0"))
    if wanted == "0":
        return None
    if torch.version.cuda is None:
        if wanted == "1":
            give_up(f"PYTRACER_CUDA=1, but torch {torch.__version__} is a build without CUDA")
        return None
    found = cuda_headers.find(torch.version.cuda)
    if found:
        return found
    wheels = " ".join(f"'{wheel}'" for wheel in cuda_headers.wheels(torch.version.cuda))
    remedy = (
        f"no headers of CUDA {torch.version.cuda} were found; install them: pip install {wheels}, "
        f"or set CUDA_HOME to a toolkit of that version"
    )
    if wanted == "1":
        give_up(f"PYTRACER_CUDA=1, but {remedy}")
    print(f"warning: building pytracer without its CUDA tracker; {remedy}", file=sys.stderr)
    return None


def compiler_name() -> str:
    cxx = cpp_extension.get_cxx_compiler()
    if shutil.which(cxx) is None:
        give_up(f"no C++ compiler ({cxx}); install one (apt install g++) or set CXX")
    output = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=False).stdout
    return output.partition("\n")[0].strip() or cxx


def check_tools() -> None:
    """Ends with one sentence where torch or distutils would end with a page."""
    # A virtual environment's ninja is found even when the environment is not activated.
    os.environ["PATH"] += os.pathsep + sysconfig.get_path("scripts")
    if shutil.which("ninja") is None:
        give_up("ninja is missing; install it: pip install ninja")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        give_up(f"{header} is missing; install Python's headers (apt install python3-dev)")


def build_facts(cuda: bool) -> dict[str, str | None]:
    return {
        "torch": str(torch.__version__),
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda if cuda else None,
        "python": platform.python_version(),
        "abi": sysconfig.get_config_var("SOABI"),
        "compiler": compiler_name(),
    }


def native_extension(cuda_dirs: list[str] | None, facts: dict[str, str | None]) -> Extension:
    cuda_sources = sources("cuda/*.cpp") if cuda_dirs is not None else []
    system_dirs = [*cpp_extension.include_paths(), *(cuda_dirs or [])]
    extension = cpp_extension.CppExtension(
        MODULE,
        sources("core/*.cpp", "torch/*.cpp", "bindings.cpp") + cuda_sources,
        depends=["setup.py", *sources("**/*.h")],
        libraries=["c10_cuda"] if cuda_sources else [],
        define_macros=[
            (f"PYTRACER_{name.upper()}_VERSION", f'"{facts[name] or ""}"')
            for name in ("torch", "torch_git", "cuda", "python")
        ]
        + [("PYTRACER_COMPILER", f'"{facts["compiler"]}"')],
    )
    # Foreign headers are system headers, so that the warnings shown are about our own code.
    extension.include_dirs = [str(CSRC)]
    extension.extra_compile_args = [
        # gcc loses its own headers when told of /usr/include once more.
        *(f"-isystem{path}" for path in system_dirs if path != "/usr/include"),
        "-O3",
        "-g0",  # Python's own flags ask for debug information: ten times the size
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        # No path of this machine in the binary: __FILE__ in torch's macros would bring some.
        f"-ffile-prefix-map={Path(torch.__file__).parent}=torch",
        f"-ffile-prefix-map={ROOT}=pytracer",
    ]
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        # Our code is C++20. Newer torches ask for that or more by themselves.
        extension.extra_compile_args.append("-std=c++20")
    return extension


class BuildNative(cpp_extension.BuildExtension if torch else build_ext):
    """Compiles the extension and writes down what it was compiled for."""

    def run(self) -> None:
        if torch is None:
            give_up(ADVICE_WITHOUT_TORCH.format(problem=torch_problem))
        check_tools()
        cuda_dirs = find_cuda()
        facts = build_facts(cuda=cuda_dirs is not None)
        # Into the stand-in, which carries what setuptools noted about it meanwhile.
        vars(self.extensions[0]).update(vars(native_extension(cuda_dirs, facts)))
        super().run()
        folders = [Path(self.build_lib, "pytracer")]
        if self.inplace:  # also what an editable install sets
            folders.append(ROOT / "pytracer")
        for folder in folders:
            (folder / "_build.json").write_text(json.dumps(facts, indent=2) + "\n")


if int(setuptools_version.split(".")[0]) < 77:
    give_up(
        f"setuptools {setuptools_version} cannot read pyproject.toml's license; "
        "pip install --upgrade 'setuptools>=77'"
    )
if choice("PYTRACER_BUILD_EXT", ("1", "0")) == "1":
    # A stand-in that makes the wheel a platform wheel and puts the sources into the source
    # distribution; the real one is made when compiling starts, since it needs torch.
    stand_in = Extension(MODULE, sources("core/*.cpp", "torch/*.cpp", "cuda/*.cpp", "bindings.cpp"))
    setup(ext_modules=[stand_in], cmdclass={"build_ext": BuildNative, "build_py": BuildPython})
else:
    print(
        "warning: PYTRACER_BUILD_EXT=0: pytracer without its extension neither traces nor reads "
        "saved traces",
        file=sys.stderr,
    )
    setup(cmdclass={"build_py": BuildPython})
