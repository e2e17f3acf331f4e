"""What the commands that imagine a program share: their options, the plan, and its ranks."""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pytracer import errors
from pytracer.cli import output, progress

if TYPE_CHECKING:
    from pytracer.export.terminal import Terminal

_WAYS = (
    "--largest-batch needs to know how the program gets its batch: write {batch} in its place, in an "
    "argument (train.py --batch-size {batch}), in an environment variable (BATCH={batch} pytracer "
    "imagine ...) or for a variable of the script (--set batch_size={batch})"
)

# ---------------------------------------------------------------- the options


def add_run(parser: argparse.ArgumentParser, *, on: str, write: bool = False) -> None:
    """Adds the options of a run that is imagined. `on` is the help of its card."""
    parser.add_argument("--on", metavar="CARDS", default="H100", help=on)
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
        "--assume",
        action="append",
        default=[],
        metavar="LINE=VALUE",
        help="the outcome of a decision: train.py:12=false",
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
        "--set",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="the number that the script assigns to this variable: batch_size=8",
    )
    add_wish(parser, write=write)
    _add_model(parser)


def add_wish(parser: Any, *, write: bool = True) -> None:
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


class Card(NamedTuple):
    """A card, and what it costs if that was said."""

    card: Any
    price: float | None


def plan(options: argparse.Namespace, command: str, *, stacks: bool = False) -> Any:
    """The plan of the run that the options ask for, on a card to be named.

    Raises:
        errors.UsageError: the options contradict each other, or no program is named.
    """
    from pytracer.basics.units import parse_size
    from pytracer.imagined import script

    program = options.program
    as_module = program[:1] == ["-m"]
    words = tuple(program[1:] if as_module else program)
    model, ranks = _model(options, words)
    if not words and model is None:
        raise errors.UsageError(f"{command} needs a script: pytracer {command} train.py --on H100")
    largest = getattr(options, "largest_batch", False)
    asked = script.Plan(
        words,
        as_module,
        card="",
        capacity=None if options.capacity is None else parse_size(options.capacity),
        steps=options.steps,
        stacks=stacks,
        assume=dict(_assumed(text) for text in options.assume),
        ranks=ranks,
        sizes=options.sizes,
        values=dict(_assigned(text) for text in options.set),
        model=model,
        wish=wish(options),
    )
    if asked.wish.write and (largest or "," in options.on):
        raise errors.UsageError("--write keeps the files of one run: name one card, and one batch")
    if largest and not asked.uses_batch():
        raise errors.UsageError(_WAYS)
    if not largest and any(script.BATCH in word for word in words):
        raise errors.UsageError(f"{script.BATCH} is for --largest-batch: add it, or name a number")
    return asked


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


def card(text: str, capacity: int | None) -> Card:
    """The card that the text names, which may have a price: T4=0.35.

    Raises:
        errors.UsageError: there is no such card, or the price is none.
    """
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
    return Card(output.card(name, capacity, other=other), cost)


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


# ---------------------------------------------------------------- the runs


class Answer(NamedTuple):
    """One imagined rank of a program on one card."""

    card: Any
    price: float | None
    rank: int
    imagined: Any
    fits: Any  # None: there is no trace


def imagine(plan: Any, card: Card, ranks: str | None, keep: Path) -> Iterator[Answer]:
    """Imagines the ranks on one card: those that are asked for, or one of each class."""
    from pytracer.imagined import others

    def of(rank: int) -> Answer:
        text = f" rank {rank}" if plan.ranks else ""
        with progress.doing(f"imagining {card.card.name}{text}"):
            return one(replace(plan, card=card.card.name, rank=rank), card, keep)

    wanted = _ranks(ranks, plan.ranks)
    if wanted:
        yield from map(of, wanted)
        return
    first = of(0)
    trace = first.imagined.trace
    if trace is None:
        yield first
        return
    document = trace.data.meta["imagined"]
    count = document.get("ranks", 1)
    each = (
        [0] if count == 1 else others.classes(count, document["meshes"], document["point_to_point"])
    )
    if each != [0] or count == 1 or plan.model is not None:  # ours is the same on each rank
        yield first
        yield from map(of, each[1:])
        return
    last = of(count - 1)
    answers = [first, last]
    if last.fits is not None:
        data = last.imagined.trace.data
        if not others.are_alike(trace.data, data):
            there = {0: first, count - 1: last}
            answers = [there.get(rank) or of(rank) for rank in others.several(count)]
        elif others.stands_for(trace.data, data):
            answers = [first]
    yield from _doubted(answers, plan, keep)


def _doubted(answers: list[Answer], plan: Any, keep: Path) -> list[Answer]:
    """The answers, with doubts if these ranks do not stand for all."""
    from pytracer.imagined import others, script

    traces = [each.imagined.trace.data for each in answers if each.fits is not None]
    reason = others.disagree(traces[0], traces[-1]) or others.of_some(traces)
    if not reason:
        return answers
    found = []
    for each in answers:
        if each.fits is not None:
            path = keep / replace(plan, card=each.card.name, rank=each.rank).file()
            data = others.doubting(each.imagined.trace.data, reason)
            imagined = script.changed(each.imagined, path, data)
            each = _answer(imagined, each.rank, Card(each.card, each.price))
        found.append(each)
    return found


def one(plan: Any, card: Card, keep: Path) -> Answer:
    """Imagines one rank."""
    from pytracer.imagined import script

    return _answer(script.imagine(plan, keep), plan.rank, card)


def _answer(imagined: Any, rank: int, card: Card) -> Answer:
    fits = None if imagined.trace is None else imagined.trace.fits(card.card.capacity)
    return Answer(card.card, card.price, rank, imagined, fits)


def _ranks(text: str | None, of: int | None) -> list[int]:
    if text is None:
        return []
    if of is None:
        raise errors.UsageError("--rank needs the number of ranks: --ranks 64 --rank 0,63")
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) < of for part in parts):
        raise errors.UsageError(f"--rank {text}: ranks count from 0 to {of - 1}, as in 0,{of - 1}")
    return [int(part) for part in parts]


# ---------------------------------------------------------------- what is printed


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


def touched(ran: Any) -> dict[str, Any]:
    """What the program has changed in its view, and whether that was kept."""
    return {"kept": ran.kept, "changes": [vars(one) for one in ran.changes]}
