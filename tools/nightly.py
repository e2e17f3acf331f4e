"""Runs everything that takes long, part by part, and goes on after a failure.

python tools/nightly.py                            # hours; `make nightly` does this
python tools/nightly.py --torch-tests FOLDER       # also PyTorch's own tests, from that folder
python tools/nightly.py kills fuzz                 # some parts

Each part writes a dated JSON below benchmarks/results; nightly-cpu.json there has them all.
The exit code is 1 if any part failed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.overhead import machine  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
LOGS = ROOT / "build" / "nightly"
# The command of each part. The tools write their own results; of the tests, the summary is kept.
PARTS = {
    "kills": ["tools/kills.py", "--kills", "200"],
    "mutations": ["tools/mutations.py", "--count", "10000"],
    "fuzz": ["tools/fuzz.py", "--seconds", "900"],
    "tests": ["-m", "pytest", "-n", "2", "--dist", "worksteal"],  # with Ctrl-C at every time
    "public-programs": ["tools/public_programs.py"],
    "exports": ["benchmarks/exports.py", "--write"],
    "always": ["benchmarks/always.py"],
    "synchronisation": ["benchmarks/synchronisation.py"],  # needs valgrind
}


def run(name: str, arguments: list[str]) -> dict[str, Any]:
    """Runs one part. Its output goes to a log and to the screen."""
    print(f"\n==== {name} ====", flush=True)
    began = time.monotonic()
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTRACER_TIER": "nightly"}
    log = LOGS / f"{name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
    return {
        "part": name,
        "command": " ".join(arguments),
        "status": process.wait(),
        "seconds": round(time.monotonic() - began, 1),
        "last_line": last_line(log),
    }


def last_line(log: Path) -> str:
    """Returns the last line of the output, such as pytest's summary."""
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def write(name: str, found: dict[str, Any]) -> None:
    document = {"machine": machine(), **found}
    (RESULTS / f"{name}-cpu.json").write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    """Runs the parts, and prints how each ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--torch-tests", type=Path, metavar="FOLDER", help="a clone's test folder")
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there is {', '.join(PARTS)}")
    parts = {name: PARTS[name] for name in options.parts or PARTS}
    if options.torch_tests:
        parts["torch-tests"] = ["tools/torch_tests.py", str(options.torch_tests.absolute())]
    LOGS.mkdir(parents=True, exist_ok=True)
    found = []
    for name, arguments in parts.items():
        found.append(run(name, arguments))
        if name == "tests":
            write("nightly-tests", found[-1])
    if not options.parts:
        write("nightly", {"parts": found})
    print("\n==== summary ====")
    for part in found:
        outcome = "FAILED" if part["status"] else "passed"
        print(f"{part['part']:16} {outcome}, {part['seconds']} s   {part['last_line']}")
    return 1 if any(part["status"] for part in found) else 0


if __name__ == "__main__":
    sys.exit(main())
