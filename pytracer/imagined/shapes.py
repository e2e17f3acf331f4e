"""Fake kernels for operators of torch's own that only the device has: the shapes of their results.

None of these asks for memory beside its results. The GRU's cell is native/cuda/RNN.cu.
"""

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
# The arguments that the results look like, by their numbers.
_ALIKE = {
    "_standard_gamma": (0,),
    "_standard_gamma_grad": (0,),
    "_sample_dirichlet": (0,),
    "_dirichlet_grad": (0,),
    "binomial": (0,),
    "_logcumsumexp": (0,),
    "multi_margin_loss_backward": (1,),
    "multilabel_margin_loss_backward": (1,),
    "fractional_max_pool3d_backward": (1,),
    "glu_jvp": (0,),
    "softplus_backward": (0,),
    "glu_backward_jvp": (0,),
    "_masked_softmax": (0,),
    "_masked_softmax_backward": (0,),
    "cudnn_grid_sampler_backward": (0, 1),
    "_fake_quantize_learnable_per_tensor_affine": (0,),
    "_fake_quantize_learnable_per_tensor_affine_backward": (1, 2, 3),
    "_fake_quantize_learnable_per_channel_affine": (0,),
    "_fake_quantize_learnable_per_channel_affine_backward": (1, 2, 3),
}
_WITH_A_MASK = (
    "fake_quantize_per_tensor_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "fake_quantize_per_channel_affine_cachemask",
)
_GATES, _KEPT = 3, 5  # of a GRU's cell: what it has, and what its backward reads


def kernels() -> dict[Any, Callable[..., Any]]:
    """The kernels by their operators, as far as this torch has them."""
    by_name: dict[str, Callable[..., Any]] = {
        **{name: _alike(numbers) for name, numbers in _ALIKE.items()},
        **dict.fromkeys(_WITH_A_MASK, _with_mask),
        "_aminmax": lambda x: (x.new_empty(()), x.new_empty(())),
        "_aminmax.dim": _of_rows,
        "_thnn_fused_gru_cell": _gru_cell,
        "_thnn_fused_gru_cell_backward": _gru_cell_backward,
        "cudnn_affine_grid_generator": lambda x, n, _, h, w: x.new_empty((n, h, w, 2)),
        "cudnn_affine_grid_generator_backward": lambda x, n, *_: x.new_empty((n, 2, 3)),
        "cudnn_grid_sampler": lambda x, grid: x.new_empty((*x.shape[:2], *grid.shape[1:-1])),
        "_compute_linear_combination": lambda x, by: x.new_empty((len(by), *x.shape[1:])),
    }
    found = {}
    for name, kernel in by_name.items():
        operator, _, overload = name.partition(".")
        packet = getattr(aten, operator, None)
        if packet is not None:
            found[getattr(packet, overload or "default")] = kernel
    return found


def _alike(numbers: tuple[int, ...]) -> Callable[..., Any]:
    def run(*args: Any, **_: Any) -> Any:
        results = tuple(torch.empty_like(args[number]) for number in numbers)
        return results if len(results) > 1 else results[0]

    return run


def _with_mask(x: Any, *_: Any) -> Any:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _of_rows(x: Any, dim: int, keepdim: bool = False) -> Any:
    sizes = list(x.shape)
    if sizes:
        sizes[dim : dim + 1 or None] = [1] if keepdim else []
    return x.new_empty(sizes), x.new_empty(sizes)


def _gru_cell(_: Any, __: Any, state: Any, *___: Any) -> Any:
    batch, hidden = state.shape
    return torch.empty_like(state), state.new_empty((batch, hidden * _KEPT))


def _gru_cell_backward(grad: Any, kept: Any, has_bias: bool) -> Any:
    batch, hidden = grad.shape
    of_input, of_state = (grad.new_empty((batch, hidden * _GATES)) for _ in range(2))
    biases = [grad.new_empty(hidden * _GATES) if has_bias else None for _ in range(2)]
    return of_input, of_state, torch.empty_like(grad), *biases
