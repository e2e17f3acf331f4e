"""Which settings of CUDA's allocator help a program. Each is replayed, not guessed."""

from collections.abc import Iterator
from dataclasses import dataclass

from pytracer.analysis.allocator import settings as allocator_settings
from pytracer.analysis.allocator.replay import FEW_ORDERS, Replay, replay
from pytracer.analysis.allocator.steps import recorded_settings, steps
from pytracer.analysis.facts.usage import devices as devices_of
from pytracer.data.recorded import Trace, once_per_trace

VARIABLE = "PYTORCH_ALLOC_CONF="
_TRIED = (
    "expandable_segments:True",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:16",
)
_LONG = 200_000  # steps, of which each replay takes a tenth of a second
_WORTH_SHARE, _WORTH_BYTES = 0.02, 32 << 20  # the least that an advised setting saves


@dataclass(frozen=True)
class Choice:
    """One way to set the allocator, in the worst of a few orders of segments. Sizes are bytes."""

    settings: str
    as_recorded: bool
    peak_reserved: int  # with unlimited memory
    smallest_room: int  # the least device memory in which the program runs
    retries: int  # in the given room
    runs: bool  # in the given room


def choices(trace: Trace, device: str, room: int | None = None) -> list[Choice]:
    """All settings that were tried, least memory first; among equals the recorded one first."""
    recorded = recorded_settings(trace, device)
    rows = []
    for settings in _candidates(recorded):
        unlimited = replay(trace, settings, device=device, unlimited=True, orders=FEW_ORDERS)
        in_room = unlimited if room is None else _in_room(trace, settings, device, room)
        rows.append(
            Choice(
                settings,
                settings == recorded,
                unlimited.reserved[1],
                unlimited.smallest_room,
                in_room.retries,
                bool(in_room),
            )
        )
    return sorted(rows, key=lambda c: (c.smallest_room, c.peak_reserved, not c.as_recorded))


def _candidates(recorded: str) -> Iterator[str]:
    """The recorded settings, the same with one setting added or changed, and torch's defaults."""
    seen = set()
    for more in ("", *_TRIED):
        text = allocator_settings.joined(recorded, more)
        if allocator_settings.parse(text) not in seen:
            seen.add(allocator_settings.parse(text))
            yield text
    if allocator_settings.parse("") not in seen:
        yield ""


def _in_room(trace: Trace, settings: str, device: str, room: int) -> Replay:
    return replay(trace, settings, device=device, capacity=room, unlimited=True, orders=FEW_ORDERS)


@dataclass(frozen=True)
class Advice:
    """A setting that helps, and the bytes that would not be reserved."""

    settings: str
    bytes: int

    @property
    def text(self) -> str:
        """The environment variable to start the program with."""
        return VARIABLE + self.settings


def to_reserve_less(trace: Trace, device: str) -> Advice | None:
    """The setting that reserves least, if it saves enough to be worth a change."""
    return _less_reserved(trace).get(device)


@once_per_trace
def _less_reserved(trace: Trace) -> dict[str, Advice]:
    result = {}
    for device in devices_of(trace):
        recorded = recorded_settings(trace, device)
        if device == "cpu" or allocator_settings.parsed(recorded) is None:
            continue
        tried = list(_candidates(recorded))
        if len(steps(trace, device).position) > _LONG:
            tried = tried[:2]  # as recorded, and expandable segments
        by_settings = {settings: _reserved(trace, settings, device, 1) for settings in tried}
        best = min(by_settings, key=lambda each: by_settings[each][1])
        now = _reserved(trace, recorded, device, FEW_ORDERS)[0]
        saved = now - _reserved(trace, best, device, FEW_ORDERS)[1]
        if saved > max(_WORTH_SHARE * now, _WORTH_BYTES):
            result[device] = Advice(best, saved)
    return result


def _reserved(trace: Trace, settings: str, device: str, orders: int) -> tuple[int, int]:
    """The least and the most that is reserved in so many orders of segments."""
    return replay(trace, settings, device=device, unlimited=True, orders=orders).reserved


def to_run_in(trace: Trace, device: str, room: int) -> Advice | None:
    """A setting with which all of the trace's requests fit into the room, if they now do not.

    None if the replay with the recorded settings does not fail there, because then a replay with
    others proves nothing.
    """
    recorded = recorded_settings(trace, device)
    is_known = allocator_settings.parsed(recorded) is not None
    if not is_known or _in_room(trace, recorded, device, room).may_run:
        return None
    for settings in _candidates(recorded):
        if _in_room(trace, settings, device, room):
            now = replay(trace, recorded, device=device, unlimited=True)
            then = replay(trace, settings, device=device, unlimited=True)
            return Advice(settings, max(now.smallest_room - then.smallest_room, 0))
    return None
