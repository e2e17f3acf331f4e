"""Turns a trace, which knows what each block is for, into the snapshot that torch would have written.

The trace has to have stacks. Where torch has no frames, this has none: autograd's own threads run no
Python, except for what Python runs inside a node (a checkpoint's forward, a hook).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from pytracer.analysis.facts import scopes
from pytracer.analysis.facts.allocations import allocations
from pytracer.data.recorded import Trace
from pytracer.data.schema import ACTION, ACTIONS, CATEGORY, DEVICE_TYPES, ROLE
from pytracer.export import snapshot as export

Frame = tuple[str, str, int]  # file, function, line
_OPTIMIZER_FILE = "/opt/venv/lib/python3.12/site-packages/torch/optim/optimizer.py"
_MODULE_FILE = "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py"
_INSTEAD: dict[str, list[Frame]] = {
    "apply": [(_MODULE_FILE, "_apply", 960)],
    "_copied_deeply": [(_MODULE_FILE.replace("modules/module", "parameter"), "__deepcopy__", 64)],
}
_FSDP = "/opt/venv/lib/python3.12/site-packages/torch/distributed/fsdp/_fully_shard/"
_GATHERS: Frame = (_FSDP + "_fsdp_param.py", "alloc_storage", 1066)
_REDUCES: Frame = (_FSDP + "_fsdp_collectives.py", "foreach_reduce", 607)
_ALLOCATES = (
    "c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::malloc(void**, signed)"
)
_BLAS = "at::cuda::getCurrentCUDABlasHandle()"
_ENGINE = (
    "torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)",
    "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)",
)
_SHOWN = (*("alloc", "free_requested", "free_completed"), *export._SEGMENTS)


def as_snapshot(trace: Trace, stacks: str = "python") -> dict[str, Any]:
    """What `torch.cuda.memory._snapshot()` would have returned.

    Args:
        trace: of one CUDA device, with stacks.
        stacks: "python" or "all", as for `_record_memory_history`.
    """
    frames = _Frames(trace, native=stacks == "all")
    events, places = trace.events, trace.places
    cuda = places.device_type[events.place] == DEVICE_TYPES.index("cuda")
    time = (trace.time_ns(events.ticks) + trace.began_unix_ns) // 1000
    entries, of_address = [], {}
    for i in np.flatnonzero(cuda).tolist():
        action = ACTIONS[events.action[i]]
        if action not in _SHOWN:
            continue
        shown = frames.of(i)
        if action == "alloc":
            of_address[int(events.address[i])] = shown
        entries.append(
            {
                "action": action,
                "addr": int(events.address[i]),
                "size": int(events.bytes[i]),
                "stream": int(places.stream[events.place[i]]),
                "time_us": int(time[i]),
                "frames": shown,
            }
        )
    device = export._Device(trace, "cuda:0", 0, export._Words(trace))
    segments = device.segments()
    for segment in segments:
        for block in segment["blocks"]:
            block["frames"] = of_address.get(block["address"], [])
    notes = [note for note in export._annotations(trace) if "Backward" not in note["name"]]
    notes = [note for note in notes if note["name"] != "backward"]
    return {
        "segments": segments,
        "device_traces": [entries],
        "allocator_settings": {"expandable_segments": False},
        "external_annotations": notes,
    }


class _Frames:
    """The frames at each event, innermost first."""

    def __init__(self, trace: Trace, *, native: bool) -> None:
        self.trace, self.native, self.tree = trace, native, scopes.tree(trace)
        self.parent, self.kind = self.tree.parent.tolist(), self.tree.kind.tolist()
        self.stack = self.tree.stack.tolist()
        self.shown: dict[tuple[Frame, ...], list[dict[str, Any]]] = {}
        self.of_row: dict[int, list[Frame]] = {0: []}
        self.main: list[Frame] = []
        self.in_module = self._module_frames()
        alloc = allocations(trace)
        blas = (alloc.category == CATEGORY["workspaces"]) & (alloc.start >= 0)
        self.blas = set(alloc.start[blas].tolist())
        # FSDP makes its whole weights by the storage's resize, and drops whole gradients between
        # operators: of these the trace has no stack.
        whole = (alloc.role == ROLE["unsharded"]) & (alloc.start >= 0)
        gathered = whole & (alloc.category == CATEGORY["weights"])
        self.fsdp = dict.fromkeys(alloc.start[gathered].tolist(), _GATHERS)
        dropped = whole & (alloc.category == CATEGORY["gradients"])
        ends = np.concatenate([alloc.end[dropped], alloc.completed[dropped]])
        self.fsdp |= dict.fromkeys(ends.tolist(), _REDUCES)

    def of(self, i: int) -> list[dict[str, Any]]:
        """The frames at the i-th event."""
        chain = list(self._chain(int(self.trace.events.scope[i])))
        is_alloc = self.trace.events.action[i] == ACTION["alloc"]
        frames = self._python(chain, is_alloc=is_alloc)
        if i in self.fsdp:
            frames = [self.fsdp[i], *frames]
        if self.native:
            frames = [*self._operators(i, chain), *frames, *self._engine(chain)]
        key = tuple(frames)
        if key not in self.shown:
            self.shown[key] = [{"filename": f, "name": n, "line": line} for f, n, line in frames]
        return self.shown[key]

    def _python(self, chain: list[int], *, is_alloc: bool) -> list[Frame]:
        inner, in_pass = self._within_pass(chain)
        own = next((self._frames(self.stack[s]) for s in inner if self.stack[s]), None)
        if own is not None and is_alloc:
            cut = _inside_engine(own) if in_pass else own
            if not in_pass:
                self.main = _outside_torch(own)
            return cut
        for scope in inner:
            if scope in self.in_module:
                return self.in_module[scope]
            name = self.trace.strings[self.tree.name[scope]]
            if self.kind[scope] in (scopes.OPTIMIZER, scopes.USER) and name.startswith("Optimizer"):
                word = "zero_grad" if "zero_grad" in name else "step"
                return [(_OPTIMIZER_FILE, word, 500), *self.main]
        return [] if in_pass else self.main

    def _within_pass(self, chain: list[int]) -> tuple[list[int], bool]:
        """The scopes inside of the innermost call of the engine, and whether there is one."""
        for at, scope in enumerate(chain):
            if self.kind[scope] in (scopes.BACKWARD, scopes.NODE):
                inner = chain[: at + 1] if self.kind[scope] == scopes.NODE else chain[:at]
                return inner, True
        return chain, False

    def _operators(self, i: int, chain: list[int]) -> Iterator[Frame]:
        """C++'s frames inside of Python's."""
        yield ("??", _ALLOCATES, 0)
        if i in self.blas:
            yield ("??", _BLAS, 0)
        for scope in self._within_pass(chain)[0]:
            if self.kind[scope] == scopes.OP:
                name = self.trace.strings[self.tree.name[scope]].removeprefix("aten::")
                yield ("??", f"at::_ops::{name}::call(at::Tensor const&)", 0)

    def _engine(self, chain: list[int]) -> Iterator[Frame]:
        """C++'s frames around all of Python's on a thread of the engine."""
        for scope in chain:
            if self.kind[scope] == scopes.NODE:
                name = self.trace.strings[self.tree.name[scope]]
                node = name if "::" in name else f"torch::autograd::generated::{name}"
                yield ("??", f"{node}::apply(std::vector<at::Tensor>&&)", 0)
            if self.kind[scope] in (scopes.NODE, scopes.BACKWARD):
                yield from (("??", name, 0) for name in _ENGINE)
                return

    def _module_frames(self) -> dict[int, list[Frame]]:
        """For calls of modules, the frames in which their own code runs: from an operator inside."""
        found: dict[int, list[Frame]] = {}
        for scope in np.flatnonzero(self.tree.stack).tolist():
            chain, in_pass = self._within_pass(list(self._chain(scope)))
            modules = [one for one in chain if self.kind[one] == scopes.MODULE]
            if not modules or modules[0] in found:
                continue
            frames = self._frames(self.stack[scope])
            frames = _inside_engine(frames) if in_pass else frames
            calls = [at for at, (_, name, _) in enumerate(frames) if name == "_call_impl"]
            for module, at in zip(modules[::-1], calls[::-1], strict=False):
                found.setdefault(module, frames[max(at - 1, 0) :])
        return found

    def _chain(self, scope: int) -> Iterator[int]:
        while scope:
            yield scope
            scope = self.parent[scope]

    def _frames(self, row: int) -> list[Frame]:
        if row not in self.of_row:
            stacks, strings = self.trace.stacks, self.trace.strings
            name = strings[stacks.function[row]].rpartition(".")[2]
            file, outer = strings[stacks.file[row]], self._frames(int(stacks.parent[row]))
            own = [(file, name, int(stacks.line[row]))]
            if "pytracer/imagined/" in file:  # stands where torch's own code would
                own = _INSTEAD.get(name, [])
            self.of_row[row] = [*own, *outer]
        return self.of_row[row]


def _inside_engine(frames: list[Frame]) -> list[Frame]:
    for at, (_, name, _) in enumerate(frames):
        if name == "_engine_run_backward":
            return frames[:at]
    return []


def _outside_torch(frames: list[Frame]) -> list[Frame]:
    """The program's own outermost frames, up to where it calls torch."""
    kept = []
    for frame in reversed(frames):
        if "/torch/" in frame[0]:
            break
        kept.append(frame)
    return kept[::-1]
