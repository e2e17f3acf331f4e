"""What a program can see of itself is the same under a trace. Each function here is one law.

A law is a program that looks at something: its variables, the lives of its objects, what its own
code was asked, torch's functions, its graphs. It runs untraced and in every mode of tracing, and
what it returns, prints, warns of, raises and leaves behind has to be equal.
"""

import asyncio
import contextlib
import copy
import dataclasses
import functools
import gc
import inspect
import json
import pickle
import types
import typing
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.nn.utils import parametrize
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import checkpoint as recompute
from torch.utils._python_dispatch import TorchDispatchMode

from pytracer import trace
from tests.transparency.observe import (
    HOOKS_MODE,
    MODES,
    Block,
    Program,
    assert_unchanged,
)

LAWS: dict[str, Program] = {}
DEVICES: dict[str, list[Any]] = {"cpu": [], "cuda": [pytest.mark.cuda]}
F = TypeVar("F", bound=Callable[..., Any])


def law(**facts: Any) -> Callable[[F], F]:
    def add(run: F) -> F:
        LAWS[run.__name__] = Program(run, own_block=True, **facts)
        return run

    return add


def a_step(device: str, model: nn.Module | None = None) -> None:
    model = model or nn.Linear(4, 4)
    model.to(device)(torch.randn(2, 4, device=device)).sum().backward()


def outcome(look: Callable[[], Any]) -> Any:
    """What a call gives, or what it raises."""
    try:
        return look()
    except Exception as error:
        return [type(error).__name__, str(error)]


# -------------------------------------------------------------------------- variables


@law()
def settings_kept_by_locals_stay_as_they_were_taken(device: str, block: Block) -> Any:
    """`locals()` once at the top is how many programs keep their settings."""

    def train(lr: float = 0.1, width: int = 4) -> str:
        settings = locals()
        model = nn.Linear(width, width)
        for _ in range(2):
            with block():
                a_step(device, model)
        return json.dumps(settings, default=str)

    return json.loads(train()).keys()


@law()
def locals_of_callers_stay_as_they_were_taken(device: str, block: Block) -> Any:
    class Trainer:
        def fit(self, model: nn.Module) -> None:
            with block():
                a_step(device, model)

    def main(lr: float = 0.1, width: int = 4) -> list[str]:
        settings = locals()
        model = nn.Linear(width, width)
        Trainer().fit(model)
        return sorted(settings)

    return main()


@law()
def locals_of_generators_and_coroutines_stay_as_they_were_taken(device: str, block: Block) -> Any:
    def steps(lr: float = 0.1) -> Iterator[list[str]]:
        settings = locals()
        model = nn.Linear(4, 4)
        for _ in range(2):
            with block():
                a_step(device, model)
                yield sorted(settings)
        yield sorted(settings)

    async def train(lr: float = 0.1) -> list[str]:
        settings = locals()
        model = nn.Linear(4, 4)
        with block():
            await asyncio.sleep(0)
            a_step(device, model)
        return sorted(settings)

    return list(steps()), asyncio.run(train())


@law()
def what_exec_defined_in_a_function_is_still_there(device: str, block: Block) -> Any:
    """On Python before 3.13 `exec` keeps what it defines in the dictionary of `locals()`."""

    def run() -> Any:
        exec("answer = 41")
        with block():
            a_step(device)
        return eval("answer") + 1

    return outcome(run)


@law()
def locals_keep_no_tensor_that_came_later(device: str, block: Block) -> Any:
    def run() -> Any:
        taken = locals()
        with block():
            big = torch.ones(1000, device=device)
        gone = weakref.ref(big)
        del big
        return gone() is None, sorted(taken)

    return run()


@law()
def variables_are_formatted_as_they_were_taken(device: str, block: Block) -> Any:
    def run(name: str = "a") -> Any:
        taken = vars()
        x = torch.ones(3, device=device)
        with block():
            x = x + 1
        return "{name} of {device}".format(**taken), len(taken), x

    return run()


@law()
def locals_of_the_frames_around_an_exception_stay(device: str, block: Block) -> Any:
    def fails(seen: list[list[str]]) -> None:
        settings = locals()
        try:
            with block():
                a_step(device)
                raise ValueError
        finally:
            seen.append(sorted(settings))

    seen: list[list[str]] = []
    return outcome(lambda: fails(seen)), seen


# -------------------------------------------------------------------------- the lives of objects


def death_of(thing: Any, told: list[str], name: str) -> None:
    weakref.finalize(thing, told.append, name)


@law()
def an_optimizer_that_is_replaced_dies(device: str, block: Block) -> Any:
    """Its state dies too, though the trace was given this very optimizer."""
    model = nn.Linear(8, 8).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    told: list[str] = []
    with block(model, optimizer):
        model(torch.ones(2, 8, device=device)).sum().backward()
        optimizer.step()
        death_of(optimizer, told, "optimizer")
        for state in optimizer.state.values():
            death_of(state["exp_avg"], told, "state")
        del state
        optimizer = torch.optim.AdamW(model.parameters())
        gc.collect()
        told.append("replaced")
    return told


@law()
def a_model_that_is_replaced_dies(device: str, block: Block) -> Any:
    told: list[str] = []
    model = nn.Linear(8, 8).to(device)
    with block(model):
        a_step(device, nn.Sequential(nn.Linear(4, 8).to(device), model))
        death_of(model, told, "model")
        death_of(model.weight, told, "weight")
        death_of(model.weight.grad, told, "gradient")
        model = nn.Linear(8, 8)
        gc.collect()
        told.append("replaced")
    return told


@law()
def tensors_die_when_their_last_name_goes(device: str, block: Block) -> Any:
    """Without a collection: nobody holds them, and nothing is in a cycle."""
    told: list[str] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).to(device)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with block():
            x = torch.randn(2, 4, device=device)
            death_of(x, told, "batch")
            loss = model(x).sum()
            death_of(loss, told, "loss")
            del x
            told.append("batch is kept by the graph only")
            loss.backward()
            told.append("backward has run")
            del loss
            told.append("loss has gone")
            model.zero_grad()
    finally:
        if was_enabled:
            gc.enable()
    return told


@law()
def a_finished_trace_keeps_nothing_of_the_program(device: str, block: Block) -> Any:
    told: list[str] = []
    with block() as kept:
        model = nn.Linear(4, 4).to(device)
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.randn(2, 4, device=device)
        model(x).sum().backward()
        optimizer.step()
    for thing, name in ((model, "model"), (optimizer, "optimizer"), (x, "batch")):
        death_of(thing, told, name)
    del model, optimizer, x, thing
    gc.collect()
    del kept
    return sorted(told)


@law()
def an_exception_that_was_handled_keeps_no_frame(device: str, block: Block) -> Any:
    told: list[str] = []

    def fails() -> None:
        held = torch.ones(4, device=device)
        death_of(held, told, "variable of the frame")
        raise ValueError

    with block():
        with contextlib.suppress(ValueError):
            fails()
        told.append("handled inside")
    with contextlib.suppress(ValueError), block():
        fails()
    told.append("handled outside")
    return told


@law()
def an_exception_comes_out_as_it_went_in(device: str, block: Block) -> Any:
    """The same object, the same frames below it, no context and no notes added."""
    raised = ValueError("the program's own")

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise raised

    model = nn.Sequential(Fails()).to(device)
    try:
        with block():
            model(torch.ones(2, device=device))
    except ValueError as error:
        frames = []
        link = error.__traceback__
        while link is not None:
            frames.append(link.tb_frame.f_code.co_name)
            link = link.tb_next
        notes = getattr(error, "__notes__", None)
        return error is raised, frames, error.__context__, error.__cause__, notes
    return "nothing was raised"


@law()
def gradients_are_taken_and_not_copied(device: str, block: Block) -> Any:
    """Autograd takes a gradient's memory for `.grad` if nobody else holds it."""
    weight = nn.Parameter(torch.ones(64, device=device))
    addresses = []
    weight.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
    taken = []
    with block():
        for _ in range(5):
            (weight * 2).exp().sum().backward()
            taken.append(weight.grad.data_ptr() == addresses[-1])
            weight.grad = None
    return taken


# -------------------------------------------------------------------------- what the program's code is asked


class Asked:
    """Who of the program's objects was asked for what, while `on`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.on = False

    def note(self, what: str) -> None:
        if self.on:
            self.log.append(what)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        self.log.clear()
        self.on = True
        try:
            yield
        finally:
            self.on = False


ASKED = Asked()


def asked_while(block: Block, run: Callable[[], Any], *targets: Any) -> list[str]:
    """What was asked from before the trace begins until after it has ended."""
    with ASKED.listening():
        with block(*targets):
            run()
            kept = torch.ones(2)
        del kept
    return list(ASKED.log)


class AnswersEverything(nn.Module):
    """As mocks and remote proxies do: whatever it is asked for, there is something."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            ASKED.note(f"asked for {name}")
            return lambda *args: ASKED.note(f"called {name}")


@law()
def a_module_that_answers_everything_is_not_asked(device: str, block: Block) -> Any:
    model = AnswersEverything()
    x = torch.ones(3, device=device)
    return asked_while(block, lambda: model(x)), asked_while(block, lambda: model(x), model)


class Listening(nn.Linear):
    """Writes down every attribute that anybody reads."""

    def __getattribute__(self, name: str) -> Any:
        ASKED.note(name)
        return super().__getattribute__(name)


class ListeningSGD(torch.optim.SGD):
    def __getattribute__(self, name: str) -> Any:
        ASKED.note(name)
        return super().__getattribute__(name)


@law()
def attributes_of_a_module_are_read_by_the_program_only(device: str, block: Block) -> Any:
    model = Listening(4, 4).to(device)
    x = torch.ones(2, 4, device=device)

    def run() -> None:
        model(x).sum().backward()

    return asked_while(block, run), asked_while(block, run, model)


@law()
def attributes_of_an_optimizer_are_read_by_the_program_only(device: str, block: Block) -> Any:
    model = nn.Linear(4, 4).to(device)
    optimizer = ListeningSGD(model.parameters(), lr=0.1, momentum=0.9)

    def run() -> None:
        model(torch.ones(2, 4, device=device)).sum().backward()
        optimizer.step()

    return asked_while(block, run), asked_while(block, run, model, optimizer)


class Overrides(nn.Module):
    """A model whose own ways of walking it have effects: they load, or they count."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        ASKED.note("named_modules")
        return super().named_modules(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        ASKED.note("named_parameters")
        return super().named_parameters(*args, **kwargs)

    def parameters(self, *args: Any, **kwargs: Any) -> Any:
        ASKED.note("parameters")
        return super().parameters(*args, **kwargs)

    def buffers(self, *args: Any, **kwargs: Any) -> Any:
        ASKED.note("buffers")
        return super().buffers(*args, **kwargs)

    def modules(self) -> Any:
        ASKED.note("modules")
        return super().modules()

    def children(self) -> Any:
        ASKED.note("children")
        return super().children()

    def __len__(self) -> int:
        ASKED.note("len")
        return 0

    def __eq__(self, other: object) -> bool:
        ASKED.note("eq")
        return self is other

    def __hash__(self) -> int:
        ASKED.note("hash")
        return id(self)


@law()
def a_model_walks_itself_for_the_program_only(device: str, block: Block) -> Any:
    model = Overrides().to(device)
    optimizer = torch.optim.Adam(model.inner.parameters())

    def run() -> None:
        model(torch.ones(2, 3, device=device)).sum().backward()
        optimizer.step()

    return asked_while(block, run), asked_while(block, run, model, optimizer)


class LoadsItself:
    """As lazy objects and request-local proxies do: whoever asks for its class loads it."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        ASKED.note("class")
        return dict

    def __getattr__(self, name: str) -> Any:
        ASKED.note(name)
        raise AttributeError(name)


class TakesMore(nn.Module):
    def forward(self, x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        return x + 1


@law()
def what_loads_when_touched_is_not_touched(device: str, block: Block) -> Any:
    """In a variable, an attribute of one, a list, and among a model's arguments."""
    model, x = TakesMore(), torch.ones(2, device=device)
    lazy = LoadsItself()
    holder = types.SimpleNamespace(lazy=lazy)
    several = [lazy, {"lazy": lazy}]
    asked = asked_while(block, lambda: model(x, lazy, several, lazy=lazy))
    return asked, holder.lazy is lazy


@law()
def a_global_that_loads_when_touched_is_not_touched(device: str, block: Block) -> Any:
    names = {**globals(), "lazy": LoadsItself()}
    run = types.FunctionType(asked_while.__code__, names, closure=asked_while.__closure__)
    return run(block, lambda: a_step(device))


class Noted:
    """Containers of the program's own, which say when they are used."""

    def __iter__(self) -> Any:
        ASKED.note("iter")
        return super().__iter__()  # type: ignore[misc]

    def __getitem__(self, key: Any) -> Any:
        ASKED.note("getitem")
        return super().__getitem__(key)  # type: ignore[misc]

    def __len__(self) -> int:
        ASKED.note("len")
        length: int = super().__len__()  # type: ignore[misc]
        return length


class LazyDict(Noted, dict):  # type: ignore[type-arg]
    def values(self) -> Any:
        ASKED.note("values")
        return super().values()

    def items(self) -> Any:
        ASKED.note("items")
        return super().items()

    def keys(self) -> Any:
        ASKED.note("keys")
        return super().keys()

    def get(self, *args: Any) -> Any:
        ASKED.note("get")
        return super().get(*args)


class LazyList(Noted, list):  # type: ignore[type-arg]
    pass


class LazyTuple(Noted, tuple):  # type: ignore[type-arg]
    __slots__ = ()


class LazyField:
    """A field of a dataclass that is read from a disk."""

    def __get__(self, owner: Any, kind: type) -> Any:
        if owner is None:
            return None
        ASKED.note("field")
        return torch.ones(2)

    def __set__(self, owner: Any, value: Any) -> None:
        pass


@dataclasses.dataclass
class LazyBatch:
    __slots__ = ()
    images: torch.Tensor | None = dataclasses.field(default=LazyField())  # type: ignore[assignment]


class PropertyBatch:
    def __init__(self) -> None:
        self.kept = torch.ones(2)

    @property
    def images(self) -> torch.Tensor:
        ASKED.note("property")
        return self.kept

    def __getattribute__(self, name: str) -> Any:
        ASKED.note(f"attribute {name}")
        return super().__getattribute__(name)

    def __eq__(self, other: object) -> bool:
        ASKED.note("eq")
        return self is other

    def __bool__(self) -> bool:
        ASKED.note("bool")
        return True

    __hash__ = None  # type: ignore[assignment]


@law()
def batches_of_the_programs_own_classes_are_not_opened(device: str, block: Block) -> Any:
    x = torch.ones(2, device=device)
    batches = [LazyDict(a=x), LazyList([x]), LazyTuple([x]), LazyBatch(), PropertyBatch()]
    model = TakesMore()
    return {
        type(batch).__name__: asked_while(block, lambda batch=batch: model(x, batch, named=batch))
        for batch in batches
    }


class OwnSizes(torch.Tensor):
    """A wrapper whose sizes, strides and device are asked of Python."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OwnSizes":
        made: OwnSizes = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            dtype=inner.dtype,
            device=inner.device,
            dispatch_sizes_strides_policy="sizes",
            dispatch_device=True,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ASKED.note(str(func))
        inner = [arg.inner if isinstance(arg, OwnSizes) else arg for arg in args]
        about = {
            "prim.device.default": lambda: inner[0].device,
            "aten.sym_size.default": lambda: inner[0].shape,
            "aten.sym_stride.default": lambda: inner[0].stride(),
            "aten.sym_numel.default": lambda: inner[0].numel(),
            "aten.sym_storage_offset.default": lambda: 0,
            "aten.dim.default": lambda: inner[0].dim(),
            "aten.is_contiguous.memory_format": lambda: True,
        }
        answer = about.get(str(func))
        return answer() if answer else func(*inner, **(kwargs or {}))


class NotesFunctions(torch.Tensor):
    """A plain subclass that hears each of torch's functions that it is given to."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ASKED.note(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


@law()
def tensors_that_describe_themselves_are_asked_by_the_program(device: str, block: Block) -> Any:
    """As a model's argument, as a variable, and in a list."""
    x, plain = OwnSizes(torch.ones(3, device=device)), torch.ones(2, device=device)
    held = [x]
    model = TakesMore()
    return asked_while(block, lambda: model(plain, x, held, named=x)), held[0] is x


@law()
def tensors_that_hear_functions_hear_only_the_programs(device: str, block: Block) -> Any:
    """As an argument, as a parameter, as a buffer, and as what autograd saves."""
    model = nn.Linear(3, 3).to(device)
    model.weight = nn.Parameter(model.weight.detach().as_subclass(NotesFunctions))
    model.register_buffer("mean", torch.zeros(3, device=device).as_subclass(NotesFunctions))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    x = torch.ones(2, 3, device=device).as_subclass(NotesFunctions)

    def run() -> None:
        (model(x) - model.mean).sum().backward()
        optimizer.step()

    return asked_while(block, run), asked_while(block, run, model, optimizer)


class GradOfItsOwn(torch.Tensor):
    @property
    def grad(self) -> Any:
        ASKED.note("grad")
        return None

    @grad.setter
    def grad(self, value: Any) -> None:
        ASKED.note("grad is set")


@law()
def a_gradient_that_is_a_property_is_read_by_the_program_only(device: str, block: Block) -> Any:
    model = nn.Linear(3, 3).to(device)
    model.mask = torch.ones(3, 3, device=device).as_subclass(GradOfItsOwn).requires_grad_()
    x = torch.ones(2, 3, device=device)
    return asked_while(block, lambda: (model(x) @ model.mask).sum().backward())


@law(hooks="a dispatch mode sees the detach of each tensor that torch saves for our hooks")
def modes_hear_what_they_hear_without_a_trace(device: str, block: Block) -> Any:
    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            log.append(f"dispatch {func}")
            return func(*args, **(kw or {}))

    class Called(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            log.append(f"function {getattr(func, '__name__', func)}")
            return func(*args, **(kw or {}))

    log: list[str] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    with block():
        for _ in range(4):
            with Dispatched(), Called():
                optimizer.zero_grad()
                y = model(torch.ones(2, 4, device=device))
                again = recompute.checkpoint(model, y.expand(2, 4), use_reentrant=False)
                again.exp().sum().backward()
                optimizer.step()
    return log


class MadeOfTwo(nn.Module):
    """A parametrization whose original is a wrapper of two tensors, with no memory of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return TwoTensor(x, x)


@law(fresh=True)
def parameters_whose_class_is_exchanged_are_read_as_what_they_are(device: str, block: Block) -> Any:
    """`swap_tensors` makes another tensor of a parameter or a buffer in place."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with block():
            model = nn.Linear(2, 2).to(device)
            model.extra = nn.Buffer(torch.randn(2, 2, device=device))
            for name in ("weight", "extra"):
                parametrize.register_parametrization(model, name, MadeOfTwo())
            kinds = [type(model.weight).__name__, type(model.extra).__name__]
            for name in ("weight", "extra"):
                parametrize.remove_parametrizations(model, name, leave_parametrized=False)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    return kinds, [name for name, _ in model.named_buffers()]


@law()
def no_warning_of_a_gradient_that_nobody_read(device: str, block: Block) -> Any:
    """`functional_call` puts tensors that are no leaves where parameters were."""

    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            energy = self.net(x).pow(2).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    model = Force().to(device)
    x = torch.ones(2, 3, device=device)
    with block():
        model(x).sum().backward()
        fast = {name: p * 0.9 for name, p in model.named_parameters()}
        torch.func.functional_call(model, fast, (x,)).sum().backward()
    return model


# -------------------------------------------------------------------------- torch's functions, looked at


class KeepsTheCall:
    def __init__(self) -> None:
        self.call = nn.Module.__call__


class ByHand(nn.Module):
    """Runs a model's call as it finds it in the class: some libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.__call__(x) + nn.Module.__call__(self.inner, x)


@law(empty=True)
def the_call_of_a_module_is_torchs_own_function(device: str, block: Block) -> Any:
    model = nn.Linear(2, 2)
    call = nn.Module.__call__
    looks: dict[str, Callable[[], Any]] = {
        "equal": lambda: nn.Module.__call__ == nn.Module._wrapped_call_impl,
        "identical": lambda: nn.Module.__call__ is nn.Module._wrapped_call_impl,
        "that from before": lambda: nn.Module.__call__ is call,
        "in the class": lambda: vars(nn.Module)["__call__"] is nn.Module._wrapped_call_impl,
        "hash": lambda: hash(nn.Module.__call__) == hash(call),
        "type": lambda: type(nn.Module.__call__).__name__,
        "is a function": lambda: inspect.isfunction(nn.Module.__call__),
        "is a routine": lambda: inspect.isroutine(nn.Module.__call__),
        "among the functions": lambda: [
            name for name, _ in inspect.getmembers(nn.Module, inspect.isfunction)
        ],
        "signature": lambda: str(inspect.signature(nn.Module.__call__)),
        "signature of a model": lambda: str(inspect.signature(model)),
        "source": lambda: inspect.getsource(nn.Module.__call__),
        "source of a bound one": lambda: inspect.getsource(model.__call__),
        "hints": lambda: len(typing.get_type_hints(nn.Module.__call__)),
        "names": lambda: [nn.Module.__call__.__qualname__, nn.Module.__call__.__module__],
        "attributes": lambda: sorted(dir(nn.Module.__call__)),
        "bound": lambda: type(model.__call__.__func__).__name__,
        "weak reference": lambda: weakref.ref(nn.Module.__call__)() is nn.Module.__call__,
        "copy": lambda: copy.copy(nn.Module.__call__) is call,
        "deep copy": lambda: copy.deepcopy(nn.Module.__call__) is call,
        "deep copy of what keeps it": lambda: copy.deepcopy(KeepsTheCall()).call is call,
        "deep copy of a bound one": lambda: type(copy.deepcopy(model.__call__)).__name__,
        "pickle": lambda: pickle.loads(pickle.dumps(nn.Module.__call__)) is call,
        "pickle of a bound one": lambda: len(pickle.dumps(model.__call__)) > 0,
        "pickle of a part": lambda: len(pickle.dumps(functools.partial(model.__call__))) > 0,
        "code": lambda: types.FunctionType(nn.Module.__call__.__code__, {}) is not None,
    }
    with block():
        return {name: outcome(look) for name, look in looks.items()}


@law()
def what_torch_makes_of_modules_is_the_same(device: str, block: Block) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device)
    x = torch.ones(2, 4, device=device)
    with block(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        graph = torch.fx.symbolic_trace(nn.Sequential(model, nn.ReLU()))
        inner = torch.fx.symbolic_trace(ByHand().to(device))
        scripted = torch.jit.script(model)
        recorded = torch.jit.trace(model, x)
        results = [graph(x), inner(x).shape, scripted(x).detach(), recorded(x)]
    by_hand = [str(node.target) for node in inner.graph.nodes]
    return results, str(graph.graph), by_hand, str(scripted.graph), type(scripted).__name__


@law()
def a_class_made_inside_keeps_torchs_own_call(device: str, block: Block) -> Any:
    with block():

        class Borrows(nn.Module):
            __call__ = nn.Module.__call__

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + 1

        inside = Borrows()(torch.ones(2, device=device))
    outside = Borrows()(torch.ones(2, device=device))
    return inside, outside, vars(Borrows)["__call__"] is nn.Module._wrapped_call_impl


@law()
def a_wrapper_put_on_inside_stays_and_calls_torchs_own(device: str, block: Block) -> Any:
    """A library that patches for good; the test takes it away again."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device)
    x = torch.ones(2, 4, device=device)
    calls: list[str] = []
    try:
        with block():
            original = nn.Module.__call__

            def wrapper(self: nn.Module, *args: Any) -> Any:
                calls.append(type(self).__name__)
                return original(self, *args)

            nn.Module.__call__ = wrapper  # type: ignore[method-assign]
            model(x)
        calls.append("after")
        model(x)
        stays = nn.Module.__call__ is wrapper
        with block():
            model(x)
    finally:
        nn.Module.__call__ = nn.Module._wrapped_call_impl  # type: ignore[method-assign]
    return calls, stays, original is nn.Module._wrapped_call_impl


@law()
def a_mock_put_on_before_and_taken_off_inside_is_gone(device: str, block: Block) -> Any:
    """And one put on inside and taken off after the trace."""
    model, x = nn.Linear(4, 4).to(device), torch.ones(2, 4, device=device)
    first = mock.patch.object(nn.Module, "__call__", autospec=True, return_value=x)
    second = mock.patch.object(nn.Module, "__call__", autospec=True, return_value=x)
    first.start()
    with block():
        mocked = [model(x) is x]
        first.stop()
        mocked.append(model(x) is x)
        second.start()
        mocked.append(model(x) is x)
    mocked.append(model(x) is x)
    second.stop()
    return mocked, nn.Module.__call__ is nn.Module._wrapped_call_impl


@law()
def optimizers_are_copied_pickled_and_inspected_as_ever(device: str, block: Block) -> Any:
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    with block():
        a_step(device, model)
        optimizer.step()
        kept = torch.optim.Optimizer._optimizer_step_code
        looks = {
            "deep copy": lambda: len(copy.deepcopy(optimizer).state),
            "pickle": lambda: len(pickle.loads(pickle.dumps(optimizer)).state),
            "signature": lambda: str(inspect.signature(optimizer.step)),
            "annotation": lambda: type(kept).__name__,
            "annotation copied": lambda: copy.deepcopy(kept) is kept,
            "source": lambda: inspect.getsource(kept),
        }
        return {name: outcome(look) for name, look in looks.items()}


# -------------------------------------------------------------------------- saved tensors


class Scaled(torch.Tensor):
    """Computes in its own way: what multiplies it gets a hundred more."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.mul:
            return result.as_subclass(torch.Tensor) + 100
        return result


class SavesSecond(Function):
    """Saves its second input; its gradient for the first is multiplied by what it gets back."""

    got: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        SavesSecond.got.append(weight)
        if hasattr(weight, "main_grad"):
            weight.main_grad.add_(grad.sum())
        return torch.Tensor.mul(grad, weight).as_subclass(torch.Tensor), None


def what_comes_back(block: Block, weight: torch.Tensor) -> Any:
    weight.main_grad = torch.zeros((), device=weight.device)
    weight.name_of_ours = "kept"
    SavesSecond.got.clear()
    with block():
        x = torch.ones(2, device=weight.device, requires_grad=True)
        SavesSecond.apply(x, weight).sum().backward()
    (back,) = SavesSecond.got
    SavesSecond.got.clear()
    about = (type(back).__name__, back is weight, back.is_leaf, back.requires_grad)
    return [*about, sorted(vars(back)), weight.main_grad, x.grad]


@law()
def what_was_saved_and_needs_no_gradient_comes_back_itself(device: str, block: Block) -> Any:
    """The object, its class, its attributes."""
    ones = torch.ones(2, device=device)
    kinds = [ones.clone().as_subclass(Scaled), ones.clone()]
    return [what_comes_back(block, weight) for weight in kinds]


@law(hooks="behind any hook torch makes a new tensor of what needs a gradient")
def a_parameter_that_was_saved_comes_back_itself(device: str, block: Block) -> Any:
    return what_comes_back(block, nn.Parameter(torch.ones(2, device=device)))


@law()
def selective_checkpoints_see_no_hooks_but_the_programs(device: str, block: Block) -> Any:
    """From torch 2.14 on they warn of any hooks that are active, and will refuse them."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)).to(device)
    saved = [torch.ops.aten.addmm.default]
    contexts = functools.partial(recompute.create_selective_checkpoint_contexts, saved)
    x = torch.ones(2, 4, device=device, requires_grad=True)
    with block():
        for _ in range(2):
            out = recompute.checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
            out.sum().backward()
    return x.grad, [parameter.grad for parameter in layer.parameters()]


@law()
def what_torchs_own_nodes_saved_comes_back_itself(device: str, block: Block) -> Any:
    x = torch.ones(3, device=device, requires_grad=True)
    constant = torch.full((3,), 2.0, device=device)
    constant.name_of_ours = "kept"
    with block():
        y = x * constant
        other = y.grad_fn._saved_other
        about = [other is constant, getattr(other, "name_of_ours", None)]
        y.sum().backward()
    return about, x.grad


@law(hooks="torch allows one pair of hooks for a saved tensor, and ours are one")
def hooks_on_one_saved_tensor_may_be_registered(device: str, block: Block) -> Any:
    x = torch.ones(2, device=device, requires_grad=True)
    seen: list[str] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append("pack")
        return tensor * 2

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append("unpack")
        return tensor

    def run() -> None:
        y = x.exp()
        y.grad_fn._raw_saved_result.register_hooks(pack, unpack)
        y.sum().backward()

    with block():
        return outcome(run), seen, x.grad


@law()
def saved_tensors_of_changing_subclasses_keep_their_gradients(device: str, block: Block) -> Any:
    x = torch.ones(3, device=device, requires_grad=True)
    weight = torch.full((3,), 3.0, device=device).as_subclass(Scaled)
    with block():
        SavesSecond.apply(x, weight).sum().backward()
        first, x.grad = x.grad, None
        (x * weight.as_subclass(torch.Tensor)).sum().backward()
    SavesSecond.got.clear()
    return first, x.grad


# -------------------------------------------------------------------------- profilers in hooks


@law()
def a_profiler_started_in_a_hook_hears_the_operators(device: str, block: Block) -> Any:
    """In later passes too: those of which torch would not tell us."""
    heard = []

    def step(number: int) -> None:
        def hook(gradient: torch.Tensor) -> None:
            if number >= 3:
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p:
                    gradient.exp().sin()
                heard.append(sorted({row.key for row in p.key_averages()}))
                with torch.autograd.profiler.profile() as p:
                    gradient.exp().sin()
                heard.append(sorted({row.key for row in p.key_averages()}))

        hidden = torch.ones(4, device=device, requires_grad=True) * 2
        hidden.register_hook(hook)
        (hidden * 3).sum().backward()

    with block():
        for number in range(6):
            step(number)
    aten = [[key for key in keys if key.startswith("aten::")] for keys in heard]
    return [keys[:2] for keys in aten]


# -------------------------------------------------------------------------- torch.compile


class CallsSuper(nn.Module):
    """As transformers' layers do for the sake of gradient checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu()


class CheckpointsItself(CallsSuper):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(super(CallsSuper, self).__call__, **kwargs)
        return recompute.checkpoint(call, *args, use_reentrant=False)


def compiled_steps(
    device: str, block: Block, layer: type[nn.Module], shapes: tuple[int, ...] = (4,), **how: Any
) -> Any:
    """Compiled before the first trace, used in three traces and between them."""
    model = nn.Sequential(*(layer() for _ in range(3))).to(device)
    how = how if "mode" in how else {"backend": "aot_eager", **how}
    compiled = torch.compile(model, **how)
    losses = []

    def step() -> None:
        for rows in shapes:
            model.zero_grad()  # CUDA graphs overwrite the gradients of the step before
            loss = compiled(torch.randn(rows, 8, device=device)).square().mean()
            loss.backward()
            losses.append(loss.detach())

    step()
    for _ in range(3):
        with block():
            step()
            step()
        step()
    return [loss.item() for loss in losses], model


@law()
def compiled_layers_that_call_super_stay_compiled(device: str, block: Block) -> Any:
    return compiled_steps(device, block, CallsSuper)


@law()
def compiled_whole_graphs_that_call_super_stay_compiled(device: str, block: Block) -> Any:
    return compiled_steps(device, block, CallsSuper, fullgraph=True)


@law()
def compiled_layers_that_call_super_recompile_as_often(device: str, block: Block) -> Any:
    return compiled_steps(device, block, CallsSuper, (4, 6, 9))


@law()
def compiled_layers_of_any_size_that_call_super_stay_compiled(device: str, block: Block) -> Any:
    return compiled_steps(device, block, CallsSuper, (4, 6, 9), dynamic=True, fullgraph=True)


@law(devices=("cuda",))
def compiled_layers_that_call_super_keep_their_cuda_graphs(device: str, block: Block) -> Any:
    return compiled_steps(device, block, CallsSuper, mode="reduce-overhead")


@law()
def compiled_layers_that_checkpoint_themselves_stay_compiled(device: str, block: Block) -> Any:
    return compiled_steps(device, block, CheckpointsItself)


@law()
def what_is_compiled_inside_a_trace_serves_after_it(device: str, block: Block) -> Any:
    """And the traces that come later find it compiled."""
    models = [nn.Sequential(*(CallsSuper() for _ in range(2))).to(device) for _ in range(2)]
    x = torch.randn(4, 8, device=device)
    results = []
    with block():
        compiled = [
            torch.compile(models[0], backend="aot_eager", fullgraph=True),
            torch.compile(models[1], backend="aot_eager", dynamic=True),
        ]
        results += [each(x) for each in compiled]
    for _ in range(2):
        results += [each(x) for each in compiled]
        with block():
            results += [each(x) for each in compiled]
    return results


@law()
def a_model_is_compiled_in_place_around_traces(device: str, block: Block) -> Any:
    model = nn.Sequential(CallsSuper(), CallsSuper()).to(device)
    model.compile(backend="aot_eager")
    x = torch.randn(4, 8, device=device)
    results = []
    for _ in range(3):
        with block():
            results.append(model(x))
        results.append(model(x))
    return results


def tiny_transformer(kind: str) -> Any:
    import transformers

    sizes = {
        "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0},
        "Bert": {"intermediate_size": 32, "max_position_embeddings": 32},
        "Llama": {"intermediate_size": 32, "num_key_value_heads": 2},
    }[kind]
    if kind != "GPT2":
        sizes |= {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    heads = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM", "Llama": "LlamaForCausalLM"}
    config = getattr(transformers, f"{kind}Config")(vocab_size=64, **sizes)
    return getattr(transformers, heads[kind])(config)


def compiled_transformer(device: str, block: Block, kind: str, **how: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers meets deprecations of its own
        model = tiny_transformer(kind).to(device).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = torch.compile(model, backend="aot_eager", **how)
        words = torch.randint(0, 64, (2, 8), device=device)
        losses = []

        def step() -> None:
            optimizer.zero_grad()
            loss = compiled(input_ids=words, labels=words).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        step()
        for _ in range(2):
            with block():
                step()
                step()
            step()
    return losses, model


@law(needs="transformers")
def compiled_gpt2_stays_compiled(device: str, block: Block) -> Any:
    return compiled_transformer(device, block, "GPT2")


@law(needs="transformers")
def compiled_bert_stays_compiled(device: str, block: Block) -> Any:
    return compiled_transformer(device, block, "Bert")


@law(needs="transformers")
def compiled_llama_stays_compiled(device: str, block: Block) -> Any:
    return compiled_transformer(device, block, "Llama", dynamic=True)


# -------------------------------------------------------------------------- recorded all the same


@pytest.mark.parametrize("detail", ["op", "category"])
def test_a_backward_started_at_the_engine_is_a_backward(detail: str) -> None:
    """Megatron's `custom_backward` calls the engine itself."""

    def phases(direct: bool) -> set[str]:
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with trace(model, optimizer, detail=detail, devices="cpu", table=False) as t:
            for _ in range(2):
                loss = model(torch.randn(4, 8)).square().mean()
                if direct:
                    torch.autograd.Variable._execution_engine.run_backward(
                        (loss,), (torch.ones_like(loss),), False, False, (), True, True
                    )
                else:
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert "steps_without_backward" not in t.health().index
        rows = t.allocations()
        return {
            f"{category} made in {phase}"
            for category, phase in zip(rows["category"], rows["phase"], strict=True)
        }

    assert phases(direct=True) == phases(direct=False)


def test_modules_are_seen_once_whoever_wraps_their_call_meanwhile() -> None:
    """A wrapper that a library puts on inside a trace is in later traces too, and counts once."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def seen() -> list[str]:
        with trace(model, devices="cpu", table=False) as t:
            model(torch.randn(4, 8)).sum().backward()
        return module_calls(t)

    before = seen()
    try:
        with trace(model, devices="cpu", table=False):
            original = nn.Module.__call__
            nn.Module.__call__ = lambda *args: original(*args)  # type: ignore[method-assign]
            model(torch.randn(4, 8))
        assert seen() == before
        assert seen() == before
    finally:
        nn.Module.__call__ = nn.Module._wrapped_call_impl  # type: ignore[method-assign]


def module_calls(recorded: trace) -> list[str]:
    from pytracer.data.schema import SCOPE_KIND

    data = recorded.data
    kinds, names = data.scopes.kind.tolist(), data.scopes.name.tolist()
    of_modules = [
        name for kind, name in zip(kinds, names, strict=True) if kind == SCOPE_KIND["module"]
    ]
    return [data.strings[name] for name in of_modules]


def test_a_module_called_by_hand_is_seen_as_one_that_is_called() -> None:
    """`super().__call__`, `model.__call__(x)` and `nn.Module.__call__(model, x)`."""
    with trace(devices="cpu", table=False) as t:
        CallsSuper()(torch.ones(2, 8))
        ByHand()(torch.ones(2, 4))
    calls = module_calls(t)
    assert calls.count("CallsSuper") == calls.count("ByHand") == 1
    assert sum(name.endswith("inner") for name in calls) == 3


# ---------------------------------------------------------------------- all of the laws


def rows() -> list[Any]:
    """A law, a device that has what it needs, and a mode that can hold it."""
    return [
        pytest.param(name, device, mode, marks=[*DEVICES[device], *_later(name, mode)])
        for name, program in LAWS.items()
        for device in program.devices
        for mode in MODES
        if mode != "hooks" or not program.hooks
    ]


def _later(name: str, mode: str) -> list[Any]:
    """The plainest mode and the one that does most; `make nightly` has each, and compiles in each."""
    if not name.startswith("compiled"):
        return [] if mode in ("default", HOOKS_MODE) else [pytest.mark.nightly]
    if mode != "default":
        return [pytest.mark.nightly]
    longest = {
        "compiled_gpt2_stays_compiled": pytest.mark.ci,
        "compiled_bert_stays_compiled": pytest.mark.nightly,
        "compiled_llama_stays_compiled": pytest.mark.nightly,
    }
    return [longest[name]] if name in longest else []


@pytest.mark.parametrize(("name", "device", "mode"), rows())
def test_a_program_cannot_tell_that_it_is_traced(
    name: str, device: str, mode: str, tmp_path: Path
) -> None:
    if LAWS[name].needs:
        pytest.importorskip(LAWS[name].needs)
    assert_unchanged(LAWS[name], device, mode, tmp_path)
