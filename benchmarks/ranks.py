"""What each way of training on several GPUs costs a rank, and whether a trace of it is right.

    python benchmarks/ranks.py --out benchmarks/results            # two GPUs or more
    python benchmarks/ranks.py --device cpu --ways ddp fsdp2       # gloo, a tiny model

Each way (`programs/parallel.py`) runs in processes of its own: untraced, traced, then both in turns for the
time of a step. `benchmarks/ranks_tables.py` makes the tables of docs/ranks.md.
"""

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import slug  # noqa: E402
from programs import parallel  # noqa: E402


def run(way: parallel.Way, options: argparse.Namespace) -> dict[str, Any]:
    """The ranks' documents, or the reason why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(way.ranks), "-m", "programs.parallel", way.name, folder),
            *("--device", options.device, "--size", options.size),
            *("--rounds", str(options.rounds)),
        ]
        settings = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        began = time.monotonic()
        try:
            ran = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, **settings},
                capture_output=True,
                text=True,
                timeout=options.seconds,
            )
        except subprocess.TimeoutExpired:
            return {"way": way.name, "problem": f"took more than {options.seconds} s"}
        files = sorted(Path(folder).glob("rank*.json"))
        if len(files) < way.ranks:
            said = [line for line in ran.stderr.splitlines() if line.startswith("[rank")]
            return {"way": way.name, "problem": "\n".join(said or [ran.stderr])[-2000:]}
        if options.keep is not None:
            kept = options.keep / way.name
            kept.mkdir(parents=True, exist_ok=True)
            for file in Path(folder).glob("*.pytrace"):
                (kept / file.name).write_bytes(file.read_bytes())
        ranks = [json.loads(file.read_text()) for file in files]
        return {"way": way.name, "seconds": round(time.monotonic() - began, 1), "ranks": ranks}


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
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=int, default=120, help="the most for one way")
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
    for name in options.ways:
        why = unfit(parallel.WAYS[name], options)
        row = {"way": name, "problem": why} if why else run(parallel.WAYS[name], options)
        document["ways"].append(row)
        print(name, row.get("problem") or f"{row['seconds']} s", flush=True)
        target.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
