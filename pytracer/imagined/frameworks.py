"""Code of frameworks that an imagined run replaces, as soon as the program imports it."""

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytracer import errors
from pytracer.basics import private_torch
from pytracer.imagined.patches import replaced
from pytracer.imagined.standins import where
from pytracer.recording.start import after_import

LBFGS: str = sys.modules[torch.optim.LBFGS.__module__].__file__ or ""
_OBSERVERS = "torch.ao.quantization.observer"
_STOPS_AT_A_WORD = "transformers.generation.stopping_criteria"


@contextlib.contextmanager
def imported() -> Iterator[None]:
    """Replaces what decides by values where the outcome for memory is known."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            replaced(torch.optim.LBFGS, "step", _to_the_end(torch.optim.LBFGS.step))
        )
        stack.callback(after_import(_STOPS_AT_A_WORD, lambda: stack.enter_context(_never_ends())))
        stack.callback(after_import(_OBSERVERS, lambda: stack.enter_context(_observed())))
        shards = private_torch.NAMES["sharded_parameter"].place.partition(":")[0]
        stack.callback(after_import(shards, lambda: stack.enter_context(_padded_once())))
        yield


def _observed() -> contextlib.AbstractContextManager[None]:
    """An observer has seen numbers, of which one is the smallest."""
    return replaced(sys.modules[_OBSERVERS], "check_min_max_valid", lambda *_: True)


def _to_the_end(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step of LBFGS, which goes on as often as it may: no change is too small."""

    @functools.wraps(step)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        (group,) = self.param_groups
        if group["line_search_fn"] is not None:
            raise errors.CannotImagine(
                f"{where()}: a line search goes where values lead, and an imagined run has none; "
                "imagine LBFGS with line_search_fn=None"
            )
        own = {name: group[name] for name in ("tolerance_grad", "tolerance_change")}
        group.update(dict.fromkeys(own, -math.inf))
        try:
            return step(self, *args, **options)
        finally:
            group.update(own)

    return run


@contextlib.contextmanager
def _padded_once() -> Iterator[None]:
    """FSDP2 pads an uneven shard once. It knows a padded one by its address, and ours have none."""
    kind = private_torch.sharded_parameter
    reset = kind.reset_sharded_param

    def reset_if_new(self: Any) -> None:
        padded: Any = vars(self).get("_sharded_param_data")
        place = self._module_info
        local = private_torch.of_this_rank(getattr(place.module, place.param_name))
        if padded is None or not _share_memory(padded, local):
            reset(self)
            return
        size, self.padded_sharded_param_size = self.padded_sharded_param_size, local.size()
        try:
            reset(self)
        finally:
            self.padded_sharded_param_size, self._sharded_param_data = size, padded

    with replaced(kind, "reset_sharded_param", reset_if_new):
        yield


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    storages = one.untyped_storage(), other.untyped_storage()
    return storages[0]._cdata == storages[1]._cdata and storages[0].nbytes() > 0


@contextlib.contextmanager
def _never_ends() -> Iterator[None]:
    """Generation goes on to its full length: no word is the last one."""
    criteria = sys.modules[_STOPS_AT_A_WORD].EosTokenCriteria

    def call(self: Any, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    never: Callable[..., Any] = call
    with replaced(criteria, "__call__", never):
        yield
