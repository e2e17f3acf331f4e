"""What cuDNN takes and keeps for recurrent layers, from the allocator of a card.

cuDNN 9.19 answered for 60,000 layers on an H100 (`benchmarks/cudnn_layers.py`). The rules here give each of its
answers, to within what its parts are aligned by.

The scratch holds the weights in cuDNN's order, 8 MiB for each layer and direction, the states of each sequence, and
what its two kinds of passes need for each word. A pass for training has room for both, forward and backward.
"""

from dataclasses import dataclass

from pytracer.imagined.scratch import SMALL, Scratch

RELU, TANH, LSTM, GRU = range(4)  # cuDNN's numbers
_GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}
_KEPT = {RELU: 1, TANH: 1, LSTM: 5, GRU: 6}  # numbers for each word and unit, for backward
_ALIGNMENT = 256
_PAIR = 2  # directions
# The most hidden units of a layer whose kernels keep its weights on the card's processors, by torch's
# use_rnn_persist_small_h: of a forward pass, and of a backward pass.
_SMALL_LAYER = {RELU: (384, 256), TANH: (384, 256), LSTM: (192, 128), GRU: (192, 128)}
_WIDEST, _TILE, _MOST_SEQUENCES = (
    1024,
    128,
    128,
)  # of one layer in float16, by use_persist_*_heuristics
# Units for each word that the backward pass of such a layer takes beside those of others.
_MORE = {RELU: 9, TANH: 9, LSTM: 12, GRU: 14}


@dataclass(frozen=True)
class Layer:
    """Recurrent layers on one batch."""

    mode: int
    hidden: int
    layers: int
    directions: int
    rows: int  # words of all sequences
    length: int  # words of the longest sequence
    batch: int
    width: int
    item: int  # bytes of a number
    dropout: float
    trains: bool = True
    is_bfloat16: bool = False
    is_packed: bool = False  # no sequence is padded
    is_projected: bool = False

    @property
    def is_known(self) -> bool:
        """Whether cuDNN was asked about such layers."""
        is_double = self.item > 4
        is_uneven = self.is_packed and self.rows != self.length * self.batch
        return not (self.is_projected or is_double or is_uneven)


def of_recurrent(layer: Layer, *, backward: bool = False) -> Scratch:
    """The scratch of a pass."""
    is_small, is_static = _is_small(layer, backward=backward), _is_static(layer)
    if not layer.is_known or (is_static and layer.mode != LSTM):
        return at_most(layer)
    # In bfloat16 cuDNN has no such kernels, and takes what it does for others.
    taken = needed(layer, is_resident=not layer.is_bfloat16 and (is_small or is_static))
    return Scratch(taken, taken)


def at_most(layer: Layer) -> Scratch:
    """The bounds of the scratch of layers that cuDNN was not asked about. No measured layer takes 0.8 times that."""
    gates, levels = _GATES[layer.mode], layer.layers * layer.directions
    wide = layer.rows * layer.hidden * layer.directions * layer.item
    given = layer.rows * layer.width * layer.item
    bias = 2 * gates * layer.hidden * levels * layer.item
    weights = _weights(layer) * layer.item + bias
    own = SMALL * levels + weights + (gates + 2) * wide * layer.layers + 4 * given + (2 << 20)
    return Scratch(0, own + own // 2)


def _is_small(layer: Layer, *, backward: bool) -> bool:
    return not layer.is_packed and layer.hidden <= _SMALL_LAYER[layer.mode][backward]


def _is_static(layer: Layer) -> bool:
    """Whether torch asks for kernels that keep the weights of one large layer in float16."""
    return (
        layer.item == 2
        and not (layer.is_bfloat16 or layer.is_packed or layer.mode == GRU)
        and layer.layers == layer.directions == 1
        and layer.hidden <= _WIDEST
        and layer.hidden % _TILE == layer.width % _TILE == 0
        and layer.batch % 8 == 0
        and layer.batch <= _MOST_SEQUENCES
    )


def _weights(layer: Layer) -> int:
    """How many weights there are, without biases."""
    hidden, directions = layer.hidden, layer.directions
    later = (layer.layers - 1) * (hidden * directions + hidden)
    return _GATES[layer.mode] * hidden * directions * (layer.width + hidden + later)


def needed(layer: Layer, *, is_resident: bool) -> int:
    """The bytes of a pass. `is_resident`: its kernels keep the weights on the processors."""
    words, wide = layer.length * layer.batch, max(layer.width, layer.hidden)
    gates, is_pair = _GATES[layer.mode], layer.directions == _PAIR
    # Forward: the gates of each word. Backward: also its gradients.
    forward = 2 * gates + 4 if is_pair else gates + bool(layer.dropout)
    if is_pair:
        backward = words * (4 * wide + 2 * layer.hidden * (1 + (layer.layers > 1)))
    elif layer.layers == 1:
        backward = words * (wide + layer.hidden)
    else:
        steps = layer.length * 2 if is_resident else min(layer.length, _steps(layer))
        backward = words * wide + layer.batch * steps * layer.hidden
    if is_resident:
        forward += 4 * gates
        backward += words * layer.hidden * _MORE[layer.mode]
    states = layer.batch * layer.hidden * layer.layers
    of_forward, of_backward = _states(layer, is_resident=is_resident)
    forward = words * layer.hidden * forward + of_forward * states
    backward += of_backward * states
    padded = 0
    if not layer.is_packed:  # both sides of each pass without gaps, and the states
        padded = words * (layer.width + layer.directions * layer.hidden)
        padded += (4 if layer.mode == LSTM else 2) * layer.directions * states
    taken = max(forward + padded, backward + 2 * padded) if layer.trains else forward + padded
    lengths = 0 if layer.is_packed else 8 * layer.batch
    blocks = SMALL * layer.layers * layer.directions
    return layer.item * (_weights(layer) + taken) + blocks + lengths + _ALIGNMENT


def _steps(layer: Layer) -> int:
    """How many steps of a sequence several layers work on at once."""
    if layer.batch > 16 and layer.length < 128:
        return 4 * (layer.layers + 2)
    return (32 if layer.batch == 1 else 16 if layer.batch <= 8 else 8) * (layer.layers + 1)


def _states(layer: Layer, *, is_resident: bool) -> tuple[int, int]:
    """How many numbers for each unit of a sequence there are forward and backward."""
    is_pair = layer.directions == _PAIR
    if layer.mode == LSTM:
        if is_resident:
            return (10, 10) if is_pair else (4, 4)
        return (16, 10) if is_pair else (6, 3)
    if is_resident:
        return (6, 6) if is_pair else (2, 2)
    forward = {GRU: (10, 3)}.get(layer.mode, (6, 1))
    return (forward[0], 6) if is_pair else (forward[1], 1)


def kept_for_backward(layer: Layer) -> int:
    """What layers keep for their backward pass: their numbers, and what dropout has kept."""
    units = layer.rows * layer.hidden * layer.directions
    numbers = units * layer.item * (_KEPT[layer.mode] * layer.layers + layer.layers - 1)
    dropped = -(-units * layer.directions // 8) if layer.dropout else 0
    return _ALIGNMENT + _rounded(numbers) + (layer.layers - 1) * _rounded(dropped)


def _rounded(amount: int) -> int:
    return amount + -amount % 32
