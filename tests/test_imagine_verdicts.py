"""An imagined run gives a verdict only of what it has seen on the card."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pytracer
from pytracer import errors
from pytracer.analysis.forecasts.fits import MOST_BESIDE
from pytracer.cli import main
from pytracer.export.fits_text import on_a_card
from pytracer.imagined import cards

ON_THE_CPU = """
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
"""


def test_a_script_that_trains_on_the_cpu_has_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, no card that fits, and what to do."""
    script = tmp_path / "train.py"
    script.write_text(ON_THE_CPU)
    assert main(["imagine", "--on", "T4", "--json", str(script)]) == 1
    card = json.loads(capsys.readouterr().out)["cards"][0]
    assert "fits" not in card
    assert "made nothing on the card" in card["problem"]
    assert 'model.to("cuda")' in card["problem"]


def test_products_on_the_cpu_take_no_workspace_of_the_card() -> None:
    """And without anything on the card, `fits` refuses."""
    with pytracer.imagine("H100") as t:
        nn.Linear(64, 64)(torch.randn(8, 64)).sum().backward()
    assert not t.data.has_allocations
    with pytest.raises(errors.NothingOnTheCard):
        t.fits()


def test_products_on_the_card_take_their_workspace() -> None:
    """The host's operators beside them change nothing."""
    with pytracer.imagine("H100") as t:
        torch.randn(8, 64) @ torch.randn(64, 8)
        torch.randn(8, 64, device="cuda") @ torch.randn(64, 8, device="cuda")
    assert t.peak.by_category["workspaces"] == 32 << 20


def test_a_card_that_was_not_measured_has_room_for_context_and_libraries() -> None:
    """A run "fits" only if 1.2 GiB beside torch's allocator do, too."""
    with pytracer.imagine("H100") as t:
        torch.empty(77 << 30, dtype=torch.uint8, device="cuda")
    assert t.fits(), "77 of 79.1 GiB"
    with pytracer.imagine("H100") as t:
        torch.empty(78 << 30, dtype=torch.uint8, device="cuda")
    found = t.fits()
    assert found.verdict == "may fit"
    assert found.replay, "the allocator itself has room"
    assert "1.20 GiB beside" in on_a_card(found)
    assert found.surely_needs == found.smallest_card + MOST_BESIDE
    with pytracer.imagine("H200") as t:
        torch.empty(139 << 30, dtype=torch.uint8, device="cuda")
    assert t.fits(), "an H200 was measured: 744 MiB"


@pytest.mark.ci
def test_the_largest_batch_leaves_room_beside_the_allocator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says how much, and whether it was measured on this card."""

    def run(batch: int) -> None:
        torch.empty(batch << 30, dtype=torch.uint8, device="cuda")

    assert pytracer.largest_batch(run, "H100").batch == 77
    assert pytracer.largest_batch(run, "H200").batch == 139
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\ntorch.empty(int(sys.argv[1]) << 30, dtype=torch.uint8, device='cuda')\n"
    )
    assert main(["imagine", "--largest-batch", "--on", "H100", str(script), "{batch}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "largest batch 77" in said
    assert "1.20 GiB of it beside torch's allocator, not measured on this card" in said


@pytest.mark.parametrize(
    ("make", "size", "layers"),
    [
        (lambda: nn.Conv2d(3, 8, 3), (2, 3, 16, 16), ["convolutions"]),
        (lambda: nn.LSTM(8, 8), (4, 2, 8), ["recurrent layers"]),
        (lambda: nn.Linear(8, 8), (2, 8), []),
    ],
)
def test_an_imagined_host_says_what_it_does_not_count(
    make: Any, size: tuple[int, ...], layers: list[str]
) -> None:
    """oneDNN alone knows what it takes. And nothing was computed, so no step has a time."""
    with pytracer.imagine("cpu") as t:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            result = model(torch.ones(size))
            (result[0] if isinstance(result, tuple) else result).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert t.data.meta["imagined"]["not_counted"] == layers
    table = " ".join(t.table().split())
    assert ("peak at least" in table) is bool(layers)
    assert ("is not known" in table) is bool(layers)
    assert "a step" not in table


def test_the_docs_list_every_card() -> None:
    """With its capacity, as `imagine` has it."""
    text = (Path(__file__).parents[1] / "docs/imagine.md").read_text(encoding="utf-8")
    for card in cards.CARDS:
        assert f"| {card.name} | sm_" in text
        assert f"{card.capacity / (1 << 30):.2f} GiB" in text
