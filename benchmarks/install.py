"""Measures how long it takes until a newcomer sees the first table, from a clone and a wheel.

    python benchmarks/install.py [--wheel FILE] [--out FILE]

Each way runs in a new environment that has torch and our dependencies from the Python that runs
this. It measures the seconds from the first command to the table, and the processor's seconds. The
demo runs on the CPU.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "install-cpu.json"
TABLE = "peak "  # the begin of the demo's first line


class Fresh:
    """A new environment on top of this one's packages, and a folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=True)
        self.python = folder / "venv" / "bin" / "python"
        packages = [path for path in sys.path if path.endswith("-packages")]
        site = next((folder / "venv").glob("lib/*/site-packages"))
        (site / "packages.pth").write_text("\n".join(packages) + "\n")

    def run(self, *command: object, where: Path | None = None) -> str:
        environment = {**os.environ, "VIRTUAL_ENV": str(self.folder / "venv")}
        environment["PATH"] = f"{self.python.parent}{os.pathsep}{environment['PATH']}"
        done = subprocess.run(
            [str(word) for word in command],
            cwd=where or self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{command} failed:\n{done.stdout[-3000:]}")
        return done.stdout

    def clone(self, commit: str) -> Path:
        target = self.folder / "clone"
        self.run("git", "clone", "--quiet", ROOT, target)
        self.run("git", "checkout", "--quiet", commit, where=target)
        return target


def demo_of_a_clone(fresh: Fresh, commit: str) -> str:
    return fresh.run("make", "demo", "ARGS=--device cpu", where=fresh.clone(commit))


def installed_from_source(fresh: Fresh, commit: str) -> str:
    fresh.run(fresh.python, "-m", "pip", "install", "--quiet", fresh.clone(commit))
    return fresh.run(fresh.python, "-m", "pytracer", "demo", "--device", "cpu")


def installed_from_wheel(fresh: Fresh, wheel: str) -> str:
    fresh.run(fresh.python, "-m", "pip", "install", "--quiet", "--no-index", wheel)
    return fresh.run(fresh.python, "-m", "pytracer", "demo", "--device", "cpu")


def time_it(way: Callable[[Fresh, str], str], what: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        fresh = Fresh(Path(folder))
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        printed = way(fresh, what)
        seconds = time.monotonic() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if not any(line.startswith(TABLE) for line in printed.splitlines()):
            raise SystemExit(f"{way.__name__} printed no table:\n{printed[-3000:]}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(seconds, 1), "processor_seconds": round(used, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    ways: list[tuple[str, Callable[[Fresh, str], str], str]] = [
        ("clone", demo_of_a_clone, "HEAD"),
        ("source", installed_from_source, "HEAD"),
    ]
    if options.wheel:
        ways.append(("wheel", installed_from_wheel, str(options.wheel.resolve())))
    head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    document: dict[str, Any] = {
        "tool": "benchmarks/install.py",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "ways": {},
    }
    for name, way, what in ways:
        document["ways"][name] = time_it(way, what)
        print(f"{name:16} {document['ways'][name]}", file=sys.stderr)
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
