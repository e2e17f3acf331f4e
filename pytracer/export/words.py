"""Explains the words on the screen."""

import textwrap
from collections.abc import Iterable

from pytracer.schema import CATEGORY, CATEGORY_ORDER, CATEGORY_TABLE

CATEGORIES = {name: CATEGORY_TABLE[CATEGORY[name]].meaning for name in CATEGORY_ORDER}

OTHERS = {
    "peak": "the moment at which most bytes were in use",
    "own_peak": "a category's own largest size, which may be at another moment",
    "at_end": "bytes that were alive when the trace ended",
    "step": "ends at optimizer.step(), or at t.step() if the program calls it",
    "phase": "data, forward, recompute (checkpointing), backward, optimizer, or other",
    "module": "a path as in model.named_modules(); h.* stands for h.0, h.1, ...",
    "line": "the program's own line that made the block (stacks=True)",
    "rounds up": "bytes that the allocator adds to requests, to make multiples of 512 bytes",
    "reserves": "bytes that the allocator holds from the driver, as nvidia-smi sees them",
    "caches": "bytes that the allocator holds and that no tensor uses now",
    "hint": "the change that saves most for least, if one is worth it",
    "events": "allocations, frees and labels that were recorded",
    "scopes": "ops, modules and phases in which something happened",
    "in about": "CPU time that recording took, and its share of the steps' time",
}


def legend(shown: Iterable[str] | None = None, width: int = 80) -> str:
    """All words, or only the shown categories and the other words."""
    wanted = CATEGORIES if shown is None else {name: CATEGORIES[name] for name in shown}
    return "\n".join(
        line
        for name, meaning in (*wanted.items(), *OTHERS.items())
        for line in textwrap.wrap(
            f"{name:<16}{meaning}", width, initial_indent="  ", subsequent_indent=" " * 18
        )
    )
