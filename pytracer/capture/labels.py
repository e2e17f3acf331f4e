"""Labels live blocks as weights, gradients, optimizer state or inputs.

Blocks are labelled after they are allocated, at moments when the truth is easy to read: the trace
begins, a module is entered, a backward pass ends, an optimizer steps, the trace ends. All
references to the program's objects are weak, so nothing lives longer for being watched.
"""

import gc
import inspect
import itertools
import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from pytracer.basics import private_torch
from pytracer.capture import deepspeed, graph, sharding
from pytracer.capture.looking import (
    buffers_of,
    is_a,
    named_modules_of,
    parameters_of,
    submodules_of,
)
from pytracer.capture.spare import OtherReaders, spare_tensors
from pytracer.data import schema
from pytracer.data._native import C

_PARALLEL_WRAPPERS = ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine")

_DEEPEST_STATE = 6  # as in moments.cpp
_MOST_CALLERS = 12  # of an optimizer's step
_MOST_VARIABLES = 1000  # of one caller

_UNKNOWN = schema.CATEGORY["unknown"]
_WEIGHTS = schema.CATEGORY["weights"]
_GRADIENTS = schema.CATEGORY["gradients"]
_OPTIMIZER_STATE = schema.CATEGORY["optimizer_state"]
_16_BITS = (torch.bfloat16, torch.float16)
_WORKSPACES = schema.CATEGORY["workspaces"]
_FUNCTIONAL = schema.CATEGORY["functional"]

# Names that models give to the keys and values of earlier words: past_key_values, kv_cache, ...
_CACHE_ARGUMENT = re.compile(r"past|cache")


class Labels:
    """The modules and optimizers of one recording, and the names of their tensors."""

    def __init__(self) -> None:
        """Starts empty. Modules and optimizers are added as the program uses them."""
        self.moments = C.Moments()  # decides when to look at them
        self._watched = self.moments.watched
        # By identity. The weak reference shows whether it is still the same module.
        self._modules: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}
        self._most_modules = 1024  # beyond this, modules that are gone are forgotten
        self._roots: list[_Root] = []
        # By name, whether it has parameters. In the first, paths are as its user writes them. In all
        # others the class precedes; readers complete the first's where they must (model_names.py).
        self.root_names: dict[str, bool] = {}
        self._engines = deepspeed.Engines()
        self._bucket_sizes: set[int] = set()  # of DistributedDataParallel
        self.hooked_buckets: set[int] = set()  # sizes of those that a communication hook gets
        self._parameter_names: dict[int, str] = {}
        # Addresses of parameters that modules had, by their ids. torch swaps no tensor that has a weak
        # reference.
        self._of_modules: dict[int, int] = {}
        # Names of parameters that no known module has, with the parameters' ids.
        self._group_names: dict[str, int] = {}
        # Optimizers may step before a module is called. Labels made by then keep the name of an
        # optimizer's group. This maps such a name to the name in the module.
        self.renamed: dict[str, str] = {}
        self._optimizers: list[_Optimizer] = []
        self._optimizers_met = 0
        self._readers = OtherReaders()
        self._has_16_bits = False  # a module has 16-bit parameters: optimizers may have masters

    # ---------------------------------------------------------------- modules

    @property
    def model_count(self) -> int:
        """How many names of models with parameters there are."""
        return sum(self.root_names.values())

    def name_of_module(self, module: torch.nn.Module) -> str:
        """Returns the module's path in the user's model. Called once per module."""
        if not self._known_name(module) and self._has(module):
            self.look_again()  # it was added since the last look
        if not self._known_name(module):
            self.add_root(module)
        return self._known_name(module)

    def _known_name(self, module: torch.nn.Module) -> str:
        reference, name = self._modules.get(id(module), (None, ""))
        return name if reference is not None and reference() is module else ""

    def named_modules(self) -> dict[str, str]:
        """Returns the class of each module that is there, by its path."""
        alive = ((name, reference()) for reference, name in self._modules.values())
        return {name: type(module).__name__ for name, module in alive if module is not None}

    def _has(self, module: torch.nn.Module) -> bool:
        """Whether a known model has this module. nn.Softmax()(x) makes one that no model has."""
        return C.has_module(self._living_roots(), module)

    def _living_roots(self) -> list[torch.nn.Module]:
        self._roots = [root for root in self._roots if root.module() is not None]
        return [module for root in self._roots if (module := root.module()) is not None]

    def add_root(self, module: torch.nn.Module) -> None:
        """Learns the names of a model's modules and tensors."""
        has_parameters = next(parameters_of([module]), None) is not None
        name = self._name_of_root(unwrapped(module), has_parameters=has_parameters)
        prefix = "" if name == next(iter(self.root_names), name) else f"{name}."
        self.root_names[name] = self.root_names.get(name, False) or has_parameters
        root = _Root(weakref.ref(module), prefix, name)
        self._roots.append(root)
        self._walk(root)
        if has_parameters:
            # Gradients of earlier steps: they may be freed before the next backward pass.
            self._watched.label_gradients()
        if is_a(module, torch.nn.parallel.DistributedDataParallel):
            self.moments.add_reducer(module)
        held = self._engines.add(module)
        self.moments.has_engines = self._engines.were_met
        adopt(tensor for _, _, tensor in held)
        self._label_held(held)

    def _name_of_root(self, model: torch.nn.Module, *, has_parameters: bool) -> str:
        """Returns the class, with a number if the class has another living model: "Net#2".

        A model that is made anew in each step has the same name each time. One that ran before
        without its wrapper keeps its name.
        """
        kind = type(model).__name__
        self._living_roots()
        taken = {root.name for root in self._roots}
        if not has_parameters or kind not in taken:
            return kind
        same = (root.name for root in self._roots if root.module() is model)
        free = (f"{kind}#{number}" for number in itertools.count(2))
        return next(same, None) or next(name for name in free if name not in taken)

    def look_again(self) -> None:
        """Learns the names again: modules come and go, and parameters are replaced."""
        for root in self._roots:
            self._walk(root)

    def _walk(self, root: "_Root") -> None:
        if (whole := root.module()) is None:
            return
        prefix = root.prefix
        for path, module in paths_in(whole):
            name = prefix + path if path else root.name
            self._name_module(module, name)
            where = prefix + path + "." if path else prefix
            attributes = C.attributes_of(module)
            for key, parameter in C.items_of(attributes.get("_parameters")):
                if parameter is not None and (C.is_parameter(parameter) or _stands_in(parameter)):
                    self._has_16_bits |= parameter.dtype in _16_BITS
                    path_to = ("_parameters", key)
                    self._of_modules[id(parameter)] = C.memory_of(parameter)[0]
                    self._watch(parameter, module, path_to, "parameter", where + key)
            for key, buffer in C.items_of(attributes.get("_buffers")):
                if buffer is not None:
                    self._watch(buffer, module, ("_buffers", key), "buffer", where + key)

    def _name_module(self, module: torch.nn.Module, name: str) -> None:
        if not self._known_name(module):
            if len(self._modules) >= self._most_modules:
                alive = {
                    key: entry for key, entry in self._modules.items() if entry[0]() is not None
                }
                self._modules, self._most_modules = alive, max(1024, 2 * len(alive))
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
            old_name = self.parameter_name(tensor)
            if not old_name:  # it has taken another tensor's place
                self._parameter_names[id(tensor)] = name
                adopt([tensor])
            elif old_name in self._group_names:
                self._watched.add(tensor, holder, path, weight, gradient, instead=True)
                self._parameter_names[id(tensor)] = self.renamed[old_name] = name

    # ---------------------------------------------------------------- moments

    def session_begins(self) -> None:
        """Labels what is known already: from the trace around this one, or given explicitly."""
        adopt(self._known_tensors())
        self._label(optimizer for optimizer in self._optimizers if optimizer.is_named)

    def _known_tensors(self) -> Iterator[torch.Tensor | None]:
        may_read = C.status()["may_read_gradients"]
        for root in self._living_roots():
            yield from buffers_of([root])
            for parameter in parameters_of([root]):
                yield parameter
                yield C.gradient_of(parameter) if may_read else None
        for optimizer in self._optimizers:
            yield from C.tensors_in(_state_of(optimizer.reference()))
        yield from (tensor for _, _, tensor in self._engines.tensors())

    def label_engines(self) -> None:
        """Labels the tensors of DeepSpeed's engines where they are now."""
        self._label_held(self._engines.tensors())

    def note_attributes(self, *roots: torch.nn.Module) -> None:
        """Labels plain tensors in attributes of these modules and their submodules.

        A tensor that a forward made and that is labelled twice has outlived another forward. It is
        a table and not an activation.
        """
        for module, key, value in C.tensors_in_attributes([*roots]):
            if not _CACHE_ARGUMENT.search(key):
                name = f"{self._known_name(module)}.{key}"
                C.label_tensors([value], [C.label_of(_UNKNOWN, "attribute", name, value)])

    def note_spare(self, frame: FrameType | None) -> None:
        """Labels tensors that the program could let go of, with the variable that keeps them."""
        for name, tensors in spare_tensors(frame, self._readers):
            labels = [C.label_of(_UNKNOWN, "spare", name, tensor) for tensor in tensors]
            C.label_tensors(tensors, labels)

    def meet_optimizer(self, optimizer: Any) -> None:
        """Watches an optimizer that is about to step. Its parameters may belong to no module."""
        entry = self._optimizer(optimizer)
        entry.has_stepped = True
        entry.watch_parameters(self)
        entry.label_state_of_old(self)
        for around in _optimizers_around(optimizer, sys._getframe(1)):
            self._optimizer(around).label_state_of_old(self)

    def label_state(self, optimizer: Any) -> None:
        """Labels the state of an optimizer, some of which is new."""
        self._optimizer(optimizer).label_state(self)

    def add_optimizer(self, optimizer: Any) -> None:
        """Adds an optimizer given explicitly. Without a model, its parameters wait for names."""
        entry = self._optimizer(optimizer)
        if self._roots:
            entry.watch_parameters(self)
            entry.label_state_of_old(self)

    def label_everything(self) -> None:
        """Labels everything a last time as a trace ends, including what modules got meanwhile."""
        self.look_again()
        self.note_attributes(*self._living_roots())
        self._label(self._optimizers)

    def frozen_modules(self) -> list[str]:
        """Returns the names of outermost modules without trained parameters: they keep no graph."""
        names = []
        for module in self._living_roots():
            trained = [parameter.requires_grad for parameter in parameters_of([module])]
            if trained and not any(trained):
                names.append(self._known_name(module))
        return names

    def unstepped(self) -> list[str]:
        """Returns the names of parameters with a gradient that no optimizer has stepped."""
        steps = (one for one in self._optimizers if one.has_stepped)
        stepped = {id(parameter) for one in steps for parameter in one.parameters()}
        if not stepped or not C.status()["may_read_gradients"]:
            return []
        left = (one for one in parameters_of(self._living_roots()) if id(one) not in stepped)
        with_gradient = [one for one in left if C.gradient_of(one) is not None]
        return [*dict.fromkeys(map(self.parameter_name, with_gradient))]

    def left_behind(self) -> list[int]:
        """Returns addresses of weights, and of their state, that an optimizer has and no model any more.

        A model had them, and they have no gradient: no step uses them.
        """
        if not C.status()["may_read_gradients"]:
            return []
        owned = {id(parameter) for parameter in parameters_of(self._living_roots())}
        tensors: list[torch.Tensor] = []
        for one in self._optimizers:
            for parameter, entry in one.entries():
                had = self._of_modules.get(id(parameter)) == C.memory_of(parameter)[0]
                if had and id(parameter) not in owned and C.gradient_of(parameter) is None:
                    tensors += [parameter, *(tensor for _, tensor in named_tensors(entry))]
        return sorted({address for tensor in tensors if (address := C.memory_of(tensor)[0])})

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
        """Labels everything else that the program has on a GPU as the trace begins.

        Examples are an average of the weights in a dictionary, a data set, and the gradients of
        models that were not met yet. It runs once, because it looks at every object. Later labels
        that know more replace these.
        """
        plain = (torch.Tensor, torch.nn.Parameter)  # subclasses may be made of these
        tensors = [t for t in C.exactly_of(gc.get_objects(), plain) if C.device_of(t)[0] == "cuda"]
        C.label_as(_FUNCTIONAL, "from_before", tensors)
        if C.status()["may_read_gradients"]:
            gradients = [C.gradient_of(tensor) for tensor in tensors]
            C.label_as(_GRADIENTS, "parameter", [g for g in gradients if g is not None])

    def learn_buckets(self) -> list[int]:
        """Returns the bytes of DistributedDataParallel's buckets so far. Only their sizes are public.

        It asks while the model is there: the program may drop it before the recording ends.
        """
        for module in self._living_roots():
            if not is_a(module, torch.nn.parallel.DistributedDataParallel):
                continue
            logged = private_torch.read_buckets(module)
            for key in ("bucket_sizes", "rebuilt_bucket_sizes"):
                sizes = re.findall(r"\d+", str(logged.get(key, "")))
                self._bucket_sizes.update(map(int, sizes))
                if logged.get("comm_hook"):
                    self.hooked_buckets.update(map(int, sizes))
        return sorted(self._bucket_sizes)

    def sharding(self) -> dict[str, Any]:
        """Returns how the models are spread over the ranks of the job."""
        return sharding.of(self._living_roots(), self.parameter_name)

    def label_workspaces(self) -> None:
        """Labels the workspaces that torch keeps for cuBLAS, made before the trace or in it."""
        C.label_workspaces(C.intern_label(_WORKSPACES, "cublas"))

    # ---------------------------------------------------------------- optimizers

    def _optimizer(self, optimizer: Any) -> "_Optimizer":
        for entry in self._optimizers:
            if entry.reference() is optimizer:
                return entry
        # As with models, only the names of a second optimizer have a prefix.
        prefix = f"optimizers[{self._optimizers_met}]." if self._optimizers_met else ""
        self._optimizers_met += 1
        entry = _Optimizer(optimizer, prefix)
        self._optimizers = [o for o in self._optimizers if o.reference() is not None]
        self._optimizers.append(entry)
        self.moments.add_optimizer(optimizer)
        return entry

    def watch_parameter(self, parameter: torch.Tensor, optimizer: Any, group: int, at: int) -> None:
        """Watches a parameter of an optimizer under its place there, unless a module names it."""
        path = ("param_groups", group, "params", at)
        name = f"{self._optimizer(optimizer).prefix}param_groups[{group}].params[{at}]"
        while self._group_names.setdefault(name, id(parameter)) != id(parameter):
            name += "'"  # another parameter stood there before
        is_master = self._has_16_bits and parameter.dtype == torch.float32
        self._watch(parameter, optimizer, path, "master" if is_master else "parameter", name)

    def parameter_name(self, parameter: Any) -> str:
        """Returns the parameter's name, "" if it has none."""
        return self._parameter_names.get(id(parameter), "")


def _stands_in(tensor: torch.Tensor) -> bool:
    """Whether functional_call has put a weight that no module has in a parameter's place.

    A weight is a leaf; what was computed is none. A transform of torch.func has wrapped it.
    """
    if type(tensor) is not torch.Tensor or not (tensor.is_leaf and tensor.requires_grad):
        return False
    C.label_as(_WEIGHTS, "parameter", [graph.unwrapped(tensor)])
    return True


class _Root(NamedTuple):
    """A model that no other contains."""

    module: weakref.ref[torch.nn.Module]
    prefix: str  # of the names inside: "Critic.", "Net#2."
    name: str  # "Critic", "Net#2"


class _Optimizer:
    """One optimizer, whose state is labelled when it changes."""

    def __init__(self, optimizer: Any, prefix: str) -> None:
        self.prefix = prefix  # of the names of parameters that no known module has
        self.reference = weakref.ref(optimizer)
        self._group_sizes: list[int] = []
        self._old_state_known = False
        # Only torch's own optimizers tell of their steps.
        self.has_stepped = not is_a(optimizer, torch.optim.Optimizer)

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._groups() for parameter in group["params"]]

    def entries(self) -> list[tuple[torch.Tensor, Any]]:
        """Returns the parameters with their states."""
        state = {
            id(parameter): entry for parameter, entry in C.items_of(_state_of(self.reference()))
        }
        return [(parameter, state.get(id(parameter))) for parameter in self.parameters()]

    def _groups(self) -> list[dict[str, Any]]:
        """Returns the parameter groups. A wrapper of an optimizer is asked for its attribute."""
        optimizer = self.reference()
        groups = C.attribute_of(optimizer, "param_groups")
        if groups is None and not is_a(optimizer, torch.optim.Optimizer):
            groups = getattr(optimizer, "param_groups", None)
        return groups if is_a(groups, list) else []

    def watch_parameters(self, labels: Labels) -> None:
        optimizer, groups = self.reference(), self._groups()
        sizes = [len(group["params"]) for group in groups]
        if sizes == self._group_sizes:
            return  # groups grow, but nobody exchanges their members between steps
        self._group_sizes = sizes
        if any(not labels.parameter_name(parameter) for parameter in self.parameters()):
            labels.look_again()
        for g, group in enumerate(groups):
            for p, parameter in enumerate(group["params"]):
                labels.watch_parameter(parameter, optimizer, g, p)

    def label_state_of_old(self, labels: Labels) -> None:
        """Labels state from before the trace, once: the step that begins may free it."""
        if not self._old_state_known:
            self._old_state_known = True
            adopt(C.tensors_in(self._besides_state()))
            self.label_state(labels, of_old=True)

    @property
    def is_named(self) -> bool:
        """Whether its parameters have their names. Until then no state is labelled.

        It waits for modules to name the parameters, because the first label of a block stays.
        """
        return self._old_state_known

    def _besides_state(self) -> list[Any]:
        """Returns its other attributes. 8-bit optimizers keep code books there for their state.

        Python's collector knows them, also while they are no dictionary: see `attribute_of`.
        """
        optimizer = self.reference()
        named = [C.attribute_of(optimizer, name) for name in ("state", "param_groups", "defaults")]
        held = gc.get_referents(optimizer)
        wholes = [one for one in held if is_a(one, dict) and "param_groups" in one]
        held += [value for one in wholes for value in dict.values(one)]
        others = {id(one) for one in (*named, *wholes)}
        return [value for value in held if id(value) not in others]

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


def _optimizers_around(optimizer: Any, frame: FrameType | None) -> Iterator[Any]:
    """Yields other objects with groups and a state, from the variables around this step.

    SAM and Lookahead are such: their state changes without a step of their own, and they may be no
    Optimizer.
    """
    for _ in range(_MOST_CALLERS):
        if frame is None:
            return
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
        held = C.locals_of(frame) if is_function else frame.f_globals
        for value in [*dict.values(held)][:_MOST_VARIABLES]:
            if value is not optimizer and not is_a(value, (type, ModuleType, torch.nn.Module)):
                groups = C.attribute_of(value, "param_groups")
                if is_a(groups, list) and is_a(C.attribute_of(value, "state"), dict):
                    yield value
        frame = frame.f_back


def _state_of(optimizer: Any) -> dict[Any, Any]:
    state = C.attribute_of(optimizer, "state")
    if state is None and not is_a(optimizer, torch.optim.Optimizer):
        state = getattr(optimizer, "state", None)
    return state if is_a(state, dict) else {}


def named_tensors(
    entry: Any, role: str = "", depth: int = _DEEPEST_STATE
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a parameter's state, each with its key or attribute there."""
    if depth == 0:
        return
    if is_a(entry, torch.Tensor):
        for part in C.parts_of(entry):
            yield role, part
    elif is_a(entry, dict):
        for key, value in dict.items(entry):
            key = str(key) if type(key) in (str, int) else ""
            yield from named_tensors(value, role or key, depth - 1)
    elif is_a(entry, (list, tuple)):
        for value in (list if is_a(entry, list) else tuple).__iter__(entry):
            yield from named_tensors(value, role, depth - 1)
    else:
        for key, value in C.fields_of(entry):
            yield from named_tensors(value, role or str(key), depth - 1)


def tensors_of_caches(caches: list[Any]) -> list[torch.Tensor]:
    """The keys and values of earlier words, however a library keeps them."""
    return [tensor for cache in caches for tensor in C.tensors_in(contents(cache))]


def cache_positions(module: torch.nn.Module) -> tuple[int, ...]:
    """Returns which positional arguments of the module's forward are caches."""
    names = enumerate(_argument_names(module))
    return tuple(i for i, name in names if _CACHE_ARGUMENT.search(name))


def _argument_names(module: torch.nn.Module) -> tuple[str, ...]:
    """Returns the argument names of the class's forward, read without running any descriptor."""
    methods = (vars(base)["forward"] for base in type(module).__mro__ if "forward" in vars(base))
    forward = next(methods, None)
    if not isinstance(forward, FunctionType):
        return ()
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code.co_varnames[1 : code.co_argcount] if isinstance(code, CodeType) else ()


def contents(cache: Any) -> Any:
    """Returns the containers in a cache that is an object, such as transformers' DynamicCache."""
    if is_a(cache, (dict, list, tuple, torch.Tensor)):
        return cache
    attributes = C.attributes_of(cache)
    layers = attributes.get("layers")
    if type(layers) is list:
        return [C.attributes_of(layer) for layer in layers]
    # One for the words and one for what they look at, as T5 and Whisper have.
    inner = [contents(one) for one in attributes.values() if "layers" in C.attributes_of(one)]
    return [attributes, *inner]


def adopt(tensors: Iterable[torch.Tensor | None]) -> None:
    """Makes CPU memory from before the trace visible, and also its end."""
    C.adopt_cpu_tensors([tensor for tensor in tensors if tensor is not None])


def paths_in(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields each module of a model with its path, without the levels that wrappers add."""
    parallel = type(root).__name__ in _PARALLEL_WRAPPERS
    for raw_path, module in named_modules_of(root):
        yield _clean(raw_path, parallel), module


def _clean(path: str, parallel: bool) -> str:
    levels = [level for level in path.split(".") if level not in schema.WRAPPER_LEVELS]
    if parallel and levels[:1] == ["module"]:
        levels = levels[1:]
    return ".".join(level for level in levels if level)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The user's model inside of wrappers."""
    held = submodules_of(module)
    for level in (*schema.WRAPPER_LEVELS, "module"):
        inner = held.get(level)
        if inner is not None and (level != "module" or type(module).__name__ in _PARALLEL_WRAPPERS):
            return unwrapped(inner)
    return module
