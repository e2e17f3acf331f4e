"""The errors that pytracer raises on purpose, with their exit codes on the command line."""

import contextlib
import difflib
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator

_collected = threading.local()  # the warnings of a `collected_warnings` block


class PytracerError(Exception):
    """The base of all errors of pytracer. The message tells what to do."""

    exit_code = 1


class BuildMissing(PytracerError, ImportError):
    """The compiled extension is missing: this copy of pytracer was never built."""


class BuildMismatch(PytracerError, ImportError):
    """The compiled extension was built for another torch or another Python."""


class CaptureError(PytracerError, RuntimeError):
    """A recording cannot start or go on, for example because another one runs."""


class CannotImagine(CaptureError):
    """An imagined run needs a value, a size or a device that it does not have."""


class NothingOnTheCard(CannotImagine):
    """The imagined program made nothing on the card, so nothing is known of the card."""

    def __init__(self) -> None:
        """Says what to do."""
        super().__init__(
            "the program made nothing on the card. If it trains on the CPU, move its model and batch to "
            'the card, as in model.to("cuda")'
        )


class UsageError(PytracerError, ValueError):
    """An argument is wrong: an unknown view, an unknown option, or a bad combination."""

    exit_code = 2


class BudgetExceeded(PytracerError):
    """A limit of the caller does not hold: a peak, a growth, a claim to confirm."""

    exit_code = 3


class UnreadableTrace(PytracerError):
    """The file is not a trace, is too damaged to read, or has a newer format."""

    exit_code = 4


class CannotWrite(PytracerError, OSError):
    """A file cannot be written: it exists already, its folder does not, or the disk is full."""


class FileIsThere(CannotWrite):
    """A file exists already, and the caller did not allow to replace it."""

    def __init__(self, path: object, state: str = "exists", remedy: str = "replaces it") -> None:
        """Makes two messages: one for Python, and one that names the command line's option."""
        super().__init__(f"{path} {state}; overwrite=True {remedy}")
        self.at_the_command_line = f"{path} {state}; -f {remedy}"


def did_you_mean(name: str, names: Iterable[str], least: float = 0.6, most: int = 1) -> str:
    """A question with the most similar known names, to end a message; "" if no name is similar.

    `least` is the least share of equal letters, `most` how many names may be in the question.
    A name that ends a longer one with dots is most similar to it: `attn` to `h.0.attn`.
    """
    known = list(names)
    similar = [each for each in known if each.endswith(f".{name}")][:most]
    similar = similar or difflib.get_close_matches(name, known, n=most, cutoff=least)
    return f"; did you mean {' or '.join(map(repr, similar))}?" if similar else ""


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns at the program's line that called pytracer, at any depth of the stack."""
    texts: list[str] | None = getattr(_collected, "texts", None)
    if texts is not None:
        texts.append(text)
        return
    level, frame = 1, sys._getframe().f_back
    while frame is not None and frame.f_globals.get("__name__", "").startswith("pytracer."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level + 1)


@contextlib.contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collects the warnings that pytracer gives in the block, on this thread.

    Python's `catch_warnings` is for all threads, and has it show the program's warnings again.
    """
    before: list[str] | None = getattr(_collected, "texts", None)
    texts: list[str] = []
    _collected.texts = texts
    try:
        yield texts
    finally:
        _collected.texts = before
