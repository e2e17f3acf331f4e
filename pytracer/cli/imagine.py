"""`pytracer imagine`: runs a script, or a model's configuration, on imagined cards."""

import argparse
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pytracer import errors
from pytracer.cli import output, progress
from pytracer.cli.command import Command

if TYPE_CHECKING:
    from pytracer.export.terminal import Terminal

_WAYS = (
    "--largest-batch needs to know how the program gets its batch: write {batch} in its place, in an "
    "argument (train.py --batch-size {batch}), in an environment variable (BATCH={batch} pytracer "
    "imagine ...) or for a variable of the script (--set batch_size={batch})"
)


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

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--on",
            metavar="CARDS",
            default="H100",
            help="the cards, with commas; with prices (T4=0.35) also the cheapest (default: H100)",
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
        parser.add_argument(
            "--ranks", type=output.positive, metavar="N", help="the program is one of N ranks"
        )
        parser.add_argument(
            "--rank",
            metavar="LIST",
            help="which of them to imagine (default: one of each class of equal ranks)",
        )
        parser.add_argument(
            "--sizes",
            choices=("balanced", "worst"),
            help="how a router's rows are spread over experts, if the script masks them",
        )
        parser.add_argument(
            "--largest-batch",
            action="store_true",
            help="find the largest batch that fits; write {batch} where the script gets it",
        )
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="NAME=NUMBER",
            help="the number that the script assigns to this variable: batch_size={batch}",
        )
        add_wish(parser)
        _add_model(parser)
        output.add_json(parser)

    def run(self, options: argparse.Namespace) -> int:
        plan = _plan(options)
        cards = [_card(name, plan.capacity) for name in options.on.split(",")]
        with ExitStack() as stack:
            keep = options.keep
            if keep is None:
                keep = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            keep.mkdir(parents=True, exist_ok=True)
            if options.largest_batch:
                runs: list[Any] = []
                found = list(_largest(plan, cards, keep, runs))
                return _print_largest(found, runs, as_json=options.json)
            answers = [one for card in cards for one in _imagine(plan, card, options.rank, keep)]
            return _print_answers(answers, as_json=options.json)


def add_wish(parser: argparse.ArgumentParser, *, write: bool = True) -> None:
    """Adds the options that say what the program may touch."""
    from pytracer.sandbox import launch

    if write:
        parser.add_argument(
            "--write",
            action="store_true",
            help="also make the program's changes of files; without it they are listed only",
        )
    parser.add_argument(
        launch.ALLOW_NETWORK,
        action="store_true",
        help="let the program connect to other machines",
    )
    parser.add_argument(
        launch.UNPROTECTED,
        action="store_true",
        help="run it even if it may change your files, where no private view of them is possible",
    )


def wish(options: argparse.Namespace) -> Any:
    """What the options allow the program to touch."""
    from pytracer.sandbox import launch

    write = getattr(options, "write", False)
    return launch.Wish(options.allow_network, write, options.unprotected)


def _add_model(parser: argparse.ArgumentParser) -> None:
    from pytracer.imagined import huggingface

    model = parser.add_argument_group("a Hugging Face model without a script")
    model.add_argument("--hf", metavar="FOLDER", help="the folder with its config.json")
    model.add_argument("--batch", type=output.positive, metavar="N", help="rows (default 1)")
    model.add_argument(
        "--seq", type=output.positive, metavar="N", help="length (default: the model's, up to 2048)"
    )
    model.add_argument(
        "--optimizer", choices=huggingface.OPTIMIZERS, help="default adamw, which is fused"
    )
    model.add_argument(
        "--bf16", action="store_true", help="mixed precision, as Trainer's option of this name"
    )
    model.add_argument("--dtype", choices=huggingface.DTYPES, help="of the weights themselves")
    model.add_argument("--checkpoint", action="store_true", help="checkpoint its layers")
    model.add_argument("--lora", type=output.positive, metavar="RANK", help="train LoRA of peft's")
    model.add_argument("--shard", metavar="HOW:N", help="over N ranks: fsdp2:64, ddp:8 or tp:8")


# ---------------------------------------------------------------- what is asked


class _Card(NamedTuple):
    card: Any
    price: float | None


def _plan(options: argparse.Namespace) -> Any:
    from pytracer.basics.units import parse_size
    from pytracer.imagined import script

    program = list(options.program)
    if "--on" in program[:-1]:
        at = program.index("--on")
        options.on = program[at + 1]
        options.program = program = program[:at] + program[at + 2 :]
    as_module = program[:1] == ["-m"]
    words = tuple(program[1:] if as_module else program)
    model, ranks = _model(options, words)
    if not words and model is None:
        raise errors.UsageError("imagine needs a script: pytracer imagine train.py --on H100")
    plan = script.Plan(
        words,
        as_module,
        card="",
        capacity=None if options.capacity is None else parse_size(options.capacity),
        steps=options.steps,
        stacks=options.stacks,
        assume=dict(_assumed(text) for text in options.assume),
        ranks=ranks,
        sizes=options.sizes,
        values=dict(_assigned(text) for text in options.set),
        model=model,
        wish=wish(options),
    )
    if plan.wish.write and (options.largest_batch or "," in options.on):
        raise errors.UsageError("--write keeps the files of one run: name one card, and one batch")
    if options.largest_batch and not plan.uses_batch():
        raise errors.UsageError(_WAYS)
    if not options.largest_batch and any(script.BATCH in word for word in words):
        raise errors.UsageError(f"{script.BATCH} is for --largest-batch: add it, or name a number")
    return plan


def _model(options: argparse.Namespace, words: Sequence[str]) -> tuple[Any, int | None]:
    """The order for a model without a script, if there is one, and the number of ranks."""
    from pytracer.imagined import huggingface

    given = {
        "batch": options.batch,
        "length": options.seq,
        "optimizer": options.optimizer,
        "bf16": options.bf16 or None,
        "dtype": options.dtype,
        "checkpoint": options.checkpoint or None,
        "lora": options.lora,
        "shard": options.shard,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if options.hf is None:
        if given:
            name = {"length": "seq"}.get(first := next(iter(given)), first)
            raise errors.UsageError(
                f"--{name} is for --hf. A script has its own options: write them after its name. "
                "If it shards itself, say of how many ranks it is one: --ranks 64"
            )
        return None, options.ranks
    if words:
        raise errors.UsageError(f"--hf needs no script, and {words[0]} is one")
    ranks = options.ranks
    if "shard" in given:
        how, _, count = given["shard"].partition(":")
        if how not in huggingface.SHARDS or not count.isdecimal() or int(count) < 1:
            raise errors.UsageError(f"--shard {given['shard']}: write fsdp2:64, ddp:8 or tp:8")
        given["shard"], ranks = how, int(count)
    return {"folder": str(Path(options.hf).absolute()), **given}, ranks


def _card(text: str, capacity: int | None) -> _Card:
    name, _, price = text.partition("=")
    if name[:1].isdigit():
        raise errors.UsageError(
            f"--on {name} is a size: name a card of the same architecture, and then the size: "
            f"--on RTX4090 --capacity {name}"
        )
    other = "card, name one of the same architecture and the size: --on RTX4090 --capacity 24GiB"
    try:
        cost = float(price) if price else None
    except ValueError:
        cost = math.nan
    if cost is not None and not 0 <= cost < math.inf:  # nan is neither
        raise errors.UsageError(f"--on {text}: {price!r} is no price")
    return _Card(output.card(name, capacity, other=other), cost)


def _assumed(text: str) -> tuple[str, bool]:
    line, _, value = text.rpartition("=")
    if not line or value.lower() not in ("true", "false"):
        raise errors.UsageError(
            f"--assume {text}: write LINE=true or LINE=false, as in train.py:12=false"
        )
    return line, value.lower() == "true"


def _assigned(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name.isidentifier() or not value:
        raise errors.UsageError(f"--set {text}: write NAME=NUMBER, as in batch_size={{batch}}")
    return name, value


# ---------------------------------------------------------------- whether it fits


class _Answer(NamedTuple):
    card: Any
    price: float | None
    rank: int
    imagined: Any
    fits: Any  # None: there is no trace


def _imagine(plan: Any, card: _Card, ranks: str | None, keep: Path) -> Iterator[_Answer]:
    """Imagines the ranks on one card: those that are asked for, or one of each class."""
    wanted = _ranks(ranks, plan.ranks)
    left = list(wanted or [0])
    while left:
        rank = left.pop(0)
        of = f" rank {rank}" if plan.ranks else ""
        with progress.doing(f"imagining {card.card.name}{of}"):
            answer = _one(replace(plan, card=card.card.name, rank=rank), card, keep)
        if not wanted and answer.fits is not None:
            wanted = _classes(answer.imagined.trace)
            left = [one for one in wanted if one != rank]
        yield answer


def _one(plan: Any, card: _Card, keep: Path) -> _Answer:
    from pytracer.imagined import script

    imagined = script.imagine(plan, keep)
    fits = None if imagined.trace is None else imagined.trace.fits(card.card.capacity)
    return _Answer(card.card, card.price, plan.rank, imagined, fits)


def _ranks(text: str | None, of: int | None) -> list[int]:
    if text is None:
        return []
    if of is None:
        raise errors.UsageError("--rank needs the number of ranks: --ranks 64 --rank 0,63")
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) < of for part in parts):
        raise errors.UsageError(f"--rank {text}: ranks count from 0 to {of - 1}, as in 0,{of - 1}")
    return [int(part) for part in parts]


def _classes(trace: Any) -> list[int]:
    from pytracer.imagined import ranks

    document = trace.data.meta["imagined"]
    if "ranks" not in document:
        return [0]
    return ranks.classes(document["ranks"], document["meshes"], document["point_to_point"])


def _print_answers(answers: Sequence[_Answer], *, as_json: bool) -> int:
    if as_json:
        output.print_json({"cards": [_document(answer) for answer in answers]})
    else:
        _print_text(answers)
    if all(answer.imagined.problem for answer in answers):
        return 1
    return 0 if _that_fit(answers) else errors.BudgetExceeded.exit_code


def _that_fit(answers: Sequence[_Answer]) -> list[_Answer]:
    """The answer of each card on which every rank fits."""
    bad = {answer.card.name for answer in answers if not answer.fits}
    return [answer for answer in answers if answer.card.name not in bad]


def _print_text(answers: Sequence[_Answer]) -> None:
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


def beside(screen: "Terminal", start: str, text: str) -> str:
    """The text to the right of `start`, over as many lines as it needs."""
    return "\n".join(screen.wrap(text, start, " " * len(start)))


def print_touched(runs: Sequence[Any]) -> None:
    """Prints what the programs would have changed."""
    from pytracer.export import terminal, touched_text

    changes = [change for ran in runs for change in ran.changes]
    kept = any(ran.kept for ran in runs)
    keep = "; keep that with --write"
    text = touched_text.render(changes, kept=kept, keep=keep, terminal=terminal.here())
    if text:
        print(text)


def _best(answers: Sequence[_Answer]) -> str:
    """A line with the cheapest card that fits, or the smallest; "" if only one card is asked for."""
    names = {answer.card.name for answer in answers}
    fitting = _that_fit(answers)
    if len(names) < 2 or not fitting:
        return ""
    if all(answer.price is not None for answer in answers):
        best = min(fitting, key=lambda answer: answer.price or 0)
        return f"cheapest that fits: {best.card.name}, at {best.price:g}"
    return f"smallest that fits: {min(fitting, key=lambda one: one.card.capacity).card.name}"


def touched(ran: Any) -> dict[str, Any]:
    """What the program has changed in its view, and whether that was kept."""
    return {"kept": ran.kept, "changes": [vars(one) for one in ran.changes]}


def _document(answer: _Answer) -> dict[str, Any]:
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
    plan: Any, cards: Sequence[_Card], keep: Path, runs: list[Any]
) -> Iterator[tuple[_Card, Any]]:
    """The largest batch of each card, or the problem. Adds each run of the program to `runs`."""
    from pytracer.imagined import search

    for card in cards:

        def attempt(batch: int, card: _Card = card) -> Any:
            with progress.doing(f"imagining {card.card.name} with a batch of {batch}"):
                answer = _one(replace(plan, card=card.card.name, batch=batch), card, keep)
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


def _print_largest(
    found: Sequence[tuple[_Card, Any]], runs: Sequence[Any], *, as_json: bool
) -> int:
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


def _largest_document(card: _Card, found: Any) -> dict[str, Any]:
    document: dict[str, Any] = {"card": card.card.name, "capacity": card.card.capacity}
    if isinstance(found, str):
        return {**document, "problem": found}
    tries = [vars(one) for one in found.tries]
    return {**document, "problem": None, "largest_batch": found.batch, "tries": tries}
