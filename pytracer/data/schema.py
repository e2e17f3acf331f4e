"""The vocabulary of a trace: tables, columns, dtypes, units and the numbers behind the words.

csrc/core/event.h has the same vocabulary for C++, and tests/test_native.py keeps the two equal.
Times in the tables are raw ticks; `Trace.time_ns` makes nanoseconds of them. Sizes are bytes.
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

U8: TypeAlias = NDArray[np.uint8]
U16: TypeAlias = NDArray[np.uint16]
U32: TypeAlias = NDArray[np.uint32]
U64: TypeAlias = NDArray[np.uint64]
I32: TypeAlias = NDArray[np.int32]
I64: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]

# An act of an allocator, or something learned about a live block. The position is the number.
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",  # the device's recording starts here
    "seed",  # a block that was alive at the snapshot
    "seed_segment",  # a segment that was held at the snapshot
    "oom",
    "label",  # bytes: a row of the label table
    "saved",  # bytes: the size of the saved tensor
)
ACTION = {name: number for number, name in enumerate(ACTIONS)}

SCOPE_KINDS = ("op", "node", "module", "backward", "optimizer", "user", "step")
SCOPE_KIND = {name: number for number, name in enumerate(SCOPE_KINDS)}
SCOPE_RECOMPUTE = 1  # scope flags: the forward runs again inside backward
SCOPE_GRAD = 2  # grad mode was on: autograd may save the results of the op or module
SCOPE_AUTOCAST = 4  # the module was entered under autocast
SCOPE_GRAPH = 8  # the op, outside of modules, got a tensor that needs a gradient

# The name of the scope of a line that allocates in code that torch.compile wrote.
GENERATED_LINE = "torch.compile::line"
# How the names of a compiled graph's Function and node begin, and of the call around them.
COMPILED = ("CompiledFunction", "Torch-Compiled Region")

DEVICE_TYPES = ("cpu", "cuda")

# Levels of module paths that are not in the user's code: modules that only wrap another.
WRAPPER_LEVELS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

PHASES = ("other", "data", "forward", "recompute", "backward", "optimizer")
PHASE = {name: number for number, name in enumerate(PHASES)}


class Category(NamedTuple):
    """A use of memory: the words, colours and rules that every view and export reads."""

    name: str
    color: str  # on light and dark paper
    terminal: int  # the colour's number after ESC [
    is_always_shown: bool  # even at 0 bytes
    meaning: str


# A category's number is its position here. Numbers are stored in files and never change; the order
# that people see is CATEGORY_ORDER. Red is for unknown bytes.
CATEGORY_TABLE = (
    Category("unknown", "#dd4433", 31, True, "bytes that no rule explains; it should be 0"),
    Category(
        "weights",
        "#4477aa",
        34,
        True,
        "parameters and buffers of modules, and an optimizer's master copies",
    ),
    Category(
        "gradients", "#aa4499", 35, True, "blocks that `.grad` holds at any time of their life"
    ),
    Category(
        "optimizer_state",
        "#44aaaa",
        36,
        True,
        "state that an optimizer keeps from step to step, such as Adam's two moments",
    ),
    Category(
        "activations",
        "#5a9e4b",
        32,
        True,
        "tensors that autograd saves for backward, or a module's result that stays alive",
    ),
    Category("temporaries", "#ddaa33", 33, True, "blocks that are made and freed inside one phase"),
    Category(
        "inputs",
        "#999933",
        37,
        False,
        "batches, targets, and the raw data they were made from on the device",
    ),
    Category("workspaces", "#997700", 37, False, "scratch memory of libraries: cuBLAS, cuDNN"),
    Category(
        "communication",
        "#cc6677",
        37,
        False,
        "buckets and buffers of DistributedDataParallel, FSDP, collectives",
    ),
    Category("graph_pools", "#882255", 37, False, "the private memory of CUDA graphs"),
    Category(
        "functional",
        "#8899aa",
        37,
        False,
        "tensors that the program itself keeps: a KV cache, a returned result, a data set",
    ),
)
CATEGORIES = tuple(category.name for category in CATEGORY_TABLE)
CATEGORY = {name: number for number, name in enumerate(CATEGORIES)}
CATEGORY_ORDER = (*CATEGORIES[1:], "unknown")
ALWAYS_SHOWN = tuple(n for n in CATEGORY_ORDER if CATEGORY_TABLE[CATEGORY[n]].is_always_shown)
CATEGORY_COLORS = {name: CATEGORY_TABLE[CATEGORY[name]].color for name in CATEGORY_ORDER}

# The categories of what a model and its optimizer own.
OWNED = [CATEGORY[name] for name in ("weights", "gradients", "optimizer_state")]

# Inferred roles. A role is a number: below len(ROLES) it is one of these; above, it is a label's
# role, a row of the trace's string table plus len(ROLES).
ROLES = (
    "",
    *PHASES,  # of temporaries: the phase that made them
    "autocast_copy",
    "target",
    "saved",
    "recomputed",
    "held",
    "cublas",
    "all_gather",
    "reduce_scatter",
    "collective",
    "bucket",
    "graph",
    "output",  # made by a forward, and kept by the program
    "carried",  # an output that is handed to a later call
    "replica",
    "fetched",
    "raw",
    "unsharded",
    "buffer",
    "batch",
    "copy_or_activation",  # without operators, a weight's 16-bit copy and an activation look alike
    "barrier",  # the byte that torch keeps of the last barrier
)
ROLE = {name: number for number, name in enumerate(ROLES)}

# The keys by which allocations can be grouped.
KEYS = tuple(
    "module op line phase free_phase category role name shape dtype step pool mesh_dim".split()  # noqa: SIM905
)


class Events(NamedTuple):
    """Events in order: a row's position is its number and its place in time."""

    ticks: U64
    address: U64
    bytes: U64
    action: U8
    scope: U32  # the innermost scope on the acting thread; 0 for none
    place: U16
    thread: U16


class Scopes(NamedTuple):
    """One row per op, node, module call, pass, ...; row i is scope i + 1."""

    ticks: U64
    parent: U32  # the enclosing scope on the same thread, always a smaller number; 0 for none
    forward: U32  # of a node: the op that made it; 0 when not known
    name: U32
    thread: U16
    kind: U8
    flags: U8


class ScopeEnds(NamedTuple):
    """The ends of scopes. Operators inside operators and scopes still open have no row."""

    ticks: U64
    scope: U32
    stack: U32  # the Python stack that called it; 0 for none


class Stacks(NamedTuple):
    """Python stacks as a trie: each row is a frame, its parent the caller. Row 0: no stack."""

    parent: U32
    file: U32
    function: U32
    line: U32


class Places(NamedTuple):
    """Device, stream and pool. Row 0 is the CPU."""

    stream: U64
    pool_high: U64
    pool_low: U64
    device_type: U8
    device_index: U8


class Labels(NamedTuple):
    """What a block holds, as learned later. Row 0: nothing."""

    category: U8
    role: U32
    name: U32
    shape: U32
    dtype: U32


class Threads(NamedTuple):
    """Threads by number, with the operating system's id and a name."""

    native_id: U64
    name: U32


class Clock(NamedTuple):
    """Readings of both clocks, taken together."""

    ticks: U64
    unix_ns: I64


# The tables by their prefix in the native interface, with the dtype of each column.
TABLES: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "clock": (Clock, ("u8", "i8")),
    "stacks": (Stacks, ("u4", "u4", "u4", "u4")),
    "places": (Places, ("u8", "u8", "u8", "u1", "u1")),
    "labels": (Labels, ("u1", "u4", "u4", "u4", "u4")),
    "threads": (Threads, ("u8", "u4")),
    "events": (Events, ("u8", "u8", "u8", "u1", "u4", "u2", "u2")),
    "scopes": (Scopes, ("u8", "u4", "u4", "u4", "u2", "u1", "u1")),
    "scope_ends": (ScopeEnds, ("u8", "u4", "u4")),
}


def device_name(kind: int, index: int) -> str:
    """A device's name, such as `cpu` or `cuda:0`."""
    name = DEVICE_TYPES[kind] if kind < len(DEVICE_TYPES) else f"device{kind}"
    return "cpu" if name == "cpu" else f"{name}:{index}"
