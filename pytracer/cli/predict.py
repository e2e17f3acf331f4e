"""Commands that predict: whether a run fits on a card, and the peak of another batch."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.cli import output, progress
from pytracer.cli.command import Command
from pytracer.cli.imagining import add_wish, wish


class Fits(Command):
    """Whether a traced run fits on a card, the first failure, the setting that helps; exit code 3 if
    it does not fit.

    Replays the recorded requests through a model of CUDA's allocator. Sizes are
    written 24GiB (of 1024), 24GB (of 1000), 5000B.

      pytracer fits train.pytrace                    the smallest card that it fits
      pytracer fits train.pytrace --on RTX4090
      pytracer fits train.pytrace --on 16GiB --plan  and what to checkpoint for it
      pytracer fits train.pytrace --on 16GiB --verify -- train.py --epochs 1
    """  # noqa: D205 - the line in the list of commands is long

    name = "fits"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        output.add_trace(parser)
        parser.add_argument(
            "--on",
            metavar="SIZE",
            help="the card's memory or name, such as RTX4090 (default: find the smallest)",
        )
        parser.add_argument(
            "--settings", metavar="TEXT", help="PYTORCH_ALLOC_CONF to try (default: as recorded)"
        )
        parser.add_argument("--device", help="default: the one that the program trained on")
        parser.add_argument(
            "--plan",
            action="store_true",
            help="find the modules to checkpoint so that it fits; also for the CPU, where "
            "SIZE limits the peak",
        )
        parser.add_argument(
            "--pinned",
            metavar="SIZE",
            default=0,
            help="the host's memory for tensors that --plan offloads",
        )
        _add_verify(parser, "limited to the card's memory")
        output.add_json(parser)

    def run(self, options: argparse.Namespace) -> int:
        loaded = output.read(output.trace_or_newest(options.file))
        options.on = _bytes(options.on)
        if options.plan:
            return _plan(options, loaded)
        require_gpu(loaded, options.device)
        with progress.doing("replaying the allocator's requests"):
            prediction = loaded.fits(options.on, options.settings, options.device)
        verified = None
        if options.verify:
            verified = _verified(options, prediction, lambda verify: verify.fits, loaded.data)
        _show(options, prediction, _document(prediction), verified)
        return _code(prediction or options.on is None, verified)


def fits(on: str, loaded: Any) -> Any:
    """Whether the run fits on a card of this size or name."""
    require_gpu(loaded, None)
    return loaded.fits(_bytes(on))


def _bytes(on: str | None) -> str | int | None:
    """The size of a card's memory, which may be given by the card's name."""
    if on is None or not on[:1].isalpha():
        return on
    capacity: int = output.card(on, other="card, write its size: --on 24GiB").capacity
    return capacity


def require_gpu(loaded: Any, device: str | None) -> None:
    """Refuses a trace of the CPU.

    Raises:
        errors.UsageError: the trace is of the CPU.
    """
    from pytracer.analysis.facts import usage

    if usage.devices(loaded.data) and (device or usage.main_device(loaded.data)) == "cpu":
        raise errors.UsageError(
            "this trace is of the CPU, and fits needs one of a GPU, or of an imagined one. Type "
            "`pytracer imagine --on RTX4090 --keep traces train.py`, then "
            "`pytracer fits traces/RTX4090.pytrace --on 24GiB`"
        )


def _add_verify(parser: Any, how: str) -> None:
    parser.add_argument(
        "--verify",
        action="store_true",
        help=f"also run the program, {how}, and show both: --verify -- train.py --epochs 1",
    )
    add_wish(parser, write=False)


def _plan(options: argparse.Namespace, loaded: Any) -> int:
    from pytracer.analysis.facts import usage
    from pytracer.analysis.forecasts import fits

    if options.on is None or options.settings is not None:
        raise errors.UsageError(
            "--plan needs --on SIZE, and uses the recorded settings; leave out --settings"
        )
    device = options.device or usage.main_device(loaded.data)
    with progress.doing("planning: trying which modules to checkpoint"):
        room = fits.room(loaded.data, options.on, device)
        prediction = loaded.checkpoint_plan(room, device, pinned=options.pinned)
    verified = None
    if options.verify:
        verified = _verified(options, prediction, lambda verify: verify.plan, loaded.data)
    _show(options, prediction, _document_of_plan(prediction), verified)
    return _code(prediction, verified)


def _verified(options: argparse.Namespace, prediction: Any, which: Any, data: Any) -> Any:
    """Runs the program. Returns an error instead of raising it, so that the prediction is shown."""
    from pytracer.reading import verify

    try:
        with progress.doing("running the program, to verify"):
            return which(verify)(data, prediction, options.program, wish(options))
    except errors.UsageError as error:
        return error


def _show(
    options: argparse.Namespace, prediction: Any, document: dict[str, Any], verified: Any
) -> None:
    from pytracer.export import fits_text, terminal

    failed = isinstance(verified, errors.UsageError)
    if options.json:
        both = {}
        if verified is not None and not failed:
            changes = [vars(one) for one in verified.changes]
            both["verified"] = {**verified.document(), "touched": changes}
        output.print_json({**document, **both})
    else:
        screen = terminal.here()
        print(fits_text.text_of(prediction, screen))
        if verified is not None and not failed:
            print(f"\n{fits_text.render_verified(verified, screen)}")
    if failed:
        raise verified


def _code(prediction: Any, verified: Any) -> int:
    """The exit code. A prediction that did not hold is an error of pytracer."""
    if verified is not None and not verified:
        return errors.PytracerError.exit_code
    return 0 if prediction else errors.BudgetExceeded.exit_code


def _document_of_plan(prediction: Any) -> dict[str, Any]:
    return {
        "device": prediction.device,
        "budget": prediction.budget,
        "fits": bool(prediction),
        "verdict": prediction.verdict,
        "basis": prediction.basis,
        "reserved": prediction.reserved,
        "now": asdict(prediction.now),
        "chosen": asdict(prediction.chosen),
        "code": prediction.code,
        "frontier": [asdict(plan) for plan in prediction.frontier],
        "warnings": list(prediction.warnings),
        "notes": list(prediction.notes),
    }


def _document(prediction: Any) -> dict[str, Any]:
    failed = prediction.replay.failed
    return {
        "device": prediction.device,
        "card": prediction.card,
        "fits": bool(prediction),
        "verdict": prediction.verdict,
        "basis": prediction.basis,
        "smallest_card": prediction.smallest_card,
        "beside": prediction.beside,
        "peak_reserved": prediction.replay.peak_reserved,
        "reserved": list(prediction.reserved),
        "retries": prediction.replay.retries,
        "failed": None if failed is None else asdict(failed),
        "holders": [vars(row) for row in prediction.holders],
        "settings": [vars(choice) for choice in prediction.choices],
        "notes": list(prediction.notes),
    }


class WhatIf(Command):
    """The peak with another batch or length, from traces of the program with small ones.

    Learns how each allocation grows. Two traces with different batches are enough
    for most programs, three for all laws; for --seq also one with another length.

      pytracer what-if batch2.pytrace batch4.pytrace --batch 32
      pytracer what-if batch2.pytrace batch4.pytrace long.pytrace --seq 4096
    """

    name = "what-if"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help=".pytrace files")
        parser.add_argument("--batch", type=output.positive, help="default: the largest trace's")
        parser.add_argument("--seq", type=output.positive, help="default: the largest trace's")
        parser.add_argument("--device", help="default: the one that the program trained on")
        _add_verify(parser, "which must use that batch and length")
        output.add_json(parser)

    def run(self, options: argparse.Namespace) -> int:
        first, *others = (output.read(file) for file in options.files)
        with progress.doing("learning how each allocation grows"):
            prediction = first.what_if(
                *others, batch=options.batch, seq=options.seq, device=options.device
            )
        verified = None
        if options.verify:
            data = [first.data, *(other.data for other in others)]
            verified = _verified(options, prediction, lambda verify: verify.what_if, data)
        document = {**asdict(prediction), "exact": prediction.exact}
        _show(options, prediction, document, verified)
        return _code(True, verified)
