"""The ledger: a device's bytes row by row, from the tensors to nvidia-smi's figure.

Each row names its source and its moment. The closing figure is NVML's "used" when the trace ended.
It is read once, and no row is computed from it. The bytes that the rows do not explain are the
residual, which is printed.

- Tensors, rounding, cache: the allocator's events.
- Context, kernels and libraries: the device's bytes beyond torch's allocator, the driver's reserve
  and the other processes, less the same figure before CUDA was up. They are from a reading *before*
  the closing one: the last one after a training step or between two calls. If CUDA was up already,
  the row is NVML's figure for this process, less the bytes of torch's allocator at that moment. So
  the residual holds kernels that are loaded later, memory that another process takes unseen, and
  memory that an allocator holds but does not report. Without a reading in between, the row is
  NVML's figure for this process at the end, which is another counter than the device's.
- NCCL's communicators: as NCCL reports them, from 2.29.7 on, and then not in the row above.
- In no process's figure: bytes in use before this process came (or beyond all processes, at the
  same earlier reading) for which NVML lists no process.
- Other processes, driver reserve: NVML, at the end.

On the CPU the closing figure is the process's resident memory, and the rows beside the allocator's
are from when the trace began. Pages that were never written are not resident, and freed memory may
still be, so there the residual can be negative.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pytracer import errors
from pytracer.analysis.allocator import blocks, fragmentation
from pytracer.analysis.facts import devices, grouping, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.data import frames, meta
from pytracer.data.recorded import Trace
from pytracer.data.schema import ALWAYS_SHOWN, CATEGORY_ORDER

if TYPE_CHECKING:
    import pandas as pd

_LIMIT_SHARE, _LIMIT_BYTES = 0.005, 32 << 20
_CONTEXT = "CUDA context, kernels, libraries"


@dataclass(frozen=True)
class Row:
    """One line. The rows of a level add up to the row above them that is one level higher."""

    name: str
    bytes: int | None  # None: unknown, and so a part of the residual
    level: int
    known_by: str  # "events", "allocator", "nvml", "cuda", "nccl", "system", "sum"
    moment: str  # "begin", "a step's end", "peak", "end", ...


@dataclass(frozen=True)
class Ledger:
    """A device's or a process's memory at one moment."""

    device: str
    at: str
    rows: tuple[Row, ...]
    residual: int | None  # None: there is no closing figure for this moment
    limit: int | None  # a larger residual deserves a look
    notes: tuple[str, ...] = field(default=())

    @property
    def total(self) -> int | None:
        """All bytes in use."""
        return self.rows[0].bytes if self.rows else None

    @property
    def closes(self) -> bool | None:
        """Whether the residual is within the limit."""
        if self.residual is None or self.limit is None:
            return None
        return abs(self.residual) <= self.limit

    def __getitem__(self, name: str) -> int | None:
        """The bytes of the row of that name."""
        return next(row.bytes for row in self.rows if row.name == name)


def ledger(trace: Trace, at: Literal["peak", "end"] = "end", device: str | None = None) -> Ledger:
    """The rows for a device, by default the device that the program trains on.

    At the peak only the allocator's rows are from that moment. The device is not read then, so
    there is a sum and no residual.

    Raises:
        errors.UsageError: there is no such moment or device.
    """
    if at not in ("peak", "end"):
        raise errors.UsageError(f'at={at!r}: a ledger is of the "peak" or of the "end"')
    name = device or usage.main_device(trace)
    usage.on_device(trace, name)
    return _host_ledger(trace, at) if name == "cpu" else _Gpu(trace, at, name).ledger()


@dataclass(frozen=True)
class DeviceUse:
    """One of NVML's readings of a device while the trace was recorded."""

    time_ns: int
    bytes: int
    when: str  # "begin", "step", "call", "end"


def device_use(trace: Trace, device: str) -> list[DeviceUse]:
    """The bytes of all processes on the device, at each reading; empty without readings."""
    return [
        DeviceUse(reading.unix_ns - trace.began_unix_ns, gpu.used, reading.when)
        for reading, gpu in _of_device(trace, device)
        if gpu.used is not None and reading.unix_ns is not None
    ]


def capacity(trace: Trace, device: str) -> int | None:
    """The bytes of the whole card, where NVML told them, or of an imagined one."""
    told = max((gpu.total or 0 for _, gpu in _of_device(trace, device)), default=0)
    imagined = meta.of(trace).imagined
    return told or (imagined.capacity if imagined and device != "cpu" else None)


def frame(ledger: Ledger) -> "pd.DataFrame":
    """One row per line; `attrs` also holds the residual, the limit and the notes."""
    table = frames.of_rows(ledger.rows, list(Row.__dataclass_fields__))
    table["bytes"] = table["bytes"].astype("Int64")
    table.attrs = {
        "device": ledger.device,
        "at": ledger.at,
        "residual": ledger.residual,
        "limit": ledger.limit,
        "closes": ledger.closes,
        "notes": list(ledger.notes),
    }
    return table


# ---------------------------------------------------------------- tensors


def _tensors(trace: Trace, at: Literal["peak", "end"], device: str, level: int) -> list[Row]:
    """A row per category with live bytes, and for those that are shown even without any."""
    which = usage.alive(trace, at, device)
    held = {row.name: row.bytes for row in grouping.holders(trace, "category", which)}
    return [
        Row(name, held.get(name, 0), level, "events", at)
        for name in CATEGORY_ORDER
        if held.get(name) or name in ALWAYS_SHOWN
    ]


# ---------------------------------------------------------------- CUDA


@dataclass(frozen=True)
class _Reading:
    """One device at one reading; None where NVML gave no figure."""

    when: str
    used: int | None
    driver_reserve: int | None
    by_cuda: int | None  # in use by cudaMemGetInfo, which leaves the driver's reserve out
    torch: int  # reserved by torch's allocator
    own: int | None  # NVML's figure for this process
    others: dict[int, int | None] | None  # the other processes' figures by process id
    names: dict[int, str]
    here: bool  # whether this process was on the device already

    @property
    def own_beyond_torch(self) -> int | None:
        """This process's context, kernels and libraries, by its own figure."""
        return None if self.own is None else self.own - self.torch

    @property
    def others_total(self) -> int | None:
        """The sum of NVML's figures for the other processes."""
        if self.others is None:
            return None
        return sum(amount or 0 for amount in self.others.values())

    @property
    def beyond(self) -> int | None:
        """Bytes in use that are not torch's, another process's or the driver's reserve."""
        if self.used is None:
            return None
        return self.used - (self.driver_reserve or 0) - (self.others_total or 0) - self.torch


class _Gpu:
    """Puts the rows of a CUDA device together."""

    def __init__(self, trace: Trace, at: Literal["peak", "end"], device: str) -> None:
        self.trace, self.at, self.device = trace, at, device
        self.notes: list[str] = []
        self.readings = _readings(trace, device)
        last = self.readings[-1] if self.readings else None
        self.end = last if last is not None and last.when == "end" else None

    def ledger(self) -> Ledger:
        torch_rows = list(self._torch())
        rest = list(self._rest())
        rows = [*torch_rows, *rest]
        explained = sum(row.bytes or 0 for row in rows if row.level == 1)
        used = self.end.used if self.end and self.at == "end" else None
        self._say_what_is_missing()
        if used is None:
            top = Row("device in use, as far as known", explained, 0, "sum", self.at)
            return Ledger(self.device, self.at, (top, *rows), None, None, tuple(self.notes))
        source = "nvml" if self._nvml() else "cuda"
        top = Row("device in use", used, 0, source, "end")
        residual = used - explained
        limit = min(int(used * _LIMIT_SHARE), _LIMIT_BYTES)
        if abs(residual) > limit:
            self._explain(residual)
        self._compare_with_cuda(limit)
        last = Row("residual", residual, 1, "difference", "end")
        return Ledger(self.device, self.at, (top, *rows, last), residual, limit, tuple(self.notes))

    # ------------------------------------------------------------ torch's allocator

    def _torch(self) -> Iterator[Row]:
        at = self.at
        position = usage.position_of(self.trace, at, self.device)
        alive = usage.alive(self.trace, at, self.device)
        memory = blocks.device_bytes(self.trace, alive, position, self.device)
        allocated, known_by = memory.allocated, "events"
        if allocated is None and at == "end":
            allocated = devices.counted(self.trace, self.device, "allocated_bytes.current")
            known_by = "allocator"
        reserved, reserved_by = memory.reserved, "events"
        if reserved is None and at == "end" and self.end is not None:
            reserved, reserved_by = self.end.torch, "allocator"
        if reserved is None:
            reserved, reserved_by = allocated or memory.requested, "events"
            self.notes.append(
                "The allocator's memory beyond the tensors is not known: the trace has no snapshot "
                "of this device."
            )
        yield Row("torch's allocator", reserved, 1, reserved_by, at)
        yield Row("allocated", allocated or memory.requested, 2, known_by, at)
        yield from _tensors(self.trace, at, self.device, 3)
        if allocated is not None:
            yield Row("rounding", allocated - memory.requested, 3, known_by, at)
        else:
            self.notes.append("The bytes that the allocator added by rounding are not known here.")
        cached = reserved - (allocated or memory.requested)
        yield from self._cache(cached, reserved_by)

    def _cache(self, cached: int, known_by: str) -> Iterator[Row]:
        layout = fragmentation.layout(self.trace, self.at, self.device)
        if layout is None or layout.free != cached:
            yield Row("cached", cached, 2, known_by, self.at)
            return
        yield Row("cached, usable", layout.usable, 2, "events", self.at)
        yield Row("cached, fragmented", layout.unusable, 2, "events", self.at)

    # ------------------------------------------------------------ beside torch's allocator

    def _rest(self) -> Iterator[Row]:
        if not self.readings or not self.end:
            return
        before = self.readings[:-1]
        yield from self._context(before)
        yield from self._others()
        yield Row("driver's reserve", self.end.driver_reserve, 1, "nvml", "end")
        yield self._nobodys(before)

    def _context(self, before: list[_Reading]) -> Iterator[Row]:
        """The context's row and its parts, by the rules in this module's docstring."""
        assert self.end is not None
        first = before[0] if before else None
        reference = next((r for r in reversed(before) if r.here), None)
        settled = reference is not None and reference.when != "begin"
        fresh = first is not None and not first.here  # CUDA came up inside the trace
        amount: int | None
        if fresh and settled and first is not None and reference is not None:
            amount, moment = _less(reference.beyond, first.beyond), reference.when
        elif settled and reference is not None and reference.own is not None:
            amount, moment = reference.own_beyond_torch, reference.when
        elif self.end.own is not None:
            amount, moment = self.end.own_beyond_torch, "end"
        elif reference is not None:
            amount, moment = reference.beyond, reference.when
            self.notes.append(
                "NVML does not list this process, and CUDA was up before the trace. So the "
                "context's row is all memory that the device had in use beyond torch's at that "
                "reading, including that of hidden processes."
            )
        else:
            amount, moment = None, "end"
        by = "nvml" if self._nvml() else "cuda"
        communicators = meta.of(self.trace).communication.memory
        held = sum(communicators.values())
        if amount is not None and 0 < held <= amount:
            yield Row(_CONTEXT, amount - held, 1, by, moment)
            yield Row("NCCL's communicators", held, 1, "nccl", "end")
            for name, size in communicators.items():
                yield Row(name, size, 2, "nccl", "end")
            return
        yield Row(_CONTEXT, amount, 1, by, moment)
        began = first.own_beyond_torch if first is not None and first.here else None
        if amount is not None and began is not None:
            yield Row("when the trace began", began, 2, "nvml", "begin")
            yield Row("since: kernels loaded, NCCL, ...", amount - began, 2, "nvml", moment)

    def _others(self) -> Iterator[Row]:
        assert self.end is not None
        others, total = self.end.others, self.end.others_total
        yield Row("other processes", total, 1, "nvml", "end")
        if others is None:
            self.notes.append(
                "NVML hides this process, as it often does in containers, so the memory of other "
                "processes is unknown. Memory in use before CUDA came up counts as in no "
                "process's figure."
            )
            return
        for pid, amount in others.items():
            name = self.end.names.get(pid, "")
            yield Row(f"process {pid} {name}".rstrip(), amount, 2, "nvml", "end")
        silent = [str(pid) for pid, amount in others.items() if amount is None]
        if silent:
            self.notes.append(f"NVML gives no figure for these processes: {', '.join(silent)}.")

    def _nobodys(self, before: list[_Reading]) -> Row:
        """Bytes in use for which NVML lists no process, at an earlier reading."""
        name = "in no process's figure"
        first = before[0] if before else None
        if first is not None and not first.here:
            return Row(name, first.beyond, 1, "nvml", "begin")
        reference = before[-1] if before else None
        if reference is None or reference.own is None:
            return Row(name, None, 1, "nvml", "begin")
        amount = _less(reference.beyond, reference.own_beyond_torch)
        return Row(name, amount, 1, "nvml", reference.when)

    # ------------------------------------------------------------ words

    def _nvml(self) -> bool:
        return self.end is not None and self.end.driver_reserve is not None

    def _say_what_is_missing(self) -> None:
        problem = meta.of(self.trace).device_memory.problem
        if meta.of(self.trace).imagined is not None:
            self.notes.append(
                "This run was imagined, so there was no device to read. The rows have torch's "
                "allocator only; `pytracer fits` says what a card needs beside it."
            )
        elif problem:
            self.notes.append(f"The device itself could not be read: {problem}.")
        elif self.end is None:
            self.notes.append(
                "This trace has no reading of the device from its end: the program was killed, "
                "or an older version wrote it."
            )
        elif self.at == "peak":
            self.notes.append(
                "Nobody reads the device at the peak, so the rows beside torch's allocator are "
                'from the moments that they name. Only the ledger at "end" closes.'
            )

    def _compare_with_cuda(self, limit: int) -> None:
        """Adds a note if cudaMemGetInfo disagrees with NVML."""
        end = self.end
        if end is None or end.used is None or end.by_cuda is None or end.driver_reserve is None:
            return
        apart = end.used - end.driver_reserve - end.by_cuda
        if abs(apart) > limit:
            self.notes.append(
                f"CUDA itself (cudaMemGetInfo) says {apart:,} bytes less than NVML: the device "
                "may be a part of a GPU (MIG, vGPU), or another process took memory in between."
            )

    def _explain(self, residual: int) -> None:
        """Adds a note about the residual's cause, as far as other counters show it."""
        assert self.end is not None
        reference = self.readings[-2] if len(self.readings) > 1 else None
        now = self.end.own_beyond_torch
        then = reference.own_beyond_torch if reference is not None else None
        if now is not None and then is not None and reference is not None and reference.here:
            self.notes.append(
                f"Since the last reading before the end this process took {now - then:,} bytes "
                "outside torch's allocator (NVML's own figure for it): kernels loaded since, or a "
                "library that allocates by itself."
            )
        elif residual > 0:
            self.notes.append(
                "The residual is memory in use that no row explains: a process that NVML does not "
                "list, or kernels and libraries that came after the last reading. Start the trace "
                "before CUDA is used, so that the readings tell them apart."
            )
        else:
            self.notes.append(
                "The rows explain more memory than is in use: some was freed between the readings. "
                "Trace a step that frees none, or several steps."
            )


def _less(amount: int | None, other: int | None) -> int | None:
    return None if amount is None or other is None else amount - other


def _readings(trace: Trace, device: str) -> list[_Reading]:
    """The device's readings, in order."""
    pid, pairs = meta.of(trace).device_memory.pid, _of_device(trace, device)
    # If torch holds memory and our process is not listed, then the ids are another namespace's, or
    # there are none. Our process may be among them, so they do not identify the other processes.
    hidden = any(
        pid not in {process.pid for process in gpu.processes or ()} and reading.reserved.get(device)
        for reading, gpu in pairs
    )
    return [_one_reading(reading, gpu, device, pid, hidden) for reading, gpu in pairs]


def _one_reading(
    reading: meta.Reading, gpu: meta.Gpu, device: str, pid: int | None, hidden: bool
) -> _Reading:
    processes = gpu.processes or ()
    is_listed = gpu.processes is not None and not hidden
    figures = {process.pid: process.bytes for process in processes} if is_listed else None
    names = {process.pid: process.name for process in processes}
    own = figures.pop(pid, None) if figures and pid is not None else None
    torch = reading.reserved.get(device, 0)
    return _Reading(
        when=reading.when,
        used=gpu.used_as_cuda_says if gpu.used is None else gpu.used,
        driver_reserve=gpu.driver_reserve,
        by_cuda=gpu.used_as_cuda_says,
        torch=torch,
        own=own,
        others=figures,
        names=names,
        # CUDA may be initialised although this device is not in use yet.
        here=reading.cuda_initialized and (hidden or own is not None or torch > 0),
    )


def _of_device(trace: Trace, device: str) -> list[tuple[meta.Reading, meta.Gpu]]:
    """The readings that contain the device, and the device's part of each."""
    memory = meta.of(trace).device_memory
    uuid = memory.uuids.get(device, "")
    return [(each, each.gpus[uuid]) for each in memory.readings if uuid in each.gpus]


# ---------------------------------------------------------------- the process


def _host_ledger(trace: Trace, at: Literal["peak", "end"]) -> Ledger:
    rows = _tensors(trace, at, "cpu", 2)
    tensors = sum(row.bytes or 0 for row in rows)
    begin, end = _host(trace, "begin"), _host(trace, "end")
    alloc = allocations(trace)
    before = usage.on_device(trace, "cpu") & (alloc.start < 0)
    old = int(alloc.requested_bytes[before].sum())
    heap = _less(begin.get("anonymous"), old)
    parts = [
        Row("tensors of torch's CPU allocator", tensors, 1, "events", at),
        *rows,
        Row("the program's own heap", heap, 1, "system", "begin"),
        Row("programs and libraries, mapped files", end.get("file"), 1, "system", "end"),
        Row("shared memory", end.get("shared"), 1, "system", "end"),
    ]
    explained = sum(row.bytes or 0 for row in parts if row.level == 1)
    used, notes = end.get("resident"), []
    if at == "peak" or used is None or heap is None:
        notes.append(
            'Resident memory is read when a trace begins and ends; the ledger at "end" closes.'
            if used is not None and heap is not None
            else _why_no_resident(trace)
        )
        top = Row("resident memory, as far as known", explained, 0, "sum", at)
        return Ledger("cpu", at, (top, *parts), None, None, tuple(notes))
    residual = used - explained
    limit = min(int(used * _LIMIT_SHARE), _LIMIT_BYTES)
    if residual > limit:
        notes.append(
            "The residual was taken since the trace began and is not a live tensor: Python's own "
            "objects, libraries' buffers, threads, and freed memory that malloc keeps."
        )
    elif residual < -limit:
        notes.append(
            "The residual is negative: some tensors have pages that were never written, or lie in "
            "mapped files, or in memory that was the heap's when the trace began."
        )
    rows_out = (
        Row("resident memory", used, 0, "system", "end"),
        *parts,
        Row("residual", residual, 1, "difference", "end"),
    )
    return Ledger("cpu", at, rows_out, residual, limit, tuple(notes))


def _why_no_resident(trace: Trace) -> str:
    if meta.of(trace).imported:
        return "A memory snapshot does not contain the process's memory."
    return "The process's memory could not be read here: there is no /proc."


def _host(trace: Trace, when: str) -> dict[str, int]:
    readings = meta.of(trace).device_memory.readings
    return next((dict(each.host) for each in readings if each.when == when), {})
