"""The options of a recording. Each is one row of OPTIONS, and is written nowhere else.

The rows make the parser of `pytracer run`, the keys of PYTRACER, what the ranks that a program
starts inherit, and the table in docs/environment.md.
"""

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pytracer import errors
from pytracer.basics.units import parse_size
from pytracer.recording.start import NAME, OFF

if TYPE_CHECKING:
    from pytracer.recording.traced_program import Plan

_ON = ("1", "on", "yes", "true")
Settings = Mapping[str, Any]  # what was asked for, by key


class Option(NamedTuple):
    """An option of `pytracer run`, and a key of PYTRACER."""

    key: str
    flags: tuple[str, ...]
    read: Callable[[str], Any]  # raises ValueError with what a value has to be
    help: str
    value: str  # one, as the docs show it
    default: Any = None
    otherwise: str = ""  # the default in words, if it is not the text of the value
    choices: tuple[str, ...] = ()
    for_environment: bool = True  # if not, a program that has the option has no recorded children
    for_children: bool = True
    when_attached: bool = False  # whether `pytracer attach` has it

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value on the command line."""
        return isinstance(self.default, bool)

    @property
    def name_of_value(self) -> str | None:
        """What the help calls a value; None for the words of `choices`."""
        return None if self.choices else self.value if self.value.isupper() else "VALUE"


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("a number")
    return int(text)


def _steps(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError('a positive number of steps, or "all"')
    return int(text)


def _ranks(text: str) -> tuple[int, ...]:
    """The ranks in "0,8-15". In PYTRACER a plus stands for the comma, which ends a key there."""
    text = text.replace("+", ",")
    if not re.fullmatch(r"\d{1,7}(-\d{1,7})?(,\d{1,7}(-\d{1,7})?)*", text):
        raise ValueError("a list of ranks, as in 0,8-15 (in PYTRACER 0+8-15)")
    ends = (part.partition("-") for part in text.split(","))
    return tuple(
        rank for first, _, last in ends for rank in range(int(first), int(last or first) + 1)
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError("a list of modules, as in h.0,h.1")
    return names


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except errors.UsageError:
        raise ValueError("a size, as in 200MiB") from None


def _switch(text: str) -> bool:
    if text not in (*OFF, *_ON):
        raise ValueError("1 or 0")
    return text in _ON


def _one_of(*allowed: str) -> Callable[[str], str]:
    def choose(text: str) -> str:
        if text not in allowed:
            raise ValueError(" or ".join(allowed))
        return text

    return choose


_DETAILS, _WAYS, _DEVICES = ("op", "category"), ("auto", "hooks"), ("cpu", "cuda")

OPTIONS = (
    Option(
        "path",
        ("-o", "--output"),
        Path,
        "default: SCRIPT.pytrace, or SCRIPT.1.pytrace, ...",
        "FILE",
        otherwise="the program's name, `.pytrace`",
        when_attached=True,
    ),
    Option("force", ("-f", "--force"), _switch, "overwrite the output file", "1", default=False),
    Option(
        "steps",
        ("--steps",),
        _steps,
        'steps to keep (default 5; or "all")',
        "N",
        default=5,
        when_attached=True,
    ),
    Option("skip", ("--skip",), _number, "steps before those to keep (default 0)", "N", default=0),
    Option(
        "watch",
        ("--no-watch",),
        _switch,
        "do not trace the steps after the kept ones",
        "0",
        default=True,
    ),
    Option(
        "always",
        ("--always",),
        _switch,
        "for weeks: totals of every step, and a look at some; in SCRIPT.always/",
        "1",
        default=False,
    ),
    Option(
        "stop",
        ("--stop",),
        _switch,
        "end the program after the steps to keep",
        "1",
        default=False,
        for_environment=False,
    ),
    Option(
        "checkpoint",
        ("--checkpoint",),
        _names,
        "checkpoint these modules (h.0,h.1 or h.*), to try a plan without changing the program",
        "NAMES",
        default=(),
        for_environment=False,
    ),
    Option(
        "offload",
        ("--offload",),
        _names,
        "offload the activations of these modules to the host, likewise",
        "NAMES",
        default=(),
        for_environment=False,
    ),
    Option(
        "apply",
        ("--apply",),
        Path,
        "make the changes of this plan, which pytracer fit has written",
        "FILE",
        otherwise="none",
        for_environment=False,
    ),
    Option(
        "stacks",
        ("--stacks",),
        _switch,
        "also record the Python line of everything",
        "1",
        default=False,
        when_attached=True,
    ),
    Option(
        "detail",
        ("--detail",),
        _one_of(*_DETAILS),
        "category: no operators, at a fraction of the cost (default: op)",
        "category",
        default="op",
        choices=_DETAILS,
        when_attached=True,
    ),
    Option(
        "saved_tensors",
        ("--saved-tensors",),
        _one_of(*_WAYS),
        "hooks: see each tensor at the moment autograd saves it; auto reads the graph "
        "(default: auto)",
        "hooks",
        default="auto",
        choices=_WAYS,
        when_attached=True,
    ),
    Option(
        "anonymous",
        ("--anonymous",),
        _switch,
        "leave out host, process numbers, command, folders and paths",
        "1",
        default=False,
        when_attached=True,
    ),
    Option(
        "device",
        ("--device",),
        _one_of(*_DEVICES),
        "default: both, if there is CUDA",
        "cpu",
        otherwise="both, where CUDA is",
        choices=_DEVICES,
        when_attached=True,
    ),
    Option(
        "json",
        ("--json",),
        Path,
        "also write the summary as JSON to this file",
        "FILE",
        otherwise="none",
        for_children=False,
    ),
    Option(
        "ranks",
        ("--ranks",),
        _ranks,
        "record only these ranks of a job, say 0,8-15; default: all",
        "LIST",
        default=(),
        otherwise="all",
    ),
    Option(
        "max_size",
        ("--max-size",),
        _size,
        "the most bytes of a rank's file, about; default: 250 MB. Later events are counted",
        "SIZE",
        otherwise="250 MB",
        when_attached=True,
    ),
    Option(
        "digests",
        ("--digests",),
        Path,
        "each rank also writes its digest there; ask them with pytracer query FOLDER",
        "FOLDER",
        otherwise="none",
    ),
)
_BY_KEY = {option.key: option for option in OPTIONS}
_OF_TRACE = ("stacks", "detail", "saved_tensors", "anonymous")
_OF_PLAN = (
    "force",
    "skip",
    "steps",
    "watch",
    "always",
    "checkpoint",
    "offload",
    "ranks",
    "max_size",
)
_WITH_ALWAYS = ("always", "path", "device", "ranks", "max_size")


# ---------------------------------------------------------------- the command line


def add_to(parser: argparse.ArgumentParser, *, when_attached: bool = False) -> None:
    """Adds the options to a parser. One that is not given is absent in the result."""
    kept = parser.add_mutually_exclusive_group()
    for option in OPTIONS:
        if when_attached and not option.when_attached:
            continue
        to = kept if option.key == "steps" else parser
        if option.is_switch:
            to.add_argument(
                *option.flags,
                dest=option.key,
                action="store_false" if option.default else "store_true",
                default=argparse.SUPPRESS,
                help=option.help,
            )
        else:
            to.add_argument(
                *option.flags,
                dest=option.key,
                type=_for_the_parser(option),
                default=argparse.SUPPRESS,
                metavar=option.name_of_value,
                choices=option.choices or None,
                help=option.help,
            )
    if when_attached:
        return
    kept.add_argument(
        "--schedule",
        type=_schedule,
        default=argparse.SUPPRESS,
        metavar="WAIT,WARMUP,ACTIVE",
        help="skip and keep steps, counted as in torch.profiler.schedule",
    )


def _for_the_parser(option: Option) -> Callable[[str], Any]:
    if option.choices:
        return str  # argparse names the choices

    def read(text: str) -> Any:
        try:
            return option.read(text)
        except ValueError as allowed:
            raise argparse.ArgumentTypeError(f"{text} is not {allowed}") from None

    return read


def _schedule(text: str) -> dict[str, int]:
    numbers = [int(part) if part.isdecimal() else -1 for part in text.split(",")]
    if len(numbers) != 3 or min(numbers) < 0 or numbers[2] < 1:
        raise argparse.ArgumentTypeError(f"{text} is not WAIT,WARMUP,ACTIVE, say 1,1,3")
    return {"skip": sum(numbers[:2]), "steps": numbers[2]}


def given(options: argparse.Namespace) -> Settings:
    """The settings that the command line has.

    Raises:
        errors.UsageError: two options contradict each other.
    """
    values = vars(options)
    settings = {key: values[key] for key in _BY_KEY if key in values}
    if "schedule" in values:
        if "skip" in settings:
            raise errors.UsageError("--schedule also says which steps to skip: leave out --skip")
        settings |= values["schedule"]
    return settings


def words(settings: Settings) -> Iterator[str]:
    """The words of a command line with these settings."""
    for key, value in settings.items():
        option = _BY_KEY[key]
        if value == option.default:
            continue
        yield option.flags[-1]
        if not option.is_switch:
            yield _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "all" if value is None else str(value)


# ---------------------------------------------------------------- the variable


def in_environment(text: str) -> Settings:
    """The settings in the value of PYTRACER, and "only", if only children are recorded.

    Raises:
        errors.UsageError: a setting is unknown or has a wrong value.
    """
    if text.strip().lower() in _ON:
        return {}
    if text.strip().lower() == "always":
        return {"always": True}
    readers = {option.key: option.read for option in OPTIONS if option.for_environment}
    readers["only"] = _one_of("children")
    settings = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if key not in readers or not equals:
            raise errors.UsageError(
                f"{NAME}={text}: {part.strip()!r} is not understood. It is 1, 0, or KEY=VALUE with "
                f"commas; keys are {', '.join(readers)}: {NAME}=path=run.pytrace,steps=5"
            )
        try:
            settings[key] = readers[key](value)
        except ValueError as allowed:
            raise errors.UsageError(f"{NAME}={text}: {key} is {allowed}") from None
    return settings


def for_children(settings: Settings) -> str | None:
    """The value of PYTRACER for processes that a recorded program starts; None if there is none.

    They are recorded if they are ranks of a job, or train in a child of multiprocessing.
    """
    parts = ["only=children"]
    for key, value in settings.items():
        option = _BY_KEY[key]
        if value == option.default or not option.for_children:
            continue
        if not option.for_environment:
            return None
        text = _text(value.absolute() if isinstance(value, Path) else value)
        text = text.replace(",", "+") if isinstance(value, tuple) else text
        if "," in text:  # a file's name
            return None
        parts.append(f"{key}={text}")
    return ",".join(parts)


# ---------------------------------------------------------------- the plan, and the docs


def plan(settings: Settings, program: Sequence[str], **more: Any) -> "Plan":
    """What to record of this program.

    Raises:
        errors.UsageError: two settings contradict each other.
    """
    from pytracer.recording.traced_program import Plan

    if settings.get("always"):
        others = [key for key in settings if key not in _WITH_ALWAYS]
        if others:
            flags = ", ".join(_BY_KEY[key].flags[-1] for key in others)
            raise errors.UsageError(f"--always decides itself what to record: leave out {flags}")

    values = {option.key: option.default for option in OPTIONS} | dict(settings)
    if values["apply"] is not None:
        from pytracer.reading import plan_file

        more["changes"] = changes = plan_file.read(values["apply"]).changes
        for key in ("checkpoint", "offload"):
            values[key] = (*values[key], *getattr(changes, key))
    return Plan(
        tuple(program),
        output=values["path"],
        devices=() if values["device"] is None else (values["device"],),
        options={key: values[key] for key in _OF_TRACE},
        **{key: values[key] for key in _OF_PLAN},
        **more,
    )


def table() -> str:
    """The options as the table of docs/environment.md."""
    rows = ["| in `PYTRACER` | in `pytracer run` | default |", "|---|---|---|"]
    for option in OPTIONS:
        key = f"`{option.key}={option.value}`" if option.for_environment else ""
        default = _text(option.default) if option.default not in (None, ()) else "none"
        rows.append(f"| {key} | `{option.flags[-1]}` | {option.otherwise or default} |")
    return "\n".join(rows)
