"""Makes the tables of docs/imagine.md from the results of benchmarks/imagine.py."""

import textwrap
from typing import Any

Document = dict[str, Any]
GIB = 1 << 30


def models(document: Document) -> str:
    """A row per program: the errors of an imagined run against the real one."""
    rows = [_row(name, ways) for name, ways in document["programs"].items()]
    heads = ["program", "peak measured", "requested", "reserved", "worst category", "without a GPU"]
    machine = document["machine"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * 3 + "---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    measured = (
        f"Measured on {machine['device']}, torch {machine['torch']}, cuDNN {machine['cudnn']}, "
        f"{machine['date'][:10]}."
    )
    return "\n".join([*lines, "", measured])


def _row(name: str, ways: Document) -> list[str]:
    real, imagined, alone = (ways.get(way, {}) for way in ("real", "imagined", "alone"))
    problem = next((ways[way]["problem"] for way in ways if "problem" in ways[way]), "")
    if "peak" not in real or "peak" not in imagined:
        first = problem.splitlines()[0].partition(": ")[2] if problem else "not run"
        why = textwrap.shorten(first, 110, placeholder=" ...")
        size = f"{real['requested'] / GIB:.2f} GiB" if "requested" in real else ""
        return [name, size, "", "", why.replace("|", "/"), ""]
    errors = [f"{imagined[what] / real[what] - 1:+.3%}" for what in ("requested", "reserved")]
    category, off = _worst(real, imagined)
    same = (
        "not run" if "peak" not in alone else "equal" if _told(alone) == _told(imagined) else "no"
    )
    worst = f"{category} {off:.2%}" if off >= 5e-5 else "none"
    return [name, f"{real['requested'] / GIB:.2f} GiB", *errors, worst, same]


def _worst(real: Document, imagined: Document) -> tuple[str, float]:
    names = {*real["by_category"], *imagined["by_category"]}
    off = {
        name: abs(real["by_category"].get(name, 0) - imagined["by_category"].get(name, 0))
        / real["peak"]
        for name in names
    }
    worst = max(sorted(off), key=lambda name: off[name])
    return worst, off[worst]


def _told(found: Document) -> Document:
    return {key: value for key, value in found.items() if key != "seconds"}


def large(document: Document) -> str:
    """One sentence about the large model."""
    machine = document["machine"]
    return (
        f"{document['requested'] / GIB:,.0f} GiB, imagined in {document['seconds']:.0f} s with "
        f"{document['resident'] / GIB:.2f} GiB of resident memory, of which torch and transformers "
        f"are most. Measured on {machine['cores']} cores, torch {machine['torch']}, "
        f"{machine['date'][:10]}."
    )
