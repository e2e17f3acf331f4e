"""A program starts and ends as it does without pytracer, however it is started.

`ways.py` makes the ways. Each is run plainly, with PYTRACER=0, with PYTRACER=1, and by `pytracer run`
where that applies. Exit status, both outputs and the files left must be the same, but for pytracer's
own lines and files. Most programs import a stand-in for torch, which takes a hundredth of the time:
there pytracer starts, refuses the stand-in in one line, and ends.
"""

import os
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.transparency import ways
from tests.transparency.ways import Way

ROOT = Path(__file__).parents[2]
STAND_IN = {
    "torch/__init__.py": """
__version__ = "0.0.0"
import colorsys  # as torch does, it imports something
from torch import sub

class Tensor:
    def __init__(self, n): self.n = n
    def sum(self): return self
    def item(self): return float(self.n)

ones = Tensor
""",
    "torch/sub.py": "",
}
# Our lines: one for each problem, and pages that end with a command.
OURS = re.compile(
    r"pytracer: [^\n]*\n|\n(The first [^\n]*\n)?peak .*?for Perfetto\n|\n[^\n]*look at it:  pytracer[^\n]*\n",
    re.DOTALL,
)
# `pytracer run` runs modules without Python's own runner, which is in plain tracebacks.
NOISE = re.compile(
    r"import time:[^\n]*\n|Previous line repeated \d+|object refcount[^\n]*\n|0x[0-9a-f]{6,}|USDT[^\n]*\n|  File \"<frozen runpy>[^\n]*\n"
)


class Pythons(NamedTuple):
    """Environments where pytracer is installed: one has a stand-in for torch."""

    light: Path
    real: Path


@pytest.fixture(scope="session")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> Pythons:
    folder = tmp_path_factory.mktemp("pythons")
    for name, text in STAND_IN.items():
        path = folder / "stand-in-packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Pythons(
        python_in(folder / "light", [folder / "stand-in-packages"]), python_in(folder / "real", [])
    )


def python_in(folder: Path, first: list[Path]) -> Path:
    """Makes an environment as if pytracer had been installed there."""
    venv.create(folder, system_site_packages=True, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    found = [*first, ROOT, Path(sysconfig.get_paths()["purelib"])]
    # Before the system's packages: a line of a .pth file alone comes after them.
    lines = [f"import sys; sys.path[:0] = {[str(path) for path in found]}"]
    (packages / "aaa.pth").write_text("\n".join(lines) + "\n")
    shutil.copy(ROOT / "pytracer.pth", packages)
    for path in (folder, *folder.parents):
        if path.stat().st_uid == os.getuid() and path != Path(path.anchor):
            path.chmod(path.stat().st_mode | 0o055)  # another user runs this Python, too
    command = "import sys\nfrom pytracer.cli import main\nsys.exit(main())\n"
    (folder / "bin" / "pytracer").write_text(command)
    return folder / "bin" / "python"


class Ran(NamedTuple):
    """What a run has left."""

    code: int
    stdout: str
    stderr: str
    files: dict[str, str]
    said: str  # by pytracer
    traces: list[str]


def run(way: Way, folder: Path, python: Path, mode: str) -> Ran:
    """Runs the way in the folder, which is made anew, so that its name is the same each time."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_program(way, folder)
    call = next((part.call for part in way.parts if part.call), ["train.py"])
    text = (folder / "train.py").read_text()
    words = [word.replace("{folder}", str(folder)).replace("{text}", text) for word in call if word]
    flags = [flag for part in way.parts for flag in part.flags]
    stdin = next((part.stdin for part in way.parts if part.stdin), "").replace("{text}", text)
    ours = [str(python.with_name("pytracer")), "run"] if mode == "run" else []
    started = [str(python), *flags, *ours, *words]
    shell = next((part.shell for part in way.parts if part.shell), '"$@"')
    ended = subprocess.run(
        ["bash", "-c", shell, "bash", *started],
        cwd=folder,
        env=environment(way, mode),
        input=stdin.encode(),
        capture_output=True,
        timeout=300,
        check=False,
    )
    return what_is_left(ended, folder)


def environment(way: Way, mode: str) -> dict[str, str]:
    clean = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("PYTHON", "PYTEST", "PYTRACER", "COV"))
    }
    env: dict[str, str | None] = {**clean, "OMP_NUM_THREADS": "1"}
    for part in way.parts:
        env |= part.env
    env["PYTRACER"] = {"0": "0", "1": "1"}.get(mode)
    return {name: text for name, text in env.items() if text is not None}


def write_program(way: Way, folder: Path) -> None:
    """Writes the program in all forms, and what else is in its folder."""
    parts = way.parts
    imports = next((part.torch for part in parts if part.kind == "torch"), "import torch\n")
    work = ways.TRAIN if way.real else ways.WORK
    first, last = ("".join(part[field] for part in parts) for field in (5, 6))
    text = f"#!{sys.executable}\n{first}{imports}{work}{last}"
    script = folder / "train.py"
    script.write_text(text)
    script.chmod(0o755)
    (folder / "link.py").symlink_to(script)
    shutil.copy(script, folder / "train")
    py_compile.compile(str(script), cfile=str(folder / "train.pyc"), doraise=True)
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    for name in ("__main__.py", "inner.py"):
        shutil.copy(script, folder / "package" / name)
    with zipfile.ZipFile(folder / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", text)
    for part in parts:
        for name, content in part.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content.replace("{text}", text))
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755)


def what_is_left(ended: subprocess.CompletedProcess[bytes], folder: Path) -> Ran:
    stderr = ended.stderr.decode(errors="backslashreplace")
    said = "".join(found[0] for found in OURS.finditer(stderr))
    files, traces = {}, []
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(place, name)
            if name in folders and not path.is_symlink():
                path.chmod(0o755)
            if path.is_file() and name.endswith(".pytrace"):
                traces.append(name)
            elif "__pycache__" not in path.parts:
                files[str(path)] = oct(path.lstat().st_mode)
    return Ran(
        ended.returncode,
        NOISE.sub("", ended.stdout.decode(errors="backslashreplace")),
        NOISE.sub("", OURS.sub("", stderr)),
        files,
        said,
        sorted(traces),
    )


def modes(way: Way) -> Iterator[str]:
    """How a way is run beside the plain one."""
    if not way.real:
        yield "0"
    yield "1"
    if all(part.run for part in way.parts):
        yield "run"


def tiers() -> Iterator[object]:
    """Each tier's ways. The first tier has some of each kind, with the stand-in, and one in full."""
    met: dict[str, int] = {}
    for way in (*ways.single(), *ways.combined(120)):
        kind = "" if len(way.parts) != 1 else way.parts[0].kind
        met[kind] = met.get(kind, 0) + 1
        marks = [pytest.mark.slow]
        if (way.real and way.parts) or met[kind] > 6 or len(way.parts) > 1:
            marks.append(pytest.mark.nightly)
        elif met[kind] > 2 and kind:
            marks.append(pytest.mark.ci)
        yield pytest.param(way, marks=marks, id=way.name)


@pytest.mark.parametrize("way", list(tiers()))
def test_a_program_starts_and_ends_as_it_does_without_us(
    way: Way, pythons: Pythons, tmp_path: Path
) -> None:
    """The same exit status, output and files; what goes wrong in pytracer is one line."""
    if any(part.root for part in way.parts) and os.getuid() != 0:
        pytest.skip("only root can be another user, and mount a disk")
    python = pythons.real if way.real else pythons.light
    plain = run(way, tmp_path / "here", python, "plain")
    for mode in modes(way):
        traced = run(way, tmp_path / "here", python, mode)
        assert traced[:4] == plain[:4], mode
        lines = {line for line in traced.said.splitlines() if line.startswith("pytracer: ")}
        assert len(lines) <= {"0": 0}.get(mode, 3 if way.real else 1), traced.said


def test_the_plain_way_is_recorded(pythons: Pythons, tmp_path: Path) -> None:
    """Else the test above would hold of a pytracer that does nothing."""
    ran = run(Way((), real=True), tmp_path / "here", pythons.real, "1")
    assert ran.traces == ["train.pytrace"]
    assert "The first 5 steps" in ran.said
