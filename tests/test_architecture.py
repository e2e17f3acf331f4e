"""Data flows one way: capture -> trace -> analysis -> export. These tests keep it so."""

import ast
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytracer import private_torch
from pytracer.analysis.facts import evidence
from pytracer.schema import CATEGORIES, CATEGORY_TABLE

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pytracer"
CSRC = ROOT / "csrc"

# What each module or room may import from pytracer, inside functions too. Anything not listed is
# forbidden, and a new module is a new line here.
WORDS = {"errors", "files", "frames", "health", "names", "schema", "units", "version"}
FACTS = {"analysis.facts", "meta", "model_names", "recorded", "sanitized"}
ALLOCATOR = {"analysis.allocator", *FACTS}
ANSWERS = {"analysis.answers", *ALLOCATOR}
FORECASTS = {"analysis.forecasts", *ANSWERS}
MAY_IMPORT = {
    "driver": set(),
    "environment": set(),
    "errors": set(),
    "files": {"errors", "units"},
    "columns": {"schema"},
    "frames": {"columns", "units"},
    "names": {"environment"},
    "schema": set(),
    "units": {"errors"},
    "version": set(),
    "health": {"schema"},
    "private_torch": {"errors"},
    "ranges": set(),
    "_native": {"_C", "_core", "errors", "version"},
    "model_names": {"schema"},
    "recorded": {*WORDS, "_native", "model_names"},
    "meta": {"model_names", "recorded", "schema"},
    "sanitized": {"meta", "recorded", "schema"},
    "anonymous": {"_native", "recorded"},
    "snapshot": {*WORDS, "_native", "ranges", "recorded"},
    "capture": {
        *WORDS,
        "private_torch",
        "_native",
        "anonymous",
        "driver",
        "environment",
        "recorded",
    },
    # A private view of the files, for a program that is to change none.
    "sandbox": {"errors"},
    # What happened; where it lay; what people ask; what would be.
    "analysis.facts": {*WORDS, "_native", "meta", "model_names", "recorded", "sanitized"},
    "analysis.allocator": {*WORDS, *FACTS, "_native", "ranges"},
    "analysis.answers": {*WORDS, *ALLOCATOR},
    "analysis.forecasts": {*WORDS, *ANSWERS, "cost"},
    "cost": {*WORDS, "private_torch", "_native", "meta", "model_names", "recorded"},
    "gemm": {*WORDS, "private_torch", *ANSWERS, "_native"},
    # Many ranks as one job: a digest of each, and what their comparison shows.
    "ranks": {*WORDS, *ANSWERS, "snapshot"},
    "export": {*WORDS, *FORECASTS, "_native", "cost", "ranges", "ranks", "sandbox"},
    "verify": {*WORDS, *FORECASTS, "sandbox"},
    # The public face: what can be asked, and where capture and analysis meet.
    "reading": {*WORDS, *FORECASTS, "anonymous", "cost", "export", "snapshot", "verify"},
    "job": {*WORDS, *ANSWERS, "anonymous", "export", "ranks", "reading"},
    "loading": {"job", "reading"},
    "api": {
        *WORDS,
        "private_torch",
        "capture",
        "cost",
        "environment",
        "export",
        "meta",
        "reading",
        "recorded",
    },
    "imagined": {*WORDS, "private_torch", *FORECASTS, "_native", "capture", "reading", "runner"}
    | {"sandbox", "start"},
    "claims": {*WORDS, *ANSWERS, "_native", "api", "capture", "cost", "driver", "export"}
    | {"gemm", "meta", "reading"},
    "integrations": {*WORDS, "api", "capture", "environment", "export", "reading"},
    "demo": {*WORDS, "api"},
    "offload": set(),
    "place": set(),
    "start": set(),
    "runner": {"environment", "errors", "files", "start"},
    "trial": {"capture", "errors", "model_names", "offload", "start"},
    "traced_program": {*WORDS, *FACTS, "api", "capture", "environment", "place", "runner"}
    | {"start", "trial"},
    "doctor": {*WORDS, "private_torch", *ANSWERS, "_native", "capture"},
    "cli": {*WORDS, *FORECASTS, "_native", "api", "capture", "claims", "cost", "demo", "doctor"}
    | {
        "driver",
        "environment",
        "export",
        "gemm",
        "imagined",
        "integrations",
        "job",
        "loading",
        "ranks",
    }
    | {"reading", "runner", "sandbox", "start", "traced_program", "verify"},
    "__main__": {"cli"},
    "__init__": {
        "api",
        "errors",
        "imagined",
        "integrations",
        "job",
        "loading",
        "reading",
        "version",
    },
}
# Rooms in which every file may import torch, and the files that may in the others.
KNOWS_TORCH = {"capture", "claims", "imagined"}
MAY_IMPORT_TORCH = {
    *("api.py", "demo.py", "offload.py", "private_torch.py", "cli/measure.py"),
    *("traced_program.py", "trial.py"),
    "cli/show.py",
    *("cost/classes.py", "cost/flops.py", "cost/measure.py", "cost/peaks.py"),
    *(f"gemm/{name}.py" for name in ("device", "kernels", "operands", "sweep", "timer")),
}


modules = sorted(PACKAGE.rglob("*.py"))
each_module = pytest.mark.parametrize("path", modules, ids=lambda p: str(p.relative_to(PACKAGE)))


def room(parts: Sequence[str]) -> str:
    """`analysis` has rooms of its own."""
    depth = 2 if parts[0] == "analysis" and len(parts) > 1 else 1
    return ".".join(parts[:depth]).removesuffix(".py")


def layer_of(path: Path) -> str:
    return room(path.relative_to(PACKAGE).parts)


def imports_of(path: Path) -> set[str]:
    """Every dotted name a module imports, including those imported inside functions."""
    return names_imported(ast.parse(path.read_text()))


def names_imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def lines_with(pattern: str, folder: str) -> list[str]:
    """Where in this folder of csrc the pattern occurs."""
    wanted = re.compile(pattern)
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((CSRC / folder).rglob("*"))
        if path.suffix in {".h", ".cpp", ".cu", ".cuh"}
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if wanted.search(line)
    ]


@each_module
def test_each_layer_imports_only_what_it_may(path: Path) -> None:
    own = layer_of(path)
    layers = {
        room(name.split(".")[1:]) for name in imports_of(path) if name.startswith("pytracer.")
    }
    if path.parent == PACKAGE / "analysis":
        assert not layers, "analysis is rooms, and nothing stands between them"
        return
    assert own in MAY_IMPORT, f"say in MAY_IMPORT what {own} may import"
    assert layers - {own} <= MAY_IMPORT[own]


def test_the_layers_have_an_order() -> None:
    """No layer imports, by whatever detour, one that imports it."""
    left = {layer: set(imports) & MAY_IMPORT.keys() for layer, imports in MAY_IMPORT.items()}
    while left:
        lowest = {layer for layer, imports in left.items() if not imports & left.keys()}
        assert lowest, f"a circle among {sorted(left)}"
        left = {layer: imports for layer, imports in left.items() if layer not in lowest}


@pytest.mark.parametrize("folder", ["benchmarks", "tools", "programs"])
def test_what_tests_share_with_others_is_in_programs(folder: str) -> None:
    """`tools/kills.py` and `tools/mutations.py` are the long versions of a test."""
    importers = {
        path.name
        for path in (ROOT / folder).rglob("*.py")
        if any(name.split(".")[0] == "tests" for name in imports_of(path))
    }
    assert importers <= {"kills.py", "mutations.py"}


def private_names_of_torch(tree: ast.AST) -> set[str]:
    """Dotted names that begin with torch and have a private part."""
    attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {
        name
        for name in attributes | names_imported(tree)
        if re.match(r"torch\.(\w+\.)*_[a-zA-Z]", name)
    }


@each_module
def test_private_names_of_torch_are_all_in_one_module(path: Path) -> None:
    """A member that is private may be used where it is, if the list of members has it."""
    if path.name == "private_torch.py":
        return
    members = {member.place.replace(":", ".") for member in private_torch.MEMBERS}
    assert private_names_of_torch(ast.parse(path.read_text())) <= members


def imports_package(path: Path, package: str) -> bool:
    return any(name.split(".")[0] == package for name in imports_of(path))


@each_module
def test_only_the_capture_side_knows_torch(path: Path) -> None:
    name = path.relative_to(PACKAGE).as_posix()
    allowed = layer_of(path) in KNOWS_TORCH or name in MAY_IMPORT_TORCH
    assert allowed or not imports_package(path, "torch")


def test_one_module_imports_pandas() -> None:
    """The others name its types only, where nothing runs."""
    importing = {
        path.relative_to(PACKAGE).as_posix()
        for path in modules
        if "pandas" in {name.split(".")[0] for name in imports_that_run(path)}
    }
    assert importing == {"frames.py"}


def imports_that_run(path: Path) -> set[str]:
    """The dotted names that a module imports outside of `if TYPE_CHECKING:`."""
    tree = ast.parse(path.read_text())
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return names_imported(tree)


@each_module
def test_only_the_command_line_exits(path: Path) -> None:
    exits = {"sys.exit", "os._exit"} & {
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }
    assert not exits or layer_of(path) in {"cli", "__main__"}


def test_the_core_includes_neither_python_nor_torch_nor_cuda() -> None:
    assert lines_with(r'#include\s*[<"](Python\.h|pybind11|torch|ATen|c10|cuda)', "core") == []


def test_the_cuda_side_does_not_know_python() -> None:
    assert (
        lines_with(r'#include\s*[<"](Python\.h|pybind11|torch/csrc/(python|utils/py))', "cuda")
        == []
    )


@pytest.mark.parametrize("folder", ["core", "torch"])
def test_cuda_arrives_as_files_and_not_by_ifdef(folder: str) -> None:
    assert lines_with(r"#\s*(if|elif).*CUDA", folder) == []
    assert lines_with(r'#include\s*[<"](c10/cuda|ATen/cuda|cuda)', folder) == []


def test_every_page_is_in_the_index_and_every_link_leads_somewhere() -> None:
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text()
    assert set(re.findall(r"\]\((\S+\.md)\)", index)) == {
        page.name for page in docs.glob("*.md") if page.name != "README.md"
    }
    for page in (*docs.glob("*.md"), ROOT / "README.md"):
        for link in re.findall(r"\]\(([^)#:\s]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_category_has_all_that_it_needs() -> None:
    """A row of the one table is not enough: a rule must choose it, and people read of it."""
    assert {*CATEGORIES} - {"unknown"} == {*evidence._LABEL_ORDER}
    page = (ROOT / "docs" / "categories.md").read_text()
    for category in CATEGORY_TABLE:
        assert f"| `{category.name}` | {category.meaning} |" in page
    assert len({category.color for category in CATEGORY_TABLE}) == len(CATEGORIES)
