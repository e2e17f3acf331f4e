"""`%load_ext pytracer`, then `%%memtrace` in front of a cell or `%memtrace` in front of a line."""

import contextlib
from collections.abc import Iterator
from typing import Any

from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand

from pytracer import errors
from pytracer.api import trace

_OPTIONS = {"--stacks": ("stacks", True), "--category": ("detail", "category")}


@magics_class
class MemoryMagics(Magics):  # type: ignore[misc, unused-ignore]
    """The magics; the last trace is left in the variable `memtrace`."""

    @no_var_expand  # type: ignore[untyped-decorator, unused-ignore]
    @line_cell_magic  # type: ignore[untyped-decorator, unused-ignore]
    def memtrace(self, line: str, cell: str | None = None) -> None:
        """Traces a cell (or the rest of the line) and shows the table.

        `%%memtrace --stacks` also takes Python lines; `--category` is quicker and knows no ops.
        The names of models and optimizers may follow: `%%memtrace model optimizer`.
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
            with tracing, _untold(shell):
                shell.run_cell(code).raise_error()
        finally:
            shell.user_ns["memtrace"] = tracing
            print(tracing)  # noqa: T201 - a magic's result is what it prints


def _variable(shell: Any, name: str) -> Any:
    if name not in shell.user_ns:
        raise errors.UsageError(
            f"%%memtrace {name}: no variable is called so; it takes names of models and optimizers"
        )
    return shell.user_ns[name]


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
