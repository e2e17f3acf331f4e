"""What can be asked of a trace, and `load()`, which reads one back. Nothing here needs torch."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pytracer import errors, health, snapshot
from pytracer.recorded import Trace, load as load_trace

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from pytracer.analysis.allocator.replay import Replay
    from pytracer.analysis.answers.budgets import Exceeded
    from pytracer.analysis.facts.usage import Peak
    from pytracer.analysis.forecasts.checkpoint_plans import CheckpointPlan
    from pytracer.analysis.forecasts.fits import Fits
    from pytracer.analysis.forecasts.what_if import WhatIf
    from pytracer.export.chrome import Exported
    from pytracer.verify import Program

At = Literal["peak", "end"] | int


def _verify() -> Any:
    """Late: it is seldom asked for."""
    from pytracer import verify

    return verify


class Views:
    """What can be asked of a trace. Tables are pandas DataFrames; sizes are bytes, times ns.

    pandas leaves out columns where the screen is narrow: `print(t.steps().to_string())` has all.
    `t.steps().pytracer.human()` has sizes and times as people read them.
    """

    @property
    def data(self) -> Trace:
        """The recorded columns behind every view."""
        raise NotImplementedError

    @property
    def peak(self) -> "Peak":
        """The moment of greatest memory: .bytes .time_ns .step .phase .by_category."""
        from pytracer.analysis.facts import usage

        return usage.peak(self.data)

    def summary(self) -> "pd.DataFrame":
        """One row per category: bytes at the peak, at its own peak and at the end."""
        from pytracer.analysis.answers import breakdown

        return breakdown.summary(self.data)

    def allocations(self) -> "pd.DataFrame":
        """One row per allocation, in order."""
        from pytracer.analysis.answers import breakdown

        return breakdown.allocations_frame(self.data)

    def timeline(self, by: str = "category") -> "pd.DataFrame":
        """Bytes over time, a column per category (or phase, device); index: time_ns."""
        from pytracer.analysis.facts import usage

        return usage.timeline(self.data, by=by)

    def by(self, keys: str | Sequence[str], at: At = "peak") -> "pd.DataFrame":
        """Who holds memory at a moment.

        Args:
            keys: one or a list of "module", "op", "line", "phase", "free_phase", "category", "role",
                "name", "shape", "dtype", "step", "pool".
            at: "peak", "end" or a time in nanoseconds.
        """
        from pytracer.analysis.answers import breakdown

        return breakdown.by(self.data, keys, at=at)

    def steps(self) -> "pd.DataFrame":
        """One row per training step: its peak, what it left behind, how long it took.

        Step 0 is the first one that was recorded, whatever a schedule let pass before it.
        """
        from pytracer.analysis.answers import training_steps

        return training_steps.steps(self.data)

    def bytes_per_parameter(self) -> "pd.DataFrame":
        """Weights, gradients and optimizer state per parameter, beside the textbook's rule."""
        from pytracer.analysis.answers import breakdown

        return breakdown.bytes_per_parameter(self.data)

    def ledger(
        self, at: Literal["peak", "end"] = "end", device: str | None = None
    ) -> "pd.DataFrame":
        """From tensors to what nvidia-smi shows (on CPU: resident memory), with the residual.

        `attrs` of the result has residual, limit and notes.
        """
        from pytracer.analysis.allocator import ledger

        return ledger.frame(ledger.ledger(self.data, at, device))

    def fragmentation(
        self,
        at: At | Literal["oom"] = "peak",
        request: int | None = None,
        device: str | None = None,
    ) -> "pd.DataFrame":
        """One row per segment of CUDA's allocator: what of it cannot serve a request, and why.

        Args:
            at: "peak", "end", a time, or "oom": when the last request failed.
            request: bytes; by default the request that failed, or the largest of the trace.
            device: by default the one that the program trains on.

        `attrs` of the result has the sums, and whether expandable segments would have helped.
        """
        from pytracer.analysis.allocator import fragmentation

        return fragmentation.frame(fragmentation.layout(self.data, at, device, request))

    def replay(
        self,
        settings: str | None = None,
        limit: int | str | None = None,
        device: str | None = None,
    ) -> "Replay":
        """What CUDA's allocator would have done: .peak_reserved .retries .failed .smallest_limit.

        Args:
            settings: what would be in PYTORCH_ALLOC_CONF; "" is torch's default. By default those
                of the recording.
            limit: what `set_per_process_memory_fraction` would allow: "24GiB", or bytes. By default
                that of the recording.
            device: by default the one that the program trains on.

        The result is true where everything ran. `.timeline()` has reserved and unused bytes over time.
        """
        from pytracer.analysis.allocator import replay

        return replay.replay(self.data, settings, limit, device)

    def fits(
        self,
        on: int | str | None = None,
        settings: str | None = None,
        device: str | None = None,
        *,
        verify: "Program" = False,
    ) -> "Fits":
        """Whether the run fits on a card of this size, and what would make it fit.

        Args:
            on: the card's memory, "24GiB"; without it the smallest card is looked for.
            settings: what would be in PYTORCH_ALLOC_CONF. By default those of the recording.
            device: by default the one that the program trains on.
            verify: the program to run again, ["train.py", "--epochs", "1"]: it gets what the card has
                for torch's allocator as its limit, and `.verified` is what happened.

        `print(t.fits("24GiB"))` says who holds what where it fails; the answer is true where it fits.
        """
        from pytracer.analysis.forecasts import fits
        from pytracer.export import fits_text

        found = fits.fits(self.data, on, settings, device, fits_text.render)
        if verify is not False:
            found = replace(found, verified=_verify().fits(self.data, found, verify))
        return found

    def checkpoint_plan(
        self,
        budget: int | str,
        device: str | None = None,
        *,
        pinned: int | str = 0,
        verify: "Program" = False,
    ) -> "CheckpointPlan":
        """Which modules to checkpoint to stay in a budget at the least time: .modules, .code.

        Args:
            budget: "20GiB" or bytes: of CUDA's allocator; on the CPU of what is requested.
            device: by default the one that the program trains on.
            pinned: "64GiB" of the host's memory may be pinned for what is offloaded there; then also
                .offloaded.
            verify: the program to run again with these modules checkpointed, and with the budget as
                the limit: ["train.py", "--epochs", "1"]. `.verified` is what happened.

        The result is true where the plan fits; else its plan is the smallest that there is.
        """
        from pytracer.analysis.forecasts import checkpoint_plans
        from pytracer.export import fits_text

        found = checkpoint_plans.plan(self.data, budget, pinned, device, fits_text.render_plan)
        if verify is not False:
            found = replace(found, verified=_verify().plan(self.data, found, verify))
        return found

    def what_if(
        self,
        *others: "Views",
        batch: int | None = None,
        seq: int | None = None,
        device: str | None = None,
        verify: "Program" = False,
    ) -> "WhatIf":
        """The peak with another batch or length: .lowest and .highest, which are equal where exact.

        Args:
            others: traces of the same program with other sizes; two or three are enough. From one
                trace alone no law can be learned, and the answer is an interval.
            batch: the batch to ask about; by default the largest trace's.
            seq: the length to ask about, likewise.
            device: by default the one that the program trains on.
            verify: the program with that batch and length, to be run: ["train.py", "--batch", "32"].
                `.verified` is what happened.
        """
        from pytracer.analysis.forecasts import what_if

        traces = [self.data, *(t.data for t in others)]
        found = what_if.what_if(traces, batch, seq, device)
        if verify is not False:
            found = replace(found, verified=_verify().what_if(traces, found, verify))
        return found

    def findings(self) -> "pd.DataFrame":
        """Leaks and waste: kind, bytes, line, module, the evidence and the change that ends it."""
        from pytracer import frames
        from pytracer.analysis.answers import findings

        rows = findings.findings(self.data)
        # Texts inside: pandas leaves out middle columns where the screen is narrow.
        inside = ["evidence", "change"]
        outside = [name for name in findings.Finding.__dataclass_fields__ if name not in inside]
        return frames.of_rows(rows, [*outside[:3], *inside, *outside[3:]])

    def check(self, **limits: int | str) -> "list[Exceeded]":
        """Limits that do not hold: `t.check(peak="2 GiB", activations="1 GiB", growth_per_step=0)`.

        A category's limit is on its own peak. An empty list is good news.
        """
        from pytracer.analysis.answers import budgets

        return budgets.check(self.data, limits)

    def growth_per_step(self) -> int:
        """Bytes that a step leaves behind: the median of all but the first."""
        from pytracer.analysis.answers import budgets

        return budgets.growth_per_step(self.data)

    def post_mortem(self, width: int = 80) -> str:
        """One page about the last allocation that failed; "" if none did."""
        from pytracer.export import postmortem

        return postmortem.render(self.data, width)

    def cost(self, by: Literal["module", "op", "class"] = "module") -> "pd.DataFrame":
        """What each part cost, forward and backward: FLOPs, bytes, time, ratios and a verdict.

        Needs `trace(cost=True)`. `attrs` of the result says what was measured on, the sum of all
        times, and which operators could not be counted.
        """
        from pytracer.cost import table as cost_table

        return cost_table.frame(self.data, by)

    def health(self) -> "pd.DataFrame":
        """What was lost or could not be seen, and what to do about it."""
        from pytracer.analysis.answers import recording_quality

        return recording_quality.health(self.data)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Writes a `.pytrace` file that `load` reads back equal."""
        return self.data.save(path, overwrite=overwrite)

    def anonymous(self) -> "LoadedTrace":
        """The same trace without host, process numbers, command, folders and paths.

        For what leaves your machine: `t.anonymous().export_html("run.html")`. A path becomes
        relative to where the program ran, or the file's name alone.
        """
        from pytracer import anonymous

        return LoadedTrace(anonymous.of(self.data))

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
        """Writes a `.json` or `.json.gz` for https://ui.perfetto.dev and chrome://tracing.

        Args:
            path: the file, compressed if it ends in .gz.
            overwrite: replace a file that is there.
            max_events: keep the largest allocations, the longest ops and as many samples of the
                counters as fit; the result says what was left out.
            min_dt_us: keep only the counters' extremes of each so many microseconds.
            arrows: how many of the largest allocations get an arrow to where they are freed.
            full: all of it. Else what is too small to see in a large trace is folded: its counts
                and bytes are there, in one bar for many.
        """
        from pytracer.export import exporters

        return exporters.chrome(
            self.data,
            path,
            overwrite=overwrite,
            max_events=max_events,
            min_dt_ns=round(min_dt_us * 1000),
            arrows=arrows,
            full=full,
        )

    def export_perfetto(
        self, path: str | Path, *, overwrite: bool = False, arrows: int = 1000, full: bool = False
    ) -> "Exported":
        """Writes a `.pftrace` for https://ui.perfetto.dev, which shows the memory at once.

        Args:
            path: the file.
            overwrite: replace a file that is there.
            arrows: how many of the largest allocations get an arrow to where they are freed.
            full: all of it. Else what is too small to see in a large trace is folded: its counts
                and bytes are there, in one bar for many.
        """
        from pytracer.export import exporters

        return exporters.perfetto(self.data, path, overwrite=overwrite, arrows=arrows, full=full)

    def export_memory_snapshot(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Writes a `.pickle` for https://pytorch.org/memory_viz, with the categories."""
        from pytracer.export.snapshot import write

        return write(self.data, path, overwrite=overwrite)

    def report(
        self,
        path: str | Path,
        other: "Views | None" = None,
        *,
        source: bool = False,
        overwrite: bool = False,
    ) -> Path:
        """Writes one offline page in which every allocation can be seen.

        Args:
            path: the file, which any browser opens; it loads nothing.
            other: another trace, to be compared with this one on the page.
            source: also put the lines of source that allocated into the page.
            overwrite: replace a file that is there.
        """
        from pytracer.export import report

        if other is not None and not isinstance(other, Views):
            raise errors.UsageError(
                f"report() compares with another trace, and {other!r} is none: load(file)"
            )
        named = [report.Named(Path(path).stem, self.data)]
        if other is not None:
            named.append(report.Named("the other", other.data))
        return report.write(named, path, source=source, overwrite=overwrite)

    def export_html(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """The same as `report`; its table and picture need no scripts."""
        from pytracer.export import exporters

        return exporters.html(self.data, path, overwrite=overwrite)

    def to_parquet(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Writes allocations, timeline, steps and summary as Parquet (needs pyarrow)."""
        from pytracer.export import parquet

        return parquet.write(self.data, folder, overwrite=overwrite)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws categories over time, steps, phases and the peak (needs matplotlib)."""
        from pytracer.export import plot

        return plot.plot(self.data, ax)

    def diff(
        self,
        other: "Views | None" = None,
        by: str | Sequence[str] = ("category", "module", "op", "line", "phase"),
        *,
        at: At = "peak",
        steps: tuple[int, int] | None = None,
    ) -> "pd.DataFrame":
        """What is different in the other trace, the largest change first.

        Args:
            other: the trace that is compared with this one; by default this one itself.
            by: what to tell apart: any keys of `by()`.
            at: the moment of each, its own peak by default.
            steps: a step of this trace and one of the other: `t.diff(steps=(0, 2))`.
        """
        from pytracer.analysis.answers import diff

        if other is None and steps is None:
            raise errors.UsageError("diff() needs another trace, or two steps=(0, 2) of this one")
        _check_steps(steps)
        if other is not None and not isinstance(other, Views):
            raise errors.UsageError(
                f"diff() compares with another trace, and {other!r} is none: t.diff(load(file))"
            )
        after = self.data if other is None else other.data
        return diff.frame(diff.diff(self.data, after, by, at, steps))

    def _repr_html_(self) -> str:
        """In a notebook: the table, a picture, and the report in a sandboxed frame."""
        from pytracer.export import report

        return report.inline(self.data)

    def table(self, width: int | None = None, *, color: bool = False) -> str:
        """The one screen, as text; by default as wide as the terminal, and 80 columns at most."""
        from pytracer.export import table

        return table.render(self.data, width=width or table.columns(), color=color)

    def __str__(self) -> str:
        """The one screen."""
        return self.table()

    def __repr__(self) -> str:
        """One line, for a prompt; `print(t)` has the screen."""
        return f"<pytracer.{type(self).__name__}: {self._in_short()}>"

    def _in_short(self) -> str:
        from pytracer.units import size_text

        peak, events = self.peak, len(self.data.events.ticks)
        return f"peak {size_text(peak.bytes)} on {peak.device}, {events:,} events"


class LoadedTrace(Views):
    """A trace read from a file."""

    def __init__(self, data: Trace) -> None:
        """`load` makes these."""
        self._data = data

    @property
    def data(self) -> Trace:
        """The recorded columns behind every view."""
        return self._data

    @property
    def file_report(self) -> dict[str, Any]:
        """How whole the file was: status, lost rows, notes."""
        return dict(self._data.file_report)


def load(path: str | Path) -> LoadedTrace:
    """Reads a saved trace, whole or as far as it was written before the program died.

    Memory snapshots of torch (`torch.cuda.memory._dump_snapshot`) are read as well, and nothing in
    them is executed. Of a file that is not whole a RuntimeWarning tells.
    """
    loaded = read(path)
    for name in sorted(health.OF_FILES & loaded.data.losses.keys()):
        known = health.counter(name)
        errors.warn(f"{os.fspath(path)}: {known.meaning}. {known.advice} t.file_report has details")
    return loaded


def read(path: str | Path) -> LoadedTrace:
    """As `load`, for those who tell of a file that is not whole in their own way."""
    if snapshot.is_snapshot(path):
        return LoadedTrace(snapshot.load(path))
    return LoadedTrace(load_trace(path))


def _check_steps(steps: Any) -> None:
    if steps is not None and not (isinstance(steps, tuple | list) and len(steps) == 2):
        raise errors.UsageError(f"steps={steps!r}: a step of each, as in steps=(0, 2)")
