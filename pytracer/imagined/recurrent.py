"""Recurrent layers as cuDNN runs them: packed weights, a reserve for backward, and scratch.

torch sends these layers to `_cudnn_rnn`, which has no fake kernel. The tensors around cuDNN's calls
are those of ATen/native/cudnn/RNN.cpp. What cuDNN itself keeps and takes is in `recurrent_scratch`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytracer.basics import private_torch
from pytracer.basics.private_torch import FakeTensor, without_modes
from pytracer.imagined import scratch
from pytracer.imagined.ctc import KEYS
from pytracer.imagined.known import Known
from pytracer.imagined.recurrent_scratch import (
    GRU,
    LSTM,
    RELU,
    TANH,
    Layer,
    at_most,
    kept_for_backward,
    of_recurrent,
)

aten = torch.ops.aten
_ASKED = (9, 0)  # the capability of the card whose cuDNN was asked
LAYERS = {"rnn_relu": RELU, "rnn_tanh": TANH, "lstm": LSTM, "gru": GRU}


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


class Kernels:
    """Fake kernels of cuDNN's operators, which take memory in the order of RNN.cpp."""

    def __init__(
        self,
        take: Callable[[scratch.Scratch], None],
        back: Callable[[list[Any]], None],
        card: Any,
    ) -> None:
        """Runs nothing yet.

        Args:
            take: takes scratch now, and gives it back.
            back: gives memory to tensors now.
            card: the card's attention, if there is one.
        """
        self._take, self._back = take, back
        self._states = card and scratch.of_dropout(card.processors, card.capability)
        self._is_asked = card is not None and card.capability == _ASKED
        self.run: dict[Any, Callable[..., Any]] = {
            aten._cudnn_rnn.default: self._forward,
            aten._cudnn_rnn_backward.default: self._backward,
        }

    def _scratch(self, layer: Layer, *, backward: bool) -> scratch.Scratch:
        return of_recurrent(layer, backward=backward) if self._is_asked else at_most(layer)

    def _forward(self, *args: Any) -> Any:
        given, weights, _, packed, hx, cx, mode, hidden, projected, layers, batch_first = args[:11]
        dropout, train, both, sizes, _ = args[11:]
        if self._states is not None and dropout and train:
            self._take(self._states)
        given, copied = _by_step(given, batch_first)
        self._back(copied)
        layer = _layer(given, mode, hidden, projected, layers, both, sizes, dropout, train)
        wide = (projected or hidden) * layer.directions
        output = given.new_empty((*given.shape[:-1], wide))
        hy = hx.new_empty(hx.shape)
        cy = given.new_empty(0) if cx is None else cx.new_empty(cx.shape)
        self._back([output, hy, cy])
        if packed is None:
            packed = given.new_empty(sum(one.numel() for one in weights))
            self._back([packed])
        taken = self._scratch(layer, backward=False)
        held = scratch.blocks([taken.least])
        reserve = given.new_empty(kept_for_backward(layer) if train else 0, dtype=torch.uint8)
        self._back([*held, reserve])
        del held
        if taken.least < taken.most:
            self._take(taken)
        return output.transpose(0, 1) if batch_first else output, hy, cy, reserve, packed

    def _backward(self, *args: Any) -> Any:
        given, weights, _, packed, hx, cx, output, d_output, d_hy, d_cy = args[:10]
        mode, hidden, projected, layers, batch_first, dropout, _, both, sizes, _, _, mask = args[
            10:
        ]
        pairs = ((d_output, output), (d_hy, hx), (d_cy, cx))
        zeros = [torch.zeros_like(one) for d, one in pairs if d is None and one is not None]
        self._back(zeros)
        turned = _by_step(output if d_output is None else d_output, batch_first)[1]
        words = given
        given, copied = _by_step(words, batch_first)
        self._back([*copied, *turned])
        layer = _layer(given, mode, hidden, projected, layers, both, sizes, dropout, True)
        taken = self._scratch(layer, backward=True)
        d_given = given.new_empty(given.shape)
        d_hx = hx.new_empty(hx.shape)
        d_cx = None if cx is None else cx.new_empty(cx.shape)
        self._back([one for one in (d_given, d_hx, d_cx) if one is not None])
        self._take(taken)
        del given, copied, turned
        d_weights = []
        if mask[3]:  # a second call, which copies the words again
            again = _by_step(words, batch_first)[1]
            self._back(again)
            buffer = packed.new_empty(sum(one.numel() for one in weights))
            self._back([buffer])
            self._take(taken)
            parts = buffer.split([one.numel() for one in weights])
            d_weights = [part.view(one.shape) for part, one in zip(parts, weights, strict=True)]
        if batch_first:
            d_given = d_given.transpose(0, 1)
        return d_given, d_hx, d_cx, d_weights


def _by_step(one: Any, batch_first: bool) -> tuple[Any, list[Any]]:
    """The words of all sequences, one step after the other, and the copy that this takes, if any."""
    turned = one.transpose(0, 1) if batch_first else one
    whole = turned.contiguous()
    return whole, [] if turned.is_contiguous() else [whole]


def _layer(
    given: Any,
    mode: int,
    hidden: int,
    projected: int,
    layers: int,
    both: bool,
    sizes: Any,
    dropout: float,
    train: bool,
) -> Layer:
    rows = given.shape[0] if sizes else given.shape[0] * given.shape[1]
    return Layer(
        mode=mode,
        hidden=hidden,
        layers=layers,
        directions=2 if both else 1,
        rows=rows,
        length=len(sizes) if sizes else given.shape[0],
        batch=sizes[0] if sizes else given.shape[1],
        width=given.shape[-1],
        item=given.element_size(),
        dropout=dropout,
        trains=train,
        is_bfloat16=given.dtype == torch.bfloat16,
        is_packed=bool(sizes),
        is_projected=bool(projected),
    )
