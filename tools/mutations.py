"""Damages traces in every way, and checks every view: no wrong total, no traceback, no hang.

python tools/mutations.py                     # 10,000, to benchmarks/results/mutations-cpu.json
python tools/mutations.py --count 100 --first 5000     # those of some seeds, to see them again

The exit code is 1 if any check failed. tests/mutations.py has the checks.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.overhead import machine  # noqa: E402
from tests.mutations import run  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "mutations-cpu.json"


def main() -> int:
    """Damages, checks and keeps the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = run(Path(folder), options.first, options.count, options.processes)
    outcomes: Counter[str] = Counter()
    for name, count in report.outcomes.items():
        outcomes[name.rpartition(": ")[2]] += count
    document = {
        "machine": machine(),
        "summary": {
            "tried": report.tried,
            "problems": len(report.problems),
            "outcomes": dict(sorted(outcomes.items())),
            "slowest_seconds": round(report.slowest_seconds, 2),
            "most_memory_bytes": report.most_memory,
            "seconds": round(time.monotonic() - began, 1),
        },
        "options": {"first": options.first, "count": options.count},
        "outcomes": dict(sorted(report.outcomes.items())),
        "problems": report.problems,
    }
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["summary"], indent=1))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
