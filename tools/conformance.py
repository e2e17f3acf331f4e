"""Runs every case and writes the results to docs/conformance.md.

python tools/conformance.py                             # CPU, small models
python tools/conformance.py --device cuda --json FILE   # real sizes; resumes where it stopped
python tools/conformance.py --device cuda --json FILE --part 1/3    # a third, beside the others
python tools/conformance.py --programs --device cuda --json FILE    # the programs, likewise
python tools/conformance.py --from FILE...              # also the tables of kept results
"""

import argparse
import gc
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from _pytest.outcomes import Skipped

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import kept  # noqa: E402
from benchmarks.readme_tables import attribution_table  # noqa: E402
from programs.conformance.cases import CASES, EXACT, Result, conform  # noqa: E402
from programs.conformance.engines import ON_A_GPU, PROGRAMS  # noqa: E402  the last to add its own
from programs.conformance.programs import MODES, ON_THE_CPU, run as run_program  # noqa: E402
from pytracer.basics.units import size_text  # noqa: E402

DOCUMENT = ROOT / "docs" / "conformance.md"

HEAD = """\
# Conformance

Are the categories right?

This page lists architectures and ways to train them. Each is traced and compared with expectations that
are computed without pytracer's analysis. Formulas give the bytes of weights, gradients, optimizer state
and inputs. A slow reference that follows autograd in Python gives the activations. `tests/conformance/`
has the models, the techniques and the expectations; `python tools/conformance.py` writes this page.

- *weights*, *gradients*, *state*, *inputs*: `=` if the most bytes at any time equal the expected
  bytes; else the difference, found less expected. Inputs are counted as hooks see them.
- *activations*: bytes that both the reference and pytracer call activations at the peak, as a share
  of the bytes that either calls so. *ever*: the same for all allocations of the run.
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
    parser.add_argument("--programs", action="store_true", help="not the cases, the programs")
    parser.add_argument("--json", type=Path, help="keep the results here, write no page")
    parser.add_argument(
        "--from", dest="kept", type=Path, nargs="+", default=[], help="results to show beside those"
    )
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    all_names = list(PROGRAMS if options.programs else CASES)
    names = [name for name in all_names[part - 1 :: parts] if options.only in name]
    if (len(names) < len(all_names) or options.programs) and not options.json:
        parser.error("--only, --part and --programs are for --json: the page has everything")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    size = options.size or ("tiny" if options.device == "cpu" else "real")
    if options.programs:
        rows = run_programs(options.device, names)
        kept.write(options.json, rows)
        return
    rows = run(options.device, size, names, options.json)
    if options.json:
        return
    given = {row["name"]: row for file in options.kept for row in kept.read(file)}
    sections = [HEAD, section(rows)]
    if options.kept:
        sections.append(section([given[name] for name in CASES if name in given]))
    here = {row["name"]: row for row in run_programs("cpu", list(PROGRAMS))}
    sections.append(
        programs_section(here, {name: given[name] for name in PROGRAMS if name in given})
    )
    for path in sorted((ROOT / "benchmarks" / "results").glob("attribution-*.json")):
        document = kept.read(path)
        title = (
            f"## Other tools on the same cases: {document['hardware']}, {document['size']} models"
        )
        sections.append(f"{title}\n\n{attribution_table(document)}\n")
    DOCUMENT.write_text("\n".join(sections))


def run(device: str, size: str, names: list[str], keep: Path | None) -> list[dict[str, Any]]:
    """Runs the cases without a kept result, and writes the results after each."""
    rows: list[dict[str, Any]] = kept.read(keep) if keep and keep.exists() else []
    done = {row["name"] for row in rows}
    for name in names:
        if name in done:
            continue
        case = CASES[name]
        row: dict[str, Any] = {"name": name, "device": device, "size": size}
        try:
            row = figures(conform(case, size, device))
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
            kept.write(keep, rows)
    return rows


def figures(result: Result) -> dict[str, Any]:
    """What the page shows of a result; of bytes at the peak, the categories that differ."""
    names = ("name", "device", "size", "peak_bytes", "expected", "found", "agreement")
    names += ("agreement_ever", "unknown_share", "inputs_with_hooks", "hooks_see_all")
    differ = result.differences()
    by_mode = {"auto": {name: bytes_ for name, (bytes_, _) in differ.items()}}
    by_mode["hooks"] = {name: bytes_ for name, (_, bytes_) in differ.items()}
    return kept.only(result.document(), *names) | by_mode


def run_programs(device: str, names: list[str]) -> list[dict[str, Any]]:
    """Runs each program in each mode, and returns how the trace differs from it."""
    rows = []
    gc.freeze()  # collections between programs skip the imported modules
    hardware = "CPU" if device == "cpu" else torch.cuda.get_device_name()
    for name in names:
        if name in (ON_A_GPU if device == "cpu" else ON_THE_CPU):
            continue
        row: dict[str, Any] = {"name": name, "hardware": hardware, "torch": torch.__version__}
        row |= {"told": 0, "totals": 0, "wrong": {}}
        for mode in MODES:
            row |= said(name, mode, device)
            if lines := row.pop("lines"):
                row["wrong"][mode] = lines
        print(name, {mode: lines[:3] for mode, lines in row["wrong"].items() if lines} or "")
        rows.append(row)
    return rows


def said(name: str, mode: str, device: str) -> dict[str, Any]:
    try:
        says = run_program(name, mode, device)
    except Exception as error:
        return {"lines": [f"{type(error).__name__}: {error}".splitlines()[0]]}
    return {"lines": says.wrong(), "told": len(says.told), "totals": len(says.totals)}


PROGRAMS_HEAD = """\
## Programs that say what their tensors are

While they run, the programs label their tensors: a parameter, a `.grad`, in `optimizer.state`, a batch, a
target, saved by autograd. *tensors* counts the labels. *totals* counts how often a program lists all its
weights, gradients or state, so that nothing else may have that category. `=`: the trace agrees to the byte
in all four modes (by default, `saved_tensors="hooks"`, `detail="category"`, both); else the bytes that differ.

The last two columns are other tools' on the CPU: their error in weights, gradients and state, if the program
lists all of them, as a share of the listed bytes. There pytracer has 0.0% in all. `NA`: the program lists no
such sum, or it needs a missing device or package.
"""


def programs_section(here: dict[str, Any], there: dict[str, Any]) -> str:
    """Returns the section on programs: on the CPU, and the kept results of a GPU."""
    peers = ("torch.profiler", "MemTracker")
    path = ROOT / "benchmarks" / "results" / "programs-cpu.json"
    asked = {row["name"]: row for row in kept.read(path)["programs"]}
    gpu = next((row["hardware"] for row in there.values()), "a GPU")
    lines = [PROGRAMS_HEAD, _line(["program", "tensors", "totals", "CPU", gpu, *peers])]
    lines.append(_line(["---", "---:", "---:", "---", "---", "---:", "---:"]))
    for name in PROGRAMS:
        row = here.get(name) or there.get(name) or {"told": "NA", "totals": "NA"}
        cells = [name.replace("_", " "), f"{row['told']}", f"{row['totals']}"]
        cells += [agrees(here.get(name)), agrees(there.get(name))]
        lines.append(_line([*cells, *(off(asked.get(name, {}).get(peer)) for peer in peers)]))
    return "\n".join(lines) + "\n"


def off(answer: dict[str, Any] | None) -> str:
    """Returns the difference of another tool."""
    if answer is None:
        return "NA"
    return "fails" if "error" in answer else f"{answer['wrong']:.1%}"


def agrees(row: dict[str, Any] | None) -> str:
    if row is None:
        return "NA"
    wrong = {mode: lines for mode, lines in row["wrong"].items() if lines}
    return "; ".join(f"{mode}: {len(lines)}" for mode, lines in wrong.items()) or "="


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
