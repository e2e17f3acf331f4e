"""Tables as people read them: any view's, without a change to the numbers themselves."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import pytracer

VIEWS: dict[str, Callable[[Any], pd.DataFrame]] = {
    "summary": lambda t: t.summary(),
    "allocations": lambda t: t.allocations(),
    "timeline": lambda t: t.timeline(),
    "by": lambda t: t.by(["module", "op"]),
    "steps": lambda t: t.steps(),
    "bytes_per_parameter": lambda t: t.bytes_per_parameter(),
    "ledger": lambda t: t.ledger(),
    "fragmentation": lambda t: t.fragmentation(),
    "findings": lambda t: t.findings(),
    "diff": lambda t: t.diff(steps=(0, 2)),
    "health": lambda t: t.health(),
}


@pytest.fixture(scope="module")
def t() -> Any:
    return pytracer.load(Path(__file__).parent / "data" / "h200.pytrace")


@pytest.mark.parametrize("view", VIEWS)
def test_a_printed_view_fits_a_terminal(t: Any, view: str) -> None:
    """As it is, and for people."""
    table = VIEWS[view](t)
    for shown in (table, table.pytracer.human()):
        assert max(map(len, str(shown).splitlines())) <= 80


@pytest.mark.parametrize("view", VIEWS)
def test_no_number_of_bytes_is_left_and_the_table_itself_stays(t: Any, view: str) -> None:
    table = VIEWS[view](t)
    before = table.copy()
    shown = table.pytracer.human()
    pd.testing.assert_frame_equal(table, before)
    assert list(shown.columns) == list(table.columns)
    assert len(shown) == len(table)
    for name in table.columns:
        if name.endswith("bytes") and len(table):
            assert all(re.fullmatch(r"-?[\d.]+ ([KMGT]i)?B", text) for text in shown[name].dropna())


def test_bytes_and_times_are_those_of_the_table(t: Any) -> None:
    found = t.steps().pytracer.human().iloc[0]
    assert found["peak_bytes"] == "244 MiB"
    assert t.steps().iloc[0]["peak_bytes"] == 255464296
    assert found["micro_steps"] == 1  # a count stays one
    assert t.timeline().pytracer.human().index.name == "time"
    assert t.summary().pytracer.human().loc["weights", "at_peak"] == "14.1 MiB"
