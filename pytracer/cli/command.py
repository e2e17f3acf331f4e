"""The interface of a command. Its docstring is its help: one line for the list, then the page."""

import argparse
import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from pytracer import errors


class Parser(argparse.ArgumentParser):
    """Explains a wrong argument in one sentence, with the most similar right one."""

    runs_a_program = False
    may_run_a_program = False
    may_follow: tuple[str, ...] = ()

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2."""
        self.exit(errors.UsageError.exit_code, f"{self.prog}: {message}\n")

    def flags_with_a_value(self) -> set[str]:
        """The options after which a word is no argument of its own."""
        takes = [action for action in self._actions if action.nargs != 0]
        return {flag for action in takes for flag in action.option_strings}

    def flags(self) -> list[str]:
        """All options."""
        return [name for action in self._actions for name in action.option_strings]

    def given_too_late(self, program: Sequence[str]) -> str:
        """A note on options of this command that the program got; "" if there are none.

        An option whose name is in the program's own file is the program's.
        """
        if not program:
            return ""
        at = 2 if program[:1] == ["-m"] else 1
        text = self._file_of(program)
        names = dict.fromkeys(word.partition("=")[0] for word in program[at:])
        own = self.flags()
        late = [
            name
            for name in names
            if name in own and not re.search(rf"\b{re.escape(name.strip('-'))}\b", text)
        ]
        if not late:
            return ""
        listed = " and ".join(late)
        return (
            f"{listed} came after {program[at - 1]}, which got {'it' if len(late) == 1 else 'them'}: "
            "options for pytracer come before"
        )

    def taken_back(self, program: Sequence[str]) -> tuple[list[str], list[str]]:
        """The options of this command that may follow the program, and the program without them.

        An option that the program's own file spells is the program's.
        """
        at = 2 if program[:1] == ["-m"] else 1
        spelled = self._file_of(program)
        own, left = [], list(program[:at])
        rest = iter(program[at:])
        takes_a_value = self.flags_with_a_value()
        for word in rest:
            name, equals, _ = word.partition("=")
            if name not in self.may_follow or re.search(rf"(?<![\w-]){name}(?![\w-])", spelled):
                left.append(word)
                continue
            own.append(word)
            if name in takes_a_value and not equals:
                own += [value for value in [next(rest, None)] if value is not None]
        return own, left

    @staticmethod
    def _file_of(program: Sequence[str]) -> str:
        with suppress(OSError, ValueError):
            if program[0] != "-m":
                text = Path(program[0]).read_text("utf-8", errors="replace")
                return "" if "\0" in text else text  # a trace is no program
        return ""

    def similar(self, words: Sequence[str]) -> str:
        """A question with the option that is most similar to one of the words, or ""."""
        options = self.flags()
        for word in words:
            # Stricter than for commands: `run` is also given options of the script, like --epochs.
            question = errors.did_you_mean(word.partition("=")[0], options, least=0.8)
            if word.startswith("--") and question:
                return question
        return ""

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # Some Pythons drop the value of `--by=--`, and argparse then returns an empty list.
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            value = self._get_value(action, "--")
            self._check_value(action, value)
            return value
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = list(action.choices or ())
        if choices and value not in choices:
            question = errors.did_you_mean(str(value), map(str, choices))
            listed = f"; there are {', '.join(map(str, choices))}"
            raise argparse.ArgumentError(action, f"invalid choice {value!r}{question or listed}")


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the commands below this one, by name."""
    below = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {name: one for action in below for name, one in action.choices.items()}


class Command:
    """A command: subclasses are listed in `pytracer.cli.COMMANDS`.

    - The docstring's first paragraph is the line in `pytracer --help`.
    - The rest of it heads `pytracer NAME --help`. It has examples, and lines of at most 79 signs.
    - `add_arguments` declares the options, and `run` answers them.
    """

    name: ClassVar[str]
    parser_options: ClassVar[Mapping[str, Any]] = {}  # further arguments of argparse's `add_parser`
    runs_a_program: ClassVar[bool] = False  # after its own options
    may_run_a_program: ClassVar[bool] = False  # if the first word is a script or -m
    may_follow: ClassVar[tuple[str, ...]] = ()  # its options that may also come after the program

    @classmethod
    def texts(cls) -> tuple[str, str]:
        """The line in the list of commands, and the text above the command's options."""
        line, _, page = (inspect.getdoc(cls) or "").partition("\n\n")
        line = " ".join(line.split()).removesuffix(".")
        return line[:1].lower() + line[1:], page

    def add_to(self, commands: Any) -> None:
        """Adds the command's parser to argparse's subparsers."""
        line, page = self.texts()
        parser = commands.add_parser(
            self.name,
            help=line,
            description=page or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,  # examples keep their lines
            **self.parser_options,
        )
        self.add_arguments(parser)
        parser.runs_a_program = self.runs_a_program
        parser.may_run_a_program = self.may_run_a_program
        parser.may_follow = self.may_follow
        parser.set_defaults(run=self.run)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the command's options."""
        raise NotImplementedError

    def run(self, options: argparse.Namespace) -> int:
        """Runs the command and returns the exit code."""
        raise NotImplementedError


# What deepspeed's launcher puts in front of all arguments, for the training program to read.
_LOCAL_RANK = re.compile(r"--local[_-]rank=\d+")


def without_program(
    arguments: Sequence[str], commands: Mapping[str, argparse.ArgumentParser]
) -> tuple[list[str], list[str]]:
    """Splits a command's own options from the program and the program's options.

    A program that is a module begins with "-m". Other commands have a program after "--verify --".
    """
    given = list(arguments)
    if given and _LOCAL_RANK.fullmatch(given[0]):
        own, program = without_program(given[1:], commands)
        at = 2 if program[:1] == ["-m"] else 1
        return own, [*program[:at], given[0], *program[at:]]
    parser = commands.get(given[0]) if given else None
    if not isinstance(parser, Parser):
        return given, []
    if not parser.runs_a_program and not parser.may_run_a_program:
        at = given.index("--") if "--verify" in given and "--" in given else len(given)
        return given[:at], given[at + 1 :]
    at, begins = _where_it_begins(parser, given)
    program = given[begins:]
    if not program or (parser.may_run_a_program and not _is_a_program(program[0])):
        return given, []
    if at < begins:
        return given[:at], program
    own, program = parser.taken_back(program)
    return [*given[:at], *own], program


def _where_it_begins(parser: Parser, given: Sequence[str]) -> tuple[int, int]:
    """The end of the command's own words, and the first word of the program behind a "--"."""
    take_a_value = parser.flags_with_a_value()
    at = 1
    while at < len(given):
        if given[at] == "--":
            return at, at + 1
        if given[at] == "-m" or not given[at].startswith("-"):
            return at, at
        at += 2 if given[at] in take_a_value else 1
    return len(given), len(given)


def _is_a_program(word: str) -> bool:
    return word == "-m" or word.endswith(".py")
