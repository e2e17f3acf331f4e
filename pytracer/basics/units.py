"""Sizes and times: as people write them, and as they read them."""

import re

from pytracer import errors

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")
_MOST_BYTES = 2**63 - 1
_CLEARLY_BYTES = 1_000_000  # who writes 40 without a unit means GiB


def parse_size(size: int | str) -> int:
    """Bytes of "40 GiB", "1.5GB" (a billion and a half), "512B", or a number that is one already.

    Raises:
        errors.UsageError: it is none of these.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise errors.UsageError(f"{size!r} is not a size: say 40GiB (of 1024) or 1.5 GB (of 1000)")
    if not match[2] and 0 < float(match[1]) < _CLEARLY_BYTES:
        number = match[1]
        raise errors.UsageError(f"{size!r} has no unit: say {number}GiB, {number}MiB or {number}B")
    amount = float(match[1]) * unit
    if amount > _MOST_BYTES:
        raise errors.UsageError(f"{size!r} is more than any memory has")
    return round(amount)


def size_text(amount: int) -> str:
    """Bytes as people read them: three digits and a binary unit, `3.57 MiB`."""
    if amount < 0:
        return "-" + size_text(-amount)
    if amount < 1000:
        return f"{amount} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    power = 1
    while amount / 1024**power >= 999.5 and power < len(units):
        power += 1
    return f"{_three_digits(amount / 1024**power)} {units[power - 1]}"


def time_text(nanoseconds: int) -> str:
    """A time as people read it: three digits, `591 ms`."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        value = nanoseconds / size
        if value >= 0.9995:
            return f"{_three_digits(value)} {unit}"
    return f"{nanoseconds} ns"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
