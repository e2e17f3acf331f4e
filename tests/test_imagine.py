"""An imagined run says what a real one would, takes no memory, and leaves nothing behind."""

import gc
import json
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pytracer
from pytracer import errors
from pytracer.cli import main
from pytracer.export.fits_text import on_a_card
from pytracer.imagined import cards, search
from tests.tiers import first_of


class Words(nn.Module):
    """A small model of words with everything that a large one has."""

    def __init__(self, width: int = 64, layers: int = 2, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(500, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
            for _ in range(layers)
        )
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, 500, bias=False)
        self.checkpointed = checkpointed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer, down in zip(self.layers, self.downs, strict=True):
            wide = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            x = x + down(wide)
        return self.head(x)


def train(
    device: str,
    make: Callable[[], nn.Module] = Words,
    optimizer: Callable[[Any], Any] = torch.optim.AdamW,
    *,
    steps: int = 2,
    micro: int = 1,
    amp: bool = False,
) -> None:
    """The program, which knows nothing of us."""
    model = make().to(device)
    updates = optimizer(model.parameters())
    for _ in range(steps):
        for _ in range(micro):
            ids = torch.randint(500, (8, 32), device=device)
            with torch.autocast(device, torch.bfloat16, enabled=amp):
                loss = functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
            loss.backward()
            del loss, ids
        updates.step()
        updates.zero_grad()


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def loop(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, foreach=False)


def fused(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, fused=True)


PROGRAMS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "in a loop": {"optimizer": loop},
    "fused": {"optimizer": fused},
    "momentum": {"optimizer": sgd},
    "accumulation": {"micro": 3, "optimizer": fused},
    "deeper": {"make": lambda: Words(layers=5), "optimizer": sgd},
    "AMP": {"amp": True, "optimizer": fused},
}


@pytest.fixture(autouse=True)
def _nothing_alive() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # collections within the test are of its own
    yield
    gc.collect()


# ---------------------------------------------------------------- against the real run


@pytest.mark.ci
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_imagined_run_requests_what_the_real_one_does(name: str) -> None:
    """On the host's memory, which is here to be compared: the peak to the byte, each category."""
    program = PROGRAMS[name]
    with pytracer.trace(devices="cpu", table=False) as real:
        train("cpu", **program)
    gc.collect()
    with pytracer.imagine("cpu") as imagined:
        train("cpu", **program)
    measured, guess = real.peak, imagined.peak
    assert guess.phase == measured.phase
    for category in ("weights", "gradients", "optimizer_state", "inputs"):
        assert guess.by_category[category] == measured.by_category[category], category
    # What libraries take inside of an operator is nobody's tensor.
    assert guess.bytes == pytest.approx(measured.bytes, rel=0.002)
    assert guess.by_category["activations"] == pytest.approx(
        measured.by_category["activations"], rel=0.002
    )


def test_checkpointing_saves_in_an_imagined_run_what_it_saves() -> None:
    """The second forward runs where backward asks for it, and is called recomputed."""

    def peak(*, checkpointed: bool) -> Any:
        with pytracer.imagine("H100") as t:
            train("cuda", lambda: Words(layers=6, checkpointed=checkpointed), sgd)
        return t

    plain, saving = peak(checkpointed=False), peak(checkpointed=True)
    assert saving.peak.by_category["activations"] < 0.8 * plain.peak.by_category["activations"]
    phases = set(saving.allocations()["phase"])
    assert "recompute" in phases
    assert "recompute" not in set(plain.allocations()["phase"])


# ---------------------------------------------------------------- what it is


def test_the_same_program_is_imagined_the_same_twice() -> None:
    """Events, addresses and labels, but for the clock."""

    def columns() -> list[list[int]]:
        with pytracer.imagine("H100") as t:
            train("cuda")
        events = t.data.events
        return [events.address.tolist(), events.bytes.tolist(), events.action.tolist()]

    columns()  # torch fills caches of its own
    first, second = columns(), columns()
    assert first == second


def test_an_imagined_trace_is_an_ordinary_one(tmp_path: Path) -> None:
    """Every view works on it, it is saved and read back, and it says what it is."""
    with pytracer.imagine("RTX4090") as t:
        train("cuda")
    assert t.data.meta["imagined"]["card"] == "RTX4090"
    assert "imagined" in t.table()
    assert t.peak.by_category["unknown"] == 0
    loaded = pytracer.load(t.save(tmp_path / "run.pytrace"))
    assert loaded.peak == t.peak
    assert bool(loaded.fits("24GiB"))
    assert t.fits().card == cards.find("RTX4090").capacity
    assert not t.fits("1200MiB").choices[0].runs or t.peak.bytes < 1200 << 20
    assert len(t.steps()) >= 2
    assert set(t.by("module").index.dropna()) >= {"words", "head"}
    t.report(tmp_path / "run.html")
    t.export_perfetto(tmp_path / "run.pftrace")
    t.export_memory_snapshot(tmp_path / "run.pickle")


def test_the_model_of_the_allocator_agrees_with_the_replay_of_what_it_recorded() -> None:
    """Reserved and allocated bytes are what `replay` finds from the requests alone."""
    with pytracer.imagine("H100") as t:
        train("cuda", lambda: Words(width=256, layers=4))
    counted = t.data.meta["counters"]["end"]["cuda:0"]
    again = t.replay("")
    assert again.peak_reserved == counted["reserved_bytes.peak"]
    assert again.peak_allocated == counted["allocated_bytes.peak"]
    assert t.peak.bytes == counted["requested_bytes.peak"]


def test_cublas_has_a_workspace_as_large_as_the_architecture_has() -> None:
    """32 MiB on Hopper and 8.125 MiB before it, once for forward and once for backward."""
    for card, amount in (("H100", 32 << 20), ("A100", 8519680)):
        with pytracer.imagine(card) as t:
            train("cuda")
        table = t.allocations()
        taken = table[table["role"] == "cublas"]["requested_bytes"].tolist()
        assert taken == [amount, amount]


def test_storage_that_is_emptied_dies_and_comes_back_to_life() -> None:
    """As sharded parameters do between their uses."""
    with pytracer.imagine("H100") as t:
        tensor = torch.empty(1 << 20, device="cuda")
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        tensor.add_(0) if tensor.untyped_storage().nbytes() else torch.empty(1, device="cuda")
        storage.resize_(size)
        tensor.zero_()
    table = t.allocations()
    large = table[table["requested_bytes"] == 4 << 20]
    assert len(large) == 2
    assert large["end_ns"].notna().tolist() == [True, False]


def test_a_storage_that_another_tensor_takes_is_freed() -> None:
    """Torch keeps results of fake operators, by their arguments."""
    with pytracer.imagine("H100"):
        tensor = torch.empty(1 << 20, device="cuda")
        other = torch.empty(0, device="cuda").set_(tensor.untyped_storage())
        assert torch.cuda.memory_allocated() == 4 << 20
        del tensor
        assert torch.cuda.memory_allocated() == 4 << 20
        del other
        assert torch.cuda.memory_allocated() == 0


# ---------------------------------------------------------------- what goes through


def test_a_loss_that_is_logged_is_a_stand_in_and_is_listed() -> None:
    """It is shown as a number, and the line is in the trace."""
    with pytracer.imagine("H100") as t:
        loss = torch.randn(3, device="cuda").sum()
        text = f"{loss.item():.2f} {loss.item() / 2} {float(loss)}"
    assert text == "1.00 0.5 1.0"
    (read,) = t.data.meta["imagined"]["stand_ins"]
    assert read["line"].startswith("tests/test_imagine.py:")
    assert read["reads"] == 3


def test_a_decision_by_a_value_stops_with_its_line_and_a_way_out() -> None:
    """And goes on where the program says what the value is to be taken for."""

    def decides() -> str:
        total = torch.randn(3, device="cuda").sum()
        return "large" if total.item() > 2 else "small"

    stops = pytest.raises(errors.CannotImagine, match=r"test_imagine.py:\d+ decides.*assume=")
    with stops, pytracer.imagine("H100"):
        decides()
    line = f"test_imagine.py:{decides.__code__.co_firstlineno + 2}"
    with pytracer.imagine("H100", assume={line: True}):
        assert decides() == "large"
    with pytracer.imagine("H100", assume={line: False}):
        assert decides() == "small"


def test_a_size_that_depends_on_values_stops_with_its_line() -> None:
    """No number is made up in silence."""
    stops = pytest.raises(errors.CannotImagine, match=r"test_imagine.py:\d+: aten")
    with stops, pytracer.imagine("H100"):
        torch.randn(3, device="cuda").nonzero()


def test_what_is_small_and_known_on_the_host_stays_known() -> None:
    """Rates by layer, as models compute them while they are made."""
    with pytracer.imagine("H100"):
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        assert rates == [0.0, 0.25, 0.5]
        assert torch.tensor([2, 3]).tolist() == [2, 3]
        assert bool(torch.tensor(5) > 4)


def test_the_card_is_described_to_who_asks() -> None:
    """Scripts ask before they do anything."""
    with pytracer.imagine("A100-40GB"):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        assert torch.cuda.get_device_capability() == (8, 0)
        assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info()[1]
        before = torch.cuda.memory_allocated()
        kept = torch.empty(1 << 20, device="cuda")
        assert torch.cuda.memory_allocated() - before == 4 << 20
        assert torch.cuda.max_memory_allocated() >= 4 << 20
        del kept
        assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_may_change_its_dtype_and_share_its_weights(dtype: torch.dtype) -> None:
    """`to()` keeps parameters who they are: tied ones stay tied."""
    with pytracer.imagine("H100") as t:
        model = Words()
        model.head.weight = model.words.weight
        model.to("cuda").to(dtype)
        assert model.head.weight is model.words.weight
        assert model.words.weight.dtype == dtype
        ids = torch.randint(500, (2, 8), device="cuda")
        model(ids).float().sum().backward()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert t.summary().loc["weights", "at_end"] == 2 * parameters


def test_gradient_scaling_goes_through() -> None:
    """float16 with a scaler, whose step is taken."""
    with pytracer.imagine("T4") as t:
        model = Words().to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")
        ids = torch.randint(500, (2, 8), device="cuda")
        with torch.autocast("cuda", torch.float16):
            loss = model(ids).float().sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert t.summary().loc["optimizer_state", "at_end"] > 0


# ---------------------------------------------------------------- afterwards


def test_afterwards_the_process_is_as_it_was() -> None:
    """Nothing of torch's is replaced, no mode is on, no thread is left."""

    def state() -> dict[str, Any]:
        return {
            "cuda": dict(vars(torch.cuda)),
            "memory": dict(vars(torch.cuda.memory)),
            "module": dict(vars(nn.Module)),
            "init": dict(vars(nn.init)),
            "modes": torch._C._len_torch_dispatch_stack(),
            "threads": threading.active_count(),
            "engine": torch.autograd.is_multithreading_enabled(),
            "available": torch.cuda.is_available(),
            "accelerator": torch.accelerator.is_available(),
            "attention": torch._C._dispatch_has_kernel_for_dispatch_key(
                "aten::scaled_dot_product_attention", "AutogradCUDA"
            ),
        }

    with pytracer.imagine("H100"):
        train("cuda")
    before = state()
    with pytracer.imagine("H100"):
        assert torch.cuda.is_available()
        train("cuda")
    with pytest.raises(ZeroDivisionError), pytracer.imagine("H100"):
        1 / 0  # noqa: B018
    assert state() == before
    weight = torch.randn(3, requires_grad=True)
    weight.square().sum().backward()
    assert torch.equal(weight.grad, 2 * weight.detach())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_afterwards_cuda_is_missing_again() -> None:
    """A fake device may not outlive its block."""
    with pytracer.imagine("H100"):
        torch.zeros(1, device="cuda")
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_what_outlives_the_block_ends_without_a_word() -> None:
    """Its memory was never there, and no later trace hears of it."""
    with pytracer.imagine("H100"):
        kept = torch.empty(1000, device="cuda")
    with pytracer.trace(devices="cpu", table=False) as t:
        del kept
        torch.ones(3)
    assert t.data.losses == {}


def test_random_numbers_go_on_as_if_nothing_had_been() -> None:
    """An imagined run draws none."""
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with pytracer.imagine("H100"):
        train("cuda")
    assert torch.equal(torch.rand(3), expected)


def test_imagining_takes_no_memory() -> None:
    """Twenty gigabytes of weights, and the process hardly grows."""
    with pytracer.imagine("H100"):
        train("cuda")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytracer.imagine("H100") as t:
        model = Words(width=16384, layers=2).to("cuda")
        model(torch.randint(500, (4, 512), device="cuda")).sum().backward()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert t.peak.bytes > 20 << 30
    assert grown < 200 << 20
    assert not t.fits("24GiB")


# ---------------------------------------------------------------- what is refused


def test_an_unknown_card_is_refused_with_those_that_are_known() -> None:
    """And with the way to another one."""
    with pytest.raises(errors.UsageError, match=r"no card is called 'H900'.*RTX4090.*capacity="):
        pytracer.imagine("H900")


def test_another_capacity_is_another_card() -> None:
    """The name gives the architecture, the size is the user's."""
    with pytracer.imagine("rtx 4090", capacity="16GiB") as t:
        train("cuda")
    assert t.fits().card == 16 << 30


def test_two_cards_at_once_are_refused() -> None:
    """One thing at a time, in words."""
    with pytracer.imagine("H100"), pytest.raises(errors.CaptureError, match="already"):
        pytracer.imagine("A100").__enter__()


# ---------------------------------------------------------------- what cuDNN and reductions take


# Measured on an H200 with cuDNN 9.19: 2 layers of 1024 units, 16 sequences of 128 words, float32.
@pytest.mark.parametrize(("kind", "reserve"), [(nn.LSTM, 92274944), (nn.GRU, 109052160)])
def test_recurrent_layers_keep_what_cudnn_keeps(kind: Any, reserve: int) -> None:
    """One tensor of weights, one of their gradients, and the reserve until backward."""
    with pytracer.imagine("H200") as t:
        layers = kind(512, 1024, 2, batch_first=True).to("cuda")
        weights = 4 * sum(parameter.numel() for parameter in layers.parameters())
        x = torch.randn(16, 128, 512, device="cuda", requires_grad=True)
        output, _ = layers(x)
        assert output.shape == (16, 128, 1024)
        output.sum().backward()
    taken = t.allocations()
    assert (taken["requested_bytes"] == reserve).sum() == 1
    assert (taken["requested_bytes"] == weights).sum() == 2
    assert t.summary().loc["gradients", "at_end"] >= weights
    assert kind(8, 8)(torch.randn(3, 2, 8))[0].shape == (3, 2, 8), "on the host as ever"


@pytest.mark.parametrize("amp", [False, True])
def test_recurrent_layers_go_through_packed_and_under_autocast(amp: bool) -> None:
    """Sequences of unequal length, too."""
    with pytracer.imagine("H100"):
        layer = nn.LSTM(8, 16, bidirectional=True).to("cuda")
        rows = nn.utils.rnn.pack_sequence(
            [torch.randn(length, 8, device="cuda") for length in (5, 3, 2)]
        )
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            packed, (state, _) = layer(rows)
        assert packed.data.shape == (10, 32)
        assert state.shape == (2, 3, 16)
        packed.data.float().sum().backward()
        assert layer.weight_ih_l0.grad.shape == (64, 8)


def test_a_sum_over_many_rows_takes_the_scratch_that_was_measured() -> None:
    """The gradient of a bias of 3,072 from 6,304 rows: 132 MiB and 96 bytes on an H200."""

    def most(card: str, *shape: int, over: int) -> int:
        with pytracer.imagine(card) as t:
            torch.empty(shape, dtype=torch.bfloat16, device="cuda").sum(over)
        return int(t.peak.bytes - 2 * shape[0] * shape[1] - 2 * shape[1 - over])

    assert most("H200", 6304, 3072, over=0) == (132 << 20) + 96
    assert most("H200", 6304, 3072, over=1) == 0, "neighbours are one output: no partial results"
    assert most("H200", 16, 3072, over=0) == 0, "few rows: each output has one thread"
    assert most("RTX4090", 6304, 3072, over=0) < 132 << 20, "it has fewer threads"


def test_a_convolution_makes_the_peak_an_interval() -> None:
    """The most is above the peak, is said, and decides where it is more than the card has."""
    with pytracer.imagine("H100") as t:
        layer = nn.Conv2d(64, 64, 3, padding=1).to("cuda")
        layer(torch.randn(8, 64, 256, 256, device="cuda")).sum().backward()
    facts = t.data.meta["imagined"]
    assert facts["peak_at_most"] > t.peak.bytes
    assert "at most" in t.table()
    safe, close = t.fits(), t.fits(t.fits().smallest_card)
    more = facts["reserved_at_most"] - safe.replay.peak_reserved
    assert safe.uncertain == close.uncertain == more > 0
    assert on_a_card(safe).startswith("fits")
    assert on_a_card(close).startswith("may fit")
    with pytracer.imagine("H100") as t:
        train("cuda")
    assert "peak_at_most" not in t.data.meta["imagined"]
    assert t.fits().uncertain == 0


# ---------------------------------------------------------------- more that goes through


def test_a_random_number_is_known_to_be_neither_below_0_nor_above_1() -> None:
    """As where a layer is skipped with probability 0. With another it is a decision."""
    with pytracer.imagine("H100"):
        assert not torch.rand([]) < 0.0
        assert torch.rand([]) < 1.0
        assert not (torch.randint(1000, (2, 8)).to("cuda") < 0).any()
        assert not (torch.stack([torch.randint(9, (8,)), torch.randint(9, (8,))]) < 0).any()
        assert not torch.isnan(torch.randn(3, device="cuda").sum())
        with pytest.raises(errors.CannotImagine, match="decides"):
            bool(torch.rand([]) < 0.5)


def test_a_random_whole_number_is_known_to_be_within_its_bounds() -> None:
    """And so is the largest of them. Numbers that were written over them need not be."""
    with pytracer.imagine("H100"):
        labels = torch.randint(3, 32, (2, 8), device="cuda")
        assert labels.max() < 32
        assert not labels.max() >= 32
        assert labels.min() > 2
        with pytest.raises(errors.CannotImagine, match="decides"):
            bool(labels.max() > 30)
        labels[0, :4] = -100
        with pytest.raises(errors.CannotImagine, match="decides"):
            bool((labels >= 0).all())


def test_a_mask_that_is_known_stays_known_where_it_says_what_is_written() -> None:
    """The backward pass of such a write asks for the count of its rows again."""
    with pytracer.imagine("H100"):
        mask = torch.tensor([[True, False], [True, True]], device="cuda")
        rows = torch.randn(2, 2, 8, device="cuda", requires_grad=True) * 1
        new = torch.randn(8, device="cuda", requires_grad=True)
        rows[mask] = new
        rows.sum().backward()
        assert new.grad is not None
        assert mask.sum() == 3


def test_no_random_word_is_a_special_one_and_the_line_is_listed() -> None:
    """Programs look for padding in their batch."""
    with pytracer.imagine("H100") as t:
        ids = torch.randint(1000, (2, 8), device="cuda")
        assert not (ids == 1).any()
        assert not torch.sum(ids[:, -1] == torch.tensor(0)) > 0
    assert len(t.data.meta["imagined"]["stand_ins"]) == 2


def test_known_values_decide_sizes() -> None:
    """A mask of ones has a count, and so have the positions of a number."""
    with pytracer.imagine("H100"):
        mask = torch.ones(4, 6, dtype=torch.bool, device="cuda")
        assert mask.nonzero().shape == (24, 2)
        assert torch.arange(10, device="cuda")[torch.arange(10, device="cuda") > 6].shape == (3,)
        assert torch.tensor([3, 1, 3], device="cuda").unique().tolist() == [1, 3]
        assert torch.equal(torch.tensor([1, 2]), torch.tensor([1, 2]))


class Routed(nn.Module):
    """Eight experts, of which a router chooses for each row."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.router, self.how = nn.Linear(64, 8), how
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        marks = functional.one_hot(chosen, 8).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if self.how == "where":
                rows, place = torch.where(chosen == number)
            elif self.how == "one-hot":
                place, rows = torch.where(marks[number])
            else:
                mask = chosen[:, 0] == number
                out[mask] = expert(x[mask])
                continue
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        return out


@pytest.mark.parametrize("how", ["where", "one-hot"])
def test_rows_of_experts_have_a_balanced_and_a_worst_count(how: str) -> None:
    """256 rows with two experts each: 64 for each expert, or all for two of them."""

    def rows(sizes: str | None) -> list[int]:
        with pytracer.imagine("H100", sizes=sizes) as t:
            model = Routed(how).to("cuda")
            model(torch.randn(256, 64, device="cuda")).sum().backward()
        taken = t.allocations()
        return [size // 256 for size in taken[taken["op"] == "aten::gelu"]["requested_bytes"]]

    assert rows("balanced") == [64] * 8
    assert rows("worst") == [256] * 2
    with pytest.raises(errors.CannotImagine, match="--sizes"):
        rows(None)


def test_rows_that_a_mask_picks_have_a_count_too() -> None:
    """And are written back by the mask. An unknown size is no word."""
    for sizes in ("balanced", "worst"):
        with pytracer.imagine("H100", sizes=sizes):
            model = Routed("mask").to("cuda")
            model(torch.randn(256, 64, device="cuda")).sum().backward()
    with pytest.raises(errors.UsageError, match="balanced, worst"):
        pytracer.imagine("H100", sizes="best")


def test_inference_mode_goes_through() -> None:
    """There torch shows modes operators that it takes apart otherwise."""
    with pytracer.imagine("H100") as t, torch.inference_mode():
        model = Words().to("cuda")
        model(torch.randint(500, (2, 8), device="cuda"))
    assert t.peak.by_category["weights"] > 0


def test_a_parameter_whose_data_moves_to_the_card_is_there() -> None:
    """As frameworks move them."""
    with pytracer.imagine("H100"):
        layer = nn.Linear(4, 4)
        layer.weight.data = layer.weight.data.to("cuda")
        assert layer.weight.device.type == "cuda"


def test_the_largest_batch_is_found_by_calling_the_program() -> None:
    """One row more does not fit."""

    def run(batch: int) -> None:
        layer = nn.Linear(4096, 4096).to("cuda")
        layer(torch.randn(batch, 1 << 10, 4096, device="cuda")).square().sum().backward()

    found = pytracer.largest_batch(run, "T4", capacity="4GiB")
    assert found
    assert {one.batch: one.fits for one in found.tries}[found.batch + 1] is False
    assert found.peak < 4 << 30
    assert not pytracer.largest_batch(run, "T4", capacity="100MiB")
    with pytest.raises(errors.UsageError, match="does not use the number"):
        pytracer.largest_batch(lambda batch: run(1), "T4")


@pytest.mark.parametrize(
    "needs",
    [lambda n: 10 + 7 * n, lambda n: max(100, 5 * n), lambda n: 20 * -(-n // 3), lambda n: n**2],
)
@pytest.mark.parametrize("capacity", [150, 977, 5003])
def test_the_search_ends_at_the_last_batch_that_fits(
    needs: Callable[[int], int], capacity: int
) -> None:
    """On lines, steps and curves, in few tries."""
    found, tries = search.search(
        lambda n: search.Try(n, needs(n) <= capacity, needs(n), needs(n)), capacity
    )
    assert needs(found) <= capacity < needs(found + 1)
    assert len(tries) <= 20


# ---------------------------------------------------------------- scripts

SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
width = int(sys.argv[1])
model = torch.nn.Linear(width, width).to(device)
optimizer = torch.optim.AdamW(model.parameters())
rows = DataLoader(
    TensorDataset(torch.randn(64, width)), batch_size=16, shuffle=True, num_workers=2, pin_memory=True
)
for epoch in range(1000):
    for (x,) in rows:
        loss = model(x.to(device)).square().mean()
        if "decide" in sys.argv and loss.item() > 3:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{loss.item():.3f}")
        torch.save(model.state_dict(), "weights.pt")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program that knows nothing of us, in the working directory."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return "train.py"


@pytest.mark.ci
def test_a_script_is_imagined_on_each_card_and_stopped(
    script: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A table and a line per card; the script's own files stay as they are."""
    code = main(["imagine", "--keep", "kept", script, "--on", "H100,T4", "20000"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert any(line.startswith("imagined  on") for line in lines)
    cards_said = [line.split()[:4] for line in lines if line.startswith(("H100", "T4"))]
    assert cards_said == [["H100", "79.1", "GiB", "fits:"], ["T4", "14.6", "GiB", "fits:"]]
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        "H100.pytrace",
        "T4.pytrace",
    ]
    assert not (tmp_path / "weights.pt").exists()
    weights = 4 * (20000 * 20000 + 20000)
    kept = pytracer.load(tmp_path / "kept" / "H100.pytrace")
    assert kept.summary().loc["weights", "at_peak"] == weights


def test_a_script_that_fits_on_no_card_exits_with_3(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `fits` does."""
    assert main(["imagine", "--on", "T4", script, "40000"]) == 3
    assert "T4  14.6 GiB  does not fit" in capsys.readouterr().out


@pytest.mark.ci
def test_what_cannot_be_imagined_is_one_line_of_the_script(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no traceback; with --assume it goes through."""
    assert main(["imagine", "--json", "--on", "H100", script, "8", "decide"]) == 1
    (card,) = json.loads(capsys.readouterr().out)["cards"]
    assert card["problem"].startswith("train.py:16 decides by the value of a tensor")
    assert "Traceback" not in card["problem"]
    assume = ["--assume", "train.py:16=false"]
    assert main(["imagine", "--json", *assume, "--on", "H100", script, "8", "decide"]) == 0
    (card,) = json.loads(capsys.readouterr().out)["cards"]
    assert card["fits"]
    assert card["problem"] is None


@pytest.mark.ci
@pytest.mark.parametrize(
    "way", first_of(["argument", "environment", "variable"], later=pytest.mark.nightly)
)
def test_the_batch_reaches_the_script_in_three_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    """And the largest one is the same: it fits by itself, and one more row does not.

    Of the card, up to 1,229 MiB may be taken beside the allocator.
    """
    source = """
import os, sys, torch
rows = 0
rows = rows or int(os.environ.get("ROWS", 0)) or int(sys.argv[1])
layer = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
while True:
    layer(torch.randn(rows << 14, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
"""
    if way == "variable":
        source = source.replace("rows = rows or", "other = rows or").replace("(sys.argv[1])", "(1)")
    (tmp_path / "train.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    command = ["imagine", "--json", "--largest-batch", "--on", "T4", "--capacity", "3277MiB"]
    if way == "environment":
        monkeypatch.setenv("ROWS", "{batch}")
    command += ["--set", "rows={batch}"] if way == "variable" else []
    command += ["train.py", *(["{batch}"] if way == "argument" else [])]
    assert main(command) == 0
    (card,) = json.loads(capsys.readouterr().out)["cards"]
    assert card["largest_batch"] == 4
    for rows in (4, 5) if way == "argument" else ():
        alone = ["imagine", "--json", "--on", "T4", "--capacity", "3277MiB", "train.py", str(rows)]
        main(alone)
        (card,) = json.loads(capsys.readouterr().out)["cards"]
        assert card["fits"] == (rows == 4)


def test_without_a_place_for_the_batch_the_three_ways_are_named(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And other mistakes are one line, too."""
    assert main(["imagine", "--largest-batch", script, "8"]) == 2
    assert "--set batch_size={batch}" in capsys.readouterr().err
    for command, word in (
        (["--batch", "8", script], "--hf"),
        (["--hf", "nowhere", script], "needs no script"),
        (["--hf", "nowhere", "--shard", "zero:3"], "fsdp2:64"),
        (["--rank", "3", script], "--ranks 64"),
        (["--ranks", "4", "--rank", "4", script], "0 to 3"),
        (["--set", "x", script], "NAME=NUMBER"),
        (["--on", "T4=cheap", script], "no price"),
        ([script, "{batch}"], "--largest-batch"),
    ):
        assert main(["imagine", *command]) == 2, command
        assert word in capsys.readouterr().err, command


@pytest.mark.ci
def test_a_hugging_face_configuration_needs_no_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sharded over 64 ranks it holds a share; a folder without a configuration is one line."""
    pytest.importorskip("transformers.models.llama.modeling_llama", exc_type=ImportError)
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    command = ["imagine", "--json", "--on", "RTX4090", "--batch", "2", "--seq", "64", "--bf16"]
    command += ["--checkpoint", "--hf", str(tmp_path)]
    states = []
    for more in ([], ["--shard", "fsdp2:64"], ["--shard", "ddp:8", "--optimizer", "sgd"]):
        assert main([*command, *more]) == 0
        (card,) = json.loads(capsys.readouterr().out)["cards"]
        assert card["problem"] is None
        states.append(card["by_category"]["optimizer_state"])
    whole, share, momentum = states
    assert share == pytest.approx(whole / 64, rel=0.01)
    assert momentum == pytest.approx(whole / 2, rel=0.01)
    assert main(["imagine", "--json", "--hf", str(tmp_path / "nothing")]) == 1
    assert "no config.json" in capsys.readouterr().out


def test_a_script_that_is_not_there_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the command line's own errors too."""
    monkeypatch.chdir(tmp_path)
    assert main(["imagine", "nothing.py"]) == 1
    assert "cannot read nothing.py" in capsys.readouterr().out
    assert main(["imagine", "--on", "H900", "nothing.py"]) == 2
    capsys.readouterr()
    assert main(["imagine", "--on", "24GB", "nothing.py"]) == 2
    assert capsys.readouterr().err.endswith("--on RTX4090 --capacity 24GB\n")
    assert main(["imagine", "--on", "RTX9990", "nothing.py"]) == 2
    said = capsys.readouterr().err
    assert "did you mean 'RTX" in said
    assert "--on RTX4090 --capacity 24GiB" in said
    assert main(["imagine"]) == 2


# ---------------------------------------------------------------- where there is a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_imagined_card_requests_what_the_real_one_does(name: str) -> None:
    """In a process that has used the GPU: the peak, without what libraries keep for good."""
    program = PROGRAMS[name]
    with pytracer.trace(devices="cuda", table=False) as real:
        train("cuda", **program)
    gc.collect()
    with pytracer.imagine("H200") as imagined:
        train("cuda", **program)
    measured, guess = real.peak.by_category, imagined.peak.by_category
    for category in ("weights", "gradients", "optimizer_state", "inputs", "activations"):
        assert guess[category] == pytest.approx(measured[category], rel=0.005, abs=4096), category


@pytest.mark.cuda
def test_imagining_touches_no_device() -> None:
    """Not a byte is allocated on the GPU that is there."""
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with pytracer.imagine("H100"):
        train("cuda")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("start", ["i", "int(i)", "i.item()"])
def test_a_batch_cut_out_at_random_positions_has_its_whole_length(start: str) -> None:
    """As nanoGPT makes it. With one stand-in for both ends of a slice, batches had no length."""
    data = np.arange(5000, dtype=np.uint16)
    with pytracer.imagine("RTX4090") as t:
        positions = torch.randint(len(data) - 128, (12,))
        rows = []
        for i in positions:
            at = {"i": i, "int(i)": int(i), "i.item()": i.item()}[start]
            rows.append(torch.from_numpy(data[at : at + 128].astype(np.int64)))
        batch = torch.stack(rows).to("cuda")
        assert batch.shape == (12, 128)
    (line, *_) = t.data.meta["imagined"]["stand_ins"]
    assert "test_imagine.py" in line["line"], "they are stand-ins, and the table says so"


def test_nothing_is_decided_by_a_random_number() -> None:
    for decides in (lambda x: bool(x[0] > 3), lambda x: x[0].item() > 3, lambda x: bool(x.any())):
        with (
            pytest.raises(pytracer.errors.CannotImagine, match="decides by the value"),
            pytracer.imagine("H100"),
        ):
            decides(torch.randint(10, (4,)) + 1)
