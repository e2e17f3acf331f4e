"""Says which live block is what: weights, gradients, optimizer state, inputs.

Blocks are labelled after the fact, at moments when the truth is easy to read: the trace begins, a
module is entered, a backward pass ends, an optimizer steps, the trace ends. Everything is known by
weak references only; nothing lives longer for being watched.
"""

import gc
import inspect
import re
import weakref
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from pytracer import private_torch, schema
from pytracer._native import C
from pytracer.capture import deepspeed
from pytracer.capture.looking import (
    buffers_of,
    is_a,
    modules_of,
    named_modules_of,
    parameters_of,
    submodules_of,
)

_PARALLEL_WRAPPERS = ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine")

_UNKNOWN = schema.CATEGORY["unknown"]
_WEIGHTS = schema.CATEGORY["weights"]
_GRADIENTS = schema.CATEGORY["gradients"]
_OPTIMIZER_STATE = schema.CATEGORY["optimizer_state"]
_16_BITS = (torch.bfloat16, torch.float16)
_WORKSPACES = schema.CATEGORY["workspaces"]
_FUNCTIONAL = schema.CATEGORY["functional"]

# What models call the keys and values of earlier words: past_key_values, cache, kv_cache, ...
_CACHE_ARGUMENT = re.compile(r"past|cache")


class Labels:
    """The modules and optimizers of one recording, and what their tensors are called."""

    def __init__(self) -> None:
        """Knows nothing yet; modules and optimizers are met as they are used."""
        self.moments = C.Moments()  # when they are looked at
        self._watched = self.moments.watched
        # By identity; the reference tells whether it is still that module.
        self._modules: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}
        self._most_modules = 1024  # then those that are gone are forgotten
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
        self._has_16_bits = False  # some module's parameters: an optimizer may have masters of them

    # ---------------------------------------------------------------- modules

    def name_of_module(self, module: torch.nn.Module) -> str:
        """The module's path in the user's model. Asked once per module."""
        if not self._known_name(module) and self._has(module):
            self.look_again()  # it has been added since we looked
        if not self._known_name(module):
            self.add_root(module)
        return self._known_name(module)

    def _known_name(self, module: torch.nn.Module) -> str:
        reference, name = self._modules.get(id(module), (None, ""))
        return name if reference is not None and reference() is module else ""

    def _has(self, module: torch.nn.Module) -> bool:
        """Whether a known model has it. Some are made for one call and in none: nn.Softmax()(x)."""
        self._roots = [root for root in self._roots if root[0]() is not None]
        return any(one is module for one in modules_of(root() for root, _ in self._roots))

    def add_root(self, module: torch.nn.Module) -> None:
        """Learns the names of a model's modules and tensors."""
        # The first model's paths are as its user writes them; a second one's say whose they are.
        prefix = f"{type(module).__name__}." if self._has_root else ""
        self._has_root = True
        self._roots.append((weakref.ref(module), prefix))
        self._walk(module, prefix)
        if next(parameters_of([module]), None) is not None:
            self._watched.label_gradients()  # of steps before the trace; they may go before a backward
        held = self._engines.add(module)
        self.moments.has_engines = self._engines.some_are_known
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
        for raw_path, module in named_modules_of(root):
            path = _clean(raw_path, parallel)
            name = prefix + path if path else type(_unwrapped(module)).__name__
            self._name_module(module, name)
            where = prefix + path + "." if path else prefix
            attributes = C.attributes_of(module)
            for key, parameter in C.items_of(attributes.get("_parameters")):
                if parameter is not None and C.is_parameter(parameter):
                    self._has_16_bits |= parameter.dtype in _16_BITS
                    path_to = ("_parameters", key)
                    self._watch(parameter, module, path_to, "parameter", where + key)
            for key, buffer in C.items_of(attributes.get("_buffers")):
                if buffer is not None:
                    self._watch(buffer, module, ("_buffers", key), "buffer", where + key)

    def _name_module(self, module: torch.nn.Module, name: str) -> None:
        if not self._known_name(module):
            if len(self._modules) >= self._most_modules:
                kept = {
                    key: known for key, known in self._modules.items() if known[0]() is not None
                }
                self._modules, self._most_modules = kept, max(1024, 2 * len(kept))
            self._modules[id(module)] = weakref.ref(module), name

    def _watch(
        self, tensor: torch.Tensor, holder: Any, path: tuple[Any, ...], role: str, name: str
    ) -> None:
        weight = C.label_of(_WEIGHTS, role, name, tensor)
        gradient = C.label_of(_GRADIENTS, role, name, tensor)
        if self._watched.add(tensor, holder, path, weight, gradient):
            self._parameter_names[id(tensor)] = name
            adopt([tensor, C.gradient_of(tensor)])
        elif name not in self._group_names:
            known = self.parameter_name(tensor)
            if not known:  # it has taken another's place
                self._parameter_names[id(tensor)] = name
                adopt([tensor])
            elif known in self._group_names:
                self._watched.add(tensor, holder, path, weight, gradient, instead=True)
                self._parameter_names[id(tensor)] = self.renamed[known] = name

    # ---------------------------------------------------------------- moments

    def session_begins(self) -> None:
        """What is known already, of the trace around this one or because it was given."""
        adopt(self._known_tensors())
        self._label(optimizer for optimizer in self._optimizers if optimizer.is_named)

    def _known_tensors(self) -> Iterator[torch.Tensor | None]:
        may_read = C.status()["may_read_gradients"]
        for root, _ in self._roots:
            yield from buffers_of([root()])
            for parameter in parameters_of([root()]):
                yield parameter
                yield C.gradient_of(parameter) if may_read else None
        for optimizer in self._optimizers:
            yield from C.tensors_in(_state_of(optimizer.reference()))
        yield from (tensor for _, _, tensor in self._engines.tensors())

    def label_engines(self) -> None:
        """Tensors that libraries keep to themselves, where they are now."""
        self._label_held(self._engines.tensors())

    def note_attributes(self, *roots: torch.nn.Module | None) -> None:
        """Plain tensors that these modules and theirs have as attributes.

        What a forward made and is seen here twice has outlived another: a table, and no activation.
        """
        for module in modules_of(roots):
            for key, value in C.items_of(C.attributes_of(module)):
                if type(value) is torch.Tensor and not _CACHE_ARGUMENT.search(key):
                    name = f"{self._known_name(module)}.{key}"
                    C.label_tensors([value], [C.label_of(_UNKNOWN, "attribute", name, value)])

    def meet_optimizer(self, optimizer: Any) -> None:
        """It is about to step. Its parameters may belong to no module."""
        known = self._optimizer(optimizer)
        known.watch_parameters(self)
        known.label_state_of_old(self)

    def label_state(self, optimizer: Any) -> None:
        """Some of it is new."""
        self._optimizer(optimizer).label_state(self)

    def add_optimizer(self, optimizer: Any) -> None:
        """One given explicitly; without its model it waits until modules have named parameters."""
        known = self._optimizer(optimizer)
        if self._roots:
            known.watch_parameters(self)
            known.label_state_of_old(self)

    def label_everything(self) -> None:
        """At the end of a trace: one last look at all that is known, and what modules got since."""
        self.look_again()
        self.note_attributes(*(root() for root, _ in self._roots))
        self._label(self._optimizers)

    def frozen_modules(self) -> list[str]:
        """Outermost modules of which nothing is trained: a call of theirs keeps no graph."""
        found = []
        for root, _ in self._roots:
            trained = [parameter.requires_grad for parameter in parameters_of([root()])]
            if (module := root()) is not None and trained and not any(trained):
                found.append(self._known_name(module))
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
            C.label_as(schema.CATEGORY[category], role, [tensor])

    def label_from_before(self) -> None:
        """What else the program has on a GPU as the trace begins.

        An average of the weights in a dictionary, a data set; and gradients, of models that have
        not been met yet. A look at every object, hence once. Whatever says more is said later.
        """
        plain = (torch.Tensor, torch.nn.Parameter)  # others may be made of these
        found = [t for t in C.exactly_of(gc.get_objects(), plain) if C.device_of(t)[0] == "cuda"]
        C.label_as(_FUNCTIONAL, "from_before", found)
        if C.status()["may_read_gradients"]:
            gradients = [C.gradient_of(tensor) for tensor in found]
            C.label_as(_GRADIENTS, "parameter", [g for g in gradients if g is not None])

    def bucket_sizes(self) -> list[int]:
        """Bytes of DistributedDataParallel's buckets: it shows nobody the buckets, only these."""
        found: set[int] = set()
        for root, _ in self._roots:
            module = root()
            if module is None or not is_a(module, torch.nn.parallel.DistributedDataParallel):
                continue
            logged = private_torch.read_buckets(module)
            for key in ("bucket_sizes", "rebuilt_bucket_sizes"):
                found |= {int(size) for size in re.findall(r"\d+", str(logged.get(key, "")))}
        return sorted(found)

    def label_workspaces(self) -> None:
        """What torch keeps for cuBLAS, made before the trace or in it."""
        C.label_workspaces(C.intern_label(_WORKSPACES, "cublas"))

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


class _Optimizer:
    """One optimizer's state, labelled when it changes."""

    def __init__(self, optimizer: Any, prefix: str) -> None:
        self.prefix = prefix  # of its parameters' names, where no module is known to have them
        self.reference = weakref.ref(optimizer)
        self._group_sizes: list[int] = []
        self._old_state_known = False

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._groups() for parameter in group["params"]]

    def _groups(self) -> list[dict[str, Any]]:
        """Of a wrapper that was given explicitly, what it says that it has."""
        optimizer = self.reference()
        groups = C.attributes_of(optimizer).get("param_groups")
        if groups is None and not is_a(optimizer, torch.optim.Optimizer):
            groups = getattr(optimizer, "param_groups", None)
        return groups if is_a(groups, list) else []

    def watch_parameters(self, labels: Labels) -> None:
        optimizer, groups = self.reference(), self._groups()
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
            adopt(C.tensors_in(self._besides_state()))
            self.label_state(labels, of_old=True)

    @property
    def is_named(self) -> bool:
        """Else it waits for modules to name its parameters: a first label is the one that stays."""
        return self._old_state_known

    def _besides_state(self) -> dict[str, Any]:
        """What it keeps to put into its state later: 8-bit optimizers share their code books."""
        held = C.attributes_of(self.reference())
        return {k: v for k, v in held.items() if k not in ("state", "param_groups", "defaults")}

    def label_state(self, labels: Labels, *, of_old: bool = False) -> None:
        state = _state_of(self.reference())
        tensors: list[torch.Tensor] = []
        numbers: list[int] = []
        for parameter, entry in C.items_of(state):
            name = labels.parameter_name(parameter)
            for role, tensor in named_tensors(entry):
                tensors.append(tensor)
                numbers.append(C.label_of(_OPTIMIZER_STATE, role, name, tensor))
        C.adopt_cpu_tensors(tensors, also_known=of_old)
        C.label_tensors(tensors, numbers)


def _state_of(optimizer: Any) -> dict[Any, Any]:
    state = C.attributes_of(optimizer).get("state")
    if state is None and not is_a(optimizer, torch.optim.Optimizer):
        state = getattr(optimizer, "state", None)
    return state if is_a(state, dict) else {}


def named_tensors(entry: Any, role: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a parameter's state, each with the key it is under."""
    if is_a(entry, torch.Tensor):
        for part in C.parts_of(entry):
            yield role, part
    elif is_a(entry, dict):
        for key, value in dict.items(entry):
            yield from named_tensors(value, role or (str(key) if type(key) in (str, int) else ""))
    elif is_a(entry, (list, tuple)):
        for value in (list if is_a(entry, list) else tuple).__iter__(entry):
            yield from named_tensors(value, role)


def tensors_of_caches(caches: list[Any]) -> list[torch.Tensor]:
    """The keys and values of earlier words, however a library keeps them."""
    return [tensor for cache in caches for tensor in C.tensors_in(contents(cache))]


def cache_positions(module: torch.nn.Module) -> tuple[int, ...]:
    """Which of its class's positional arguments are such."""
    names = enumerate(_argument_names(module))
    return tuple(i for i, name in names if _CACHE_ARGUMENT.search(name))


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
    if is_a(cache, (dict, list, tuple, torch.Tensor)):
        return cache
    attributes = C.attributes_of(cache)
    layers = attributes.get("layers")
    return [C.attributes_of(layer) for layer in layers] if type(layers) is list else attributes


def adopt(tensors: Iterable[torch.Tensor | None]) -> None:
    """Makes CPU memory from before the trace visible, and its end too."""
    C.adopt_cpu_tensors([tensor for tensor in tensors if tensor is not None])


def _clean(path: str, parallel: bool) -> str:
    levels = [level for level in path.split(".") if level not in schema.WRAPPER_LEVELS]
    if parallel and levels[:1] == ["module"]:
        levels = levels[1:]
    return ".".join(level for level in levels if level)


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    held = submodules_of(module)
    for level in (*schema.WRAPPER_LEVELS, "module"):
        inner = held.get(level)
        if inner is not None and (level != "module" or type(module).__name__ in _PARALLEL_WRAPPERS):
            return _unwrapped(inner)
    return module
