"""Kills recordings at random instants, and compares their files with one that was not killed.

python tools/kills.py                     # 200 kills, to benchmarks/results/kills-cpu.json
python tools/kills.py --kills 20          # fewer

The exit code is 1 if any finished step differs.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.overhead import machine  # noqa: E402
from tests.kills import compare, kill_recordings  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "kills-cpu.json"


def main() -> int:
    """Kills, compares and keeps the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--cuts", type=int, default=10, help="places at which each file is cut")
    parser.add_argument("--longest", type=float, default=1.5, help="seconds that a recording lives")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        delays = [rng.uniform(0, options.longest) for _ in range(options.kills)]
        kill_recordings(Path(folder), delays, steps=round(2000 * options.longest))
        found = list(compare(Path(folder), options.cuts, options.seed))
    killed = [each for each in found if each.name.startswith("killed")]
    document = {
        "machine": machine(),
        "summary": {
            "kills": len(killed),
            "cuts": len(found) - len(killed),
            "wrong": sum(bool(each.wrong) for each in found),
            "steps_compared": sum(each.finished_steps for each in found),
            "killed_before_the_first_flush": sum(each.events == 0 for each in killed),
            "most_steps": max(each.finished_steps for each in killed),
            "seconds": round(time.monotonic() - began, 1),
        },
        "options": {"seed": options.seed, "longest_seconds": options.longest},
        "wrong": [vars(each) for each in found if each.wrong],
    }
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["summary"], indent=1))
    return 1 if document["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
