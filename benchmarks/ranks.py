"""What each way of training on several GPUs costs a rank, and whether a trace of it is right.

    python benchmarks/ranks.py --out benchmarks/results            # two GPUs or more
    python benchmarks/ranks.py --device cpu --ways ddp fsdp2       # gloo, a tiny model
    WAYS="fsdp2 ddp" sh benchmarks/on_gpu.sh OUT ranks             # builds first; 60 s a way at most

Each way (`programs/parallel.py`) runs untraced, traced, and then both in turns for the time of a step. A
block has five steps and the last three are timed: a recording reads the graphs of its first two. What
these two take longer, and what it takes to begin and to end, has figures of its own (`recording_s`).
`fsdp2_offloaded` is not timed and has 4 of the model's 22 layers, since the host computes its steps.
`benchmarks/rank_tables.py` makes the tables of docs/ranks.md.
"""

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import kept, slug  # noqa: E402
from programs import parallel  # noqa: E402


def run(ways: list[parallel.Way], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per way: its ranks' documents, or the reason why there are none. All need as many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        problem = _started(ways, folder, options)
        if options.keep is not None:
            for file in Path(folder).rglob("*.pytrace"):
                kept = options.keep / file.parent.name
                kept.mkdir(parents=True, exist_ok=True)
                (kept / file.name).write_bytes(file.read_bytes())
        return [_row(way, Path(folder) / way.name, problem) for way in ways]


def _started(ways: list[parallel.Way], folder: str, options: argparse.Namespace) -> str:
    """Runs the ranks, and returns what went wrong."""
    command = [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ways[0].ranks), "-m", "programs.parallel", folder),
        *(way.name for way in ways),
        *("--device", options.device, "--size", options.size, "--rounds", str(options.rounds)),
    ]
    settings = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    try:
        ran = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=options.seconds * len(ways),
        )
    except subprocess.TimeoutExpired:
        return f"took more than {options.seconds * len(ways)} s, with those before it"
    said = [line for line in ran.stderr.splitlines() if line.startswith("[rank")]
    return "\n".join(said or [ran.stderr])[-2000:]


def _row(way: parallel.Way, folder: Path, problem: str) -> dict[str, Any]:
    """The row says when it was taken: a file may have rows of several days."""
    ranks = [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]
    failed = next((one["problem"] for one in ranks if "problem" in one), "")
    if failed or len(ranks) < way.ranks:
        return {"way": way.name, "problem": failed or problem}
    return {
        "way": way.name,
        "taken": dt.date.today().isoformat(),
        "ranks": list(map(_figures, ranks)),
    }


def _figures(rank: dict[str, Any]) -> dict[str, Any]:
    """What the tables show of a rank."""
    seen = rank["trace"]
    trace = {
        **kept.only(seen, "peak", "gathered", "residual"),
        "at_end": kept.only(seen["at_end"], "weights", "optimizer_state"),
        "most": kept.only(seen["most"], "gradients", "communication", "unknown"),
    }
    others = kept.only(rank, "way", "parameters", "same", "truth", "step_ratio")
    return others | {"trace": trace}


def unfit(way: parallel.Way, options: argparse.Namespace) -> str:
    """Why a way cannot run here; "" if it can."""
    if way.needs and way.needs != options.device:
        return f"needs {way.needs}"
    if options.device == "cuda" and torch.cuda.device_count() < way.ranks:
        return f"needs {way.ranks} GPUs"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--size", choices=["tiny", "large"])
    parser.add_argument("--ways", nargs="*", choices=parallel.WAYS, default=list(parallel.WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=60, help="the most for one way")
    parser.add_argument("--at-once", type=int, default=4, help="ways in one pair of processes")
    parser.add_argument("--keep", type=Path, help="a folder for the traces")
    options = parser.parse_args()
    options.size = options.size or ("large" if options.device == "cuda" else "tiny")
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    document: dict[str, Any] = {
        "taken": dt.date.today().isoformat(),
        "device": device,
        "devices": torch.cuda.device_count(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if options.device == "cuda" else "",
        "size": options.size,
        "ways": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"ranks-{slug(device)}.json"
    waiting = [parallel.WAYS[name] for name in options.ways]
    while waiting:
        batch = [way for way in waiting if way.ranks == waiting[0].ranks][: options.at_once]
        waiting = [way for way in waiting if way not in batch]
        able = [way for way in batch if not unfit(way, options)]
        rows = [
            {"way": way.name, "problem": unfit(way, options)} for way in batch if way not in able
        ]
        for row in rows + (run(able, options) if able else []):
            document["ways"].append(row)
            print(row["way"], row.get("problem", "done"), flush=True)
        kept.write(target, document)


if __name__ == "__main__":
    main()
