"""Writes the tables of docs/transparency.md from benchmarks/results/*.json.

    python tools/transparency_page.py           # rewrites them
    python tools/transparency_page.py --check   # fails if they differ

tools/torch_tests.py and tools/public_programs.py write the results, and then call this.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "transparency.md"
TORCH_TESTS = ROOT / "benchmarks" / "results" / "torch-tests-cpu.json"
PUBLIC_PROGRAMS = ROOT / "benchmarks" / "results" / "public-programs-cpu.json"


def write() -> None:
    PAGE.write_text(page())


def page() -> str:
    """Returns the page with new tables."""
    text = PAGE.read_text()
    for name, file, table in (
        ("torch-tests", TORCH_TESTS, torch_tests),
        ("public-programs", PUBLIC_PROGRAMS, public_programs),
    ):
        if file.exists():
            text = between(text, name, table(json.loads(file.read_text())))
    return text


def between(text: str, name: str, table: str) -> str:
    """Returns the text with this table between its markers."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{table}{end}{after}"


def public_programs(results: dict[str, Any]) -> str:
    modes = results["modes"]
    lines = [
        "| program | packages | values | " + " | ".join(modes) + " |",
        "|---|---|---:|" + "---|" * len(modes),
    ]
    said = []
    for row in results["programs"]:
        if "skipped" in row:
            said.append(f"`{row['program']}` did not run: it {row['skipped']}.")
            continue
        cells = [row["program"].replace("_", " "), row["packages"], str(row["values"])]
        for mode in modes:
            found = row.get("differs", {}).get(mode)
            cells.append("varies untraced" if "flaky" in row else "differs" if found else "=")
            said += [
                f"- `{row['program']}`, {mode}: {one}".replace("|", "\\|") for one in found or ()
            ]
        lines.append("| " + " | ".join(cells) + " |")
    about = results["about"]
    measured = f"torch {about['torch']}, Python {about['python']}, {about['date']}."
    return "\n".join([*lines, "", *said, "", measured]) + "\n"


def torch_tests(results: dict[str, Any]) -> str:
    modes = results["modes"]
    lines = [
        "| file | passed | skipped | failed | flaky | "
        + " | ".join(f"differ: {m}" for m in modes)
        + " |",
        "|---|" + "---:|" * (4 + len(modes)),
    ]
    rows = [row for row in results["files"] if row["untraced"]]
    for row in [*rows, total(rows, modes)]:
        cells = [row["file"], *map(str, counts(row)), str(len(row["flaky"]))]
        cells += [str(len(row["differs"].get(mode, ()))) for mode in modes]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *differences(rows, modes)]
    lines += listed("Flaky, untraced", rows, "flaky")
    lines += listed("Too slow untraced to be compared", rows, "slow")
    unusable = [f"`{row['file']}`" for row in results["files"] if not row["untraced"]]
    if unusable:
        lines += [f"Not usable with this torch, or not there: {', '.join(unusable)}.", ""]
    about = results["about"]
    lines.append(
        f"torch {about['torch']}, tests of torch {about['tests']}, Python {about['python']}, "
        f"pytracer {about['pytracer']}, {about['date']}."
    )
    return "\n".join(lines) + "\n"


def counts(row: dict[str, Any]) -> tuple[int, int, int]:
    """Returns the tests that passed, were skipped, and all others."""
    found = Counter(row["untraced"])
    passed = found["passed"] + found["failed as expected"]
    return passed, found["skipped"], found.total() - passed - found["skipped"]


def total(rows: list[dict[str, Any]], modes: list[str]) -> dict[str, Any]:
    together: Counter[str] = Counter()
    for row in rows:
        together.update(row["untraced"])
    return {
        "file": "**all**",
        "untraced": together,
        "flaky": [name for row in rows for name in row["flaky"]],
        "differs": {m: [d for row in rows for d in row["differs"].get(m, ())] for m in modes},
    }


def differences(rows: list[dict[str, Any]], modes: list[str]) -> Iterable[str]:
    """Returns each test that differs, with its modes and its messages."""
    for row in rows:
        by_test: dict[str, dict[str, Any]] = {}
        for mode in modes:
            for found in row["differs"].get(mode, ()):
                entry = by_test.setdefault(found["test"], {**found, "modes": []})
                entry["modes"].append(f"{mode} ({found['again']} again)")
        for name, found in sorted(by_test.items()):
            same = found.get("torchs_own_hooks") == found["traced"]
            also = " **The same inside torch's own hooks, with no trace.**" if same else ""
            why = found["why"].replace("|", "\\|").replace("<", "&lt;")[:160]
            yield (
                f"- `{row['file']}` `{name}`: {found['untraced']} untraced, {found['traced']} traced "
                f"in {', '.join(found['modes'])}.{also} {why}"
            )
    yield ""


def listed(title: str, rows: list[dict[str, Any]], key: str) -> list[str]:
    names = [f"`{name}`" for row in rows for name in row.get(key, ())]
    return [f"{title}: {', '.join(names)}.", ""] if names else []


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(PAGE.read_text() != page())
    write()
