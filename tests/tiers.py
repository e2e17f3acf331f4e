"""How much of a long proof runs: `make test` has ten minutes, `.ci/run` thirty, `make nightly` all night."""

import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

TIERS = ("test", "ci", "nightly")
MOST = {"test": 12, "ci": 150}  # cases of one test
TIER = os.environ.get("PYTRACER_TIER", "test")
if TIER not in TIERS:
    raise SystemExit(f"PYTRACER_TIER={TIER} is none of the tiers: it is one of {', '.join(TIERS)}")


def first_of(
    values: Iterable[Any], count: int = 1, *, later: pytest.MarkDecorator = pytest.mark.ci
) -> list[Any]:
    """Parameters of which the shorter tiers have the first; the others are in the tier `later`."""
    known = list(values)
    others = (one if isinstance(one, tuple) else (one,) for one in known[count:])
    return known[:count] + [pytest.param(*each, marks=later) for each in others]


def by_tier(test: int, ci: int, nightly: int) -> int:
    return (test, ci, nightly)[TIERS.index(TIER)]


def too_many(items: list[pytest.Item]) -> set[pytest.Item]:
    """Those that are left out if each test has at most `MOST` cases, for a GPU and for none.

    A test that is marked `all_cases` has them all in each tier.
    """
    if TIER not in MOST:
        return set()
    most = MOST[TIER]
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("all_cases") is not None:
            continue
        test, _, _ = item.nodeid.partition("[")
        cases[test, item.get_closest_marker("cuda") is not None].append(item)
    left: set[pytest.Item] = set()
    for each in cases.values():
        kept = {len(each) * number // most for number in range(most)}
        left |= {item for at, item in enumerate(each) if at not in kept}
    return left
