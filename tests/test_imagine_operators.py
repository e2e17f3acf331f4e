"""Operators on an imagined card take what they took on a real one (benchmarks/operators.py).

Each runs in two layouts, because kernels on a card copy what does not lie as they want it.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import pytracer
from benchmarks.operators import imagined, operators

FILE = Path(__file__).parents[1] / "benchmarks/results/operators-nvidia-h200.json"
MEASURED: dict[str, Any] = json.loads(FILE.read_text())["operators"]
CARD = "H200"
_FORMULA = "torch computes it by other operators, some in place"
_SORTS = "the sorting library's own scratch"
# What is not followed, and why.
OTHERWISE = {
    "binary_cross_entropy_with_logits": _FORMULA,
    "multinomial": _FORMULA,
    "sort": _SORTS,
    "sort whole": _SORTS,
    "argsort of one row": _SORTS,
    "pad by reflection, turned": "the layout of its result",
    "batch_norm of rows, plain": "8 KiB of statistics in backward",
}
if not torch.backends.cuda.is_built():
    OTHERWISE["batch_norm, turned"] = "cuDNN keeps its copy of the input, and makes no second one"


def test_each_operator_was_measured() -> None:
    assert [name for name, _ in operators()] == list(MEASURED)


@pytest.mark.parametrize(("name", "program"), list(operators()), ids=list(MEASURED))
def test_an_operator_takes_what_a_card_took(name: str, program: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = imagined(program, CARD)
    if name in OTHERWISE or name.rpartition(", ")[0] in OTHERWISE:
        assert found != MEASURED[name], "it is followed now: take it off the list"
    else:
        assert found == MEASURED[name]


def test_sorting_long_rows_takes_what_only_the_library_knows() -> None:
    """The interval holds what was measured; short rows are sorted in place."""
    program = dict(operators())["argsort of one row, plain"]
    with pytracer.imagine(CARD) as t:
        program()
    most = t.data.meta["imagined"]["peak_at_most"]
    assert t.peak.bytes < MEASURED["argsort of one row, plain"]["peak"] <= most
    with pytracer.imagine(CARD) as t:
        torch.sort(torch.ones(64, 4096, device="cuda"))
    assert "peak_at_most" not in t.data.meta["imagined"]
