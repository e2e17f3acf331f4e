"""Imagined as the host, a program takes what it really takes there: block by block, but for scratch.

This is the oracle of imagined runs that needs no GPU. What a card does otherwise (workspaces, its kernels
of attention, its reductions) is held against recordings of a card: benchmarks/imagine.py.
"""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pytracer
from programs.conformance.cases import CASES, Case, make, run
from pytracer.analysis.facts.doubts import doubts
from tests.imagined_oracle import compare, peaks
from tests.tiers import first_of

# Programs that are not followed here, and why.
_ELSEWHERE = {
    "lstm": "oneDNN keeps a workspace for backward whose size only it knows",
    "experts": "how many rows an expert gets depends on values",
    "compile": "a compiler takes memory of its own: test_imagine_compiled.py",
    "torchao": "its optimizer compiles its step, and a compiler takes memory of its own",
    "bitsandbytes": "its optimizer takes memory before it steps",
    "recommender": "a formula of torch's writes in place unless a dispatch mode is there",
    # torch's fake kernels give the statistics another dtype.
    "resnet-autocast_bf16": "normalization in two dtypes at once",
    "resnet-autocast_fp16": "normalization in two dtypes at once",
    "unet-autocast": "normalization in two dtypes at once",
}
_FIRST = ("gpt2-fp32-adamw", "unet-fp32-adamw", "t5-checkpoint-adamw", "vit-distillation-adamw")


def followed() -> list[Any]:
    """A few in each run of the tests, a third in CI, all at night."""
    names = [name for name in CASES if not any(word in name for word in _ELSEWHERE)]
    later = [name for name in names if name not in _FIRST]
    night = [name for at, name in enumerate(later) if at % 3]
    known = first_of([*_FIRST, *night], len(_FIRST), later=pytest.mark.nightly)
    return known + first_of(later[::3], 0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # scratch is for each thread
    gc.collect()
    yield
    torch.set_num_threads(threads)
    gc.collect()


def _trains(case: Case) -> None:
    run(case, make(case, "tiny", "cpu"))


@pytest.mark.ci
@pytest.mark.parametrize("name", followed())
def test_a_program_takes_what_it_is_imagined_to_take(name: str) -> None:
    """Each step, phase, category and operator has the same blocks; so the peaks are equal."""
    with pytracer.trace(devices="cpu", table=False) as real:
        _trains(CASES[name])
    gc.collect()
    with pytracer.imagine("cpu") as imagined:
        _trains(CASES[name])
    found = compare(real.data, imagined.data)
    assert not found.invented
    assert not found.missing
    assert peaks(real.data) == peaks(imagined.data)
    assert not doubts(imagined.data)
