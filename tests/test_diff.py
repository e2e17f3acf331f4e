"""A diff compares what blocks are for and who made them, never where they lie."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pytracer import LoadedTrace, errors
from pytracer.analysis.answers import training_steps
from pytracer.analysis.answers.budgets import differences
from pytracer.analysis.answers.diff import KEYS, diff
from pytracer.analysis.facts import usage
from pytracer.export.budget import difference_lines
from pytracer.export.diff import render
from pytracer.recorded import Trace
from tests.golden import same_as_golden
from tests.test_analysis_categories import programs
from tests.test_analysis_damaged import damaged
from tests.trace_builder import TraceBuilder, training_step

MIB = 1 << 20


def training(
    *, activation: int = 5 * MIB, layers: int = 4, steps: int = 2, **more: Any
) -> TraceBuilder:
    b = TraceBuilder()
    b.meta.update(more)
    weight = b.seed(3 * MIB)
    b.label(weight, "weights", "parameter", "h.0.weight", "786432", "float32")
    for _ in range(steps):
        training_step(b, weight, layers=layers, activation=activation)
    return b


def test_a_trace_differs_in_nothing_from_itself() -> None:
    trace = training().trace()
    assert {row.kind for row in diff(trace, trace).rows} == {"same"}


@given(programs, programs)
def test_the_rows_add_up_to_what_changed(one: Trace, other: Trace) -> None:
    found = diff(one, other)
    assert sum(row.before for row in found.rows) == found.before.bytes == usage.peak(one).bytes
    assert sum(row.after for row in found.rows) == found.after.bytes == usage.peak(other).bytes
    sizes = [abs(row.change) for row in found.rows]
    assert sizes == sorted(sizes, reverse=True)
    back = {row.key: -row.change for row in diff(other, one).rows}
    assert back == {row.key: row.change for row in found.rows}


def test_what_grew_what_is_new_and_what_is_gone() -> None:
    found = diff(training().trace(), training(activation=6 * MIB, layers=5).trace(), "module")
    by_module = {row.key[0]: row for row in found.rows}
    assert by_module["h.4"].kind == "new"
    assert by_module["h.1"].kind == "grew"
    assert by_module["h.1"].change == MIB
    back = diff(training(layers=5).trace(), training().trace(), "module")
    assert {row.key[0]: row.kind for row in back.rows}["h.4"] == "gone"


def test_a_trace_with_lines_and_one_without_are_compared_without() -> None:
    def one(*line: str) -> Trace:
        b = TraceBuilder()
        with b.module("h.0"), b.op("aten::mm", at=line):
            b.alloc(MIB)
        return b.trace()

    found = diff(one("/x/train.py:3"), one())
    assert found.keys == ("category", "module", "op", "phase")
    assert {row.kind for row in found.rows} == {"same"}
    assert "without" in render(found, ("a", "b"))
    for same in (one(), one("/x/train.py:3")):
        assert diff(same, same).keys == KEYS


def test_addresses_do_not_matter() -> None:
    moved = TraceBuilder()
    moved.alloc(123_456)  # everything lies elsewhere, and this is not alive at the peak
    moved = training()
    moved._next_address = 0x7000_0000
    assert all(row.change == 0 for row in diff(training().trace(), moved.trace()).rows)


def test_the_project_may_lie_in_another_folder() -> None:
    """Lines are relative to where the program ran, and packages to where they are installed."""

    def program(home: str, packages: str) -> Trace:
        b = TraceBuilder()
        b.meta["directory"] = home
        with b.op("aten::mm", at=(f"{home}/train.py:3",)):
            b.alloc(100)
        with b.op("aten::mm", at=(f"{packages}/site-packages/timm/layer.py:7",)):
            b.alloc(200)
        return b.trace()

    found = diff(program("/home/a/x", "/usr/lib"), program("/data/b", "/opt/venv/lib"), "line")
    assert {row.key[0]: row.change for row in found.rows} == {"train.py:3": 0, "timm/layer.py:7": 0}


def test_lines_of_a_recording_without_a_folder_are_found() -> None:
    """A memory snapshot has absolute paths only; the same end is the same line."""

    def program(directory: str) -> Trace:
        b = TraceBuilder()
        b.meta["directory"] = directory
        for number in (3, 4):
            with b.op("aten::mm", at=(f"/home/a/x/train.py:{number}",)):
                b.alloc(100)
        return b.trace()

    found = diff(program("/nowhere"), program("/home/a"), "line")
    assert {row.key[0]: row.change for row in found.rows} == {"x/train.py:3": 0, "x/train.py:4": 0}


@pytest.mark.parametrize("wrapped", ["module.h.0", "_orig_mod.h.0", "h._fsdp_wrapped_module.0"])
def test_wrapped_models_are_compared_by_what_they_wrap(wrapped: str) -> None:
    def program(name: str) -> Trace:
        b = TraceBuilder()
        with b.module(name), b.op("aten::mm"):
            b.alloc(100)
        return b.trace()

    found = diff(program("h.0"), program(wrapped), "module")
    assert [(row.key, row.change) for row in found.rows] == [(("h.0",), 0)]


def test_two_steps_of_one_run_are_compared_at_their_peaks() -> None:
    b = training(steps=1)
    kept = b.alloc(3 * MIB)
    weight = b.seed(8)
    training_step(b, weight, layers=4, activation=5 * MIB)
    b.free(kept)
    trace = b.trace()
    found = diff(trace, trace, KEYS, steps=(0, 1))
    steps = training_steps.step_rows(trace)
    assert (found.before.step, found.after.step) == (0, 1)
    assert (found.before.bytes, found.after.bytes) == (steps[0].peak_bytes, steps[1].peak_bytes)
    assert found.after.bytes - found.before.bytes == sum(row.change for row in found.rows)


@given(programs, st.data())
def test_a_steps_peak_is_the_one_that_steps_says(trace: Trace, data: st.DataObject) -> None:
    rows = training_steps.step_rows(trace)
    if rows:
        step = data.draw(st.integers(0, len(rows) - 1))
        assert diff(trace, trace, steps=(step, step)).before.bytes == rows[step].peak_bytes


@given(damaged(), damaged())
def test_damaged_traces_are_compared(one: Trace, other: Trace) -> None:
    render(diff(one, other))


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda t: t.diff(), "another trace, or two steps"),
        (lambda t: t.diff(steps=(0, 9)), "no step 9: the trace has 2, from 0"),
        (lambda t: t.diff(t, by="colour"), "cannot group by 'colour'"),
        (lambda t: t.diff(t, at="noon"), "a moment is"),
        (lambda t: t.diff(at="end", steps=(0, 1)), "steps are compared at their peaks"),
        (lambda t: t.diff(t, by=[]), "at least one key"),
    ],
)
def test_what_cannot_be_compared_is_said(ask: Callable[[LoadedTrace], Any], says: str) -> None:
    with pytest.raises(errors.UsageError, match=says):
        ask(LoadedTrace(training().trace()))


def test_the_frame_has_a_row_per_key_and_na_for_what_is_not_known() -> None:
    one, other = LoadedTrace(training().trace()), LoadedTrace(training(layers=5).trace())
    frame = one.diff(other, by=("category", "module"))
    assert list(frame.columns[:2]) == ["category", "module"]
    assert frame["change"].sum() == other.peak.bytes - one.peak.bytes
    assert frame["module"].isna().any()


def test_a_child_of_a_sequential_is_shown_as_the_table_shows_it() -> None:
    """`[0]`: a bare 0 beside an amount is no name."""

    def program(size: int) -> Trace:
        b = TraceBuilder()
        for name in ("0", "h.0"):
            with b.module(name), b.op("aten::mm"):
                b.alloc(size)
        return b.trace()

    before, after = program(MIB), program(2 * MIB)
    found = diff(before, after, ("module", "step"))
    lines = render(found).splitlines()
    assert "   +1.00 MiB  grew    [0]  0" in lines
    assert "   +1.00 MiB  grew    h.0  0" in lines
    assert {row.key[0] for row in found.rows} == {"0", "h.0"}  # programs read the name itself
    rows = difference_lines(differences(after, before))
    assert [row.split()[0] for row in rows[rows.index("modules") + 1 :]] == ["[0]", "h.0"]


def test_the_screen() -> None:
    found = diff(training().trace(), training(activation=6 * MIB, layers=5).trace())
    same_as_golden("diff", render(found, ("runs/before.pytrace", "runs/after.pytrace")))


def test_the_screen_of_nothing() -> None:
    empty = TraceBuilder().trace()
    same_as_golden("diff-of-nothing", render(diff(empty, empty)))
