"""The machine that starts and stops recordings as steps go by."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pytracer import errors
from pytracer.capture import cycles
from pytracer.capture.cycles import Cycles, kept_then_watched, of_schedule

actions = st.lists(st.sampled_from(["NONE", "WARMUP", "RECORD", "RECORD_AND_SAVE"]), min_size=1)


def told(window_of: Any, steps: int) -> list[tuple[str, int]]:
    """What a program of so many steps starts and stops, with the step at which it happens."""
    happened: list[tuple[str, int]] = []

    def start(window: int) -> None:
        happened.append(("start", machine.step))

    def stop(window: int, error: BaseException | None) -> None:
        happened.append(("stop", machine.step))

    machine = Cycles(window_of, start, stop)
    machine.begin()
    for _ in range(steps):
        machine.stepped()
    machine.end()
    return happened


@given(actions)
def test_a_schedules_windows_hold_the_steps_to_record_and_end_where_it_saves(
    listed: list[str],
) -> None:
    happened = told(of_schedule(lambda step: SimpleNamespace(name=listed[step])), len(listed) - 1)
    recorded = [name in ("RECORD", "RECORD_AND_SAVE") for name in listed]
    begins = [
        step
        for step, on in enumerate(recorded)
        if on and (step == 0 or not recorded[step - 1] or listed[step - 1] == "RECORD_AND_SAVE")
    ]
    ends = [
        step + 1
        for step, on in enumerate(recorded[:-1])
        if on and (not recorded[step + 1] or listed[step] == "RECORD_AND_SAVE")
    ]
    assert [step for what, step in happened if what == "start"] == begins
    stops = [step for what, step in happened if what == "stop"]
    assert stops == ends + [len(listed) - 1] * recorded[-1]


@given(st.integers(0, 5), st.integers(1, 5) | st.none(), st.booleans(), st.integers(0, 100))
def test_every_step_is_in_the_window_that_the_plan_says(
    skip: int, steps: int | None, watch: bool, step: int
) -> None:
    window = kept_then_watched(skip, steps, watch=watch)(step)
    if step < skip:
        assert window is None
    elif steps is None or step < skip + steps:
        assert window == 0
    elif not watch:
        assert window is None
    else:
        assert window == 1 + (step - skip - steps) // cycles._WATCH_STEPS


def test_a_window_that_cannot_start_is_tried_again_at_its_next_step() -> None:
    tried: list[int] = []

    def start(window: int) -> None:
        tried.append(window)
        if len(tried) == 1:
            raise errors.CannotWrite("the disk is full")

    machine = Cycles(cycles.always, start, lambda window, error: None)
    with pytest.raises(errors.CannotWrite):
        machine.begin()
    machine.stepped()
    machine.stepped()
    assert tried == [0, 0]


class Program:
    """Stands in for `trace`: remembers what is done with it."""

    made: list["Program"]

    def __init__(self, **options: Any) -> None:
        self.options, self.recording = options, False
        self.error: BaseException | None = None
        self.first_step, self.is_read = 0, True
        Program.made.append(self)

    def __enter__(self) -> "Program":
        self.recording = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.recording, self.error = False, error


def recorded(made: int, **plan: Any) -> tuple[Any, list[tuple[str, int]]]:
    Program.made, calls = [], []
    recording = cycles.Recording(
        Program,
        **plan,
        keep={"path": "run.pytrace"},
        ready=lambda traced: calls.append(("ready", traced.first_step)),
        watched=lambda traced, first: calls.append(("watched", first)),
        problem=lambda text: calls.append((text, 0)),
    )
    recording.begin()
    for _ in range(made):
        recording.stepped()
    return recording, calls


def test_each_trace_knows_the_step_that_it_began_with() -> None:
    recording, calls = recorded(70, skip=2, steps=3, watch=True)
    recording.end()
    assert [traced.first_step for traced in Program.made] == [2, 5, 25, 45, 65]
    assert calls == [
        ("ready", 2),
        ("watched", 5),
        ("watched", 25),
        ("watched", 45),
        ("watched", 65),
    ]
    assert [traced.is_read for traced in Program.made] == [True, False, False, False, False]
    assert Program.made[0].options == {"table": False, "path": "run.pytrace"}
    assert not any(traced.recording for traced in Program.made)


def test_the_error_that_ends_the_program_reaches_the_trace_that_saw_it() -> None:
    error = RuntimeError()
    recording, calls = recorded(4, skip=0, steps=3, watch=True)
    recording.end(error)
    assert recording.watched
    assert recording.last.error is error
    assert Program.made[0].error is None
    assert calls == [("ready", 0), ("watched", 3)]
