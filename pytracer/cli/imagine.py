"""`pytracer imagine`: runs a script on imagined cards."""

import argparse
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from pytracer import errors
from pytracer.cli import output
from pytracer.cli.command import Command


class Imagine(Command):
    """Run a script on imagined cards: would it fit? exit code 3 if it fits on no card.

    Runs the first steps of a script on an imagined card. That needs no GPU and no
    memory, because its tensors have shapes only. Records the allocations, and
    compares them with each card.

      pytracer imagine train.py --on A100-40GB,H100,RTX4090
      pytracer imagine --on H100 --capacity 64GiB train.py --batch 32
      pytracer imagine --on RTX4090 --keep traces -m my.training

    Options for pytracer come before the script; only --on may also follow it. All
    other options after the script are the script's own. The script runs in a
    process of its own, in which torch.cuda describes the card, and is stopped after
    two steps of its optimizer. Values of tensors are stand-ins: the output lists
    those that are read, and an error names a line that decides by one.
    """

    name = "imagine"
    parser_options: ClassVar[Mapping[str, Any]] = {
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "usage": "pytracer imagine [options] (SCRIPT | -m MODULE) [arguments]",
        "allow_abbrev": False,
    }

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--on", metavar="CARDS", default="H100", help="the cards, with commas (default: H100)"
        )
        parser.add_argument(
            "--capacity", metavar="SIZE", help="the cards' memory, if it is not the usual one"
        )
        parser.add_argument(
            "--steps",
            type=output.positive,
            default=2,
            metavar="N",
            help="steps of its optimizer to run (default 2)",
        )
        parser.add_argument(
            "--stacks", action="store_true", help="also record the Python line of everything"
        )
        parser.add_argument(
            "--assume",
            action="append",
            default=[],
            metavar="LINE=VALUE",
            help="the outcome of a decision: train.py:12=false",
        )
        parser.add_argument(
            "--keep", type=Path, metavar="FOLDER", help="keep the traces in this folder"
        )
        output.add_json(parser)

    def run(self, options: argparse.Namespace) -> int:
        from pytracer.imagined import script
        from pytracer.units import parse_size

        program = list(options.program)
        if "--on" in program[:-1]:
            at = program.index("--on")
            options.on = program[at + 1]
            del program[at : at + 2]
        as_module = program[:1] == ["-m"]
        words = tuple(program[1:] if as_module else program)
        if not words:
            raise errors.UsageError("imagine needs a script: pytracer imagine train.py --on H100")
        size = None if options.capacity is None else parse_size(options.capacity)
        wanted = [_card(name, size) for name in options.on.split(",")]
        assume = dict(_assumed(text) for text in options.assume)
        with ExitStack() as stack:
            keep = options.keep
            if keep is None:
                keep = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            keep.mkdir(parents=True, exist_ok=True)
            runs = []
            for card in wanted:
                with output.patience(f"imagining {card.name}"):
                    plan = script.Plan(
                        words, as_module, card.name, size, options.steps, options.stacks, assume
                    )
                    runs.append((card, script.imagine(plan, keep)))
            return _print_answers(runs, as_json=options.json)


def _card(name: str, capacity: int | None) -> Any:
    if name[:1].isdigit():
        raise errors.UsageError(
            f"--on {name} is a size: name a card of the same architecture, and then the size: "
            f"--on RTX4090 --capacity {name}"
        )
    other = "card, name one of the same architecture and the size: --on RTX4090 --capacity 24GiB"
    return output.card(name, capacity, other=other)


TAKE_A_VALUE = {"--on", "--capacity", "--steps", "--assume", "--keep"}


def _assumed(text: str) -> tuple[str, bool]:
    line, _, value = text.rpartition("=")
    if not line or value.lower() not in ("true", "false"):
        raise errors.UsageError(
            f"--assume {text}: write LINE=true or LINE=false, as in train.py:12=false"
        )
    return line, value.lower() == "true"


def _print_answers(runs: Sequence[tuple[Any, Any]], *, as_json: bool) -> int:
    answers = [(card, imagined, _fits(card, imagined)) for card, imagined in runs]
    if as_json:
        output.print_json({"cards": [_document(*answer) for answer in answers]})
    else:
        _print_text(answers)
    if all(imagined.problem for _, imagined, _ in answers):
        return 1
    return 0 if any(fits for _, _, fits in answers) else errors.BudgetExceeded.exit_code


def _fits(card: Any, imagined: Any) -> Any:
    return None if imagined.trace is None else imagined.trace.fits(card.capacity)


def _print_text(answers: Sequence[tuple[Any, Any, Any]]) -> None:
    from pytracer.export.fits_text import on_a_card
    from pytracer.export.table import columns
    from pytracer.units import size_text

    first = next((imagined for _, imagined, _ in answers if imagined.trace is not None), None)
    if first is not None:
        print(first.trace.table())
        print()
    width = max(len(card.name) for card, _, _ in answers)
    for card, imagined, fits in answers:
        if imagined.problem:
            print(f"{card.name:<{width}}  cannot be imagined: {imagined.problem}")
            continue
        start = f"{card.name:<{width}}  {size_text(card.capacity):>8}  "
        indent = " " * len(start)
        print(
            textwrap.fill(
                on_a_card(fits), columns(), initial_indent=start, subsequent_indent=indent
            )
        )


def _document(card: Any, imagined: Any, fits: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "card": card.name,
        "capacity": card.capacity,
        "source": card.source,
        "problem": imagined.problem or None,
    }
    if imagined.trace is not None:
        peak = imagined.trace.peak
        document |= {
            "fits": bool(fits),
            "with": None if fits.helps is None else fits.helps.settings,
            "peak": peak.bytes,
            "by_category": dict(peak.by_category),
            "peak_reserved": fits.replay.peak_reserved,
            "beside": card.beside,
            "stand_ins": imagined.trace.data.meta["imagined"]["stand_ins"],
        }
    return document
