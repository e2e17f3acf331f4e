"""The command line. Only this package prints and decides exit codes.

Output for programs is one JSON document with a version, on stdout (`--json`). Output for people is
plain text. An error is one line on stderr, and the exit code is its kind.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.basics.version import __version__
from pytracer.cli import (
    attach,
    baseline,
    check,
    completion,
    export,
    fit,
    imagine,
    jobs,
    measure,
    output,
    predict,
    run,
    show,
)
from pytracer.cli.command import Command, Parser, commands_of, without_program
from pytracer.recording.start import AUTOSTART

COMMANDS: tuple[Command, ...] = (
    show.Demo(),
    show.Summary(),
    run.Run(),
    show.Watch(),
    attach.Attach(),
    attach.Detach(),
    check.Check(),
    baseline.Baseline(),
    predict.Fits(),
    fit.Fit(),
    predict.WhatIf(),
    imagine.Imagine(),
    show.Diff(),
    export.Export(),
    export.Report(),
    jobs.Query(),
    show.Ledger(),
    measure.Gemm(),
    measure.Cost(),
    measure.Confirm(),
    show.Doctor(),
    completion.Completion(lambda: _parsers()[0]),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    AUTOSTART.disarm()
    parser, commands = _parsers()
    arguments, program = without_program(
        sys.argv[1:] if arguments is None else arguments, commands.choices
    )
    if arguments[:1] == ["help"]:
        _help_of(arguments[1:], parser).print_help()
        return 0
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands.choices:
        similar = _for_a_file(arguments[0])
        similar = similar or errors.did_you_mean(arguments[0], [*commands.choices, "help"])
        all_of_them = f"; there are {', '.join(commands.choices)}"
        parser.error(f"there is no command {arguments[0]!r}{similar or all_of_them}")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        words = " ".join(unknown)
        of_command = commands.choices.get(options.command, parser)
        hint = of_command.similar(unknown)
        if not hint and (program or options.command == "run"):
            hint = "; the script's own options go after the script"
        of_command.error(f"unrecognized arguments: {words}{hint}")
    if options.command is None:
        parser.print_help()
        return errors.UsageError.exit_code
    options.program = program
    command: Callable[[argparse.Namespace], int] = options.run
    parser = commands.choices[options.command]
    if options.command == "run":
        try:
            return command(options)  # Python prints the program's exceptions and exits
        except SystemExit as end:
            if end.code == errors.UsageError.exit_code:
                _say(parser.given_too_late(options.program))
            raise
    output.ready_streams()
    try:
        code = command(options)
        sys.stdout.flush()
        if code:
            _say(parser.given_too_late(options.program))
        return code
    except errors.PytracerError as error:
        _say(output.in_words(error))
        _say(parser.given_too_late(options.program))
        return error.exit_code
    except OSError as error:
        # Keeps Python from flushing the broken stream again as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader has seen enough: `pytracer ... | head`
            return 0
        file = error.filename or "the output"
        print(f"pytracer: {file}: {error.strerror or error}", file=sys.stderr)
        return 1
    except MemoryError:
        print(
            "pytracer: out of memory; use a machine with more memory",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130


def _say(text: str) -> None:
    if text:
        print(f"pytracer: {text}", file=sys.stderr)


def _help_of(words: Sequence[str], parser: Parser) -> argparse.ArgumentParser:
    """The parser of the command that the words name, such as `gemm sweep`."""
    found: argparse.ArgumentParser = parser
    for word in words:
        below = commands_of(found)
        if word not in below:
            question = errors.did_you_mean(word, below)
            parser.error(f"help explains a command, and {word!r} is none{question}")
        found = below[word]
    return found


def _for_a_file(word: str) -> str:
    """A question with the command for this file, if the word is one."""
    commands = {".py": "run", ".pytrace": "summary", ".pickle": "summary"}
    command = commands.get(Path(word).suffix)
    return f"; did you mean pytracer {command} {shlex.quote(word)}?" if command else ""


def _parsers() -> tuple[Parser, Any]:
    """The parser of `pytracer`, and its subparsers, one for each command."""
    parser = Parser(
        prog="pytracer",
        description="Where a training step's memory went, to the byte.",
        epilog="`pytracer help COMMAND` explains a command. Commands that read a trace take the newest "
        "in this folder, if none is named. In your own code: `from pytracer import trace`, then `with trace():` around a step. "
        "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 over a limit, 4 no readable trace; `run` "
        "has the program's own.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"pytracer {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser, commands
