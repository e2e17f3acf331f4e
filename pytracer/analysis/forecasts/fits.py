"""Whether a traced run fits on a card, and if not, what fails first and what helps.

The card holds more than torch's allocator: the context, kernels and libraries, the driver's reserve.
Those come from the ledger. What other processes had is left out: it is another card.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pytracer import errors, frames, meta
from pytracer.analysis.allocator import advice as allocator_advice, ledger, replay
from pytracer.analysis.allocator.advice import Choice
from pytracer.analysis.allocator.replay import Replay
from pytracer.analysis.answers import postmortem
from pytracer.analysis.facts import lifetimes, owners, usage
from pytracer.analysis.forecasts.verified import Verified
from pytracer.recorded import Trace
from pytracer.units import parse_size

if TYPE_CHECKING:
    import pandas as pd

_NOT_THE_PROGRAMS = "other processes"
_ALLOCATOR = "torch's allocator"
_MOST_HOLDERS = 8
_NOTHING_READ = (
    "The memory beside torch's allocator is not known: 0.5 GiB and more for the context and "
    "libraries. `pytracer ledger --probe` measures it."
)
_NOT_MEASURED = (
    "This card's memory beside torch's allocator was not measured: leave 0.5 to 1 GiB for the "
    "context, kernels and libraries; an H200 has 744 MiB."
)


@dataclass(frozen=True)
class Holder:
    """Who holds memory, layers that are alike taken together."""

    bytes: int
    category: str
    module: str
    line: str


@dataclass(frozen=True)
class Fits:
    """The answer, which is true where it fits as it was recorded. Sizes are bytes."""

    device: str
    card: int | None  # None: it was not asked about one
    beside: int  # what the card holds beside torch's allocator
    replay: Replay  # in what is left of the card, with the recording's settings
    smallest_card: int  # with the recording's settings
    holders: tuple[Holder, ...]  # who holds what where the first request fails
    choices: tuple[Choice, ...]  # settings, what needs least first
    notes: tuple[str, ...]
    _render: Callable[["Fits"], str] = field(repr=False, compare=False)
    verified: Verified | None = None  # None: nobody asked

    def __bool__(self) -> bool:
        """Whether it runs to the end on that card."""
        return bool(self.replay)

    def __str__(self) -> str:
        """The answer as text."""
        return self._render(self)

    @property
    def helps(self) -> Choice | None:
        """The settings under which it fits, where as recorded it does not."""
        if self:
            return None
        return next((choice for choice in self.choices if choice.runs), None)

    def settings(self) -> "pd.DataFrame":
        """One row per choice of settings, what needs least first."""
        rows = [
            {**vars(choice), "smallest_card": choice.smallest_room + self.beside}
            for choice in self.choices
        ]
        return frames.of_rows(rows)


def fits(
    trace: Trace,
    on: int | str | None,
    settings: str | None,
    device: str | None,
    render: Callable[[Fits], str],
) -> Fits:
    """Replays the trace in what the card has for torch's allocator.

    Raises:
        errors.UsageError: no such size, device or settings, or nothing of a GPU in the trace.
    """
    name = device or usage.main_device(trace)
    replay.steps(trace, name)
    beside, notes = _beside(trace, name)
    card = None if on is None else parse_size(on)
    left = None if on is None else room(trace, on, name)
    found = replay.replay(trace, settings, device=name, capacity=left, unlimited=True)
    return Fits(
        device=name,
        card=card,
        beside=beside,
        replay=found,
        smallest_card=found.smallest_room + beside,
        holders=_holders(trace, found),
        choices=tuple(allocator_advice.choices(trace, name, left)),
        notes=(*found.notes, *notes),
        _render=render,
    )


def room(trace: Trace, on: int | str, device: str) -> int:
    """What a card of this size has for torch's allocator; on the CPU all of it.

    Raises:
        errors.UsageError: no such size, or a card that has nothing left.
    """
    card = parse_size(on)
    beside = 0 if device == "cpu" else _beside(trace, device)[0]
    if card <= beside:
        raise errors.UsageError(
            f"a card of {card:,} bytes: {beside:,} are in use before torch's allocator starts"
        )
    return card - beside


def _beside(trace: Trace, device: str) -> tuple[int, list[str]]:
    """What the card holds beside torch's allocator; the largest that was read."""
    imagined = meta.of(trace).imagined
    if imagined is not None:
        return (0, [_NOT_MEASURED]) if imagined.beside is None else (imagined.beside, [])
    rows = ledger.ledger(trace, "end", device).rows
    others = [
        row for row in rows if row.level == 1 and row.name not in (_ALLOCATOR, _NOT_THE_PROGRAMS)
    ]
    known = [row.bytes for row in others if row.bytes is not None and row.name != "residual"]
    if not known:
        return 0, [_NOTHING_READ]
    return sum(known), []


def _holders(trace: Trace, found: Replay) -> tuple[Holder, ...]:
    if found.failed is None:
        return ()
    alive = np.zeros(len(lifetimes.lifetimes(trace).start), np.bool_)
    alive[found.alive_at_failure()] = True
    total: dict[tuple[str, str, str], int] = {}
    for row in postmortem.largest(trace, alive, None):
        key = (row.category, owners.layers_alike(row.module), row.line)
        total[key] = total.get(key, 0) + row.bytes
    rows = [Holder(amount, *key) for key, amount in total.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes)[:_MOST_HOLDERS])
