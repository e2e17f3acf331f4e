"""The mode in which tensors are fake: torch's own, with what an imagined run needs beside it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from pytracer import errors
from pytracer.basics import private_torch
from pytracer.basics.private_torch import FakeTensorMode
from pytracer.imagined.standins import where

aten = torch.ops.aten
_TAKES_A_STORAGE = frozenset((aten.set_.source_Storage, aten.set_.source_Storage_storage_offset))
_FAKE = private_torch.mode_keys.FAKE


class Mode(FakeTensorMode):
    """Never touches a device, even while the patched `torch.cuda` claims that there is one."""

    _entered = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch compile while the mode is there: see `compiled.py`."""
        return True

    @property
    def avoid_device_init(self) -> bool:
        """Keeps small known constants on the CPU."""
        return True

    def dispatch(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs an operator. Torch's cache of results would keep a storage that it was given."""
        before = self.cache_enabled
        self.cache_enabled = before and func not in _TAKES_A_STORAGE
        try:
            return super().dispatch(func, *args, **kwargs)
        finally:
            self.cache_enabled = before

    def __enter__(self) -> "Mode":
        """Counts, because torch's own code finds this mode and enters it again."""
        self._entered += 1
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the last entry."""
        super().__exit__(*error)  # type: ignore[arg-type]
        self._entered -= 1

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Makes new tensors fake, also where torch's own code has put this mode aside."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def create_symbolic_nested_int(self, **_: Any) -> Any:
        """Refuses nested tensors.

        Raises:
            errors.CannotImagine: their lengths are values.
        """
        raise errors.CannotImagine(
            f"{where()}: a nested tensor's lengths are values, which an imagined run does not have; imagine "
            "the program with padded rows"
        )

    def computes_shapes(self) -> bool:
        """Whether an operator is asked for its result's shape only, and takes no memory.

        Without us the program has no fake mode. So whoever entered one, this or another, asks for
        shapes: DTensor's sharding propagation, a compiler, the program itself. Whoever put this one
        aside, as a mesh does to cut itself, wants values.
        """
        active = private_torch.active_mode(_FAKE)
        return self._entered > 1 or (active is not None and active is not self)
