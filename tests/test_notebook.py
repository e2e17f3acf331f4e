"""What a notebook shows of an answer: a table that fits a narrow frame, and says what matters."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pytracer
from pytracer.export import notebook
from tests.browser import chromium
from tests.trace_builder import TraceBuilder, training_step

DATA = Path(__file__).parent / "data"
WIDTH = 900  # of the frame that notebooks give to an output
MIB = 2**20


@pytest.fixture(scope="module")
def recorded() -> Any:
    return pytracer.load(DATA / "plans-h200.pytrace")


@pytest.fixture(scope="module")
def costly() -> Any:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    with pytracer.trace(model, devices="cpu", table=False, cost=True) as t:
        model(torch.randn(32, 64)).pow(2).mean().backward()
    return t


def training(layers: int) -> Any:
    b = TraceBuilder()
    training_step(b, b.seed(3 * MIB), layers=layers, activation=5 * MIB)
    return pytracer.LoadedTrace(b.trace())


def test_a_plan_shows_its_neighbours_and_the_code(recorded: Any) -> None:
    plan = recorded.checkpoint_plan("2GiB")
    shown = plan._repr_html_()
    assert shown.count("<tr") == len(plan.frontier) + 1
    assert shown.count('font-weight:600">') >= 2  # the answer, and the chosen row
    assert "use_reentrant=False" in shown


@pytest.mark.parametrize(("card", "answer"), [("2GiB", "no, not on"), ("80GiB", "yes, on")])
def test_fits_shows_every_setting(recorded: Any, card: str, answer: str) -> None:
    found = recorded.fits(card)
    shown = found._repr_html_()
    assert answer in shown
    assert ("held at the failure" in shown) == (answer == "no, not on")
    for choice in found.choices:
        assert (choice.settings or "torch&#x27;s defaults") in shown


def test_advice_shows_what_it_saves_and_the_code(recorded: Any) -> None:
    shown = recorded.advice()._repr_html_()
    assert "saves" in shown
    assert "1.33 GiB" in shown
    assert "use_reentrant=False" in shown


def test_a_diff_shows_what_changed_and_counts_the_rest() -> None:
    table = training(4).diff(training(5))
    same = int((table["change"] == 0).sum())
    assert same
    shown = table._repr_html_()
    assert "+5.00 MiB" in shown
    assert ">same<" not in shown
    assert f"{same} row" in shown


def test_a_table_is_still_an_ordinary_dataframe_that_can_be_changed() -> None:
    table = training(4).diff(training(5))
    again = pickle.loads(pickle.dumps(table))
    assert table.equals(again)
    assert again.equals(table.copy())
    table["change"] = 0
    assert "nothing" in table._repr_html_()


def test_advice_is_a_list_in_a_terminal_and_a_table_to_pandas(recorded: Any) -> None:
    advice = recorded.advice()
    assert str(advice) == repr(advice)
    assert "  saves 1.33 GiB" in str(advice)
    assert "use_reentrant=False" in str(advice)
    advice.loc[0, "change"] = "Do something else."
    assert "Do something else. Price" in str(advice)
    del advice["price"]
    assert "peak_after" in str(advice)
    again = pickle.loads(pickle.dumps(recorded.advice()))
    for table in (recorded.advice().copy(), recorded.advice().head(1), again):
        assert "The peak is" not in str(table)
        assert table.equals(recorded.advice().head(len(table)))


def test_names_of_a_program_are_no_markup() -> None:
    b = TraceBuilder()
    with b.module("<script>alert(1)</script>"), b.op("aten::mm"):
        b.alloc(MIB)
    shown = pytracer.LoadedTrace(TraceBuilder().trace()).diff(pytracer.LoadedTrace(b.trace()))
    assert "<script" not in shown._repr_html_()


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": WIDTH, "height": 800})
        browser.close()


@pytest.mark.slow
def test_every_answer_fits_the_frame(recorded: Any, costly: Any, page: Any) -> None:
    other = pytracer.load(DATA / "convnext-h100.pytrace")
    answers = {
        "plan": recorded.checkpoint_plan("2GiB"),
        "fits": recorded.fits("2GiB"),
        "advice": recorded.advice(),
        "diff": recorded.diff(other),
        "cost by module": costly.cost(),
        "cost by op": costly.cost("op"),
    }
    for name, answer in answers.items():
        page.set_content(f"<body>{answer._repr_html_()}</body>")
        assert page.locator("table").count(), name
        assert page.evaluate("document.documentElement.scrollWidth") <= WIDTH, name


def test_costs_show_the_ratios_and_where_the_rest_is(costly: Any) -> None:
    table = costly.cost()
    shown = notebook.costs(table)
    assert "backward&#x27;s over forward&#x27;s" in shown
    assert "list(t.cost().columns)" in shown


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("name", ["plans-h200", "h200", "unet-h100", "convnext-h100"])
def test_the_legend_does_not_cover_the_peak(name: str, alone: bool) -> None:
    pytest.importorskip("matplotlib").use("agg")
    from matplotlib import pyplot as plt

    axes = pytracer.load(DATA / f"{name}.pytrace").plot(None if alone else plt.subplots()[1])
    figure: Any = axes.figure
    figure.canvas.draw()
    legend = axes.get_legend().get_window_extent()
    (peak,) = (text for text in axes.texts if text.get_text().startswith("peak "))
    assert not legend.overlaps(peak.get_window_extent())
    assert figure.bbox.x0 <= peak.get_window_extent().x0
    assert peak.get_window_extent().x1 <= figure.bbox.x1
    plt.close(figure)
