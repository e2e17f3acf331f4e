"""torch.compile must see an untouched torch while it traces, and may arrive at any moment.

What we put in place of torch's functions is taken away while Dynamo compiles: it then finds no
hook to trace, to guard on or to break at, and the graphs are those of an untraced run. Dynamo
itself is imported late, often by the first optimizer, and remembers some of torch's functions as
it finds them. So its import is awaited, and gets the originals too.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

DYNAMO = "torch._dynamo"
CONVERT = "torch._dynamo.convert_frame"


class Shelter:
    """Calls `suspend` before torch.compile looks at torch, and `resume` afterwards."""

    def __init__(self, suspend: Callable[[], None], resume: Callable[[], None]) -> None:
        """Nothing is installed yet."""
        self._suspend = suspend
        self._resume = resume
        self._depth = 0
        self._watcher: _ImportWatcher | None = None
        self._registered = False
        self._compile: Any = None  # torch's own, while ours is in its place

    def install(self) -> None:
        """Watches compilations, from now on or from Dynamo's import on."""
        if DYNAMO in sys.modules:
            self._register()
        else:
            self._watcher = _ImportWatcher(self._enter, self._after_import)
            sys.meta_path.insert(0, self._watcher)

    def uninstall(self) -> None:
        """Leaves no trace of itself."""
        if self._watcher is not None:
            sys.meta_path.remove(self._watcher)
            self._watcher = None
        if self._registered:
            handler = sys.modules[DYNAMO].callback_handler
            del handler.clear
            self._remove(handler)
            if self._compile is not None:
                convert: Any = sys.modules[CONVERT]
                convert.compile_frame = self._compile
                self._compile = None
            self._registered = False
        self._depth = 0

    def _register(self) -> None:
        handler = sys.modules[DYNAMO].callback_handler
        self._add(handler)
        clear = handler.clear

        def clear_and_stay() -> None:  # torch._dynamo.reset() forgets all callbacks
            clear()
            self._add(handler)

        handler.clear = clear_and_stay
        self._registered = True
        self._wrap_compile(sys.modules.get(CONVERT))

    def _wrap_compile(self, convert: Any) -> None:
        """torch.export's strict mode compiles without telling the callbacks."""
        compile_frame = self._compile = getattr(convert, "compile_frame", None)
        if compile_frame is None:
            return

        @functools.wraps(compile_frame)
        def sheltered(*args: Any, **kwargs: Any) -> Any:
            self._enter()
            try:
                return compile_frame(*args, **kwargs)
            finally:
                self._leave()

        convert.compile_frame = sheltered

    def _add(self, handler: Any) -> None:
        handler.register_start_callback(self._enter)
        handler.register_end_callback(self._leave)

    def _remove(self, handler: Any) -> None:
        # The program may have emptied the lists itself.
        if self._enter in handler.start_callbacks:
            handler.remove_start_callback(self._enter)
        if self._leave in handler.end_callbacks:
            handler.remove_end_callback(self._leave)

    def _after_import(self) -> None:
        if self._watcher is not None:
            sys.meta_path.remove(self._watcher)
            self._watcher = None
            if hasattr(sys.modules.get(DYNAMO), "callback_handler"):
                self._register()
        self._leave()

    def _enter(self, *_: object) -> None:
        self._depth += 1
        if self._depth == 1:
            self._suspend()

    def _leave(self, *_: object) -> None:
        if self._depth == 0:
            return  # of a compilation that began before us
        self._depth -= 1
        if self._depth == 0:
            self._resume()


class _ImportWatcher(importlib.abc.MetaPathFinder):
    """Finds nothing itself; brackets the execution of one module."""

    def __init__(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._before = before
        self._after = after

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != DYNAMO:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            self._bracket(spec.loader)
        return spec

    def _bracket(self, loader: importlib.abc.Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self._before()
            try:
                execute(module)
            finally:
                self._after()

        loader.exec_module = exec_module  # type: ignore[method-assign]
