"""Advice says what a change saves. The tests make the change, and measure."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pytracer
from pytracer.cli import main
from pytracer.export import advice_text
from pytracer.export.terminal import PLAIN, Terminal
from tests.tiers import by_tier

WITHIN = 0.05  # of the bytes that a change saves


@dataclass(frozen=True)
class Made:
    """Which mistakes a program makes, and which savings it misses."""

    width: int = 256
    layers: int = 4
    rows: int = 512
    words: int = 2048
    keeps_logits: bool = False
    gelu_by_hand: bool = False
    evaluates: str = "no"  # or "with grad", "without grad"
    plain_optimizer: bool = False
    code: str = ""  # runs where the model is made


class HandWritten(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class Block(nn.Module):
    def __init__(self, how: Made) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(how.width)
        self.up, self.down = (
            nn.Linear(how.width, 4 * how.width),
            nn.Linear(4 * how.width, how.width),
        )
        self.act = HandWritten() if how.gelu_by_hand else nn.GELU(approximate="tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return y


def paste(code: str, model: nn.Module) -> None:
    exec(code, {"model": model})  # in a function that has no tensors


def traced(how: Made, steps: int = 4) -> Any:
    """A trace of a training with these mistakes."""
    torch.manual_seed(0)
    blocks = (Block(how) for _ in range(how.layers))
    model = nn.Sequential(*blocks, nn.Linear(how.width, how.words))
    paste(how.code, model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=not how.plain_optimizer)
    with pytracer.trace(model, optimizer, devices="cpu", table=False) as t:
        for _ in range(steps):
            logits = model(torch.randn(how.rows, how.width))
            loss = nn.functional.cross_entropy(logits, torch.randint(0, how.words, (how.rows,)))
            if not how.keeps_logits:
                del logits
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if how.evaluates != "no":
            model.eval()
            with torch.set_grad_enabled(how.evaluates == "with grad"):
                for _ in range(2):
                    model(torch.randn(4096, how.width)).sum().item()
    return t


def rows_of(t: Any, kind: str) -> Any:
    advice = t.advice()
    return advice[(advice.kind == kind) & advice.saves.notna()]


def saves_what_it_says(sick: Made, kind: str, says: str, **mended: Any) -> None:
    """The row about this says the peak that the mended program has."""
    before, after = traced(sick), traced(replace(sick, **mended))
    rows = rows_of(before, kind)
    (row,) = rows[rows.change.str.contains(says, regex=False)].itertuples()
    saved = before.peak.bytes - after.peak.bytes
    assert saved > 1 << 20
    assert abs(row.saves - saved) <= WITHIN * saved
    assert row.peak_after == before.peak.bytes - row.saves


def test_a_variable_that_lives_too_long() -> None:
    sick = Made(keeps_logits=True)
    saves_what_it_says(sick, "mistake", "del logits", keeps_logits=False)


@pytest.mark.parametrize("words", [8, 2048])
def test_a_function_written_by_hand(words: int) -> None:
    """The peak is in its backward, or in the loss."""
    sick = Made(gelu_by_hand=True, words=words)
    saves_what_it_says(sick, "free", "GELU", gelu_by_hand=False)


def test_a_step_without_a_fused_optimizer() -> None:
    sick = Made(plain_optimizer=True, layers=8, width=384, rows=16)
    saves_what_it_says(sick, "free", "fused=True", plain_optimizer=False)


@pytest.mark.ci
@pytest.mark.parametrize("words", [32, 2048])
def test_an_evaluation_with_grad_mode(words: int) -> None:
    sick = Made(evaluates="with grad", words=words)
    saves_what_it_says(sick, "mistake", "no_grad", evaluates="without grad")


def test_an_evaluation_of_operators_saves_no_less_than_is_said() -> None:
    """Which of a call's blocks end before it is not known, so all end with it."""
    sick = Made(evaluates="with grad", gelu_by_hand=True)
    before, after = traced(sick), traced(replace(sick, evaluates="without grad"))
    saved = before.peak.bytes - after.peak.bytes
    assert 0.9 * saved < before.advice().saves[0] <= saved


@pytest.mark.parametrize("rows", [256, 700, 1024][: by_tier(1, 3, 3)])
def test_checkpoints_of_the_layers(rows: int) -> None:
    before = traced(Made(rows=rows))
    (row,) = rows_of(before, "trade").itertuples()
    after = traced(Made(rows=rows, code=row.code))
    assert row.saves > 0.05 * before.peak.bytes
    assert abs(row.peak_after - after.peak.bytes) <= 0.01 * after.peak.bytes


def encoded(code: str) -> Any:
    """A trace of an encoder in a Sequential in training."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4)
    model = nn.Sequential(nn.Linear(32, 64), encoder, nn.Linear(64, 100))
    paste(code, model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytracer.trace(model, optimizer, devices="cpu", table=False) as t:
        for _ in range(3):
            loss = model(torch.randn(16, 64, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return t


def test_an_encoder_in_a_sequential_is_checkpointed_by_its_layers() -> None:
    before = encoded("")
    (row,) = rows_of(before, "trade").itertuples()
    assert [f"1.layers.{i}" in row.code for i in range(5)] == [True] * 4 + [False]
    assert '"1"' not in row.code
    after = encoded(row.code)
    assert row.saves > 0.4 * before.peak.bytes
    assert abs(row.peak_after - after.peak.bytes) <= 0.01 * after.peak.bytes


class KeepsItsEmbedding(nn.Module):
    """The first result stays in a variable as long as the forward runs."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.drop = nn.Linear(32, 128), nn.Dropout(0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(128, 4, 512, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(128, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.embed(x)
        y = self.drop(first + 1)
        for layer in self.layers:
            y = layer(y)
        result: torch.Tensor = self.head(y)
        return result


@pytest.mark.parametrize("layers", [2, 5, 12][: by_tier(2, 2, 3)])
def test_a_variable_of_the_forward_is_not_taken_for_an_input(layers: int) -> None:
    def run(code: str) -> Any:
        torch.manual_seed(0)
        model = KeepsItsEmbedding(layers)
        paste(code, model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with pytracer.trace(model, optimizer, devices="cpu", table=False) as t:
            for _ in range(3):
                model(torch.randn(16, 64, 32)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return t

    before = run("")
    (row,) = rows_of(before, "trade").itertuples()
    after = run(row.code)
    assert abs(row.peak_after - after.peak.bytes) <= 0.001 * after.peak.bytes


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_checkpoints_of_transformers_turn_its_cache_off(
    kind: str, holds: bool, caches: bool
) -> None:
    """A cache of keys and values that the output holds, too."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, vocab_size=1000, use_cache=caches, bos_token_id=0, eos_token_id=1
    )

    def run(*, checkpoints: bool) -> Any:
        torch.manual_seed(0)
        model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else "LlamaForCausalLM")(
            config
        ).train()
        if checkpoints:
            model.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with pytracer.trace(model, optimizer, devices="cpu", table=False) as t:
            for _ in range(3):
                words = torch.randint(0, 1000, (4, 64))
                out = model(input_ids=words, labels=words)
                loss = out.loss
                if not holds:
                    del out
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return t

    before, after = run(checkpoints=False), run(checkpoints=True)
    rows = before.advice()
    (row,) = rows[rows.change.str.contains("gradient_checkpointing_enable")].itertuples()
    assert abs(row.peak_after - after.peak.bytes) <= 0.01 * after.peak.bytes
    assert all(row.kind in ("trade", "noticed") for row in after.advice().itertuples())


def layer_by_layer() -> Any:
    """Each layer has an optimizer, and is trained before the next; its last gradients stay."""
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512) for _ in range(3)]
    optimizers = [torch.optim.Adam(layer.parameters(), fused=True) for layer in layers]
    with pytracer.trace(devices="cpu", table=False) as t:
        for layer, optimizer in zip(layers, optimizers, strict=True):
            for _ in range(4):
                optimizer.zero_grad()
                layer(torch.randn(64, 512)).square().mean().backward()
                optimizer.step()
    return t


def test_gradients_that_an_optimizer_uses_are_not_said_to_be_unused() -> None:
    assert "requires_grad_(False)" not in " ".join(layer_by_layer().advice().change)


def test_all_changes_together_are_not_the_sum_of_them() -> None:
    sick = Made(keeps_logits=True, gelu_by_hand=True)
    t, mended = traced(sick), traced(replace(sick, keeps_logits=False, gelu_by_hand=False))
    advice = t.advice()
    after = advice.attrs["peak_after_all"]
    saved = t.peak.bytes - mended.peak.bytes
    assert abs(t.peak.bytes - after - saved) <= WITHIN * saved
    assert len(rows_of(t, "mistake")) == len(rows_of(t, "free")) == 1
    assert list(advice.kind) == sorted(
        advice.kind, key=["mistake", "free", "trade", "noticed"].index
    )


@pytest.mark.parametrize("width", [128, 192, 320, 448][: by_tier(1, 2, 4)])
@pytest.mark.parametrize("layers", [2, 3, 6, 9][: by_tier(1, 2, 4)])
def test_a_healthy_program_makes_no_mistake(width: int, layers: int) -> None:
    t = traced(Made(width=width, layers=layers))
    assert set(t.advice().kind) <= {"trade"}
    assert t.advice().attrs["peak_after_all"] in (None, t.peak.bytes)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_list_fits_a_screen(width: int) -> None:
    t = traced(Made(keeps_logits=True, gelu_by_hand=True))
    shown = advice_text.text(t, Terminal(width))
    code = {f"    {line}" for text in t.advice().code for line in text.splitlines()}
    assert all(len(line) <= width or line in code for line in shown.splitlines())
    assert shown.index("Mistakes") < shown.index("Free savings") < shown.index("together")


def test_the_list_of_a_program_without_memory_is_empty() -> None:
    with pytracer.trace(devices="cpu", table=False) as t:
        pass
    assert len(t.advice()) == 0
    assert "No change is known" in advice_text.text(t, PLAIN)


def test_the_list_is_in_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    t = traced(Made(keeps_logits=True))
    t.save(tmp_path / "run.pytrace")
    assert main(["summary", str(tmp_path / "run.pytrace"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["advice"]
    assert [row["change"] for row in said] == list(t.advice().change)
    assert said[0]["saves"] == t.advice().saves[0]
