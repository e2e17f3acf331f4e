"""Predicting: whether a run fits on a card, and what another batch would need."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.cli import output


def add_fits(commands: Any) -> None:
    """Its arguments."""
    fits = commands.add_parser(
        "fits",
        help="whether a traced run fits on a card, what fails first, which setting helps; "
        "exit code 3 if it does not fit",
        description="Replays the recorded requests through a model of CUDA's allocator. Sizes are "
        "written 24GiB (of 1024), 24GB (of 1000), 5000B.",
    )
    fits.add_argument("file", type=Path, help="a .pytrace file or a memory snapshot of torch")
    fits.add_argument("--on", metavar="SIZE", help="the card's memory (default: find the smallest)")
    fits.add_argument(
        "--settings", metavar="TEXT", help="PYTORCH_ALLOC_CONF to try (default: as recorded)"
    )
    fits.add_argument("--device", help="default: the one that the program trained on")
    output.add_json(fits)
    fits.set_defaults(run=_fits)


def _fits(options: argparse.Namespace) -> int:
    loaded = output.read(options.file)
    with output.patience("replaying"):
        found = loaded.fits(options.on, options.settings, options.device)
    if options.json:
        output.print_json(_document(found))
    else:
        print(found)
    return 0 if found else errors.BudgetExceeded.exit_code


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


def add_what_if(commands: Any) -> None:
    """Its arguments."""
    what_if = commands.add_parser(
        "what-if",
        help="the peak with another batch or length, from traces of the program with small ones",
        description="Learns how each allocation grows. Two traces with different batches are "
        "enough for most programs, three for all laws; for --seq also one with another length.",
    )
    what_if.add_argument("files", type=Path, nargs="+", metavar="FILE", help=".pytrace files")
    what_if.add_argument("--batch", type=output.positive, help="default: the largest trace's")
    what_if.add_argument("--seq", type=output.positive, help="default: the largest trace's")
    what_if.add_argument("--device", help="default: the one that the program trained on")
    output.add_json(what_if)
    what_if.set_defaults(run=_what_if)


def _what_if(options: argparse.Namespace) -> int:
    from pytracer.export.fits_text import render_what_if

    first, *others = (output.read(file) for file in options.files)
    found = first.what_if(*others, batch=options.batch, seq=options.seq, device=options.device)
    if options.json:
        output.print_json({**asdict(found), "exact": found.exact})
    else:
        print(render_what_if(found))
    return 0
