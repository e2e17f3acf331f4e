"""The report's page: what Python writes into it is the trace, to the byte, and nothing else."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pytracer import LoadedTrace, cli, errors
from pytracer.analysis.answers import findings
from pytracer.analysis.facts import grouping, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.data.recorded import Trace
from pytracer.export import packed, report
from tests.test_analysis_categories import programs
from tests.test_analysis_damaged import damaged
from tests.test_diff import training
from tests.trace_builder import TraceBuilder, training_step


@dataclass
class Decoded:
    """What a reader makes of the columns; written plainly, from their description alone."""

    facts: dict[str, Any]
    kind: Any
    start: list[int]
    end: list[int]
    texts: dict[str, list[str]]
    sizes: Any
    marks: Any

    def alive(self, change: int) -> list[int]:
        return [i for i in range(len(self.kind)) if self.start[i] <= change < self.end[i]]

    def by(self, key: str, change: int) -> Counter[str]:
        found: Counter[str] = Counter()
        for i in self.alive(change):
            found[self.texts[key][self.kind[i]]] += int(self.sizes[self.kind[i]])
        return found


def decode(trace: Trace, most: int = packed.MOST) -> Decoded:
    strings = packed.Strings()
    found = packed.pack(trace, usage.main_device(trace), strings, most)
    facts, columns = dict(found.facts), found.columns
    kind, life = (packed.unpacked(columns[name], facts["shown"]) for name in ("kind", "life"))
    bits = np.frombuffer(packed.zlib.decompress(columns["begins"]), np.uint8)
    begins = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: facts["changes"]])
    start = [-1] * facts["before"] + begins.tolist()
    end = [first + int(lived) for first, lived in zip(start, life, strict=True)]
    kinds, groups = facts["kinds"], facts["groups"]
    group = packed.unpacked(columns["group"], kinds)
    numbers = packed.unpacked(columns["texts"], len(packed.TEXTS) * groups)
    texts = {
        name: [strings.texts[number] for number in row[group]]
        for name, row in zip(packed.TEXTS, numbers.reshape(len(packed.TEXTS), groups), strict=True)
    }
    marks = packed.unpacked(columns["finding"], facts["shown"])
    return Decoded(facts, kind, start, end, texts, packed.unpacked(columns["sizes"], kinds), marks)


@given(programs)
def test_what_is_alive_after_every_change_is_what_python_says(trace: Trace) -> None:
    found, device = decode(trace), usage.main_device(trace)
    order = packed.order(trace, device)
    alloc = allocations(trace)
    for change, position in enumerate(order.position.tolist()):
        if change + 1 < len(order.position) and order.position[change + 1] == position:
            continue
        there = usage.alive_at(trace, position) & usage.on_device(trace, device)
        total = sum(found.by("category", change).values())
        assert total == int(alloc.requested_bytes[there].sum())


@given(programs)
def test_at_the_peak_every_grouping_is_that_of_python(trace: Trace) -> None:
    found, peak = decode(trace), usage.peak(trace)
    at = found.facts["peak_change"]
    by_category = {name: size for name, size in peak.by_category.items() if size}
    assert {k: v for k, v in found.by("category", at).items() if v} == by_category
    for key in ("module", "op", "phase", "role", "name"):
        there = usage.alive(trace, "peak")
        known = {row.name: row.bytes for row in grouping.holders(trace, key, there) if row.bytes}
        assert {k: v for k, v in found.by(key, at).items() if k and v} == known


@given(programs, st.integers(1, 6))
def test_of_too_many_allocations_the_sums_are_whole(trace: Trace, most: int) -> None:
    """What is alive at the peak is shown, and what is left out is summed up."""
    found, peak = decode(trace, most), usage.peak(trace)
    facts = found.facts
    at = facts["peak_change"]
    assert sum(found.by("category", at).values()) == peak.bytes
    rest = facts["rest"]
    if rest is None:
        assert facts["shown"] == facts["allocations"]
        return
    assert rest["count"] == facts["allocations"] - facts["shown"] > 0
    last = sum(levels[-1] for levels in rest["levels"].values())
    there = usage.alive(trace, "end")
    whole = int(allocations(trace).requested_bytes[there].sum())
    assert sum(found.by("category", facts["changes"] - 1).values()) + last == whole


@pytest.mark.parametrize("most", [20, 40, 1000])
def test_a_findings_allocations_are_marked_all_or_not_at_all(most: int) -> None:
    """If only a part of a trace is shown, a sum of a part of them would not be the finding's."""
    b = TraceBuilder()
    weight = b.seed(100)
    b.label(weight, "weights", "parameter", "h.0.weight", "25", "float32")
    for _ in range(30):
        with b.module("h.0"), b.op("aten::addmm", grad=True, at=("train.py:9",)):
            b.alloc(1 << 20)
        training_step(b, weight, layers=2, activation=5 << 20)
    trace = b.trace()
    (row,) = findings.findings(trace)
    assert row.proof is not None
    marked = int((decode(trace, most).marks == 1).sum())
    assert marked == int(row.proof.which.sum())
    page = report.page([report.Named("run", trace)], most=most)
    assert document_of(page)["sets"][0]["findings"][0]["at"] is not None
    none = np.zeros(0, np.uint32)
    pack = packed.Packed({}, {}, packed.order(trace, "cpu"), none)
    assert report._finding(row, 0, pack)["at"] is None


@given(damaged())
def test_every_trace_has_a_report(trace: Trace) -> None:
    assert document_of(report.page([report.Named("x", trace)]))["format"] == report.FORMAT


def document_of(page: str) -> dict[str, Any]:
    found = re.search(r'id="data-document">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    document: dict[str, Any] = json.loads(found[1])
    return document


EVIL = "</script><img src=x onerror=alert(1)><!--\u2028\x00"


def evil_trace() -> Trace:
    b = TraceBuilder()
    with b.module(EVIL), b.op(EVIL, grad=True, at=(f"/home/user/{EVIL}.py:1",)):
        b.label(b.alloc(100), "weights", "parameter", EVIL, EVIL, EVIL)
    return b.trace()


def test_names_in_the_page_are_text_and_never_markup() -> None:
    page = report.page([report.Named(EVIL, evil_trace())])
    assert "<img" not in page
    assert page.count("<!--") == report._resource("report.js").count("<!--")
    assert page.count("</script>") == page.count("<script")
    assert any("onerror" in text for text in document_of(page)["strings"])


def test_only_our_script_may_run_and_nothing_is_loaded() -> None:
    page = report.page([report.Named("run", training().trace())])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    script = re.search(r'<script id="viewer">(.*?)</script>', page, re.DOTALL)
    assert policy is not None
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert policy[1].startswith(f"default-src 'none'; script-src 'sha256-{digest}' blob:;")
    assert "connect-src" not in policy[1]
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page) == []


def test_the_page_says_nothing_of_where_files_lie_and_shows_no_source(tmp_path: Path) -> None:
    """Unless it is asked to."""
    program = tmp_path / "secret" / "model.py"
    program.parent.mkdir()
    program.write_text("first = 1\nsecond = allocate()\nthird = 3\n")
    b = TraceBuilder()
    with b.op("aten::mm", grad=True, at=(f"{program}:2",)):
        b.alloc(100)
    named = [report.Named("run", b.trace())]
    page = report.page(named)
    assert str(tmp_path) not in page
    assert document_of(page)["source"] == {}
    shown = document_of(report.page(named, source=True))["source"]
    assert shown == {
        ".../secret/model.py:2": [1, ["first = 1", "second = allocate()", "third = 3", ""]]
    }


def test_a_short_path_is_no_exception() -> None:
    b = TraceBuilder()
    with b.op("aten::mm", grad=True, at=("/me/at/work/model.py:2",)):
        b.alloc(100)
    page = report.page([report.Named("run", b.trace())])
    assert "/me/at" not in page
    assert page.count(".../work/model.py:2") >= 2


def test_the_numbers_of_the_books_are_those_of_python() -> None:
    trace = LoadedTrace(training().trace())
    facts = document_of(report.page([report.Named("run", trace.data)]))["sets"][0]
    assert facts["peak"]["bytes"] == trace.peak.bytes
    assert [row["category"] for row in facts["categories"]] == list(trace.summary().index)
    assert [row["peak_bytes"] for row in facts["steps"]] == trace.steps()["peak_bytes"].tolist()
    import pandas as pd

    rows = trace.ledger()
    assert [row["bytes"] for row in facts["ledgers"][0]["rows"]] == [
        None if value is pd.NA else value for value in rows["bytes"].tolist()
    ]


def test_two_traces_are_on_one_page() -> None:
    traces = [training().trace(), training(layers=5).trace()]
    page = report.page([report.Named(f"run {i}", trace) for i, trace in enumerate(traces)])
    sets = document_of(page)["sets"]
    assert [row["name"] for row in sets] == ["run 0", "run 1"]
    assert [row["peak"]["bytes"] for row in sets] == [usage.peak(t).bytes for t in traces]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return LoadedTrace(training().trace()).save(tmp_path / "run.pytrace")


def test_the_command_writes_the_page_beside_the_trace(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(saved)]) == 0
    page = saved.with_suffix(".html")
    assert str(page) in capsys.readouterr().out
    assert document_of(page.read_text())["sets"][0]["name"] == "run.pytrace"
    assert cli.main(["report", str(saved)]) == errors.CannotWrite.exit_code
    assert cli.main(["report", str(saved), str(saved), "--force", "--json"]) == 0
    assert len(document_of(page.read_text())["sets"]) == 2


def test_what_is_written_of_a_pattern_has_the_jobs_name(saved: Path, tmp_path: Path) -> None:
    """No star, and nothing of a rank."""
    for rank in (0, 1):
        (tmp_path / f"train.rank{rank}.pytrace").write_bytes(saved.read_bytes())
    pattern = f"{tmp_path}/train.rank*.pytrace"
    assert cli.main(["report", pattern]) == 0
    assert cli.main(["export", pattern]) == 0
    written = {path.name for path in tmp_path.iterdir() if path.suffix != ".pytrace"}
    assert written == {"train.html", "train.pftrace"}


def test_the_command_does_not_replace_the_trace_it_reads(saved: Path) -> None:
    before = saved.read_bytes()
    assert cli.main(["report", str(saved), "-o", str(saved), "-f"]) == 2
    assert saved.read_bytes() == before


def test_a_report_is_written_like_every_other_file(tmp_path: Path) -> None:
    trace = LoadedTrace(training().trace())
    page = trace.report(tmp_path / "run.html")
    with pytest.raises(errors.CannotWrite):
        trace.report(page)
    trace.report(page, LoadedTrace(training(layers=5).trace()), overwrite=True)
    assert len(document_of(page.read_text())["sets"]) == 2
    with pytest.raises(errors.UsageError, match="compares with another trace"):
        trace.report(page, "other.pytrace", overwrite=True)  # type: ignore[arg-type]


def test_a_hundred_thousand_allocations_fit_into_two_megabytes() -> None:
    rng = np.random.default_rng(0)
    b = TraceBuilder()
    alive = []
    for i in range(10_000):
        alive.append(b.alloc(int(rng.integers(1, 1 << 20))))
        if i > 50:
            b.free(alive.pop(int(rng.integers(0, len(alive)))))
    page = report.page([report.Named("run", b.trace())])
    shell = len(report.page([report.Named("run", TraceBuilder().trace())]))
    assert shell < 150_000
    assert (len(page) - shell) / 10_000 < 20


VIEWER = Path(__file__).parents[1] / "viewer"


def test_the_viewer_that_is_shipped_is_built_from_its_sources(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not (VIEWER / "node_modules" / "esbuild").exists():
        pytest.skip("needs node and `npm install` in viewer/")
    subprocess.run([node, VIEWER / "build.mjs", "--to", tmp_path], check=True)
    for name in ("report.js", "report.css"):
        assert (tmp_path / name).read_text() == report._resource(name)
