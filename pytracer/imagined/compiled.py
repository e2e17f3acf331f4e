"""Follows `torch.compile`: the compiler runs, and what it wrote runs without its kernels.

Dynamo, AOTAutograd, the partitioner and Inductor see fake tensors of their own, none of our modes,
and torch as it is. Inductor's plan of memory is the Python file that it writes. That file is run:
what it allocates is imagined, its kernels do nothing, and what it calls of torch (products,
convolutions, attention) is an operator of the program like any other.
"""

import contextlib
import functools
import gc
import importlib
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from pytracer.basics import private_torch
from pytracer.data._native import C
from pytracer.imagined.patches import aside, replaced
from pytracer.recording.start import after_import

# What Inductor is told: to write Python, and to ask and to keep nothing outside of this run.
_SETTINGS = {
    "compile_threads": 1,
    "cpp.vec_isa_ok": True,
    "cpp_wrapper": False,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
}
# What AOTAutograd is told: to compile now, and not to look at operators of the first call.
_JOINT = {
    "check_custom_op_aliasing": False,
    "enable_autograd_cache": False,
    "force_non_lazy_backward_lowering": True,
}
# Settings that take memory in ways that are not followed, and what is not known then.
_NOT_FOLLOWED = {
    "cpp_wrapper": "C++ code allocates (cpp_wrapper)",
    "max_autotune": "kernels are chosen by timing (max-autotune)",
    "max_autotune_gemm": "kernels are chosen by timing (max-autotune)",
    "max_autotune_pointwise": "kernels are chosen by timing (max-autotune)",
    "memory_planning": "blocks are cut out of pools (memory_planning)",
    "triton.cudagraphs": "CUDA graphs keep a pool (reduce-overhead)",
}
_ABOUT_DEVICES = (
    "torch._inductor.runtime.hints",
    "torch._inductor.utils",
    "torch.utils._triton",
)
_TRITON = ("triton", "triton.language")  # what Inductor's files import, and use for kernels only
_STOPPED = (
    "the compiler stopped where there is no card ({kind}: {said}), so that code is counted as eager"
)
_ATTENDS = "its attention, which is not causal, may take another kernel there"
_MOST_SAID = 160
_OURS = f"{Path(__file__).parents[1]}/"
_CUDA_ARGUMENT = re.compile(r"^def \w+\((.*?)\):", re.M | re.S)
# How generated code allocates, and where.
_ALLOCATES = {
    "_empty_strided_cpu": "cpu",
    "_empty_strided_cpu_pinned": "cpu",
    "_empty_strided_cuda": "cuda",
}
_BETWEEN = 1  # frames of ours between generated code and the allocation: `make`
_MEMORY_BOUND = 30  # multiplications for each number, below which padding costs more than it saves
_ALIGNMENT = 16  # bytes, as Inductor asks of inputs


class Compiler:
    """The compiler of one imagined run."""

    def __init__(
        self,
        make: Callable[..., Any],
        forget: Callable[[list[Any]], None],
        running: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        """Nothing is compiled yet.

        Args:
            make: makes a tensor without an operator, as generated code does: `make(device, size,
                stride, dtype)`.
            forget: is told of tensors that a kernel writes.
            running: a block in which the program's own operators run.
        """
        self._make, self._forget, self._running = make, forget, running
        self._why: dict[str, None] = {}
        self._padded = 0
        self._has_compiled = False
        self.on_kernel: Callable[[list[Any]], None] = lambda _: None  # gets its tensors

    def document(self, attends_freely: bool) -> dict[str, Any]:
        """Why the compiled code may take other memory on a card. `attends_freely`: it has attention, not causal."""
        why = [*self._why, _ATTENDS] if attends_freely else [*self._why]
        return {"not_followed": why, "padded": self._padded}

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follows what is compiled inside the block. Afterwards torch compiles it again."""
        with contextlib.ExitStack() as stack:
            compile_ = torch.compile

            @functools.wraps(compile_)
            def imported_first(*arguments: Any, **options: Any) -> Any:
                with aside(everything=True):  # a module may keep what it finds as it is imported
                    for module in put:
                        importlib.import_module(module)
                return compile_(*arguments, **options)

            stack.enter_context(replaced(torch, "compile", imported_first))
            put = {private_torch.DYNAMO: self._dynamo, private_torch.INDUCTOR: self._inductor}
            for module, patches in put.items():

                def enter(patches: Any = patches) -> None:
                    for patch in patches():
                        stack.enter_context(patch)

                stack.callback(after_import(module, enter))
            _forget_devices()
            C.allocates_in_python(_BETWEEN)
            stack.callback(C.allocates_in_python, 0)
            yield
        _forget_devices()
        if self._has_compiled:
            torch.compiler.reset()  # no kernel of what was compiled here does anything
            for packet in vars(torch.ops.aten).values():  # a compiler notes who runs an operator
                for one in vars(packet).values() if hasattr(packet, "overloads") else ():
                    if isinstance(one, private_torch.operator_overload):
                        one._dispatch_cache.clear()

    def _stopped(self, error: Exception) -> None:
        cause = getattr(error, "inner_exception", None) or error
        said = (str(cause).strip().splitlines() or [""])[0]
        self._why[_STOPPED.format(kind=type(cause).__name__, said=said[:_MOST_SAID])] = None

    # ------------------------------------------------------------ Dynamo

    def _dynamo(self) -> Iterator[contextlib.AbstractContextManager[Any]]:
        converter, graph = private_torch.frame_converter, private_torch.dynamo_graph
        convert = converter.__call__
        with aside(everything=True):  # these know functions by their identity
            private_torch.dynamo_rules.get_torch_obj_rule_map()
            private_torch.dynamo_functions._get_handlers()

        def outside(callback: Any, frame: Any, *rest: Any) -> Any:
            if frame.f_code.co_filename.startswith(_OURS):
                return private_torch.frame_not_compiled()
            self._has_compiled = True
            try:
                with private_torch.without_modes(), aside():
                    made = convert(callback, frame, *rest)
                gc.collect()  # Dynamo leaves cycles, which may hold what the frame returns
                return made
            except (private_torch.backend_failed, private_torch.dynamo_failed) as error:
                self._stopped(error)
                return private_torch.frame_not_compiled()

        yield replaced(converter, "__call__", outside)
        yield replaced(graph, "example_inputs", _example_inputs)
        optimizer = private_torch.dynamo_optimizer
        yield replaced(optimizer, "call_method", self._initializing(optimizer.call_method))
        joint = private_torch.functorch_settings
        yield joint.patch({name: _JOINT[name] for name in _JOINT if hasattr(joint, name)})
        # The compiler's modes must not touch a device, either.
        yield replaced(private_torch.FakeTensorMode, "avoid_device_init", property(lambda _: True))

        interfaces = private_torch.device_interfaces
        for name in ("current_devices", "device_properties"):
            yield replaced(interfaces, f"caching_worker_{name}", {})
        for name, one in vars(interfaces.CudaInterface).items():
            if isinstance(one, staticmethod) and hasattr(torch.cuda, name):  # of the real card
                yield replaced(interfaces.CudaInterface, name, staticmethod(_of_cuda(name)))

    def _initializing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Dynamo lets an optimizer make its state while it traces the step."""

        def call_method(variable: Any, tracer: Any, name: str, *rest: Any) -> Any:
            if name != "_init_group":
                return call(variable, tracer, name, *rest)
            make = variable.value._init_group

            def make_state(*arguments: Any, **options: Any) -> Any:
                with self._running():
                    return make(*arguments, **options)

            with replaced(variable.value, "_init_group", make_state):
                return call(variable, tracer, name, *rest)

        return call_method

    # ------------------------------------------------------------ Inductor

    def _inductor(self) -> Iterator[contextlib.AbstractContextManager[Any]]:
        inductor, modules = private_torch.inductor, private_torch.inductor_modules
        yield replaced(inductor, "compile_fx", self._compiling(inductor.compile_fx))
        for module in (private_torch.inductor_scheduler, private_torch.padding):
            yield replaced(module, "has_triton", lambda: True)  # nobody calls it
        yield replaced(private_torch.triton_facts, "triton_hash_with_backend", lambda: "")
        padding = private_torch.padding
        yield replaced(padding, "_should_pad", self._padding(padding._should_pad))
        folder = private_torch.constant_folder
        yield replaced(folder, "_deduce_value", _on_the_host(folder._deduce_value))
        yield replaced(private_torch.inductor_utils, "copy_misaligned_inputs", _copy_misaligned)
        # Modules of this run are no others', and theirs not ours: the kernels differ.
        yield replaced(modules, "modules_no_attr", {})
        load = modules.load_by_key_path

        def load_without_triton(*arguments: Any, **options: Any) -> Any:
            private_torch.triton_heuristics  # noqa: B018 - imports it while it sees the real one
            with mock.patch.dict(sys.modules, {name: ModuleType(name) for name in _TRITON}):
                return load(*arguments, **options)

        yield replaced(modules, "load_by_key_path", load_without_triton)
        for name, kernel in self._kernels().items():
            yield replaced(private_torch.inductor_kernels, name, kernel)
        guards = private_torch.guards
        yield replaced(guards, "_reinterpret_tensor", _reinterpret)
        for name, device in _ALLOCATES.items():
            yield replaced(guards, name, functools.partial(self._make, device))

    def _compiling(self, compile_fx: Callable[..., Any]) -> Callable[..., Any]:
        settings = private_torch.inductor_settings

        @functools.wraps(compile_fx)
        def run(
            graph: Any, inputs: Any, *rest: Any, config_patches: Any = None, **options: Any
        ) -> Any:
            asked = {name: settings.get_config_copy()[name] for name in _NOT_FOLLOWED}
            asked |= config_patches or {}
            for name, why in _NOT_FOLLOWED.items():
                if asked[name]:
                    self._why[why] = None
            given = {**(config_patches or {}), **_SETTINGS, **dict.fromkeys(_NOT_FOLLOWED, False)}
            as_it_is = torch.fx.GraphModule(
                graph, copy(graph.graph)
            )  # the compiler changes its own
            try:
                with settings.patch(given):
                    return compile_fx(graph, inputs, *rest, **options)
            except Exception as error:
                self._stopped(error)
                return as_it_is.forward

        return run

    def _padding(self, should_pad: Callable[..., bool]) -> Callable[..., bool]:
        """Torch's answer. Where it would measure, the likely one, because only the card knows."""

        def asked(match: Any, one: Any, other: Any, *rest: Any, **options: Any) -> bool:
            def likely(key: str) -> bool:
                self._padded = max(self._padded, *map(_bytes, (one, other)))
                return _is_faster_padded(one, other)

            with replaced(private_torch.padding, "get_cached_should_pad", likely):
                return should_pad(match, one, other, *rest, **options)

        return asked

    def _ran(self, tensors: list[Any], written: list[Any]) -> None:
        self._forget(written)
        self.on_kernel(tensors)

    def _kernels(self) -> Mapping[str, Callable[..., Any]]:
        def of_host(_: Any, arguments: list[str], *__: Any, **___: Any) -> "_Kernel":
            written = [not one.startswith("const ") for one in arguments]
            return _Kernel(self._ran, written)

        def of_card(_: Any, name: str, source: str, *__: Any, **___: Any) -> "_Kernel":
            found = _CUDA_ARGUMENT.search(source)
            names = found[1].split(",") if found else []
            return _Kernel(self._ran, ["out_ptr" in one for one in names])

        return {"cpp_pybinding": of_host, "triton": of_card}


def _sizes(tensor: Any) -> list[int]:
    """Also those that may change, as they are now."""
    sizes = (one.node.hint if isinstance(one, torch.SymInt) else one for one in tensor.shape)
    return [size or 0 for size in sizes]


def _bytes(tensor: Any) -> int:
    return math.prod(_sizes(tensor)) * int(tensor.element_size())


def _is_faster_padded(one: Any, other: Any) -> bool:
    """What an H100 said of the products of ten models: large ones in 16 bits, for their columns or a long sum."""
    (*batch, rows, inner), columns = _sizes(one), _sizes(other)[-1]
    steps = rows * columns * inner / max(rows * inner + inner * columns + rows * columns, 1)
    row = _ALIGNMENT // int(one.element_size())
    is_odd = columns % row > 0 or (inner % row > 0 and not batch)
    return one.dtype.itemsize == 2 and is_odd and steps > _MEMORY_BOUND


def _of_cuda(name: str) -> Callable[..., Any]:
    return lambda *arguments, **options: getattr(torch.cuda, name)(*arguments, **options)


def _forget_devices() -> None:
    """Drops what Inductor has noted of the card that there was."""
    for name in _ABOUT_DEVICES:
        for owner in _classes_too(sys.modules.get(name)):
            for one in vars(owner).values():
                clear = getattr(getattr(one, "__func__", one), "cache_clear", None)
                if clear is not None:
                    clear()


def _classes_too(module: Any) -> list[Any]:
    found = [] if module is None else vars(module).values()
    inside = [one for one in found if isinstance(one, type) and one.__module__ == module.__name__]
    return [module, *inside] if module else []


def _example_inputs(graph: Any) -> list[Any]:
    """The inputs for the compiler's back end: Dynamo's own, of its own fake mode."""
    return [
        node.meta["example_value"]
        if node.meta.get("example_value") is not None
        else node.meta["grapharg"].example
        for node in graph.placeholders
    ]


class _Kernel:
    """Does nothing, but what it writes is not known any more."""

    def __init__(self, ran: Callable[[list[Any], list[Any]], None], written: list[bool]) -> None:
        self._ran, self._written = ran, written

    def __call__(self, *arguments: Any, **_: Any) -> None:
        given = zip(arguments, self._written, strict=False)
        tensors = [(one, written) for one, written in given if isinstance(one, torch.Tensor)]
        self._ran([one for one, _ in tensors], [one for one, written in tensors if written])

    run = __call__


def _reinterpret(tensor: Any, size: Any, stride: Any, offset: int) -> Any:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


class _OnTheHost(private_torch.TorchDispatchMode):
    """Makes there what is asked for on a card."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = private_torch.tree_map(_host_for_a_card, (args, kwargs or {}))
        return func(*args, **kwargs)


def _host_for_a_card(one: Any) -> Any:
    return torch.device("cpu") if isinstance(one, torch.device) else one


def _on_the_host(deduce: Callable[..., Any]) -> Callable[..., Any]:
    """Computes constants, of which each has the same value everywhere, on the host."""

    def run(*arguments: Any) -> Any:
        with _OnTheHost():
            return deduce(*arguments)

    return run


def _copy_misaligned(
    inputs: list[Any], checked: Any, returned: Any = None
) -> tuple[list[Any], list[Any]]:
    """As Inductor's. A block of the card's is aligned, so the offset tells whether an input is."""
    before, after = [], []
    for at in checked:
        one = inputs[at]
        if one.storage_offset() * one.element_size() % _ALIGNMENT:
            inputs[at] = private_torch.inductor_utils.clone_preserve_strides(one)
            if returned is not None and at in returned:
                before.append(one)
                after.append(inputs[at])
    return before, after
