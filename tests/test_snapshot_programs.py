"""Categories of snapshots of training programs that nobody wrote, held against what their traces know.

The programs are those of tests/conformance/test_random_programs.py, imagined on a card.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings, strategies as st
from torch import nn

import pytracer
from benchmarks import snapshots
from benchmarks.snapshots import STACKS, VARIANTS, compared, variant
from programs.conformance.programs import Says
from programs.snapshot_oracle import as_snapshot
from tests.conformance import test_random_programs as random_programs
from tests.conformance.test_random_programs import Plan
from tests.test_snapshot_categories import read
from tests.tiers import by_tier

# Wide enough that weights, activations and inputs differ in size, as they do in models.
WIDTH, OUT = 384, 256
_MOST_WRONG = 0.01


def is_shown(plan: Plan, kind: str) -> bool:
    """Whether docs/snapshots.md says nothing of what this program does under "may be wrong".

    A trace has no stacks of frees, so the oracle cannot tell what a hook frees. To a trace, the
    gradient of a reentrant checkpoint's input is a gradient; a snapshot does not show that.
    """
    older = kind in ("ring", "built", "late") and plan.averages
    shared = kind == "oom" and "twice the same" in plan.layers
    again = plan.backward == "of a penalty" or "reentrant" in plan.recomputes
    return plan.gradients in ("stay", "a hook looks") and not (older or shared or again)


class Quiet(Says):
    """Says nothing: the trace knows. The teacher is a model, so it is called."""

    @contextmanager
    def traced(self, *targets: Any) -> Iterator[None]:
        yield
        for one in targets:
            if isinstance(one, nn.Linear):
                with torch.no_grad():
                    one(torch.zeros(1, WIDTH))


def imagined(plan: Plan) -> Any:
    torch.manual_seed(0)
    with pytracer.imagine("H100", stacks=True) as t, torch.device("cuda"):
        program = random_programs.Program(plan, Quiet("default", "cuda"))
        program.run()
    del program
    return t


def shares(pairs: Counter[tuple[str, str]]) -> dict[str, Any]:
    """Without workspaces, which would outweigh all."""
    rest = {pair: size for pair, size in pairs.items() if pair[0] != "workspaces"}
    return _shares(Counter(rest))


_shares = snapshots._shares


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@settings(
    max_examples=by_tier(4, 12, 300),
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # a smaller program takes minutes to find
    suppress_health_check=list(HealthCheck),
)
@given(
    plan=random_programs.plans,
    stacks=st.sampled_from(STACKS),
    kind=st.sampled_from(VARIANTS),
)
def test_of_any_program_at_most_a_hundredth_is_wrong(
    plan: Plan, stacks: str, kind: str, tmp_path: Path
) -> None:
    assume(is_shown(plan, kind))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_programs, "WIDTH", WIDTH)
        patch.setattr(random_programs, "OUT", OUT)
        patch.setattr(snapshots, "_shares", shares)
        truth = imagined(replace(plan, thread="one"))
        snapshot = variant(as_snapshot(truth.data, stacks), kind)
        found = compared(truth, read(snapshot, tmp_path), kind)
    for at in ("peak", "events"):
        assert found[at]["wrong"] <= _MOST_WRONG, (at, found[at])
