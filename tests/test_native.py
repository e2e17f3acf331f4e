"""Law 5: what the native side computes is what the plain Python says; and its vocabulary too."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pytracer import errors
from pytracer.analysis.facts import lifetimes
from pytracer.data import schema
from pytracer.data._native import core
from pytracer.data.recorded import Trace, load, unix_ns
from tests import lifetimes_reference
from tests.strategies import PLACES, hostile_events, valid_events
from tests.trace_builder import TraceBuilder

EVENT_H = Path(__file__).parents[1] / "csrc" / "core" / "event.h"


def native(events: schema.Events) -> dict[str, np.ndarray]:
    columns = {f"events.{name}": column for name, column in events._asdict().items()}
    columns |= {f"places.{name}": column for name, column in PLACES._asdict().items()}
    return core.lifetimes(columns)


@given(st.one_of(valid_events(), hostile_events()))
def test_native_lifetimes_are_the_references(events):
    expected = lifetimes_reference.match_lifetimes(events, PLACES)
    found = native(events)
    for column in ("start", "end", "completed", "address", "bytes", "place", "allocation_of_event"):
        assert np.array_equal(found[column], getattr(expected, column)), column
    assert found["counters"] == dict(expected.counters)


def enumerators(name: str) -> dict[str, int]:
    body = re.search(rf"enum class {name} : uint8_t {{(.*?)}};", EVENT_H.read_text(), re.S)
    assert body
    return {
        re.sub(r"(?<!^)(?=[A-Z])", "_", word).lower(): int(number)
        for word, number in re.findall(r"k(\w+) = (\d+)", body.group(1))
    }


def test_both_languages_use_the_same_numbers():
    assert enumerators("Action") == schema.ACTION
    assert enumerators("ScopeKind") == schema.SCOPE_KIND
    assert list(enumerators("DeviceType")) == list(schema.DEVICE_TYPES)


def a_trace(events: schema.Events, strings: tuple[str, ...]) -> Trace:
    def rows(table: str, **columns: list[int]) -> object:
        row_type, dtypes = schema.TABLES[table]
        return row_type(
            *(
                np.array(columns.get(name, [0]), dtype=dtype)
                for name, dtype in zip(row_type._fields, dtypes, strict=True)
            )
        )

    return Trace(
        events=events,
        places=PLACES,
        scopes=rows("scopes"),
        scope_ends=rows("scope_ends", scope=[1]),
        stacks=rows("stacks"),
        # As many as the random events may refer to: references into nothing are repaired.
        labels=rows("labels", **{name: [0] * 64 for name in schema.Labels._fields}),
        threads=rows("threads"),
        clock=rows("clock", ticks=[5], unix_ns=[7]),
        strings=("", *strings),
        losses={"lost_alloc": 3},
        meta={"pid": 1, "name": "é"},
    )


@given(valid_events(), st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20)))
def test_what_is_saved_is_loaded(tmp_path_factory, events, strings):
    before = a_trace(events, tuple(strings))
    path = before.save(tmp_path_factory.mktemp("saved") / "t.pytrace")
    after = load(path)
    assert after.file_report["status"] == "complete"
    for table in schema.TABLES:
        for ours, theirs in zip(getattr(before, table), getattr(after, table), strict=True):
            assert np.array_equal(ours, theirs), table
    assert after.strings[: len(before.strings)] == before.strings
    assert after.losses == before.losses
    assert after.meta == before.meta


def test_ticks_become_time_by_the_clocks_readings_whatever_a_file_says():
    clock = schema.Clock(np.array([1000, 3_000_001_000], "u8"), np.array([50, 10**9 + 50], "i8"))
    ticks = np.array([1000, 1003, 400, 2**63, 2**64 - 1, 0], "u8")
    times = unix_ns(clock, ticks)
    assert list(times[:3]) == [50, 51, -150]
    assert times[3] > times[1]  # absurd, but no complaint


def test_a_saved_file_is_not_overwritten_unless_asked(tmp_path):
    whole = a_trace(schema.Events(*(np.zeros(0, d) for d in schema.TABLES["events"][1])), ())
    path = whole.save(tmp_path / "t.pytrace")
    with pytest.raises(errors.CannotWrite, match="exists"):
        whole.save(path)
    whole.save(path, overwrite=True)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such file"),
        (b"", "empty"),
        (b"PK\x03\x04 a zip file, say", "not a"),
        (b"\x80\x04}q\x00.", "not a"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_one_line(tmp_path, content, says):
    path = tmp_path / "x.pytrace"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(errors.UnreadableTrace, match=f"(?i){says}") as refused:
        load(path)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 4


def test_a_trace_of_too_many_events_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    b = TraceBuilder()
    for _ in range(3):
        b.alloc(8)
    monkeypatch.setattr(lifetimes, "_MOST_EVENTS", 2)
    with pytest.raises(
        errors.UsageError, match="3 events are more than can be analysed, 2: record"
    ):
        lifetimes.lifetimes(b.trace())
