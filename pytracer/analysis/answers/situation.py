"""What rules about needless memory look at, and what they yield."""

from dataclasses import dataclass, field

import numpy as np

from pytracer.analysis.answers.edits import Edit, peak_after
from pytracer.analysis.facts import grouping, phases, saved_tensors, scopes, timelines, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORY, Mask


@dataclass(frozen=True)
class Proof:
    """The allocations of a finding. After the event, the living ones sum up to the finding's bytes."""

    which: Mask
    position: int
    turns: int | None = (
        1  # of growth: the sum is of so many turns; None: each is larger than the last
    )


@dataclass(frozen=True)
class Finding:
    """One cause for which memory was kept in vain."""

    kind: str
    bytes: int  # for growth: per step; for an evaluation: the most at once
    at_peak: int  # how much lower the peak would be
    line: str  # the line that made most of it; "" if lines were not recorded
    module: str
    evidence: str
    change: str
    proof: Proof | None = field(default=None, repr=False, compare=False)
    edit: Edit | None = field(default=None, repr=False, compare=False)  # what the change does


@dataclass(frozen=True)
class Situation:
    """The input of the rules: a device, and the moment of its peak (or of another event)."""

    trace: Trace
    device: str
    position: int
    phase: str | None
    alive: Mask

    def of_category(self, category: str) -> Mask:
        """The allocations of the category that are alive at the moment."""
        is_of_category: Mask = self.alive & (allocations(self.trace).category == CATEGORY[category])
        return is_of_category

    @property
    def step(self) -> int:
        """The step that the moment lies in."""
        if self.position < 0:
            return 0
        at = slice(self.position, self.position + 1)
        return int(timelines.timeline(self.trace).step_at(self.trace.events.ticks[at])[0])

    def bytes(self, which: Mask) -> int:
        """The requested bytes of these allocations."""
        return int(allocations(self.trace).requested_bytes[which].sum())

    def saved_by(self, edit: Edit) -> int:
        """How much lower the peak is after an edit than what is alive at the moment."""
        return self.bytes(self.alive) - peak_after(self.trace, self.device, [edit])

    def where(self, which: Mask) -> tuple[str, str]:
        """The line and the module that hold most of these; "" if unknown."""
        line, module = (grouping.holders(self.trace, key, which) for key in ("line", "module"))
        return line[0].name if line else "", module[0].name if module else ""

    def finding(self, kind: str, which: Mask, evidence: str, change: str) -> Finding:
        """A finding about these allocations, alive at the moment."""
        amount = self.bytes(which)
        proof = Proof(which, self.position)
        where, edit = self.where(which), Edit(self.in_any_step(which))
        return Finding(kind, amount, amount, *where, evidence, change, proof, edit)

    def in_any_step(self, which: Mask) -> Mask:
        """These allocations and those like them: made in the same way, and for the same."""
        alloc, moments = allocations(self.trace), phases.moments(self.trace)
        kind = saved_tensors.kinds(scopes.tree(self.trace), moments.lives, moments)
        alike: Mask = np.isin(kind, kind[which]) & np.isin(alloc.role, alloc.role[which])
        return alike | which


def at_peak(trace: Trace, device: str | None = None) -> Situation:
    """The situation at the device's peak."""
    peak = usage.peak(trace, device)
    alive = usage.alive(trace, "peak", device)
    return Situation(trace, peak.device, peak.position, peak.phase, alive)
