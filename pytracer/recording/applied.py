"""Makes the changes of a plan in the program that runs: those that are not of single modules."""

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from pytracer.data.changes import Changes
from pytracer.recording.start import after_import

_TRAINER = "transformers.trainer"  # the module
_HALVES = (torch.bfloat16, torch.float16)


class Applied:
    """Makes the changes that concern optimizers, DistributedDataParallel and transformers' Trainer."""

    def __init__(self, changes: Changes) -> None:
        """Changes nothing until `begin`."""
        self._changes = changes
        self._had_effect: set[str] = set()
        self._undo: list[Callable[[], object]] = []
        self._outermost: Any = None  # the module that runs under autocast, and its context
        self._context: Any = None

    def begin(self) -> None:
        """Puts the changes in place: the program has imported torch."""
        if self._changes.optimizer == "8bit":
            for kind in (torch.optim.Adam, torch.optim.AdamW):
                self._replace(kind, "__init__", self._in_8_bits)
        elif self._changes.optimizer:
            hook = register_optimizer_step_pre_hook(self._before_step)
            self._undo.append(hook.remove)
        if self._changes.set_to_none:
            self._replace(Optimizer, "zero_grad", self._zero_grad)
        if self._changes.bucket_views:
            self._replace(torch.nn.parallel.DistributedDataParallel, "__init__", self._with_views)
        if self._changes.micro_batches:
            self._undo.append(after_import(_TRAINER, self._divide))
        if self._changes.bf16:
            hooks = torch.nn.modules.module
            enter = hooks.register_module_forward_pre_hook(self._enter_autocast)
            leave = hooks.register_module_forward_hook(self._leave_autocast, always_call=True)
            self._undo += [enter.remove, leave.remove]

    def end(self) -> str:
        """Takes the changes away. Returns a sentence about one without an effect, or ""."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        return self.problem()

    def problem(self) -> str:
        """A sentence about a change that has had no effect so far; "" if all had one."""
        asked = asdict(self._changes)
        own = ("optimizer", "set_to_none", "bucket_views", "micro_batches", "bf16", "lora")
        for key in own:
            if asked[key] and key not in self._had_effect:
                return (
                    f"the plan's {key} = {json.dumps(asked[key])} changed nothing in this program"
                )
        return ""

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        before = vars(owner)[name]
        setattr(owner, name, make(before))
        self._undo.append(lambda: setattr(owner, name, before))

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """Chooses how the optimizer steps, before its first step makes its state."""
        if optimizer.state or self._changes.optimizer not in (*optimizer.defaults, "loop"):
            return
        if "foreach" not in optimizer.defaults or optimizer.defaults.get("differentiable"):
            return
        for group in optimizer.param_groups:
            group["foreach"] = self._changes.optimizer == "foreach"
            if "fused" in group:
                group["fused"] = self._changes.optimizer == "fused"
        self._had_effect.add("optimizer")

    def _in_8_bits(self, before: Callable[..., None]) -> Callable[..., None]:
        """Makes torchao's optimizer of a new Adam or AdamW, which stays the same object."""

        def init(optimizer: Any, *args: Any, **options: Any) -> None:
            before(optimizer, *args, **options)
            twin = _of_torchao(optimizer)
            if twin is not None:
                vars(optimizer).update(vars(twin))
                optimizer.__class__ = type(twin)
                self._had_effect.add("optimizer")

        return init

    def _enter_autocast(self, module: Any, _: Any) -> None:
        if self._outermost is None:
            first = next(module.parameters(), None)
            kind = "cpu" if first is None else first.device.type
            if not torch.is_autocast_enabled(kind) and first is not None:
                self._had_effect.add("bf16")
                self._outermost, self._context = module, torch.autocast(kind, torch.bfloat16)
                self._context.__enter__()

    def _leave_autocast(self, module: Any, _: Any, result: Any) -> Any:
        if module is not self._outermost:
            return None
        context, self._outermost, self._context = self._context, None, None
        context.__exit__(None, None, None)
        return _in_32_bits(result)

    def _zero_grad(self, before: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(optimizer: Any, set_to_none: bool = True) -> None:
            if not set_to_none:
                self._had_effect.add("set_to_none")
            before(optimizer, set_to_none=True)

        return zero_grad

    def _with_views(self, before: Callable[..., None]) -> Callable[..., None]:
        def init(model: Any, *args: Any, **kwargs: Any) -> None:
            if not kwargs.get("gradient_as_bucket_view"):
                self._had_effect.add("bucket_views")
            before(model, *args, **{**kwargs, "gradient_as_bucket_view": True})

        return init

    def _divide(self) -> None:
        self._replace(sys.modules[_TRAINER].Trainer, "__init__", self._with_micro_batches)

    def _with_micro_batches(self, before: Callable[..., None]) -> Callable[..., None]:
        def init(
            trainer: Any, model: Any = None, args: Any = None, *more: Any, **named: Any
        ) -> None:
            parts = self._changes.micro_batches
            size = getattr(args, "per_device_train_batch_size", 0)
            if size and size % parts == 0:
                args.per_device_train_batch_size = size // parts
                args.gradient_accumulation_steps *= parts
                self._had_effect.add("micro_batches")
            before(trainer, model, args, *more, **named)

        return init


def _of_torchao(optimizer: Any) -> Any:
    """The same optimizer with a state of 8 bits; None if torchao has none like it."""
    kinds = {torch.optim.Adam: "Adam8bit", torch.optim.AdamW: "AdamW8bit"}
    name, defaults = kinds.get(type(optimizer)), optimizer.defaults
    other = ("maximize", "capturable", "differentiable")
    if name is None or any(defaults.get(key) for key in other):
        return None
    taken = ("lr", "betas", "eps", "weight_decay", "amsgrad")
    make = getattr(importlib.import_module("torchao.optim"), name)
    return make(optimizer.param_groups, **{key: defaults[key] for key in taken})


def _in_32_bits(result: Any) -> Any:
    """The result as Accelerate gives it under mixed precision: without halves."""
    if isinstance(result, torch.Tensor):
        return result.float() if result.dtype in _HALVES else result
    if isinstance(result, dict):
        for key, value in result.items():
            result[key] = _in_32_bits(value)
    elif type(result) in (list, tuple):
        return type(result)(map(_in_32_bits, result))
    return result
