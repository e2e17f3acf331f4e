"""Makes programs fit on a GPU with less memory than they need, and compares with what was promised.

    python benchmarks/fit.py --out benchmarks/results [--names "A|B"] [--workers N] [--found FILE]

Each program is imagined here, and a plan is searched for SHARE of what it reserves. Then it runs on
the GPU: as it is; as it is with that limit, which must fail; under the plan with that limit. Each
step is timed. Losses are compared with deterministic algorithms, in runs of their own.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import imagine_programs, kept, slug  # noqa: E402

SHARE = 0.85  # of what the program reserves
STEPS = 6
# Transformers, diffusion, convolutions, recurrent networks and others, of several optimizers.
NAMES = (
    "BERT, fp32, AdamW", "GPT-2, AMP, AdamW", "GPT-2, fp32, Adam in a loop", "GPT-2, AMP, eager attention",
    "Llama, bfloat16, SGD", "Llama, AMP, accumulation", "ViT, AMP, AdamW", "Whisper, AMP, AdamW",
    "ResNet-50, fp32, SGD", "ResNet-50, AMP, AdamW", "ConvNeXt, AMP, AdamW", "U-Net, fp32, AdamW",
    "U-Net, AMP, AdamW", "Qwen3, AMP, AdamW", "Mistral, bfloat16, fused AdamW", "OPT, fp32, AdamW",
    "GPT-NeoX, AMP, fused AdamW", "BART, AMP, AdamW", "Swin, AMP, AdamW",
    "TransformerEncoder with dropout, AMP",
)  # fmt: skip


# ---------------------------------------------------------------- the search, without a GPU


def search(name: str, card: str) -> dict[str, Any]:
    """A plan for less than the program needs: what was tried, or why there is none."""
    from pytracer.analysis.forecasts import fitting
    from pytracer.imagined import script

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        words = (str(Path(__file__).resolve()), "--program", name)
        plan = script.Plan(words, False, card)

        def imagine(changes: Any) -> Any:
            found = script.imagine(replace(plan, changes=changes), Path(folder))
            return (None if found.trace is None else found.trace.data), found.problem

        first = script.imagine(plan, Path(folder))
        if first.trace is None:
            return {"name": name, "problem": first.problem}
        fits = first.trace.fits("70GiB")
        limit = int(SHARE * fits.reserved[0]) + fits.uncertain
        room = limit + fits.more - fits.uncertain
        found = fitting.search(imagine, first.trace.data, room, fitting.Wanted())
    best = found.chosen
    promised = {"peak": best.peak, "reserved": best.reserved, "time": best.time_ratio}
    return {
        "name": name,
        "limit": limit,
        "plain": first.trace.peak.bytes,
        "fits": best.fits,
        "changes": asdict(best.changes),
        "bit_equal": best.changes.is_bit_equal,
        "promised": promised,
        "tried": len(found.tried),
        "seconds": time.monotonic() - began,
    }


# ---------------------------------------------------------------- the runs, on the GPU


@contextlib.contextmanager
def planned(changes: Any) -> Iterator[None]:
    """The changes of a plan, as `pytracer run --apply` makes them."""
    from pytracer.recording.applied import Applied
    from pytracer.recording.trial import Trial

    def stop(reason: str) -> None:
        raise RuntimeError(reason)

    trials: list[Any] = []
    if changes.checkpoint or changes.offload:
        trials.append(Trial(changes.checkpoint, changes.offload, stop=stop, tell=print))
    trials.append(Applied(changes))
    for one in trials:
        one.begin()
    try:
        yield
    finally:
        problems = [one.end() for one in trials]
    if any(problems):
        raise RuntimeError("; ".join(filter(None, problems)))


def run(name: str, changes: Any, steps: int, limit: int | None, *, exact: bool) -> dict[str, Any]:
    """Runs the program once. What it leaves is removed before."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else (limit + 0.5) / total)
    torch.use_deterministic_algorithms(exact, warn_only=True)
    ends: list[float] = []
    losses: list[float] = []
    item = torch.Tensor.item

    def stepped(*_: Any) -> None:
        torch.cuda.synchronize()
        ends.append(time.perf_counter())

    def noted(tensor: Any) -> Any:
        losses.append(value := item(tensor))
        return value

    hook = register_optimizer_step_post_hook(stepped)
    torch.Tensor.item = noted  # type: ignore[method-assign, assignment]
    imagine_programs.STEPS = steps
    failed = ""
    try:
        with planned(changes):
            imagine_programs.PROGRAMS[name]("cuda")
    except torch.OutOfMemoryError:
        failed = "out of memory"
    except Exception as problem:
        failed = f"{type(problem).__name__}: {problem}"[:300]
    finally:
        hook.remove()
        torch.Tensor.item = item  # type: ignore[method-assign]
    stats = torch.cuda.memory_stats()
    took = [after - before for before, after in itertools.pairwise(ends[1:])]
    return {
        "failed": failed,
        "peak": stats["requested_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "step_s": statistics.median(took) if took else None,
        "losses": [float(value).hex() for value in losses],
    }


def measure(found: dict[str, Any]) -> dict[str, Any]:
    """The plain program and the fitted one, with and without the limit."""
    from pytracer.data.changes import Changes, changes_of

    name, limit, changes = found["name"], found["limit"], changes_of(found["changes"])
    row = {
        "plain": run(name, Changes(), STEPS, None, exact=False),
        "limited": run(name, Changes(), 2, limit, exact=False),
        "fitted": run(name, changes, STEPS, limit, exact=False),
    }
    plain, again, fitted = (
        run(name, each, 2, None, exact=True)["losses"] for each in (Changes(), Changes(), changes)
    )
    # None: two runs of the plain program differ, so nothing can be compared.
    row["equal"] = plain == fitted if plain and plain == again else None
    for one in ("plain", "limited", "fitted"):
        del row[one]["losses"]
    return row


def drive(path: Path) -> None:
    """Measures all programs of a file in this process, whose allocator has the settings of all."""
    rows = json.loads(path.read_text())
    for row in rows:
        try:
            row["measured"] = measure(row)
        except Exception as problem:
            row["measured"] = {"problem": f"{type(problem).__name__}: {problem}"[:300]}
        path.with_suffix(".out").write_text(json.dumps(rows))


def measured(found: list[dict[str, Any]], folder: Path, seconds: float) -> list[dict[str, Any]]:
    """Each program with its measurement. Programs of equal settings share a process."""
    from pytracer.data.changes import allocator_variables

    by_settings: dict[str, list[dict[str, Any]]] = {}
    rows = [one for one in found if "problem" in one or not one["fits"]]
    for one in found:
        if one not in rows:
            by_settings.setdefault(one["changes"]["settings"], []).append(one)
    ends = time.monotonic() + seconds
    for number, (settings, group) in enumerate(by_settings.items()):
        path = folder / f"drive-{number}.json"
        path.write_text(json.dumps(group))
        variables = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        variables |= allocator_variables(settings) if settings else {}
        command = [sys.executable, __file__, "--drive", str(path)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, env=variables, timeout=max(ends - time.monotonic(), 1))
        done = path.with_suffix(".out")
        rows += json.loads(done.read_text()) if done.exists() else group
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--names", default="|".join(NAMES), help="with | between them")
    parser.add_argument("--found", type=Path, help="plans of an earlier search: rows as JSON")
    parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) - 2, 1))
    parser.add_argument("--seconds", type=float, default=200, help="for the runs on the GPU")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        imagine_programs.PROGRAMS[options.program]("cuda")
        return
    if options.drive:
        drive(options.drive)
        return
    import torch

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "H100"
    options.out.mkdir(parents=True, exist_ok=True)
    if options.found:
        found = json.loads(options.found.read_text())
    else:
        with ThreadPoolExecutor(options.workers) as pool:
            found = list(pool.map(lambda name: search(name, card), options.names.split("|")))
    rows = found if card == "H100" else measured(found, options.out, options.seconds)
    machine = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": card,
        "torch": torch.__version__,
    }
    path = options.out / f"fit-{slug(card)}.json"
    kept.write(path, {"machine": machine, "share": SHARE, "steps": STEPS, "programs": rows})
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
