"""The report in a real browser: every total on it is Python's, nothing is loaded, and it is for all.

Needs playwright and chromium; the accessibility rules are axe-core's, from `npm install` in viewer/.
"""

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import irregular
from programs.notebook_hosts import COLAB, VS_CODE, put_in_by_a_script
from pytracer import LoadedTrace, load
from pytracer.analysis.answers import findings, layers
from pytracer.analysis.facts import usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.forecasts import changes
from pytracer.basics.units import size_text
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORY_COLORS
from pytracer.export import advice_text, packed, words
from tests.browser import browser_page
from tests.report_pages import RECORDED, Shown, growing_trace, largest_of, shown, window
from tests.test_diff import MIB, training
from tests.test_report import EVIL, evil_trace
from tests.tiers import first_of
from tests.trace_builder import TraceBuilder, training_step

pytestmark = [pytest.mark.browser, pytest.mark.slow]

AXE = Path(__file__).parents[1] / "viewer" / "node_modules" / "axe-core" / "axe.min.js"
TABS = ("timeline", "map", "modules", "lines", "steps", "books", "compare")


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    with browser_page() as found:
        yield found


@pytest.fixture
def recorded(tab: Any, tmp_path: Path) -> Shown:
    return shown(tab, tmp_path, load(RECORDED).data).open()


@pytest.fixture
def growing(tab: Any, tmp_path: Path) -> Shown:
    return shown(tab, tmp_path, growing_trace()).open()


# ---------------------------------------------------------------- sums


def test_it_opens_at_the_peak_with_pythons_numbers(recorded: Shown) -> None:
    t = load(RECORDED)
    assert recorded.bytes == t.peak.bytes
    summary = t.summary()
    names = recorded.names(".sums")
    assert names == [n for n in summary.index if summary.allocations[n] or n == "unknown"]
    for name, (now, at_peak, own_peak) in zip(names, recorded.cells(".sums"), strict=True):
        assert now == at_peak == summary.at_peak[name]
        assert own_peak == summary.own_peak[name]


def test_at_every_moment_the_page_says_what_python_says(recorded: Shown) -> None:
    trace = load(RECORDED).data
    order = packed.order(trace, "cuda:0")
    for change in range(0, len(order.position), 211):
        recorded.open(f"#cursor={change}")
        at = usage.moment(trace, int(order.position[change]), "cuda:0")
        assert recorded.bytes == at.bytes
        levels = dict(zip(recorded.names(".sums"), recorded.cells(".sums"), strict=True))
        assert {n: row[0] for n, row in levels.items() if row[0]} == {
            n: size for n, size in at.by_category.items() if size
        }


@pytest.mark.parametrize("keys", ["module,op,line", "op,line,module", "line,op", "phase,module,op"])
def test_who_holds_it_is_what_by_says(recorded: Shown, keys: str) -> None:
    recorded.open(f"#tab=modules&keys={keys}")
    recorded.settle()
    key = keys.split(",")[0]
    known = load(RECORDED).by(key)["bytes"]
    nobody = "no module" if key == "module" else "not known"
    expected = {nobody if name != name else str(name): int(b) for name, b in known.items()}
    found = recorded.tree()
    assert {n: b for n, b in expected.items() if n in found} == found
    assert sum(found.values()) == load(RECORDED).peak.bytes


def test_the_steps_and_the_ledger_are_pythons(recorded: Shown) -> None:
    t = load(RECORDED)
    recorded.show("steps")
    assert [row[0] for row in recorded.cells(".panel")] == t.steps()["peak_bytes"].tolist()
    recorded.show("books")
    known = [int(b) for at in ("end", "peak") for b in t.ledger(at)["bytes"].dropna()]  # type: ignore[arg-type]
    found = [row[0] for row in recorded.cells(".panel") if row]
    assert found[: len(known)] == known


def test_a_search_adds_up_what_it_finds(recorded: Shown) -> None:
    recorded.show("modules")
    recorded.press("/")
    recorded.tab.keyboard.type("category:activations ^module:blocks")
    recorded.settle()
    rows = load(RECORDED).by(["category", "module"]).reset_index()
    wanted = (rows.category == "activations") & rows.module.astype(str).str.startswith("blocks")
    found = recorded.tab.locator(".found").get_attribute("data-bytes")
    assert int(found) == int(rows[wanted].bytes.sum())


@pytest.mark.parametrize("name", first_of(["h200", "unet-h100", "plans-h200", "convnext-h100"], 2))
def test_the_largest_module_is_the_terminals(name: str, tab: Any, tmp_path: Path) -> None:
    """Alike layers are one. A click finds its allocations, and no others."""
    trace = load(RECORDED.parent / f"{name}.pytrace").data
    page = shown(tab, tmp_path, trace).open()
    first = layers.repeated_modules(trace, usage.alive(trace, "peak"), depth=False)[0]
    assert ("module", first.text, first.bytes) in largest_of(page)
    page.tab.locator(".first .largest button", has_text=first.text).click()
    page.settle()
    assert page.tab.locator(".found").get_attribute("data-bytes") == str(first.bytes)


def test_the_largest_line_and_op_are_said_first(recorded: Shown) -> None:
    t = load(RECORDED)
    said = {key: (name, size) for key, name, size in largest_of(recorded)}
    for key in ("line", "op"):
        known = t.by(key)["bytes"]
        known = known[known.index.notna()]
        assert said[key] == (known.idxmax(), known.max())


def test_why_a_step_is_larger_is_said_in_words(tab: Any, tmp_path: Path) -> None:
    b = TraceBuilder()
    weight = b.seed(MIB)
    b.label(weight, "weights", "parameter", "h.0.weight", "262144", "float32")
    for batch in (1, 1, 3):
        training_step(b, weight, layers=2, activation=batch * MIB)
    page = shown(tab, tmp_path, b.trace()).open()
    page.show("steps").get_by_role("button", name="what changed in step 2").click()
    page.settle()
    text = page.tab.locator(".panel p[data-bytes]").inner_text()
    assert text.startswith("Change +")
    assert "as many allocations, larger ones" in text


def test_a_line_that_only_moved_is_no_change(tab: Any, tmp_path: Path) -> None:
    """Two versions of a program: a comment above pushed the line down."""

    def version(line: int) -> Trace:
        b = TraceBuilder()
        with b.module("h.0"), b.op("aten::mm", grad=True, at=(f"/home/me/train.py:{line}",)):
            b.alloc(MIB)
        with b.module("h.0"), b.op("aten::add", grad=True, at=("/home/me/train.py:1",)):
            b.alloc(MIB)
        return b.trace()

    page = shown(tab, tmp_path, version(7), version(9)).open("#tab=timeline&keys=line,op")
    panel = page.show("compare")
    assert panel.locator("p[data-bytes]").get_attribute("data-bytes") == "0"
    assert page.tree() == {}


def test_what_grew_over_a_range_is_the_difference_of_its_ends(recorded: Shown) -> None:
    trace = load(RECORDED).data
    order = packed.order(trace, "cuda:0")
    first, last = 40, len(order.position) - 200
    recorded.open(f"#tab=modules&begin={first}&cursor={last}&measure=grew")
    recorded.settle()
    ends = [usage.moment(trace, int(order.position[k]), "cuda:0").bytes for k in (first, last)]
    found = recorded.tab.locator(".found").get_attribute("data-bytes")
    assert int(found) == ends[1] - ends[0]


def test_two_traces_are_compared_at_their_peaks(tab: Any, tmp_path: Path) -> None:
    traces = [training().trace(), training(layers=6).trace()]
    page = shown(tab, tmp_path, *traces).open()
    panel = page.tab.locator(".panel[data-tab=compare]")  # of two traces that is what one sees
    change = usage.peak(traces[1]).bytes - usage.peak(traces[0]).bytes
    assert int(panel.locator("p[data-bytes]").get_attribute("data-bytes")) == change
    assert page.tree() == {"h.0-5": change}
    page.open("#keys=module,op,line&tab=compare").settle()
    known = LoadedTrace(traces[0]).diff(LoadedTrace(traces[1]), by="module")
    differs = {str(row.module): int(row.change) for row in known.reset_index().itertuples()}
    assert {n: b for n, b in page.tree().items() if b} == {n: b for n, b in differs.items() if b}


@pytest.mark.parametrize("idle_ms", [0, 60_000])
def test_a_program_that_mostly_waits_is_shown_by_events(
    idle_ms: int, tab: Any, tmp_path: Path
) -> None:
    """The first AdamW imports a compiler for half a minute; steps would be a pixel wide."""
    built = training(steps=3)
    built.now += idle_ms * 1_000_000
    training_step(built, built.seed(64), layers=1, activation=64)
    page = shown(tab, tmp_path, built.trace()).open()
    across = page.tab.locator("label", has_text="go by").locator("select")
    assert across.input_value() == ("events" if idle_ms else "time")
    told = page.tab.get_by_text("of 60.0 s, so the pictures go by events")
    assert told.count() == bool(idle_ms)
    across.select_option("time")
    page.settle()
    assert page.problems == []


def red_in(page: Shown, name: str) -> int:
    """How many pixels have the colour of leaks and failures."""
    count: int = page.tab.evaluate(
        """(name) => {
          const canvas = document.querySelector(`canvas.${name}`);
          const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          let count = 0;
          for (let i = 0; i < data.length; i += 4) {
            if (data[i] === 0xdd && data[i + 1] === 0x44 && data[i + 2] === 0x33) count++;
          }
          return count;
        }""",
        name,
    )
    return count


def test_leaks_and_failures_are_marked(growing: Shown, tab: Any, tmp_path: Path) -> None:
    assert red_in(growing, "area") > 50
    b = training(steps=3)
    assert red_in(shown(tab, tmp_path, b.trace()).open(), "area") == 0
    b.oom(5 * MIB)
    assert red_in(shown(tab, tmp_path, b.trace()).open(), "area") > 50


def test_forecasts_that_were_asked_for_are_on_the_page(tab: Any, tmp_path: Path) -> None:
    t = load(RECORDED)
    fits = t.fits("24GiB")
    page = Shown(tab, t.report(tmp_path / "run.html", forecasts=[fits])).open()
    shown_text = page.show("books").locator(".answer").inner_text()
    assert shown_text.split() == str(fits).split()


@pytest.mark.ci
def test_what_moves_is_drawn_coarse_and_what_rests_bar_by_bar(tab: Any, tmp_path: Path) -> None:
    """Of 200,000 allocations; the page says which of the two it is."""
    page = shown(tab, tmp_path, irregular(200_000)).open()
    page.show("map")
    page.press("f")
    drawn = page.tab.locator("canvas.map")
    page.tab.wait_for_timeout(1500)
    assert drawn.get_attribute("data-drawn") == "each"
    page.tab.keyboard.press("d")
    page.tab.wait_for_selector("canvas.map[data-drawn=coarse]")
    page.tab.wait_for_selector("canvas.map[data-drawn=each]")
    assert page.problems == []


def test_of_a_sampled_trace_the_page_says_so_and_the_peak_is_exact(
    tab: Any, tmp_path: Path
) -> None:
    trace = training(steps=6).trace()
    page = shown(tab, tmp_path, trace, most=30).open()
    assert "are not drawn" in page.tab.locator(".notes").inner_text()
    assert page.bytes == usage.peak(trace).bytes


# ---------------------------------------------------------------- from a growth to its line


def first_change(trace: Trace) -> str:
    return advice_text.said(changes.changes(trace, "cpu")[0])


@pytest.mark.parametrize("size", [(1440, 900), (1024, 768), (390, 844)])
def test_the_first_ten_seconds_are_above_the_fold(growing: Shown, size: tuple[int, int]) -> None:
    """How much and of what, who, and what to change; `code` stands in code elements."""
    said = first_change(growing_trace())
    with window(growing, *size):
        advice = growing.tab.locator(".advice")
        first = advice.locator("li").first
        assert first.get_attribute("title") == said
        assert said.replace("`", "") in first.inner_text()
        assert advice.locator("code").first.inner_text() == "outputs"
        for name in (".sentence", ".amount-bar", ".holders tbody tr", ".advice li"):
            box = growing.tab.locator(name).first.bounding_box()
            assert box["y"] + box["height"] <= size[1], name
        tops = [
            growing.tab.locator(name).first.bounding_box()["y"]
            for name in (".sentence", ".amount-bar", ".cards", ".tabs")
        ]
        assert tops == sorted(tops)
        advice.get_by_role("button").first.click()
        growing.settle()
        chosen = growing.tab.locator("[role=tab][aria-selected=true]")
        assert chosen.inner_text() == "What to change"


def test_the_first_look_is_pythons_peak(recorded: Shown) -> None:
    """Its categories and the first level of the model add up to what Python says, to the byte."""
    t = load(RECORDED)
    summary = t.summary()["at_peak"]
    chips = recorded.tab.locator(".chips .toggle")
    found = {
        each.get_attribute("data-category"): each.get_attribute("title") for each in chips.all()
    }
    assert found == {n: f"{int(b):,} bytes" for n, b in summary.items() if b}
    assert size_text(t.peak.bytes) in recorded.tab.locator(".sentence").inner_text()
    rows = recorded.tab.locator(".holders tbody tr:not(.inner) td[data-bytes]")
    top = sum(int(row.get_attribute("data-bytes")) for row in rows.all())
    assert 0 < top <= t.peak.bytes


@pytest.mark.parametrize("times", [1, 3, 100])
def test_an_imagined_cards_size_is_beside_the_peak(times: int, tab: Any, tmp_path: Path) -> None:
    b = TraceBuilder()
    with b.op("aten::mm"):
        b.alloc(12 * MIB, device="cuda:0")
    b.meta["imagined"] = {"title": "a card", "capacity": 4 * times * MIB}
    page = shown(tab, tmp_path, b.trace()).open()
    text = page.tab.locator(".first .sentence").inner_text()
    capacity = size_text(4 * times * MIB)
    over = f"More than the card's {capacity}."
    under = f"That is {3 / times:.1%} of the card's {capacity}."
    assert text.endswith(over if times == 1 else under)
    assert page.tab.locator(".card-end").count() == (times == 1)


def test_a_step_says_how_much_larger_it_is(growing: Shown) -> None:
    """And what changed is said by category, too: the sums are those of the two peaks."""
    peaks = [row[0] for row in growing.show("steps") and growing.cells(".panel")]
    growing.tab.get_by_role("button", name="what changed in step 3").click()
    growing.settle()
    panel = growing.tab.locator(".panel")
    change = int(panel.locator("p[data-bytes]").get_attribute("data-bytes"))
    assert change == peaks[3] - peaks[2] == MIB
    assert panel.locator(".changed").inner_text().split("\n")[0] == "activations +1.00 MiB"
    chosen = [
        each.evaluate("(e) => e.selectedOptions[0].text") for each in panel.locator("select").all()
    ]
    assert chosen[:2] == ["peak of step 2", "peak of step 3"]


def test_the_model_is_a_tree_in_which_alike_layers_share_a_row(recorded: Shown) -> None:
    """And a click on a row finds exactly its bytes."""
    recorded.open("#tab=modules")
    recorded.settle()
    rows = load(RECORDED).by("module")["bytes"]
    folded = next(name for name in recorded.tree() if name.startswith("blocks."))
    wanted = sum(int(b) for n, b in rows.items() if str(n).startswith("blocks."))
    assert recorded.tree()[folded] == wanted
    recorded.tab.locator(".tree .name", has_text=folded).first.click()
    recorded.settle()
    assert int(recorded.tab.locator(".found").get_attribute("data-bytes")) == wanted
    assert (
        f"module=blocks.*.** finds module {'blocks.'}"
        in recorded.tab.locator(".matched").inner_text()
    )


def test_a_finding_that_is_a_change_is_said_once(growing: Shown) -> None:
    panel = growing.show("books")
    (row,) = findings.findings(growing_trace())
    text = panel.inner_text()
    assert text.count(row.evidence.replace("`", "").split(",")[0]) == 1
    assert panel.locator(".findings").count() == 0
    assert "`" not in text


def test_what_to_change_is_the_first_tab_with_code_to_paste(recorded: Shown) -> None:
    trace = load(RECORDED).data
    rows = changes.changes(trace, usage.main_device(trace))
    assert recorded.tab.locator("[role=tab]").first.inner_text() == "What to change"
    panel = recorded.show("books")
    shown = panel.locator(".changes > li")
    assert shown.count() == len(rows) > 0
    assert panel.locator(".changes pre").all_inner_texts() == [row.code for row in rows if row.code]
    assert recorded.tab.locator(".advice li").first.inner_text().startswith(f"{rows[0].kind} ")


def test_without_advice_the_page_says_that_there_is_none(tab: Any, tmp_path: Path) -> None:
    page = shown(tab, tmp_path, TraceBuilder().trace()).open()
    assert page.tab.locator(".advice li").count() == 0
    assert "No change is known" in page.tab.locator(".advice").inner_text()


def test_a_findings_button_shows_exactly_its_allocations(growing: Shown) -> None:
    """Their sum, at the moment that the button leads to, is the finding's bytes, for each step."""
    trace = growing_trace()
    (row,) = findings.findings(trace)
    assert row.proof is not None
    growing.show("books").get_by_role("button", name="show its allocations").click()
    growing.settle()
    there = row.proof.which
    wanted = int(allocations(trace).requested_bytes[there].sum())
    found = growing.tab.locator(".found")
    assert int(found.get_attribute("data-bytes")) == wanted == row.bytes * (row.proof.turns or 0)
    assert f"{int(there.sum())} allocations" in found.inner_text()
    assert found.inner_text().endswith("4 times the finding's 1.00 MiB.")
    assert growing.tab.url.count("only=finding+0") == 1
    growing.press("Backspace")
    assert "only=" not in growing.tab.url


@pytest.mark.parametrize("grows", [True, False])
def test_where_memory_grows_the_page_opens_on_all_steps(
    grows: bool, tab: Any, tmp_path: Path
) -> None:
    trace = growing_trace() if grows else training(steps=6).trace()
    page = shown(tab, tmp_path, trace).open()
    page.press("f")
    assert page.tab.url.endswith(("run.html", "#")) == grows  # as it was


def test_what_changed_is_in_sight_and_lists_only_that(growing: Shown) -> None:
    """In a window of 1400 pixels nobody has to scroll for the button."""
    growing.open("#keys=module,op,line")
    with window(growing, 1400, 900):
        panel = growing.show("steps")
        button = panel.get_by_role("button", name="what changed in step 3")
        box, around = button.bounding_box(), panel.bounding_box()
        assert box["x"] + box["width"] <= around["x"] + around["width"]
        button.click()
        growing.settle()
    panel = growing.tab.locator(".panel")
    assert int(panel.locator("p[data-bytes]").get_attribute("data-bytes")) == MIB
    rows = growing.tab.evaluate(
        """() => [...document.querySelectorAll('table.tree tbody tr[data-bytes]')]
          .map((row) => Number(row.dataset.bytes))"""
    )
    assert rows == [MIB]
    assert (
        panel.locator("tbody td[colspan]").inner_text() == "2 rows did not change and are left out"
    )


def test_a_sum_that_did_not_change_has_no_arrow(tab: Any, tmp_path: Path) -> None:
    page = shown(tab, tmp_path, training().trace(), training().trace()).open()
    panel = page.show("compare")
    assert panel.locator("tfoot td").nth(2).inner_text() == "0 B"
    assert panel.locator(".more, .less").count() == 0


# ---------------------------------------------------------------- searches


def test_a_new_search_replaces_the_old_one(recorded: Shown) -> None:
    for text in ("op:mm", "category:weights"):
        recorded.press("/")
        recorded.tab.keyboard.type(text)
        recorded.press("Enter")
        assert recorded.tab.locator("#search").input_value() == text


@pytest.mark.parametrize("where", ["page", "search field", "button"])
def test_a_search_without_bars_says_so_and_how_it_ends(recorded: Shown, where: str) -> None:
    panel = recorded.show("map")
    recorded.press("/")
    recorded.tab.keyboard.type("no such bar")
    recorded.settle()
    assert "No bar at the cursor matches the search. Esc ends the search." in panel.inner_text()
    assert panel.locator("table").count() == 0
    if where == "button":
        panel.get_by_role("button", name="end the search").click()
    elif where == "page":
        recorded.press("Enter", "Escape")
    else:
        recorded.press("Escape")
    recorded.settle()
    assert recorded.tab.locator("#search").input_value() == ""
    assert panel.locator("tbody tr").count() > 0


def test_a_word_is_whole_and_the_page_says_what_it_found(recorded: Shown) -> None:
    """`op:mm` finds aten::mm, but neither aten::addmm nor _log_softmax. Python finds the same bytes."""
    recorded.show("modules")
    rows = load(RECORDED).by("op")["bytes"]
    ops = {str(name): int(size) for name, size in rows.items() if name == name}
    for word in ("mm", "copy_"):
        recorded.tab.fill("#search", f"op:{word}")
        recorded.settle()
        wanted = sum(b for n, b in ops.items() if n.split("::")[-1] == word)
        assert int(recorded.tab.locator(".found").get_attribute("data-bytes")) == wanted
        said = recorded.tab.locator(".matched").inner_text()
        assert said == f"op:{word} finds op aten::{word}" or said.startswith(
            f"op:{word} finds nothing. Words are whole: op:*{word}* looks inside of them."
        )
    recorded.tab.fill("#search", "module:blocks.0")
    recorded.settle()
    modules = load(RECORDED).by("module")["bytes"]
    wanted = sum(int(b) for n, b in modules.items() if f"{n}.".startswith("blocks.0."))
    assert int(recorded.tab.locator(".found").get_attribute("data-bytes")) == wanted > 0


def test_typing_a_search_in_the_timeline_leads_to_who_is_found(recorded: Shown) -> None:
    recorded.press("/")
    recorded.tab.keyboard.type("category:weights")
    recorded.settle()
    assert recorded.tab.locator("#search").input_value() == "category:weights"
    assert recorded.tab.locator("[role=tab][aria-selected=true]").inner_text() == "Modules"


def test_of_a_range_the_words_are_of_the_range(recorded: Shown) -> None:
    recorded.open("#tab=modules&begin=40&cursor=400&measure=grew").settle()
    text = recorded.tab.locator(".found").inner_text()
    assert text.endswith("allocations; shares are of the range.")
    assert " in " not in text
    assert " with " in text


# ---------------------------------------------------------------- a job


def test_a_jobs_page_is_about_the_job(tab: Any, tmp_path: Path) -> None:
    """A row per rank, who differs and why, and any rank on demand; sums are each rank's own."""
    for rank, batch in enumerate((1, 1, 3)):
        b = TraceBuilder()
        b.meta.update(rank=rank, world_size=3)
        weight = b.seed(MIB)
        b.label(weight, "weights", "parameter", "h.0.weight", "262144", "float32")
        for _ in range(3):
            training_step(b, weight, layers=2, activation=batch * MIB)
        LoadedTrace(b.trace()).save(tmp_path / f"train.rank{rank}.pytrace")
    job = load(tmp_path)
    page = Shown(tab, job.report(tmp_path / "job.html")).open()
    assert page.tab.locator("[role=tab][aria-selected=true]").inner_text() == "Ranks"
    ranks = job.ranks()
    assert [row[0] for row in page.cells(".ranks")] == ranks["peak"].tolist()
    assert "differs" in page.tab.locator(".ranks tr", has_text="rank 2").inner_text()
    assert "differs" not in page.tab.locator(".ranks tr", has_text="rank 1").inner_text()
    assert "activations" in page.tab.locator(".card", has_text="Who differs").inner_text()
    for rank in (0, 1, 2):
        page.tab.get_by_role("button", name=f"Open rank {rank}").click()
        page.settle()
        assert page.bytes == job.rank(rank).peak.bytes
    assert page.problems == []


# ---------------------------------------------------------------- safe


def test_nothing_is_loaded_and_nothing_could_be(recorded: Shown) -> None:
    assert recorded.problems == []
    assert all(url.startswith(("file:", "blob:", "about:")) for url in recorded.requests)
    tried = recorded.tab.evaluate(
        """async () => {
          const refused = [];
          document.addEventListener('securitypolicyviolation', (e) => refused.push(e.violatedDirective));
          await fetch('http://127.0.0.1:9/').catch(() => null);
          const image = new Image();
          image.src = 'http://127.0.0.1:9/x.png';
          const script = document.createElement('script');
          script.textContent = 'window.ran = true';
          document.body.append(script, image);
          await new Promise((done) => setTimeout(done, 300));
          return [refused, window.ran === undefined];
        }"""
    )
    refused, safe = tried
    assert safe
    assert {"connect-src", "img-src", "script-src-elem"} <= set(refused)


def test_names_full_of_markup_are_text(tab: Any, tmp_path: Path) -> None:
    page = shown(tab, tmp_path, evil_trace()).open()
    for name in TABS:
        page.show(name)
    assert page.problems == []
    assert page.tab.locator("img").count() == 0
    page.show("modules")
    assert any("onerror=alert(1)" in name for name in page.tree())
    assert EVIL[:9] in page.tab.locator(".tree").inner_text()


def test_without_scripts_the_page_still_says_it(recorded: Shown) -> None:
    tab = recorded.tab.context.browser.new_page(java_script_enabled=False)
    tab.goto(recorded.file.as_uri())
    text = tab.locator("body").inner_text()
    assert "peak 272 MiB on cuda:0" in text
    assert "activations" in text
    assert tab.locator("svg").is_visible()
    tab.close()


def test_where_workers_are_forbidden_the_page_works_without(recorded: Shown) -> None:
    tab = recorded.tab.context.browser.new_page()
    tab.add_init_script("delete window.Worker")
    tab.goto(recorded.file.as_uri())
    tab.wait_for_selector("html[data-ready=page]", state="attached", timeout=60_000)
    status = tab.locator(".status").get_attribute("data-bytes")
    tab.close()
    assert int(status) == load(RECORDED).peak.bytes


def test_in_a_notebook_it_runs_in_a_sandbox(tab: Any, tmp_path: Path) -> None:
    file = tmp_path / "notebook.html"
    file.write_text(f"<!DOCTYPE html><body>{load(RECORDED)._repr_html_()}</body>")  # type: ignore[operator]
    tab.goto(file.as_uri())
    frame = tab.frame_locator("iframe")
    frame.locator("html[data-ready]").wait_for(state="attached", timeout=60_000)
    status = frame.locator(".status").get_attribute("data-bytes")
    assert int(status) == load(RECORDED).peak.bytes


@pytest.mark.parametrize("host", ["vs code", "colab"])
def test_other_notebooks_show_it_too(tab: Any, tmp_path: Path, host: str) -> None:
    output = load(RECORDED)._repr_html_()  # type: ignore[operator]
    document = put_in_by_a_script(output, VS_CODE if host == "vs code" else "")
    if host == "colab":
        document = (
            f'<iframe sandbox="{COLAB}" width=900 height=900 srcdoc="{escape(document)}"></iframe>'
        )
    file = tmp_path / "notebook.html"
    file.write_text(document)
    blocked: list[str] = []
    listen = tab.context.browser.new_page()
    listen.on("console", lambda said: blocked.append(said.text) if said.type == "error" else None)
    listen.goto(file.as_uri())
    frame = listen.frame_locator("iframe") if host == "colab" else listen
    assert "peak 272 MiB on cuda:0" in frame.locator("#output").inner_text()
    assert frame.locator("#output > div svg").first.bounding_box()["height"] > 100
    page = frame.frame_locator("iframe")
    page.locator("html[data-ready]").wait_for(state="attached", timeout=60_000)
    assert int(page.locator(".status").get_attribute("data-bytes")) == load(RECORDED).peak.bytes
    # VS Code allows no worker; the page then does the work itself.
    assert all(text.startswith("Creating a worker") for text in blocked)
    assert len(blocked) == (host == "vs code")
    listen.close()


def test_where_a_notebook_runs_no_script_the_table_and_the_picture_remain(
    tab: Any, tmp_path: Path
) -> None:
    """An untrusted notebook, or its page on a site that strips scripts and frames."""
    output = load(RECORDED)._repr_html_()  # type: ignore[operator]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    file = tmp_path / "notebook.html"
    file.write_text(
        f'<!DOCTYPE html><head><meta charset=utf-8><meta http-equiv="Content-Security-Policy" '
        f'content="{policy}"></head><body>{output.partition("<iframe")[0]}</body>'
    )
    tab.goto(file.as_uri())
    text = tab.locator("body").inner_text()
    assert "peak 272 MiB on cuda:0" in text
    assert "optimizer_state" in text
    assert tab.locator("svg").bounding_box()["height"] > 100
    assert tab.locator("svg path").count() > 3


# ---------------------------------------------------------------- for everybody


def test_keys_alone_lead_everywhere(recorded: Shown) -> None:
    tab = recorded.tab
    peak = recorded.bytes
    recorded.press("[")
    assert recorded.bytes != peak
    recorded.press("p")
    assert recorded.bytes == peak
    recorded.press("w", "w", "d", "ArrowRight")
    assert "cursor=" in tab.url
    assert recorded.bytes != peak
    recorded.press("Backspace")
    assert recorded.bytes == peak
    recorded.press("?")
    assert tab.locator("dialog").is_visible()
    recorded.press("Escape")
    recorded.show("modules")
    tab.focus("#tab-modules")
    recorded.press("ArrowRight", "ArrowRight")
    assert tab.locator("[role=tab][aria-selected=true]").inner_text() == "Steps"


def chooses(name: str, value: str) -> Any:
    return lambda page: page.tab.locator(f"select[name='{name}']").last.select_option(value)


def clicks(selector: str) -> Any:
    return lambda page: page.tab.locator(selector).first.click()


def draws_a_box(page: Shown) -> None:
    canvas = page.tab.locator("canvas.map")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.tab.keyboard.down("Shift")
    page.tab.mouse.move(box["x"] + 300, box["y"] + 60)
    page.tab.mouse.down()
    page.tab.mouse.move(box["x"] + 500, box["y"] + 200, steps=4)
    page.tab.mouse.up()
    page.tab.keyboard.up("Shift")


def types(text: str) -> Any:
    def act(page: Shown) -> None:
        page.tab.fill("#search", text)
        page.tab.locator("#search").blur()

    return act


# What is done, by the view in which it is done, and the word of the address that it changes.
ACTIONS = {
    "timeline": {
        "axis=events": chooses("go by", "events"),
        "hidden=weights": clicks(".toggle"),
        "theme=dark": lambda page: page.tab.get_by_role("button", name="Light or dark").click(),
        "room=device": lambda page: page.tab.get_by_role("button", name="make room for it").click(),
        "search=op": types("op:mm"),
        "begin=": lambda page: page.press("r"),
        "from=": lambda page: page.press("w"),
        "cursor=": lambda page: page.press("]"),
        "tab=compare": clicks("#tab-compare"),
    },
    "map": {
        "layout=module": chooses("arrange by", "module"),
        "only=saved": chooses("show", "saved"),
        "color=size": chooses("colour by", "size"),
        "low=": draws_a_box,
    },
    "modules": {
        "keys=line": chooses("group by", "line,op"),
        "measure=bytetime": chooses("count bytes", "bytetime"),
        "sort=name": clicks(".tree thead button"),
        "open=": clicks(".tree button.open"),
    },
}


@pytest.mark.ci
def test_everything_that_is_shown_is_in_the_address_and_can_be_taken_back(recorded: Shown) -> None:
    """Each action changes the address; Backspace after it leads back to the address before."""
    for tab, actions in ACTIONS.items():
        recorded.show(tab)
        for word, act in actions.items():
            before = recorded.tab.url.partition("#")[2]
            act(recorded)
            recorded.tab.wait_for_timeout(250)
            after = recorded.tab.url.partition("#")[2]
            assert word in after, word
            recorded.tab.evaluate("document.activeElement.blur()")
            recorded.tab.keyboard.press("Backspace")
            recorded.tab.wait_for_timeout(250)
            assert recorded.tab.url.partition("#")[2] == before, word
    assert recorded.problems == []


@pytest.mark.ci
@pytest.mark.parametrize("color", ["category", "phase", "module", "op", "line", "size"])
def test_each_way_to_colour_has_its_legend(recorded: Shown, color: str) -> None:
    recorded.open(f"#tab=map&color={color}")
    recorded.settle()
    legend = recorded.tab.locator(".legend")
    assert legend.inner_text().startswith(f"{color}:")
    assert legend.locator(".swatch").count() > 1


def test_the_mouse_says_who_made_and_freed_a_bar(recorded: Shown) -> None:
    recorded.show("map")
    recorded.press("f")
    recorded.tab.locator("canvas.map").scroll_into_view_if_needed()
    box = recorded.tab.locator("canvas.map").bounding_box()
    recorded.tab.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.5)
    recorded.settle()
    lines = recorded.tab.locator(".tip").inner_text().splitlines()
    assert lines[-2].startswith("made ")
    assert lines[-1].startswith(("freed ", "alive at the end"))


def test_the_wheel_scrolls_the_page_and_zooms_only_with_control(recorded: Shown) -> None:
    tab = recorded.tab
    with window(recorded, 1024, 768):
        tab.evaluate("scrollTo(0, 0)")
        box = tab.locator("canvas.area").bounding_box()
        tab.mouse.move(box["x"] + 300, box["y"] + 20)
        before = tab.url
        tab.mouse.wheel(0, 200)
        recorded.settle()
        assert tab.evaluate("scrollY") > 0
        assert tab.url == before
        box = tab.locator("canvas.area").bounding_box()
        tab.mouse.move(box["x"] + 300, box["y"] + 20)
        tab.keyboard.down("Control")
        tab.mouse.wheel(0, -200)
        tab.keyboard.up("Control")
        recorded.settle()
        assert "from=" in tab.url


PINCH = """() => {
  const canvas = document.querySelector('canvas.area');
  const { left, top } = canvas.getBoundingClientRect();
  const touch = (type, id, x) => canvas.dispatchEvent(new PointerEvent(type, {
    pointerId: id, pointerType: 'touch', bubbles: true, clientX: left + x, clientY: top + 30,
  }));
  touch('pointerdown', 1, 200);
  touch('pointerdown', 2, 300);
  for (let x = 300; x <= 500; x += 20) touch('pointermove', 2, x);
  touch('pointerup', 1, 200);
  touch('pointerup', 2, 500);
}"""


def test_fingers_zoom_and_so_do_buttons(recorded: Shown) -> None:
    def width() -> float:
        found = dict(each.split("=") for each in recorded.tab.url.partition("#")[2].split("&"))
        return float(found["to"]) - float(found["from"])

    recorded.open("#from=0&to=50000000").settle()
    recorded.press("w")
    before = width()
    recorded.tab.evaluate(PINCH)
    recorded.settle()
    pinched = width()
    assert pinched < before / 2
    recorded.tab.get_by_role("button", name="Zoom out").click()
    recorded.settle()
    assert width() > pinched


def test_what_is_copied_as_text_has_the_numbers(recorded: Shown) -> None:
    recorded.tab.evaluate(
        "navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }"
    )
    recorded.tab.get_by_role("button", name="Copy as text").click()
    recorded.settle()
    text = recorded.tab.evaluate("window.copied")
    peak = size_text(load(RECORDED).peak.bytes)
    for said in (f"it held {peak}", "Who holds it", "What to change", "optimizer_state"):
        assert said in text
    recorded.tab.get_by_role("button", name="Copy link").click()
    recorded.settle()
    assert recorded.tab.evaluate("window.copied") == recorded.tab.url


def test_words_say_what_they_mean_under_the_mouse_and_the_keys(recorded: Shown) -> None:
    tip = recorded.tab.locator(".tip")
    recorded.tab.locator(".chips .toggle", has_text="activations").hover()
    assert tip.inner_text() == words.CATEGORIES["activations"]
    recorded.tab.locator(".sums .term", has_text="own peak").focus()
    assert tip.inner_text() == words.OTHERS["own_peak"]


def test_the_legend_can_be_clicked(recorded: Shown) -> None:
    recorded.open("#tab=map&color=op").settle()
    entry = recorded.tab.locator(".legend .toggle").first
    name = entry.inner_text()
    entry.click()
    recorded.settle()
    assert recorded.tab.locator("#search").input_value() == f"op={name}"


def test_on_paper_nothing_is_a_button(recorded: Shown) -> None:
    recorded.tab.emulate_media(media="print")
    for name in (".tools", ".controls", ".tabs", ".moves"):
        assert not recorded.tab.locator(name).first.is_visible()
    assert recorded.tab.locator(".sentence").is_visible()
    recorded.tab.emulate_media(media="screen")


def test_on_paper_the_page_is_light(recorded: Shown) -> None:
    recorded.open("#theme=dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = recorded.tab.evaluate(ground)
    printed = recorded.tab.evaluate(f"dispatchEvent(new Event('beforeprint')), {ground}")
    after = recorded.tab.evaluate(f"dispatchEvent(new Event('afterprint')), {ground}")
    assert dark == after != printed == "rgb(255, 255, 255)"


def test_an_address_shows_what_its_sender_saw(recorded: Shown) -> None:
    recorded.press("w", "w", "ArrowRight", "ArrowRight")
    recorded.show("steps")
    address, seen = recorded.tab.url, recorded.tab.locator(".status").inner_text()
    recorded.tab.goto("about:blank")
    recorded.tab.goto(address)
    recorded.tab.wait_for_selector("html[data-ready]", state="attached")
    assert recorded.tab.locator(".status").inner_text() == seen
    assert recorded.tab.locator("[role=tab][aria-selected=true]").inner_text() == "Steps"


def test_a_click_on_a_bar_says_what_it_is(recorded: Shown) -> None:
    recorded.show("map")
    recorded.press("f")
    recorded.tab.locator("canvas.map").scroll_into_view_if_needed()
    box = recorded.tab.locator("canvas.map").bounding_box()
    recorded.tab.mouse.click(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.87)
    recorded.settle()
    panel = recorded.tab.locator(".panel")
    text = panel.locator("dl").inner_text()
    number = int(text.split("number")[1].split()[0].replace(",", ""))
    row = load(RECORDED).allocations().iloc[number]
    assert f"{row.requested_bytes:,} bytes" in text
    assert row.category in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_to_complain_about(recorded: Shown, scheme: str) -> None:
    if not AXE.exists():
        pytest.skip("needs axe-core (npm install in viewer/)")
    recorded.tab.emulate_media(color_scheme=scheme)
    recorded.tab.evaluate(AXE.read_text())
    found = []
    for name in TABS:
        recorded.show(name)
        result = recorded.tab.evaluate("axe.run(document, {resultTypes: ['violations']})")
        found += [(name, v["id"], v["nodes"][0]["html"][:160]) for v in result["violations"]]
    recorded.tab.emulate_media(color_scheme="light")
    assert json.dumps(found) == "[]"


def test_a_phone_of_320_pixels_scrolls_only_downwards(recorded: Shown) -> None:
    size = recorded.tab.viewport_size
    recorded.tab.set_viewport_size({"width": 320, "height": 700})
    for name in TABS:
        recorded.show(name)
        assert recorded.tab.evaluate("document.documentElement.scrollWidth") <= 320
    recorded.tab.set_viewport_size(size)


def test_on_a_phone_the_table_without_scripts_is_not_cut(growing: Shown) -> None:
    """And beside the live page there is no second copy of it."""
    assert not growing.tab.locator("#summary").is_visible()
    tab = growing.tab.context.browser.new_page(java_script_enabled=False)
    tab.goto(growing.file.as_uri())
    for width in (390, 320):
        tab.set_viewport_size({"width": width, "height": 844})
        wide, seen = tab.locator("#summary").evaluate("(e) => [e.scrollWidth, e.clientWidth]")
        assert 0 < wide <= seen
    tab.close()


def test_on_a_phone_the_controls_are_three_rows(recorded: Shown) -> None:
    with window(recorded, 390, 844):
        tops = recorded.tab.evaluate(
            "[...document.querySelector('.controls').children].map((each) => each.offsetTop)"
        )
        rows = sorted(set(tops))
        assert len([b for a, b in zip([-9, *rows], rows, strict=False) if b - a > 4]) <= 3


@pytest.mark.parametrize(("height", "high"), [(900, 80), (700, 40)])
def test_the_overview_is_high_where_there_is_room(recorded: Shown, height: int, high: int) -> None:
    with window(recorded, 1400, height):
        assert recorded.tab.locator("canvas.strip").bounding_box()["height"] == high
        inside = recorded.tab.evaluate("document.querySelector('canvas.strip').height")
        assert inside == high


def test_the_pictures_are_not_empty(recorded: Shown) -> None:
    """And have the colours of their categories."""
    for name in ("strip", "area", "map"):
        if name == "map":
            recorded.show("map")
        colors = recorded.tab.evaluate(
            """(name) => {
              const canvas = document.querySelector(`canvas.${name}`);
              const context = canvas.getContext('2d');
              const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
              const seen = new Set();
              for (let i = 0; i < data.length; i += 4) {
                seen.add('#' + [0, 1, 2].map((c) => data[i + c].toString(16).padStart(2, '0')).join(''));
              }
              return [...seen];
            }""",
            name,
        )
        assert {"#5a9e4b", "#4477aa", "#997700"} <= set(colors)


# How many pixels of each colour one column of the picture has, without what is drawn on top of it.
COLUMN = """(share) => {
  const canvas = document.querySelector('canvas.area');
  const left = window.innerWidth < 600 ? 60 : 70;
  const x = Math.floor(left + (canvas.width - left) * share);
  const { data } = canvas.getContext('2d').getImageData(x, 0, 1, canvas.height);
  const found = {};
  for (let i = 0; i < data.length; i += 4) {
    const rgb = [0, 1, 2].map((c) => data[i + c].toString(16).padStart(2, '0')).join('');
    found['#' + rgb] = (found['#' + rgb] ?? 0) + 1;
  }
  return found;
}"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("scheme", "size"), [("light", (1400, 900)), ("dark", (1400, 900)), ("light", (390, 844))]
)
def test_the_picture_of_categories_is_pythons_sums(
    recorded: Shown, scheme: str, size: tuple[int, int]
) -> None:
    """In both themes and on a phone: of each moment, each category has its share of the pixels."""
    trace = load(RECORDED).data
    order = packed.order(trace, "cuda:0")
    recorded.tab.emulate_media(color_scheme=scheme)
    with window(recorded, *size):
        for first in range(60, len(order.position) - 10, 400):
            recorded.open(f"#axis=events&from={first}&to={first + 8}&cursor=0")
            recorded.settle()
            at = usage.moment(trace, int(order.position[first + 4]), "cuda:0")
            pixels = recorded.tab.evaluate(COLUMN, 4.5 / 8)
            whole = sum(pixels.get(color, 0) for color in CATEGORY_COLORS.values())
            for name, color in CATEGORY_COLORS.items():
                share = at.by_category.get(name, 0) / at.bytes
                assert abs(pixels.get(color, 0) - share * whole) <= 2, (first, name)
    recorded.tab.emulate_media(color_scheme="light")
