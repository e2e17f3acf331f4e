"""`PYTRACER=1 python train.py` does the same as `pytracer run train.py`.

`pytracer.pth` lies beside the installed package. It imports this module as Python starts, but only if
PYTRACER is set. Recording begins when the program has imported torch.
"""

import atexit
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytracer import environment, errors
from pytracer.cli import output

NAME = "PYTRACER"
_OFF = ("", "0", "off", "no", "false")
_ON = ("1", "on", "yes", "true")


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("a number")
    return int(text)


def _steps(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError('a number of steps, or "all"')
    return int(text)


def _ranks(text: str) -> tuple[int, ...]:
    """Ranks with a plus between them, because commas are taken: "0+8-15"."""
    from pytracer.cli.run import ranks

    try:
        return ranks(text.replace("+", ","))
    except ArgumentTypeError:
        raise ValueError("a list of ranks, as in 0+8-15") from None


def _size(text: str) -> int:
    from pytracer.units import parse_size

    try:
        return parse_size(text)
    except errors.UsageError:
        raise ValueError("a size, as in 200MiB") from None


def _switch(text: str) -> bool:
    if text not in (*_OFF, *_ON):
        raise ValueError("1 or 0")
    return text in _ON


def _one_of(*allowed: str) -> Callable[[str], str]:
    def choose(text: str) -> str:
        if text not in allowed:
            raise ValueError(" or ".join(allowed))
        return text

    return choose


# The keys of PYTRACER, like the options of `pytracer run`.
_KEYS: Mapping[str, Callable[[str], Any]] = {
    "path": Path,
    "force": _switch,
    "steps": _steps,
    "skip": _number,
    "watch": _switch,
    "stacks": _switch,
    "detail": _one_of("op", "category"),
    "saved_tensors": _one_of("auto", "hooks"),
    "device": _one_of("cpu", "cuda"),
    "json": Path,
    "anonymous": _switch,
    "ranks": _ranks,
    "max_size": _size,
    "digests": Path,
    "only": _one_of("children"),
}


def asked(text: str) -> dict[str, Any]:
    """The settings in the value of PYTRACER.

    Raises:
        errors.UsageError: a setting is unknown or has a wrong value.
    """
    if text.strip().lower() in _ON:
        return {}
    settings = {}
    for part in text.split(","):
        key, given, value = (word.strip() for word in part.partition("="))
        if key not in _KEYS or not given:
            raise errors.UsageError(
                f"{NAME}={text}: {part.strip()!r} is not understood. It is 1, 0, or KEY=VALUE with "
                f"commas; keys are {', '.join(_KEYS)}: {NAME}=path=run.pytrace,steps=5"
            )
        try:
            settings[key] = _KEYS[key](value)
        except ValueError as allowed:
            raise errors.UsageError(f"{NAME}={text}: {key} is {allowed}") from None
    return settings


def for_children(settings: Mapping[str, Any]) -> str | None:
    """The value of PYTRACER for processes that a recorded program starts; None if there is none.

    They are recorded if they are ranks of a job, or train in a child of multiprocessing.
    """
    words = {"only": "children"}
    for key, value in settings.items():
        if isinstance(value, bool):
            words[key] = str(int(value))
        elif key == "ranks":
            words[key] = "+".join(map(str, value))
        else:
            words[key] = str(value)
    text = ",".join(f"{key}={word}" for key, word in words.items())
    return text if text.count(",") == len(words) - 1 else None  # a file's name has a comma


class Autostart:
    """Records this process, from its import of torch to its end."""

    def __init__(self) -> None:
        """Does nothing until `arm`."""
        self._is_armed = self._silent = False
        self._forget: Callable[[], None] = lambda: None
        self._traced: Any = None

    def arm(self) -> None:
        """Starts the recording at the program's own `import torch`.

        Called by each `pytracer.pth` that Python reads: there may be one for the user as well.
        """
        if self._is_armed or os.environ.get(NAME, "").strip().lower() in _OFF:
            return
        from pytracer import runner

        self._is_armed = True
        self._forget = runner.after_import("torch", self._begin)

    def disarm(self) -> None:
        """Turns the recording off, for our own commands."""
        self._forget()

    def _begin(self) -> None:
        try:
            settings = asked(os.environ.get(NAME, "1"))
            program = _program(sys.orig_argv, sys.argv)
            is_child = _is_child(sys.orig_argv)
            only_children = "only" in settings and environment.world_size() == 1
            if program is not None and (is_child or not only_children):
                self._record(program, settings, is_child=is_child)
        except errors.PytracerError as problem:  # the program goes on without a recording
            if environment.rank() == 0:
                text = str(problem).replace("overwrite=True", f"force=1 in {NAME}")
                output.tell(f"pytracer: not recorded: {text}")

    def _record(self, program: str, settings: dict[str, Any], *, is_child: bool) -> None:
        from pytracer import runner
        from pytracer.capture.hooks import HOOKS
        from pytracer.cli.run import Teller
        from pytracer.files import refuse_to_overwrite

        device, force = settings.get("device"), settings.get("force", False)
        plan = runner.Plan(
            program=(program,),
            output=settings.get("path"),
            force=force,
            skip=settings.get("skip", 0),
            steps=settings.get("steps", 5),
            watch=settings.get("watch", True),
            devices=(device,) if device else (),
            options={
                name: settings[name]
                for name in ("stacks", "detail", "saved_tensors", "anonymous")
                if name in settings
            },
            ranks=settings.get("ranks", ()),
            max_size=settings.get("max_size"),
            by_environment=True,
            is_child=is_child,
        )
        path = plan.file()
        refuse_to_overwrite(path, overwrite=force)
        self._traced = runner.Traced(
            plan,
            path,
            Teller(settings.get("json"), force, every="steps=all", digests=settings.get("digests")),
        )
        # Silent about programs that train nothing, because many import torch.
        self._silent = plan.skip == 0
        self._traced.begin()
        # Python calls the last registered function first, so our end comes before the recordings'.
        HOOKS.await_exit()
        if is_child:  # Python does not end there as usual
            import multiprocessing.util

            multiprocessing.util.Finalize(None, self._end, exitpriority=0)
        else:
            atexit.register(self._end)

    def _end(self) -> None:
        """Called as Python ends. Python has kept the exception, if the program died of one."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if hasattr(sys, "ps1"):  # a prompt goes on after errors
            error = None
        self._traced.end(error, gave_up=self._silent)
        self._traced.say_why()


# Python runs these for the processes that a program starts and may train in.
_CHILDREN = ("from multiprocessing.spawn", "from multiprocessing.forkserver")
_RAY_WORKER = "ray/_private/workers/default_worker.py"


def _is_child(original: list[str]) -> bool:
    """Whether a program that runs already started this process to work for it."""
    return any(word.startswith(_CHILDREN) or word.endswith(_RAY_WORKER) for word in original)


def _program(original: list[str], arguments: list[str]) -> str | None:
    """The program's name; None for processes that only help or start others."""
    from pytracer.runner import LAUNCHERS

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


THIS_PROCESS = Autostart()
