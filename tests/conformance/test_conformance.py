"""Attribution of whole training steps: every case against expectations computed without pytracer.

Models are tiny here. `python tools/conformance.py` writes what is found to docs/conformance.md, and
runs models of the sizes people use on a GPU.
"""

import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from programs.conformance.cases import CASES, Result, conform
from programs.conformance.techniques import TECHNIQUES

DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"


def _every_case() -> Iterator[Any]:
    for device in ("cpu", "cuda"):
        for name in CASES:
            marks: list[Any] = [pytest.mark.cuda] if device == "cuda" else []
            # Beside each other, so that both look at one run.
            yield pytest.param(name, device, conforms, id=f"{name}-{device}", marks=marks)
            also = f"{name}-{device}-same_by_default"
            yield pytest.param(name, device, same, id=also, marks=marks)
            also = f"{name}-{device}-same_by_category"
            yield pytest.param(name, device, same_or_coarser, id=also, marks=marks)


def conforms(found: Result) -> None:
    assert found.without_inputs("found") == found.without_inputs("expected")
    if found.hooks_see_all:
        assert found.inputs_with_hooks == found.expected["inputs"]
    if found.kept_by_program:  # a generation's cache
        assert found.functional_at_end == found.kept_by_program
    role = TECHNIQUES[CASES[found.name].technique].role
    assert not role or role in found.roles
    assert found.same_with_reference  # what it says of its run holds for the others
    assert found.agreement >= 0.999
    assert found.agreement_ever >= 0.999
    assert found.unknown_share <= 0.001
    assert found.differences().keys() <= {"inputs", "functional"}
    assert found.sums_hold


def same(found: Result) -> None:
    if found.hooks_see_all:
        assert found.found["inputs"] == found.expected["inputs"]
    assert found.differences() == {}


def same_or_coarser(found: Result) -> None:
    """detail="category" says of every block at the peak what op mode does, or the one coarser word."""
    coarser = found.coarser()
    assert {word for word in found.only_category if not word.startswith("unknown ")} == set()
    if coarser:
        assert "copy_or_activation" in found.category_roles, coarser
        assert coarser.pop("unknown") == -sum(coarser.values())
        assert coarser.keys() <= {"weights", "activations", "temporaries"}
        assert min(coarser.values()) > 0


@functools.lru_cache(maxsize=1)
def result(name: str, device: str) -> Result:
    # Garbage is collected before each run of a case: what is there by now need not be looked at again.
    gc.collect()
    gc.freeze()
    return conform(CASES[name], "tiny", device)


@pytest.fixture(autouse=True, scope="module")
def unfrozen_at_the_end() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models are small, and other tests may be running beside these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the compiler's advice
@pytest.mark.parametrize(("name", "device", "check"), list(_every_case()))
def test_every_byte_is_what_it_is(name: str, device: str, check: Callable[[Result], None]) -> None:
    """Weights, gradients, optimizer state and inputs to the byte; activations as the slow reference
    has them; hardly anything unknown; both ways of learning saved tensors agree, and so does detail="category";
    sums hold.
    """
    check(result(name, device))


def test_the_table_in_the_documentation_has_every_case() -> None:
    """`python tools/conformance.py` writes it."""
    text = DOCUMENT.read_text().partition("## Programs")[0]
    tables = text.split("\n## ")[1:]
    assert len(tables) == 2  # a CPU's and a GPU's
    for table in tables:
        lines = [line for line in table.splitlines() if line.startswith("|")]
        rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines]
        assert {"-".join(row) for row in rows if row[0] not in ("model", "---")} == set(CASES)
