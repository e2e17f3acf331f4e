"""Prints the path of a Python that can build and run pytracer, and makes one if needed.

    python3 tools/environment.py [group ...]     dependency groups of pyproject.toml: test, lint
    python3 tools/environment.py --stale         prints FORCE when the extension built here
                                                 belongs to another torch or another Python

If the interpreter that runs this lacks no package, it is the answer, and the network is not used.
An active virtual environment gets the packages that it lacks. Otherwise `.venv` is made: on top of
this interpreter's packages if torch is among them, else with the pinned torch from PyPI.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "_build_backend"))
import cuda_headers  # noqa: E402 - not on the path before

VENV = ROOT / ".venv"
TORCH = "torch==2.13.0"


def requirements(groups: list[str]) -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = settings["project"]
    wanted = [TORCH, *settings["build-system"]["requires"], *project["dependencies"]]
    for group in groups:
        wanted += settings["dependency-groups"][group]
    return wanted


def is_installed(requirement: str) -> bool:
    """Whether the package is installed and new enough. Any torch will do."""
    name, relation, wanted = re.match(r"([\w.-]+)(==|>=)?(.*)", requirement).groups()
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return importlib.util.find_spec(name.replace("-", "_")) is not None
    if relation is None or name == "torch":
        return True
    return version == wanted if relation == "==" else numbers(version) >= numbers(wanted)


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def install(missing: list[str]) -> None:
    if not missing:
        return
    print(f"installing into {sys.prefix}: {' '.join(missing)}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *missing]
    command += the_torch_that_is_there()
    # stdout is for the answer.
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise SystemExit(
            f"error: {sys.executable} lacks {', '.join(missing)} and pip failed. Without a network, "
            f"{sys.executable} -m pytest runs the tests of what is there"
        )


def the_torch_that_is_there() -> list[str]:
    """Returns the installed torch as a requirement, so that no package brings another."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return [f"torch=={importlib.metadata.version('torch')}"]
    return []  # there is no torch yet, or it was built without metadata


def main(arguments: list[str]) -> None:
    stale = arguments == ["--stale"]
    missing = [need for need in requirements([] if stale else arguments) if not is_installed(need)]
    if missing and sys.prefix == sys.base_prefix:
        python = VENV / "bin" / "python"
        if stale and not python.exists():
            return
        if not python.exists():
            has_torch = TORCH not in missing
            print(f"making {VENV}", file=sys.stderr)
            try:
                venv.create(VENV, with_pip=True, system_site_packages=has_torch)
            except subprocess.CalledProcessError:  # Debian's Python without its ensurepip
                shutil.rmtree(VENV)
                raise SystemExit(
                    "error: no virtual environment: apt install python3-venv"
                ) from None
        os.execv(python, [str(python), __file__, *arguments])
    if stale:
        print("FORCE" if is_stale() else "")
    else:
        install(missing)
        if Path(sys.prefix) == VENV:  # elsewhere setup.py names the packages to install
            install(missing_cuda_headers())
        print(sys.executable)


def missing_cuda_headers() -> list[str]:
    """Returns the packages with the headers of the CUDA tracker, if this torch has CUDA."""
    importlib.invalidate_caches()
    cuda = cuda_headers.cuda_of(Path(importlib.util.find_spec("torch").origin).parent)
    return [] if cuda is None or cuda_headers.find(cuda) else cuda_headers.wheels(cuda)


def is_stale() -> bool:
    facts = ROOT / "pytracer" / "_build.json"
    torch = importlib.util.find_spec("torch")
    if torch is None or not facts.exists():
        return False  # make itself notices a missing build
    built = json.loads(facts.read_text())
    # Reads the version: importing torch takes longer than all the rest of make.
    version = (Path(torch.origin).parent / "version.py").read_text()
    same_torch = any(f"'{each['torch']}'" in version for each in built.get("torches", {}).values())
    return not same_torch or built["abi"] != sysconfig.get_config_var("SOABI")


main(sys.argv[1:])
