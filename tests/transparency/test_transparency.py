"""A traced program is the untraced program: same bits, same errors, nothing left behind."""

from contextlib import ExitStack
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
    Running,
    differences,
    observe,
)

DEVICES = {"cpu": [], "cuda": [pytest.mark.cuda]}
UNTRACED_RUNS: dict[tuple[str, str], Observation] = {}


def rows() -> list[Any]:
    return [
        pytest.param(
            program,
            device,
            mode,
            id=f"{name}-{device}-{mode}",
            marks=DEVICES[device] + known(program),
        )
        for name, program in PROGRAMS.items()
        for device in program.devices
        for mode in (AUTO, HOOKS_MODE)
        if mode == AUTO or not program.hooks
    ]


def known(program: Program) -> list[Any]:
    return [pytest.mark.xfail(reason=program.broken, strict=True)] if program.broken else []


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
    key = program.name, device
    untraced = UNTRACED_RUNS.get(key)
    if program.fresh:
        with ExitStack() as stack:  # side by side
            other = stack.enter_context(Running(program, device, mode, folder))
            if untraced is None:
                one = stack.enter_context(Running(program, device, UNTRACED, folder))
                untraced = UNTRACED_RUNS[key] = one.finish()
            return untraced, other.finish()
    if untraced is None:
        untraced = observe(program, device, UNTRACED)
        if untraced.left_behind or untraced.seen["warnings"]:
            untraced = observe(program, device, UNTRACED)  # the first time fills caches, and warns
        UNTRACED_RUNS[key] = untraced
    return untraced, observe(program, device, mode)
