"""Runs an unchanged program as Python itself would."""

import ast
import builtins
import contextlib
import importlib.machinery
import io
import os
import runpy
import sys
import zipimport
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from pytracer import errors
from pytracer.basics import environment
from pytracer.recording import start


def program(
    words: Sequence[str], *, as_module: bool, values: Mapping[str, int] | None = None
) -> Callable[[], None]:
    """Returns a function that runs a script or a module with its arguments, once, as `__main__`.

    Args:
        words: the script or the module, and its arguments.
        as_module: whether it is a module.
        values: numbers for variables of the script, in place of those that it assigns to them.

    Raises:
        errors.UsageError: the script cannot be read, or assigns to no such variable.
    """
    if as_module and values:
        raise errors.UsageError("--set is for a script, and this is a module (-m)")
    if as_module:
        return _prepare_module(words)
    if _is_archive(words[0]):
        return _prepare_archive(words)
    return _prepare_script(words, values or {})


# Programs that do not train but start processes that do.
LAUNCHERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate": "accelerate launch",
    "accelerate.commands.launch": "accelerate launch",
    "accelerate.commands.accelerate_cli": "accelerate launch",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
}


def _prepare_script(words: Sequence[str], values: Mapping[str, int]) -> Callable[[], None]:
    script = words[0]
    if Path(script).is_dir():
        raise errors.UsageError(f"{Path(script).resolve()} is a folder: name its script, or use -m")
    try:
        path = _as_python_names(script)
        with io.open_code(path) as file:
            source = file.read()
    except OSError as problem:
        from pytracer.basics import files

        question = files.similar(script, ".py")
        raise errors.UsageError(f"cannot read {script}: {problem.strerror}{question}") from None
    _first_on_path(os.path.dirname(os.path.realpath(script)))  # noqa: PTH120
    sys.argv = list(words)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    names = {"__file__": path, "__cached__": None, "__spec__": None, "__loader__": loader}

    code = _with_values(source, script, values) if values else source

    def execute() -> None:
        _execute(compile(code, path, "exec", dont_inherit=True), {**names, "__package__": None})

    return execute


def _as_python_names(script: str) -> str:
    return os.path.join(environment.working_directory(), script)  # noqa: PTH118 - keeps `..`


def _is_archive(path: str) -> bool:
    """Whether it is a folder or a zip file that Python runs: it has a `__main__.py`."""
    try:
        return zipimport.zipimporter(path).find_spec("__main__") is not None
    except zipimport.ZipImportError:
        return Path(path, "__main__.py").is_file()


def _prepare_archive(words: Sequence[str]) -> Callable[[], None]:
    sys.path[0] = _as_python_names(words[0])
    sys.argv = list(words)

    def execute() -> None:
        details: Any = runpy._get_main_module_details  # type: ignore[attr-defined]
        _, spec, code = details()
        _execute(code, _names_of(spec))

    return execute


def _with_values(source: bytes, script: str, values: Mapping[str, int]) -> ast.Module:
    """The script, which assigns these numbers to its variables."""
    try:
        tree = ast.parse(source)
    except SyntaxError as problem:
        raise errors.UsageError(f"{script}:{problem.lineno}: {problem.msg}") from None
    left, assigned = dict.fromkeys(values), set[str]()
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for name in [target.id for target in targets if isinstance(target, ast.Name)]:
            assigned.add(name)
            if name in values:
                node.value = ast.copy_location(ast.Constant(values[name]), node.value)
                left.pop(name, None)
    if left:
        asked = "; ".join(f"--set {name}{errors.did_you_mean(name, assigned)}" for name in left)
        raise errors.UsageError(f"{script} assigns to no variable of this name: {asked}")
    return tree


def _prepare_module(words: Sequence[str]) -> Callable[[], None]:
    _first_on_path(environment.working_directory())
    sys.argv = ["-m", *words[1:]]

    def execute() -> None:
        details: Any = runpy._get_module_details  # type: ignore[attr-defined]
        try:
            _, spec, code = details(words[0])
        except ImportError as problem:
            raise SystemExit(f"pytracer: {problem}") from None
        sys.argv[0] = spec.origin
        _execute(code, _names_of(spec))

    return execute


def _names_of(spec: importlib.machinery.ModuleSpec) -> dict[str, Any]:
    names = {"__file__": spec.origin, "__cached__": spec.cached, "__spec__": spec}
    return {**names, "__loader__": spec.loader, "__package__": spec.parent}


def _first_on_path(folder: str) -> None:
    """Puts the folder first on sys.path, in place of the one that Python put there."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = [folder] if folder else []


def _execute(code: CodeType, names: dict[str, Any]) -> None:
    """Runs the code as `__main__`, which stays: its pickles and threads look names up there."""
    start.leave_to_the_program(start.imported_since_python_started())
    main = ModuleType("__main__")
    main.__dict__.update(names, __builtins__=builtins)
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def leave_traceback_to_the_program(error: BaseException, afterwards: Callable[[], object]) -> None:
    """Has Python print the exception without our frames, and then calls `afterwards`."""
    print_it = vars(sys).get("excepthook", _without_a_hook)

    def hook(
        kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        if value is error:
            traceback = _without_ours(traceback)
            value.__traceback__ = traceback
        try:
            print_it(kind, value, traceback)
        except SystemExit:
            raise
        except BaseException as failed:  # shown as Python would, without our line
            failed.__traceback__ = failed.__traceback__ and failed.__traceback__.tb_next
            _show("Error in sys.excepthook:\n", failed)
            _show("\nOriginal exception was:\n", value)
        afterwards()

    sys.excepthook = hook


def _without_a_hook(kind: object, value: BaseException, traceback: object) -> None:
    _show("sys.excepthook is missing\n", value)


def _show(line: str, error: BaseException) -> None:
    with contextlib.suppress(Exception):  # the program may have put anything there
        sys.stderr.write(line)
    sys.__excepthook__(type(error), error, error.__traceback__)


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """Returns the traceback from the program's first frame on; None after a syntax error."""
    while traceback is not None and traceback.tb_frame.f_code is not _execute.__code__:
        traceback = traceback.tb_next
    return traceback and traceback.tb_next
