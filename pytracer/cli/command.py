"""The interface of a command. Its docstring is its help: one line for the list, then the page."""

import argparse
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from pytracer import errors


class Parser(argparse.ArgumentParser):
    """Explains a wrong argument in one sentence, with the most similar right one."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2."""
        self.exit(errors.UsageError.exit_code, f"{self.prog}: {message}\n")

    def similar(self, words: Sequence[str]) -> str:
        """A question with the option that is most similar to one of the words, or ""."""
        options = [name for action in self._actions for name in action.option_strings]
        for word in words:
            # Stricter than for commands: `run` is also given options of the script, like --epochs.
            question = errors.did_you_mean(word.partition("=")[0], options, least=0.8)
            if word.startswith("--") and question:
                return question
        return ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = list(action.choices or ())
        if choices and value not in choices:
            question = errors.did_you_mean(str(value), map(str, choices))
            listed = f"; there are {', '.join(map(str, choices))}"
            raise argparse.ArgumentError(action, f"invalid choice {value!r}{question or listed}")


class Command:
    """A command: subclasses are listed in `pytracer.cli.COMMANDS`.

    - The docstring's first paragraph is the line in `pytracer --help`.
    - The rest of it heads `pytracer NAME --help`. It has examples, and lines of at most 79 signs.
    - `add_arguments` declares the options, and `run` answers them.
    """

    name: ClassVar[str]
    parser_options: ClassVar[Mapping[str, Any]] = {}  # further arguments of argparse's `add_parser`

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
        parser.set_defaults(run=self.run)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the command's options."""
        raise NotImplementedError

    def run(self, options: argparse.Namespace) -> int:
        """Runs the command and returns the exit code."""
        raise NotImplementedError
