"""Replaces attributes of torch for as long as an imagined run lasts."""

import contextlib
from collections.abc import Iterator
from typing import Any

_MISSING = object()
_there: "list[_Replaced]" = []  # in the order they came


class _Replaced(contextlib.AbstractContextManager[None]):
    def __init__(self, owner: Any, name: str, value: Any, *, for_all: bool) -> None:
        self._owner, self._name, self._value, self.for_all = owner, name, value, for_all
        self._before = _MISSING

    def put(self) -> None:
        self._before = vars(self._owner).get(self._name, _MISSING)
        setattr(self._owner, self._name, self._value)
        _there.append(self)

    def take_away(self) -> None:
        _there.remove(self)
        if self._before is _MISSING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)

    def __enter__(self) -> None:
        self.put()

    def __exit__(self, *_: object) -> None:
        self.take_away()


def replaced(owner: Any, name: str, value: Any) -> contextlib.AbstractContextManager[None]:
    """Replaces an attribute inside the block, and restores or deletes it afterwards."""
    return _Replaced(owner, name, value, for_all=True)


def for_programs(owner: Any, name: str, value: Any) -> contextlib.AbstractContextManager[None]:
    """The same, but a compiler at work sees what torch has: see `aside`."""
    return _Replaced(owner, name, value, for_all=False)


@contextlib.contextmanager
def aside(*, everything: bool = False) -> Iterator[None]:
    """Puts aside what was replaced for programs only, or all of it."""
    taken = [one for one in _there if everything or not one.for_all]
    for one in reversed(taken):
        one.take_away()
    try:
        yield
    finally:
        for one in taken:
            one.put()


@contextlib.contextmanager
def listed(types: list[Any], one: Any) -> Iterator[None]:
    """Adds a type to a list of torch's inside the block."""
    types.append(one)
    try:
        yield
    finally:
        types.remove(one)
