"""Makes the parts of a release beside wheels and the source, and tries a release.

python tools/release.py notes v1.2.3        # the changelog's section, to the screen
python tools/release.py checksums dist      # SHA256SUMS of its files, for sha256sum --check
python tools/release.py changelog           # holds CHANGELOG.md to the rules of CONTRIBUTING.md
python tools/release.py check [--quick]     # builds, installs and tries it here

Each exits with 1 and one line if something is wrong. `check` builds the source distribution, and
from that the wheel for this Python and this torch. It installs the wheel in a new environment
without a compiler, runs the demo and some tests, and checks the metadata. With `--quick` it
leaves out the tests and the checkers that come from PyPI.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "SHA256SUMS"
LONGEST = 120  # lines of the changelog
HEADING = re.compile(r"^## (\S+) - (\d{4}-\d\d-\d\d)$", re.MULTILINE)
GROUPS = ("Added", "Changed", "Fixed", "Deprecated", "Removed", "Security")
# Words that tell how the code was, not what it does.
HISTORY = re.compile(r"\b(before|formerly|previously|used to)\b|no longer|any more", re.IGNORECASE)
CHECKERS = ("twine==6.2.0", "check-wheel-contents==0.6.3")
TESTS = ("test_stability.py", "test_human.py", "test_table.py", "test_first_hour.py")


def version() -> str:
    """Returns the version, which all places must name.

    Raises:
        SystemExit: two places name different versions.
    """
    places = {
        "pyproject.toml": r'^version = "(.+)"',
        "pytracer/version.py": r'^__version__ = "(.+)"',
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
        print(f"{name:<42} {outcome}  {time.monotonic() - began:5.1f} s", flush=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout}\nerror: {name} failed")
        return done.stdout


def environment(check: Check) -> tuple[Path, dict[str, str]]:
    """Makes an environment with this one's torch and no pytracer; its folder and variables."""
    fresh = check.folder / "fresh"
    check.step("a new environment", sys.executable, "-m", "venv", fresh)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.check_output([fresh / "bin" / "python", "-c", ask], text=True).strip())
    # The packages of this environment, torch among them, are that one's too.
    folders = [path for path in sys.path if path.endswith("-packages")]
    (site / "torch.pth").write_text("\n".join(folders) + "\n")
    variables = {
        **os.environ,
        "PATH": str(fresh / "bin"),
        "CXX": "no-compiler",
        "CC": "no-compiler",
    }
    variables.pop("PYTHONPATH", None)
    return fresh / "bin", variables


def check(quick: bool) -> None:
    """Builds a release of this machine, installs it and tries it."""
    changelog()
    print(f"version {version()} in all places, and in the changelog")
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        checked = Check(Path(name))
        dist = checked.folder / "dist"
        setup = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", dist]
        checked.step("source distribution", *setup, cwd=ROOT)
        source = next(dist.glob("*.tar.gz"))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        build = ["wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", dist, source]
        checked.step("wheel from the source distribution", *pip, *build)
        wheel = next(dist.glob("*.whl"))
        for file in (source, wheel):
            if not file.name.startswith(f"pytracer-{version()}"):
                raise SystemExit(f"error: {file.name} is not of version {version()}")
        programs, variables = environment(checked)
        install = [programs / "python", "-m", "pip", "install", "--no-deps", wheel]
        checked.step("install without a compiler", *install, env=variables)
        demo = ["demo", "-o", checked.folder / "demo.pytrace"]
        shown = checked.step("demo", programs / "pytracer", *demo, env=variables)
        if "peak " not in shown:
            raise SystemExit(f"error: the demo printed no table:\n{shown}")
        said = checked.step("version", programs / "pytracer", "--version", env=variables)
        if said.split() != ["pytracer", version()]:
            raise SystemExit(f"error: pytracer --version says {said}")
        if not quick:
            tests(checked, programs, variables)
            metadata(checked, dist)
        print(f"{wheel.name}, {time.monotonic() - checked.began:.0f} s in all")


def tests(checked: Check, programs: Path, variables: dict[str, str]) -> None:
    """Runs some tests on the installed package: no package lies beside them."""
    for name in ("tests", "docs"):
        shutil.copytree(ROOT / name, checked.folder / name)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, checked.folder)
    files = [f"tests/{name}" for name in TESTS]
    checked.step("tests", programs / "python", "-m", "pytest", "-q", *files, env=variables)


def metadata(checked: Check, dist: Path) -> None:
    """Runs the checkers of metadata, in an environment of theirs."""
    place = checked.folder / "checkers"
    checked.step("an environment for the checkers", sys.executable, "-m", "venv", place)
    checked.step("their packages", place / "bin" / "pip", "install", "--quiet", *CHECKERS)
    files = sorted(dist.iterdir())
    checked.step("twine check", place / "bin" / "twine", "check", "--strict", *files)
    # W002: two binaries may be equal. W009: pytracer.pth lies beside the package, on purpose.
    wheels = dist.glob("*.whl")
    options = ["--ignore", "W002,W009"]
    checked.step("check-wheel-contents", place / "bin" / "check-wheel-contents", *options, *wheels)


def main() -> None:
    """Prints the notes, writes the checksums, or checks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("notes", "checksums", "changelog", "check"))
    parser.add_argument("of", nargs="?", default="", help="the tag, or the folder")
    parser.add_argument("--quick", action="store_true", help="check: no tests, no checkers")
    options = parser.parse_args()
    if options.what == "notes":
        sys.stdout.write(notes(options.of))
    elif options.what == "checksums":
        (Path(options.of) / NAME).write_text(checksums(Path(options.of)))
    elif options.what == "changelog":
        changelog()
    else:
        check(options.quick)


if __name__ == "__main__":
    main()
