"""README and docs: short, up to date, and every command and name in them exists."""

import ast
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytracer import cli, trace
from pytracer.basics.version import OLDEST_TORCH, TESTED_TORCH
from pytracer.cli.command import without_program
from pytracer.export import words
from pytracer.integrations.callback import Callback
from pytracer.reading.views import Views

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
START = ROOT / "docs" / "start.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TYPED = re.compile(r"(?:^|\$ |-m )(pytracer .*)")


def section(title: str, page: Path = README) -> str:
    """A section of a page, without its heading."""
    return page.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(text: str, *languages: str) -> Iterator[str]:
    """The fenced blocks of these languages."""
    return (body for language, body in _FENCE.findall(text) if language in languages)


def commands(text: str) -> Iterator[str]:
    """The commands of ours that a page shows for typing, in blocks and in the README's table."""
    table = text.partition("| question | command |")[2].partition("\n\n")[0]
    for body in (*blocks(text, "", "sh", "bash"), *re.findall(r"`(.*?)`", table)):
        for line in body.replace("\\\n", " ").splitlines():
            if typed := _TYPED.match(line) or re.search(r"-m (pytracer .*)", line):
                yield re.split(r"\s#|\s\||\s>|\s{3,}|;", typed[1])[0].strip()


# ---------------------------------------------------------------- the README


def test_the_readme_is_read_in_one_sitting() -> None:
    assert len(README.read_text().splitlines()) <= 150
    what_it_is = README.read_text().partition("\n## ")[0]
    assert len(what_it_is.splitlines()) <= 15


def test_the_readme_names_the_supported_versions() -> None:
    """Its line of facts, instead of pictures that a server makes."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read pyproject.toml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    facts = next(line for line in README.read_text().splitlines() if " · " in line)
    assert f"Python {project['requires-python'].removeprefix('>=')} to " in facts
    assert f"torch {OLDEST_TORCH} to {TESTED_TORCH[-1]}, " in facts
    assert facts.endswith(project["license"])


def test_figures_on_pages_are_those_of_the_results() -> None:
    """No figure is written by hand."""
    tool = ROOT / "benchmarks" / "readme_tables.py"
    done = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_explains_its_screen_line_by_line() -> None:
    text = section("The screen")
    screen = next(blocks(text, ""))
    labels = {line[:10].strip() for line in screen.splitlines() if re.match(r"\w", line)}
    explained = text.partition("| line | meaning |")[2]
    for label in labels:
        assert f"`{label.partition(' ')[0]}" in explained or f"`{label}`" in explained, label
    shown = set(re.findall(r"^  (\w+) ", screen, re.MULTILINE))
    assert {"weights", "gradients", "optimizer_state", "activations", "temporaries"} < shown
    assert shown <= set(words.CATEGORIES)


@pytest.mark.parametrize("walk", ["My program is out of memory", "My program leaks"])
def test_a_walk_is_five_commands_that_are_numbered(walk: str) -> None:
    lines = next(blocks(section(walk, START), "")).splitlines()
    assert [line.partition("#")[2].split()[0] for line in lines] == list("12345")
    assert all(line.startswith("pytracer ") for line in lines)


def test_a_user_finds_the_names_of_what_they_use_in_the_readme() -> None:
    text = README.read_text()
    for name in (
        "Hugging Face",
        "Lightning",
        "W&B",
        "TensorBoard",
        "TrainingArguments",
        "MemoryTrace",
        "%load_ext pytracer",
        "%%memtrace",
        "`memtrace`",
        "PYTRACER=1",
        "pytracer.human()",
        "memory_budget",
        "images/report.png",
    ):
        assert name in text, name


def test_the_listed_options_are_those_of_trace() -> None:
    table = section("In Python", START).partition("| option | meaning |")[2].partition("\n\n")[0]
    options = re.findall(r"^\| `(\w+)=", table, re.MULTILINE)
    assert len(options) >= 6
    assert set(options) <= set(inspect.signature(trace).parameters)


def test_the_options_of_a_callback_are_those_of_its_page() -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text()
    table = page.partition("| option | default | what it does |")[2].partition("\n\n")[0]
    shown = dict(re.findall(r"^\| `(\w+)` \| `?(\w+)`? \|", table, re.MULTILINE))
    own = inspect.signature(Callback.__init__).parameters
    defaults = {
        name: "none" if each.default is None else str(each.default)
        for name, each in own.items()
        if each.kind is each.KEYWORD_ONLY and name != "report"
    }
    assert shown == defaults


# ---------------------------------------------------------------- all pages


def test_commands_are_seen() -> None:
    assert len(list(commands(README.read_text()))) >= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_on_a_page_is_one_that_the_command_line_takes(page: Path) -> None:
    parser, _ = cli._parsers()
    for command in commands(page.read_text()):
        arguments, program = without_program(shlex.split(command)[1:], cli._parsers()[1].choices)
        options, unknown = parser.parse_known_args(arguments)
        assert unknown == [], command
        assert options.command != "run" or program, command


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_view_on_a_page_has_that_name_and_these_arguments(page: Path) -> None:
    for code in blocks(page.read_text(), "python"):
        for call in ast.walk(_parsed(code)):
            if not isinstance(call, ast.Call):
                continue
            function = call.func
            if isinstance(function, ast.Attribute) and ast.unparse(function.value) == "t":
                view = getattr(trace, function.attr, None)
                assert view is not None, f"{page.name}: t.{function.attr}"
                given = [*call.args, *(keyword.arg for keyword in call.keywords)]
                names = {keyword.arg: None for keyword in call.keywords if keyword.arg}
                assert None in given or inspect.signature(view).bind(t, *call.args, **names)
            elif isinstance(function, ast.Name) and function.id == "trace":
                names = {keyword.arg for keyword in call.keywords if keyword.arg}
                assert names <= set(inspect.signature(trace).parameters), page.name


t = object()


def _parsed(code: str) -> ast.Module:
    try:
        return ast.parse(code)
    except SyntaxError:  # a magic of a notebook, or a part of a function
        return ast.Module([], [])


def test_every_page_opens_with_the_question_that_the_index_has() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in PAGES[1:]:
        if page.name == "README.md":
            continue
        title, _, rest = page.read_text().partition("\n")
        opening = title if title.endswith("?") else rest.strip().split("\n\n")[0]
        assert opening.endswith("?"), f"{page.name} opens with {opening[:60]!r}"
        row = next(line for line in index.splitlines() if f"({page.name})" in line)
        if page.name not in ("gallery.md", "frameworks.md"):  # the index asks as people do
            assert opening.removeprefix("# ") in row, page.name


def test_a_view_explains_its_keys() -> None:
    """`t.by?` in a notebook."""
    text = inspect.getdoc(Views.by) or ""
    for key in ("module", "op", "line", "phase", "category", "role"):
        assert f'"{key}"' in text
