"""How long a large memory snapshot takes to read, and how much memory: a recorded one, many times over.

python benchmarks/large_snapshots.py                 # 5 million entries, about 5 minutes
python benchmarks/large_snapshots.py --entries 100000 --out FOLDER
python benchmarks/large_snapshots.py --docs          # writes the sentence of docs/snapshots.md
"""

import argparse
import gzip
import json
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.readme_tables import between  # noqa: E402

ENTRIES = 5_000_000
_SAMPLE = ROOT / "tests" / "data" / "both-lstm-all.pickle.gz"
_RESULT = "large-snapshots-cpu.json"
_SIZES = (ENTRIES // 4, ENTRIES)


def write(path: Path, entries: int) -> int:
    """A snapshot of so many entries, at least. Each allocation has a list of frames of its own."""
    whole = pickle.loads(gzip.decompress(_SAMPLE.read_bytes()))  # our own file
    steps = whole["device_traces"][0]
    rest = {name: value for name, value in whole.items() if name != "device_traces"}
    span = steps[-1]["time_us"] - steps[0]["time_us"] + 1
    with path.open("wb") as file:
        out = pickle._Pickler(file, 4)
        out.write(pickle.PROTO + bytes([4]) + pickle.EMPTY_DICT + pickle.MARK)
        for name, value in rest.items():
            out.save(name)
            out.save(value)
        out.save("device_traces")
        out.write(pickle.EMPTY_LIST + pickle.EMPTY_LIST + pickle.MARK)
        for entry in steps:
            out.save(entry)
        out.write(pickle.APPENDS)
        again = [_Repeated(out, entry) for entry in _freed(steps)]
        written, shift, count = len(steps), span, len(out.memo)
        while written < entries:
            lists: dict[int, int] = {}  # of frames, by address: the free that completes has that
            parts = [pickle.MARK]
            for one in again:
                count = one.write(parts, shift, count, lists)
            file.write(b"".join([*parts, pickle.APPENDS]))
            written, shift = written + len(again), shift + span
        out.write(pickle.APPEND + pickle.SETITEMS + pickle.STOP)
    return written


class _Repeated:
    """An entry in the words of a pickle, to be written many times."""

    def __init__(self, out: Any, entry: dict[str, Any]) -> None:
        def known(value: Any) -> bytes:
            found: bytes = out.get(out.memo[id(value)][0])
            return found

        def number(value: int) -> bytes:
            return pickle.LONG1 + bytes([8]) + value.to_bytes(8, "little")

        self.address, self.time, self.action = entry["addr"], entry["time_us"], entry["action"]
        self.begin = pickle.EMPTY_DICT + pickle.MEMOIZE + pickle.MARK
        for key, value in entry.items():
            if isinstance(value, int) and key != "time_us":
                self.begin += known(key) + number(value)
            elif isinstance(value, str):
                self.begin += known(key) + known(value)
        keys = {key: key for key in entry}
        self.begin += known(keys["time_us"]) + pickle.LONG1 + bytes([8])
        self.frames_key = known(keys["frames"]) if "frames" in entry else b""
        self.frames = pickle.EMPTY_LIST + pickle.MEMOIZE + pickle.MARK
        self.frames += b"".join(map(known, entry.get("frames", []))) + pickle.APPENDS

    def write(self, parts: list[bytes], shift: int, count: int, lists: dict[int, int]) -> int:
        """Adds it to the parts. `count` is how many values the pickle has remembered."""
        parts += (self.begin, (self.time + shift).to_bytes(8, "little"))
        count += 1
        if self.frames_key and self.action == "free_completed" and self.address in lists:
            index = lists.pop(self.address).to_bytes(4, "little")
            parts += (self.frames_key, pickle.LONG_BINGET, index)
        elif self.frames_key:
            parts += (self.frames_key, self.frames)
            if self.action == "free_requested":
                lists[self.address] = count
            count += 1
        parts.append(pickle.SETITEMS)
        return count


def _freed(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of blocks that are made and freed: these can be repeated."""
    made: dict[int, list[dict[str, Any]]] = {}
    kept: list[dict[str, Any]] = []
    for entry in entries:
        if entry["action"] == "alloc":
            made[entry["addr"]] = [entry]
        elif entry["addr"] in made and entry["action"].startswith("free"):
            made[entry["addr"]].append(entry)
            if entry["action"] == "free_completed":
                kept += made.pop(entry["addr"])
    order = {id(entry): at for at, entry in enumerate(entries)}
    return sorted(kept, key=lambda entry: order[id(entry)])


def measured(path: Path) -> dict[str, float]:
    """Seconds and bytes that `pytracer summary` takes for this file, in a process of its own."""
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pytracer", "summary", str(path)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seconds": round(time.monotonic() - begin, 1),
        "cpu_seconds": round(cpu, 1),
        "peak_bytes": used.ru_maxrss * 1024,
    }


def main() -> int:
    """Writes files of two sizes, reads each, and keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, help="one file of so many")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--docs", action="store_true", help="write the sentence of the docs")
    given = parser.parse_args()
    if given.docs:
        page = ROOT / "docs" / "snapshots.md"
        result = json.loads((given.out / _RESULT).read_text())
        page.write_text(between(page.read_text(), "large-snapshots", _sentence(result)))
        return 0
    files = []
    with tempfile.TemporaryDirectory() as folder:
        for entries in [given.entries] if given.entries else _SIZES:  # the smaller first
            path = Path(folder) / "large.pickle"
            written = write(path, entries)
            files.append({"entries": written, "bytes": path.stat().st_size, **measured(path)})
            print(files[-1], flush=True)
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / _RESULT).write_text(json.dumps({"date": date, "files": files}, indent=1) + "\n")
    return 0


def _sentence(result: dict[str, Any]) -> str:
    rows = [
        f"{row['bytes'] / 1e6:,.0f} MB ({row['entries'] / 1e6:.2f} million entries) take "
        f"{row['cpu_seconds']:.0f} s of processor time and {row['peak_bytes'] / 2**30:.1f} GiB"
        for row in result["files"]
    ]
    return f"`pytracer summary` of a file: {'; '.join(rows)} ({result['date']})."


if __name__ == "__main__":
    sys.exit(main())
