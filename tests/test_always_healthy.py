"""A recorder that is always on raises no alarm about the healthy programs of the hints' suite."""

from pathlib import Path

import pytest

import pytracer
from programs.hints.healthy import HEALTHY
from pytracer import errors
from tests.tiers import by_tier, first_of


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the libraries
@pytest.mark.parametrize("name", first_of(HEALTHY, 2))
def test_a_healthy_program_of_the_hints_gets_no_alarm(name: str, tmp_path: Path) -> None:
    alarms: list[str] = []
    with (
        errors.collected_warnings(),
        pytracer.always(tmp_path / "run.always", alarm=alarms.append, share=0.5, devices="cpu"),
    ):
        for number in range(by_tier(6, 12, 40)):
            (folder := tmp_path / str(number)).mkdir()
            HEALTHY[name](folder)
    assert alarms == []
    history = pytracer.History(tmp_path / "run.always")
    assert history.step_count or history.looks  # a generation has no optimizer's step
