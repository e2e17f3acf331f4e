"""`PYTRACER=1 python train.py` does the same as `pytracer run train.py`.

`pytracer.pth` lies beside the installed package. If PYTRACER is set, it has `pytracer/recording/start.py` call
`begin` here when the program has imported torch.
"""

import atexit
import os
import sys
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.basics import environment
from pytracer.cli import recording
from pytracer.recording.start import NAME, error_that_ended_python, safely, tell


def begin() -> None:
    """Records this process to its end, if PYTRACER asks for it. The program has imported torch."""
    try:
        settings = recording.in_environment(os.environ.get(NAME, "1"))
        program = program_of(_words(sys, "orig_argv"), _words(sys, "argv"))
        is_child = _is_child(_words(sys, "orig_argv"))
        only_children = "only" in settings and environment.world_size() == 1
        if program is not None and (is_child or not only_children):
            _record(program, settings, is_child=is_child)
    except errors.PytracerError as problem:  # the program goes on without a recording
        if environment.rank() == 0:
            text = str(problem).replace("overwrite=True", f"force=1 in {NAME}")
            tell(f"pytracer: not recorded: {' '.join(text.split())}")


def _record(program: str, settings: recording.Settings, *, is_child: bool) -> None:
    from pytracer.capture.hooks import HOOKS
    from pytracer.cli.messages import Messages
    from pytracer.recording import always_program

    asked = {key: value for key, value in settings.items() if key != "only"}
    plan = recording.plan(asked, (program,), by_environment=True, is_child=is_child)
    if not plan.always:
        plan.place()  # refuses a file that is there
    messages = Messages(
        settings.get("json"),
        plan.force,
        every="PYTRACER=steps=all",
        unwatch="watch=0" if plan.watch else "",
        digests=settings.get("digests"),
    )
    traced = always_program.recorder(plan, messages)
    traced.begin()

    def end() -> None:
        """Called as Python ends. Silent about programs that train nothing: many import torch."""
        traced.end(error_that_ended_python(), gave_up=plan.skip == 0)
        traced.say_why()

    # Python calls the last registered function first, so our end comes before the recordings'.
    HOOKS.await_exit()
    if is_child:  # Python does not end there as usual
        import multiprocessing.util

        multiprocessing.util.Finalize(None, safely, (end,), exitpriority=0)
    else:
        atexit.register(safely, end)


def _words(holder: Any, name: str) -> list[str]:
    """The words of a command line, without what the program has put there that is no text."""
    words = vars(holder).get(name)
    if type(words) is not list:
        return []
    return [os.fsdecode(word) if type(word) in (str, bytes) else "" for word in words]


# Python runs these for the processes that a program starts and may train in.
_CHILDREN = ("from multiprocessing.spawn", "from multiprocessing.forkserver")
_RAY_WORKER = "ray/_private/workers/default_worker.py"


def _is_child(original: list[str]) -> bool:
    """Whether a program that runs already started this process to work for it."""
    return any(word.startswith(_CHILDREN) or word.endswith(_RAY_WORKER) for word in original)


def program_of(original: list[str], arguments: list[str]) -> str | None:
    """The program's name; None for processes that only help or start others.

    Args:
        original: the whole command line.
        arguments: the script or module and its arguments, as the program sees them.
    """
    from pytracer.recording.runner import LAUNCHERS

    words = iter(original[1:])
    for word in words:
        if word == "-m":
            module = next(words, "run")
            if module in LAUNCHERS:
                return None
            return module.removesuffix(".__main__").rpartition(".")[2]
        if word == "-c":
            code = next(words, "")
            if code.startswith(_CHILDREN):
                break  # its arguments are now its parent's
            return None if code.startswith("from multiprocessing") else "run"
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            next(words, None)
        elif word.endswith(_RAY_WORKER):
            return "ray"
        elif not word.startswith("-"):
            break
    script = Path(arguments[0] if arguments and arguments[0] else "run")
    if script.name in LAUNCHERS or "compile_worker" in script.parts:  # torch's own helpers
        return None
    return script.parent.name if script.name == "__main__.py" else script.name
