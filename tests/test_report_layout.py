"""The report looks as it was designed: golden layouts, and nothing that overlaps or is cut.

`PYTRACER_UPDATE_GOLDEN=1 pytest tests/test_report_layout.py` writes the layouts anew; look at the page first.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import irregular
from pytracer import LoadedTrace, load
from pytracer.data.schema import CATEGORY_COLORS
from tests.browser import browser_page
from tests.report_layout import FAULTS, differences, found
from tests.report_pages import RECORDED, Shown, growing_trace, shown
from tests.test_diff import MIB, training
from tests.tiers import by_tier, first_of
from tests.trace_builder import TraceBuilder, training_step

pytestmark = [pytest.mark.browser, pytest.mark.slow]

GOLDEN = Path(__file__).parent / "golden" / "report.json"
SIZES = {"desktop": (1440, 900), "small": (1024, 768), "notebook": (900, 900), "phone": (390, 844)}
THEMES = ("light", "dark")


def job(folder: Path) -> Any:
    """Four ranks, of which one has three times the batch."""
    for rank, batch in enumerate((1, 1, 3, 1)):
        b = TraceBuilder()
        b.meta.update(rank=rank, world_size=4)
        weight = b.seed(MIB)
        b.label(weight, "weights", "parameter", "h.0.weight", "262144", "float32")
        for _ in range(3):
            training_step(b, weight, layers=2, activation=batch * MIB)
        LoadedTrace(b.trace()).save(folder / f"train.rank{rank}.pytrace")
    return load(folder)


def failing() -> TraceBuilder:
    b = training(steps=3)
    b.oom(5 * MIB)
    return b


PROGRAMS = {
    "transformer": lambda: load(RECORDED).data,
    "leak": growing_trace,
    "job": None,
    "convolutions": lambda: load(RECORDED.parent / "unet-h100.pytrace").data,
    "out of memory": lambda: failing().trace(),
    "many": lambda: irregular(by_tier(5_000, 20_000, 1_000_000)),
}


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    with browser_page() as one:
        yield one


def page_of(program: str, tab: Any, folder: Path) -> Shown:
    make = PROGRAMS[program]
    if make is not None:
        return shown(tab, folder, make())
    return Shown(tab, job(folder).report(folder / "job.html"))


def at(page: Shown, size: str, theme: str = "light", hash_: str = "") -> Shown:
    width, height = SIZES[size]
    page.tab.set_viewport_size({"width": width, "height": height})
    page.tab.emulate_media(color_scheme=theme)
    page.open(hash_)
    page.tab.wait_for_timeout(300)
    return page


@pytest.mark.parametrize("program", first_of([name for name in PROGRAMS if name != "many"], 3))
def test_the_page_looks_as_it_was_designed(program: str, tab: Any, tmp_path: Path) -> None:
    """A golden layout for each size; themes differ in colours, and in nothing else."""
    page = page_of(program, tab, tmp_path)
    now = {
        size: [found(at(page, size, theme).tab, CATEGORY_COLORS) for theme in THEMES]
        for size in SIZES
    }
    if os.environ.get("PYTRACER_UPDATE_GOLDEN"):
        kept = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        GOLDEN.write_text(
            written({**kept, program: {size: light for size, (light, _) in now.items()}})
        )
    kept = json.loads(GOLDEN.read_text())[program]
    for size, (light, dark) in now.items():
        width, _ = SIZES[size]
        assert differences(kept[size], light, width) == [], size
        assert {said.split(":")[0] for said in differences(light, dark, width)} == {
            "colour of ground",
            "colour of ink",
            "colour of card",
        }, size
        for name in ("ground", "card"):
            assert sum(dark["colors"][name][:3]) < 200 < 600 < sum(light["colors"][name][:3])


def written(layouts: Any) -> str:
    """JSON, with a line for each list of numbers."""
    text = json.dumps(layouts, indent=1, sort_keys=True)
    return re.sub(r"\[[\s\d,\[\]]+\]", lambda each: re.sub(r"\s+", " ", each[0]), text) + "\n"


CHANGES = {
    "the cards are below each other": ".cards { grid-template-columns: 1fr !important }",
    "the bar is missing": ".amount-bar { display: none !important }",
    "the ground is grey": "body { background: #ccc !important }",
    "the cards have no ground": ".card { background: none !important }",
    "the sentence is huge": ".sentence { font-size: 60px !important }",
    "the first card is narrow": ".card { width: 60% !important }",
    "the picture is low": ".area { height: 90px !important }",
    "the tabs are at the end": ".tabs { position: relative; top: 400px }",
    "the bar has one colour": ".part { background: #777 !important }",
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_of_the_design_is_noticed(change: str, tab: Any, tmp_path: Path) -> None:
    page = at(page_of("transformer", tab, tmp_path), "desktop")
    before = found(tab, CATEGORY_COLORS)
    assert differences(before, found(tab, CATEGORY_COLORS), 1440) == []
    page.tab.add_style_tag(content=CHANGES[change])
    page.tab.wait_for_timeout(400)
    assert differences(before, found(tab, CATEGORY_COLORS), 1440)


@pytest.mark.parametrize("font", ["Liberation Sans", "DejaVu Serif", "Liberation Sans Narrow"])
def test_another_font_is_no_change(font: str, tab: Any, tmp_path: Path) -> None:
    page = page_of("transformer", tab, tmp_path)
    for size, (width, _) in SIZES.items():
        at(page, size)
        before = found(tab, CATEGORY_COLORS)
        page.tab.add_style_tag(content=f"* {{ font-family: {font} !important }}")
        page.tab.wait_for_timeout(400)
        assert differences(before, found(tab, CATEGORY_COLORS), width) == [], size


def test_another_picture_of_the_same_size_is_noticed(tab: Any, tmp_path: Path) -> None:
    """The recorded steps, and the page of a leak in the same place."""
    page = at(page_of("transformer", tab, tmp_path), "desktop")
    before = found(tab, CATEGORY_COLORS)
    page.tab.locator("canvas.strip").click(position={"x": 100, "y": 20})
    page.tab.wait_for_timeout(400)
    assert any("picture" in said for said in differences(before, found(tab, CATEGORY_COLORS), 1440))


@pytest.mark.parametrize("program", first_of(PROGRAMS, 2))
def test_nothing_overlaps_sticks_out_or_is_cut(program: str, tab: Any, tmp_path: Path) -> None:
    """In each view at each size; what is cut has a title with the whole text."""
    page = page_of(program, tab, tmp_path)
    for size in SIZES:
        at(page, size)
        for view in page.tab.locator("[role=tab]").all():
            view.click()
            page.settle()
            said = page.tab.evaluate(FAULTS)
            assert said == [], (size, view.inner_text())


@pytest.mark.parametrize(
    ("css", "says"),
    [
        (".chips { margin-top: -60px }", "on top of"),
        ("h1 { position: absolute; left: -60px }", "sticks out"),
        (".tabs { width: 1500px }", "wider"),
        (
            ".says { width: 60px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap }",
            "cut",
        ),
    ],
)
def test_each_fault_of_a_layout_is_found(css: str, says: str, tab: Any, tmp_path: Path) -> None:
    page = at(page_of("leak", tab, tmp_path), "desktop")
    page.tab.add_style_tag(content=css.replace("}", " !important }").replace(";", " !important;"))
    page.settle()
    assert any(says in fault for fault in page.tab.evaluate(FAULTS))


def test_four_questions_need_three_clicks_at_most(tab: Any, tmp_path: Path) -> None:
    """Each answer is in sight, at the size of a small laptop, after these clicks."""
    clicks = 0

    def click(name: str) -> None:
        nonlocal clicks
        clicks += 1
        page.tab.get_by_role("button", name=name).or_(
            page.tab.get_by_role("tab", name=name)
        ).click()
        page.settle()

    def seen(text: str) -> bool:
        box = page.tab.get_by_text(text).filter(visible=True).first.bounding_box()
        return bool(box and box["y"] + box["height"] <= SIZES["small"][1])

    page = at(page_of("leak", tab, tmp_path), "small")
    assert seen("train.py:9")  # the line that holds most
    assert seen("saves 5.00 MiB")  # what to change, and what that saves
    click("Steps")
    click("what changed in step 3")
    assert seen("Change +1.00 MiB; 1 more allocation.")  # why step 3 is larger than step 2
    assert clicks <= 3
    (tmp_path / "job").mkdir()
    page = at(page_of("job", tab, tmp_path / "job"), "small")
    assert seen("differs")  # which rank is different
    assert page.tab.locator(".ranks tr", has_text="differs").inner_text().startswith("rank 2")
