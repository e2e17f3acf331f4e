"""Every claim and every experiment, from the files of their subjects."""

from collections.abc import Sequence

from pytracer import errors
from pytracer.lab.claims.claim import Claim, claims_of
from pytracer.lab.claims.experiment import EXPERIMENTS, Experiment
from pytracer.lab.claims.subjects import (
    autocast,
    batches,
    beams,
    compilers,
    data_loading,
    device_memory,
    experts,
    number_formats,
    operators,
    optimizers,
    sharding,
    training_table,
    variables,
)

# Reports show the subjects in this order, and the claims of a subject from the top of its file.
SUBJECTS = (
    device_memory,
    data_loading,
    training_table,
    optimizers,
    batches,
    number_formats,
    variables,
    operators,
    autocast,
    compilers,
    experts,
    beams,
    sharding,
)
CLAIMS: tuple[Claim, ...] = tuple(
    claim for subject in SUBJECTS for claim in claims_of(subject.__name__)
)


def experiments() -> dict[str, Experiment]:
    """All experiments, by name."""
    return EXPERIMENTS


def chosen(ids: Sequence[str]) -> tuple[Claim, ...]:
    """The claims with these ids; all claims if no id is given.

    Raises:
        errors.UsageError: no claim has such an id.
    """
    known = {claim.id.upper(): claim for claim in CLAIMS}
    unknown = [each for each in ids if each.upper() not in known]
    if unknown:
        there = ", ".join(claim.id for claim in CLAIMS)
        raise errors.UsageError(f"no claim {', '.join(unknown)}; there are {there}")
    wanted = {each.upper() for each in ids}
    return tuple(claim for claim in CLAIMS if not ids or claim.id.upper() in wanted)
