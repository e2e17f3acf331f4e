"""The only door to the compiled extensions: `from pytracer.data._native import C`, or `core`.

`core` reads and writes files and needs no torch. `C` records. An extension of torch works only with
the release of torch that it was compiled for. In another release it fails with an undefined symbol
or, worse, reads structures that have changed. So there is one extension for each release. This module
chooses before it opens any: by the `_build.json` that the build writes beside them, and by torch's
version. It opens each extension when that is first used.
"""

import importlib.machinery
import importlib.util
import json
import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from pytracer import errors
from pytracer.basics.version import OLDEST_TORCH, TESTED_TORCH

if TYPE_CHECKING:
    from pytracer import _C as C, _core as core

HERE = Path(__file__).parents[1]
Facts = Mapping[str, Any]


def how_to_rebuild(package: Path = HERE) -> str:
    """Returns the command that builds for the running torch. It needs only a compiler."""
    checkout = package.parent
    python = shlex.quote(sys.executable)
    if (checkout / "setup.py").is_file() and (checkout / "csrc").is_dir():
        return f"cd {shlex.quote(str(checkout))} && {python} setup.py build_ext --inplace"
    return f"{python} -m pip install --force-reinstall --no-deps .   (in pytracer's source)"


def release_of(version: str) -> str:
    """Returns the release of a version: 2.13 for 2.13.1+cpu."""
    return ".".join(version.split(".")[:2])


def _promised(version: str) -> str:
    """The part of the version that must be equal for two torches to share a binary.

    Patch releases keep the ABI, and builds for the CPU and for CUDA are the same in all that the
    extension uses. Nightlies and builds from source promise nothing, so their whole version counts.
    """
    numbers = version.partition("+")[0].split(".")
    is_release = len(numbers) == 3 and numbers[2].isdigit()
    return release_of(version) if is_release else version


def _installed_elsewhere(package: Path) -> Path | None:
    """A built pytracer that this one hides: in a clone's folder, Python imports the clone."""
    for entry in sys.path:
        other = Path(entry).resolve() / package.name
        if other != package.resolve() and (other / "_build.json").is_file():
            return other
    return None


def read_facts(package: Path = HERE) -> Facts:
    """Reads which Python and which torches the binaries in this package were built for.

    Raises:
        BuildMissing: there are no binaries.
    """
    try:
        facts: Facts = json.loads((package / "_build.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        hidden = _installed_elsewhere(package)
        also = f"pytracer is installed in {hidden}, and this folder hides it:\n" if hidden else ""
        leave = "run from another folder, or build" if hidden else "Build"
        raise errors.BuildMissing(
            f"pytracer's extension has not been built in {package}. {also}{leave} it:\n"
            f"  {how_to_rebuild(package)}"
        ) from None
    return facts


def facts_for(facts: Facts, torch_version: str, package: Path = HERE) -> dict[str, str | None]:
    """The facts of the binary for this torch.

    Raises:
        BuildMismatch: there is none for this torch or this Python; names both, and the remedy.
    """
    check_torch(torch_version)
    _check_abi(facts, package)
    release = release_of(torch_version)
    torches = facts.get("torches", {})
    fitting = torches.get(release)
    if not torches:
        raise errors.BuildMissing(
            "this pytracer was installed where there was no torch: it reads traces and records "
            f"none. Install it again:\n  {how_to_rebuild(package)}"
        )
    if fitting is None or _promised(fitting["torch"]) != _promised(torch_version):
        built_for = ", ".join(each["torch"] for each in torches.values()) or "none"
        raise errors.BuildMismatch(
            f"pytracer was built for torch {built_for}, and this is torch {torch_version}. "
            f"Rebuild it:\n  {how_to_rebuild(package)}"
        )
    return {**{name: facts[name] for name in ("python", "abi", "compiler")}, **fitting}


def _check_abi(facts: Facts, package: Path) -> str:
    abi = str(sysconfig.get_config_var("SOABI"))
    if facts.get("abi") != abi:
        raise errors.BuildMismatch(
            f"pytracer was built for Python {facts.get('abi')}, and this is {abi}. Rebuild it:\n"
            f"  {how_to_rebuild(package)}"
        )
    return abi


def check_torch(version: str) -> None:
    """Refuses a torch that this pytracer cannot be built for.

    Raises:
        BuildMismatch: this torch is too old.
    """
    if _numbers(version) < _numbers(OLDEST_TORCH):
        raise errors.BuildMismatch(
            f"torch {version} is older than pytracer supports ({OLDEST_TORCH} to "
            f"{TESTED_TORCH[-1]}); update it: pip install 'torch>={OLDEST_TORCH}'"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int("".join(filter(str.isdigit, each)) or 0) for each in version.split(".")[:2])


def torch_version() -> str:
    """The version of the imported torch, or of the one that an import would find.

    Importing takes seconds, so this reads version.py.

    Raises:
        BuildMissing: there is no torch.
    """
    if (torch := sys.modules.get("torch")) is not None:
        return str(torch.__version__)
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):  # somebody prevents its import
        spec = None
    if spec is None or spec.origin is None:
        raise errors.BuildMissing(
            "recording needs torch, and there is none here (reading traces needs none). Install "
            f"it: {shlex.quote(sys.executable)} -m pip install torch"
        )
    version = Path(spec.origin).with_name("version.py")
    named = re.search(r"^__version__\b.*?= *'(.+?)'", _text_of(version), re.MULTILINE)
    return named[1] if named else str(importlib.import_module("torch").__version__)


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _load(name: str, path: Path, beside: str) -> ModuleType:
    """Opens a binary as `pytracer.NAME`."""
    name = f"pytracer.{name}"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise errors.BuildMismatch(
            f"pytracer's {path.name} does not load in {beside}: {error}\n"
            f"Rebuild it:\n  {how_to_rebuild()}"
        ) from error
    sys.modules[name] = module
    return module


class _Accelerator(NamedTuple):
    """An accelerator whose allocator a library of its own follows: _NAME-torch2.13.so."""

    name: str  # its row in _build_backend/native.py
    title: str
    device: str  # as torch and schema.DEVICE_TYPES name the device
    is_in: Callable[[ModuleType], bool]  # whether this torch was built for it


_ACCELERATORS = (
    _Accelerator("cuda", "CUDA", "cuda", lambda torch: torch.version.cuda is not None),
)


def _open_tracker(torch: ModuleType, extension: ModuleType, accelerator: _Accelerator) -> str:
    """Opens the tracker beside a torch that has the accelerator; returns why there is none."""
    title = accelerator.title
    if not accelerator.is_in(torch):
        return f"this torch is built without {title}"
    path = HERE / f"_{accelerator.name}-torch{release_of(str(torch.__version__))}.so"
    if not path.is_file():
        return f"this build of pytracer has no {title} tracker; build one: {how_to_rebuild()}"
    return str(extension.open_device_tracker(accelerator.device, os.fsencode(path)))


def _open_trackers(torch: ModuleType, extension: ModuleType) -> dict[str, str]:
    """By device: "" if one of its trackers is open, or why none is."""
    problems: dict[str, list[str]] = {}
    for accelerator in _ACCELERATORS:
        problem = _open_tracker(torch, extension, accelerator)
        problems.setdefault(accelerator.device, []).append(problem)
    return {device: "" if "" in each else "; ".join(each) for device, each in problems.items()}


def _open_core() -> dict[str, Any]:
    abi = _check_abi(read_facts(), HERE)
    return {"core": _load("_core", HERE / f"_core.{abi}.so", f"Python {sys.version.split()[0]}")}


def _open_extension() -> dict[str, Any]:
    version = torch_version()
    facts = facts_for(read_facts(), version)
    torch = importlib.import_module("torch")
    if "core" not in globals():  # the extension imports it
        globals().update(_open_core())
    path = HERE / f"_C-torch{release_of(version)}.{facts['abi']}.so"
    extension = _load("_C", path, f"torch {version}")
    problems = _open_trackers(torch, extension)
    return {
        "C": extension,
        "facts": facts,
        "no_trackers": problems,
        "no_tracker": problems["cuda"],
    }


if TYPE_CHECKING:
    facts: dict[str, str | None]  # of the binary that is open
    no_trackers: dict[str, str]  # by device: why it has no tracker; "" if it has one
    no_tracker: str  # the same for CUDA
else:

    def __getattr__(name: str) -> Any:
        if name == "core":
            globals().update(_open_core())
        elif name in ("C", "facts", "no_tracker", "no_trackers"):
            globals().update(_open_extension())
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]


__all__ = ["C", "core", "facts", "no_tracker", "no_trackers"]
