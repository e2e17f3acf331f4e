"""Data flows one way: capture -> trace -> analysis -> export. These tests keep it so."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pytracer"
CSRC = ROOT / "csrc"

# What each module or subpackage may import from pytracer, inside functions too. Anything not
# listed is forbidden, and a new module is a new line here.
WORDS = {"errors", "files", "health", "schema", "version"}
MAY_IMPORT = {
    "driver": set(),
    "environment": set(),
    "errors": set(),
    "files": {"errors"},
    "schema": set(),
    "version": set(),
    "health": {"schema"},
    "ranges": set(),
    "_native": {"_C", "_core", "errors", "version"},
    "trace": {*WORDS, "_native"},
    "anonymous": {"_native", "trace"},
    "snapshot": {*WORDS, "_native", "ranges", "trace"},
    "capture": {*WORDS, "_native", "anonymous", "driver", "environment", "trace"},
    "analysis": {*WORDS, "_native", "environment", "ranges", "trace"},
    "cost": {*WORDS, "_native", "analysis", "trace"},
    "gemm": {*WORDS, "_native"},
    "export": {*WORDS, "_native", "analysis", "ranges", "trace"},
    "verify": {*WORDS, "analysis", "trace"},
    # The public face: what can be asked, and where capture and analysis meet.
    "reading": {*WORDS, "analysis", "anonymous", "export", "snapshot", "trace", "verify"},
    "api": {*WORDS, "capture", "cost", "environment", "export", "reading", "trace"},
    "imagined": {*WORDS, "_native", "analysis", "capture", "reading", "runner", "trace"},
    "claims": {*WORDS, "_native", "analysis", "api", "capture", "cost", "driver", "export"}
    | {"gemm", "reading", "trace"},
    "integrations": {*WORDS, "api", "capture", "environment", "export", "reading", "recording"}
    | {"trace"},
    "demo": {*WORDS, "api"},
    "offload": set(),
    "recording": {"errors"},
    "runner": {*WORDS, "analysis", "api", "capture", "environment", "export", "offload"}
    | {"recording"},
    "doctor": {*WORDS, "_native", "analysis", "capture", "trace"},
    "cli": {*WORDS, "_native", "analysis", "api", "capture", "claims", "cost"}
    | {"demo", "doctor", "driver", "environment", "export", "gemm", "imagined", "integrations"}
    | {"reading", "runner", "trace", "verify"},
    "__main__": {"cli"},
    "__init__": {"api", "errors", "imagined", "integrations", "reading", "version"},
}
MEASURES = {"capture", "claims", "cost", "gemm", "imagined"}
MAY_IMPORT_TORCH = {"_native", "api", "cli", "demo", "doctor", "integrations", "offload", "runner"}
MAY_IMPORT_TORCH |= MEASURES


modules = sorted(PACKAGE.rglob("*.py"))
each_module = pytest.mark.parametrize("path", modules, ids=lambda p: str(p.relative_to(PACKAGE)))


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Every dotted name a module imports, including those imported inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


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
    layers = {name.split(".")[1] for name in imports_of(path) if name.startswith("pytracer.")}
    assert own in MAY_IMPORT, f"say in MAY_IMPORT what {own} may import"
    assert layers - {own} <= MAY_IMPORT[own]


def test_the_layers_have_an_order() -> None:
    """No layer imports, by whatever detour, one that imports it."""
    left = {layer: set(imports) & MAY_IMPORT.keys() for layer, imports in MAY_IMPORT.items()}
    while left:
        lowest = {layer for layer, imports in left.items() if not imports & left.keys()}
        assert lowest, f"a circle among {sorted(left)}"
        left = {layer: imports for layer, imports in left.items() if layer not in lowest}


@each_module
def test_only_the_capture_side_knows_torch(path: Path) -> None:
    uses_torch = any(name.split(".")[0] == "torch" for name in imports_of(path))
    assert not uses_torch or layer_of(path) in MAY_IMPORT_TORCH


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
