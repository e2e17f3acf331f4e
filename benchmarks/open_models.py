"""Imagines 50 named open models in each of seven ways, beside a computation by hand.

    python benchmarks/open_models.py --out benchmarks/results     # needs no GPU
    python benchmarks/open_models.py --only Llama --way FSDP2     # prints, and writes nothing
    python benchmarks/open_models.py --out benchmarks/results --missing   # what has no result yet

The published configurations are in `tests/data/open_models.json`, cut in layers. Each run is a
process of its own: its seconds and its resident memory are those of one run. What it holds as the
optimizer steps is compared to `open_models_by_hand.py`.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import kept, open_models_by_hand as by_hand  # noqa: E402

MODELS = ROOT / "tests" / "data" / "open_models.json"
RANKS = 4
ROWS = 2  # with one row, the gradient of an expanded parameter is a view of a larger tensor
LENGTH = 32  # words
CARD = "H200"
FIRST = "openai-community/gpt2"  # small, and in the file for good
# How each model is trained: what the order for `huggingface.train` says beside the model.
WAYS: dict[str, dict[str, Any]] = {
    "one card": {},
    "DDP": {"shard": "ddp"},
    "FSDP2": {"shard": "fsdp2"},
    "tensor parallel": {"shard": "tp"},
    "bf16": {"bf16": True},
    "bfloat16": {"dtype": "bfloat16"},
    "checkpointed": {"checkpoint": True},
}
HELD = ("weights", "gradients", "optimizer_state")


def models() -> dict[str, dict[str, Any]]:
    """Returns the entries of the data file, by the model's name."""
    found: dict[str, dict[str, Any]] = json.loads(MODELS.read_text())
    return found


def config_of(entry: Mapping[str, Any], *, whole: bool = False) -> dict[str, Any]:
    """Returns a model's config.json: as published, or cut in layers."""
    config: dict[str, Any] = json.loads(json.dumps(entry["config"]))
    for key, value in {} if whole else entry["cut"].items():
        *path, last = key.split(".")
        part = config
        for name in path:
            part = part[name]
        part[last] = value
    return config


def ranks(entry: Mapping[str, Any], way: str) -> int:
    """How many ranks there are: as many as heads that transformers cannot split, if fewer."""
    return int(entry.get("ranks", {}).get(way, RANKS)) if "shard" in WAYS[way] else 1


def ranks_of(entry: Mapping[str, Any], way: str) -> list[int]:
    """The ranks to imagine: the first and the last, where their shares may differ."""
    return sorted({0, ranks(entry, way) - 1})


def refusal(entry: Mapping[str, Any], way: str) -> str | None:
    """Why torch or transformers themselves cannot train this model in this way."""
    reason: str | None = entry.get("cannot", {}).get(way)
    return reason


def imagined(
    entry: Mapping[str, Any], folder: Path, way: str, rank: int = 0, steps: int = 2
) -> Any:
    """Imagines one rank of the model whose config.json is in the folder."""
    import pytracer
    from pytracer.imagined import huggingface

    job: dict[str, Any] = {"ranks": ranks(entry, way), "rank": rank} if "shard" in WAYS[way] else {}
    order = huggingface.Order(
        str(folder), batch=ROWS, length=entry.get("length", LENGTH), **WAYS[way]
    )
    with pytracer.imagine(CARD, sizes="balanced", **job) as t:
        huggingface.train(order, steps)
    return t


def held(t: Any) -> dict[str, int]:
    """Bytes of weights, gradients and state as the optimizer steps for the first time."""
    taken = t.allocations()
    states = taken[(taken["category"] == "optimizer_state") & (taken["step"] == 0)]
    moment = states["start_ns"].max()
    ended = (taken["end_ns"] <= moment).fillna(False)  # never, for what outlives the run
    alive = taken[(taken["start_ns"] <= moment) & ~ended]
    sums = alive.groupby("category", observed=False)["requested_bytes"].sum()
    return {name: int(sums[name]) for name in HELD}


# ---------------------------------------------------------------- all of them


def answer(name: str, way: str) -> dict[str, Any]:
    """Imagines the first rank in a forked process, which has torch and transformers already."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "answer")
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                file.write_text(json.dumps(_measured(name, way, Path(folder))))
                code = 0
            os._exit(code)
        os.waitpid(child, 0)
        if not file.exists():
            return {"verdict": "no answer"}
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def _measured(name: str, way: str, folder: Path) -> dict[str, Any]:
    """What one run holds, whether shapes say the same, and what the run took."""
    entry = models()[name]
    config = config_of(entry)
    (folder / "config.json").write_text(json.dumps(config))
    began = time.perf_counter()
    try:
        t = imagined(entry, folder, way, steps=1)
        found = held(t)
    except Exception as problem:
        return {"verdict": f"{type(problem).__name__}: {problem}".partition("\n")[0]}
    seconds = time.perf_counter() - began
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    shapes = by_hand.held(
        by_hand.on_meta(config), WAYS[way], ranks(entry, way), 0, entry.get("idle", "")
    )
    wrong = {what: found[what] - shapes[what] for what in HELD if found[what] != shapes[what]}
    return {
        "verdict": f"differs: {wrong}" if wrong else "equal",
        "doubts": [str(one) for one in _doubts(t)],
        **found,
        "peak": t.peak.bytes,
        "seconds": round(seconds, 2),
        "resident": resident,
    }


def _doubts(t: Any) -> list[Any]:
    from pytracer.analysis.facts.doubts import doubts

    return list(doubts(t.data))


def pairs(only: str = "", way: str = "") -> Iterator[tuple[str, str]]:
    """The models and ways that torch and transformers can train."""
    for name, entry in models().items():
        for each in WAYS:
            if only in name and way in each and refusal(entry, each) is None:
                yield name, each


def line(name: str, way: str, row: Mapping[str, Any]) -> str:
    """One line for a run."""
    if "seconds" not in row:
        return f"{name:45} {way:16} {row['verdict']}"
    return (
        f"{name:45} {way:16} {row['verdict']:6} {sum(row[what] for what in HELD) / 2**30:8.2f} GiB "
        f"{row['seconds']:6.1f} s {row['resident'] / 2**30:.2f} GiB resident {row['doubts'] or ''}"
    )


def write(path: Path, rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
    """Writes the results, in the order of the models and of the ways."""
    import torch
    import transformers

    machine = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cores": os.cpu_count(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    ordered = [
        {"model": name, "way": way, **rows[name, way]}
        for name, way in pairs()
        if (name, way) in rows
    ]
    refused = [
        [name, way] for name, entry in models().items() for way in WAYS if refusal(entry, way)
    ]
    kept.write(path, {"machine": machine, "ranks": RANKS, "refused": refused, "runs": ordered})


def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the rows that `write` was given."""
    if not path.exists():
        return {}
    rows = kept.read(path)["runs"]
    return {(row.pop("model"), row.pop("way")): row for row in rows}


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="models whose name has this")
    parser.add_argument("--way", default="", help="ways whose name has this")
    parser.add_argument("--missing", action="store_true", help="keep the equal results of --out")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    _import_all()
    path = None if options.out is None else options.out / "open-models.json"
    keeps = options.missing or options.only or options.way
    rows = read(path) if path is not None and keeps else {}
    for name, way in pairs(options.only, options.way):
        if options.missing and rows.get((name, way), {}).get("verdict") == "equal":
            continue
        rows[name, way] = answer(name, way)
        print(line(name, way, rows[name, way]), flush=True)
        if path is not None:
            write(path, rows)


def _import_all() -> None:
    """Imports what a run needs, once; with one thread, because a fork keeps no others.

    A first run, in a fork, says which modules these are. This process must not run it: after a
    backward pass torch lets no fork have one.
    """
    import torch
    import transformers

    import pytracer  # noqa: F401

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder, "names")
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                _measured(FIRST, "FSDP2", Path(folder))
                names.write_text("\n".join(sys.modules))
            os._exit(0)
        os.waitpid(child, 0)
        for name in names.read_text().split():
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.freeze()


if __name__ == "__main__":
    main()
