"""Makes the parts of a release beside wheels and the source, and tries a release.

python tools/release.py notes v1.2.3        # the changelog's section, to the screen
python tools/release.py checksums dist      # SHA256SUMS of its files, for sha256sum --check
python tools/release.py changelog           # holds CHANGELOG.md to the rules of CONTRIBUTING.md
python tools/release.py check [PYTHON ...]  # builds, installs and tries it here

Each exits with 1 and one line if something is wrong. `check` builds the source distribution, and
from that one wheel for the named Pythons' releases of torch. Beside each of them it makes a new
environment without a compiler, installs the wheel, and runs the demo and some tests. Then it checks
the metadata. A named Python has torch, numpy, pandas, pytest and hypothesis. Without a name, it makes
two environments, with the oldest and the newest torch (6 GB each). Both files are then in dist/.

`--quick` is for .ci/run, which tests after it: it takes the torch that is here, leaves out the tests
and the checkers of metadata, and keeps the wheel's binaries in this checkout.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "SHA256SUMS"
LONGEST = 120  # lines of the changelog
HEADING = re.compile(r"^## (\S+) - (\d{4}-\d\d-\d\d)$", re.MULTILINE)
GROUPS = ("Added", "Changed", "Fixed", "Deprecated", "Removed", "Security")
# Words that tell how the code was, not what it does.
HISTORY = re.compile(r"\b(before|formerly|previously|used to)\b|no longer|any more", re.IGNORECASE)
CHECKERS = ("twine==6.2.0", "check-wheel-contents==0.6.3")
# Those that each supported torch has to pass; tools/matrix.py runs them, too.
TESTS = (
    *("test_native.py", "test_reading.py", "test_graph_walk.py", "test_public_face.py"),
    *("test_stability.py", "test_human.py", "test_table.py"),
    *("test_imagine_ranks.py", "test_imagine_parallel.py"),
)
NEEDED = ("numpy", "pandas", "nvidia-ml-py", "pytest", "hypothesis")
FACTS = """
import json, platform, sys, torch
packages = [path for path in sys.path if path.endswith("-packages")]
here = {"torch": str(torch.__version__), "python": platform.python_version(), "packages": packages}
print(json.dumps(here))
"""
WHERE = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"


def version() -> str:
    """Returns the version, which all places must name.

    Raises:
        SystemExit: two places name different versions.
    """
    places = {
        "pyproject.toml": r'^version = "(.+)"',
        "pytracer/basics/version.py": r'^__version__ = "(.+)"',
        "CITATION.cff": r"^version: (.+)",
        "conda/recipe.yaml": r'^  version: "(.+)"',
        "README.md": r"\bversion = \{(.+?)\}",
    }
    found = {}
    for place, pattern in places.items():
        match = re.search(pattern, (ROOT / place).read_text(), re.MULTILINE)
        found[place] = match[1] if match else "none"
    if len({*found.values()}) > 1:
        said = ", ".join(f"{place} says {each}" for place, each in found.items())
        raise SystemExit(f"error: the versions differ: {said}")
    return found["pyproject.toml"]


def faults(text: str) -> list[str]:
    """Returns what CONTRIBUTING.md does not allow in this changelog."""
    found = []
    if len(text.splitlines()) > LONGEST and len(HEADING.findall(text)) == 1:
        found.append(f"{len(text.splitlines())} lines; a release has at most {LONGEST}")
    found += [
        f"{heading!r} is not `## VERSION - YYYY-MM-DD`"
        for heading in re.findall(r"^## .*$", text, re.MULTILINE)
        if not HEADING.fullmatch(heading)
    ]
    found += [
        f"the group {group!r} is not one of {', '.join(GROUPS)}"
        for group in re.findall(r"^### (.*)$", text, re.MULTILINE)
        if group not in GROUPS
    ]
    for line in text.splitlines():
        if not line.startswith("- "):
            continue
        pages = re.findall(r"\]\(([^)#]+)", line)
        if not pages:
            found.append(f"no link to a page: {line}")
        found += [f"no such page: {page}" for page in pages if not (ROOT / page).exists()]
        if HISTORY.search(line):
            found.append(f"says how it was, not how it is: {line}")
    return found


def changelog() -> None:
    """Holds the changelog to the rules.

    Raises:
        SystemExit: a rule is broken, or the version has no dated heading.
    """
    text = (ROOT / "CHANGELOG.md").read_text()
    found = faults(text)
    if version() not in dict(HEADING.findall(text)):
        found.append(f"no dated heading for {version()}")
    if found:
        raise SystemExit("error: CHANGELOG.md: " + "\n  ".join(found))


def notes(tag: str) -> str:
    """Returns the changelog's section on this version."""
    here = version()
    if tag != f"v{here}":
        raise SystemExit(f"error: the tag is {tag} and pyproject.toml says {here}: tag v{here}")
    _, *parts = HEADING.split((ROOT / "CHANGELOG.md").read_text())
    sections = dict(zip(parts[::3], parts[2::3], strict=True))
    if not sections.get(here, "").strip():
        raise SystemExit(
            f"error: CHANGELOG.md has nothing below ## {here} - DATE: write there what changes"
        )
    return sections[here].strip() + "\n"


def checksums(folder: Path) -> str:
    """Returns one line per file, as sha256sum writes and checks them."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != NAME)
    if not files:
        raise SystemExit(f"error: {folder} is empty: run make wheels first")
    return "".join(f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in files)


# ---------------------------------------------------------------- trying a release


class Check:
    """Runs the steps of `check` in a folder of its own, and prints the seconds of each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.began = time.monotonic()

    def step(self, name: str, *command: str | Path, **options: object) -> str:
        """Runs a command and returns its output.

        Raises:
            SystemExit: the command fails.
        """
        began = time.monotonic()
        done = subprocess.run(
            [str(word) for word in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            **{"cwd": self.folder, **options},
        )
        outcome = "FAILED" if done.returncode else "passed"
        print(f"{name:<52} {outcome}  {time.monotonic() - began:5.1f} s", flush=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout}\nerror: {name} failed")
        return done.stdout


def fresh(check: Check, python: Path) -> Callable[..., str]:
    """Makes an environment with that one's packages and without pytracer or a compiler.

    Returns a function that runs a step with its Python.
    """
    asked = json.loads(subprocess.check_output([python, "-c", FACTS], text=True))
    name = f"torch {asked['torch']}, Python {asked['python']}"
    place = check.folder / asked["torch"]
    check.step(f"{name}: new environment", python, "-m", "venv", place)
    site = next(place.glob("lib/*/site-packages"))
    # The other environment's packages, torch among them, are this one's too.
    (site / "torch.pth").write_text("\n".join(asked["packages"]) + "\n")
    nothing = {"PATH": str(place / "bin"), "CXX": "no-compiler", "CC": "no-compiler"}
    variables = {**os.environ, **nothing}
    variables.pop("PYTHONPATH", None)

    def step(what: str, *words: str | Path, **options: object) -> str:
        command = [place / "bin" / "python", "-m", *words]
        return check.step(f"{name}: {what}", *command, env=variables, **options)

    return step


def check(pythons: list[Path], quick: bool) -> None:
    """Builds a release of this machine, installs it and tries it."""
    changelog()
    print(f"version {version()} in all places, and dated in the changelog")
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        checked = Check(Path(name))
        source, wheel = build(checked, pythons, quick)
        if not quick:
            oldest, *_, newest = releases_of_torch()
            pythons = pythons or [make(checked, torch) for torch in (oldest, newest)]
        for python in pythons or [Path(sys.executable)]:
            use(checked, fresh(checked, python), source, wheel, quick)
        if quick:
            keep_binaries(wheel)
        else:
            metadata(checked, [source, wheel])
            for file in (source, wheel):
                (ROOT / "dist").mkdir(exist_ok=True)
                shutil.copy(file, ROOT / "dist")
        print(f"{wheel.name}, {time.monotonic() - checked.began:.0f} s in all")


def releases_of_torch() -> list[str]:
    """Returns the releases of torch that pytracer supports, the oldest first."""
    text = (ROOT / "pytracer" / "basics" / "version.py").read_text()
    return re.findall(r'"([\d.]+)"', text.partition("TESTED_TORCH")[2])


def make(checked: Check, torch: str) -> Path:
    """Makes an environment with this release of torch, and returns its Python."""
    place = checked.folder / f"with-torch-{torch}"
    checked.step(f"torch {torch}: an environment", sys.executable, "-m", "venv", place)
    python = place / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet"]
    checked.step(f"torch {torch}: its packages", *pip, f"torch=={torch}.*", *NEEDED)
    return python


def build(checked: Check, pythons: list[Path], quick: bool) -> tuple[Path, Path]:
    """Builds the source distribution and, from it alone, the wheel."""
    dist = checked.folder / "dist"
    setup = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", dist]
    checked.step("source distribution", *setup, cwd=ROOT)
    source = next(dist.glob("*.tar.gz"))
    name = "wheel from the source distribution"
    if quick:  # for the torch that is here
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir"]
        checked.step(name, *pip, "--wheel-dir", dist, source)
    else:
        folders = [subprocess.check_output([python, "-c", WHERE], text=True) for python in pythons]
        named = [word for folder in folders for word in ("--torch", folder.strip())]
        named += ["--only-named"] if named else []
        wheels = [sys.executable, ROOT / "tools" / "wheels.py", "--source", source]
        checked.step(name, *wheels, "--into", dist, *named)
    wheel = next(dist.glob("*.whl"))
    for file in (source, wheel):
        if not file.name.startswith(f"pytracer-{version()}"):
            raise SystemExit(f"error: {file.name} is not of version {version()}")
    return source, wheel


def use(checked: Check, step: Callable[..., str], source: Path, wheel: Path, quick: bool) -> None:
    """Installs the wheel, and runs the demo and some tests of the source distribution."""
    began = time.monotonic()
    step("install", "pip", "install", "--quiet", "--no-deps", wheel)
    shown = step("demo", "pytracer", "demo", "--device", "cpu", "-f", "-o", "demo.pytrace")
    seconds = time.monotonic() - began
    if "peak " not in shown:
        raise SystemExit(f"error: the demo printed no table:\n{shown}")
    print(f"    from `pip install` to the first table: {seconds:.1f} s")
    said = step("version", "pytracer", "--version")
    if said.split() != ["pytracer", version()]:
        raise SystemExit(f"error: pytracer --version says {said}")
    if quick:
        return
    with tarfile.open(source) as archive:
        archive.extractall(checked.folder, filter="data")
    unpacked = checked.folder / source.name.removesuffix(".tar.gz")
    shutil.rmtree(unpacked / "pytracer")  # the tests must use the wheel's
    pytest = ["pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{name}" for name in TESTS)]
    print("   ", step("tests", *pytest, cwd=unpacked).splitlines()[-1])


def keep_binaries(wheel: Path) -> None:
    """Takes the wheel's binaries into this checkout, so that its tests compile nothing again."""
    with zipfile.ZipFile(wheel) as archive:
        binaries = [name for name in archive.namelist() if name.endswith(".so")]
        for name in [*binaries, "pytracer/_build.json"]:  # the facts last, as native.py does
            archive.extract(name, ROOT)


def metadata(checked: Check, files: list[Path]) -> None:
    """Runs the checkers of metadata, in an environment of theirs."""
    place = checked.folder / "checkers"
    checked.step("checkers: an environment", sys.executable, "-m", "venv", place)
    checked.step("checkers: their packages", place / "bin" / "pip", "install", "-q", *CHECKERS)
    checked.step("twine check", place / "bin" / "twine", "check", "--strict", *files)
    # W002: two binaries may be equal. W004: binaries are loaded by path, for one torch each.
    # W009: pytracer.pth lies beside the package, on purpose.
    options = ["--ignore", "W002,W004,W009", files[-1]]
    checked.step("check-wheel-contents", place / "bin" / "check-wheel-contents", *options)


def main() -> None:
    """Prints the notes, writes the checksums, or checks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("notes", "checksums", "changelog", "check"))
    parser.add_argument("of", nargs="*", help="the tag, the folder, or Pythons that have torch")
    parser.add_argument("--quick", action="store_true", help="check: the part of .ci/run")
    options = parser.parse_args()
    if options.what == "notes":
        sys.stdout.write(notes(*options.of))
    elif options.what == "checksums":
        folder = Path(*options.of)
        (folder / NAME).write_text(checksums(folder))
    elif options.what == "changelog":
        changelog()
    else:
        check([Path(python).absolute() for python in options.of], options.quick)


if __name__ == "__main__":
    main()
