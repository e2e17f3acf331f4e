"""Installs pytracer beside each supported torch, tests it there and writes docs/support.md's table.

    python tools/matrix.py ENVIRONMENT [...] [--wheels FOLDER]
    python tools/matrix.py --make FOLDER [--python python3.12 ...] [--wheels FOLDER]

An environment is the path of a Python that has torch, numpy, pandas, pytest and hypothesis.
`--make` makes one per release of torch, in turn beside the named Pythons, and removes it again
(6 GB each). A wheel in FOLDER that fits is installed, with no compiler in PATH; else a fresh clone
of the last commit is built in place. Then come `pytracer doctor`, a part of the tests, and the
demo. CUDA builds of torch run without a GPU, too. Cells that were not run stay marked so.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from release import TESTS, releases_of_torch

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "matrix-cpu.json"
PAGE = ROOT / "docs" / "support.md"
NEEDED = ["numpy", "pandas", "pytest", "hypothesis", "setuptools>=77"]
FACTS = """
import json, platform, torch
print(json.dumps({
    "python": platform.python_version(),
    "torch": str(torch.__version__),
    "cuda": torch.version.cuda,
    "gpu": torch.cuda.is_available(),
}))
"""


def run(*command: object, cwd: Path, **environment: str) -> tuple[float, str, bool]:
    """Runs a command. Returns its seconds, its output, and whether it succeeded."""
    began = time.monotonic()
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return round(time.monotonic() - began, 1), done.stdout, done.returncode == 0


def path_without_compilers(folder: Path) -> str:
    """Returns a PATH with only the programs that installing and running need."""
    for name in ("bash", "sh", "uname", "env"):
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return str(folder)


def fitting_wheel(wheels: Path | None, python: str) -> bool:
    tag = "cp" + "".join(python.split(".")[:2])
    return wheels is not None and any(wheels.glob(f"pytracer-*-{tag}-*.whl"))


def cell(python: Path, wheels: Path | None) -> dict[str, Any]:
    """Returns the row of one environment."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, checkout = Path(scratch), Path(scratch) / "clone"
        row = json.loads(run(python, "-c", FACTS, cwd=folder)[1].splitlines()[-1])
        row["seconds"] = {}
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
        if fitting_wheel(wheels, row["python"]):
            add_wheel(row, python, wheels, folder)
            shutil.rmtree(checkout / "pytracer")  # the tests must use the wheel's
            used = {}
        else:
            add_build(row, python, checkout)
            used = {"PYTHONPATH": str(checkout)}
        add_proofs(row, python, folder, checkout, used)
        if row["from"] == "wheel":
            run(python, "-m", "pip", "uninstall", "-y", "pytracer", cwd=folder)
    return row


def add_wheel(row: dict[str, Any], python: Path, wheels: Path | None, folder: Path) -> None:
    tools = folder / "tools"
    tools.mkdir()
    pip = [python, "-m", "pip", "install", "--no-index", "--find-links", wheels, "pytracer"]
    seconds, output, well = run(*pip, cwd=folder, PATH=path_without_compilers(tools))
    row["from"], row["seconds"]["install"] = "wheel", seconds
    row["installed"] = "ok" if well else output.strip().splitlines()[-1]


def add_build(row: dict[str, Any], python: Path, checkout: Path) -> None:
    build = (python, "setup.py", "build_ext", "--inplace")
    seconds, output, well = run(*build, cwd=checkout)
    row["from"], row["seconds"]["build"] = "source", seconds
    row["installed"] = "ok" if well else output.strip().splitlines()[-1]


def add_proofs(
    row: dict[str, Any], python: Path, folder: Path, checkout: Path, used: dict[str, str]
) -> None:
    demo = (python, "-m", "pytracer", "demo", "--json", "--device", "cpu", "-o", "demo.pytrace")
    seconds, output, well = run(*demo, cwd=folder, **used)
    row["seconds"]["demo"] = seconds
    row["demo"] = _json_in(output).get("peak", {}) if well else output.strip().splitlines()[-1]
    doctor = _json_in(run(python, "-m", "pytracer", "doctor", "--json", cwd=folder, **used)[1])
    row["doctor"] = {each["name"]: each["verdict"] for each in doctor.get("checks", [])}
    tests = [f"tests/{name}" for name in TESTS]
    pytest = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    row["seconds"]["tests"], output, well = run(*pytest, cwd=checkout, **used)
    row["tests"] = output.strip().splitlines()[-1]
    row["failed"] = re.findall(r"^FAILED (\S+)", output, re.MULTILINE)
    row["ok"] = well and isinstance(row["demo"], dict) and "failed" not in row["doctor"].values()


def _json_in(output: str) -> dict[str, Any]:
    found = re.search(r"^\{.*^\}", output, re.DOTALL | re.MULTILINE)
    return json.loads(found[0]) if found else {}


def make(folder: Path, python: str, release: str) -> Path:
    target = folder / f"{Path(python).name}-torch{release}"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([python, "-m", "venv", str(target)], check=True)
    made = target / "bin" / "python"
    pip = [str(made), "-m", "pip", "install", "--quiet", f"torch=={release}.*", *NEEDED]
    subprocess.run(pip, check=True)
    return made


# ---------------------------------------------------------------------------- the page


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| torch | Python | installed from | doctor, tests, demo on the CPU |",
        "|---|---|---|---|",
    ]
    for release in releases_of_torch():
        of_release = [row for row in rows if row["torch"].startswith(f"{release}.")]
        for row in of_release:
            kind = f"CUDA {row['cuda']}" if row["cuda"] else "CPU"
            outcome = f"{'passed' if row['ok'] else '**failed**'}: {_counts(row['tests'])}"
            lines.append(
                f"| {row['torch']} ({kind}) | {row['python']} | {row['from']} | {outcome} |"
            )
        if not of_release:
            lines.append(f"| {release} | | | *not run* |")
    return "\n".join(lines)


def _counts(tests: str) -> str:
    return re.sub(r" in [\d.]+s.*", "", tests).strip("= ")


def write_page(document: dict[str, Any]) -> None:
    page = PAGE.read_text()
    begin, end = "<!-- matrix:begin -->\n", "<!-- matrix:end -->"
    head, rest = page.split(begin)
    PAGE.write_text(head + begin + table(document["rows"]) + "\n" + end + rest.split(end)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("environments", nargs="*", type=Path, metavar="ENVIRONMENT")
    parser.add_argument("--make", type=Path, metavar="FOLDER")
    parser.add_argument("--python", action="append", default=[])
    parser.add_argument("--wheels", type=lambda text: Path(text).resolve())
    options = parser.parse_args()
    document: dict[str, Any] = {"tool": "tools/matrix.py", "rows": []}
    if RESULT.exists():
        document = json.loads(RESULT.read_text())
    document["machine"] = (
        f"{platform.machine()}, {os.cpu_count()} cores, {' '.join(platform.libc_ver())}"
    )

    def keep(row: dict[str, Any]) -> None:
        same = ("torch", "python", "from")
        others = [old for old in document["rows"] if any(old[key] != row[key] for key in same)]
        row["commit"] = run("git", "rev-parse", "--short", "HEAD", cwd=ROOT)[1].strip()
        document["rows"] = [*others, row]
        RESULT.write_text(json.dumps(document, indent=1) + "\n")
        write_page(document)
        print(
            row["torch"], row["python"], row["from"], row["tests"], row["seconds"], file=sys.stderr
        )

    for python in options.environments:
        keep(cell(python.absolute(), options.wheels))
    if options.make:
        pythons = options.python or [sys.executable]
        for number, release in enumerate(releases_of_torch()):
            made = make(options.make.absolute(), pythons[number % len(pythons)], release)
            keep(cell(made, options.wheels))
            shutil.rmtree(made.parents[1])


main()
