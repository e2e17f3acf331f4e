"""Stand-ins for values that the program reads from fake tensors, and a list of these reads."""

import math
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from pytracer import errors
from pytracer.imagined.known import GUESS

_ASSUMED = 'say what it is: --assume {line}=true, or assume={{"{line}": True}}'
_SKIPPED = "; or skip this line while imagining: `if not pytracer.is_imagining():`"


class Reads:
    """Answers and lists the program's reads of values that an imagined run does not have."""

    def __init__(self, assumed: dict[str, Any]) -> None:
        """`assumed`: the values for decisions, by file and line."""
        self._assumed = assumed
        self._lines: Counter[str] = Counter()
        self.shared: set[str] = set()  # lines that decided by what all ranks together say

    def listed(self) -> list[dict[str, Any]]:
        """Each line that read values, with the number of its reads."""
        return [{"line": line, "reads": count} for line, count in self._lines.items()]

    def number(self, kind: type, value: Any = GUESS) -> Any:
        """A stand-in for a number of this kind, `float`, `int` or `bool`."""
        if _is_torchs_own(sys._getframe(1)):
            return kind(value)
        self._lines[where()] += 1
        return _KINDS[kind](value)

    def assumes(self) -> None:
        """Lists the line whose sizes rely on an assumption."""
        self._lines[where()] += 1

    def shares(self) -> bool | None:
        """What was said of this line, which reads what all ranks together say. Lists it if nothing was."""
        if _is_torchs_own(sys._getframe(1)):
            return None
        line = where()
        said = self.assumed(line)
        if said is None:
            self.shared.add(line)
        return said

    def assumed(self, line: str) -> bool | None:
        """What was said of the line; None if nothing."""
        for place, value in self._assumed.items():
            if line == place or line.endswith("/" + place):
                self._lines[line] += 1
                return bool(value)
        return None

    def decide(self) -> bool:
        """The value that the program decides by, from the assumptions.

        Raises:
            errors.CannotImagine: there is no assumption for this line.
        """
        line = where()
        said = self.assumed(line)
        if said is not None:
            return said
        by_torch = _is_torchs_own(sys._getframe(1))
        decides = "calls torch, which decides" if by_torch else "decides"
        raise errors.CannotImagine(
            f"{line} {decides} by the value of a tensor, which an imagined run does not have; "
            + _ASSUMED.format(line=line)
            + ("" if by_torch else _SKIPPED)
        )


def stand_in(tensor: Any) -> Any:
    """For the one number that the tensor holds, where torch itself reads it."""
    if tensor.dtype.is_floating_point:
        return float(GUESS)
    return bool(GUESS) if str(tensor.dtype) == "torch.bool" else GUESS


def where() -> str:
    """The innermost line of the program, outside torch, pytracer and installed libraries."""
    frame: FrameType | None = sys._getframe(1)
    in_library = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_inside(file):
            line = f"{_shown(file)}:{frame.f_lineno}"
            in_library = in_library or line
            if "site-packages" not in file:
                return line
        frame = frame.f_back
    return in_library or "the program"


def _shown(file: str) -> str:
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


_TORCH = str(Path(sys.modules["torch"].__file__ or "").parent) if "torch" in sys.modules else "?"
_OURS = str(Path(__file__).parents[1])
WRAPPERS = ("eval_frame.py", "_compile.py")  # torch's own frames around a mode
_PYTHONS = sysconfig.get_path("stdlib")


def _is_inside(file: str) -> bool:
    return file.startswith((_TORCH, _OURS, _PYTHONS, "<"))


def _is_torchs_own(frame: FrameType | None) -> bool:
    """Whether torch itself reads, as an optimizer reads the number of its step."""
    return _asker(frame).startswith(_TORCH)


def is_asked_by(*files: str) -> bool:
    """Whether code of one of these files asks for a value."""
    return _asker(sys._getframe(1)) in files


def _asker(frame: FrameType | None) -> str:
    """The file whose code asks us; "" for none."""
    while frame is not None and _is_between(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename


def _is_between(file: str) -> bool:
    return file.startswith(_OURS) or file.endswith(WRAPPERS)


# The reads of the imagined run that is going on, if any.
current: list[Reads] = []


def _decides(*_: Any) -> bool:
    if current:
        return current[-1].decide()
    return True


def _equals(self: Any, other: Any) -> bool:
    """No number is NaN or infinite, which `json` asks of each that it writes."""
    if other is self:
        return True
    if type(other) is float and math.isinf(other):
        return False
    return _decides()


def _differs(self: Any, other: Any) -> bool:
    if other is self:
        return False
    if type(other) is float and math.isinf(other):
        return True
    return _decides()


class StandInFloat(float):
    """An unknown number. A program can compute with it and print it, but not compare it."""

    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = _decides
    __eq__, __ne__ = _equals, _differs
    __hash__ = float.__hash__


class StandInInt(int):
    """An unknown whole number."""

    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = _decides
    __eq__, __ne__ = _equals, _differs
    __hash__ = int.__hash__


def _carries(kind: type, name: str) -> Callable[..., Any]:
    plain = getattr(kind, name)

    def carried(*arguments: Any) -> Any:
        result = plain(*arguments)
        return _KINDS[type(result)](result) if type(result) in (int, float) else result

    return carried


_KINDS: dict[type, Callable[[Any], Any]] = {
    float: StandInFloat,
    int: StandInInt,
    bool: StandInInt,
}
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _name in (
    *(f"__{way}{name}__" for name in _ARITHMETIC for way in ("", "r")),
    *("__neg__", "__abs__", "__pos__", "__round__"),
):
    setattr(StandInFloat, _name, _carries(float, _name))
    setattr(StandInInt, _name, _carries(int, _name))
