"""With `stacks=True` a backward's blocks have the line that called the forward operator.

A view and an operator in place make no block, but their backward does: `a[:, t]` gives a gradient
as large as `a`.
"""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import pytracer

SIZE = 32


def a_scan(a: Tensor) -> Tensor:
    state, seen = torch.zeros(SIZE), []
    for t in range(8):
        state = a[:, t] * state + 1
        seen.append(state)
    return torch.stack(seen)


def a_slice(a: Tensor) -> Tensor:
    return a[1:7].square()


def parts(a: Tensor) -> Tensor:
    first, second = a.chunk(2)
    return first * second


def rows(a: Tensor) -> Tensor:
    return sum((row * i for i, row in enumerate(a.unbind())), a[0])


def turned(a: Tensor) -> Tensor:
    return a.t().reshape(-1) * 2


def spread(a: Tensor) -> Tensor:
    wide = a[:1].expand(4, SIZE)
    return wide * 3


def put(a: Tensor) -> Tensor:
    target = a * 1
    target[::2] = a[1::2] * 2
    return target * target


def in_place(a: Tensor) -> Tensor:
    b = a * 2
    b.add_(a).mul_(3)
    return b * b


def joined(a: Tensor) -> Tensor:
    return torch.cat([a[:3], a[5:]]).square()


@pytest.mark.parametrize(
    "function",
    [a_scan, a_slice, parts, rows, turned, spread, put, in_place, joined],
    ids=lambda function: function.__name__,
)
def test_every_block_of_a_backward_has_a_forward_line(function: Callable[[Tensor], Tensor]) -> None:
    weight = torch.randn(SIZE, SIZE, requires_grad=True)
    with pytracer.trace(devices="cpu", stacks=True, table=False) as t:
        for _ in range(3):
            loss = function(weight * 1).sum()
            loss.backward()
            weight.grad = None
    made = t.allocations()
    made = made[(made.phase == "backward") & (made.requested_bytes >= 128)]
    made = made[made.op != "torch::autograd::AccumulateGrad"]
    source, first = inspect.getsourcelines(function)
    inside = {f"{__file__}:{first + i}" for i in range(len(source))}
    assert len(made)
    lines = made.forward_line.fillna(made.line).astype(str)
    here = {line for line in lines if line.rpartition(":")[0].endswith("test_lines_of_views.py")}
    assert set(lines) == here
    assert {line.rpartition("/")[2] for line in here} & {one.rpartition("/")[2] for one in inside}


def test_the_gradient_of_a_view_has_the_views_line() -> None:
    weight = torch.randn(SIZE, SIZE, requires_grad=True)
    with pytracer.trace(devices="cpu", stacks=True, table=False) as t:
        whole = weight * 1
        seen = whole[:, 3]
        loss = seen.square().sum()
        loss.backward()
    line = inspect.currentframe().f_lineno - 3  # type: ignore[union-attr]
    made = t.allocations()
    made = made[made.op == "SelectBackward0"]
    assert made.requested_bytes.tolist() == [4 * SIZE * SIZE]
    assert str(made.forward_line.iloc[0]).endswith(f"test_lines_of_views.py:{line}")
