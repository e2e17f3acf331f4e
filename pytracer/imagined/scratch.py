"""What cuDNN takes from torch's allocator beside tensors: as far as it is known, and at most.

The algorithm decides, and cuDNN chooses it on the card. So scratch is an interval. Its bounds were
made from measurements (benchmarks/cudnn_scratch.py), and a test holds every measured row to them.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pytracer.imagined.recurrent import Layer

aten = torch.ops.aten
CONVOLUTIONS = frozenset((aten.convolution.default, aten.convolution_backward.default))
# Numbers that cuDNN keeps for each word and hidden unit of a layer, by its number of the kind.
_KEPT = {0: 1, 1: 1, 2: 5, 3: 6}
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
_ALIGNMENT = 256
_CHANNELS = 8
_SMALL = 8 << 20  # what the smallest convolutions take


@dataclass(frozen=True)
class Scratch:
    """Bytes that are taken for one call."""

    least: int
    most: int


class Taken:
    """The scratch of a run: takes the least, and where the most is taken the most."""

    def __init__(self, device: Any) -> None:
        """`device`: the imagined device."""
        self._device = device
        self._largest = 0

    def take(self, scratch: Scratch) -> None:
        """Takes the scratch for a moment."""
        self.hold(scratch.least)
        self._device.take_at_most(scratch.most)
        self._largest = max(self._largest, scratch.most)

    def hold(self, *amounts: int) -> None:
        """Takes blocks of these bytes for a moment, all at once."""
        if any(amounts):
            blocks = [torch.empty(one, dtype=torch.uint8, device="cuda") for one in amounts]
            self._device.back(blocks)

    def document(self) -> dict[str, int]:
        """The upper bounds, as far as they are above what is sure."""
        counters = self._device.counters()
        peak, reserved = self._device.peaks_at_most()
        bounds: dict[str, int] = {}
        if peak > counters["requested_bytes.peak"]:
            bounds |= {"peak_at_most": peak, "scratch_at_most": self._largest}
        if reserved > counters["reserved_bytes.peak"]:
            bounds["reserved_at_most"] = reserved
        return bounds


def of_convolution(func: Any, args: tuple[Any, ...], result: Any) -> Scratch:
    """The scratch of a convolution that ran.

    cuDNN's kernels want other layouts, so they copy the input and the output, and for a weight's
    gradient they add up partial results. At most each is there twice, and the weight four times.
    """
    if func is aten.convolution.default:
        x, w, y = args[0], args[1], result
    else:
        y, x, w = args[0], args[1], args[2]
    return Scratch(0, 2 * (_padded(x) + _padded(y)) + 16 * math.prod(w.shape) + _SMALL)


def of_recurrent(layer: "Layer", *, backward: bool) -> Scratch:
    """The scratch of a recurrent layer: its gates for every word, and their gradients."""
    wide = layer.rows * layer.hidden * layer.directions * layer.item
    gates = _GATES[layer.mode] * wide
    return Scratch(0, (2 if backward else 1) * gates * layer.layers + _SMALL)


def reserve(layer: "Layer") -> int:
    """What a recurrent layer keeps for its backward pass."""
    wide = layer.rows * layer.hidden * layer.directions * layer.item
    return wide * (_KEPT[layer.mode] * layer.layers + layer.layers - 1) + _ALIGNMENT


def _padded(tensor: Any) -> int:
    """The bytes of a copy, which has a multiple of eight channels."""
    batch, channels, *rest = tensor.shape
    channels += -channels % _CHANNELS
    return int(batch * channels * math.prod(rest) * tensor.element_size())
