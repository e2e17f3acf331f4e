"""`%load_ext pytracer`, then `%%memtrace` in front of a cell or `%memtrace` in front of a line."""

import contextlib
from collections.abc import Iterator
from typing import Any

from IPython.core.magic import Magics, line_cell_magic, magics_class

from pytracer import errors
from pytracer.api import trace

_OPTIONS = {"--stacks": ("stacks", True), "--category": ("detail", "category")}


@magics_class
class MemoryMagics(Magics):  # type: ignore[misc, unused-ignore]
    """The magics; the last trace is left in the variable `memtrace`."""

    @line_cell_magic  # type: ignore[untyped-decorator, unused-ignore]
    def memtrace(self, line: str, cell: str | None = None) -> None:
        """Traces a cell (or the rest of the line) and shows the table.

        `%%memtrace --stacks` also takes Python lines; `--category` is quicker and knows no ops.
        The names of models and optimizers may follow: `%%memtrace model optimizer`.
        """
        shell: Any = self.shell
        words = line.split()
        options: dict[str, Any] = {}
        while words and words[0].startswith("--"):
            word = words.pop(0)
            if word not in _OPTIONS:
                raise errors.UsageError(f"%memtrace has no {word}; it has {', '.join(_OPTIONS)}")
            name, value = _OPTIONS[word]
            options[name] = value
        targets = [shell.user_ns[word] for word in words] if cell is not None else []
        code = cell if cell is not None else " ".join(words)
        tracing = trace(*targets, report=False, **options)
        try:
            with tracing, _untold(shell):
                shell.run_cell(code).raise_error()
        finally:
            shell.user_ns["memtrace"] = tracing
            print(tracing)  # noqa: T201 - a magic's result is what it prints


@contextlib.contextmanager
def _untold(shell: Any) -> Iterator[None]:
    """Whoever runs the magic shows the cell's error: it is not to be seen twice."""
    shell._showtraceback = lambda *_: None
    try:
        yield
    finally:
        del shell._showtraceback


def register(shell: Any) -> None:
    """Called by `%load_ext pytracer`."""
    shell.register_magics(MemoryMagics)
