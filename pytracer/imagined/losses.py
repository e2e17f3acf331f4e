"""Results that keep more memory than they need: losses that are reduced, and images from columns.

Torch computes a loss for each element into the result, reduces it, and makes the result's shape smaller.
Its storage stays as it was. Fake kernels return a storage of one number.
"""

from typing import Any

import torch

aten = torch.ops.aten
# The position of the argument that says how to reduce; 0 stands for not at all.
_REDUCTION = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
}
# Gradients of blocks and images, which torch makes of the argument's size first, and then makes smaller.
_MADE_SMALLER = frozenset((aten.col2im.default,))
_MEAN = 1


def keep(func: Any, args: tuple[Any, ...], result: Any) -> None:
    """Gives the result of such a loss the storage that it has on a device."""
    if func in _MADE_SMALLER:
        size = max(int(args[0].nbytes), int(result.nbytes))
        result.untyped_storage().resize_(size)
    at = _REDUCTION.get(func)
    if at is None or not (args[at] if at < len(args) else _MEAN):
        return
    whole = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    result.untyped_storage().resize_(whole * result.element_size())
