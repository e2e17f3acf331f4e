"""Phases and steps: what the program was doing when.

The rules, in the order in which they are tried for an event:

1. The innermost scope around it that says something: an autograd node or a call of the engine is
   `backward`; a module's call is `forward`, and inside a node or a call of the engine it is
   `recompute`, as is an op that runs with grad mode on inside a node that began without; a
   DataLoader's annotation is `data`. An optimizer's step is `optimizer`, except for what a closure
   does in it.
2. Otherwise (the loss outside the model, a free from another thread, the engine's own threads
   between nodes) the phase of the main thread at that time, its *timeline*:
   - `forward` begins when an outermost module is entered, or with the first op outside of modules
     that made autograd nodes (a model need not be a module). When a backward follows, with no
     optimizer in between, it lasts until then: the loss belongs to it. When none follows
     (evaluation, generation, anything without grad mode) it ends when the module is left. Where
     no ops were recorded, the modules say whether grad mode was on as they were entered.
     A trace that ends within a training step, or an allocation that fails in it, leaves it forward.
   - `backward`, `optimizer` and `data` last as long as their scope.
   - everything else is `other`: between a step and the next forward, clipping gradients, logging.
   A thread that runs no module, no node, no backward and no optimizer of its own trains nothing:
   what it makes (the next batch, say) is `other`, whatever the main thread does meanwhile.

An *interval* is one instance of a phase on the timeline. What interrupts it (data fetched during
forward, a closure called by an optimizer) does not end it.

A step ends where the user says `step()`; if that is never said, at the end of an optimizer's step.
Several optimizers count once, if no forward begins between them (or in the later one's closure, as
Lightning has it), or if they take turns: a GAN's two are one iteration.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer import meta
from pytracer.analysis.facts import scopes
from pytracer.analysis.facts.lifetimes import lifetimes
from pytracer.analysis.facts.sanitized import within
from pytracer.analysis.facts.scopes import (
    BACKWARD,
    MODULE,
    NEVER,
    NODE,
    OP,
    OPTIMIZER,
    STEP,
    USER,
    Mask,
    Tree,
)
from pytracer.recorded import Trace, once_per_trace
from pytracer.schema import (
    ACTION,
    I64,
    PHASE,
    SCOPE_GRAD,
    SCOPE_RECOMPUTE,
    U8,
    U32,
    U64,
)

UNSAID = 255  # no scope says it: ask the timeline
MISSING = 255  # of an allocation: it began before the trace, or has not ended

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
    interval: I64  # which instance of the phase; an interrupted one goes on under its number
    # Per interval: for a forward whose activations something is to be shown about, the time at
    # which what is still alive counts as kept; NEVER for all others.
    kept_from: U64
    step_ends: U64
    began: int = 0  # when the trace did

    @property
    def begins(self) -> U64:
        """When each stretch begins; the first one, which is before anything, with the trace."""
        return np.maximum(self.ticks, np.uint64(self.began))

    @property
    def of_training(self) -> Mask:
        """Per stretch: false of an evaluation's forward, where there are others in the trace."""
        forward = self.phase == FORWARD
        trains = forward & (self.kept_from[self.interval] != NEVER)
        found: Mask = ~forward | trains | ~trains.any()
        return found

    def stretch_at(self, ticks: U64) -> NDArray[np.intp]:
        """The stretch each tick lies in."""
        found: NDArray[np.intp] = np.searchsorted(self.ticks, ticks, side="right") - 1
        return found

    def step_at(self, ticks: U64) -> NDArray[np.intp]:
        """The step each tick lies in, from 0; after the last end, the number of steps."""
        # The clock cannot tell an end from what follows it at once: the end still belongs to it.
        found: NDArray[np.intp] = np.searchsorted(self.step_ends, ticks, side="left")
        return found


def trains_on(trace: Trace) -> bool:
    """Whether another training step began after the last one's end, or the only one there is.

    An evaluation does not: no backward comes, and its forward ends.
    """
    line = timeline(trace)
    last = line.step_ends[-1] if len(line.step_ends) else np.uint64(0)
    after = line.ticks > last
    if len(line.step_ends) == 0:
        return bool((after & np.isin(line.phase, (FORWARD, BACKWARD_PHASE))).any())
    unfinished = bool(after[-1] and line.phase[-1] == FORWARD and line.of_training[-1])
    return unfinished or bool((after & (line.phase == BACKWARD_PHASE)).any())


def of_events(trace: Trace, ticks: U64, scope: U32) -> U8:
    """The phase of something that happened at these ticks inside these scopes."""
    return _phase(trace, scope, timeline(trace).stretch_at(ticks))


def _phase(trace: Trace, scope: U32, stretch: NDArray[np.intp]) -> U8:
    said = scope_phases(trace)[scope]
    return np.where(said == UNSAID, timeline(trace).phase[stretch], said)


@once_per_trace
def scope_phases(trace: Trace) -> U8:
    """Per scope number, the phase it puts what is inside it in, or UNSAID (rule 1)."""
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
    """Inside a step the main thread may run a closure: forward, loss, backward."""
    passes = tree.nearest_context((tree.kind == NODE) | (tree.kind == BACKWARD))
    closures = (passes == 0) & (tree.thread == main_thread(trace))
    phase[(phase == OPTIMIZER_PHASE) & closures] = UNSAID


def _leave_engine_threads_to_the_timeline(trace: Trace, tree: Tree, phase: U8) -> None:
    """Without node scopes (detail="category") only the time tells a forward that is run again.

    On the engine's own thread it looks like a module called by the user.
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
    """Per scope number: the annotation torch puts around fetching a batch."""
    named = scopes.scopes_named(trace, lambda text: text.startswith("enumerate(DataLoader)"))
    found: Mask = named & (scopes.tree(trace).kind == USER)
    return found


@once_per_trace
def main_thread(trace: Trace) -> int:
    """The thread that trains: it calls backward, else it steps, else it calls modules."""
    tree = scopes.tree(trace)
    for kind in (BACKWARD, OPTIMIZER, MODULE):
        found = np.flatnonzero((tree.kind == kind) & (tree.node == 0))
        if len(found):
            return int(tree.thread[found[0]])
    return int(trace.events.thread[0]) if len(trace.events.thread) else 0


@once_per_trace
def training_threads(trace: Trace) -> int:
    """How many threads call backward or step on their own."""
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
        """From this tick on, that interval."""
        self.ticks.append(tick)
        self.phase.append(interval[0])
        self.interval.append(interval[1])


@once_per_trace
def timeline(trace: Trace) -> Timeline:
    """The main thread's phases (rule 2) and the ends of the steps."""
    marks = _marks(trace)
    out = _Writer([], [], [], [])
    base = out.new(OTHER)  # what goes on around forward and backward: other, or an optimizer
    out.go(0, base)
    forward: tuple[int, int] | None = None  # one that lasts until backward begins
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
    ticks = np.array(out.ticks, np.uint64)
    phase = np.array(out.phase, np.uint8)
    ends = _step_ends(trace, ticks[phase == FORWARD])
    # A trace inside another has that one's scopes as well: what it began in is its first stretch.
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


# tick, kind, whether it begins, of a forward: whether it lasts until a backward begins, and from
# when on what it made counts as kept if none begins.
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
    """Of each outermost module's call: does its forward go on until a backward begins?

    It does not if it ran without grad mode throughout. If the trace ends first it does when a
    training step was cut short: by an allocation that failed, or after earlier backwards. What is
    alive at that moment is then what the backward would have found; otherwise what is alive when
    the call ends is.
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
    """When forwards that no backward follows were cut short: an allocation failed, or the end."""
    events = trace.events
    last = events.ticks[-1] if len(events.ticks) else NEVER
    failures = np.append(events.ticks[events.action == ACTION["oom"]], last)
    next_one = np.minimum(np.searchsorted(failures, begins), len(failures) - 1)
    ends: U64 = failures[next_one]
    return ends


def ran_with_grad(trace: Trace, calls: NDArray[np.intp]) -> Mask:
    """Whether anything in these calls of modules, none inside another, ran with grad mode on."""
    tree = scopes.tree(trace)
    told = tells_of_grad_mode(trace)
    if told is None:
        return np.ones(len(calls), np.bool_)  # an older trace: nothing is known of it
    found = np.zeros(len(tree.kind), np.bool_)
    found[_outermost_call(tree, calls)[told & (tree.flags & SCOPE_GRAD != 0)]] = True
    return found[calls]


def tells_of_grad_mode(trace: Trace) -> Mask | None:
    """Scopes whose flags say whether grad mode was on: operators or, without, innermost modules."""
    tree = scopes.tree(trace)
    if scopes.has_operators(trace):
        operators: Mask = tree.kind == OP
        return operators
    if not meta.of(trace).modules_tell_modes:
        return None
    told: Mask = tree.kind == MODULE
    # What a compiler made of a model runs without grad mode inside a function that has a node.
    told &= ~(_is_a_graph(trace) & (tree.module[tree.parent] != 0))
    told[tree.module[tree.parent[told]]] = False
    return told


def _is_a_graph(trace: Trace) -> Mask:
    """Calls of what torch.fx made."""
    return scopes.scopes_named(trace, "GraphModule".__eq__)


def _outermost_call(tree: Tree, modules: NDArray[np.intp]) -> U32:
    outermost = np.zeros(len(tree.kind), np.bool_)
    outermost[modules] = True
    return tree.nearest_context(outermost)


def _first_ops_with_nodes(tree: Tree, outermost: Mask, hard: NDArray[np.intp]) -> NDArray[np.intp]:
    """Between two turns, the first op outside of modules that made nodes a backward ran."""
    ops = np.flatnonzero(tree.made_nodes & outermost & (tree.module == 0))
    turns = np.sort(np.concatenate([tree.begin[hard], tree.end[hard]]))
    _, first = np.unique(np.searchsorted(turns, tree.begin[ops]), return_index=True)
    return ops[first]


def _step_ends(trace: Trace, forwards: U64) -> U64:
    tree = scopes.tree(trace)
    marks = np.sort(tree.begin[tree.kind == STEP])
    if len(marks):
        return marks
    found = np.flatnonzero((tree.kind == OPTIMIZER) & (tree.end != NEVER))
    found = found[np.argsort(tree.end[found], kind="stable")]
    ends = tree.end[found]
    forwards_until = np.searchsorted(forwards, ends)
    has_forward = np.append(False, forwards_until[1:] > forwards_until[:-1])[: len(ends)]
    return ends[_last_of_iterations(tree.name[found].tolist(), has_forward.tolist())]


_MOST_OPTIMIZERS = 64  # of a file with other numbers nothing is right


def _last_of_iterations(optimizers: list[int], has_forward: list[bool]) -> list[int]:
    """Which optimizers' steps end an iteration, as people count them: a GAN's two are one.

    An iteration is over when an optimizer steps that has stepped in it already, after another
    forward. Often that is known earlier: as soon as the last one was only ever followed by such an
    optimizer. csrc/core/iterations.h has the same, one step at a time.
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
            if len(known := followers.setdefault(last, set())) < _MOST_OPTIMIZERS:
                known.add(optimizer)
        if len(stepped) < _MOST_OPTIMIZERS:
            stepped.add(optimizer)
    if optimizers:
        known = followers.get(optimizers[-1], set())
        if not known or known & stepped:  # else it was cut short
            ends.append(len(optimizers) - 1)
    return ends


@dataclass(frozen=True)
class Moments:
    """When and inside of what each allocation was made and given back."""

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
    """The program's side of each allocation: an end is where it gave the block back."""
    found = lifetimes(trace)
    made = _at(trace, found.start, np.uint64(0))
    made[2][_made_beside(trace, found.start, made[1])] = OTHER
    freed = _at(trace, found.end, NEVER)
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
    """Between two modules that a backward pass runs again as the forward had run them.

    Without operators nothing else tells the sums in between (a residual's) from the pass's own.
    A pass goes the other way round, so what follows in the forward follows within one forward again. What
    comes between such a module and a pass within the pass is of the forward, too (reentrant checkpoints).
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
    """Names of modules that a call runs one after the other."""
    order = calls[np.argsort(tree.module[tree.parent[calls]], kind="stable")]
    around = tree.module[tree.parent[order]]
    beside = around[1:] == around[:-1]
    names = tree.name[order]
    return set(zip(names[:-1][beside].tolist(), names[1:][beside].tolist(), strict=True))


def _made_beside(trace: Trace, position: I64, scope: U32) -> Mask:
    """Made by a thread that has no part in the training, where the scopes tell such threads."""
    tree = scopes.tree(trace)
    thread = trace.events.thread[position]
    found: Mask = (thread != main_thread(trace)) & (position >= 0)
    # Without nodes the engine's threads would look like that, too: then they are told by their names.
    if meta.of(trace).names_threads:
        found &= ~_is_of_the_engine(trace)[thread]
    elif not (tree.kind == NODE).any():
        return np.zeros(len(position), np.bool_)
    if found.any():
        trains = np.isin(tree.kind, (MODULE, NODE, BACKWARD, OPTIMIZER))
        found &= ~np.isin(thread, tree.thread[trains])
        found &= scope_phases(trace)[scope] == UNSAID
    return found


def _is_of_the_engine(trace: Trace) -> Mask:
    """Per number of a thread. Reentrant passes run in threads that torch gives no name."""
    named = scopes.names_where(trace, lambda text: text.startswith("pt_autograd"))
    result = np.zeros(np.iinfo(np.uint16).max + 1, np.bool_)
    result[: len(trace.threads.name)] = named[within(trace.threads.name, len(named))]
    return result


def _at(trace: Trace, position: I64, missing_ticks: np.uint64) -> tuple[U64, U32, U8, I64]:
    """Of these rows of the event table; -1 is "none" and gets what stands for it."""
    events, line = trace.events, timeline(trace)
    none = position < 0
    ticks = events.ticks[position]
    scope = events.scope[position]
    scope = within(scope, len(scopes.tree(trace).kind))
    stretch = line.stretch_at(ticks)
    phase, interval = _phase(trace, scope, stretch), line.interval[stretch]
    ticks[none] = missing_ticks
    scope[none] = 0
    phase[none] = MISSING
    interval[none] = -1
    return ticks, scope, phase, interval
