"""Whether a traced run fits on a card, and if not, what fails first and what helps.

The card holds more than torch's allocator: the context, kernels and libraries, the driver's
reserve. Those come from the ledger. The bytes of other processes do not count, because they were on
another card.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytracer import errors, frames, meta
from pytracer.analysis.allocator import advice as allocator_advice, ledger, replay
from pytracer.analysis.allocator.advice import Choice
from pytracer.analysis.allocator.replay import Replay
from pytracer.analysis.answers import peaks, postmortem
from pytracer.analysis.facts import devices, usage
from pytracer.analysis.facts.usage import Peak
from pytracer.analysis.forecasts.verified import Verified
from pytracer.names import layers_alike
from pytracer.recorded import Trace
from pytracer.units import parse_size

if TYPE_CHECKING:
    import pandas as pd

_NOT_THE_PROGRAMS = "other processes"
_ALLOCATOR = "torch's allocator"
_MOST_HOLDERS = 8
_NOTHING_READ = (
    "The memory beside torch's allocator is unknown: the context and libraries take 0.5 GiB and "
    "more. `pytracer ledger --probe` measures it."
)
_NOT_MEASURED = (
    "This card's memory beside torch's allocator was not measured: leave 0.5 to 1 GiB for the "
    "context, kernels and libraries; an H200 has 744 MiB."
)
_UNCERTAIN = (
    "cuDNN's scratch, and what NCCL keeps for a while, are known only on the card. The answer is "
    "without them; the table and the line per card have the most that they may take."
)
_NCCL = (
    "NCCL's own buffers are not counted: it takes 0.2 to 1 GiB of the card beside torch's allocator, "
    "by the number of its groups and channels."
)


@dataclass(frozen=True)
class Holder:
    """Who holds memory; layers that are alike are one holder."""

    bytes: int
    category: str
    module: str
    line: str


@dataclass(frozen=True)
class Fits:
    """The answer; it is true if the run fits as recorded. Sizes are bytes."""

    device: str
    card: int | None  # None: no card was given
    beside: int  # the card's bytes beside torch's allocator
    replay: Replay  # in the rest of the card, with the recording's settings
    smallest_card: int  # with the recording's settings
    holders: tuple[Holder, ...]  # the live memory when the first request fails
    choices: tuple[Choice, ...]  # settings, least memory first
    notes: tuple[str, ...]
    _render: Callable[["Fits"], str] = field(repr=False, compare=False)
    uncertain: int = 0  # what torch may reserve beside, at most: not known in an imagined run
    by_kind: dict[str, Peak] = field(default_factory=dict)  # the peak of each kind of work
    verified: Verified | None = None  # None: not verified

    def __bool__(self) -> bool:
        """Whether the run completes on that card."""
        return bool(self.replay)

    def __str__(self) -> str:
        """The answer as text."""
        return self._render(self)

    @property
    def helps(self) -> Choice | None:
        """Settings with which the run fits, if it does not fit as recorded."""
        if self:
            return None
        return next((choice for choice in self.choices if choice.runs), None)

    def settings(self) -> "pd.DataFrame":
        """One row per choice of settings, least memory first."""
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
    """Replays the trace in the memory that the card has for torch's allocator.

    Raises:
        errors.UsageError: the size, device or settings do not exist, or the trace is not of a GPU.
    """
    name = device or usage.main_device(trace)
    replay.steps(trace, name)
    beside, notes = _beside(trace, name)
    card = None if on is None else parse_size(on)
    left = None if on is None else room(trace, on, name)
    replayed = replay.replay(trace, settings, device=name, capacity=left, unlimited=True)
    return Fits(
        device=name,
        card=card,
        beside=beside,
        replay=replayed,
        smallest_card=replayed.smallest_room + beside,
        holders=_holders(trace, replayed),
        choices=tuple(allocator_advice.choices(trace, name, left)),
        notes=(*replayed.notes, *notes, *([_UNCERTAIN] if _uncertain(trace) else [])),
        uncertain=_uncertain(trace),
        by_kind=peaks.by_kind(trace, name),
        _render=render,
    )


def _uncertain(trace: Trace) -> int:
    imagined = meta.of(trace).imagined
    if imagined is None or imagined.reserved_at_most is None:
        return 0
    sure = devices.counted(trace, usage.main_device(trace), "reserved_bytes.peak", "end")
    return max(imagined.reserved_at_most - (sure or 0), 0)


def room(trace: Trace, on: int | str, device: str) -> int:
    """The bytes that a card of this size has for torch's allocator; on the CPU all of them.

    Raises:
        errors.UsageError: the size does not exist, or the card has nothing left.
    """
    card = parse_size(on)
    beside = 0 if device == "cpu" else _beside(trace, device)[0]
    if card <= beside:
        raise errors.UsageError(
            f"a card of {card:,} bytes: {beside:,} are in use before torch's allocator starts"
        )
    return card - beside


def _beside(trace: Trace, device: str) -> tuple[int, list[str]]:
    """The card's bytes beside torch's allocator, and notes on how they are known."""
    imagined = meta.of(trace).imagined
    if imagined is not None:
        notes = [_NOT_MEASURED] if imagined.beside is None else []
        return imagined.beside or 0, [*notes, _NCCL] if imagined.ranks > 1 else notes
    rows = ledger.ledger(trace, "end", device).rows
    others = [
        row for row in rows if row.level == 1 and row.name not in (_ALLOCATOR, _NOT_THE_PROGRAMS)
    ]
    beside = [row.bytes for row in others if row.bytes is not None and row.name != "residual"]
    if not beside:
        return 0, [_NOTHING_READ]
    return sum(beside), []


def _holders(trace: Trace, replayed: Replay) -> tuple[Holder, ...]:
    if replayed.failed is None:
        return ()
    total: dict[tuple[str, str, str], int] = {}
    for row in postmortem.largest(trace, replayed.alive_at_failure(), None):
        key = (row.category, layers_alike(row.module), row.line)
        total[key] = total.get(key, 0) + row.bytes
    rows = [Holder(amount, *key) for key, amount in total.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes)[:_MOST_HOLDERS])
