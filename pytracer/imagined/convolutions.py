"""What a convolution takes from torch's allocator on a card beside its result.

torch asks cuDNN for a plan, and gives it the scratch that the plan wants. cuDNN says the same without a
card, where it is installed. Two parts of it are known on the card only, so there the scratch may be an interval:

- how cuBLASLt splits a product, which is a kernel of one pixel that moves by one;
- how many clusters of blocks run at once, which persistent kernels ask (`persistent`).

Of torch, these are ConvShared.cpp, Conv_v8.cpp and Convolution.cpp. Without cuDNN's answer all is an interval.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from pytracer.basics import private_torch
from pytracer.imagined import cudnn, persistent
from pytracer.imagined.cards import Card
from pytracer.imagined.patches import replaced
from pytracer.imagined.scratch import SMALL, Scratch, aten

_CHANNELS = 8
_MOST_INDEX = 2**31 - 1
_IMAGE, _VIDEO = 4, 5  # dimensions
_HALVES = ("float16", "bfloat16")
_FEW_CHANNELS, _NARROW = 32, 7  # with less, torch does a pass by channel itself
_OF_CUBLASLT = 32 << 20  # at most
_LITTLE = 512  # bytes that the allocator gives anyway
_MANY_PIXELS = 1 << 14  # of all images: with channels last cuBLASLt splits no product over channels
_FEW_TO_ADD = 1 << 11  # pixels of all images: a weight's gradient in half precision is not split
# What an H100 says of itself. The answers depend on the capability only.
_PROPERTIES = (
    '{"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,'
    '"multiProcessorCount":132,"warpSize":32,"maxSharedMemoryPerBlock":49152,'
    '"maxSharedMemoryPerBlockOptin":232448,"reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,'
    '"maxCtasPerSM":32,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,"pciDeviceId":6,"isTccDriver":0,'
    '"supportCoopLaunch":1,"totalGlobalMem":85017493504,"smClockRateKHz":1980000,"memClockRateKHz":2619000,'
    '"l2CacheSize":52428800,"cudaDeviceId":0,"deviceVer":900,"driverVer":13000,'
    '"deviceName":"NVIDIA H100 80GB HBM3"}'
)
# How many clusters of so many blocks run at once if each fills a processor, as
# cuOccupancyMaxActiveClusters of an H100 said ("NVIDIA H100 80GB HBM3", driver 580.159).
_CLUSTERS = dict(enumerate((132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7), start=1))
_ANYWHERE = 2  # blocks of a cluster that fit on any pair of processors
# In half precision two short blocks with a small tile fit on a processor. So many clusters of eight ran.
_SMALL_TILE, _MEASURED_SMALL, _CLUSTERS_OF_SMALL = 1, 8, (28, 29)
_ASKED_WITH = 18  # processors that cuDNN counts without a driver
_PROCESSORS = 132
_CARDS = {"H100": _CLUSTERS, "H200": {one: _CLUSTERS[one] for one in range(1, _ANYWHERE + 1)}}


@dataclass(frozen=True)
class Problem:
    """One pass, as torch hands it to cuDNN: each tensor's sizes and strides."""

    operation: str  # forward, input, weight
    dtype: str
    x: tuple[tuple[int, ...], tuple[int, ...]]
    w: tuple[tuple[int, ...], tuple[int, ...]]
    y: tuple[tuple[int, ...], tuple[int, ...]]
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    last: bool  # channels last
    tf32: bool
    deterministic: bool
    copies: tuple[int, ...] = ()  # bytes of what torch first brings into this order

    def question(self) -> dict[str, Any]:
        """For cuDNN."""
        names = (
            "operation",
            "dtype",
            "x",
            "w",
            "y",
            "padding",
            "stride",
            "dilation",
            "tf32",
            "deterministic",
        )
        return {"card": _PROPERTIES, **{name: getattr(self, name) for name in names}}

    @property
    def kernel(self) -> tuple[int, ...]:
        """The sizes of the kernel."""
        return self.w[0][2:]

    @property
    def by_channel(self) -> bool:
        """Whether each channel is on its own."""
        return self.groups > 1 and self.w[0][1] == 1


class Convolutions:
    """The scratch of a run's convolutions."""

    def __init__(self, card: Card | None, library: cudnn.Cudnn | None) -> None:
        """Starts cuDNN when the first convolution runs.

        Args:
            card: the imagined card; None is a host.
            library: cuDNN, if it is installed.
        """
        self._clusters = _CARDS.get(card.name) if card else None
        self._library = library if self._clusters else None
        self._has_started = False
        self.passes = self.exact = 0

    def taken(self, func: Any, args: tuple[Any, ...], result: Any) -> list[tuple[Any, Scratch]]:
        """What the operator makes, one after the other, and the scratch for each."""
        if func is aten.convolution.default:
            x, w, _, *how, groups = args
            made, operations = [result], ["forward"]
        else:
            grad, x, w, _, *how, groups, _ = args
            made, operations, result = result[:2], ["input", "weight"], grad
        tensors = (x, w, result)
        # What torch brings into the kernel's order, and keeps until the pass ends.
        copied = {"forward": "xw", "input": "xyw" if made[-1] is not None else "yw", "weight": "xy"}
        return [
            (one, self._of_pass(operation, tensors, how, groups, copied[operation]))
            for one, operation in zip(made, operations, strict=True)
            if one is not None
        ]

    def document(self) -> dict[str, Any]:
        """How many passes there were, of how many the scratch is sure, and what would make more so."""
        version = self._version() if self.passes else 0
        return {
            "passes": self.passes,
            "exact": self.exact,
            "cudnn": version,
            "advice": self._advice(),
        }

    def _advice(self) -> str:
        if not self.passes or self._clusters is None or self._version() in cudnn.MEASURED:
            return ""
        if self._library is None:
            return f"cuDNN would say most of that without a card: {cudnn.ADVICE}"
        if not self._version():
            return "A cuDNN is installed that does not load here"
        found = f"The installed cuDNN {self._version()} was never held against a card"
        return (
            found if torch.backends.cuda.is_built() else f"{found}: {cudnn.ADVICE} has one that was"
        )

    def close(self) -> None:
        """Ends cuDNN's process."""
        if self._library is not None and self._has_started:
            self._has_started = False
            self._library.close()

    def _of_pass(self, operation: str, tensors: Any, how: Any, groups: int, copied: str) -> Scratch:
        at_most = of_pass(*tensors)
        self.passes += 1
        problem = _problem(operation, tensors, how, groups, copied)
        found = None if problem is None else self.of_problem(problem, at_most.most)
        if found is None or problem is None:
            return at_most
        self.exact += found.most - found.least <= _LITTLE
        return replace(found, beside=problem.copies)

    def of_problem(self, problem: Problem, most: int) -> Scratch | None:
        """The scratch of a pass, which would take at most so many bytes; None if it is not known."""
        if self._clusters is None:
            return None
        if problem.by_channel and not problem.transposed and not _is_for_cudnn(problem):
            return Scratch(0, 0)  # torch does it itself
        return self._answer(problem)

    def _answer(self, problem: Problem) -> Scratch | None:
        """What the first plan takes that cuDNN shows without a driver."""
        if self._version() not in cudnn.MEASURED or self._library is None or self._clusters is None:
            return None
        answer = self._library.ask(problem.question())
        size, unsplit = answer.get("bytes"), answer.get("unsplit")
        if not isinstance(size, int) or not isinstance(unsplit, int):
            return None
        if answer["allowed"]:
            more = 0 if _is_whole(problem) else min(answer["allowed"], _OF_CUBLASLT)
            return Scratch(size, size + more)
        knobs = dict(answer["knobs"])
        kernel = persistent.Kernel(problem.operation, problem.dtype, knobs)
        if knobs.get(persistent.SHARES) != 0 or persistent.ACROSS not in knobs:
            return Scratch(size, size)
        if knobs[persistent.TILE] not in persistent.TILES:
            return None
        tiles, steps = kernel.tiles(problem.x[0], problem.w[0], problem.y[0], problem.groups)
        there = _ASKED_WITH - _ASKED_WITH % kernel.cluster
        copies = unsplit - kernel.plain(tiles, there)
        at_most = Scratch(copies, copies + kernel.at_most(_PROCESSORS))
        # The tiles of groups are believed only if smaller cards have them, too.
        fewer = answer.get("fewer", ()) if problem.groups > 1 else ()
        if problem.groups > 1 and kernel.is_short and kernel.cluster > _ANYWHERE:
            return at_most
        for count, taken in ((there, size), *fewer):
            least, most = kernel.scratch(tiles, steps, count)
            if not least - _LITTLE <= taken - copies <= most + _LITTLE:
                return at_most
        counts = self._counts(kernel)
        bounds = [kernel.scratch(tiles, steps, one * kernel.cluster) for one in counts]
        return Scratch(
            copies + min(least for least, _ in bounds), copies + max(most for _, most in bounds)
        )

    def _counts(self, kernel: persistent.Kernel) -> Sequence[int]:
        """How many of the kernel's clusters may run at once."""
        is_small = kernel.is_short and kernel.knobs[persistent.TILE] == _SMALL_TILE
        if is_small and kernel.cluster == _MEASURED_SMALL:
            return _CLUSTERS_OF_SMALL
        known = (self._clusters or {}).get(kernel.cluster)
        if known and (kernel.cluster <= _ANYWHERE or not is_small):
            return (known,)
        return range(1, 2 * _PROCESSORS // kernel.cluster + 1)

    def _version(self) -> int:
        if self._library is None:
            return 0
        if not self._has_started:
            self._has_started = True
            self._library.start()
        return self._library.version


def of_pass(x: Any, w: Any, y: Any) -> Scratch:
    """At most, of a pass of a convolution of `x` to `y`.

    cuDNN's kernels want other layouts, so they copy the input and the output, and for a weight's
    gradient they add up partial results. At most each is there twice, and the weight four times.
    """
    return Scratch(0, 2 * (_padded(x) + _padded(y)) + 16 * math.prod(w.shape) + SMALL)


def _padded(tensor: Any) -> int:
    """The bytes of a copy, which has a multiple of eight channels."""
    batch, channels, *rest = tensor.shape
    channels += -channels % _CHANNELS
    return int(batch * channels * math.prod(rest) * tensor.element_size())


# ---------------------------------------------------------------- what torch asks


def placed() -> AbstractContextManager[Any]:
    """Makes fake convolutions return cuDNN's layout, which a torch for the CPU does not know."""
    if torch.backends.cuda.is_built():
        return nullcontext()
    return replaced(private_torch.bindings, "_conv_determine_backend_memory_format", _layout)


def _layout(x: Any, w: Any, backend: Any) -> torch.memory_format:
    """By `cudnn_conv_suggest_memory_format` of native/ConvUtils.h. Without cuDNN the rows come last."""
    last = _LAST.get(w.dim())
    given = ((one.shape, one.stride()) for one in (x, w))
    if (
        last is None
        or not torch.backends.cudnn.enabled
        or torch.double in (x.dtype, w.dtype)
        or not any(_has_channels_last(*one) for one in given)
    ):
        return torch.contiguous_format
    return last


_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the dimensions of the weight


def _problem(operation: str, tensors: Any, how: Any, groups: int, copied: str) -> Problem | None:
    """The pass as torch hands it to cuDNN, after copies of the tensors that are named; None where it does not."""
    *moves, transposed, output_padding = how
    ways = tensors[0].dim() - 2
    stride, padding, dilation, output_padding = (
        [*one] * (ways if len(one) == 1 else 1) for one in (*moves, output_padding)
    )
    backend = torch.backends.cudnn
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    if (
        not backend.enabled
        or backend.benchmark
        or dtype not in ("float32", *_HALVES)
        or any(one.dtype != tensors[0].dtype for one in tensors)
        or any(more >= moves for more, moves in zip(output_padding, stride, strict=True))
        or any(one.numel() > _MOST_INDEX or not one.numel() for one in tensors)
    ):
        return None
    try:
        tf32 = bool(backend.allow_tf32)
    except RuntimeError:  # the program has said it in both ways that torch has
        return None
    images = [_as_image(one) for one in tensors]
    if ways == 1:
        stride, padding, dilation = [1, *stride], [0, *padding], [1, *dilation]
    last = any(_has_channels_last(*one) for one in images[:2])
    copies = tuple(
        int(one.nbytes)
        for name, one, image in zip("xwy", tensors, images, strict=True)
        if name in copied and not _lies(*image, last=last)
    )
    x, w, y = (_in_order(*one, last=last) for one in images)
    if transposed:
        x, y = y, x
        operation = {"forward": "input", "input": "forward"}.get(operation, operation)
    return Problem(
        operation,
        dtype,
        x,
        w,
        y,
        padding=tuple(padding),
        stride=tuple(stride),
        dilation=tuple(dilation),
        groups=groups,
        transposed=transposed,
        last=last,
        tf32=tf32,
        deterministic=bool(backend.deterministic),
        copies=copies,
    )


def _as_image(tensor: Any) -> tuple[list[int], list[int]]:
    """Sizes and strides. A row is an image of one line."""
    sizes, strides = [int(one) for one in tensor.shape], [int(one) for one in tensor.stride()]
    if len(sizes) < _IMAGE:
        strides.insert(2, sizes[2] * strides[2])
        sizes.insert(2, 1)
    return sizes, strides


def _order(count: int, last: bool) -> list[int]:
    """The dimensions, from the innermost."""
    inner = range(count - 1, 1, -1)
    return [1, *inner, 0] if last else [*inner, 1, 0]


def _has_channels_last(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """As is_channels_last_strides of torch: what is in both orders counts as channels first."""
    least = 0
    for one in _order(len(sizes), last=True):
        if strides[one] < least or not strides[1] or (one == 0 and least == strides[1]):
            return False
        least = strides[one] * max(sizes[one], 1)
    return True


def _lies(sizes: Sequence[int], strides: Sequence[int], *, last: bool) -> bool:
    """Whether the tensor is contiguous in this order."""
    expected = 1
    for one in _order(len(sizes), last):
        if sizes[one] != 1:
            if strides[one] != expected:
                return False
            expected *= sizes[one]
    return True


def _in_order(
    sizes: Sequence[int], strides: Sequence[int], *, last: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Contiguous in this order. A dimension of one has the stride that fixSizeOneDimStride of torch gives it."""
    fixed, expected = list(strides), 1
    for one in _order(len(sizes), last):
        fixed[one] = expected
        expected *= sizes[one]
    return tuple(sizes), tuple(fixed)


def _is_flat(problem: Problem) -> bool:
    """Whether it has rows and columns only."""
    return len(problem.kernel) == _IMAGE - 2


# ---------------------------------------------------------------- what cuDNN does not say


def _is_for_cudnn(problem: Problem) -> bool:
    """Whether torch gives a pass by channel to cuDNN, as `use_cudnn_depthwise` of Convolution.cpp."""
    (images, channels, *size), kernel, stride = problem.x[0], problem.kernel, problem.stride
    if problem.last:
        return True
    if (
        problem.dtype != "float16"
        or not _is_flat(problem)
        or {*problem.dilation} != {1}
        or channels < _FEW_CHANNELS
        or (stride[0] != stride[1] and size[0] > 1)
    ):
        return False
    if size[0] == stride[1] == 1:
        return True
    if kernel[0] != kernel[1] or kernel[1] not in (1, 3, 5) or size[1] < _NARROW:
        return False
    if stride[1] != 2:
        return stride[1] == 1
    if kernel[1] == 1:
        return size[1] <= 28 if images == 1 else images <= 16 and channels >= 128 and size[1] <= 7
    return images == 1 or channels >= 512 or (channels >= 256 and size[1] >= 28)


def _is_whole(problem: Problem) -> bool:
    """Whether cuBLASLt sums the product in one go, as in all measured passes. Else it may add up partial sums."""
    images, pixels = problem.x[0][0], math.prod(problem.x[0][2:])
    if not problem.last:  # a product for each image
        return images > 1
    if problem.operation == "weight":
        return problem.dtype in _HALVES and images * pixels <= _FEW_TO_ADD
    has_eights = all(one[0][1] % _CHANNELS == 0 for one in (problem.x, problem.y))
    return images * pixels >= _MANY_PIXELS or (problem.dtype in _HALVES and has_eights)
