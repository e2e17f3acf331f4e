"""How long the device works on each phase: a few CUDA events a step, and no waiting.

The host runs ahead of a GPU, so its own clock does not say how long a forward takes there. Where a
phase begins or ends (the outermost module, the backward pass, the optimizer) an event is put into
the stream that is current; the device writes the time when it comes to it. Six a micro-step, about
a microsecond each; they are used again. They are read when the trace ends, or in a long one those
that the device has passed. A stream that is being captured into a graph gets none: nothing would
run, and the graph would have them for good. Nothing here initialises CUDA or allocates its memory.

What is left is `meta["phase_times"]`:

    {"problem": "", "missing": pairs that could not be read,
     "phase": [numbers of schema.PHASES], "device": [indices], "device_ns": [...],
     "begin": [ticks of the host at the borders], "end": [...]}

A phase is one pair: from the border that begins it to the one that ends it, as `analysis/phases.py`
has them. A forward that a backward follows lasts until that one, so the loss belongs to it; a call
of a model that none follows lasts until the model is left.
"""

import threading
import time
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch

from pytracer._native import C
from pytracer.capture.looking import parameters_of
from pytracer.schema import PHASE

_FORWARD, _BACKWARD, _OPTIMIZER = (PHASE[name] for name in ("forward", "backward", "optimizer"))

_MOST_PENDING = 512  # pairs that wait; of more those that have passed are read
_MOST_CALLS = 256  # of models, since the last backward: a forward of more begins later
_MOST_KEPT = 300_000  # pairs of a trace: as many as 100,000 steps have
_LONGEST_WAIT = 10.0  # seconds for the device at the end; a collective may hang for ever


class Stopwatch(Protocol):
    """What a device offers; CUDA's is below."""

    def mark(self, device: int, again: Any) -> Any:
        """An event in the current stream, an old one if given; None where there may be none."""

    def has_passed(self, event: Any) -> bool:
        """Whether the device has come to it."""

    def elapsed_ns(self, begin: Any, end: Any) -> int:
        """The device's time between two events that it has passed."""


class CudaEvents:
    """CUDA's events. A stream's object is kept while it stays the current one."""

    def __init__(self) -> None:
        """Nothing of CUDA's is touched yet."""
        self._streams: dict[int, Any] = {}

    def mark(self, device: int, again: Any) -> Any:
        """An event in the current stream; None before CUDA is up or while a graph is captured."""
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True) if again is None else again
        event.record(self._stream(device))
        return event

    def has_passed(self, event: Any) -> bool:
        """Not asked while a graph is captured, which that would spoil."""
        return not torch.cuda.is_current_stream_capturing() and bool(event.query())

    def elapsed_ns(self, begin: Any, end: Any) -> int:
        """To about half a microsecond."""
        taken: float = begin.elapsed_time(end)  # milliseconds
        return max(round(taken * 1e6), 0)

    def _stream(self, device: int) -> Any:
        raw = torch._C._cuda_getCurrentRawStream(device)
        known = self._streams.get(device)
        if known is None or known.cuda_stream != raw:
            known = self._streams[device] = torch.cuda.current_stream(device)
        return known


class _Border(NamedTuple):
    """Where a phase begins or ends."""

    number: int
    event: Any
    ticks: int
    device: int


class PhaseTimes:
    """The borders that one session passes, on the thread that trains."""

    def __init__(self, stopwatch: Stopwatch | None) -> None:
        """Without a stopwatch (on the CPU, whose own clock is right) nothing is measured."""
        self._stopwatch = stopwatch
        self._problem = ""
        self._thread = 0  # the first that passes a border trains
        self._device: int | None = None
        self._count = self._missing = 0
        self._free: list[Any] = []
        self._used: deque[_Border] = deque()
        self._pending: deque[tuple[int, _Border, _Border]] = deque()
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._call: _Border | None = None  # an outermost module is being called
        self._calls: deque[tuple[_Border, _Border]] = deque()  # no backward has followed yet
        self._backward: _Border | None = None
        self._optimizer: _Border | None = None
        self._stepping = False

    # ---------------------------------------------------------------- the borders

    def root_entered(self, module: torch.nn.Module) -> None:
        """An outermost module is called."""
        if not self._listens():
            return
        found = _device_of(module)
        self._device = self._device if found is None else found
        border = self._call = self._border()
        if self._optimizer is not None:  # a closure: the step goes on after its backward
            self._pair(_OPTIMIZER, self._optimizer, border)
            self._optimizer = None

    def root_left(self) -> None:
        """It has returned."""
        if not self._listens():
            return
        call, self._call = self._call, None
        border = self._border() if call is not None else None
        if call is None or border is None:
            return
        if not torch.is_grad_enabled():
            self._pair(_FORWARD, call, border)
            return
        self._calls.append((call, border))
        if len(self._calls) > _MOST_CALLS:
            self._pair(_FORWARD, *self._calls.popleft())

    def backward_begins(self, outputs: Any) -> None:
        """An outermost backward pass begins."""
        if not self._listens():
            return
        if self._device is None:
            self._device = _device_among(outputs)
        border = self._backward = self._border()
        begin = self._calls[0][0] if self._calls else self._call
        self._pair(_FORWARD, begin, border)
        self._calls.clear()
        self._call = None

    def backward_ends(self) -> None:
        """It has ended without an exception."""
        if not self._listens():
            return
        border = self._border()
        self._pair(_BACKWARD, self._backward, border)
        self._backward = None
        self._optimizer = border if self._stepping else None

    def step_begins(self) -> None:
        """An optimizer steps."""
        if not self._listens():
            return
        while self._calls:
            self._pair(_FORWARD, *self._calls.popleft())
        self._stepping = True
        self._optimizer = self._border()

    def step_ends(self) -> None:
        """It has stepped without an exception."""
        if not self._listens():
            return
        self._pair(_OPTIMIZER, self._optimizer, self._border() if self._stepping else None)
        self._optimizer, self._stepping = None, False

    # ---------------------------------------------------------------- reading

    def look(self) -> None:
        """Reads what the device has passed, without waiting."""
        self._quietly(self._read_passed)

    def finish(self, *, wait: bool) -> None:
        """The trace ends. `wait`: until the device has come so far, where that takes no age."""
        while self._calls:
            self._pair(_FORWARD, *self._calls.popleft())
        give_up = time.monotonic() + _LONGEST_WAIT
        self.look()
        while wait and self._pending and not self._problem and time.monotonic() < give_up:
            time.sleep(0.0002)  # where Ctrl-C is heard, as it is not inside of a synchronisation
            self.look()
        self._missing += len(self._pending)
        self._pending.clear()
        self._used.clear()
        self._free.clear()

    def document(self) -> dict[str, Any] | None:
        """What goes into the trace."""
        if self._stopwatch is None:
            return None
        names = ("phase", "device", "begin", "end", "device_ns")
        columns = zip(*self._rows, strict=True) if self._rows else ((),) * len(names)
        return {
            "problem": self._problem,
            "missing": self._missing,
            **{name: list(column) for name, column in zip(names, columns, strict=True)},
        }

    # ---------------------------------------------------------------- parts

    def _listens(self) -> bool:
        if self._stopwatch is None or self._problem:
            return False
        here = threading.get_ident()
        self._thread = self._thread or here
        return self._thread == here

    def _border(self) -> _Border | None:
        if self._device is None or self._stopwatch is None:
            return None
        again = self._free.pop() if self._free else None
        try:
            event = self._stopwatch.mark(self._device, again)
        except RuntimeError as error:  # CUDA's: the program will meet it itself
            self._fail(error)
            return None
        if event is None:
            if again is not None:
                self._free.append(again)
            return None
        self._count += 1
        border = _Border(self._count, event, C.read_clock()[0], self._device)
        self._used.append(border)
        return border

    def _pair(self, phase: int, begin: _Border | None, end: _Border | None) -> None:
        if begin is None or end is None:
            return
        if begin.device != end.device or len(self._rows) >= _MOST_KEPT:
            self._missing += 1
        else:
            self._pending.append((phase, begin, end))
        if len(self._pending) > _MOST_PENDING or len(self._used) > 3 * _MOST_PENDING:
            self.look()

    def _read_passed(self) -> None:
        if self._stopwatch is None:
            return
        while self._pending and self._stopwatch.has_passed(self._pending[0][2].event):
            phase, begin, end = self._pending.popleft()
            taken = self._stopwatch.elapsed_ns(begin.event, end.event)
            self._rows.append((phase, begin.device, begin.ticks, end.ticks, taken))
        self._take_back()

    def _take_back(self) -> None:
        """Events that nothing waits for any more are used again."""
        needed = [self._call, self._backward, self._optimizer]
        needed += self._calls[0] if self._calls else ()
        needed += (begin for _, begin, _ in self._pending)  # in the order of their ends
        oldest = min((border.number for border in needed if border), default=self._count + 1)
        while self._used and self._used[0].number < oldest:
            self._free.append(self._used.popleft().event)

    def _quietly(self, read: Any) -> None:
        try:
            read()
        except RuntimeError as error:
            self._fail(error)

    def _fail(self, error: RuntimeError) -> None:
        self._problem = (str(error).splitlines() or [""])[0][:200] or type(error).__name__


def _device_of(module: torch.nn.Module) -> int | None:
    """The CUDA device of the first parameter."""
    parameter = next(parameters_of([module]), None)
    return _cuda_index(parameter) if parameter is not None else None


def _device_among(outputs: Any) -> int | None:
    found = (_cuda_index(one) for one in C.tensors_in(outputs, depth=1))
    return next((index for index in found if index is not None), None)


def _cuda_index(tensor: torch.Tensor) -> int | None:
    kind, index = C.device_of(tensor)
    return index if kind == "cuda" else None
