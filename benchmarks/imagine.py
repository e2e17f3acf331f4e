"""Compares imagined runs with real ones: the peak, each category and reserved bytes.

    python benchmarks/imagine.py models --out benchmarks/results    # needs a GPU
    python benchmarks/imagine.py replays --out benchmarks/results   # needs a GPU
    python benchmarks/imagine.py large --out benchmarks/results     # needs nothing: Llama-70B

models: each program runs three times, each time in a process of its own: on the GPU, traced;
imagined beside the GPU; imagined where no GPU is visible. The last two must be equal to the byte.

replays: each program's trace is replayed at its own settings, beside what torch reserved.

large: one training step of a 70B Llama, with the seconds and the memory that imagining it takes.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import imagine_programs, kept, slug  # noqa: E402
from benchmarks.imagine_convolutions import CONVOLUTIONS  # noqa: E402
from benchmarks.imagine_programs import fused, trains, words  # noqa: E402

PROGRAMS = imagine_programs.PROGRAMS | CONVOLUTIONS
CARD = "H100"  # which the results are measured on
MOST_OPS = 12
LONGEST = 120  # seconds for one program
AT_ONCE = 8  # programs, which fit on the GPU together

# ---------------------------------------------------------------- how they run


def real(name: str) -> dict[str, Any]:
    """Runs a program on the GPU, traced."""
    import pytracer

    with pytracer.trace(devices="cuda", table=False) as t:
        PROGRAMS[name]("cuda")
    stats = torch.cuda.memory_stats()
    return {
        "device": torch.cuda.get_device_name(),
        "requested": stats["requested_bytes.all.peak"],
        "allocated": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        **_of_trace(t),
    }


def replayed(name: str) -> dict[str, Any]:
    """Runs a program on the GPU, traced, and replays the trace at its own settings."""
    import pytracer

    with pytracer.trace(devices="cuda", table=False) as t:
        PROGRAMS[name]("cuda")
    reserved = torch.cuda.memory_stats()["reserved_bytes.all.peak"]
    replay = t.replay()
    return {
        "device": torch.cuda.get_device_name(),
        "reserved": reserved,
        "replayed": replay.peak_reserved,
    }


def imagined(name: str) -> dict[str, Any]:
    """Runs a program on an imagined card."""
    import pytracer

    begin = time.perf_counter()
    with pytracer.imagine(CARD) as t:
        PROGRAMS[name]("cuda")
    seconds = time.perf_counter() - begin
    counters = t.data.meta["counters"]["end"]["cuda:0"]
    return {
        "requested": counters["requested_bytes.peak"],
        "allocated": counters["allocated_bytes.peak"],
        "reserved": counters["reserved_bytes.peak"],
        "seconds": round(seconds, 2),
        **_of_trace(t),
    }


def alone(name: str) -> dict[str, Any]:
    """Runs a program on an imagined card, in a process that sees no GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return imagined(name)


def _of_trace(t: Any) -> dict[str, Any]:
    peak = t.peak
    return {
        "peak": peak.bytes,
        "phase": peak.phase,
        "by_category": {name: amount for name, amount in peak.by_category.items() if amount},
        "by_op": _largest_ops(t),
        **bounds(t),
    }


def bounds(t: Any) -> dict[str, Any]:
    """What an imagined run says that the two peaks are between."""
    imagined = t.data.meta.get("imagined")
    if imagined is None:
        return {}
    most = imagined.get("peak_at_most", t.peak.bytes)
    return {"between": {"requested": [t.peak.bytes, most], "reserved": list(t.fits().reserved)}}


def _largest_ops(t: Any) -> dict[str, int]:
    """The operators that hold most at the peak, as the errors' explanation."""
    table = t.by("op", at="peak")
    amounts = {str(op): int(amount) for op, amount in table.iloc[:, 0].items()}
    return dict(sorted(amounts.items(), key=lambda one: -one[1])[:MOST_OPS])


WAYS: dict[str, Callable[[str], dict[str, Any]]] = {
    "real": real,
    "imagined": imagined,
    "alone": alone,
}
APART: dict[str, Callable[[str], dict[str, Any]]] = {**WAYS, "replayed": replayed}


def answer(measure: Callable[[], dict[str, Any]], file: Path) -> None:
    """Writes what was measured, or the problem, into the file."""
    try:
        found = measure()
    except BaseException as problem:
        traceback.print_exc()
        first = str(problem).partition("\n")[0]
        found = {"problem": f"{type(problem).__name__}: {first}"}
    file.write_text(json.dumps(found))


def apart(script: str, words: list[list[str]]) -> list[dict[str, Any]]:
    """Runs `script --apart WORDS FILE` for each list of words, all at once, and returns the answers.

    Each is a process of its own, because one that has touched a GPU cannot fork another that does.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.json" for number in range(len(words))]
        processes = [
            subprocess.Popen([sys.executable, script, "--apart", *each, str(file)])
            for each, file in zip(words, files, strict=True)
        ]
        end = time.monotonic() + LONGEST
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0.1))
            process.kill()
            process.wait()
        return [
            json.loads(file.read_text()) if file.exists() else {"problem": "no answer"}
            for file in files
        ]


def gpus() -> int:
    """Asks in another process, because this one must not touch a GPU."""
    ask = "import sys, torch; sys.exit(torch.cuda.device_count())"
    return subprocess.run([sys.executable, "-c", ask]).returncode


def run_all(names: list[str], ways: list[str], at_once: int) -> Iterator[tuple[str, Any]]:
    """Yields each program's name and its row, with an answer for each way, as they end."""
    rows: dict[str, dict[str, Any]] = {name: {} for name in names}
    with ThreadPoolExecutor(at_once) as pool:
        running = {
            pool.submit(apart, __file__, [[way, name]]): (way, name)
            for name in names
            for way in ways
        }
        for done in as_completed(running):
            way, name = running[done]
            (rows[name][way],) = done.result()
            if len(rows[name]) == len(ways):
                yield name, rows[name]


# ---------------------------------------------------------------- what they say


def line(name: str, row: dict[str, Any]) -> str:
    """Returns one line with the errors of an imagined run."""
    problems = [
        f"{way}: {found['problem'].splitlines()[0]}"
        for way, found in row.items()
        if "problem" in found
    ]
    if problems:
        return f"{name:32} " + "; ".join(problems)
    measured, guessed, apart = row.get("real"), row.get("imagined"), row.get("alone")
    if measured is None or guessed is None:
        either = guessed or apart or {}
        return f"{name:32} {either.get('requested', 0) / 2**20:10.1f} MiB imagined"
    cells = [
        f"{what} {_off(guessed[what], measured[what]):+8.3%}" for what in ("requested", "reserved")
    ]
    worst = max(
        (abs(_category_off(row, category)), category) for category in measured["by_category"]
    )
    same = "equal alone" if _told(guessed) == _told(apart) else "NOT EQUAL ALONE"
    return (
        f"{name:32} {measured['requested'] / 2**20:9.1f} MiB  {'  '.join(cells)}  "
        f"worst category {worst[1]} {worst[0]:.2%} of the peak  {same}"
    )


def _off(guess: int, measured: int) -> float:
    return guess / measured - 1


def _category_off(row: dict[str, Any], category: str) -> float:
    guess: int = row["imagined"]["by_category"].get(category, 0)
    measured: int = row["real"]["by_category"][category]
    return (guess - measured) / float(row["real"]["peak"])


def _told(found: dict[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (found or {}).items() if key not in ("seconds", "device")}


def imagined_again(
    file: Path,
    imagine: Callable[[str], dict[str, Any]],
    judge: Callable[[str, dict[str, Any]], None],
    *,
    only: str,
    beside: bool,
) -> None:
    """Imagines each program of a measured document again, and writes both into the same file.

    `only`: those whose name has this.
    `beside`: with another torch, whose peaks are kept beside those of the first one.
    """
    document = kept.read(file)
    for name, row in document["programs"].items():
        if only not in name:
            continue
        found = imagine(name)
        if beside:
            told = found["imagined"]
            ranks = told if isinstance(told, list) else [told]
            peaks = [kept.only(one, "requested", "reserved", "problem") for one in ranks]
            row.setdefault("beside", {})[torch.__version__] = peaks
            document["machine"].setdefault("beside", {})[torch.__version__] = _transformers()
            print(name, flush=True)
        else:
            row |= found
            judge(name, row)
    if not beside:
        document["machine"]["imagined_again"] = {"torch": torch.__version__, "date": _now()}
    kept.write(file, document)


def add_again(parser: argparse.ArgumentParser) -> None:
    """Adds the options that imagine measured programs again."""
    parser.add_argument("--again", type=Path, help="imagine again, beside what this file measured")
    parser.add_argument(
        "--beside", action="store_true", help="with --again: keep what an earlier torch imagined"
    )


def _again(name: str) -> dict[str, Any]:
    (found,) = apart(__file__, [["alone", name]])
    return {"imagined": found, "alone": found}


def models(options: argparse.Namespace) -> None:
    """Runs every program every way. Writes after each, so that what was measured is kept."""
    if options.again:
        imagined_again(
            options.again,
            _again,
            lambda name, row: print(line(name, row), flush=True),
            only=options.only,
            beside=options.beside,
        )
        return
    names = [name for name in PROGRAMS if options.only in name]
    ways = list(WAYS) if gpus() else ["alone"]
    rows: dict[str, dict[str, Any]] = {}
    for name, row in run_all(names, ways, options.at_once):
        rows[name] = row
        print(line(name, row), flush=True)
        ordered = {each: rows[each] for each in names if each in rows}
        device = row.get("real", {}).get("device", "")
        if device or ways == ["alone"]:
            write(options.out, "imagine-models", {"programs": ordered}, device or "cpu")


# ---------------------------------------------------------------- replays


def replays(options: argparse.Namespace) -> None:
    """Replays each program's trace at its own settings, beside what torch reserved."""
    names = [name for name in PROGRAMS if options.only in name]
    rows = dict(run_all(names, ["replayed"], options.at_once))
    found = {name: rows[name]["replayed"] for name in names}
    devices = {one.pop("device") for one in found.values() if "device" in one}
    for name, one in found.items():
        print(f"{name:36} {one}", flush=True)
    write(options.out, "replays", {"programs": found}, min(devices, default=""))


# ---------------------------------------------------------------- large


def large(options: argparse.Namespace) -> None:
    """Imagines a 70B Llama, checkpointed, with fused AdamW."""
    import transformers

    import pytracer

    begin = time.perf_counter()
    shape = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    with pytracer.imagine("H100") as t:
        program = trains(
            lambda: transformers.LlamaForCausalLM(shape),
            words(128256, 1, 4096),
            fused,
            dtype=torch.bfloat16,
            checkpoint=True,
        )
        program("cuda")
    peak = t.peak
    found = {
        "seconds": time.perf_counter() - begin,
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "requested": peak.bytes,
        "by_category": {name: amount for name, amount in peak.by_category.items() if amount},
    }
    print(t)
    print(json.dumps(found, indent=1))
    write(options.out, "imagine-large", found)


def write(folder: Path | None, name: str, document: dict[str, Any], device: str = "") -> None:
    """Writes a document with the machine that it was measured on."""
    if folder is None:
        return
    if not device:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    machine = {
        "device": device,
        "torch": torch.__version__,
        "transformers": _transformers(),
        "cudnn": torch.backends.cudnn.version(),
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "date": _now(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{slug(device)}.json"
    kept.write(path, {"machine": machine, **document})


def _transformers() -> str:
    """The release of it: another one may make another model of the same program."""
    return importlib.metadata.version("transformers")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def main() -> None:
    """Runs the command line."""
    if sys.argv[1:2] == ["--apart"]:
        way, name, file = sys.argv[2:]
        answer(lambda: APART[way](name), Path(file))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["models", "large", "replays"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="programs whose name has this")
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    add_again(parser)
    options = parser.parse_args()
    {"models": models, "large": large, "replays": replays}[options.what](options)


if __name__ == "__main__":
    main()
