"""Phases, modules and lines as scopes, from the stacks and the annotations of a snapshot."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer.data.schema import ACTION, I64, SCOPE_KIND, U32, Mask
from pytracer.snapshot.rows import Rows, runs
from pytracer.snapshot.stacks import ENGINE, FORWARD, NOTHING, OPTIMIZER, RECOMPUTE, UNCLEAR, Shown
from pytracer.snapshot.timeline import Doing, filled


def _after_closures(own: I64, first: I64, after: I64) -> I64:
    """Where steps begin: behind the forward and backward of the closure that they may call."""
    works = np.isin(own, (FORWARD, ENGINE, RECOMPUTE))
    last = np.maximum.accumulate(np.where(works, np.arange(len(own)), -1))
    found: I64 = np.maximum(first, np.append(last, -1)[after - 1] + 1)
    return found


class Scopes:
    """The scopes of one file."""

    def __init__(
        self,
        events: Rows,
        ticks: I64,
        before: int,
        notes: Rows,
        stacks: Rows,
        strings: list[str],
        shown: Shown,
        string: Callable[[str], int],
    ) -> None:
        """Makes none yet.

        Args:
            events: all events, of which the first `before` are older than the history.
            ticks: their times.
            before: how many of them are older.
            notes: the file's annotations.
            stacks: the stack table.
            strings: all texts.
            shown: what each stack shows.
            string: gives the row of a text.
        """
        self.events, self.ticks, self.before = events, ticks, before
        self.notes, self.stacks, self.strings, self.shown = notes, stacks, strings, shown
        self.string = string
        # begin, end, parent, name, kind, stack; numbered from 1
        self.rows: list[tuple[int, int, int, int, int, int]] = []

    def annotated(self, own: I64) -> Doing:
        """What annotations add to the activity that events show by their own stacks."""
        self._annotations()
        table = np.array(self.rows, np.int64).reshape(-1, 6)
        steps = table[table[:, 4] == SCOPE_KIND["optimizer"], :2]
        names = [text.startswith("Optimizer.zero_grad") for text in self.strings]
        cleared = table[np.array(names, np.bool_)[table[:, 3]], :2]
        first, after_step = self._events(steps)
        begins = _after_closures(own, first, after_step)
        in_step = self._within(begins, after_step)
        first, after_clearing = self._events(cleared)
        clears = self._within(first, after_clearing)
        activity = own.copy()
        activity[clears & (activity == UNCLEAR)] = NOTHING
        activity[in_step & ((activity == UNCLEAR) | (activity == NOTHING))] = OPTIMIZER
        after = np.concatenate([after_step, after_clearing])
        after = after[after < len(activity)]
        activity[after[activity[after] == UNCLEAR]] = NOTHING
        failures = np.append(0, np.cumsum(self.events.action == ACTION["oom"]))
        whole = failures[after_step] == failures[begins]
        over = self._within(begins[whole], after_step[whole])
        activity = filled(activity)
        if len(begins) == 0:
            firsts = [first for first, _ in runs(activity) if activity[first] == OPTIMIZER]
            begins = np.array(firsts, np.int64)
        return Doing(own, activity, np.sort(begins), clears, over)

    def _events(self, spans: I64) -> tuple[I64, I64]:
        """The first event within each of these spans of time, and the one that follows it."""
        first = np.maximum(np.searchsorted(self.ticks, spans[:, 0]), self.before)
        after = np.maximum(np.searchsorted(self.ticks, spans[:, 1]), self.before)
        return first.astype(np.int64), after.astype(np.int64)

    def _within(self, first: I64, after: I64) -> Mask:
        """The events from one of the first on, and before the one that follows."""
        depth = np.zeros(len(self.ticks) + 1, np.int64)
        np.add.at(depth, first, 1)
        np.add.at(depth, after, -1)
        within: Mask = np.cumsum(depth)[:-1] > 0
        return within

    def build(self, activity: I64) -> tuple[U32, dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        """The scope of each event, and the tables of scopes and of their ends."""
        activity = activity.copy()
        scope = np.zeros(len(self.events), np.int64)
        if not self.rows:
            self._annotations()
        if self._steps:  # they are scopes already
            activity[activity == OPTIMIZER] = NOTHING
        self._phases(activity, scope)
        self._lines(scope, activity)
        return self._tables(scope)

    @property
    def _steps(self) -> list[tuple[int, int, int, int, int, int]]:
        return [row for row in self.rows if row[4] == SCOPE_KIND["optimizer"]]

    def _annotations(self) -> None:
        """Adds user annotations as scopes."""
        rows, strings = self.notes, self.strings
        if len(rows) == 0 or len(self.ticks) == 0:
            return
        open_: dict[int, list[int]] = {}
        rows = rows.take(np.flatnonzero(rows.device == rows.device.min()))
        order = np.argsort(rows.time_us, kind="stable")
        for i in order.tolist():
            name, time = int(rows.name[i]), int(rows.time_us[i]) * 1000
            if strings[rows.stage[i]] == "START":
                open_.setdefault(name, []).append(time)
            elif open_.get(name):
                begin = max(open_[name].pop(), int(self.ticks[0]))
                if time <= begin:
                    continue  # over before the history begins
                step = strings[name].startswith("Optimizer.step")
                kind = SCOPE_KIND["optimizer" if step else "user"]
                self.rows.append((begin, time, 0, name, kind, 0))

    def _phases(self, activity: I64, scope: I64) -> None:
        group = np.where(activity == RECOMPUTE, ENGINE, activity)
        kinds = {FORWARD: "module", ENGINE: "backward", OPTIMIZER: "optimizer"}
        for first, last in runs(group):
            kind = kinds.get(int(group[first]))
            if kind is None:
                continue
            number = self._add(first, last, 3, 0, kind, "")
            scope[first : last + 1] = number
            if kind == "backward":
                inner = activity[first : last + 1] == RECOMPUTE
                for begin, end in runs(inner.astype(np.int64)):
                    if inner[begin]:
                        again = self._add(first + begin, first + end, 2, number, "module", "")
                        scope[first + begin : first + end + 1] = again

    def _lines(self, scope: I64, activity: I64) -> None:
        """Adds, around allocations that share a stack, its module and a scope with the stack."""
        stack = self.events.stack.astype(np.int64)
        stack[self.events.action != ACTION["alloc"]] = -1
        stack[: self.before] = -1
        together = stack * (len(self.rows) + 1) + scope
        together[stack <= 0] = -1
        calls = np.isin(activity, (FORWARD, RECOMPUTE))
        for first, last in runs(together):
            if together[first] < 0:
                continue
            row = int(stack[first])
            parent = int(scope[first])
            if self.shown.module[row] and calls[first]:
                name = self.shown.modules[self.shown.module[row]]
                parent = self._add(first, last, 1, parent, "module", name)
            name = self.strings[int(self.stacks.function[self.shown.python[row]])]
            scope[first : last + 1] = self._add(first, last, 1, parent, "user", name, row)

    def _add(
        self, first: int, last: int, room: int, parent: int, kind: str, name: str, stack: int = 0
    ) -> int:
        begin, end = int(self.ticks[first]) - room, int(self.ticks[last]) + room
        row = (begin, end, parent, self.string(name), SCOPE_KIND[kind], stack)
        self.rows.append(row)
        return len(self.rows)

    def _tables(self, scope: I64) -> tuple[U32, dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        """Returns the tables of scopes in the order of their begins, as a recording has them."""
        table = np.array(self.rows, np.int64).reshape(-1, 6)
        order = np.argsort(table[:, 0], kind="stable")
        number = np.zeros(len(table) + 1, np.int64)
        number[1 + order] = 1 + np.arange(len(table))
        begins = table[order]
        none = np.zeros(len(table))
        scopes = {
            "ticks": begins[:, 0],
            "parent": number[begins[:, 2]],
            "forward": none,
            "name": begins[:, 3],
            "thread": none,
            "kind": begins[:, 4],
            "flags": none,
        }
        ends = np.argsort(table[:, 1], kind="stable")
        scope_ends = {
            "ticks": table[ends, 1],
            "scope": number[1 + ends],
            "stack": table[ends, 5],
        }
        return number[scope].astype(np.uint32), scopes, scope_ends
