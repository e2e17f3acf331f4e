"""Proves on the CPU what docs/always.md promises of long runs: python benchmarks/always.py [PROOF ...]

    leak      50,000 steps of a real loop; from step 40,000 on, each keeps 64 KiB: the alarm names variable and line
    leak_on_gpu  the same in 5,000 steps on a GPU, from step 4,000 on; only if it is named
    healthy   the healthy programs of the hints' suite, again and again: no alarm
    rare      20,000 steps; every 10,000th has a larger batch: the departure is noted, and looked at
    equal     totals of 300 steps, and categories of the looks at some, are those of a full trace
    million   a million tiny steps: memory and file stay bounded
    instructions  of a step between two looks, by valgrind
    kills     50 runs that are killed at random: all steps but those of the last second are told

Writes benchmarks/results/always-cpu.json. The exit code is 1 if a proof fails.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
RESULT = ROOT / "benchmarks" / "results" / "always-cpu.json"
KIB = 1 << 10

_KILLED = """
import sys, time, torch
from pathlib import Path
torch.set_num_threads(1)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters())
with open("told", "w", buffering=1) as told:
    for step in range(10**9):
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
        told.write(f"{step} {time.monotonic()}\\n")
"""


def parts(width: int = 16, device: str = "cpu") -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, 4))
    return model, torch.optim.AdamW(model.to(device).parameters())


def train(model: Any, optimizer: Any, rows: int = 8) -> None:
    import torch

    ones = torch.ones(rows, model[0].in_features, device=model[0].weight.device)
    model(ones).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def leak(
    folder: Path, steps: int = 50_000, begins: int = 40_000, device: str = "cpu"
) -> dict[str, Any]:
    import torch

    import pytracer

    model, optimizer = parts(device=device)
    kept, alarms = [], []

    def alarm(text: str) -> None:
        alarms.append((step, text))

    with pytracer.always(folder / "run.always", alarm=alarm):
        for step in range(steps):
            train(model, optimizer)
            if step >= begins:
                kept.append(torch.zeros(64 * KIB // 4, device=device))
    first = alarms[0] if alarms else (None, "")
    named = "`kept`" in first[1] and "always.py:" in first[1]
    return {"proved": named, "alarm_at_step": first[0], "alarm": first[1], "alarms": len(alarms)}


def leak_on_gpu(folder: Path) -> dict[str, Any]:
    return leak(folder, steps=5_000, begins=4_000, device="cuda")


def healthy(folder: Path, seconds: float = 2.0) -> dict[str, Any]:
    import pytracer
    from programs.hints import kept  # noqa: F401 - has more of them
    from programs.hints.healthy import HEALTHY
    from pytracer import errors

    alarms: list[str] = []
    runs, steps = {}, 0
    for name, program in HEALTHY.items():
        until, runs[name] = time.monotonic() + seconds, 0
        with (
            errors.collected_warnings(),
            pytracer.always(folder / f"{name}.always", alarm=alarms.append, share=0.5),
        ):
            while runs[name] < 3 or time.monotonic() < until:
                (place := folder / f"{name}-{runs[name]}").mkdir()
                program(place)
                runs[name] += 1
        if (folder / f"{name}.always").exists():
            steps += pytracer.History(folder / f"{name}.always").step_count
    return {"proved": not alarms, "programs": len(runs), "runs": sum(runs.values()), "steps": steps}


def rare(folder: Path) -> dict[str, Any]:
    import pytracer

    model, optimizer = parts()
    with pytracer.always(folder / "run.always"):
        for step in range(20_000):
            train(model, optimizer, rows=20_000 if step % 10_000 == 9_999 else 8)
    history = pytracer.History(folder / "run.always")
    departs = [event for event in history.events if event["kind"] == "departs"]
    looks = [look for look in history.looks if look.reason == "departs"]
    by_category = history.look(looks[0].step).peak.by_category if looks else {}
    rows = history.steps()
    high = int(rows.highest_peak.max())
    return {
        "proved": [event["step"] for event in departs] == [9_999] and high > 5 << 20,
        "noted_at": [event["step"] for event in departs],
        "peak_of_the_departure": high,
        "look_after_it_at": [look.step for look in looks],
        "categories_of_that_look": {name: int(n) for name, n in by_category.items() if n},
    }


def equal(folder: Path, steps: int = 300) -> dict[str, Any]:
    """Totals of each step and categories of each look, beside a full trace of the same steps."""
    import pytracer
    from pytracer.analysis.answers import diff

    draw = random.Random(0)
    with pytracer.always(folder / "run.always", devices="cpu", share=0.5):
        model, optimizer = parts()  # within: blocks of the host from before are not counted
        with pytracer.trace(devices="cpu", table=False) as full:
            for _ in range(steps):
                train(model, optimizer, rows=draw.randint(1, 500))
    history = pytracer.History(folder / "run.always")
    rows, compared = history.steps(), full.steps()
    peaks = [int(rows.peak[step]) == int(compared.peak_bytes[step]) for step in range(1, steps - 1)]
    looks = [look.step for look in history.looks if 0 < look.step < steps - 1 and look.steps == 1]
    categories = []
    for step in looks:
        at_peak = history.look(step).peak.by_category
        beside = diff.diff(full.data, full.data, steps=(step, step)).after.by_category
        categories.append(
            {name: n for name, n in at_peak.items() if n}
            == {name: n for name, n in beside.items() if n}
        )
    return {
        "proved": len(peaks) == steps - 2
        and all(peaks)
        and len(categories) > 0
        and all(categories),
        "steps_equal": sum(peaks),
        "steps": len(peaks),
        "looks_equal": sum(categories),
        "looks": len(categories),
    }


def million(folder: Path, steps: int = 1_000_000) -> dict[str, Any]:
    import pytracer

    resident = []
    began = time.monotonic()
    with pytracer.always(folder / "run.always", devices="cpu"):
        model, optimizer = parts(4)
        for step in range(steps):
            train(model, optimizer)
            if step % (steps // 10) == 0:
                resident.append(_resident())
    history = pytracer.History(folder / "run.always")
    rows = history.steps()
    size = sum(path.stat().st_size for path in (folder / "run.always").iterdir())
    return {
        "proved": history.step_count == steps
        and int(rows.steps.sum()) == steps
        and size <= 64_000_000
        and resident[-1] - resident[1] < 16 << 20,
        "steps": history.step_count,
        "seconds": round(time.monotonic() - began),
        "bytes_on_the_disk": size,
        "rows": len(rows),
        "resident_by_tenths": resident,
    }


def instructions(folder: Path) -> dict[str, Any]:
    """What is added to a step of a narrow transformer between two looks, counted by valgrind."""
    from benchmarks import synchronisation

    name = "narrow transformer"
    group = [make.__name__ for make in synchronisation.groups()].index("transformer")
    found = synchronisation.measure(ROOT, folder, (group,), ("plain", "always"))
    ours = found["ours"]["always"][name]
    events = {
        function: count
        for owner, function, count in found["functions"]["always"][name]
        if owner == "pytracer" and "cpu_allocator" in function
    }
    return {
        "proved": ours <= synchronisation.MOST["always"][name],
        "plain": found["instructions"]["plain"][name],
        "added": synchronisation.added(found["instructions"], "always", name),
        "ours": ours,
        "in_events": sum(events.values()),
        "in_python": synchronisation.added(
            {
                mode: {name: row[name]["Python"]}
                for mode, row in found["owners"].items()
                if name in row
            },
            "always",
            name,
        ),
    }


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def kills(folder: Path, runs: int = 50) -> dict[str, Any]:
    from pytracer import History

    draw = random.Random(0)
    lost = []
    (folder / "train.py").write_text(_KILLED)
    for number in range(runs):
        place = folder / str(number)
        place.mkdir()
        command = [sys.executable, "-m", "pytracer", "run", "--always", "-o", "run.always"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen([*command, "../train.py"], cwd=place, env=environment)
        told = place / "told"
        while process.poll() is None and not (told.exists() and told.stat().st_size):
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 1.5))
        process.kill()
        process.wait()
        lines = [line.split() for line in told.read_text().splitlines()]
        whole = [(int(step), float(at)) for step, at in (one for one in lines if len(one) == 2)]
        known = History(place / "run.always").step_count
        lost.append(max(whole[-1][0] + 1 - known, 0))
    return {"proved": max(lost) == 0, "runs": runs, "steps_lost_at_most": max(lost)}


PROOFS: dict[str, Callable[..., dict[str, Any]]] = {
    "leak": leak,
    "healthy": healthy,
    "rare": rare,
    "instructions": instructions,
    "equal": equal,
    "million": million,
    "kills": kills,
}
ON_GPU = {"leak_on_gpu": leak_on_gpu}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("proofs", nargs="*", metavar="PROOF", default=list(PROOFS))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the proof `million`")
    options = parser.parse_args()
    if unknown := set(options.proofs) - set(PROOFS | ON_GPU):
        parser.error(f"there is no proof {', '.join(sorted(unknown))}")
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.proofs:
        with tempfile.TemporaryDirectory() as folder:
            more = {"steps": options.steps} if name == "million" else {}
            found[name] = (PROOFS | ON_GPU)[name](Path(folder), **more)
        found[name] |= {"date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        print(name, json.dumps(found[name], indent=1), flush=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(not all(found[name]["proved"] for name in options.proofs))


if __name__ == "__main__":
    sys.exit(main())
