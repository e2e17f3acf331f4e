"""What a program could let go of as a backward pass begins, held against what `del` really does."""

import contextlib
import io
import random
import runpy
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from pytracer import trace
from pytracer.capture.looking import INSTALLED, packages_on
from pytracer.capture.spare import read_later, spare_tensors
from tests.tiers import by_tier

NAMES = "abcd"


def generated(seed: int) -> str:
    """A function of four variables with branches, loops and handlers, and one call of `probe`."""
    chance = random.Random(seed)

    def value() -> str:
        return f"{chance.choice(NAMES)} + {chance.randrange(9)}"

    def statement(depth: int) -> Iterator[str]:
        kind = chance.randrange(10 if depth else 4)
        name = chance.choice(NAMES)
        if kind in (0, 1):
            yield f"{name} = {value()}"
        elif kind == 2:
            yield f"print({name})"
        elif kind == 3:
            yield f"{name} += {chance.randrange(9)}"
        elif kind in (4, 5):
            yield f"if ({value()}) % 2:"
            yield from block(depth - 1)
            if chance.random() < 0.5:
                yield "else:"
                yield from block(depth - 1)
        elif kind == 6:
            yield f"for {name} in range({chance.randrange(4)}):"
            yield from block(depth - 1, in_loop=True)
        elif kind == 7:
            yield "try:"
            yield from block(depth - 1)
            yield f"    if ({value()}) % 3 == 0: raise KeyError"
            yield "except KeyError:"
            yield from block(depth - 1)
        elif kind == 8:
            yield "try:"
            yield from block(depth - 1)
            yield "finally:"
            yield f"    print({chance.choice(NAMES)})"
        elif chance.random() < 0.1:
            yield f"print((lambda: {name})())"
        else:
            yield f"print([{name} for _ in range(2)])"

    def block(depth: int, *, in_loop: bool = False) -> Iterator[str]:
        for _ in range(chance.randrange(1, 4)):
            yield from (f"    {line}" for line in statement(depth))
        if in_loop and chance.random() < 0.3:
            yield f"    if ({value()}) % 2: {chance.choice(('break', 'continue'))}"

    lines = [*block(3), *block(3), *block(3)]
    at = chance.randrange(len(lines) + 1)
    while at < len(lines) and lines[at].lstrip().startswith(("else", "except", "finally")):
        at += 1
    after = lines[at - 1] if at else "    "
    indent = after[: len(after) - len(after.lstrip())] + "    " * after.endswith(":")
    lines.insert(at, f"{indent}probe()")
    return "\n".join(["def program(probe, a, b, c, d):", *lines])


def outcome(source: str, probe: Any) -> str:
    """What the program prints, and how it ends."""
    said, names = io.StringIO(), dict[str, Any]()
    exec(compile(source, "generated", "exec"), names)
    with contextlib.redirect_stdout(said):
        try:
            names["program"](probe, 1, 2, 3, 4)
        except Exception as error:
            return f"{said.getvalue()}{type(error).__name__}"
    return said.getvalue()


def test_no_program_misses_a_variable_that_is_said_to_be_spare() -> None:
    """The oracle is Python: with each spare variable deleted, the program does the same."""
    spare = [check(seed) for seed in range(by_tier(300, 2000, 20_000))]
    assert sum(map(bool, spare)) > len(spare) // 10


def check(seed: int) -> set[str]:
    source, spare = generated(seed), set[str]()

    def look() -> None:
        frame = sys._getframe(1)
        spare.update(set(NAMES) - read_later(frame.f_code, frame.f_lasti))

    plain = outcome(source, look)
    deleted = source
    for line in source.splitlines():
        if line.lstrip() == "probe()":
            indent = line[: -len("probe()")]
            without = [f"{indent}try: del {name}\n{indent}except NameError: pass" for name in spare]
            deleted = source.replace(line, "\n".join([*without, line]))
    assert outcome(deleted, lambda: None) == plain, f"seed {seed}: {sorted(spare)}\n{source}"
    return spare


def found_by(text: str, folder: Path, **given: Any) -> dict[str, int]:
    """The spare variables where a program of this text calls `look`, and their numbers of tensors."""
    found = dict[str, int]()

    def look() -> None:
        frame: FrameType | None = sys._getframe(1)
        found.update((name, len(tensors)) for name, tensors in spare_tensors(frame))

    file = folder / "program.py"
    file.write_text(textwrap.dedent(text))
    names = {"look": look, "torch": torch, **given}
    exec(compile(file.read_text(), str(file), "exec"), names)
    return found


ONLY_BEFORE = sys.version_info >= (3, 11)  # bytecode says of a function that it is called


@pytest.mark.parametrize(
    ("text", "is_spare"),
    [
        ("exec('y = 2')\nx = torch.ones(9)\nlook()", ONLY_BEFORE),
        ("k = [*globals()]\nx = torch.ones(9)\nlook()", ONLY_BEFORE),
        ("k = {n: globals()[n] for n in ['y']}\nx = torch.ones(9)\nlook()", ONLY_BEFORE),
        (
            "exec('y = 2')\ndef f(m): m.eval()\nx = torch.ones(9)\nlook()\nf(torch.nn.Tanh())",
            ONLY_BEFORE,
        ),
        ("exec('y = 2')\nfor _ in '12':\n    x = torch.ones(9)\n    look()", ONLY_BEFORE),
        ("exec('def f(): return y')\nx = torch.ones(9)\nlook()\nf()", ONLY_BEFORE),
        ("def f():\n    eval('2')\n    x = torch.ones(9)\n    look()\nf()", ONLY_BEFORE),
        (
            "def f():\n    for _ in '12':\n        eval('y')\n        x = torch.ones(9)\n        look()\nf()",
            False,
        ),
        ("for _ in '12':\n    exec('y = 2')\n    x = torch.ones(9)\n    look()", False),
        ("exec('def f(): return x')\nx = torch.ones(9)\nlook()\nf()", False),
        ("exec('def f(): return [x for _ in y]')\nx = torch.ones(9)\nlook()\nf()", False),
        ("exec('class C:\\n  def f(self): return x')\nx = torch.ones(9)\nlook()\nC().f()", False),
        ("exec('k = [lambda: x]')\nx = torch.ones(9)\nlook()\nk[0]()", False),
        ("exec('def f(): return globals()')\nx = torch.ones(9)\nlook()\nf()['x']", False),
        ("exec('e = eval')\nx = torch.ones(9)\nlook()\ne('x')", False),
        ("e = [eval]\nx = torch.ones(9)\nlook()\ne[0]('x')", False),
        ("g = globals()\nx = torch.ones(9)\nlook()\ng['x']", False),
        ("g = [globals()]\nx = torch.ones(9)\nlook()\ng[0]['x']", False),
        ("g = [globals() for _ in '1']\nx = torch.ones(9)\nlook()\ng[0]['x']", False),
        ("def f(g):\n    look()\n    g['x']\nx = torch.ones(9)\nf(globals())", False),
        ("x = torch.ones(9)\nk = [(globals()['x'], look()) for _ in '12']", False),
        ("def f(g=globals()):\n    look()\n    g['x']\nx = torch.ones(9)\nf()", False),
        ("exec('y = 2')\nx = torch.ones(9)\nlook()\nexec('print(x)')", False),
        ("import builtins as b\nx = torch.ones(9)\nlook()\nb.eval('x')", False),
    ],
)
def test_a_variable_is_spare_after_the_last_exec(text: str, is_spare: bool, tmp_path: Path) -> None:
    """The text runs to its end: who reads the variable by name does it without an error."""
    found, file = dict[str, int](), tmp_path / "program.py"

    def look() -> None:
        found.update((name, len(tensors)) for name, tensors in spare_tensors(sys._getframe(1)))

    file.write_text(text)
    runpy.run_path(str(file), {"look": look, "torch": torch, "y": "12"})
    assert found == ({"x": 1} if is_spare else {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = torch.ones(9)\nlook()", {"x": 1}),
        ("x = torch.ones(9)\nlook()\nprint(x)", {}),
        ("x = torch.ones(9)\nlook()\nx = 1\nprint(x)", {"x": 1}),
        ("def f():\n    x = torch.ones(9)\n    look()\nf()", {"x": 1}),
        ("def f():\n    x = [torch.ones(9), (torch.ones(9),)]\n    look()\nf()", {"x": 2}),
        ("def f():\n    x = {'a': torch.ones(9)}\n    look()\nf()", {"x": 1}),
        ("def f():\n    for _ in '12':\n        x = torch.ones(9)\n        look()\nf()", {"x": 1}),
        (
            "def f(x=None):\n    for _ in '12':\n        print(x)\n        x = 1\n        look()\nf()",
            {},
        ),
        ("def f(x):\n    look()\n    return x\nf(torch.ones(9))", {}),
        ("def f(x):\n    look()\nf(torch.ones(9))", {"x": 1}),
        ("def f(x):\n    look()\ny = torch.ones(9)\nf(y)\nprint(y)", {}),
        ("def f():\n    x = torch.ones(9)\n    y = x\n    look()\nf()", {}),
        ("def f():\n    x = torch.ones(9)\n    y = x[:3]\n    look()\nf()", {}),
        ("y = torch.ones(9)[:3]\nlook()", {"y": 1}),
        ("x = torch.ones(9)\ny = x[:3]\nz = x[3:]\ndel x\nlook()\nz", {}),
        (
            "m = torch.nn.Linear(2, 3)\nx = m(torch.ones(2, 2, 2))\ny = x.tanh().exp()\nlook()\nm, y",
            {"x": 1},
        ),
        ("def f():\n    x = torch.ones(9)\n    k = lambda: x\n    look()\n    return k\nf()", {}),
        ("def f():\n    x = torch.ones(9)\n    look()\n    return locals()\nf()", {}),
        (
            "def f(m):\n    x = torch.ones(9)\n    look()\n    m.eval()\nf(torch.nn.Tanh())",
            {"x": 1},
        ),
        ("def f():\n    x = torch.ones(9)\n    look()\n    print(eval('x'))\nf()", {}),
        ("x = torch.ones(9)\ndef f():\n    print(x)\nlook()\nf()", {}),
        ("def f():\n    print(globals()['x'])\nx = torch.ones(9)\nlook()\nf()", {}),
        ("class C: pass\nc = C()\nc.x = torch.ones(9)\nlook()", {}),
        ("m = torch.nn.Linear(2, 2)\nm.x = x = torch.ones(9)\nlook()\nm", {}),
        ("w = torch.ones(9, requires_grad=True)\nx = w * 2\ny = x.tanh()\nlook()\ny", {"x": 1}),
        ("w = torch.ones(9, requires_grad=True)\nx = w * 2\ny = x.pow(2)\nlook()\ny", {}),
        ("w = torch.ones(9, requires_grad=True)\nx = w.tanh()\ny = x * 2\nlook()\ny", {}),
    ],
)
def test_a_variable_is_spare_only_if_nothing_else_needs_its_tensor(
    text: str, expected: dict[str, int], tmp_path: Path
) -> None:
    assert found_by(text, tmp_path) == expected


def test_packages_of_every_environment_are_no_code_of_the_program() -> None:
    """An environment that sees another one's packages has two such folders on its path."""
    path = ["", "/a/lib/python3.11/site-packages", "/usr/lib/python3/dist-packages", "/home/me", 3]
    assert [*packages_on(path)] == path[1:3]
    assert {f"{folder}/" for folder in packages_on(sys.path)} <= {*INSTALLED}


def test_a_variable_of_a_notebook_is_not_spare() -> None:
    """The next cell may read it: no file says what comes."""
    found = list[str]()

    def look() -> None:
        found.extend(name for name, _ in spare_tensors(sys._getframe(1)))

    exec(compile("x = torch.ones(9)\nlook()", "<cell>", "exec"), {"look": look, "torch": torch})
    assert found == []


def test_to_delete_what_a_finding_names_lowers_the_peak_as_it_says() -> None:
    """Advice that is followed: the same program with and without `del`."""

    def run(*, follow: bool) -> trace:
        torch.manual_seed(0)
        model = torch.nn.Linear(256, 256)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with trace(model, optimizer, devices="cpu", table=False) as t:
            for _ in range(3):
                shown = model(torch.randn(2048, 256)).repeat(1, 4)
                loss = shown.sum()
                if follow:
                    del shown
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return t

    told, followed = run(follow=False), run(follow=True)
    (row,) = told.findings().to_dict("records")
    assert row["change"] == "del shown before the backward"
    assert row["at_peak"] == told.peak.bytes - followed.peak.bytes > 0
