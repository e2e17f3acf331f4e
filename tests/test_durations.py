"""How long an imagined step would take: what is noted of each call, and the ratio of two runs."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.checkpoint import checkpoint

import pytracer
from benchmarks import kept, prediction
from pytracer.analysis.forecasts import fitting
from pytracer.data import meta
from pytracer.data.recorded import Trace
from pytracer.imagined import durations

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
calls = st.tuples(st.integers(0, 5), st.integers(0, 9), st.booleans())


def plain(step: list[tuple[int, int, bool]]) -> int:
    """The second of two equal steps, one call after the other. A call that waits does nothing else."""
    host = card = before = 0
    for _ in range(2):
        before = card
        for given_, taken, waits in step:
            if waits:
                host = max(host, card)
            else:
                host += given_
                card = max(card, host) + taken
    return card - before


@given(st.lists(calls, min_size=1, max_size=30))
def test_a_step_takes_what_its_calls_take_one_by_one(step) -> None:
    waits = np.array([one[2] for one in step])
    host, card = (np.where(waits, 0, [one[at] for one in step]).astype(float) for at in (0, 1))
    assert durations._steady(host, card, np.flatnonzero(waits)) == plain(step)


def imagined(steps: int, *, checkpoints: bool = False, width: int = 64) -> Trace:
    with pytracer.imagine("H100") as t:
        layers = [
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in "abc"
        ]
        model = torch.nn.Sequential(*layers).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            x = torch.randn(8 * width, width, device="cuda")
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False) if checkpoints else layer(x)
            x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return t.data


def step_ns(trace: Trace) -> tuple[int, ...]:
    found = meta.of(trace).imagined
    assert found is not None
    return found.step_ns


def test_a_run_of_one_step_says_nothing_of_its_time() -> None:
    first = imagined(1)
    assert step_ns(first) == ()
    assert fitting._times(first, first) is None


def test_a_run_like_the_first_takes_as_long() -> None:
    first, again = imagined(2), imagined(2)
    assert fitting._times(first, again) == (1.0, 1.0)
    longer = imagined(3)
    assert fitting._times(first, longer) == pytest.approx((2.0, 2.0), rel=0.01)


def test_a_checkpoint_takes_a_slow_host_longer_than_its_card() -> None:
    """Layers this small leave the card idle: with every host but the one that costs nothing."""
    first, after = (step_ns(imagined(2, checkpoints=each)) for each in (False, True))
    assert len(first) == len(after)
    variants = durations._VARIANTS
    ratios = {
        host: [b / a for (one, *_), a, b in zip(variants, first, after, strict=True) if one == host]
        for host in durations.HOSTS
    }
    assert 1 < max(ratios[0.0]) < min(ratios[3.0]) < 2.5


def test_a_large_product_takes_the_card_its_flops() -> None:
    width = 8192
    least = min(step_ns(imagined(2, width=width)))
    flops = 3 * 3 * 2 * 8 * width**3 - 2 * 8 * width**3  # the first layer's input has no gradient
    assert least == pytest.approx(1e9 * flops / durations._RATES["float32"], rel=0.1)


PLANS = kept.read(RESULTS / "prediction-plans-nvidia-h200.json")["runs"]
IMAGINED_HERE = ("transformer", "encoder")  # the third needs torchvision


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("model", IMAGINED_HERE)
def test_measured_plans_lie_within_the_promised_time(model: str) -> None:
    """On an H200, steps of all plans timed in turn: at most 2 % outside."""

    def run(modules: list[str]) -> Trace:
        with pytracer.imagine("H100") as t:
            training = prediction.MODELS[model]("cuda")
            for name in modules:
                module = training[0].get_submodule(name)
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)
            for _ in range(2):
                prediction.step(training)
        return t.data

    rows = [row for row in PLANS if row["model"] == model and not row["offloaded"]]
    first = run([])
    for row in rows:
        times = fitting._times(first, run(row["modules"]))
        assert times is not None
        assert times[0] / 1.02 <= row["measured"]["time_ratio"] <= times[1] * 1.02
    assert len(rows) == 3
