"""A traced program is the untraced program: same bits, same errors, nothing left behind."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pytracer import trace
from pytracer.data.schema import ACTION
from tests.programs import PROGRAMS
from tests.transparency.observe import (
    AUTO,
    HOOKS_MODE,
    Program,
    assert_unchanged,
    observe,
)

DEVICES = {"cpu": [], "cuda": [pytest.mark.cuda]}


def rows() -> list[Any]:
    return [
        pytest.param(
            program,
            device,
            mode,
            id=f"{name}-{device}-{mode}",
            marks=[*DEVICES[device], *_later(program, mode)],
        )
        for name, program in PROGRAMS.items()
        for device in program.devices
        for mode in (AUTO, HOOKS_MODE)
        if mode == AUTO or not program.hooks
    ]


def _later(program: Program, mode: str) -> list[Any]:
    """A process of its own takes seconds: only `make nightly` runs it in each mode."""
    return [pytest.mark.nightly] if program.fresh and mode != AUTO else []


@pytest.mark.parametrize(("program", "device", "mode"), rows())
def test_tracing_changes_nothing_and_leaves_nothing(
    program: Program, device: str, mode: str, tmp_path: Path
) -> None:
    assert_unchanged(program, device, mode, tmp_path)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "checkpoint_" in name])
def test_what_is_computed_again_is_recorded_as_such(name: str) -> None:
    (facts,) = observe(PROGRAMS[name], "cpu", AUTO).traces

    assert facts["recompute"]


def test_training_without_checkpoints_computes_nothing_again() -> None:
    (facts,) = observe(PROGRAMS["double_backward"], "cpu", AUTO).traces

    assert not facts["recompute"]


def sizes(recorded: trace) -> set[int]:
    events = recorded.data.events
    return set(events.bytes[events.action == ACTION["alloc"]].tolist())


def test_each_of_nested_traces_sees_its_own_block() -> None:
    with trace(table=False) as outer:
        first = torch.empty(1001)
        with trace(table=False) as inner:
            second = torch.empty(1002)
        third = torch.empty(1003)

    assert {4004, 4008, 4012} <= sizes(outer)
    assert sizes(inner) & {4004, 4008, 4012} == {4008}
    del first, second, third


def test_each_of_overlapping_traces_sees_its_own_block() -> None:
    one, two = trace(table=False), trace(table=False)
    one.__enter__()
    kept = [torch.empty(1001)]
    two.__enter__()
    kept.append(torch.empty(1002))
    one.__exit__(None, None, None)
    kept.append(torch.empty(1003))
    two.__exit__(None, None, None)

    assert sizes(one) & {4004, 4008, 4012} == {4004, 4008}
    assert sizes(two) & {4004, 4008, 4012} == {4008, 4012}
