"""How long products take: interleaved, paired, and repeated until it is known well enough.

What is compared runs in rounds. In each round every candidate runs twice, in an order drawn anew
and in the same one backwards, and ratios are taken within a round: a device that slows down slows
all of them, and what comes first comes last as well. One candidate may run under two names; how far
that ratio is from 1 is what a ratio is worth (the null).

On CUDA a sample is one replay of a graph of many calls, between two events. Before each, the device
waits in a kernel that does nothing: until the host has queued the next, so that gaps between
launches cannot count, and for as long as the sample takes, so that power does not hold the clock
down. Without these pauses a product's time is also of what ran before it. The host asks for the
clock meanwhile. On the CPU a sample is a loop of calls.
Nothing is thrown away: every sample is in the result.
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
from pytracer.gemm import device as devices, statistics
from pytracer.gemm.operands import Prepared, as_asked, bytes_of, prepare
from pytracer.gemm.shapes import Work, check

_HEAD_START_CYCLES = 500_000  # some 0.3 ms, in which the host queues the first samples of a round
_CYCLES_PER_SECOND = 2e9  # about, of any GPU: for pauses
# How many last caches the operands of each candidate are, the first for which there is room. Three
# are cold; more are for where in memory they lie, which makes one set faster than another.
_CACHES = (24, 8, 3)
_MOST_SETS = 4096  # of operands
_MOST_CALLS = 8192  # in a sample
_READ_EVERY_SECONDS = 0.05
_MEMORY_SHARE = 0.8  # of what is free that operands may take


@dataclass(frozen=True)
class Settings:
    """When a measurement is good enough, and when it has taken long enough."""

    noise: float = 0.002  # half the interval, as a share of the median
    seconds: float = 0.5  # for each candidate of a comparison, without allocating
    least_rounds: int = 6  # fewer have no interval
    most_rounds: int = 500
    sample_seconds: float = 0.001
    warm_seconds: float = 0.1


@dataclass(frozen=True)
class Pace:
    """When a GPU is quiet. One that has worked for a while is held down by its power."""

    pause: float = 1.0  # before each sample, as a share of it
    rest: float = 0.0  # seconds before each pass through all candidates


EVEN = Pace()
SUSTAINED = Pace(pause=0.0)


@dataclass(frozen=True)
class Timing:
    """One candidate: what it took, per call."""

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
        """At the median."""
        return self.work.flops / self.time.median / 1e12


@dataclass(frozen=True)
class Comparison:
    """Candidates that ran in the same rounds."""

    timings: tuple[Timing, ...]
    null: Timing | None = None  # the first candidate again, as another one
    gauges: tuple[dict[str, Any], ...] = ()
    stopped: str = ""  # "steady", "time" or "rounds"
    notes: tuple[str, ...] = field(default=())

    def ratio(self, which: int, to: int = 0) -> statistics.Interval:
        """How many times longer one candidate takes than another."""
        return statistics.ratio(self.timings[which].seconds, self.timings[to].seconds)

    @property
    def bias(self) -> statistics.Interval | None:
        """The same thing over itself: 1, if the measurement is fair."""
        if self.null is None:
            return None
        return statistics.ratio(self.null.seconds, self.timings[0].seconds)

    @property
    def doubt(self) -> float:
        """How much of a ratio could be the measurement's own doing, by the null."""
        bias = self.bias
        if bias is None:
            return 0.0
        return max(abs(bias.low - 1), abs(bias.high - 1))


class Measure(Protocol):
    """What times candidates: a Timer, or a stand-in in a test."""

    def __call__(
        self, works: Sequence[Work], *, null: bool = False, pace: Pace = EVEN
    ) -> Comparison:
        """Times these in the same rounds."""


class _Clock(Protocol):
    """How a device runs a sample."""

    def start(self) -> None: ...

    def ready(self, prepared: Prepared, sample_seconds: float) -> "_Ready": ...

    def once(self, ready: Sequence["_Ready"], pause: float) -> list[float]: ...

    def finish(self) -> list[dict[str, Any]]: ...


@dataclass
class _Ready:
    """A candidate as the clock runs it."""

    prepared: Prepared
    run: Callable[[], Any]
    calls: int
    seconds: float = 0.0  # about; what pauses are a share of


class Timer:
    """Times products on one device."""

    def __init__(self, device: torch.device, settings: Settings | None = None) -> None:
        """Nothing runs yet."""
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
        """Times these in the same rounds.

        Args:
            works: the candidates; ratios are to the first.
            null: run the first one twice, as two candidates.
            pace: when the device is quiet; evenly, unless it is to show what it can sustain.

        Raises:
            errors.UsageError: a product that cannot be.
            errors.PytracerError: one that does not fit in memory, is wrong, or is not supported.
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
            ready.clear()  # graphs and their operands, before the next candidates are allocated

    def _ready(self, prepared: Prepared) -> _Ready:
        try:
            with as_asked(prepared.work):
                return self._clock.ready(prepared, self._sample_seconds)
        except RuntimeError as error:  # out of memory is one
            first_line = str(error).partition("\n")[0]
            raise errors.PytracerError(
                f"{self.device} cannot time {prepared.work}: {first_line}"
            ) from error

    @property
    def _sample_seconds(self) -> float:
        # A CPU is interrupted more often: longer samples lose less to it.
        return self.settings.sample_seconds * (1 if self.device.type == "cuda" else 3)

    def _sets(self, candidates: Sequence[Work]) -> list[int]:
        """How many sets of operands each gets: enough to outgrow the cache, if there is room."""
        room = self.require_room(candidates)
        for caches in self.caches:
            cold = caches * self.facts.cache_bytes
            sets = [min(max(2, -(-cold // work.bytes)), _MOST_SETS) for work in candidates]
            if sum(map(bytes_of, candidates, sets)) <= room:
                return sets
        return [1] * len(candidates)

    def require_room(self, candidates: Sequence[Work]) -> int:
        """How many bytes may be used for these at once.

        Raises:
            errors.PytracerError: fewer than one set of operands of each takes.
        """
        room = int(devices.free_bytes(self.device) * _MEMORY_SHARE)
        largest = max(candidates, key=lambda work: work.bytes)
        scratch = max(work.scratch_bytes for work in candidates)  # none of them at the same time
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
        """Runs until rounds take the same time as those before them, or it has taken too long.

        The first comparison on a device warms it for longer: its clock and its heat settle.
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
    """Of two and two."""
    return tuple((a + b) / 2 for a, b in zip(samples[::2], samples[1::2], strict=True))


def _noise(samples: Sequence[Sequence[float]]) -> float:
    """The widest interval: of ratios to the first candidate, or of the only one."""
    seconds = [_means(one) for one in samples]
    if len(seconds) == 1:
        return statistics.median(seconds[0]).noise
    return max(statistics.ratio(one, seconds[0]).noise for one in seconds[1:])


class _Cpu:
    """Samples on the CPU: a loop of calls."""

    def start(self) -> None:
        """Nothing to begin."""

    def ready(self, prepared: Prepared, sample_seconds: float) -> _Ready:
        each = min(_elapsed(prepared.calls[0]) for _ in range(2))
        count = max(1, min(math.ceil(sample_seconds / each), _MOST_CALLS))
        turns = itertools.cycle(prepared.calls)  # goes on where the last sample ended

        def run() -> None:
            for call in itertools.islice(turns, count):
                call()

        return _Ready(prepared, run, count)

    def once(self, ready: Sequence[_Ready], pause: float) -> list[float]:
        del pause  # nothing holds a CPU down for milliseconds
        found = []
        for one in ready:
            with as_asked(one.prepared.work):
                found.append(_elapsed(one.run) / one.calls)
        return found

    def finish(self) -> list[dict[str, Any]]:
        return []  # nothing is left running, and there is nothing to read


def _elapsed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class _CudaClock:
    """Samples on a CUDA device: replays of graphs, between events."""

    def __init__(self, device: torch.device, gauges: devices.Gauges) -> None:
        self._device = device
        self._gauges = gauges
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._turns: dict[tuple[Work, int], int] = {}
        self._read_at = -math.inf
        self.readings: list[dict[str, Any]] = []

    def start(self) -> None:
        """New candidates: a pool whose graphs are all gone cannot be used again."""
        self._pool = torch.cuda.graph_pool_handle()

    def ready(self, prepared: Prepared, sample_seconds: float) -> _Ready:
        """Captures as many turns through all sets of operands as fill a sample.

        Whole turns, and of one product always as many: so each set, which is a place in memory,
        weighs the same, and what a replay costs by itself is the same share of a sample.
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

        torch.cuda.graph would collect garbage and empty the allocator's cache each time. Results
        are never looked at, so all graphs may have theirs in the same memory.
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
        """About how long a replay takes: not the first, with which it is sent to the device."""
        graph.replay()
        begin, end = _event(), _event()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return max(float(begin.elapsed_time(end)) / 1000, 1e-6)

    def once(self, ready: Sequence[_Ready], pause: float) -> list[float]:
        """One replay each, queued well before the device comes to it."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            torch.cuda._sleep(_HEAD_START_CYCLES)
            marks = []
            for one in ready:
                if pause:
                    torch.cuda._sleep(int(pause * one.seconds * _CYCLES_PER_SECOND))
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
        """Asks for the clock while the device works; not often, since asking takes a while."""
        now = time.perf_counter()
        if now - self._read_at > _READ_EVERY_SECONDS and (reading := self._gauges.read()):
            self.readings.append(reading)
            self._read_at = now

    def finish(self) -> list[dict[str, Any]]:
        """Everything queued has run, so operands may be freed. Returns what the gauges said."""
        torch.cuda.synchronize(self._device)
        readings, self.readings = self.readings, []
        return readings


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
