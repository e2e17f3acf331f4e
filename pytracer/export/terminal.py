"""Where a text is shown: the one place that knows its width and its colours."""

import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TextIO, TypeAlias

MARGIN = 10  # width of "modules   ", "mistake   ", ...
LEAST, USUAL, MOST = 40, 80, 120  # columns; longer lines are hard to read

BOLD, DIM, RED, GREEN, YELLOW = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[33m"
_RESET = "\x1b[0m"

# Titles with a colour of their own. All others are dim, so that the text beside them stands out.
_OF_TITLES = {
    "mistake": RED,
    "free": GREEN,
    "trade": YELLOW,
    "lost": RED,
    "health": YELLOW,
    "missing": RED,
    "ended": RED,
    "stuck": RED,
    "finding": YELLOW,
    "fails at": RED,
    "warning": YELLOW,
    "NOT KNOWN": YELLOW,
}

Paint: TypeAlias = Callable[[str, str], str]  # adds a colour's code to a text, or does not


@dataclass(frozen=True)
class Terminal:
    """How wide a text may be, and whether it may have colours. By default, a file's: no colours."""

    width: int = USUAL
    color: bool = False

    def paint(self, text: str, code: str) -> str:
        """The text in that colour, or as it is."""
        return f"{code}{text}{_RESET}" if self.color and code and text else text

    def paragraph(self, title: str, text: str) -> list[str]:
        """A text beside its title, over as many lines as it needs."""
        lines = self.wrap(text, f"{title:<{MARGIN}}", " " * MARGIN)
        if title and lines and lines[0].startswith(title):
            rest = lines[0][len(title) :]
            lines[0] = self.paint(title, _OF_TITLES.get(title, DIM)) + rest
        return lines

    def in_one_color(self, title: str, text: str, code: str) -> list[str]:
        """A paragraph of which all is in that colour: a verdict, or what few people need."""
        return [
            self.paint(line, code) for line in replace(self, color=False).paragraph(title, text)
        ]

    def wrap(self, text: str, start: str = "", indent: str = "") -> list[str]:
        """The text in lines that fit: the first begins with `start`, the others with `indent`."""
        return textwrap.wrap(
            text,
            self.width,
            initial_indent=start,
            subsequent_indent=indent,
            break_on_hyphens=False,  # so that an option stays in one piece
        )

    def code(self, text: str) -> list[str]:
        """Code to copy: indented where it fits, and never broken."""
        lines = text.splitlines()
        room = self.width - max(map(len, lines), default=0)
        return [" " * max(min(room, 4), 0) + line if line else "" for line in lines]

    def listed(self, parts: Iterable[str]) -> Iterator[str]:
        """The parts with commas, and a new line before a part that no longer fits."""
        line = ""
        for part in parts:
            if line and len(f"{line}, {part},") > self.width:
                yield f"{line},"
                line = ""
            line = f"{line}, {part}" if line else part
        if line:
            yield line

    def one_line(self, start: str, text: str) -> str:
        """A line with the end of the text if it is too long, because names differ at their ends."""
        return start + cut_in_front(text, self.width - len(start))


PLAIN = Terminal()


def here(stream: TextIO | None = None) -> Terminal:
    """The terminal that the stream writes to, by default stdout. COLUMNS overrides its width."""
    stream = sys.stdout if stream is None else stream
    return Terminal(_width(stream), wants_color(stream))


def plain(width: int | None = None) -> Terminal:
    """Without colours, for a text that may go anywhere. By default as wide as stdout's terminal."""
    return Terminal(_width(sys.stdout) if width is None else width)


def wants_color(stream: TextIO | None) -> bool:
    """Whether to colour text on the stream, by https://no-color.org and force-color.org."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person sees the stream. A closed one is none."""
    try:
        return stream is not None and stream.isatty()
    except (ValueError, AttributeError):  # closed, or the program's own object
        return False


def cut_in_front(text: str, room: int) -> str:
    """The name, or its end if it is too long, because the end is distinctive."""
    return text if len(text) <= room else f"...{text[len(text) - max(room - 3, 0) :]}"


def _width(stream: TextIO | None) -> int:
    """Columns for text, from LEAST to MOST."""
    return min(max(_columns(stream), LEAST), MOST)


def _columns(stream: TextIO | None) -> int:
    """The columns of COLUMNS or of the stream's terminal. Files and pipes have the usual number."""
    wanted = os.environ.get("COLUMNS", "")
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    try:
        return os.get_terminal_size(stream.fileno()).columns or USUAL if stream else USUAL
    except (ValueError, OSError, AttributeError):
        return USUAL
