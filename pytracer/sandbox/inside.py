"""A private view of the files for a process that runs already, such as a notebook's.

The library (csrc/view) takes the place of libc's functions in the tables of what is loaded, until
the block ends. Threads that were there before are not in the view. Programs that the block starts
are, with Landlock; this process itself has only the library.
"""

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from pytracer import errors
from pytracer.sandbox import network, preload, written
from pytracer.sandbox.order import VIEW, quiet


class Inside:
    """A block whose changes of files are private. Afterwards `changes` lists them."""

    def __init__(self, *, allow_network: bool, write: bool) -> None:
        """Changes nothing yet.

        Args:
            allow_network: whether the block may connect to other machines.
            write: whether the changes are made for real at the end, unless the block fails.
        """
        self._allow_network, self._write = allow_network, write
        self.changes: tuple[written.Change, ...] = ()
        self.kept = False
        self.failed = False  # whether the block has; then nothing is made for real
        self._library: Any = None

    def __enter__(self) -> "Inside":
        """Begins the view. Changes nothing in a process that is in a view already.

        Raises:
            errors.CaptureError: the library is missing.
        """
        if VIEW in os.environ:
            return self
        library = _library()
        self._folder = Path(tempfile.mkdtemp(prefix="pytracer-")).resolve()
        ours = preload.variables(str(self._folder), [], network=self._allow_network)
        ours |= quiet(os.environ, network=self._allow_network)
        self._before = {name: os.environ.get(name) for name in ours}
        self._where = Path.cwd()
        os.environ.update(ours)
        self._listen = [] if self._allow_network else [network.refuse()]
        folder = os.fsencode(self._folder)
        library.pytracer_view_begin(folder, folder, self._allow_network)
        self._library = library
        _look_after_imports(library)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the view, and lists what it has."""
        library, self._library = self._library, None
        if library is None:
            return
        where = self._where
        with suppress(OSError):  # the block may have removed it
            where = Path.cwd()
        library.pytracer_view_end()
        _looking.clear()
        for end in self._listen:
            end()
        _restore(self._before)
        os.chdir(where if where.is_dir() else self._where)
        try:
            self.changes = tuple(preload.changes(self._folder))
            if self._write and not self.failed and error is None:
                preload.write(self._folder, list(self.changes))
                self.kept = True
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


_looking: list[Any] = []  # the library, while there is a view
_hook_is_there = False


def _look_after_imports(library: Any) -> None:
    """Covers what is loaded later, as soon as Python does the next thing that it tells of."""
    global _hook_is_there
    _looking.append(library)
    if not _hook_is_there:  # Python never removes one
        _hook_is_there = True
        sys.addaudithook(_heard)


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if _looking and not event.startswith("object."):
        _looking[0].pytracer_view_look()


def _library() -> Any:
    try:
        library = ctypes.PyDLL(str(preload.LIBRARY))
    except OSError as problem:
        raise errors.CaptureError(
            f"an imagined run needs a private view of the files, so that it changes none: {problem}"
        ) from None
    library.pytracer_view_begin.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int]
    for name in ("begin", "look", "end"):
        getattr(library, f"pytracer_view_{name}").restype = None
    return library


def _restore(before: Mapping[str, str | None]) -> None:
    for name, text in before.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text
