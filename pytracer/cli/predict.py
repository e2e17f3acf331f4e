"""Predicting: whether a run fits on a card, and what another batch would need."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.cli import output
from pytracer.cli.command import Command


class Fits(Command):
    """Whether a traced run fits on a card, the first failure, the setting that helps; exit code 3 if
    it does not fit.

    Replays the recorded requests through a model of CUDA's allocator. Sizes are written 24GiB
    (of 1024), 24GB (of 1000), 5000B.
    """  # noqa: D205 - the line in the list of commands is long

    name = "fits"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", type=Path, help="a .pytrace file or a memory snapshot of torch")
        parser.add_argument(
            "--on", metavar="SIZE", help="the card's memory (default: find the smallest)"
        )
        parser.add_argument(
            "--settings", metavar="TEXT", help="PYTORCH_ALLOC_CONF to try (default: as recorded)"
        )
        parser.add_argument("--device", help="default: the one that the program trained on")
        parser.add_argument(
            "--plan",
            action="store_true",
            help="which modules to checkpoint so that it fits; also for the CPU, where "
            "SIZE limits the peak",
        )
        parser.add_argument(
            "--pinned",
            metavar="SIZE",
            default=0,
            help="the host's memory for tensors that --plan offloads",
        )
        _add_verify(parser, "with what the card has as its limit")
        output.add_json(parser)

    def run(self, options: argparse.Namespace) -> int:
        loaded = output.read(options.file)
        if options.plan:
            return _plan(options, loaded)
        with output.patience("replaying"):
            found = loaded.fits(options.on, options.settings, options.device)
        verified = None
        if options.verify:
            verified = _verified(options, found, lambda verify: verify.fits, loaded.data)
        _show(options, found, str(found), _document(found), verified)
        return _code(found, verified)


def _add_verify(parser: Any, how: str) -> None:
    parser.add_argument(
        "--verify",
        action="store_true",
        help=f"also run it, {how}, and show both: --verify -- train.py --epochs 1",
    )


def _plan(options: argparse.Namespace, loaded: Any) -> int:
    from pytracer.analysis.facts import usage
    from pytracer.analysis.forecasts import fits

    if options.on is None or options.settings is not None:
        raise errors.UsageError("--plan needs --on SIZE, and takes the settings of the recording")
    device = options.device or usage.main_device(loaded.data)
    with output.patience("planning"):
        room = fits.room(loaded.data, options.on, device)
        found = loaded.checkpoint_plan(room, device, pinned=options.pinned)
    verified = None
    if options.verify:
        verified = _verified(options, found, lambda verify: verify.plan, loaded.data)
    _show(options, found, str(found), _document_of_plan(found), verified)
    return _code(found, verified)


def _verified(options: argparse.Namespace, found: Any, which: Any, data: Any) -> Any:
    """The run. The answer is shown whatever becomes of it."""
    from pytracer import verify

    try:
        with output.patience("running it"):
            return which(verify)(data, found, options.program)
    except errors.UsageError as error:
        return error


def _show(
    options: argparse.Namespace, found: Any, text: str, document: dict[str, Any], verified: Any
) -> None:
    from pytracer.export.fits_text import render_verified

    failed = isinstance(verified, errors.UsageError)
    if options.json:
        both = {} if verified is None or failed else {"verified": verified.document()}
        output.print_json({**document, **both})
    else:
        print(text)
        if verified is not None and not failed:
            print(f"\n{render_verified(verified)}")
    if failed:
        raise verified


def _code(found: Any, verified: Any) -> int:
    """A prediction that did not hold is an error of ours."""
    if verified is not None and not verified:
        return errors.PytracerError.exit_code
    return 0 if found else errors.BudgetExceeded.exit_code


def _document_of_plan(found: Any) -> dict[str, Any]:
    return {
        "device": found.device,
        "budget": found.budget,
        "fits": bool(found),
        "now": asdict(found.now),
        "chosen": asdict(found.chosen),
        "code": found.code,
        "frontier": [asdict(plan) for plan in found.frontier],
        "warnings": list(found.warnings),
        "notes": list(found.notes),
    }


def _document(found: Any) -> dict[str, Any]:
    failed = found.replay.failed
    return {
        "device": found.device,
        "card": found.card,
        "fits": bool(found),
        "smallest_card": found.smallest_card,
        "beside": found.beside,
        "peak_reserved": found.replay.peak_reserved,
        "retries": found.replay.retries,
        "failed": None if failed is None else asdict(failed),
        "holders": [vars(row) for row in found.holders],
        "settings": [vars(choice) for choice in found.choices],
        "notes": list(found.notes),
    }


class WhatIf(Command):
    """The peak with another batch or length, from traces of the program with small ones.

    Learns how each allocation grows. Two traces with different batches are enough for most
    programs, three for all laws; for --seq also one with another length.
    """

    name = "what-if"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help=".pytrace files")
        parser.add_argument("--batch", type=output.positive, help="default: the largest trace's")
        parser.add_argument("--seq", type=output.positive, help="default: the largest trace's")
        parser.add_argument("--device", help="default: the one that the program trained on")
        _add_verify(parser, "as it is with that batch and length")
        output.add_json(parser)

    def run(self, options: argparse.Namespace) -> int:
        from pytracer.export.fits_text import render_what_if

        first, *others = (output.read(file) for file in options.files)
        found = first.what_if(*others, batch=options.batch, seq=options.seq, device=options.device)
        verified = None
        if options.verify:
            data = [first.data, *(other.data for other in others)]
            verified = _verified(options, found, lambda verify: verify.what_if, data)
        document = {**asdict(found), "exact": found.exact}
        _show(options, found, render_what_if(found), document, verified)
        return _code(True, verified)
