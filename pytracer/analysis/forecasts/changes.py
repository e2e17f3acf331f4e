"""Every change that makes the peak smaller, and what it saves: a replay with the change shows it.

It is the one list of changes: `export/advice_text.py` says it on the screen, on the page and where
memory ran out.
"""

from dataclasses import dataclass, field

from pytracer.analysis.answers import hints, postmortem, room
from pytracer.analysis.answers.edits import Edit, level_after, peak_after
from pytracer.analysis.answers.hints import FREE, MISTAKE, NOTICED, SMALLEST_CHANGE, TRADE, Hint
from pytracer.analysis.answers.postmortem import Failure
from pytracer.analysis.facts import usage
from pytracer.analysis.forecasts import checkpoint_plans
from pytracer.data.recorded import Trace, once_per_trace

_WORTH_A_LINE = 0.01  # of the peak
_WORTH_UNPROVED = 0.1  # of the peak: the bytes that a change concerns, if no replay shows it


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
    enough: bool | None  # for the allocation that failed; None: none did, or that is not known
    edit: Edit | None = field(default=None, repr=False, compare=False)


@once_per_trace
def changes(trace: Trace, device: str) -> list[Change]:
    """Every hint that lowers the peak by a hundredth, the largest of each kind first.

    Those that no replay can show come last, without a figure. Where memory ran out below the peak,
    what lowers only the bytes in use there is in the list, too.
    """
    peak, failed = usage.peak(trace, device).bytes, postmortem.failure(trace)
    if failed is not None and failed.moment.device != device:
        failed = None
    found = [*hints.every_hint(trace, device), *room.hints(trace, device)]
    rows = [(one, _replayed(trace, device, peak, one, failed)) for one in found]
    kept = [row for one, row in rows if one.grows or _is_worth(one, row, peak)]
    kinds = (MISTAKE, FREE, TRADE, NOTICED)
    return sorted(kept, key=lambda row: (kinds.index(row.kind), -(row.saves or 0)))


def _is_worth(one: Hint, row: Change, peak: int) -> bool:
    """Whether it is worth a line: a mistake may be small in a small program."""
    if row.kind == NOTICED or row.enough:
        return True
    smallest = 1 if row.kind == MISTAKE else SMALLEST_CHANGE
    if row.saves is None:
        return one.bytes >= max(_WORTH_UNPROVED * peak, smallest)
    return row.saves >= max(_WORTH_A_LINE * peak, smallest)


def together(trace: Trace, device: str) -> int:
    """The peak after every mistake is mended and every free saving made: not the sum of them."""
    made = (one.edit for one in changes(trace, device) if one.kind in (MISTAKE, FREE))
    return peak_after(trace, device, [edit for edit in made if edit is not None])


def _replayed(trace: Trace, device: str, peak: int, one: Hint, failed: Failure | None) -> Change:
    after, price, code = None, one.price, ""
    broken = None if failed is None else failed.moment.step
    by_framework = bool(hints.words_of_framework(trace, "checkpoint"))
    plan = checkpoint_plans.of_layers(trace, device, one.modules, broken, caches=not by_framework)
    if plan is not None:
        after = plan.peak
        price = f"a step takes {plan.time_ratio:.2f} times as long"
        if one.edit is not None and broken is not None:  # no plan covers a step without its end
            after = max(after, peak_after(trace, device, [one.edit], broken))
    elif one.edit is not None and not one.at_failure:
        after = peak_after(trace, device, [one.edit])
    saves, enough = None if after is None else peak - after, one.serves
    if failed is not None and one.edit is not None:
        left = level_after(trace, device, [one.edit], failed.moment.position)
        freed = failed.moment.bytes - left
        if (saves or 0) < _WORTH_A_LINE * peak and freed >= (saves or 0):
            saves, after = freed, None
        if enough is None and failed.missing is not None:
            enough = freed >= failed.missing
    if one.modules and saves and not by_framework:
        code = checkpoint_plans.code_in(trace, plan.modules if plan else one.modules)
    return Change(one.kind, one.text, saves, after, price, one.numbers, code, enough, one.edit)
