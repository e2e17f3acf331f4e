"""Categories that a snapshot of torch's shows, held against a trace that knows them, block by block.

No GPU is needed: programs run on an imagined card, and their trace is turned into the snapshot that torch
would have written. benchmarks/snapshots.py records the same programs both ways on a GPU.
"""

import gc
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pytracer
from benchmarks.snapshot_programs import PROGRAMS
from benchmarks.snapshots import ROOT, STACKS, VARIANTS, compared, rules_table, variant
from programs.snapshot_oracle import as_snapshot
from pytracer.snapshot import evidence
from tests.tiers import first_of

# Libraries of the programs' own.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
_FIRST = (
    *("GPT-2, AdamW", "Llama, AMP, accumulation", "Llama, LoRA, bfloat16, checkpointed"),
    *("Two networks against each other", "Llama, FSDP2"),
)
_MOST_WRONG = 0.01
# Without frames, a free does not tell whether a node or a reduction made it.
_FREES_TELL = {"Llama, FSDP2": 0.05, "GPT-2, checkpointed": 0.03}
_LEAST_RIGHT = {
    "whole": (0.95, 0.9),
    "ring": (0.8, 0.85),
    "built": (0.4, 0.9),
    "alloc": (0.85, 0.9),
}


@pytest.fixture(autouse=True)
def _nothing_alive() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # collections within the test are of its own
    yield
    gc.collect()


def imagined(name: str) -> Any:
    ranks = 2 if "DDP" in name or "FSDP" in name else None
    with pytracer.imagine("H100", stacks=True, ranks=ranks) as t:
        held = PROGRAMS[name]("cuda")
    del held
    return t


def read(snapshot: dict[str, Any], folder: Path) -> Any:
    path = folder / "one.pickle"
    path.write_bytes(pickle.dumps(snapshot, protocol=4))
    return pytracer.load(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", first_of([*_FIRST, *(name for name in PROGRAMS if name not in _FIRST)], len(_FIRST))
)
def test_snapshots_have_the_categories_of_the_trace(name: str, tmp_path: Path) -> None:
    """Most bytes are right; of the others most are unknown, and at most a hundredth is wrong."""
    truth = imagined(name)
    for stacks in STACKS:
        snapshot = as_snapshot(truth.data, stacks)
        for kind in VARIANTS:
            found = compared(truth, read(variant(snapshot, kind), tmp_path), kind)
            for at, least in zip(("peak", "events"), _LEAST_RIGHT.get(kind, (0, 0)), strict=True):
                case = (stacks, kind, at, found[at])
                assert found[at]["lost"] == 0, case
                assert found[at]["right"] >= least, case
                most = _FREES_TELL.get(name, 0) if kind == "alloc" else 0
                assert found[at]["wrong"] <= max(most, _MOST_WRONG), case


def test_every_category_has_its_evidence(tmp_path: Path) -> None:
    """The role of a block is the rule that decided it; only unknown blocks have none."""
    truth = imagined("GPT-2, AdamW")
    blocks = read(as_snapshot(truth.data), tmp_path).allocations()
    rules = {rule for _, rule, _ in evidence.RULES} | {"like_other_steps"}
    phases = {"forward", "backward", "optimizer", "other"}
    for category, role in zip(
        blocks["category"], blocks["role"].astype(object).fillna(""), strict=True
    ):
        assert (category == "unknown") == (role == ""), (category, role)
        assert role in (phases if category == "temporaries" else rules) | {"", "like_other_steps"}


def test_modules_have_the_line_that_calls_them(tmp_path: Path) -> None:
    truth = imagined("Classifier, SGD, evaluations")
    modules = read(as_snapshot(truth.data), tmp_path).allocations()["module"].dropna().unique()
    assert any(name.startswith("linear (snapshot_programs.py:") for name in modules), modules


def test_the_table_of_the_module_is_that_of_the_rules() -> None:
    """Category and evidence, in the order in which the rules are tried."""
    table, category = [], ""
    for line in str(evidence.__doc__).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[1]:
            category = cells[0] or category
            table.append((category, cells[1]))
    rules = [(category, rule) for category, rule, _ in evidence.RULES]
    last = [("temporaries", "the phase"), ("any", "like_other_steps")]
    assert table == [("category", "evidence"), *rules, *last]


def test_the_page_has_the_rules() -> None:
    """`python benchmarks/snapshots.py --docs` writes them there."""
    assert rules_table() in (ROOT / "docs" / "snapshots.md").read_text()
