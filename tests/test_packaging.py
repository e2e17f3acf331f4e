"""What an installer, an importer and a person with the wrong torch get."""

import ast
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

import pytracer
from pytracer import errors
from pytracer.basics.version import TESTED_TORCH
from pytracer.data import _native

ROOT = Path(__file__).parents[1]
TIME_OF_PYTHON_S = 1  # that a build may take to refuse, on a machine that does nothing else
ABI = sysconfig.get_config_var("SOABI")
tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read pyproject.toml")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = SETTINGS["project"]


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_version_is_the_same_everywhere() -> None:
    """pyproject.toml, the package and the changelog name one version."""
    assert pytracer.__version__ == PROJECT["version"]
    assert f"\n## {PROJECT['version']} - 20" in (ROOT / "CHANGELOG.md").read_text()


def test_torch_is_never_a_requirement() -> None:
    """An installer must not be led to replace the torch that is there."""
    everything = [*PROJECT["dependencies"], *SETTINGS["build-system"]["requires"]]
    for group in (
        *PROJECT["optional-dependencies"].values(),
        *SETTINGS["dependency-groups"].values(),
    ):
        everything += [need for need in group if isinstance(need, str)]
    assert not [need for need in everything if re.match(r"torch\b", need)]
    assert PROJECT["dependencies"] == ["numpy", "pandas", "nvidia-ml-py"]


def test_a_release_has_the_changelogs_words_and_checksums(tmp_path: Path) -> None:
    """The tag, pyproject.toml and the changelog name one version; sha256sum checks the files."""
    tool = str(ROOT / "tools" / "release.py")
    notes = run(tool, "notes", f"v{PROJECT['version']}", cwd=tmp_path)
    assert notes.returncode == 0, notes.stderr
    assert notes.stdout.strip() in (ROOT / "CHANGELOG.md").read_text()
    assert "\n## " not in notes.stdout
    wrong = run(tool, "notes", "v99.0.0", cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert f"tag v{PROJECT['version']}" in wrong.stderr
    (tmp_path / "one.whl").write_bytes(b"a wheel")
    assert run(tool, "checksums", ".", cwd=tmp_path).returncode == 0
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path, check=True)


def test_the_changelog_keeps_to_the_rules_of_contributing(tmp_path: Path) -> None:
    """Dated headings, three groups, a page for each line, and no history of development."""
    tool = ROOT / "tools" / "release.py"
    checked = run(str(tool), "changelog", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    faults = runpy.run_path(str(tool))["faults"]
    good = "## 1.0.0 - 2026-11-26\n### Added\n- A view ([limits](docs/limits.md)).\n"
    assert faults(good) == []
    assert len(faults(good.replace(" - 2026-11-26", ""))) == 1
    assert len(faults(good.replace("Added", "Faster"))) == 1
    assert len(faults(good.replace("limits.md", "no.md"))) == 1
    assert len(faults(good.replace("A view (", "A view, slower before ("))) == 1
    assert len(faults("## 1.0.0 - 2026-11-26\n- A view.\n")) == 1
    assert len(faults(good + "\n" * 120)) == 1


def test_the_workflows_wheels_have_a_binary_for_each_tested_torch() -> None:
    """[tool.cibuildwheel] cannot read pytracer/basics/version.py."""
    folders = SETTINGS["tool"]["cibuildwheel"]["linux"]["environment"]["PYTRACER_TORCHES"].split(
        ":"
    )
    assert tuple(Path(folder).name for folder in folders) == TESTED_TORCH


def test_pull_requests_run_what_ci_runs() -> None:
    """One list of checks, .ci/run; and the long parts of it know their tier."""
    workflow = (ROOT / ".github" / "workflows" / "checks.yml").read_text()
    assert "run: .ci/run\n" in workflow
    assert "PYTRACER_TIER=ci part test" in (ROOT / ".ci" / "run").read_text()


def test_metadata_is_static() -> None:
    """uv reads the metadata without building."""
    assert "dynamic" not in PROJECT


def test_the_entry_point_exists() -> None:
    """`pytracer` on the command line is a function."""
    module, _, function = PROJECT["scripts"]["pytracer"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.ci
@pytest.mark.slow
def test_a_users_typed_file_passes_mypy_strict(tmp_path: Path) -> None:
    """As a user has it, whose mypy says nothing of what is installed; no settings of ours apply."""
    user = ROOT / "tests" / "typing" / "user.py"
    silent, cache = "--follow-imports=silent", f"--cache-dir={tmp_path}"
    done = run("-m", "mypy", "--strict", "--config-file=", silent, cache, str(user), cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_pre_commit_uses_the_pinned_tools() -> None:
    """A commit hook and `make lint` never disagree on a layout."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    revisions = dict(re.findall(r"repo: \S+/(\S+)\n\s+rev: v(\S+)", hooks))
    pins = dict(pin.split("==") for pin in SETTINGS["dependency-groups"]["lint"])
    assert revisions["ruff-pre-commit"] == pins["ruff"]
    assert revisions["mirrors-clang-format"] == pins["clang-format"]
    assert revisions["codespell"] == pins["codespell"]


def test_the_stub_names_what_the_extension_has() -> None:
    """`_C.pyi` is what mypy believes: it may neither promise nor hide anything."""
    stub = ast.parse((ROOT / "pytracer" / "_C.pyi").read_text())
    named = set()
    for node in stub.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            named.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            named.add(ast.unparse(node.target))
    assert {name for name in named if not name.startswith("_")} == {
        name for name in dir(_native.C) if not name.startswith("_")
    }


def test_errors_carry_the_exit_codes_of_the_command_line() -> None:
    """0 fine, 1 failed, 2 usage, 3 a budget exceeded, 4 not a readable trace."""
    codes = {
        name: kind.exit_code
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.PytracerError)
    }
    special = {"UsageError": 2, "BudgetExceeded": 3, "UnreadableTrace": 4}
    assert codes == {name: special.get(name, 1) for name in codes}


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    """py.typed and stubs are in; leftovers of a build in place are not."""
    source = tmp_path / "source"
    leave = shutil.ignore_patterns(".*", "build*", "*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=leave)
    (source / "pytracer" / "_build.json").write_text("{}")
    (source / "pytracer" / "_C.leftover.so").touch()
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = run("-c", build, cwd=source, PYTRACER_BUILD_EXT="0")
    assert done.returncode == 0, done.stderr
    names = set(zipfile.ZipFile(source / done.stdout.split()[-1]).namelist())
    inside = {name for name in names if not name.startswith("pytracer-")}
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / "pytracer").rglob("*")
        if path.suffix in {".py", ".pyi", ".typed", ".html", ".css", ".js"}
    }
    assert "pytracer/py.typed" in wanted
    assert inside == wanted | {"pytracer.pth"}


@pytest.mark.slow
def test_importing_costs_little_beside_torch() -> None:
    """`import pytracer` adds at most 50 ms to `import torch`, and leaves pandas alone."""
    code = "import torch, pytracer, sys; sys.exit('pandas' in sys.modules)"
    tried = []
    # Bytecode is kept, as it is for everyone; the first run may write it. Other programs on the
    # machine only ever add, so the best counts.
    for _ in range(4):
        done = run("-X", "importtime", "-c", code, cwd=ROOT, PYTHONDONTWRITEBYTECODE="")
        assert done.returncode == 0, "import pytracer imported pandas"
        spent = {name: int(us) for us, name in re.findall(r"(\d+) \| +(\S+)\n", done.stderr)}
        own_ms, torch_ms = spent["pytracer"] / 1000, spent["torch"] / 1000
        tried.append((own_ms, torch_ms))
        # A machine that is busy slows both: on an idle one torch takes 1400 ms.
        if own_ms <= 50 * max(1, torch_ms / 1400):
            return
    pytest.fail(f"pytracer and torch took, in ms: {tried}")


# --- a binary for another torch ------------------------------------------------------------------


def built_for(*torches: str, abi: str = ABI) -> dict[str, Any]:
    """What the build writes beside binaries for these torches."""
    made = {_native.release_of(each): {"torch": each, "cuda": None} for each in torches}
    return {"python": "3", "abi": abi, "compiler": "c++", "torches": made}


@pytest.mark.parametrize(
    ("built", "running", "fits"),
    [
        ("2.11.0+cu130", "2.11.0+cu130", True),
        ("2.11.0+cu130", "2.11.1+cu130", True),
        ("2.11.0", "2.11.0", True),
        ("2.11.0+cu130", "2.11.0+cu128", True),
        ("2.11.0+cpu", "2.11.0+cu130", True),
        ("2.11.0+cpu", "2.13.0+cpu", False),
        ("2.14.0.dev20261101+cpu", "2.14.0.dev20261102+cpu", False),
        ("2.14.0.dev20261101+cpu", "2.14.0+cpu", False),
        ("2.14.0", "2.14.0a0+gitabc1234", False),
        ("2.14.0a0+gitabc1234", "2.14.0a0+gitabc1234", True),
        ("2.14.0a0+gitabc1234", "2.14.0a0+gitdef5678", False),
    ],
)
def test_a_binary_fits_its_release_of_torch(built: str, running: str, fits: bool) -> None:
    """Patch releases and variants share a binary; nightlies and builds from source share none."""
    if fits:
        assert _native.facts_for(built_for(built), running)["torch"] == built
    else:
        with pytest.raises(errors.BuildMismatch, match=re.escape(built)):
            _native.facts_for(built_for(built), running)


def test_of_several_binaries_the_one_for_this_release_is_taken() -> None:
    """A wheel has one for each release, and a release that it lacks gets none."""
    facts = built_for("2.12.0", "2.13.0", "2.14.1")
    assert _native.facts_for(facts, "2.13.2+cu130")["torch"] == "2.13.0"
    with pytest.raises(errors.BuildMismatch, match=r"2\.12\.0, 2\.13\.0, 2\.14\.1.*torch 2\.15\.0"):
        _native.facts_for(facts, "2.15.0")


def test_a_binary_for_another_python_is_refused() -> None:
    """The message names both and the command."""
    facts = built_for("2.13.0+cpu", abi="cpython-39-x86_64-linux-gnu")
    with pytest.raises(errors.BuildMismatch, match=r"(?s)cpython-39.*Rebuild it:\n  \w"):
        _native.facts_for(facts, "2.13.0+cpu")


def test_a_torch_that_is_too_old_is_refused_in_one_sentence() -> None:
    """Rebuilding would not help: the sentence says what does."""
    with pytest.raises(errors.BuildMismatch) as refused:
        _native.facts_for(built_for("2.13.0"), "2.10.0+cu128")
    assert str(refused.value) == (
        "torch 2.10.0+cu128 is older than pytracer supports (2.11 to 2.15); "
        "update it: pip install 'torch>=2.11'"
    )


def copy_beside_a_torch(folder: Path, torch_version: str) -> None:
    """The door to the extension, without an extension, beside a torch of this version."""
    for name in ("pytracer", "torch"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"__version__ = '{torch_version}'\n")
    for name in ("data/_native.py", "errors.py", "basics/version.py"):
        place = folder / "pytracer" / name
        place.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "pytracer" / name, place)


def test_another_torch_is_refused_before_the_binary_is_loaded(tmp_path: Path) -> None:
    """Both versions and the command, instead of an undefined symbol."""
    copy_beside_a_torch(tmp_path, "2.99.0+cu150")
    facts = json.dumps(built_for("2.13.0+cpu"))
    (tmp_path / "pytracer" / "_build.json").write_text(facts)
    message = run("-c", "from pytracer.data._native import C", cwd=tmp_path).stderr
    assert "errors.BuildMismatch: pytracer was built for torch 2.13.0+cpu" in message
    assert "this is torch 2.99.0+cu150" in message
    assert f"{sys.executable} -m pip install --force-reinstall --no-deps ." in message


def test_a_binary_that_does_not_load_is_explained(tmp_path: Path) -> None:
    """The facts fit, and yet the import fails: the reason and the command are given."""
    copy_beside_a_torch(tmp_path, "2.13.0+cpu")
    facts = json.dumps(built_for("2.13.0+cpu"))
    (tmp_path / "pytracer" / "_build.json").write_text(facts)
    shutil.copy(ROOT / "pytracer" / f"_core.{ABI}.so", tmp_path / "pytracer")
    (tmp_path / "pytracer" / f"_C-torch2.13.{ABI}.so").write_text("not a binary")
    message = run("-c", "from pytracer.data._native import C", cwd=tmp_path).stderr
    assert "does not load in torch 2.13.0+cpu" in message
    assert "Rebuild it:" in message


def test_a_checkout_that_was_never_built_says_how(tmp_path: Path) -> None:
    """In a checkout the command is setup.py's."""
    copy_beside_a_torch(tmp_path, "2.13.0+cpu")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "setup.py").touch()
    message = run("-c", "from pytracer.data._native import C", cwd=tmp_path).stderr
    assert "errors.BuildMissing" in message
    assert f"cd {tmp_path} && {sys.executable} setup.py build_ext --inplace" in message


def test_a_checkout_that_hides_an_installed_pytracer_says_so(tmp_path: Path) -> None:
    """Whoever has run `pip install .` stands in the clone, and Python looks there first."""
    checkout, installed = tmp_path / "checkout", tmp_path / "site-packages"
    for folder in (checkout, installed):
        folder.mkdir()
        copy_beside_a_torch(folder, "2.13.0+cpu")
    (checkout / "csrc").mkdir()
    (checkout / "setup.py").touch()

    def message() -> str:
        return run(
            "-c", "from pytracer.data._native import C", cwd=checkout, PYTHONPATH=str(installed)
        ).stderr

    assert "is installed in" not in message()  # that one was not built either
    (installed / "pytracer" / "_build.json").write_text("{}")
    assert (
        f"pytracer is installed in {installed / 'pytracer'}, and this folder hides it" in message()
    )
    assert "run from another folder, or build it:" in message()
    assert f"cd {checkout} && {sys.executable} setup.py build_ext --inplace" in message()


# --- building where something is missing ---------------------------------------------------------


def build_in_place(torch_folder: Path | None, **environment: str) -> str:
    """Asks for a build beside this torch, of which only the version is looked at; its last words."""
    named = {"PYTRACER_TORCHES": str(torch_folder)} if torch_folder else {}
    began = time.monotonic()
    done = run("setup.py", "build_ext", "--inplace", cwd=ROOT, **named, **environment)
    assert done.returncode != 0
    assert time.monotonic() - began < 10 * TIME_OF_PYTHON_S
    assert "Traceback" not in done.stderr
    return done.stderr.strip()


def a_torch(folder: Path, version: str, cuda: str | None = None) -> Path:
    (folder / "version.py").write_text(
        f"__version__ = {version!r}\ngit_version = 'abc'\ncuda = {cuda!r}\n"
    )
    return folder


def test_building_beside_a_torch_that_is_too_old_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """At once, and not after minutes by hundreds of lines of C++."""
    assert build_in_place(a_torch(tmp_path, "2.10.0+cu128")) == (
        "error: torch 2.10.0+cu128 is older than pytracer supports (2.11 to 2.15); "
        "update it: pip install 'torch>=2.11'"
    )


def test_building_without_a_compiler_says_which_to_install(tmp_path: Path) -> None:
    """One line with the command."""
    said = build_in_place(a_torch(tmp_path, "2.13.0"), CXX="no-such-compiler")
    assert said == (
        "error: no C++ compiler (no-such-compiler); install one (apt install g++) or set CXX"
    )


def test_building_beside_a_newer_torch_says_so_in_one_line(tmp_path: Path) -> None:
    """It is tried: most releases change nothing that matters here."""
    said = build_in_place(a_torch(tmp_path, "2.99.0"), CXX="no-such-compiler")
    assert said.splitlines()[0] == (
        "warning: torch 2.99.0 is newer than the tested ones (2.11 to 2.15); "
        "`pytracer doctor` proves what works"
    )


def test_what_does_not_compile_is_told_in_one_line(tmp_path: Path) -> None:
    """The first error and the file that has the others."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\nfor i in 1 2 3; do echo x.cpp:$i: error: no $i >&2; done; exit 1"
    )
    compiler.chmod(0o755)
    said = build_in_place(a_torch(tmp_path, "2.13.0"), CXX=str(compiler), MAX_JOBS="1")
    assert re.search(
        r"^error: .* failed: x\.cpp:1: error: no 1 \(the whole output is in \S+\)$", said, re.M
    )
    assert "no 2" not in said


def test_building_without_torch_makes_the_reader_and_says_so(tmp_path: Path) -> None:
    """What reads traces needs no torch; what records does, and the way to get it is told."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in ('torch', 'pybind11') else find(name, *a)\n"
    )
    said = build_in_place(None, PYTHONPATH=str(tmp_path))
    assert said.startswith("warning: no torch was found, so pytracer will read traces")
    assert "pip install torch, then pip install --force-reinstall --no-deps ." in said
    assert said.endswith("error: pybind11 is missing; install it: pip install pybind11")


def test_an_unknown_switch_is_refused() -> None:
    """A typing error in an environment variable does not silently build something else."""
    done = run("setup.py", "--version", cwd=ROOT, PYTRACER_BUILD_EXT="yes")
    assert done.returncode != 0
    assert "PYTRACER_BUILD_EXT=yes is not understood; it is one of 1, 0" in done.stderr
