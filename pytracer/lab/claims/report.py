"""The verdicts as text for a terminal, as a JSON document, and as a page.

The page needs only the document. `pytracer report` shows a kept trace over time.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pytracer.basics.files import write_whole
from pytracer.basics.units import size_text
from pytracer.data.schema import CATEGORY_COLORS
from pytracer.lab.claims import systems
from pytracer.lab.claims.claim import DEPENDS, MOST_UNKNOWN, SOURCES, VERDICTS, Claim
from pytracer.lab.claims.runner import Outcome, Row

Document = Mapping[str, Any]

_TITLE = "The anatomy of training, re-measured"
_QUESTION = "Do published claims about training hold on my machine?"
_WIDTH = 80


# ---------------------------------------------------------------------- the document


def listed(claims: Sequence[Claim]) -> dict[str, Any]:
    """The document of `--list`: the claims, without measurements."""
    return {"claims": [_described(claim) for claim in claims], "sources": dict(SOURCES)}


def document(outcome: Outcome) -> dict[str, Any]:
    """The whole document: rows, results, systems, device and software."""
    done = [r for r in outcome.results.values() if r["status"] == "done"]
    counts = {v: sum(row.verdict.verdict == v for row in outcome.rows) for v in VERDICTS}
    return {
        "device": outcome.plan.device,
        "device_name": next((r["device_name"] for r in done), outcome.plan.device),
        "scale": outcome.plan.scale,
        "folder": str(outcome.plan.folder),
        "software": {k: v for r in done[:1] for k, v in r.items() if k in ("torch", "pytracer")},
        "seconds": round(sum(r["seconds"] for r in outcome.results.values()), 1),
        "verdicts": counts,
        "claims": [_row(row, outcome.plan.device) for row in outcome.rows],
        "experiments": outcome.results,
        "systems": list(systems.found({r.claim.id: r.verdict.verdict for r in outcome.rows})),
    }


def _described(claim: Claim) -> dict[str, Any]:
    return {
        "id": claim.id,
        "sources": list(claim.sources),
        "quote": claim.quote,
        "arithmetic": claim.arithmetic,
        "rule": claim.rule,
        "experiments": [*claim.experiments, *claim.welcome],
        "without_gpu": claim.without_gpu,
    }


def _row(row: Row, device: str) -> dict[str, Any]:
    described = _described(row.claim)
    if device != "cpu":
        described["without_gpu"] = ""
    return described | vars(row.verdict) | {"unknown_share": row.unknown_share}


# ---------------------------------------------------------------------- text


def list_text(claims: Sequence[Claim]) -> str:
    """The claims as text for a terminal."""
    lines = []
    for claim in claims:
        lines += [f"{claim.id:4} {' '.join(claim.sources):9} " + _cut(claim.quote, _WIDTH - 15)]
        lines += _wrapped(claim.rule, 5)
    lines += ["", "The documents", *(f"{name}   {title}" for name, title in SOURCES.items())]
    return "\n".join(lines)


def text(document: Document) -> str:
    """The verdicts as text for a terminal."""
    lines = [
        f"{document['device_name']}, {document['scale']} scale, {document['seconds']:.0f} s of experiments",
        "",
    ]
    for row in document["claims"]:
        lines.append(f"{row['id']:4} {row['verdict']:10} {_cut(row['quote'], _WIDTH - 16)}")
        lines += _wrapped(row["measured"], 16)
        lines += _wrapped(_because(row), 16)
    counts = ", ".join(f"{n} {v}" for v, n in document["verdicts"].items() if n)
    lines += ["", f"{counts}. Measurements and traces are in {document['folder']}."]
    lines += [
        f"unknown is {row['unknown_share']:.2%} of a peak of {row['id']}: more than the 0.1 % that "
        "may be"
        for row in document["claims"]
        if (row["unknown_share"] or 0.0) > MOST_UNKNOWN
    ]
    if document["device"] == "cpu":
        lines += _wrapped(_SMALL, 0)
    return "\n".join(lines)


_SMALL = (
    "Without a GPU the set is scaled down: bytes and categories are exact, times are this CPU's, "
    "and what only a GPU has is SKIPPED."
)


def _because(row: Document) -> str:
    said: str = row["because"]
    if said and row["verdict"] == DEPENDS:
        return f"Depends on {said}"
    return said


def _wrapped(words: str, indent: int) -> list[str]:
    return textwrap.wrap(words, _WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent)


def _cut(words: str, width: int) -> str:
    return textwrap.shorten(words, width, placeholder=" ...")


# ---------------------------------------------------------------------- pages


def write(path: Path, page: str, *, overwrite: bool) -> None:
    """Writes the whole page or nothing."""

    def fill(file: BinaryIO) -> None:
        file.write(page.encode())

    write_whole(path, fill, overwrite=overwrite)


def markdown_page(document: Document) -> str:
    """The page as Markdown."""
    lines = [f"# {_TITLE}", "", _QUESTION, "", _made_on(document), ""]
    lines += ["| | verdict | the documents | here |", "|---|---|---|---|"]
    for row in document["claims"]:
        here = ". ".join(each for each in (row["measured"], _because(row)) if each)
        said = f"{row['quote']} ({', '.join(row['sources'])})"
        lines.append(f"| {row['id']} | {row['verdict']} | {_cell(said)} | {_cell(here)} |")
    lines += ["", "## The rules", ""]
    for row in document["claims"]:
        arithmetic = (
            f" The documents' own numbers: {row['arithmetic']}." if row["arithmetic"] else ""
        )
        lines.append(f"- **{row['id']}**: {row['rule']}.{arithmetic}")
        if row["without_gpu"]:
            lines.append(f"  Without a GPU: {row['without_gpu']}")
    if any(_traces(document)):
        lines += ["", "## Where the memory was", "", *_memory_rows(document)]
    ledgers = [(n, t) for n, t in _traces(document) if t["device"] != "cpu" and _is_a_training(n)]
    if ledgers:
        lines += ["", "## From the tensors to nvidia-smi", "", *_ledger_rows(ledgers)]
    lines += ["", "## The systems that the documents name", ""]
    lines += ["| system | how | claims | here |", "|---|---|---|---|"]
    for each in document["systems"]:
        cells = (each["name"], each["how"], ", ".join(each["claims"]), each["status"])
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    lines += ["", "## The documents", ""]
    lines += [f"- {name}: {title}" for name, title in SOURCES.items()]
    return "\n".join(lines) + "\n"


def _made_on(document: Document) -> str:
    software = ", ".join(f"{name} {version}" for name, version in document["software"].items())
    counts = ", ".join(f"{n} {v}" for v, n in document["verdicts"].items() if n)
    text = f"Measured by `pytracer confirm` on {document['device_name']} ({software}): {counts}."
    return f"{text} {_SMALL}" if document["device"] == "cpu" else text


def _memory_text(document: Document) -> str:
    worst = max(t["unknown_share"] for _, t in _traces(document))
    return f"Bytes at the peak of each trace. Of no trace more than {worst:.3%} is unknown."


def _memory_rows(document: Document) -> Iterator[str]:
    names = _shown_categories(document)
    yield from (_memory_text(document), "")
    yield from (f"| trace | peak | {' | '.join(names)} |", "|---|" + "---:|" * (len(names) + 1))
    for name, trace in _traces(document):
        sizes = [_size(each, trace["categories"][each]["at_peak"]) for each in names]
        yield f"| {name} | {size_text(trace['peak_bytes'])} | {' | '.join(sizes)} |"


def _traces(document: Document) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, result in document["experiments"].items():
        for label, trace in result["traces"].items():
            yield f"{name}.{label}", trace


def _is_a_training(name: str) -> bool:
    return name.startswith(("trainer_", "accelerate_", "weights_load", "sharding"))


def _shown_categories(document: Document) -> list[str]:
    """The categories that some trace has at its peak, and always `unknown`."""
    traces = [trace for _, trace in _traces(document)]
    return [
        name
        for name in CATEGORY_COLORS
        if name == "unknown" or any(t["categories"][name]["at_peak"] for t in traces)
    ]


def _ledger_rows(ledgers: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    yield "When each trace ended; the rows of a level add up to the one above."
    for name, trace in ledgers:
        yield from ("", f"`{name}`", "", "```")
        yield from _ledger_lines(trace)
        yield "```"


def _ledger_lines(trace: Mapping[str, Any]) -> Iterator[str]:
    for row in trace["ledger"]["rows"]:
        size = "not known" if row["bytes"] is None else f"{row['bytes']:,}"
        yield f"{'  ' * row['level'] + row['name']:44}{size:>20}"


def _size(category: str, amount: int) -> str:
    """Empty when there are no bytes, except for `unknown`, whose zero is printed."""
    return size_text(amount) if amount or category == "unknown" else ""


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("\n", " ")
