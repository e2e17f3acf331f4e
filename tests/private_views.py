"""The ways to a private view of the files, for the tests of imagined runs."""

import contextlib
import functools
import os
from pathlib import Path

import pytest

from pytracer import errors
from pytracer.sandbox import launch

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@functools.cache
def possible() -> list[str]:
    """The ways to a private view that this machine allows."""
    found = []
    for way in ("namespaces", "preload"):
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(errors.CaptureError):
            patch.setattr(launch, "WAYS", [way])
            launch.run(["true"], dict(os.environ), launch.Wish())
            found.append(way)
    return found
