"""Whether a traced run fits on a card, and if not, what fails first and what helps.

The card holds more than torch's allocator: the context, kernels and libraries, the driver's
reserve. Those come from the ledger. The bytes of other processes do not count, because they were on
another card.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytracer import errors
from pytracer.analysis.allocator import advice as allocator_advice, ledger, replay
from pytracer.analysis.allocator.advice import Choice
from pytracer.analysis.allocator.replay import Replay
from pytracer.analysis.allocator.steps import steps
from pytracer.analysis.answers import peaks, postmortem
from pytracer.analysis.facts import devices, usage
from pytracer.analysis.facts.usage import Peak
from pytracer.analysis.forecasts.shown import Shown
from pytracer.analysis.forecasts.verified import Verified
from pytracer.basics.names import layers_alike
from pytracer.basics.units import parse_size
from pytracer.data import frames, meta
from pytracer.data.recorded import Trace

if TYPE_CHECKING:
    import pandas as pd

_NOT_THE_PROGRAMS = "other processes"
_ALLOCATOR = "torch's allocator"
_MOST_HOLDERS = 8
_NOTHING_READ = (
    "The memory beside torch's allocator is unknown: the context and libraries take 0.5 GiB and "
    "more. Up to 1.2 GiB are counted beside it. `pytracer ledger --probe` measures it."
)
_NOT_MEASURED = (
    "This card's memory beside torch's allocator was not measured: the context, kernels and "
    "libraries took 744 MiB on an H200 and 1.2 GiB on an H100. Up to 1.2 GiB are counted."
)
MOST_BESIDE = 1229 << 20  # of the measured cards
_UNCERTAIN = (
    "cuDNN's scratch, what NCCL keeps for a while, and gradients that only other ranks make are not "
    "known here. The answer is without them; the table and the line per card have the most of them."
)
_NCCL = (
    "NCCL's own buffers take 0.2 to 1 GiB of the card beside torch's allocator, by the number of its "
    "groups and channels. Up to 1 GiB is counted."
)
_MOST_OF_NCCL = 1 << 30


@dataclass(frozen=True)
class Holder:
    """Who holds memory; layers that are alike are one holder."""

    bytes: int
    category: str
    module: str
    line: str


@dataclass(frozen=True)
class Fits:
    """The answer; it is true if the run surely fits as recorded. Sizes are bytes."""

    device: str
    card: int | None  # None: no card was given
    beside: int  # the card's bytes beside torch's allocator
    replay: Replay  # in the rest of the card, with the recording's settings
    smallest_card: int  # with the recording's settings
    holders: tuple[Holder, ...]  # the live memory when the first request fails
    choices: tuple[Choice, ...]  # settings, least memory first
    notes: tuple[str, ...]
    _shown: Shown = field(repr=False, compare=False)
    uncertain: int = 0  # what torch may reserve beside, at most: not known in an imagined run
    saved_at_most: int = 0  # and less than that, where other blocks suit it better
    beside_at_most: int = 0  # more than `beside` where it was not measured
    settings_known: bool = True  # what other settings of the allocator would do
    by_kind: dict[str, Peak] = field(default_factory=dict)  # the peak of each kind of work
    verified: Verified | None = None  # None: not verified

    def __bool__(self) -> bool:
        """Whether the run completes on that card, with the most that is uncertain."""
        return self.verdict == replay.YES

    @property
    def verdict(self) -> str:
        """YES, PERHAPS, NO or NOT_KNOWN."""
        return replay.verdict(
            self.basis,
            surely=bool(self.replay) and self._has_room_for_all,
            perhaps=self.replay.may_run,
            proves_failure=self.replay.proves_failure,
        )

    @property
    def reserved(self) -> tuple[int, int]:
        """The least and the most that torch reserves."""
        least, most = self.replay.reserved
        return max(least - self.saved_at_most, 0), most + self.uncertain

    @property
    def more(self) -> int:
        """What the run may take of the card beyond what is sure."""
        return self.uncertain + max(self.beside_at_most - self.beside, 0)

    @property
    def surely_needs(self) -> int:
        """A card on which the run completes with the most that is uncertain."""
        return self.smallest_card + self.more

    @property
    def flushes(self) -> bool:
        """Whether later steps wait for the allocator, which gives its cache back for a request."""
        if self.card is None:
            return False
        return self.replay.later_retries(max(self.card - self.beside - self.more, 0)) > 0

    @property
    def _has_room_for_all(self) -> bool:
        return not self.more or self.card is None or self.surely_needs <= self.card

    @property
    def basis(self) -> str:
        """What the reserved bytes are: exact, an interval, or not known."""
        moves = self.uncertain or self.saved_at_most
        is_interval = moves and self.replay.basis == replay.EXACT
        return replay.INTERVAL if is_interval else self.replay.basis

    def __str__(self) -> str:
        """The answer as text."""
        return self._shown.text(self)

    def _repr_html_(self) -> str:
        """The answer as a table, for a notebook."""
        return self._shown.html(self)

    @property
    def helps(self) -> Choice | None:
        """Settings with which the run fits, if it does not fit as recorded."""
        if self:
            return None
        return next((choice for choice in self.choices if self.surely_runs(choice)), None)

    def surely_runs(self, choice: Choice) -> bool:
        """Whether the run completes with these settings, with the most that is uncertain."""
        if self.basis == replay.NOT_KNOWN or not (choice.as_recorded or self.settings_known):
            return False
        most = self.beside + choice.smallest_room + self.more
        return choice.runs and (not self.more or self.card is None or most <= self.card)

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
    shown: Shown,
) -> Fits:
    """Replays the trace in the memory that the card has for torch's allocator.

    Raises:
        errors.UsageError: the size, device or settings do not exist, or the trace is not of a GPU.
        errors.NothingOnTheCard: the trace is of an imagined card, and has nothing on it.
    """
    if meta.of(trace).imagined is not None and not trace.has_allocations:
        raise errors.NothingOnTheCard
    name = device or usage.main_device(trace)
    steps(trace, name)
    beside, at_most, notes = _beside(trace, name)
    card = None if on is None else parse_size(on)
    left = None if on is None else room(trace, on, name)
    replayed = replay.replay(trace, settings, device=name, capacity=left, unlimited=True)
    saved, uncertain = _uncertain(trace)
    return Fits(
        device=name,
        card=card,
        beside=beside,
        replay=replayed,
        smallest_card=replayed.smallest_room + beside,
        holders=_holders(trace, replayed),
        choices=tuple(allocator_advice.choices(trace, name, left)),
        notes=(*replayed.notes, *notes, *([_UNCERTAIN] if uncertain else [])),
        uncertain=uncertain,
        saved_at_most=saved,
        beside_at_most=at_most,
        settings_known=not replay.late(trace, name),
        by_kind=peaks.by_kind(trace, name),
        _shown=shown,
    )


def _uncertain(trace: Trace) -> tuple[int, int]:
    """How much less and how much more an imagined run may reserve, by what only the card knows."""
    imagined = meta.of(trace).imagined
    if imagined is None:
        return 0, 0
    sure = reserved_peak(trace)
    less = sure if imagined.reserved_at_least is None else imagined.reserved_at_least
    more = sure if imagined.reserved_at_most is None else imagined.reserved_at_most
    return max(sure - less, 0), max(more - sure, 0)


def room(trace: Trace, on: int | str, device: str) -> int:
    """The bytes that a card of this size has for torch's allocator; on the CPU all of them.

    Raises:
        errors.UsageError: the size does not exist.
    """
    beside = 0 if device == "cpu" else _beside(trace, device)[0]
    return max(parse_size(on) - beside, 0)


def _beside(trace: Trace, device: str) -> tuple[int, int, list[str]]:
    """The card's bytes beside torch's allocator, the most they may be, and how they are known."""
    imagined = meta.of(trace).imagined
    if imagined is not None:
        notes = [_NOT_MEASURED] if imagined.beside is None else []
        most = MOST_BESIDE if imagined.beside is None else imagined.beside
        if imagined.ranks > 1:
            notes, most = [*notes, _NCCL], most + _MOST_OF_NCCL
        return imagined.beside or 0, most, notes
    rows = ledger.ledger(trace, "end", device).rows
    others = [
        row for row in rows if row.level == 1 and row.name not in (_ALLOCATOR, _NOT_THE_PROGRAMS)
    ]
    beside = [row.bytes for row in others if row.bytes is not None and row.name != "residual"]
    if not beside:
        return 0, MOST_BESIDE, [_NOTHING_READ]
    return sum(beside), sum(beside), []


def _holders(trace: Trace, replayed: Replay) -> tuple[Holder, ...]:
    if replayed.failed is None:
        return ()
    total: dict[tuple[str, str, str], int] = {}
    for row in postmortem.largest(trace, replayed.alive_at_failure(), None):
        key = (row.category, layers_alike(row.module), row.line)
        total[key] = total.get(key, 0) + row.bytes
    rows = [Holder(amount, *key) for key, amount in total.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes)[:_MOST_HOLDERS])


def requested_peak(trace: Trace) -> int:
    """The most requested bytes."""
    return usage.peak(trace).bytes


def reserved_peak(trace: Trace) -> int:
    """The most bytes that the main device's allocator reserved."""
    return devices.counted(trace, usage.main_device(trace), "reserved_bytes.peak", "end") or 0
