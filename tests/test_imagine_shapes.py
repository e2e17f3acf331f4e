"""Operators that only the device has give what torch's kernels on the CPU give, or its own formulas."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pytracer
from pytracer import errors
from pytracer.imagined import kernels


def _x(*sizes: int) -> torch.Tensor:
    return torch.rand(*sizes, requires_grad=True)


def _quantized(x: torch.Tensor) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255)


PROGRAMS: dict[str, Callable[[], Any]] = {
    "aminmax": lambda: torch.aminmax(_x(8, 4)),
    "aminmax of rows": lambda: torch.aminmax(_x(8, 4), dim=1),
    "aminmax of columns kept": lambda: torch.aminmax(_x(8, 4), dim=0, keepdim=True),
    "logcumsumexp": lambda: torch.logcumsumexp(_x(8, 4), 1),
    "gamma": lambda: torch.distributions.Gamma(_x(8), _x(8)).rsample(),
    "dirichlet": lambda: torch.distributions.Dirichlet(_x(8, 4) + 1).rsample(),
    "binomial": lambda: torch.binomial(torch.full((8,), 9.0), torch.rand(8)),
    "multi margin": lambda: functional.multi_margin_loss(_x(8, 4), torch.randint(0, 4, (8,))),
    "multi label": lambda: functional.multilabel_margin_loss(
        _x(8, 4), torch.zeros(8, 4, dtype=torch.long)
    ),
    "fake quantization": lambda: _quantized(_x(8, 4)),
    "fake quantization by channel": lambda: torch.fake_quantize_per_channel_affine(
        _x(8, 4), torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int32), 1, 0, 255
    ),
    "pool of volumes": lambda: functional.fractional_max_pool3d(
        _x(2, 3, 8, 8, 8), 2, output_size=3
    ),
    "matrix exponential": lambda: torch.linalg.matrix_exp(_x(3, 4, 4)),
    "GRU cell": lambda: nn.GRUCell(8, 16)(_x(4, 8), _x(4, 16)),
    "GRU cell without bias": lambda: nn.GRUCell(8, 16, bias=False)(_x(4, 8), _x(4, 16)),
    "affine grid": lambda: functional.affine_grid(_x(2, 2, 3), [2, 3, 5, 6], align_corners=True),
    "grid sample": lambda: functional.grid_sample(
        _x(2, 3, 8, 8), _x(2, 5, 6, 2), align_corners=True
    ),
}


def _shapes(program: Callable[[], Any], device: str) -> list[Any]:
    """Shapes of the results and of each gradient of an input."""
    with torch.device(device):
        made = program()
    results = [made] if isinstance(made, torch.Tensor) else list(made)
    loss = sum(one.sum() for one in results if one.requires_grad)
    if isinstance(loss, torch.Tensor):
        loss.backward()
    leaves = _leaves(loss)
    found = (*results, *leaves, *(leaf.grad for leaf in leaves))
    return [None if one is None else (tuple(one.shape), one.dtype) for one in found]


def _leaves(loss: Any) -> list[torch.Tensor]:
    """The leaves of a graph, in its order."""
    todo, found = [getattr(loss, "grad_fn", None)], {}
    while todo:
        node = todo.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        todo += [one for one, _ in node.next_functions]
    return list(found.values())


@pytest.mark.parametrize("name", PROGRAMS)
def test_imagined_shapes_are_those_of_the_cpu(name: str) -> None:
    try:
        real = _shapes(PROGRAMS[name], "cpu")
    except RuntimeError as error:  # an older torch has no derivative
        pytest.skip(str(error))
    with pytracer.imagine("H100"):
        imagined = _shapes(PROGRAMS[name], "cuda")
    assert sorted(map(str, imagined)) == sorted(map(str, real))


def test_no_operator_of_torchs_is_counted_as_nothing() -> None:
    """Without a fake kernel, an operator that makes something is refused by its name."""
    refused, returned = set(), set()
    for name in kernels.listed():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if operator is None:  # this build lacks it
            continue
        schema = operator._schema
        given = tuple(object() for _ in schema.arguments)
        makes_nothing = all(
            one.alias_info is not None and one.alias_info.is_write for one in schema.returns
        )
        if makes_nothing:
            found = kernels.in_place(operator, given, {})
            found = found if isinstance(found, tuple) else (found,)
            assert all(one is None or one in given for one in found), name
            returned.add(name)
        else:
            with pytest.raises(errors.CannotImagine, match=re.escape(str(operator))):
                kernels.in_place(operator, given, {})
            refused.add(name)
    assert len(refused) > 1000
    assert len(returned) > 500
