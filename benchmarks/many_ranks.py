"""What it takes to reduce, compare and ask the files of many ranks.

    python benchmarks/many_ranks.py --out benchmarks/results

The ranks are made from real recordings, with planted faults (`programs/many_ranks.py`).
"""

import argparse
import datetime as dt
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pytracer  # noqa: E402
from programs import many_ranks  # noqa: E402
from pytracer.ranks import dataset  # noqa: E402

QUESTION = (
    "SELECT s.rank, o.module, s.step, s.bytes FROM step_categories s "
    "JOIN owners o ON o.rank = s.rank WHERE s.category = 'activations' "
    "ORDER BY s.bytes DESC, o.bytes DESC LIMIT 10"
)


def summarised(folder: Path, *options: str) -> dict[str, float]:
    """`pytracer summary` of the folder, in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    command = [sys.executable, "-m", "pytracer", "summary", str(folder), *options]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": round(cpu, 2), "wall_s": round(time.monotonic() - began, 2)}


def peak_mib(folder: Path) -> float:
    """The most resident memory of reading the job."""
    code = (
        "import resource, sys, pytracer; str(pytracer.load(sys.argv[1])); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, check=True
    )
    return round(int(ran.stdout) / 1024, 1)


def measured(ranks: int, *, everything: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        files, target = Path(place) / "job", Path(place) / "digests"
        files.mkdir()
        faults = many_ranks.write(files, ranks)
        row: dict[str, Any] = {"ranks": ranks, **summarised(files), "peak_mib": peak_mib(files)}
        row["trace_bytes_per_rank"] = sum(f.stat().st_size for f in files.iterdir()) // ranks
        if not everything:
            return row
        loaded = pytracer.load(files)
        row["faults_named"] = faults_named(loaded, faults)
        loaded.to_parquet(target)
        sizes = [file.stat().st_size for file in target.rglob("*.parquet")]
        steps = loaded.comparison.steps
        row["digest_bytes_per_rank_and_step"] = sum(sizes) // len(sizes) // steps
        began = time.monotonic()
        dataset.query(target, QUESTION)
        row["question_s"] = round(time.monotonic() - began, 2)
        row["dask"] = summarised(files, "--engine", "dask")
        row["dask_is_equal"] = pytracer.load(files, engine="dask").comparison == loaded.comparison
        return row


def faults_named(loaded: Any, faults: many_ranks.Faults) -> dict[str, bool]:
    there = loaded.comparison
    return {
        "leaking": any(one.ranks == (faults.leaking,) for one in there.findings),
        "imbalanced": any(one.rank == faults.imbalanced for one in there.outliers),
        "truncated": any(
            one.rank == faults.truncated and one.status == "truncated" for one in there.digests
        ),
        "missing": there.missing == (faults.missing,),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256, 1024])
    options = parser.parse_args()
    rows = []
    for ranks in options.ranks:
        rows.append(measured(ranks, everything=ranks == options.ranks[-1]))
        print(rows[-1], flush=True)
    document = {"taken": dt.date.today().isoformat(), "cpus": os.cpu_count(), "rows": rows}
    (options.out / "many-ranks-cpu.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
