"""Memory that each step leaves behind, and what a variable keeps that is no leak."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.answers import training_steps
from pytracer.analysis.answers.edits import Edit
from pytracer.analysis.answers.keepers import Keeper, keeper_of, kinds
from pytracer.analysis.answers.outer_calls import outermost, outermost_calls
from pytracer.analysis.answers.situation import Finding, Proof, Situation, at_peak
from pytracer.analysis.facts import grouping, lines, scopes, timelines, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.scopes import BACKWARD
from pytracer.basics.units import size_text
from pytracer.data import meta, sanitized
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import CATEGORY, I64, U64, Mask

_MOST_LINES = 3  # of lines that grow
# What ends a leak by such a link, whatever it is that the program keeps there.
_CURES = (
    (
        "__traceback__",
        "keep str(error), not the exception: its traceback keeps its frames' variables",
    ),
    (
        "Parameter.grad -> tensor -> grad_fn",
        "let optimizer.zero_grad() drop the gradients: create_graph=True gives them graphs",
    ),
    (
        ".state -> defaultdict[Parameter]",
        "use one optimizer, or drop the old ones from `{}`: each has a state of its own",
    ),
    (" -> lru_cache", "give `{}` a maxsize, or call {}.cache_clear()"),
    (
        " -> cycle -> ",
        "loop over its source again: itertools.cycle keeps all that `{}` has yielded",
    ),
    ("_mock_", "call reset_mock() on it in each step: a mock keeps the arguments of all its calls"),
    (" -> Future._result", "let go of each future in `{}` once it is done, as it keeps its result"),
    (" -> Task -> ", "let go of each task in `{}` once it is done, as it keeps its result"),
)
# What ends a cycle, by what is in it; the last is for any other.
_CYCLE = "a cycle: "
_OF_CYCLES = (
    (
        "'s ctx.",
        "ctx.save_for_backward(...) instead of ctx.name = ...: with its output it is a cycle",
    ),
    # A function's variable or default:
    (" of ", "use x.detach() in a hook of x, and not x: not even gc.collect() ends such a cycle"),
    ("", "let nothing in `{}` lead back to it, or call gc.collect(): only a cycle keeps it"),
)
_HISTORY = re.compile(
    r"\.state -> defaultdict\[Parameter\] -> dict\['(\w+)'\] -> (?:list|deque|tuple)\b"
)
_OWN_WEIGHTS = re.compile(r"^[^>]+ -> parameter$")  # of a model, and not of models in a list
_NUMBERED = re.compile(r"\w\*")
_LATE = 3  # the first steps make what stays: a leak that begins then began with the program
_REGULAR = 0.7  # of the steps that made a leak are at the same distance
_PART = 10  # a tenth of a growth is worth a line of its own


def kept_results(now: Situation) -> list[Finding]:
    """What a variable keeps of equal calls, where no optimizer steps, and what still fills.

    These are no findings, because the program may need all of them.
    """
    turns = _equal_calls(now)
    rows = [_results(now, turns, leak) for leak in _leaks(now, turns)] if turns else []
    _, leaks = _of_steps(now.trace, now.device)
    rows += [_filling(now, leak) for leak in leaks if leak.keeper.bound]
    rows += [_models(now, leak) for leak in leaks if _is_of_models(now, leak)]
    return [row for row in rows if row.bytes > 0]


def _filling(now: Situation, leak: "_Leak") -> Finding:
    evidence = (
        f"`{leak.keeper.name}` still fills, by {size_text(leak.each)} per {leak.unit.word}: it may hold "
        f"{leak.keeper.bound:,} items"
    )
    return now.finding("kept", leak.alike & (allocations(now.trace).end < 0), evidence, "")


def _is_of_models(now: Situation, leak: "_Leak") -> bool:
    """Whether it is weights that were trained, as those of the models of an ensemble are."""
    alloc = allocations(now.trace)
    gradients = (alloc.category == CATEGORY["gradients"]) & (alloc.label != 0)
    names = sanitized.labels(now.trace).name
    trained = np.isin(names[alloc.label], np.unique(names[alloc.label[gradients]]))
    weights = leak.own & (alloc.category == CATEGORY["weights"]) & (alloc.label != 0) & trained
    return 2 * now.bytes(weights) > now.bytes(leak.own)


def _models(now: Situation, leak: "_Leak") -> Finding:
    evidence = (
        f"`{leak.keeper.name}` keeps models, {size_text(leak.each)} per {leak.unit.word}"
        f"{leak.keeper.way}: later steps may need them"
    )
    return now.finding("kept", leak.alike & (allocations(now.trace).end < 0), evidence, "")


@dataclass(frozen=True)
class Growing:
    """Blocks that one variable (or an unknown keeper) keeps more of in each step."""

    finding: Finding
    alike: Mask  # the blocks made like them, in any step


class _Unit(NamedTuple):
    """In what a leak is counted, which is the steps or turns in which it grew."""

    word: str  # "step", "8 steps", "call"
    make: str  # "each step makes", "every 8 steps make"
    turns: int  # how many the blocks are from
    since: int = 0  # the first step whose blocks stayed, if the leak began late


@dataclass(frozen=True)
class _Leak:
    """What one keeper keeps of each turn."""

    keeper: Keeper
    own: Mask
    alike: Mask  # the blocks made like them, in any turn
    each: int  # bytes per unit
    unit: "_Unit"


def growing(now: Situation) -> Iterator[Growing]:
    """Blocks that each step leaves behind."""
    turns, leaks = _of_steps(now.trace, now.device)
    if turns is None:
        return
    for leak in leaks:
        if leak.keeper.bound or _OWN_WEIGHTS.search(leak.keeper.path):
            continue  # it may be far from full, and grow no more; or a program builds its model
        if _is_of_models(now, leak):
            continue
        yield Growing(_growth(now, turns, leak), leak.alike)
    yield from _swelling(now, turns)


@once_per_trace
def _of_steps(trace: Trace, device: str) -> tuple["_Turns | None", list[_Leak]]:
    """The steps, and what each leaves behind; at any moment the same."""
    now = at_peak(trace, device)
    turns = _steps(now)
    return turns, [] if turns is None else list(_leaks(now, turns))


def _leaks(now: Situation, turns: "_Turns") -> Iterator[_Leak]:
    """Blocks that each turn leaves behind. Turns are alike, so something keeps these blocks.

    They may be gone when the trace ends, if the function that kept them has returned.
    """
    if min(turns.growth) <= 0:
        return
    alloc, each = allocations(now.trace), int(np.median(turns.growth))
    there = (alloc.start <= turns.last) & ((alloc.completed < 0) | (alloc.completed > turns.last))
    kept = there & _follows_the_steps(now)
    kept &= np.isin(turns.of_allocation, turns.settled)
    # Layers that first run later get their optimizer state later. That is not a leak.
    kept &= (alloc.category != CATEGORY["optimizer_state"]) | _states_again(now)
    kind = kinds(now.trace)
    for keeper, own in _by_keeper(now, kept, kind).items():
        amount = now.bytes(own) // len(turns.settled)
        # The very last result is kept, too, but it comes from one turn only.
        made_in = np.unique(turns.of_allocation[own])
        if amount > each // _PART and len(made_in) > len(turns.settled) // 2:
            alike = np.isin(kind, np.unique(kind[own]))
            unit = _unit(now, turns, own, alike & there)
            yield _Leak(keeper, own, alike, now.bytes(own) // unit.turns, unit)


def _states_again(now: Situation) -> Mask:
    """States of parameters that have such a state already: of another optimizer.

    Several in a list are the history that one optimizer keeps, as torch's LBFGS does.
    """
    alloc, labels = allocations(now.trace), sanitized.labels(now.trace)
    paths = (_HISTORY.search(one.path) for one in meta.of(now.trace).variables)
    histories = {found[1] for found in paths if found}
    listed = np.array([name in histories for name in now.trace.strings])
    is_state = alloc.category == CATEGORY["optimizer_state"]
    rows = np.flatnonzero(is_state & ~listed[labels.role[alloc.label]])
    rows = rows[np.argsort(alloc.start[rows], kind="stable")]
    again, known = np.zeros(len(alloc), np.bool_), dict[tuple[int, int], int]()
    for row, name in zip(rows.tolist(), labels.name[alloc.label[rows]].tolist(), strict=True):
        before = known.get((name, int(alloc.role[row])))
        known[name, int(alloc.role[row])] = row
        if before is not None and name:
            again[row] = not 0 <= alloc.completed[before] < alloc.start[row]
    return again


def _unit(now: Situation, turns: "_Turns", own: Mask, stayed: Mask) -> _Unit:
    """The steps that made these blocks, if they come at equal distances; else the turns."""
    unit = _Unit(turns.word, turns.make, len(turns.settled))
    if not turns.are_steps:
        return unit
    step = allocations(now.trace).step
    made = np.unique(step[own & (step >= 0)])
    apart = np.diff(made)
    every = int(np.median(apart)) if len(apart) else 0
    if every and (apart == every).mean() > _REGULAR:
        unit = _Unit(*_words(every), len(made))
    first = int(step[stayed & (step >= 0)].min(initial=made[0] if len(made) else 0))
    late = first >= _LATE and first > every
    return unit._replace(since=training_steps.first_step(now.trace) + first if late else 0)


def _words(steps: int) -> tuple[str, str]:
    """How to speak of a run of so many steps, and of what it makes."""
    if steps == 1:
        return "step", "each step makes"
    return f"{steps} steps", f"every {steps} steps make"


def _follows_the_steps(now: Situation) -> Mask:
    """Blocks on the device; if several lines train, only those of the main thread's.

    Another line's step may last for several of these steps, and keeps its tensors that long.
    """
    here = usage.on_device(now.trace, now.device)
    if lines.training_lines(now.trace) > 1:
        here &= lines.on_main_line(now.trace, allocations(now.trace).thread)
    return here


def _swelling(now: Situation, turns: "_Turns") -> Iterator[Growing]:
    """Blocks that are made anew and larger in each turn, such as torch.cat of old and new."""
    alloc = allocations(now.trace)
    turn, each = turns.of_allocation, int(np.median(turns.growth))
    if min(turns.growth) <= 0 or _longer_batches(now, turns):
        return
    ends = np.append(turns.begins[1:], turns.last)[np.clip(turn, 0, len(turns.begins) - 1)]
    left = _follows_the_steps(now) & (turn >= 1) & (alloc.start < ends)
    left &= (alloc.completed < 0) | (alloc.completed > ends)
    place = kinds(now.trace, sizes=False)
    rows = np.flatnonzero(left)
    rows = rows[np.lexsort((turn[rows], place[rows]))]
    cuts = np.flatnonzero(np.diff(place[rows])) + 1
    for own in np.split(rows, cuts) if len(rows) else ():
        more = np.diff(alloc.requested_bytes[own].astype(np.int64))
        in_each = np.array_equal(turn[own], np.arange(turn[own[0]], turn[own[0]] + len(own)))
        if not in_each or len(own) < len(turns.settled) or len(more) < 2 or (more <= 0).any():
            continue
        amount = int(np.median(more))
        if amount > each // _PART:
            alike = place == place[own[0]]
            yield Growing(_swollen(now, turns, alike, amount), alike)


def _longer_batches(now: Situation, turns: "_Turns") -> bool:
    """Whether each turn's batch is larger than the last, as when sorted by length.

    Then all blocks made from batches grow, too.
    """
    alloc = allocations(now.trace)
    inputs = (alloc.category == CATEGORY["inputs"]) & np.isin(turns.of_allocation, turns.settled)
    of_turn = turns.of_allocation[inputs] - turns.settled[0]
    sums = usage.sums(of_turn, alloc.requested_bytes[inputs], len(turns.settled))
    return len(sums) > 1 and bool((np.diff(sums.astype(np.int64)) > 0).all())


def _swollen(now: Situation, turns: "_Turns", own: Mask, amount: int) -> Finding:
    line, module = now.where(own)
    at = line or (f"module {module}" if module else "an unknown line")
    keeper = keeper_of(now, own, kinds(now.trace))
    evidence = (
        f"Memory grows by {size_text(amount)} per {turns.word}: "
        f"{f'`{keeper.name}`' if keeper else 'a tensor'} made at {at} is made anew in each, and larger{keeper.way}"
    )
    change = (
        "put a number of each into a list, x.mean().item(), or write into a buffer with a bound"
    )
    there = now.bytes(own & now.alive)
    more = max(there - amount, 0)
    proof, edit = Proof(own, now.position, None), Edit(own, share=amount / max(there, 1))
    return Finding("growth", amount, more, line, module, evidence, change, proof, edit)


def _growth(now: Situation, turns: "_Turns", leak: _Leak) -> Finding:
    line, module = now.where(leak.own)
    made = f", made in module {module}" if module else ""
    if line:
        lines = grouping.holders(now.trace, "line", leak.own)[:_MOST_LINES]
        large = [row.name for row in lines if row.bytes * _PART > now.bytes(leak.own)]
        made = f", made at {', '.join(large or [line])}"
    by = f"`{leak.keeper.name}` keeps" if leak.keeper else "something keeps"
    amount = size_text(leak.each)
    since = f" since step {leak.unit.since}" if leak.unit.since else ""
    evidence = f"Memory grows by {amount} per {leak.unit.word}{since}{made}: {by} what "
    evidence += leak.unit.make
    evidence += leak.keeper.way or _search_cut(now)
    earlier = leak.alike & (turns.of_allocation < turns.at(now.position)) & now.alive
    proof = Proof(leak.own, turns.last, leak.unit.turns)
    change, there = _instead_of_keeping(now, leak), now.bytes(earlier)
    edit = Edit(leak.alike, end=turns.over(now.trace))
    return Finding("growth", leak.each, there, line, module, evidence, change, proof, edit)


def _results(now: Situation, turns: "_Turns", leak: _Leak) -> Finding:
    """What the keeper has at the end. A statement, and no advice: it may be what the program is for."""
    alloc = allocations(now.trace)
    at_the_end = leak.alike & (alloc.end < 0)
    calls = len(np.unique(turns.of_allocation[at_the_end]))
    by = f"`{leak.keeper.name}` still held" if leak.keeper else "something still held"
    evidence = (
        f"When the trace ended, {by} {size_text(now.bytes(at_the_end))} that {calls} calls had made"
        f"{leak.keeper.way}"
    )
    change, there = _instead_of_keeping(now, leak), leak.alike & now.alive
    return replace(now.finding("kept", at_the_end, evidence, change), at_peak=now.bytes(there))


def _search_cut(now: Situation) -> str:
    cut = meta.of(now.trace).search_cut
    return f" (the search for what keeps it ended {cut})" if cut else ""


def _instead_of_keeping(now: Situation, leak: _Leak) -> str:
    keeper = leak.keeper
    for link, change in _OF_CYCLES if keeper.path.startswith(_CYCLE) else _CURES:
        if link in keeper.path:
            return change.replace("{}", keeper.name)
    if _NUMBERED.search(keeper.name):
        return f"use one `{keeper.name}` again, and do not make another in each step"
    # Detaching a graph's output frees the graph; a tensor alone stays, detached or not. After a
    # backward the graph has freed its saved tensors.
    calls = outermost(now.trace)
    trains = bool((scopes.tree(now.trace).kind == BACKWARD).any())
    graph = keeper.has_graph if keeper else not trains and bool(calls.with_grad.any())
    instead = "x.detach() (keeps x, not its graph)" if graph else "x.mean().item()"
    change = f"keep a number, not a tensor: loss.item(), or {instead}"
    if keeper:
        change = f"put numbers into `{keeper.name}`, not tensors: loss.item(), or {instead}"
    if not graph:
        change += "; tensors that are needed (predictions, a replay buffer) need a bound"
    made_in = calls.of_scope[allocations(now.trace).scope[leak.own]]
    made_in = made_in[made_in >= 0]
    if graph and not (calls.went_back[made_in].any() if len(made_in) else trains):
        change += "; where nothing is trained, `with torch.no_grad():`"
    return change


def _by_keeper(now: Situation, kept: Mask, kind: U64) -> dict[Keeper, Mask]:
    """These allocations by the variable that keeps them, if it is known.

    Lines (or modules) with the same keeper are one leak, because one graph keeps the blocks of many
    lines. All other lines count together, under the keeper of most of their blocks.
    """
    key = "line" if grouping.holders(now.trace, "line", kept) else "module"
    by_holder = grouping.group(now.trace, key, kept)
    groups: dict[Keeper, Mask] = {}
    rest = kept.copy()
    for holder in grouping.holders(now.trace, key, kept)[:_MOST_LINES]:
        own = np.zeros(len(kept), np.bool_)
        own[np.flatnonzero(kept)[by_holder.codes == by_holder.names.index(holder.name)]] = True
        rest &= ~own
        keeper = keeper_of(now, own, kind)
        groups[keeper] = groups.get(keeper, own) | own
    if rest.any():
        keeper = keeper_of(now, rest, kind)
        groups[keeper] = groups.get(keeper, rest) | rest
    return groups


@dataclass(frozen=True)
class _Turns:
    """The turns of the program: runs of steps, or the calls of one module if no optimizer steps."""

    word: str
    make: str  # "each step makes", "every 8 steps make"
    growth: list[int]  # of each turn but the first, which makes optimizer state
    of_allocation: I64
    settled: NDArray[np.intp]  # turns whose leftovers a later turn would have freed
    begins: NDArray[np.intp]  # rows of the event table
    last: int  # the row after which the last growth was measured
    are_steps: bool = True

    def over(self, trace: Trace) -> U64:
        """The ticks at which each allocation's turn is over."""
        rows = np.append(self.begins[1:], self.last)
        turn = np.clip(self.of_allocation, 0, len(self.begins) - 1)
        over: U64 = trace.events.ticks[np.clip(rows, 0, len(trace.events.ticks) - 1)[turn]]
        return over

    def at(self, position: int) -> int:
        """The turn of this event."""
        return int(np.searchsorted(self.begins, position, side="right")) - 1


def _steps(now: Situation) -> _Turns | None:
    """The runs of steps; None if there are fewer than three whole steps, which show no growth."""
    trace, alloc = now.trace, allocations(now.trace)
    ticks, ends = trace.events.ticks, timelines.timeline(trace).step_ends
    rows = training_steps.step_rows(trace, now.device)
    if len(ends) >= 3:
        rows = rows[: len(ends)]  # after the last end there is no whole step
    if len(rows) < 3:
        return None
    cuts = np.searchsorted(ticks, ends, side="right")
    last = int(cuts[-1]) - 1 if len(rows) == len(ends) else len(ticks) - 1
    growth = training_steps.steady_growth([row.growth_bytes for row in rows[1:]])
    run = growth.steps
    first = len(rows) - run * len(growth.amounts)  # steps before the first run
    return _Turns(
        *_words(run),
        growth.amounts,
        np.where(alloc.step < 0, -1, np.maximum((alloc.step - first + run) // run, 0)),
        np.arange(1, len(growth.amounts)),
        np.concatenate([[0], cuts[first - 1 :: run]]),
        last,
    )


def _equal_calls(now: Situation) -> _Turns | None:
    """The calls of one module; None if an optimizer steps, or if the program calls others."""
    trace, alloc, tree = now.trace, allocations(now.trace), scopes.tree(now.trace)
    calls = outermost_calls(trace)
    steps = len(timelines.timeline(trace).step_ends)
    if steps or len(calls) < 4 or len(np.unique(tree.name[calls])) > 1:
        return None
    positions = np.searchsorted(trace.events.ticks, tree.begin[calls])
    here = usage.on_device(trace, now.device)
    none = np.zeros(len(here), np.int64)
    changes, (level,) = usage.level_columns(trace, here, none, 1)
    if len(changes) == 0:
        return None
    before = np.searchsorted(changes, positions)  # how many changes came before each call
    levels = np.concatenate([[now.bytes(here & (alloc.start < 0))], level])[before]
    return _Turns(
        "call",
        "each call makes",
        np.diff(levels)[1:].tolist(),
        np.searchsorted(positions, alloc.start, side="right") - 1,
        np.arange(1, len(calls) - 2),
        positions,
        int(positions[-1]) - 1,
        are_steps=False,
    )
