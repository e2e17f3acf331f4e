"""The verdicts as text for a terminal, as a JSON document, and as a page without scripts.

The pages need only the document. The pictures of memory over time also need the traces.
"""

import html
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pytracer.basics.files import write_whole
from pytracer.basics.units import size_text
from pytracer.data.schema import CATEGORY_COLORS
from pytracer.export import html as html_export
from pytracer.lab.claims import systems
from pytracer.lab.claims.claim import DEPENDS, MOST_UNKNOWN, SOURCES, VERDICTS, Claim
from pytracer.lab.claims.runner import Outcome, Row
from pytracer.reading.views import load

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


# ---------------------------------------------------------------------- HTML

_STYLE = """
body{font:15px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;width:100%}td,th{padding:.2rem .5rem;text-align:left;
vertical-align:top;border-bottom:1px solid #8884}pre{font-size:12px;overflow:auto}
.CONFIRMED{color:#2a7d2a}.REFUTED{color:#c33}.DEPENDS{color:#a06a00}.FAILED{color:#c33}
.SKIPPED{color:#888}.v{font-weight:bold}.small{font-size:13px;opacity:.8}
@media(prefers-color-scheme:dark){.CONFIRMED{color:#6c6}.DEPENDS{color:#db5}}
"""


def html_page(document: Document, pictures: Mapping[str, str]) -> str:
    """The page, in light and dark. It has no scripts, and links only to itself."""
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{_TITLE}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_TITLE}</h1><p>{_safe(_made_on(document))}</p>",
        *_claims_html(document),
        *_memory_html(document, pictures),
        *_systems_html(document),
        "<h2>The documents</h2><ul>",
        *(f"<li>{_safe(name)}: {_safe(title)}</li>" for name, title in SOURCES.items()),
        "</ul></body></html>",
    ]
    return "\n".join(parts) + "\n"


def pictures(document: Document) -> dict[str, str]:
    """A picture of memory over time for each training whose trace is still in the folder."""
    drawn = {}
    for name, trace in _traces(document):
        path = Path(document["folder"]) / trace["file"]
        if _is_a_training(name) and path.exists():
            drawn[name] = html_export.picture(load(path).data, trace["device"])
    return drawn


def _claims_html(document: Document) -> Iterator[str]:
    yield "<table><tr><th></th><th>verdict</th><th>the documents</th><th>here</th></tr>"
    for row in document["claims"]:
        here = [f"<div>{_safe(row['measured'])}</div>"] if row["measured"] else []
        here += [f"<div><b>{_safe(_because(row))}</b></div>"] if row["because"] else []
        details = [f"Rule: {row['rule']}."]
        details += [f"The documents' own numbers: {row['arithmetic']}."] * bool(row["arithmetic"])
        details += [f"Without a GPU: {row['without_gpu']}"] * bool(row["without_gpu"])
        here += [f'<div class="small">{_safe(line)}</div>' for line in details]
        links = " ".join(
            f'<a href="#{_safe(name)}">{_safe(name)}</a>'
            for name in row["experiments"]
            if document["experiments"].get(name, {}).get("traces")
        )
        here += [f'<div class="small">Memory: {links}</div>'] if links else []
        said = f"{_safe(row['quote'])} <span class=small>{' '.join(row['sources'])}</span>"
        verdict = row["verdict"]
        yield (
            f'<tr id="{_safe(row["id"])}"><td><b>{_safe(row["id"])}</b></td>'
            f'<td class="v {verdict}">{verdict}</td><td>{said}</td><td>{"".join(here)}</td></tr>'
        )
    yield "</table>"


def _memory_html(document: Document, pictures: Mapping[str, str]) -> Iterator[str]:
    if not any(_traces(document)):
        return
    yield f"<h2>Where the memory was</h2><p>{_safe(_memory_text(document))}</p>"
    yield from _legend(document)
    for name, trace in _traces(document):
        yield _trace_html(name, trace, pictures.get(name, ""))


def _legend(document: Document) -> Iterator[str]:
    yield '<p class="small">'
    for name in _shown_categories(document):
        yield f'<span style="color:{CATEGORY_COLORS[name]}">&#9632;</span> {name.replace("_", " ")} '
    yield "</p>"


def _trace_html(name: str, trace: Mapping[str, Any], picture: str) -> str:
    """One trace: its peak as a bar, its picture over time, its categories and its ledger."""
    experiment_name, _, label = name.partition(".")
    where = f"in {trace['peak_phase']}" if trace["peak_phase"] else "before the first event"
    counters = ", ".join(f"{shown} {size_text(trace[key])}" for key, shown in _counters(trace))
    counters = f"; {counters}" if counters else ""
    ledger = f"<pre>{_safe(chr(10).join(_ledger_lines(trace)))}</pre>"
    return (
        f'<h3 id="{_safe(experiment_name)}">{_safe(experiment_name)}: {_safe(label)}</h3>'
        f"<div>{size_text(trace['peak_bytes'])} {_safe(where)}; {trace['unknown_share']:.3%} unknown"
        f"{counters}; <code>{_safe(trace['file'])}</code></div>{_bar(trace)}{picture}"
        f"<details><summary>by category, and the ledger</summary><table>{_category_rows(trace)}"
        f"</table>{ledger}</details>"
    )


def _counters(trace: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The device's own counters that this trace has, and the words for them."""
    for key, shown in (
        ("allocated_peak", "allocated at most"),
        ("reserved_peak", "reserved at most"),
        ("nvml_used", "NVML at the end"),
    ):
        if trace.get(key) is not None:
            yield key, shown


def _bar(trace: Mapping[str, Any]) -> str:
    """The categories at the peak, side by side."""
    peak = max(trace["peak_bytes"], 1)
    parts, left = [], 0.0
    for category, color in CATEGORY_COLORS.items():
        at_peak = trace["categories"][category]["at_peak"]
        width = 760 * at_peak / peak
        if width:
            parts.append(
                f'<rect x="{left:.1f}" width="{width:.1f}" height="18" fill="{color}">'
                f"<title>{_safe(f'{category} {size_text(at_peak)}')}</title></rect>"
            )
        left += width
    return f'<svg viewBox="0 0 760 18" width="100%" role="img">{"".join(parts)}</svg>'


def _category_rows(trace: Mapping[str, Any]) -> str:
    rows = ["<tr><th></th><th>at the peak</th><th>most</th><th>at the end</th></tr>"]
    for category in CATEGORY_COLORS:
        row = trace["categories"][category]
        if row["most"] or category == "unknown":
            sizes = (row["at_peak"], row["most"], row["at_end"])
            cells = "".join(f"<td>{size_text(size)}</td>" for size in sizes)
            rows.append(f"<tr><td>{category}</td>{cells}</tr>")
    return "".join(rows)


def _systems_html(document: Document) -> Iterator[str]:
    yield "<h2>The systems that the documents name</h2><table>"
    yield "<tr><th>system</th><th>how</th><th>claims</th><th>here</th></tr>"
    for each in document["systems"]:
        links = ", ".join(f'<a href="#{_safe(c)}">{_safe(c)}</a>' for c in each["claims"])
        name, how, status = (_safe(each[key]) for key in ("name", "how", "status"))
        yield f"<tr><td>{name}</td><td>{how}</td><td>{links}</td><td>{status}</td></tr>"
    yield "</table>"


def _safe(words: str) -> str:
    return html.escape(str(words))
