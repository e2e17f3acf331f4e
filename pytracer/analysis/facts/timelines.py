"""Timelines: what each line of work was doing when (rule 2 of `phases.py`), and where steps end."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.facts import lines, scopes
from pytracer.analysis.facts.scopes import (
    BACKWARD,
    MODULE,
    NEVER,
    OP,
    OPTIMIZER,
    STEP,
    USER,
    Tree,
)
from pytracer.data import meta
from pytracer.data._native import core
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import ACTION, I32, I64, PHASE, SCOPE_GRAD, U8, U32, U64, Mask

OTHER = PHASE["other"]
DATA = PHASE["data"]
FORWARD = PHASE["forward"]
RECOMPUTE = PHASE["recompute"]
BACKWARD_PHASE = PHASE["backward"]
OPTIMIZER_PHASE = PHASE["optimizer"]


@dataclass(frozen=True)
class Timeline:
    """What a line was doing: stretch i lasts from its tick to the next one's."""

    ticks: U64  # the first is 0: before anything
    phase: U8
    interval: I32  # which instance of the phase; an interrupted one keeps its number
    # Per interval of all lines: when a forward's survivors start to count as activations (its
    # backward begins). NEVER for other intervals.
    kept_from: U64
    step_ends: U64  # of all lines
    began: int = 0  # when the trace began

    @property
    def begins(self) -> U64:
        """When each stretch begins. The first one, before any event, begins with the trace."""
        return np.maximum(self.ticks, np.uint64(self.began))

    @property
    def of_training(self) -> Mask:
        """Per stretch: False for an evaluation's forward, if other forwards in the trace train."""
        forward = self.phase == FORWARD
        trains = forward & (self.kept_from[self.interval] != NEVER)
        is_training: Mask = ~forward | trains | ~trains.any()
        return is_training

    def stretch_at(self, ticks: U64) -> NDArray[np.intp]:
        """The stretch each tick lies in."""
        stretch: NDArray[np.intp] = np.searchsorted(self.ticks, ticks, side="right") - 1
        return stretch

    def step_at(self, ticks: U64) -> NDArray[np.intp]:
        """The step each tick lies in, from 0; after the last end, the number of steps."""
        # An event with the same tick as the end of a step still belongs to that step.
        step: NDArray[np.intp] = np.searchsorted(self.step_ends, ticks, side="left")
        return step


@once_per_trace
def data_scopes(trace: Trace) -> Mask:
    """Per scope number: whether it is torch's annotation around fetching a batch."""
    named = scopes.scopes_named(trace, lambda text: text.startswith("enumerate(DataLoader)"))
    is_data: Mask = named & (scopes.tree(trace).kind == USER)
    return is_data


def bounds(trace: Trace) -> I64:
    """The first event of each step, and of what comes after the last; then the number of events."""
    ticks = trace.events.ticks
    ends = np.searchsorted(ticks, timeline(trace).step_ends, side="right")
    return np.concatenate([[0], ends, [len(ticks)]]).astype(np.int64)


@dataclass
class _Writer:
    """Builds the timeline, mark by mark. There may be millions, so these are no lists."""

    ticks: "array[int]" = field(default_factory=lambda: array("Q"))
    phase: "array[int]" = field(default_factory=lambda: array("B"))
    interval: "array[int]" = field(default_factory=lambda: array("i"))
    kept_from: "array[int]" = field(default_factory=lambda: array("Q"))

    def new(self, phase: int) -> tuple[int, int]:
        """A new interval: its phase and number."""
        self.kept_from.append(int(NEVER))
        return phase, len(self.kept_from) - 1

    def go(self, tick: int, interval: tuple[int, int]) -> None:
        """Begins a stretch of this interval at this tick."""
        self.ticks.append(tick)
        self.phase.append(interval[0])
        self.interval.append(interval[1])


def timeline(trace: Trace) -> Timeline:
    """What the main thread's line was doing."""
    return timelines(trace)[0]


@once_per_trace
def timelines(trace: Trace) -> tuple[Timeline, ...]:
    """A timeline per line. Their intervals have numbers of their own."""
    found = [_of_line(trace, number) for number in range(lines.lines(trace).count)]
    # Two more for what threads beside the lines make (phases.py).
    kept_from = np.concatenate([*(line.kept_from for line in found), [NEVER, NEVER]])
    ends = np.unique(np.concatenate([line.step_ends for line in found]))
    begins = np.cumsum([0, *(len(line.kept_from) for line in found)]).astype(np.int32)
    return tuple(
        replace(line, interval=line.interval + first, kept_from=kept_from, step_ends=ends)
        for line, first in zip(found, begins[:-1], strict=True)
    )


def _of_line(trace: Trace, number: int) -> Timeline:
    out = _Writer()
    base = out.new(OTHER)  # the interval around forward and backward: other, or an optimizer
    out.go(0, base)
    forward: tuple[int, int] | None = None  # the open forward that lasts until backward begins
    for tick, kind, begins, lasts, kept_from in _marks(trace, number):
        if kind in (OPTIMIZER, BACKWARD):
            if kind == BACKWARD and begins and forward is not None:
                out.kept_from[forward[1]] = min(out.kept_from[forward[1]], tick)
            forward = None
            if kind == OPTIMIZER:
                base = out.new(OPTIMIZER_PHASE if begins else OTHER)
                out.go(tick, base)
            elif begins:
                out.go(tick, out.new(BACKWARD_PHASE))
            else:
                base = base if base[0] == OPTIMIZER_PHASE else out.new(OTHER)
                out.go(tick, base)
        elif kind == USER:
            out.go(tick, out.new(DATA) if begins else forward or base)
        elif begins and forward is None:
            started = out.new(FORWARD)
            out.kept_from[started[1]] = kept_from
            out.go(tick, started)
            forward = started if lasts else None
        elif not begins and forward is None:
            base = base if base[0] == OPTIMIZER_PHASE else out.new(OTHER)
            out.go(tick, base)
    return _from_the_trace_on(trace, number, out)


def _from_the_trace_on(trace: Trace, number: int, out: _Writer) -> Timeline:
    """The timeline without what came before the trace.

    A trace inside another one also has the outer one's scopes. Its first stretch is the one in
    which it began.
    """
    ticks, phase = np.array(out.ticks), np.array(out.phase)
    ends = _step_ends(trace, number, ticks[phase == FORWARD])
    began = trace.clock.ticks[0] if len(trace.clock.ticks) else np.uint64(0)
    first = max(int(np.searchsorted(ticks, began, side="right")) - 1, 0)
    intervals, interval = np.unique(out.interval[first:], return_inverse=True)
    return Timeline(
        np.append(np.uint64(0), ticks[first + 1 :]),
        phase[first:],
        interval.astype(np.int32),
        np.array(out.kept_from)[intervals],
        ends[ends >= began],
        int(began),
    )


# The tick, the scope's kind, and whether the scope begins. Then, for a forward: whether it lasts
# until a backward begins, and its `kept_from` if no backward begins.
_Mark = tuple[int, int, bool, bool, int]
_Columns = tuple[U64, U8, Mask, Mask, U64]  # of marks
_PIECE = 1 << 16


def _marks(trace: Trace, number: int) -> Iterator[_Mark]:
    """Where the outermost scopes of a line begin and end, in order."""
    tree = scopes.tree(trace)
    outermost = _outermost(trace) & (lines.lines(trace).of_thread[tree.thread] == number)
    hard = np.flatnonzero(outermost & ((tree.kind == BACKWARD) | (tree.kind == OPTIMIZER)))
    modules = np.flatnonzero(outermost & (tree.kind == MODULE))
    lasts, kept_from = _followed_by_backward(trace, tree, modules, hard)
    others = np.concatenate([hard, np.flatnonzero(outermost & data_scopes(trace))])
    no, never = np.zeros(len(others), np.bool_), np.full(len(others), NEVER)
    ops = _first_ops_with_nodes(tree, outermost, hard)
    yes = np.ones(len(ops), np.bool_)
    parts: list[_Columns] = [
        *_both_ends(tree, others, no, never),
        *_both_ends(tree, modules, lasts, kept_from),
        (tree.begin[ops], np.full(len(ops), MODULE, np.uint8), yes, yes, np.full(len(ops), NEVER)),
    ]
    columns = [np.concatenate(each) for each in zip(*parts, strict=True)]
    order = np.lexsort((columns[2], columns[0]))
    for first in range(0, len(order), _PIECE):
        rows = order[first : first + _PIECE]
        yield from zip(*(column[rows].tolist() for column in columns), strict=True)


def _outermost(trace: Trace) -> Mask:
    """Per scope number: whether it is outside of modules and passes, and its thread marks phases."""
    tree = scopes.tree(trace)
    marks = lines.lines(trace).marks[tree.thread]
    outermost: Mask = marks & (lines.inside_passes(tree)[tree.parent] == 0)
    outermost &= tree.module[tree.parent] == 0
    return outermost


def landmarks(trace: Trace) -> Mask:
    """Per scope number: whether the timeline needs it. A trace with only these has the same one."""
    tree, outermost = scopes.tree(trace), _outermost(trace)
    turns = outermost & ((tree.kind == BACKWARD) | (tree.kind == OPTIMIZER))
    calls = outermost & (tree.kind == MODULE)
    result: Mask = turns | calls | (outermost & data_scopes(trace)) | (tree.kind == STEP)
    result |= tree.kind == OPTIMIZER
    result[_first_ops_with_nodes(tree, outermost, np.flatnonzero(turns))] = True
    tells = tells_of_grad_mode(trace)
    if tells is not None:  # one scope with grad mode on is enough for each call
        with_grad = np.flatnonzero(tells & (tree.flags & SCOPE_GRAD != 0))
        call = outermost_call(tree, np.flatnonzero(calls))[with_grad]
        result[with_grad[np.unique(call, return_index=True)[1]]] = True
    return result


def _both_ends(
    tree: Tree, numbers: NDArray[np.intp], lasts: Mask, kept_from: U64
) -> Iterator[_Columns]:
    ended = tree.end[numbers] != NEVER
    for begins, which in ((True, np.ones(len(numbers), np.bool_)), (False, ended)):
        ticks = (tree.begin if begins else tree.end)[numbers[which]]
        begin = np.full(len(ticks), begins)
        yield ticks, tree.kind[numbers[which]], begin, lasts[which], kept_from[which]


def _followed_by_backward(
    trace: Trace, tree: Tree, modules: NDArray[np.intp], hard: NDArray[np.intp]
) -> tuple[Mask, U64]:
    """Whether each outermost module call's forward lasts until a backward, and its `kept_from`.

    A forward that ran without grad mode throughout does not last. If the trace ends before a
    backward, the forward lasts if a training step was cut short: by an allocation that failed, or
    after earlier backwards. Blocks alive at that moment are then kept, as the backward would have
    found them. Otherwise the kept blocks are those alive when the call ends.
    """
    turns = np.concatenate([tree.begin[hard], tree.end[hard]])
    is_backward = np.concatenate([tree.kind[hard] == BACKWARD, np.zeros(len(hard), np.bool_)])
    order = np.argsort(turns, kind="stable")[: np.count_nonzero(turns != NEVER)]
    turns, is_backward = turns[order], is_backward[order]
    following = np.searchsorted(turns, tree.begin[modules], side="left")
    lasts = np.append(is_backward, False)[following]
    alone = ~lasts
    kept_from = np.where(alone, tree.end[modules], NEVER)
    cut_short = alone & (kept_from == NEVER)
    if is_backward.any() or (trace.events.action == ACTION["oom"]).any():
        cut_short |= following == len(turns)
        lasts |= cut_short
    kept_from[cut_short] = _ends_of_forward(trace, tree.begin[modules[cut_short]])
    with_grad = ran_with_grad(trace, modules)
    return lasts & with_grad, np.where(with_grad, kept_from, NEVER)


def _ends_of_forward(trace: Trace, begins: U64) -> U64:
    """When forwards without a backward were cut short: a failed allocation, or the trace's end."""
    events = trace.events
    last = events.ticks[-1] if len(events.ticks) else NEVER
    failures = np.append(events.ticks[events.action == ACTION["oom"]], last)
    next_one = np.minimum(np.searchsorted(failures, begins), len(failures) - 1)
    ends: U64 = failures[next_one]
    return ends


def ran_with_grad(trace: Trace, calls: NDArray[np.intp]) -> Mask:
    """Whether anything in these calls of modules, none inside another, ran with grad mode on.

    A checkpoint that is reentrant turns grad mode off in its function, which itself has a node.
    """
    tree = scopes.tree(trace)
    tells = tells_of_grad_mode(trace)
    if tells is None:
        return np.ones(len(calls), np.bool_)  # an older trace does not tell
    with_grad = np.zeros(len(tree.kind), np.bool_)
    with_grad[outermost_call(tree, calls)[tells & (tree.flags & SCOPE_GRAD != 0)]] = True
    function = tree.op[tree.parent[calls]]
    in_function: Mask = tree.flags[function] & SCOPE_GRAD != 0
    return with_grad[calls] | in_function


def tells_of_grad_mode(trace: Trace) -> Mask | None:
    """Scopes whose flags tell whether grad mode was on; None if no scope tells.

    These are the operators, except those inside an operator of ATen: autocast casts a weight with
    grad mode on even under no_grad(), so that the copy may be used again. If no operators were
    recorded, these are the innermost modules.
    """
    tree = scopes.tree(trace)
    if scopes.has_operators(trace):
        of_aten = scopes.scopes_named(trace, lambda text: text.startswith("aten::"))
        inside = (tree.kind[tree.parent] == OP) & of_aten[tree.parent]
        operators: Mask = (tree.kind == OP) & ~inside
        return operators
    if not meta.of(trace).modules_tell_modes:
        return None
    tells: Mask = tree.kind == MODULE
    # A compiled model runs without grad mode, inside a function that has a node.
    tells &= ~(is_a_graph(trace) & (tree.module[tree.parent] != 0))
    tells[tree.module[tree.parent[tells]]] = False
    return tells


def is_a_graph(trace: Trace) -> Mask:
    """Per scope: whether it is a call of a module that torch.fx made."""
    return scopes.scopes_named(trace, "GraphModule".__eq__)


def outermost_call(tree: Tree, modules: NDArray[np.intp]) -> U32:
    """Per scope, the one of these modules that is at or around it."""
    outermost = np.zeros(len(tree.kind), np.bool_)
    outermost[modules] = True
    return tree.nearest_context(outermost)


def _first_ops_with_nodes(tree: Tree, outermost: Mask, hard: NDArray[np.intp]) -> NDArray[np.intp]:
    """Between two borders of backwards and optimizers, the first op that begins a forward.

    It lies outside of modules and made nodes that a backward ran.
    """
    ops = np.flatnonzero(tree.made_nodes & outermost & (tree.module == 0))
    turns = np.sort(np.concatenate([tree.begin[hard], tree.end[hard]]))
    _, first = np.unique(np.searchsorted(turns, tree.begin[ops]), return_index=True)
    return ops[first]


def _step_ends(trace: Trace, number: int, forwards: U64) -> U64:
    """The ends of steps that the program marked, or else of the line's optimizers."""
    tree = scopes.tree(trace)
    marks = np.sort(tree.begin[tree.kind == STEP])
    if len(marks):
        return marks
    line = lines.lines(trace).of_thread[tree.thread]
    steps = (tree.kind == OPTIMIZER) & (tree.end != NEVER)
    optimizers = np.flatnonzero(steps & (np.maximum(line, 0) == number))
    optimizers = optimizers[np.argsort(tree.end[optimizers], kind="stable")]
    ends = tree.end[optimizers]
    forwards_until = np.searchsorted(forwards, ends)
    has_forward = np.append(False, forwards_until[1:] > forwards_until[:-1])[: len(ends)]
    return ends[core.step_ends(tree.name[optimizers].astype(np.uint64), has_forward)]
