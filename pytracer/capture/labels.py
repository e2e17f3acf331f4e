"""Says which live block is what: weights, gradients, optimizer state, inputs.

Blocks are labelled after the fact, at moments when the truth is easy to read: the trace begins, a
module is entered, a backward pass ends, an optimizer steps, the trace ends. Everything is known by
weak references only; nothing lives longer for being watched.
"""

import contextlib
import functools
import gc
import inspect
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, ParamSpec, TypeVar

import torch

from pytracer import schema
from pytracer._native import C
from pytracer.capture import deepspeed

P = ParamSpec("P")
R = TypeVar("R")

_PARALLEL_WRAPPERS = ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine")

_WEIGHTS = schema.CATEGORY["weights"]
_GRADIENTS = schema.CATEGORY["gradients"]
_OPTIMIZER_STATE = schema.CATEGORY["optimizer_state"]
_16_BITS = (torch.bfloat16, torch.float16)
_INPUTS = schema.CATEGORY["inputs"]
_WORKSPACES = schema.CATEGORY["workspaces"]
_FUNCTIONAL = schema.CATEGORY["functional"]

# What models call the keys and values of earlier words: past_key_values, cache, kv_cache, ...
_CACHE_ARGUMENT = re.compile(r"past|cache")
# Which of a class's positional arguments are such.
_CACHE_POSITIONS: weakref.WeakKeyDictionary[type, tuple[int, ...]] = weakref.WeakKeyDictionary()


_DEEPEST_BATCH = 6  # a call's arguments are two deep themselves
_MOST_VISITS = 5_000  # of what a call was given
_NO_BATCH = (torch.nn.Module, torch.optim.Optimizer, type, ModuleType, FunctionType, MethodType)


def unheard(method: Callable[P, R]) -> Callable[P, R]:
    """What we ask of tensors does not reach the program's `__torch_function__`."""

    @functools.wraps(method)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return quiet


class Labels:
    """The modules and optimizers of one recording, and what their tensors are called."""

    def __init__(self) -> None:
        """Knows nothing yet; modules and optimizers are met as they are used."""
        self._watched = C.Watched()
        self._module_names: dict[int, str] = {}
        self._module_references: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._roots: list[tuple[weakref.ref[torch.nn.Module], str]] = []
        self._has_root = False  # had one, that is
        self._engines = deepspeed.Engines()
        self._parameter_names: dict[int, str] = {}
        self._group_names: dict[str, int] = {}  # of parameters of no known module, and their ids
        # Optimizers may step before a module is called. What had been labelled by then has a
        # group's name for good: this says which module's it is.
        self.renamed: dict[str, str] = {}
        self._optimizers: list[_Optimizer] = []
        self._optimizers_met = 0
        self._nameless: dict[tuple[int, str, Any, Any], int] = {}  # labels of shapes and dtypes
        self._has_16_bits = False  # some module's parameters: an optimizer may have masters of them

    # ---------------------------------------------------------------- modules

    def name_of_module(self, module: torch.nn.Module) -> str:
        """The module's path in the user's model. Asked once per module."""
        if id(module) not in self._module_names and self._has(module):
            self.look_again()  # it has been added since we looked
        if id(module) not in self._module_names:
            self.add_root(module)
        return self._module_names[id(module)]

    def _has(self, module: torch.nn.Module) -> bool:
        """Whether a known model has it. Some are made for one call and in none: nn.Softmax()(x)."""
        self._roots = [root for root in self._roots if root[0]() is not None]
        return any(one is module for one in modules_of(root() for root, _ in self._roots))

    @unheard
    def add_root(self, module: torch.nn.Module) -> None:
        """Learns the names of a model's modules and tensors."""
        # The first model's paths are as its user writes them; a second one's say whose they are.
        prefix = f"{type(module).__name__}." if self._has_root else ""
        self._has_root = True
        self._roots.append((weakref.ref(module), prefix))
        self._walk(module, prefix)
        if next(module.parameters(), None) is not None:
            self._watched.label_gradients()  # of steps before the trace; they may go before a backward
        held = self._engines.add(module)
        adopt(tensor for _, _, tensor in held)
        self._label_held(held)

    def look_again(self) -> None:
        """Modules come and go, and parameters are replaced: where one died another may stand."""
        for root, prefix in self._roots:
            known = root()
            if known is not None:
                self._walk(known, prefix)

    def _walk(self, root: torch.nn.Module, prefix: str) -> None:
        parallel = type(root).__name__ in _PARALLEL_WRAPPERS
        for raw_path, module in root.named_modules():
            path = _clean(raw_path, parallel)
            name = prefix + path if path else type(_unwrapped(module)).__name__
            self._name_module(module, name)
            where = prefix + path + "." if path else prefix
            for key, parameter in module._parameters.items():
                self._has_16_bits |= parameter is not None and parameter.dtype in _16_BITS
                self._watch(parameter, module, ("_parameters", key), "parameter", where + key)
            for key, buffer in module._buffers.items():
                self._watch(buffer, module, ("_buffers", key), "buffer", where + key)

    def _name_module(self, module: torch.nn.Module, name: str) -> None:
        key = id(module)
        if key not in self._module_names:
            self._module_names[key] = name
            self._module_references[key] = weakref.ref(module, lambda _: self._forget(key))

    def _watch(
        self,
        tensor: torch.Tensor | None,
        holder: Any,
        path: tuple[Any, ...],
        role: str,
        name: str,
    ) -> None:
        if tensor is None:
            return
        shape, dtype = describe(tensor)
        weight = C.intern_label(_WEIGHTS, role, name, shape, dtype)
        gradient = C.intern_label(_GRADIENTS, role, name, shape, dtype)
        if self._watched.add(tensor, holder, path, weight, gradient):
            self._parameter_names[id(tensor)] = name
            adopt([tensor, tensor.grad if tensor.is_leaf else None])
        elif name not in self._group_names:
            known = self.parameter_name(tensor)
            if not known:  # it has taken another's place
                self._parameter_names[id(tensor)] = name
                adopt([tensor])
            elif known in self._group_names:
                self._watched.add(tensor, holder, path, weight, gradient, instead=True)
                self._parameter_names[id(tensor)] = self.renamed[known] = name

    def _forget(self, module_id: int) -> None:
        self._module_names.pop(module_id, None)
        self._module_references.pop(module_id, None)
        C.forget_module(module_id)

    # ---------------------------------------------------------------- moments

    @unheard
    def session_begins(self) -> None:
        """What is known already, of the trace around this one or because it was given."""
        adopt(self._known_tensors())
        self._label(optimizer for optimizer in self._optimizers if optimizer.is_named)

    def _known_tensors(self) -> Iterator[torch.Tensor | None]:
        may_read = C.status()["may_read_gradients"]
        for root, _ in self._roots:
            module = root()
            if module is None:
                continue
            yield from module.buffers()
            for parameter in module.parameters():
                yield parameter
                yield parameter.grad if may_read and parameter.is_leaf else None
        for optimizer in self._optimizers:
            yield from tensors_in(_state_of(optimizer.reference()))
        yield from (tensor for _, _, tensor in self._engines.tensors())

    def before_root(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """The outermost module is entered: weights are where they are, inputs are new."""
        if self._watched.label():
            self.look_again()
        cached = _caches(module, args, kwargs)
        is_cache = {id(tensor) for tensor in cached}
        inputs = [t for t in _given((args, kwargs)) if id(t) not in is_cache]
        adopt([*inputs, *cached])
        self._label_as(_INPUTS, "batch", inputs)
        self._label_as(_FUNCTIONAL, "kv_cache", cached)

    def after_backward(self) -> None:
        """Gradients are where they are, whatever op allocated their blocks."""
        self._watched.label_gradients()
        self._label_held(self._engines.tensors())

    def before_optimizer(self, optimizer: Any) -> None:
        """The gradients as the optimizer sees them; its parameters may belong to no module."""
        known = self._optimizer(optimizer)
        known.watch_parameters(self)
        if not self._watched.label_gradients_of(known.parameters()):
            self._watched.label()  # something is to be written down of a step that does nothing
        self._label_held(self._engines.tensors())
        known.label_state_of_old(self)
        known.label_changed_state(self)  # load_state_dict puts another in its place

    def after_optimizer(self, optimizer: Any) -> None:
        """State that this step has made."""
        self._optimizer(optimizer).label_changed_state(self)

    @unheard
    def add_optimizer(self, optimizer: Any) -> None:
        """One given explicitly; without its model it waits until modules have named parameters."""
        known = self._optimizer(optimizer)
        if self._roots:
            known.watch_parameters(self)
            known.label_state_of_old(self)

    @unheard
    def label_everything(self) -> None:
        """At the end of a trace: one last look at all that is known, and what modules got since."""
        self.look_again()
        self._label(self._optimizers)

    def frozen_modules(self) -> list[str]:
        """Outermost modules of which nothing is trained: a call of theirs keeps no graph."""
        found = []
        for root, _ in self._roots:
            module = root()
            trained = [p.requires_grad for p in module.parameters()] if module is not None else []
            if trained and not any(trained):
                found.append(self._module_names.get(id(module), ""))
        return found

    def _label(self, optimizers: Iterable["_Optimizer"]) -> None:
        self.label_workspaces()
        self._watched.label()
        self._watched.label_gradients()
        self._label_held(self._engines.tensors())
        for optimizer in optimizers:
            optimizer.label_state(self)

    def _label_held(self, held: Iterable[deepspeed.Held]) -> None:
        for category, role, tensor in held:
            self._label_as(schema.CATEGORY[category], role, [tensor])

    @unheard
    def label_from_before(self) -> None:
        """What else the program has on a GPU as the trace begins.

        An average of the weights in a dictionary, a data set; and gradients, of models that have
        not been met yet. A look at every object, hence once. Whatever says more is said later.
        """
        plain = (torch.Tensor, torch.nn.Parameter)  # others may run code of the program's
        found = [t for t in C.exactly_of(gc.get_objects(), plain) if t.is_cuda]
        may_read = C.status()["may_read_gradients"]
        gradients = [t.grad for t in found if may_read and t.is_leaf and t.grad is not None]
        self._label_as(_FUNCTIONAL, "from_before", found)
        self._label_as(_GRADIENTS, "parameter", gradients)

    def _label_as(self, category: int, role: str, tensors: list[torch.Tensor]) -> None:
        """Those that have no name; of what is alike the label is looked up once."""
        C.label_tensors(tensors, [self._number_of(category, role, t) for t in tensors])

    def _number_of(self, category: int, role: str, tensor: torch.Tensor) -> int:
        if tensor.is_nested:  # has no shape, or one of symbols
            return C.intern_label(category, role, "", *describe(tensor))
        alike = (category, role, tensor.shape, tensor.dtype)
        number = self._nameless.get(alike)
        if number is None:
            number = C.intern_label(category, role, "", *describe(tensor))
            self._nameless[alike] = number
        return number

    def bucket_sizes(self) -> list[int]:
        """Bytes of DistributedDataParallel's buckets: it shows nobody the buckets, only these."""
        found: set[int] = set()
        for root, _ in self._roots:
            told: dict[str, Any] = getattr(root(), "_get_ddp_logging_data", dict)()
            for key in ("bucket_sizes", "rebuilt_bucket_sizes"):
                found |= {int(size) for size in re.findall(r"\d+", str(told.get(key, "")))}
        return sorted(found)

    def label_workspaces(self) -> None:
        """What torch keeps for cuBLAS, made before the trace or in it."""
        C.label_workspaces(C.intern_label(_WORKSPACES, "cublas", "", "", ""))

    # ---------------------------------------------------------------- optimizers

    def _optimizer(self, optimizer: Any) -> "_Optimizer":
        for known in self._optimizers:
            if known.reference() is optimizer:
                return known
        # As with models, the first one's are as its user writes them.
        prefix = f"optimizers[{self._optimizers_met}]." if self._optimizers_met else ""
        self._optimizers_met += 1
        known = _Optimizer(optimizer, prefix)
        self._optimizers = [o for o in self._optimizers if o.reference() is not None]
        self._optimizers.append(known)
        return known

    def watch_parameter(self, parameter: torch.Tensor, optimizer: Any, group: int, at: int) -> None:
        """A parameter that an optimizer has; modules' parameters are known by better names."""
        path = ("param_groups", group, "params", at)
        name = f"{self._optimizer(optimizer).prefix}param_groups[{group}].params[{at}]"
        while self._group_names.setdefault(name, id(parameter)) != id(parameter):
            name += "'"  # another stood there before
        is_master = self._has_16_bits and parameter.dtype == torch.float32
        self._watch(parameter, optimizer, path, "master" if is_master else "parameter", name)

    def parameter_name(self, parameter: Any) -> str:
        """The name under which it is known, or nothing."""
        return self._parameter_names.get(id(parameter), "")


def modules_of(roots: Iterable[torch.nn.Module | None]) -> Iterator[torch.nn.Module]:
    """Each once, in order: some have what they are a part of. Calls nothing of the program's."""
    left, seen = [*roots][::-1], set()
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            left += reversed(one._modules.values())


class _Optimizer:
    """One optimizer's state, labelled when it changes."""

    def __init__(self, optimizer: Any, prefix: str) -> None:
        self.prefix = prefix  # of its parameters' names, where no module is known to have them
        self.reference = weakref.ref(optimizer)
        self._group_sizes: list[int] = []
        self._labelled = C.identity_of({})  # which tensors
        self._old_state_known = False

    def parameters(self) -> list[torch.Tensor]:
        groups = getattr(self.reference(), "param_groups", ())
        return [parameter for group in groups for parameter in group["params"]]

    def watch_parameters(self, labels: Labels) -> None:
        optimizer = self.reference()
        groups = getattr(optimizer, "param_groups", ())
        sizes = [len(group["params"]) for group in groups]
        if sizes == self._group_sizes:
            return  # groups grow; nobody exchanges their members in between steps
        self._group_sizes = sizes
        if any(not labels.parameter_name(parameter) for parameter in self.parameters()):
            labels.look_again()
        for g, group in enumerate(groups):
            for p, parameter in enumerate(group["params"]):
                labels.watch_parameter(parameter, optimizer, g, p)

    def label_state_of_old(self, labels: Labels) -> None:
        """State from before the trace, once: it may be freed by this very step."""
        if not self._old_state_known:
            self._old_state_known = True
            adopt(tensors_in(self._besides_state()))
            self.label_state(labels, of_old=True)

    @property
    def is_named(self) -> bool:
        """Else it waits for modules to name its parameters: a first label is the one that stays."""
        return self._old_state_known

    def _besides_state(self) -> dict[str, Any]:
        """What it keeps to put into its state later: 8-bit optimizers share their code books."""
        held = getattr(self.reference(), "__dict__", {})
        return {k: v for k, v in held.items() if k not in ("state", "param_groups", "defaults")}

    def label_changed_state(self, labels: Labels) -> None:
        """Labels all state if some of it is new: it has grown, or its tensors were replaced."""
        if C.identity_of(_state_of(self.reference())) != self._labelled:
            self.label_state(labels)

    def label_state(self, labels: Labels, *, of_old: bool = False) -> None:
        state = _state_of(self.reference())
        self._labelled = C.identity_of(state)
        tensors: list[torch.Tensor] = []
        numbers: list[int] = []
        for parameter, entry in state.items():
            name = labels.parameter_name(parameter)
            for role, tensor in named_tensors(entry):
                tensors.append(tensor)
                numbers.append(C.intern_label(_OPTIMIZER_STATE, role, name, *describe(tensor)))
        C.adopt_cpu_tensors(tensors, also_known=of_old)
        C.label_tensors(tensors, numbers)


def _state_of(optimizer: Any) -> dict[Any, Any]:
    state = getattr(optimizer, "state", None)
    return state if isinstance(state, dict) else {}


def named_tensors(entry: Any, role: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a parameter's state, each with the key it is under."""
    if isinstance(entry, torch.Tensor):
        for part in plain_tensors(entry):
            yield role, part
    elif isinstance(entry, dict):
        for key, value in entry.items():
            yield from named_tensors(value, role or str(key))
    elif isinstance(entry, list | tuple):
        for value in entry:
            yield from named_tensors(value, role)


def _given(arguments: Any) -> Iterator[torch.Tensor]:
    """Tensors in a call's arguments: in containers, and in objects that are batches."""
    todo = [(arguments, _DEEPEST_BATCH)]
    for _ in range(_MOST_VISITS):
        if not todo:
            return
        value, depth = todo.pop()
        if isinstance(value, torch.Tensor):
            yield from plain_tensors(value)
        elif depth:
            todo.extend((part, depth - 1) for part in _parts(value))


def _parts(value: Any) -> Iterable[Any]:
    """What a container or an object holds. What computes or learns is no batch."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, _NO_BATCH):
        return ()
    with contextlib.suppress(AttributeError):  # an object with slots has none
        attributes: dict[str, Any] = object.__getattribute__(value, "__dict__")
        return attributes.values()
    return [getattr(value, name, None) for name in getattr(type(value), "__dataclass_fields__", ())]


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        yield from plain_tensors(value)
    elif depth == 0:
        return
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item, depth - 1)


def _caches(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """Tensors handed over under a name that says what they are."""
    named = [value for name, value in kwargs.items() if _CACHE_ARGUMENT.search(name)]
    if args:
        positions = _CACHE_POSITIONS.get(type(module))
        if positions is None:
            names = enumerate(_argument_names(module))
            positions = tuple(i for i, name in names if _CACHE_ARGUMENT.search(name))
            _CACHE_POSITIONS[type(module)] = positions
        named += [args[i] for i in positions if i < len(args)]
    return [tensor for value in named for tensor in tensors_in(contents(value))]


def _argument_names(module: torch.nn.Module) -> tuple[str, ...]:
    """Of its class's forward, found without running what a class may have put in its place."""
    found = (vars(base)["forward"] for base in type(module).__mro__ if "forward" in vars(base))
    forward = next(found, None)
    if not isinstance(forward, FunctionType):
        return ()
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code.co_varnames[1 : code.co_argcount] if isinstance(code, CodeType) else ()


def contents(cache: Any) -> Any:
    """What a cache that is an object of its own (transformers' DynamicCache) is made of."""
    if isinstance(cache, dict | list | tuple | torch.Tensor) or not hasattr(cache, "__dict__"):
        return cache
    layers = vars(cache).get("layers")
    if not isinstance(layers, list):
        return vars(cache)
    return [vars(layer) for layer in layers if hasattr(layer, "__dict__")]


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """What a tensor subclass is made of (quantised state, DTensor), or the tensor itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    names, _ = flatten()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):  # a DTensor also names its mesh
            yield from plain_tensors(part)


def describe(tensor: torch.Tensor) -> tuple[str, str]:
    """Shape and dtype as people write them."""
    try:
        shape = "x".join(map(str, tensor.shape)) or "scalar"
    except RuntimeError:  # a nested tensor has none
        shape = "nested"
    return shape, str(tensor.dtype).removeprefix("torch.")


def adopt(tensors: Iterable[torch.Tensor | None]) -> None:
    """Makes CPU memory from before the trace visible, and its end too."""
    C.adopt_cpu_tensors([part for t in tensors if t is not None for part in plain_tensors(t)])


def _clean(path: str, parallel: bool) -> str:
    levels = [level for level in path.split(".") if level not in schema.WRAPPER_LEVELS]
    if parallel and levels[:1] == ["module"]:
        levels = levels[1:]
    return ".".join(level for level in levels if level)


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    for level in (*schema.WRAPPER_LEVELS, "module"):
        inner = getattr(module, level, None)
        if isinstance(inner, torch.nn.Module) and (
            level != "module" or type(module).__name__ in _PARALLEL_WRAPPERS
        ):
            return _unwrapped(inner)
    return module
