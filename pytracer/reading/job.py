"""A job of many ranks as one object."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytracer import errors
from pytracer.data import anonymous, frames
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORY_ORDER
from pytracer.ranks import clocks, compare, dataset, engines, folder
from pytracer.ranks.compare import Comparison
from pytracer.ranks.digest import Digest
from pytracer.ranks.folder import Ranks
from pytracer.reading import history
from pytracer.reading.views import At, LoadedTrace

if TYPE_CHECKING:
    import pandas as pd

    from pytracer.analysis.answers.budgets import Exceeded
    from pytracer.export.chrome import Exported
    from pytracer.export.report import Named
    from pytracer.reading.views import Views

_KEYS = ("rank", "host", "part", "step", "category", "module", "op", "line")
_MOST_TIMELINES = 64  # in one file: a browser holds no more
_MOST_PAGES = 4  # of ranks, where not all are shown
_MOST_RANKS = 16  # on one page
_MOST_BYTES = 32 << 20  # of their files


def read_job(path: str | Path, engine: str | None = None) -> "Job":
    """The job in a folder of traces, or in a dataset that `to_parquet` wrote."""
    if history.is_history(path):
        looks = history.History(path).looks
        named = f", or name one of its looks, such as {path}/{looks[-1].file}" if looks else ""
        raise errors.UsageError(
            f"{path} has every step of a program: read it with pytracer.History or "
            f"pytracer summary{named}"
        )
    if dataset.is_dataset(path):
        return Job(folder.latest(dataset.read(path)))
    files = folder.files_of(path)
    with engines.opened(engine) as each:
        return Job(folder.ranks_of(files, each))


class Job(LoadedTrace):
    """The ranks of a job.

    `print(job)` compares them. `job.rank(3)` is one of them, with every view. Views that are not
    named here are those of the rank with the highest peak.
    """

    def __init__(self, ranks: Ranks, change: Callable[[Trace], Trace] | None = None) -> None:
        """Takes the digests. Call `load` instead."""
        self._ranks = ranks
        self._change = change  # of every trace that is read

    @property
    def data(self) -> Trace:
        """The trace of the rank with the highest peak."""
        return self._worst

    @cached_property
    def _worst(self) -> Trace:
        return self.rank(self.comparison.worst.rank).data

    @cached_property
    def comparison(self) -> Comparison:
        """What the table shows, as an object."""
        return compare.compare(self._ranks.digests)

    def rank(self, number: int) -> LoadedTrace:
        """Returns the trace of one rank.

        Raises:
            errors.UsageError: the job has no such rank, or only its digest is here.
        """
        one = next((each for each in self._ranks.digests if each.rank == number), None)
        if one is None:
            ranks = compare.ranks_text([each.rank for each in self._ranks.digests])
            raise errors.UsageError(f"there is no rank {number}; there is: {ranks}")
        if not one.is_readable:
            raise errors.UnreadableTrace(one.problem)
        if not one.file or not Path(one.file).is_file():
            raise errors.UsageError(
                f"rank {number}: {one.file or 'its trace'} is not here, only its digest; this view "
                "needs the trace"
            )
        trace = folder.read(Path(one.file))
        return LoadedTrace(self._change(trace) if self._change else trace)

    def ranks(self) -> "pd.DataFrame":
        """Returns one row per rank: its status, peak, bytes by category, steps and times."""
        rows = []
        for one in self._ranks.digests:
            figures = {name: compare.figure(one, name) for name in ("peak", *CATEGORY_ORDER)}
            times = {f"{name}_ns": compare.figure(one, name) or 0 for name in compare.TIMES}
            rows.append(
                {
                    **{name: getattr(one, name) for name in ("rank", "status", "host", "device")},
                    **figures,
                    "reserved": one.reserved,
                    "growth_per_step": one.growth_per_step,
                    "steps": len(one.steps),
                    **times,
                    "part": one.part,
                    "file": one.file,
                }
            )
        return frames.of_rows(rows).set_index("rank")

    def by(self, keys: str | Sequence[str], at: At = "peak") -> "pd.DataFrame":
        """Returns bytes per group, as of one trace; with the key "rank", of all ranks.

        `job.by(["rank", "category"])` is at each rank's own peak, `job.by(["rank", "step"])` at the
        peak of each step, and `job.by(["rank", "module"])` who holds each rank's peak.

        Args:
            keys: "rank" with any of "host", "part", "step", "category", "module", "op", "line"; or
                the keys of a single trace, for the rank with the highest peak.
            at: "peak", "end" or a time; with "rank" only "peak".
        """
        wanted = [keys] if isinstance(keys, str) else list(keys)
        if "rank" not in wanted:
            return super().by(keys, at)
        unknown = [key for key in wanted if key not in _KEYS]
        if unknown:
            raise errors.UsageError(
                f"cannot group ranks by {unknown[0]!r}; there is: {', '.join(_KEYS)}"
            )
        if at != "peak":
            raise errors.UsageError(f"at={at!r}: ranks are compared at their peaks")
        rows = [row for one in self._ranks.digests for row in _rows(one, wanted)]
        frame = frames.of_rows(rows, [*wanted, "bytes"])
        return (
            frame.groupby(wanted, sort=False)
            .sum()
            .sort_values("bytes", ascending=False, kind="stable")
        )

    def findings(self) -> "pd.DataFrame":
        """Returns the findings of all ranks, with the rank of each."""
        rows = [
            {"rank": one.rank, **note._asdict()}
            for one in self._ranks.digests
            for note in one.notes
        ]
        names = ["rank", "kind", "bytes", "module", "line", "evidence", "change"]
        return frames.of_rows(rows, names)

    def check(self, **limits: int | str) -> "list[Exceeded]":
        """Returns the limits that any rank exceeds. `name` has the rank: "peak of rank 3"."""
        return [row for row in self.measured(limits) if row.found > row.limit]

    def measured(self, limits: "dict[str, int | str]") -> "list[Exceeded]":
        """Returns each limit with the figure of the rank that needs most."""
        from pytracer.analysis.answers import budgets
        from pytracer.basics.units import parse_size

        rows = []
        for name, size in limits.items():
            if name not in budgets.LIMITS:
                raise budgets.unknown(name)
            short = "growth" if name == "growth_per_step" else name
            known = [
                (value, -one.rank)
                for one in self.comparison.readable
                if (value := compare.figure(one, short)) is not None
            ]
            if not known:
                raise errors.UsageError("growth per step needs three steps on a rank")
            most, rank = max(known)
            rows.append(budgets.Exceeded(f"{name} of rank {-rank}", parse_size(size), most))
        return rows

    def query(self, sql: str) -> "pd.DataFrame":
        """Runs SQL over the digests in DuckDB: `SELECT rank, module, bytes FROM owners`.

        docs/ranks.md lists the tables.
        """
        import tempfile

        with tempfile.TemporaryDirectory() as place:
            dataset.write(self._ranks.digests, place)
            return dataset.query(place, sql)

    def anonymous(self) -> "Job":
        """Returns the same job without hosts, commands, folders and paths."""
        plain = (
            replace(
                one,
                host="",
                program="",
                error=anonymous.kind_of(one.error),
                file=one.file and Path(one.file).name,
            )
            for one in self._ranks.digests
        )
        return Job(Ranks(tuple(plain)), anonymous.of)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """A job is many files: `to_parquet` writes its digests, `rank(3).save` one trace."""
        raise errors.UsageError(
            f"{path}: a job is many traces; job.rank(3).save() writes one of them, and "
            "job.to_parquet() the digests of all"
        )

    def to_parquet(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Writes the digests of all ranks as a Parquet dataset, a folder per rank."""
        return dataset.write(self._ranks.digests, folder, overwrite=overwrite)

    def drop_alike(self) -> int:
        """Deletes the traces of ranks that are like others, and returns how many.

        The traces of outliers stay, of ranks that did not end well, and one of each group of ranks
        that hold the same modules. Write the digests first: `to_parquet`.
        """
        there = self.comparison
        kept = set(self.interesting(len(there.digests)))
        for part in there.parts:
            like = [one for one in there.readable if one.rank in part.ranks]
            kept.add(min(like, key=lambda one: abs(one.peak - part.median_peak)).rank)
        kept |= {one.rank for one in there.digests if not one.is_readable}
        others = [one for one in there.digests if one.rank not in kept and one.file]
        for one in others:
            Path(one.file).unlink(missing_ok=True)
        return len(others)

    def report(
        self,
        path: str | Path,
        other: "Views | None" = None,
        *,
        forecasts: Sequence[Any] = (),
        source: bool = False,
        overwrite: bool = False,
    ) -> Path:
        """Writes one offline page of the job, with its ranks, or of many those that matter."""
        from pytracer.export import fits_text, report

        named = self.on_page()
        answers = tuple(map(fits_text.text_of, forecasts))
        named[0] = replace(named[0], answers=answers)
        if other is not None:
            named.append(report.Named("the other", other.data))
        return report.write(named, path, source=source, overwrite=overwrite, job=self.comparison)

    def on_page(self) -> "list[Named]":
        """The ranks on the page: the worst and a typical one first; of few ranks all."""
        from pytracer.export import report

        ranks = self.interesting()
        others = [one for one in self.comparison.readable if one.rank not in ranks]
        size = sum(Path(one.file).stat().st_size for one in others if Path(one.file).is_file())
        if len(ranks) + len(others) <= _MOST_RANKS and size <= _MOST_BYTES:
            ranks += [one.rank for one in others if Path(one.file).is_file()]
        return [report.Named(f"rank {rank}", self.rank(rank).data, rank=rank) for rank in ranks]

    def interesting(self, most: int = _MOST_PAGES) -> list[int]:
        """The ranks to look at first: the worst, a typical one, those that stand out."""
        there = self.comparison
        ranks = [there.worst.rank, there.typical.rank]
        ranks += [one.rank for one in there.readable if one.status != "whole"]
        ranks += [one.rank for one in there.outliers]
        return list(dict.fromkeys(ranks))[:most]

    def export_chrome_trace(
        self,
        path: str | Path,
        *,
        overwrite: bool = False,
        max_events: int | None = None,
        min_dt_us: float = 0,
        arrows: int = 1000,
        full: bool = False,
    ) -> "Exported":
        """Writes all ranks as one Chrome trace on one clock. See `Views.export_chrome_trace`.

        `max_events` and `arrows` are for each rank. Of many ranks it has the first 64 that
        `interesting` names.
        """
        from pytracer.export import chrome
        from pytracer.export.rows import Options

        options = Options(max_events, round(min_dt_us * 1000), arrows, full)
        return chrome.write_all(self._timelines(), path, options, overwrite=overwrite)

    def export_perfetto(
        self, path: str | Path, *, overwrite: bool = False, arrows: int = 1000, full: bool = False
    ) -> "Exported":
        """Writes all ranks as one `.pftrace`. See `Views.export_perfetto`."""
        from pytracer.export import perfetto
        from pytracer.export.rows import Options

        options = Options(arrows=arrows, full=full)
        return perfetto.write_all(self._timelines(), path, options, overwrite=overwrite)

    def _timelines(self) -> Iterator[Trace]:
        readable = self.comparison.readable
        ranks = [one.rank for one in readable]
        if len(ranks) > _MOST_TIMELINES:
            first = self.interesting(_MOST_TIMELINES)
            ranks = sorted(
                [*first, *(rank for rank in ranks if rank not in first)][:_MOST_TIMELINES]
            )
        leads = {one.rank: self.comparison.clocks[one.host].ns for one in readable}
        return (clocks.corrected(self.rank(rank).data, leads[rank]) for rank in ranks)

    def table(self, width: int | None = None, *, color: bool = False) -> str:
        """Returns the comparison as text: the screen that `print(job)` shows."""
        from pytracer.export import job_text, terminal

        where = replace(terminal.plain(width), color=color)
        return job_text.render(self.comparison, self._ranks.earlier, where)

    def _in_short(self) -> str:
        from pytracer.basics.units import size_text

        there = self.comparison
        worst = there.worst
        return f"{there.world_size} ranks, peak {size_text(worst.peak)} on rank {worst.rank}"


def _rows(one: Digest, keys: Sequence[str]) -> "list[dict[str, Any]]":
    """The rank's rows that have these keys."""
    named = {"rank": one.rank, "host": one.host, "part": one.part}
    if "step" in keys and any(key in keys for key in ("module", "op", "line")):
        raise errors.UsageError("owners are known at a rank's peak, not per step: leave out 'step'")
    if "step" in keys:
        rows = [
            {**named, "step": one.first_step + number, "category": category, "bytes": size}
            for number, step in enumerate(one.steps)
            for category, size in step.by_category.items()
        ]
    else:
        rows = [{**named, **held._asdict()} for held in one.holders]
    return [{key: row[key] for key in (*keys, "bytes")} for row in rows]
