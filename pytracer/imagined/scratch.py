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
# The gradients of tables, and which argument is the number of rows.
TABLES = {aten.embedding_dense_backward.default: 2, aten._embedding_bag_backward.default: 6}
_SPARSE = 9  # the argument of an embedding bag's gradient
_FEW_WORDS = 3072  # up to here the gradient of a table is summed without sorting its words
_RUN = 10  # words that are summed together
_WARP = 32
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
    stays: bool = False  # taken once, for all later calls


class Taken:
    """The scratch of a run: takes the least, and where the most is taken the most."""

    def __init__(self, device: Any) -> None:
        """`device`: the imagined device."""
        self._device = device
        self._largest = 0
        self._staying: list[Any] = []

    def take(self, scratch: Scratch) -> None:
        """Takes the scratch for a moment, or for good."""
        if scratch.stays:
            if not self._staying:
                self._staying = [torch.empty(scratch.least, dtype=torch.uint8, device="cuda")]
                self._device.back(self._staying)
            return
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


def of_onednn(func: Any) -> str:
    """Which of oneDNN's operators it is, whose memory on a host only oneDNN knows; "" if none."""
    if func in CONVOLUTIONS:
        return "convolutions"
    return "recurrent layers" if func.name().startswith("aten::mkldnn_rnn_layer") else ""


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


def of_table(func: Any, args: tuple[Any, ...]) -> Scratch:
    """What the gradient of an embedding takes: words in order, and a partial sum for each run of one.

    How many runs there are depends on the words: at least as many as if all were one word, at most as
    many as if all differed.
    """
    grad, words = args[0], args[1]
    count, rows = words.numel(), args[TABLES[func]]
    is_bag = func is aten._embedding_bag_backward.default
    if count == 0 or (args[_SPARSE] if is_bag else count <= _FEW_WORDS):
        return Scratch(0, 0)
    fixed = 5 * words.nbytes + 16 + (0 if grad.is_contiguous() else grad.nbytes)
    wide = grad.shape[-1] + -grad.shape[-1] % _WARP
    each = words.element_size() + 4 * wide
    least, most = -(-count // _RUN), min(count, rows) + count // _RUN + 1
    return Scratch(fixed + least * each, fixed + most * each)


def of_recurrent(layer: "Layer") -> Scratch:
    """The scratch of a pass of a recurrent layer, forward or backward.

    Each level and direction has 8 MiB of its own beside a copy of the weights and the gates of every
    word. Of 144 layers measured on an H100, none takes more than 0.8 times this.
    """
    gates, levels = _GATES[layer.mode], layer.layers * layer.directions
    wide = layer.rows * layer.hidden * layer.directions * layer.item
    first = layer.width + layer.hidden + 2
    later = layer.hidden * layer.directions + layer.hidden + 2
    units = gates * layer.hidden * layer.directions * layer.item
    weights = units * (first + (layer.layers - 1) * later)
    given = layer.rows * layer.width * layer.item
    own = _SMALL * levels + weights + (gates + 2) * wide * layer.layers + 4 * given + (2 << 20)
    return Scratch(0, own + own // 2)


_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}  # of a multiprocessor


def of_dropout(processors: int, capability: tuple[int, int]) -> Scratch:
    """The states of cuDNN's random numbers, 24 bytes for each thread of the card. Measured on an H100."""
    amount = processors * _THREADS.get(capability, 2048) * 24
    return Scratch(amount, amount, stays=True)


def of_grouped_product(groups: int, processors: int, capability: tuple[int, int]) -> Scratch:
    """The scratch of a product of groups in bfloat16: descriptors per multiprocessor and per group.

    Measured on an H100. Before Hopper each group is a product of its own.
    """
    most = 512 * processors + 60 * groups + (24 if groups % 2 else 0)
    if capability == (9, 0):
        return Scratch(most, most)
    return Scratch(0, 2 * most if capability[0] == 10 else 0)


def beside(func: Any, args: Any) -> int:
    """What other operators of torch's own take on a card beside their result, and no fake kernel does."""
    if func is aten._softmax_backward_data.default:  # the product of its two inputs
        return max(int(one.nbytes) for one in args[:2])
    return 0


def reserve(layer: "Layer") -> int:
    """What a recurrent layer keeps for its backward pass: its numbers, and what dropout has kept."""
    units = layer.rows * layer.hidden * layer.directions
    numbers = units * layer.item * (_KEPT[layer.mode] * layer.layers + layer.layers - 1)
    dropped = -(-units * layer.directions // 8) if layer.dropout else 0
    return _ALIGNMENT + _rounded(numbers) + (layer.layers - 1) * _rounded(dropped)


def _rounded(amount: int) -> int:
    return amount + -amount % 32


def _padded(tensor: Any) -> int:
    """The bytes of a copy, which has a multiple of eight channels."""
    batch, channels, *rest = tensor.shape
    channels += -channels % _CHANNELS
    return int(batch * channels * math.prod(rest) * tensor.element_size())
