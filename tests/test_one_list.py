"""The screen, the page, the text about memory that ran out and `--json` say one list of changes."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pytracer
from programs.hints import kept, sick
from pytracer.basics.units import size_text
from pytracer.cli import main
from pytracer.export import advice_text, terminal
from pytracer.export.terminal import Terminal
from tests.browser import browser_page

TOO_MUCH = 1 << 44  # of float32
WIDTH, WORDS = 128, 1024


class Greedy(nn.Module):
    """Asks for too much in its last call, or in the backward of that."""

    def __init__(self, call: int, when: str) -> None:
        super().__init__()
        self.call, self.when = call, when

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.call -= 1
        if self.call == 0 and self.when == "forward":
            torch.empty(TOO_MUCH)
        if self.call == 0 and self.when == "backward":
            x.register_hook(lambda gradient: gradient.new_empty(TOO_MUCH))
        return x


class Transformer(nn.Module):
    def __init__(self, call: int = 0, when: str = "") -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 3), nn.Linear(WIDTH, WORDS)
        self.last = Greedy(call, when)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.head(self.encoder(x)))
        return y


def trained(model: nn.Module, *, holds: bool = False, fails_at_end: bool = False) -> Any:
    """Four steps of the model, or as many as there is memory for."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    t = pytracer.trace(model, optimizer, devices="cpu", stacks=True, table=False)
    history = []
    try:
        with t:
            for _ in range(4):
                y = model(torch.randn(8, 32, WIDTH))
                if holds:
                    history.append(y)
                y.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if fails_at_end:
                torch.empty(TOO_MUCH)
    except RuntimeError:
        pass  # memory ran out
    return t


def healthy() -> Any:
    return trained(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)))


def failing(call: int, when: str) -> Callable[[], Any]:
    return lambda: trained(Transformer(call, when))


PROGRAMS: dict[str, Callable[[], Any]] = {
    "healthy": healthy,
    "transformer": lambda: trained(Transformer()),
    "frozen": lambda: kept.HEALTHY["a_frozen_backbone"](Path()),
    "leak": lambda: sick.SICK["outputs_in_a_list"].run(),
    "held": lambda: sick.SICK["a_variable_that_lives_through_backward"].run(),
    "noticed": lambda: sick.SICK["a_module_that_keeps_its_hidden_layer"].run(),
    "by hand": lambda: sick.SICK["a_gelu_by_hand"].run(),
    "evaluation": lambda: sick.SICK["a_validation_that_sums_losses"].run(),
    "leak and more": lambda: trained(Transformer(), holds=True),
    "fails at first": failing(1, "forward"),
    "fails in forward": failing(3, "forward"),
    "fails in backward": failing(3, "backward"),
    "fails with a leak": lambda: trained(Transformer(), holds=True, fails_at_end=True),
}


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    with browser_page() as found:
        yield found


def plain(text: str) -> str:
    return " ".join(text.replace("`", "").split())


def in_order(said: list[str], text: str) -> bool:
    """Whether all of these are in the text, each once, one after the other."""
    places = [text.find(each) for each in said]
    return (
        -1 not in places
        and places == sorted(places)
        and all(text.count(each) == 1 for each in said)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_places_say_the_same_changes(
    name: str, tab: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same ones, in the same order, with the same bytes."""
    t = PROGRAMS[name]()
    t.save(tmp_path / "run.pytrace")
    capsys.readouterr()
    assert main(["summary", str(tmp_path / "run.pytrace"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["advice"]
    saves = ["" if r["saves"] is None else f"saves {size_text(r['saves'])}: " for r in rows]
    said = [plain(text + row["change"]) for text, row in zip(saves, rows, strict=True)]

    screen = plain(t.table(width=100))
    assert in_order(said[:3], screen)
    assert not any(text in screen for text in said[3:])
    rest = f"more {len(said) - 3} more: pytracer summary --advice, or t.advice()"
    assert (rest in screen) == (len(said) > 3)

    failed = plain(t.post_mortem(100))
    assert bool(failed) == name.startswith("fails")
    assert not failed or in_order(said, failed)

    tab.goto(t.report(tmp_path / "run.html").as_uri())
    tab.click("#tab-books")
    shown = tab.locator(".panel[data-tab=books] .changes > li")
    shown.first.wait_for() if said else tab.wait_for_selector(".panel[data-tab=books]")
    assert len(said) == shown.count()
    for text, row, each in zip(said, rows, shown.all(), strict=True):
        assert plain(each.inner_text()).startswith(text)
        assert each.get_attribute("data-bytes") == (row["saves"] and str(row["saves"]))
    none = "No change is known that lowers the peak by a hundredth."
    assert (none in tab.locator(".panel").inner_text()) == (not said)

    whole = plain(re.sub(r"\n\n    .*?(?=\n\S|\n  \S|\Z)", "", advice_text.text(t, Terminal(100))))
    assert in_order([row["change"].replace("`", "") for row in rows], whole) or not rows
    assert str(t.advice()) == advice_text.text(t, terminal.plain())


def test_memory_that_ran_out_is_not_said_to_need_no_change() -> None:
    """A leak is named where memory ran out, and what it kept there."""
    t = PROGRAMS["fails with a leak"]()
    assert "history" in t.post_mortem()
    assert {"mistake", "trade"} <= set(t.advice().kind)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_what_checkpoints_save_where_memory_ran_out(when: str) -> None:
    """In a step without its end as in the steps before it."""
    saved = []
    for t in (trained(Transformer()), trained(Transformer(3, when))):
        (row,) = (row for row in t.advice().itertuples() if "encoder.layers.*" in row.change)
        saved.append(row.saves)
    assert 0.9 * saved[0] < saved[1] <= saved[0]
