"""Warnings come exactly as often as without a trace: the same ones, from the same lines.

Python counts what it has shown in a registry of each module, and looks at its filters' version. A
`catch_warnings` or `simplefilter` anywhere starts these counts anew, for the whole process.
"""

import ast
import contextlib
import functools
import io
import os
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pytracer
from pytracer.integrations.callback import Callback
from tests.tiers import first_of
from tests.transparency.processes import Running

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pytracer"


def warn_here(number: int) -> None:
    warnings.warn("of the program, in one line", UserWarning, stacklevel=1)
    warnings.warn(f"of the program, step {number}", DeprecationWarning, stacklevel=2)


def log_of_zero(_: int) -> None:
    np.log(np.zeros(1))


def inner_gradient(_: int) -> None:
    _ = (torch.ones(1, requires_grad=True) * 2).grad  # torch warns in C++, once per process or line


def dropped_channels(_: int) -> None:
    torch.nn.functional.dropout2d(torch.ones(2, 3, 4))  # torch warns in Python


def of_other_libraries(_: int) -> None:
    registry: dict[str, Any] = OTHERS.__dict__.setdefault("__warningregistry__", {})
    warnings.warn_explicit("of a library", FutureWarning, "library.py", 7, "library", registry)


OTHERS = types.ModuleType("library")
WARNS: list[Callable[[int], None]] = [
    warn_here,
    log_of_zero,
    inner_gradient,
    dropped_channels,
    of_other_libraries,
]


class Training:
    """Warns before, in and after each step, and outside of the block too."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def warn(self, number: int) -> None:
        for each in WARNS:
            try:
                each(number)
            except Warning as raised:  # noqa: PERF203
                SHOWN.append(("raised", type(raised).__name__, str(raised), "", 0))

    def step(self, number: int) -> None:
        self.warn(number)
        self.model(torch.ones(2, 4)).sum().backward()
        self.warn(number)
        self.optimizer.step()
        self.optimizer.zero_grad()


SHOWN: list[tuple[str, str, str, str, int]] = []


def plain(training: Training) -> None:
    for number in range(8):
        training.step(number)


def traced(**options: Any) -> Callable[[Training], None]:
    def run(training: Training) -> None:
        with pytracer.trace(table=False, **options):
            plain(training)

    return run


def several_blocks(training: Training) -> None:
    for number in range(8):
        with pytracer.trace(table=False):
            training.step(number)


def printed(training: Training) -> None:
    with contextlib.redirect_stderr(io.StringIO()), pytracer.trace():
        plain(training)


def decorated(training: Training) -> None:
    pytracer.trace(table=False)(plain)(training)


def scheduled(training: Training) -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
    with pytracer.trace(table=False, schedule=schedule):
        plain(training)


def with_an_error(training: Training) -> None:
    with contextlib.suppress(ZeroDivisionError), pytracer.trace(table=False):
        plain(training)
        raise ZeroDivisionError


def out_of_memory(training: Training) -> None:
    with (
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(RuntimeError),
        pytracer.trace(table=False),
    ):
        plain(training)
        torch.empty(1 << 50)


def called_back(training: Training) -> None:
    callback = Callback(steps=2, table=False)
    callback.begin(training.model)
    for number in range(8):
        training.step(number)
        callback.stepped()
    callback.end()


def looked_at(training: Training) -> None:
    with pytracer.trace(table=False) as t:
        for number in range(8):
            training.step(number)
            if number == 4:
                t.table()
    t.table()


def recorded_to_a_file(training: Training) -> None:
    with pytracer.trace(table=False, path="warnings.pytrace"):
        plain(training)


BLOCKS: dict[str, Callable[[Training], None]] = {
    "plain": plain,
    "default": traced(),
    "category": traced(detail="category"),
    "stacks": traced(stacks=True),
    "hooks": traced(saved_tensors="hooks"),
    "cost": traced(cost=True),
    "anonymous": traced(anonymous=True),
    "several": several_blocks,
    "printed": printed,
    "decorated": decorated,
    "schedule": scheduled,
    "error": with_an_error,
    "out of memory": out_of_memory,
    "callback": called_back,
    "looked at": looked_at,
    "file": recorded_to_a_file,
}
ACTIONS = ("default", "once", "always", "error", "module", "ignore")


def shown(block: str, action: Any, folder: str, to_stderr: bool) -> Any:
    """What is shown of the warnings: as `warnings.showwarning` gets it, or on stderr."""
    os.chdir(folder)
    warnings.resetwarnings()
    warnings.simplefilter(action)
    stderr = io.StringIO()

    def show(message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
        SHOWN.append(("shown", category.__name__, str(message), filename, line))

    if not to_stderr:
        warnings.showwarning = show
    filters, version = list(warnings.filters), version_of_filters()
    with contextlib.redirect_stderr(stderr):
        training = Training()
        training.warn(-1)
        BLOCKS[block](training)
        training.warn(99)
    assert list(warnings.filters) == filters
    assert version_of_filters() == version
    return stderr.getvalue() if to_stderr else SHOWN


def version_of_filters() -> Any:
    """Python raises it at each change, and then shows again what it has shown."""
    registry: dict[str, Any] = {}
    with contextlib.suppress(PendingDeprecationWarning):  # where warnings are errors
        warnings.warn_explicit("", PendingDeprecationWarning, "version.py", 1, "version", registry)
    return registry.get("version")


@functools.cache
def untraced(action: str, to_stderr: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), "plain", action, to_stderr)


def run(folder: Path, block: str, action: str, to_stderr: bool) -> Any:
    running = Running(folder, shown, block, action, str(folder), to_stderr, imports="torch._dynamo")
    with running:
        return running.finish()


@pytest.mark.parametrize("to_stderr", first_of([False, True]), ids=["shown", "stderr"])
@pytest.mark.parametrize("action", first_of(ACTIONS, 2))
@pytest.mark.parametrize("block", [name for name in BLOCKS if name != "plain"])
def test_each_warning_is_shown_as_often_as_without_a_trace(
    block: str, action: str, to_stderr: bool, tmp_path: Path
) -> None:
    if to_stderr and block in ("printed", "out of memory"):
        pytest.skip("its table goes to the same stderr")
    expected = untraced(action, to_stderr)
    if action != "ignore" and not (to_stderr and action == "error"):  # errors go to the program
        assert len(expected) > 5
    assert run(tmp_path, block, action, to_stderr) == expected


@pytest.mark.all_cases
@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_no_code_of_ours_changes_what_python_knows_of_warnings(path: Path) -> None:
    changes = {"catch_warnings", "simplefilter", "filterwarnings", "resetwarnings"}
    names = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.Name)
    }
    assert not changes & names
