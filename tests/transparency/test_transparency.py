"""A traced program is the untraced program: same bits, same errors, nothing left behind."""

from pathlib import Path
from typing import Any

import pytest

from tests.programs import PROGRAMS
from tests.transparency.observe import (
    AUTO,
    HOOKS_MODE,
    UNTRACED,
    Observation,
    Program,
    differences,
    finish,
    observe,
    start,
)

DEVICES = {"cpu": [], "cuda": [pytest.mark.cuda]}
UNTRACED_RUNS: dict[tuple[str, str], Observation] = {}


def rows() -> list[Any]:
    return [
        pytest.param(program, device, mode, id=f"{name}-{device}-{mode}", marks=DEVICES[device])
        for name, program in PROGRAMS.items()
        for device in program.devices
        for mode in (AUTO, HOOKS_MODE)
        if mode == AUTO or not program.hooks
    ]


@pytest.mark.parametrize(("program", "device", "mode"), rows())
def test_tracing_changes_nothing_and_leaves_nothing(
    program: Program, device: str, mode: str, tmp_path: Path
) -> None:
    untraced, traced = both(program, device, mode, tmp_path)

    different = differences(untraced.seen, traced.seen)
    assert not different, "\n".join(different)
    assert traced.left_behind == untraced.left_behind
    for facts in traced.traces:
        assert facts["events"] > 0 or program.empty
        assert facts["losses"] == {}
        assert facts["callback_errors"] == 0


def both(program: Program, device: str, mode: str, folder: Path) -> tuple[Observation, Observation]:
    if program.fresh:
        runs = [start(program, device, each, folder) for each in (UNTRACED, mode)]
        untraced, traced = map(finish, runs)
        return untraced, traced
    untraced = UNTRACED_RUNS.get((program.name, device))
    if untraced is None:
        untraced = observe(program, device, UNTRACED)
        if untraced.left_behind or untraced.seen["warnings"]:
            untraced = observe(program, device, UNTRACED)  # the first time fills caches, and warns
        UNTRACED_RUNS[program.name, device] = untraced
    return untraced, observe(program, device, mode)
