"""Operators as a device runs them, where torch's fake tensors have no kernel or another one.

Four classes differ:

- An operator that only writes in place returns nothing new, so it needs no kernel here.
- A torch for the CPU has no kernels of CUDA. If an operator has a formula beside them, torch takes it
  apart into the formula's operators. `place` restores the whole operator.
- Some operators run others, whose results are scratch (`COMPOSED`). A fake kernel has the result only.
- The operators in `Kernels` have no fake kernel, or one that refuses what the device takes.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pytracer import errors
from pytracer.basics import private_torch
from pytracer.imagined import attention, batch_norms, ctc, recurrent, scratch, shapes
from pytracer.imagined.standins import where

aten = torch.ops.aten
COMPOSED = frozenset(
    (
        aten._safe_softmax.default,
        aten._euclidean_dist.default,
        aten.affine_grid_generator.default,
    )
)
_FORMULA, _CUDA = "CompositeImplicitAutograd", "CUDA"
_ALIGNMENT = 16  # bytes of a row of a grouped product


def place(library: Any) -> None:
    """Registers a kernel of CUDA for each operator that torch would take apart without one.

    Nobody runs it, because the tensors are fake. It only keeps the operator whole.
    """
    if private_torch.has_kernel("aten::mm", _CUDA):
        return  # a torch for CUDA has them all
    for name in _with_a_formula():
        library.impl(name, _never_runs, _CUDA)


def _never_runs(*_: Any, **__: Any) -> Any:
    raise errors.CannotImagine("a tensor of CUDA that is not imagined cannot be computed here")


@cache
def _with_a_formula() -> tuple[str, ...]:
    """The operators with kernels of CUDA beside a formula."""
    return tuple(_that_have_both(listed()))


def listed() -> dict[str, str]:
    """Torch's own list of its operators: what it says of each."""
    folder = Path(private_torch.code_generator.__file__).parent
    text = (folder / "packaged/ATen/native/native_functions.yaml").read_text(encoding="utf-8")
    return {block.partition("(")[0]: block for block in text.split("\n- func: ")[1:]}


def _that_have_both(blocks: dict[str, str]) -> Iterator[str]:
    for name, block in blocks.items():
        keys = _keys(block)
        if _FORMULA not in keys:
            continue
        delegate = re.search(r"^  structured_delegate: (\S+)$", block, re.M)
        if delegate is not None:
            keys |= _keys(blocks[delegate[1]])
        if _CUDA in keys:
            yield name


def _keys(block: str) -> set[str]:
    found = re.findall(r"^    ([A-Za-z0-9_, ]+):", block, re.M)
    return {key.strip() for keys in found for key in keys.split(",")}


_FOREIGN = (
    "has no fake kernel, which computes the shape of its result: register one with "
    "torch.library.register_fake"
)
_OF_TORCH = (
    "cannot be imagined: this torch does not compute the shape of its result without values; skip it "
    "while imagining: `if not pytracer.is_imagining():`"
)


def in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator without a fake kernel returns that makes nothing new.

    Raises:
        errors.CannotImagine: its result is new, so its shape is not known.
    """
    schema = func._schema
    given = dict(zip((one.name for one in schema.arguments), args, strict=False)) | kwargs
    written = {
        alias: given[one.name]
        for one in schema.arguments
        if one.alias_info is not None and one.alias_info.is_write and one.name in given
        for alias in one.alias_info.before_set
    }
    results = []
    for one in schema.returns:
        alias = None if one.alias_info is None else next(iter(one.alias_info.before_set), None)
        if alias not in written:
            why = _OF_TORCH if func.namespace == "aten" else _FOREIGN
            raise errors.CannotImagine(f"{where()}: {func} {why}")
        results.append(written[alias])
    return tuple(results) if len(results) > 1 else next(iter(results), None)


def check_layout(func: Any, result: Any) -> None:
    """Refuses a sparse tensor.

    Raises:
        errors.CannotImagine: how many numbers the result has depends on values.
    """
    if isinstance(result, torch.Tensor) and result.layout is not torch.strided:
        raise errors.CannotImagine(
            f"{where()}: {func} makes a sparse tensor, whose bytes depend on values; "
            "imagine the program with a dense one"
        )


def of_operators(func: Any) -> Callable[..., Any]:
    """What an operator does that is given others: it runs them, as it does on a device.

    Raises:
        errors.CannotImagine: torch does not say what it runs.
    """
    whole = func.py_kernels.get(private_torch.dispatch_keys.CompositeExplicitAutograd)
    runs: Callable[..., Any] | None = whole or private_torch.higher_order_shapes.get(func)
    if runs is None:
        raise errors.CannotImagine(f"{where()}: {func} has no fake kernel")
    return runs


class Kernels:
    """Fake kernels for operators of torch's own."""

    def __init__(
        self,
        take: Callable[[scratch.Scratch], None],
        back: Callable[[list[Any]], None],
        operator: Any,
    ) -> None:
        """Runs nothing yet.

        Args:
            take: takes the scratch of a call.
            back: gives memory to tensors.
            operator: the card's attention, if there is a card.
        """
        self._take = take
        self._wanted: list[scratch.Scratch] = []
        wants = self._wanted.append

        def grouped(a: Any, b: Any, offs: Any = None, *rest: Any, **options: Any) -> Any:
            if operator is not None and a.dtype == b.dtype == torch.bfloat16:
                groups = a.shape[0] if offs is None else offs.shape[0]
                wants(scratch.of_grouped_product(groups, operator.processors, operator.capability))
            return _grouped_product(a, b, offs, *rest, **options)

        self._run: dict[Any, Callable[..., Any]] = {aten._grouped_mm.default: grouped}
        self._run |= {**ctc.kernels(wants), **attention.kernels(wants, operator)}
        self._run |= batch_norms.kernels(wants)
        self._run |= recurrent.Kernels(take, back, operator).run | shapes.kernels() | _waits()

    def __contains__(self, func: Any) -> bool:
        """Whether the operator has a kernel here."""
        return func in self._run

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator returns."""
        return self._run[func](*args, **kwargs)

    def take_scratch(self) -> None:
        """Takes the scratch of the operator that ran, now that its results have memory."""
        while self._wanted:
            self._take(self._wanted.pop())


def _waits() -> dict[Any, Callable[..., Any]]:
    """A wait for other ranks returns its tensors themselves. Torch's fake kernels return new ones."""
    if not torch.distributed.is_available():
        return {}
    operators = private_torch.collectives
    names = [name for name in ("wait_tensor", "wait_tensors") if hasattr(operators, name)]
    return {getattr(operators, name).default: lambda waited: waited for name in names}


def _grouped_product(
    a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Any:
    """`create_grouped_gemm_output_tensor` of native/GroupedMMUtils.h: rows of whole 16 bytes."""
    flat, flat_b = a.dim() == 2, b.dim() == 2
    shape: tuple[int, ...]
    if flat and flat_b:
        shape = (offs.shape[0], a.shape[0], b.shape[1])
    elif flat:
        shape = (a.shape[0], b.shape[-1])
    elif flat_b:
        shape = (a.shape[1], b.shape[1])
    else:
        shape = (a.shape[0], a.shape[1], b.shape[-1])
    dtype = out_dtype or a.dtype
    per_row = _ALIGNMENT // dtype.itemsize
    row = shape[-1] + -shape[-1] % per_row
    stride = (row, 1) if flat != flat_b else (shape[1] * row, row, 1)
    return torch.empty_strided(shape, stride, dtype=dtype, device=a.device)
