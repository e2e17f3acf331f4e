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
import re
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.utils import checkpoint as recompute

from tests.transparency.observe import Block, Program, freeze, gradients, registries

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
    error = caught(loss.backward)
    # A GPU's backward has a thread of its own. What saved-tensor hooks packed it lets go when Python
    # lets it, some time after we are told of the error, but before it begins with the next.
    torch.ones((), device=device, requires_grad=True).backward()
    return error


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


# Untraced too, 17 of 700 runs on a GPU peak at 1 KiB more.
@program(timed=True)
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

    seen: ClassVar[list[Any]] = []

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
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), block():
        return train(make_model(device), device, 1)


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


# -------------------------------------------------------------------------- modules


@program()
def hooks_on_modules(device: str) -> Any:
    heard: list[Any] = []
    model = make_model(device, 1)
    first = model[0]
    first.register_forward_pre_hook(lambda m, a: heard.append(("pre", len(a))))
    first.register_forward_hook(lambda m, a, out: out * 2)
    first.register_full_backward_pre_hook(lambda m, g: heard.append(("back pre", len(g))))
    first.register_full_backward_hook(lambda m, i, o: heard.append(("back", len(i), len(o))))
    first.register_forward_hook(lambda m, a, k, o: heard.append(sorted(k)), with_kwargs=True)
    return train(model, device, 2), heard


@program(own_block=True)
def global_module_hooks_of_the_user(device: str, block: Block) -> Any:
    from torch.nn.modules import module

    heard: list[str] = []
    model = make_model(device)
    with module.register_module_forward_pre_hook(lambda m, a: heard.append(type(m).__name__)):
        with block():
            inside = train(model, device, 1)
        after = train(model, device, 1)
    return inside, after, heard


class OwnCall(nn.Linear):
    def __call__(self, *args: Any, scale: float = 1.0, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * scale


class Attributes(nn.Module):
    """Takes many arguments, returns a dict, fails when told to."""

    def forward(self, a: torch.Tensor, *rest: Any, fail: str = "", **named: Any) -> Any:
        if fail:
            raise ValueError(fail)
        return {"sum": a.sum(), "rest": len(rest), "named": sorted(named)}


@program()
def module_calls_of_every_shape(device: str) -> Any:
    x = batch(device)
    module = Attributes()
    many = {f"k{i}": i for i in range(30)}
    bound = OwnCall(8, 2).to(device)
    return [
        bound(x, scale=2.0),
        bound.__call__(x),
        nn.Module.__call__(bound, input=x),
        module(x),
        module(x, *range(20)),
        module(x, *range(20), **many),
        caught(lambda: module()),
        caught(lambda: module(x, fail="as told")),
        caught(lambda: nn.Module.__call__()),  # type: ignore[call-arg]
        caught(lambda: nn.Module()(x)),
        caught(lambda: bound(torch.randn(2, 3, device=device))),
    ]


@program(empty=True)
def what_introspection_sees(device: str) -> Any:
    model = nn.Linear(8, 3).to(device)
    call = nn.Module.__call__
    return [
        str(inspect.signature(model)),
        str(inspect.signature(call)),
        str(inspect.signature(model.__call__)),
        inspect.isfunction(call),
        inspect.ismethod(model.__call__),
        callable(model),
        call.__name__,
        call.__qualname__,
        call.__code__.co_name,
        inspect.getsourcelines(call)[1],
        isinstance(model, nn.Module),
        [name for name in dir(model) if name not in dir(object)],
        inspect.signature(torch.autograd._engine_run_backward).parameters.keys(),  # type: ignore[attr-defined]
    ]


class Deep(nn.Module):
    def __init__(self, inner: nn.Module | None) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() if self.inner is None else self.inner(x) + 1


@program()
def deeply_nested_modules(device: str) -> Any:
    model: nn.Module = Deep(None)
    for _ in range(150):
        model = Deep(model)
    x = batch(device).requires_grad_()
    model(x).sum().backward()
    return x.grad


class Endless(nn.Module):
    depth = 0

    def forward(self, x: torch.Tensor) -> Any:
        Endless.depth += 1
        return self(x)


@program()
def recursion_without_end_is_an_error(device: str) -> Any:
    Endless.depth = 0
    x = batch(device)
    error = caught(lambda: Endless()(x))
    return error, Endless.depth


@program()
def model_and_optimizer_die_inside(device: str) -> Any:
    model = make_model(device)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, device, 2, optimizer)
    alive = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].first.weight)]
    del model, optimizer
    gc.collect()
    return [reference() is None for reference in alive], train(make_model(device), device, 1)


@program(own_block=True)
def model_dies_when_it_would(device: str, block: Block) -> Any:
    """Without the garbage collector, where it is freed by reference counts alone."""
    died: list[str] = []
    with block():
        model = nn.Linear(8, 3).to(device)
        weakref.finalize(model, died.append, "model")
        weakref.finalize(model.weight, died.append, "weight")
        loss = model(batch(device)).sum()
        weakref.finalize(loss, died.append, "loss")
        loss.backward()
        del loss
        died.append("before")
        del model
        died.append("after")
    return died


@program()
def conversion_that_swaps_parameters(device: str) -> Any:
    """torch refuses it while anybody holds a weak reference to the tensor."""
    model = make_model(device)
    train(model, device, 1)
    model.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    model(batch(device).double()).sum().backward()
    return model


@program()
def tensors_in_cycles(device: str) -> Any:
    seen = []
    for _ in range(3):
        node: dict[str, Any] = {"tensor": torch.randn(10, device=device)}
        node["self"] = node
        seen.append(weakref.ref(node["tensor"]))
        del node
    before = [reference() is None for reference in seen]
    gc.collect()
    return before, [reference() is None for reference in seen]


@program()
def copies_of_a_model(device: str) -> Any:
    model = make_model(device)
    train(model, device, 1)
    copied = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    torch.manual_seed(1)
    first = train(copied, device, 1)
    torch.manual_seed(1)
    return (
        first,
        train(loaded, device, 1),
        pickle.loads(pickle.dumps(model[2].__call__))(batch(device)),
    )


# -------------------------------------------------------------------------- kinds of tensors


class Logged(torch.Tensor):
    """Hears every function called on it."""

    heard: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Logged.heard.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


@program()
def subclass_with_torch_function(device: str) -> Any:
    model = nn.Linear(8, 3).to(device)
    model.weight = nn.Parameter(model.weight.detach().as_subclass(Logged))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = batch(device).as_subclass(Logged)
    Logged.heard = []
    for _ in range(2):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return Logged.heard, loss.as_subclass(torch.Tensor), type(model.weight).__name__


@program()
def modes_that_hear_every_operator(device: str) -> Any:
    from torch.overrides import TorchFunctionMode

    calls: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    model = make_model(device, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with Functions():
        return train(model, device, 2, optimizer), calls


@program(hooks="torch detaches what it hands to a hook, and a mode hears that")
def modes_that_hear_every_dispatch(device: str) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: list[str] = []

    class Dispatches(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    model = make_model(device, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with Dispatches():
        return train(model, device, 2, optimizer), calls


@program()
def wrapper_subclass(device: str) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(8, 3).to(device)
    model.weight = nn.Parameter(TwoTensor(model.weight.detach(), model.weight.detach().clone()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model(batch(device)).sum().backward()
        optimizer.step()
    weight: Any = model.weight
    return weight.a, weight.b, weight.grad.a


@program(empty=True)
def fake_and_meta_tensors(device: str) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.device(device):
        fake = nn.Sequential(Block2(), nn.Linear(8, 3))
        out = fake(batch(device))
        out.sum().backward()
        shapes = [str(out.device), list(out.shape), type(fake[0].first.weight.grad).__name__]
    with torch.device("meta"):
        meta = make_model("meta")
    meta_out = meta(torch.randn(6, 8, device="meta"))
    meta_out.sum().backward()
    real = meta.to_empty(device=device)
    return shapes, meta_out, [str(p.device) for p in real.parameters()]


@program()
def default_device_and_dtype(device: str) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(torch.float64)
    try:
        return train(make_model(device), device, 2), torch.ones(3)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


@program()
def inference_mode_and_no_grad(device: str) -> Any:
    model = make_model(device).eval()
    with torch.inference_mode():
        out = model(batch(device))
    with torch.no_grad():
        quiet = model(batch(device))
    error = caught(lambda: model(out[:, :1].expand(6, 8)).sum().backward())
    return out.is_inference(), quiet, error


@program(devices=("cpu",))
def sparse_nested_and_quantised(device: str) -> Any:
    table = nn.EmbeddingBag(20, 8, sparse=True, mode="sum").to(device)
    optimizer = torch.optim.SparseAdam(table.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.randint(20, (4, 3), device=device)).sum().backward()
        optimizer.step()
    csr = torch.eye(4, device=device).to_sparse_csr()
    linear = nn.Linear(8, 3).to(device)
    jagged = torch.nested.nested_tensor(
        [torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged, device=device
    )
    strided = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], device=device)
    quantised = torch.quantize_per_tensor(torch.randn(4, 8), 0.1, 0, torch.qint8)
    linear(jagged).values().sum().backward()
    return [
        table,
        csr @ torch.randn(4, 2, device=device),
        linear(strided),
        nn.ReLU()(quantised),
        linear.weight.grad,
    ]


@program()
def storages_shared_resized_and_aliased(device: str) -> Any:
    x = torch.randn(8, device=device)
    linear = nn.Linear(8, 8).to(device)
    linear(x)
    x.untyped_storage().resize_(0)
    emptied = x.untyped_storage().nbytes()
    x.untyped_storage().resize_(32)
    x.copy_(torch.ones(8, device=device))
    alias = torch._lazy_clone(x)
    alias.add_(1)
    seen = [emptied, linear(x), alias, x]
    if device == "cpu":
        shared = torch.randn(8)
        linear(shared)
        array = shared.numpy()
        array[0] = 7
        seen += [shared.clone(), linear(torch.from_numpy(array.copy())), shared.share_memory_()]
        seen.append(torch.frombuffer(bytearray(32), dtype=torch.float32))
    return seen


# -------------------------------------------------------------------------- threads, processes


@program(timed=True)
def threads_that_train_at_once(device: str) -> Any:
    models = [make_model(device, 1) for _ in range(3)]
    results: dict[int, Any] = {}
    x = batch(device)

    def work(number: int) -> None:
        model = models[number].eval()  # dropout would share the random generator
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        results[number] = [loss.item(), model]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(3)]


@program()
def thread_that_uses_func_while_another_trains(device: str) -> Any:
    turns = [threading.Event() for _ in range(2)]
    result: list[Any] = []

    def work() -> None:
        def loss(x: torch.Tensor) -> torch.Tensor:
            turns[0].set()
            turns[1].wait(10)
            return x.square().sum()

        result.append(torch.func.grad(loss)(torch.ones(3, device=device)))

    thread = threading.Thread(target=work)
    thread.start()
    turns[0].wait(10)
    trained = train(make_model(device), device, 1)
    turns[1].set()
    thread.join()
    return trained, result, train(make_model(device), device, 1)


@program(own_block=True)
def trace_in_a_thread(device: str, block: Block) -> Any:
    result: list[Any] = []

    def work() -> None:
        with block():
            result.append(train(make_model(device), device, 2))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return result, train(make_model(device), device, 1)


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        calls = torch.nn.Module.__dict__["__call__"] is torch.nn.Module._wrapped_call_impl
        return torch.full((8,), float(index)), calls, nn.Linear(8, 1).in_features


def load_and_train(device: str, how: str) -> Any:
    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=4, num_workers=2, multiprocessing_context=how
    )
    model = nn.Linear(8, 1).to(device)
    untouched = []
    for x, calls, _ in loader:
        model(x.to(device)).sum().backward()
        untouched.append(calls)
    return model, untouched


@program(fresh=True)
def data_loader_forks(device: str) -> Any:
    return load_and_train(device, "fork")


@program(fresh=True)
def data_loader_spawns(device: str) -> Any:
    return load_and_train(device, "spawn")


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child, and the child's exit status."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(writing, pickle.dumps(freeze(work())))
            status = 0
        except BaseException as error:
            os.write(writing, pickle.dumps(f"{type(error).__name__}: {error}"))
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        result = pickle.loads(pipe.read())
    return result, os.waitpid(child, 0)[1]


@program(fresh=True, imports="torch._dynamo", devices=("cpu",))
def fork_inside_and_the_child_trains(device: str) -> Any:
    model = make_model(device)
    before = train(model, device, 1)
    child = in_child(lambda: train(model, device, 2))
    return before, child, train(model, device, 2)


@program(fresh=True, imports="torch._dynamo", devices=("cpu",), own_block=True)
def fork_inside_and_the_child_traces(device: str, block: Block) -> Any:
    def work() -> Any:
        inner = Block(block.mode)
        with inner():
            result = train(make_model(device), device, 2)
        for t in inner.traces:
            assert len(t.data.events.ticks) > 0
            assert t.data.losses == {}
        return result

    with block():
        before = train(make_model(device), device, 1)
        child = in_child(work)
        after = train(make_model(device), device, 1)
    return before, child, after


@program(fresh=True, imports="torch._dynamo", devices=("cpu",), own_block=True)
def fork_inside_and_the_child_leaves_the_block(device: str, block: Block) -> Any:
    child = -1
    reading, writing = os.pipe()
    with block():
        before = train(make_model(device), device, 1)
        child = os.fork()
    if child == 0:
        result = freeze(train(make_model(device), device, 1))
        os.write(writing, pickle.dumps([result, registries()["Module.__call__"]]))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        in_the_child = pickle.loads(pipe.read())
    return before, in_the_child, os.waitpid(child, 0)[1]


# -------------------------------------------------------------------------- traces among traces


@program(own_block=True)
def traces_one_after_the_other(device: str, block: Block) -> Any:
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(4):
        with block():
            losses.append(train(model, device, 1, optimizer))
    return losses


@program(own_block=True)
def trace_inside_a_trace(device: str, block: Block) -> Any:
    model = make_model(device)
    with block(stacks=False):
        first = train(model, device, 1)
        with block():
            second = train(model, device, 1)
        third = train(model, device, 1)
    return first, second, third


@program(own_block=True)
def traces_that_overlap(device: str, block: Block) -> Any:
    model = make_model(device)
    one, two = block(), block()
    one.__enter__()
    first = train(model, device, 1)
    two.__enter__()
    second = train(model, device, 1)
    one.__exit__(None, None, None)
    third = train(model, device, 1)
    two.__exit__(None, None, None)
    return first, second, third, train(model, device, 1)


@program(own_block=True)
def traces_in_generators_that_take_turns(device: str, block: Block) -> Any:
    def steps() -> Iterator[Any]:
        model = make_model(device)
        with block():
            for _ in range(3):
                yield train(model, device, 1)

    one, two = steps(), steps()
    seen = [next(one), next(two), next(one), next(two)]
    one.close()  # GeneratorExit inside the block
    seen += list(two)
    abandoned = steps()
    seen.append(next(abandoned))
    del abandoned
    return seen


@program(own_block=True)
def traces_in_coroutines(device: str, block: Block) -> Any:
    async def batches() -> AsyncIterator[torch.Tensor]:
        for _ in range(2):
            await asyncio.sleep(0)
            yield batch(device)

    async def work(model: nn.Module) -> Any:
        losses = []
        with block():
            async for x in batches():
                loss = model(x).square().mean()
                loss.backward()
                losses.append(loss)
        return losses, model

    async def everything() -> Any:
        return await asyncio.gather(*(work(make_model(device)) for _ in range(2)))

    return asyncio.run(everything())


@program(own_block=True)
def trace_as_a_decorator(device: str, block: Block) -> Any:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    manager = block()
    traced = manager(step) if callable(manager) else step
    block.traces.clear()  # each call has its own
    model = make_model(device)
    return [traced(model, batch(device)) for _ in range(2)], traced.__name__, model


# -------------------------------------------------------------------------- leaving the block


class Stop(BaseException):
    """Not an Exception: nobody catches it by accident."""


@program(own_block=True)
def exceptions_leave_the_block(device: str, block: Block) -> Any:
    kinds = (ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, Stop)
    model = make_model(device)

    class Raises(nn.Module):
        def forward(self, x: torch.Tensor, kind: Any) -> torch.Tensor:
            raise kind("inside a module")

    class RaisesLater(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("inside backward")

    def leave(kind: Any) -> None:
        with block():
            train(model, device, 1)
            Raises()(batch(device), kind)

    def leave_backward() -> None:
        with block():
            x = batch(device).requires_grad_()
            RaisesLater.apply(x.sin()).sum().backward()

    errors = [caught(lambda kind=kind: leave(kind)) for kind in kinds]
    return errors, caught(leave_backward), train(model, device, 1)


@program(timed=True)
def interrupted_by_a_signal(device: str) -> Any:
    """Ctrl-C, at whatever moment: also while the tracer itself is at work."""
    import _thread
    import signal

    model = make_model(device)
    caught_errors = []
    # A shell starts what it puts in the background deaf to Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    for wait in range(10):
        timer = threading.Timer(0.002 * wait, _thread.interrupt_main)
        try:
            timer.start()
            for _ in range(10_000):
                model(batch(device)).sum().backward()
        except KeyboardInterrupt:
            caught_errors.append("KeyboardInterrupt")
        timer.join()
    signal.signal(signal.SIGINT, before)
    torch.manual_seed(0)
    return caught_errors


@program(own_block=True)
def traceback_shows_the_program_only(device: str, block: Block) -> Any:
    import traceback

    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("here")

    try:
        with block():
            nn.Sequential(Raises())(batch(device).sin())
    except ValueError as error:
        return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


# -------------------------------------------------------------------------- torch's own observers


def events_of(profile: Any) -> Any:
    """Without CUDA's own calls, which tracing adds to; INVALID are those that kineto cannot name."""
    others = ("cuda", "INVALID", "Memcpy", "void")
    names = [e.name for e in profile.events() if not e.name.startswith(others)]
    return sorted(name for name in names if "Profiler" not in name and "Device" not in name)


def profiling(device: str, **options: Any) -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options)


@program(own_block=True)
def profiler_inside_outside_and_overlapping(device: str, block: Block) -> Any:
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    profiles = [profiling(device) for _ in range(3)]
    with block(), profiles[0]:
        train(model, device, 1, optimizer)
    with profiles[1]:
        train(model, device, 1, optimizer)
        with block():
            train(model, device, 1, optimizer)
        train(model, device, 1, optimizer)
    traced = block()
    with ExitStack() as stack:
        profiles[2].start()
        stack.enter_context(traced)
        train(model, device, 1, optimizer)
        profiles[2].stop()
        train(model, device, 1, optimizer)
    return [events_of(profile) for profile in profiles], model


@program()
def profiler_of_memory_and_shapes(device: str) -> Any:
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with profiling(device, profile_memory=True, record_shapes=True) as profile:
        train(model, device, 2, optimizer)
    rows = profile.key_averages(group_by_input_shape=True)
    return sorted(
        (row.key, row.count, row.cpu_memory_usage, row.self_cpu_memory_usage, str(row.input_shapes))
        for row in rows
        if not row.key.startswith(("cuda", "[", "void", "Memcpy", "Memset"))
    )


@program(fresh=True, imports="torch._dynamo")
def profiler_with_stacks(device: str) -> Any:
    """First used inside the block, where it looks up Module.__call__ for good."""
    model = make_model(device)
    with profiling(device, with_stack=True, with_modules=True):
        return train(model, device, 1, torch.optim.SGD(model.parameters(), lr=0.1))


@program()
def python_profile_function(device: str) -> Any:
    calls: list[str] = []
    model = make_model(device, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def within_pytracer(frame: Any) -> bool:
        while frame is not None and "pytracer" not in frame.f_code.co_filename:
            frame = frame.f_back
        return frame is not None

    def heard(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and not within_pytracer(frame):
            calls.append(f"{event} {frame.f_code.co_name}")

    loss = model(batch(device)).sum()
    sys.setprofile(heard)
    try:
        model(batch(device))
        loss.backward()
    finally:
        sys.setprofile(None)
    optimizer.step()
    return calls


@program(devices=("cuda",))
def memory_history_running(device: str) -> Any:
    torch.cuda.memory._record_memory_history(max_entries=10_000)
    try:
        result = train(make_model(device), device, 2)
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    actions = [
        [e["action"] for e in events if e["action"] != "snapshot"]
        for events in snapshot["device_traces"]
    ]
    return result, actions


# -------------------------------------------------------------------------- torch.compile


def compiled_training(model: Any, device: str, steps: int = 2) -> Any:
    losses = []
    for _ in range(steps):
        model.zero_grad()  # CUDA graphs overwrite the gradients of the step before
        loss = model(batch(device)).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses, {name: each.clone() for name, each in gradients(model).items()}


def around_the_block(device: str, block: Block, compiled: Any) -> Any:
    """Compiled before, called inside and after; another compiled inside, called after."""
    before = compiled(make_model(device))
    inside = compiled(make_model(device))
    seen = [compiled_training(before, device)]
    with block():
        seen.append(compiled_training(before, device))
        seen.append(compiled_training(inside, device))
    seen.append(compiled_training(before, device))
    seen.append(compiled_training(inside, device))
    with block():
        seen.append(compiled_training(before, device))
        seen.append(compiled_training(inside, device))
    return seen


@program(own_block=True)
def compile_whole_graph_eager_backend(device: str, block: Block) -> Any:
    return around_the_block(
        device, block, lambda m: torch.compile(m, fullgraph=True, backend="eager")
    )


@program(own_block=True)
def compile_whole_graph_aot_eager(device: str, block: Block) -> Any:
    return around_the_block(
        device, block, lambda m: torch.compile(m, fullgraph=True, backend="aot_eager")
    )


@program(own_block=True)
def compile_whole_graph_inductor(device: str, block: Block) -> Any:
    return around_the_block(device, block, lambda m: torch.compile(m, fullgraph=True))


@program(own_block=True)
def compile_in_place(device: str, block: Block) -> Any:
    def compiled(model: nn.Module) -> nn.Module:
        model.compile(fullgraph=True, backend="aot_eager")
        return model

    return around_the_block(device, block, compiled)


class Breaks(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.first = make_model(device, 1)
        self.second = nn.Linear(3, 3).to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x) if float(x.sum()) > 1000 else self.second(x.sin())


@program(own_block=True)
def compile_with_graph_breaks(device: str, block: Block) -> Any:
    model = torch.compile(Breaks(device), backend="aot_eager")
    with block():
        inside = compiled_training(model, device)
    return inside, compiled_training(model, device)


@program(own_block=True)
def compile_recompiles_as_often(device: str, block: Block) -> Any:
    @torch.compile(backend="eager")
    def function(x: torch.Tensor, times: int) -> torch.Tensor:
        return x.sin() * times

    def use() -> Any:
        return [function(batch(device, rows), t) for rows in (2, 3, 4) for t in (1, 2, 3)]

    before = use()
    with block():
        inside = use()
    return before, inside, use()


@program(own_block=True)
def compiled_optimizer_step(device: str, block: Block) -> Any:
    model = make_model(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01, device=device))

    @torch.compile(fullgraph=False, backend="aot_eager")
    def step() -> None:
        optimizer.step()

    def once() -> Any:
        optimizer.zero_grad()
        loss = model(batch(device)).square().mean()
        loss.backward()
        step()
        return loss

    before = [once() for _ in range(3)]
    with block():
        inside = [once() for _ in range(3)]
    return before, inside, [once() for _ in range(2)], model


@program(own_block=True)
def dynamo_reset_inside(device: str, block: Block) -> Any:
    model = torch.compile(make_model(device), fullgraph=True, backend="aot_eager")
    with block():
        first = compiled_training(model, device)
        torch._dynamo.reset()
        second = compiled_training(model, device)
    return first, second, compiled_training(model, device)


@program(fresh=True)
def compile_first_of_all_inside(device: str) -> Any:
    """Dynamo is imported inside the block."""
    assert "torch._dynamo" not in sys.modules
    model = torch.compile(make_model(device), fullgraph=True, backend="aot_eager")
    return compiled_training(model, device)


@program()
def compile_of_func_and_checkpoint(device: str) -> Any:
    model = nn.Linear(8, 8).to(device)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def slopes(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(lambda y: y.sin().sum()))(x)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def saved(x: torch.Tensor) -> torch.Tensor:
        return recompute.checkpoint(model, x.sin(), use_reentrant=False)

    x = batch(device).requires_grad_()
    saved(x).sum().backward()
    return slopes(batch(device)), x.grad, model


@program()
def jit_trace_and_script(device: str) -> Any:
    model = make_model(device).eval()
    x = batch(device)
    traced = torch.jit.trace(model, (x,))
    scripted = torch.jit.script(model)
    graphs = [
        re.sub(r"___torch_mangle_\d+\.", "", str(text)) for text in (traced.graph, scripted.code)
    ]
    return graphs, traced(x), scripted(x)


@program(own_block=True)
def fx_and_export(device: str, block: Block) -> Any:
    model = make_model(device).eval()
    x = batch(device)
    with block():
        symbolic = torch.fx.symbolic_trace(model)
        exported = torch.export.export(model, (x,))
        inside = symbolic(x), exported.module()(x)
        strict = torch.export.export(model, (x,), strict=True)
    graphs = [str(symbolic.code), str(exported.graph), str(strict.graph)]
    return graphs, inside, symbolic(x), exported.module()(x), type(symbolic).__name__


# -------------------------------------------------------------------------- the rest of training


@program()
def autocast_in_bfloat16(device: str) -> Any:
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(batch(device)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@program()
def grad_scaler(device: str) -> Any:
    model = make_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**40, growth_interval=1)
    scales = []
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=dtype):
            loss = model(batch(device)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, model


@program(fresh=True, imports="torch._dynamo")
def distributed_data_parallel(device: str) -> Any:
    import tempfile

    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            model = DistributedDataParallel(make_model(device), gradient_as_bucket_view=True)
            result = train(model, device)
            with model.no_sync():
                model(batch(device)).sum().backward()
            return result, gradients(model)
        finally:
            distributed.destroy_process_group()


@program(devices=("cuda",))
def cuda_graph_capture_and_replay(device: str) -> Any:
    model = make_model(device).eval()
    x = batch(device)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x)
    seen = []
    for _ in range(3):
        x.copy_(batch(device))
        graph.replay()
        seen.append(out.clone())
    return seen


@program(devices=("cuda",))
def cuda_graphed_callables(device: str) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)).to(device)
    graphed = torch.cuda.make_graphed_callables(model, (batch(device),))
    return train(graphed, device)


@program(devices=("cuda",), own_block=True)
def cuda_graph_trees(device: str, block: Block) -> Any:
    model = torch.compile(make_model(device), mode="reduce-overhead")
    before = compiled_training(model, device, 3)
    with block():
        inside = compiled_training(model, device, 3)
    return before, inside, compiled_training(model, device, 2)


@program(devices=("cuda",))
def cuda_streams(device: str) -> Any:
    side = torch.cuda.Stream()
    model = make_model(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x = batch(device)
        x.record_stream(torch.cuda.current_stream())
        result = train(model, device)
    torch.cuda.current_stream().wait_stream(side)
    return result


@program(devices=("cuda",))
def cuda_out_of_memory(device: str) -> Any:
    error = caught(lambda: torch.empty(2**50, device=device))
    return error[0], train(make_model(device), device)


@program(devices=("cuda",), fresh=True, imports="torch._dynamo", own_block=True)
def cuda_comes_up_inside(device: str, block: Block) -> Any:
    with block():
        result = train(make_model(device), device)
    return result, torch.cuda.max_memory_allocated()


# -------------------------------------------------------------------------- the CPU allocator


@program(fresh=True, imports="torch._dynamo", devices=("cpu",), own_block=True)
def user_installed_cpu_allocator(device: str, block: Block) -> Any:
    """One with a higher priority than the default's."""
    import ctypes
    from pathlib import Path

    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    mobile = c10._ZN3c1028GetDefaultMobileCPUAllocatorEv
    default = c10._ZN3c1022GetDefaultCPUAllocatorEv
    mobile.restype = default.restype = ctypes.c_void_p
    install = c10._ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh
    install.argtypes = [ctypes.c_void_p, ctypes.c_uint8]
    theirs = mobile()
    install(theirs, 5)
    with block():
        inside = train(make_model(device), device, 1)
    still_theirs = registries()["CPU allocator"][1] == theirs
    after = train(make_model(device), device, 1)
    install(default(), 4)
    refused = registries()["CPU allocator"][1] == theirs
    install(default(), 5)
    return inside, still_theirs, after, refused
