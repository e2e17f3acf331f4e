"""Makes the tables of docs/ranks.md from the results of ranks.py and many_ranks.py."""

import statistics
from typing import Any

Document = dict[str, Any]
GIB, MIB = 1 << 30, 1 << 20
_HELD = ("weights", "gradients", "optimizer_state")

_NOT_REPEATED = {"context_parallel"}  # it ran without deterministic algorithms
# What a rank of N holds of weights, gradients and Adam's state in fp32, by the paper or documentation, in bytes
# per parameter of the whole model; and whose word it is.
_SAID = {
    "ddp": (lambda n: 16, "each rank has all of it ([ZeRO](https://arxiv.org/abs/1910.02054))"),
    "ddp_views": (lambda n: 16, "the same, without buckets beside the gradients (DDP's docs)"),
    "ddp_checkpointed": (lambda n: 16, "the same"),
    "fsdp1": (lambda n: 16 / n, "all of it is cut over N ranks (ZeRO 3)"),
    "fsdp2": (lambda n: 16 / n, "all of it is cut over N ranks (ZeRO 3)"),
    "fsdp2_kept": (lambda n: 16 / n, "the same; whole weights stay until backward (ZeRO 2)"),
    "fsdp2_mixed": (lambda n: 16 / n, "the same; whole weights have 2 bytes"),
    "fsdp2_offloaded": (lambda n: 0, "shards, gradients and state are on the host"),
    "fsdp2_checkpointed": (lambda n: 16 / n, "all of it is cut over N ranks"),
    "hsdp": (lambda n: 8, "cut over the 2 ranks of a group"),
    "tensor_parallel": (None, "matrices of layers are cut, embedding and head are whole"),
    "fsdp2_tensor_parallel": (None, "layers cut by both, embedding and head by one"),
    "context_parallel": (lambda n: 16, "only sequences are cut"),
    "pipeline": (None, "its stage: half of the layers, and embedding or head"),
    "pipeline_interleaved": (None, "its two stages"),
    "experts": (None, "its experts, and all else"),
}


def ways(document: Document) -> str:
    """A row per way: what a rank holds, gathers and communicates, and whether the trace is right."""
    heads = ["way", "bytes per parameter", "documented", "gathered", "communication", "peak"]
    heads += ["trace", "results", "a step takes"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|---|" + "---:|" * 3 + "---|---|---:|"]
    first = next(way for way in document["ways"] if "ranks" in way)
    whole = first["ranks"][0]["parameters"]
    rows = (_row(way, whole) for way in document["ways"] if "ranks" in way)
    lines += [f"| {' | '.join(row)} |" for row in rows]
    left = [f"{way['way']} ({way['problem']})" for way in document["ways"] if _needs_more(way)]
    failed = [way["way"] for way in document["ways"] if "problem" in way and not _needs_more(way)]
    machine = f"torch {document['torch']}, NCCL {document['nccl']}"
    ranks = f"{document['devices'] or 2} ranks, {whole / 1e9:.2f} billion parameters"
    notes = [f"{ranks}; {document['device']}, {machine}."]
    for day in sorted({way["taken"] for way in document["ways"] if "taken" in way}):
        names = [f"`{way['way']}`" for way in document["ways"] if way.get("taken") == day]
        notes.append(f"{day}: {', '.join(names)}.")
    if left:
        notes.append(f"Not run: {', '.join(left)}.")
    if failed:
        notes.append(f"Did not run to its end: {', '.join(failed)}.")
    return "\n".join([*lines, "", " ".join(notes)])


def _needs_more(way: Document) -> bool:
    return way.get("problem", "").startswith("needs ")


def _row(way: Document, whole: int) -> list[str]:
    name, ranks = way["way"], way["ranks"]
    worst = max(ranks, key=lambda one: sum(one["truth"][key] for key in _HELD))
    held = sum(worst["truth"][key] for key in _HELD) / whole
    documented, words = _SAID[name]
    said = words if documented is None else f"{documented(len(ranks)):.0f}: {words}"
    most = {
        key: max(one["trace"]["most"].get(key, 0) for one in ranks) for key in ("communication",)
    }
    gathered = max(one["trace"]["gathered"] for one in ranks)
    peak = max(one["trace"]["peak"] for one in ranks)
    return [
        f"`{name}`",
        f"{held:.2f}",
        said,
        _size(gathered),
        _size(most["communication"]),
        f"{peak / GIB:.1f} GiB",
        _verdict(ranks),
        _same(ranks),
        _ratio(ranks),
    ]


def _size(size: int) -> str:
    return f"{size / MIB:,.0f} MiB" if size else "–"


def _verdict(ranks: list[Document]) -> str:
    """Whether each rank's trace has what the program itself counts."""
    wrong = []
    for one in ranks:
        truth, seen = one["truth"], one["trace"]
        wrong += [key for key in _HELD[::2] if seen["at_end"][key] != truth[key]]
        wrong += ["gradients"] if seen["most"]["gradients"] < truth["gradients"] else []
        wrong += ["ledger"] if abs(seen.get("residual") or 0) > 32 * MIB else []
    unknown = max(one["trace"]["most"]["unknown"] for one in ranks)
    known = f", {unknown} B unknown" if unknown else ""
    return (f"differs: {', '.join(sorted(set(wrong)))}" if wrong else "exact") + known


def _same(ranks: list[Document]) -> str:
    if ranks[0]["way"] in _NOT_REPEATED:
        return "not compared"
    results = ("losses", "parameters")
    differ = sorted({key for one in ranks for key in results if not one["same"][key]})
    return f"differ: {', '.join(differ)}" if differ else "equal"


def _ratio(ranks: list[Document]) -> str:
    ratios = [one["step_ratio"]["median"] for one in ranks if "step_ratio" in one]
    return f"{max(ratios):.3f}" if ratios else "–"


def recordings(document: Document) -> str:
    """What it takes a rank to begin and to end a recording, in milliseconds of CPU time."""
    lines = ["| ms of CPU time | plain step | begin | first two steps, longer by | end |"]
    lines.append("|---|" + "---:|" * 4)
    for way in document["ways"]:
        timed = [one["step_ratio"] for one in way.get("ranks", ()) if "step_ratio" in one]
        if not timed:
            continue
        step = max(statistics.median(one["plain_s"]) for one in timed)
        parts = [
            max(one["recording_s"][part]["process"] for one in timed)
            for part in ("begin", "first_steps_longer", "end")
        ]
        figures = " | ".join(f"{1000 * seconds:.1f}" for seconds in (step, *parts))
        lines.append(f"| `{way['way']}` | {figures} |")
    what = "Medians, of the rank that takes most; a plain step in milliseconds of the wall's clock."
    where = f"A tiny model, 2 ranks with gloo; {document['device']}, torch {document['torch']}"
    return "\n".join([*lines, "", f"{what} {where}, {document['taken']}."])


def many(document: Document) -> str:
    """What reducing and comparing the files of many ranks takes."""
    heads = "| ranks | CPU time | per rank | memory | traces |"
    lines = [heads, "|---:|---:|---:|---:|---:|"]
    for row in document["rows"]:
        traces = row["trace_bytes_per_rank"] * row["ranks"] / MIB
        lines.append(
            f"| {row['ranks']:,} | {row['cpu_s']:.1f} s | {1000 * row['cpu_s'] / row['ranks']:.1f} ms "
            f"| {row['peak_mib']:.0f} MiB | {traces:.0f} MiB |"
        )
    last = document["rows"][-1]
    named = sum(last["faults_named"].values())
    summary = (
        f"In the largest job, {named} of {len(last['faults_named'])} planted faults are named. A "
        f"digest takes {last['digest_bytes_per_rank_and_step']} bytes per rank and step. SQL over "
        f"all digests answers in {last['question_s']:.1f} s. Dask with two workers gives "
        f"{'the same' if last['dask_is_equal'] else 'other'} digests. Measured on "
        f"{document['cpus']} cores, {document['taken']}."
    )
    return "\n".join([*lines, "", summary])
