"""The peak of each kind of work: training, evaluation and generation."""

from typing import Any

import pytest
import torch
from torch import nn

import pytracer

WIDTH = 16


class Decoder(nn.Module):
    """One layer that looks back at the words before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, past: torch.Tensor | None = None) -> Any:
        keys = self.layer(x)
        keys = keys if past is None else torch.cat((past, keys), 1)
        return (x @ keys.mT) @ keys, keys


def generate(model: nn.Module, rows: int, device: str) -> None:
    """Words one by one."""
    past = None
    with torch.no_grad():
        for _ in range(4):
            word, past = model(torch.randn(rows, 1, WIDTH, device=device), past)
            torch.softmax(word, -1)


def loop(device: str, *, rows: tuple[int, int, int]) -> None:
    """Generates, scores and trains, with so many rows each."""
    model, score = Decoder().to(device), Decoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        generate(model, rows[0], device)
        with torch.no_grad():
            score(torch.randn(rows[1], 4, WIDTH, device=device))
        model(torch.randn(rows[2], 4, WIDTH, device=device))[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def real(**options: Any) -> Any:
    with pytracer.trace(devices="cpu", table=False) as t:
        loop("cpu", **options)
    return t


def imagined(**options: Any) -> Any:
    with pytracer.imagine("cpu") as t:
        loop("cpu", **options)
    return t


@pytest.mark.parametrize("record", [real, imagined])
@pytest.mark.parametrize(
    ("largest", "rows"),
    [("generation", (900, 4, 4)), ("evaluation", (4, 900, 4)), ("training", (4, 4, 900))],
)
def test_each_kind_of_work_has_a_peak_of_its_own(
    record: Any, largest: str, rows: tuple[int, int, int]
) -> None:
    """The largest comes first, is the trace's own peak, and follows the rows of its part."""
    t = record(rows=rows)
    peaks = t.peaks()
    assert set(peaks.index) == {"generation", "evaluation", "training"}
    assert peaks.index[0] == largest
    assert peaks.peak_bytes.iloc[0] == t.peak.bytes
    assert (peaks.peak_bytes.iloc[1:] < t.peak.bytes / 4).all()
    categories = peaks.drop(columns=["peak_bytes", "step", "phase", "time_ns"])
    assert (categories.sum(axis=1) == peaks.peak_bytes).all()
    assert f"peaks     {largest}" in t.table()
    if largest != "training":
        assert f"in {largest}" in t.table().splitlines()[0]


def test_a_program_that_only_trains_has_one_kind_and_no_line() -> None:
    """Nothing is said where there is nothing to choose."""
    with pytracer.trace(devices="cpu", table=False) as t:
        model = Decoder()
        model(torch.randn(4, 4, WIDTH))[0].sum().backward()
    assert list(t.peaks().index) == ["training"]
    assert "peaks  " not in t.table()


def test_an_evaluation_that_keeps_its_caches_generates_nothing() -> None:
    """A cache that no later call gets is an output."""
    with pytracer.trace(devices="cpu", table=False) as t:
        model = Decoder()
        with torch.no_grad():
            kept = [model(torch.randn(4, 4, WIDTH)) for _ in range(3)]
        model(torch.randn(4, 4, WIDTH))[0].sum().backward()
    assert len(kept) == 3
    assert set(t.peaks().index) == {"evaluation", "training"}


def test_a_card_is_told_which_work_needs_most() -> None:
    """In the line, on the page of fits and in its document."""
    from pytracer.export.fits_text import on_a_card

    with pytracer.imagine("H100") as t:
        loop("cuda", rows=(4, 900, 4))
    fits = t.fits()
    assert "; peaks: evaluation " in on_a_card(fits)
    assert "peaks     evaluation " in str(fits)
    assert next(iter(fits.by_kind)) == "evaluation"


SCRIPT = """
import torch
from transformers import {name}Config as Config, {model} as Model
config = Config(vocab_size=500, pad_token_id=0, {sizes})
actor, reference = Model(config).to("cuda"), Model(config).to("cuda").eval()
optimizer = torch.optim.AdamW(actor.parameters())
for _ in range(2):
    prompt = torch.randint(2, 500, (8, 16), device="cuda")
    with torch.no_grad():
        words = actor.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=True)
        reward = reference(words).logits.log_softmax(-1).mean(-1)
    (actor(words).logits.log_softmax(-1).mean(-1) * reward).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
GPT2 = {"name": "GPT2", "model": "GPT2LMHeadModel", "sizes": "n_layer=2, n_embd=64, n_head=4"}
LLAMA = {
    "name": "Llama",
    "model": "LlamaForCausalLM",
    "sizes": "num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4",
}


@pytest.mark.ci
@pytest.mark.parametrize("of", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_loop_of_reinforcement_learning_shows_its_kinds(of: dict[str, str]) -> None:
    """With a real model, whose cache is an object: traced here and imagined."""
    pytest.importorskip("transformers")
    program = SCRIPT.format(**of)
    with pytracer.trace(devices="cpu", table=False) as traced:
        exec(compile(program.replace("cuda", "cpu"), "loop", "exec"), {})
    with pytracer.imagine("H100") as guessed:
        exec(compile(program, "loop", "exec"), {})
    for t in (traced, guessed):
        assert list(t.peaks().index) == ["training", "evaluation", "generation"]
        assert t.peaks().peak_bytes.iloc[0] == t.peak.bytes
