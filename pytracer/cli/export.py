"""`pytracer export` and `pytracer report`: a trace for a viewer, a notebook or a browser."""

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.cli import output

# What each export is called, and which suffixes stand for it; the first is its own.
_SUFFIXES = {
    "chrome": (".json.gz", ".json"),
    "perfetto": (".pftrace",),
    "snapshot": (".pickle", ".pkl"),
    "html": (".html", ".htm"),
    "parquet": (".parquet", "/"),
    "pytrace": (".pytrace",),
}

_OPENED_WITH = {
    "snapshot": "Open it at https://pytorch.org/memory_viz (the file stays on your machine).",
    "html": "Open it in any browser; it loads nothing.",
    "parquet": "Read it with pandas.read_parquet('{}/allocations.parquet').",
    "pytrace": "Look at it with pytracer summary.",
}


def add_export(commands: Any) -> None:
    """Its arguments."""
    export = commands.add_parser(
        "export", help="a saved trace for a viewer, a notebook or a browser"
    )
    export.add_argument("file", type=Path, help="a .pytrace file or a memory snapshot of torch")
    export.add_argument(
        "-o", "--output", help="the file, or for parquet the folder (default: beside the trace)"
    )
    export.add_argument(
        "--format",
        choices=tuple(_SUFFIXES),
        metavar="FORMAT",
        help="perfetto (https://ui.perfetto.dev), chrome (the same as JSON), snapshot "
        "(https://pytorch.org/memory_viz), html, parquet or pytrace; the default follows the "
        "output's suffix, else perfetto",
    )
    export.add_argument("-f", "--force", action="store_true", help="overwrite the output file")
    export.add_argument(
        "--max-events",
        type=output.positive,
        help="keep only the largest and longest events of a large trace",
    )
    export.add_argument(
        "--full",
        action="store_true",
        help="write all of a large trace; the default folds small items",
    )
    output.add_anonymous(export)
    output.add_json(export)
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> int:
    kind, target = _export_target(options)
    with output.patience(f"exporting {options.file}"):
        loaded = output.read(options.file, anonymous=options.anonymous)
        if Path(target).exists() and Path(target).samefile(options.file):
            raise errors.UsageError(f"{target} is the trace itself; name another file with -o")
        return _export_as(kind, target, loaded, options)


def _export_as(kind: str, target: str, loaded: Any, options: argparse.Namespace) -> int:
    if options.max_events is not None and kind != "chrome":
        raise errors.UsageError("--max-events is for --format chrome")
    if kind in ("chrome", "perfetto"):
        return _export_timeline(options, loaded, Path(target), kind)
    if options.full:
        raise errors.UsageError("--full is for --format perfetto and chrome")
    writers: dict[str, Callable[..., Path]] = {
        "snapshot": loaded.export_memory_snapshot,
        "html": loaded.export_html,
        "parquet": loaded.to_parquet,
        "pytrace": loaded.save,
    }
    written = writers[kind](target, overwrite=options.force)
    if options.json:
        output.print_json({"format": kind, "path": str(written)})
        return 0
    print(f"Written to {written}.")
    print(_OPENED_WITH[kind].format(written))
    return 0


def _export_target(options: argparse.Namespace) -> tuple[str, str]:
    """The format and where it goes."""
    if options.output is None:
        kind = options.format or ("perfetto" if options.max_events is None else "chrome")
        # Not with_suffix, which refuses "." before it is read and called a folder.
        return kind, str(options.file.parent / f"{options.file.stem}{_SUFFIXES[kind][0]}")
    if options.format is not None:
        return options.format, options.output
    for kind, suffixes in _SUFFIXES.items():
        if options.output.endswith(suffixes):
            return kind, options.output
    known = ", ".join(suffix for suffixes in _SUFFIXES.values() for suffix in suffixes)
    raise errors.UsageError(f"{options.output}: say --format, or end it with one of {known}")


def _export_timeline(options: argparse.Namespace, loaded: Any, target: Path, kind: str) -> int:
    if kind == "chrome":
        written = loaded.export_chrome_trace(
            target, overwrite=options.force, max_events=options.max_events, full=options.full
        )
    else:
        written = loaded.export_perfetto(target, overwrite=options.force, full=options.full)
    if options.json:
        output.print_json({**vars(written), "path": str(written.path)})
        return 0
    from pytracer.export.table import size_text

    size = size_text(written.file_bytes)
    print(f"Written to {written.path}: {written.events:,} events, {size}.")
    left_out = ", ".join(f"{count:,} {what}" for what, count in written.left_out.items())
    folded = ", ".join(f"{count:,} {what}" for what, count in written.folded.items())
    if folded:
        print(f"Folded, as too small to see: {folded}. --full has all.", file=sys.stderr)
    for note in (*([f"Left out: {left_out}"] if left_out else []), *written.warnings):
        print(note, file=sys.stderr)
    print("Open it at https://ui.perfetto.dev (the file stays on your machine).")
    print(f"The same on one screen:  pytracer summary {shlex.quote(str(options.file))}")
    return 0


def add_report(commands: Any) -> None:
    """Its arguments."""
    report = commands.add_parser("report", help="one offline page that shows every allocation")
    report.add_argument("file", type=Path, help="a .pytrace file or a memory snapshot of torch")
    report.add_argument(
        "other", type=Path, nargs="?", help="a second trace to compare with the first"
    )
    report.add_argument("-o", "--output", type=Path, help="default: beside the trace, as .html")
    report.add_argument("-f", "--force", action="store_true", help="overwrite the output file")
    report.add_argument(
        "--source", action="store_true", help="also include the source lines that allocated"
    )
    output.add_json(report)
    report.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    from pytracer.export import report
    from pytracer.export.table import size_text
    from pytracer.files import refuse_to_overwrite

    target = options.output or options.file.parent / f"{options.file.stem}.html"
    given = [options.file, *([options.other] if options.other else [])]
    if any(target.exists() and file.exists() and target.samefile(file) for file in given):
        raise errors.UsageError(f"{target} is the trace itself; name another file with -o")
    refuse_to_overwrite(target, overwrite=options.force)
    with output.patience(f"reading {options.file}"):
        traces = [report.Named(file.name, output.read(file).data) for file in given]
        written = report.write(traces, target, source=options.source, overwrite=options.force)
    if options.json:
        output.print_json({"path": str(written), "bytes": written.stat().st_size})
        return 0
    print(f"Written to {written}: {size_text(written.stat().st_size)}.")
    print("Open it in any browser; it loads nothing, so you can send it as it is.")
    return 0
