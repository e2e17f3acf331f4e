"""Measures what tracing costs: the traced step's time over the plain step's, beside peers.

    python benchmarks/overhead.py                        # the cases this machine can run
    python benchmarks/overhead.py --cases tiny-cpu --minutes 3
    python benchmarks/overhead.py --cases ddp            # two processes on two GPUs
    python benchmarks/overhead.py --modes category default --out DIR  # a JSON file per case
    sh benchmarks/on_gpu.sh OUT overhead                 # all cases of one GPU: 6 minutes and a build
    sh benchmarks/on_gpu.sh OUT host_bound               # those that wait for the host: the same
    sh benchmarks/on_gpu.sh OUT ddp                      # on two GPUs: 4 minutes and a build

How it measures:

* Everything runs in one process, in rounds. A round runs a block of steps in each mode that has a
  limit, and every third or fourth round in the others, in an order drawn anew, with a plain block
  before and after each. A block's ratio is its time over the mean of its two neighbours, which are
  a fraction of a second away: a machine that slows down for a while slows all three. It prints the
  median over rounds with its 95 % confidence interval. "steps" is the median of all the mode's
  steps over that of the plain steps of the same rounds: a few slow blocks do not move it. It is
  left out where the GPU is the limit, because the host does not time a step there.
* The timed region is steps only, between two synchronisations of the device. A mode is entered
  before it and runs warm-up steps first; entering, leaving and the first step are reported in ms.
* "plain again" is the plain step once more: the distance of its ratio from 1 is the noise.
* Peers that leave something behind (the profiler keeps CUPTI attached) have rounds of their own,
  after all others. The report also has the cost that stays after tracing and after the peers: the
  plain step before anything was ever traced, after our rounds, and after theirs.
* A mode that fails is reported with its error, and the rest goes on. A mode that uses more than
  its share of the time sits out rounds, once it has three samples.
* A case of several ranks starts its own processes. They take the same blocks at the same time,
  rank 0 decides which, and a block's time is that of the slowest rank.
"""

import argparse
import gc
import itertools
import os
import platform
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # from a checkout, wherever it is run

import models  # noqa: E402

import pytracer  # noqa: E402
from benchmarks import kept, slug  # noqa: E402
from pytracer.data._native import C  # noqa: E402
from pytracer.lab.gemm import statistics as intervals  # noqa: E402

LEAST_ROUNDS = 3
TIMES = ("step_ms", "step_cpu_ms")  # of a block, by the clock and by the processor
LEFT_BEHIND_BLOCKS = 5  # plain blocks before the first trace, and after each group of modes
EVENTS_FOR_MEMORY = 150_000  # enough to fill the logs mostly, which grow by chunks
LONGEST_WAIT = timedelta(minutes=2)  # of a rank for the others: then one of them has failed


@dataclass(frozen=True)
class Case:
    """A workload and how to measure it."""

    name: str
    build: Callable[[], models.Workload]
    device: str
    steps: int  # timed steps in a block
    limits: dict[str, float]  # the ratios that must hold
    host_bound: bool = True  # if not, the host does not time a step
    ranks: int = 1  # processes, each with a device of its own


@dataclass(frozen=True)
class Mode:
    """A way to run the step. `start` returns the function that ends it."""

    name: str
    start: Callable[[models.Workload], Callable[[], None]]
    after_step: Callable[[], None] | None = None
    peer: bool = False
    steps: float = 1.0  # share of the case's steps: less for modes that are many times slower
    every: int = 1  # runs in one of so many rounds: modes with a limit get the most
    cuda_only: bool = False
    leaves_something: bool = False


@dataclass
class Samples:
    """The measurements of one mode, a row per block."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    spent_s: float = 0.0


# ---------------------------------------------------------------------------- modes


def ours(**options: Any) -> Callable[[models.Workload], Callable[[], None]]:
    """Returns the mode that traces at one level. With path=True it also streams to a file."""

    def start(workload: models.Workload) -> Callable[[], None]:
        chosen = dict(options)
        folder = ""
        if chosen.get("path"):
            folder = tempfile.mkdtemp(prefix="overhead-")
            chosen["path"] = Path(folder) / "run.pytrace"
        tracing = pytracer.trace(workload.model, workload.optimizer, table=False, **chosen)
        tracing.__enter__()

        def stop() -> None:
            tracing.__exit__(None, None, None)
            if folder:
                shutil.rmtree(folder)

        return stop

    return start


def nothing(_: models.Workload) -> Callable[[], None]:
    """The mode that runs the plain step."""
    return lambda: None


def hearing(_: models.Workload) -> Callable[[], None]:
    """RecordFunction with an empty callback for every operator: torch's own price."""
    C.listen_to_operators(True)
    return lambda: C.listen_to_operators(False)


def memory_history(stacks: str) -> Callable[[models.Workload], Callable[[], None]]:
    """torch.cuda's own recording."""

    def start(_: models.Workload) -> Callable[[], None]:
        torch.cuda.memory._record_memory_history("all", stacks=stacks)
        return lambda: torch.cuda.memory._record_memory_history(None)

    return start


def profiler(**options: Any) -> Callable[[models.Workload], Callable[[], None]]:
    """torch.profiler with memory, stopped as a context manager stops it, without an export."""

    def start(_: models.Workload) -> Callable[[], None]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(
            activities=activities, profile_memory=True, acc_events=True, **options
        )
        profile.start()
        return profile.stop

    return start


class MemTracker:
    """torch.distributed's tracker. It refuses a second iteration unless its table is emptied."""

    def __init__(self) -> None:
        self.tracker: Any = None

    def start(self, workload: models.Workload) -> Callable[[], None]:
        from torch.distributed._tools.mem_tracker import MemTracker

        self.tracker = MemTracker()
        self.tracker.track_external(workload.model, workload.optimizer)
        self.tracker.__enter__()

        def stop() -> None:
            tracker, self.tracker = self.tracker, None
            tracker.__exit__(None, None, None)

        return stop

    def after_step(self) -> None:
        self.tracker.reset_mod_stats()


MEM_TRACKER = MemTracker()
PLAIN = Mode("plain", nothing)
MODES: tuple[Mode, ...] = (
    PLAIN,
    Mode("plain again", nothing),
    Mode("operators heard", hearing, every=3),
    Mode("category", ours(detail="category")),
    Mode("default", ours()),
    Mode("stacks", ours(stacks=True)),
    Mode("hooks", ours(saved_tensors="hooks"), every=3),
    Mode("everything", ours(stacks=True, saved_tensors="hooks", path=True), every=3),
    *(
        Mode(
            f"memory history, {stacks} stacks",
            memory_history(stacks),
            peer=True,
            every=4,
            cuda_only=True,
        )
        for stacks in ("python", "all")
    ),
    Mode("profiler, memory", profiler(), peer=True, steps=0.5, leaves_something=True),
    Mode(
        "profiler, memory + shapes + stack",
        profiler(record_shapes=True, with_stack=True),
        peer=True,
        steps=0.5,
        leaves_something=True,
    ),
    Mode(
        "MemTracker",
        MEM_TRACKER.start,
        MEM_TRACKER.after_step,
        peer=True,
        steps=0.1,
        leaves_something=True,
    ),
)

HOST_BOUND = {"category": 1.02, "default": 1.06, "stacks": 1.08}
CASES = (
    Case(
        "gpt2-gpu-bound",
        lambda: models.gpt2("cuda", batch=16, length=1024),
        "cuda",
        steps=10,
        limits={"everything": 1.005},
        host_bound=False,
    ),
    Case(
        "gpt2-host-bound",
        lambda: models.gpt2("cuda", batch=1, length=64),
        "cuda",
        steps=12,
        limits=HOST_BOUND,
    ),
    Case(
        "compiled-gpt2",
        models.compiled_gpt2,
        "cuda",
        steps=20,
        limits=HOST_BOUND,
    ),
    Case("bert-large", models.bert_large, "cuda", steps=5, limits=HOST_BOUND),
    Case("resnet50", models.resnet50, "cuda", steps=12, limits=HOST_BOUND),
    Case("generate", models.llama_generate, "cuda", steps=2, limits=HOST_BOUND),
    Case(
        "reinforcement",
        models.actor_and_critic,
        "cuda",
        steps=30,
        limits={"category": 1.08, "default": 1.12},
    ),
    Case("ddp", models.ddp, "cuda", steps=15, limits=HOST_BOUND, ranks=2),
    Case("tiny-cpu", models.tiny, "cpu", steps=20, limits={"default": 1.15}),
    Case("ddp-cpu", lambda: models.ddp("cpu"), "cpu", steps=10, limits={}, ranks=2),
)


# ---------------------------------------------------------------------------- several ranks


def greatest(value: float) -> float:
    """Returns the greatest of all ranks' values, once every rank has come here."""
    if not distributed.is_initialized():
        return value
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    held = torch.tensor(value, dtype=torch.float64, device=device)
    distributed.all_reduce(held, distributed.ReduceOp.MAX)
    return float(held.item())


def decided(yes: bool) -> bool:
    """Rank 0 decides: ranks that take different steps would wait for each other forever."""
    return bool(greatest(yes if is_first_rank() else False))


def is_first_rank() -> bool:
    return not distributed.is_initialized() or distributed.get_rank() == 0


def run_rank(rank: int, store: str, case: str, minutes: float, options: argparse.Namespace) -> None:
    """The process of one rank."""
    (chosen,) = (each for each in CASES if each.name == case)
    on_gpu = chosen.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=distributed.FileStore(store, chosen.ranks),
        rank=rank,
        world_size=chosen.ranks,
        timeout=LONGEST_WAIT,
    )
    try:
        measure(chosen, minutes, options)
    finally:
        distributed.destroy_process_group()


def run_ranks(case: Case, minutes: float, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        given = (f"{folder}/store", case.name, minutes, options)
        multiprocessing.spawn(run_rank, given, nprocs=case.ranks)


# ---------------------------------------------------------------------------- measuring


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed_ms(device: str, run: Callable[[], Any]) -> float:
    synchronize(device)
    before = time.perf_counter()
    run()
    synchronize(device)
    return (time.perf_counter() - before) * 1e3


def run_block(case: Case, workload: models.Workload, mode: Mode) -> dict[str, Any]:
    """Runs one block of steps in one mode: enters it, warms up, times it and leaves it."""
    steps = max(1, round(case.steps * mode.steps))
    after_step = mode.after_step or (lambda: None)
    stop: Callable[[], None] = lambda: None  # noqa: E731 - replaced by what start returns

    def start() -> None:
        nonlocal stop
        stop = mode.start(workload)

    def one() -> None:
        workload.step()
        after_step()

    gc.collect()
    start_ms = timed_ms(case.device, start)
    try:
        # The first step learns names and lines. The measured cost is that of later steps.
        first_ms = timed_ms(case.device, one)
        for _ in range(2 if mode.steps == 1 else 1):
            one()
        events = C.status()["events"]
        synchronize(case.device)
        greatest(0.0)  # all ranks begin together
        cpu_before, before = time.process_time(), time.perf_counter()
        ends = [before]
        for _ in range(steps):
            one()
            ends.append(time.perf_counter())
        synchronize(case.device)
        wall, cpu = time.perf_counter() - before, time.process_time() - cpu_before
        events = C.status()["events"] - events
    finally:
        stop_ms = timed_ms(case.device, stop)
    return {
        "steps": steps,
        "step_ms": greatest(wall) * 1e3 / steps,
        "steps_ms": [round((end - begin) * 1e3, 3) for begin, end in itertools.pairwise(ends)],
        "step_cpu_ms": cpu * 1e3 / steps,
        "start_ms": start_ms,
        "first_step_ms": first_ms,
        "stop_ms": stop_ms,
        "events_per_step": events / steps,
    }


def run_rounds(
    case: Case,
    workload: models.Workload,
    modes: list[Mode],
    seconds: float,
    progress: Callable[[str], None],
) -> dict[str, Samples]:
    """Runs rounds of blocks until the time is up."""
    samples = {mode.name: Samples() for mode in modes}
    # Modes with a limit in this case get the most rounds.
    every = {mode.name: 1 if mode.name in case.limits else mode.every for mode in modes}
    deadline = time.monotonic() + seconds
    shuffled = random.Random(0)
    round_number = 0
    # Another round would overrun by more than the time left.
    while decided(
        round_number < LEAST_ROUNDS or time.monotonic() < deadline - 0.5 * _round_s(samples)
    ):
        order = [mode for mode in modes if mode is not PLAIN]
        shuffled.shuffle(order)
        plain = _plain_block(case, workload, samples, round_number)
        for mode in order:
            own = samples[mode.name]
            if own.error or round_number % every[mode.name]:
                continue
            if decided(_had_its_share(own, samples)):
                continue
            before = time.monotonic()
            try:
                row = run_block(case, workload, mode)
            except Exception as error:
                own.error = f"{type(error).__name__}: {error}".splitlines()[0]
                progress(f"{mode.name} failed: {own.error}")
                continue
            own.spent_s += time.monotonic() - before
            earlier, plain = plain, _plain_block(case, workload, samples, round_number)
            beside = {f"plain_{key}": (earlier[key] + plain[key]) / 2 for key in TIMES}
            own.rows.append({"round": round_number, **row, **beside})
        round_number += 1
        progress(f"round {round_number}")
    return samples


def _plain_block(
    case: Case, workload: models.Workload, samples: dict[str, Samples], round_number: int
) -> dict[str, Any]:
    own = samples[PLAIN.name]
    before = time.monotonic()
    row = run_block(case, workload, PLAIN)
    own.spent_s += time.monotonic() - before
    own.rows.append({"round": round_number, **row, **{f"plain_{key}": row[key] for key in TIMES}})
    return row


def _had_its_share(own: Samples, samples: dict[str, Samples]) -> bool:
    others = [other.spent_s for other in samples.values()]
    fair = 2 * sum(others) / len(others)
    return len(own.rows) >= LEAST_ROUNDS and own.spent_s > fair


def _round_s(samples: dict[str, Samples]) -> float:
    return sum(own.spent_s / max(1, len(own.rows)) for own in samples.values())


def measure_memory(case: Case, workload: models.Workload, **options: Any) -> dict[str, float]:
    """Returns host bytes per event: in the logs while recording, and in the trace's columns."""
    workload.step()
    with pytracer.trace(workload.model, workload.optimizer, table=False, **options) as traced:
        steps = 0
        deadline = time.monotonic() + 30
        while decided(C.status()["events"] < EVENTS_FOR_MEMORY and time.monotonic() < deadline):
            workload.step()
            steps += 1
        synchronize(case.device)
        status = C.status()
    data = traced.data
    rows = (data.events, data.scopes, data.scope_ends, data.stacks, data.labels)
    columns = sum(column.nbytes for table in rows for column in table)
    events = len(data.events.ticks)
    return {
        "steps": steps,
        "events": events,
        "events_per_step": events / max(1, steps),
        "scopes": len(data.scopes.ticks),
        "log_bytes_per_event": status["host_bytes"] / max(1, status["events"]),
        "column_bytes_per_event": columns / max(1, events),
        "lost": sum(data.losses.values()),
    }


# ---------------------------------------------------------------------------- reporting


def spread(values: list[float]) -> dict[str, float]:
    """Returns the median, its 95 % confidence interval, and of how many values it is."""
    return {**vars(intervals.median(values)), "samples": len(values)}


def summarise(case: Case, samples: dict[str, Samples], modes: list[Mode]) -> dict[str, Any]:
    """Returns, per mode, the ratio to the plain blocks beside it, and the costs around it."""
    summary: dict[str, Any] = {}
    for mode in modes:
        own = samples[mode.name]
        entry: dict[str, Any] = {"peer": mode.peer, "error": own.error}
        if own.rows:
            for figure, of in zip(("ratio", "cpu_ratio"), TIMES, strict=True):
                entry[figure] = spread([row[of] / row[f"plain_{of}"] for row in own.rows])
            for figure in ("step_ms", "start_ms", "first_step_ms", "stop_ms", "events_per_step"):
                entry[figure] = statistics.median(row[figure] for row in own.rows)
            if case.host_bound:
                rounds = {row["round"] for row in own.rows}  # others met another machine
                entry["steps_ratio"] = median_step(own) / median_step(samples[PLAIN.name], rounds)
        summary[mode.name] = entry
    return summary


def median_step(samples: Samples, rounds: set[int] | None = None) -> float:
    rows = [row for row in samples.rows if rounds is None or row["round"] in rounds]
    return statistics.median(taken for row in rows for taken in row["steps_ms"])


def graphs_compiled() -> int:
    """Returns how many graphs torch.compile has made. More of them under a trace are recompiles."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"].get("unique_graphs", 0)) if dynamo is not None else 0


def print_summary(case: Case, result: dict[str, Any]) -> None:
    print(f"\n{case.name}: {result['description']}")
    print(
        f"{'':36}{'ratio':>7} {'is within':>13} {'n':>3} {'cpu':>6}"
        f" {'steps':>6} {'step':>9} {'start':>8} {'stop':>9}"
    )
    for name, entry in result["modes"].items():
        if "ratio" not in entry:
            print(f"  {name:34} {entry['error'] or 'not run'}")
            continue
        ratio = entry["ratio"]
        limit = case.limits.get(name)
        verdict = "" if limit is None else f"  (at most {limit})"
        print(
            f"  {name:34}{ratio['median']:7.3f} {ratio['low']:6.3f}-{ratio['high']:6.3f}"
            f" {ratio['samples']:3}"
            f" {entry['cpu_ratio']['median']:6.3f} {entry.get('steps_ratio', 0):6.3f}"
            f" {entry['step_ms']:6.2f} ms"
            f" {entry['start_ms']:5.1f} ms {entry['stop_ms']:6.1f} ms{verdict}"
            + (f"  then failed: {entry['error']}" if entry["error"] else "")
        )
    left = result["plain_step_ms"]
    print(
        f"  plain step: {left['before']:.3f} ms before the first trace, {left['after_ours']:.3f} "
        f"after our rounds"
        + (f", {left['after_peers']:.3f} after theirs" if left["after_peers"] else "")
    )
    graphs = result["graphs_compiled"]
    if graphs["before"]:
        print(f"  graphs compiled: {graphs['before']} before, {graphs['after_ours']} after ours")
    for level, memory in result["memory"].items():
        if "error" in memory:
            print(f"  memory, {level}: {memory['error']}")
            continue
        print(
            f"  memory, {level}: {memory['events_per_step']:.0f} events a step, "
            f"{memory['log_bytes_per_event']:.1f} bytes an event while recording, "
            f"{memory['column_bytes_per_event']:.1f} in the trace ({memory['events']:.0f} events)"
        )


def machine() -> dict[str, Any]:
    """Describes the machine and the versions of the measurement."""
    cuda = torch.cuda.is_available()
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else "",
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "driver": _driver() if cuda else "",
        "python": platform.python_version(),
        "system": platform.system(),
        "pytracer": pytracer.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    return facts


def _cpu_name() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def _driver() -> str:
    try:
        found = re.search(
            r"Kernel Module.*?\s(\d+\.[\d.]+)", Path("/proc/driver/nvidia/version").read_text()
        )
    except OSError:
        found = None
    return found[1] if found else ""


# ---------------------------------------------------------------------------- the whole


def chosen_modes(case: Case, options: argparse.Namespace) -> list[Mode]:
    return [
        mode
        for mode in MODES
        if (case.device == "cuda" or not mode.cuda_only)
        and not (options.no_peers and mode.peer)
        and (mode is PLAIN or not options.modes or mode.name in options.modes)
    ]


def run_case(
    case: Case,
    minutes: float,
    options: argparse.Namespace,
    keep: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """Runs a case. `keep` gets the results so far after each part: a time limit may end it."""
    torch.set_num_threads(options.threads)
    workload = case.build()
    here = chosen_modes(case, options)
    ours_and_tidy = [mode for mode in here if not mode.leaves_something]
    untidy = [mode for mode in here if mode.leaves_something]
    untidy = [PLAIN, *untidy] if untidy else []

    def progress(what: str) -> None:
        if is_first_rank():
            print(f"{case.name}: {what}", file=sys.stderr, flush=True)

    def plain_ms() -> float:
        blocks = [run_block(case, workload, PLAIN)["step_ms"] for _ in range(LEFT_BEHIND_BLOCKS)]
        return statistics.median(blocks)

    for _ in range(10):
        workload.step()
    plain: dict[str, float | None] = {"before": plain_ms(), "after_ours": None, "after_peers": None}
    result: dict[str, Any] = {
        "case": case.name,
        "description": workload.description,
        "threads": options.threads,
        "ranks": case.ranks,
        "limits": case.limits,
        "machine": machine(),
        "plain_step_ms": plain,
        "graphs_compiled": {"before": graphs_compiled()},
    }
    seconds = minutes * 60
    share = 0.7 if untidy else 0.9
    samples = run_rounds(case, workload, ours_and_tidy, share * seconds, progress)
    plain["after_ours"] = plain_ms()
    result["graphs_compiled"]["after_ours"] = graphs_compiled()
    result["modes"] = modes = summarise(case, samples, ours_and_tidy)
    result["memory"] = memory = {}
    keep(result)
    for level, options in (
        ("category", {"detail": "category"}),
        ("default", {}),
        ("stacks and hooks", {"stacks": True, "saved_tensors": "hooks"}),
    ):
        progress(f"memory, {level}")
        try:
            memory[level] = measure_memory(case, workload, **options)
        except Exception as error:
            memory[level] = {"error": f"{type(error).__name__}: {error}"}
    keep(result)
    if untidy:
        samples = run_rounds(case, workload, untidy, 0.2 * seconds, progress)
        plain["after_peers"] = plain_ms()
        others = summarise(case, samples, untidy)
        others["plain, in the peers' rounds"] = others.pop(PLAIN.name)
        modes |= others
    return result


def measure(case: Case, minutes: float, options: argparse.Namespace) -> None:
    """Runs a case, prints it and writes its file."""

    def keep(result: dict[str, Any]) -> Path:
        device = result["machine"]["device"] if case.device == "cuda" else "cpu"
        name = f"overhead-{case.name.removesuffix('-cpu')}-{slug(device)}.json"
        target: Path = options.out / name
        if is_first_rank():
            kept.write(target, result)
        return target

    result = run_case(case, minutes, options, keep)
    written = keep(result)
    if is_first_rank():
        print_summary(case, result)
        print(f"  written: {written.name}", flush=True)


def can_run(case: Case) -> bool:
    return case.device == "cpu" or torch.cuda.device_count() >= case.ranks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--cases", default="", help="comma-separated; default: all that can run")
    parser.add_argument(
        "--modes",
        nargs="+",
        metavar="MODE",
        choices=[mode.name for mode in MODES],
        help="default: all of them",
    )
    parser.add_argument("--minutes", type=float, default=6.0, help="for all cases together")
    parser.add_argument("--no-peers", action="store_true", help="ours and the plain step only")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="torch's CPU threads; one, since a step this small gains nothing from more and a "
        "busy machine makes them wait for each other",
    )
    options = parser.parse_args()
    # Deprecation warnings of the peers do not matter here.
    warnings.filterwarnings("ignore", category=FutureWarning)
    names = [case.name for case in CASES]
    wanted = options.cases.split(",") if options.cases else names
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"there is no case {', '.join(unknown)}, only: {', '.join(names)}")
    cases = [case for case in CASES if case.name in wanted and can_run(case)]
    if not cases:
        parser.error("these cases need more GPUs than this machine has")
    # CUDA starts here, so that its time is not in the first block of a case.
    if any(case.device == "cuda" and case.ranks == 1 for case in cases):
        torch.cuda.init()
    options.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for case in cases:
        run = measure if case.ranks == 1 else run_ranks
        try:
            run(case, options.minutes / len(cases), options)
        except Exception as error:
            print(f"\n{case.name} failed: {type(error).__name__}: {error}", flush=True)
            failed = 1
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return failed


if __name__ == "__main__":
    sys.exit(main())
