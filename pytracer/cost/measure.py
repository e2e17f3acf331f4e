"""Runs torch.profiler beside a recording, and leaves what each operator cost as one document.

The document is part of the trace's meta: distinct calls (module, phase, operator, shapes), how
often they ran, for how long, and their FLOPs and bytes, computed here, where torch is.
`pytracer/cost/measurements.py` reads it.
"""

import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from pytracer import errors, private_torch
from pytracer._native import C
from pytracer.cost import classes, flops, peaks, traffic
from pytracer.cost.calls import (
    COMPILING,
    Argument,
    Call,
    Kernel,
    Key,
    Kind,
    Sum,
    busy,
    join,
    module_calls,
)

VERSION = 1
COLUMNS = (
    "module",  # texts are rows of `strings`; 0 is none
    "phase",
    "op",
    "pair",
    "node",
    "class",
    "shapes",
    "dtype",
    "calls",
    "time_ns",
    "host_ns",
    "launches",
    "flops",  # -1: no formula
    "other_flops",  # by convention, of what is no contraction; -1: none
    "bytes",  # -1: no model
    "kernel_bytes",
    "notes",  # rows of `strings`
    "kernels",  # rows of `strings`, those that took longest
    "kernel_ns",  # and how long each took
)
ALIGNED_BYTES = 16  # what a tensor core's loads need; below, another generation's kernel runs

_NODE = "autograd::engine::evaluate_function: "
_MODULE_SCOPE = 9  # at::RecordScope::STATIC_RUNTIME_MODEL; see csrc/torch/interceptors.cpp
_BACKWARD_SCOPE = 1
# What torch.compile records around what it compiled: no operators, though they look like some.
_COMPILERS = ("TorchDynamo ", "Torch-Compiled Region", "AOTDispatcher ", "Pregraph ", "## Call ")
_COMPILES = ("entire_frame_compile", "entire_backward_compile", "dynamo", "build_guards", "gc")
_MOST_KERNELS, _LONGEST_NAME = 4, 160
_GEMMS = frozenset({"mm", "addmm", "bmm", "baddbmm"})


class Measurement:
    """One run of torch.profiler. `start` it inside a session, `stop` it before the session's end."""

    def __init__(self) -> None:
        """Nothing runs yet."""
        self._profiler: Any = None

    def start(self) -> None:
        """Begins to measure.

        Raises:
            errors.CaptureError: another profiler runs, and torch has only one.
        """
        if private_torch.profiler_is_on():
            raise errors.CaptureError(
                "cost=True measures with torch.profiler, and one is running already: "
                "end it first, or trace without cost=True"
            )
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities, record_shapes=True)
        with warnings.catch_warnings():
            # torch 2.11 warns of cycles before there is a second one, and there never is.
            warnings.filterwarnings("ignore", ".*Profiler clears events")
            self._profiler.start()
        C.mark_modules(True)

    def stop(self) -> dict[str, Any] | None:
        """Ends, and says what was measured. None if somebody else has ended the profiler."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return None
        C.mark_modules(False)
        if not private_torch.profiler_is_on():
            return None
        profiler.stop()
        events = profiler.profiler.kineto_results.events()
        return document(*_read(events))


# ---------------------------------------------------------------- what the profiler recorded


def _read(events: Iterable[Any]) -> tuple[list[Call], list[Kernel]]:
    calls, kernels = [], []
    for event in events:
        if event.is_async():
            continue
        if event.device_type() != DeviceType.CPU:
            if not event.is_user_annotation() and _activity(event) not in _NO_WORK:
                kernels.append(_kernel(event))
        elif _is_call(event):
            calls.append(_call(event))
    return calls, kernels


# The kinds of records, where torch tells them. What else is on the host are the driver's calls,
# which are linked to the operator around them, and the profiler's own work.
_CALLS = ("cpu_op", "user_annotation", "")
# A driver's call outside of operators is linked to none, and has a number of the driver's own: taken
# for an operator it could have one's number, and that one's kernels.
_DRIVERS_CALL = re.compile(r"cu(da)?[A-Z]\w*$")
_NO_WORK = ("gpu_user_annotation", "cuda_sync", "cuda_event", "overhead")


def _is_call(event: Any) -> bool:
    linked = event.linked_correlation_id() != 0
    return not linked and _activity(event) in _CALLS and not _DRIVERS_CALL.match(event.name())


def _activity(event: Any) -> str:
    return str(event.activity_type()) if hasattr(event, "activity_type") else ""


def _kernel(event: Any) -> Kernel:
    start = event.start_ns()
    return Kernel(event.name(), start, start + event.duration_ns(), event.linked_correlation_id())


def _call(event: Any) -> Call:
    name, start, kind = event.name(), event.start_ns(), _kind(event)
    if kind == "node":
        name = name.removeprefix(_NODE)
    return Call(
        name=name,
        kind=kind,
        thread=event.start_thread_id(),
        start=start,
        end=start + event.duration_ns(),
        id=event.correlation_id(),
        sequence=event.sequence_nr(),
        forward_thread=event.fwd_thread_id(),
        arguments=_arguments(event) if kind == "op" else (),
    )


def _kind(event: Any) -> Kind:
    if event.scope() == _MODULE_SCOPE:
        return "module"
    if event.name() in _COMPILES or event.name().endswith("(dynamo_timed)"):
        return "compile"
    if event.is_user_annotation() or event.name().startswith(_COMPILERS):
        return "annotation"
    if event.scope() == _BACKWARD_SCOPE:
        return "call"
    return "node" if event.name().startswith(_NODE) else "op"


def _arguments(event: Any) -> tuple[Argument, ...]:
    dtypes, values = event.dtypes(), event.concrete_inputs()
    if hasattr(event, "structured_input_strides"):
        shapes, strides = event.structured_input_shapes(), event.structured_input_strides()
    else:  # before torch 2.13: neither strides nor what is in lists
        shapes = event.shapes()
        strides = [()] * len(shapes)
    if not len(shapes) == len(strides) == len(dtypes) == len(values):
        return ()
    return tuple(map(_argument, shapes, strides, dtypes, values))


def _argument(shape: Any, strides: Any, dtype: str, value: Any) -> Argument:
    if dtype in traffic.SIZES:
        return Argument(tuple(shape), tuple(strides), dtype)
    if dtype == "TensorList":
        return Argument(value=tuple(tuple(each) for each in shape if isinstance(each, list)))
    if isinstance(value, list):
        return Argument(value=tuple(value))
    return Argument(value=value)


# ---------------------------------------------------------------- the document


def document(calls: list[Call], kernels: list[Kernel]) -> dict[str, Any]:
    """What was recorded, as it is kept: one row per distinct call."""
    rows = join(calls, kernels, classes.class_of)
    strings = _Strings()
    written = [_row(key, found, strings, bool(kernels)) for key, found in rows.items()]
    if kernels:
        # Views, and what ran on the host: no kernel, nothing to say.
        launches = COLUMNS.index("launches")
        written = [row for row in written if row[launches]]
    modules = [
        [strings(module), count, strings(parent)]
        for module, (count, parent) in module_calls(calls).items()
    ]
    device = "cuda" if kernels else "cpu"
    name = peaks.device_name(device)
    time_ns = COLUMNS.index("time_ns")
    return {
        "version": VERSION,
        "device": device,
        "device_name": name,
        "cache_bytes": peaks.cache_bytes(device),
        "clock": "kernels" if kernels else "operators",
        "busy_ns": sum(row[time_ns] for row in written),
        "device_busy_ns": busy(kernels) if kernels else None,  # two at once count once
        "matmul_precision": torch.get_float32_matmul_precision(),
        "peaks": peaks.cached(name),
        "modules": modules,  # path, calls in forward, the module that called it
        "columns": list(COLUMNS),
        "strings": strings.rows,
        "rows": written,
    }


class _Strings:
    """Texts by number; row 0 is the empty one."""

    def __init__(self) -> None:
        self.rows = [""]
        self._numbers = {"": 0}

    def __call__(self, text: str | None) -> int:
        text = text or ""
        if text not in self._numbers:
            self._numbers[text] = len(self.rows)
            self.rows.append(text)
        return self._numbers[text]


OUTSIDE = "(outside of modules)"
ROOT = "(model)"


def _row(key: Key, found: Sum, strings: _Strings, on_device: bool) -> list[Any]:
    op_class = _class(key)
    counted = _flops(key, op_class) if found.is_leaf else 0
    other = flops.per_element(key.op, key.arguments) if op_class != "contraction" else 0
    moved = traffic.traffic(key.op, key.arguments)
    times = found.launching_calls if on_device else found.calls
    tensors = [argument for argument in key.arguments if argument.dtype]
    by_time = sorted(found.kernels, key=lambda name: (-found.kernels[name], name))
    longest = by_time[:_MOST_KERNELS]
    return [
        strings(OUTSIDE if key.module is None else key.module or ROOT),
        strings(key.phase),
        strings(key.op),
        strings(key.pair),
        strings(key.node),
        strings(op_class),
        strings(", ".join("x".join(map(str, tensor.shape)) or "()" for tensor in tensors)),
        strings(_dtype(tensors)),
        times,
        found.kernel_ns if on_device else found.host_ns,
        found.host_ns,
        found.launches,
        -1 if counted is None else counted * times,
        -1 if other is None else other * times,
        -1 if moved is None else moved.operator * times,
        -1 if moved is None else (moved.kernels if on_device else moved.operator) * times,
        [strings(note) for note in _notes(key)],
        [strings(name[:_LONGEST_NAME]) for name in longest],
        [found.kernels[name] for name in longest],
    ]


def _class(key: Key) -> str:
    if key.phase == "optimizer":
        return "optimizer"
    name = key.op.removeprefix("kernel ")
    found = classes.class_of(name) or "other"
    if name != key.op and found == "other" and name.startswith(("Memcpy", "Memset")):
        return "data movement"
    return found


def _flops(key: Key, op_class: str) -> int | None:
    """A contraction's FLOPs; 0 of what is known to be none; None where nothing is known."""
    if key.op == COMPILING:
        return 0
    if op_class == "contraction" or key.phase == "optimizer":
        found = flops.contraction(key.op, key.arguments)
        return 0 if found is None and key.phase == "optimizer" else found
    if op_class in ("normalisation", "element-wise", "data movement", "communication"):
        return None if key.op.startswith("triton_") else 0
    known = classes.is_reduction(key.op) or classes.computes_nothing(key.op)
    return 0 if known else None


def _dtype(tensors: list[Argument]) -> str:
    """The first type of floats, or the first type."""
    names = [tensor.dtype for tensor in tensors]
    floats = [name for name in names if name in ("float", "double", "c10::Half", "c10::BFloat16")]
    found = next(iter(floats or names), "")
    return {"float": "float32", "double": "float64"}.get(found, found.removeprefix("c10::").lower())


def _notes(key: Key) -> Iterator[str]:
    """What about these shapes and flags explains what they cost."""
    if flops.is_causal(key.op, key.arguments):
        yield "causal: counted in full, a kernel may skip half"
    if key.op.removeprefix("aten::") in _GEMMS:
        unaligned = _unaligned(key)
        if unaligned:
            yield f"unaligned: {unaligned}"
    if _is_cast(key):
        yield "cast"


def _unaligned(key: Key) -> str:
    """Which GEMM has rows that do not begin at multiples of 16 bytes, and for which size."""
    first = 1 if key.op.removeprefix("aten::") in ("addmm", "baddbmm") else 0
    factors = key.arguments[first : first + 2]
    if len(factors) < 2 or any(len(factor.shape) < 2 for factor in factors):
        return ""
    width, role = traffic.element_size(factors[0]), _role(key, factors)
    rows = {_row_length(factors[0], transposed=role == "weight-gradient")}
    rows |= {_row_length(factors[1]), factors[1].shape[-1]}  # the last is the product's
    odd = sorted(length for length in rows if length * width % ALIGNED_BYTES)
    if not odd:
        return ""
    return f"rows of {', '.join(map(str, odd))} elements of {width} B in the {role} GEMM"


def _row_length(factor: Argument, *, transposed: bool = False) -> int:
    """Elements from one row in memory to the next; by the usual layout where strides are unknown."""
    if len(factor.strides) == len(factor.shape):
        return max(factor.strides[-2:])
    return factor.shape[-2 if transposed else -1]


def _role(key: Key, factors: tuple[Argument, ...]) -> str:
    if key.phase != "backward":
        return "forward"
    made = {factors[0].shape[-2], factors[1].shape[-1]}
    tensors = [argument for argument in key.forward if len(argument.shape) >= 2][-2:]
    if len(tensors) == 2:
        of_input, of_weight = ({*tensor.shape[-2:]} for tensor in tensors)
        if of_input != of_weight and made in (of_input, of_weight):
            return "input-gradient" if made == of_input else "weight-gradient"
    return "backward"


def _is_cast(key: Key) -> bool:
    """Whether floats are copied into another type, as autocast and a loss in float32 do."""
    if key.op != "aten::copy_" or len(key.arguments) < 2:
        return False
    floats = {"float", "double", "c10::Half", "c10::BFloat16"}
    types = {argument.dtype for argument in key.arguments[:2]}
    return len(types) == 2 and types <= floats
