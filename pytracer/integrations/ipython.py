"""`%load_ext pytracer`, then `%%memtrace` in front of a cell or `%memtrace` in front of a line."""

import contextlib
from collections.abc import Iterator
from typing import Any

from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand

from pytracer import errors
from pytracer.recording.api import trace

_OPTIONS = {"--stacks": ("stacks", True), "--category": ("detail", "category")}


@magics_class
class MemoryMagics(Magics):  # type: ignore[misc, unused-ignore]
    """The magics. They keep the last trace in the variable `memtrace`."""

    @no_var_expand  # type: ignore[untyped-decorator, unused-ignore]
    @line_cell_magic  # type: ignore[untyped-decorator, unused-ignore]
    def memtrace(self, line: str, cell: str | None = None) -> None:
        """Traces a cell (or the rest of the line) and shows the table.

        `%%memtrace --stacks` also records Python lines. `--category` is faster, without ops. Names
        of models and optimizers may follow: `%%memtrace model optimizer`.
        """
        shell: Any = self.shell
        options: dict[str, Any] = {}
        line = line.lstrip()
        while line.startswith("--"):
            word, line = (*line.split(maxsplit=1), "")[:2]
            if word not in _OPTIONS:
                raise errors.UsageError(f"%memtrace has no {word}; it has {', '.join(_OPTIONS)}")
            name, value = _OPTIONS[word]
            options[name] = value
        targets = [] if cell is None else [_variable(shell, name) for name in line.split()]
        code = line if cell is None else cell
        tracing = trace(*targets, table=False, **options)
        try:
            with tracing, _without_traceback(shell):
                shell.run_cell(code).raise_error()
        finally:
            shell.user_ns["memtrace"] = tracing
            print(tracing)  # noqa: T201 - a magic's result is what it prints


def _variable(shell: Any, name: str) -> Any:
    if name not in shell.user_ns:
        raise errors.UsageError(
            f"%%memtrace {name}: there is no variable {name!r}; name models and optimizers"
        )
    return shell.user_ns[name]


@contextlib.contextmanager
def _without_traceback(shell: Any) -> Iterator[None]:
    """Keeps the shell from printing the cell's error. The magic raises it, and it is printed then."""
    shell._showtraceback = lambda *_: None
    try:
        yield
    finally:
        del shell._showtraceback


def register(shell: Any) -> None:
    """Registers the magics; `%load_ext pytracer` calls it."""
    shell.register_magics(MemoryMagics)
