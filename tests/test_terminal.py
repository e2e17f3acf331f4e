"""Every text fits the terminal that it is shown on, and has colours only where they are wanted."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

import pytracer
from programs import many_ranks
from pytracer.analysis.allocator import fragmentation, ledger
from pytracer.analysis.answers import diff
from pytracer.export import (
    advice_text,
    cost_text,
    diff as diff_text,
    fits_text,
    job_text,
    ledger_text,
    postmortem,
    table,
    terminal,
    words,
)
from pytracer.export.terminal import Terminal
from tests.trace_builder import TraceBuilder

pyte = pytest.importorskip("pyte", reason="needs pyte, which stands for a terminal")
ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
KEYS = ("category", "module", "op", "line", "phase")
WIDTHS = (60, 80, 120, 200)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[Terminal], str]]:
    """How each text is made for a terminal, of recordings on real cards."""
    made: dict[str, Callable[[Terminal], str]] = {}

    def add(name: str, render: Callable[..., str], *arguments: Any) -> None:
        made[name] = lambda where: render(*arguments, where)

    traces = {name: pytracer.load(DATA / f"{name}.pytrace") for name in ("plans-h200", "unet-h100")}
    for name, t in traces.items():
        add(f"summary of {name}", table.render, t.data)
        add(f"advice for {name}", advice_text.text, t)
        layout = fragmentation.layout(t.data, "end")
        add(f"ledger of {name}", ledger_text.render, ledger.ledger(t.data), layout)
        add(
            f"ledger of {name} at the peak", ledger_text.render, ledger.ledger(t.data, "peak"), None
        )
        for card in ("1500MiB", "80GiB"):
            found = t.fits(card)
            add(f"fits of {name} on {card}", fits_text.text_of, found)
            add(f"imagine {name} on {card}", _on_a_card, fits_text.on_a_card(found))
        add(f"plan of {name}", fits_text.text_of, t.checkpoint_plan("2GiB"))
    first, second = traces.values()
    names = "runs/monday/unet-with-attention.pytrace", "runs/friday/encoder-of-eight-layers.pytrace"
    add("diff", diff_text.render, diff.diff(first.data, second.data, KEYS), names)
    folder = tmp_path_factory.mktemp("job")
    many_ranks.write(folder, 4)
    add("ranks", job_text.render, pytracer.load(folder).comparison, ())
    add("out of memory", postmortem.render, out_of_memory())
    for by in ("class", "module", "op"):
        add(f"cost by {by}", _cost, costly().data, by)
    add("words", lambda where: words.legend(terminal=where, of_jobs=True))
    return made


def costly() -> Any:
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytracer.trace(model, optimizer, cost=True, table=False) as t:
        model(torch.ones(2, 8, 16)).sum().backward()
        optimizer.step()
    return t


def _cost(trace: pytracer.data.recorded.Trace, by: str, where: Terminal) -> str:
    return cost_text.render(trace, by, terminal=where)


def _on_a_card(text: str, where: Terminal) -> str:
    start = f"{'RTX4090':<10}{'24.0 GiB':>8}  "
    return "\n".join(where.wrap(text, start, " " * len(start)))


def out_of_memory() -> pytracer.data.recorded.Trace:
    b = TraceBuilder()
    with b.module("transformer.layers.11.attention"), b.op("aten::mm", grad=True):
        b.alloc(10**9)
        b.oom(10**12)
    return b.trace()


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal(texts: Any, width: int) -> None:
    for name, render in texts.items():
        for line in render(Terminal(width)).splitlines():
            assert len(line) <= width, (name, line)


@pytest.mark.parametrize("width", WIDTHS)
def test_colours_change_nothing_but_colours(texts: Any, width: int) -> None:
    for name, render in texts.items():
        coloured = render(Terminal(width, color=True))
        assert re.sub(r"\x1b\[\d+m", "", coloured) == render(Terminal(width)), name
        assert name == "words" or name.startswith("imagine") or "\x1b[" in coloured, name


def test_a_wider_terminal_is_used(texts: Any) -> None:
    for name in ("summary of unet-h100", "diff", "ranks"):
        longest = [max(map(len, texts[name](Terminal(width)).splitlines())) for width in (80, 120)]
        assert longest[0] < longest[1], name


# ---------------------------------------------------------------- which terminal it is


@contextmanager
def a_terminal() -> Iterator[TextIO]:
    primary, secondary = pty.openpty()
    try:
        with os.fdopen(secondary, "w") as stream:
            yield stream
    finally:
        os.close(primary)


@pytest.fixture
def no_wishes(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return monkeypatch


@pytest.mark.parametrize(
    ("wishes", "on_a_terminal", "in_a_file"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_colours_are_where_the_terminal_has_them_and_nobody_forbids_them(
    no_wishes: pytest.MonkeyPatch,
    wishes: dict[str, str],
    on_a_terminal: bool,
    in_a_file: bool,
    tmp_path: Path,
) -> None:
    for name, value in wishes.items():
        no_wishes.setenv(name, value)
    with a_terminal() as stream, (tmp_path / "file").open("w") as file:
        assert terminal.here(stream).color == on_a_terminal
        assert terminal.here(file).color == in_a_file


@pytest.mark.parametrize(
    ("columns", "width"), [(30, 40), (60, 60), (80, 80), (100, 100), (120, 120), (400, 120)]
)
def test_the_width_is_the_terminals_to_a_limit(
    no_wishes: pytest.MonkeyPatch, columns: int, width: int
) -> None:
    with a_terminal() as stream:
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(stream.fileno(), termios.TIOCSWINSZ, size)
        assert terminal.here(stream).width == width
    no_wishes.setenv("COLUMNS", str(columns))
    assert terminal.plain().width == width


def test_a_file_and_a_closed_stream_have_the_usual_width(
    no_wishes: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "file").open("w") as file:
        assert terminal.here(file) == Terminal(80, color=False)
    assert terminal.here(file) == Terminal(80, color=False)


# ---------------------------------------------------------------- what takes long

SLOW = """
import time
from pytracer.cli import output, progress

progress._PATIENCE_S = progress._EVERY_S = 0.02
with progress.doing("reading"):
    time.sleep(0.2)
    with progress.doing("planning: trying which modules to checkpoint"):
        time.sleep(0.2)
    output.tell("a note")
    time.sleep(0.2)
print("the answer")
"""


def test_a_long_work_says_what_it_does_and_leaves_no_trace() -> None:
    shown = _on_a_terminal(SLOW)
    for words_ in ("reading ... ", "planning: trying which modules to checkpoint ... "):
        assert f"pytracer: {words_}" in shown
    screen = pyte.Screen(80, 24)
    pyte.Stream(screen).feed(shown)
    assert [line.rstrip() for line in screen.display if line.strip()] == ["a note", "the answer"]


def test_a_long_work_shows_how_much_is_done() -> None:
    tells = "time.sleep(0.2)\n    share_done.tell(0.45)\n    time.sleep(0.2)"
    code = SLOW.replace("import time\n", "import time\nfrom pytracer.basics import share_done\n")
    shown = _on_a_terminal(code.replace("time.sleep(0.2)", tells, 1))
    assert "pytracer: reading ... [#########-----------] 45% " in shown
    assert "checkpoint ... [" not in shown  # the next work has told nothing yet


def test_a_short_work_says_nothing() -> None:
    assert _on_a_terminal(SLOW.replace("0.02", "9")).split("\r\n")[:2] == ["a note", "the answer"]


def test_a_file_gets_no_progress() -> None:
    done = subprocess.run([sys.executable, "-c", SLOW], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("the answer\n", "a note\n")


def _on_a_terminal(code: str) -> str:
    """What the code writes to a terminal."""
    primary, secondary = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=secondary, stderr=secondary, cwd=ROOT
    ) as process:
        os.close(secondary)
        parts = []
        with suppress(OSError):  # Linux's way to say that the other end is closed
            while part := os.read(primary, 4096):
                parts.append(part)
    os.close(primary)
    assert process.returncode == 0
    return b"".join(parts).decode()
