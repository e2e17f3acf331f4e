"""Every claim and every experiment, from the files of their groups."""

from collections.abc import Sequence

from pytracer import errors
from pytracer.claims.claim import Claim
from pytracer.claims.experiment import EXPERIMENTS, Experiment
from pytracer.claims.subjects import (
    device_memory,
    operators,
    optimizers,
    sharding,
    training_table,
)

# In the order in which the documents come to them.
CLAIMS: tuple[Claim, ...] = (
    *device_memory.CLAIMS,
    *training_table.CLAIMS,
    *optimizers.CLAIMS,
    *operators.CLAIMS,
    *sharding.CLAIMS,
)


def experiments() -> dict[str, Experiment]:
    """All of them, by name."""
    return EXPERIMENTS


def chosen(ids: Sequence[str]) -> tuple[Claim, ...]:
    """Those claims, or all.

    Raises:
        errors.UsageError: there is no such claim.
    """
    known = {claim.id.upper(): claim for claim in CLAIMS}
    unknown = [each for each in ids if each.upper() not in known]
    if unknown:
        there = ", ".join(claim.id for claim in CLAIMS)
        raise errors.UsageError(f"no claim {', '.join(unknown)}; there are {there}")
    wanted = {each.upper() for each in ids}
    return tuple(claim for claim in CLAIMS if not ids or claim.id.upper() in wanted)
