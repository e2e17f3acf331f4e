"""Measures the scratch that cuDNN takes from torch's allocator, by operator, shape, dtype and layout.

    python benchmarks/cudnn_scratch.py --out benchmarks/results      # needs a GPU, about 3 minutes
    python benchmarks/cudnn_scratch.py --out benchmarks/results --drawn 240 --seed 1    # other convolutions

For convolutions: the bytes beyond the results of the forward pass, of the gradient of the input and
of the gradient of the weight. For recurrent layers: the packed weights, the reserve that stays for
backward, and the scratch of both passes. Imagined runs bound the scratch by these rows.
"""

import argparse
import functools
import gc
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.imagine import write  # noqa: E402

LONGEST = 160  # seconds, after which the rows that are left, which are less common, are skipped
KEPT_EVERY = 20  # rows
aten = torch.ops.aten


class Shape(NamedTuple):
    """A convolution: its input, its weight, and how it moves."""

    input: tuple[int, ...]
    weight: tuple[int, ...]  # outputs, inputs per group, kernel
    stride: int = 1
    padding: int = 0
    groups: int = 1
    dilation: int = 1
    transposed: bool = False


def _shapes() -> Iterator[Shape]:
    for patch in (16, 14, 32):  # ViT
        size = 224 // patch * patch
        yield Shape((32, 3, size, size), (768, 3, patch, patch), patch)
    for batch, width, size in ((8, 64, 128), (2, 32, 256)):  # U-Net
        yield Shape((batch, 3, size, size), (width, 3, 3, 3), 1, 1)
        yield Shape((batch, width, size // 2, size // 2), (2 * width, width, 3, 3), 1, 1)
        half = 2 * width
        yield Shape((batch, half, size // 4, size // 4), (2 * half, half, 3, 3), 1, 1)
        yield Shape((batch, 6 * width, size // 2, size // 2), (half, 6 * width, 3, 3), 1, 1)
        yield Shape((batch, 3 * width, size, size), (width, 3 * width, 3, 3), 1, 1)
        yield Shape((batch, width, size, size), (3, width, 1, 1))
    yield Shape((32, 3, 224, 224), (64, 3, 7, 7), 2, 3)  # ResNet
    for inside, wide, size in ((64, 256, 56), (128, 512, 28), (256, 1024, 14), (512, 2048, 7)):
        yield Shape((32, inside, size, size), (inside, inside, 3, 3), 1, 1)
        yield Shape((32, inside, 2 * size, 2 * size), (inside, inside, 3, 3), 2, 1)
        yield Shape((32, wide, size, size), (inside, wide, 1, 1))
        yield Shape((32, inside, size, size), (wide, inside, 1, 1))
        yield Shape((32, wide // 2, 2 * size, 2 * size), (wide, wide // 2, 1, 1), 2)
    yield Shape((32, 3, 224, 224), (96, 3, 4, 4), 4)  # ConvNeXt
    for width, size in ((96, 56), (192, 28), (384, 14), (768, 7)):
        yield Shape((32, width, size, size), (width, 1, 7, 7), 1, 3, width)
        yield Shape((32, width, size, size), (2 * width, width, 2, 2), 2)
    for width, size in ((320, 64), (640, 32), (1280, 16), (1280, 8)):  # diffusion
        yield Shape((4, width, size, size), (width, width, 3, 3), 1, 1)
        yield Shape((4, 2 * width, size, size), (width, 2 * width, 3, 3), 1, 1)
        yield Shape((4, width, size, size), (width, width, 1, 1))
    yield Shape((4, 4, 64, 64), (320, 4, 3, 3), 1, 1)
    for inside, out, stride in ((80, 384, 1), (384, 384, 2), (1280, 1280, 2)):  # Whisper
        yield Shape((4, inside, 3000), (out, inside, 3), stride, 1)
    yield Shape((4, 1024, 499), (1024, 64, 128), 1, 64, 16)  # wav2vec
    yield Shape((4, 1024, 64), (1024, 1, 4), 1, 3, 1024)  # Mamba
    for inside, out, size in ((3, 64, 224), (64, 128, 112), (256, 512, 28), (512, 512, 14)):  # VGG
        yield Shape((16, inside, size, size), (out, inside, 3, 3), 1, 1)
    for width, size, kernel in ((32, 112, 3), (144, 56, 5), (672, 14, 5)):  # EfficientNet
        yield Shape((32, width, size, size), (width, 1, kernel, kernel), 1, kernel // 2, width)
    yield Shape((2, 16, 16, 64, 64), (32, 16, 3, 3, 3), 1, 1)  # video
    yield Shape((2, 64, 8, 32, 32), (64, 64, 3, 3, 3), 1, 1)
    yield Shape((2, 3, 16, 112, 112), (64, 3, 3, 7, 7), 1, 3)
    yield Shape((8, 256, 32, 32), (256, 128, 2, 2), 2, transposed=True)
    yield Shape((8, 512, 4, 4), (512, 256, 4, 4), 2, 1, transposed=True)
    yield Shape((4, 256, 64, 64), (256, 256, 3, 3), 1, 2, dilation=2)
    yield Shape((16, 256, 28, 28), (256, 8, 3, 3), 1, 1, 32)  # ResNeXt
    yield Shape((1, 64, 512, 512), (64, 64, 3, 3), 1, 1)
    yield Shape((1, 128, 1024, 1024), (128, 128, 3, 3), 1, 1)


_KINDS = ("plain", "plain", "plain", "point", "grouped", "depthwise", "transposed", "dilated")
_LARGEST = 1 << 27  # elements of an input or of a result
_OF_DRAWN = (  # dtype, and whether TensorFloat-32 may be used
    (torch.float32, True),
    (torch.float32, False),
    (torch.float16, True),
    (torch.bfloat16, True),
)


def drawn(seed: int, count: int) -> Iterator[tuple[Shape, torch.dtype, bool, bool]]:
    """Yields convolutions drawn at random: the shape, the dtype, channels last, and TensorFloat-32."""
    chance = random.Random(seed)
    while count:
        shape = _drawn(chance)
        dtype, tf32 = chance.choice(_OF_DRAWN)
        last = chance.random() < 0.5
        if shape is not None:
            count -= 1
            yield shape, dtype, last, tf32


def _drawn(chance: random.Random) -> Shape | None:
    """A convolution of some kind, or None where it is too large or has no result."""
    ways, kind = chance.choice((1, 2, 2, 2, 3)), chance.choice(_KINDS)
    size = chance.choice(
        {1: (64, 300, 1500, 4000), 2: (7, 14, 28, 33, 56, 112), 3: (8, 12, 16, 32)}[ways]
    )
    batch = chance.choice((1, 2, 3, 4, 8, 16, 32))
    inside, out = (
        chance.choice((3, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)) for _ in "io"
    )
    kernel, stride, dilation, groups = (
        chance.choice((2, 3, 3, 3, 4, 5, 7)),
        chance.choice((1, 1, 2)),
        1,
        1,
    )
    if kind == "point":
        kernel = 1
    elif kind == "grouped":
        inside, out = (one - one % 8 or 16 for one in (inside, out))
        groups = chance.choice((2, 4, 8))
    elif kind == "depthwise":
        out = groups = inside
    elif kind == "dilated":
        dilation = 2
    transposed = kind == "transposed"
    padding = chance.choice((0, dilation * (kernel - 1) // 2))
    channels = (inside, out // groups) if transposed else (out, inside // groups)
    shape = Shape(
        (batch, inside, *[size] * ways),
        (*channels, *[kernel] * ways),
        stride,
        padding,
        groups,
        dilation,
        transposed,
    )
    reach = dilation * (kernel - 1)
    length = (
        (size - 1) * stride - 2 * padding + reach + 1 if transposed else size + 2 * padding - reach
    )
    elements = max(inside * size**ways, out * max(length, 0) ** ways) * batch
    return (
        shape
        if length > 0 and elements <= _LARGEST and math.prod(shape.weight) <= _LARGEST
        else None
    )


def scratch(run: Callable[[], Any]) -> int:
    """Runs it twice, and returns the bytes that the second run takes beyond its results."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        result = run()
        stats = torch.cuda.memory_stats()
        beyond = stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"]
        del result
    return int(beyond)


def convolution(shape: Shape, dtype: torch.dtype, last: bool) -> dict[str, Any]:
    """Returns the scratch of one convolution's three passes."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape.input))
    format_ = layout if last and layout else torch.contiguous_format
    x = torch.randn(shape.input, device="cuda", dtype=dtype).to(memory_format=format_)
    w = torch.randn(shape.weight, device="cuda", dtype=dtype).to(memory_format=format_)
    ways = len(shape.input) - 2
    rest = (
        [shape.stride] * ways,
        [shape.padding] * ways,
        [shape.dilation] * ways,
        shape.transposed,
        [0] * ways,
        shape.groups,
    )
    y = aten.convolution(x, w, None, *rest)
    gradient = torch.randn_like(y)
    return {
        "of_forward": scratch(lambda: aten.convolution(x, w, None, *rest)),
        "of_input": scratch(
            lambda: aten.convolution_backward(gradient, x, w, None, *rest, [True, False, False])
        ),
        "of_weight": scratch(
            lambda: aten.convolution_backward(gradient, x, w, None, *rest, [False, True, False])
        ),
    }


# ---------------------------------------------------------------- recurrent layers

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
}
# input, hidden, layers, both directions, batch, length, dropout
SIZES = [
    (512, 1024, 2, False, 16, 128, 0.0),
    (512, 1024, 1, False, 16, 128, 0.0),
    (512, 1024, 3, False, 16, 128, 0.0),
    (512, 1024, 2, True, 16, 128, 0.0),
    (512, 1024, 1, True, 16, 128, 0.0),
    (512, 1024, 2, False, 16, 128, 0.2),
    (512, 1024, 1, False, 8, 128, 0.0),
    (512, 1024, 1, False, 32, 128, 0.0),
    (512, 1024, 1, False, 16, 64, 0.0),
    (512, 1024, 1, False, 16, 256, 0.0),
    (256, 1024, 1, False, 16, 128, 0.0),
    (512, 512, 1, False, 16, 128, 0.0),
    (512, 256, 2, False, 16, 128, 0.0),
    (128, 128, 2, False, 64, 50, 0.0),
    (100, 200, 2, True, 20, 35, 0.5),
    (39, 77, 1, False, 3, 17, 0.0),
    (39, 77, 2, True, 3, 17, 0.3),
    (64, 64, 1, False, 1, 1000, 0.0),
    (650, 650, 2, False, 20, 35, 0.5),
    (1024, 2048, 1, False, 4, 16, 0.0),
]


def recurrent(kind: str, sizes: tuple[Any, ...], dtype: torch.dtype) -> dict[str, Any]:
    """Returns what one recurrent layer keeps, and the scratch of its passes."""
    width, hidden, layers, both, batch, length, dropout = sizes
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    layer = KINDS[kind](width, hidden, layers, dropout=dropout, bidirectional=both)
    layer = layer.to(device="cuda", dtype=dtype)
    packed = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    x = torch.randn(length, batch, width, device="cuda", dtype=dtype, requires_grad=True)
    y, _ = layer(x)
    reserve = [
        one.numel() * one.element_size()
        for name in dir(y.grad_fn)
        if name.startswith("_saved_result")
        and isinstance(one := getattr(y.grad_fn, name), torch.Tensor)
    ]
    forward = scratch(lambda: layer(x))
    gradient = torch.randn_like(y)

    def backward() -> Any:
        layer.zero_grad()
        x.grad = None
        torch.autograd.backward(y, gradient, retain_graph=True)

    weights = sum(one.numel() * one.element_size() for one in layer.parameters())
    return {
        "weights": weights,
        "packed": packed,
        "saved": reserve,
        "forward": forward,
        "backward": scratch(backward),
    }


Row = tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]


def drawn_rows(seed: int, count: int) -> Iterator[Row]:
    """Yields the rows of convolutions drawn at random."""
    for shape, dtype, last, tf32 in drawn(seed, count):
        row = {**shape._asdict(), "dtype": _name(dtype), "last": last, "tf32": tf32}
        yield "convolutions", row, functools.partial(_with_tf32, tf32, shape, dtype, last)


def _with_tf32(tf32: bool, shape: Shape, dtype: torch.dtype, last: bool) -> dict[str, Any]:
    torch.backends.cudnn.allow_tf32 = tf32
    return convolution(shape, dtype, last)


def rows() -> Iterator[Row]:
    """Yields every row's kind, its description, and the function that measures it."""
    names = ("input", "hidden", "layers", "both", "batch", "length", "dropout")
    for dtype, kind, sizes in itertools.product((torch.float32, torch.bfloat16), KINDS, SIZES):
        row = {"kind": kind, "dtype": _name(dtype), **dict(zip(names, sizes, strict=True))}
        yield "recurrent", row, functools.partial(recurrent, kind, sizes, dtype)
    ways = itertools.product((torch.float32, torch.bfloat16, torch.float16), (False, True))
    for (dtype, last), shape in itertools.product(ways, list(_shapes())):
        row = {**shape._asdict(), "dtype": _name(dtype), "last": last}
        yield "convolutions", row, functools.partial(convolution, shape, dtype, last)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=LONGEST)
    parser.add_argument(
        "--drawn", type=int, default=0, help="so many convolutions, drawn at random"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    given = drawn_rows(options.seed, options.drawn) if options.drawn else rows()
    name = f"cudnn-drawn-{options.seed}" if options.drawn else "cudnn-scratch"
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # from here on the allocator counts
    found: dict[str, list[dict[str, Any]]] = {"recurrent": [], "convolutions": []}
    end = time.perf_counter() + options.seconds
    for kind, row, measure in given:
        if time.perf_counter() > end:
            print(f"stopped after {options.seconds} s", flush=True)
            break
        try:
            found[kind].append({**row, **measure()})
        except Exception as problem:
            found[kind].append({**row, "problem": str(problem).partition("\n")[0]})
        gc.collect()
        torch.cuda.empty_cache()
        if sum(map(len, found.values())) % KEPT_EVERY == 0:
            write(options.out, name, found)
    print({kind: len(measured) for kind, measured in found.items()}, flush=True)
    write(options.out, name, found)


if __name__ == "__main__":
    main()
