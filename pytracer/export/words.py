"""Explains the words on the screen."""

from collections.abc import Iterable

from pytracer.data.schema import CATEGORY, CATEGORY_ORDER, CATEGORY_TABLE
from pytracer.export.terminal import PLAIN, Terminal

CATEGORIES = {name: CATEGORY_TABLE[CATEGORY[name]].meaning for name in CATEGORY_ORDER}

OTHERS = {
    "peak": "the moment at which most bytes were in use",
    "own_peak": "a category's own largest size, which may be at another moment",
    "at_end": "bytes that were alive when the trace ended",
    "step": "ends at optimizer.step(), or at t.step() if the program calls it",
    "phase": "data, forward, recompute (checkpointing), backward, optimizer, or other",
    "modules": "who holds most at the peak: paths as in model.named_modules(). h.* stands for "
    "h.0, h.1, ...; [0] is a Sequential's child. With several models their class precedes: "
    "Critic.body",
    "lines": "the program's own lines that made most of it (stacks=True)",
    "peaks": "the peak of each kind of work, where a program does several. generation: calls "
    "without backward that pass a cache on; evaluation: other calls without backward; training",
    "allocator": "bytes that are no tensor's, of the allocator's own",
    "rounds up": "bytes that the allocator adds to requests, to make multiples of 512 bytes",
    "reserves": "bytes that the allocator holds from the driver, as nvidia-smi sees them",
    "caches": "bytes that the allocator holds and that no tensor uses now",
    "a step": "the median time of each phase",
    "note": "what to know before the changes",
    "mistake": "a change that mends a mistake, and how much lower the peak is with it",
    "free": "a change that costs no time",
    "trade": "a change that costs time or exactness",
    "noticed": "what is kept; whether it is needed is not known",
    "more": "how many changes are not on this screen, and what shows them",
    "lost": "something could not be recorded; health is the same for what may be wrong",
    "recorded": "how much the recording has:",
    "events": "allocations, frees and labels that were recorded",
    "scopes": "ops, modules and phases in which something happened",
    "in about": "CPU time that recording took, and its share of the steps' time",
}

OF_JOBS = {
    "on rank": "the ranks that have the highest figure",
    "missing": "ranks without a file, or with one that cannot be read",
    "earlier": "files of earlier attempts or steps, which are not counted",
    "ended": "ranks that died or hang, the first death first",
    "stuck": "a collective that some ranks wait in and others never began",
    "waits": "the rank that the others wait for in collectives",
    "rank": "a rank whose figures differ from the others', with module and line",
    "part": "ranks with modules of their own: stages of a pipeline, experts",
    "finding": "a leak or waste, and the ranks that have it",
    "clocks": "how well the clocks of hosts and ranks are known",
    "sharding": "how the model is spread over the ranks, and a rank's part of it",
}


def legend(
    shown: Iterable[str] | None = None, terminal: Terminal = PLAIN, *, of_jobs: bool = False
) -> str:
    """All words, or only the shown categories and the other words."""
    wanted = CATEGORIES if shown is None else {name: CATEGORIES[name] for name in shown}
    words = [*wanted.items(), *OTHERS.items(), *(OF_JOBS.items() if of_jobs else ())]
    return "\n".join(
        line
        for name, meaning in words
        for line in terminal.wrap(meaning, f"  {name:<16}", " " * 18)
    )
