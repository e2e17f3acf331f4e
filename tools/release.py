"""Makes the parts of a release beside wheels and the source.

python tools/release.py notes v1.2.3        # the changelog's section, to the screen
python tools/release.py checksums dist      # SHA256SUMS of its files, for sha256sum --check

The first exits with 1 if the tag, pyproject.toml and CHANGELOG.md name different versions.
"""

import argparse
import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "SHA256SUMS"


def notes(tag: str) -> str:
    """Returns the changelog's section on this version."""
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    if version is None or tag != f"v{version[1]}":
        there = version and version[1]
        raise SystemExit(f"error: the tag is {tag} and pyproject.toml says {there}: tag v{there}")
    changes = (ROOT / "CHANGELOG.md").read_text()
    section = re.search(
        rf"^## \[{re.escape(version[1])}\][^\n]*\n(.*?)(?=^## \[|\Z)", changes, re.M | re.S
    )
    if section is None or not section[1].strip():
        raise SystemExit(
            f"error: CHANGELOG.md has nothing below ## [{version[1]}]: write there what changes"
        )
    return section[1].strip() + "\n"


def checksums(folder: Path) -> str:
    """Returns one line per file, as sha256sum writes and checks them."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != NAME)
    if not files:
        raise SystemExit(f"error: {folder} is empty: run make wheels first")
    return "".join(f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in files)


def main() -> None:
    """Prints the notes, or writes the checksums."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("notes", "checksums"))
    parser.add_argument("of", help="the tag, or the folder")
    options = parser.parse_args()
    if options.what == "notes":
        sys.stdout.write(notes(options.of))
    else:
        (Path(options.of) / NAME).write_text(checksums(Path(options.of)))


if __name__ == "__main__":
    main()
