"""Which settings of CUDA's allocator help a program: each is replayed, none is guessed."""

from collections.abc import Iterator
from dataclasses import dataclass

from pytracer import errors
from pytracer.analysis.allocator import settings as allocator_settings
from pytracer.analysis.allocator.replay import Replay, recorded_settings, replay, steps
from pytracer.analysis.facts.usage import devices as devices_of
from pytracer.recorded import Trace, once_per_trace

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
_WORTH_SHARE, _WORTH_BYTES = 0.02, 32 << 20  # what a setting must save to be advised


@dataclass(frozen=True)
class Choice:
    """One way to set the allocator. Sizes are bytes."""

    settings: str
    as_recorded: bool
    peak_reserved: int  # where nothing is short
    smallest_room: int  # the least that it runs in
    retries: int  # in the room that is asked about
    runs: bool  # in that room


def choices(trace: Trace, device: str, room: int | None = None) -> list[Choice]:
    """All that are tried, what needs least first; of equal ones what is on already."""
    recorded = recorded_settings(trace, device)
    found = []
    for settings in _candidates(recorded):
        free = replay(trace, settings, device=device, unlimited=True)
        there = free if room is None else _in_room(trace, settings, device, room)
        found.append(
            Choice(
                settings,
                settings == recorded,
                free.peak_reserved,
                free.smallest_room,
                there.retries,
                bool(there),
            )
        )
    return sorted(found, key=lambda c: (c.smallest_room, c.peak_reserved, not c.as_recorded))


def _candidates(recorded: str) -> Iterator[str]:
    """The recorded ones, those with one thing more or else, and torch's own."""
    seen = set()
    for more in ("", *_TRIED):
        text = allocator_settings.joined(recorded, more)
        if allocator_settings.parse(text) not in seen:
            seen.add(allocator_settings.parse(text))
            yield text
    if allocator_settings.parse("") not in seen:
        yield ""


def _replayable(settings: str) -> bool:
    """Not so: the driver's own allocator, what a later torch may know, and what a damaged file has."""
    try:
        allocator_settings.parse(settings)
    except errors.UsageError:
        return False
    return True


def _in_room(trace: Trace, settings: str, device: str, room: int) -> Replay:
    return replay(trace, settings, device=device, capacity=room, unlimited=True)


@dataclass(frozen=True)
class Advice:
    """A setting that helps, and the bytes that would not be reserved."""

    settings: str
    bytes: int

    @property
    def text(self) -> str:
        """What to start the program with."""
        return VARIABLE + self.settings


def to_reserve_less(trace: Trace, device: str) -> Advice | None:
    """The setting under which least is reserved, if that is worth a change."""
    return _less_reserved(trace).get(device)


@once_per_trace
def _less_reserved(trace: Trace) -> dict[str, Advice]:
    result = {}
    for device in devices_of(trace):
        recorded = recorded_settings(trace, device)
        if device == "cpu" or not _replayable(recorded):
            continue
        tried = list(_candidates(recorded))
        if len(steps(trace, device).position) > _LONG:
            tried = tried[:2]  # as recorded, and expandable segments
        by_settings = {
            settings: replay(trace, settings, device=device, unlimited=True).peak_reserved
            for settings in tried
        }
        now, best = by_settings[recorded], min(by_settings, key=lambda each: by_settings[each])
        saved = now - by_settings[best]
        if saved > max(_WORTH_SHARE * now, _WORTH_BYTES):
            result[device] = Advice(best, saved)
    return result


def to_run_in(trace: Trace, device: str, room: int) -> Advice | None:
    """The setting with which all of the trace's requests find room, where they fail as recorded.

    None also where the replay of the recording does not fail there: then it would prove nothing.
    """
    recorded = recorded_settings(trace, device)
    if not _replayable(recorded) or _in_room(trace, recorded, device, room):
        return None
    for settings in _candidates(recorded):
        if _in_room(trace, settings, device, room):
            now = replay(trace, recorded, device=device, unlimited=True)
            then = replay(trace, settings, device=device, unlimited=True)
            return Advice(settings, max(now.smallest_room - then.smallest_room, 0))
    return None
