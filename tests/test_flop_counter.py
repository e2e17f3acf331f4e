"""Where torch's FlopCounterMode is wrong: each line of the table in docs/cost.md, measured."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from pytracer import trace
from pytracer.cost import measurements

PAGE = Path(__file__).parents[1] / "docs" / "cost.md"

Program = Callable[[], torch.Tensor]


def depthwise() -> Program:
    layer = nn.Conv2d(64, 64, 3, groups=64, bias=False)
    x = torch.randn(1, 64, 8, 8, requires_grad=True)
    return lambda: layer(x)


def attention() -> Program:
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    return lambda: functional.scaled_dot_product_attention(q, q, q)


def lstm() -> Program:
    layer, x = nn.LSTM(8, 16), torch.randn(5, 2, 8, requires_grad=True)

    def run() -> torch.Tensor:
        out: torch.Tensor = layer(x)[0]
        return out

    return run


def vector() -> Program:
    matrix, v = torch.randn(64, 32), torch.randn(32)
    return lambda: matrix.mv(v)


def linear() -> Program:
    layer, x = nn.Linear(32, 64), torch.randn(8, 32, requires_grad=True)
    return lambda: layer(x)


# By hand: a multiplication and an addition are two. The linear layer is one that torch has right.
CASES = {
    # 9 weights at 6x6 places of 64 channels; backward makes two gradients.
    "convolution of 64 groups, forward and backward": (depthwise, 3 * 2 * 9 * 36 * 64),
    # Two products of 16x16 scores for two heads of width 8; backward has five.
    "attention on the CPU, forward and backward": (attention, (2 + 5) * 2 * 2 * 16 * 16 * 8),
    # Four gates of 16 from 8 features and 16 hidden ones, 5 steps of batch 2.
    "LSTM on the CPU, forward and backward": (lstm, 3 * 5 * 2 * 2 * 4 * 16 * (8 + 16)),
    "matrix times vector": (vector, 2 * 64 * 32),
    "linear layer, forward and backward": (linear, 3 * 2 * 8 * 32 * 64),
}


def run(program: Program) -> None:
    out = program()
    if out.requires_grad:
        out.backward(torch.ones_like(out))


def theirs(program: Program) -> int:
    with FlopCounterMode(display=False) as counter:
        run(program)
    return int(counter.get_total_flops())


def ours(program: Program) -> int:
    with trace(cost=True, devices="cpu") as t:
        run(program)
    return sum(record.flops or 0 for record in measurements.measured(t.data).records)


@pytest.mark.parametrize("name", CASES)
def test_our_count_is_the_one_by_hand(name: str) -> None:
    build, by_hand = CASES[name]
    assert ours(build()) == by_hand


@pytest.mark.parametrize("name", CASES)
def test_the_page_says_what_flop_counter_mode_counts(name: str) -> None:
    """When torch learns better, the page has to change: the last cell is empty where it is right."""
    build, by_hand = CASES[name]
    counted = theirs(build())
    differs = "" if counted == by_hand else f"{counted / by_hand:.2f}x"
    line = f"| {name} | {counted:,} | {by_hand:,} | {differs} |"
    assert line in PAGE.read_text().splitlines(), line
