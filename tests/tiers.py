"""How much of a long proof runs: `make test` has ten minutes, `.ci/run` thirty, `make nightly` all night."""

import os

TIERS = ("test", "ci", "nightly")
TIER = os.environ.get("PYTRACER_TIER", "test")


def by_tier(test: int, ci: int, nightly: int) -> int:
    return (test, ci, nightly)[TIERS.index(TIER)]
