"""Runs torch.profiler beside a recording, and writes the cost of each operator into one document.

The document is part of the trace's meta. It has a row for each distinct call (module, phase, operator,
shapes) with its count, time, FLOPs and bytes. FLOPs and bytes are computed here, because they need
torch. `pytracer/cost/measurements.py` reads the document without torch.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from pytracer import errors
from pytracer.basics import private_torch
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
from pytracer.data._native import C

VERSION = 1
COLUMNS = (
    "module",  # texts are rows of `strings`; 0 is no text
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
    "other_flops",  # by convention, of operators that are no contractions; -1: no convention
    "bytes",  # -1: no model
    "kernel_bytes",
    "notes",  # rows of `strings`
    "kernels",  # rows of `strings`, the longest ones only
    "kernel_ns",  # the time of each
)
ALIGNED_BYTES = 16  # tensor cores' loads need it; otherwise an older generation's kernel runs

_NODE = "autograd::engine::evaluate_function: "
_MODULE_SCOPE = 9  # at::RecordScope::STATIC_RUNTIME_MODEL; see csrc/torch/interceptors.cpp
_BACKWARD_SCOPE = 1
# torch.compile records these around compiled code. They look like operators and are none.
_COMPILERS = ("TorchDynamo ", "Torch-Compiled Region", "AOTDispatcher ", "Pregraph ", "## Call ")
_COMPILES = ("entire_frame_compile", "entire_backward_compile", "dynamo", "build_guards", "gc")
_MOST_KERNELS, _LONGEST_NAME = 4, 160
_GEMMS = frozenset({"mm", "addmm", "bmm", "baddbmm"})


class Measurement:
    """One run of torch.profiler. Call `start` inside a session and `stop` before the session ends."""

    def __init__(self) -> None:
        """Does not start the profiler yet."""
        self._profiler: Any = None

    def start(self) -> None:
        """Starts the profiler.

        Raises:
            errors.CaptureError: another profiler runs, and torch allows only one.
        """
        if private_torch.profiler_is_on():
            raise errors.CaptureError(
                "cost=True needs torch.profiler, and one is running already: "
                "end it first, or trace without cost=True"
            )
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # Without acc_events torch warns, once per process, of what happens after several cycles.
        self._profiler = profile(activities=activities, record_shapes=True, acc_events=True)
        self._profiler.start()
        C.mark_modules(True)

    def stop(self) -> dict[str, Any] | None:
        """Ends the profiler and returns the document. None if other code has ended the profiler."""
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


# The kinds of records of calls, if this torch names kinds. All other records of the host are the
# driver's calls, which are linked to the operator around them, and the profiler's own work.
_CALLS = ("cpu_op", "user_annotation", "")
# A driver's call outside operators is linked to no operator, and has a number from the driver. That
# number may equal an operator's id, so as an operator it would get kernels of another operator.
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
    else:  # before torch 2.13: no strides, and no shapes inside lists
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
    """The document of these calls and kernels: one row per distinct call."""
    rows = join(calls, kernels, classes.class_of)
    strings = _Strings()
    written = [_row(key, sums, strings, bool(kernels)) for key, sums in rows.items()]
    if kernels:
        # Without a kernel a row is a view or ran on the host. It has no time on the device.
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
        "device_busy_ns": busy(kernels) if kernels else None,  # kernels that overlap count once
        "matmul_precision": torch.get_float32_matmul_precision(),
        "peaks": peaks.cached(name),
        "modules": modules,  # path, calls in forward, the module that called it
        "columns": list(COLUMNS),
        "strings": strings.rows,
        "rows": written,
    }


class _Strings:
    """Texts by number. Row 0 is the empty text."""

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


def _row(key: Key, sums: Sum, strings: _Strings, on_device: bool) -> list[Any]:
    op_class = _class(key)
    counted = _flops(key, op_class) if sums.is_leaf else 0
    other = flops.per_element(key.op, key.arguments) if op_class != "contraction" else 0
    moved = traffic.traffic(key.op, key.arguments)
    times = sums.launching_calls if on_device else sums.calls
    tensors = [argument for argument in key.arguments if argument.dtype]
    by_time = sorted(sums.kernels, key=lambda name: (-sums.kernels[name], name))
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
        sums.kernel_ns if on_device else sums.host_ns,
        sums.host_ns,
        sums.launches,
        -1 if counted is None else counted * times,
        -1 if other is None else other * times,
        -1 if moved is None else moved.operator * times,
        -1 if moved is None else (moved.kernels if on_device else moved.operator) * times,
        [strings(note) for note in _notes(key)],
        [strings(name[:_LONGEST_NAME]) for name in longest],
        [sums.kernels[name] for name in longest],
    ]


def _class(key: Key) -> str:
    if key.phase == "optimizer":
        return "optimizer"
    name = key.op.removeprefix("kernel ")
    op_class = classes.class_of(name) or "other"
    if name != key.op and op_class == "other" and name.startswith(("Memcpy", "Memset")):
        return "data movement"
    return op_class


def _flops(key: Key, op_class: str) -> int | None:
    """FLOPs of a contraction. 0 if the operator is known not to be one, None if it is unknown."""
    if key.op == COMPILING:
        return 0
    if op_class == "contraction" or key.phase == "optimizer":
        counted = flops.contraction(key.op, key.arguments)
        return 0 if counted is None and key.phase == "optimizer" else counted
    if op_class in ("normalisation", "element-wise", "data movement", "communication"):
        return None if key.op.startswith("triton_") else 0
    has_none = classes.is_reduction(key.op) or classes.computes_nothing(key.op)
    return 0 if has_none else None


def _dtype(tensors: list[Argument]) -> str:
    """The first floating-point type, or else the first type."""
    names = [tensor.dtype for tensor in tensors]
    floats = [name for name in names if name in ("float", "double", "c10::Half", "c10::BFloat16")]
    dtype = next(iter(floats or names), "")
    return {"float": "float32", "double": "float64"}.get(dtype, dtype.removeprefix("c10::").lower())


def _notes(key: Key) -> Iterator[str]:
    """The properties of the shapes and flags that explain the cost."""
    if flops.is_causal(key.op, key.arguments):
        yield "causal: counted in full, a kernel may skip half"
    if key.op.removeprefix("aten::") in _GEMMS:
        unaligned = _unaligned(key)
        if unaligned:
            yield f"unaligned: {unaligned}"
    if _is_cast(key):
        yield "cast"


def _unaligned(key: Key) -> str:
    """Names a GEMM whose rows do not begin at multiples of 16 bytes, with the sizes; "" if aligned."""
    first = 1 if key.op.removeprefix("aten::") in ("addmm", "baddbmm") else 0
    factors = key.arguments[first : first + 2]
    if len(factors) < 2 or any(len(factor.shape) < 2 for factor in factors):
        return ""
    width, role = traffic.element_size(factors[0]), _role(key, factors)
    rows = {_row_length(factors[0], transposed=role == "weight-gradient")}
    rows |= {_row_length(factors[1]), factors[1].shape[-1]}  # the last is the product's row
    odd = sorted(length for length in rows if length * width % ALIGNED_BYTES)
    if not odd:
        return ""
    return f"rows of {', '.join(map(str, odd))} elements of {width} B in the {role} GEMM"


def _row_length(factor: Argument, *, transposed: bool = False) -> int:
    """Elements from one row in memory to the next. Without strides, the usual layout is assumed."""
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
    """Whether this copies floats into another float type, as autocast and a float32 loss do."""
    if key.op != "aten::copy_" or len(key.arguments) < 2:
        return False
    floats = {"float", "double", "c10::Half", "c10::BFloat16"}
    types = {argument.dtype for argument in key.arguments[:2]}
    return len(types) == 2 and types <= floats
