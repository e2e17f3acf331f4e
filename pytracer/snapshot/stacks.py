"""What the frames of a snapshot show: the activity of each stack, and signs of what its blocks are.

Everything is per row of the stack table: a row is a frame, and its parent the caller. Frames of C++
lie between those of Python or within, if they were recorded.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pytracer.data.schema import I64, U32
from pytracer.snapshot.rows import Rows

# The activity that an event's stack shows. Without a stack of its own it is UNCLEAR, and the event
# before it decides.
UNCLEAR, NOTHING, FORWARD, ENGINE, RECOMPUTE, OPTIMIZER = range(-1, 5)

# Signs, as bits. Those of a caller hold for what it calls.
MOVED = 1 << 0  # a module moves its weights: .to(), .cuda(), .half()
BUILT = 1 << 1  # a module of torch's is made, or a Parameter copied
LOADED = 1 << 2  # a library loads a model
INIT_GROUP = 1 << 3  # an optimizer makes its state
CLEARS = 1 << 4  # zero_grad
ACCUMULATES = 1 << 5  # autograd puts a gradient into .grad (C++ frames)
BLAS = 1 << 6  # the workspace of cuBLAS (C++ frames)
GATHERS = 1 << 7  # FSDP makes the whole weights of a layer
EXCHANGES = 1 << 8  # FSDP's buffers, a collective
CLIPS = 1 << 9  # gradients are scaled or clipped
REDUCES = 1 << 13  # FSDP reduces gradients to a shard
NO_GRAPH = 1 << 14  # in a function that torch.no_grad() or inference_mode() decorates
GENERATED = 1 << 15  # in code that torch.compile wrote
COPIES = 1 << 16  # autocast copies into half precision (C++ frames)
# Signs of the innermost frame of Python alone.
BUCKETS = 1 << 10  # DistributedDataParallel makes its buckets
CACHES = 1 << 11  # a cache of keys and values
CASTS = 1 << 12  # a matrix product or convolution, which autocast casts weights for
_OWN = BUCKETS | CACHES | CASTS
# What a function of torch's goes through where a default device is set, or a subclass of tensors.
_BETWEEN = ("torch/utils/_device.py", "torch/overrides.py")

_LOADERS = (
    "transformers/modeling_utils.py",
    "transformers/core_model_loading.py",
    "transformers/integrations/accelerate.py",
    "accelerate/utils/modeling.py",
    "diffusers/models/model_loading_utils.py",
)
_BLAS_CALLS = ("getCurrentCUDABlasHandle", "setWorkspaceForHandle", "BlasLtWorkspace")
_PRODUCTS = (
    "torch/nn/modules/linear.py",
    "torch/nn/modules/conv.py",
    "transformers/pytorch_utils.py",
)


_SIGNS_OF_FSDP = {
    "alloc_storage": GATHERS,
    "init_unsharded_param": GATHERS,
    "init_all_gather_outputs": GATHERS,
    "_init_sharded_param": BUILT,
    "foreach_all_gather": EXCHANGES,
    "foreach_reduce": EXCHANGES | REDUCES,
    "post_backward": REDUCES,
}
_NATIVE = ("??", ".cpp", ".cc", ".c", ".cu", ".cuh", ".h", ".hpp", ".o", ".S", ".so")


def is_python(file: str) -> bool:
    """Whether a frame of this file is Python's."""
    return bool(file) and not file.endswith(_NATIVE)


def signs_of_frame(file: str, name: str) -> int:
    """The signs of one frame."""
    if not is_python(file):
        if "AccumulateGrad::apply" in name:
            return ACCUMULATES
        if "autocast::cached_cast" in name:
            return COPIES
        return BLAS if any(call in name for call in _BLAS_CALLS) else 0
    word = name.rpartition(".")[2]
    if file.endswith(_PRODUCTS) and word in ("forward", "_conv_forward"):
        return CASTS
    if file.endswith("transformers/cache_utils.py"):
        return CACHES
    if "torchinductor_" in file:
        return GENERATED
    if file.endswith(_LOADERS) and word != "forward":
        return LOADED
    return _signs_of_torchs(file, word)


def _signs_of_torchs(file: str, name: str) -> int:
    if "torch/optim/" in file:
        return {"_init_group": INIT_GROUP, "zero_grad": CLEARS}.get(name, 0)
    if file.endswith("torch/utils/_contextlib.py") and name == "decorate_context":
        return NO_GRAPH
    if "torch/nn/modules/" in file:
        if file.endswith("module.py"):
            return {"_apply": MOVED, "zero_grad": CLEARS, "to_empty": MOVED}.get(name, 0)
        return BUILT if name in ("__init__", "reset_parameters") else 0
    if file.endswith("torch/nn/parameter.py") and name in ("__deepcopy__", "__new__"):
        return BUILT
    if file.endswith("torch/nn/parallel/distributed.py"):
        return BUCKETS
    if file.endswith("torch/distributed/distributed_c10d.py"):
        return EXCHANGES
    if "torch/distributed/fsdp/" in file:
        return _SIGNS_OF_FSDP.get(name, 0)
    if file.endswith(("torch/nn/utils/clip_grad.py", "torch/amp/grad_scaler.py")):
        return CLIPS
    return 0


def activity_of_frame(file: str, name: str, *, outermost: bool) -> int:
    """What the program does while this frame runs, UNCLEAR if the frame does not show it."""
    if file.endswith("torch/nn/modules/module.py") and name.rpartition(".")[2] in (
        "_call_impl",
        "_wrapped_call_impl",
    ):
        return FORWARD
    if file.endswith("torch/utils/checkpoint.py") and name.endswith("recompute_fn"):
        return FORWARD
    if name.rpartition(".")[2] == "forward" and not is_torchs(file) and is_python(file):
        return FORWARD  # a program may call it instead of the module
    if is_torchs_step(file, name):
        return OPTIMIZER
    # Around the step of each optimizer, also of one that the program wrote itself.
    if file.endswith("torch/optim/optimizer.py") and name.endswith("wrapper"):
        return OPTIMIZER
    if "autograd::Engine::" in name:
        return ENGINE
    if file.endswith("torch/autograd/graph.py") and name == "_engine_run_backward":
        return ENGINE
    if file.endswith("torch/autograd/__init__.py") and name in ("backward", "grad"):
        return ENGINE
    # The engine's own threads begin in what they call: a backward in Python, or a hook.
    return ENGINE if outermost and is_python(file) and name not in _BEGINS else UNCLEAR


_BEGINS = ("<module>", "_bootstrap", "_run_module_as_main")  # of a program, and of its threads


def is_torchs_step(file: str, name: str) -> bool:
    """Whether this frame is the step of one of torch's optimizers."""
    is_step = "torch/optim/" in file and name.rpartition(".")[2] == "step"
    return is_step and "lr_scheduler" not in file


def is_torchs(file: str) -> bool:
    """Whether this file belongs to torch."""
    return file.startswith("torch/") or "/torch/" in file


@dataclass(frozen=True)
class Shown:
    """What each row of the stack table shows."""

    activity: I64
    signs: U32
    module: U32  # a row of `modules`, 0: not inside a module
    modules: list[str]
    call: U32  # the row of the innermost call of a module, 0: none
    python: U32  # the row of the innermost frame of Python, 0: none

    @cached_property
    def has_native(self) -> bool:
        """Whether frames of C++ were recorded too."""
        return bool((self.python[1:] != np.arange(1, len(self.python))).any())


def shown(stacks: Rows, strings: list[str]) -> Shown:
    """Looks at every stack once."""
    count = len(stacks)
    activity = np.full(count, NOTHING, np.int64)
    signs, python = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
    module, call = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
    in_engine, calls, named = [False] * count, [False] * count, [False] * count
    in_step = [False] * count  # of torch's own, and not in the closure that it calls
    names = {"": 0}
    same: dict[tuple[int, int, int, int], int] = {}
    by_frame: dict[tuple[int, int, bool], tuple[int, int, bool, bool, bool]] = {}
    parents, files, functions = (
        column.tolist() for column in (stacks.parent, stacks.file, stacks.function)
    )
    lines = stacks.line.tolist()
    # Stacks that were cut, or renamed, do not tell whose thread they are of.
    begins = {strings[functions[row]] for row in range(1, count) if parents[row] == 0}
    is_whole = not begins.isdisjoint(_BEGINS)
    for row in range(1, count):
        parent, file, function = parents[row], files[row], functions[row]
        key = (file, function, parent == 0 and is_whole)
        if key not in by_frame:
            texts = strings[file], strings[function]
            by_frame[key] = (
                activity_of_frame(*texts, outermost=key[2]),
                signs_of_frame(*texts),
                is_python(strings[file]),
                is_torchs_step(*texts),
                is_torchs(strings[file]),
            )
        own, own_signs, pythons, steps, torchs = by_frame[key]
        in_engine[row] = in_engine[parent] or own == ENGINE
        activity[row] = activity[parent] if own == UNCLEAR else own
        in_step[row] = steps or in_step[parent]
        if activity[row] == OPTIMIZER and in_engine[row]:
            activity[row] = ENGINE  # a hook that steps, in the middle of a backward
        if in_step[parent] and pythons and not torchs:
            in_step[row] = False
            activity[row] = NOTHING if own == UNCLEAR else own
        if activity[row] == FORWARD and in_engine[row]:
            activity[row] = RECOMPUTE
        forward = strings[function].rpartition(".")[2] == "forward"
        calls[row] = own == FORWARD and not forward
        above = int(python[parent])
        # C++'s frames may differ where Python's are the same: the first such row stands for all.
        frame = (above, file, function, lines[row])
        python[row] = same.setdefault(frame, row) if pythons else above
        inherited = int(signs[parent])
        through = not pythons or strings[file].endswith(_BETWEEN)
        signs[row] = (inherited if through else inherited & ~_OWN) | own_signs
        module[row] = module[parent]
        call[row] = python[row] if calls[row] else call[parent]
        # The frame in a call is the module's own, or a decorator's until its forward comes.
        named[row] = named[parent] and not calls[row]
        if pythons and not calls[row] and call[row] and (calls[above] or forward > named[row]):
            named[row] = forward
            caller = int(call[row])
            while calls[caller]:
                caller = int(python[parents[caller]])
            place = f"{_base(strings[files[caller]])}:{lines[caller]}" if caller else ""
            text = _module_name(strings[file], strings[function], place)
            module[row] = names.setdefault(text, len(names))
    return Shown(activity, signs, module, list(names), call, python)


def _base(file: str) -> str:
    return file.replace("\\", "/").rpartition("/")[2]


def _module_name(file: str, function: str, place: str) -> str:
    """The class, if the function's name has it, else the file; and the line that calls it."""
    name = function.rpartition(".")[0] or _base(file).removesuffix(".py")
    return f"{name} ({place})" if place else name
