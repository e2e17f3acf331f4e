"""Measures what exports of a long run cost: time, memory and size of each format.

    python benchmarks/exports.py [--events 3000000] [--write]

A small transformer trains on the CPU until its file has as many events. Then a process of its own
reads the file and writes each format. "nothing" reads it and only makes the table's rows, which
every export needs as well. Times are processor time of all threads, which other programs do not change.
Targets, for three million events: a memory snapshot in 5 s and 0.5 GB.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, not installed

RESULTS = Path(__file__).parent / "results"
FORMATS: dict[str, Callable[[Any, Path], object]] = {
    "nothing": lambda trace, folder: trace.summary(),
    "Perfetto": lambda trace, folder: trace.export_perfetto(folder / "run.pftrace"),
    "Perfetto, full": lambda trace, folder: trace.export_perfetto(
        folder / "full.pftrace", full=True
    ),
    "Chrome trace": lambda trace, folder: trace.export_chrome_trace(folder / "run.json.gz"),
    "memory snapshot": lambda trace, folder: trace.export_memory_snapshot(folder / "run.pickle"),
}


def record(path: Path, events: int) -> None:
    """Trains until the file has as many events."""
    import torch

    import pytracer

    torch.set_num_threads(1)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(100, 64), torch.nn.TransformerEncoder(layer, 2), torch.nn.Linear(64, 100)
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        tokens = torch.randint(100, (4, 16))
        logits = model(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytracer.trace(devices="cpu", table=False) as few:
        for _ in range(10):
            step()
    a_step = len(few.data.events.ticks) // 10
    with pytracer.trace(devices="cpu", table=False, path=path):
        for _ in range(events // a_step + 1):
            step()


def export(path: Path, name: str, folder: Path) -> None:
    """Exports in a process of its own, whose peak memory is then that of the export."""
    import pytracer

    began = time.process_time()
    trace = pytracer.load(path)
    loaded = time.process_time()
    FORMATS[name](trace, folder)
    found = {
        "read_s": round(loaded - began, 2),
        "write_s": round(time.process_time() - loaded, 2),
        "most_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000),
        "file_mb": round(sum(file.stat().st_size for file in folder.iterdir()) / 1e6, 1),
        "events": len(trace.data.events.ticks),
    }
    print(json.dumps(found))


def measured(path: Path) -> list[dict[str, Any]]:
    rows = []
    for name in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            child = subprocess.run(
                [sys.executable, __file__, "--export", name, str(path), folder],
                check=True,
                capture_output=True,
                text=True,
            )
        rows.append({"format": name, **json.loads(child.stdout)})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=3_000_000)
    parser.add_argument("--write", action="store_true", help="keep it in benchmarks/results/")
    parser.add_argument("--record", nargs=2, help=argparse.SUPPRESS)  # a file, a number of events
    parser.add_argument("--export", nargs=3, help=argparse.SUPPRESS)  # a format, a file, a folder
    options = parser.parse_args()
    if options.record:
        record(Path(options.record[0]), int(options.record[1]))
    elif options.export:
        name, path, folder = options.export
        export(Path(path), name, Path(folder))
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.pytrace"
            command = [sys.executable, __file__, "--record", str(path), str(options.events)]
            subprocess.run(command, check=True)
            rows = measured(path)
        if options.write:
            from benchmarks.overhead import machine  # imports torch, which reading does not need

            document = {"machine": machine(), "exports": rows}
            (RESULTS / "exports-cpu.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
