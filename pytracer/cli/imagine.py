"""`pytracer imagine`: runs a script, or a model's configuration, on imagined cards."""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from pytracer import errors
from pytracer.cli import imagining, output, progress
from pytracer.cli.command import Command
from pytracer.cli.imagining import Answer, Card, beside, print_touched, touched


class Imagine(Command):
    """Run a script on imagined cards: would it fit? exit code 3 if it fits on no card.

    Runs the first steps of a script on an imagined card. That needs no GPU and no
    memory, because its tensors have shapes only. Records the allocations, and
    compares them with each card.

      pytracer imagine train.py --on A100-40GB,H100,RTX4090
      pytracer imagine --on H100 --capacity 64GiB train.py --batch 32
      pytracer imagine --on RTX4090 --keep traces -m my.training
      pytracer imagine --on H100 --ranks 64 train.py       one rank of 64
      pytracer imagine --hf FOLDER --batch 8 --seq 2048 --bf16 --shard fsdp2:64
      pytracer imagine --largest-batch --on T4,A10 train.py --batch-size {batch}
      pytracer imagine --on T4=0.35,A10=0.75 train.py      the cheapest, by price

    Options for pytracer come before the script; only --on may also follow it. All
    other options after the script are the script's own. The script runs in a
    process of its own, in which torch.cuda describes the card, and is stopped after
    two steps of its optimizer. Values of tensors are stand-ins: the output lists
    those that are read, and an error names a line that decides by one.
    """

    name = "imagine"
    parser_options: ClassVar[Mapping[str, Any]] = {
        "usage": "pytracer imagine [options] (SCRIPT | -m MODULE | --hf FOLDER) [arguments]",
        "allow_abbrev": False,
    }
    runs_a_program: ClassVar[bool] = True
    may_follow: ClassVar[tuple[str, ...]] = ("--on",)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        imagining.add_run(
            parser,
            on="the cards, with commas; with prices (T4=0.35) also the cheapest (default: H100)",
            write=True,
        )
        parser.add_argument(
            "--stacks", action="store_true", help="also record the Python line of everything"
        )
        parser.add_argument(
            "--keep", type=Path, metavar="FOLDER", help="keep the traces in this folder"
        )
        parser.add_argument(
            "--largest-batch",
            action="store_true",
            help="find the largest batch that fits; write {batch} where the script gets it",
        )
        output.add_json(parser)

    def run(self, options: argparse.Namespace) -> int:
        asked = imagining.plan(options, self.name, stacks=options.stacks)
        cards = [imagining.card(name, asked.capacity) for name in options.on.split(",")]
        with ExitStack() as stack:
            keep = options.keep
            if keep is None:
                keep = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            keep.mkdir(parents=True, exist_ok=True)
            if options.largest_batch:
                runs: list[Any] = []
                found = list(_largest(asked, cards, keep, runs))
                return _print_largest(found, runs, as_json=options.json)
            answers = [
                one for on in cards for one in imagining.imagine(asked, on, options.rank, keep)
            ]
            return _print_answers(answers, as_json=options.json)


# ---------------------------------------------------------------- whether it fits


def _print_answers(answers: Sequence[Answer], *, as_json: bool) -> int:
    if as_json:
        output.print_json({"cards": [_document(answer) for answer in answers]})
    else:
        _print_text(answers)
    if all(answer.imagined.problem for answer in answers):
        return 1
    return 0 if _that_fit(answers) else errors.BudgetExceeded.exit_code


def _that_fit(answers: Sequence[Answer]) -> list[Answer]:
    """The answer of each card on which every rank fits."""
    bad = {answer.card.name for answer in answers if not answer.fits}
    return [answer for answer in answers if answer.card.name not in bad]


def _print_text(answers: Sequence[Answer]) -> None:
    from pytracer.basics.units import size_text
    from pytracer.export import table, terminal
    from pytracer.export.fits_text import on_a_card

    screen = terminal.here()
    whole = [answer for answer in answers if answer.fits is not None]
    if whole:
        fullest = max(whole, key=lambda answer: answer.imagined.trace.peak.bytes)
        print(table.render(fullest.imagined.trace.data, screen))
        print()
    several = len({answer.rank for answer in answers}) > 1
    width = max(len(answer.card.name) for answer in answers)
    for answer in answers:
        start = f"{answer.card.name:<{width}}  "
        if several:
            start += f"rank {answer.rank:<3} "
        if answer.imagined.problem:
            print(beside(screen, start, f"cannot be imagined: {answer.imagined.problem}"))
            continue
        start += f"{size_text(answer.card.capacity):>8}  "
        print(beside(screen, start, on_a_card(answer.fits)))
    best = _best(answers)
    if best:
        print(best)
    print_touched([answer.imagined.ran for answer in answers])


def _best(answers: Sequence[Answer]) -> str:
    """A line with the cheapest card that fits, or the smallest; "" if only one card is asked for."""
    names = {answer.card.name for answer in answers}
    fitting = _that_fit(answers)
    if len(names) < 2 or not fitting:
        return ""
    if all(answer.price is not None for answer in answers):
        best = min(fitting, key=lambda answer: answer.price or 0)
        return f"cheapest that fits: {best.card.name}, at {best.price:g}"
    return f"smallest that fits: {min(fitting, key=lambda one: one.card.capacity).card.name}"


def _document(answer: Answer) -> dict[str, Any]:
    card, imagined, fits = answer.card, answer.imagined, answer.fits
    document: dict[str, Any] = {
        "card": card.name,
        "capacity": card.capacity,
        "source": card.source,
        "problem": imagined.problem or None,
        "touched": touched(imagined.ran),
    }
    if answer.price is not None:
        document["price"] = answer.price
    if imagined.trace is not None:
        peak, run = imagined.trace.peak, imagined.trace.data.meta["imagined"]
        document |= {
            "fits": bool(fits),
            "verdict": fits.verdict,
            "basis": fits.basis,
            "why": list(fits.replay.notes),
            "with": None if fits.helps is None else fits.helps.settings,
            "peak": peak.bytes,
            "by_category": dict(peak.by_category),
            "peaks": {kind: one.bytes for kind, one in fits.by_kind.items()},
            "peak_reserved": fits.replay.peak_reserved,
            "reserved": list(fits.reserved),
            "beside": card.beside,
            "stand_ins": run["stand_ins"],
        }
        further = ("ranks", "rank", "peak_at_most", "reserved_at_most", "scratch_at_most")
        document |= {name: run[name] for name in further if name in run}
    return document


# ---------------------------------------------------------------- the largest batch


def _largest(
    plan: Any, cards: Sequence[Card], keep: Path, runs: list[Any]
) -> Iterator[tuple[Card, Any]]:
    """The largest batch of each card, or the problem. Adds each run of the program to `runs`."""
    from pytracer.imagined import search

    for card in cards:

        def attempt(batch: int, card: Card = card) -> Any:
            with progress.doing(f"imagining {card.card.name} with a batch of {batch}"):
                answer = imagining.one(replace(plan, card=card.card.name, batch=batch), card, keep)
            runs.append(answer.imagined.ran)
            if answer.fits is None:
                raise errors.CannotImagine(answer.imagined.problem)
            return search.tried(batch, answer.fits, answer.imagined.trace.peak.bytes)

        try:
            batch, tries = search.search(attempt, card.card.capacity)
        except errors.CannotImagine as problem:
            yield card, str(problem)
        else:
            yield card, search.Largest(batch, card.card.name, card.card.capacity, tries)


def _print_largest(found: Sequence[tuple[Card, Any]], runs: Sequence[Any], *, as_json: bool) -> int:
    from pytracer.basics.units import size_text
    from pytracer.export import terminal
    from pytracer.imagined.search import Largest

    screen = terminal.here()
    if as_json:
        changes = [touched(ran) for ran in runs]
        output.print_json({"cards": [_largest_document(*one) for one in found], "touched": changes})
    width = max(len(card.card.name) for card, _ in found)
    for card, one in () if as_json else found:
        start = f"{card.card.name:<{width}}  {size_text(card.card.capacity):>8}  "
        if not isinstance(one, Largest):
            print(beside(screen, start, f"cannot be imagined: {one}"))
            continue
        needs = {each.batch: size_text(each.needs) for each in one.tries}
        tried = ", ".join(map(str, sorted(needs)))
        rest = f"{size_text(one.tries[0].beside)} of it beside torch's allocator"
        rest += "" if card.card.beside else ", not measured on this card"
        if one:
            more = needs.get(one.batch + 1)
            next_one = f"; {one.batch + 1} needs {more}" if more else ""
            text = f"largest batch {one.batch}: it needs a card of {needs[one.batch]} ({rest})"
            print(beside(screen, start, f"{text}{next_one} (tried {tried})"))
        else:
            text = f"does not fit: a batch of 1 needs a card of {needs[1]} ({rest})"
            print(beside(screen, start, text))
    if not as_json:
        print_touched(runs)
    answers = [one for _, one in found]
    if not any(isinstance(one, Largest) for one in answers):
        return 1
    fits = any(isinstance(one, Largest) and one for one in answers)
    return 0 if fits else errors.BudgetExceeded.exit_code


def _largest_document(card: Card, found: Any) -> dict[str, Any]:
    document: dict[str, Any] = {"card": card.card.name, "capacity": card.card.capacity}
    if isinstance(found, str):
        return {**document, "problem": found}
    tries = [vars(one) for one in found.tries]
    return {**document, "problem": None, "largest_batch": found.batch, "tries": tries}
