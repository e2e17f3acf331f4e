"""Replaces attributes of torch for as long as an imagined run lasts."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute inside the block, and restores or deletes it afterwards."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def listed(types: list[Any], one: Any) -> Iterator[None]:
    """Adds a type to a list of torch's inside the block."""
    types.append(one)
    try:
        yield
    finally:
        types.remove(one)
