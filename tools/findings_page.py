"""Writes the tables of docs/findings.md: the findings in programs with a mistake, and in healthy ones.

python tools/findings_page.py           # runs the programs and rewrites the tables
python tools/findings_page.py --check   # runs them, and fails if the page has other tables
"""

import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from programs.conformance.cases import CASES  # noqa: E402
from programs.conformance.engines import ON_A_GPU, PROGRAMS  # noqa: E402  the last to add its own
from programs.conformance.programs import KEPT  # noqa: E402
from programs.hints.one_step import ONE_STEP, traced  # noqa: E402
from programs.hints.recipes import HEALTHY  # noqa: E402
from programs.hints.reported import SICK  # noqa: E402
from programs.hints.sick import Sick  # noqa: E402
from pytracer.analysis.forecasts import changes  # noqa: E402
from tools.transparency_page import between  # noqa: E402

PAGE = ROOT / "docs" / "findings.md"


def finding_of(sick: Sick) -> str:
    """The finding, or the first change, for a program with a mistake."""
    t = sick.run()
    if sick.kind == "hint":
        found = changes.changes(t.data, "cpu")
        return found[0].change if found else "nothing"
    rows = t.findings().to_dict("records")
    return "; ".join(f"{row['evidence']}: {row['change']}" for row in rows) or "nothing"


def page() -> str:
    """The page with new tables. Its other text stays."""
    torch.set_num_threads(1)
    text = between(PAGE.read_text(), "sick", sick_table())
    return between(text, "healthy", healthy_table())


def sick_table() -> str:
    lines = [f"## {len(SICK)} programs with a mistake", "", "| program | kind | the finding |"]
    lines.append("|---|---|---|")
    for name, sick in SICK.items():
        lines.append(f"| {name.replace('_', ' ')} | {sick.kind} | {finding_of(sick)} |")
    return "\n".join(lines) + "\n"


def healthy_table() -> str:
    others = len(PROGRAMS) - len(ON_A_GPU) - len(KEPT)
    lines = [
        f"## {len(HEALTHY) + len(ONE_STEP)} healthy programs, and the {len(CASES)} cases",
        "",
        "docs/conformance.md has the cases; they run five steps each. Nothing is found in the",
        f"{others} programs of that page that keep nothing in vain; {len(KEPT)} programs keep memory in vain, and have that finding.",
        "",
        "| program | found |",
        "|---|---|",
    ]
    for name, run in HEALTHY.items():
        with tempfile.TemporaryDirectory() as folder:
            rows = run(Path(folder)).findings()
        lines.append(f"| {name.replace('_', ' ')} | {len(rows) or 'nothing'} |")
    for name in ONE_STEP:
        t, _kept = traced(name, stacks=True)
        lines.append(f"| {name.replace('_', ' ')} | {len(t.findings()) or 'nothing'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(PAGE.read_text() != page())
    PAGE.write_text(page())
