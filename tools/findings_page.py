"""Writes docs/findings.md: what is found in programs with one mistake each, and in healthy ones.

python tools/findings_page.py
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
from programs.hints.healthy import HEALTHY  # noqa: E402
from programs.hints.sick import SICK, Sick  # noqa: E402
from pytracer.analysis.answers import hints  # noqa: E402

HEAD = """# Findings

`t.findings()` lists memory that was kept in vain: bytes, line, evidence, and the change that ends it. The
table's hint is the first finding. Without a finding, it is the change that saves most for least.
`tests/hints` checks two rules: a healthy program has no finding, and one with a mistake has exactly that.
`python tools/findings_page.py` ran these programs and wrote this page.

"""


def told(sick: Sick) -> str:
    """What is said of a program with a mistake."""
    t = sick.run()
    if sick.kind == "hint":
        found = hints.hint(t.data)
        return found.text if found else "nothing"
    rows = t.findings().to_dict("records")
    return "; ".join(f"{row['evidence']}: {row['change']}" for row in rows) or "nothing"


def page() -> str:
    torch.set_num_threads(1)
    lines = [f"## {len(SICK)} programs with a mistake", "", "| program | kind | the finding |"]
    lines.append("|---|---|---|")
    for name, sick in SICK.items():
        lines.append(f"| {name.replace('_', ' ')} | {sick.kind} | {told(sick)} |")
    lines += ["", f"## {len(HEALTHY)} healthy programs, and the {len(CASES)} cases", ""]
    others = len(PROGRAMS) - len(ON_A_GPU) - len(KEPT)
    lines += [
        "docs/conformance.md has the cases; they run five steps each. Nothing is found in the",
        f"{others} programs of that page that keep nothing in vain; {len(KEPT)} programs keep memory in vain, and have that finding.",
        "",
    ]
    lines += ["| program | found |", "|---|---|"]
    for name, run in HEALTHY.items():
        with tempfile.TemporaryDirectory() as folder:
            found = run(Path(folder)).findings()
        lines.append(f"| {name.replace('_', ' ')} | {len(found) or 'nothing'} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "findings.md").write_text(page())
