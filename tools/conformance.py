"""Runs every case and writes what was found to docs/conformance.md.

python tools/conformance.py                             # CPU, small models
python tools/conformance.py --device cuda --json FILE   # real sizes; goes on where it was stopped
python tools/conformance.py --device cuda --json FILE --part 1/3    # a third, beside the others
python tools/conformance.py --from FILE...              # the table of kept results as well
"""

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from _pytest.outcomes import Skipped

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.readme_tables import attribution_table  # noqa: E402
from pytracer.export.table import size_text  # noqa: E402
from tests.conformance.cases import CASES, EXACT, Result, conform  # noqa: E402

DOCUMENT = ROOT / "docs" / "conformance.md"

HEAD = """\
# Conformance

Architectures and ways to train them, each traced and compared with expectations that are computed
without pytracer's analysis: the bytes of weights, gradients, optimizer state and inputs by formula,
the activations by a slow reference that listens to autograd in Python. `tests/conformance/` has the
models, the techniques and the expectations; `python tools/conformance.py` writes this page.

- *weights*, *gradients*, *state*, *inputs*: `=` where the most bytes there ever were are those
  expected, to the byte; else what was found, less what was expected. Inputs as hooks see them.
- *activations*: of the bytes that are activations at the peak for the reference or for pytracer,
  the share that are for both. *ever*: the same of all allocations of the run.
- *unknown*: share of the bytes at the peak. *modes*: the categories that differ there between
  `saved_tensors="auto"` and `"hooks"`.
"""
COLUMNS = (
    "model technique optimizer peak weights gradients state inputs activations ever unknown modes"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=("tiny", "real"), help="default: real on CUDA")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--part", default="1/1", help="every n-th case: 1/3, 2/3 or 3/3")
    parser.add_argument("--json", type=Path, help="keep the results here, write no page")
    parser.add_argument(
        "--from", dest="kept", type=Path, nargs="+", default=[], help="results to show beside those"
    )
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    names = [name for name in list(CASES)[part - 1 :: parts] if options.only in name]
    if len(names) < len(CASES) and not options.json:
        parser.error("--only and --part are for --json: the page has every case")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    size = options.size or ("tiny" if options.device == "cpu" else "real")
    rows = run(options.device, size, names, options.json)
    if options.json:
        return
    sections = [HEAD, section(rows)]
    if options.kept:
        kept = {row["name"]: row for file in options.kept for row in json.loads(file.read_text())}
        sections.append(section([kept[name] for name in CASES if name in kept]))
    for path in sorted((ROOT / "benchmarks" / "results").glob("attribution-*.json")):
        document = json.loads(path.read_text())
        title = (
            f"## Other tools on the same cases: {document['hardware']}, {document['size']} models"
        )
        sections.append(f"{title}\n\n{attribution_table(document)}\n")
    DOCUMENT.write_text("\n".join(sections))


def run(device: str, size: str, names: list[str], keep: Path | None) -> list[dict[str, Any]]:
    """Kept results are written after every case, and cases that have one are not run again."""
    rows: list[dict[str, Any]] = json.loads(keep.read_text()) if keep and keep.exists() else []
    done = {row["name"] for row in rows}
    for name in names:
        if name in done:
            continue
        case = CASES[name]
        row: dict[str, Any] = {"name": name, "device": device, "size": size}
        try:
            row = conform(case, size, device).document()
        except Skipped as reason:
            row["skipped"] = str(reason)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        if device != "cpu":
            row["hardware"] = torch.cuda.get_device_name()
            torch.cuda.empty_cache()
        print(name, row.get("error") or row.get("skipped") or "", flush=True)
        rows.append({**row, "torch": torch.__version__})
        if keep:
            keep.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def section(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    hardware = first.get("hardware", "CPU")
    title = f"## {hardware}, {first['size']} models, torch {first['torch']}"
    if len(rows) < len(CASES):
        title += f": {len(rows)} of {len(CASES)} cases"
    names = COLUMNS.split()
    lines = [title, "", _line(names), _line(["---"] * 3 + ["---:"] * 8 + ["---"])]
    lines += [_line(cells(row)) for row in rows]
    return "\n".join(lines) + "\n"


def cells(row: dict[str, Any]) -> list[str]:
    case = CASES[row["name"]]
    head = [case.model, case.technique, case.optimizer]
    if "skipped" in row or "error" in row:
        reason = row.get("error") or row["skipped"]
        return [*head, *["NA"] * 8, reason.replace("|", "/")]
    result = Result(**{k: v for k, v in row.items() if k in Result.__dataclass_fields__})
    found = {**result.found, "inputs": result.inputs_with_hooks}
    if not result.hooks_see_all:
        found["inputs"] = result.found["inputs"]
    exact = [found[name] - result.expected[name] for name in EXACT]
    return [
        *head,
        size_text(result.peak_bytes),
        *("=" if difference == 0 else f"{difference:+,}" for difference in exact),
        f"{result.agreement:.2%}",
        f"{result.agreement_ever:.2%}",
        f"{result.unknown_share:.2%}",
        ", ".join(sorted(result.differences())) or "agree",
    ]


def _line(texts: list[str]) -> str:
    return "| " + " | ".join(texts) + " |"


if __name__ == "__main__":
    main()
