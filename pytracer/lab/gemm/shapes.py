"""Matrix products: their sizes, layouts and alignments. Nothing here runs anything.

`C = A B` with A of m x k, B of k x n and C of m x n, all in torch's row order. A linear layer,
`y = x Wᵀ`, runs three products in a training step. Each has another layout of its operands:

| role    | m    | n   | k    | A          | B        | BLAS |
|---------|------|-----|------|------------|----------|------|
| forward | rows | out | in   | x          | W, turned| TN   |
| dgrad   | rows | in  | out  | dy         | W        | NN   |
| wgrad   | out  | in  | rows | dy, turned | x        | NT   |

An operand's leading dimension must be aligned: the distance in memory from one stored row to the
next. So an odd `out` misaligns C in forward, A in dgrad and A in wgrad.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytracer import errors

ROLES = ("forward", "dgrad", "wgrad")
LIBRARIES = ("cublas", "cublaslt")  # of CUDA; torch has both, and chooses one itself by default
MOST_ALIGNED = 128  # bytes: a cache line, and the widest swizzle of Hopper's loads
STEPS = (1, 2, 4, 8, 16, 32, 64)  # elements below a multiple of 128; the step is also the alignment


@dataclass(frozen=True)
class Dtype:
    """A number format of the operands, and the format of the result."""

    name: str
    torch_name: str
    bytes: int
    out_torch_name: str
    out_bytes: int
    multiple: int = 1  # torch requires n and k to be multiples of this
    tolerance: float = 1e-2  # for the relative error of the result against float64


DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("bf16", "bfloat16", 2, "bfloat16", 2),
        Dtype("fp16", "float16", 2, "float16", 2, tolerance=5e-3),
        Dtype("tf32", "float32", 4, "float32", 4, tolerance=2e-3),
        Dtype("fp32", "float32", 4, "float32", 4, tolerance=1e-4),
        Dtype("fp8", "float8_e4m3fn", 1, "bfloat16", 2, multiple=16),
        Dtype("int8", "int8", 1, "int32", 4, multiple=8, tolerance=0.0),
    )
}


@dataclass(frozen=True)
class Gemm:
    """One matrix product (or `batch` of them), in the layout of its role."""

    m: int
    n: int
    k: int
    dtype: str = "bf16"
    role: str = "forward"
    batch: int = 1
    compiled: bool = False  # with torch.compile, which may pad on its own
    library: str | None = None  # of LIBRARIES; None is torch's choice

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """The bytes of every operand once, which must be moved at least."""
        kind = DTYPES[self.dtype]
        read = self.m * self.k + self.k * self.n
        return self.batch * (read * kind.bytes + self.m * self.n * kind.out_bytes)

    @property
    def scratch_bytes(self) -> int:
        """The bytes that one call takes besides, and gives back."""
        return self.bytes if self.compiled else 0  # padded copies, and the result

    @property
    def turned(self) -> tuple[bool, bool]:
        """Whether A and B are stored as their transposes."""
        if DTYPES[self.dtype].bytes == 1:
            return False, True  # 8-bit operands have only this layout
        return self.role == "wgrad", self.role == "forward"

    @property
    def layout(self) -> str:
        """BLAS's name of the layout: torch's B first, then its A."""
        a, b = self.turned
        return ("T" if b else "N") + ("T" if a else "N")

    @property
    def alignment(self) -> dict[str, int]:
        """For each operand, the bytes that divide its leading dimension: 2, 4, ... 128."""
        kind = DTYPES[self.dtype]
        a, b = self.turned
        return {
            "a": aligned_to((self.m if a else self.k) * kind.bytes),
            "b": aligned_to((self.k if b else self.n) * kind.bytes),
            "c": aligned_to(self.n * kind.out_bytes),
        }

    def __str__(self) -> str:
        """The product as a person would write it."""
        sizes = f"{self.m}x{self.n}x{self.k}"
        batch = f"{self.batch} times " if self.batch > 1 else ""
        how = (" compiled" if self.compiled else "", f" by {self.library}" if self.library else "")
        return f"{batch}{sizes} {self.dtype} {self.role}{''.join(how)}"


@dataclass(frozen=True)
class CrossEntropy:
    """The loss on a vocabulary's logits, forward and backward, as autocast runs it.

    It is not a matrix product. But it too reads every logit, so padding a vocabulary changes its time.
    """

    rows: int
    classes: int
    dtype: str = "bf16"

    @property
    def flops(self) -> int:
        """0, because memory limits it."""
        return 0

    @property
    def bytes(self) -> int:
        """The logits, their float32 copy, its log-softmax and three gradients."""
        small = DTYPES[self.dtype].bytes
        return self.rows * self.classes * (2 * small + 4 * 4)

    @property
    def scratch_bytes(self) -> int:
        """The copies and the gradients."""
        return self.bytes

    def __str__(self) -> str:
        """The loss as a person would write it."""
        return f"cross-entropy of {self.rows}x{self.classes} {self.dtype} logits"


Work = Gemm | CrossEntropy


def aligned_to(size: int) -> int:
    """The largest power of two that divides a size, up to a cache line."""
    return min(size & -size, MOST_ALIGNED)


def check(work: Work) -> None:
    """Checks that torch can run this.

    Raises:
        errors.UsageError: a number is wrong; the text says which, and what it may be.
    """
    if work.dtype not in DTYPES:
        raise errors.UsageError(f"no dtype {work.dtype!r}; there are {', '.join(DTYPES)}")
    if isinstance(work, CrossEntropy):
        named = {"rows": work.rows, "classes": work.classes}
    else:
        named = {"m": work.m, "n": work.n, "k": work.k, "batch": work.batch}
    for name, value in named.items():
        if value < 1:
            raise errors.UsageError(f"{name} is {value}: a matrix needs at least one row")
    if isinstance(work, Gemm):
        _check_multiples(work)


def _check_multiples(gemm: Gemm) -> None:
    kind = DTYPES[gemm.dtype]
    for name, value in (("n", gemm.n), ("k", gemm.k)):
        if value % kind.multiple:
            low = value // kind.multiple * kind.multiple
            raise errors.UsageError(
                f"{gemm.dtype} needs n and k to be multiples of {kind.multiple}, and {name} is "
                f"{value} (for {gemm.role}); nearest: {low or kind.multiple}, {low + kind.multiple}"
            )
    if gemm.dtype == "int8" and gemm.m <= 16:
        raise errors.UsageError(f"int8 needs m to be more than 16, and m is {gemm.m}")
    if kind.bytes == 1 and gemm.batch > 1:
        raise errors.UsageError(f"torch has no batched {gemm.dtype} product")
    if kind.bytes == 1 and gemm.library == "cublas":
        raise errors.UsageError(f"torch multiplies {gemm.dtype} by cublaslt only")


def possible(work: Work) -> bool:
    """Whether `check` passes."""
    try:
        check(work)
    except errors.UsageError:
        return False
    return True


def linear(rows: int, out: int, inner: int, dtype: str) -> dict[str, Gemm]:
    """The three products of a linear layer's training step."""
    return {
        "forward": Gemm(rows, out, inner, dtype, "forward"),
        "dgrad": Gemm(rows, inner, out, dtype, "dgrad"),
        "wgrad": Gemm(out, inner, rows, dtype, "wgrad"),
    }


def below(value: int) -> list[int]:
    """A multiple of 128 and sizes just below it, with every alignment from 1 to 128 elements."""
    top = max(128, -(-value // 128) * 128)
    return [top - step for step in STEPS] + [top]


def across_waves(
    m: int, tile_m: int, tile_n: int, multiprocessors: int, waves: int = 2
) -> list[int]:
    """Sizes of n for which the last wave of tiles is full or has just begun."""
    tall = -(-m // tile_m)
    widths: set[int] = set()
    for wave in range(1, waves + 1):
        full = multiprocessors * wave // tall * tile_n
        widths |= {full, full + 8, full + tile_n}
    return sorted(size for size in widths if size > 0)


def vary(base: Gemm, dimension: str, sizes: Iterable[int]) -> list[Gemm]:
    """The product with other sizes of one dimension, without those that its dtype forbids."""
    made = (_with(base, dimension, size) for size in sizes)
    return [gemm for gemm in made if possible(gemm)]


def _with(base: Gemm, dimension: str, size: int) -> Gemm:
    changed: dict[str, Any] = {dimension: size}
    return replace(base, **changed)


def paddings(value: int, itemsize: int) -> list[int]:
    """The larger sizes worth trying: the next multiples of 16, 32, ... 512 bytes.

    The nearest is always tried. The others are at most twice as large.
    """
    units = [max(1, size // itemsize) for size in (16, 32, 64, 128, 256, 512)]
    larger = sorted({-(-value // unit) * unit for unit in units} - {value})
    return [size for size in larger if size <= 2 * value] or larger[:1]


_RANGE = re.compile(r"(\d+):(\d+)(?::(\d+))?")
_MOST_SIZES = 4096


def sizes(text: str) -> tuple[int, ...]:
    """Reads `4096`, `4096,8192`, `4088:4104` or `4088:4104:4`. Ranges include both ends.

    Raises:
        errors.UsageError: the text has another form, or a number is not positive.
    """
    listed: list[int] = []
    for part in text.split(","):
        span = _RANGE.fullmatch(part.strip())
        try:
            new: Sequence[int] = (
                range(int(span[1]), int(span[2]) + 1, int(span[3] or 1)) if span else [int(part)]
            )
        except ValueError:
            raise errors.UsageError(
                f"{part!r} is no size; write 4096, or 4096,8192, or 4088:4104, or 4088:4104:4"
            ) from None
        if not new and int(part.partition(":")[0]) > 0:
            raise errors.UsageError(f"{part!r} is no size: it ends before it begins")
        if not new or new[0] < 1:
            raise errors.UsageError(f"{part!r}: sizes are whole numbers from 1 up")
        if len(listed) + len(new) > _MOST_SIZES:
            raise errors.UsageError(f"{text!r} is more than {_MOST_SIZES} sizes")
        listed += new
    return tuple(listed)
