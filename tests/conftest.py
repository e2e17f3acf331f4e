"""What every test gets: fixed seeds, and a skip with its reason where there is no GPU."""

import gc
import os
import random
import sys
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch
from torch import distributed

from pytracer.capture import variables
from tests.tiers import TIER, too_many

# Hundreds of processes import pytracer and these tests. Each would compile them again, where the
# environment says that Python is to keep no bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Beside another worker, threads of torch's would wait for cores, and spin while they do.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# The same examples on every run, and no deadline: the machine may be busy with something else.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
# HYPOTHESIS_PROFILE=search looks for new ones, and for longer.
hypothesis.settings.register_profile("search", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("alone") and "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("measures the device as a whole: run it without -n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`make test` leaves to the longer tiers what is marked `ci`, and both what is marked `nightly`.

    Of each test they run `tiers.MOST` cases at most, evenly spread, unless the command line names tests.
    """
    longer = {"test": ("ci", "nightly"), "ci": ("nightly",), "nightly": ()}[TIER]
    left = {item for item in items if any(map(item.get_closest_marker, longer))}
    if not any("::" in one or one.endswith(".py") for one in config.args):
        left |= too_many([item for item in items if item not in left])
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]


@pytest.fixture(autouse=True, scope="module")
def _heap() -> None:
    """Collections within tests skip what is there already: the libraries, a second's worth of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _others(request: pytest.FixtureRequest) -> Iterator[None]:
    """To a trace, all other test files are a library: to search their variables takes half a second."""
    names = [name for name in sys.modules if name.rpartition(".")[2].startswith("test_")]
    files = {str(sys.modules[name].__file__) for name in names} - {str(request.path)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variables, "INSTALLED", (*variables.INSTALLED, *files))
        yield


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the code under test may use the global generator
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """What `pytracer run` tells the children of its program is not for later tests."""
    before = os.environ.get("PYTRACER")
    yield
    if before is None:
        os.environ.pop("PYTRACER", None)
    else:
        os.environ["PYTRACER"] = before


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(params=["namespaces", "preload"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way to a private view of the files that this machine allows."""
    from pytracer.sandbox import launch
    from tests.private_views import possible

    if request.param not in possible():
        pytest.skip(f"this machine allows no {request.param}")
    monkeypatch.setattr(launch, "WAYS", [request.param])
    return str(request.param)
