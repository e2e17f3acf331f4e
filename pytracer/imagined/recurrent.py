"""Recurrent layers as cuDNN runs them: packed weights, a reserve for backward, and scratch.

torch sends these layers to `_cudnn_rnn`, which has no fake kernel. The tensors around cuDNN's calls
are those of ATen/native/cudnn/RNN.cpp. What cuDNN itself keeps and takes was measured.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pytracer.basics import private_torch
from pytracer.basics.private_torch import FakeTensor, without_modes
from pytracer.imagined import scratch
from pytracer.imagined.ctc import KEYS
from pytracer.imagined.known import Known

aten = torch.ops.aten
# Numbers that cuDNN keeps for each word and hidden unit of a layer, by its number of the kind.
_KEPT = {0: 1, 1: 1, 2: 5, 3: 6}
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
_ALIGNMENT = 256
LAYERS = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cuDNN's numbers


@dataclass(frozen=True)
class Layer:
    """A recurrent layer on one batch."""

    mode: int
    hidden: int
    layers: int
    directions: int
    rows: int  # words of all sequences
    batch: int
    width: int
    item: int  # bytes of a number
    dropout: float


def of_recurrent(layer: Layer) -> scratch.Scratch:
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
    own = (
        scratch.SMALL * levels + weights + (gates + 2) * wide * layer.layers + 4 * given + (2 << 20)
    )
    return scratch.Scratch(0, own + own // 2)


def kept_for_backward(layer: Layer) -> int:
    """What a recurrent layer keeps for its backward pass: its numbers, and what dropout has kept."""
    units = layer.rows * layer.hidden * layer.directions
    numbers = units * layer.item * (_KEPT[layer.mode] * layer.layers + layer.layers - 1)
    dropped = -(-units * layer.directions // 8) if layer.dropout else 0
    return _ALIGNMENT + _rounded(numbers) + (layer.layers - 1) * _rounded(dropped)


def _rounded(amount: int) -> int:
    return amount + -amount % 32


def patches() -> Iterator[tuple[Any, str, Any]]:
    """Packs the weights of a layer on the card into one tensor, as torch does there."""
    yield torch.nn.RNNBase, "flatten_parameters", _flatten(torch.nn.RNNBase.flatten_parameters)


def _flatten(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def flatten(self: Any) -> None:
        weights = [one for one in self._flat_weights if isinstance(one, torch.Tensor)]
        if not all(isinstance(one, FakeTensor) for one in weights):
            original(self)
        elif all(one.is_cuda for one in weights) and not _are_packed(weights):
            with torch.no_grad():
                for one, part in zip(weights, _parts(weights), strict=True):
                    one.data = part

    return flatten


def _are_packed(weights: list[Any]) -> bool:
    storages = [one.untyped_storage() for one in weights]
    return all(one is storages[0] for one in storages)


def _parts(weights: list[Any]) -> list[torch.Tensor]:
    """Views of one new tensor, one for each weight."""
    packed = weights[0].new_empty(sum(one.numel() for one in weights))
    parts = packed.split([one.numel() for one in weights])
    return [part.view(one.shape) for part, one in zip(parts, weights, strict=True)]


# ---------------------------------------------------------------- the layers' own operators


def place(library: Any, is_fake: Callable[[Any], bool]) -> None:
    """Sends the layers of fake tensors on the card to cuDNN's operator."""
    for name in LAYERS:
        library.impl(f"{name}.input", _of_rows(name, is_fake), "AutogradCUDA")
        library.impl(f"{name}.data", _of_packed(name, is_fake), "AutogradCUDA")


_BY_POINTER = (aten._pad_packed_sequence.default, aten._pack_padded_sequence_backward.default)


def place_packing(library: Any, known: Known) -> None:
    """Gives memory to the lengths of sequences, which torch reads and writes by pointer."""
    for operator in _BY_POINTER:

        def kernel(*args: Any, operator: Any = operator) -> Any:
            with known.grounding():
                return operator._op_dk(_composite(), *args)

        for key in KEYS:
            library.impl(operator.name().removeprefix("aten::"), kernel, key)


def _of_rows(name: str, is_fake: Callable[[Any], bool]) -> Callable[..., Any]:
    original = getattr(aten, name).input

    def kernel(input_: Any, state: Any, weights: Any, *rest: Any) -> Any:
        if not is_fake(input_):
            return original._op_dk(_composite(), input_, state, weights, *rest)
        biases, layers, dropout, train, both, batch_first = rest
        return _run(
            name, input_, [], state, weights, biases, layers, dropout, train, both, batch_first
        )

    return kernel


def _of_packed(name: str, is_fake: Callable[[Any], bool]) -> Callable[..., Any]:
    original = getattr(aten, name).data

    def kernel(data: Any, sizes: Any, state: Any, weights: Any, *rest: Any) -> Any:
        if not is_fake(data):
            return original._op_dk(_composite(), data, sizes, state, weights, *rest)
        biases, layers, dropout, train, both = rest
        lengths = [int(one) for one in sizes.tolist()]
        return _run(
            name, data, lengths, state, weights, biases, layers, dropout, train, both, False
        )

    return kernel


def _composite() -> Any:
    return private_torch.dispatch_keys.CompositeImplicitAutograd


def _run(
    name: str,
    given: Any,
    sizes: list[int],
    state: Any,
    weights: Any,
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both: bool,
    batch_first: bool,
) -> Any:
    hx, cx = (state[0], state[1]) if name == "lstm" else (state, None)
    packed = None
    if _are_packed(weights):
        packed = weights[0].detach().as_strided((sum(one.numel() for one in weights),), (1,), 0)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        given, hx = given.to(dtype), hx.to(dtype)
        cx = None if cx is None else cx.to(dtype)
        weights, packed = [one.to(dtype) for one in weights], None
    hidden = (hx if cx is None else cx).shape[2]
    projected = hx.shape[2] if hx.shape[2] != hidden else 0
    with torch.autocast("cuda", enabled=False):
        output, hy, cy, _, _ = aten._cudnn_rnn(
            given,
            weights,
            4 if biases else 2,
            packed,
            hx,
            cx,
            LAYERS[name],
            hidden,
            projected,
            layers,
            batch_first,
            dropout,
            train,
            both,
            sizes,
            None,
        )
    return (output, hy, cy) if name == "lstm" else (output, hy)


def pack(args: tuple[Any, ...], known: Known) -> Any:
    """Packs sequences of known lengths into one: rows, and how many there are at each position."""
    given, lengths = args[0], known.value_of(args[1])
    if lengths is None or known.is_guess(args[1]):
        return None
    with without_modes(), torch.no_grad():
        like = torch.empty((*given.shape[:2], 1), device="cpu")
        rows, sizes = aten._pack_padded_sequence(like, lengths, *args[2:])
    packed = given.new_empty((rows.shape[0], *given.shape[2:]))
    counts = torch.empty(sizes.shape, dtype=sizes.dtype)
    known.ground(counts, sizes)
    return packed, counts


# ---------------------------------------------------------------- cuDNN's operator


def kernels(
    take: Callable[[scratch.Scratch], None], state: scratch.Scratch | None
) -> dict[Any, Callable[..., Any]]:
    """Fake kernels of the operators. `take`: takes the scratch of a call. `state`: dropout's."""

    def forward(*args: Any) -> Any:
        dropout, train = args[11:13]
        if state is not None and dropout and train:
            take(state)
        return _forward(args, take)

    return {
        aten._cudnn_rnn.default: forward,
        aten._cudnn_rnn_backward.default: lambda *args: _backward(args, take),
    }


def _forward(args: tuple[Any, ...], take: Callable[[scratch.Scratch], None]) -> Any:
    given, weights, _, packed, hx, cx, mode, hidden, projected, layers, batch_first = args[:11]
    dropout, train, both, sizes, _ = args[11:]
    if batch_first:
        given = given.transpose(0, 1).contiguous()
    layer = _layer(given, mode, hidden, layers, both, sizes, dropout)
    wide = (projected or hidden) * layer.directions
    output = given.new_empty((*given.shape[:-1], wide))
    hy = hx.new_empty(hx.shape)
    cy = given.new_empty(0) if cx is None else cx.new_empty(cx.shape)
    if packed is None:
        packed = given.new_empty(sum(one.numel() for one in weights))
    kept = kept_for_backward(layer) if train else 0
    reserve = given.new_empty(kept, dtype=torch.uint8)
    take(of_recurrent(layer))
    return output.transpose(0, 1) if batch_first else output, hy, cy, reserve, packed


def _backward(args: tuple[Any, ...], take: Callable[[scratch.Scratch], None]) -> Any:
    given, weights, _, packed, hx, cx, output, d_output, d_hy, d_cy = args[:10]
    mode, hidden, _, layers, batch_first, dropout, _, both, sizes, _, _, mask = args[10:]
    d_output = torch.zeros_like(output) if d_output is None else d_output
    d_hy = torch.zeros_like(hx) if d_hy is None else d_hy
    d_cy = torch.zeros_like(cx) if d_cy is None and cx is not None else d_cy
    if batch_first:
        given = given.transpose(0, 1).contiguous()
        d_output = d_output.transpose(0, 1).contiguous()
    layer = _layer(given, mode, hidden, layers, both, sizes, dropout)
    d_given = given.new_empty(given.shape)
    d_hx = hx.new_empty(hx.shape)
    d_cx = None if cx is None else cx.new_empty(cx.shape)
    d_weights = []
    if mask[3]:
        buffer = packed.new_empty(sum(one.numel() for one in weights))
        parts = buffer.split([one.numel() for one in weights])
        d_weights = [part.view(one.shape) for part, one in zip(parts, weights, strict=True)]
    take(of_recurrent(layer))
    if batch_first:
        d_given = d_given.transpose(0, 1)
    return d_given, d_hx, d_cx, d_weights


def _layer(
    given: Any, mode: int, hidden: int, layers: int, both: bool, sizes: Any, dropout: float
) -> Layer:
    rows = given.shape[0] if sizes else given.shape[0] * given.shape[1]
    return Layer(
        mode=mode,
        hidden=hidden,
        layers=layers,
        directions=2 if both else 1,
        rows=rows,
        batch=sizes[0] if sizes else given.shape[1],
        width=given.shape[-1],
        item=given.element_size(),
        dropout=dropout,
    )
