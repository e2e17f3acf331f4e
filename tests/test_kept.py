"""benchmarks/kept.py: what it reads is what it wrote, and rows with the same names are a table."""

import json
from pathlib import Path

import pytest

from benchmarks import kept

DOCUMENTS = [
    {"rows": [{"name": "a", "ms": 1.5}, {"name": "b", "ms": None}], "day": "2026-11-27"},
    [{"name": "a"}, {"name": "b", "problem": "no answer"}],
    {"one": [{"name": "a"}], "none": [], "sizes": [1, 2], "empty": [{}, {}]},
    {"cases": [{"modes": [{"ms": 1}, {"ms": 2}]}, {"modes": [{"ms": 3}, {"ms": 4}]}]},
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_results_are_read_as_they_were_written(document: object, tmp_path: Path) -> None:
    kept.write(tmp_path / "a.json", document)
    assert kept.read(tmp_path / "a.json") == document


def test_rows_with_the_same_names_are_kept_as_a_table(tmp_path: Path) -> None:
    kept.write(tmp_path / "a.json", [{"n": 1, "ms": 1 / 3}, {"n": 123456789012, "ms": 2.0}])
    text = json.loads((tmp_path / "a.json").read_text())
    assert text == {"columns": ["n", "ms"], "rows": [[1, 0.3333333333], [123456789012, 2.0]]}


def test_only_the_named_entries_are_kept() -> None:
    rows = [{"name": "a", "samples": [1, 2]}, {"samples": []}]
    assert kept.only(rows, "name") == [{"name": "a"}, {}]
