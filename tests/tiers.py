"""How much of a long proof runs: `make test` has ten minutes, `.ci/run` thirty, `make nightly` all night."""

import os

TIERS = ("test", "ci", "nightly")
TIER = os.environ.get("PYTRACER_TIER", "test")
if TIER not in TIERS:
    raise SystemExit(f"PYTRACER_TIER={TIER} is none of the tiers: it is one of {', '.join(TIERS)}")


def by_tier(test: int, ci: int, nightly: int) -> int:
    return (test, ci, nightly)[TIERS.index(TIER)]
