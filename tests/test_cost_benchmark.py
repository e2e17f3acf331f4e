"""benchmarks/cost.py: what it writes, that it goes on where it stopped, and the tables of it."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cost as benchmark, cost_tables, kept
from pytracer.cost import measurements

FACTS = {
    "device": "a device",
    "torch": "2.13",
    "date": "2026-11-21T00:00:00",
    "peaks": {"copy_bytes_per_s": 4e12},
}


def report(target: Path) -> benchmark.Report:
    return benchmark.Report(target, time.monotonic() + 600, dict(FACTS), "cpu")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A few small results of each part, by the CPU."""
    target = tmp_path_factory.mktemp("cost") / "cost.json"
    made = report(target)
    shape = benchmark.QUICK_SHAPES[0]
    for first in (False, True):
        made.add("shapes", f"{first}", lambda f=first: benchmark.run_shape(shape, "cpu", f))
    made.add("models", "bert", lambda: benchmark.run_model("bert-large", "cpu", True, False))
    benchmark.operators(made, "cpu", quick=True)
    made.document["summary"] = benchmark.summarise(made.document)
    made.write()
    found: dict[str, Any] = kept.read(target)
    assert found["failed"] == []
    return found


@pytest.mark.ci
def test_flop_ratios_and_sums_are_in_the_file(measured: dict[str, Any]) -> None:
    assert [each["flop_ratio"] for each in measured["shapes"]] == [2, 1]
    assert len(measured["operators"]) == 10
    (model,) = measured["models"]
    assert model["profiler"]["ratio"] == pytest.approx(1, abs=0.01)
    assert model["flop_counter"]["differences"] == {}
    modules = model["flop_counter"]["modules"]
    assert modules["equal"] == modules["compared"] > 8
    assert model["sum_of_rows_ns"] == model["busy_ns"]


@pytest.mark.ci
def test_the_tables_have_a_line_of_everything(measured: dict[str, Any]) -> None:
    for part, results in (("shapes", 2), ("operators", 10), ("models", 3), ("phases", 0)):
        text = getattr(cost_tables, part)(measured)
        lines = [line for line in text.splitlines() if line.startswith("|")]
        assert len(lines) == 2 + results, part
        assert len({line.count("|") for line in lines}) == 1, part
    assert "61.0 %" in cost_tables.summary(measured)


@pytest.mark.ci
def test_what_the_file_has_is_not_measured_again(measured: dict[str, Any], tmp_path: Path) -> None:
    again = report(tmp_path / "again.json")
    again.resume(measured)
    called = []

    def run() -> dict[str, Any]:
        called.append(1)
        return measured["shapes"][0]

    again.add("shapes", "True", run)
    assert called == []
    again.add("shapes", "another", run)
    assert called == [1]
    assert len(again.document["shapes"]) == 3
    other = benchmark.Report(
        tmp_path / "other.json", time.monotonic(), {**FACTS, "torch": "9"}, "cpu"
    )
    with pytest.raises(SystemExit, match="another device or torch"):
        other.resume(measured)


def test_a_result_that_fails_costs_only_itself(tmp_path: Path) -> None:
    made = report(tmp_path / "failed.json")

    def fails() -> dict[str, Any]:
        raise MemoryError("too large")

    made.add("shapes", "large", fails)
    late = benchmark.Report(tmp_path / "late.json", time.monotonic() - 1, dict(FACTS), "cpu")
    late.add("shapes", "late", fails)
    assert json.loads((tmp_path / "failed.json").read_text())["failed"][0]["name"] == "large"
    assert json.loads((tmp_path / "late.json").read_text())["skipped"][0]["why"] == "no time left"


def record(op: str, phase: str, ms: float, amount: int) -> measurements.Record:
    return measurements.Record(
        *("m", phase, op, op, "", "element-wise", "", "bfloat16"),
        *(1, round(ms * 1e6), 0, 1, 0, 0, amount, amount, (), ()),
    )


def of(records: list[measurements.Record]) -> measurements.Measured:
    peaks = {"copy_bytes_per_s": 4e12, "flops_per_s": {}}
    return measurements.Measured(tuple(records), "cuda", "a GPU", "kernels", 0, 0, "highest", peaks)


def test_why_an_operator_is_slower_than_a_copy() -> None:
    """One that is slow among several; arithmetic, where twice the bytes take no longer; or nobody
    knows."""
    fast, slow = record("fast", "forward", 1, 4 * 10**9), record("slow", "forward", 3, 10**9)
    both = [fast, slow]
    assert benchmark.why_below("forward", both, of(both), None).startswith("slow alone: 75%")
    alone = [slow]
    assert benchmark.why_below("forward", alone, of(alone), None) == ""
    for ms, because in ((3.3, "arithmetic per element"), (6.0, "")):
        wide = [record("slow", "forward", ms, 2 * 10**9)]
        found = benchmark.why_below("forward", alone, of(alone), (0, None, of(wide), wide))  # type: ignore[arg-type]
        assert found.startswith(because)
        assert bool(found) == bool(because)
    for moved in (10**9, 4 * 10**9):  # both as fast as a copy; as many bytes, or others
        quick = record("fast", "backward", moved / 4e9, moved)
        found = benchmark.why_below("forward", [slow, quick], of([slow, quick]), None)
        assert found.startswith("not the memory: backward") == (moved == 10**9)


def test_kernels_that_differ_are_named() -> None:
    ours, theirs = {"a": 100.0, "b": 50.0}, {"a": 100.001, "c": 10.0}
    assert benchmark.differences(ours, theirs, 160) == {"b": (50.0, 0), "c": (0, 10.0)}
