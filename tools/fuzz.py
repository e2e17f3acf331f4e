"""Fuzzes the readers of the C++ core with libFuzzer, under two sanitizers.

python tools/fuzz.py                    # 15 minutes each, to benchmarks/results/fuzz-cpu.json
python tools/fuzz.py --seconds 30 --output -     # shorter, and only to the screen

The exit code is 1 if a reader crashed, hung or took too much memory. Its input is in build/fuzz.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "fuzz-cpu.json"
BUILT, FOUND = ROOT / "build" / "cmake-fuzz", ROOT / "build" / "fuzz"
CORPORA = {"trace_file": "corpus", "snapshot": "corpus_snapshots"}
# The files are small: more memory than this is out of proportion, and a second is a hang.
LIMITS = ["-rss_limit_mb=1024", "-malloc_limit_mb=512", "-timeout=10"]


def build() -> None:
    """Builds the fuzzers with clang, in a folder of its own."""
    for command in (
        ["cmake", "--preset", "fuzz"],
        ["cmake", "--build", "--preset", "fuzz", "--target", *(f"fuzz_{name}" for name in CORPORA)],
    ):
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def fuzz(name: str, seconds: int) -> dict[str, Any]:
    """Fuzzes one reader, starting from its corpus."""
    new = FOUND / name
    new.mkdir(parents=True, exist_ok=True)
    corpus = ROOT / "tests" / "csrc" / CORPORA[name]
    program = BUILT / "tests" / "csrc" / f"fuzz_{name}"
    command = [program, f"-max_total_time={seconds}", "-print_final_stats=1", *LIMITS]
    command += [f"-artifact_prefix={FOUND}/{name}-", new, corpus]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    last = done.stderr.splitlines()[-40:]
    return {
        "reader": name,
        "seconds": seconds,
        "inputs": number(r"number_of_executed_units: (\d+)", done.stderr),
        "new_inputs": number(r"new_units_added: +(\d+)", done.stderr),
        "edges": number(r"cov: (\d+)", done.stderr),
        "peak_mb": number(r"peak_rss_mb: +(\d+)", done.stderr),
        "status": done.returncode,
        "problem": [] if done.returncode == 0 else last,
    }


def number(pattern: str, text: str) -> int | None:
    """Returns the last number that the fuzzer printed."""
    found = re.findall(pattern, text)
    return int(found[-1]) if found else None


def write(path: Path, readers: list[dict[str, Any]], seconds: float) -> None:
    sys.path.insert(0, str(ROOT))
    from benchmarks.overhead import machine  # needs the extension, which fuzzing does not

    document = {"machine": machine(), "seconds": round(seconds, 1), "readers": readers}
    path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    """Fuzzes both readers and keeps the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=900, help="for each reader")
    parser.add_argument("--output", default=str(RESULT), help='a file, or "-" for none')
    options = parser.parse_args()
    began = time.monotonic()
    build()
    readers = [fuzz(name, options.seconds) for name in CORPORA]
    if options.output != "-":
        write(Path(options.output), readers, time.monotonic() - began)
    for reader in readers:
        print(json.dumps(reader))
        print("\n".join(reader["problem"]), file=sys.stderr)
    return 1 if any(reader["status"] for reader in readers) else 0


if __name__ == "__main__":
    sys.exit(main())
