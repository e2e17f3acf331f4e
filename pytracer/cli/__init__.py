"""The command line: the only place that prints, and the only one that decides how to exit.

What a program reads goes to stdout (`--json`, one document with a version); what a person reads
is plain text. Errors are one line on stderr, and the exit code says which kind they are.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pytracer import errors
from pytracer.cli import (
    autostart,
    check,
    export,
    imagine,
    measure,
    output,
    predict,
    run,
    show,
    watch,
)
from pytracer.cli.command import Command
from pytracer.version import __version__

COMMANDS: tuple[Command, ...] = (
    show.Demo(),
    show.Summary(),
    run.Run(),
    watch.Watch(),
    check.Check(),
    predict.Fits(),
    predict.WhatIf(),
    imagine.Imagine(),
    show.Diff(),
    export.Export(),
    export.Report(),
    show.Ledger(),
    measure.Gemm(),
    measure.Cost(),
    measure.Confirm(),
    show.Doctor(),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    autostart.THIS_PROCESS.disarm()
    parser, commands = _parsers()
    arguments, program = run.without_program(sys.argv[1:] if arguments is None else arguments)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands.choices:
        similar = errors.did_you_mean(arguments[0], commands.choices)
        all_of_them = f"; there is {', '.join(commands.choices)}"
        parser.error(f"there is no command {arguments[0]!r}{similar or all_of_them}")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        words = " ".join(unknown)
        hint = (
            "; the script's own options go after the script"
            if program or options.command == "run"
            else ""
        )
        of_command = commands.choices.get(options.command, parser)
        of_command.error(f"unrecognized arguments: {words}{hint}")
    if options.command is None:
        parser.print_help()
        return errors.UsageError.exit_code
    options.program = program
    command: Callable[[argparse.Namespace], int] = options.run
    if options.command == "run":
        return command(options)  # Python prints the program's exceptions and exits
    output.ready_streams()
    try:
        code = command(options)
        sys.stdout.flush()
        return code
    except errors.PytracerError as error:
        print(f"pytracer: {output.in_words(error)}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        # Nothing more is to be tried when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # `pytracer ... | head`: who reads has seen enough
            return 0
        what = error.filename or "the output"
        print(f"pytracer: {what}: {error.strerror or error}", file=sys.stderr)
        return 1
    except MemoryError:
        print(
            "pytracer: there is not enough memory; use a machine with more",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130


def _parsers() -> tuple[argparse.ArgumentParser, Any]:
    """The parser of `pytracer`, and its subparsers, one for each command."""
    parser = argparse.ArgumentParser(
        prog="pytracer",
        description="Where a training step's memory went, to the byte.",
        epilog="In your own code: `from pytracer import trace`, then `with trace():` around a step. "
        "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 over a limit, 4 no readable trace; `run` "
        "has the program's own.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"pytracer {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser, commands
