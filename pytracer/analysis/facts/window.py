"""The part of a growing trace from which the facts of its last whole step follow.

A window is a trace like any other, only smaller. So the same rules apply to it. It has:

- everything that happened since the last whole step began;
- the first step; of the steps in whose backward the graph was read, the first and the last; and of
  those that made a gradient that still lives. Later steps are judged by their likeness to these
  (saved_tensors.py, casts.py);
- of every other block that is alive then: the events that made it and say what it is, with their
  scopes, and the landmarks of the step that made it (timelines.landmarks). Of dead blocks the same,
  where they show that a living one is an input (inputs.proof).

All other events and scopes are left out. So its size is that of a few steps and of the live blocks,
however long the recording.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.facts import inputs, scopes, timelines
from pytracer.analysis.facts.categories import categories
from pytracer.analysis.facts.evidence import evidence
from pytracer.analysis.facts.lifetimes import Lifetimes, lifetimes
from pytracer.analysis.facts.scopes import NEVER, Tree
from pytracer.data import sanitized
from pytracer.data._native import core
from pytracer.data.recorded import Trace
from pytracer.data.schema import ACTION, CATEGORY, TABLES, U32, U64, Mask

_ROWS = ("events", "scopes", "scope_ends")
_LEAST = 1 << 14  # rows that are always kept
_MOST_OF_A_STEP = 1 << 18  # rows; a longer one is cut
_MOST_OF_THE_FIRST = 1 << 16  # it may be a program without steps
_PART = 1 << 10  # events of a part of it
_NUMBERS = ("scope", "parent", "forward")  # columns that hold numbers of scopes
_SAYS = (ACTION["label"], ACTION["saved"])

_Columns = dict[str, NDArray[Any]]


class Window:
    """Takes rows as they come, and lets go of those that no fact of the last step needs."""

    def __init__(self) -> None:
        self._tables = {name: _empty(name) for name in _ROWS}
        self._new: list[Mapping[str, Any]] = []
        self._new_rows = 0
        self._number = np.zeros(0, np.uint32)  # of each scope in the whole trace
        self._scopes = 0  # in the whole trace
        self._gaps_until = 0  # all scopes with higher numbers are here
        self._kept = 0  # rows
        self._trace: Trace | None = None
        self.complete_from = 0  # ticks; of earlier events only those of live blocks are here

    def add(self, rows: Mapping[str, Any]) -> None:
        """Takes the rows that follow."""
        count = sum(len(rows[f"{name}.ticks"]) for name in _ROWS)
        if count:
            self._new.append(rows)
            self._new_rows += count
            self._trace = None

    @property
    def is_large(self) -> bool:
        """Whether `condense` is worth its time."""
        return self._new_rows > max(self._kept, _LEAST)

    def trace(self, others: Mapping[str, Any]) -> Trace:
        """The window as a trace. `others`: the tables to which its rows refer."""
        self._take_new()
        if self._trace is None:
            columns = {f"{name}.{c}": v for name in _ROWS for c, v in self._tables[name].items()}
            columns = core.safe_columns({**others, **columns})
            for name, table in self._tables.items():
                table.update((column, columns[f"{name}.{column}"]) for column in table)
            self._trace = Trace.from_columns(columns)
        return self._trace

    def condense(self, others: Mapping[str, Any], step_ends: U64) -> None:
        """Lets go of what the facts of the last of these steps, and of later ones, do not need."""
        trace = self.trace(others)
        if not len(trace.events.ticks):
            return
        ticks, last = trace.events.ticks, step_ends[-1:].max(initial=0)
        unfinished = np.count_nonzero(ticks > last) + np.count_nonzero(trace.scopes.ticks > last)
        steps = _Steps(trace, step_ends)
        if unfinished > (_MOST_OF_A_STEP if len(step_ends) else _MOST_OF_THE_FIRST):
            steps = _Steps(trace, np.append(ticks[_PART::_PART], ticks[-1:]))
            steps.kept[1:-1] = False
            self.complete_from = int(ticks[-1])
        elif len(step_ends) > 1:
            self.complete_from = max(self.complete_from, int(step_ends[-2]))
        events, numbers = _needed(trace, steps)
        self._keep(events, numbers)

    def _take_new(self) -> None:
        new, self._new = self._new, []
        if not new:
            return
        count = sum(len(rows["scopes.ticks"]) for rows in new)
        numbers = np.arange(self._scopes + 1, self._scopes + count + 1, dtype=np.uint32)
        self._number, self._scopes = np.concatenate((self._number, numbers)), self._scopes + count
        for name, table in self._tables.items():
            for column in table:
                parts = [rows[f"{name}.{column}"] for rows in new]
                if column in _NUMBERS:
                    parts = [self._here(numbers) for numbers in parts]
                table[column] = np.concatenate((table[column], *parts))

    def _here(self, number: U32) -> U32:
        """Scopes' numbers in the window, from those in the whole trace; 0 if they are not here."""
        here = number - np.uint32(self._scopes - len(self._number))
        old = np.flatnonzero(number <= self._gaps_until)
        place = np.searchsorted(self._number, number[old])
        there = np.append(self._number, 0)[place] == number[old]
        here[old] = np.where(there & (number[old] != 0), place + 1, 0)
        return here

    def _keep(self, events: Mask, numbers: Mask) -> None:
        """Keeps these events and scopes; number 0 is no scope."""
        ends = numbers[self._tables["scope_ends"]["scope"]]
        new_number = (np.cumsum(numbers) * numbers).astype(np.uint32)
        self._number, self._gaps_until = self._number[numbers[1:]], self._scopes
        for name, rows in zip(_ROWS, (events, numbers[1:], ends), strict=True):
            table = self._tables[name]
            for column, values in table.items():
                kept = values[rows]
                table[column] = new_number[kept] if column in _NUMBERS else kept
        self._kept = sum(len(self._tables[name]["ticks"]) for name in _ROWS)
        self._new_rows, self._trace = 0, None


def _empty(name: str) -> _Columns:
    row_type, dtypes = TABLES[name]
    return {c: np.zeros(0, dtype) for c, dtype in zip(row_type._fields, dtypes, strict=True)}


class _Steps:
    """The steps of the window, and which of them are kept whole."""

    def __init__(self, trace: Trace, ends: U64) -> None:
        self._ends = ends
        self.kept = np.zeros(len(ends) + 1, np.bool_)
        self.kept[0] = True
        self.kept[-2:] = True
        read = trace.events.ticks[trace.events.action == ACTION["saved"]]
        for example in (read, _gradients_made(trace)):
            before = example[example <= ends[-2:][:1].max(initial=0)]
            self.kept[self.of(np.append(before[:1], before[-1:]))] = True

    def of(self, ticks: U64) -> NDArray[np.intp]:
        """The step of each tick."""
        step: NDArray[np.intp] = np.searchsorted(self._ends, ticks, side="left")
        return step

    def meet(self, begin: U64, end: U64) -> Mask:
        """Which of these spans meet a step that is kept whole."""
        before = np.append(0, np.cumsum(self.kept))
        meets: Mask = before[self.of(end) + 1] > before[self.of(begin)]
        return meets


def _gradients_made(trace: Trace) -> U64:
    """When the gradients that are alive were made."""
    lives, labels = lifetimes(trace), sanitized.labels(trace).category
    label = np.flatnonzero(trace.events.action == ACTION["label"])
    row = sanitized.within(trace.events.bytes[label], len(labels)).astype(np.intp)
    about = lives.allocation_of_event[label[labels[row] == CATEGORY["gradients"]]]
    about = about[about >= 0]
    alive = about[(lives.start[about] >= 0) & (lives.completed[about] < 0)]
    ticks: U64 = np.sort(trace.events.ticks[lives.start[alive]])
    return ticks


def _needed(trace: Trace, steps: _Steps) -> tuple[Mask, Mask]:
    """The events and the scopes, by number, that the window keeps."""
    lives, tree, ticks = lifetimes(trace), scopes.tree(trace), trace.events.ticks
    begin = np.where(lives.start < 0, np.uint64(0), ticks[lives.start])
    end = np.where(lives.completed < 0, NEVER, ticks[lives.completed])
    blocks = steps.meet(begin, end)
    is_input = categories(trace).category == CATEGORY["inputs"]
    proof = inputs.proof(trace, evidence(trace), blocks, is_input)
    blocks |= proof.blocks
    events = steps.kept[steps.of(ticks)] | _events_of(trace, lives, blocks)
    events[proof.events] = True
    marked_ends = np.where(tree.kind == scopes.STEP, tree.begin, tree.end)
    numbers = steps.meet(tree.begin, marked_ends)
    numbers[trace.events.scope[events]] = True
    made = np.zeros(len(steps.kept), np.bool_)
    made[steps.of(begin[blocks])] = True
    numbers |= timelines.landmarks(trace) & made[steps.of(tree.begin)]
    _add_those_around(tree, numbers)
    return events, numbers


def _events_of(trace: Trace, lives: Lifetimes, blocks: Mask) -> Mask:
    """The events that make, free and explain these blocks: of those that say the same, two.

    The rules ask when something was said first, and whether it was said again.
    """
    events, about = trace.events, lives.allocation_of_event
    result = np.zeros(len(about), np.bool_)
    for position in (lives.start[blocks], lives.end[blocks], lives.completed[blocks]):
        result[position[position >= 0]] = True
    result |= (events.action == ACTION["seed"]) & (about >= 0) & blocks[about]
    says = np.flatnonzero(np.isin(events.action, _SAYS) & (about >= 0) & blocks[about])
    what = np.where(events.action[says] == ACTION["label"], events.bytes[says], NEVER)
    order = np.lexsort((says, what, about[says]))
    differs = (np.diff(about[says][order]) != 0) | (np.diff(what[order]) != 0)
    first, last = np.append(True, differs), np.append(differs, True)
    result[says[order][(first | last)[: len(order)]]] = True
    return result


def _add_those_around(tree: Tree, numbers: Mask) -> None:
    """Adds the scopes around these, the operators of their nodes, and a node of each operator."""
    passes = np.flatnonzero(tree.forward != 0)
    operators, first = np.unique(tree.forward[passes], return_index=True)
    count = -1
    while count != (count := int(np.count_nonzero(numbers))):
        numbers[tree.parent[numbers]] = True
        numbers[tree.forward[numbers]] = True
        numbers[passes[first[numbers[operators]]]] = True
        numbers[0] = False
