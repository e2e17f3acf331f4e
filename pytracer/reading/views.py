"""The views of a trace, and `load()`, which reads a trace from a file. Nothing here needs torch."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pytracer import errors, snapshot
from pytracer.basics import files
from pytracer.data import health
from pytracer.data.recorded import Trace, load as load_trace

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
    from pytracer.reading.verify import Program

At = Literal["peak", "end"] | int


def _verify() -> Any:
    """Imports the module late, because it is seldom needed."""
    from pytracer.reading import verify

    return verify


class Views:
    """The views of a trace: tables, forecasts and exports.

    Tables are pandas DataFrames. Sizes are bytes, times are nanoseconds, and NA stands for an
    unknown module, line or op. On a narrow screen pandas leaves out columns:
    `print(t.steps().to_string())` prints all of them. `t.steps().pytracer.human()` writes sizes and
    times as people read them, such as `3.57 MiB` and `591 ms`.

    A view raises `errors.UsageError` for a key, moment, step, device or size that does not exist.
    """

    @property
    def data(self) -> Trace:
        """The recorded columns behind every view."""
        raise NotImplementedError

    @property
    def peak(self) -> "Peak":
        """The moment of greatest memory, with .bytes .time_ns .step .phase .by_category .device."""
        from pytracer.analysis.facts import usage

        return usage.peak(self.data)

    def summary(self) -> "pd.DataFrame":
        """Returns one row per category: its bytes at the peak, at its own peak and at the end."""
        from pytracer.analysis.answers import breakdown

        return breakdown.summary(self.data)

    def allocations(self) -> "pd.DataFrame":
        """Returns one row per allocation, in the order in which they were made.

        A row has sizes, times, category, module, op and line; name, shape and dtype where a tensor
        is known.
        """
        from pytracer.analysis.answers import breakdown

        return breakdown.allocations_frame(self.data)

    def timeline(self, by: str = "category") -> "pd.DataFrame":
        """Returns the bytes after every change, with the time in ns as the index.

        Args:
            by: "category", "phase" or "device": the columns of the table.
        """
        from pytracer.analysis.facts import usage

        return usage.timeline(self.data, by=by)

    def by(self, keys: str | Sequence[str], at: At = "peak") -> "pd.DataFrame":
        """Returns who holds memory at a moment: bytes and allocations per group, largest first.

        A module holds the blocks that it and its backward made, and its own weights, gradients and
        optimizer state. `t.by(["module", "op"])` groups by both.

        Args:
            keys: one or a list of "module", "op", "line", "phase", "free_phase", "category",
                "role", "name", "shape", "dtype", "step", "pool", "mesh_dim" (what cuts the
                parameter over the job's ranks; "none" if each rank has it whole).
            at: "peak", "end" or a time in nanoseconds.
        """
        from pytracer.analysis.answers import breakdown

        return breakdown.by(self.data, keys, at=at)

    def peaks(self) -> "pd.DataFrame":
        """Returns one row per kind of work: the peak of training, evaluation and generation."""
        from pytracer.analysis.answers import peaks

        return peaks.peaks(self.data)

    def steps(self) -> "pd.DataFrame":
        """Returns one row per training step: its peak, its growth and the times of its phases.

        Step 0 is the first recorded step, even if a schedule skipped some before it. On CUDA the
        `device_` times are the ones to look at: the host runs ahead.
        """
        from pytracer.analysis.answers import training_steps

        return training_steps.steps(self.data)

    def parameters(self) -> "pd.DataFrame":
        """Returns one row per parameter of a job's model: its bytes, and those of this rank's part.

        Rows are named as in the whole model. Only traces of a job with several ranks have them.
        """
        from pytracer.analysis.answers import breakdown

        return breakdown.parameter_shares(self.data)

    def bytes_per_parameter(self) -> "pd.DataFrame":
        """Returns weights, gradients and optimizer state per parameter, and the textbook's rule."""
        from pytracer.analysis.answers import breakdown

        return breakdown.bytes_per_parameter(self.data)

    def ledger(
        self, at: Literal["peak", "end"] = "end", device: str | None = None
    ) -> "pd.DataFrame":
        """Returns the sums from tensors up to nvidia-smi's figure, or the CPU's resident memory.

        `attrs` of the result has the residual (bytes that nothing explains), the limit and notes.

        Args:
            at: "peak" or "end". At the peak nobody read the device, so there is no residual.
            device: by default the one that the program trains on.
        """
        from pytracer.analysis.allocator import ledger

        return ledger.frame(ledger.ledger(self.data, at, device))

    def fragmentation(
        self,
        at: At | Literal["oom"] = "peak",
        request: int | None = None,
        device: str | None = None,
    ) -> "pd.DataFrame":
        """Returns one row per segment of CUDA's allocator: its bytes that cannot serve a request.

        `attrs` of the result has the sums, and whether expandable segments would have helped.

        Args:
            at: "peak", "end", a time, or "oom": when the last request failed.
            request: bytes; by default the request that failed, or the largest of the trace.
            device: by default the one that the program trains on.
        """
        from pytracer.analysis.allocator import fragmentation

        return fragmentation.frame(fragmentation.layout(self.data, at, device, request))

    def replay(
        self,
        settings: str | None = None,
        limit: int | str | None = None,
        device: str | None = None,
    ) -> "Replay":
        """Replays the allocations in a model of CUDA's allocator, under other settings.

        The result has .peak_reserved .retries .failed .smallest_limit, and is true if every request
        was served. Its `.timeline()` has reserved and unused bytes over time.

        Args:
            settings: the text of PYTORCH_ALLOC_CONF; "" is torch's default. By default the settings
                of the recording.
            limit: the bytes that `set_per_process_memory_fraction` would allow, or "24GiB". By
                default the limit of the recording.
            device: by default the one that the program trains on.
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
        """Returns whether the run fits on a card of this size, and what would make it fit.

        The result is true if the run fits. `print(t.fits("24GiB"))` shows who holds the memory at
        the request that fails.

        Args:
            on: the card's memory, "24GiB" or bytes. Without it, the result names the smallest card.
            settings: the text of PYTORCH_ALLOC_CONF. By default the settings of the recording.
            device: by default the one that the program trains on.
            verify: the program to run again, ["train.py", "--epochs", "1"]. Its limit is the card's
                share for torch's allocator, and `.verified` compares the run with the forecast.
        """
        from pytracer.analysis.forecasts import fits
        from pytracer.analysis.forecasts.shown import Shown
        from pytracer.export import fits_text, notebook

        shown = Shown(fits_text.as_printed, notebook.fits)
        answer = fits.fits(self.data, on, settings, device, shown)
        if verify is not False:
            answer = replace(answer, verified=_verify().fits(self.data, answer, verify))
        return answer

    def checkpoint_plan(
        self,
        budget: int | str,
        device: str | None = None,
        *,
        pinned: int | str = 0,
        verify: "Program" = False,
    ) -> "CheckpointPlan":
        """Returns which modules to checkpoint to stay in a budget at the least time.

        The result has .modules, and .code to write into the program. It is true if the plan fits
        the budget. Otherwise it is the plan that needs least.

        Args:
            budget: "20GiB" or bytes, for CUDA's allocator; on the CPU, for the requested bytes.
            device: by default the one that the program trains on.
            pinned: the host's memory that may be pinned to offload activations, such as "64GiB".
                The result then also has .offloaded.
            verify: the program to run again, ["train.py", "--epochs", "1"], with these modules
                checkpointed and the budget as its limit. `.verified` compares it with the plan.
        """
        from pytracer.analysis.forecasts import checkpoint_plans
        from pytracer.analysis.forecasts.shown import Shown
        from pytracer.export import fits_text, notebook

        shown = Shown(fits_text.as_printed, notebook.plan)
        chosen = checkpoint_plans.plan(self.data, budget, pinned, device, shown)
        if verify is not False:
            chosen = replace(chosen, verified=_verify().plan(self.data, chosen, verify))
        return chosen

    def what_if(
        self,
        *others: "Views",
        batch: int | None = None,
        seq: int | None = None,
        device: str | None = None,
        verify: "Program" = False,
    ) -> "WhatIf":
        """Predicts the peak with another batch or sequence length.

        The result has .lowest and .highest. They are equal if the prediction is exact.

        Args:
            others: traces of the same program with other sizes; two or three are enough. One trace
                alone shows no law, so the answer is an interval.
            batch: the batch to predict for; by default that of the largest trace.
            seq: the sequence length to predict for; by default that of the largest trace.
            device: by default the one that the program trains on.
            verify: the program with that batch and length, ["train.py", "--batch", "32"], to run.
                `.verified` compares it with the prediction.
        """
        from pytracer.analysis.forecasts import what_if

        traces = [self.data, *(t.data for t in others)]
        predicted = what_if.what_if(traces, batch, seq, device)
        if verify is not False:
            predicted = replace(predicted, verified=_verify().what_if(traces, predicted, verify))
        return predicted

    def findings(self) -> "pd.DataFrame":
        """Returns leaks and waste, each with bytes, line, module, evidence and the change to make.

        docs/findings.md lists the kinds.
        """
        from pytracer.analysis.answers import findings
        from pytracer.analysis.answers.situation import Finding
        from pytracer.data import frames

        rows = findings.findings(self.data)
        # The texts are in the middle: pandas leaves out middle columns on a narrow screen.
        inside = ["evidence", "change"]
        others = [*inside, "proof", "edit"]
        outside = [name for name in Finding.__dataclass_fields__ if name not in others]
        return frames.of_rows(rows, [*outside[:3], *inside, *outside[3:]])

    def advice(self) -> "pd.DataFrame":
        """Returns every change that lowers the peak by a hundredth, mistakes first.

        `saves` and `peak_after` are what a replay of the trace's requests with that change shows;
        NA where no replay shows it. `enough` says whether a change makes room for the allocation that
        failed, if one did. `attrs["peak_after_all"]` is the peak after all mistakes and
        free savings together, which is not the sum of them. `print()` shows it as a list.
        """
        from pytracer.analysis.facts import usage
        from pytracer.analysis.forecasts import changes
        from pytracer.data import frames
        from pytracer.export import advice_text, notebook

        device = usage.main_device(self.data)
        columns = [name for name in changes.Change.__dataclass_fields__ if name != "edit"]
        rows = changes.changes(self.data, device)
        frame = frames.of_rows(rows, columns)
        frame = frame.astype({"saves": "Int64", "peak_after": "Int64", "enough": "boolean"})
        frame.attrs["peak"] = self.peak.bytes
        frame.attrs["peak_after_all"] = changes.together(self.data, device) if rows else None
        return frames.shown_as(frame, notebook.advised, advice_text.of_table)

    def check(self, **limits: int | str) -> "list[Exceeded]":
        """Returns the limits that the trace exceeds; an empty list if all hold.

        Args:
            **limits: "peak", "growth_per_step" or a category, each with bytes or a size:
                `t.check(peak="2 GiB", activations="1 GiB", growth_per_step=0)`. A category's limit
                is for its own peak.
        """
        from pytracer.analysis.answers import budgets

        return budgets.check(self.data, limits)

    def growth_per_step(self) -> int:
        """Returns the bytes that a step leaves behind: the median of all steps but the first.

        Raises:
            errors.UsageError: the trace has fewer than three steps.
        """
        from pytracer.analysis.answers import budgets

        return budgets.growth_per_step(self.data)

    def post_mortem(self, width: int = 80) -> str:
        """Returns one page of text about the last allocation that failed; "" if none failed."""
        from pytracer.export import postmortem, terminal

        return postmortem.render(self.data, terminal.plain(width))

    def cost(self, by: Literal["module", "op", "class"] = "module") -> "pd.DataFrame":
        """Returns FLOPs, bytes, times, ratios and a verdict for each part, forward and backward.

        Needs a trace with `trace(cost=True)`. `attrs` of the result has the device, the sum of all
        times, and the operators that could not be counted.

        Args:
            by: "module", "op" or "class": the rows of the table.
        """
        from pytracer.cost import table as cost_table
        from pytracer.data import frames
        from pytracer.export import notebook

        return frames.shown_as(cost_table.frame(self.data, by), notebook.costs)

    def health(self) -> "pd.DataFrame":
        """Returns everything that the recording lost or could not see, each with advice.

        An empty table means that the recording is whole.
        """
        from pytracer.analysis.answers import recording_quality

        return recording_quality.health(self.data)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Writes a `.pytrace` file that `load` reads back equal, and returns its path.

        Raises:
            errors.CannotWrite: the file exists, and `overwrite` is false, or it cannot be written.
        """
        return self.data.save(path, overwrite=overwrite)

    def anonymous(self) -> "LoadedTrace":
        """Returns the same trace without host, process numbers, command, folders and paths.

        Use it for files that leave your machine: `t.anonymous().export_html("run.html")`. A path
        becomes relative to the program's working directory, or the file's name alone.
        """
        from pytracer.data import anonymous

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
            overwrite: replace an existing file.
            max_events: write at most so many events: the largest allocations, the longest ops and
                as many samples of the counters as fit. The result counts what was left out.
            min_dt_us: keep only the extremes of the counters within each so many microseconds.
            arrows: for how many of the largest allocations to draw an arrow to their free.
            full: write everything. Otherwise, in a large trace, bars that are too small to see are
                folded into one, with their counts and bytes.
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
            overwrite: replace an existing file.
            arrows: for how many of the largest allocations to draw an arrow to their free.
            full: write everything. Otherwise, in a large trace, bars that are too small to see are
                folded into one, with their counts and bytes.
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
        forecasts: "Sequence[Fits | WhatIf | CheckpointPlan]" = (),
        source: bool = False,
        overwrite: bool = False,
    ) -> Path:
        """Writes one offline page that shows every allocation, and returns its path.

        Args:
            path: the file, which any browser opens. It loads nothing from elsewhere.
            other: another trace, to compare with this one on the page.
            forecasts: answers to show, too: `[t.fits("24GiB"), t.what_if(larger, batch=32)]`.
            source: also include the source lines that allocated.
            overwrite: replace an existing file.
        """
        from pytracer.export import fits_text, report

        if other is not None and not isinstance(other, Views):
            raise errors.UsageError(
                f"report() compares with another trace, and {other!r} is none: load(file)"
            )
        answers = tuple(map(fits_text.text_of, forecasts))
        named = [report.Named(Path(path).stem, self.data, answers)]
        if other is not None:
            named.append(report.Named("the other", other.data))
        return report.write(named, path, source=source, overwrite=overwrite)

    def export_html(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Writes the same page as `report`. Its table and picture need no scripts."""
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
        """Returns the differences of the other trace from this one, the largest change first.

        Args:
            other: the later trace. Without it, `steps` compares two steps of this trace.
            by: the keys that a row is of, as in `by()`.
            at: the moment in each trace; by default its own peak.
            steps: a step of this trace and one of the other: `t.diff(steps=(0, 2))`.
        """
        from pytracer.analysis.answers import diff
        from pytracer.data import frames
        from pytracer.export import notebook

        if other is None and steps is None:
            raise errors.UsageError("diff() needs another trace, or two steps=(0, 2) of this one")
        _check_steps(steps)
        if other is not None and not isinstance(other, Views):
            raise errors.UsageError(
                f"diff() compares with another trace, and {other!r} is none: t.diff(load(file))"
            )
        after = self.data if other is None else other.data
        table = diff.frame(diff.diff(self.data, after, by, at, steps))
        return frames.shown_as(table, notebook.changed)

    def _repr_html_(self) -> str:
        """Shows the table, a picture, and the report in a sandboxed frame, in a notebook."""
        from pytracer.export import report

        return report.inline(self.data)

    def table(self, width: int | None = None, *, color: bool = False) -> str:
        """Returns the table as text: the screen that `print(t)` shows.

        Args:
            width: columns of text; by default those of the terminal, at most 120.
            color: with the escape codes of a terminal.
        """
        from pytracer.export import table, terminal

        return table.render(self.data, replace(terminal.plain(width), color=color))

    def __str__(self) -> str:
        """The table, as `table()` returns it."""
        return self.table()

    def __repr__(self) -> str:
        """One line, for a prompt. `print(t)` shows the table."""
        return f"<pytracer.{type(self).__name__}: {self._in_short()}>"

    def _in_short(self) -> str:
        from pytracer.basics.units import size_text

        peak, events = self.peak, len(self.data.events.ticks)
        return f"peak {size_text(peak.bytes)} on {peak.device}, {events:,} events"


class LoadedTrace(Views):
    """A trace read from a file."""

    def __init__(self, data: Trace) -> None:
        """Wraps a trace. Call `load` instead."""
        self._data = data

    @property
    def data(self) -> Trace:
        """The recorded columns behind every view."""
        return self._data

    @property
    def file_report(self) -> dict[str, Any]:
        """The state of the file: its status, lost rows and notes."""
        return dict(self.data.file_report)


def load(path: str | Path) -> LoadedTrace:
    """Reads a trace from a file, as far as it was written before the program ended.

    It also reads memory snapshots of torch (`torch.cuda.memory._dump_snapshot`), and executes
    nothing in them. A RuntimeWarning says what an incomplete file lacks.

    Example:
        t = load("run.pytrace")
        print(t)

    Args:
        path: a `.pytrace` file, or a memory snapshot.

    Raises:
        errors.UnreadableTrace: the file is missing, no trace, damaged beyond reading, or of a newer
            format.
    """
    loaded = read(path)
    for name in sorted(health.OF_FILES & loaded.data.losses.keys()):
        loss = health.counter(name)
        errors.warn(f"{os.fspath(path)}: {loss.meaning}. {loss.advice} t.file_report has details")
    return loaded


def read(path: str | Path) -> LoadedTrace:
    """Like `load`, without the warning. For callers that report an incomplete file themselves."""
    try:
        if snapshot.is_snapshot(path):
            return LoadedTrace(snapshot.load(path))
        return LoadedTrace(load_trace(path))
    except errors.UnreadableTrace:
        if reason := files.why_no_trace(path):
            raise errors.UnreadableTrace(reason) from None
        raise


def _check_steps(steps: Any) -> None:
    if steps is not None and not (isinstance(steps, tuple | list) and len(steps) == 2):
        raise errors.UsageError(f"steps={steps!r}: a step of each, as in steps=(0, 2)")
