"""Data flows one way: capture -> trace -> analysis -> export. These tests keep it so."""

import ast
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytracer.analysis.facts import evidence
from pytracer.basics import private_torch
from pytracer.data.schema import CATEGORIES, CATEGORY_TABLE

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pytracer"
CSRC = ROOT / "csrc"

# What each room may import from pytracer, inside functions too. Anything not listed is forbidden.
TRACE = {"basics", "data", "errors"}
FACTS = {*TRACE, "analysis.facts"}
ALLOCATOR = {*FACTS, "analysis.allocator"}
ANSWERS = {*ALLOCATOR, "analysis.answers"}
FORECASTS = {*ANSWERS, "analysis.forecasts"}
MAY_IMPORT = {
    "errors": set(),
    "basics": {"errors"},
    "data": {"basics", "errors", "_C", "_core"},
    "capture": TRACE,
    # A private view of the files, for a program that is to change none.
    "sandbox": {"errors"},
    "snapshot": TRACE,
    "cost": TRACE,
    # What happened; where it lay; what people ask; what would be.
    "analysis.facts": TRACE,
    "analysis.allocator": FACTS,
    "analysis.answers": ALLOCATOR,
    "analysis.forecasts": {*ANSWERS, "cost"},
    # Many ranks as one job: a digest of each, and what their comparison shows.
    "ranks": {*ANSWERS, "snapshot"},
    "export": {*FORECASTS, "cost", "ranks", "sandbox"},
    # The public face: what can be asked, and where capture and analysis meet.
    "reading": {*FORECASTS, "cost", "export", "ranks", "sandbox", "snapshot"},
    "recording": {*FACTS, "capture", "cost", "export", "reading"},
    "imagined": {*FORECASTS, "capture", "cost", "reading", "recording", "sandbox"},
    "integrations": {*TRACE, "capture", "export", "imagined", "reading", "recording"},
    # Nothing but the command line knows it.
    "lab": {*ANSWERS, "capture", "cost", "export", "reading", "recording"},
    "cli": {*FORECASTS, "capture", "cost", "export", "imagined", "lab", "ranks", "reading"}
    | {"recording", "sandbox"},
    "__main__": {"cli"},
    "__init__": {"basics", "imagined", "integrations", "reading", "recording"},
}
MOST_ROOMS, MOST_ARROWS = 24, 120
# Rooms in which every file may import torch, and the files that may in the others.
KNOWS_TORCH = {"capture", "imagined"}
MAY_IMPORT_TORCH = {
    "basics/private_torch.py",
    *(f"cli/{name}.py" for name in ("demo", "measure", "show")),
    *(f"cost/{name}.py" for name in ("classes", "flops", "measure", "peaks")),
    *(f"recording/{name}.py" for name in ("always", "api", "applied", "offload")),
    *(f"recording/{name}.py" for name in ("traced_program", "trial")),
    *(f"lab/gemm/{name}.py" for name in ("device", "kernels", "operands", "sweep", "timer")),
}


modules = sorted(PACKAGE.rglob("*.py"))
pytestmark = pytest.mark.all_cases
each_module = pytest.mark.parametrize("path", modules, ids=lambda p: str(p.relative_to(PACKAGE)))


def room(parts: Sequence[str]) -> str:
    """`analysis` has rooms of its own."""
    depth = 2 if parts[0] == "analysis" and len(parts) > 1 else 1
    return ".".join(parts[:depth]).removesuffix(".py")


def layer_of(path: Path) -> str:
    return room(path.relative_to(PACKAGE).parts)


def layers_of_imports(path: Path) -> set[str]:
    return {room(name.split(".")[1:]) for name in imports_of(path) if name.startswith("pytracer.")}


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
    own, layers = layer_of(path), layers_of_imports(path)
    if path.parent == PACKAGE / "analysis":
        assert not layers, "analysis is rooms, and nothing stands between them"
        return
    assert own in MAY_IMPORT, f"say in MAY_IMPORT what {own} may import"
    assert layers - {own} <= MAY_IMPORT[own]


def test_the_rooms_have_an_order() -> None:
    """No room imports, by whatever detour, one that imports it."""
    assert circle_of({room: set(others) for room, others in MAY_IMPORT.items()}) == []


def test_no_file_imports_by_a_detour_one_that_imports_it() -> None:
    """`pytracer/__init__.py` gives the public names, and imports each when somebody asks for it."""
    names = {name_of(path): path for path in modules if path != PACKAGE / "__init__.py"}
    imports = {
        own: {known(each, names) for each in imports_of(path)} - {own, ""}
        for own, path in names.items()
    }
    assert circle_of(imports) == []


def test_the_house_stays_small() -> None:
    """Rooms and arrows that are there, whatever would be allowed."""
    arrows = {(layer_of(path), other) for path in modules for other in layers_of_imports(path)}
    arrows = {(own, other) for own, other in arrows if own != other and other in MAY_IMPORT}
    assert len({layer_of(path) for path in modules} - {"analysis"}) <= MOST_ROOMS
    assert len(arrows) <= MOST_ARROWS


def name_of(path: Path) -> str:
    """The dotted name of a module."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def known(imported: str, names: dict[str, Path]) -> str:
    """The module that a dotted name is in; "" if none is ours."""
    while imported and imported not in names:
        imported = imported.rpartition(".")[0]
    return imported


def circle_of(imports: dict[str, set[str]]) -> list[str]:
    """What imports each other in circles, and what imports these."""
    left = dict(imports)
    while lowest := {each for each, others in left.items() if not others & left.keys()}:
        left = {each: others for each, others in left.items() if each not in lowest}
    return sorted(left)


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
    if path == PACKAGE / "basics" / "private_torch.py":
        return
    members = {member.place.replace(":", ".") for member in private_torch.MEMBERS}
    assert private_names_of_torch(ast.parse(path.read_text())) <= members


def imports_package(path: Path, package: str) -> bool:
    return any(name.split(".")[0] == package for name in imports_of(path))


@each_module
def test_only_the_capture_side_knows_torch(path: Path) -> None:
    name = path.relative_to(PACKAGE).as_posix()
    knows = layer_of(path) in KNOWS_TORCH or name.startswith("lab/claims/")
    allowed = knows or name in MAY_IMPORT_TORCH
    assert allowed or not imports_package(path, "torch")


def test_one_module_imports_pandas() -> None:
    """The others name its types only, where nothing runs."""
    importing = {
        path.relative_to(PACKAGE).as_posix()
        for path in modules
        if "pandas" in {name.split(".")[0] for name in imports_that_run(path)}
    }
    assert importing == {"data/frames.py"}


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
