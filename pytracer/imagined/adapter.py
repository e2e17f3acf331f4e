"""The adapter to torch's fake tensors. No other module knows how they are made.

Inside `Fakes` tensors have shapes, dtypes and devices but no memory. Every tensor that an operator
returns gets imagined memory, because an operator's result is the only way to a new tensor.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
import torch.utils.data

from pytracer import errors
from pytracer.basics import private_torch
from pytracer.basics.private_torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    TorchDispatchMode,
    UnsupportedOperatorException,
    tree_iter,
    tree_map,
    without_modes,
)
from pytracer.data._native import C
from pytracer.imagined import (
    attention,
    checkpoints,
    compiled,
    convolutions,
    ctc,
    doubts,
    durations,
    frameworks,
    kernels,
    lazy,
    loaders,
    losses,
    ranks,
    recurrent,
    scratch,
    sizes,
)
from pytracer.imagined.fake_mode import Mode
from pytracer.imagined.known import GUESS, Known
from pytracer.imagined.patches import for_programs, listed, replaced
from pytracer.imagined.shelf import Shelf
from pytracer.imagined.standins import WRAPPERS, Reads, is_asked_by, stand_in, where

CPU = "cpu"
aten = torch.ops.aten
_RUNS_BACKWARD = private_torch.backward_runner.__code__
_COMPOSITE = private_torch.dispatch_keys.CompositeImplicitAutograd
_COMPOSED = private_torch.dispatch_keys.CompositeExplicitAutograd
_READS_A_NUMBER = aten._local_scalar_dense.default
_COPIES = frozenset((aten._to_copy.default, aten.copy_.default))
_STEP = "Optimizer.step#"
# Files whose questions have the answer yes: raises unless what it got is valid, ends unless it may go on.
_YES = (torch.distributions.distribution.__file__, frameworks.LBFGS)
# The engine and its nodes do these in place, but not where a dispatch mode is there.
_IN_PLACE = frozenset(
    (
        aten.add.Tensor,
        aten.index_add.default,
        aten.index_put.default,
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter_add.default,
    )
)
# How many of their last results a card makes first.
_MADE_FIRST = {aten.native_dropout.default: 1, aten._scaled_dot_product_cudnn_attention.default: 2}


class Fakes:
    """The mode of fake tensors, and patches that make torch's own code act as on a card."""

    def __init__(
        self,
        device: str,
        memory: Any,
        reads: Reads,
        attention_: Callable[..., Any] | None,
        ran: Callable[[Any, Any, Any], None],
        job: ranks.Job,
        take: Callable[[scratch.Scratch], None],
        sizes_: sizes.Sizes,
        doubts_: doubts.Doubts,
        convolutions_: convolutions.Convolutions,
        durations_: durations.Durations,
    ) -> None:
        """Changes nothing yet.

        Args:
            device: the type of device whose tensors get memory.
            memory: the imagined memory.
            reads: answers the program's reads of values.
            attention_: replaces `scaled_dot_product_attention`, if anything does.
            ran: called with each operator of the device, its arguments and its result after it ran.
            job: the ranks of which the program is one.
            take: takes the scratch of a call.
            sizes_: makes up sizes that depend on values.
            doubts_: is shown every tensor that was made.
            convolutions_: knows their scratch.
            durations_: is told of every call.
        """
        self._known = Known(is_fake)
        self._known.assumes = reads.assumes
        self._composites = attention.Composites()
        self.compiler = compiled.Compiler(self._make, self._known.forget, self._running)
        self._mode = Mode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._watching = _Watching(
            self._mode,
            device,
            memory,
            self._known,
            attention_,
            ran,
            job,
            take,
            sizes_,
            self._composites,
            doubts_,
            convolutions_,
            durations_,
        )
        self._reads, self._memory, self._job, self._doubts = reads, memory, job, doubts_

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Puts the calling thread onto the imagined device, and undoes everything at the end."""
        _begin_engine()
        with contextlib.ExitStack() as stack:
            back, shelf = self._watching.back, self._job.shelf
            for patch in _patches(self._reads, self._known, self._memory, shelf, back):
                stack.enter_context(patch)
            guard = C.ImaginedGuard()
            stack.callback(lambda: holder.clear())
            holder = [guard]
            del guard
            stack.callback(_placed(self._known, self._composites)._destroy)
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self._mode)
            stack.enter_context(self._watching)
            stack.enter_context(ranks.placed(self._job, self._known))
            stack.enter_context(self.compiler.followed())
            yield

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        with self._mode.making(), self._watching, self._doubts.aside():
            yield

    def _make(self, device: str, size: Any, stride: Any, dtype: torch.dtype) -> Any:
        """A tensor without an operator, as code that torch.compile wrote makes it."""
        with without_modes():
            shape = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            made = FakeTensor(self._mode, shape, torch.device(device))
        if self._watching._is_ours(made):
            self._memory.back([made])
        return made


def _placed(known: Known, composites: attention.Composites) -> Any:
    """Replaces operators that read fake tensors by pointer, until `_destroy()` of the result."""
    library = torch.library.Library("aten", "IMPL")
    ctc.place(library, known)
    recurrent.place_packing(library, known)
    composites.place(library)
    return library


def _begin_engine() -> None:
    """Runs a backward pass, at which torch counts devices once and starts a thread for each."""
    torch.zeros((), requires_grad=True).backward()


class _Watching(TorchDispatchMode):
    """Sees the result of every operator, above the fake tensors' own mode."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch compile while the mode is there."""
        return True

    def __init__(
        self,
        mode: Mode,
        device: str,
        memory: Any,
        known: Known,
        attention_: Callable[..., Any] | None,
        ran: Callable[[Any, Any, Any], None],
        job: ranks.Job,
        take: Callable[[scratch.Scratch], None],
        sizes_: sizes.Sizes,
        composites: attention.Composites,
        doubts_: doubts.Doubts,
        convolutions_: convolutions.Convolutions,
        durations_: durations.Durations,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode, self._job, self._take, self._sizes = mode, job, take, sizes_
        self._device, self._memory, self._known = device, memory, known
        self._attention, self._ran = attention_, ran
        self._is_card = device != CPU
        self._used: torch.device | None = None  # the card's number is what the program says
        self._kernels = kernels.Kernels(take, self.back, attention_)
        self._composites = composites
        self._doubts, self._convolutions, self._durations = doubts_, convolutions_, durations_
        sizes_.knows(known)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func.namespace == "prim":  # a question about a tensor
            return func(*args, **given)
        if isinstance(func, private_torch.higher_order):
            with self:
                return kernels.of_operators(func)(*args, **given)
        if not all(issubclass(one, FakeTensor) for one in types):
            self._doubts.given((args, given))
            return NotImplemented  # it does the operator by other operators, as DTensor does
        if self._mode.computes_shapes():
            try:
                return func(*args, **given)
            except UnsupportedOperatorException:
                return kernels.in_place(func, args, given)
        if func.namespace == "c10d":
            self._durations.exchanged(args)
            return ranks.collective(func, args, self._known, self._job)
        if func is aten.is_pinned.default:
            return self._known.is_pinned(args[0])
        if func.namespace == "profiler":  # the name of a scope, such as an optimizer's step
            if args and str(args[0]).startswith(_STEP):
                self._job.shelf.stepped()
            with without_modes():
                return func(*args, **given)
        if (
            self._attention and func is aten.scaled_dot_product_attention.default
        ):  # in inference mode
            return self._attention(*args, **given)
        if func in kernels.COMPOSED:
            with self:
                return func._op_dk(_COMPOSED, *args, **given)
        if torch.is_inference_mode_enabled() and _is_composite(func):
            with self:  # otherwise autograd takes it apart before a mode sees it
                return func._op_dk(_COMPOSITE, *args, **given)
        try:
            ours_runs = func in self._kernels
            result = self._kernels.run(func, args, given) if ours_runs else func(*args, **given)
        except (DataDependentOutputException, DynamicOutputShapeException) as problem:
            result = self._of_known_values(func, args, given, problem)
        except UnsupportedOperatorException:
            result = kernels.in_place(func, args, given)
        kernels.check_layout(func, result)
        if self._is_card and func in scratch.IN_ROWS:
            result = tree_map(scratch.in_rows, result)
        losses.keep(func, args, result)
        self._durations.ran(func, args, given, result)
        if func in _COPIES:
            self._copied(func, args, given, result)
        self._known.ran(func, args, given, result)
        self._sizes.ran(func, args, result)
        ours = [one for one in tree_iter(result) if self._is_ours(one)]
        by_torch = func in _IN_PLACE and (self._composites.is_running or _is_of_the_engine())
        if by_torch and sys.getrefcount(args[0]) <= _OF_THE_CALL:  # the program does not have it
            self._memory.take_over(result, args[0])
        held = scratch.blocks(scratch.copies(func, args)) if ours and self._is_card else []
        self._memory.back(held)
        if func in scratch.CONVOLUTIONS and ours:
            for made, taken in self._convolutions.taken(func, args, result):
                self._memory.back([made])
                self._take(taken)
        made_first = len(ours) - _MADE_FIRST.get(func, 0)
        self._memory.back(ours[made_first:] + ours[:made_first])
        self._kernels.take_scratch()
        if ours and (unsure := scratch.not_sure(func, args, given, result)) is not None:
            self._take(unsure)
        if ours:
            self._doubts.made(ours)
            self._job.ran(func)
            self._ran(func, args, result)
        return result

    def _of_known_values(self, func: Any, args: Any, kwargs: Any, problem: Exception) -> Any:
        """The result of an operator that needs values, if they are known."""
        if func is aten._pack_padded_sequence.default:
            packed = recurrent.pack(args, self._known)
            if packed is not None:
                return packed
        result = self._known.result_of(func, args, kwargs)
        if result is not None:
            device = next(one.fake_device for one in tree_iter((args, kwargs)) if is_fake(one))
            with self._mode.making():
                return tree_map(lambda one: _empty_like(one, device), result)
        if func is _READS_A_NUMBER:
            return stand_in(args[0])
        if _is_a_question(func):
            return self._job.reads.decide()
        result = self._sizes.result_of(func, args)
        if result is not None:
            return result
        count = isinstance(problem, DynamicOutputShapeException)
        needed = "a count of them" if count else "values"
        raise errors.CannotImagine(self._sizes.are_needed(func, needed)) from None

    def _copied(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """A copy to the host waits for the card."""
        source = args[0] if func is aten._to_copy.default else args[1]
        blocks = not (kwargs.get("non_blocking") or args[2:3] == (True,))
        if blocks and self._is_ours(source) and result.fake_device.type == CPU:
            self._job.shelf.synchronized()

    def back(self, tensors: list[Any]) -> None:
        """Gives memory to tensors on the imagined device that were made without an operator."""
        self._memory.back([one for one in tensors if self._is_ours(one)])

    def _is_ours(self, one: Any) -> bool:
        if not isinstance(one, FakeTensor) or one.fake_device.type != self._device:
            return False
        if one.fake_device != self._used:
            self._used = self._used or one.fake_device
            if one.fake_device != self._used:
                raise errors.CannotImagine(
                    f"{where()}: the program uses {one.fake_device} beside {self._used}, and one card "
                    "is imagined. If each card has a process of its own, imagine one of them "
                    "(ranks=2 or --ranks 2). Otherwise imagine the part on each card by itself"
                )
        return True


def is_fake(one: Any) -> bool:
    """Whether the object is a fake tensor."""
    return isinstance(one, FakeTensor)


def _is_a_question(func: Any) -> bool:
    """Whether the operator's result is a truth, such as whether all numbers are close."""
    return [str(one.type) for one in func._schema.returns] == ["bool"]


def _is_composite(func: Any) -> bool:
    return func.namespace == "aten" and private_torch.has_kernel(
        func.name(), "CompositeImplicitAutograd"
    )


def _empty_like(one: Any, device: torch.device) -> Any:
    if not isinstance(one, torch.Tensor):
        return one
    return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=device)


_OF_THE_CALL = (
    3  # references to an operator's argument: of two calls in Python, and of the question
)


def _is_of_the_engine() -> bool:
    """Whether the engine or a node of torch's runs it, and not Python code inside a node."""
    if private_torch.backward_pass_number() == -1 or torch.is_grad_enabled():
        return False
    frame: Any = sys._getframe(2)  # the operator's caller
    while frame is not None and frame.f_code.co_filename.endswith(WRAPPERS):
        frame = frame.f_back
    return frame is not None and frame.f_code is _RUNS_BACKWARD


# ---------------------------------------------------------------- patches of torch


def _patches(
    reads: Reads,
    known: Known,
    memory: Any,
    shelf: Shelf,
    back: Callable[[list[Any]], None],
) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """Yields the patches of torch's attributes one by one."""
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        memory.resized(storage)
        return result

    yield for_programs(torch.UntypedStorage, "resize_", resize_and_tell)
    yield replaced(private_torch.fake_tensors, "init_gpu_context", lambda device: None)
    # Some code takes a FakeTensor as a sign of a compiler.
    yield for_programs(private_torch.subclasses, "FakeTensor", _NoTensor)
    yield for_programs(torch.utils.data.DataLoader, "__init__", loaders.loads_here)
    yield for_programs(torch, "save", checkpoints.saving(torch.save))
    yield for_programs(torch, "load", checkpoints.loading(torch.load, back))
    for owner, name, packing in recurrent.patches():
        yield for_programs(owner, name, packing)
    for kind in lazy.KINDS:
        yield for_programs(kind, "__new__", lazy.make)
    yield for_programs(torch.nn.init, "_no_grad_trunc_normal_", _truncated)
    yield for_programs(torch.nn.Module, "_apply", _apply(torch.nn.Module._apply))
    for name, method in _methods(reads, known, shelf).items():
        waits = name in _WAIT_FOR_THE_CARD
        yield for_programs(
            FakeTensor, name, _telling(method, shelf.synchronized) if waits else method
        )
    yield listed(private_torch.foreach_types_of_optimizers, FakeTensor)
    yield listed(private_torch.foreach_types_of_norms, FakeTensor)
    yield for_programs(torch.amp.GradScaler, "_maybe_opt_step", _step)


_WAIT_FOR_THE_CARD = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy")


def _telling(method: Callable[..., Any], tell: Callable[[], None]) -> Callable[..., Any]:
    """The method, which also tells that the program waited for the card."""

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if self.fake_device.type != CPU:
            tell()
        return method(self, *args, **options)

    return call


class _NoTensor:
    """A class without instances."""


def _methods(reads: Reads, known: Known, shelf: Shelf) -> dict[str, Any]:
    """Methods of fake tensors. Those that read values give known ones, or else stand-ins."""
    value_of = known.value_of

    def said_of(self: torch.Tensor, kind: type) -> bool | None:
        """What the program's line was said to decide, where the value follows from an assumption."""
        if known.is_assumed(self):
            reads.number(kind)
        return reads.shares() if known.is_shared(self) else None

    def item(self: torch.Tensor) -> Any:
        real = value_of(self)
        if real is not None:
            value = _of_real(torch.Tensor.item, real)
            is_open = known.is_guess(self) or said_of(self, type(value)) is not None
            return reads.number(type(value), value) if is_open else value
        if self.numel() != 1:
            raise RuntimeError(
                f"a Tensor with {self.numel()} elements cannot be converted to Scalar"
            )
        kind = bool if self.dtype == torch.bool else float if self.dtype.is_floating_point else int
        return reads.number(kind)

    def tolist(self: torch.Tensor) -> Any:
        real = value_of(self)
        if real is not None and not known.is_guess(self):
            said_of(self, int)
            return _of_real(torch.Tensor.tolist, real)
        if self.dim() == 0:
            return item(self)
        return [tolist(row) for row in self.unbind(0)]

    def truth(self: torch.Tensor) -> bool:
        real = None if known.is_guess(self) else value_of(self)
        if real is None and is_asked_by(*_YES):
            reads.assumes()
            return True
        said = None if real is None else said_of(self, bool)
        if said is not None:
            return said
        return bool(_of_real(torch.Tensor.item, real)) if real is not None else reads.decide()

    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        import numpy as np

        real = value_of(self)
        if real is None or known.is_guess(self):
            reads.number(float)
        if real is not None:
            return _of_real(torch.Tensor.numpy, real).copy()
        return np.full(tuple(self.shape), GUESS, dtype=_numpy_type(self.dtype))

    return {
        "item": item,
        "tolist": tolist,
        "__bool__": truth,
        "__float__": lambda self: float.__add__(float(item(self)), 0.0),
        "__int__": lambda self: int.__add__(int(item(self)), 0),
        "__index__": lambda self: int.__add__(int(item(self)), 0),
        "numpy": numpy,
        "data": property(_data.__get__, _set_data),
        "record_stream": lambda self, stream: shelf.used_on(stream.stream_id, self),
        "pin_memory": lambda self, *_: self,
        "is_pinned": lambda self, *_: False,
        "__deepcopy__": _copied_deeply,
        "__format__": lambda self, spec: format(item(self) if self.dim() == 0 else str(self), spec),
    }


def _copied_deeply(self: Any, memo: dict[Any, Any]) -> Any:
    """As torch copies real tensors. It would copy the mode of a fake one, too."""
    if id(self) in memo:
        return memo[id(self)]
    if not self.is_leaf:
        return torch.Tensor.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]  # refuses it
    with torch.no_grad():
        if isinstance(self, torch.nn.Parameter):
            data = self.data.clone(memory_format=torch.preserve_format)
            copy: Any = torch.nn.Parameter(data, self.requires_grad)
        else:
            copy = _whole_copied(self, memo).as_strided(
                self.shape, self.stride(), self.storage_offset()
            )
            copy = copy.detach().requires_grad_(self.requires_grad)
            copy.grad = deepcopy(self.grad, memo)
    own = {name: one for name, one in vars(self).items() if name not in vars(copy)}
    vars(copy).update(deepcopy(own, memo))
    memo[id(self)] = copy
    return copy


def _whole_copied(tensor: Any, memo: dict[Any, Any]) -> torch.Tensor:
    """A copy of the tensor's storage, one for all tensors that share it."""
    storage, size = tensor.untyped_storage(), tensor.element_size()
    copies = memo.setdefault("pytracer", {})
    key = (storage._cdata, tensor.dtype)
    if key not in copies:
        whole = tensor.detach().as_strided((storage.nbytes() // size,), (1,), 0)
        copies[key] = whole.clone()
    return copies[key]  # type: ignore[no-any-return]


def _of_real(read: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    with without_modes():
        return read(tensor)


def _numpy_type(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    if not dtype.is_floating_point:
        return "int64"
    return "float64" if dtype == torch.float64 else "float32"


def _apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """`module.to()` for fake parameters. torch would swap them, and fails if they are referenced."""

    def apply(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> Any:
        own = [p for p in self._parameters.values() if p is not None]
        if not all(isinstance(parameter, FakeTensor) for parameter in own):
            return original(self, fn, recurse)
        if recurse:
            for child in self.children():
                child._apply(fn)
        for parameter in own:
            _become(parameter, fn)
            if parameter.grad is not None:
                _become(parameter.grad, fn)
        for name, buffer in self._buffers.items():
            if buffer is not None and lazy.is_lazy(buffer):
                _become(buffer, fn)
            elif buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    return apply


def _become(tensor: Any, fn: Callable[..., Any]) -> None:
    with torch.no_grad():
        applied = fn(tensor)
    if applied is not tensor:
        tensor.data = applied


_data: Any = torch.Tensor.data


def _set_data(tensor: Any, other: Any) -> None:
    """`tensor.data = other`, which may be on another device. Torch leaves the tensor's device."""
    _data.__set__(tensor, other)
    if isinstance(other, FakeTensor):
        tensor.fake_device = other.fake_device
        tensor.constant = None


def _truncated(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Fills in place once. Later torch releases draw again until all values are inside the bounds."""
    with torch.no_grad():
        return tensor.normal_()


def _step(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """Always steps, because no gradient is infinite here."""
    return optimizer.step(*args, **kwargs)
