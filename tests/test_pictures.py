"""What notebooks, browsers and other programs get: pages, pictures and tables of a trace."""

import itertools
import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pytracer import LoadedTrace, errors
from pytracer.analysis.facts import usage
from pytracer.data.recorded import Trace
from pytracer.export import html, parquet, series
from tests.test_analysis_categories import programs
from tests.test_analysis_damaged import damaged
from tests.test_diff import training
from tests.trace_builder import TraceBuilder, training_step


@given(programs, st.integers(2, 12))
def test_a_picture_with_few_points_loses_no_peak(trace: Trace, points: int) -> None:
    """Of each slice of time its highest moment is drawn, and exactly as it was."""
    shown = series.series(trace, points)
    total = sum(shown.levels.values(), np.zeros(len(shown.times_ns), np.int64))
    assert total.max() == usage.peak(trace).bytes
    assert len(shown.times_ns) <= points + 2
    assert (np.diff(shown.times_ns) >= 0).all()


class Tags(HTMLParser):
    """What a page consists of."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_nothing_in_a_notebooks_table_runs_or_is_loaded() -> None:
    page = html.fragment(training().trace())
    found = Tags(page)
    assert not found.tags & {"script", "style", "link", "img", "iframe", "object", "a", "image"}
    assert not any(name.startswith("on") or name in ("src", "href") for name in found.attributes)
    assert re.findall(r"url\(|https?://(?!www\.w3\.org/2000/svg)", page) == []


def test_names_cannot_break_out_of_the_page() -> None:
    """Module names and paths are whatever the traced program says."""
    b = TraceBuilder()
    evil = "</pre><script>alert(1)</script>\x1b[31m&<b"
    with b.module(evil), b.op("aten::mm", grad=True, at=(f"/{evil}.py:1",)):
        b.alloc(100)
    page = html.fragment(b.trace())
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "\x1b" not in page


def test_the_picture_is_sound_svg_and_its_colours_fit_dark_and_light() -> None:
    page = html.fragment(training().trace())
    svg = ET.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    areas = [path for path in svg.iter() if path.get("fill", "").startswith("#")]
    named = {path[0].text for path in areas}
    assert {"weights", "gradients", "activations"} <= named
    texts = [text for text in svg.iter() if text.tag.endswith("text")]
    assert {text.get("fill") for text in texts} == {"currentColor"}
    assert "peak" in "".join(text.text or "" for text in texts)


@given(damaged())
def test_every_trace_has_a_page(trace: Trace) -> None:
    page = html.fragment(trace)
    ET.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])


def test_a_page_of_many_events_stays_small() -> None:
    b = TraceBuilder()
    for i in range(5000):
        b.free(b.alloc(1000 + i))
    assert len(html.fragment(b.trace())) < 100_000


def test_plot_needs_matplotlib_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(errors.PytracerError, match=r"pip install matplotlib$"):
        LoadedTrace(training().trace()).plot()


def test_parquet_needs_pyarrow_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(errors.PytracerError, match=r"pip install pyarrow$"):
        LoadedTrace(training().trace()).to_parquet(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_plot_stacks_categories_and_marks_the_peak() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    trace = LoadedTrace(training().trace())
    axes = trace.plot()
    assert trace.plot(axes) is axes
    top = max(path.get_extents().y1 for area in axes.collections for path in area.get_paths())
    assert top == pytest.approx(trace.peak.bytes / 2**20)
    assert any("peak" in text.get_text() for text in axes.texts)
    assert {"weights", "activations"} <= {t.get_text() for t in axes.get_legend().get_texts()}
    axes.figure.canvas.draw()
    LoadedTrace(TraceBuilder().trace()).plot().figure.canvas.draw()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_long_idle_time_is_cut_and_marked_and_steps_have_the_room() -> None:
    """As where the first AdamW imports half of torch: 34 of 35 seconds, in which nothing happens."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    b = TraceBuilder()
    weight = b.seed(10)
    training_step(b, weight)
    b.now += 34_000_000
    for _ in range(5):
        training_step(b, weight)
    axes = LoadedTrace(b.trace()).plot()
    axes.figure.canvas.draw()
    texts = [text.get_text() for text in axes.texts]
    assert [text for text in texts if text.endswith(" idle, cut")] == ["34.0 ms idle, cut"]
    assert [f"step {number}" for number in range(6) if f"step {number}" in texts] == texts[:6]
    labels = [text.get_window_extent() for text in axes.texts[:6]]
    assert not any(one.overlaps(other) for one, other in itertools.pairwise(labels))
    ticks = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert len(ticks) > 2
    assert not any(one.overlaps(other) for one, other in itertools.pairwise(ticks))


def test_a_notebooks_picture_cuts_a_long_idle_time_too() -> None:
    b = TraceBuilder()
    weight = b.seed(10)
    training_step(b, weight)
    b.now += 34_000_000
    for _ in range(5):
        training_step(b, weight)
    picture = html.fragment(b.trace())
    assert picture.count(">34.0 ms idle, cut</text>") == 1
    places = re.findall(r'<text x="([\d.]+)"[^>]*>step (\d)</text>', picture)
    assert [number for _, number in places] == list("012345")
    at = [float(place) for place, _ in places]
    assert all(after - before > 30 for before, after in itertools.pairwise(at))


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=30, unique=True))
def test_a_cut_axis_keeps_the_order_of_times_and_leads_back_to_them(times: list[float]) -> None:
    at = np.sort(np.array(times)).round(3)
    scale = series.clock(at)
    places = scale.place(at)
    assert (np.diff(places) >= 0).all()
    assert places[0] == 0
    assert places[-1] <= 1 + 1e-9
    assert np.allclose(scale.time(places), at, atol=1e-3 + 1e-6 * float(at[-1]))


def test_parquet_has_the_tables(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pandas as pd

    trace = LoadedTrace(training().trace())
    folder = trace.to_parquet(tmp_path / "run")
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        f"{t}.parquet" for t in parquet.TABLES
    )
    rows = pd.read_parquet(folder / "allocations.parquet")
    assert rows["requested_bytes"].sum() == trace.allocations()["requested_bytes"].sum()
    assert pd.read_parquet(folder / "summary.parquet").equals(trace.summary())
    with pytest.raises(errors.CannotWrite, match="is not empty"):
        trace.to_parquet(folder)
    trace.to_parquet(folder, overwrite=True)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(errors.CannotWrite, match="is a file"):
        trace.to_parquet(tmp_path / "file", overwrite=True)
    assert (tmp_path / "file").read_text() == "mine"
