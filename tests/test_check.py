"""`pytracer check`: a saved trace against a budget, and against an earlier one."""

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from pytracer import errors
from pytracer.basics import units
from pytracer.cli import main
from pytracer.reading.views import read
from tests.trace_builder import TraceBuilder, training_step

MIB = 1 << 20


def a_trace(*, activation: int = 5 * MIB, steps: int = 3, leak: int = 0) -> TraceBuilder:
    b = TraceBuilder()
    weight = b.seed(3 * MIB)
    b.label(weight, "weights", "parameter", "h.0.weight", "786432", "float32")
    for _ in range(steps):
        training_step(b, weight, layers=4, activation=activation)
        if leak:
            b.alloc(leak)
    return b


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return a_trace().trace().save(tmp_path / "run.pytrace")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40GiB", 40 << 30),
        ("40 gib", 40 << 30),
        ("1.5 GB", 1_500_000_000),
        ("2 KiB", 2048),
        (".5MiB", MIB // 2),
        ("0", 0),
        ("17 B", 17),
        (5, 5),
    ],
)
def test_sizes_are_read_as_people_write_them(text, size) -> None:
    assert units.parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "40G", "GiB", "1,5 GB", "-1", "1 GiB more", "1e3", None, True]
)
def test_what_is_no_size_is_refused(text) -> None:
    with pytest.raises(errors.UsageError, match="is not a size"):
        units.parse_size(text)


@given(st.integers(0, 2**50))
def test_a_number_of_bytes_is_itself(number) -> None:
    assert units.parse_size(number) == units.parse_size(f"{number} B") == number


@given(st.integers(1_000_000, 2**50))
def test_a_large_number_needs_no_unit(number) -> None:
    assert units.parse_size(str(number)) == number


@given(st.integers(1, 999_999))
def test_a_small_number_without_a_unit_is_asked_about(number) -> None:
    """Who writes --max-peak 40 does not mean forty bytes."""
    with pytest.raises(errors.UsageError, match=f"say {number}GiB, {number}MiB or {number}B"):
        units.parse_size(str(number))


def test_within_the_budget_is_0_and_says_what_was_looked_at(saved, capsys) -> None:
    limits = ["--max-peak", "40GiB", "--max", "activations=30MiB", "--max-growth", "0"]
    assert main(["check", str(saved), *limits]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Within the budget:",
        "  peak 31.0 MiB of 40.0 GiB",
        "  activations 20.0 MiB of 30.0 MiB, at its own peak",
        "  growth_per_step 0 B of 0 B",
    ]


def test_a_category_over_its_limit_is_said_to_be_so_at_its_own_peak(saved, capsys) -> None:
    """The table beside it has categories at the peak of the whole."""
    assert main(["check", str(saved), "--max", "activations=15MiB"]) == 3
    over = "over      activations 20.0 MiB at its own peak, limit 15.0 MiB: 5.00 MiB too much"
    assert over in capsys.readouterr().out


def test_what_is_typed_next_can_be_copied_into_a_shell(saved, tmp_path, capsys) -> None:
    file = tmp_path / "my run.pytrace"
    file.write_bytes(saved.read_bytes())
    assert main(["check", str(file), "--max-peak", "1B"]) == 3
    assert capsys.readouterr().out.endswith(f"pytracer report '{file}'\n")


def test_over_the_budget_is_3_with_what_is_over_and_then_the_table(saved, capsys) -> None:
    code = main(["check", str(saved), "--max-peak", "8 MiB", "--max", "activations=30MiB"])
    out = capsys.readouterr().out
    assert code == 3
    verdict = "over      peak 31.0 MiB, limit 8.00 MiB: 23.0 MiB too much"
    assert out.startswith(f"{verdict}\n\npeak 31.0 MiB")
    assert out.count(verdict) == 1
    assert "over      activations" not in out
    assert f"pytracer report {saved}" in out  # the table is there already


def test_growth_over_its_limit_names_two_steps_to_compare(tmp_path, capsys) -> None:
    file = a_trace(steps=5, leak=MIB).trace().save(tmp_path / "leak.pytrace")
    assert main(["check", str(file), "--max-growth", "0"]) == 3
    *_, diff, report = capsys.readouterr().out.splitlines()
    assert diff == f"Look closer with:  pytracer diff {file} --steps 1,4"
    assert report.split() == ["pytracer", "report", str(file)]
    assert main(diff.partition("pytracer ")[2].split()) == 0


def test_the_baseline_says_what_grew(saved, tmp_path, capsys) -> None:
    larger = a_trace(activation=6 * MIB).trace().save(tmp_path / "larger.pytrace")
    command = ["check", str(larger), "--baseline", str(saved), "--max-increase", "5%"]
    assert main(command) == 3
    out = capsys.readouterr().out
    grown = next(line for line in out.splitlines() if line.startswith("activations"))
    assert grown.split() == ["activations", "20.0", "MiB", "24.0", "MiB", "+4.00", "MiB"]
    _, _, modules = out.partition("\nmodules\n")
    assert modules.splitlines()[0].split()[0].startswith("h.")  # apart from the categories
    assert f"Look closer with:  pytracer diff {saved} {larger}\n" in out
    assert max(map(len, out.splitlines())) <= 80 + len(f"{saved} {larger}")
    assert main([*command[:-1], "50%"]) == 0


def test_json_is_one_document(saved, capsys) -> None:
    assert main(["check", str(saved), "--max-peak", "1B", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["pytracer_json"] == 1
    (over,) = document["exceeded"]
    assert over == {"name": "peak", "limit": 1, "found": document["peak"]}


def test_growth_is_what_every_step_leaves(tmp_path, capsys) -> None:
    leaking = a_trace(leak=100).trace().save(tmp_path / "leak.pytrace")
    assert main(["check", str(leaking), "--max-growth", "99B"]) == 3
    out = capsys.readouterr().out
    assert "growth_per_step 100 B, limit 99 B" in out
    assert f"Look closer with:  pytracer diff {leaking} --steps 1," in out
    assert main(["check", str(leaking), "--max-growth", "100B"]) == 0


def test_growth_that_came_once_is_within_the_limit_and_is_named(tmp_path, capsys) -> None:
    built = TraceBuilder()
    weight = built.seed(3 * MIB)
    for step in range(6):
        training_step(built, weight, layers=1, activation=64)
        if step == 3:
            built.alloc(MIB)
    grown = built.trace().save(tmp_path / "once.pytrace")
    assert main(["check", str(grown), "--max-growth", "0"]) == 0
    out = capsys.readouterr().out
    assert "But memory grew by 1.00 MiB, in step" in out
    assert "too seldom to tell whether it goes on" in out


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--max-peak", "much"],
        ["--max", "activations"],
        ["--max", "memory=3GiB"],
        ["--max-increase", "5%"],
        ["--max-increase", "inf%", "--baseline"],
        ["--max-increase", "nan%", "--baseline"],
        ["--max-increase", "9" * 400, "--baseline"],
        ["--max-peak", "9" * 400],
        ["--max-peak", "9" * 300 + "TiB"],
    ],
)
def test_what_cannot_be_checked_is_a_matter_of_usage(saved, options, capsys) -> None:
    baseline = [str(saved)] if "--baseline" in options else []
    assert main(["check", str(saved), *options, *baseline]) == 2
    err = capsys.readouterr().err
    assert err.startswith("pytracer: ")
    assert err.count("\n") == 1


def test_too_few_steps_tell_nothing_of_growth(tmp_path, capsys) -> None:
    short = a_trace(steps=2).trace().save(tmp_path / "short.pytrace")
    assert main(["check", str(short), "--max-growth", "0"]) == 2
    assert "needs three steps" in capsys.readouterr().err


def test_no_trace_is_4(tmp_path, capsys) -> None:
    (tmp_path / "no.pytrace").write_text("no")
    assert main(["check", str(tmp_path / "no.pytrace"), "--max-peak", "1GiB"]) == 4


@pytest.mark.parametrize("flag", [[], ["--json"]])
def test_what_is_not_whole_is_not_within_any_budget(flag, tmp_path, capsys) -> None:
    whole = a_trace(steps=400).trace().save(tmp_path / "whole.pytrace")
    cut, empty = tmp_path / "cut.pytrace", tmp_path / "empty.pytrace"
    gone, again = tmp_path / "gone.pytrace", tmp_path / "again.pytrace"
    cut.write_bytes(whole.read_bytes()[:-8])
    read(cut).save(again)
    gone.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    TraceBuilder().trace().save(empty)
    reasons = {cut: "is not whole", again: "is not whole", gone: "nothing that happened is left"}
    for file, why in (*reasons.items(), (empty, "no memory event")):
        assert main(["check", str(file), "--max-peak", "40GiB", *flag]) == 4
        out, err = capsys.readouterr()
        assert why in err
        assert out == ""
    assert main(["check", str(whole), "--max-peak", "40GiB", *flag]) == 0


def test_a_truncated_trace_that_is_over_its_budget_is_over_it(tmp_path) -> None:
    whole = a_trace(steps=400).trace().save(tmp_path / "whole.pytrace")
    whole.write_bytes(whole.read_bytes()[:-8])  # the end is missing, and all rows are there
    assert main(["check", str(whole), "--max-peak", "1KiB"]) == 3


def test_a_trace_that_lost_allocations_is_not_within_any_budget(tmp_path, capsys) -> None:
    import torch

    from pytracer import trace

    with trace(devices="cpu", max_events=10, table=False) as t:
        for _ in range(100):
            torch.ones(100)
    t.save(tmp_path / "lost.pytrace")
    assert main(["check", str(tmp_path / "lost.pytrace"), "--max-peak", "40GiB"]) == 4
    assert "did not fit" in capsys.readouterr().err
