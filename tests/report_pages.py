"""A report that is open in a browser, for the tests that read it and act on it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytracer.data.recorded import Trace
from pytracer.export import report
from tests.test_diff import MIB
from tests.trace_builder import TraceBuilder, training_step

RECORDED = Path(__file__).parent / "data" / "h200.pytrace"


class Shown:
    """A page that is open, and what can be read and done there."""

    def __init__(self, tab: Any, file: Path) -> None:
        self.tab, self.file = tab, file
        self.problems: list[str] = []
        self.requests: list[str] = []
        tab.on("pageerror", lambda error: self.problems.append(str(error)))
        tab.on("request", lambda request: self.requests.append(request.url))

    def open(self, hash_: str = "") -> "Shown":
        self.tab.goto("about:blank")
        self.tab.goto(self.file.as_uri() + hash_)
        self.tab.wait_for_selector("html[data-ready=worker]", state="attached", timeout=60_000)
        return self

    def press(self, *keys: str) -> None:
        for key in keys:
            self.tab.keyboard.press(key)
            self.settle()

    def settle(self) -> None:
        """Until the page has answered the last thing that was asked of it."""
        self.tab.wait_for_timeout(150)

    def show(self, tab: str) -> Any:
        self.tab.click(f"#tab-{tab}")
        self.tab.wait_for_selector(f".panel[data-tab={tab}]")
        self.settle()
        return self.tab.locator(".panel")

    @property
    def bytes(self) -> int:
        return int(self.tab.locator(".status").get_attribute("data-bytes"))

    def cells(self, table: str) -> list[list[int]]:
        """The exact bytes in each row of a table."""
        rows: list[list[int]] = self.tab.evaluate(
            """(table) => [...document.querySelectorAll(`${table} tbody tr`)].map((row) =>
              [...row.querySelectorAll('[data-bytes]')].map((each) => Number(each.dataset.bytes)))""",
            table,
        )
        return rows

    def names(self, table: str) -> list[str]:
        found: list[str] = self.tab.locator(f"{table} tbody th").all_inner_texts()
        return [name.strip() for name in found]

    def tree(self) -> dict[str, int]:
        """The first level of who holds how much."""
        rows: list[list[Any]] = self.tab.evaluate(
            """() => [...document.querySelectorAll('table.tree tr[data-bytes]:has(.name)')]
              .map((row) => [row.querySelector('.name').textContent, Number(row.dataset.bytes)])"""
        )
        return dict(rows)


def shown(tab: Any, folder: Path, *traces: Trace, **options: Any) -> Shown:
    named = [report.Named(f"run {i}", trace) for i, trace in enumerate(traces)]
    file = folder / "run.html"
    file.write_text(report.page(named, **options), encoding="utf-8")
    return Shown(tab, file)


def growing_trace() -> Trace:
    """Each step keeps 1 MiB of its forward; the same line makes healthy blocks, too."""
    b = TraceBuilder()
    weight = b.seed(3 * MIB)
    b.label(weight, "weights", "parameter", "h.0.weight", "786432", "float32")
    kept = []
    for _ in range(6):
        with b.module("h.0"), b.op("aten::addmm", grad=True, at=("/home/user/train.py:9",)):
            kept.append(b.alloc(MIB))
        training_step(b, weight, layers=2, activation=5 * MIB)
    variable = {"name": "outputs", "addresses": [each.address for each in kept]}
    b.meta["variables"] = [{**variable, "graph_addresses": []}]
    return b.trace()


@contextlib.contextmanager
def window(page: Shown, width: int, height: int) -> Iterator[None]:
    before = page.tab.viewport_size
    page.tab.set_viewport_size({"width": width, "height": height})
    try:
        page.settle()
        yield
    finally:
        page.tab.set_viewport_size(before)


def largest_of(page: Shown) -> list[tuple[str, str, int]]:
    """What the first look says is largest: of which kind, its name, and its exact bytes."""
    rows: list[list[Any]] = page.tab.evaluate(
        """() => [...document.querySelector('.first .largest').querySelectorAll('dt')].map((key) =>
          [key.textContent, key.nextSibling.querySelector('button').textContent,
           Number(key.nextSibling.nextSibling.dataset.bytes)])"""
    )
    return [(key, name, size) for key, name, size in rows]
