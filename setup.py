"""Builds pytracer's binaries for the torch that is installed here: see _build_backend/native.py.

Everything that never changes is in pyproject.toml. `python setup.py build_ext --inplace` needs
nothing beside Python, a compiler and torch; other commands need setuptools.

Environment: PYTRACER_BUILD_EXT=1|0 (0: leave the binaries out), PYTRACER_CUDA=auto|1|0,
PYTRACER_TORCHES (folders of torch packages to build for, instead of the installed one), MAX_JOBS,
CXX, CXXFLAGS, LDFLAGS, CUDA_HOME.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "_build_backend"))
import native  # noqa: E402 - ours, and not on the path before

WITHOUT_TORCH = """\
warning: no torch was found, so pytracer will read traces and record none. To record:
  pip install torch, then pip install --force-reinstall --no-deps . again
  with uv:                     uv pip install --no-build-isolation .   (needs setuptools)
  torch is somewhere else:     PYTRACER_TORCH_PATH=/its/site-packages pip install ."""
ONLY_LINUX = "warning: pytracer records on Linux only; here it will read traces and record none"


def give_up(message: str) -> NoReturn:
    raise SystemExit(f"\nerror: {message}\n")


def choice(name: str, allowed: tuple[str, ...]) -> str:
    """An environment switch; the first allowed value is its default."""
    value = os.environ.get(name) or allowed[0]
    if value not in allowed:
        give_up(f"{name}={value} is not understood; it is one of {', '.join(allowed)}")
    return value


def find_torches() -> list[native.Torch]:
    named = os.environ.get("PYTRACER_TORCHES")
    if named:
        return [native.torch_in(Path(folder)) for folder in named.split(os.pathsep)]
    if sys.platform != "linux":
        print(ONLY_LINUX, file=sys.stderr)
        return []
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        print(WITHOUT_TORCH, file=sys.stderr)
        return []
    return [native.torch_in(Path(torch.origin).parent)]


def build(into: Path) -> None:
    wanted = {each.name: choice(each.switch, ("auto", "1", "0")) for each in native.ACCELERATORS}
    try:
        native.build(find_torches(), into, wanted)
    except native.CannotBuild as problem:
        give_up(str(problem))


def main() -> None:
    with_binaries = choice("PYTRACER_BUILD_EXT", ("1", "0")) == "1"
    arguments = [argument for argument in sys.argv[1:] if argument not in ("-q", "--quiet")]
    if with_binaries and arguments == ["build_ext", "--inplace"]:
        build(ROOT / "pytracer")
        return

    from setuptools import Extension, __version__, setup
    from setuptools.command.build_ext import build_ext
    from start_line import BuildPython

    if int(__version__.split(".")[0]) < 77:
        give_up(
            f"setuptools {__version__} cannot read pyproject.toml's license; "
            "pip install --upgrade 'setuptools>=77'"
        )
    if not with_binaries:
        print(
            "warning: PYTRACER_BUILD_EXT=0: pytracer without its extension neither traces nor "
            "reads saved traces",
            file=sys.stderr,
        )
        setup(cmdclass={"build_py": BuildPython})
        return

    class BuildNative(build_ext):
        """Compiles when setuptools calls it."""

        def run(self) -> None:
            # An editable install is one in place, too.
            build(ROOT / "pytracer" if self.inplace else Path(self.build_lib, "pytracer"))

        def get_outputs(self) -> list[str]:
            return []

        def get_output_mapping(self) -> dict[str, str]:
            return {}

    # It makes the wheel a platform wheel, and puts the sources into the source distribution.
    sources = [str(path.relative_to(ROOT)) for path in sorted(native.CSRC.rglob("*.cpp"))]
    setup(
        ext_modules=[Extension("pytracer._C", sources)],
        cmdclass={"build_ext": BuildNative, "build_py": BuildPython},
    )


main()
