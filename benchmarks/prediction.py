"""Compares predictions with runs: runs each answer, and writes both down.

    python benchmarks/prediction.py replay --out benchmarks/results      # needs a GPU
    python benchmarks/prediction.py plans --out benchmarks/results       # on a GPU, else on the CPU
    python benchmarks/prediction.py plan-times --out benchmarks/results  # after it, alone
    python benchmarks/prediction.py what-if --out benchmarks/results     # likewise

replay: five workloads are recorded once, each from before CUDA is up. Each is then run under twelve
settings and limits, every time in a process of its own, and torch's own counters are compared with
the replay of the one recording. For three settings, the replay finds the smallest limit. A run at
it and a run just below it prove it.

plans: three models are recorded without checkpoints, and get plans for roomy to tight budgets. Each
plan is run with the budget as the allocator's limit: whether it runs, its peak and its reserved
bytes. plan-times adds the time of a step.

what-if: each architecture of programs/conformance is recorded with one, two and three of its
batches. The peak with six is predicted, and then measured in a run.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import kept, slug  # noqa: E402

MIB = 1 << 20
BELOW = 2 * MIB  # how far below the smallest limit a run must fail
TIMEOUT = 240  # seconds for one run

# ---------------------------------------------------------------- the programs


def gpt2() -> None:
    """Fixed shapes, bf16 autocast."""
    from benchmarks import models

    workload = models.gpt2(batch=8, length=512)
    for _ in range(3):
        workload.step()


def resnet() -> None:
    """Convolutions, whose library chooses its own scratch memory."""
    import torch
    from torch.nn import functional
    from torchvision.models import resnet50

    torch.manual_seed(0)
    model = resnet50().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(3):
        images = torch.randn(32, 3, 224, 224, device="cuda")
        labels = torch.randint(1000, (32,), device="cuda")
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def lengths() -> None:
    """Batches of different lengths, which fragment the cache."""
    import torch

    from benchmarks import models

    torch.manual_seed(0)
    model = models.Transformer(models.GPT2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for length in (310, 512, 129, 700, 460, 255, 900, 611, 333, 777):
        ids = torch.randint(models.GPT2.vocabulary, (4, length), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(ids, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def streams() -> None:
    """Makes a batch on a side stream while it trains on another."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(6))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    side = torch.cuda.Stream()

    def load(rows: int) -> torch.Tensor:
        with torch.cuda.stream(side):
            raw = torch.randn(rows, 4096, device="cuda")
            return (raw - raw.mean()) / raw.std()

    batch = load(4096)
    for rows in (4096, 6000, 3000, 5000, 7000, 2000):
        torch.cuda.current_stream().wait_stream(side)
        batch.record_stream(torch.cuda.current_stream())
        current, batch = batch, load(rows)
        model(current).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        del current


def graphs() -> None:
    """Captures a step, which keeps a private pool, and works eagerly beside it."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)
    static = torch.randn(8192, 2048, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            model(static).square().mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        model(static).square().mean().backward()
        optimizer.step()
    for rows in (3000, 9000, 5000):
        graph.replay()
        with torch.no_grad():
            model(torch.randn(rows, 2048, device="cuda"))
    torch.cuda.synchronize()


PROGRAMS: dict[str, Callable[[], None]] = {
    program.__name__: program for program in (gpt2, resnet, lengths, streams, graphs)
}

# ---------------------------------------------------------------- plans

# A model, its optimizer, and its loss through a callable.
Training = tuple[Any, Any, Callable[[Any], Any]]


def transformer(device: str) -> Training:
    """Equal layers, under autocast."""
    import torch

    from benchmarks import models

    torch.manual_seed(0)
    config = models.GPT2 if device == "cuda" else models.Config(1000, 128, 128, 6, 4)
    model = models.Transformer(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = 16 if device == "cuda" else 8
    ids = torch.randint(config.vocabulary, (rows, config.context), device=device)

    def loss(forward: Any) -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            return forward(ids, ids)

    return model, optimizer, loss


def convolutions(device: str) -> Training:
    """Different layers, with BatchNorm: ResNet-50. On the CPU with small images."""
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    if device == "cuda":
        from torchvision.models import resnet50

        model, rows, side, classes = resnet50().to(device), 128, 224, 1000
    else:
        from programs.conformance.models import Bottleneck

        widths = ((16, 8, 1), (32, 16, 2), (64, 32, 2))
        blocks = (Bottleneck(*each) for each in widths)
        stem = torch.nn.Conv2d(3, 16, 3, 1, 1)
        head = (torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(128, 10))
        model, rows, side, classes = torch.nn.Sequential(stem, *blocks, *head), 8, 32, 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(rows, 3, side, side, device=device)
    labels = torch.randint(classes, (rows,), device=device)

    def loss(forward: Any) -> Any:
        return functional.cross_entropy(forward(images), labels)

    return model, optimizer, loss


def encoder(device: str) -> Training:
    """torch's own encoder layers, with dropout, in float32."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    width, layers, length = (1024, 8, 512) if device == "cuda" else (128, 4, 64)
    layer = nn.TransformerEncoderLayer(width, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(8, length, width, device=device)

    def loss(forward: Any) -> Any:
        return forward(x).square().mean()

    return model, optimizer, loss


MODELS: dict[str, Callable[[str], Training]] = {
    model.__name__: model for model in (transformer, convolutions, encoder)
}
STEPS = 4  # recorded ones
BUDGETS = (0.6, 0.3, 0.02)  # between the smallest plan's reserved bytes and those without a plan


def step(training: Training, forward: Any = None) -> None:
    """Makes one step, through the model or its replacement."""
    model, optimizer, loss = training
    loss(model if forward is None else forward).backward()
    optimizer.step()
    optimizer.zero_grad()


Way = tuple[list[str], list[str]]  # modules to checkpoint, and modules to offload


def changed(model: Any, way: Way) -> None:
    """Checkpoints and offloads these modules and no others, for the block."""
    from torch.utils.checkpoint import checkpoint

    from pytracer.recording.offload import offload

    for module in model.modules():
        vars(module).pop("forward", None)
    for path in way[0]:
        module = model.get_submodule(path)
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    for path in way[1]:
        offload(model.get_submodule(path))


def train_here(name: str, way: Way, limit: int | None, trace_to: str | None) -> dict[str, Any]:
    """Trains in this way, under the limit. Returns the memory needed, or the failure."""
    import torch

    import pytracer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if limit is not None and device == "cuda":
        allow(limit)
    failed = False
    with pytracer.trace(devices=device, table=False) as recorded:
        try:
            training = MODELS[name](device)
            changed(training[0], way)
            for _ in range(STEPS):
                step(training)
        except torch.OutOfMemoryError:
            failed = True
    if trace_to:
        recorded.save(trace_to, overwrite=True)
    found = {"peak": recorded.peak.bytes, "failed": failed, **machine(device)}
    if device == "cuda":
        counted = torch.cuda.memory_stats()
        found["reserved"] = counted["reserved_bytes.all.peak"]
        found["caught"] = counted.get("num_ooms", 0)
        found["retries"] = counted.get("num_alloc_retries", 0)
    return found


def allow(limit: int) -> None:
    """Limits torch's allocator to these bytes."""
    import torch

    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((limit + 0.5) / total)


def times_here(ways_of: dict[str, list[Way]]) -> dict[str, dict[str, Any]]:
    """Times a step of each model in each way, in turns, so that all meet the same conditions.

    The first way is without a plan. Its operators' costs are measured too, and predict the times of
    the other ways.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {}
    for name, ways in ways_of.items():
        training = MODELS[name](device)
        predicted = ratios_from_costs(training, device, ways)
        measured = in_turn([partial(step_in, training, way) for way in ways], device)
        found[name] = {"step_s": measured, "from_costs": predicted}
        training = None  # type: ignore[assignment]
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


def step_in(training: Training, way: Way) -> None:
    """Makes one step in this way."""
    changed(training[0], way)
    step(training)


def ratios_from_costs(training: Training, device: str, ways: list[Way]) -> list[float]:
    """Returns the predicted time of each way, from a trace with costs."""
    import pytracer
    from pytracer.analysis.facts import usage
    from pytracer.analysis.forecasts.planned import Work

    model, optimizer, _ = training
    with pytracer.trace(model, optimizer, devices=device, cost=True, table=False) as recorded:
        for _ in range(STEPS):
            step(training)
    work = Work(recorded.data, usage.main_device(recorded.data))
    return [work.judge(tuple(each), tuple(moved), 1).time_ratio for each, moved in ways]


def in_turn(ways: list[Callable[[], None]], device: str) -> list[float]:
    """Returns the median time of each, run in turns."""
    import statistics

    seconds: list[list[float]] = [[] for _ in ways]
    for way in ways:
        way()
    for _ in range(ROUNDS):
        for way, own in zip(ways, seconds, strict=True):
            way()
            synchronize(device)
            began = time.perf_counter()
            for _ in range(AT_ONCE):
                way()
            synchronize(device)
            own.append((time.perf_counter() - began) / AT_ONCE)
    return [statistics.median(own) for own in seconds]


ROUNDS = 5
AT_ONCE = 3  # steps


def synchronize(device: str) -> None:
    """Waits until the device has no work."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def machine(device: str) -> dict[str, Any]:
    """Describes the machine of the figures."""
    import torch

    gpu = device == "cuda"
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "total": torch.cuda.mem_get_info()[1] if gpu else None,
    }


def plans_part(options: argparse.Namespace) -> dict[str, Any]:
    """Makes each model's plan for each budget, and runs it with the budget as the limit."""
    folder = options.traces or options.out
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    with ThreadPoolExecutor(options.at_once) as pool:
        files = {name: folder / f"plans-{name}.pytrace" for name in MODELS}
        bases = {
            name: pool.submit(started, "train", name, {}, ["--trace", str(files[name])])
            for name in MODELS
        }
        waiting = []
        for name, running in bases.items():
            base = running.result()
            if "problem" in base:
                say(f"{name}: {base['problem']}")
                continue
            for row in budgets_and_plans(name, files[name], base):
                more = ["--way", json.dumps([row["modules"], row["offloaded"]])]
                more += ["--limit", str(row["budget"])]
                waiting.append((row, pool.submit(started, "train", name, {}, more)))
        for row, running in waiting:
            row["measured"] = running.result()
            say(line_of_plan(row))
            rows.append(row)
    facts = rows[0]["base"] if rows else {}
    names = ("torch", "cuda", "cudnn", "device", "total")
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        **{each: facts.get(each) for each in names},
        "runs": rows,
    }


def plan_times_part(options: argparse.Namespace) -> dict[str, Any]:
    """Adds the time of a step to the results of `plans`. Nothing else should run meanwhile."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    file = options.out / f"prediction-plans-{slug(machine(device)['device'])}.json"
    document: dict[str, Any] = kept.read(file)
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in document["runs"]:
        rows.setdefault(row["model"], []).append(row)
    ways = {
        name: [([], []), *((row["modules"], row["offloaded"]) for row in mine)]
        for name, mine in rows.items()
    }
    for name, timed in times_here(ways).items():
        seconds = timed["step_s"]
        for number, row in enumerate(rows[name], 1):
            row["measured"]["time_ratio"] = seconds[number] / seconds[0]
            row["measured"]["step_s"], row["base"]["step_s"] = seconds[number], seconds[0]
            row["predicted"]["time_ratio_from_costs"] = timed["from_costs"][number]
            say(line_of_plan(row))
    return document


def budgets_and_plans(name: str, file: Path, base: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields budgets from roomy to tight with their plans, and at last one with offloading."""
    import pytracer
    from pytracer.analysis.facts import usage
    from pytracer.analysis.forecasts.planned import Work

    recorded = pytracer.load(file)
    smallest = recorded.checkpoint_plan(1).chosen
    least, most = smallest.peak_reserved or smallest.peak, base.get("reserved", base["peak"])
    asked = [int(least + share * (most - least)) for share in BUDGETS]
    chosen = [(budget, recorded.checkpoint_plan(budget).chosen) for budget in asked]
    device = usage.main_device(recorded.data)
    if device != "cpu":
        work = Work(recorded.data, device)
        half = tuple(work.units)[: len(work.units) // 2]
        needs = work.judge((), half, 1).peak_reserved or 1
        chosen.append((needs, work.judge((), half, needs)))
    seen = set()
    for budget, plan in chosen:
        if (plan.modules, plan.offloaded) in seen:
            continue
        seen.add((plan.modules, plan.offloaded))
        yield {
            "model": name,
            "budget": budget,
            "fits": plan.fits,
            "modules": plan.modules,
            "offloaded": plan.offloaded,
            "pinned": plan.pinned,
            "base": base,
            "predicted": {
                "peak": plan.peak,
                "reserved": plan.peak_reserved,
                "time_ratio": plan.time_ratio,
            },
        }


def line_of_plan(row: dict[str, Any]) -> str:
    """Returns a line for the screen: the errors in percent."""
    predicted, measured = row["predicted"], row["measured"]
    head = (
        f"{row['model']:14} {len(row['modules'])} checkpointed, {len(row['offloaded'])} offloaded "
    )
    head += f"in {row['budget'] / MIB:.0f} MiB"
    if "problem" in measured:
        return f"{head} PROBLEM {measured['problem']}"
    errors = [
        f"{name} {100 * (predicted[name] / measured[name] - 1):+.3f}%"
        for name in ("peak", "reserved", "time_ratio")
        if measured.get(name) and predicted.get(name)
    ]
    ratio = predicted.get("time_ratio_from_costs")
    if ratio and measured.get("time_ratio"):
        errors.append(f"by costs {100 * (ratio / measured['time_ratio'] - 1):+.3f}%")
        errors.append(f"measured {measured['time_ratio']:.4f} of {row['base']['step_s']:.4f} s")
    ran = "failed" if measured["failed"] else "ran"
    said = "fits" if row["fits"] else "does not fit"
    caught = f", caught {measured['caught']}" if measured.get("caught") else ""
    return f"{head}: {said}, {ran}{caught}  {'  '.join(errors)}"


# ---------------------------------------------------------------- what if


def recorded_with(name: str, copies: int, device: str) -> tuple[Any, int]:
    """Records two steps of the architecture with so many of its batches in one, and counts rows.

    On a GPU it has the size that people train, and an eighth of the recipe's batch.
    """
    import torch

    import pytracer
    from programs.conformance.models import MODELS as ARCHITECTURES

    gc.collect()  # objects from before are no part of this recording
    torch.manual_seed(0)
    with torch.device(device):
        recipe = ARCHITECTURES[name]("tiny" if device == "cpu" else "real")
    model = recipe.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    rows = len(recipe.batch("cpu").target)
    part = rows if device == "cpu" else max(rows // 8, 1)

    def step() -> None:
        batch = recipe.batch("cpu")
        *inputs, target = (
            torch.cat([x.narrow(x.shape.index(rows), 0, part)] * copies, x.shape.index(rows)).to(
                device
            )
            for x in batch.tensors()
        )
        del batch
        recipe.loss(model(*inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # so that every trace has kernels and workspaces from before
    with pytracer.trace(model, optimizer, devices=device, table=False) as recorded:
        for _ in range(2):
            step()
    return recorded, part * copies


def what_if_part(options: argparse.Namespace) -> dict[str, Any]:
    """Predicts six batches from one, two and three, for every architecture."""
    import torch

    from programs.conformance.models import MODELS as ARCHITECTURES
    from pytracer import errors

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for name in options.programs or ARCHITECTURES:
        row: dict[str, Any] = {"model": name}
        rows.append(row)
        try:
            small = [recorded_with(name, copies, device)[0] for copies in (1, 2, 3)]
            recorded, batch = recorded_with(name, 6, device)
            measured = recorded.peak.bytes
            found = small[0].what_if(*small[1:], batch=batch)
        except (errors.PytracerError, RuntimeError, TypeError) as error:
            row["problem"] = str(error)
            say(f"{name:14} PROBLEM {error}")
            continue
        row |= {"lowest": found.lowest, "highest": found.highest, "with_law": found.with_law}
        row |= {"likely": found.likely, "basis": found.basis}
        row |= {"measured": measured, "batch": found.batch}
        ends = (found.lowest, found.likely or found.highest, found.highest)
        low, likely, high = (100 * (each / measured - 1) for each in ends)
        say(f"{name:14} batch {found.batch:4} {low:+.1f} {likely:+.3f} {high:+.1f} % {found.basis}")
    others = {row["model"]: row for row in before(options.out, machine(device))}
    others |= {row["model"]: row for row in rows}
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        **machine(device),
        "runs": [others[name] for name in ARCHITECTURES if name in others],
    }


def before(out: Path, here: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the file's rows, if they are of this device and this torch."""
    file = out / f"prediction-what-if-{slug(here['device'])}.json"
    document = kept.read(file) if file.exists() else {}
    same = all(document.get(name) == here[name] for name in ("torch", "cudnn", "device"))
    return document["runs"] if same else []


# ---------------------------------------------------------------- one run


def run_here(name: str, limit: int | None, trace_to: str | None) -> dict[str, Any]:
    """Runs the program under the limit, and returns torch's counters."""
    import torch

    import pytracer

    def work() -> bool:
        if limit is not None:
            allow(limit)
        try:
            PROGRAMS[name]()
        except torch.OutOfMemoryError:
            return True
        return False

    if trace_to:
        with pytracer.trace(devices="cuda", table=False) as recorded:
            failed = work()
        recorded.save(trace_to, overwrite=True)
    else:
        failed = work()
    counted = torch.cuda.memory_stats()
    names = ("reserved_bytes.all.peak", "allocated_bytes.all.peak", "active_bytes.all.peak")
    names += ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")
    return {
        # A library may catch the failure and go on with less.
        "failed": counted.get("num_ooms", 0) > 0,
        "ended": failed,
        **{each: counted.get(each, 0) for each in names},
        **machine("cuda"),
    }


def run(
    name: str, settings: str, limit: int | None, trace_to: Path | None = None
) -> dict[str, Any]:
    """Runs the program as `run_here` does, in a process of its own."""
    variables = {"PYTORCH_ALLOC_CONF": settings, "PYTORCH_CUDA_ALLOC_CONF": settings}
    more = ["--limit", str(limit)] if limit is not None else []
    more += ["--trace", str(trace_to)] if trace_to else []
    return started("one", name, variables if settings else {}, more)


def started(part: str, name: str, variables: dict[str, str], more: list[str]) -> dict[str, Any]:
    """Returns the last line of the process as a document. An error is in "problem"."""
    clean = {key: text for key, text in os.environ.items() if "ALLOC_CONF" not in key}
    command = [sys.executable, __file__, part, "--program", name, *more]
    try:
        done = subprocess.run(
            command,
            env={**clean, **variables},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"took more than {TIMEOUT} s"}
    if done.returncode:
        return {"problem": done.stderr[-2000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---------------------------------------------------------------- replay


def cases(trace: Any) -> Iterator[tuple[str, int | None, str]]:
    """Returns settings, limits and names: twelve, and three just below the smallest limit."""
    from pytracer.analysis.allocator.replay import replay

    for settings in (
        "",
        "expandable_segments:True",
        "max_split_size_mb:32",
        "max_split_size_mb:128",
        "max_split_size_mb:64,max_non_split_rounding_mb:40",
        "roundup_power2_divisions:8",
        "roundup_power2_divisions:[4:2,64:4,>:8],expandable_segments:True",
    ):
        yield settings, None, "unlimited"
    for settings in ("", "expandable_segments:True", "max_split_size_mb:64"):
        smallest = replay(trace, settings).smallest_limit
        yield settings, smallest, "smallest limit"
        yield settings, smallest - BELOW, "below it"
    roomy = replay(trace, "").peak_reserved * 9 // 10
    yield "garbage_collection_threshold:0.6", roomy, "collecting"
    yield "garbage_collection_threshold:0.5,max_split_size_mb:32", roomy, "collecting"


def predict(trace: Any, settings: str, limit: int | None) -> dict[str, Any]:
    """Returns the prediction, under the names of torch's counters."""
    from pytracer.analysis.allocator import (
        replay,
        settings as allocator_settings,
        steps as steps_of,
    )
    from pytracer.data._native import core

    found = replay.replay(trace, settings, limit)
    rules = allocator_settings.parse(settings).rules(limit, None)
    counted = core.replay(steps_of.steps(trace, found.device).columns, rules, False)
    return {
        "failed": found.failed is not None,
        "reserved_bytes.all.peak": found.peak_reserved,
        "allocated_bytes.all.peak": found.peak_allocated,
        "active_bytes.all.peak": counted["peak_active"],
        "num_alloc_retries": found.retries,
        "num_ooms": int(found.failed is not None),
        "num_device_alloc": counted["device_allocs"],
        "num_device_free": counted["device_frees"],
    }


def replay_part(options: argparse.Namespace) -> dict[str, Any]:
    """Runs all programs in all cases."""
    import pytracer

    folder = options.traces or options.out
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.at_once) as pool:
        names = options.programs or list(PROGRAMS)
        files = {name: folder / f"replay-{name}.pytrace" for name in names}
        recorded = {name: pool.submit(run, name, "", None, files[name]) for name in names}
        waiting = []
        for name, recording in recorded.items():
            say(f"{name}: recorded {recording.result()}")
            if "problem" in recording.result():
                continue
            trace = pytracer.load(files[name]).data
            for number, (settings, limit, shows) in enumerate(cases(trace)):
                row = {"program": name, "settings": settings, "limit": limit, "shows": shows}
                row["predicted"] = predict(trace, settings, limit)
                kept = folder / f"replay-{name}-{number}.pytrace" if options.keep else None
                waiting.append((row, kept, pool.submit(run, name, settings, limit, kept)))
        rows = []
        for row, kept, running in waiting:
            row["measured"] = running.result()
            say(line_of(row))
            if kept and kept.exists() and exact(row):
                kept.unlink()
            rows.append(row)
    facts = next((r["measured"] for r in rows if "torch" in r["measured"]), {})
    names_of_facts = ("torch", "cuda", "cudnn", "device", "total")
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        **{name: facts.get(name) for name in names_of_facts},
        "recorded": {name: recording.result() for name, recording in recorded.items()},
        "runs": [
            row | {way: _figures(row[way]) for way in ("predicted", "measured")} for row in rows
        ],
    }


def _figures(run: dict[str, Any]) -> dict[str, Any]:
    names = ("failed", "ended", "problem", "num_ooms", "num_alloc_retries")
    return kept.only(run, *names, "reserved_bytes.all.peak")


def exact(row: dict[str, Any]) -> bool:
    """Whether the peak is right to the byte, and the end as predicted."""
    names = ("failed", "reserved_bytes.all.peak")
    return all(row["predicted"][name] == row["measured"].get(name) for name in names)


def line_of(row: dict[str, Any]) -> str:
    """Returns a line for the screen."""
    predicted, measured = row["predicted"], row["measured"]
    head = f"{row['program']:8} {row['settings'] or 'default':55} {row['shows']:14}"
    if "problem" in measured:
        return f"{head} PROBLEM {measured['problem']}"
    found = [
        f"{name.split('.')[0]} {predicted[name]}/{measured[name]}"
        for name in predicted
        if predicted[name] != measured[name]
    ]
    return f"{head} {'exact' if exact(row) else 'OFF'} {'; '.join(found)}"


def say(text: str) -> None:
    """Prints at once, also into a pipe."""
    print(text, file=sys.stderr, flush=True)


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "replay": replay_part,
    "plans": plans_part,
    "plan-times": plan_times_part,
    "what-if": what_if_part,
}


def main() -> int:
    """Runs the parts, or one run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=(*PARTS, "one", "train"))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--traces", type=Path, help="where recordings go (default: --out)")
    parser.add_argument("--keep", action="store_true", help="record each run; keep the inexact")
    parser.add_argument("--at-once", type=int, default=8, help="processes (default 8)")
    parser.add_argument("--programs", nargs="*", help="some of the programs or architectures")
    one = parser.add_argument_group("of one run, which the parts start")
    one.add_argument("--program", choices=(*PROGRAMS, *MODELS))
    one.add_argument("--limit", type=int, help="bytes")
    one.add_argument("--way", default="[[], []]", help="what to checkpoint and to offload, as JSON")
    one.add_argument("--trace", help="record it to this file")
    options = parser.parse_args()
    if options.part == "one":
        print(json.dumps(run_here(options.program, options.limit, options.trace)))
        return 0
    if options.part == "train":
        way = json.loads(options.way)
        print(json.dumps(train_here(options.program, way, options.limit, options.trace)))
        return 0
    began = time.monotonic()
    document = PARTS[options.part](options)
    document["seconds"] = round(time.monotonic() - began)
    about = "plans" if options.part == "plan-times" else options.part
    where = options.out / f"prediction-{about}-{slug(document['device'])}.json"
    options.out.mkdir(parents=True, exist_ok=True)
    kept.write(where, document)
    say(f"{document['seconds']} s, {where}")
    if options.part == "replay":
        right = sum(map(exact, document["runs"]))
        say(f"{right} of {len(document['runs'])} exact")
    return 0


if __name__ == "__main__":
    sys.exit(main())
