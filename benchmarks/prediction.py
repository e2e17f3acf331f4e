"""What pytracer predicts beside what happens: each answer is run, and both are written down.

    python benchmarks/prediction.py replay --out benchmarks/results      # needs a GPU
    python benchmarks/prediction.py plans --out benchmarks/results       # on a GPU, else on the CPU
    python benchmarks/prediction.py what-if --out benchmarks/results     # likewise

replay: five workloads are recorded once, each from before CUDA is up. Each is then run under twelve
settings and limits, every time in a process of its own, and torch's own counters are held against
the replay of the one recording. Of three settings the smallest limit is found by replay and proved
by a run just there and a run just below.

plans: three models are recorded without checkpoints. Plans for a half, for all and for what is between
are replayed, and then each is run: its peak, what is reserved, and a step's time.

what-if: each architecture of tests/conformance is recorded with one, two and three of its batches, and
the peak with six is foretold; then it is run.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

MIB = 1 << 20
BELOW = 2 * MIB  # how far below the smallest limit a run must fail
TIMEOUT = 240  # seconds, of one run

# ---------------------------------------------------------------- the programs


def gpt2() -> None:
    """Fixed shapes, bf16 autocast."""
    from benchmarks import models

    workload = models.gpt2(batch=8, length=512)
    for _ in range(3):
        workload.step()


def resnet() -> None:
    """Convolutions, whose library chooses its scratch by itself."""
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
    """Each batch of another length: what fragments the cache."""
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
    """A batch is made on a side stream while another one is trained on."""
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
    """A captured step keeps a private pool; eager work goes on beside it."""
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

Training = tuple[Any, Any, Callable[[], None]]  # a model, its optimizer, one step


def transformer(device: str) -> Training:
    """Like layers, under autocast."""
    import torch

    from benchmarks import models

    torch.manual_seed(0)
    config = models.GPT2 if device == "cuda" else models.Config(1000, 128, 128, 6, 4)
    model = models.Transformer(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(config.vocabulary, (8, config.context), device=device)

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(ids, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def convolutions(device: str) -> Training:
    """Unlike layers, with BatchNorm."""
    import torch
    from torch.nn import functional
    from torchvision.models import resnet50

    torch.manual_seed(0)
    model = resnet50().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(32, 3, 224, 224, device=device)
    labels = torch.randint(1000, (32,), device=device)

    def step() -> None:
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


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

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


MODELS: dict[str, Callable[[str], Training]] = {
    model.__name__: model for model in (transformer, convolutions, encoder)
}


def train_here(name: str, modules: list[str], trace_to: str | None) -> dict[str, Any]:
    """Trains with these modules checkpointed: peak, reserved bytes and a step's time."""
    import statistics
    from functools import partial

    import torch
    from torch.utils.checkpoint import checkpoint

    import pytracer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with pytracer.trace(devices=device, report=False) as recorded:
        model, _, step = MODELS[name](device)
        for path in modules:
            module = model.get_submodule(path)
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        for _ in range(4):
            step()
    if trace_to:
        recorded.save(trace_to, overwrite=True)
    times = []
    for _ in range(12):
        synchronize(device)
        began = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - began)
    found = {"peak": recorded.peak.bytes, "step_s": statistics.median(times), **machine(device)}
    if device == "cuda":
        found["reserved"] = torch.cuda.memory_stats()["reserved_bytes.all.peak"]
    return found


def synchronize(device: str) -> None:
    """Until the device has nothing to do."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def machine(device: str) -> dict[str, Any]:
    """What the figures hold for."""
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
    """Every model: without a plan, and plans along the frontier."""
    import pytracer

    folder = options.traces or options.out
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in MODELS:
        file = folder / f"plans-{name}.pytrace"
        base = started("train", name, {}, ["--trace", str(file)])
        if "problem" in base:
            say(f"{name}: {base['problem']}")
            continue
        frontier = pytracer.load(file).checkpoint_plan(1).frontier
        shown = [frontier[len(frontier) * part // 4] for part in (1, 2, 3)] + [frontier[-1]]
        for plan in dict.fromkeys(shown):
            if not plan.modules:
                continue
            measured = started("train", name, {}, ["--modules", ",".join(plan.modules)])
            row = {"model": name, "modules": plan.modules, "base": base, "measured": measured}
            predicted = {"peak": plan.peak, "reserved": plan.peak_reserved}
            predicted["step_s"] = base["step_s"] * plan.time_ratio
            rows.append({**row, "predicted": predicted})
            say(line_of_plan(rows[-1]))
    facts = rows[0]["base"] if rows else {}
    names = ("torch", "cuda", "cudnn", "device", "total")
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        **{each: facts.get(each) for each in names},
        "runs": rows,
    }


def line_of_plan(row: dict[str, Any]) -> str:
    """For people who watch: the errors in percent."""
    predicted, measured = row["predicted"], row["measured"]
    if "problem" in measured:
        return f"{row['model']} {row['modules']} PROBLEM {measured['problem']}"
    errors = [
        f"{name} {100 * (predicted[name] / measured[name] - 1):+.3f}%"
        for name in predicted
        if measured.get(name)
    ]
    return f"{row['model']:14} {len(row['modules'])} modules  {'  '.join(errors)}"


# ---------------------------------------------------------------- what if


def recorded_with(name: str, copies: int, device: str) -> Any:
    """Two steps of the architecture, with so many of its batches in one."""
    import torch

    import pytracer
    from tests.conformance.models import MODELS as ARCHITECTURES

    torch.manual_seed(0)
    recipe = ARCHITECTURES[name]("tiny")
    model = recipe.model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    def step() -> None:
        batch = recipe.batch(device)
        inputs = [torch.cat([x] * copies) for x in batch.inputs]
        target = torch.cat([batch.target] * copies)
        del batch
        recipe.loss(model(*inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # kernels and workspaces are there then, for every trace alike
    with pytracer.trace(model, optimizer, devices=device, report=False) as recorded:
        for _ in range(2):
            step()
    return recorded


def what_if_part(options: argparse.Namespace) -> dict[str, Any]:
    """Every architecture: one, two and three batches foretell six."""
    import torch

    from pytracer import errors
    from tests.conformance.models import MODELS as ARCHITECTURES

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for name in ARCHITECTURES:
        row: dict[str, Any] = {"model": name}
        rows.append(row)
        try:
            first, *others = (recorded_with(name, copies, device) for copies in (1, 2, 3))
            found = first.what_if(*others, batch=2 * batch_of(others[-1]))
            measured = recorded_with(name, 6, device).peak.bytes
        except (errors.PytracerError, RuntimeError, TypeError) as error:
            row["problem"] = str(error)
            say(f"{name:14} PROBLEM {error}")
            continue
        row |= {"lowest": found.lowest, "highest": found.highest, "with_law": found.with_law}
        row |= {"measured": measured, "batch": found.batch}
        low, high = (100 * (each / measured - 1) for each in (found.lowest, found.highest))
        say(f"{name:14} batch {found.batch:4} {low:+.3f} ... {high:+.3f} %")
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        **machine(device),
        "runs": rows,
    }


def batch_of(recorded: Any) -> int:
    """As what_if sees it."""
    from pytracer.analysis import views, what_if

    trace = recorded.data
    return what_if.shape_of(trace, views.main_device(trace), 1).batch


# ---------------------------------------------------------------- one run


def run_here(name: str, limit: int | None, trace_to: str | None) -> dict[str, Any]:
    """Runs the program under the limit, and says what torch counted."""
    import torch

    import pytracer

    def work() -> bool:
        if limit is not None:
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction((limit + 0.5) / total)
        try:
            PROGRAMS[name]()
        except torch.OutOfMemoryError:
            return True
        return False

    if trace_to:
        with pytracer.trace(devices="cuda", report=False) as recorded:
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
    """The same in a process of its own."""
    variables = {"PYTORCH_ALLOC_CONF": settings, "PYTORCH_CUDA_ALLOC_CONF": settings}
    more = ["--limit", str(limit)] if limit is not None else []
    more += ["--trace", str(trace_to)] if trace_to else []
    return started("one", name, variables if settings else {}, more)


def started(part: str, name: str, variables: dict[str, str], more: list[str]) -> dict[str, Any]:
    """What the process says last; what went wrong is in "problem"."""
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
    """Settings, limits and what each shows: twelve, and three just below the smallest limit."""
    from pytracer.analysis.replay import replay

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
    """Under the names of torch's counters."""
    from pytracer._native import core
    from pytracer.analysis import allocator_settings, replay

    found = replay.replay(trace, settings, limit)
    rules = allocator_settings.parse(settings).rules(limit, None)
    counted = core.replay(replay.steps(trace, found.device).columns, rules, False)
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
    """All programs, all cases."""
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
        "runs": rows,
    }


def exact(row: dict[str, Any]) -> bool:
    """Whether the peak is right to the byte, and the end as predicted."""
    names = ("failed", "reserved_bytes.all.peak")
    return all(row["predicted"][name] == row["measured"].get(name) for name in names)


def line_of(row: dict[str, Any]) -> str:
    """For people who watch."""
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
    """At once, also into a pipe."""
    print(text, file=sys.stderr, flush=True)


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "replay": replay_part,
    "plans": plans_part,
    "what-if": what_if_part,
}


def main() -> int:
    """The parts, or one run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=(*PARTS, "one", "train"))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--traces", type=Path, help="where recordings go (default: --out)")
    parser.add_argument("--keep", action="store_true", help="record each run; keep the inexact")
    parser.add_argument("--at-once", type=int, default=8, help="processes (default 8)")
    parser.add_argument("--programs", nargs="*", choices=PROGRAMS)
    one = parser.add_argument_group("of one run, which the parts start")
    one.add_argument("--program", choices=(*PROGRAMS, *MODELS))
    one.add_argument("--limit", type=int, help="bytes")
    one.add_argument("--modules", default="", help="to checkpoint, with commas")
    one.add_argument("--trace", help="record it to this file")
    options = parser.parse_args()
    if options.part == "one":
        print(json.dumps(run_here(options.program, options.limit, options.trace)))
        return 0
    if options.part == "train":
        modules = [name for name in options.modules.split(",") if name]
        print(json.dumps(train_here(options.program, modules, options.trace)))
        return 0
    began = time.monotonic()
    document = PARTS[options.part](options)
    document["seconds"] = round(time.monotonic() - began)
    where = options.out / f"prediction-{options.part}-{slug(document['device'])}.json"
    options.out.mkdir(parents=True, exist_ok=True)
    where.write_text(json.dumps(document, indent=1) + "\n")
    say(f"{document['seconds']} s, {where}")
    if options.part == "replay":
        right = sum(map(exact, document["runs"]))
        say(f"{right} of {len(document['runs'])} exact")
    return 0


def slug(device: str | None) -> str:
    """nvidia-h200 of "NVIDIA H200"."""
    return (device or "none").lower().replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
