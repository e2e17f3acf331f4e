"""Does the ledger close? Ten workloads, each in a process of its own, under five conditions.

    python benchmarks/ledger.py                      # about 3 minutes on one GPU
    python benchmarks/ledger.py --conditions lazy --workloads mlp,convnet
    python benchmarks/ledger.py --out DIR            # where the JSON goes

Conditions: modules loaded lazily (CUDA's default) and eagerly; another process on the device that
holds 3 GiB; under an allocator limit, with a request that fails; and with CUDA up and the program
warm before the trace begins. Elsewhere CUDA comes up inside the trace.

A run passes if the residual is at most 0.5 % of the device's used bytes, or 32 MiB if that is less.
A second residual is a harder test: the row of the context, kernels and libraries comes from the
same workload in *another* process, so it contains nothing that the process measured of itself.
nvidia-smi is asked once, while the memory is held.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import kept, models, slug  # noqa: E402
from pytracer import errors, trace  # noqa: E402
from pytracer.analysis.allocator import ledger  # noqa: E402
from pytracer.basics import driver  # noqa: E402
from pytracer.capture import probe  # noqa: E402

Step = Callable[[], Any]
MIB = 2**20
CONTEXT = "CUDA context, kernels, libraries"
CONDITIONS = ("lazy", "eager", "other process", "limit", "warm")
STEPS = 4
LIMIT = 0.1  # of the device, where there is a limit
RUN_SECONDS = 120
KEPT = ("workload", "condition", "error", "used", "residual", "limit", "closes", "sums")
KEPT += ("request_failed", "residual_with_twins_context")


# ---------------------------------------------------------------- workloads


def trained(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor], **adam: Any) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **adam)

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step


def mlp(device: str) -> Step:
    model = nn.Sequential(nn.Linear(4096, 8192), nn.ReLU(), nn.Linear(8192, 4096)).to(device)
    x = torch.randn(512, 4096, device=device)
    return trained(model, lambda model: model(x).square().mean())


def convnet(device: str) -> Step:
    layers: list[nn.Module] = []
    for inner, outer in ((3, 64), (64, 128), (128, 256), (256, 512)):
        layers += [nn.Conv2d(inner, outer, 3, 2, 1), nn.BatchNorm2d(outer), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100))
    model = model.to(device)
    x = torch.randn(64, 3, 128, 128, device=device)
    y = torch.randint(100, (64,), device=device)
    return trained(model, lambda model: functional.cross_entropy(model(x), y))


def gpt2(device: str) -> Step:
    return models.gpt2(device, batch=4, length=256).step


def long_context(device: str) -> Step:
    return models.gpt2(device, batch=2, length=1024).step


def checkpointed(device: str) -> Step:
    blocks = nn.ModuleList(
        nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(4)
    ).to(device)
    x = torch.randn(16, 256, 512, device=device, requires_grad=True)

    def loss(_: nn.Module) -> torch.Tensor:
        hidden = x
        for block in blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden.square().mean()

    return trained(blocks, loss)


def lstm(device: str) -> Step:
    model = nn.LSTM(512, 512, num_layers=2, batch_first=True).to(device)
    x = torch.randn(32, 128, 512, device=device)
    return trained(model, lambda model: model(x)[0].square().mean())


def accumulated(device: str) -> Step:
    model = nn.Sequential(nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 2048)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(256, 2048, device=device)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(4):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
        optimizer.step()

    return step


def streams(device: str) -> Step:
    model = nn.Linear(4096, 4096).to(device)
    side = torch.cuda.Stream()
    x = torch.randn(1024, 4096, device=device)

    def loss(model: nn.Module) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other = x.sin() @ x.T
        torch.cuda.current_stream().wait_stream(side)
        other.record_stream(torch.cuda.current_stream())
        return (other @ model(x)).square().mean()

    return trained(model, loss)


def solver(device: str) -> Step:
    """Uses cuSOLVER and cuFFT, which have handles and plans of their own."""
    model = nn.Linear(512, 512).to(device)

    def loss(model: nn.Module) -> torch.Tensor:
        square = model.weight @ model.weight.T + 512 * torch.eye(512, device=device)
        return (
            torch.linalg.cholesky(square).square().mean()
            + torch.fft.rfft(model.weight).abs().mean()
        )

    return trained(model, loss)


def inference(device: str) -> Step:
    """Runs without optimizer and steps: the device is read between the calls."""
    model = models.Transformer(models.GPT2).to(device).eval()
    ids = torch.randint(models.GPT2.vocabulary, (2, 512), device=device)

    def step() -> None:
        with torch.no_grad():
            model(ids, ids)

    return step


WORKLOADS: dict[str, Callable[[str], Step]] = {
    function.__name__: function
    for function in (
        mlp,
        convnet,
        gpt2,
        long_context,
        checkpointed,
        lstm,
        accumulated,
        streams,
        solver,
        inference,
    )
}


# ---------------------------------------------------------------- one run, in its own process


def run_in_child(pipe: Any, workload: str, condition: str, ask_smi: bool) -> None:
    try:
        pipe.send(run_here(workload, condition, ask_smi))
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"})


def run_here(workload: str, condition: str, ask_smi: bool) -> dict[str, Any]:
    os.environ["CUDA_MODULE_LOADING"] = "EAGER" if condition == "eager" else "LAZY"
    torch.manual_seed(0)
    step: Step | None = None
    if condition == "limit":
        torch.cuda.set_per_process_memory_fraction(LIMIT)
    if condition == "warm":
        step = WORKLOADS[workload]("cuda")
        step()
        torch.cuda.synchronize()
    began = time.perf_counter()
    with trace(devices="cuda") as t:
        step = step or WORKLOADS[workload]("cuda")
        for _ in range(STEPS):
            step()
        failed = condition == "limit" and not fits(2 * LIMIT)
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    found = ledger.ledger(t.data)
    document = t.data.meta["device_memory"]
    return {
        "seconds": seconds,
        "request_failed": failed,
        "used": found.total,
        "residual": found.residual,
        "limit": found.limit,
        "closes": found.closes,
        "sums": adds_up(found),
        "notes": found.notes,
        "rows": [vars(row) for row in found.rows],
        "reading_ms": [reading["took_ns"] / 1e6 for reading in document["readings"]],
        "readings": document,
        "nvidia_smi": nvidia_smi(document["devices"]["cuda:0"]) if ask_smi else None,
        "health": t.health().reset_index().to_dict("records"),
    }


def fits(fraction: float) -> bool:
    """Whether the allocator serves a request of that share of the device."""
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.empty(int(fraction * total), dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        return False
    return True


def adds_up(found: ledger.Ledger) -> bool:
    """Whether the first level's rows, residual included, sum to the total to the byte."""
    return found.total == sum(row.bytes or 0 for row in found.rows if row.level == 1)


def nvidia_smi(uuid: str) -> dict[str, int] | None:
    """Returns nvidia-smi's figure for the device now, in MiB."""
    command = ["nvidia-smi", "-i", f"GPU-{uuid}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(
            [*command, "--query-gpu=memory.used,memory.reserved"],
            capture_output=True,
            text=True,
            timeout=30,
        )
        used, reserve = (int(part) for part in found.stdout.split(","))
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return {"used_mib": used, "reserved_mib": reserve}


def what_smi_counts(run: dict[str, Any]) -> str:
    """Returns which of NVML's figures nvidia-smi shows, to the MiB to which it rounds."""
    said = run["nvidia_smi"]["used_mib"]
    reserve = next(row["bytes"] for row in run["rows"] if row["name"] == "driver's reserve") or 0
    if abs(said - (run["used"] - reserve) / MIB) <= 1:
        return "without the driver's reserve"
    if abs(said - run["used"] / MIB) <= 1:
        return "with the driver's reserve"
    return f"something else: {said} MiB"


def hold_memory(pipe: Any, amount: int) -> None:
    """Runs in the other process: holds memory until it gets the order to end."""
    held = torch.ones(amount, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    pipe.send(held.nbytes)
    pipe.recv()


# ---------------------------------------------------------------- all of them


def in_process(workload: str, condition: str, ask_smi: bool = False) -> dict[str, Any]:
    """Makes one run, in a process that has not used CUDA before."""
    context = _context()
    ours, theirs = context.Pipe()
    process = context.Process(target=run_in_child, args=(theirs, workload, condition, ask_smi))
    process.start()
    theirs.close()
    try:
        if not ours.poll(RUN_SECONDS):
            return {"error": f"not done after {RUN_SECONDS} s"}
        result: dict[str, Any] = ours.recv()
    except EOFError:
        process.join()
        return {"error": f"the process died with exit code {process.exitcode}"}
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()
    return result


def _context() -> Any:
    """Forks from a server that has imported torch and not touched CUDA: saves seconds per run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "pandas", "pytracer", "pytracer.analysis.allocator.ledger"]
    )
    return context


@contextmanager
def other_process(wanted: bool) -> Any:
    """Starts another process that holds 3 GiB, if it is wanted."""
    if not wanted:
        yield
        return
    ours, theirs = _context().Pipe()
    process = _context().Process(target=hold_memory, args=(theirs, 3 << 30))
    process.start()
    if not ours.poll(RUN_SECONDS):
        raise RuntimeError("the other process did not get its memory")
    ours.recv()
    try:
        yield
    finally:
        ours.send("go")
        process.join(30)


def wait_until_quiet(nvml: Any) -> None:
    """Waits until the memory of the last process is free again."""
    before = -1
    for _ in range(50):
        gpus = driver.read_gpus(nvml, driver.all_uuids(nvml))
        now = sum(gpu.get("used", 0) for gpu in gpus.values())
        if now == before:
            return
        before = now
        time.sleep(0.1)


def compare_twins(runs: list[dict[str, Any]]) -> None:
    """Closes each lazily loading run with the context measured by its twin, another process."""
    by_name: dict[tuple[str, str], dict[str, Any]] = {
        (run["workload"], run["condition"]): run for run in runs if "error" not in run
    }
    for (workload, condition), run in by_name.items():
        twin = {"lazy": "other process", "other process": "lazy"}.get(condition)
        other = by_name.get((workload, twin or ""))
        own = context_of(run)
        if other is not None and own is not None and (theirs := context_of(other)) is not None:
            run["residual_with_twins_context"] = run["residual"] + own - theirs


def context_of(run: dict[str, Any]) -> int | None:
    return next((row["bytes"] for row in run["rows"] if row["name"] == CONTEXT), None)


def line_of(run: dict[str, Any]) -> str:
    head = f"{run['workload']:<14}{run['condition']:<15}"
    if "error" in run:
        return f"{head}{run['error']}"
    figures = [run["used"], context_of(run), run["residual"], run["limit"]]
    shown = "".join("       none" if x is None else f"{x / MIB:>11.2f}" for x in figures)
    return f"{head}{shown}  {'closes' if passed(run) else 'OPEN'}"


def passed(run: dict[str, Any]) -> bool:
    limited = run.get("condition") != "limit" or run.get("request_failed")
    return bool(run.get("closes") and run.get("sums") and limited)


def machine(nvml: Any) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    return {
        "device": nvml.nvmlDeviceGetName(handle),
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--conditions", default=",".join(CONDITIONS))
    options = parser.parse_args()
    workloads, conditions = options.workloads.split(","), options.conditions.split(",")
    unknown = {*workloads, *conditions} - {*WORKLOADS, *CONDITIONS}
    if unknown:
        parser.error(f"no such workload or condition: {', '.join(sorted(unknown))}")
    nvml = driver.open_nvml()
    if isinstance(nvml, str):
        parser.error(f"this needs a GPU and NVML: {nvml}")

    began = time.monotonic()
    try:
        probed = probe.measure()
    except errors.PytracerError as error:
        probed = {"error": str(error)}
    facts = machine(nvml)
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"ledger-{slug(facts['device'])}.json"
    print(f"{'MiB':<29}{'in use':>11}{'context':>11}{'residual':>11}{'limit':>11}")
    runs: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for condition in conditions:
        with other_process(condition == "other process"):
            for i, workload in enumerate(workloads):
                wait_until_quiet(nvml)
                run = {"workload": workload, "condition": condition}
                run |= in_process(workload, condition, ask_smi=i == 0)
                print(line_of(run), flush=True)
                runs.append(run)
        # After each run, so that a time limit loses no finished run.
        compare_twins(runs)
        summary = summarise(runs, time.monotonic() - began)
        document = {"machine": facts, "summary": summary, "probe": probed}
        kept.write(target, document | {"runs": kept.only(runs, *KEPT)})
    print(json.dumps({"summary": summary, "probe": probed}, indent=1))
    print(f"written: {target.name}")
    return 0 if summary["closed"] == summary["runs"] else 1


def summarise(runs: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    done = [run for run in runs if "error" not in run]
    residuals = [abs(run["residual"]) for run in done if run["residual"] is not None]
    twins = [run for run in done if "residual_with_twins_context" in run]
    times = [ms for run in done for ms in run["reading_ms"]]
    return {
        "runs": len(runs),
        "closed": sum(passed(run) for run in done),
        "largest_residual": max(residuals, default=None),
        "twins": len(twins),
        "twins_closed": sum(
            abs(run["residual_with_twins_context"]) <= run["limit"] for run in twins
        ),
        "twins_largest_residual": max(
            (abs(run["residual_with_twins_context"]) for run in twins), default=None
        ),
        "nvidia_smi_counts": sorted({what_smi_counts(run) for run in done if run["nvidia_smi"]}),
        "reading_ms": {
            "median": statistics.median(times) if times else None,
            "largest": max(times, default=None),
        },
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
