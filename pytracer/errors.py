"""The errors that pytracer raises on purpose, with their exit codes on the command line."""

import difflib
import sys
import warnings
from collections.abc import Iterable


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


def did_you_mean(name: str, names: Iterable[str], least: float = 0.6) -> str:
    """A question with the most similar known name, to end a message; "" if no name is similar.

    `least` is the least share of equal letters.
    """
    similar = difflib.get_close_matches(name, names, n=1, cutoff=least)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns at the program's line that called pytracer, at any depth of the stack."""
    level, frame = 1, sys._getframe().f_back
    while frame is not None and frame.f_globals.get("__name__", "").startswith("pytracer."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level + 1)
