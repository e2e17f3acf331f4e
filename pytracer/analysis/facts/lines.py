"""Lines of work: which threads do one piece of work, whose phases follow one another.

A program may train in a new thread per step, or in whichever worker is idle, or train several
models at once. A thread belongs to the line of another if it calls the same models, or if a
backward pass of one runs nodes that the other made. A thread that only steps goes on with what the
call before its first one began.

- Threads of a line that never work at the same time share its phases: each marks them. If they do
  work at the same time, each has a line of its own.
- A thread that only works inside the calls of another follows it and marks nothing: DataParallel
  calls a model's copies in such threads, and the engine runs checkpointed modules in its own.
- The engine's threads, and those that train nothing and call no model, have no line.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.facts import scopes
from pytracer.analysis.facts.scopes import BACKWARD, MODULE, NEVER, NODE, OPTIMIZER, Tree
from pytracer.data import meta
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.sanitized import within
from pytracer.data.schema import U64, Mask

_THREADS = np.iinfo(np.uint16).max + 1
NO_LINE = -1


@dataclass(frozen=True)
class Lines:
    """The line of each thread. Line 0 has the main thread."""

    of_thread: NDArray[np.int16]  # NO_LINE for threads that train nothing and call no model
    marks: Mask  # per thread, whether what it calls begins and ends phases
    count: int


@once_per_trace
def lines(trace: Trace) -> Lines:
    """Groups the threads."""
    calls = _calls(trace)
    main = main_thread(trace)
    threads = np.unique(np.append(calls.thread, main)).tolist()
    leaders = _leaders(calls, threads) if len(threads) > 1 else {}
    alone = [thread for thread in threads if thread not in leaders]
    groups = [part for group in _linked(trace, calls, alone) for part in _apart(calls, group)]
    groups.sort(key=lambda each: main not in each)
    of_thread = np.full(_THREADS, NO_LINE, np.int16)
    marks = np.zeros(_THREADS, np.bool_)
    for number, group in enumerate(groups):
        of_thread[group], marks[group] = number, True
    for thread, leader in leaders.items():
        of_thread[thread] = of_thread[leader]
    return Lines(of_thread, marks, len(groups))


@once_per_trace
def main_thread(trace: Trace) -> int:
    """The thread that calls backward; without one, that steps; without one, that calls modules."""
    tree = scopes.tree(trace)
    for kind in (BACKWARD, OPTIMIZER, MODULE):
        calls = np.flatnonzero((tree.kind == kind) & (tree.node == 0))
        if len(calls):
            return int(tree.thread[calls[0]])
    return int(trace.events.thread[0]) if len(trace.events.thread) else 0


def on_main_line(trace: Trace, thread: NDArray[np.integer]) -> Mask:
    """Whether each of these threads belongs to the line of the main thread."""
    on_it: Mask = lines(trace).of_thread[thread] == 0
    return on_it


@once_per_trace
def training_lines(trace: Trace) -> int:
    """How many lines call backward or step an optimizer."""
    return len(_spans(trace))


def training_at_once(trace: Trace) -> int:
    """How many lines train while another does: between its first and its last call."""
    spans = _spans(trace)
    return sum(
        any(
            begin < other_end and other_begin < end
            for other_begin, other_end in spans[:i] + spans[i + 1 :]
        )
        for i, (begin, end) in enumerate(spans)
    )


def _spans(trace: Trace) -> list[tuple[int, int]]:
    """When each line that trains begins its first call and its last one."""
    calls = _calls(trace)
    trains = np.isin(calls.kind, (BACKWARD, OPTIMIZER))
    line, begin = lines(trace).of_thread[calls.thread[trains]], calls.begin[trains]
    return [
        (int(begin[line == one].min()), int(begin[line == one].max())) for one in np.unique(line)
    ]


def threads_named(trace: Trace, prefix: str) -> Mask:
    """Per thread number: whether torch gave it a name that begins like this.

    Torch names the engine's threads, but not those of reentrant passes.
    """
    named = scopes.names_where(trace, lambda text: text.startswith(prefix))
    result = np.zeros(_THREADS, np.bool_)
    result[: len(trace.threads.name)] = named[within(trace.threads.name, len(named))]
    return result


@dataclass(frozen=True)
class _Calls:
    """What threads call outside of backward passes and models: models, passes and steps."""

    thread: NDArray[np.intp]
    kind: NDArray[np.uint8]
    name: NDArray[np.intp]
    begin: U64
    end: U64


def _calls(trace: Trace) -> _Calls:
    tree = scopes.tree(trace)
    outermost = inside_passes(tree)[tree.parent] == 0
    outermost &= tree.module[tree.parent] == 0
    if meta.of(trace).names_threads:
        outermost &= ~threads_named(trace, "pt_autograd")[tree.thread]
    outermost &= np.isin(tree.kind, (BACKWARD, OPTIMIZER, MODULE))
    rows = np.flatnonzero(outermost)
    return _Calls(
        tree.thread[rows].astype(np.intp),
        tree.kind[rows],
        tree.name[rows].astype(np.intp),
        tree.begin[rows],
        tree.end[rows],
    )


def inside_passes(tree: Tree) -> NDArray[np.uint32]:
    """Per scope, the innermost node or backward pass at or around it."""
    return tree.nearest_context((tree.kind == NODE) | (tree.kind == BACKWARD))


def _leaders(calls: _Calls, threads: list[int]) -> dict[int, int]:
    """The threads that only work inside the calls of another, with that one."""
    trains = np.isin(calls.kind, (BACKWARD, OPTIMIZER))
    trainers = np.unique(calls.thread[trains]).tolist() or threads[:1]
    found = {}
    for thread in threads:
        if thread in trainers:
            continue
        own = calls.thread == thread
        for trainer in trainers:
            others = calls.thread == trainer
            if _lie_inside(
                calls.begin[own], calls.end[own], calls.begin[others], calls.end[others]
            ):
                found[thread] = trainer
                break
    return found


def _lie_inside(begin: U64, end: U64, outer_begin: U64, outer_end: U64) -> bool:
    """Whether each of these calls lies inside one of the others, which are in order."""
    outer = np.searchsorted(outer_begin, begin, side="right") - 1
    return bool((outer >= 0).all() and (end <= np.maximum.accumulate(outer_end)[outer]).all())


def _linked(trace: Trace, calls: _Calls, threads: list[int]) -> Iterable[list[int]]:
    """The groups of threads that call the same models, or one another's graphs."""
    group = {thread: thread for thread in threads}

    def of(thread: int) -> int:
        while group[thread] != thread:
            group[thread] = thread = group[group[thread]]
        return thread

    for one, other in _pairs(trace, calls):
        if one in group and other in group:
            first, second = sorted((of(one), of(other)))
            group[second] = first
    found: dict[int, list[int]] = {}
    for thread in threads:
        found.setdefault(of(thread), []).append(thread)
    return found.values()


def _pairs(trace: Trace, calls: _Calls) -> Iterator[tuple[int, int]]:
    tree = scopes.tree(trace)
    models = calls.kind == MODULE
    named = np.unique(np.stack((calls.name[models], calls.thread[models])), axis=1)
    same = np.flatnonzero(named[0][1:] == named[0][:-1])
    yield from zip(named[1][same].tolist(), named[1][same + 1].tolist(), strict=True)
    knows = np.flatnonzero((tree.forward != 0) & ((tree.kind == NODE) | (tree.kind == BACKWARD)))
    both = tree.thread[tree.forward[knows]].astype(np.uint32) << 16 | tree.thread[knows]
    for pair in np.unique(both).tolist():
        yield pair >> 16, pair & 0xFFFF
    # A thread that only steps goes on with what another has begun, and one that only runs backward
    # does where no node tells who made the graph.
    order = np.argsort(calls.begin, kind="stable")
    thread = calls.thread[order]
    begin_themselves = calls.kind != OPTIMIZER if scopes.has_operators(trace) else models
    without = np.flatnonzero(~np.isin(thread, calls.thread[begin_themselves]))
    for one, first in zip(*np.unique(thread[without], return_index=True), strict=True):
        if at := int(without[first]):
            yield int(thread[at - 1]), int(one)


def _apart(calls: _Calls, group: list[int]) -> Iterable[list[int]]:
    """One line of all these threads, or of each alone if some work at the same time."""
    mine = np.isin(calls.thread, group)
    order = np.argsort(calls.begin[mine], kind="stable")
    thread, begin, end = calls.thread[mine][order], calls.begin[mine][order], calls.end[mine][order]
    return [[one] for one in group] if _work_at_once(thread, begin, end) else [group]


def _work_at_once(thread: NDArray[np.intp], begin: U64, end: U64) -> bool:
    """Whether one thread's call begins while another's goes on. What did not end is not counted."""
    end = np.where(end == NEVER, begin, end)
    until = np.maximum.accumulate(end)
    last = thread[np.maximum.accumulate(np.where(end == until, np.arange(len(end)), 0))]
    return bool(((begin[1:] < until[:-1]) & (thread[1:] != last[:-1])).any())
