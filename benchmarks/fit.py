"""Makes programs fit on a GPU with less memory than they need, and compares with what was promised.

    python benchmarks/fit.py --out DIR [--names "A|B"] [--workers N]     # searches, without a GPU
    python benchmarks/fit.py --out DIR --found FILE --part memory --at-once 4    # on a GPU
    python benchmarks/fit.py --out DIR --found FILE --part times                 # alone on a GPU
    python benchmarks/fit.py --out benchmarks/results --merge DIR/*.json         # and the docs

Each program is imagined, and a plan is searched for SHARE of what it reserves. Then it runs on the
GPU: as it is; as it is with that limit, which must fail; under the plan with that limit. Losses are
compared with deterministic algorithms, in runs of their own. Steps are timed in turn.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import signal
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

from benchmarks import imagine_programs, imagine_ranks, kept, slug  # noqa: E402

SHARE = 0.85  # of what the program reserves
STEPS = 6
# Transformers, diffusion, convolutions, recurrent networks and others, of several optimizers.
NAMES = (
    "BERT, fp32, AdamW", "GPT-2, AMP, AdamW", "GPT-2, fp32, Adam in a loop", "GPT-2, AMP, eager attention",
    "Llama, bfloat16, SGD", "Llama, AMP, accumulation", "ViT, AMP, AdamW", "Whisper, AMP, AdamW",
    "ResNet-50, fp32, SGD", "ResNet-50, AMP, AdamW", "ConvNeXt, AMP, AdamW", "U-Net, fp32, AdamW",
    "U-Net, AMP, AdamW", "Qwen3, AMP, AdamW", "Mistral, bfloat16, fused AdamW", "OPT, fp32, AdamW",
    "GPT-NeoX, AMP, fused AdamW", "BART, AMP, AdamW", "Swin, AMP, AdamW",
    "TransformerEncoder with dropout, AMP", "T5, AMP, AdamW", "BEiT, AMP, AdamW",
    "Llama, fp16 with a scaler", "DistilBERT, fp16 with a scaler", "MoE (Mixtral), bfloat16, SGD",
    "Gemma 2, bfloat16, SGD",
)  # fmt: skip

# Of two ranks, each on a GPU of its own.
OF_RANKS = (
    "DDP, GPT-2, AMP", "FSDP2, Llama, bfloat16", "DDP, Llama, gradients in buckets",
    "DDP, GPT-2, accumulation",
)  # fmt: skip
PROGRAMS = {**imagine_programs.PROGRAMS, **imagine_ranks.PROGRAMS}


def ranks_of(name: str) -> int:
    """On how many GPUs the program runs."""
    return imagine_ranks.RANKS if name in imagine_ranks.PROGRAMS else 1


# ---------------------------------------------------------------- the search, without a GPU


def search(name: str, card: str) -> dict[str, Any]:
    """A plan for less than the program needs: what was tried, or why there is none."""
    from pytracer.analysis.forecasts import fitting
    from pytracer.imagined import script

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        words = (str(Path(__file__).resolve()), "--program", name)
        count = ranks_of(name)
        plan = script.Plan(words, False, card, ranks=count if count > 1 else None)

        def imagine(changes: Any, rank: int = 0) -> Any:
            found = script.imagine(replace(plan, changes=changes, rank=rank), Path(folder))
            return (None if found.trace is None else found.trace.data), found.problem

        first = script.imagine(plan, Path(folder))
        if first.trace is None:
            return {"name": name, "problem": first.problem}
        fits = first.trace.fits("70GiB")
        limit = int(SHARE * fits.reserved[0])
        room = (
            limit + fits.more - fits.uncertain
        )  # what is beside the allocator does not count here
        found = fitting.search(imagine, first.trace.data, room, fitting.Wanted())
        for rank in range(1, count):
            found = fitting.with_rank(found, rank, *imagine(found.chosen.changes, rank))
    best = found.chosen
    promised = {
        "peak": best.peak,
        "reserved": best.reserved,
        "time": best.time_ratio,
        "time_at_most": best.time_at_most,
        "flushes": best.flushes,  # then a step takes longer than that
    }
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
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else (limit + 0.5) / total)
    torch.use_deterministic_algorithms(exact)  # cuDNN's attention is not, if it only warns
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
    imagine_programs.STEPS = imagine_ranks.STEPS = steps
    _meet_elsewhere()
    failed = ""
    try:
        with planned(changes):
            _start(name)
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
        "retries": stats["num_alloc_retries"] - retries,  # the cache was given back for a request
        "losses": [float(value).hex() for value in losses],
    }


def _meet_elsewhere() -> None:
    """Gives the ranks of the next run a store of their own: torchrun's has the last run's addresses."""
    if "MASTER_PORT" in os.environ:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)


def _start(name: str) -> None:
    program: Any = PROGRAMS[name]
    program() if ranks_of(name) > 1 else program("cuda")


def measure(found: dict[str, Any], part: str) -> Iterator[tuple[str, Any]]:
    """What is measured of the plain program and of the fitted one, with and without the limit.

    Nothing follows a run of several ranks that has failed: its other ranks may still wait.
    """
    from pytracer.data.changes import Changes, changes_of

    name, limit, changes = found["name"], found["limit"], changes_of(found["changes"])
    fitted, plain = (changes, limit), (Changes(), None)

    def done(way: tuple[Any, Any], steps: int = STEPS, *, exact: bool = False) -> dict[str, Any]:
        return run(name, way[0], steps, None if exact else way[1], exact=exact)

    if part == "times":
        # Twice, because the first runs on an idle GPU are slow.
        for key, way in (("fitted", fitted), ("plain", plain)) * 2:
            ran = done(way)
            yield key, {"step_s": ran["step_s"], "failed": ran["failed"]}
            if ran["failed"] and ranks_of(name) > 1:
                return
        return
    # The plan first: other runs leave small blocks behind.
    for key, way in (("fitted", fitted), ("plain", plain)):
        ran = done(way)
        taken = ("failed", "peak", "reserved", "retries")
        yield key, {each: ran[each] for each in taken}
        if ran["failed"] and ranks_of(name) > 1:
            return
    exact = [done(way, 2, exact=True) for way in (plain, plain, fitted)]
    before, again, after = (one["losses"] for one in exact)
    # None: an operator is not deterministic, or two runs of the plain program differ.
    is_known = before and before == again and not any(one["failed"] for one in exact)
    yield "equal", before == after if is_known else None
    ran = done((Changes(), limit))
    yield "limited", {key: ran[key] for key in ("failed", "peak", "reserved")}


def _joined(before: Any, more: Any) -> Any:
    """Both. Of two times the shorter holds, and what has failed once has failed."""
    if not isinstance(before, dict) or not isinstance(more, dict):
        return more
    joined = {**before, **{key: _joined(before.get(key), value) for key, value in more.items()}}
    if before.get("step_s") and more.get("step_s"):
        joined["step_s"] = min(before["step_s"], more["step_s"])
    if "failed" in joined:
        joined["failed"] = more.get("failed") or before.get("failed") or ""
    return joined


def drive(path: Path, part: str) -> None:
    """Measures the plan that the file names. After each run it writes the figures so far."""
    row = json.loads(path.read_text())
    out = path.with_suffix(f".out{os.environ.get('RANK', '0')}")
    taken: dict[str, Any] = {}
    try:
        for key, value in measure(row, part):
            taken = _joined(taken, {key: value})
            out.write_text(json.dumps(taken))
    except Exception as problem:
        taken["problem"] = f"{type(problem).__name__}: {problem}"[:300]
        out.write_text(json.dumps(taken))
    os._exit(0)  # a process group with a failed rank does not end


def measured(found: list[dict[str, Any]], folder: Path, options: Any) -> list[dict[str, Any]]:
    """Each program with its measurement, in a process of its own: others leave small blocks behind."""
    ends = time.monotonic() + options.seconds

    def one(number: int) -> dict[str, Any]:
        row = found[number]
        left = ends - time.monotonic()
        if "problem" in row or not row["fits"] or left < 1:
            return row
        path = folder / f"{options.part}-{number}.json"
        path.write_text(json.dumps(row))
        _run_apart(row, path, options.part, min(left, _MOST_SECONDS))
        outs = [path.with_suffix(f".out{rank}") for rank in range(ranks_of(row["name"]))]
        ranks = [json.loads(each.read_text()) for each in outs if each.exists()]
        return _told({**row, "measured": _of_ranks(ranks)} if ranks else row)

    with ThreadPoolExecutor(options.at_once) as pool:
        return list(pool.map(one, range(len(found))))


_MOST_SECONDS = 60  # of a program
_TO_END = 10


def _run_apart(row: dict[str, Any], path: Path, part: str, seconds: float) -> None:
    """Runs one program, and ends all its processes."""
    from pytracer.data.changes import allocator_variables

    settings = row["changes"]["settings"]
    variables = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    variables |= allocator_variables(settings) if settings else {}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch = launch if ranks_of(row["name"]) > 1 else []
    command = [sys.executable, *launch, __file__, "--drive", str(path), "--part", part]
    process = subprocess.Popen(command, env=variables, start_new_session=True)
    for left in (seconds, _TO_END):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(left)
        process.terminate()  # torchrun ends its ranks, which have sessions of their own
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _of_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The first rank's figures. What failed in any rank has failed, and all must have equal losses."""
    first = ranks[0]
    for other in ranks[1:]:
        for key in ("plain", "fitted", "limited"):
            failed = other.get(key, {}).get("failed")
            if failed:
                first.setdefault(key, {})["failed"] = failed
        if "equal" in first:
            first["equal"] = first["equal"] and other.get("equal")
    return first


def merged(paths: list[Path]) -> dict[str, Any]:
    """One document of several: each program with all that was measured of it."""
    documents = [kept.read(path) for path in paths]
    rows: dict[str, dict[str, Any]] = {}
    for document in documents:
        for row in document["programs"]:
            rows[row["name"]] = _joined(rows.get(row["name"], {}), row)
    measured_on = [one for one in documents if any("measured" in row for row in one["programs"])]
    return {**(measured_on or documents)[-1], "programs": list(rows.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    every = "|".join((*NAMES, *OF_RANKS))
    parser.add_argument(
        "--names", default=every, help="with | between them; those of ranks need two GPUs"
    )
    parser.add_argument("--found", type=Path, help="plans of an earlier search: rows as JSON")
    parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) - 2, 1))
    parser.add_argument("--seconds", type=float, default=200, help="for the runs on the GPU")
    parser.add_argument("--part", choices=("memory", "times"), default="memory")
    parser.add_argument("--at-once", type=int, default=1, help="programs on the GPU: 1 for times")
    parser.add_argument("--merge", type=Path, nargs="+", help="results of parts, into one file")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        _start(options.program)
        return
    if options.drive:
        drive(options.drive, options.part)
        return
    import torch

    options.out.mkdir(parents=True, exist_ok=True)
    if options.merge:
        document = merged(options.merge)
        kept.write(options.out / f"fit-{slug(document['machine']['device'])}.json", document)
        subprocess.run([sys.executable, str(ROOT / "benchmarks" / "readme_tables.py")], check=True)
        return
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "H100"
    if options.found:
        found = json.loads(options.found.read_text())
    else:
        names = options.names.split("|")
        with ThreadPoolExecutor(options.workers) as pool:
            found = [_told(one) for one in pool.map(lambda name: search(name, card), names)]
        (options.out / "found.json").write_text(json.dumps(found))
    rows = found if card == "H100" else measured(found, options.out, options)
    machine = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": card,
        "torch": torch.__version__,
    }
    path = options.out / f"fit-{options.part}-{slug(card)}.json"
    kept.write(path, {"machine": machine, "share": SHARE, "steps": STEPS, "programs": rows})


def _told(found: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    main()
