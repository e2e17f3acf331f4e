"""Writes the tables of README.md and of docs/ from benchmarks/results/*.json.

    python benchmarks/readme_tables.py             # rewrites them
    python benchmarks/readme_tables.py --check     # fails if they differ
    python benchmarks/readme_tables.py --pictures  # and draws those of docs/images

A table stands between markers such as `<!-- overhead:begin -->` and `<!-- overhead:end -->`:

    marker                          results of
    overhead                        overhead.py
    prices                          prices.py, on a GPU
    gemm, gemm-*                    gemm.py, on a GPU
    cost, cost-*                    cost.py, on a GPU
    right                           attribution.py, on a GPU
    books                           ledger.py, on a GPU
    synchronisation                 synchronisation.py
    whose-time                      whose_time.py
    always, always-price            always.py; always_price.py, on a GPU
    prediction-*                    prediction.py and planners.py
    imagine-models, imagine-large   imagine.py
    imagine-ranks                   imagine_ranks.py, on two GPUs
    replays                         imagine.py replays
    fit                             fit.py, on a GPU
    imagine-scratch                 cudnn_scratch.py, on a GPU
    imagine-claims                  cudnn_claims.py
    imagine-peers                   estimators.py
    imagine-open-models             open_models.py
    exports                         exports.py
    ranks                           ranks.py, on two GPUs
    recordings                      ranks.py
    many-ranks                      many_ranks.py
    report                          report.py
    install                         install.py
    (measured rows of the README)   attribution.py, overhead.py
"""

import argparse
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]  # from a checkout, wherever it is run

from benchmarks import (  # noqa: E402
    always_tables,
    cost_tables,
    gemm_tables,
    imagine_tables,
    kept,
    prediction_tables,
    rank_tables,
)

RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
OVERHEAD_PAGE = ROOT / "docs" / "overhead.md"
ACCURACY_PAGE = ROOT / "docs" / "accuracy.md"
COST_PAGE = ROOT / "docs" / "cost.md"
GEMM_PAGE = ROOT / "docs" / "gemm.md"
PREDICTION_PAGE = ROOT / "docs" / "prediction.md"
IMAGINE_PAGE = ROOT / "docs" / "imagine.md"
EXPORTS_PAGE = ROOT / "docs" / "chrome-trace.md"
RANKS_PAGE = ROOT / "docs" / "ranks.md"
REPORT_PAGE = ROOT / "docs" / "report.md"
FINDINGS_PAGE = ROOT / "docs" / "findings.md"
FIT_PAGE = ROOT / "docs" / "fit.md"
ALWAYS_PAGE = ROOT / "docs" / "always.md"
PAGES = (
    *(README, OVERHEAD_PAGE, ACCURACY_PAGE, COST_PAGE, GEMM_PAGE, PREDICTION_PAGE, IMAGINE_PAGE),
    *(EXPORTS_PAGE, RANKS_PAGE, REPORT_PAGE, FINDINGS_PAGE, FIT_PAGE),
    ALWAYS_PAGE,
)

# The modes that a reader compares, in order: our levels, then the peers.
ROWS = {
    "operators heard": "torch telling of every operator, nobody listening",
    "category": 'pytracer, `detail="category"`',
    "default": "pytracer, default",
    "stacks": "pytracer, `stacks=True`",
    "hooks": 'pytracer, `saved_tensors="hooks"`',
    "everything": "pytracer, all of it, streaming to a file",
    "memory history, python stacks": "memory history, Python stacks",
    "memory history, all stacks": "memory history, Python and C++ stacks",
    "profiler, memory": "torch.profiler, memory",
    "profiler, memory + shapes + stack": "torch.profiler, memory, shapes, stacks",
    "MemTracker": "MemTracker",
}
MARKERS = {"attribution": "right", "ledger": "books"}
CASE_ORDER = (
    "gpt2-gpu-bound",
    "gpt2-host-bound",
    "bert-large",
    "resnet50",
    "compiled-gpt2",
    "generate",
    "reinforcement",
    "ddp",
    "tiny-cpu",
    "ddp-cpu",
)


def results() -> list[dict[str, Any]]:
    found = [kept.read(path) for path in sorted(RESULTS.glob("overhead-*.json"))]
    return sorted(found, key=lambda result: CASE_ORDER.index(result["case"]))


def overhead_table(cases: list[dict[str, Any]]) -> str:
    """A column per case: the median ratio to the plain step, and its interval."""
    titles = [case["case"] for case in cases]
    lines = [
        "| traced step over the plain step | " + " | ".join(titles) + " |",
        "|---|" + "---|" * len(cases),
    ]
    for name, title in ROWS.items():
        cells = [_cell(case, name) for case in cases]
        if any(cell != "-" for cell in cells):
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines.append(
        "| the plain step again | " + " | ".join(_cell(c, "plain again") for c in cases) + " |"
    )
    lines += [
        "",
        "Each cell has the median over interleaved rounds, and in brackets its interval with 95 %",
    ]
    lines.append(
        "confidence (the range, if there are fewer than six blocks). If single steps were timed, the"
    )
    lines.append(
        "median of all of them over that of plain ones follows. Figures over their limit are in bold."
    )
    if any(_is_of_few(case, name) for case in cases for name in ROWS):
        lines.append(f"† Rougher: from fewer than half the blocks of its column ({_fewer(cases)}).")
    lines += ["", *(_case_line(case) for case in cases), ""]
    machines = {_machine(case) for case in cases}
    lines.append("Measured on " + "; ".join(sorted(machines)) + ".")
    return "\n".join(lines)


def _case_line(case: dict[str, Any]) -> str:
    plain = case["modes"]["plain"]["step_ms"]
    limits = ", ".join(f"{name} {limit}" for name, limit in case["limits"].items())
    return f"- {case['case']}: {case['description']}; {plain:.1f} ms plain. Limits: {limits}."


def _blocks(case: dict[str, Any]) -> dict[str, int]:
    """Returns how many blocks each row is of."""
    return {
        name: entry["ratio"]["samples"]
        for name, entry in case["modes"].items()
        if name in (*ROWS, "plain again") and "ratio" in entry
    }


def _is_of_few(case: dict[str, Any], name: str) -> bool:
    blocks = _blocks(case)
    return 2 * blocks.get(name, sys.maxsize) < max(blocks.values())


def _fewer(cases: list[dict[str, Any]]) -> str:
    """`host-bound: 4 to 11 of 33`."""
    found = []
    for case in cases:
        blocks = _blocks(case)
        few = sorted({count for name, count in blocks.items() if _is_of_few(case, name)})
        if few:
            between = f"{few[0]} to {few[-1]}" if len(few) > 1 else str(few[0])
            title = case["case"].removeprefix("gpt2-")
            found.append(f"{title}: {between} of {max(blocks.values())}")
    return "; ".join(found)


def _cell(case: dict[str, Any], name: str) -> str:
    entry = case["modes"].get(name, {})
    if "ratio" not in entry:
        return "failed" if entry.get("error") else "-"
    ratio = entry["ratio"]
    limit = case["limits"].get(name)
    median = f"{ratio['median']:.3f}" if ratio["median"] < 2 else f"{ratio['median']:.1f}"
    if limit is not None and ratio["median"] > limit:
        median = f"**{median}**"
    digits = 2 if ratio["median"] < 2 else 1
    places = 3 if ratio["median"] < 2 else 1
    of_steps = f"{entry['steps_ratio']:.{places}f}" if "steps_ratio" in entry else ""
    if of_steps and limit is not None and entry["steps_ratio"] > limit:
        of_steps = f"**{of_steps}**"
    median += "†" * _is_of_few(case, name)
    between = f"{ratio['low']:.{digits}f}-{ratio['high']:.{digits}f}"
    return ", ".join(filter(None, [f"{median} ({between})", of_steps]))


def _machine(case: dict[str, Any]) -> str:
    facts = case["machine"]
    device = facts["device"] if "-cpu" not in case["case"] else f"CPU ({facts['cpu']})"
    return f"{device}, torch {facts['torch']}, Python {facts['python']}, {facts['date'][:10]}"


def attribution_table(document: dict[str, Any]) -> str:
    """A row per training: the share of the peak's bytes that each tool has wrong or unknown."""
    tools = ("pytracer", "torch.profiler", "MemTracker")
    lines = [
        "| at the peak, wrong or unknown | " + " | ".join(tools) + " |",
        "|---|---:|---:|---:|",
    ]
    for case in document["cases"]:
        if "error" in case:
            continue  # the tool could not run there
        cells = [_share(case[tool]) for tool in tools]
        lines.append(
            f"| {case['name'].replace('-', ', ').replace('_', ' ')} | " + " | ".join(cells) + " |"
        )
    days = {document["measured"], *(case.get("measured", "") for case in document["cases"])}
    when = " and ".join(sorted(days - {""}))
    where = f"{document['hardware']}, torch {document['torch']}, {when}"
    return "\n".join([*lines, "", f"Share of the bytes. Measured on {where}."])


def _share(found: dict[str, Any]) -> str:
    return "fails" if "error" in found else f"{found['wrong_or_unknown']:.1%}"


def synchronisation_table(document: dict[str, Any]) -> str:
    """What tracing adds at each point of synchronisation, what is ours, and what it was before."""
    now, before = document["now"], document.get("before", {})

    def added(run: dict[str, Any], kind: str, mode: str, name: str) -> float:
        if name not in run.get(kind, {}).get(mode, {}):
            return math.nan
        return float(run[kind][mode][name] - run[kind]["plain"][name]) / 1000

    def cells(mode: str, name: str) -> Iterator[str]:
        plain = now["instructions"]["plain"][name] / 1000
        whole = added(now, "instructions", mode, name)
        yield f"{whole:,.0f} ({whole / plain:.1%})"
        yield f"{added(now, 'ours', mode, name):,.0f}"
        yield f"{added(before, 'instructions', mode, name):,.0f}"

    modes = ('`detail="category"`', "default")
    titles = " | ".join(f"{mode} adds | ours | before" for mode in modes)
    lines = [f"| thousands of instructions | plain | {titles} |", "|---|" + 7 * "---:|"]
    for name, plain in now["instructions"]["plain"].items():
        found = " | ".join([*cells("category", name), *cells("default", name)])
        lines.append(f"| {name} | {plain / 1000:,.0f} | {found.replace('nan', '-')} |")
    lines += ["", f"| microseconds | plain | {' adds | before | '.join(modes)} adds | before |"]
    lines.append("|---|" + 5 * "---:|")
    for name, plain in now["microseconds"]["plain"].items():
        figures = (
            1000 * added(run, "microseconds", mode, name)
            for mode in ("category", "default")
            for run in (now, before)
        )
        found = " | ".join(f"{each:,.1f}".replace("nan", "-") for each in figures)
        lines.append(f"| {name} | {plain:,.1f} | {found} |")
    at = f"torch {document['torch']}, Python {document['python']}, {document['date'][:10]}"
    said = "Instructions counted by valgrind, and medians of process time, on one thread"
    return "\n".join([*lines, "", f"{said}: {at}."])


def owners_table(document: dict[str, Any]) -> str:
    """Whose code runs the instructions that tracing adds, and the functions with most of them."""
    now = document["now"]
    columns = [
        (name, mode)
        for name in ("whole step", "reinforcement loop")
        for mode in now["functions"]
        if name in now["functions"][mode]
    ]
    heads = " | ".join(f"{name}, {mode}" for name, mode in columns)
    lines = [f"| thousands of instructions added | {heads} |", "|---|" + len(columns) * "---:|"]

    def row(title: str, counts: list[int]) -> str:
        return f"| {title} | " + " | ".join(f"{count / 1000:,.0f}" for count in counts) + " |"

    plain = now["owners"]["plain"]
    for owner in plain[columns[0][0]]:
        counts = [now["owners"][mode][name][owner] - plain[name][owner] for name, mode in columns]
        lines.append(row(f"in {owner}", counts))
    of_loop = {mode: now["functions"][mode]["reinforcement loop"] for mode in now["functions"]}
    said = [
        f"With `{mode}` the loop's largest are "
        + ", ".join(f"`{name}` ({count / 1000:,.0f}, {owner})" for owner, name, count in rows[:8])
        + "."
        for mode, rows in of_loop.items()
    ]
    return "\n".join([*lines, "", *said])


def whose_time_table(document: dict[str, Any]) -> str:
    """Where samples find the threads of a traced step: in our code, and in all code."""
    modes = ("category", "default")
    heads = " | ".join(f"ours, {mode}" for mode in modes)
    lines = [f"| milliseconds a step | plain, all code | {heads} |", "|---|---:|---:|---:|"]
    for case in document["cases"]:
        plain = sum(case["modes"]["plain"]["owners_ms"].values())
        cells = []
        for mode in modes:
            owners = case["modes"][mode]["owners_ms"]
            cells.append(
                f"{owners['pytracer']:.2f} ({owners['pytracer'] / sum(owners.values()):.1%})"
            )
        lines.append(f"| {case['case']} | {plain:.1f} | {' | '.join(cells)} |")
    here = document["cases"][0]["machine"]
    at = f"{here['device'] or here['cpu']}, torch {here['torch']}, {here['date'][:10]}"
    return "\n".join([*lines, "", f"Samples of the processor's time every 100 us, on {at}."])


def exports_table(document: dict[str, Any]) -> str:
    """What each format takes in a process of its own that reads, analyses and writes the file."""
    lines = ["| | file, MB | processor seconds | most memory, GB |", "|---|---:|---:|---:|"]
    for row in document["exports"]:
        seconds = row["read_s"] + row["write_s"]
        name = "the analysis alone" if row["format"] == "nothing" else row["format"]
        size = f"{row['file_mb']:,.0f}" if row["file_mb"] else ""
        lines.append(f"| {name} | {size} | {seconds:.1f} | {row['most_mb'] / 1000:.2f} |")
    here, events = document["machine"], document["exports"][0]["events"]
    at = f"{here['cpu']}, Python {here['python']}, {here['date'][:10]}"
    return "\n".join(
        [*lines, "", f"{events / 1e6:.1f} million events of a small transformer; {at}."]
    )


def prices_table(document: dict[str, Any]) -> str:
    """The plain time of each act, and the time that a mode adds."""
    modes = {
        "operators heard": "torch alone, telling",
        "category": '`detail="category"`',
        "default": "default",
        "stacks": "`stacks=True`",
    }
    lines = [
        "| microseconds | plain | " + " | ".join(f"{each} adds" for each in modes.values()) + " |",
        "|---|" + "---:|" * (1 + len(modes)),
    ]
    for name, by_mode in document["prices"].items():
        plain = by_mode["plain"]["median_ns"]
        added = [(by_mode[mode]["median_ns"] - plain) / 1000 for mode in modes]
        cells = " | ".join(f"{each:.2f}" for each in added)
        lines.append(f"| {name} | {plain / 1000:.2f} | {cells} |")
    facts = document["machine"]
    where = f"{facts['device'] or facts['cpu']}, torch {facts['torch']}, {facts['date'][:10]}"
    return "\n".join([*lines, "", f"Medians over {document['rounds']} rounds on {where}."])


def install_text(document: dict[str, Any]) -> str:
    """Seconds until the first table."""
    seconds = {way: each["seconds"] for way, each in document["ways"].items()}
    return (
        f"From the first command to the first table, where torch is there: {seconds['wheel']:.0f} s "
        f"from a wheel, {seconds['source']:.0f} s\nfrom source, {seconds['clone']:.0f} s from "
        f"`git clone` with `make demo` ({document['cores']} cores, Python {document['python']}, "
        f"{document['date'][:10]})."
    )


def peer_rows(attribution: dict[str, Any], cases: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The measured rows of the comparison in the README, by their first cell."""
    wrong = {}
    for tool in ("pytracer", "torch.profiler"):
        found = [case[tool] for case in attribution["cases"] if "error" not in case]
        shares = [each["wrong_or_unknown"] for each in found if "error" not in each]
        wrong[tool] = " to ".join(dict.fromkeys(f"{each(shares):.1%}" for each in (min, max)))
    of_case = {case["case"]: case for case in cases}

    def ratios(name: str) -> list[str]:
        modes = ("default", "memory history, python stacks", "profiler, memory")
        found = [of_case[name]["modes"][mode]["ratio"]["median"] for mode in modes]
        return [*(f"{each:.2f}" for each in found), "-", "-"]

    return {
        "bytes of a peak that are unknown or wrong": [
            *(wrong["pytracer"], "no categories", wrong["torch.profiler"], "-", "-")
        ],
        "traced step, GPU-bound GPT-2": ratios("gpt2-gpu-bound"),
        "traced step, host-bound GPT-2": ratios("gpt2-host-bound"),
    }


def with_rows(text: str, rows: dict[str, list[str]]) -> str:
    """Replaces the rows of a table that begin with these cells."""
    for first, cells in rows.items():
        row = f"| {' | '.join([first, *cells])} |"
        text, found = re.subn(rf"^\| {re.escape(first)} \|.*$", row, text, flags=re.MULTILINE)
        if found != 1:
            raise SystemExit(f"there is no row {first!r}: put one where it belongs")
    return text


def report_table(document: dict[str, Any]) -> str:
    """How large the report's page is, how fast it opens, and how fast it follows the hand."""
    heads = ("allocations", "file", "first paint", "interactive", "its CPU")
    heads += ("pan and zoom, half / 95 of 100", "their CPU", "every bar, at rest")
    heads += ("hover, 95 of 100", "slowdown of both")
    lines = [f"| {' | '.join(heads)} |", f"|{'---:|' * len(heads)}"]
    for row in document["rows"]:
        each = f"{row['each_p95_ms']:.0f} ms" if row["each_p95_ms"] else "at once"
        slow = f"{row['interactive_slowdown']:.1f}, {row['pan_zoom_slowdown']:.1f}"
        lines.append(
            f"| {row['allocations']:,} | {row['mb']:.1f} MB | {row['first_paint_s']:.2f} s | "
            f"{row['interactive_s']:.2f} s | {row['interactive_cpu_s']:.2f} s | "
            f"{row['pan_zoom_p50_ms']:.0f} / {row['pan_zoom_p95_ms']:.0f} ms | "
            f"{row['pan_zoom_cpu_ms']:.0f} ms | {each} | {row['hover_p95_ms']:.1f} ms | {slow} |"
        )
    return "\n".join(lines)


_CONDITIONS = {
    "lazy": "with kernels loaded as they are needed",
    "eager": "all at once",
    "other process": "beside another process",
    "limit": "under an allocator limit",
    "warm": "traced once warm",
}


def ledger_text(document: dict[str, Any]) -> str:
    """The residual of all runs, and the one with the context measured by another process."""
    found = document["summary"]
    conditions = dict.fromkeys(run["condition"] for run in document["runs"])
    workloads = {run["workload"] for run in document["runs"]}
    machine = document["machine"]
    return (
        f"It closed in {found['closed']} of {found['runs']} runs: {len(workloads)} workloads, each "
        f"{', '.join(_CONDITIONS[name] for name in conditions)}. The largest residual was {found['largest_residual']:,} "
        f"bytes; with the context's row as *another* process measured it, "
        f"{found['twins_largest_residual'] / 1024:.0f} KiB. Measured on {machine['device']}, "
        f"torch {machine['torch']}, {machine['date'][:10]}."
    )


def between(text: str, name: str, content: str) -> str:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, found, rest = text.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found or not found_end:
        raise SystemExit(f"there is no {begin} … {end}: put them where the table belongs")
    return f"{head}{begin}\n{content}\n{end}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it would")
    parser.add_argument("--pictures", action="store_true", help="draw docs/images too: matplotlib")
    arguments = parser.parse_args()
    if arguments.check and arguments.pictures:
        parser.error("--check writes nothing, --pictures does")
    cases = results()
    if not cases:
        raise SystemExit("benchmarks/results has no overhead-*.json: run benchmarks/overhead.py")
    if not README.exists():
        raise SystemExit("there is no README.md")
    before = {page: page.read_text() for page in PAGES}
    after = dict(before)
    after[OVERHEAD_PAGE] = between(after[OVERHEAD_PAGE], "overhead", overhead_table(cases))
    report = kept.read(RESULTS / "report-cpu.json")
    after[REPORT_PAGE] = between(after[REPORT_PAGE], "report", report_table(report))
    for path in sorted(RESULTS.glob("prices-nvidia-*.json"))[:1]:
        text = prices_table(kept.read(path))
        after[OVERHEAD_PAGE] = between(after[OVERHEAD_PAGE], "prices", text)
    for path in sorted(RESULTS.glob("gemm-nvidia-*.json"))[:1]:
        document = kept.read(path)
        after[GEMM_PAGE] = between(after[GEMM_PAGE], "gemm", gemm_tables.vocabulary(document))
        for part in ("peaks", "alignment", "libraries", "methods", "claims"):
            text = getattr(gemm_tables, part)(document)
            after[GEMM_PAGE] = between(after[GEMM_PAGE], f"gemm-{part}", text)
        if arguments.pictures:
            gemm_tables.pictures(document, ROOT / "docs" / "images")
    for path in sorted(RESULTS.glob("cost-nvidia-*.json"))[:1]:
        document = kept.read(path)
        after[COST_PAGE] = between(after[COST_PAGE], "cost", cost_tables.summary(document))
        for part in ("shapes", "operators", "models", "phases"):
            text = getattr(cost_tables, part)(document)
            after[COST_PAGE] = between(after[COST_PAGE], f"cost-{part}", text)
    for name in ("replay", "plans", "planners", "what-if"):
        # The figures of a GPU if there are any; for what-if those of both devices.
        found = sorted(RESULTS.glob(f"prediction-{name}-*.json"), reverse=True)
        documents = [kept.read(path) for path in found]
        if documents:
            shown = documents if name == "what-if" else documents[:1]
            text = getattr(prediction_tables, name.replace("-", "_"))(*shown)
            after[PREDICTION_PAGE] = between(after[PREDICTION_PAGE], f"prediction-{name}", text)
    for path in sorted(RESULTS.glob("replays-nvidia-*.json"))[:1]:
        text = prediction_tables.replays(kept.read(path))
        after[PREDICTION_PAGE] = between(after[PREDICTION_PAGE], "prediction-replays", text)
    for path in sorted(RESULTS.glob("fit-nvidia-*.json"))[:1]:
        text = prediction_tables.fitted(kept.read(path))
        after[FIT_PAGE] = between(after[FIT_PAGE], "fit", text)
    for name, files in (
        ("models", "imagine-models-nvidia-*.json"),
        ("large", "imagine-large-*.json"),
        ("ranks", "imagine-ranks-*.json"),
        ("scratch", "cudnn-scratch-*.json"),
        ("claims", "cudnn-claims-*.json"),
        ("peers", "imagine-peers-*.json"),
        ("open-models", "open-models.json"),
    ):
        documents = [kept.read(path) for path in RESULTS.glob(files)]
        for document in sorted(documents, key=lambda one: one["machine"]["date"])[-1:]:
            text = getattr(imagine_tables, name.replace("-", "_"))(document)
            after[IMAGINE_PAGE] = between(after[IMAGINE_PAGE], f"imagine-{name}", text)
    made = [kept.read(path) for path in sorted(RESULTS.glob("advice-*.json"))]
    after[FINDINGS_PAGE] = between(
        after[FINDINGS_PAGE], "advice", prediction_tables.advice(*reversed(made))
    )
    for name, make in (("attribution", attribution_table), ("ledger", ledger_text)):
        for path in sorted(RESULTS.glob(f"{name}-nvidia-*.json"))[:1]:
            text = make(kept.read(path))
            after[ACCURACY_PAGE] = between(after[ACCURACY_PAGE], MARKERS[name], text)
    for path in RESULTS.glob("synchronisation-cpu.json"):
        text = synchronisation_table(kept.read(path))
        after[OVERHEAD_PAGE] = between(after[OVERHEAD_PAGE], "synchronisation", text)
        text = owners_table(kept.read(path))
        after[OVERHEAD_PAGE] = between(after[OVERHEAD_PAGE], "owners", text)
    for path in sorted(RESULTS.glob("whose-time-nvidia-*.json"))[:1]:
        text = whose_time_table(kept.read(path))
        after[OVERHEAD_PAGE] = between(after[OVERHEAD_PAGE], "whose-time", text)
    for path in RESULTS.glob("always-cpu.json"):
        text = always_tables.proofs(kept.read(path))
        after[ALWAYS_PAGE] = between(after[ALWAYS_PAGE], "always", text)
    for path in sorted(RESULTS.glob("always-price-nvidia-*.json"))[:1]:
        text = always_tables.price(kept.read(path))
        after[ALWAYS_PAGE] = between(after[ALWAYS_PAGE], "always-price", text)
    for path in RESULTS.glob("exports-cpu.json"):
        text = exports_table(kept.read(path))
        after[EXPORTS_PAGE] = between(after[EXPORTS_PAGE], "exports", text)
    for path in sorted(RESULTS.glob("ranks-nvidia-*.json"))[:1]:
        text = rank_tables.ways(kept.read(path))
        after[RANKS_PAGE] = between(after[RANKS_PAGE], "ranks", text)
    for path in RESULTS.glob("ranks-cpu.json"):
        text = rank_tables.recordings(kept.read(path))
        after[RANKS_PAGE] = between(after[RANKS_PAGE], "recordings", text)
    for path in RESULTS.glob("many-ranks-cpu.json"):
        text = rank_tables.many(kept.read(path))
        after[RANKS_PAGE] = between(after[RANKS_PAGE], "many-ranks", text)
    for path in RESULTS.glob("install-cpu.json"):
        after[README] = between(after[README], "install", install_text(kept.read(path)))
    for path in sorted(RESULTS.glob("attribution-nvidia-*.json"))[:1]:
        rows = peer_rows(kept.read(path), cases)
        after[README] = with_rows(after[README], rows)
    if arguments.check:
        different = [page.name for page in before if after[page] != before[page]]
        for name in different:
            print(f"{name} differs from benchmarks/results: run benchmarks/readme_tables.py")
        return int(bool(different))
    for page, text in after.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
