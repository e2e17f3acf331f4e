"""Runs a program and writes down all that can be observed of it, comparable bit for bit."""

import contextlib
import gc
import inspect
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pytracer import trace
from pytracer.data._native import C
from pytracer.data.schema import ACTION
from tests.transparency.processes import Running

# How a program is run: not traced at all, or in one of the modes, each with its options.
UNTRACED, AUTO, HOOKS_MODE = "untraced", "auto", "hooks"
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "category": {"detail": "category"},
    AUTO: {"stacks": True},
    HOOKS_MODE: {"stacks": True, "saved_tensors": "hooks"},
}


class Block:
    """`with block():` where the program is traced, if it is traced at all."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.traces: list[trace] = []

    def __call__(self, *targets: Any, **options: Any) -> contextlib.AbstractContextManager[Any]:
        if self.mode == UNTRACED:
            return contextlib.nullcontext()
        self.traces.append(trace(*targets, table=False, **MODES[self.mode] | options))
        return self.traces[-1]


@dataclass
class Program:
    """One row of the table."""

    run: Callable[..., Any]
    devices: tuple[str, ...] = ("cpu", "cuda")
    own_block: bool = False  # takes the block and decides what is traced; else all of it is
    fresh: bool = False  # in processes of its own
    imports: str = "torch"  # what its parent has imported; an optimizer imports torch._dynamo
    hooks: str = ""  # why saved_tensors="hooks" cannot hold, or nothing
    empty: bool = False  # nothing needs to be allocated inside
    needs: str = ""  # a package that need not be there
    timed: bool = False  # how much is allocated, and how much at once, depends on the moment

    @property
    def name(self) -> str:
        return self.run.__name__


@dataclass
class Observation:
    """What a program did, and what the traces of it say."""

    seen: dict[str, Any]
    left_behind: dict[str, Any]  # what is not as it was before
    traces: list[dict[str, Any]]


def observe(program: Program, device: str, mode: str) -> Observation:
    """Runs the program here and looks at everything it did and left."""
    block = Block(mode)
    before, threads = registries(), native_threads()
    gc.freeze()  # what there is already is not looked at below
    try:
        seen = _run(program, device, block)
        _wait_for_threads(before["Python threads"], threads)
        after = registries()
        left = _alive(torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
    finally:
        gc.unfreeze()
    for name in before:
        if before[name] != after[name]:
            change = f"{before[name]!r} became {after[name]!r}"
            left[name] = re.sub(r" at 0x[0-9a-f]+", "", change)
    compiler = "torch._inductor" in sys.modules  # whose threads come and go as it likes
    if native_threads() > threads and not compiler:  # fewer: somebody else's have ended
        left["native threads"] = native_threads() - threads
    traces = [_facts(t) for t in block.traces]
    return Observation(seen, left, traces)


def assert_unchanged(program: Program, device: str, mode: str, folder: Path) -> None:
    """The program does, says and leaves the same as untraced, and its traces are whole."""
    untraced, traced = untraced_and_traced(program, device, mode, folder)
    assert "result" in untraced.seen, untraced.seen["raised"]
    different = differences(untraced.seen, traced.seen)
    assert not different, "\n".join(different)
    assert traced.left_behind == untraced.left_behind
    for facts in traced.traces:
        assert facts["events"] > 0 or program.empty
        assert facts["losses"] == {}
        assert facts["callback_errors"] == 0


def untraced_and_traced(
    program: Program, device: str, mode: str, folder: Path
) -> tuple[Observation, Observation]:
    """The program without a trace (once for all modes) and with one."""
    key = program.run, device
    untraced = _UNTRACED.get(key)
    if program.fresh:

        def running(mode: str) -> Running:
            return Running(folder, observe, program, device, mode, imports=program.imports)

        with contextlib.ExitStack() as stack:  # side by side
            other = stack.enter_context(running(mode))
            if untraced is None:
                untraced = _UNTRACED[key] = stack.enter_context(running(UNTRACED)).finish()
            return untraced, other.finish()
    if untraced is None:
        untraced = observe(program, device, UNTRACED)
        if device == "cuda" or untraced.left_behind or _says_something(untraced):
            untraced = observe(program, device, UNTRACED)  # the first time fills caches, and warns
        _UNTRACED[key] = untraced
    return untraced, observe(program, device, mode)


def _says_something(observation: Observation) -> bool:
    return bool(observation.seen["warnings"] or observation.seen["printed"])


_UNTRACED: dict[tuple[Callable[..., Any], str], Observation] = {}


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two frozen values differ, one line each."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [*a, *(key for key in b if key not in a)]
        pairs = [(f"{where}.{key}", a.get(key), b.get(key)) for key in keys]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(f"{where}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        return [] if a == b and type(a) is type(b) else [f"{where}:\n  {a!r}\n  {b!r}"]
    return [line for inner, x, y in pairs for line in differences(x, y, inner)]


# -------------------------------------------------------------------------- the run


def _run(program: Program, device: str, block: Block) -> dict[str, Any]:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global generator is what programs use
    torch.manual_seed(0)
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
        dynamo.utils.counters.clear()
    gc.collect()  # what ran before
    if device == "cuda":
        torch.cuda.init()
        torch.cuda.synchronize()
        # Workspaces stay with a thread's handles: the run before would leave some to this one.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
    # What ran before may hold some still.
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    reserved = torch.cuda.memory_reserved() if device == "cuda" else 0
    seen: dict[str, Any] = {}
    printed: list[str] = []
    with warnings.catch_warnings(record=True) as warned, _outputs(printed):
        warnings.simplefilter("always")
        try:
            if program.own_block:
                result = program.run(device, block)
            else:
                with block():
                    result = program.run(device)
            seen["result"] = freeze(result)
        except BaseException as error:
            seen["raised"] = (type(error).__name__, str(error))
    seen["warnings"] = sorted(_warning(w) for w in warned)
    seen["printed"] = printed
    seen["random state"] = freeze(torch.get_rng_state())
    seen["random state of Python and numpy"] = repr((random.getstate(), np.random.get_state()))  # noqa: NPY002
    seen["compiled"] = _compilations()
    if device == "cuda":
        torch.cuda.synchronize()
        gc.collect()  # this program's, whenever it would have come
        if program.timed:
            # How many threads computed at once, each with a workspace, depends on the moment.
            torch._C._cuda_clearCublasWorkspaces()
        seen["allocated"] = torch.cuda.memory_allocated() - held
        if not program.timed:
            seen["peak"] = torch.cuda.max_memory_allocated() - held
            seen["peak reserved"] = torch.cuda.max_memory_reserved() - reserved
            seen["allocations"] = torch.cuda.memory_stats()["allocation.all.allocated"]
    return seen


# Whatever pytest puts into `sys`. Never closed: a handler of `logging` may keep it.
_STDOUT = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115


@contextlib.contextmanager
def _outputs(lines: list[str]) -> Iterator[None]:
    """What Python and C++ write to stdout and stderr, without times and process ids."""
    with tempfile.TemporaryFile("w+") as file:
        kept = [os.dup(descriptor) for descriptor in (1, 2)]
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        try:
            with contextlib.redirect_stdout(_STDOUT), contextlib.redirect_stderr(_STDOUT):
                yield
        finally:
            for descriptor, before in zip((1, 2), kept, strict=True):
                os.dup2(before, descriptor)
                os.close(before)
            file.seek(0)
            lines += [re.sub(r"[0-9]{2}[0-9:.-]*", "#", line) for line in file]


def _warning(warned: warnings.WarningMessage) -> str:
    text = str(warned.message).partition("\n")[0]  # below it may be the stack that led here
    return f"{warned.category.__name__}: {re.sub(r'pid=[0-9]+', 'pid', text)}"


def _compilations() -> dict[str, dict[str, int]]:
    """Graph breaks, recompiles, graphs: Dynamo's own counts."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return {}
    wanted = ("frames", "stats", "graph_break", "recompiles", "unimplemented", "aot_autograd")
    counters = dynamo.utils.counters
    return {name: dict(counters[name]) for name in wanted if counters.get(name)}


def freeze(value: Any) -> Any:
    """A value as plain data that is equal exactly if every bit is."""
    if isinstance(value, torch.Tensor):
        return _freeze_tensor(value)
    if isinstance(value, torch.nn.Module):
        return [type(value).__name__, freeze(value.state_dict()), freeze(gradients(value))]
    if isinstance(value, BaseException):
        return [type(value).__name__, str(value)]
    if isinstance(value, dict):
        return {str(key): freeze(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [freeze(item) for item in value]
    if value is None or isinstance(value, str | int | float | bytes):
        return value
    return str(value)


def _freeze_tensor(tensor: torch.Tensor) -> Any:
    kind = [type(tensor).__name__, str(tensor.dtype), str(tensor.layout), str(tensor.device)]
    kind += [tensor.requires_grad, tensor.grad_fn.name() if tensor.grad_fn else None]
    with torch.no_grad():
        if tensor.is_nested:
            return [kind, [freeze(part) for part in tensor.unbind()]]
        if tensor.layout == torch.sparse_coo:
            coalesced = tensor.coalesce()
            return [kind, freeze(coalesced.indices()), freeze(coalesced.values())]
        if tensor.layout == torch.sparse_csr:
            return [kind, freeze(tensor.crow_indices()), freeze(tensor.values())]
        if tensor.is_quantized:
            return [kind, tensor.q_scale(), freeze(tensor.int_repr())]
        if tensor.device.type == "meta":
            return [kind, list(tensor.shape), list(tensor.stride())]
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        if flat.is_conj() or flat.is_neg():
            flat = flat.resolve_conj().resolve_neg()
        content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return [kind, list(tensor.shape), list(tensor.stride()), content]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


# -------------------------------------------------------------------------- what is left behind


def registries() -> dict[str, Any]:
    """Everything of torch's and of the interpreter's that a tracer might have touched."""
    from torch.autograd import graph
    from torch.nn.modules import module
    from torch.optim import optimizer

    autograd = torch._C._autograd
    dynamo = sys.modules.get("torch._dynamo")
    handler = dynamo.callback_handler if dynamo is not None else None
    status = C.status()
    return {
        "Module.__call__": torch.nn.Module.__dict__["__call__"] is module.Module._wrapped_call_impl,
        "_engine_run_backward": torch.autograd._engine_run_backward is graph._engine_run_backward,
        "Optimizer._optimizer_step_code": inspect.isfunction(
            vars(torch.optim.Optimizer)["_optimizer_step_code"]
        )
        and type(vars(torch.optim.Optimizer)["_optimizer_step_code"]).__name__,
        "global module hooks": [
            len(getattr(module, name))
            for name in vars(module)
            if name.startswith("_global_") and isinstance(getattr(module, name), dict)
        ],
        "optimizer pre hooks": list(optimizer._global_optimizer_pre_hooks),
        "optimizer post hooks": list(optimizer._global_optimizer_post_hooks),
        "saved-tensor hooks": autograd._top_saved_tensors_default_hooks(True),
        "saved-tensor hooks allowed": autograd._saved_tensors_hooks_is_enabled(),
        "hooks_disable": autograd._saved_tensors_hooks_disable,
        "hooks_enable": autograd._saved_tensors_hooks_enable,
        "profiler enabled": torch.autograd._profiler_enabled(),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "function modes": torch._C._len_torch_function_stack(),
        "dynamo callbacks": (
            ([], []) if handler is None else (handler.start_callbacks, handler.end_callbacks)
        ),
        "dynamo clear": handler is None or "clear" not in vars(handler),
        "meta_path": [type(finder).__name__ for finder in sys.meta_path],
        "warnings filters": list(warnings.filters),
        "showwarning": warnings.showwarning,
        "excepthook": (sys.excepthook, threading.excepthook),
        "profile and trace functions": (sys.getprofile(), sys.gettrace()),
        "gc": (len(gc.callbacks), gc.isenabled(), gc.get_threshold()),
        "signal handlers": [signal.getsignal(number) for number in signal.valid_signals()],
        "torch's settings": (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_num_threads(),
            torch.get_default_dtype(),
        ),
        "queued CUDA calls": len(torch.cuda._queued_calls),
        "Python threads": python_threads(),
        "recording": status["recording"],
        "sessions": status["sessions"],
        "op callbacks": status["ops_installed"],
        "CPU allocator": (status["cpu_installed"], _cpu_allocator()),
    }


def _cpu_allocator() -> int:
    """Which allocator torch asks for CPU memory now."""
    import ctypes

    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    get = c10._ZN3c1015GetCPUAllocatorEv
    get.restype = ctypes.c_void_p
    address: int = get()
    return address


def native_threads() -> int:
    """Threads as the operating system counts them: Python's and everybody else's."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def python_threads() -> list[str]:
    """By name; the compiler's come and go as it likes."""
    its_own = ("InductorSubproc", "subproc_worker_timer", "tqdm_monitor")
    return sorted(thread.name for thread in threading.enumerate() if thread.name not in its_own)


def _wait_for_threads(before: list[str], native: int) -> None:
    """Helpers of the program's that are about to end may do so."""
    for _ in range(50):
        if python_threads() == before and native_threads() <= native:
            return
        time.sleep(0.02)


def _alive(*kinds: type) -> dict[str, Any]:
    """How many objects of each kind have been made and outlive the garbage."""
    gc.collect()
    types = [type(thing) for thing in gc.get_objects()]
    counts = {kind.__name__: sum(issubclass(t, kind) for t in types) for kind in kinds}
    return {name: count for name, count in counts.items() if count}


# -------------------------------------------------------------------------- what was recorded


def _facts(traced: trace) -> dict[str, Any]:
    data = traced.data
    flags = int(np.bitwise_or.reduce(data.scopes.flags)) if len(data.scopes.flags) else 0
    return {
        "events": len(data.events.ticks),
        "allocated": int(data.events.bytes[data.events.action == ACTION["alloc"]].sum()),
        "losses": dict(data.losses),
        "callback_errors": data.meta["callback_errors"],
        "recompute": bool(flags & 1),
        "names": sorted(set(data.strings)),
    }
