"""Programs of other people compute, print and warn the same under a trace, in every mode.

tools/public_programs.py has the programs, and says how to install what they need.
"""

import functools
from typing import Any

import pytest

from tests.tiers import first_of
from tools import transparency_page
from tools.public_programs import MODES, PROGRAMS, UNTRACED, difference, observed


@functools.cache
def untraced(name: str) -> dict[str, Any]:
    """What a run shows that any other untraced run shows as well."""
    one, other = observed(name, UNTRACED), observed(name, UNTRACED)
    assert one == other, "the program itself varies"
    assert one["status"] == 0, "\n".join(one["stderr"])
    assert one["result"]
    return one


# These come with the group `test`. `make nightly` runs all programs.
WITH_TESTS = {"accelerate", "lightning", "transformers"}


def rows() -> list[Any]:
    """The programs whose packages are there. Only `make nightly` compiles one for a minute."""
    names = [name for name, program in PROGRAMS.items() if WITH_TESTS.issuperset(program.needs)]
    return [
        pytest.param(name, marks=[pytest.mark.nightly] if name.startswith("compiled") else [])
        for name in names
    ]


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("mode", first_of(MODES, later=pytest.mark.nightly))
@pytest.mark.parametrize("name", rows())
def test_a_public_program_is_the_same_under_a_trace(name: str, mode: str) -> None:
    missing = PROGRAMS[name].missing
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: see tools/public_programs.py")

    assert difference(name, mode, untraced(name)) == []


def test_the_page_says_what_the_results_say() -> None:
    assert transparency_page.PAGE.read_text() == transparency_page.page()
