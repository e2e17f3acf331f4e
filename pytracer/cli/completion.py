"""`pytracer completion`: what bash completes, and the man page, from the options of all commands."""

import argparse
from collections.abc import Callable, Iterator

from pytracer.basics.version import __version__
from pytracer.cli.command import Command, commands_of

_BASH = """\
_pytracer() {{
    local options
    case "${{COMP_WORDS[*]:1:COMP_CWORD-1}} " in
{cases}
    esac
    COMPREPLY=($(compgen -W "$options" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _pytracer pytracer
"""


class Completion(Command):
    """Print what bash completes, or the man page.

    Both are made from the options of this version:

      pytracer completion bash    for .bashrc: eval "$(pytracer completion bash)"
      pytracer completion man     for ~/.local/share/man/man1/pytracer.1
    """

    name = "completion"

    def __init__(self, parser: Callable[[], argparse.ArgumentParser]) -> None:
        self._parser = parser

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("what", choices=("bash", "man"))

    def run(self, options: argparse.Namespace) -> int:
        print((_bash if options.what == "bash" else _man)(self._parser()), end="")
        return 0


def _all(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each command's words after `pytracer`, the longest first, and its parser."""
    for name, below in commands_of(parser).items():
        yield from ((f"{name} {words}".strip(), one) for words, one in _all(below))
    yield "", parser


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """What a person may write, as `--help` lists it."""
    shown = (action for action in parser._actions if action.help is not argparse.SUPPRESS)
    return (action for action in shown if not isinstance(action, argparse._SubParsersAction))


def _bash(parser: argparse.ArgumentParser) -> str:
    cases = []
    for words, one in _all(parser):
        listed = [*commands_of(one)]
        for action in _options(one):
            choices = [str(choice) for choice in action.choices or ()]
            listed += action.option_strings or choices
            flags = action.option_strings if choices else ()
            cases += [_case(f"'{words}'*' {flag} '", choices) for flag in flags]
        cases.append(_case(f"'{words} '*" if words else "*", listed))
    return _BASH.format(cases="\n".join(cases))


def _case(pattern: str, listed: list[str]) -> str:
    return f"        {pattern}) options='{' '.join(listed)}' ;;"


def _man(parser: argparse.ArgumentParser) -> str:
    lines = [f'.TH PYTRACER 1 "" "pytracer {__version__}"', ".SH NAME"]
    lines += ["pytracer \\- where a training step's memory went", ".SH SYNOPSIS"]
    lines += ["pytracer COMMAND [options]", ".SH DESCRIPTION", _roff(parser.epilog or "")]
    lines.append(".SH COMMANDS")
    for words, one in sorted(_all(parser), key=lambda each: each[0]):
        if words:
            lines += [f".SS pytracer {_roff(words)}", ".nf", _roff(one.description or ""), ".fi"]
        for action in _options(one):
            names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
            takes = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
            value = f" {takes}" if action.option_strings and takes else ""
            text = (action.help or "") % {**vars(action), "prog": one.prog}
            lines += [".TP", f".B {_roff(names + value)}", _roff(text)]
    return "\n".join(lines) + "\n"


def _roff(text: str) -> str:
    """The text for troff: no line is a request, and hyphens are those of the keyboard."""
    plain = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(
        f"\\&{line}" if line.startswith((".", "'")) else line for line in plain.split("\n")
    )
