"""The only door to the compiled extension: `from pytracer._native import C`.

An extension of torch works with the torch it was compiled for and with no other. Loaded into
another, it fails with an undefined symbol or, worse, reads structures that have changed. So what
the binary was built for is compared first, from the `_build.json` that setup.py writes beside it.
"""

import json
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import torch

from pytracer import errors

HERE = Path(__file__).parent


def how_to_rebuild(package: Path = HERE) -> str:
    """The exact command that builds the extension for the torch that is running."""
    checkout = package.parent
    if (checkout / "setup.py").is_file() and (checkout / "csrc").is_dir():
        return f"cd {checkout} && python setup.py build_ext --inplace"
    return "pip install --no-build-isolation --force-reinstall --no-deps .   (in pytracer's source)"


def _installed_elsewhere(package: Path) -> Path | None:
    """A built pytracer that this one is found before: whoever stands in a clone imports that."""
    for entry in sys.path:
        other = Path(entry).resolve() / package.name
        if other != package.resolve() and (other / "_build.json").is_file():
            return other
    return None


def _release(version: str) -> tuple[str, str]:
    """What must be equal for two torches to share a binary: release and variant (+cpu, +cu130).

    Patch releases keep the ABI. Nightlies and builds from source promise nothing, so they are
    compared whole.
    """
    public, _, variant = version.partition("+")
    numbers = public.split(".")
    if len(numbers) == 3 and numbers[2].isdigit():
        return ".".join(numbers[:2]), variant
    return public, variant


def read_facts(package: Path = HERE) -> dict[str, str | None]:
    """What the binary in this package was built for.

    Raises:
        BuildMissing: there is no binary.
    """
    try:
        facts: dict[str, str | None] = json.loads((package / "_build.json").read_text())
    except FileNotFoundError:
        hidden = _installed_elsewhere(package)
        also = f"pytracer is installed in {hidden}, and this folder hides it:\n" if hidden else ""
        leave = "run from another folder, or build" if hidden else "Build"
        raise errors.BuildMissing(
            f"pytracer's extension has not been built in {package}. {also}{leave} it:\n"
            f"  {how_to_rebuild(package)}"
        ) from None
    return facts


def check_facts(facts: Mapping[str, str | None], torch_version: str, package: Path = HERE) -> None:
    """Refuses a binary that was built for another torch or another Python.

    Raises:
        BuildMismatch: names both and the command that rebuilds.
    """
    abi = sysconfig.get_config_var("SOABI")
    built_for = str(facts.get("torch"))
    if _release(built_for) == _release(torch_version) and facts.get("abi") == abi:
        return
    raise errors.BuildMismatch(
        f"pytracer was built for torch {built_for} ({facts.get('abi')}), and this is torch "
        f"{torch_version} ({abi}). Rebuild it:\n  {how_to_rebuild(package)}"
    )


facts = read_facts()
check_facts(facts, str(torch.__version__))
try:
    from pytracer import _C as C
except ImportError as error:
    raise errors.BuildMismatch(
        f"pytracer's extension was built for torch {facts['torch']} and does not load in torch "
        f"{torch.__version__}: {error}\nRebuild it:\n  {how_to_rebuild()}"
    ) from error

__all__ = ["C", "facts"]
