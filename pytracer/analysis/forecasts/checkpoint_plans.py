"""Which modules to checkpoint for a budget. Each plan is replayed, and the replay decides."""

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pytracer import errors
from pytracer.analysis.allocator import replay
from pytracer.analysis.facts import usage
from pytracer.analysis.facts.scopes import MODULE
from pytracer.analysis.forecasts.planned import Plan, Work
from pytracer.analysis.forecasts.shown import Shown
from pytracer.analysis.forecasts.tallest_steps import Part, tallest_steps
from pytracer.analysis.forecasts.verified import Verified
from pytracer.basics.units import parse_size
from pytracer.data import frames, meta
from pytracer.data.model_names import Roots, in_code, module_text
from pytracer.data.recorded import Trace
from pytracer.data.schema import Mask

if TYPE_CHECKING:
    import pandas as pd

ONE = Roots()  # one model: its paths have no class
Lines = tuple[str, ...]

_BATCH_NORM = "batch_norm"
_RANDOM = ("dropout", "bernoulli", "rand", "multinomial")
_LONGEST_LIST = 42  # characters of a list on one line of code
_MOST_SURE = 8  # plans that are tried in several orders of segments, the quickest first


@dataclass(frozen=True)
class CheckpointPlan:
    """The cheapest plan that fits, or else the smallest plan. It is true if it surely fits."""

    device: str
    budget: int
    pinned: int  # the host memory that plans may pin
    now: Plan  # the program as recorded
    chosen: Plan
    frontier: tuple[Plan, ...]  # the least time for each peak
    warnings: tuple[str, ...]
    notes: tuple[str, ...]  # why the answer is not exact
    _shown: Shown = field(repr=False, compare=False)
    verified: Verified | None = None  # None: not verified
    roots: Roots = ONE  # the models, for the code
    reserved: tuple[int, int] | None = None  # the least and the most, as segments may lie
    failing_orders: int = 0  # of segments, in which the chosen plan does not fit
    is_known: bool = True  # exactly, or between two ends
    proves_failure: bool = True  # if no plan fits

    def __str__(self) -> str:
        """The answer as text."""
        return self._shown.text(self)

    def _repr_html_(self) -> str:
        """The answer as a table, for a notebook."""
        return self._shown.html(self)

    def __bool__(self) -> bool:
        """Whether the chosen plan surely fits."""
        return self.verdict == replay.YES

    @property
    def basis(self) -> str:
        """What the figures are: exact, an interval, or not known."""
        if not self.is_known:
            return replay.NOT_KNOWN
        is_exact = self.reserved is None or self.reserved[0] == self.reserved[1]
        return replay.EXACT if is_exact else replay.INTERVAL

    @property
    def verdict(self) -> str:
        """YES, PERHAPS, NO or NOT_KNOWN."""
        return replay.verdict(
            self.basis,
            surely=not self.failing_orders,
            perhaps=self.chosen.fits,
            proves_failure=self.proves_failure,
        )

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules to checkpoint."""
        return self.chosen.modules

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The modules to offload to the host."""
        return self.chosen.offloaded

    @property
    def code(self) -> str:
        """Code to paste where the model is made; "" if the plan has no modules."""
        parts = []
        if self.modules:
            parts.append(code_of(self.modules, self.roots))
        if self.offloaded:
            parts.append(code_of_offload(self.offloaded, self.roots))
        return "\n\n".join(parts)

    def table(self) -> "pd.DataFrame":
        """The frontier, one row per plan."""
        return frames.of_rows({**vars(plan), "count": len(plan.modules)} for plan in self.frontier)


def code_of(modules: Iterable[str], roots: Roots = ONE) -> str:
    """Code that checkpoints these modules with torch's own checkpoint."""
    return _code(
        ("from functools import partial", "from torch.utils.checkpoint import checkpoint"),
        modules,
        roots,
        (
            "    module = model.get_submodule(name)",
            "    module.forward = partial(",
            "        checkpoint, module.forward, use_reentrant=False",
            "    )",
        ),
    )


def code_of_offload(modules: Iterable[str], roots: Roots = ONE) -> str:
    """Code that offloads these modules with `pytracer.recording.offload`, which needs nothing but torch."""
    return _code(
        ("from pytracer.recording.offload import offload",),
        modules,
        roots,
        ("    offload(model.get_submodule(name))",),
    )


def _code(imports: Lines, modules: Iterable[str], roots: Roots, body: Lines) -> str:
    """A loop over the modules of each model, with a comment that names its class."""
    only = roots.models[0] if len(roots.models) == 1 else ""
    by_model: dict[str, list[str]] = {}
    for path in modules:
        model, inside = roots.split(path)
        by_model.setdefault(model, []).append(f'"{inside}"')
    lines = list(imports)
    for model, names in by_model.items():
        listed = ", ".join(names)
        if len(listed) > _LONGEST_LIST:
            listed = f"\n{textwrap.indent(textwrap.fill(f'{listed},', _LONGEST_LIST), '    ')}\n"
        lines += ["", f"for name in [{listed}]:"]
        lines += [f"    # model: your {model or only}"] if model or only else []
        lines += body
    return "\n".join(lines)


def plan(
    trace: Trace,
    budget: int | str,
    pinned: int | str,
    device: str | None,
    shown: Shown,
) -> CheckpointPlan:
    """Proposes plans, replays them, and chooses one.

    Raises:
        errors.UsageError: the size or device does not exist, or no backward used a module's
            activations.
    """
    name = device or usage.main_device(trace)
    usage.on_device(trace, name)
    size, host = parse_size(budget), parse_size(pinned) if pinned else 0
    if host and name == "cpu":
        raise errors.UsageError(
            "pinned=: offloading moves tensors from a GPU to the host, and this trace is of the CPU"
        )
    work = Work(trace, name)
    if not work.units:
        raise errors.UsageError(work.why_no_units())
    judged = {chosen: work.judge(*chosen, size) for chosen in work.proposals(host)}
    now = judged[(), ()]
    fitting = sorted(
        (each for each in judged.values() if each.fits),
        key=lambda each: (each.time_ratio, each.peak),
    )
    if fitting:
        tried = [(each, *work.in_orders(each, size)) for each in fitting[:_MOST_SURE]]
        sure = [one for one in tried if not one[2]]
        best, reserved, failing = (sure or tried)[0]
    else:
        best = min(judged.values(), key=lambda each: (each.peak_reserved or each.peak, each.peak))
        reserved, failing = work.in_orders(best, None)
    return CheckpointPlan(
        device=name,
        budget=size,
        pinned=host,
        now=now,
        chosen=best,
        frontier=tuple(_frontier(judged.values())),
        warnings=tuple(_warnings(work, best)),
        notes=replay.reasons(trace, name) or tuple(replay.late(trace, name)),
        is_known=not replay.reasons(trace, name),
        reserved=reserved,
        failing_orders=failing,
        proves_failure=not replay.wrong(trace, name),
        _shown=shown,
        roots=meta.of(trace).roots,
    )


def of_layers(
    trace: Trace, device: str, layers: Iterable[str], but: int | None = None, *, caches: bool = True
) -> Plan | None:
    """The plan that checkpoints these layers, as far as that is possible.

    It is replayed in the steps with the highest peaks but for one, and without an allocator.
    Without `caches`, the way to checkpoint turns them off.
    """
    wanted = frozenset(in_code(name) for name in layers)
    if not wanted:
        return None
    part = Part(wanted, tallest_steps(trace, device, but))
    work = Work(trace, device, part, caches=caches)
    if not work.units:
        return None
    chosen = tuple(work.units)
    return Plan(chosen, work.peak(chosen), None, work.time_ratio(chosen), fits=True)


def code_in(trace: Trace, modules: Iterable[str]) -> str:
    """Code that checkpoints these modules of this trace's models."""
    return code_of(map(in_code, modules), meta.of(trace).roots)


def _frontier(plans: Iterable[Plan]) -> Iterator[Plan]:
    """The plans that no other plan beats in both time and peak, the quickest first."""
    least = None
    for each in sorted(plans, key=lambda p: (p.time_ratio, p.peak)):
        if least is None or each.peak < least:
            least = each.peak
            yield each


def _warnings(work: Work, best: Plan) -> Iterator[str]:
    """Reasons why a second forward would differ from the first."""
    chosen = np.zeros(len(work.tree.kind), np.bool_)
    names = set(map(module_text, best.modules))
    calls = np.flatnonzero(work.tree.kind == MODULE)
    mine = [work.trace.strings[row] in names for row in work.tree.name[calls]]
    chosen[calls[mine]] = True
    inside: Mask = work.tree.nearest_context(chosen) != 0
    ops = {work.trace.strings[row] for row in np.unique(work.tree.name[inside])}
    if any(_BATCH_NORM in op for op in ops):
        yield (
            "BatchNorm in these modules updates its running statistics twice per step: set its "
            "momentum to 1 - sqrt(1 - momentum), or leave these modules out."
        )
    if any(word in op for op in ops for word in _RANDOM):
        yield (
            "These modules draw random numbers: keep preserve_rng_state=True, the default, or "
            "the second forward differs."
        )
