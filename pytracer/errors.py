"""Every error pytracer raises on purpose, and the exit code the command line gives it."""

import difflib
import sys
import warnings
from collections.abc import Iterable


class PytracerError(Exception):
    """Something went wrong and the message says what to do; every error below is one."""

    exit_code = 1


class BuildMissing(PytracerError, ImportError):
    """The compiled extension is not there: this copy of pytracer was never built."""


class BuildMismatch(PytracerError, ImportError):
    """The compiled extension was built for another torch or another Python than these."""


class CaptureError(PytracerError, RuntimeError):
    """A recording cannot start, or cannot go on: another one is running, say."""


class CannotImagine(CaptureError):
    """An imagined run came to something that needs a value, a size or a device that is not there."""


class UsageError(PytracerError, ValueError):
    """What was asked for does not exist: an unknown view, option or combination of options."""

    exit_code = 2


class BudgetExceeded(PytracerError):
    """A limit that the caller set does not hold: a peak, a growth, a claim to confirm."""

    exit_code = 3


class UnreadableTrace(PytracerError):
    """The file is not a trace, is damaged beyond reading, or is of a newer format."""

    exit_code = 4


class CannotWrite(PytracerError, OSError):
    """A file cannot be made: it exists already, its folder does not, or the disk is full."""


class FileIsThere(CannotWrite):
    """A file is there already, and nobody said that it may be replaced."""

    def __init__(self, path: object, state: str = "exists", remedy: str = "replaces it") -> None:
        """The message is for Python; the command line has an option for it, and says its own."""
        super().__init__(f"{path} {state}; overwrite=True {remedy}")
        self.at_the_command_line = f"{path} {state}; -f {remedy}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error's sentence; empty where nothing is like it."""
    similar = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns at the line of the program that called pytracer, however far up the stack it is."""
    level, frame = 1, sys._getframe().f_back
    while frame is not None and frame.f_globals.get("__name__", "").startswith("pytracer."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level + 1)
