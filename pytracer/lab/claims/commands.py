"""Does the work of `pytracer confirm`. The command line prints it."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pytracer import errors
from pytracer.basics.files import refuse_to_overwrite
from pytracer.lab.claims import catalog, report, runner


@dataclass(frozen=True)
class Done:
    """The output of the command, and its exit code."""

    document: dict[str, Any]
    text: str
    exit_code: int


def run(options: argparse.Namespace, progress: Callable[[str], None]) -> Done:
    """Lists the claims, or measures and judges them.

    Raises:
        errors.UsageError: the claim is unknown, the device is missing, or options exclude each other.
    """
    claims = catalog.chosen(options.ids)
    if options.list:
        return Done(report.listed(claims), report.list_text(claims), 0)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise errors.UsageError("--device cuda: there is no CUDA device here")
    if options.markdown is not None:
        refuse_to_overwrite(options.markdown, overwrite=options.force)
    scale = "full" if device == "cuda" and not options.quick else "small"
    if options.kept and options.again:
        raise errors.UsageError("--kept measures nothing and --again everything: choose one")
    plan = runner.Plan(options.out, device, scale, options.again, options.kept)
    outcome = runner.run(claims, catalog.experiments(), plan, progress)
    document = report.document(outcome)
    if options.markdown is not None:
        report.write(options.markdown, report.markdown_page(document), overwrite=options.force)
    return Done(document, report.text(document), _exit_code(outcome))


def _exit_code(outcome: runner.Outcome) -> int:
    """A failed experiment and unexplained memory are faults. A refuted claim is not."""
    if outcome.failed:
        return errors.PytracerError.exit_code
    return errors.BudgetExceeded.exit_code if outcome.unexplained else 0
