"""What the commands do with a folder of ranks, and `pytracer query`."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.cli import output, progress
from pytracer.cli.command import Command

_MERGED = {"perfetto": ".pftrace", "chrome": ".json.gz"}


def is_job(path: Path | None) -> bool:
    """Whether the argument names a folder of ranks."""
    from pytracer.reading import loading

    return path is not None and loading.is_job(path)


def name_of(path: Path) -> str:
    """The name of what is written about a file, or about the job whose ranks match a pattern."""
    from pytracer.ranks import folder

    return folder.job_of(folder.files_of(path)[0]) or "job" if "*" in path.name else path.stem


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Adds `--engine`, for commands that read many files."""
    parser.add_argument(
        "--engine",
        metavar="dask|ADDRESS",
        help="for a folder of ranks: read the files in Dask's workers, here or at a scheduler",
    )


def read(path: Path, engine: str | None = None, *, anonymous: bool = False) -> Any:
    """The job in a folder.

    Raises:
        errors.UnreadableTrace: no rank has a trace that can be read.
    """
    from pytracer.reading import job

    with progress.doing(f"reading the ranks in {path}"):
        found = job.read_job(path, engine)
        if not found.comparison.readable:
            raise errors.UnreadableTrace(found.comparison.digests[0].problem)
    return found.anonymous() if anonymous else found


def summary(options: argparse.Namespace) -> int:
    """Prints the comparison of all ranks."""
    from pytracer.export import terminal, words

    found = read(options.file, options.engine, anonymous=options.anonymous)
    if options.json:
        output.print_json(document(found))
        return 0
    screen = terminal.here()
    print(found.table(screen.width, color=screen.color))
    if options.words:
        print(f"\n{words.legend(terminal=screen, of_jobs=True)}")
    folder = shlex.quote(str(options.file))
    print(f"\nWhy it differs:  pytracer diff {folder}", file=sys.stderr)
    print(f"On one page:     pytracer report {folder}", file=sys.stderr)
    return 0


def document(found: Any) -> dict[str, Any]:
    """The contents of the table, for programs."""
    there = found.comparison
    return {
        "world_size": there.world_size,
        "peak": {"bytes": there.worst.peak, "rank": there.worst.rank},
        "missing": there.missing,
        "ranks": [
            {
                **{name: getattr(one, name) for name in _OF_RANK},
                "steps": len(one.steps),
                "by_category": dict(one.at_peak),
            }
            for one in there.digests
        ],
        "spreads": [row._asdict() for row in there.spreads],
        "parts": [row._asdict() for row in there.parts],
        "outliers": [
            {**row._asdict(), "holder": row.holder and row.holder._asdict()}
            for row in there.outliers
        ],
        "findings": [row._asdict() for row in there.findings],
        "sharding": [row._asdict() for row in there.shares],
    }


_OF_RANK = (
    "rank",
    "status",
    "host",
    "device",
    "peak",
    "reserved",
    "growth_per_step",
    "file",
    "part",
)


def check(options: argparse.Namespace, limits: dict[str, int | str]) -> int:
    """Compares the rank that needs most with the budget, and requires every rank's file."""
    from pytracer.export import budget

    if options.baseline is not None:
        raise errors.UsageError(
            "--baseline compares two files: name a rank's file and one of the baseline's"
        )
    found = read(options.file)
    measured = found.measured(limits)
    exceeded = [row for row in measured if row.found > row.limit]
    if not exceeded:
        _require_all(options.file, found)
    if options.json:
        output.print_json(
            {
                "file": str(options.file),
                "limits": {row.name: row.limit for row in measured},
                "peak": found.comparison.worst.peak,
                "exceeded": [vars(row) for row in exceeded],
            }
        )
    elif exceeded:
        print("\n".join((*budget.exceeded_lines(exceeded), "", found.table())))
    else:
        print("\n".join(("Within the budget:", *budget.kept_lines(measured))))
    return errors.BudgetExceeded.exit_code if exceeded else 0


def _require_all(path: Path, found: Any) -> None:
    from pytracer.ranks.compare import ranks_text

    there = found.comparison
    lacking = [one.rank for one in there.digests if one.status not in ("whole", "out of memory")]
    lacking += there.missing
    if lacking:
        raise errors.UnreadableTrace(
            f"{path} lacks rank {ranks_text(lacking)}, wholly or in part: the others are within the "
            "budget, but this rank may exceed it"
        )


def export(options: argparse.Namespace) -> int:
    """Writes all ranks as one timeline, or their digests as a dataset."""
    from pytracer.basics.units import size_text
    from pytracer.ranks import dataset, folder

    if not dataset.is_dataset(options.file):
        folder.files_of(options.file)  # there are none: that is worth more than a wrong format
    name, target = _export_target(options)
    if options.drop_alike and name != "parquet":
        raise errors.UsageError(
            "--drop-alike goes with parquet, which keeps the digests of all ranks"
        )
    found = read(options.file, options.engine, anonymous=options.anonymous)
    with progress.doing(f"exporting {options.file}"):
        if name == "parquet":
            written = found.to_parquet(target, overwrite=options.force)
            if options.drop_alike:
                dropped = found.drop_alike()
                print(f"Deleted {dropped} traces of ranks that are like others.", file=sys.stderr)
            size = sum(file.stat().st_size for file in written.rglob("*.parquet"))
        elif name == "html":
            written = found.report(target, overwrite=options.force)
            size = written.stat().st_size
        else:
            write = found.export_perfetto if name == "perfetto" else found.export_chrome_trace
            limits: dict[str, Any] = {"full": True} if options.full else {}
            if name == "chrome":
                limits["max_events"] = options.max_events
            result = write(target, overwrite=options.force, **limits)
            written, size = result.path, result.file_bytes
    if options.json:
        output.print_json({"path": str(written), "bytes": size, "ranks": _count(found)})
        return 0
    print(f"Written to {written}: {_count(found)} ranks, {size_text(size)}.")
    again = shlex.quote(str(written))
    if name == "parquet":
        print(f"Ask it:  pytracer query {again} 'SELECT rank, peak FROM ranks ORDER BY peak DESC'")
    elif name in _MERGED:
        print("Open it at https://ui.perfetto.dev (the file stays on your machine).")
    return 0


def _count(found: Any) -> int:
    return len(found.comparison.readable)


def _export_target(options: argparse.Namespace) -> tuple[str, Path]:
    """The format, and the path to write to."""
    given = options.output
    name = options.format
    if name is None and given is not None:
        ends = {".pftrace": "perfetto", ".json": "chrome", ".json.gz": "chrome", "/": "parquet"}
        ends |= {".parquet": "parquet", ".html": "html"}
        name = next((found for end, found in ends.items() if given.endswith(end)), None)
        if name is None:
            raise errors.UsageError(f"{given}: say --format, or end it with {', '.join(ends)}")
    name = name or "perfetto"
    if name not in (*_MERGED, "parquet", "html"):
        raise errors.UsageError(
            f"--format {name} is for one rank: pytracer export {options.file}/FILE --format {name}"
        )
    stem = name_of(options.file) if "*" in options.file.name else options.file.name or "job"
    suffix = _MERGED.get(name, ".parquet" if name == "parquet" else ".html")
    return name, Path(given or options.file.parent / f"{stem}{suffix}")


def diff(options: argparse.Namespace) -> tuple[Path, Path]:
    """The two files to compare: of two jobs their worst ranks, of one a typical rank and the worst.

    Raises:
        errors.UsageError: the ranks are all alike, or only one of the arguments is a folder.
    """
    before = read(options.before) if is_job(options.before) else None
    if options.after is None:
        assert before is not None
        there = before.comparison
        if there.worst.rank == there.typical.rank:
            raise errors.UsageError(
                f"{options.before}: no rank has a higher peak than the others; to compare two, name "
                "their files"
            )
        return Path(there.typical.file), Path(there.worst.file)
    after = read(options.after) if is_job(options.after) else None
    if before is not None and after is not None:
        rank = after.comparison.worst.rank
        same = [one for one in before.comparison.readable if one.rank == rank]
        first = same[0] if same else before.comparison.worst
        return Path(first.file), Path(after.comparison.worst.file)
    return (
        options.before if before is None else Path(before.comparison.worst.file),
        options.after if after is None else Path(after.comparison.worst.file),
    )


def report(options: argparse.Namespace) -> tuple[Sequence[Any], Any]:
    """The ranks to show on the page, and the comparison of all."""
    found = read(options.file)
    return found.on_page(), found.comparison


class Query(Command):
    """Ask a job's digests in SQL, with DuckDB.

    Works on a folder of ranks, and on the dataset that `pytracer export` makes of
    it. The tables are ranks, steps, categories, step_categories, owners, findings,
    ledger and facts.

      pytracer query run/ 'SELECT rank, peak FROM ranks ORDER BY peak DESC LIMIT 5'
      pytracer query job.parquet 'SELECT rank, module, bytes FROM owners'
    """

    name = "query"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("folder", type=Path, help="a folder of ranks, or a dataset of them")
        parser.add_argument("sql", help="one SELECT")
        add_engine(parser)
        output.add_json(parser)

    def run(self, options: argparse.Namespace) -> int:
        from pytracer.ranks import dataset
        from pytracer.reading import job

        if not options.folder.is_dir() and not is_job(options.folder):
            raise errors.UsageError(f"{options.folder} is not a folder of ranks")
        if dataset.is_dataset(options.folder):
            answer = dataset.query(options.folder, options.sql)
        else:
            answer = job.read_job(options.folder, options.engine).query(options.sql)
        if options.json:
            import json

            output.print_json({"rows": json.loads(answer.to_json(orient="records"))})
        else:
            print(answer.to_string(index=False))
        return 0
