"""Traces read from damaged files: numbers may point anywhere. Every view still answers."""

import contextlib

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pytracer import errors
from pytracer.analysis.allocator import replay
from pytracer.analysis.answers import breakdown, findings, recording_quality, training_steps
from pytracer.analysis.facts import devices, usage
from pytracer.analysis.forecasts import checkpoint_plans, what_if
from pytracer.analysis.forecasts.shown import Shown
from pytracer.data.recorded import Trace
from pytracer.data.schema import ACTION, TABLES
from pytracer.export import fits_text, notebook, postmortem
from pytracer.export.table import render
from tests.test_analysis_categories import programs
from tests.trace_builder import TraceBuilder

# Not the clock: turning ticks into times is the trace's own affair.
COLUMNS = [
    f"{name}.{column}"
    for name, (row, _) in TABLES.items()
    for column in row._fields
    if name != "clock"
]


OOM = ACTION["oom"]
SHOWN = Shown(fits_text.text_of, notebook.plan)


@st.composite
def damaged(draw: st.DrawFn) -> Trace:
    columns = draw(programs).to_columns()
    actions = columns["events.action"] = columns["events.action"].copy()
    if len(actions) and draw(st.booleans()):
        actions[draw(st.integers(0, len(actions) - 1))] = OOM
    for name in draw(st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=6)):
        column = columns[name].copy()
        if len(column):
            largest = min(int(np.iinfo(column.dtype).max), 2**62)
            at = draw(st.integers(0, len(column) - 1))
            column[at] = draw(st.sampled_from([0, 1, len(column), largest // 2, largest]))
        columns[name] = column
    return Trace.from_columns(columns)


@given(damaged())
def test_every_view_answers(trace: Trace) -> None:
    render(trace)
    breakdown.summary(trace)
    breakdown.allocations_frame(trace)
    usage.timeline(trace)
    training_steps.steps(trace)
    recording_quality.health(trace)
    breakdown.bytes_per_parameter(trace)
    findings.findings(trace)
    postmortem.render(trace)
    for key in ("module", "op", "line", "phase", "role", "name", "step"):
        breakdown.by(trace, key)
    for device in usage.devices(trace):
        with contextlib.suppress(errors.UsageError):
            checkpoint_plans.plan(trace, 1, 0, device, SHOWN)
            checkpoint_plans.plan(trace, 1, 2**40, device, SHOWN)
        with contextlib.suppress(errors.UsageError):
            what_if.what_if([trace, trace], 1000, None, device)
        if device != "cpu":
            replay.replay(trace, "", device=device)


def test_more_places_than_an_event_can_name_are_no_error() -> None:
    """A damaged table of places may be longer than its 16 bits can number."""
    b = TraceBuilder()
    b.alloc(512)
    columns = b.trace().to_columns()
    for name in TABLES["places"][0]._fields:
        columns[f"places.{name}"] = np.repeat(columns[f"places.{name}"], 70_000)
    trace = Trace.from_columns(columns)
    assert devices.on(trace, "cpu", trace.events.place).all()
    assert "512 B" in render(trace)


@pytest.mark.parametrize("table", ["scopes", "scope_ends", "labels", "stacks", "clock", "threads"])
def test_a_lost_table_costs_only_what_it_said(table: str) -> None:
    from tests.test_table import training

    columns = training().trace().to_columns()
    for column in TABLES[table][0]._fields:
        columns[f"{table}.{column}"] = columns[f"{table}.{column}"][:0]
    trace = Trace.from_columns(columns)
    render(trace)
    assert breakdown.summary(trace).at_peak.sum() == usage.peak(training().trace()).bytes
