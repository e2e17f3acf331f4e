"""Every change that makes the peak smaller, and what it saves: a replay with the change shows it."""

from dataclasses import dataclass, field

from pytracer.analysis.answers import hints
from pytracer.analysis.answers.edits import Edit, peak_after
from pytracer.analysis.answers.hints import FREE, MISTAKE, NOTICED, SMALLEST_CHANGE, TRADE, Hint
from pytracer.analysis.facts import usage
from pytracer.analysis.forecasts import checkpoint_plans
from pytracer.recorded import Trace, once_per_trace

_WORTH_A_LINE = 0.01  # of the peak


@dataclass(frozen=True)
class Change:
    """A hint, and the peak that the program would have with it."""

    kind: str
    change: str
    saves: int | None  # of the peak's requested bytes; None: no replay shows it
    peak_after: int | None
    price: str
    numbers: str
    code: str  # to paste where the model is made; "" if the change is made elsewhere
    edit: Edit | None = field(default=None, repr=False, compare=False)


@once_per_trace
def changes(trace: Trace, device: str) -> list[Change]:
    """Every hint that lowers the peak by a hundredth, the largest of each kind first.

    Those that no replay can show come last, without a figure.
    """
    peak = usage.peak(trace, device).bytes
    found = [_replayed(trace, device, peak, one) for one in hints.every_hint(trace, device)]
    least = max(_WORTH_A_LINE * peak, SMALLEST_CHANGE)
    kept = [one for one in found if one.saves is None or one.saves >= least]
    kinds = (MISTAKE, FREE, TRADE, NOTICED)
    return sorted(kept, key=lambda one: (kinds.index(one.kind), -(one.saves or 0)))


def together(trace: Trace, device: str) -> int:
    """The peak after every mistake is mended and every free saving made: not the sum of them."""
    made = (one.edit for one in changes(trace, device) if one.kind in (MISTAKE, FREE))
    return peak_after(trace, device, [edit for edit in made if edit is not None])


def _replayed(trace: Trace, device: str, peak: int, one: Hint) -> Change:
    after, price, code = None, one.price, ""
    if one.edit is not None:
        after = peak_after(trace, device, [one.edit])
    elif plan := checkpoint_plans.of_layers(trace, device, one.modules):
        after = plan.peak
        if not hints.words_of_framework(trace, "checkpoint"):
            code = checkpoint_plans.code_in(trace, plan)
        price = f"a step takes {plan.time_ratio:.2f} times as long"
    saves = None if after is None else peak - after
    return Change(one.kind, one.text, saves, after, price, one.numbers, code, one.edit)
