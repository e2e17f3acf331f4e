"""PYTORCH_ALLOC_CONF as torch 2.11 to 2.15 read it: the settings that decide block placement."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from pytracer import errors

MIB = 1 << 20
_NONE = 2**64 - 1
_INTERVALS = 16  # powers of two from 1 MiB to 64 GiB
_LEAST_ROUNDING, _LEAST_SEGMENT = 20, 11
# Settings that torch also reads, without effect on placement: pinned memory, locks, failures.
_PLACES_NOTHING = re.compile(
    r"pinned_\w+|release_lock_on_(cuda|hip)malloc|throw_on_cudamalloc_oom"
    r"|graph_capture_record_stream_reuse"
)


@dataclass(frozen=True)
class Settings:
    """The settings. Sizes are bytes; `csrc/core/allocator_replay.h` has the rules."""

    max_split_size: int = _NONE
    max_non_split_rounding: int = 20 * MIB
    roundup_divisions: tuple[int, ...] = ()
    gc_threshold: float = 0.0
    expandable_segments: bool = False
    large_segment_size: int = 20 * MIB
    memory_fraction: float = 1.0
    text: str = field(default="", compare=False)  # as written in the variable

    def rules(self, limit: int | None, capacity: int | None) -> dict[str, Any]:
        """The settings as `core.replay` takes them."""
        rules = asdict(self)
        del rules["text"], rules["memory_fraction"]
        rules["roundup_divisions"] = list(self.roundup_divisions)
        rules["limit"] = _NONE if limit is None else limit
        rules["capacity"] = _NONE if capacity is None else capacity
        return rules


def parse(text: str) -> Settings:
    """Reads settings such as "expandable_segments:True,max_split_size_mb:128".

    Raises:
        errors.UsageError: torch would reject the text, or it is for another allocator.
    """
    values: dict[str, Any] = {}
    for name, value in _pairs(text):
        if name == "backend" and value != "native":
            raise errors.UsageError(
                f"backend:{value} is the driver's own allocator, which cannot be replayed; leave "
                "backend out"
            )
        if name in _READERS:
            key, read = _READERS[name]
            values[key] = read(name, value)
        elif name != "backend" and not _PLACES_NOTHING.fullmatch(name):
            raise errors.UsageError(
                f"PYTORCH_ALLOC_CONF has no {name}; it has {', '.join(_READERS)}"
            )
    settings = Settings(**values, text=",".join(f"{name}:{value}" for name, value in _pairs(text)))
    if settings.max_split_size < settings.large_segment_size:
        least = settings.large_segment_size // MIB
        raise errors.UsageError(
            f"max_split_size_mb:{settings.max_split_size // MIB}: torch takes {least} or more, the "
            "size of a large segment"
        )
    return settings


def parsed(text: str) -> Settings | None:
    """The settings; None for those of another allocator, a later torch or a damaged file."""
    try:
        return parse(text)
    except errors.UsageError:
        return None


def joined(text: str, more: str) -> str:
    """The settings with some replaced or added."""
    pairs = dict(_pairs(text)) | dict(_pairs(more))
    return ",".join(f"{name}:{value}" for name, value in pairs.items())


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Names and values; commas inside of a list do not separate settings."""
    text = text.replace(" ", "")
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text):
        name, colon, value = part.partition(":")
        if not (name and colon and value):
            raise errors.UsageError(f"{part!r} is no setting; write name:value,name:value")
        yield name, value


def _boolean(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise errors.UsageError(f"{name}:{value}: torch takes True or False")
    return value == "True"


def _whole(name: str, value: str) -> int:
    if not value.isdecimal():
        raise errors.UsageError(f"{name}:{value}: torch takes a whole number")
    return int(value)


def _mebibytes(least: int) -> Any:
    def read(name: str, value: str) -> int:
        number = _whole(name, value)
        if number < least:
            raise errors.UsageError(f"{name}:{value}: torch takes {least} or more")
        return min(number * MIB, _NONE - 1)

    return read


def _share(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 < number <= 1 or (number == 1 and name.startswith("garbage")):
        raise errors.UsageError(f"{name}:{value}: torch takes a number between 0 and 1")
    return number


def _divisions(name: str, value: str) -> tuple[int, ...]:
    if not value.startswith("["):
        return (_power(name, value, least=1),) * _INTERVALS
    divisions, last, first = [0] * _INTERVALS, 0, True
    for entry in filter(None, value.strip("[]").split(",")):
        bound, _, count = entry.partition(":")
        number = _power(name, count, least=0)
        if bound == ">":
            divisions[last + 1 :] = [number] * (_INTERVALS - last - 1)
            continue
        last = min(_power(name, bound, least=1).bit_length() - 1, _INTERVALS - 1)
        if first:
            divisions[:last] = [number] * last
        divisions[last], first = number, False
    return tuple(divisions)


def _power(name: str, value: str, least: int) -> int:
    number = _whole(name, value)
    if number < least or number & (number - 1):
        raise errors.UsageError(f"{name}: {value} is no power of two, as torch wants it")
    return number


_READERS: dict[str, tuple[str, Any]] = {
    "expandable_segments": ("expandable_segments", _boolean),
    "max_split_size_mb": ("max_split_size", _mebibytes(0)),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mebibytes(_LEAST_ROUNDING)),
    "roundup_power2_divisions": ("roundup_divisions", _divisions),
    "garbage_collection_threshold": ("gc_threshold", _share),
    "large_segment_size_mb": ("large_segment_size", _mebibytes(_LEAST_SEGMENT)),
    "per_process_memory_fraction": ("memory_fraction", _share),
}
