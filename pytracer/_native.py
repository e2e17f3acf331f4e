"""The only door to the compiled extension: `from pytracer._native import C`.

An extension of torch works with the release of torch it was compiled for and with no other. Loaded
into another, it fails with an undefined symbol or, worse, reads structures that have changed. So
there is one for each release, and which one fits is seen before any is opened: from the
`_build.json` that the build writes beside them, and from torch's version.
"""

import importlib.machinery
import importlib.util
import json
import os
import shlex
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from pytracer import errors
from pytracer.version import OLDEST_TORCH, TESTED_TORCH

if TYPE_CHECKING:
    from pytracer import _C as C

HERE = Path(__file__).parent
Facts = Mapping[str, Any]


def how_to_rebuild(package: Path = HERE) -> str:
    """The command that builds for the torch that is running; it needs nothing but a compiler."""
    checkout = package.parent
    python = shlex.quote(sys.executable)
    if (checkout / "setup.py").is_file() and (checkout / "csrc").is_dir():
        return f"cd {shlex.quote(str(checkout))} && {python} setup.py build_ext --inplace"
    return f"{python} -m pip install --force-reinstall --no-deps .   (in pytracer's source)"


def release_of(version: str) -> str:
    """2.13 of 2.13.1+cpu."""
    return ".".join(version.split(".")[:2])


def _promised(version: str) -> str:
    """What must be equal for two torches to share a binary.

    Patch releases keep the ABI, and builds for the CPU and for CUDA are the same in all that the
    extension sees. Nightlies and builds from source promise nothing, so they are compared whole.
    """
    numbers = version.partition("+")[0].split(".")
    is_release = len(numbers) == 3 and numbers[2].isdigit()
    return release_of(version) if is_release else version


def _installed_elsewhere(package: Path) -> Path | None:
    """A built pytracer that this one is found before: whoever stands in a clone imports that."""
    for entry in sys.path:
        other = Path(entry).resolve() / package.name
        if other != package.resolve() and (other / "_build.json").is_file():
            return other
    return None


def read_facts(package: Path = HERE) -> Facts:
    """What the binaries in this package were built for.

    Raises:
        BuildMissing: there are none.
    """
    try:
        facts: Facts = json.loads((package / "_build.json").read_text())
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
    """What is known of the binary for this torch.

    Raises:
        BuildMismatch: there is none for this torch or this Python; names both and what to do.
    """
    release, abi = release_of(torch_version), sysconfig.get_config_var("SOABI")
    check_torch(torch_version)
    if facts.get("abi") != abi:
        raise errors.BuildMismatch(
            f"pytracer was built for Python {facts.get('abi')}, and this is {abi}. Rebuild it:\n"
            f"  {how_to_rebuild(package)}"
        )
    torches = facts.get("torches", {})
    fitting = torches.get(release)
    if fitting is None or _promised(fitting["torch"]) != _promised(torch_version):
        built_for = ", ".join(each["torch"] for each in torches.values()) or "none"
        raise errors.BuildMismatch(
            f"pytracer was built for torch {built_for}, and this is torch {torch_version}. "
            f"Rebuild it:\n  {how_to_rebuild(package)}"
        )
    return {**{name: facts[name] for name in ("python", "abi", "compiler")}, **fitting}


def check_torch(version: str) -> None:
    """Refuses a torch that no build of this pytracer can support.

    Raises:
        BuildMismatch: it is too old.
    """
    if _numbers(version) < _numbers(OLDEST_TORCH):
        raise errors.BuildMismatch(
            f"torch {version} is older than pytracer supports ({OLDEST_TORCH} to "
            f"{TESTED_TORCH[-1]}); update it: pip install 'torch>={OLDEST_TORCH}'"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int("".join(filter(str.isdigit, each)) or 0) for each in version.split(".")[:2])


def _load(facts: Mapping[str, str | None]) -> ModuleType:
    """Opens the binary for this release, as `pytracer._C`."""
    release = release_of(str(facts["torch"]))
    name, path = "pytracer._C", HERE / f"_C-torch{release}.{facts['abi']}.so"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise errors.BuildMismatch(
            f"pytracer's extension was built for torch {facts['torch']} and does not load in torch "
            f"{torch.__version__}: {error}\nRebuild it:\n  {how_to_rebuild()}"
        ) from error
    sys.modules[name] = module
    return module


def _open_tracker(extension: ModuleType, release: str) -> str:
    """Opens the CUDA tracker beside a torch that has CUDA; returns why there is none."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    path = HERE / f"_cuda-torch{release}.so"
    if not path.is_file():
        return "this build of pytracer has no CUDA tracker; rebuild it beside a CUDA torch"
    return str(extension.open_device_tracker(os.fsencode(path)))


facts = facts_for(read_facts(), str(torch.__version__))
if not TYPE_CHECKING:
    C = _load(facts)
no_tracker = _open_tracker(C, release_of(str(torch.__version__)))

__all__ = ["C", "facts", "no_tracker"]
