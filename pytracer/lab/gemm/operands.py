"""Prepares a product: operands in memory, calls that use them in turn, and a check of the result.

The operands are random. On zeros fewer transistors switch, and a device runs faster than on data.
There are several sets of operands and calls take turns, so no call finds its operands in the cache.

All sets of a product lie in one block of memory, and large operands begin at a page. The time of a
product depends on where its operands lie across pages, and an allocator would place each elsewhere.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from pytracer import errors
from pytracer.basics import private_torch
from pytracer.lab.gemm.shapes import DTYPES, CrossEntropy, Dtype, Gemm, Work

_SAMPLE = 48  # rows and columns that the check computes in float64
_PAGE = 2 << 20  # bytes; a page of a GPU's memory
_APART = 512  # bytes; smaller operands begin at multiples of this, as in torch's allocator


@dataclass(frozen=True)
class Prepared:
    """A product that can run. Each call runs it on the next set of operands."""

    work: Work
    calls: tuple[Callable[[], Any], ...]
    error: float  # of the result, relative, against float64

    @property
    def rotated_bytes(self) -> int:
        """The bytes that the calls pass through before they reach the first set again."""
        return self.work.bytes * len(self.calls)


def prepare(work: Work, device: torch.device, sets: int) -> Prepared:
    """Allocates operands, fills them with random numbers, runs once and checks the result.

    Raises:
        errors.PytracerError: the result is wrong, or the device cannot run the product.
    """
    try:
        with as_asked(work), torch.random.fork_rng(_cuda_devices(device)):
            torch.manual_seed(0)
            if isinstance(work, CrossEntropy):
                return _cross_entropy(work, device, sets)
            with _many_compiles() if work.compiled else nullcontext():
                return _gemm(work, device, sets)
    except torch.OutOfMemoryError:
        raise errors.PytracerError(
            f"out of memory for {work}: one set of operands takes {work.bytes:,} bytes"
        ) from None
    except (RuntimeError, NotImplementedError) as error:
        first_line = str(error).partition("\n")[0]
        raise errors.PytracerError(f"{device} cannot run {work}: {first_line}") from error


def bytes_of(work: Work, sets: int) -> int:
    """The memory of this many sets of operands."""
    return _Layout.of(work).stride * sets + _PAGE


def _cuda_devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


@contextmanager
def as_asked(work: Work) -> Iterator[None]:
    """Sets the precision and the library that the product asks for, and restores them after."""
    with ExitStack() as stack:
        if work.dtype in ("tf32", "fp32"):
            stack.enter_context(_precision(work.dtype))
        if isinstance(work, Gemm) and work.library is not None:
            stack.enter_context(_library(work.library))
        yield


@contextmanager
def _precision(dtype: str) -> Iterator[None]:
    """Switches TF32 on for tf32 and off for fp32."""
    settings: Any = torch.backends.cuda.matmul
    name = "fp32_precision" if hasattr(settings, "fp32_precision") else "allow_tf32"
    values: dict[str, Any] = {"tf32": True, "fp32": False}
    if name == "fp32_precision":
        values = {"tf32": "tf32", "fp32": "ieee"}
    before = getattr(settings, name)
    setattr(settings, name, values[dtype])
    try:
        yield
    finally:
        setattr(settings, name, before)


@contextmanager
def _library(name: str) -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


@contextmanager
def _many_compiles() -> Iterator[None]:
    """Raises torch's limits, because every product compiles the same few lines again."""
    config = private_torch.dynamo_limits

    limits = {"recompile_limit": 10_000, "accumulated_recompile_limit": 10_000}
    with config.patch({name: value for name, value in limits.items() if hasattr(config, name)}):
        yield


# ---------------------------------------------------------------------- memory


@dataclass(frozen=True)
class _Layout:
    """A set of operands in memory: the offset of each operand, and the distance to the next set."""

    offsets: tuple[int, ...]
    stride: int

    @staticmethod
    def of(work: Work) -> "_Layout":
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in _stored(work)]
        offsets: list[int] = []
        at = 0
        for size in sizes:
            at = _up(at, _PAGE if size >= _PAGE else _APART)
            offsets.append(at)
            at += size
        return _Layout(tuple(offsets), _up(at, _PAGE if max(sizes) >= _PAGE else _APART))


def _up(at: int, unit: int) -> int:
    return -(-at // unit) * unit


def _stored(work: Work) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes in memory, of A, B and their product, or of the logits."""
    kind = DTYPES[work.dtype]
    dtype = getattr(torch, kind.torch_name)
    if isinstance(work, CrossEntropy):
        return [((work.rows, work.classes), dtype)]
    batch = (work.batch,) if work.batch > 1 else ()
    a_turned, b_turned = work.turned
    return [
        ((*batch, work.k, work.m) if a_turned else (*batch, work.m, work.k), dtype),
        ((*batch, work.n, work.k) if b_turned else (*batch, work.k, work.n), dtype),
        ((*batch, work.m, work.n), getattr(torch, kind.out_torch_name)),
    ]


def _sets(work: Work, device: torch.device, count: int) -> list[list[torch.Tensor]]:
    """The tensors of each set. All sets have the same random inputs."""
    layout, stored = _Layout.of(work), _stored(work)
    block = torch.empty(bytes_of(work, count), dtype=torch.uint8, device=device)
    first = -block.data_ptr() % _PAGE
    sets: list[list[torch.Tensor]] = []
    for number in range(count):
        begin = first + number * layout.stride
        sets.append([
            block[begin + at :][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for at, (shape, dtype) in zip(layout.offsets, stored, strict=True)
        ])  # fmt: skip
    for i in range(min(len(stored), 2)):
        _fill(sets[0][i], DTYPES[work.dtype])
        for operands in sets[1:]:
            operands[i].copy_(sets[0][i])
    return sets


def _fill(matrix: torch.Tensor, kind: Dtype) -> None:
    """Fills a matrix with random numbers: floats with a normal distribution, integers evenly."""
    if kind.name == "int8":
        matrix.random_(-127, 128)
    elif kind.bytes == 1:
        matrix.copy_(torch.randn(matrix.shape, dtype=torch.bfloat16, device=matrix.device))
    else:
        matrix.normal_()


# ---------------------------------------------------------------------- products


def _gemm(gemm: Gemm, device: torch.device, sets: int) -> Prepared:
    a_turned, b_turned = gemm.turned
    operands = [
        (a.mT if a_turned else a, b.mT if b_turned else b, out)
        for a, b, out in _sets(gemm, device, sets)
    ]
    product = _product(gemm, device)
    calls = tuple(_call(product, *three) for three in operands)
    a, b, out = operands[0]
    # An element that the product does not write stays wrong.
    out.fill_(float("nan") if out.is_floating_point() else -1)
    return Prepared(gemm, calls, _verify(gemm, calls[0], a, b))


def _call(
    product: Callable[..., torch.Tensor], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> Callable[[], torch.Tensor]:
    return lambda: product(a, b, out)


def _product(gemm: Gemm, device: torch.device) -> Callable[..., torch.Tensor]:
    """The function of torch for this product. It takes A, B and the tensor for the result."""
    if gemm.compiled:
        return _compiled(gemm)
    if gemm.dtype == "fp8":
        one = torch.ones((), device=device)
        options: dict[str, Any] = {
            "scale_a": one,
            "scale_b": one,
            "out_dtype": torch.bfloat16,
            "use_fast_accum": device.type == "cuda",
        }
        return lambda a, b, out: private_torch.multiply_fp8(a, b, out=out, **options)
    if gemm.dtype == "int8":
        return lambda a, b, out: private_torch.multiply_int8(a, b, out=out)
    if gemm.batch > 1:
        return lambda a, b, out: torch.bmm(a, b, out=out)
    return lambda a, b, out: torch.mm(a, b, out=out)


def _compiled(gemm: Gemm) -> Callable[..., torch.Tensor]:
    """The product through Inductor, which gets the operands as stored and may pad them."""
    a_turned, b_turned = gemm.turned

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.mT if a_turned else a) @ (b.mT if b_turned else b)

    run: Any = torch.compile(product, dynamic=False)

    def call(a: torch.Tensor, b: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = run(a.mT if a_turned else a, b.mT if b_turned else b)
        return result

    return call


# ---------------------------------------------------------------------- the check


def _verify(
    gemm: Gemm, call: Callable[[], torch.Tensor], a: torch.Tensor, b: torch.Tensor
) -> float:
    """Compares some rows and columns with float64. The last ones are among them: tails go wrong.

    Raises:
        errors.PytracerError: they differ by more than rounding.
    """
    result = call()
    rows = _some(gemm.m, a.device)
    columns = _some(gemm.n, a.device)
    exact = _some_of(a, -2, rows) @ _some_of(b, -1, columns)
    picked = _some_of(_some_of(result, -2, rows), -1, columns)
    error = float((picked - exact).norm() / exact.norm().clamp_min(1e-30))
    # A single unwritten element would hide in the norm.
    everywhere = bool(torch.isfinite(result).all()) if result.is_floating_point() else True
    if not error <= DTYPES[gemm.dtype].tolerance or not everywhere:
        raise errors.PytracerError(
            f"the result of {gemm} is wrong: it differs from float64 by {error:.1e} of its norm"
        )
    return error


def _some_of(matrix: torch.Tensor, dimension: int, which: torch.Tensor) -> torch.Tensor:
    """These rows or columns in float64. 8-bit floats cannot be picked, but their bits can."""
    if matrix.is_floating_point() and matrix.itemsize == 1:
        picked = matrix.view(torch.uint8).index_select(dimension, which).view(matrix.dtype)
        return picked.float().double()
    return matrix.index_select(dimension, which).double()


def _some(size: int, device: torch.device) -> torch.Tensor:
    """The first and last few indices, and some between."""
    if size <= _SAMPLE:
        return torch.arange(size, device=device)
    edge = torch.arange(_SAMPLE // 3)
    between = torch.randint(size, (_SAMPLE // 3,))
    return torch.cat([edge, between, size - 1 - edge]).to(device)


# ---------------------------------------------------------------------- the loss


def _cross_entropy(work: CrossEntropy, device: torch.device, sets: int) -> Prepared:
    targets = torch.randint(work.classes, (work.rows,), device=device)
    stored = [logits for (logits,) in _sets(work, device, sets)]
    calls = tuple(_loss_call(logits.requires_grad_(), targets) for logits in stored)
    loss = float(calls[0]()[0].detach())
    with torch.no_grad():
        exact = float(_exact_loss(stored[0], targets))
    error = abs(loss / exact - 1)
    if not error <= 1e-3:
        raise errors.PytracerError(f"the result of {work} is wrong: {loss} instead of {exact}")
    return Prepared(work, calls, error)


def _loss_call(logits: torch.Tensor, targets: torch.Tensor) -> Callable[[], Any]:
    def call() -> tuple[torch.Tensor, torch.Tensor]:
        loss = torch.nn.functional.cross_entropy(logits.float(), targets)
        (gradient,) = torch.autograd.grad(loss, logits)
        return loss, gradient

    return call


def _exact_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss in float64, some rows at a time. All rows at once would take four times the logits."""
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for rows, wanted in zip(logits.split(256), targets.split(256), strict=True):
        exact = rows.double()
        total += (exact.logsumexp(1) - exact.gather(1, wanted[:, None])[:, 0]).sum()
    return total / len(targets)
