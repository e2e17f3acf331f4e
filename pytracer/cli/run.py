"""`pytracer run`: records a program without a change to it."""

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pytracer import errors
from pytracer.cli import output, recording
from pytracer.cli.command import Command
from pytracer.cli.messages import Messages
from pytracer.recording.start import NAME


class Run(Command):
    """Run a script or module and record its memory.

    Runs a script as Python would, with its arguments, and records its memory:

      pytracer run train.py --lr 0.1              5 steps, in train.pytrace
                                                  (the next in train.1.pytrace)
      pytracer run -o run.pytrace -m my.training  a module, as python -m
      pytracer run --steps 50 --stacks train.py   more steps, and Python lines
      torchrun --nproc-per-node 8 -m pytracer run train.py      one file per rank
      accelerate launch -m pytracer run train.py
      pytracer run --always train.py              for weeks, at half a per cent

    A step ends at optimizer.step(), or at the last one if several optimizers take
    turns. The first steps are written to the file as they happen, so a killed
    process leaves a file. Later steps are watched, 20 at a time, and not kept. If
    an allocation fails then, pytracer explains it and saves those steps, and it
    names a step with a higher peak than the first ones. Watching records no
    operators unless --stacks is given, and leaves out steps where it would take
    more than 3 % of the processor time. --no-watch stops tracing after the first
    steps. A program without steps is recorded to its end. A program without
    tensors leaves no file.

    Options for pytracer come before the script; options after it are the script's
    own. Its exit code, signals and tracebacks stay as they are without pytracer.
    Under a launcher only rank 0 prints.
    """

    name = "run"
    parser_options: ClassVar[Mapping[str, Any]] = {
        "usage": "pytracer run [options] (SCRIPT | -m MODULE) [arguments]",
        "allow_abbrev": False,  # without_program knows the whole words only
    }

    runs_a_program: ClassVar[bool] = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        recording.add_to(parser)
        parser.add_argument(
            "--live",
            action="store_true",
            help="record every step, and show it on this terminal while the program runs",
        )

    def run(self, options: argparse.Namespace) -> int:
        """Runs the program. Its exceptions pass through, as they do without pytracer."""
        from pytracer.recording import always_program, traced_program

        program: list[str] = options.program
        as_module = program[:1] == ["-m"]
        words = program[1:] if as_module else program
        prepared: Callable[[], int]
        try:
            if not words:
                raise errors.UsageError(
                    "run needs a script: pytracer run train.py, or see pytracer run -h"
                )
            settings = recording.given(options)
            plan = recording.plan(settings, words, as_module=as_module)
            if options.live and plan.always:
                raise errors.UsageError("--live shows every step: leave out --always")
            if options.live:
                return _run_live(settings, program, plan)
            messages = Messages(
                settings.get("json"),
                plan.force,
                unwatch="--no-watch" if plan.watch else "",
                stop=settings.get("stop", False),
                digests=settings.get("digests"),
            )
            prepared = traced_program.prepare(plan, always_program.recorder(plan, messages))
        except errors.PytracerError as error:
            output.tell(f"pytracer: {output.in_words(error)}")
            return error.exit_code
        _record_children_too(settings)
        return prepared()


def _record_children_too(settings: recording.Settings) -> None:
    """Passes the same options on to the ranks that the program may start itself, as Lightning does.

    A rank that a launcher started has no ranks below it: its processes are helpers.
    """
    from pytracer.basics import environment

    value = recording.for_children(settings)
    if value is not None and environment.world_size() == 1:
        os.environ[NAME] = value


def _run_live(settings: recording.Settings, program: list[str], plan: Any) -> int:
    """Runs the program in a process of its own, which keeps its signals, and watches it from here."""
    from pytracer.basics import environment
    from pytracer.cli import watch

    if environment.world_size() > 1:
        raise errors.UsageError(
            "--live is for a single process; run without it, and in another terminal: "
            "pytracer watch train.rank0.pytrace"
        )
    path: Path = plan.place().unused()
    # A watched recording needs all steps.
    own = recording.words({"steps": None, **settings, "path": path})
    return watch.run_live([*own, *program], path)
