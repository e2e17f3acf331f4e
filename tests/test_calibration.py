"""A card that was measured here is known to imagined runs, and a broken file is no error."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import pytracer
from pytracer.cli import main
from pytracer.imagined import calibration, cards

OWN = {
    "title": "NVIDIA GeForce RTX 4090",
    "capability": [8, 9],
    "capacity": 25_000_000_000,
    "processors": 128,
    "beside": 400 << 20,
    "cublas_workspace": 9 << 20,
    "torch": "2.13.0",
    "date": "2026-11-24",
}
OTHER = {**OWN, "title": "NVIDIA RTX 4000 SFF Ada Generation", "capacity": 48 << 30}


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the file of measured cards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def write(text: str) -> None:
        calibration.file().parent.mkdir(exist_ok=True)
        calibration.file().write_text(text)

    return write


def test_a_measured_card_has_its_measured_figures(keep: Any) -> None:
    """In the table of cards, in the trace and in the answer."""
    keep(json.dumps({"cards": [OWN, OTHER]}))
    card = cards.find("RTX4090")
    assert (card.capacity, card.beside) == (OWN["capacity"], OWN["beside"])
    assert "--calibrate" in card.source
    with pytracer.imagine("RTX4090") as t:
        layer = torch.nn.Linear(512, 512).to("cuda")
        layer(torch.randn(4, 512, device="cuda")).sum().backward()
    assert t.fits().beside == OWN["beside"]
    assert not any("not measured" in note for note in t.fits().notes)
    taken = t.allocations()
    workspaces = taken[taken["role"] == "cublas"]["requested_bytes"]
    assert set(workspaces) == {OWN["cublas_workspace"]}


def test_a_measured_card_that_is_in_no_table_has_a_name(keep: Any) -> None:
    """Its title, in any spelling."""
    assert cards.find("H100").beside is None
    keep(json.dumps({"cards": [OTHER]}))
    for name in ("RTX-4000-SFF-Ada-Generation", "rtx 4000 sff ada generation", OTHER["title"]):
        assert cards.find(name).capacity == 48 << 30


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"cards": 3}', '{"cards": [3, {"title": "x"}]}']
    + [json.dumps({"cards": [{**OWN, name: "odd"}]}) for name in ("capacity", "capability")]
    + [json.dumps({"cards": [{**OWN, "beside": -1}]})],
)
def test_a_broken_file_has_no_cards(keep: Any, text: str) -> None:
    """And is no error."""
    keep(text)
    assert calibration.kept() == {}
    assert cards.find("RTX4090").beside is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card to measure")
def test_without_a_card_calibrating_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Which says so."""
    assert main(["doctor", "--calibrate"]) == 1
    assert "there is no CUDA device here" in capsys.readouterr().err


@pytest.mark.cuda
def test_the_card_at_hand_is_measured_and_kept(keep: Any) -> None:
    """Its capacity is the driver's, and the context has a size."""
    card = calibration.measure()
    assert card.capacity == torch.cuda.mem_get_info()[1]
    assert 100 << 20 < card.beside < 4 << 30
    assert calibration.kept()[card.title] == card


def test_the_cards_that_people_have_are_in_the_table() -> None:
    """Each is found by its name, the driver's name and any spelling; an estimate says that it is one."""
    wanted = ["B200", "B100", "GB200", "RTX5090", "RTX5080", "RTX4080", "L4", "L40S", "A6000"]
    wanted += ["A5000", "H100-NVL", "H20"]
    assert {card.name for card in cards.CARDS} >= set(wanted)
    for card in cards.CARDS:
        assert cards.find(card.name) == cards.find(card.title) == cards.find(card.name.lower())
        assert card.capacity > 8 << 30
        assert card.processors > 20
    assert len({card.title for card in cards.CARDS}) == len(cards.CARDS)
    assert cards.find("rtx a6000").name == "A6000"
    assert cards.find("B100").source.startswith("estimated")
