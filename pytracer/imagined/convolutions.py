"""What a convolution takes from torch's allocator on a card beside its result.

torch asks cuDNN for a plan, and gives it the scratch that the plan wants. cuDNN says the same without a
card, where it is installed. Some of its engines need a driver that works before they show up, so where one of
them may come first the scratch is an interval:

- cuBLASLt's, for a product: a kernel of one pixel that moves by one.
- Fourier transforms in float32, with TensorFloat-32 for kernels wider than 3 and channels first.
- Winograd's for the gradient of a weight of 3 by 3, in float32.

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
_FEW_PIXELS = 3  # of a kernel's side
_MOST_WHOLE = 256  # pixels of a side that are transformed as a whole
_MOST_INDEX = 2**31 - 1
_IMAGE, _VIDEO = 4, 5  # dimensions
_HALVES = ("float16", "bfloat16")
_OF_CUBLASLT = 32 << 20  # at most
_LITTLE = 512  # bytes that the allocator gives anyway
# What follows decides between engines that cuDNN shows and those that it does not. All was measured, with room.
_MANY_PIXELS = 1 << 14  # of all images: with channels last cuBLASLt needs nothing
_FEW_TO_ADD = 1 << 11  # pixels of all images: a weight's gradient in half precision is not split
_FEW_WEIGHTS = 1 << 20  # of a product in TensorFloat-32
# The bytes of an image's partial sums, as a share of the image's: cuBLASLt comes first between the second
# and the third, and not below the first or above the last.
_SHARES_OF_HALVES = (-1.0, -1.0, 1.5, 2.05)
_SHARES_OF_FLOAT32 = (0.003, 0.015, 2.5, 8.0)
_LITTLE_WORK = {"": 1e8, "last": 3.5e7, "input": 8e8}  # operations of a convolution in float32
_WINOGRAD_FROM = 0.37  # a first plan that takes less than this share of Winograd's comes before it
_NARROW = 5  # pixels of a kernel's side
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
_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15, 10: 7, 12: 7, 16: 7}
_ANYWHERE = 2  # blocks of a cluster that fit on any pair of processors
_OTHER_CLUSTERS = (1, 0)  # two knobs of a kernel in half precision that ran fewer of eight
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
    def is_product(self) -> bool:
        """Whether it is a product of matrices."""
        return {*self.kernel, *self.stride} == {1} and not any(self.padding)

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
        if problem.by_channel and problem.transposed:
            return None
        if problem.by_channel and _takes_nothing_by_channel(problem):
            return Scratch(0, 0)
        answer = self._answer(problem)
        if answer is None:
            return None
        if problem.is_product and _product_takes_nothing(problem):
            return Scratch(0, 0)
        if problem.by_channel:  # with float16 torch may do it itself, which takes nothing
            may_be_torch = problem.dtype == "float16" and not problem.last
            return Scratch(0, answer.most) if may_be_torch else answer
        if problem.is_product and (
            problem.dtype != "float32" or problem.tf32 or problem.groups > 1
        ):
            return _of_product(problem, answer)
        if problem.dtype == "float32" and _may_be_fourier_of_row(problem):
            return Scratch(0, max(most, answer.most, _of_square(problem)))
        if problem.dtype == "float32" and _may_be_fourier(problem):
            if _transforms_come_later(problem):
                return answer
            return Scratch(0, max(most, answer.most, _of_fourier(problem), _of_winograd(problem)))
        if problem.dtype == "float32" and _may_be_winograd(problem):
            other = _of_winograd(problem)
            if answer.most <= max(_LITTLE, _WINOGRAD_FROM * other):
                return answer
            return Scratch(min(answer.least, other), max(answer.most, other))
        return answer

    def _answer(self, problem: Problem) -> Scratch | None:
        """What the first plan takes that cuDNN shows without a driver."""
        if self._version() not in cudnn.MEASURED or self._library is None or self._clusters is None:
            return None
        answer = self._library.ask(problem.question())
        size, unsplit = answer.get("bytes"), answer.get("unsplit")
        if not isinstance(size, int) or not isinstance(unsplit, int):
            return None
        knobs = dict(answer["knobs"])
        kernel = persistent.Kernel(problem.operation, problem.dtype, knobs)
        if knobs.get(persistent.SHARES) != 0 or persistent.ACROSS not in knobs:
            return Scratch(size, size)
        clusters = self._clusters.get(kernel.cluster)
        if knobs[persistent.TILE] not in persistent.TILES:
            return None
        if (
            problem.dtype in _HALVES
            and kernel.cluster > _ANYWHERE
            and _counts_otherwise(knobs, problem.groups)
        ):
            clusters = None
        tiles, steps = kernel.tiles(problem.x[0], problem.w[0], problem.y[0], problem.groups)
        there = _ASKED_WITH - _ASKED_WITH % kernel.cluster
        copies = unsplit - kernel.plain(tiles, there)
        # The tiles of groups are believed only if smaller cards have them, too.
        fewer = answer.get("fewer", ()) if problem.groups > 1 else ()
        for count, taken in ((there, size), *fewer):
            least, most = kernel.scratch(tiles, steps, count)
            if not least - _LITTLE <= taken - copies <= most + _LITTLE:
                clusters = None
        if clusters is None:
            return Scratch(copies, copies + kernel.at_most(_PROCESSORS))
        least, most = kernel.scratch(tiles, steps, clusters * kernel.cluster)
        return Scratch(copies + least, copies + most)

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


def _counts_otherwise(knobs: dict[int, int], groups: int) -> bool:
    """Whether a kernel in half precision runs other numbers of large clusters."""
    tile, length = knobs[persistent.TILE], knobs[persistent.LENGTH]
    return (tile, length) == _OTHER_CLUSTERS or (groups > 1 and length == 0)


def _is_flat(problem: Problem) -> bool:
    """Whether it has rows and columns only."""
    return len(problem.kernel) == _IMAGE - 2


# ---------------------------------------------------------------- engines that need a driver


def _takes_nothing_by_channel(problem: Problem) -> bool:
    """Whether torch's own kernel does each channel, or an engine of cuDNN's that is made at run time."""
    if _is_flat(problem) and problem.operation != "weight":
        return True
    return not problem.last and not (_is_flat(problem) and problem.dtype == "float16")


def _product_takes_nothing(problem: Problem) -> bool:
    """Whether cuBLASLt's engine comes first and takes at most 400 bytes, as in all measured passes."""
    images, pixels = problem.x[0][0], math.prod(problem.x[0][2:])
    is_half = problem.dtype in _HALVES
    if problem.groups > 1:
        return False
    if problem.operation == "weight":
        return is_half and problem.last and images * pixels <= _FEW_TO_ADD
    if not is_half and not problem.tf32:
        return False
    if problem.last:
        has_eights = all(one[0][1] % _CHANNELS == 0 for one in (problem.x, problem.y))
        return has_eights if is_half else images * pixels >= _MANY_PIXELS
    is_small = is_half or problem.x[0][1] * problem.y[0][1] <= _FEW_WEIGHTS
    return pixels % 4 == 0 and images > 1 and is_small


def _of_product(problem: Problem, answer: Scratch) -> Scratch:
    """What a product takes that cuBLASLt may do, beside the first plan that cuDNN shows.

    For the gradient of a weight with channels first, cuBLASLt leaves a partial sum for each image. It comes
    first where those are small beside the images.
    """
    images, inside, out = problem.x[0][0], problem.x[0][1], problem.y[0][1]
    sums = 4 * images * inside * out
    unknown = Scratch(0, max(_OF_CUBLASLT, answer.most, sums))
    if problem.operation != "weight" or problem.last or problem.groups > 1 or images == 1:
        return unknown
    size = 4 if problem.dtype == "float32" else 2
    share = 4 * inside * out / (size * math.prod(problem.x[0][2:]) * (inside + out))
    least, less, more, most = _SHARES_OF_FLOAT32 if size == 4 else _SHARES_OF_HALVES
    if answer.most <= _LITTLE or share < least or share > most:
        return answer
    return Scratch(sums, sums) if less < share < more and sums <= _OF_CUBLASLT else unknown


def _may_transform(problem: Problem) -> bool:
    """Whether a Fourier or Winograd engine may be the first."""
    moves = {*problem.stride, *problem.dilation}
    return moves == {1} and _is_flat(problem) and min(problem.kernel) > 1


def _may_be_fourier(problem: Problem) -> bool:
    """With TensorFloat-32 other engines are faster for kernels of 3 by 3, and where channels are last."""
    is_slow = not problem.tf32 or (not problem.last and max(problem.kernel) > _FEW_PIXELS)
    return is_slow and _may_transform(problem)


def _may_be_fourier_of_row(problem: Problem) -> bool:
    """Whether the gradient of a row's weight may come from the spectra of whole squares."""
    is_row = problem.x[0][2] == problem.kernel[0] == 1 < problem.kernel[-1]
    is_plain = {*problem.stride, *problem.dilation} == {1} and problem.groups == 1
    return problem.operation == "weight" and is_row and is_plain and _square(problem) <= _MOST_WHOLE


def _square(problem: Problem) -> int:
    """A side of the square around a row: a power of two."""
    length = max(problem.x[0][-1], problem.y[0][-1]) + 2 * problem.padding[-1]
    return 1 << (length - 1).bit_length()


def _of_square(problem: Problem) -> int:
    """At most, the complex spectra of the weight: a square with one more row and column for each two channels."""
    return 8 * (_square(problem) + 1) ** 2 * problem.x[0][1] * problem.y[0][1] + SMALL


def _transforms_come_later(problem: Problem) -> bool:
    """Whether there is little to do, or no measured pass of such a kernel was a transform."""
    if problem.operation == "forward" and problem.last and max(problem.kernel) < _NARROW:
        return True
    if problem.operation == "weight" and set(problem.kernel) <= {2, 4}:
        return True
    work = 2 * math.prod(problem.w[0]) * problem.y[0][0] * math.prod(problem.y[0][2:])
    most = _LITTLE_WORK["input" if problem.operation == "input" else "last" if problem.last else ""]
    return problem.groups == 1 and max(problem.kernel) <= _NARROW and work <= most


def _may_be_winograd(problem: Problem) -> bool:
    return (
        problem.operation == "weight"
        and not problem.last
        and set(problem.kernel) == {3}
        and _may_transform(problem)
    )


def _of_winograd(problem: Problem) -> int:
    """Tiles of 4 by 4 pixels with their border, 6 by 6, of all three tensors."""
    (batch, _, *_), (_, _, high, wide) = problem.x[0], problem.y[0]
    tiles = batch * -(-high // 4) * -(-wide // 4)
    inside, out = problem.x[0][1], problem.y[0][1]
    return 6 * 6 * 4 * (tiles * (inside + out) + inside * out // problem.groups)


def _of_fourier(problem: Problem) -> int:
    """At most, the complex spectra of all three tensors: of tiles of 32 by 32 pixels, or of whole images.

    A whole image has a border, and its sides are powers of two. One shape took more than tiles do. Which engine
    did it is not known; whole images are more than it took.
    """
    batch, inside, out = problem.x[0][0], problem.x[0][1], problem.y[0][1]
    sizes = [max(pair) for pair in zip(problem.x[0][2:], problem.y[0][2:], strict=True)]
    sides = list(zip(sizes, problem.kernel, strict=True))
    tiles = batch * math.prod(-(-size // max(33 - kernel, 1)) for size, kernel in sides)
    most = 32 * 32 * (tiles * (inside + out) + inside * out)
    whole = [1 << (size + kernel - 2).bit_length() for size, kernel in sides]
    if max(whole) <= _MOST_WHOLE:
        most = max(most, math.prod(whole) * (batch * (inside + out) + inside * out))
    return 8 * most + SMALL
