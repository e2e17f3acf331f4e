"""Scratch of imagined cards, held against calls that were measured on an H100."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pytracer
from benchmarks import kept
from benchmarks.cudnn_layers import KEPT, LITTLE, said_of
from benchmarks.imagine_tables import layer_of
from pytracer.imagined import recurrent_scratch

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MEASURED = kept.read(RESULTS / "cudnn-scratch-nvidia-h100-80gb-hbm3.json")
LEVELS, LAYERS = MEASURED["levels"], [row for row in MEASURED["recurrent"] if "saved" in row]


def test_the_reserve_of_a_recurrent_layer_is_exact() -> None:
    """Also with dropout, which keeps a mask between two levels."""
    wrong = [
        row
        for row in [*LEVELS, *LAYERS]
        if recurrent_scratch.kept_for_backward(layer_of(row)) not in row["saved"]
    ]
    assert len(LEVELS) == 120
    assert wrong == []


def test_no_pass_of_a_recurrent_layer_takes_more_than_its_bound() -> None:
    """Not even a small one, whose levels each take 8 MiB."""
    shares = [row["largest"] / recurrent_scratch.at_most(layer_of(row)).most for row in LEVELS]
    assert 0.5 < max(shares) <= 0.8


def test_the_scratch_of_a_recurrent_layer_is_what_torch_took() -> None:
    """To within what cuDNN aligns its parts by."""
    off = [row["forward"] - recurrent_scratch.of_recurrent(layer_of(row)).most for row in LAYERS]
    assert len(off) == 120
    assert all(0 <= one <= LITTLE for one in off)


def test_the_scratch_of_layers_is_what_cudnn_says_on_a_card() -> None:
    """Asked of cuDNN with other layers than those that the rules were found with."""
    rows = kept.read(RESULTS / "cudnn-layers-nvidia-h100-80gb-hbm3.json")["rows"]
    said = [said_of(row) for row in rows]
    assert len(rows) == KEPT
    assert all(0 <= row["scratch"] - one[0] <= LITTLE for row, one in zip(rows, said, strict=True))
    assert all(
        abs(row["reserve"] - one[1]) <= LITTLE
        for row, one in zip(rows, said, strict=True)
        if row["trains"]
    )


@pytest.mark.parametrize("card", ["A100-80GB", "RTX4090"])
def test_layers_on_a_card_that_was_not_asked_take_an_interval(card: str) -> None:
    for name, is_interval in ((card, True), ("H100", False)):
        with pytracer.imagine(name) as t:
            layers = nn.LSTM(256, 256).to("cuda")
            layers(torch.randn(4, 2, 256, device="cuda"))[0].sum().backward()
        assert ("peak_at_most" in t.data.meta["imagined"]) == is_interval


def test_sequences_of_several_lengths_take_an_interval() -> None:
    """cuDNN was asked about sequences of one length."""
    for lengths, is_interval in (([4, 4], False), ([4, 2], True)):
        with pytracer.imagine("H100") as t:
            layers = nn.LSTM(256, 256).to("cuda")
            given = torch.randn(4, 2, 256, device="cuda")
            packed = nn.utils.rnn.pack_padded_sequence(given, torch.tensor(lengths))
            layers(packed)[0].data.sum().backward()
        assert ("peak_at_most" in t.data.meta["imagined"]) == is_interval


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_states_of_dropout_are_made_once(dropout: float) -> None:
    """An H100 has 132 processors of 2,048 threads, and a state has 24 bytes."""
    with pytracer.imagine("H100") as t:
        layers = nn.LSTM(64, 64, 2, dropout=dropout).to("cuda")
        for _ in range(3):
            layers(torch.randn(4, 2, 64, device="cuda"))[0].sum().backward()
    frame = t.allocations()
    states = frame[frame.requested_bytes == 132 * 2048 * 24]
    assert len(states) == (1 if dropout else 0)
    assert states.end_ns.isna().all()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_the_gradient_of_a_table_is_an_interval(kind: Any) -> None:
    """Measured with 4,096 rows of 8 words: 10,826,344 bytes beside the copy of the gradient."""
    with pytracer.imagine("H100") as t:
        table = kind(100_000, 64).to("cuda")
        words = torch.randint(100_000, (4096, 8), device="cuda")
        table(words).sum().backward()
    bounds = t.data.meta["imagined"]
    least = t.peak.bytes
    assert bounds["peak_at_most"] > least
    assert bounds["scratch_at_most"] >= 10_826_344


def test_few_words_of_a_table_take_no_scratch() -> None:
    with pytracer.imagine("H100") as t:
        table = nn.Embedding(100_000, 64).to("cuda")
        table(torch.randint(100_000, (8, 384), device="cuda")).sum().backward()
    assert "peak_at_most" not in t.data.meta["imagined"]


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_linear_layer_adds_its_bias_as_on_a_real_machine(contiguous: bool) -> None:
    """To rows that are not contiguous, it adds the bias in place."""
    peaks = []
    for made in (pytracer.trace(devices="cpu", table=False), pytracer.imagine("cpu")):
        with made as t:
            layer = nn.Linear(64, 4096)
            x = torch.randn(32, 64, 64)
            layer(x if contiguous else x.transpose(0, 1))
        peaks.append(t.peak.bytes)
    assert peaks[0] == peaks[1]


def flags(device: str) -> Any:
    return (torch.ones(40, 25, device=device) > 0).sum(1)


def flat_gradient(device: str) -> Any:
    """A sum's gradient is one number for all, which cuBLAS does not take."""
    layer = nn.Linear(32, 16, device=device)
    return layer(torch.ones(4, 32, device=device, requires_grad=True)).sum().backward()


def scattered(device: str) -> Any:
    x, mask = torch.ones(40, 25, device=device), torch.ones(40, 1, device=device) > 0
    return x.masked_scatter(mask, x)


@pytest.mark.parametrize(
    ("program", "extra"),
    [
        (flags, [8 * 1000]),
        (flat_gradient, [256, 256]),
        (scattered, [8 * 1000, 1000, 1279]),
        (lambda device: torch.logsumexp(torch.ones(40, 25, device=device), 1), [160, 40, 4000]),
        (lambda device: torch.cdist(*torch.ones(2, 40, 8, device=device)), [160, 1600]),
    ],
)
def test_blocks_beside_results_are_those_of_a_card(program: Any, extra: list[int]) -> None:
    """The sizes are those that operators of torch's test database took on an H100."""
    with pytracer.imagine("H100") as t:
        program("cuda")
    found = t.allocations().requested_bytes.tolist()
    for size in extra:
        assert size in found
        found.remove(size)


@pytest.mark.parametrize(
    ("program", "measured"),
    [
        (lambda: torch.linalg.svd(torch.ones(1, 5, 5, device="cuda"))[1], 3968),
        (lambda: torch.linalg.eig(torch.ones(10, 5, device="cuda")[:5]), 132608),
        (lambda: torch.linalg.qr(torch.ones(5, 5, device="cuda")), 3145856),
        (lambda: torch.fft.irfft(torch.ones(30, 7, device="cuda") + 0j), 1680),
        (lambda: torch.linalg.matrix_exp(torch.ones(32, 32, device="cuda")), 48152),
    ],
)
def test_the_scratch_of_whole_libraries_is_an_interval(program: Any, measured: int) -> None:
    """It holds what they took on an H100, or on a host."""
    with pytracer.imagine("H100") as t:
        program()
    assert t.data.meta["imagined"]["peak_at_most"] >= t.peak.bytes + measured
