"""Runs the programs of examples/gallery, and writes their output into docs/gallery.md.

    python tools/gallery_page.py

Programs, screens, changes and bytes are between markers in the page. The words around them are
written by hand. `tests/test_gallery.py` runs the same programs and compares.
"""

import difflib
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pytracer  # noqa: E402
from benchmarks.readme_tables import between  # noqa: E402
from pytracer.basics.units import size_text  # noqa: E402
from pytracer.data.schema import ACTION  # noqa: E402

PAGE = ROOT / "docs" / "gallery.md"
_EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"
PROGRAMS = ROOT / "examples" / "gallery"
_PYTHON = {"pytracer": "pytracer", "torchrun": "torch.distributed.run"}


@dataclass(frozen=True)
class Case:
    """A program, the commands that show its trouble, and the commands after the change."""

    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    traces: tuple[str, str]  # the files that the commands leave
    counts: str = "peak"  # or what the allocator reserves

    @property
    def programs(self) -> list[str]:
        """Returns the program, and also the changed one if the change is one of code."""
        names = [f"{self.name}.py", f"{self.name}_mended.py"]
        return [name for name in names if (PROGRAMS / name).exists()]


CASES = {
    case.name: case
    for case in (
        Case(
            "out_of_memory",
            ("pytracer run --stacks out_of_memory.py",),
            ("pytracer run --stacks out_of_memory_mended.py",),
            ("out_of_memory.pytrace", "out_of_memory_mended.pytrace"),
        ),
        Case(
            "leak",
            ("pytracer run --steps 20 --stacks leak.py", "pytracer diff leak.pytrace --steps 2,18"),
            (
                "pytracer run --steps 20 --stacks leak_mended.py",
                "pytracer check leak_mended.pytrace --max-growth 0",
            ),
            ("leak.pytrace", "leak_mended.pytrace"),
        ),
        Case(
            "optimizer",
            ("pytracer run optimizer.py",),
            ("pytracer run optimizer_mended.py",),
            ("optimizer.pytrace", "optimizer_mended.pytrace"),
        ),
        Case(
            "ddp",
            ("torchrun --nproc-per-node 2 -m pytracer run ddp.py",),
            ("torchrun --nproc-per-node 2 -m pytracer run ddp_mended.py",),
            ("ddp.rank1.pytrace", "ddp_mended.rank1.pytrace"),
        ),
        Case(
            "fragmentation",
            ("pytracer imagine --on RTX4090 --keep before fragmentation.py",),
            (f"{_EXPANDABLE} pytracer imagine --on RTX4090 --keep after fragmentation.py",),
            ("before/RTX4090.pytrace", "after/RTX4090.pytrace"),
            counts="reserved",
        ),
    )
}


@dataclass(frozen=True)
class Solved:
    """A case that was run in a folder."""

    case: Case
    folder: Path
    before: str
    after: str

    @cached_property
    def needed(self) -> tuple[int, int]:
        """Returns bytes before and after, including requests that failed."""
        traces = (pytracer.load(self.folder / name) for name in self.case.traces)
        before, after = (_needed(t, self.case.counts) for t in traces)
        return before, after

    @property
    def won(self) -> str:
        """Returns the gain in words."""
        before, after = self.needed
        what = "needed" if self.case.counts == "peak" else "reserved"
        return (
            f"**{size_text(before)} {what} before, {size_text(after)} after: "
            f"{size_text(before - after)} won.**"
        )

    def parts(self) -> dict[str, str]:
        """Returns the parts of the page by the names of their markers."""
        name = self.case.name
        found = {
            f"{name}-program": _fenced("python", (PROGRAMS / f"{name}.py").read_text()),
            f"{name}-before": _fenced("", self.before),
            f"{name}-after": _fenced("", self.after),
            f"{name}-won": self.won,
        }
        if len(self.case.programs) == 2:
            found[f"{name}-change"] = _fenced("diff", _change(self.case))
        return found


def _needed(t: pytracer.LoadedTrace, counts: str) -> int:
    if counts == "reserved":
        return t.replay().peak_reserved
    events = t.data.events
    failed = np.flatnonzero(events.action == ACTION["oom"])
    return t.peak.bytes + (int(events.bytes[failed[-1]]) if len(failed) else 0)


def _change(case: Case) -> str:
    """Returns the lines that differ, each with one of its neighbours."""
    texts = [(PROGRAMS / name).read_text().splitlines() for name in case.programs]
    lines = list(difflib.unified_diff(*texts, n=1, lineterm=""))[2:]
    return "\n".join(" ..." if line.startswith("@@") else line for line in lines[1:])


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{_trimmed(text)}\n```"


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def solve(case: Case, folder: Path) -> Solved:
    """Runs the commands of a case in the folder."""
    for name in case.programs:
        (folder / name).write_text((PROGRAMS / name).read_text())
    before, after = (
        "\n\n".join(_shown(line, folder) for line in lines) for lines in (case.before, case.after)
    )
    return Solved(case, folder, before, after)


def _shown(line: str, folder: Path) -> str:
    """Returns a command, and its output below it."""
    words = shlex.split(line)
    first = next(i for i, word in enumerate(words) if word in _PYTHON)
    settings = dict(word.split("=", 1) for word in words[:first])
    done = subprocess.run(
        [sys.executable, "-m", _PYTHON[words[first]], *words[first + 1 :]],
        cwd=folder,
        env=machine() | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=120,
    )
    return f"$ {line}\n{_screen(done.stdout)}"


def machine() -> dict[str, str]:
    """Returns an environment with one thread and no GPU, so that all machines show equal bytes."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {
        **os.environ,
        "PYTHONPATH": path,
        "COLUMNS": "80",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "NO_COLOR": "1",
        "PYTORCH_ALLOC_CONF": "",
    }


def _screen(text: str) -> str:
    """Returns the printed text without frames of tracebacks and progress messages."""
    shown, inside = [], False
    for line in text.splitlines():
        inside = line.startswith("Traceback") or (inside and line.startswith(" "))
        if line.startswith("Traceback"):
            shown += [line, "  ..."]
        elif not inside and not line.startswith("pytracer: imagining"):
            shown.append(line)
    return "\n".join(shown).strip()


def stamp() -> str:
    """Returns the line that names the tool and the torch that wrote the page."""
    return f"Written by `python tools/gallery_page.py` with torch {torch.__version__}."


def main() -> None:
    text = between(PAGE.read_text(), "stamp", stamp())
    for case in CASES.values():
        with tempfile.TemporaryDirectory() as folder:
            for name, content in solve(case, Path(folder)).parts().items():
                text = between(text, name, content)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
