"""Makes tables and pictures of README.md and docs/gemm.md from results of benchmarks/gemm.py."""

from pathlib import Path
from typing import Any

Document = dict[str, Any]

# The curves vary dimensions by single elements, the table by alignment.
_CURVES = ("bf16", "fp16", "tf32", "fp32")
_ELEMENTS = (1, 2, 4, 8, 16, 32, 64)
_METHODS = ("ours", "event loop", "do_bench")


def vocabulary(document: Document) -> str:
    """GPT-2's vocabulary and its paddings, by role: TFLOP/s, and the library of the kernel."""
    rows = document["parts"]["vocabulary"]["rows"]
    titles = list(dict.fromkeys(row["group"] for row in rows))
    sizes = sorted({_size(row) for row in rows})
    cells = {(_size(row), row["group"]): row for row in rows}
    found = [[str(size), *(_rate(cells.get((size, title))) for title in titles)] for size in sizes]
    note = "TFLOP/s in bf16, medians, and the generation the kernel was written for."
    table = _table(["vocabulary", *titles], found)
    return "\n".join([table, "", note, *_foretold(document), machine(document)])


def _foretold(document: Document) -> list[str]:
    """The gain of a step that the advice predicted, and the measured one."""
    part = document["parts"].get("gpt2", {})
    if "step" not in part:
        return []
    step = part["step"]
    saved, foretold = step["saved_ms"], step["predicted_ms"]
    (size,) = (d["advised"] for d in part["advice"]["dimensions"] if d["name"] == "vocab")
    text = (
        f"Advised for GPT-2 124M: {size}, which would save {_span(foretold)} ms of a step; applied, "
        f"it saved {_span(saved)} of {step['before_ms']:.1f} ms."
    )
    return [text]


def _span(found: Document) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def _size(row: Document) -> int:
    return int(row[{"forward": "n", "dgrad": "k", "wgrad": "m"}[row["role"]]])


def _rate(row: Document | None) -> str:
    if row is None:
        return "-"
    kernel = row["kernel"]
    generation = f" (sm{kernel['arch']})" if kernel and kernel["arch"] else ""
    return f"{row['tflops']:.0f}{generation}"


def libraries(document: Document) -> str:
    """CUDA's two libraries in the same rounds: rates, the kernels' library, and the ratio."""
    ratios = document["parts"].get("libraries", {}).get("ratios", {})
    rows = []
    for title, of_group in _groups(document, "libraries").items():
        ratio = ratios[title]
        taken = f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
        rows.append([title, *(_rate(row) for row in of_group), taken])
    heads = ["TFLOP/s", "cuBLAS", "cuBLASLt", "cuBLASLt's time over cuBLAS's"]
    return "\n".join([_table(heads, rows), "", machine(document)])


def peaks(document: Document) -> str:
    """The best rate of each dtype, for a moment and sustained, and that of do_bench."""
    heads = [
        "TFLOP/s",
        "after a rest",
        "sustained",
        "do_bench, rested",
        "do_bench",
        "datasheet",
        "m x n x k",
    ]
    rows = []
    for dtype, found in document["parts"].get("peaks", {}).items():
        both, row = (found["tflops"], found["do_bench_tflops"]), found["row"]
        bursts = [f"{max(each['bursts']):.0f}" for each in both]
        ranges = [f"{min(each['sustained']):.0f} to {max(each['sustained']):.0f}" for each in both]
        share = row["datasheet_share"]
        size = f"{row['m']}x{row['n']}x{row['k']}"
        cells = [value for pair in zip(bursts, ranges, strict=True) for value in pair]
        rows.append([dtype, *cells, f"{share:.0%}" if share else "-", size])
    return "\n".join([_table(heads, rows), "", machine(document)])


def alignment(document: Document) -> str:
    """What alignment costs: each rate as a share of that of the best alignment."""
    groups = _groups(document, "alignment")
    rows = []
    for title, of_group in groups.items():
        if " to " in title:
            continue
        dimension = title.rpartition(" ")[2]
        rates = {_alignment(row[dimension]): row["tflops"] for row in of_group}
        best = rates[max(rates)]
        rows.append([title, *(f"{rates[each] / best:.2f}" for each in _ELEMENTS)])
    heads = ["a multiple of", *map(str, _ELEMENTS)]
    return "\n".join([_table(heads, rows), "", machine(document)])


def _alignment(size: int) -> int:
    return size & -size


def methods(document: Document) -> str:
    """Three ways to time one product, five times each: the median and the spread."""
    rows = []
    for product, found in document["parts"].get("peers", {}).items():
        rows.append([product, *(_timed(found.get(name)) for name in _METHODS)])
    return "\n".join([_table(["product", *_METHODS], rows), "", machine(document)])


def _timed(found: Document | None) -> str:
    return f"{found['median_microseconds']:.2f} us, {found['spread']:.1%}" if found else "-"


def claims(document: Document) -> str:
    """The promised or published figures, and the measured ones."""
    words = {True: "holds", False: "does not hold", None: ""}
    rows = [
        [each["claim"], each["measured"], each["limit"], words[each["holds"]]]
        for each in document["claims"]
        if each["holds"] is not None or each["limit"] == "reported"
    ]
    return _table(["", "measured", "to hold", ""], rows)


def pictures(document: Document, folder: Path) -> None:
    """The curves, and where waves of tiles fill. Needs matplotlib."""
    from pytracer.lab.gemm import plot

    name = document["device"]["name"].rpartition(" ")[2].lower()
    curves = [
        {"title": title, "rows": rows}
        for title, rows in _groups(document, "alignment").items()
        if " to " in title and title.split()[0] in _CURVES
    ]
    filled = [{"title": t, "rows": rows} for t, rows in _groups(document, "waves").items()]
    for kind, groups in (("alignment", curves), ("waves", filled)):
        if not groups:
            continue
        shown = {"device": document["device"], "groups": groups}
        plot.draw(shown, folder / f"gemm-{kind}-{name}.svg")


def machine(document: Document) -> str:
    """The machine and the date."""
    dates = {facts["date"][:10] for facts in document["measured"].values()}
    torch = document["machine"]["torch"]
    when = " and ".join(sorted(dates))
    return f"Measured on {document['device']['name']}, torch {torch}, {when}."


def _groups(document: Document, part: str) -> dict[str, list[Document]]:
    found: dict[str, list[Document]] = {}
    for row in document["parts"].get(part, {}).get("rows", ()):
        found.setdefault(row["group"], []).append(row)
    return found


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---|" * (len(heads) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])
