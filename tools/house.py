"""Measures how the package is laid out: rooms, arrows, functions, and the way to the table.

    python tools/house.py [--way] RUN.pytrace [CHECKOUT ...]

For each checkout (default: this one) it prints

- files and lines of each room. A folder is a room; `analysis` has rooms of its own. All modules that
  stand beside the folders are one room, the ground floor, except those that people call;
- the arrows inside `analysis`: pairs of modules of which one imports the other;
- the number of functions, their median length, the longest ones, and how many exceed 50 lines;
- the way from `load` to the printed table, as a reader follows it through the source. A function is
  read once, where it is first called; nobody follows calls of a function that was read before. A stay
  is a stretch of reading in one room, and a return is a stay in a room that was left before. Words
  and tables are looked up on the ground floor, which is no stay; nor is the wrapper of
  `once_per_trace`. `analysis` counts as one room and then as several, if it has them.
"""

import argparse
import ast
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_GROUND = "ground floor"
_FACES = {"__init__", "__main__", "api", "demo", "doctor", "job", "reading", "recording", "runner"}


def room(parts: tuple[str, ...]) -> str:
    """The room of a module, from the parts of its path inside the package."""
    if len(parts) == 1:
        name = parts[0].removesuffix(".py")
        return name if name in _FACES else _GROUND
    return "/".join(parts[:2]) if parts[0] == "analysis" and len(parts) > 2 else parts[0]


def modules(package: Path) -> dict[str, Path]:
    """The modules by their dotted names."""
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): path
        for path in sorted(package.rglob("*.py"))
        if path.name != "__init__.py"
    }


def arrows(package: Path) -> set[tuple[str, str]]:
    """The pairs of modules inside `analysis` of which the first imports the second."""
    inside = {n: p for n, p in modules(package).items() if n.startswith("pytracer.analysis.")}
    return {
        (name, target)
        for name, path in inside.items()
        for imported in _imports(path)
        for target in inside
        if imported == target or imported.startswith(f"{target}.")
    }


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def functions(package: Path) -> list[tuple[int, str]]:
    """The length and the place of each function, the longest first."""
    rows = []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                rows.append((length, f"{path.relative_to(package)}:{node.name}"))
    return sorted(rows, reverse=True)


def way(package: Path, file: str) -> list[str]:
    """The rooms in which a reader stays between `load` and the table. Run it in a new process."""
    sys.path.insert(0, str(package.parent))
    from pytracer import load

    stays: list[str] = []
    read: set[CodeType] = set()
    followed = [True]

    def follow(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event not in ("call", "return") or package not in path.parents:
            return
        if code.co_name == "kept" or code.co_name.startswith("<"):
            return
        if event == "return":
            followed.pop()
            return
        followed.append(followed[-1] and code not in read)
        if followed[-1]:
            read.add(code)
            here = room(path.relative_to(package).parts)
            if here != _GROUND and stays[-1:] != [here]:
                stays.append(here)

    str(load(file))  # so that imports are over
    sys.setprofile(follow)
    str(load(file))
    sys.setprofile(None)
    return stays


def report(package: Path, stays: list[str]) -> Iterator[str]:
    """The lines of one checkout."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        here = room(path.relative_to(package).parts)
        files[here] += 1
        lines[here] += len(path.read_text().splitlines())
    yield f"{package.parent}: {files.total()} files, {lines.total():,} lines"
    yield from (f"  {name:22}{files[name]:4}{lines[name]:8,}" for name in sorted(files))
    inside = arrows(package)
    crossing = {(a.split(".")[2], b.split(".")[2]) for a, b in inside if a.count(".") > 2}
    directions = sum(a != b for a, b in crossing)
    yield f"  arrows inside analysis: {len(inside)}, in {directions} directions between its rooms"
    lengths = functions(package)
    median = statistics.median(length for length, _ in lengths)
    long = sum(length > 50 for length, _ in lengths)
    yield f"  functions: {len(lengths)}, median {median:.0f} lines, {long} over 50; the longest:"
    yield from (f"    {length} {place}" for length, place in lengths[:3])
    whole = [name.partition("/")[0] for name in stays]
    for path, what in ((whole, "analysis as one room"), (stays, "with its rooms")):
        seen = [name for i, name in enumerate(path) if path[i - 1 : i] != [name]]
        returns = len(seen) - len(set(seen))
        yield f"  from load to the table, {what}: {len(seen)} stays, {returns} returns"
        yield f"    {' > '.join(seen)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", help="a trace that all checkouts read")
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT")
    parser.add_argument("--way", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for checkout in options.checkouts or [Path(__file__).parents[1]]:
        package = checkout.resolve() / "pytracer"
        if options.way:
            print("\n".join(way(package, options.file)))
            continue
        command = [sys.executable, __file__, "--way", options.file, str(checkout)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        print("\n".join(report(package, text.split("\n")[:-1])))


if __name__ == "__main__":
    main()
