"""Waits for the program's `import torch`, and keeps from the program whatever goes wrong in pytracer.

`pytracer.pth` imports this module as Python starts. It imports only what Python itself has by then,
because the program may have modules of its own that are called `json` or `pytracer`.
"""

import _frozen_importlib
import _imp
import _signal  # type: ignore[import-not-found]
import _thread
import os
import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import CodeType, ModuleType
    from typing import Any

NAME = "PYTRACER"
OFF = ("", "0", "off", "no", "false")
# What an import of this module brings. The program's own module may be called pytracer.
_BROUGHT = ("pytracer", "pytracer.basics", "pytracer.basics.version", "pytracer.recording")

_ROOM = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - no pathlib yet
_PACKAGE = os.path.dirname(_ROOM)  # noqa: PTH120
_BESIDE = os.path.dirname(_PACKAGE)  # noqa: PTH120
_LIBRARY = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120
_HAS_STDERR = sys.__stderr__ is not None  # if not, the program's first file may get its number
_ENCODING = getattr(sys.__stderr__, "encoding", None) or "utf-8"
_LONGEST = 300  # of an exception's text


# ---------------------------------------------------------------------- the guard


def safely(work: "Callable[..., object]", *arguments: "Any") -> bool:
    """Calls our function. If it fails, says so in one line and returns False.

    Two kinds of exceptions go on to the program: Ctrl-C, and what its own signal handler raises.
    """
    handlers: set[CodeType] = set()
    try:
        handlers = _signal_handlers()
        with OUR_IMPORTS:
            work(*arguments)
        return True
    except BaseException as problem:
        if isinstance(problem, KeyboardInterrupt) or _ran_any(problem, handlers):
            raise
        _explain(problem)
        return False


def _explain(problem: BaseException) -> None:
    try:
        tell(f"pytracer: the recording has failed, and the program goes on: {_in_words(problem)}")
    except Exception:  # there is no memory left, even for a line
        return


def _in_words(problem: BaseException) -> str:
    """The exception, and the innermost line of ours. Calls nothing of the program's."""
    kind, place = type(problem), ""
    for code, line in _lines(problem):
        if code.co_filename.startswith(_PACKAGE + os.sep):
            place = f" ({code.co_filename[len(_PACKAGE) + 1 :]}:{line})"
    is_known = kind.__module__.partition(".")[0] in ("builtins", "pytracer")
    text = " ".join(str(problem).split())[:_LONGEST] if is_known else ""
    return f"{kind.__name__}{': ' if text else ''}{text}{place}"


def _lines(problem: BaseException) -> "Iterable[tuple[CodeType, int]]":
    traceback = problem.__traceback__
    while traceback is not None:
        yield traceback.tb_frame.f_code, traceback.tb_lineno
        traceback = traceback.tb_next


def _ran_any(problem: BaseException, handlers: "set[CodeType]") -> bool:
    """Whether the exception comes from a signal handler: one of these, or a newer one."""
    handlers = handlers | _signal_handlers()
    return any(code in handlers for code, _ in _lines(problem))


def _signal_handlers() -> "set[CodeType]":
    """The code of the program's signal handlers."""
    found = {_code_of(_signal.getsignal(number)) for number in range(1, _signal.NSIG)}
    return {code for code in found if code is not None}


def _code_of(handler: "Any") -> "CodeType | None":
    kind = type(handler)
    if kind.__module__ == "functools" and kind.__name__ == "partial":
        return _code_of(handler.func)
    if kind.__name__ == "method" and kind.__module__ == "builtins":
        return _code_of(handler.__func__)
    if kind.__name__ != "function" or kind.__module__ != "builtins":
        of_classes = (base.__dict__.get("__call__") for base in kind.__mro__)
        handler = next(filter(None, of_classes), None)
    return handler.__code__ if type(handler).__name__ == "function" else None


def tell(text: str) -> None:
    """Writes to the process's own stderr, past whatever the program has put in `sys.stderr`.

    Python's stream would keep what it cannot write, and fail once more as Python ends.
    """
    if not _HAS_STDERR:
        return
    left = f"{text}\n".encode(_ENCODING, "backslashreplace")
    pipe = (_signal.SIGPIPE,)
    kills = _signal.getsignal(_signal.SIGPIPE) == _signal.SIG_DFL
    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, pipe if kills else ())
    try:
        while left:
            left = left[os.write(2, left) :]
    except OSError:  # nobody reads it, or the disk is full
        if kills:
            _signal.sigtimedwait(pipe, 0)
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, before)


def error_that_ended_python() -> "BaseException | None":
    """The exception of which the program dies. Python has kept it, unless a prompt goes on."""
    left = (vars(sys).get(name) for name in ("last_exc", "last_value"))
    error = next((one for one in left if issubclass(type(one), BaseException)), None)
    return None if hasattr(sys, "ps1") else error


# ---------------------------------------------------------------------- our imports


class OurImports:
    """Finds what pytracer imports where packages are installed, and not among the program's files.

    Only for the thread and the time of a `with` block. Afterwards the program finds its own modules,
    as if we had imported nothing.
    """

    def __init__(self) -> None:
        """Finds nothing outside of a block."""
        self._inside: dict[int, int] = {}  # by thread: how deep
        self._found: set[str] = set()

    def __enter__(self) -> None:
        """Begins to find modules for the thread."""
        _ask_first(self)
        thread = _thread.get_ident()
        self._inside[thread] = self._inside.get(thread, 0) + 1

    def __exit__(self, *_: object) -> None:
        """Ends it."""
        thread = _thread.get_ident()
        self._inside[thread] -= 1
        if not self._inside[thread]:
            del self._inside[thread]
            found, self._found = self._found, set()
            leave_to_the_program(found)

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "Any":
        """Finds a module for us; None for the program, whose imports go on to the next finder."""
        if path is not None or _thread.get_ident() not in self._inside:
            return None
        self._found.add(name)
        return PathFinder.find_spec(name, where_packages_are())


OUR_IMPORTS = OurImports()


def _ask_first(finder: "Any") -> None:
    """Puts a finder first, if the program has left the list of finders as it was."""
    finders = sys.meta_path
    if issubclass(type(finders), list) and not any(each is finder for each in finders):
        list.insert(finders, 0, finder)


def _ask_no_more(finder: "Any") -> None:
    finders = sys.meta_path
    if issubclass(type(finders), list):
        for place in [place for place, each in enumerate(finders) if each is finder]:
            list.__delitem__(finders, place)


def where_packages_are() -> list[str]:
    """The entries of `sys.path` that hold no files of the program's."""
    places = [entry for entry in sys.path if _has_packages(entry)]
    return places if _BESIDE in places else [*places, _BESIDE]


def _has_packages(entry: object) -> bool:
    if type(entry) is not str:
        return False
    folder = f"{entry}{os.sep}"
    return entry == _BESIDE or folder.startswith(_LIBRARY) or f"-packages{os.sep}" in folder


def leave_to_the_program(names: "Iterable[str]") -> None:
    """Forgets those of these modules in whose place the program would find one of its own."""
    places = [entry for entry in sys.path if not _has_packages(entry)]
    its = {name for name in names if name in sys.modules and _is_another(name, places)}
    for name in [name for name in sys.modules if name.partition(".")[0] in its]:
        del sys.modules[name]


def _is_another(name: str, places: "list[str]") -> bool:
    if name in sys.builtin_module_names or _imp.is_frozen(name):  # Python finds these first
        return False
    its, ours = PathFinder.find_spec(name, places), getattr(sys.modules[name], "__spec__", None)
    origin = getattr(its, "origin", None)
    return origin is not None and origin != getattr(ours, "origin", None)


def imported_since_python_started() -> list[str]:
    """The modules that neither Python nor its `site` imports by itself."""
    names = list(sys.modules)
    first = names.index("site") + 1 if "site" in names else 0
    return [name for name in names[first:] if "." not in name and name != "__main__"]


# ---------------------------------------------------------------------- the import of torch


def after_import(name: str, then: "Callable[[], object]") -> "Callable[[], None]":
    """Calls `then` as soon as the module is imported: at once if it is already, perhaps never.

    Returns a function that cancels the call.
    """
    watcher = _Watcher(name, then)
    _ask_first(watcher)
    watcher.find_spec(name)
    return watcher.forget


class _Watcher:
    """A finder that notices when a module has been imported.

    It leaves the import to the other finders, so that no line of ours is in the traceback of one that
    fails. While a package is imported, it imports others: this is when we see it.
    """

    def __init__(self, name: str, then: "Callable[[], object]") -> None:
        """Notices nothing before it is in `sys.meta_path`."""
        self._name, self._then = name, then
        self._asks = False

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Looks whether the module is there by now."""
        if name == self._name and "." in name and not self._asks:
            return self._find(name, path)  # a single module may import nothing
        module: Any = sys.modules.get(self._name)
        if issubclass(type(module), type(sys)) and not _is_lazy(module):
            spec = module.__spec__
            if type(spec) is _Noticed or spec.__dict__.get("_initializing"):
                self._await(spec)
            else:
                self.done()
        return None

    def _find(self, name: str, path: "Sequence[str] | None") -> "ModuleSpec | None":
        find_by_others: Any = getattr(_frozen_importlib, "_find_spec")  # noqa: B009 - has no type
        self._asks = True
        try:
            spec: ModuleSpec | None = find_by_others(name, path)
        finally:
            self._asks = False
        if spec is not None:
            self._await(spec)
        return spec

    def _await(self, spec: "Any") -> None:
        if type(spec) is ModuleSpec:
            spec.__dict__["_watchers"] = []
            spec.__class__ = _Noticed
        if type(spec) is _Noticed and self not in spec.__dict__["_watchers"]:
            spec.__dict__["_watchers"].append(self)

    def done(self) -> None:
        """Calls the function: the module has been imported."""
        then, self._then = self._then, lambda: None
        self.forget()
        then()

    def forget(self) -> None:
        """Stops waiting for the module."""
        _ask_no_more(self)


class _Noticed(ModuleSpec):
    """The spec of a module that is being imported. Python says to it when the import is over."""

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__["_initializing"])

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value
        if value:
            return
        watchers: list[_Watcher] = self.__dict__.pop("_watchers")
        self.__class__ = ModuleSpec  # type: ignore[assignment]
        if getattr(sys.modules.get(self.name), "__spec__", None) is self:  # else it has failed
            for watcher in watchers:
                watcher.done()


def _is_lazy(module: "ModuleType") -> bool:
    """Whether `importlib.util.LazyLoader` has put it there, and nobody has used it yet."""
    kind = type(module)
    return kind.__name__ == "_LazyModule" and kind.__module__ == "importlib.util"


# ---------------------------------------------------------------------- PYTRACER=1


class Autostart:
    """Starts the recording of this process if PYTRACER asks for it. Use the one instance."""

    def __init__(self) -> None:
        """Does nothing until `arm`."""
        self._forget: Callable[[], None] | None = None

    def arm(self, entry: str) -> None:
        """Calls `begin()` of the module `entry` when the program has imported torch.

        Called by each `pytracer.pth` that Python reads: there may be one for the user as well.
        """
        for name in _BROUGHT:
            sys.modules.pop(name, None)
        if self._forget is None and os.environ.get(NAME, "").strip().lower() not in OFF:
            self._forget = after_import("torch", lambda: safely(_begin, entry))

    def disarm(self) -> None:
        """Does not start a recording after all: this is a command of ours."""
        if self._forget is not None:
            self._forget()


def _begin(entry: str) -> None:
    if not our_name_is_taken():
        __import__(entry, fromlist=["_"]).begin()


def our_name_is_taken() -> bool:
    """Whether the program has another module called pytracer. Says so: nothing can be recorded."""
    its = getattr(PathFinder.find_spec("pytracer"), "origin", None)
    is_ours = its is None or os.path.realpath(its).startswith(os.path.realpath(_PACKAGE) + os.sep)
    if not is_ours:
        tell(f"pytracer: not recorded: {its} has our name; give it another one to be recorded")
    return not is_ours


AUTOSTART = Autostart()
