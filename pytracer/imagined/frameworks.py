"""Code of frameworks that an imagined run replaces, as soon as the program imports it."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytracer.imagined.patches import replaced
from pytracer.start import after_import

_STOPS_AT_A_WORD = "transformers.generation.stopping_criteria"


@contextlib.contextmanager
def eager(compiled: list[str]) -> Iterator[None]:
    """Runs functions that the program compiles as they are, and notes their names."""

    def compile_(model: Any = None, **_: Any) -> Any:
        if model is None:
            return compile_
        compiled.append(getattr(model, "__name__", type(model).__name__))
        return model

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(torch, "compile", compile_))
        if "torch._dynamo" in sys.modules:  # functions may have been compiled before
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextlib.contextmanager
def imported() -> Iterator[None]:
    """Replaces what decides by values where the outcome for memory is known."""
    with contextlib.ExitStack() as stack:
        stack.callback(after_import(_STOPS_AT_A_WORD, lambda: stack.enter_context(_never_ends())))
        yield


@contextlib.contextmanager
def _never_ends() -> Iterator[None]:
    """Generation goes on to its full length: no word is the last one."""
    criteria = sys.modules[_STOPS_AT_A_WORD].EosTokenCriteria

    def call(self: Any, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    never: Callable[..., Any] = call
    with replaced(criteria, "__call__", never):
        yield
