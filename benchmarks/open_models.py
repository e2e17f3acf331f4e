"""Imagines 50 named open models in each of seven ways, beside a computation by hand.

    python benchmarks/open_models.py --out benchmarks/results     # needs no GPU
    python benchmarks/open_models.py --only Llama --way FSDP2

The published configurations are in `tests/data/open_models.json`, cut in layers. Each run is a
process of its own: its seconds and its resident memory are those of one run. What it holds as the
optimizer steps is compared to `open_models_by_hand.py`.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


MODELS = ROOT / "tests" / "data" / "open_models.json"
RANKS = 4
ROWS = 2  # with one row, the gradient of an expanded parameter is a view of a larger tensor
LENGTH = 32  # words
CARD = "H200"
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


def ranks_of(way: str) -> list[int]:
    """The ranks to imagine: the first and the last, where their shares may differ."""
    return [0, RANKS - 1] if "shard" in WAYS[way] else [0]


def refusal(entry: Mapping[str, Any], way: str) -> str | None:
    """Why torch or transformers themselves cannot train this model in this way."""
    reason: str | None = entry.get("cannot", {}).get(way)
    return reason


def imagined(folder: Path, way: str, rank: int = 0) -> Any:
    """Imagines one rank of the model whose config.json is in the folder."""
    import pytracer
    from pytracer.imagined import huggingface

    job = {"ranks": RANKS, "rank": rank} if "shard" in WAYS[way] else {}
    order = huggingface.Order(str(folder), batch=ROWS, length=LENGTH, **WAYS[way])
    with pytracer.imagine(CARD, sizes="balanced", **job) as t:
        huggingface.train(order, 2)
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
