"""A diff compares what blocks are for and who made them, never where they lie."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pytracer import LoadedTrace, errors
from pytracer.analysis.answers import diff_rows, training_steps
from pytracer.analysis.answers.budgets import differences
from pytracer.analysis.answers.diff import KEYS, Diff, diff
from pytracer.analysis.facts import usage
from pytracer.cli import main
from pytracer.data.recorded import Trace
from pytracer.export.budget import difference_lines
from pytracer.export.diff import render
from pytracer.export.terminal import Terminal
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


def shown(found: Diff) -> list[tuple[int, str, dict[str, str], str]]:
    """The rows for people: change, kind, the named keys, and the line's number before."""
    return [
        (c.row.change, c.row.kind, dict(zip(found.keys, c.row.key, strict=True)), c.old_line)
        for c in diff_rows.changes(found).rows
    ]


# (module, line, bytes) of blocks that one op makes
Made = tuple[str, str, int]


def making(*blocks: Made, command: str = "train.py") -> Trace:
    b = TraceBuilder()
    b.meta |= {"directory": "/x", "command": command}
    for module, line, size in blocks:
        with b.module(module), b.op("aten::mm", at=(f"/x/{line}",)):
            b.alloc(size)
    return b.trace()


def test_a_trace_differs_in_nothing_from_itself() -> None:
    trace = training().trace()
    assert {row.kind for row in diff(trace, trace).rows} == {"same"}
    again = training().trace()
    for found in (diff(trace, trace), diff(trace, again)):
        assert diff_rows.changes(found) == diff_rows.Changes((), 0, 0)
        assert render(found).endswith("\n\nnothing differs")


def test_where_only_reserved_bytes_differ_nothing_else_does() -> None:
    found = diff(training().trace(), training().trace())
    reserved = replace(
        found, before=replace(found.before, reserved=1), after=replace(found.after, reserved=2)
    )
    assert render(reserved).endswith("\n\nnothing else differs")


@given(programs, programs)
def test_the_rows_add_up_to_what_changed(one: Trace, other: Trace) -> None:
    found = diff(one, other)
    assert sum(row.before for row in found.rows) == found.before.bytes == usage.peak(one).bytes
    assert sum(row.after for row in found.rows) == found.after.bytes == usage.peak(other).bytes
    sizes = [abs(row.change) for row in found.rows]
    assert sizes == sorted(sizes, reverse=True)
    back = {row.key: -row.change for row in diff(other, one).rows}
    assert back == {row.key: row.change for row in found.rows}


made_blocks = st.lists(
    st.tuples(
        st.sampled_from(("", "h.0", "h.1", "h.2.mlp.0", "h.2.mlp.1", "head", "0", "1")),
        st.builds("{}:{}".format, st.sampled_from(("train.py", "new.py")), st.integers(1, 5)),
        st.integers(1, 4),
    ),
    max_size=9,
)


@pytest.mark.ci
@given(
    made_blocks,
    made_blocks,
    st.sampled_from((KEYS, ("module",), ("line",), ("op", "line"), ("line", "line", "name"))),
)
def test_the_shown_rows_add_up_too(one: list[Made], other: list[Made], by: tuple[str, ...]) -> None:
    before, after = making(*one), making(*other, command="new.py")
    found, back = diff(before, after, by), diff(after, before, by)
    rows = diff_rows.changes(found).rows
    total = found.after.bytes - found.before.bytes
    assert sum(change.row.change for change in rows) == total
    order = [(-abs(change.row.change), change.row.change * total < 0) for change in rows]
    assert order == sorted(order)
    reverse = sorted(-change.row.change for change in diff_rows.changes(back).rows)
    assert reverse == sorted(change.row.change for change in rows)
    same = diff_rows.changes(diff(before, making(*one), by))
    assert same == diff_rows.Changes((), 0, 0)


def test_savings_stand_before_growth_of_the_same_size_if_the_total_is_a_saving() -> None:
    before = making(("a", "train.py:1", 3), ("b", "train.py:2", 3))
    after = making(("c", "train.py:3", 3))
    assert [row.change for row in diff(before, after).rows] == [-3, -3, 3]
    assert [row.change for row in diff(after, before).rows] == [3, 3, -3]


def test_layers_that_are_alike_share_a_row() -> None:
    """The savings of all layers are one row, which stands above one layer's growth."""
    before = making(*((f"h.{i}.mlp.0", "train.py:5", 2 * MIB) for i in range(12)))
    after = making(
        ("h.0.mlp.0", "train.py:5", 2 * MIB),
        *((f"h.{i}.mlp.0", "train.py:5", MIB) for i in range(1, 12)),
        ("head", "train.py:6", 3 * MIB),
    )
    found = diff(before, after)
    keys = {"category": "functional", "op": "aten::mm", "phase": "forward"}
    assert shown(found) == [
        (-11 * MIB, "shrank", {**keys, "module": "h.*.mlp.0", "line": "train.py:5"}, ""),
        (3 * MIB, "new", {**keys, "module": "head", "line": "train.py:6"}, ""),
    ]
    assert "   -11.0 MiB  shrank  functional  h.*.mlp.0 (11 layers)" in render(found)
    assert len(found.rows) == 13  # programs read the exact rows
    assert "-11.0 MiB  shrank  h.*.mlp.0 (11 layers)" in render(diff(before, after, "module"))


def test_a_change_in_one_layer_names_the_layer() -> None:
    before = making(("h.0", "train.py:5", 2), ("h.1", "train.py:5", 2))
    after = making(("h.0", "train.py:5", 2), ("h.1", "train.py:5", 5))
    assert [row[2]["module"] for row in shown(diff(before, after))] == ["h.1"]


def test_children_of_a_sequential_share_a_row_only_if_they_are_many() -> None:
    """As in the table: `[0]` and `[2]` are seldom alike, and have no other name."""

    def rows(count: int) -> list[str]:
        before, after = (
            making(*((str(i), "train.py:5", size) for i in range(count))) for size in (1, 2)
        )
        return render(diff(before, after, "module")).splitlines()[5:]

    assert [line.split()[-1] for line in rows(3)] == ["[0]", "[1]", "[2]"]
    assert rows(20) == ["       +20 B  grew    [0 ... 19] (20 layers)"]


def test_a_pattern_of_two_numbers_counts_modules() -> None:
    names = [f"h.{i}.mlp.{j}" for i in range(2) for j in range(2)]
    before, after = (making(*((name, "a.py:1", size) for name in names)) for size in (1, 2))
    assert "h.*.mlp.* (4 modules)" in render(diff(before, after))


def test_rows_that_moved_to_another_line_are_counted_and_not_shown() -> None:
    moved = [(f"h.{i}", "train.py:312", 5 * MIB) for i in (0, 1)]
    before = making(*((module, "train.py:311", size) for module, _, size in moved))
    after = making(*moved)
    found = diff(before, after)
    assert diff_rows.changes(found) == diff_rows.Changes((), 1, 0)
    assert render(found).endswith("nothing else differs: 1 row that only moved to another line")
    more = diff(before, making(*moved, ("head", "train.py:320", MIB)))
    assert render(more).splitlines()[-2:] == [
        "   +1.00 MiB  new     functional  head  aten::mm  train.py:320  forward",
        "         0 B  in 1 row that only moved to another line",
    ]


def test_a_moved_row_shows_its_net_change_and_both_lines() -> None:
    before = making(("h.0", "train.py:311", 5), ("h.0", "train.py:400", 50))
    after = making(("h.0", "train.py:313", 5), ("h.0", "train.py:402", 53))
    found = diff(before, after)
    assert [(row[0], row[1], row[2]["line"], row[3]) for row in shown(found)] == [
        (3, "grew", "train.py:402", "400")
    ]
    assert "train.py:402 (was 400)" in render(found)


def test_lines_that_moved_onto_each_other_are_told_apart_by_their_order() -> None:
    """Line 2 exists on both sides, but it is another one: all lines moved down by one."""
    before = making(*(("h.0", f"train.py:{i}", 10 * i) for i in (1, 2, 3)))
    after = making(*(("h.0", f"train.py:{i + 1}", 10 * i) for i in (1, 2, 3)))
    assert diff_rows.changes(diff(before, after)) == diff_rows.Changes((), 3, 0)


def test_a_new_line_between_others_is_the_one_that_is_new() -> None:
    before = making(*(("h.0", f"train.py:{i}", 10 * i) for i in (1, 2)))
    after = making(*(("h.0", f"train.py:{at}", size) for at, size in ((5, 10), (6, 7), (7, 20))))
    rows = shown(diff(before, after))
    assert [(row[0], row[1], row[2]["line"]) for row in rows] == [(7, "new", "train.py:6")]


def test_lines_of_no_module_and_op_are_the_same_only_with_the_same_bytes() -> None:
    before = making(("a", "train.py:1", 5), ("b", "train.py:2", 7))
    after = making(("a", "train.py:2", 5), ("b", "train.py:3", 8))
    found = diff(before, after, "line")
    rows = [(row[0], row[1], row[2]["line"]) for row in shown(found)]
    assert rows == [
        (8, "new", "train.py:3"),
        (-5, "gone", "train.py:1"),
        (-2, "shrank", "train.py:2"),
    ]
    moved = making(("a", "train.py:11", 5), ("b", "train.py:12", 7))
    assert diff_rows.changes(diff(before, moved, "line")) == diff_rows.Changes((), 2, 0)


def test_the_lines_of_two_versions_of_a_script_are_compared() -> None:
    def program(name: str, *more: Made, command: str = "") -> Trace:
        weights = ("h.0", f"{name}:3", 5), ("h.1", "models.py:8", 5)
        return making(*weights, *more, command=command or name)

    same = diff(program("gan.py"), program("gan_fixed.py"))
    assert diff_rows.changes(same) == diff_rows.Changes((), 0, 0)
    found = diff(program("gan.py"), program("gan_fixed.py", ("h.0", "extra.py:1", 9)))
    assert [row[:2] for row in shown(found)] == [(9, "new")]  # the commands name the scripts
    unknown = program("gan.py", command="x"), program("b.py", ("h.0", "c.py:1", 9), command="y")
    assert len(shown(diff(*unknown))) == 3


def test_lines_of_one_run_do_not_move() -> None:
    """A step that ran another line is no edit of the program."""
    b = TraceBuilder()
    weight = b.seed(8)
    for line in (1, 2):
        with b.module("h.0"), b.op("aten::mm", at=(f"/home/user/train.py:{line}",)):
            block = b.alloc(100 * MIB)
        training_step(b, weight, layers=1)
        b.free(block)
    trace = b.trace()
    rows = shown(diff(trace, trace, "line", steps=(0, 1)))
    assert {(row[1], row[2]["line"]) for row in rows} >= {
        ("gone", "train.py:1"),
        ("new", "train.py:2"),
    }


def on_a_gpu(*segments: int, size: int = MIB) -> Trace:
    """A snapshot of nothing, then segments of the allocator, and a block in the first."""
    b = TraceBuilder()
    b.snapshot(device="cuda:0")
    for number, length in enumerate(segments):
        b._event("segment_alloc", b._block(length, (1 + number) << 40, device="cuda:0"), length)
    with b.module("h.0"), b.op("aten::mm"):
        b.alloc(size, address=1 << 40, device="cuda:0")
    return b.trace()


def test_reserved_bytes_stand_beside_the_peak_if_both_sides_know_them() -> None:
    before, after = on_a_gpu(20 * MIB, 20 * MIB), on_a_gpu(20 * MIB, 10 * MIB, size=MIB // 2)
    found = diff(before, after)
    assert (found.before.reserved, found.after.reserved) == (40 * MIB, 30 * MIB)
    line = "-512 KiB (-50.0%)   reserved 40.0 MiB -> 30.0 MiB, -10.0 MiB (-25.0%)"
    assert line in render(found).splitlines()
    assert line.split("   ") == render(found, terminal=Terminal(60)).splitlines()[2:4]
    unknown = diff(before, making(("h.0", "train.py:1", MIB)))
    assert unknown.after.reserved is None
    assert "reserved" not in render(unknown)


def test_the_document_has_the_reserved_bytes_and_the_exact_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = on_a_gpu(20 * MIB), on_a_gpu(10 * MIB, size=MIB // 2)
    files = [str(trace.save(tmp_path / f"{i}.pytrace")) for i, trace in enumerate(traces)]
    assert main(["diff", *files, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [document[side]["reserved"] for side in ("before", "after")] == [20 * MIB, 10 * MIB]
    assert sum(row["change"] for row in document["rows"]) == -MIB // 2


def test_a_peak_in_another_layer_is_no_change() -> None:
    before, after = making(("h.3", "train.py:1", MIB)), making(("h.2", "train.py:1", MIB))
    assert diff_rows.changes(diff(before, after)) == diff_rows.Changes((), 0, 1)
    assert render(diff(before, after)).endswith(": 1 row that only moved to another layer")


def test_the_last_line_says_both_directions() -> None:
    modules = "abcdefgh"
    large = [(name, "train.py:1", 100) for name in "uvwxyz"]
    before = making(*large, *((name, "train.py:1", 10) for name in modules))
    after = making(
        *((name, line, 300) for name, line, _ in large),
        *((name, "train.py:1", 8 if name == "a" else 11) for name in modules),
    )
    assert render(diff(before, after)).splitlines()[-1] == "        +7 B and -2 B in 8 other rows"
    only_growth = render(diff(making(*large), after)).splitlines()[-1]
    assert only_growth == "       +85 B  in 8 other rows"


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
    found = diff(one, other)
    render(found)
    total = found.after.bytes - found.before.bytes
    assert sum(change.row.change for change in diff_rows.changes(found).rows) == total


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
    assert {row.key[0] for row in found.rows} == {"[0]", "h.0"}
    rows = difference_lines(differences(after, before))
    assert [row.split()[0] for row in rows[rows.index("modules") + 1 :]] == ["[0]", "h.0"]


def test_the_screen() -> None:
    found = diff(training().trace(), training(activation=6 * MIB, layers=5).trace())
    same_as_golden("diff", render(found, ("runs/before.pytrace", "runs/after.pytrace")))


def test_the_screen_of_nothing() -> None:
    empty = TraceBuilder().trace()
    same_as_golden("diff-of-nothing", render(diff(empty, empty)))
