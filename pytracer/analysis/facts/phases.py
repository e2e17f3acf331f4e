"""Phases and steps: what the program was doing when.

For an event, these rules are tried in order:

1. The innermost scope around the event that names a phase:
   - An autograd node or a call of the engine is `backward`.
   - A module's call is `forward`. Inside a node or a call of the engine it is `recompute`.
   - An op with grad mode on, inside a node that began without grad mode, is `recompute`.
   - A DataLoader's annotation is `data`.
   - An optimizer's step is `optimizer`, except for what its closure does.
2. Otherwise the phase of its line of work at that time (`lines.py`), read from its *timeline*. This
   serves the loss outside the model, and the engine's own threads between nodes. A free counts on
   the line that made the block, whichever thread frees it.
   - `forward` begins when an outermost module is entered, or with the first op outside of modules
     that made autograd nodes (a model need not be a module). If a backward follows with no
     optimizer in between, the forward lasts until that backward, so that it includes the loss. If
     no backward follows (evaluation, generation, anything without grad mode), it ends when the
     module is left. If no ops were recorded, the modules tell whether grad mode was on as they
     were entered. A trace that ends within a training step leaves the step in forward. So does an
     allocation that fails in one.
   - `backward`, `optimizer` and `data` last as long as their scope.
   - Everything else is `other`: between a step and the next forward, clipping gradients, logging.
   A thread trains nothing if it runs no module, node, backward or optimizer of its own. Its
   allocations (the next batch, say) are `other`, whatever other threads do meanwhile.

A *stretch* is a piece of the timeline. An *interval* is one instance of a phase. An interruption
(data fetched during forward, a closure called by an optimizer) does not end the interval: it
continues in a later stretch.

A step ends where the user calls `step()`, or without such calls, at the end of an optimizer's step.
Several optimizers count once if no forward begins between them (or only in the later one's closure,
as in Lightning), or if they take turns: the two of a GAN are one iteration.

An example: one step of a training loop, and the blocks it makes.

    program        loader    model(x)      loss   backward()     clip   step()         log
    scopes         [data ]   [module   ]          [engine    ]          [optimizer ]

    stretch   0    1      2  3                    4              5      6              7
    phase   other  data  other  forward           backward       other  optimizer      other
    interval  0    1      0  2                    3              4      5              6

    x              o---------------------------------------------------------------------> next step
    hidden                     o---------------------x
    loss                                   o---------------------------------------------> next step
    gradient                                          o--------------------------------x  zero_grad
    momentum                                                              o--------------> kept
    norm                                                           o-x

    block      made in                phase, because of               freed in
    x          stretch 1              data, its scope (rule 1)        next step, stretch 2 of it
    hidden     stretch 3              forward, its scope (rule 1)     stretch 4, by a node
    loss       stretch 3              forward, the timeline (rule 2)  next step, stretch 3 of it
    gradient   stretch 4              backward, its scope (rule 1)    stretch 7
    momentum   stretch 6              optimizer, its scope (rule 1)   never
    norm       stretch 5              other, the timeline (rule 2)    stretch 5

`kept_from` of interval 2 is the time at which stretch 4 begins: `hidden` and `loss` are alive then,
and so count as activations. Stretch 2 is interval 0 again, which the loader had interrupted.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.facts import lines, scopes
from pytracer.analysis.facts.lifetimes import Lifetimes, lifetimes
from pytracer.analysis.facts.lines import NO_LINE
from pytracer.analysis.facts.scopes import BACKWARD, MODULE, NEVER, NODE, OP, OPTIMIZER, Tree
from pytracer.analysis.facts.timelines import (
    BACKWARD_PHASE,
    DATA,
    FORWARD,
    OPTIMIZER_PHASE,
    OTHER,
    RECOMPUTE,
    data_scopes,
    is_a_graph,
    outermost_call,
    ran_with_grad,
    timeline,
    timelines,
)
from pytracer.data import meta
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.sanitized import within
from pytracer.data.schema import I32, SCOPE_RECOMPUTE, U8, U32, U64, Mask

UNSAID = 255  # no scope names a phase: ask the timeline
MISSING = 255  # the allocation began before the trace, or has not ended


def trains_on(trace: Trace) -> bool:
    """Whether a training step began after the last step's end (or at all, if no step ended).

    An evaluation does not count: no backward follows, and its forward ends.
    """
    line = timeline(trace)
    last = line.step_ends[-1] if len(line.step_ends) else np.uint64(0)
    after = line.ticks > last
    if len(line.step_ends) == 0:
        return bool((after & np.isin(line.phase, (FORWARD, BACKWARD_PHASE))).any())
    unfinished = bool(after[-1] and line.phase[-1] == FORWARD and line.of_training[-1])
    return unfinished or bool((after & (line.phase == BACKWARD_PHASE)).any())


def of_events(trace: Trace, ticks: U64, scope: U32) -> U8:
    """The phases of events at these ticks inside these scopes."""
    of_thread = lines.lines(trace).of_thread[scopes.tree(trace).thread[scope]]
    phase, _ = _on_lines(trace, np.where(scope == 0, 0, np.maximum(of_thread, 0)), ticks)
    return _phase(trace, scope, phase)


def _phase(trace: Trace, scope: U32, of_line: U8) -> U8:
    of_scope = scope_phases(trace)[scope]
    return np.where(of_scope == UNSAID, of_line, of_scope)


def _on_lines(trace: Trace, line: NDArray[np.int16], ticks: U64) -> tuple[U8, I32]:
    """The phase and interval of each of these lines at its tick."""
    phase, interval = np.zeros(len(ticks), np.uint8), np.zeros(len(ticks), np.int32)
    every = timelines(trace)
    for number, one in enumerate(every):
        here = slice(None) if len(every) == 1 else line == number
        stretch = one.stretch_at(ticks[here])
        phase[here], interval[here] = one.phase[stretch], one.interval[stretch]
    return phase, interval


@once_per_trace
def scope_phases(trace: Trace) -> U8:
    """Per scope number: the phase of events inside the scope, or UNSAID (rule 1)."""
    tree = scopes.tree(trace)
    passes = (tree.kind == NODE) | (tree.kind == BACKWARD)
    modules = tree.kind == MODULE
    inside_pass = tree.nearest_context(passes)[tree.parent] != 0
    own = np.full(len(tree.kind), UNSAID, np.uint8)
    own[passes] = BACKWARD_PHASE
    own[modules] = np.where(inside_pass[modules], RECOMPUTE, FORWARD)
    own[tree.kind == OPTIMIZER] = OPTIMIZER_PHASE
    own[data_scopes(trace)] = DATA
    says = own != UNSAID
    phase = own[tree.nearest_context(says)]
    _leave_closures_to_the_timeline(trace, tree, phase)
    _leave_engine_threads_to_the_timeline(trace, tree, phase)
    again = (tree.flags & SCOPE_RECOMPUTE != 0) & (tree.kind == OP)
    if again.any():
        source = scopes.nearest(tree.parent, says | again)
        phase[again[source]] = RECOMPUTE
    return phase


def _leave_closures_to_the_timeline(trace: Trace, tree: Tree, phase: U8) -> None:
    """Leaves an optimizer's closure (forward, loss, backward of its thread) to rule 2."""
    closures = (lines.inside_passes(tree) == 0) & lines.lines(trace).marks[tree.thread]
    phase[(phase == OPTIMIZER_PHASE) & closures] = UNSAID


def _leave_engine_threads_to_the_timeline(trace: Trace, tree: Tree, phase: U8) -> None:
    """Finds forwards that are run again where no nodes were recorded (detail="category").

    On the engine's own thread such a forward looks like a module that the user calls. Only its
    time shows that a backward runs it.
    """
    marks = lines.lines(trace).marks[tree.thread]
    modules = (tree.kind == MODULE) & ~marks & (phase == FORWARD)
    if not modules.any():
        return
    line = timeline(trace)
    numbers = np.flatnonzero(modules)
    during = line.phase[line.stretch_at(tree.begin[numbers])] == BACKWARD_PHASE
    again = np.zeros(len(phase), np.bool_)
    again[numbers[during]] = True
    phase[again[tree.module] & (phase == FORWARD)] = RECOMPUTE


def intervals_at(trace: Trace, position: NDArray[np.integer]) -> I32:
    """The interval of each of these events' own line of work, at its tick."""
    line = np.maximum(_line_of(trace, position.astype(np.int32)), 0)
    _, interval = _on_lines(trace, line, trace.events.ticks[position])
    return interval


@dataclass(frozen=True)
class Moments:
    """When and in which scope each allocation was made and given back."""

    made_scope: U32
    made_phase: U8  # MISSING: before the trace
    made_interval: I32  # -1: before the trace
    freed_scope: U32
    freed_phase: U8  # MISSING: alive at the end
    freed_interval: I32  # -1: alive at the end
    ticks: U64  # of every event
    lives: Lifetimes

    @property
    def made_ticks(self) -> U64:
        """When each allocation was made; 0: before the trace."""
        return _ticks_at(self.ticks, self.lives.start, np.uint64(0))

    @property
    def freed_ticks(self) -> U64:
        """When each allocation was given back; NEVER: alive at the end."""
        return _ticks_at(self.ticks, self.lives.end, NEVER)


@once_per_trace
def moments(trace: Trace) -> Moments:
    """The program's side of each allocation: it ends where the program gave the block back."""
    lives = lifetimes(trace)
    line = _line_of(trace, lives.start)
    made = _at(trace, lives.start, np.uint64(0), line)
    freed = _at(trace, lives.end, NEVER, line)
    beside = line == NO_LINE
    made[2][beside] = OTHER
    made[3][beside], freed[3][beside] = _intervals_beside(trace, lives, beside)
    if not scopes.has_operators(trace):
        for ticks, scope, phase, _ in (made, freed):
            phase[_between_modules_run_again(trace, ticks, scope)] = RECOMPUTE
    return Moments(*made[1:], *freed[1:], trace.events.ticks, lives)


def made_without_grad(trace: Trace, moments: Moments) -> Mask:
    """Which allocations a model made in a call that ran without grad mode throughout."""
    tree = scopes.tree(trace)
    calls = np.flatnonzero((tree.kind == MODULE) & (tree.module[tree.parent] == 0))
    without = np.zeros(len(tree.kind), np.bool_)
    without[calls] = ~ran_with_grad(trace, calls) & ~is_a_graph(trace)[calls]
    around = outermost_call(tree, calls)[moments.made_scope]
    made: Mask = without[around] & (moments.made_phase == FORWARD)
    return made


def _between_modules_run_again(trace: Trace, ticks: U64, scope: U32) -> Mask:
    """Which moments lie between two modules that a backward pass runs again in forward order.

    Without operators, only this distinguishes the sums in between (a residual's) from the pass's
    own work. A pass visits modules in reverse order, so two that follow each other in forward order
    belong to one forward that is run again. The time between such a module and a pass within the
    pass also belongs to that forward (reentrant checkpoints).
    """
    tree, phase = scopes.tree(trace), scope_phases(trace)
    modules = (tree.kind == MODULE) & (tree.name != 0)
    again = modules & (phase == RECOMPUTE)
    again &= ~again[tree.module[tree.parent]]
    passes = tree.kind == BACKWARD
    inner = passes & (tree.nearest_context(passes)[tree.parent] != 0)
    inner |= passes & ~lines.lines(trace).marks[tree.thread]
    calls = np.flatnonzero(again | inner)
    first, second = calls[:-1], calls[1:]
    pairs = _following(tree, np.flatnonzero(modules & (phase == FORWARD)))
    pairs = pairs - {(b, a) for a, b in pairs}
    names = zip(tree.name[first].tolist(), tree.name[second].tolist(), strict=True)
    within = np.array([pair in pairs for pair in names], np.bool_)
    within |= again[first] & inner[second]
    within &= tree.thread[first] == tree.thread[second]
    number = np.searchsorted(np.sort(tree.begin[passes]), tree.begin[calls])
    within &= number[:-1] == number[1:]
    order = np.argsort(tree.end[first[within]])
    begin, end = tree.end[first[within]][order], tree.begin[second[within]][order]
    gap = np.searchsorted(begin, ticks, side="right")
    inside: Mask = (
        (gap > 0) & (ticks < np.append(np.uint64(0), end)[gap]) & (tree.module[scope] == 0)
    )
    return inside


def _following(tree: Tree, calls: NDArray[np.intp]) -> set[tuple[int, int]]:
    """Pairs of names of modules that one call runs one after the other."""
    order = calls[np.argsort(tree.module[tree.parent[calls]], kind="stable")]
    around = tree.module[tree.parent[order]]
    beside = around[1:] == around[:-1]
    names = tree.name[order]
    return set(zip(names[:-1][beside].tolist(), names[1:][beside].tolist(), strict=True))


def _line_of(trace: Trace, position: I32) -> NDArray[np.int16]:
    """The line of each of these events. NO_LINE: of a thread that has no part in training.

    The engine's threads work for the line that made the graph.
    """
    tree, threads = scopes.tree(trace), lines.lines(trace)
    line = threads.of_thread[trace.events.thread[position]]
    line[position < 0] = 0
    open_ = np.flatnonzero(line == NO_LINE)
    if len(open_) == 0:
        return line
    scope = within(trace.events.scope[position[open_]], len(tree.kind))
    maker = tree.forward[tree.node[scope]]
    by_node = np.where(maker != 0, threads.of_thread[tree.thread[maker]], NO_LINE)
    thread = trace.events.thread[position[open_]]
    # Without nodes the engine's threads look the same; only their names distinguish them.
    is_beside: Mask = ~lines.threads_named(trace, "pt_autograd")[thread]
    if not meta.of(trace).names_threads and not (tree.kind == NODE).any():
        is_beside[:] = False
    trains = np.isin(tree.kind, (MODULE, NODE, BACKWARD, OPTIMIZER))
    is_beside &= ~np.isin(thread, tree.thread[trains])
    is_beside &= scope_phases(trace)[scope] == UNSAID
    line[open_] = np.where(is_beside, NO_LINE, np.maximum(by_node, 0))
    return line


def _intervals_beside(trace: Trace, lives: Lifetimes, beside: Mask) -> tuple[I32, I32]:
    """The intervals of blocks that no line made: what another thread frees was handed to it.

    Such a thread has no phases, and how it runs beside those that have is chance.
    """
    start, end = lives.start[beside], lives.end[beside]
    own = np.full(len(start), len(timeline(trace).kept_from) - 2, np.int32)
    thread = trace.events.thread
    freed = np.where(thread[start] == thread[end], own, own + 1)
    return own, np.where(end < 0, -1, freed).astype(np.int32)


def _at(
    trace: Trace, position: I32, missing_ticks: np.uint64, line: NDArray[np.int16]
) -> tuple[U64, U32, U8, I32]:
    """Ticks, scope, phase and interval of these event rows, on these lines.

    Row -1 gets the missing values.
    """
    missing = position < 0
    ticks = _ticks_at(trace.events.ticks, position, missing_ticks)
    scope = within(trace.events.scope[position], len(scopes.tree(trace).kind))
    on_line, interval = _on_lines(trace, np.maximum(line, 0), ticks)
    phase = _phase(trace, scope, on_line)
    scope[missing] = 0
    phase[missing] = MISSING
    interval[missing] = -1
    return ticks, scope, phase, interval


def _ticks_at(ticks: U64, position: I32, missing: np.uint64) -> U64:
    result = ticks[position]
    result[position < 0] = missing
    return result
