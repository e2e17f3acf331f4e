"""Measures what tracing adds at each point of synchronisation: instructions and process time.

    python benchmarks/synchronisation.py [--out FILE] [--before FOLDER] [--profile FOLDER]

The points are those of a training step of three linear layers: an outermost module call, forward
with backward, an optimizer step, and the whole step (zero_grad, forward, loss, backward, clip,
step). A loop of reinforcement learning calls its tiny networks 18 times between two steps. A
transformer has GPT-2's 12 layers, but so narrow that there is next to nothing to compute; it
trains by itself, with a hook on its loss, and in DistributedDataParallel. All of it runs in one
thread, on the CPU, in the steady state, where valgrind counts the same each time. The exit code
is 1 if tracing adds more than the limit. `--before` is an older checkout of this project, built
in place, to compare with; without it, what is known of one stays; `--profile` keeps callgrind's
files, for callgrind_annotate.
"""

import argparse
import contextlib
import ctypes
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "synchronisation-cpu.json"
MODES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "category": {"detail": "category"},
    "default": {},
    "always": {},  # between two looks
}
BLOCKS = 24  # for the clock
# Instructions that may be added: a tenth above the most that was measured on torch 2.13 and Python
# 3.11, for the loop a twentieth. The plain transformers differ by 200,000 from machine to machine.
MOST = {
    "category": {
        "module call": 5_600,
        "forward and backward": 58_000,
        "optimizer step": 36_500,
        "whole step": 120_000,
        "reinforcement loop": 1_110_000,
        "narrow transformer": 1_245_000,
        "with a hook": 2_285_000,
        "DistributedDataParallel": 1_226_000,
    },
    "default": {
        "module call": 5_600,
        "forward and backward": 105_000,
        "optimizer step": 146_000,
        "whole step": 300_000,
        "reinforcement loop": 2_525_000,
        "narrow transformer": 3_786_000,
        "with a hook": 7_900_000,
        "DistributedDataParallel": 3_995_000,
    },
    "always": {"narrow transformer": 132_000},
}
LOOP = "reinforcement loop"
TIMES = {"module call": 200, "forward and backward": 20, "optimizer step": 20, "whole step": 20}
TIMES |= {LOOP: 12, "narrow transformer": 4, "with a hook": 4, "DistributedDataParallel": 4}
REQUESTS = """
#include <valgrind/callgrind.h>
extern "C" void begin() { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
extern "C" void end(const char* label) {
  CALLGRIND_DUMP_STATS_AT(label);
  CALLGRIND_STOP_INSTRUMENTATION;
}
"""


# Whose code it is, by parts of a binary's path; the last has all others.
OWNERS: dict[str, tuple[str, ...]] = {
    "pytracer": ("/pytracer/_C",),
    "torch": ("/libtorch", "/libc10"),
    "Python": ("/libpython", "/python"),
    "C library": ("",),
}
FUNCTIONS = 12  # the most in the results
# Left out: valgrind counts one instruction a byte, so a new chunk of a log would be half a million.
BY_THE_BYTE = "__memset"

Ways = dict[str, Callable[[], Any]]
Group = tuple[Ways, tuple[Any, Any]]
Function = tuple[str, str]  # the path of its binary, and its name


def groups() -> list[Callable[[], Group]]:
    """Returns what makes each group: the cases that are traced together, their model and optimizer."""
    return [three_layers, reinforcement, transformer, with_a_hook, data_parallel]


def our_models() -> Any:
    """Returns benchmarks/models.py of this checkout; pytracer is that of PYTHONPATH, maybe an older one."""
    import pytracer  # noqa: F401 - before this checkout is on the path

    sys.path[:0] = [str(ROOT)]
    from benchmarks import models

    return models


def reinforcement() -> Group:
    models = our_models()

    loop = models.actor_and_critic("cpu")
    return {LOOP: loop.step}, (loop.model, loop.optimizer)


def transformer() -> Group:
    model, optimizer, loss = narrow()
    return {"narrow transformer": lambda: train(optimizer, loss(model))}, (model, optimizer)


def with_a_hook() -> Group:
    """Someone else's code may run in the backward pass."""
    model, optimizer, loss = narrow()

    def step() -> None:
        found = loss(model)
        found.register_hook(lambda gradient: None)
        train(optimizer, found)

    return {"with a hook": step}, (model, optimizer)


def data_parallel() -> Group:
    import torch
    from torch import distributed

    model, optimizer, loss = narrow()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    whole = torch.nn.parallel.DistributedDataParallel(model)
    return {"DistributedDataParallel": lambda: train(optimizer, loss(whole))}, (whole, optimizer)


def train(optimizer: Any, loss: Any) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def narrow() -> tuple[Any, Any, Callable[[Any], Any]]:
    """Returns a transformer, its optimizer and what computes a loss by it."""
    import torch

    models = our_models()
    torch.manual_seed(0)
    config = models.Config(vocabulary=64, context=64, width=16, layers=12, heads=2)
    model = models.Transformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids, targets = torch.randint(64, (2, 1, 8))
    return model, optimizer, lambda called: called(ids, targets)


def three_layers() -> Group:
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256), torch.nn.ReLU()] * 2
    model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    alone, x = torch.nn.Identity(), torch.randn(32, 256)
    target = torch.randint(0, 10, (32,))

    def forward_and_backward() -> None:
        torch.nn.functional.cross_entropy(model(x), target).backward()

    def step() -> None:
        optimizer.zero_grad()
        forward_and_backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    each = [lambda: alone(x), forward_and_backward, optimizer.step, step]
    return dict(zip(TIMES, each, strict=False)), (model, optimizer)


def count(library: Path, group: int, modes: list[str]) -> None:
    """Runs inside valgrind: each case of a group in each mode, after steps that leave nothing new."""
    import torch

    requests = ctypes.CDLL(str(library))

    def block(mode: str, ways: Ways) -> None:
        *_, whole_step = ways.values()
        for name, way in ways.items():
            for _ in range(20):
                whole_step()
            for _ in range(20):
                way()
            requests.begin()
            for _ in range(TIMES[name]):
                way()
            requests.end(f"{mode}, {name}".encode())

    torch.set_num_threads(1)
    ways, targets = groups()[group]()
    in_each_mode(ways, targets, block, modes)


def in_each_mode(
    ways: Ways, targets: Any, block: Callable[[str, Ways], None], modes: Sequence[str] = (*MODES,)
) -> None:
    """Calls the block untraced, and in a trace of each mode."""
    import pytracer

    for mode in modes:
        options = MODES[mode]
        if options is None:
            block(mode, ways)
        elif mode == "always":
            with tempfile.TemporaryDirectory() as folder, always_on(Path(folder)):
                block(mode, ways)
        else:
            with pytracer.trace(*targets, table=False, **options):
                block(mode, ways)


@contextlib.contextmanager
def always_on(folder: Path) -> Iterator[None]:
    """Counts steps, and looks at the first two only."""
    import pytracer

    recorder = pytracer.always(folder / "run.always", share=0.0)
    recorder._allowance.wait = lambda: 3600.0
    with recorder:
        yield


def clock() -> None:
    """Returns the process time of each case and mode in us: medians of blocks in turns."""

    found: dict[str, dict[str, list[float]]] = {
        mode: {name: [] for name in TIMES} for mode in MODES
    }

    def block(mode: str, ways: Ways) -> None:
        for name, way in ways.items():
            for _ in range(10):
                way()
            began = time.process_time()
            for _ in range(TIMES[name]):
                way()
            found[mode][name].append((time.process_time() - began) / TIMES[name] * 1e6)

    import torch

    torch.set_num_threads(1)
    all_groups = [make() for make in groups()]
    for _ in range(BLOCKS):
        for ways, targets in all_groups:
            in_each_mode(ways, targets, block)
    medians = {
        mode: {name: round(statistics.median(each), 2) for name, each in rows.items()}
        for mode, rows in found.items()
    }
    print(json.dumps(medians))


def timed(checkout: Path) -> dict[str, dict[str, float]]:
    """Returns the microseconds of one call, by mode and case."""
    command = [sys.executable, str(Path(__file__).resolve()), "--clock"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


def measure(
    checkout: Path, folder: Path, chosen: tuple[int, ...] = (), modes: tuple[str, ...] = (*MODES,)
) -> dict[str, Any]:
    """Returns the instructions of one call, by mode and case: all, and those of our own code.

    `chosen` are the groups to run, all by default; and only these modes.
    """
    (folder / "requests.cpp").write_text(REQUESTS)
    library = folder / "requests.so"
    build = ["g++", "-shared", "-fPIC", "-O1", "-o", str(library), str(folder / "requests.cpp")]
    subprocess.run(build, check=True)
    command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--combine-dumps=no"]
    inside = [sys.executable, str(Path(__file__).resolve()), "--inside", str(library), "--group"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONHASHSEED": "0"}
    runs = []
    for group in chosen or range(
        len(groups())
    ):  # at the same time: counts do not depend on the time
        files = [f"--callgrind-out-file={folder}/counts.{group}", "--smc-check=none"]
        runs.append(
            subprocess.Popen(
                [*command, *files, *inside, str(group), "--modes", *modes],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [run.communicate()[1] for run in runs]
    found = counts_in(folder)
    wanted = 1 if chosen else len(TIMES)
    if any(len(found["instructions"][mode]) < wanted for mode in modes):
        raise SystemExit("valgrind counted too little:\n" + "\n".join(said)[-3000:])
    return found


def counts_in(folder: Path) -> dict[str, Any]:
    """Reads callgrind's files: instructions in all, of our own code, by owner and by function."""
    read: dict[str, dict[str, Counter[Function]]] = {mode: {} for mode in MODES}
    for file in folder.glob("counts*"):
        text = file.read_text()
        if label := re.search(r"Client Request: (\w+), ([\w ]+)", text):
            counts = instructions_by_function(text)
            read[label[1]][label[2]] = Counter(
                {
                    function: count // TIMES[label[2]]
                    for function, count in counts.items()
                    if not function[1].startswith(BY_THE_BYTE)
                }
            )
    owners = {
        mode: {name: by_owner(rows[name]) for name in TIMES if name in rows}
        for mode, rows in read.items()
    }
    return {
        "instructions": {
            mode: {name: sum(each.values()) for name, each in rows.items()}
            for mode, rows in owners.items()
        },
        "ours": {
            mode: {name: each["pytracer"] for name, each in rows.items()}
            for mode, rows in owners.items()
        },
        "owners": owners,
        "functions": {
            mode: {name: most_added(rows[name], read["plain"][name]) for name in rows}
            for mode, rows in read.items()
            if mode != "plain"
        },
    }


def by_owner(counts: Counter[Function]) -> dict[str, int]:
    totals = dict.fromkeys(OWNERS, 0)
    for (path, _), count in counts.items():
        totals[owner_of(path)] += count
    return totals


def owner_of(path: str) -> str:
    return next(owner for owner, parts in OWNERS.items() if any(part in path for part in parts))


def most_added(counts: Counter[Function], plain: Counter[Function]) -> list[tuple[str, str, int]]:
    """The owner, name and added instructions of the functions that add most."""
    more = Counter({function: counts[function] - plain[function] for function in counts})
    return [
        (
            owner_of(path),
            re.sub(r"\(anonymous namespace\)::|[(\[].*| const$|'\d+$", "", name),
            count,
        )
        for (path, name), count in more.most_common(FUNCTIONS)
    ]


def instructions_by_function(text: str) -> Counter[Function]:
    """Returns the instructions in each function, without those of the functions that it calls."""
    # By callgrind's numbers: a path or name stands only where it is first met.
    paths: dict[str, str] = {}
    names: dict[str, str] = {}
    counts: Counter[Function] = Counter()
    path, name, is_of_call = "", "", False
    for line in text.splitlines():
        if met := re.match(r"(c?)(ob|fn)=\((\d+)\)(?: (.*))?", line):
            known = paths if met[2] == "ob" else names
            known.setdefault(met[3], met[4] or "")
            if not met[1] and met[2] == "ob":
                path = known[met[3]]
            elif not met[1]:
                name = re.sub(r"'\d+$", "", known[met[3]])  # the depth of a recursion
        elif line.startswith("calls="):
            is_of_call = True  # the next line has what the called function took
        elif line and line[0] in "0123456789+-*":
            counts[path, name] += 0 if is_of_call else int(line.split()[1])
            is_of_call = False
    return counts


def added(rows: dict[str, dict[str, float]], mode: str, name: str) -> float:
    return rows[mode][name] - rows["plain"][name]


def too_much(instructions: dict[str, dict[str, float]]) -> list[str]:
    """Returns the cases in which tracing adds more than the limit."""
    return [
        f"{name}, {mode}: {added(instructions, mode, name):,.0f} instructions, at most {most:,}"
        for mode, limits in MOST.items()
        for name, most in limits.items()
        if added(instructions, mode, name) > most
    ]


def print_rows(document: dict[str, Any]) -> None:
    for unit in ("instructions", "microseconds"):
        rows = document[unit]
        for name in TIMES:
            modes = (f"{m} +{added(rows, m, name):,.1f}" for m in MODES if m != "plain")
            print(f"{unit:12}  {name:22} plain {rows['plain'][name]:>12,.1f}  " + "  ".join(modes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--group", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--modes", nargs="+", default=[*MODES], help=argparse.SUPPRESS)
    parser.add_argument("--clock", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()
    if options.inside:
        count(options.inside, options.group, options.modes)
        return 0
    if options.clock:
        clock()
        return 0
    checkouts = {"now": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    found: dict[str, Any] = {}
    for name, checkout in checkouts.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = options.profile if options.profile and checkout == ROOT else Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            found[name] = {**measure(checkout, folder), "microseconds": timed(checkout)}
        print(name)
        print_rows(found[name])
    import torch

    if options.out.exists() and "before" not in found:
        found["before"] = json.loads(options.out.read_text()).get("before", {})
    document = {
        "tool": "benchmarks/synchronisation.py",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **found,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    problems = too_much(found["now"]["instructions"])
    print("\n".join(problems), file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
