"""What cuDNN takes from torch's allocator beside tensors: as far as it is known, and at most.

The algorithm decides, and cuDNN chooses it on the card. So scratch is an interval. Its bounds were
made from measurements (benchmarks/cudnn_scratch.py), and a test holds every measured row to them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from pytracer.basics.private_torch import tree_iter

aten = torch.ops.aten
CONVOLUTIONS = frozenset((aten.convolution.default, aten.convolution_backward.default))
# The gradients of tables, and which argument is the number of rows.
TABLES = {aten.embedding_dense_backward.default: 2, aten._embedding_bag_backward.default: 6}
_SPARSE = 9  # the argument of an embedding bag's gradient
_FEW_WORDS = 3072  # up to here the gradient of a table is summed without sorting its words
_RUN = 10  # words that are summed together
_WARP = 32
SMALL = 8 << 20  # what the smallest convolutions take


@dataclass(frozen=True)
class Scratch:
    """Bytes that are taken for one call."""

    least: int
    most: int
    stays: bool = False  # taken once, for all later calls
    beside: tuple[int, ...] = ()  # blocks that are there at the same time


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
        held = blocks(scratch.beside)
        self._device.back(held)
        self._device.take(scratch.least, scratch.most)
        self._largest = max(self._largest, scratch.most + sum(scratch.beside))

    def hold(self, *amounts: int) -> None:
        """Takes blocks of these bytes for a moment, all at once."""
        self._device.back(blocks(amounts))

    def document(self, *, any_end: bool) -> dict[str, int]:
        """The bounds, as far as they are not what is sure.

        `any_end`: when some blocks end is not sure.

        What is reserved was tried with a few sizes of all scratch. Others may move it further, so half
        of the distance is added on both sides. It was also tried with a few ends of blocks that the
        card may still need. Other ends may fill gaps better, so half of the width is added below.
        """
        further = 2 if self._largest else 0
        counters = self._device.counters()
        peak, least, most = self._device.bounds()
        sure = counters["reserved_bytes.peak"]
        bounds: dict[str, int] = {}
        if peak > counters["requested_bytes.peak"]:
            bounds |= {"peak_at_most": peak, "scratch_at_most": self._largest}
            least -= (most - least) // 2 if any_end else 0
        if least < sure:
            least -= (sure - least) // further if further else 0
            bounds["reserved_at_least"] = max(least, counters["allocated_bytes.peak"])
        if most > sure:
            most += (most - sure) // further if further else 0
            bounds["reserved_at_most"] = most
        return bounds


def blocks(amounts: Iterable[int]) -> list[Any]:
    """Tensors of so many bytes on the card."""
    return [torch.empty(one, dtype=torch.uint8, device="cuda") for one in amounts if one]


def of_onednn(func: Any) -> str:
    """Which of oneDNN's operators it is, whose memory on a host only oneDNN knows; "" if none."""
    if func in CONVOLUTIONS:
        return "convolutions"
    return "recurrent layers" if func.name().startswith("aten::mkldnn_rnn_layer") else ""


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
    wide = 4 * (grad.shape[-1] + -grad.shape[-1] % _WARP)
    least, most = -(-count // _RUN), min(count, rows) + count // _RUN + 1
    numbers = words.element_size() * most
    return Scratch(least * wide, most * wide, beside=(*[words.nbytes] * 5, numbers, 8, 8))


# cuFFT copies what it would overwrite, and has a workspace; cuSOLVER and MAGMA have theirs.
_TRANSFORMS, _COPIES_OF_TRANSFORMS = ("aten::_fft_", "aten::fft_"), 4
_DECOMPOSITIONS = (
    "aten::linalg_",
    "aten::_linalg_",
    "aten::cholesky_",
    "aten::triangular_solve",
    "aten::ormqr",
)
_COPIES_OF_MATRICES = 16
_NO_DECOMPOSITIONS = frozenset(
    (aten.linalg_vector_norm.default, aten.linalg_cross.default, aten.linalg_matrix_exp.default)
)
_POWERS = 24  # matrices that an exponential may have at once; measured on a host: 12
_SORTS = frozenset((aten.sort.default, aten.sort.stable))
_SHORT_ROW = 4096  # is sorted in place
_SORTED_BY = 16  # bytes of the places of a number


def of_sort(values: Any, dim: int) -> Scratch:
    """What the sorting library takes for long rows: at most numbers and places twice, and places again."""
    if values.dim() == 0 or values.shape[dim] <= _SHORT_ROW:
        return Scratch(0, 0)
    each = _SORTED_BY + 2 * (values.element_size() + _SORTED_BY)
    return Scratch(0, values.numel() * each + (1 << 20))


def not_sure(
    func: Any, args: tuple[Any, ...], options: dict[str, Any], result: Any
) -> Scratch | None:
    """The scratch of a call that depends on values, or that only a library knows; None if there is none."""
    if func in TABLES:
        return of_table(func, args)
    if func in _SORTS:
        at = 1 if func is aten.sort.default else 2
        return of_sort(args[0], args[at] if len(args) > at else options.get("dim", -1))
    if func.name().startswith(_TRANSFORMS):
        results = [one for one in tree_iter(result) if isinstance(one, torch.Tensor)]
        largest = max(int(one.nbytes) for one in (args[0], *results))
        return Scratch(0, _COPIES_OF_TRANSFORMS * largest + (1 << 20))
    if func.name().startswith(_DECOMPOSITIONS) and func not in _NO_DECOMPOSITIONS:
        return Scratch(0, _COPIES_OF_MATRICES * int(args[0].nbytes) + SMALL)
    if func is aten.linalg_matrix_exp.default:  # its polynomials' degrees depend on values
        return Scratch(0, _POWERS * int(args[0].nbytes))
    return None


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


# Operators of torch's own whose kernels on a card want contiguous arguments, and which.
_CONTIGUOUS: dict[Any, tuple[int, ...]] = {
    aten.native_layer_norm.default: (0,),
    aten.native_layer_norm_backward.default: (0, 1),
    aten._fused_rms_norm.default: (0,),
    aten._fused_rms_norm_backward.default: (0, 1),
    aten._softmax.default: (0,),
    aten._softmax_backward_data.default: (0, 1),
    aten._log_softmax.default: (0,),
    aten._log_softmax_backward_data.default: (0, 1),
    aten.embedding_dense_backward.default: (0,),
    aten._embedding_bag_backward.default: (0,),
    aten.max_pool2d_with_indices.default: (0,),
    aten.max_pool2d_with_indices_backward.default: (0, 1),
    aten.avg_pool2d.default: (0,),
    aten.avg_pool2d_backward.default: (0, 1),
    aten._adaptive_avg_pool2d.default: (0,),
    aten._adaptive_avg_pool2d_backward.default: (0,),
    aten.upsample_nearest2d.default: (0,),
    aten.upsample_nearest2d_backward.default: (0,),
    aten.upsample_bilinear2d_backward.default: (0,),
    aten.upsample_nearest1d_backward.default: (0,),
    aten.upsample_nearest3d_backward.default: (0,),
    aten._upsample_nearest_exact1d_backward.default: (0,),
    aten._upsample_nearest_exact2d_backward.default: (0,),
    aten._upsample_nearest_exact3d_backward.default: (0,),
    aten._adaptive_avg_pool3d_backward.default: (0,),
    aten.upsample_linear1d_backward.default: (0,),
    aten.upsample_trilinear3d_backward.default: (0,),
    aten.adaptive_max_pool2d_backward.default: (0,),
    aten.fractional_max_pool2d_backward.default: (0,),
    aten.max_pool3d_with_indices_backward.default: (0,),
    aten.avg_pool3d_backward.default: (0,),
    aten.upsample_bicubic2d_backward.default: (0,),
    aten.reflection_pad2d_backward.default: (0,),
    aten.roll.default: (0,),
    aten.median.dim: (0,),
    aten.im2col.default: (0,),
    aten.col2im.default: (0,),
    aten.topk.default: (0,),
}
# A torch for the CPU has no operator of cuDNN's for these, which a card takes for images.
_NORMS_OF_IMAGES: dict[Any, tuple[int, ...]] = (
    {}
    if torch.backends.cuda.is_built()
    else {aten.native_batch_norm.default: (0,), aten.native_batch_norm_backward.default: (0, 1)}
)
# Operators of torch's own whose results are contiguous on a card, whatever their arguments are.
IN_ROWS = frozenset(
    (
        aten.native_layer_norm_backward.default,
        aten._fused_rms_norm_backward.default,
        aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default,
        aten.native_batch_norm_backward.default,
        aten.mse_loss_backward.default,
        aten.smooth_l1_loss_backward.default,
        aten.huber_loss_backward.default,
    )
)
# Products, and which argument is their first factor.
_PRODUCTS = {
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
}


def copies(func: Any, args: Any) -> list[int]:
    """The bytes of the copies that the operator makes of its arguments, before its results."""
    if func in _PRODUCTS:
        factors = args[_PRODUCTS[func] :][:2]
        return [int(one.nbytes) for one in factors if not _suits_a_product(one)]
    wanted = [args[one] for one in _CONTIGUOUS.get(func, ())]
    if func is aten._softmax_backward_data.default:  # its first step lays out what is expanded
        wanted = [one for one in wanted if 0 not in one.stride()]
    if func in _NORMS_OF_IMAGES and args[0].dim() > 2:
        wanted = [args[one] for one in _NORMS_OF_IMAGES[func]]
    return [int(one.nbytes) for one in wanted if not _lies_as_wanted(one)]


def _suits_a_product(factor: Any) -> bool:
    """Whether cuBLAS takes the factor as it lies, by `prepare_matrix_for_cublas` of native/cuda/Blas.cpp."""
    (rows, columns), (down, across) = factor.shape[-2:], factor.stride()[-2:]
    return bool((down == 1 and across >= max(1, rows)) or (across == 1 and down >= max(1, columns)))


def in_rows(one: Any) -> Any:
    """The result as it lies on a card."""
    is_turned = isinstance(one, torch.Tensor) and not _lies_as_wanted(one)
    return one.new_empty(one.shape) if is_turned else one


def _lies_as_wanted(tensor: Any) -> bool:
    """Images may have their channels last."""
    return bool(tensor.is_contiguous()) or (
        tensor.dim() == _IMAGES and tensor.is_contiguous(memory_format=torch.channels_last)
    )


_IMAGES = 4  # dimensions
_LOSSES = {aten.mse_loss.default: 2, aten.smooth_l1_loss.default: 2, aten.huber_loss.default: 2}
_COUNTS = frozenset((aten.sum.default, aten.sum.dim_IntList))
_SCAN = 1279  # bytes of a scan's own; measured on an H100


def _is_cast(given: torch.dtype, result: torch.dtype) -> bool:
    """Whether a sum first makes its input of the result's type, as it does for flags."""
    return given != result and not (given.itemsize == 2 and result == torch.float32)


_REDUCED = {aten.soft_margin_loss.default: 2, aten.binary_cross_entropy.default: 3}
_SUMS = frozenset((aten.cumsum.default, aten.cumprod.default))
_NUMBER = 8  # bytes of an index


def beside(func: Any, args: Any, result: Any) -> list[list[int]]:
    """What other operators of torch's own take on a card beside their result, and no fake kernel does.

    The blocks of a list are there at the same time.
    """
    if func is aten._softmax_backward_data.default:  # the product of its two inputs
        return [[max(int(one.nbytes) for one in args[:2])]]
    if func in _LOSSES and (len(args) < 3 or args[_LOSSES[func]] != 0):  # the loss of each number
        return [[int(args[0].nbytes)]]
    if func in _SUMS:  # a copy in another type, and one in order
        copied = (args[0].dtype != result.dtype) + (not args[0].is_contiguous())
        return [[int(result.nbytes)] * copied]
    if func is aten.multinomial.default:
        return [[int(args[0].nbytes)] * (1 if args[0].is_contiguous() else 2)]
    if func in _COUNTS and _is_cast(args[0].dtype, result.dtype):
        return [[result.element_size() * args[0].numel()]]
    if func is aten.masked_scatter.default:  # which number of the source goes where
        spread = 0 if args[1].shape == args[0].shape else args[0].numel()
        return [[_NUMBER * args[0].numel(), spread, _SCAN]]
    if func in _REDUCED and (len(args) <= _REDUCED[func] or args[_REDUCED[func]] != 0):
        return [[result.element_size()]]
    if func is aten.logsumexp.default:  # the largest, whether they are infinite, the differences
        each = int(result.nbytes)
        return [[each, result.numel()], [each, int(args[0].nbytes)]]
    if func is aten.soft_margin_loss_backward.default:
        each = int(result.nbytes)
        return [[each, each], [each]]
    if func is aten.im2col.default:  # first as large as its argument
        return [[int(args[0].nbytes)]]
    if func is aten.native_group_norm.default:
        return [[4 * args[3] * args[4]] * 2]
    if func is aten.native_group_norm_backward.default:
        return [[4 * args[5] * args[6]] * 3 + [4 * args[5] * args[8]] * 2]
    if func in _PUTS and len(args) > _ADDS and args[_ADDS]:  # sorts the places
        places = [one.shape for one in args[1] if one is not None]
        numbers, values = _NUMBER * math.prod(torch.broadcast_shapes(*places)), args[2]
        copied = 0 if values.is_contiguous() else int(values.nbytes)
        return [[numbers], [copied, *[numbers] * 4, 1]]
    return []


_PUTS = frozenset((aten.index_put.default, aten.index_put_.default))
_ADDS = 3  # the argument
