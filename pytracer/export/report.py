"""The report: one offline page that shows every allocation.

The page has the table and a picture (`html.py`), which need no script; the allocations (`packed.py`); a
document of everything else on the page; and the viewer (`report.js`, built from `viewer/`). The
page's policy forbids to load anything, and allows only scripts with exactly our text.
"""

import base64
import hashlib
import html as markup
import json
import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pytracer.analysis.allocator import ledger
from pytracer.analysis.answers import (
    breakdown,
    diff,
    diff_rows,
    findings,
    hints,
    recording_quality,
    training_steps,
)
from pytracer.analysis.answers.situation import Finding
from pytracer.analysis.facts import devices, grouping, owners, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.forecasts import changes
from pytracer.basics.files import write_whole
from pytracer.basics.version import __version__
from pytracer.cost import table as cost_table
from pytracer.data import meta, sanitized
from pytracer.data.recorded import Trace
from pytracer.data.schema import ACTION, CATEGORY_COLORS, CATEGORY_ORDER, PHASES
from pytracer.export import advice_text, html, job_page, ledger_text, packed, series, words
from pytracer.ranks.compare import Comparison

FORMAT = 1  # of the document and the columns
_MOST_BANDS = 20_000
_MOST_COSTS = 200
_MOST_INLINE = 20_000  # allocations in a notebook, because it keeps its outputs
_AROUND = 2  # lines shown above and below a line of source


@dataclass(frozen=True)
class Named:
    """A trace, its name on the page, and the forecasts that somebody asked for, as texts."""

    name: str
    trace: Trace
    answers: tuple[str, ...] = ()
    rank: int | None = None  # in a job


def write(
    traces: Sequence[Named],
    path: str | Path,
    *,
    source: bool = False,
    overwrite: bool = False,
    job: Comparison | None = None,
) -> Path:
    """Writes the page of one trace, of two to compare, or of a job and some of its ranks.

    Raises:
        errors.CannotWrite: the file exists already, or cannot be written.
    """
    target = Path(path)
    whole = page(traces, source=source, job=job).encode()

    def fill(file: BinaryIO) -> None:
        file.write(whole)

    return write_whole(target, fill, overwrite=overwrite)


def page(
    traces: Sequence[Named],
    *,
    source: bool = False,
    most: int = packed.MOST,
    job: Comparison | None = None,
) -> str:
    """The page as text."""
    strings = packed.Strings()
    parts = [
        (each, device, packed.pack(each.trace, device, strings, most))
        for each in traces
        for device in usage.devices(each.trace) or (usage.main_device(each.trace),)
    ]
    document = {
        "format": FORMAT,
        "version": __version__,
        "colors": CATEGORY_COLORS,
        "categories": CATEGORY_ORDER,
        "phases": PHASES,
        "texts": packed.TEXTS,
        "meanings": {**words.CATEGORIES, **words.OTHERS},
        "job": job and job_page.document(job, _places([each for each, _, _ in parts])),
        "sets": [
            {
                **_facts(each, device, strings, pack),
                **pack.facts,
                "aligned": _aligned([one.trace for one in traces], each.trace),
            }
            for each, device, pack in parts
        ],
        "source": {k: v for each in traces for k, v in _source(each.trace).items()}
        if source
        else {},
    }
    document["strings"] = strings.texts
    columns = (
        _data(f"{number}-{name}", base64.b64encode(column).decode())
        for number, (_, _, pack) in enumerate(parts)
        for name, column in pack.columns.items()
    )
    return "".join(_lines(traces, document, columns, job is not None))


def _places(sets: Sequence[Named]) -> dict[int, int]:
    """The first set of each rank."""
    found: dict[int, int] = {}
    for place, each in enumerate(sets):
        if each.rank is not None:
            found.setdefault(each.rank, place)
    return found


def inline(trace: Trace) -> str:
    """The output of a notebook: the table and a picture, and below them the page in a frame.

    The frame is sandboxed, so its script reaches neither the notebook nor a network.
    """
    table = html.fragment(trace)
    count = len(allocations(trace))
    if count == 0:
        return table
    if count > _MOST_INLINE:
        text = f"{count:,} allocations are too many for a notebook: t.report('run.html') shows all."
        return f"{table}\n<p>{text}</p>"
    whole = markup.escape(page([Named("trace", trace)]))
    return (
        f'{table}\n<iframe sandbox="allow-scripts allow-downloads" title="Every allocation" '
        f'style="width:100%;height:900px;border:0" srcdoc="{whole}"></iframe>'
    )


def _lines(
    traces: Sequence[Named], document: Mapping[str, Any], columns: Iterator[str], is_job: bool
) -> Iterator[str]:
    script, style = _resource("report.js"), _resource("report.css")
    yield '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield '<meta name="color-scheme" content="light dark">\n'
    title = "A job of ranks" if is_job else " and ".join(each.name for each in traces)
    yield f"<title>{markup.escape(html.printable(title))}: pytracer</title>\n"
    yield f"<style>{style}</style></head>\n<body>\n"
    yield f'<main><h1>{markup.escape(html.printable(title))}</h1>\n<div id="app"></div>\n'
    yield '<section id="summary" aria-label="Summary">'
    for each in traces:
        yield html.fragment(each.trace)
    yield "</section></main>\n<noscript><p>The table and the picture need no scripts. To see each "
    yield "allocation, allow the scripts of this page; it loads nothing.</p></noscript>\n"
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    yield _data("document", text.replace("<", "\\u003c"))
    # The script comes before the columns, so that it works on one while the browser reads the next.
    yield f'<script id="viewer">{script}</script>\n'
    yield from columns
    yield "</body></html>\n"


def _policy(script: str) -> str:
    """The policy: no network, and no script but ours, even if a name in the trace contains one."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}' blob:; worker-src blob:; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _resource(name: str) -> str:
    return (files("pytracer.export") / name).read_text(encoding="utf-8")


def _data(name: str, text: str) -> str:
    return f'<script type="application/octet-stream" id="data-{name}">{text}</script>\n'


# ---------------------------------------------------------------- the document


def _facts(
    each: Named, device: str, strings: packed.Strings, pack: packed.Packed
) -> dict[str, Any]:
    """The facts on the page about a device beside its allocations."""
    order = pack.shown
    trace, peak = each.trace, usage.peak(each.trace, device)
    last = int(trace.time_ns(trace.events.ticks[-1:])[0]) if len(trace.events.ticks) else 0
    reserved = packed.reserved(trace, device)
    has_events = bool(usage.devices(trace))
    return {
        "name": html.printable(each.name),
        "device": device,
        "end_ns": max(last, 0),
        "idle_ns": _idle_ns(trace, order),
        "first_step": training_steps.first_step(trace),
        "peak": {
            "bytes": peak.bytes,
            "time_ns": peak.time_ns,
            "when": training_steps.when(trace, peak),
        },
        "capacity": ledger.capacity(trace, device),
        "calls_libraries": _calls_libraries(trace),
        "categories": [
            vars(row) for row in breakdown.category_rows(trace, device if has_events else None)
        ],
        "steps": _steps(trace, device, order) if has_events else [],
        "phases": [
            [PHASES.index(band.name), band.begin_ns, band.end_ns]
            for band in series.phase_bands(trace, last)[:_MOST_BANDS]
        ],
        "most_bands": _MOST_BANDS,
        "modules": [
            [strings.number(band.name), band.depth, band.begin_ns, band.end_ns]
            for band in series.module_bands(trace, last, _MOST_BANDS)
        ],
        "reserved": {"times_ns": reserved.times_ns, "bytes": reserved.bytes},
        "device_use": [vars(use) for use in ledger.device_use(trace, device)],
        "failures": _failures(trace, device),
        **(_books(trace, device, pack) if has_events else {}),
        "answers": [html.without_folders(html.printable(text)) for text in each.answers],
        "health": [vars(row) for row in recording_quality.health_rows(trace)],
        "costs": _costs(trace),
    }


def _aligned(traces: Sequence[Trace], trace: Trace) -> dict[str, dict[str, str]]:
    """The names of a trace that mean the same as others in the page's other trace."""
    first, own = traces[0], meta.of(trace).roots
    others = next((meta.of(one).roots for one in traces if one is not trace), own)
    everything = np.ones(len(allocations(trace)), np.bool_)
    modules = grouping.group(trace, "module", everything).names
    bare = dict(zip(modules, diff.comparable("module", modules, own, others), strict=True))
    lines = {}
    if trace is not first and usage.devices(first) and usage.devices(trace):
        moved = diff_rows.moved_lines(diff.diff(first, trace, ("module", "op", "line")))
        lines = {packed.relative(old): packed.relative(new) for old, new in moved.items()}
    return {"modules": {k: v for k, v in bare.items() if k != v}, "lines": lines}


def _steps(trace: Trace, device: str, order: packed.Order) -> list[dict[str, Any]]:
    """The rows of `t.steps()`, each with its last change."""
    rows = training_steps.step_rows(trace, device)
    times = trace.time_ns(trace.events.ticks[order.position])
    ends = np.searchsorted(times, [row.end_ns for row in rows], side="right") - 1
    return [
        {**row._asdict(), "last_change": end} for row, end in zip(rows, ends.tolist(), strict=True)
    ]


def _idle_ns(trace: Trace, order: packed.Order) -> int:
    """The sum of the long stretches without an allocation or a free."""
    times = trace.time_ns(trace.events.ticks[order.position])
    idle = series.clock(times[times >= 0].astype(np.float64)).idle
    return round(sum(end - begin for begin, end in idle))


def _failures(trace: Trace, device: str) -> list[dict[str, int]]:
    events = trace.events
    rows = np.flatnonzero(events.action == ACTION["oom"])
    times = trace.time_ns(events.ticks[rows]).tolist()
    return [
        {"time_ns": time, "bytes": min(int(events.bytes[row]), packed.LARGEST)}
        for row, time in zip(rows.tolist(), times, strict=True)
        if devices.device_of_event(trace, row) == device
    ]


def _books(trace: Trace, device: str, pack: packed.Packed) -> dict[str, Any]:
    found = findings.findings(trace, device)
    texts = [hints.said(row) for row in found]
    return {
        "ledgers": [_ledger(ledger.ledger(trace, at, device)) for at in ("end", "peak")],
        "parameters": breakdown.parameters(trace, device),
        "per_parameter": [
            {key: _number(value) for key, value in vars(row).items()}
            for row in breakdown.parameter_rows(trace, device)
        ],
        "findings": [_finding(row, number, pack) for number, row in enumerate(found)],
        "notes": [html.without_folders(note) for note in hints.notes(trace, device)],
        "advice": [_change(row, texts) for row in changes.changes(trace, device)],
        "together": advice_text.together(trace, device),
    }


def _change(row: changes.Change, findings_said: list[str]) -> dict[str, Any]:
    """A change in the words of every other place that shows it."""
    return {
        "kind": row.kind,
        "head": advice_text.HEADS[row.kind],
        "saves": row.saves,
        "said": html.without_folders(advice_text.said(row)),
        "code": row.code,
        "finding": findings_said.index(row.change) if row.change in findings_said else None,
    }


def _finding(row: Finding, number: int, pack: packed.Packed) -> dict[str, Any]:
    """A finding, and the moment at which its allocations sum up to its bytes, if they are shown."""
    is_marked = number < packed.MOST_FINDINGS and bool((pack.marks >> np.uint32(number) & 1).any())
    return {
        "kind": row.kind,
        "bytes": row.bytes,
        "at_peak": row.at_peak,
        "line": packed.relative(row.line),
        "module": row.module,
        "evidence": html.without_folders(row.evidence),
        "change": html.without_folders(row.change),
        "at": pack.shown.change_at(row.proof.position) if row.proof and is_marked else None,
        "turns": row.proof.turns if row.proof else None,
    }


def _ledger(books: ledger.Ledger) -> dict[str, Any]:
    return {
        "at": books.at,
        "rows": [vars(row) for row in books.rows],
        "verdict": ledger_text.verdict(books),
        "notes": books.notes,
    }


def _costs(trace: Trace) -> list[dict[str, Any]]:
    """The costs of modules, if the trace has them."""
    if "cost" not in trace.meta:
        return []
    rows = cost_table.rows(trace)[:_MOST_COSTS]
    return [{key: _number(value) for key, value in vars(row).items()} for row in rows]


def _number(value: Any) -> Any:
    """None in place of NaN, which JSON does not have."""
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _line_rows(trace: Trace) -> list[int]:
    """The rows of the stack table that allocations name as their lines, or as the program's own."""
    alloc, own = allocations(trace), owners.own_frames(trace)
    named = [alloc.line, alloc.forward_line]
    rows: list[int] = np.unique(np.concatenate([*named, *(own[each] for each in named)])).tolist()
    return [row for row in rows if row]


def _calls_libraries(trace: Trace) -> bool:
    """Whether some allocations were made at lines that are not the program's own."""
    rows = np.array(_line_rows(trace), np.int64)
    return bool((owners.own_frames(trace)[rows] != rows).any())


def _source(trace: Trace) -> dict[str, list[Any]]:
    """For each line that allocated: the number of the first shown line, and the shown lines."""
    stacks, shown = sanitized.stacks(trace), {}
    for row in _line_rows(trace):
        path, number = trace.strings[stacks.file[row]], int(stacks.line[row])
        first = max(number - _AROUND, 1)
        lines = [linecache.getline(path, n) for n in range(first, number + _AROUND + 1)]
        if any(lines):
            text = packed.relative(owners.line_text(trace, row))
            shown[text] = [first, [line.rstrip("\n") for line in lines]]
    return shown
