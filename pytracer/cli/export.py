"""`pytracer export` and `pytracer report`: write a trace for a viewer, a notebook or a browser."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytracer import errors
from pytracer.cli import jobs, output, predict, progress
from pytracer.cli.command import Command
from pytracer.export.exporters import EXPORTERS, Exporter

if TYPE_CHECKING:
    from pytracer.export import report

_LIMITS = ("max_events", "full")


class Export(Command):
    """Write a saved trace for a viewer, a notebook or a browser.

    The name of the output chooses the format:

      pytracer export train.pytrace                      for https://ui.perfetto.dev
      pytracer export train.pytrace -o train.json.gz     the same as Chrome's JSON
      pytracer export train.pytrace -o train.pickle      for pytorch.org/memory_viz
      pytracer export train.pytrace --format parquet     tables, for pandas or SQL
      pytracer export run/ -o job.pftrace                all ranks on one clock
    """

    name = "export"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        output.add_trace(parser)
        parser.add_argument(
            "-o", "--output", help="the file, or for parquet the folder (default: beside the trace)"
        )
        parser.add_argument(
            "--format",
            choices=tuple(EXPORTERS),
            metavar="FORMAT",
            help="perfetto (https://ui.perfetto.dev), chrome (the same as JSON), snapshot "
            "(https://pytorch.org/memory_viz), html, parquet or pytrace; the default "
            "follows the output's suffix, else perfetto",
        )
        parser.add_argument("-f", "--force", action="store_true", help="overwrite the output file")
        parser.add_argument(
            "--max-events",
            type=output.positive,
            help="keep only the largest and longest events of a large trace",
        )
        parser.add_argument(
            "--full",
            action="store_true",
            help="write all of a large trace; the default folds small items",
        )
        parser.add_argument(
            "--drop-alike",
            action="store_true",
            help="for a folder of ranks and parquet: then delete the traces of ranks that are like "
            "others",
        )
        jobs.add_engine(parser)
        output.add_anonymous(parser)
        output.add_json(parser)

    def run(self, options: argparse.Namespace) -> int:
        options.file = output.trace_or_newest(options.file)
        if jobs.is_job(options.file):
            return jobs.export(options)
        name, target = _export_target(options)
        exporter = EXPORTERS[name]
        with progress.doing(f"exporting {options.file}"):
            trace = output.read(options.file, anonymous=options.anonymous).data
            if Path(target).exists() and Path(target).samefile(options.file):
                raise errors.UsageError(f"{target} is the trace itself; name another file with -o")
            limits = _limits_of(exporter, options)
            written = exporter.write(trace, target, overwrite=options.force, **limits)
        if isinstance(written, Path):
            _print_path(exporter, written, options)
        else:
            _print_timeline(exporter, written, options)
        return 0


def _limits_of(exporter: Exporter, options: argparse.Namespace) -> dict[str, Any]:
    """The limits that the user gave, if the exporter takes them."""
    limits = {name: value for name in _LIMITS if (value := getattr(options, name))}
    for name in limits:
        if name not in exporter.limits:
            takers = [each.name for each in EXPORTERS.values() if name in each.limits]
            raise errors.UsageError(
                f"--{name.replace('_', '-')} is for --format {' and '.join(takers)}"
            )
    return limits


def _export_target(options: argparse.Namespace) -> tuple[str, str]:
    """The exporter's name, and the path to write to."""
    if options.output is None:
        name = options.format or ("perfetto" if options.max_events is None else "chrome")
        # with_suffix refuses the path ".", before the error that it is a folder.
        return name, str(options.file.parent / f"{options.file.stem}{EXPORTERS[name].suffixes[0]}")
    if options.format is not None:
        return options.format, options.output
    for exporter in EXPORTERS.values():
        if options.output.endswith(exporter.suffixes):
            return exporter.name, options.output
    suffixes = ", ".join(suffix for each in EXPORTERS.values() for suffix in each.suffixes)
    raise errors.UsageError(f"{options.output}: say --format, or end it with one of {suffixes}")


def _print_path(exporter: Exporter, written: Path, options: argparse.Namespace) -> None:
    if options.json:
        output.print_json({"format": exporter.name, "path": str(written)})
        return
    print(f"Written to {written}.")
    print(exporter.opened_with.format(written))


def _print_timeline(exporter: Exporter, written: Any, options: argparse.Namespace) -> None:
    """Prints the counts of a timeline, and what it leaves out."""
    if options.json:
        output.print_json({**vars(written), "path": str(written.path)})
        return
    from pytracer.basics.units import size_text

    size = size_text(written.file_bytes)
    print(f"Written to {written.path}: {written.events:,} events, {size}.")
    left_out = ", ".join(f"{count:,} {kind}" for kind, count in written.left_out.items())
    folded = ", ".join(f"{count:,} {kind}" for kind, count in written.folded.items())
    if folded:
        print(f"Folded, as too small to see: {folded}. --full writes all.", file=sys.stderr)
    for note in (*([f"Left out: {left_out}"] if left_out else []), *written.warnings):
        print(note, file=sys.stderr)
    print(exporter.opened_with.format(written.path))
    print(f"The same on one screen:  pytracer summary {shlex.quote(str(options.file))}")


def _named(options: argparse.Namespace, given: Sequence[Path]) -> "list[report.Named]":
    """The traces. Forecasts are those of the first; a second one shows how sizes follow the batch."""
    from pytracer.export import fits_text, report

    first, *others = (output.read(file) for file in given)
    answers = []
    if options.fits is not None:
        with progress.doing("replaying the allocator's requests"):
            answers.append(fits_text.text_of(predict.fits(options.fits, first)))
    if options.batch is not None:
        answers.append(fits_text.text_of(first.what_if(*others, batch=options.batch)))
    traces = [report.Named(given[0].name, first.data, tuple(answers))]
    return traces + [
        report.Named(file.name, other.data) for file, other in zip(given[1:], others, strict=True)
    ]


class Report(Command):
    """Write one offline page that shows every allocation.

    The page is one file without any link to a network. Open it in a browser:

      pytracer report train.pytrace                       writes train.html
      pytracer report train.pytrace --source --fits 24GiB
      pytracer report before.pytrace after.pytrace -o both.html
    """

    name = "report"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        output.add_trace(parser)
        parser.add_argument(
            "other", type=Path, nargs="?", help="a second trace to compare with the first"
        )
        parser.add_argument("-o", "--output", type=Path, help="default: beside the trace, as .html")
        parser.add_argument("-f", "--force", action="store_true", help="overwrite the output file")
        parser.add_argument(
            "--source", action="store_true", help="also include the source lines that allocated"
        )
        parser.add_argument(
            "--fits",
            metavar="SIZE",
            help="also show whether the run fits on a card of this size or name, such as 24GiB",
        )
        parser.add_argument(
            "--batch", type=int, help="also show the predicted peak of this batch (see what-if)"
        )
        output.add_json(parser)

    def run(self, options: argparse.Namespace) -> int:
        from pytracer.basics.files import refuse_to_overwrite
        from pytracer.basics.units import size_text
        from pytracer.export import report

        options.file = output.trace_or_newest(options.file)
        target = options.output or options.file.parent / f"{jobs.name_of(options.file)}.html"
        given = [options.file, *([options.other] if options.other else [])]
        if any(target.exists() and file.exists() and target.samefile(file) for file in given):
            raise errors.UsageError(f"{target} is the trace itself; name another file with -o")
        refuse_to_overwrite(target, overwrite=options.force)
        with progress.doing(f"writing {target}"):
            if jobs.is_job(options.file) and options.other is None:
                if options.fits is not None or options.batch is not None:
                    raise errors.UsageError("--fits and --batch need one rank's file")
                traces, job = jobs.report(options)
            else:
                traces, job = _named(options, given), None
            written = report.write(
                traces, target, source=options.source, overwrite=options.force, job=job
            )
        if options.json:
            output.print_json({"path": str(written), "bytes": written.stat().st_size})
            return 0
        print(f"Written to {written}: {size_text(written.stat().st_size)}.")
        print("Open it in any browser. It loads nothing, so you can send it as it is.")
        return 0
