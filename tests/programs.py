"""Programs that use torch in the ways people do, for tests that run them with and without a trace.

Each is a function of the device that returns what its user would look at. One that places the
traced block itself takes `block` as well and says `own_block=True`.
"""

import asyncio
import copy
import gc
import inspect
import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import checkpoint as recompute

from tests.transparency.observe import Block, Program, gradients

PROGRAMS: dict[str, Program] = {}
F = TypeVar("F", bound=Callable[..., Any])

NO_PARAMETERS = "a tensor that hooks have handled is no Parameter any more"


def program(**facts: Any) -> Callable[[F], F]:
    def add(run: F) -> F:
        row = Program(run, **facts)
        PROGRAMS[row.name] = row
        return run

    return add


# -------------------------------------------------------------------------- the models


class Block2(nn.Module):
    """A residual block with state (batch norm) and randomness (dropout)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.first(self.norm(x)))
        return x + self.drop(self.second(hidden))


def make_model(device: str, depth: int = 2) -> nn.Sequential:
    return nn.Sequential(*(Block2() for _ in range(depth)), nn.Linear(8, 3)).to(device)


def batch(device: str, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 8, device=device)


def train(
    model: nn.Module, device: str, steps: int = 3, optimizer: Any = None
) -> tuple[list[float], nn.Module]:
    """Losses, and the model (compared by state and gradients)."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch(device)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def caught(function: Callable[[], Any]) -> list[str]:
    """What a call raises: its type and text."""
    try:
        function()
    except BaseException as error:
        return [type(error).__name__, str(error)]
    return ["nothing was raised"]


# -------------------------------------------------------------------------- plain training


@program()
def training_made_inside(device: str) -> Any:
    return train(make_model(device), device)


@program(own_block=True)
def training_made_before(device: str, block: Block) -> Any:
    model = make_model(device)
    optimizer = torch.optim.Adam(model.parameters(), fused=None)
    before = train(model, device, 1, optimizer)
    with block():
        inside = train(model, device, 2, optimizer)
    return before, inside, train(model, device, 1, optimizer)


@program()
def every_optimizer(device: str) -> Any:
    kinds: list[Any] = [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.Adam(p, fused=True),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.RMSprop(p, centered=True),
    ]
    return [
        train(make_model(device, 1), device, 2, kind(list(m.parameters())))
        for kind in kinds
        for m in [make_model(device, 1)]
    ]


@program()
def lbfgs_calls_a_closure(device: str) -> Any:
    model = nn.Linear(8, 3).to(device)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = batch(device)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return [float(optimizer.step(closure)) for _ in range(2)], model


@program()
def gradient_accumulation_and_clipping(device: str) -> Any:
    model = make_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for _ in range(2):
        for _ in range(3):
            (model(batch(device)).square().mean() / 3).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return norms, model


@program()
def optimizer_in_backward(device: str) -> Any:
    model = make_model(device)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    order = []

    def step(parameter: torch.Tensor) -> None:
        order.append(tuple(parameter.shape))
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    losses = []
    for _ in range(3):
        loss = model(batch(device)).square().mean()
        loss.backward()
        losses.append(loss.item())
    for handle in handles:
        handle.remove()
    return losses, model, order


# -------------------------------------------------------------------------- autograd


def modified_in_place(device: str, change: str) -> Any:
    x = torch.randn(3, 4, device=device, requires_grad=True)
    weight = nn.Parameter(torch.randn(4, 4, device=device))
    if change == "input":
        kept = x * 2
        loss = (kept @ weight).sum()
        kept.add_(1)
    elif change == "output":
        kept = (x * 2).sigmoid()
        loss = kept.sum()
        kept.add_(1)
    elif change == "leaf":
        loss = (x * weight[:3]).sum()
        with torch.no_grad():
            weight.add_(1)
    elif change == "view":
        kept = x * 2
        loss = kept[0].exp().sum() + kept[1].square().sum()
        kept[1].mul_(2)
    else:
        kept = x * 2
        loss = (kept * kept).sum()
        with torch.no_grad():
            kept[0].zero_()
    return caught(loss.backward)


@program()
def in_place_modification_is_an_error(device: str) -> Any:
    changes = ("input", "output", "leaf", "view", "view without grad")
    return {change: modified_in_place(device, change) for change in changes}


@program()
def in_place_modification_under_anomaly_detection(device: str) -> Any:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        return modified_in_place(device, "output")


@program()
def freed_graph_is_an_error(device: str) -> Any:
    x = torch.randn(3, device=device, requires_grad=True)
    loss = (x * x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return caught(loss.backward), x.grad, caught(lambda: (x * 2).backward())


@program()
def double_backward(device: str) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    x = batch(device).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    penalty.backward()
    return slope, penalty, model, x.grad


@program()
def gradients_by_autograd_grad(device: str) -> Any:
    model = make_model(device)
    x = batch(device).requires_grad_()
    out = model(x)
    wanted = [x, *model.parameters()]
    first = torch.autograd.grad(out.sum(), wanted, retain_graph=True, allow_unused=True)
    batched = torch.autograd.grad(
        out, x, torch.eye(18, device=device).view(18, 6, 3), is_grads_batched=True
    )
    return first, batched, caught(lambda: torch.autograd.grad(out.sum(), [torch.ones(1)]))


@program()
def gradcheck_and_gradgradcheck(device: str) -> Any:
    weight = torch.randn(3, 3, dtype=torch.double, device=device, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x @ x.t()).tanh().cumsum(0)

    return [
        torch.autograd.gradcheck(function, (weight,)),
        torch.autograd.gradgradcheck(function, (weight,)),
    ]


@program()
def hooks_on_tensors_and_nodes(device: str) -> Any:
    heard: list[Any] = []
    x = batch(device).requires_grad_()
    hidden = x.square()
    hidden.retain_grad()
    hidden.register_hook(lambda g: heard.append(("tensor", g.clone())))
    hidden.grad_fn.register_prehook(lambda g: heard.append(("before", len(g))))
    hidden.grad_fn.register_hook(lambda i, o: heard.append(("after", len(i), len(o))))
    x.register_hook(lambda g: g * 2)
    hidden.sum().backward()
    return heard, x.grad, hidden.grad


@program()
def graph_of_nodes(device: str) -> Any:
    model = make_model(device)
    loss = model(batch(device)).sum()
    names, queue = [], [loss.grad_fn]
    while queue:
        node = queue.pop(0)
        if node is not None:
            names.append((node.name(), sorted(k for k in dir(node) if k.startswith("_saved"))))
            queue += [n for n, _ in node.next_functions]
    return names


class Doubled(torch.autograd.Function):
    """Saves an input that is a Parameter, and an output."""

    seen: list[Any] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
        out = x * weight
        ctx.save_for_backward(x, weight, out)
        ctx.weight = weight
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, out = ctx.saved_tensors
        Doubled.seen.append((out.requires_grad, weight.requires_grad, float(out.sum())))
        Doubled.seen.append(weight is ctx.weight and type(weight).__name__)
        Doubled.seen.append(getattr(weight, "main_grad", None))
        return grad * weight, (grad * x).sum(0)


def custom_function(device: str) -> Any:
    Doubled.seen = []
    weight = nn.Parameter(torch.randn(8, device=device))
    weight.main_grad = "kept by the program"  # type: ignore[attr-defined]
    x = batch(device).requires_grad_()
    Doubled.apply(x, weight).sum().backward()
    return Doubled.seen, x.grad, weight.grad


@program(hooks=NO_PARAMETERS)
def custom_function_gets_its_own_parameter_back(device: str) -> Any:
    return custom_function(device)


@program()
def custom_function_saves_inputs_and_outputs(device: str) -> Any:
    seen, *grads = custom_function(device)
    return seen[0], grads


@program()
def user_saved_tensor_hooks(device: str) -> Any:
    sizes: list[Any] = []

    def pack(x: torch.Tensor) -> Any:
        sizes.append(tuple(x.shape))
        return x.detach().cpu()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.to(device)):
        result = train(make_model(device), device, 2)
    return result, sizes


@program(own_block=True)
def user_saved_tensor_hooks_from_before(device: str, block: Block) -> Any:
    packed: list[Any] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda x: packed.append(tuple(x.shape)) or x.detach(), lambda x: x
    )
    with hooks, block():
        result = train(make_model(device), device, 2)
    return result, packed


@program(own_block=True)
def user_saved_tensor_hooks_left_after_the_block(device: str, block: Block) -> Any:
    packed: list[Any] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda x: packed.append(tuple(x.shape)) or x.detach(), lambda x: x
    )
    model = make_model(device)
    with block():
        hooks.__enter__()
        inside = train(model, device, 1)
    after = train(model, device, 1)
    hooks.__exit__()
    return inside, after, train(model, device, 1), packed


@program()
def saved_tensor_hooks_forbidden(device: str) -> Any:
    def push() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            pass

    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        inner = caught(push)
        with torch.autograd.graph.disable_saved_tensors_hooks("nor here"):
            innermost = caught(push)
        result = train(make_model(device), device, 1)
    return inner, innermost, result, caught(push)


@program(own_block=True)
def saved_tensor_hooks_forbidden_from_before(device: str, block: Block) -> Any:
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        with block():
            result = train(make_model(device), device, 1)
    return result


@program()
def activations_saved_on_the_cpu(device: str) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return train(make_model(device), device)


# -------------------------------------------------------------------------- torch.func


def pure(model: nn.Module) -> Callable[..., torch.Tensor]:
    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    return loss


@program()
def func_transforms(device: str) -> Any:
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    parameters = {k: v.detach() for k, v in model.named_parameters()}
    x = batch(device)
    loss = pure(model)
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    return [
        torch.func.grad(loss)(parameters, x),
        torch.func.grad_and_value(loss)(parameters, x),
        per_sample(parameters, x.unsqueeze(1)),
        torch.func.jacrev(model)(x[0]),
        torch.func.jacfwd(model)(x[0]),
        torch.func.hessian(lambda y: model(y).square().sum())(x[0]),
        torch.func.vjp(model, x)[1](torch.ones(6, 2, device=device)),
        torch.func.jvp(model, (x,), (x,)),
        torch.func.functional_call(model, parameters, (x,)),
    ]


@program(own_block=True)
def func_transforms_around_the_block(device: str, block: Block) -> Any:
    model = nn.Linear(8, 2).to(device)

    def loss(x: torch.Tensor) -> torch.Tensor:
        with block():
            return model(x).square().mean()

    return torch.func.grad(loss)(batch(device)), train(model, device, 1)


@program()
def func_transform_with_user_hooks_is_an_error(device: str) -> Any:
    def run() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            torch.func.grad(torch.sum)(batch(device))

    return caught(run), train(make_model(device), device, 1)


@program()
def forward_mode(device: str) -> Any:
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh()).to(device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(batch(device), batch(device))
        return torch.autograd.forward_ad.unpack_dual(model(dual))


# -------------------------------------------------------------------------- checkpointing


def with_checkpoints(device: str, **options: Any) -> Any:
    model = make_model(device, 3)
    first, *rest = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        x = first(batch(device))
        for part in rest:
            x = recompute.checkpoint(part, x, **options)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@program()
def checkpoint_reentrant(device: str) -> Any:
    return with_checkpoints(device, use_reentrant=True)


@program()
def checkpoint_non_reentrant(device: str) -> Any:
    return with_checkpoints(device, use_reentrant=False)


@program()
def checkpoint_nested(device: str) -> Any:
    model = make_model(device, 2)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return recompute.checkpoint(model, x.sin(), use_reentrant=False)

    loss = recompute.checkpoint(outer, batch(device), use_reentrant=False).sum()
    loss.backward()
    return loss, model


@program()
def checkpoint_selective(device: str) -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        keep = op == torch.ops.aten.addmm.default
        kinds = recompute.CheckpointPolicy
        return kinds.MUST_SAVE if keep else kinds.PREFER_RECOMPUTE

    def contexts() -> Any:
        return recompute.create_selective_checkpoint_contexts(policy)

    return with_checkpoints(device, use_reentrant=False, context_fn=contexts)


@program()
def checkpoint_that_does_not_repeat_itself(device: str) -> Any:
    calls = []

    def different(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin().sum() if len(calls) == 1 else x.sin()[:2].sum()

    x = batch(device).requires_grad_()
    loss = recompute.checkpoint(different, x, use_reentrant=False)
    return caught(loss.backward)
