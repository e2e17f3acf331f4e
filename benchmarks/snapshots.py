"""Records programs with pytracer and as memory snapshots of torch at once, and compares each block.

    python benchmarks/snapshots.py --record FOLDER    # needs a GPU, or two: keeps both recordings of each
    python benchmarks/snapshots.py --recorded FOLDER  # compares these, and writes benchmarks/results
    python benchmarks/snapshots.py --imagined         # no GPU: an imagined card
    python benchmarks/snapshots.py --docs             # writes the table of docs/snapshots.md

The trace knows what each block is for. `pytracer.load()` of the snapshot has to find that out. Each
program runs twice, with Python's frames and with all frames; less is then made of each snapshot:

- whole: everything was recorded
- ring: only the last part of the history is left
- built: the history begins with the first forward, and older blocks have no frames
- late: the same, after the first step
- oom: written at the peak of the first step, as when memory runs out
- alloc: frees have no frames (context="alloc")
"""

import argparse
import gc
import gzip
import json
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import slug  # noqa: E402
from benchmarks.readme_tables import between  # noqa: E402

STACKS = ("python", "all")
VARIANTS = ("whole", "ring", "built", "late", "oom", "alloc")
RING = 0.4  # the part of the history that is left
LONGEST = 180  # seconds for one program
AT_ONCE = 10
CARD = "H100"

# ---------------------------------------------------------------- less of a snapshot


def variant(snapshot: dict[str, Any], kind: str) -> dict[str, Any]:
    """The snapshot as torch would have written it, had it recorded less. The first device counts."""
    entries = snapshot["device_traces"][0]
    if kind == "whole":
        return snapshot
    if kind == "alloc":
        kept = [{**entry, "frames": []} if _is_free(entry) else entry for entry in entries]
        return _with(snapshot, kept)
    if kind == "ring":
        return _with(snapshot, entries[-int(len(entries) * RING) :])
    if kind == "oom":
        return _stopped(snapshot, _first_step(snapshot))
    begin = _first_forward(entries) if kind == "built" else _first_step(snapshot)
    kept = [entry for entry in entries if entry["time_us"] > begin]
    made = {entry["addr"] for entry in kept if entry["action"] == "alloc"}
    segments = [
        {**segment, "blocks": [_aged(block, made) for block in segment["blocks"]]}
        for segment in snapshot["segments"]
    ]
    notes = [note for note in snapshot["external_annotations"] if note["time_us"] > begin]
    return {**_with(snapshot, kept), "segments": segments, "external_annotations": notes}


def _stopped(snapshot: dict[str, Any], until: int) -> dict[str, Any]:
    """The snapshot as it was at the most requested bytes before a time.

    The exception has ended the annotations when a program writes the file.
    """
    entries = snapshot["device_traces"][0]
    level, most, last = 0, 0, 0
    for at, entry in enumerate(entries):
        if entry["time_us"] > until:
            break
        if entry["action"] in ("alloc", "free_completed"):
            level += entry["size"] if entry["action"] == "alloc" else -entry["size"]
        if level > most:
            most, last = level, at + 1
    alive: dict[int, dict[str, Any]] = {}
    for entry in entries[:last]:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = entry
        elif entry["action"] == "free_completed":
            alive.pop(entry["addr"], None)
    notes = [note for note in snapshot["external_annotations"] if note["time_us"] <= until]
    segments = [_segment(entry) for entry in alive.values()]
    failed = {**entries[min(last, len(entries) - 1)], "action": "oom", "addr": 0}
    kept = [*entries[:last], {**failed, "time_us": entries[last - 1]["time_us"]}]
    return {**_with(snapshot, kept), "segments": segments, "external_annotations": notes}


def _segment(entry: dict[str, Any]) -> dict[str, Any]:
    """A segment of one block."""
    size = entry["size"]
    block = {"address": entry["addr"], "size": size, "requested_size": size}
    block |= {"state": "active_allocated", "frames": entry.get("frames", [])}
    sizes = dict.fromkeys(("total_size", "allocated_size", "active_size", "requested_size"), size)
    place = {"device": 0, "address": entry["addr"], "stream": entry["stream"], "blocks": [block]}
    return {**place, **sizes}


def _first_forward(entries: list[dict[str, Any]]) -> int:
    """The time before the first call of a module."""
    for entry in entries:
        if any(frame["name"].endswith("_call_impl") for frame in entry.get("frames", [])):
            return int(entry["time_us"]) - 1
    return 0


def _first_step(snapshot: dict[str, Any]) -> int:
    """The time at which the first step of an optimizer ends; without one, a third of the history."""
    entries = snapshot["device_traces"][0]
    for note in snapshot["external_annotations"]:
        if note["stage"] == "END" and note["name"].startswith("Optimizer.step"):
            return int(note["time_us"])
    return int(entries[len(entries) // 3]["time_us"])


def _is_free(entry: dict[str, Any]) -> bool:
    return str(entry["action"]).startswith("free")


def _with(snapshot: dict[str, Any], entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {**snapshot, "device_traces": [entries, *snapshot["device_traces"][1:]]}


def _aged(block: dict[str, Any], made: set[int]) -> dict[str, Any]:
    return block if block["address"] in made else {**block, "frames": []}


# ---------------------------------------------------------------- the comparison


def compared(truth: Any, snapshot: Any, kind: str = "whole") -> dict[str, Any]:
    """Shares of bytes whose category the snapshot shows right, not at all, or wrong.

    Args:
        truth: the trace of pytracer.
        snapshot: the snapshot of the same run, loaded.
        kind: its variant.
    """
    from pytracer.analysis.facts import usage
    from pytracer.analysis.facts.allocations import allocations
    from pytracer.data.schema import CATEGORIES

    found, device = allocations(snapshot.data), usage.devices(snapshot.data)[0]
    of_truth = _matched(allocations(truth.data), found, -1 if kind != "oom" else 0)
    at_peak = usage.alive(snapshot.data, "peak", device)
    rows: dict[str, Any] = {"rules": _by_rule(snapshot.data, of_truth)}
    for name, chosen in (("peak", at_peak), ("events", np.ones(len(found), np.bool_))):
        pairs: Counter[tuple[str, str]] = Counter()
        lost = 0
        for row in np.flatnonzero(chosen).tolist():
            size = int(found.requested_bytes[row])
            if of_truth[row] < 0:
                lost += size
                continue
            pair = CATEGORIES[of_truth[row]], CATEGORIES[found.category[row]]
            pairs[pair] += size
        rows[name] = {**_shares(pairs), "lost": lost}
    return rows


def _by_rule(snapshot: Any, of_truth: Any) -> dict[str, tuple[int, int]]:
    """By category and rule: the bytes that it decides, and those that it decides right."""
    from pytracer.analysis.facts.allocations import allocations
    from pytracer.analysis.facts.grouping import role_text
    from pytracer.data.schema import CATEGORIES

    found = allocations(snapshot)
    rules: dict[str, tuple[int, int]] = {}
    for row in np.flatnonzero((of_truth > 0) & (found.category != 0)).tolist():
        category = CATEGORIES[found.category[row]]
        rule = f"{category}: {role_text(snapshot, int(found.role[row]))}"
        size = int(found.requested_bytes[row])
        decided, right = rules.get(rule, (0, 0))
        good = size if found.category[row] == of_truth[row] else 0
        rules[rule] = decided + size, right + good
    return rules


def _shares(pairs: Counter[tuple[str, str]]) -> dict[str, Any]:
    """The shares of all bytes that the trace has a category for."""
    known = {pair: size for pair, size in pairs.items() if pair[0] != "unknown"}
    total = max(sum(known.values()), 1)
    right = sum(size for (one, other), size in known.items() if one == other)
    silent = sum(size for (_, other), size in known.items() if other == "unknown")
    confused = sorted(
        ((f"{one} > {other}", size) for (one, other), size in known.items() if one != other),
        key=lambda pair: -pair[1],
    )
    return {
        "bytes": total,
        "right": round(right / total, 4),
        "unknown": round(silent / total, 4),
        "wrong": round((total - right - silent) / total, 4),
        "confused": dict(confused[:6]),
    }


def _matched(truth: Any, found: Any, first: int) -> Any:
    """Each block's category by the trace, -1 if the trace lacks the block.

    Both saw the same allocations. If they end together, the last block of an address is the last in
    both (`first` is -1); if they begin together, the first is (0).
    """
    by_address: dict[tuple[int, int], list[int]] = {}
    for row in _in_order(truth):
        key = int(truth.address[row]), int(truth.requested_bytes[row])
        by_address.setdefault(key, []).append(int(truth.category[row]))
    category = np.full(len(found), -1, np.int64)
    rows = list(_in_order(found))
    for row in reversed(rows) if first else rows:
        key = int(found.address[row]), int(found.requested_bytes[row])
        if by_address.get(key):
            category[row] = by_address[key].pop(first)
    return category


def _in_order(blocks: Any) -> Iterator[int]:
    yield from np.argsort(blocks.start, kind="stable").tolist()


def table(truth: Any, snapshot: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The comparison for each variant of a snapshot."""
    import pytracer

    rows = {}
    for kind in VARIANTS:
        path = folder / "less.pickle"
        path.write_bytes(pickle.dumps(variant(snapshot, kind), protocol=4))
        rows[kind] = compared(truth, pytracer.load(path), kind)
    return rows


# ---------------------------------------------------------------- how they run


def record(name: str, stacks: str, folder: Path) -> dict[str, Any]:
    """Runs a program on the GPU, recorded both ways. Of several ranks, the first is kept."""
    import torch

    import pytracer
    from benchmarks.snapshot_programs import PROGRAMS

    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    memory = torch.cuda.memory
    torch.zeros(1, device="cuda")  # the first use of the device belongs to neither
    memory._record_memory_history(max_entries=1_000_000, stacks=stacks)
    with pytracer.trace(devices="cuda", table=False) as t:
        held = PROGRAMS[name]("cuda")
        gc.collect()
        torch.cuda.synchronize()
        snapshot = memory._snapshot()
    del held
    memory._record_memory_history(enabled=None)
    if int(os.environ.get("RANK", "0")):
        return {}
    trace, pickled = _files(folder, name, stacks)
    t.save(trace, overwrite=True)
    with gzip.open(pickled, "wb", 6) as file:
        pickle.dump(snapshot, file, protocol=4)
    return {"entries": _entries(snapshot), "ranks": int(os.environ.get("WORLD_SIZE", "1"))}


def _files(folder: Path, name: str, stacks: str) -> tuple[Path, Path]:
    """The trace and the snapshot of one run."""
    stem = folder / f"{slug(name)}-{stacks}"
    return stem.with_suffix(".pytrace"), stem.with_suffix(".pickle.gz")


def recorded(name: str, stacks: str, folder: Path) -> dict[str, Any]:
    """Compares what `record` has kept."""
    import pytracer

    trace, pickled = _files(folder, name, stacks)
    if not pickled.exists():
        return {"error": f"{pickled.name} was not recorded"}
    snapshot = pickle.loads(gzip.decompress(pickled.read_bytes()))  # our own file
    with tempfile.TemporaryDirectory() as less:
        return {"entries": _entries(snapshot), **table(pytracer.load(trace), snapshot, Path(less))}


def _entries(snapshot: dict[str, Any]) -> int:
    return len(snapshot["device_traces"][0])


def imagined(name: str, stacks: str) -> dict[str, Any]:
    """Runs a program on an imagined card, and makes a snapshot of the trace."""
    import pytracer
    from benchmarks.snapshot_programs import PROGRAMS
    from programs.snapshot_oracle import as_snapshot

    ranks = 2 if _has_ranks(name) else None
    with pytracer.imagine(CARD, stacks=True, ranks=ranks) as t:
        held = PROGRAMS[name]("cuda")
    del held
    snapshot = as_snapshot(t.data, stacks)
    with tempfile.TemporaryDirectory() as folder:
        rows = table(t, snapshot, Path(folder))
    return {"entries": _entries(snapshot), **rows}


def _alone(name: str, stacks: str, given: argparse.Namespace) -> dict[str, Any]:
    """Runs this file for one program in a process of its own, or in one for each GPU."""
    command, environment = [sys.executable], dict(os.environ)
    if given.record and _has_ranks(name):
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "gpu"]
    elif given.record:
        environment["CUDA_VISIBLE_DEVICES"] = "0"  # transformers' Trainer takes all that it sees
    command += [__file__, "--program", name, "--stacks", stacks]
    command += ["--imagined"] if given.imagined else []
    for option in ("record", "recorded"):
        command += [f"--{option}", str(folder)] if (folder := getattr(given, option)) else []
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {LONGEST} s"}
    marked = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    answers = [json.loads(line.removeprefix(_ANSWER)) for line in marked]
    answer: dict[str, Any] = next(filter(None, answers), {"error": done.stderr[-2000:]})
    return answer


_ANSWER = "answer "  # begins the line that says what was found: programs print lines, too


def _has_ranks(name: str) -> bool:
    return "DDP" in name or "FSDP" in name


def _one(given: argparse.Namespace) -> dict[str, Any]:
    """One program, in this process."""
    for way, folder in ((record, given.record), (recorded, given.recorded)):
        if folder:
            return way(given.program, given.stacks, folder)
    return imagined(given.program, given.stacks)


def _about(given: argparse.Namespace) -> dict[str, Any]:
    """Device, torch and date of these recordings."""
    if given.recorded:
        about: dict[str, Any] = json.loads((given.recorded / _ABOUT).read_text())
        return about
    import torch

    device = f"imagined {CARD}" if given.imagined else torch.cuda.get_device_name()
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return {"date": date, "device": device, "torch": torch.__version__}


def _all(given: argparse.Namespace) -> dict[str, Any]:
    """All programs, each with Python's stacks and with all."""
    from benchmarks.snapshot_programs import PROGRAMS

    rows: dict[str, Any] = {name: {} for name in PROGRAMS}
    with ThreadPoolExecutor(AT_ONCE if given.record else 2) as pool:
        jobs = {
            pool.submit(_alone, name, stacks, given): (name, stacks)
            for name in PROGRAMS
            for stacks in STACKS
        }
        for job in as_completed(jobs):
            name, stacks = jobs[job]
            rows[name][stacks] = job.result()
            print(name, stacks, _line(job.result()), flush=True)
    return {name: {stacks: each[stacks] for stacks in STACKS} for name, each in rows.items()}


def main() -> int:
    """Runs all programs, or one; prints a line for each and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--program", help="only this one, in this process")
    parser.add_argument("--stacks", choices=STACKS, default="python")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--record", type=Path, help="record on the GPU into this folder")
    how.add_argument("--recorded", type=Path, help="compare the recordings of this folder")
    how.add_argument("--imagined", action="store_true", help="on an imagined card")
    how.add_argument("--docs", action="store_true", help="write the table of the docs")
    given = parser.parse_args()
    if given.docs:
        page = ROOT / "docs" / "snapshots.md"
        text = between(page.read_text(), "snapshot-rules", rules_table())
        page.write_text(between(text, "snapshots", _page_tables(given.out)))
        return 0
    if given.record:
        given.record.mkdir(parents=True, exist_ok=True)
    if given.program:
        try:
            answer = _one(given)
        except Exception:
            answer = {"error": traceback.format_exc()[-2000:]}
        print(_ANSWER + json.dumps(answer), flush=True)
        return 0
    about = _about(given)
    if given.record:
        (given.record / _ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    rows = _all(given)
    if given.record:
        return int(any("error" in row for each in rows.values() for row in each.values()))
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"snapshots-{slug(about['device'])}.json"
    path.write_text(json.dumps({**about, "programs": rows}, indent=1) + "\n")
    print(path)
    return 0


_ABOUT = "recorded.json"


def rules_table() -> str:
    """The table of the rules, from their module."""
    from pytracer.snapshot import evidence

    lines = str(evidence.__doc__).splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


def _page_tables(folder: Path) -> str:
    """A table for each result: the worst of all programs, and each program."""
    parts = []
    for path in sorted(folder.glob("snapshots-*.json")):
        result = json.loads(path.read_text())
        rows = {
            f"{name}, {stacks} stacks": row
            for name, each in result["programs"].items()
            for stacks in STACKS
            if "error" not in (row := each[stacks])
        }
        head = f"{result['device']}, torch {result['torch']}, {result['date']}. "
        programs = sum(
            all("error" not in row for row in each.values()) for each in result["programs"].values()
        )
        head += f"The least right and the most wrong of {programs} programs, "
        worst = "\n".join(_worst(kind, list(rows.values())) for kind in VARIANTS)
        each = "\n".join(_program(name, row["whole"]) for name, row in rows.items())
        ruled = "\n".join(_rules(list(rows.values())))
        parts += [
            f"**{head[:1].upper()}{head[1:]}with Python's stacks and with all:**",
            f"| recorded | right at the peak | wrong | right over all events | wrong |\n{_ALIGN}{worst}",
            f"| recorded whole | right at the peak | unknown | wrong | over all events |\n{_ALIGN}{each}",
            "How much each rule decides in all of these, by bytes, and how much of that is right:",
            f"| rule | decides | right |\n|---|---:|---:|\n{ruled}",
        ]
    return "\n\n".join(parts)


_ALIGN = "|---|---:|---:|---:|---:|\n"


def _program(name: str, whole: dict[str, Any]) -> str:
    peak, events = whole["peak"], whole["events"]
    cells = (peak["right"], peak["unknown"], peak["wrong"], events["right"])
    return f"| {name} | {' | '.join(f'{cell:.1%}' for cell in cells)} |"


def _rules(rows: list[dict[str, Any]]) -> Iterator[str]:
    decided: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for row in rows:
        for kind in VARIANTS:
            for rule, (size, good) in row[kind]["rules"].items():
                decided[rule] += size
                right[rule] += good
    total = sum(decided.values())
    for rule, size in decided.most_common():
        yield f"| {rule} | {size / total:.2%} | {right[rule] / size:.2%} |"


def _worst(kind: str, rows: list[dict[str, Any]]) -> str:
    cells = [
        f"{one(row[kind][at][what] for row in rows):.1%}"
        for at in ("peak", "events")
        for what, one in (("right", min), ("wrong", max))
    ]
    return f"| {kind} | {' | '.join(cells)} |"


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])[-300:]
    if "whole" not in row:
        return f"{row['entries']} entries of {row['ranks']} ranks"
    return ", ".join(
        f"{kind} {row[kind][at]['right']:.1%} right {row[kind][at]['wrong']:.1%} wrong at {at}"
        for kind in VARIANTS
        for at in ("peak", "events")
    )


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
