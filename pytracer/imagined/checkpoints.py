"""Checkpoints of an imagined run: they have shapes and the right size, and no values.

What the program loads again are stand-ins, too. A file's data is a hole, which takes no disk.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytracer.basics.private_torch import tree_iter
from pytracer.imagined.patches import replaced
from pytracer.recording.start import after_import

_SAFETENSORS = "safetensors.torch"
_ALIGNMENT = 8
_TYPES = {  # in the file's header
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_BY_NAME = {name: dtype for dtype, name in _TYPES.items()}


def saving(save: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.save`, which leaves out the values."""

    def save_shapes(*arguments: Any, **options: Any) -> Any:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            return save(*arguments, **options)

    return save_shapes


def loading(load: Callable[..., Any], back: Callable[[list[Any]], None]) -> Callable[..., Any]:
    """`torch.load`; `back` gives memory to the tensors that it makes."""

    def load_shapes(*arguments: Any, **options: Any) -> Any:
        loaded = load(*arguments, **options)
        back([one for one in tree_iter(loaded) if isinstance(one, torch.Tensor)])
        return loaded

    return load_shapes


@contextlib.contextmanager
def of_safetensors() -> Iterator[None]:
    """Replaces how safetensors writes, as soon as the program imports it."""
    with contextlib.ExitStack() as stack:
        stack.callback(after_import(_SAFETENSORS, lambda: stack.enter_context(_without_values())))
        yield


@contextlib.contextmanager
def _without_values() -> Iterator[None]:
    module: Any = sys.modules[_SAFETENSORS]
    with contextlib.ExitStack() as stack:
        for name in ("_flatten", "_flatten_as_ptr"):  # before version 0.8, and since
            if hasattr(module, name):
                stack.enter_context(replaced(module, name, lambda tensors, *_: tensors))
        stack.enter_context(replaced(module, "serialize_file", _write_shapes))
        stack.enter_context(replaced(module, "serialize", _shapes_as_bytes))
        stack.enter_context(replaced(module, "safe_open", _Shapes))
        yield


def _write_shapes(tensors: Any, filename: Any, metadata: Any = None) -> None:
    header, size = _header(tensors, metadata)
    with open(filename, "wb") as file:  # noqa: PTH123 - as the program names it
        file.write(header)
        os.ftruncate(file.fileno(), len(header) + size)


def _shapes_as_bytes(tensors: Any, metadata: Any = None) -> bytes:
    header, size = _header(tensors, metadata)
    return header + bytes(size)


def _header(tensors: Any, metadata: Any) -> tuple[bytes, int]:
    """The file's beginning, and the size of the data behind it."""
    rows: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        shape = [int(size) for size in tensor.shape]
        rows[name] = {"dtype": _TYPES[tensor.dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(rows).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, at


class _Shapes(contextlib.AbstractContextManager["_Shapes"]):
    """`safe_open`, which makes a stand-in of each shape in the file."""

    def __init__(self, filename: Any, framework: str = "pt", device: Any = "cpu", **_: Any) -> None:
        self._device = torch.device(device)
        with open(filename, "rb") as file:  # noqa: PTH123 - as the program names it
            size = int.from_bytes(file.read(8), "little")
            self._rows: dict[str, Any] = json.loads(file.read(size))
        self._metadata = self._rows.pop("__metadata__", None)

    def __exit__(self, *_: object) -> None:
        pass

    def metadata(self) -> Any:
        return self._metadata

    def keys(self) -> list[str]:
        return list(self._rows)

    def get_tensor(self, name: str) -> torch.Tensor:
        row = self._rows[name]
        return torch.empty(row["shape"], dtype=_BY_NAME[row["dtype"]], device=self._device)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self._rows}
