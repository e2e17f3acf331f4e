"""The build backend: setuptools, with the torch of the environment that pytracer goes into.

pip builds in an isolated environment, where torch cannot be imported. Asking for torch as a build
requirement would be worse: pip would download one, and a binary compiled against it may not load in
the installed torch. But pip runs this backend with the target environment's own interpreter, and
only hides that environment's packages. So we ask the interpreter, in a fresh process, where it would
find torch, and add those folders behind the isolated ones.

uv and `python -m build` use a throw-away interpreter, which knows nothing about the target: there
setup.py ends with the advice to use --no-build-isolation. PYTRACER_TORCH_PATH names a folder
(a site-packages) to look in first.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import native
from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401 - the hooks that need no torch
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

WHERE_IS_TORCH = """
import importlib.util, json, sys
print(json.dumps(sys.path if importlib.util.find_spec("torch") else []))
"""


def _reveal_torch():
    named = os.environ.get("PYTRACER_TORCH_PATH")
    if named:
        sys.path.append(named)
    if importlib.util.find_spec("torch"):
        return
    # These two are how pip hides the environment.
    hiding = ("PYTHONPATH", "PYTHONNOUSERSITE")
    environment = {name: value for name, value in os.environ.items() if name not in hiding}
    answer = subprocess.run(
        [sys.executable, "-c", WHERE_IS_TORCH],
        env=environment,
        cwd=os.path.dirname(sys.executable),  # not here, where a folder could pose as torch
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode == 0:
        sys.path += [path for path in json.loads(answer.stdout) if path and path not in sys.path]
        importlib.invalidate_caches()


def _tools():
    """Packages that this machine lacks: often none, and then a build needs no network."""
    if os.environ.get("PYTRACER_TORCHES"):
        return []
    _reveal_torch()
    torch = importlib.util.find_spec("torch")
    if torch is None:  # the reader is built nevertheless; torch would have these headers
        return ["pybind11>=2.12"]
    return _missing_headers(native.torch_in(Path(torch.origin).parent))


def _missing_headers(torch):
    """The wheels with the headers of the accelerators that this torch was built for."""
    wheels = []
    for accelerator in native.ACCELERATORS:
        version = accelerator.version_in(torch)
        is_wanted = version and os.environ.get(accelerator.switch) != "0"
        if is_wanted and not accelerator.find_headers(version):
            wheels += accelerator.wheels(version)
    return wheels


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + _tools()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + _tools()


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _reveal_torch()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _reveal_torch()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
