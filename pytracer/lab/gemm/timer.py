"""Times products: in interleaved rounds, in pairs, until the result is precise enough.

Candidates run in rounds. In each round every candidate runs twice: in a random order, and in the
same order backwards. Ratios are taken within a round. So a slow moment hits all candidates, and the
first candidate is also the last. One candidate may run under two names (the null). Its ratio to
itself shows how far a ratio can be wrong.

On CUDA a sample is one replay of a graph of many calls, between two events. Before each sample the
device runs a kernel that only waits, for two reasons. The host queues the next sample meanwhile, so
gaps between launches do not count. And the device rests as long as the sample takes, so the power
limit does not lower the clock. Without these pauses a product's time would depend on what ran
before. The host reads the clock meanwhile.

On the CPU a sample is a loop of calls. The result keeps every sample.
"""

import gc
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from pytracer import errors
from pytracer.basics import private_torch
from pytracer.lab.gemm import device as devices, statistics
from pytracer.lab.gemm.operands import Prepared, as_asked, bytes_of, prepare
from pytracer.lab.gemm.shapes import Work, check

_HEAD_START_CYCLES = 500_000  # some 0.3 ms, for the host to queue the first samples of a round
_CYCLES_PER_SECOND = 2e9  # of any GPU, roughly; converts pauses
# The operands of a candidate fill the last cache this many times; the first factor that has room is
# used. Three times is enough to be cold. More sets even out their places in memory, which make one
# set faster than another.
_CACHES = (24, 8, 3)
_MOST_SETS = 4096  # of operands
_MOST_CALLS = 8192  # in a sample
_READ_EVERY_SECONDS = 0.05
_MEMORY_SHARE = 0.8  # the share of free memory that operands may take


@dataclass(frozen=True)
class Settings:
    """When a measurement is precise enough, and when it has taken too long."""

    noise: float = 0.002  # half the interval, as a share of the median
    seconds: float = 0.5  # for each candidate of a comparison; allocating does not count
    least_rounds: int = 6  # fewer have no interval
    most_rounds: int = 500
    sample_seconds: float = 0.001
    warm_seconds: float = 0.1


@dataclass(frozen=True)
class Pace:
    """The pauses of a GPU. After a while of work its power limit lowers the clock."""

    pause: float = 1.0  # before each sample, as a share of it
    rest: float = 0.0  # seconds before each pass through all candidates


EVEN = Pace()
SUSTAINED = Pace(pause=0.0)


@dataclass(frozen=True)
class Timing:
    """The seconds of one candidate, per call."""

    work: Work
    samples: tuple[float, ...]  # seconds, two of each round
    calls: int = 1  # in each sample
    sets: int = 1  # of operands that calls took turns with
    cold: bool = True  # whether the sets are more than the cache holds
    error: float = 0.0  # of the result, against float64

    @property
    def seconds(self) -> tuple[float, ...]:
        """One number per round: the mean of its two samples."""
        return _means(self.samples)

    @property
    def time(self) -> statistics.Interval:
        """Seconds per call."""
        return statistics.median(self.seconds)

    @property
    def tflops(self) -> float:
        """The rate at the median."""
        return self.work.flops / self.time.median / 1e12


@dataclass(frozen=True)
class Comparison:
    """Candidates that ran in the same rounds."""

    timings: tuple[Timing, ...]
    null: Timing | None = None  # the first candidate again, under another name
    gauges: tuple[dict[str, Any], ...] = ()
    stopped: str = ""  # "steady", "time" or "rounds"
    notes: tuple[str, ...] = field(default=())

    def ratio(self, which: int, to: int = 0) -> statistics.Interval:
        """The time of one candidate divided by that of another."""
        return statistics.ratio(self.timings[which].seconds, self.timings[to].seconds)

    @property
    def bias(self) -> statistics.Interval | None:
        """The null divided by the first candidate: 1 if the measurement is fair."""
        if self.null is None:
            return None
        return statistics.ratio(self.null.seconds, self.timings[0].seconds)

    @property
    def doubt(self) -> float:
        """The part of a ratio that may come from the measurement itself, from the null."""
        bias = self.bias
        if bias is None:
            return 0.0
        return max(abs(bias.low - 1), abs(bias.high - 1))


class Measure(Protocol):
    """Times candidates. A Timer does, or a test's stand-in."""

    def __call__(
        self, works: Sequence[Work], *, null: bool = False, pace: Pace = EVEN
    ) -> Comparison:
        """Times these candidates in the same rounds."""


class _Clock(Protocol):
    """Runs the samples of a device."""

    def start(self) -> None: ...

    def ready(self, prepared: Prepared, sample_seconds: float) -> "_Ready": ...

    def once(self, ready: Sequence["_Ready"], pause: float) -> list[float]: ...

    def finish(self) -> list[dict[str, Any]]: ...


@dataclass
class _Ready:
    """A candidate that the clock can run."""

    prepared: Prepared
    run: Callable[[], Any]
    calls: int
    seconds: float = 0.0  # of a sample, roughly; pauses are a share of it


class Timer:
    """Times products on one device."""

    def __init__(self, device: torch.device, settings: Settings | None = None) -> None:
        """Reads the facts of the device. Runs nothing yet."""
        self.device = device
        self.facts = devices.facts(device)
        self.settings = settings or Settings()
        self.gauges = devices.Gauges(device)
        self._clock: _Clock = _CudaClock(device, self.gauges) if device.type == "cuda" else _Cpu()
        self.caches = _CACHES if device.type == "cuda" else _CACHES[-1:]
        self._random = random.Random(0)
        self._warm = False

    def __call__(
        self, works: Sequence[Work], *, null: bool = False, pace: Pace = EVEN
    ) -> Comparison:
        """Times these candidates in the same rounds.

        Args:
            works: the candidates; ratios are to the first.
            null: run the first candidate twice, under two names.
            pace: the pauses of the device.

        Raises:
            errors.UsageError: a product has impossible sizes.
            errors.PytracerError: memory is too small, a result is wrong, or the device cannot run it.
        """
        for work in works:
            check(work)
        devices.require_dtypes(self.facts, sorted({work.dtype for work in works}))
        candidates = [*works, works[0]] if null else list(works)
        sets = self._sets(candidates)
        ready: list[_Ready] = []
        self._clock.start()
        try:
            for work, count in zip(candidates, sets, strict=True):
                ready.append(self._ready(prepare(work, self.device, count)))
            return self._run(ready, null=null, pace=pace)
        finally:
            ready.clear()  # frees graphs and operands before the next candidates are allocated

    def _ready(self, prepared: Prepared) -> _Ready:
        try:
            with as_asked(prepared.work):
                return self._clock.ready(prepared, self._sample_seconds)
        except RuntimeError as error:  # running out of memory too
            first_line = str(error).partition("\n")[0]
            raise errors.PytracerError(
                f"{self.device} cannot time {prepared.work}: {first_line}"
            ) from error

    @property
    def _sample_seconds(self) -> float:
        # A CPU is interrupted more often, and longer samples lose less by it.
        return self.settings.sample_seconds * (1 if self.device.type == "cuda" else 3)

    def _sets(self, candidates: Sequence[Work]) -> list[int]:
        """The number of sets of operands for each: enough to outgrow the cache, if there is room."""
        room = self.require_room(candidates)
        for caches in self.caches:
            cold = caches * self.facts.cache_bytes
            sets = [min(max(2, -(-cold // work.bytes)), _MOST_SETS) for work in candidates]
            if sum(map(bytes_of, candidates, sets)) <= room:
                return sets
        return [1] * len(candidates)

    def require_room(self, candidates: Sequence[Work]) -> int:
        """The bytes that the operands of these may take together.

        Raises:
            errors.PytracerError: one set of operands of each takes more.
        """
        room = int(devices.free_bytes(self.device) * _MEMORY_SHARE)
        largest = max(candidates, key=lambda work: work.bytes)
        scratch = max(work.scratch_bytes for work in candidates)  # one candidate runs at a time
        least = sum(bytes_of(work, 1) for work in candidates) + scratch
        if least > room:
            gc.collect()
            room = int(devices.free_bytes(self.device) * _MEMORY_SHARE)
        if least > room:
            raise errors.PytracerError(
                f"{largest} takes {bytes_of(largest, 1) + largest.scratch_bytes:,} bytes, all "
                f"{len(candidates)} candidates {least:,}, and {self.device} has room for {room:,}"
            )
        return room - scratch

    def _run(self, ready: list[_Ready], *, null: bool, pace: Pace) -> Comparison:
        settings = self.settings
        most_seconds = settings.seconds * len(ready) + 2 * pace.rest * settings.least_rounds
        if pace.rest:
            self._clock.once(ready, pace.pause)
        else:
            self._warm_up(ready, pace)
        samples: list[list[float]] = [[] for _ in ready]
        order = list(range(len(ready)))
        began = time.perf_counter()
        while True:
            self._random.shuffle(order)
            for one_way in (order, order[::-1]):
                time.sleep(pace.rest)
                values = self._clock.once([ready[i] for i in one_way], pace.pause)
                for which, value in zip(one_way, values, strict=True):
                    samples[which].append(value)
            rounds = len(samples[0]) // 2
            if rounds >= settings.least_rounds and _noise(samples) <= settings.noise:
                stopped = "steady"
                break
            if rounds >= settings.most_rounds:
                stopped = "rounds"
                break
            if time.perf_counter() - began > most_seconds and rounds >= 2:
                stopped = "time"
                break
        gauges = self._clock.finish()
        timings = [
            Timing(
                one.prepared.work,
                tuple(taken),
                one.calls,
                len(one.prepared.calls),
                one.prepared.rotated_bytes >= 2 * self.facts.cache_bytes,
                one.prepared.error,
            )
            for one, taken in zip(ready, samples, strict=True)
        ]
        notes = (self.gauges.problem,) if self.gauges.problem else ()
        last = timings.pop() if null else None
        return Comparison(tuple(timings), last, tuple(gauges), stopped, notes)

    def _warm_up(self, ready: list[_Ready], pace: Pace) -> None:
        """Runs until the time of a round is stable, or until it has taken too long.

        The first comparison warms the device for longer, until its clock and its heat settle.
        """
        least = min(self.settings.warm_seconds, self.settings.seconds * len(ready) / 4)
        least *= 1 if self._warm else 5
        self._warm = True
        began = time.perf_counter()
        totals: list[float] = []
        while (spent := time.perf_counter() - began) < 3 * least:
            totals.append(math.fsum(self._clock.once(ready, pace.pause)))
            if len(totals) >= 4 and spent >= least:
                before = sorted(totals[-4:-1])[1]
                if abs(totals[-1] / before - 1) < 0.01:
                    return


def _means(samples: Sequence[float]) -> tuple[float, ...]:
    """The mean of each pair of samples."""
    return tuple((a + b) / 2 for a, b in zip(samples[::2], samples[1::2], strict=True))


def _noise(samples: Sequence[Sequence[float]]) -> float:
    """The widest interval of the ratios to the first candidate, or of the only candidate's time."""
    seconds = [_means(one) for one in samples]
    if len(seconds) == 1:
        return statistics.median(seconds[0]).noise
    return max(statistics.ratio(one, seconds[0]).noise for one in seconds[1:])


class _Cpu:
    """Runs samples on the CPU. A sample is a loop of calls."""

    def start(self) -> None:
        """Does nothing."""

    def ready(self, prepared: Prepared, sample_seconds: float) -> _Ready:
        each = min(_elapsed(prepared.calls[0]) for _ in range(2))
        count = max(1, min(math.ceil(sample_seconds / each), _MOST_CALLS))
        turns = itertools.cycle(prepared.calls)  # continues where the last sample ended

        def run() -> None:
            for call in itertools.islice(turns, count):
                call()

        return _Ready(prepared, run, count)

    def once(self, ready: Sequence[_Ready], pause: float) -> list[float]:
        del pause  # a CPU needs no pauses
        seconds = []
        for one in ready:
            with as_asked(one.prepared.work):
                seconds.append(_elapsed(one.run) / one.calls)
        return seconds

    def finish(self) -> list[dict[str, Any]]:
        return []  # a CPU has no gauges


def _elapsed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class _CudaClock:
    """Runs samples on a CUDA device. A sample is a replay of a graph, between two events."""

    def __init__(self, device: torch.device, gauges: devices.Gauges) -> None:
        self._device = device
        self._gauges = gauges
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._turns: dict[tuple[Work, int], int] = {}
        self._read_at = -math.inf
        self.readings: list[dict[str, Any]] = []

    def start(self) -> None:
        """Makes a new pool. A pool cannot be used again after its graphs are gone."""
        self._pool = torch.cuda.graph_pool_handle()

    def ready(self, prepared: Prepared, sample_seconds: float) -> _Ready:
        """Captures enough turns through all sets of operands to fill a sample.

        A sample has whole turns, so each set, which is a place in memory, has the same weight. A
        product always has the same number of turns, so a replay's own cost is the same share of it.
        """
        with torch.cuda.device(self._device):
            self._stream = self._stream or torch.cuda.Stream(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for call in prepared.calls[:3]:
                    call()
                self._stream.synchronize()
                graph = self._capture(prepared.calls)
                each = self._elapsed(graph)
                fill = min(math.ceil(sample_seconds / each), _MOST_CALLS // len(prepared.calls))
                turns = self._turns.setdefault((prepared.work, len(prepared.calls)), max(1, fill))
                if turns > 1:
                    graph = self._capture(prepared.calls * turns)
        return _Ready(prepared, graph.replay, len(prepared.calls) * turns, each * turns)

    def _capture(self, calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
        """A graph of these calls.

        torch.cuda.graph would collect garbage and empty the allocator's cache each time. Nobody reads
        the results, so all graphs may write theirs to the same memory.
        """
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        return graph

    def _elapsed(self, graph: torch.cuda.CUDAGraph) -> float:
        """The rough time of a replay. The first one does not count: it uploads the graph."""
        graph.replay()
        begin, end = _event(), _event()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return max(float(begin.elapsed_time(end)) / 1000, 1e-6)

    def once(self, ready: Sequence[_Ready], pause: float) -> list[float]:
        """Replays each once. Each replay is queued well before the device reaches it."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            private_torch.wait_on_gpu(_HEAD_START_CYCLES)
            marks = []
            for one in ready:
                if pause:
                    private_torch.wait_on_gpu(int(pause * one.seconds * _CYCLES_PER_SECOND))
                begin, end = _event(), _event()
                begin.record()
                one.run()
                end.record()
                marks.append((begin, end))
            self._read()
            marks[-1][1].synchronize()
        return [
            begin.elapsed_time(end) / 1000 / one.calls
            for one, (begin, end) in zip(ready, marks, strict=True)
        ]

    def _read(self) -> None:
        """Reads the clock while the device works, but not often, because reading takes a while."""
        now = time.perf_counter()
        if now - self._read_at > _READ_EVERY_SECONDS and (reading := self._gauges.read()):
            self.readings.append(reading)
            self._read_at = now

    def finish(self) -> list[dict[str, Any]]:
        """Waits until all samples have run, so operands may be freed. Returns the readings."""
        torch.cuda.synchronize(self._device)
        readings, self.readings = self.readings, []
        return readings


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
