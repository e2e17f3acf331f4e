"""Findings accuse nobody falsely: none in healthy programs, and in a sick one exactly the right one.

`python tools/findings_page.py` writes the table of both to docs/findings.md.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from programs.conformance.cases import CASES, make
from programs.conformance.techniques import TECHNIQUES
from programs.hints.one_step import ONE_STEP, traced
from programs.hints.recipes import HEALTHY, OF_TRL
from programs.hints.reported import SICK
from pytracer import trace
from pytracer.analysis.forecasts import changes

DOCUMENT = Path(__file__).parents[2] / "docs" / "findings.md"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_healthy_program(name: str, tmp_path: Path) -> None:
    if name in OF_TRL:
        pytest.importorskip("trl")
    assert HEALTHY[name](tmp_path).findings().to_dict("records") == []


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_found_in_a_case_of_the_conformance_suite(name: str) -> None:
    case = CASES[name]
    training = make(case, "tiny", "cpu")
    targets = [training.model, training.average, training.optimizer]
    given = [target for target in targets if target is not None]
    with trace(*given, devices="cpu", stacks=True, table=False) as t:
        for _ in range(5):
            TECHNIQUES[case.technique].step(training)
    assert t.findings().to_dict("records") == []


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("name", [name for name in SICK if SICK[name].kind != "hint"])
def test_exactly_the_mistake_is_found_with_its_variable_and_line(name: str) -> None:
    sick = SICK[name]
    (row,) = sick.run().findings().to_dict("records")
    said = f"{row['evidence']}: {row['change']}"
    assert row["kind"] == sick.kind
    assert [word for word in sick.words if word not in said] == []
    (line,) = sick.lines() or [None]
    assert line is None or row["line"].endswith(line)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("name", SICK)
def test_the_cure_of_a_mistake_saves_what_is_said(name: str) -> None:
    """Of a leak it may end the last step's part, too: a list of numbers keeps none of it."""
    sick = SICK[name]
    t, mended = sick.run(), sick.mended()
    first = changes.changes(t.data, "cpu")[0]
    assert mended.findings().to_dict("records") == []
    assert first.change not in [one.change for one in changes.changes(mended.data, "cpu")]
    saved = t.peak.bytes - mended.peak.bytes
    if first.saves is None:  # what is only stated
        assert saved > 0.05 * t.peak.bytes
        return
    of_last_step = 0
    if sick.kind == "growth":
        of_last_step = int(t.findings().bytes[0])
        assert mended.growth_per_step() < t.growth_per_step() / 4
    assert 0 < 0.95 * first.saves <= saved <= 1.05 * (first.saves + of_last_step)


@pytest.mark.parametrize("name", [name for name in SICK if SICK[name].kind == "hint"])
def test_what_costs_nothing_to_save_is_the_hint_and_no_mistake(name: str) -> None:
    sick = SICK[name]
    t = sick.run()
    first = changes.changes(t.data, "cpu")[0]
    assert [word for word in sick.words if word not in first.change] == []
    assert len(t.findings()) == 0


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adadelta])
def test_an_optimizer_without_a_fused_kernel_is_told_what_its_loop_saves(kind: Any) -> None:
    """Measured: the same step with foreach=False. On a GPU, foreach=True is the default."""

    def peak(*, foreach: bool) -> trace:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
        optimizer = kind(model.parameters(), foreach=foreach)
        with trace(model, optimizer, table=False) as t:
            for _ in range(3):
                model(torch.randn(16, 256)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return t

    together, one_by_one = peak(foreach=True), peak(foreach=False)
    first = changes.changes(together.data, "cpu")[0]
    assert f"{kind.__name__}(..., foreach=False)" in first.change
    assert first.saves == pytest.approx(together.peak.bytes - one_by_one.peak.bytes, rel=0.15)
    assert "foreach" not in str(one_by_one)


def test_the_first_hint_for_a_default_adamw_is_what_fused_saves() -> None:
    """Measured: the same step with fused=True."""

    def peak(*, fused: bool) -> trace:
        torch.manual_seed(0)
        model = torch.nn.Linear(1024, 1024, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        with trace(model, optimizer, devices="cpu", table=False) as t:
            for _ in range(3):
                model(torch.randn(4, 1024)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return t

    plain, fused = peak(fused=False), peak(fused=True)
    first = changes.changes(plain.data, "cpu")[0]
    assert "fused=True" in first.change
    assert first.saves == plain.peak.bytes - fused.peak.bytes
    assert "fused" not in str(fused)


def test_nothing_is_advised_that_cannot_be_done_on_a_cpu() -> None:
    """What a backward node makes nobody can make in pieces; a small model needs no 8-bit state."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    with trace(model, optimizer, devices="cpu", stacks=True, table=False) as t:
        for _ in range(3):
            model(torch.randn(2048, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "8-bit" not in str(t)
    assert "in pieces" not in str(t)


def test_the_page_of_findings_has_every_program() -> None:
    text = DOCUMENT.read_text()
    for name in [*HEALTHY, *ONE_STEP, *SICK]:
        assert f"| {name.replace('_', ' ')} |" in text
    assert f"{len(CASES)} cases" in text


@pytest.mark.parametrize("stacks", [True, False])
@pytest.mark.parametrize("name", ONE_STEP)
def test_one_healthy_step_accuses_nobody(name: str, stacks: bool) -> None:
    """README's first snippet, around one step or one call; the caller keeps what it returns."""
    t, _kept = traced(name, stacks=stacks)
    assert t.findings().to_dict("records") == []
