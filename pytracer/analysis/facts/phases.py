"""Phases and steps: what the program was doing when.

For an event, these rules are tried in order:

1. The innermost scope around the event that names a phase:
   - An autograd node or a call of the engine is `backward`.
   - A module's call is `forward`. Inside a node or a call of the engine it is `recompute`.
   - An op with grad mode on, inside a node that began without grad mode, is `recompute`.
   - A DataLoader's annotation is `data`.
   - An optimizer's step is `optimizer`, except for what its closure does.
2. Otherwise the phase of the main thread at that time, read from its *timeline*. This serves the
   loss outside the model, frees from another thread, and the engine's own threads between nodes.
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
   allocations (the next batch, say) are `other`, whatever the main thread does meanwhile.

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

from pytracer import meta
from pytracer.analysis.facts import scopes
from pytracer.analysis.facts.lifetimes import lifetimes
from pytracer.analysis.facts.scopes import (
    BACKWARD,
    MODULE,
    NEVER,
    NODE,
    OP,
    OPTIMIZER,
    STEP,
    USER,
    Tree,
)
from pytracer.recorded import Trace, once_per_trace
from pytracer.sanitized import within
from pytracer.schema import (
    ACTION,
    I64,
    PHASE,
    SCOPE_GRAD,
    SCOPE_RECOMPUTE,
    U8,
    U32,
    U64,
    Mask,
)

UNSAID = 255  # no scope names a phase: ask the timeline
MISSING = 255  # the allocation began before the trace, or has not ended

OTHER = PHASE["other"]
DATA = PHASE["data"]
FORWARD = PHASE["forward"]
RECOMPUTE = PHASE["recompute"]
BACKWARD_PHASE = PHASE["backward"]
OPTIMIZER_PHASE = PHASE["optimizer"]


@dataclass(frozen=True)
class Timeline:
    """What the main thread was doing: stretch i lasts from its tick to the next one's."""

    ticks: U64  # the first is 0: before anything
    phase: U8
    interval: I64  # which instance of the phase; an interrupted one keeps its number
    # Per interval: when a forward's survivors start to count as activations (its backward
    # begins). NEVER for other intervals.
    kept_from: U64
    step_ends: U64
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
    return _phase(trace, scope, timeline(trace).stretch_at(ticks))


def _phase(trace: Trace, scope: U32, stretch: NDArray[np.intp]) -> U8:
    of_scope = scope_phases(trace)[scope]
    return np.where(of_scope == UNSAID, timeline(trace).phase[stretch], of_scope)


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
    """Leaves an optimizer's closure (forward, loss, backward on the main thread) to rule 2."""
    passes = tree.nearest_context((tree.kind == NODE) | (tree.kind == BACKWARD))
    closures = (passes == 0) & (tree.thread == main_thread(trace))
    phase[(phase == OPTIMIZER_PHASE) & closures] = UNSAID


def _leave_engine_threads_to_the_timeline(trace: Trace, tree: Tree, phase: U8) -> None:
    """Finds forwards that are run again where no nodes were recorded (detail="category").

    On the engine's own thread such a forward looks like a module that the user calls. Only its
    time shows that a backward runs it.
    """
    modules = (tree.kind == MODULE) & (tree.thread != main_thread(trace)) & (phase == FORWARD)
    if not modules.any():
        return
    line = timeline(trace)
    numbers = np.flatnonzero(modules)
    during = line.phase[line.stretch_at(tree.begin[numbers])] == BACKWARD_PHASE
    again = np.zeros(len(phase), np.bool_)
    again[numbers[during]] = True
    phase[again[tree.module] & (phase == FORWARD)] = RECOMPUTE


@once_per_trace
def data_scopes(trace: Trace) -> Mask:
    """Per scope number: whether it is torch's annotation around fetching a batch."""
    named = scopes.scopes_named(trace, lambda text: text.startswith("enumerate(DataLoader)"))
    is_data: Mask = named & (scopes.tree(trace).kind == USER)
    return is_data


@once_per_trace
def main_thread(trace: Trace) -> int:
    """The thread that calls backward; without one, that steps; without one, that calls modules."""
    tree = scopes.tree(trace)
    for kind in (BACKWARD, OPTIMIZER, MODULE):
        calls = np.flatnonzero((tree.kind == kind) & (tree.node == 0))
        if len(calls):
            return int(tree.thread[calls[0]])
    return int(trace.events.thread[0]) if len(trace.events.thread) else 0


@once_per_trace
def training_threads(trace: Trace) -> int:
    """How many threads call backward or step an optimizer outside of any backward pass."""
    tree = scopes.tree(trace)
    passes = tree.nearest_context((tree.kind == NODE) | (tree.kind == BACKWARD))
    trains = (tree.kind == BACKWARD) | (tree.kind == OPTIMIZER)
    return len(np.unique(tree.thread[trains & (passes[tree.parent] == 0)]))


@dataclass
class _Writer:
    """Builds the timeline, mark by mark."""

    ticks: list[int]
    phase: list[int]
    interval: list[int]
    kept_from: list[int]

    def new(self, phase: int) -> tuple[int, int]:
        """A new interval: its phase and number."""
        self.kept_from.append(int(NEVER))
        return phase, len(self.kept_from) - 1

    def go(self, tick: int, interval: tuple[int, int]) -> None:
        """Begins a stretch of this interval at this tick."""
        self.ticks.append(tick)
        self.phase.append(interval[0])
        self.interval.append(interval[1])


@once_per_trace
def timeline(trace: Trace) -> Timeline:
    """The main thread's phases (rule 2) and the ends of the steps."""
    marks = _marks(trace)
    out = _Writer([], [], [], [])
    base = out.new(OTHER)  # the interval around forward and backward: other, or an optimizer
    out.go(0, base)
    forward: tuple[int, int] | None = None  # the open forward that lasts until backward begins
    for tick, kind, begins, lasts, kept_from in marks:
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
    return _from_the_trace_on(trace, out)


def _from_the_trace_on(trace: Trace, out: _Writer) -> Timeline:
    """The timeline without what came before the trace.

    A trace inside another one also has the outer one's scopes. Its first stretch is the one in
    which it began.
    """
    ticks = np.array(out.ticks, np.uint64)
    phase = np.array(out.phase, np.uint8)
    ends = _step_ends(trace, ticks[phase == FORWARD])
    began = trace.clock.ticks[0] if len(trace.clock.ticks) else np.uint64(0)
    first = max(int(np.searchsorted(ticks, began, side="right")) - 1, 0)
    intervals, interval = np.unique(out.interval[first:], return_inverse=True)
    return Timeline(
        np.append(np.uint64(0), ticks[first + 1 :]),
        phase[first:],
        interval.astype(np.int64),
        np.array(out.kept_from, np.uint64)[intervals],
        ends[ends >= began],
        int(began),
    )


# The tick, the scope's kind, and whether the scope begins. Then, for a forward: whether it lasts
# until a backward begins, and its `kept_from` if no backward begins.
_Mark = tuple[int, int, bool, bool, int]


def _marks(trace: Trace) -> list[_Mark]:
    """Where the main thread's outermost scopes begin and end, in order."""
    tree = scopes.tree(trace)
    passes = tree.nearest_context((tree.kind == NODE) | (tree.kind == BACKWARD))
    outermost = (tree.thread == main_thread(trace)) & (passes[tree.parent] == 0)
    outermost &= tree.module[tree.parent] == 0
    hard = np.flatnonzero(outermost & ((tree.kind == BACKWARD) | (tree.kind == OPTIMIZER)))
    modules = np.flatnonzero(outermost & (tree.kind == MODULE))
    lasts, kept_from = _followed_by_backward(trace, tree, modules, hard)
    data = np.flatnonzero(outermost & data_scopes(trace))
    never = np.full(len(hard) + len(data), NEVER)
    marks = _both_ends(tree, np.concatenate([hard, data]), never != NEVER, never)
    marks += _both_ends(tree, modules, lasts, kept_from)
    for scope in _first_ops_with_nodes(tree, outermost, hard):
        marks.append((int(tree.begin[scope]), MODULE, True, True, int(NEVER)))
    marks.sort(key=lambda mark: (mark[0], mark[2]))
    return marks


def _both_ends(tree: Tree, numbers: NDArray[np.intp], lasts: Mask, kept_from: U64) -> list[_Mark]:
    kinds, more = tree.kind[numbers].tolist(), (lasts.tolist(), kept_from.tolist())
    begins, ends = tree.begin[numbers].tolist(), tree.end[numbers].tolist()
    yes, no, never = [True] * len(begins), [False] * len(begins), int(NEVER)
    marks = list(zip(begins, kinds, yes, *more, strict=True))
    return marks + [m for m in zip(ends, kinds, no, *more, strict=True) if m[0] != never]


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
    """Whether anything in these calls of modules, none inside another, ran with grad mode on."""
    tree = scopes.tree(trace)
    tells = tells_of_grad_mode(trace)
    if tells is None:
        return np.ones(len(calls), np.bool_)  # an older trace does not tell
    with_grad = np.zeros(len(tree.kind), np.bool_)
    with_grad[_outermost_call(tree, calls)[tells & (tree.flags & SCOPE_GRAD != 0)]] = True
    return with_grad[calls]


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
    tells &= ~(_is_a_graph(trace) & (tree.module[tree.parent] != 0))
    tells[tree.module[tree.parent[tells]]] = False
    return tells


def _is_a_graph(trace: Trace) -> Mask:
    """Per scope: whether it is a call of a module that torch.fx made."""
    return scopes.scopes_named(trace, "GraphModule".__eq__)


def _outermost_call(tree: Tree, modules: NDArray[np.intp]) -> U32:
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


def _step_ends(trace: Trace, forwards: U64) -> U64:
    tree = scopes.tree(trace)
    marks = np.sort(tree.begin[tree.kind == STEP])
    if len(marks):
        return marks
    optimizers = np.flatnonzero((tree.kind == OPTIMIZER) & (tree.end != NEVER))
    optimizers = optimizers[np.argsort(tree.end[optimizers], kind="stable")]
    ends = tree.end[optimizers]
    forwards_until = np.searchsorted(forwards, ends)
    has_forward = np.append(False, forwards_until[1:] > forwards_until[:-1])[: len(ends)]
    return ends[_last_of_iterations(tree.name[optimizers].tolist(), has_forward.tolist())]


_MOST_OPTIMIZERS = 64  # a file with more is damaged anyway


def _last_of_iterations(optimizers: list[int], has_forward: list[bool]) -> list[int]:
    """Which optimizers' steps end an iteration as people count them: the two of a GAN are one.

    An iteration is over when, after another forward, an optimizer steps that already stepped in
    it. Often this is clear earlier: when the last optimizer was only ever followed by optimizers
    that already stepped in this iteration. csrc/core/iterations.h has the same rule, one step at
    a time.
    """
    ends: list[int] = []
    stepped: set[int] = set()  # in this iteration
    followers: dict[int, set[int]] = {}
    for i, (optimizer, forward) in enumerate(zip(optimizers, has_forward, strict=True)):
        if i > 0:
            last = optimizers[i - 1]
            is_over = last in followers and followers[last] <= stepped
            if forward and (is_over or optimizer in stepped):
                ends.append(i - 1)
                stepped.clear()
            if len(followed_by := followers.setdefault(last, set())) < _MOST_OPTIMIZERS:
                followed_by.add(optimizer)
        if len(stepped) < _MOST_OPTIMIZERS:
            stepped.add(optimizer)
    if optimizers:
        followed_by = followers.get(optimizers[-1], set())
        if not followed_by or followed_by & stepped:  # otherwise the iteration was cut short
            ends.append(len(optimizers) - 1)
    return ends


@dataclass(frozen=True)
class Moments:
    """When and in which scope each allocation was made and given back."""

    made_ticks: U64  # 0: before the trace
    made_scope: U32
    made_phase: U8  # MISSING: before the trace
    made_interval: I64  # -1: before the trace
    freed_ticks: U64  # NEVER: alive at the end
    freed_scope: U32
    freed_phase: U8  # MISSING: alive at the end
    freed_interval: I64  # -1: alive at the end


@once_per_trace
def moments(trace: Trace) -> Moments:
    """The program's side of each allocation: it ends where the program gave the block back."""
    lives = lifetimes(trace)
    made = _at(trace, lives.start, np.uint64(0))
    made[2][_made_beside(trace, lives.start, made[1])] = OTHER
    freed = _at(trace, lives.end, NEVER)
    if not scopes.has_operators(trace):
        for ticks, scope, phase, _ in (made, freed):
            phase[_between_modules_run_again(trace, ticks, scope)] = RECOMPUTE
    return Moments(*made, *freed)


def made_without_grad(trace: Trace, moments: Moments) -> Mask:
    """Which allocations a model made in a call that ran without grad mode throughout."""
    tree = scopes.tree(trace)
    calls = np.flatnonzero((tree.kind == MODULE) & (tree.module[tree.parent] == 0))
    without = np.zeros(len(tree.kind), np.bool_)
    without[calls] = ~ran_with_grad(trace, calls) & ~_is_a_graph(trace)[calls]
    around = _outermost_call(tree, calls)[moments.made_scope]
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
    inner |= passes & (tree.thread != main_thread(trace))
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


def _made_beside(trace: Trace, position: I64, scope: U32) -> Mask:
    """Which allocations a thread made that has no part in training, if scopes show its role."""
    tree = scopes.tree(trace)
    thread = trace.events.thread[position]
    is_beside: Mask = (thread != main_thread(trace)) & (position >= 0)
    # Without nodes the engine's threads look the same; only their names distinguish them.
    if meta.of(trace).names_threads:
        is_beside &= ~threads_named(trace, "pt_autograd")[thread]
    elif not (tree.kind == NODE).any():
        return np.zeros(len(position), np.bool_)
    if is_beside.any():
        trains = np.isin(tree.kind, (MODULE, NODE, BACKWARD, OPTIMIZER))
        is_beside &= ~np.isin(thread, tree.thread[trains])
        is_beside &= scope_phases(trace)[scope] == UNSAID
    return is_beside


def threads_named(trace: Trace, prefix: str) -> Mask:
    """Per thread number: whether torch gave it a name that begins like this.

    Torch names the engine's threads, but not those of reentrant passes.
    """
    named = scopes.names_where(trace, lambda text: text.startswith(prefix))
    result = np.zeros(np.iinfo(np.uint16).max + 1, np.bool_)
    result[: len(trace.threads.name)] = named[within(trace.threads.name, len(named))]
    return result


def _at(trace: Trace, position: I64, missing_ticks: np.uint64) -> tuple[U64, U32, U8, I64]:
    """Ticks, scope, phase and interval of these event rows; row -1 gets the missing values."""
    events, line = trace.events, timeline(trace)
    missing = position < 0
    ticks = events.ticks[position]
    scope = events.scope[position]
    scope = within(scope, len(scopes.tree(trace).kind))
    stretch = line.stretch_at(ticks)
    phase, interval = _phase(trace, scope, stretch), line.interval[stretch]
    ticks[missing] = missing_ticks
    scope[missing] = 0
    phase[missing] = MISSING
    interval[missing] = -1
    return ticks, scope, phase, interval
