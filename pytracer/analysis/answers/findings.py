"""Leaks and waste: memory that was kept for nothing, with its bytes, line and remedy.

Each rule is a function from a trace to findings. It yields only findings that the data proves.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer import health, meta
from pytracer.analysis.allocator import advice as allocator_advice, blocks
from pytracer.analysis.answers import training_steps
from pytracer.analysis.facts import grouping, owners, phases, scopes, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.categories import label_events
from pytracer.analysis.facts.scopes import BACKWARD, MODULE, NEVER, NODE, OP, Tree
from pytracer.names import short_line
from pytracer.recorded import Trace, once_per_trace
from pytracer.schema import ACTION, CATEGORY, I64, OWNED, ROLE, U64, Mask
from pytracer.units import size_text

_WORTH = 0.01  # of the peak: less is noise
_LEAST_GROWTH = 1024  # bytes a step, or a ten-thousandth of the peak: less is kept numbers
_MOST_LINES = 3  # of lines that grow
_MANY = 250  # blocks in one variable; the trace has only the last 300 of a longer list
_PART = 10  # a tenth of a growth is worth a line of its own
_CACHE_SHARE = 0.2  # of the bytes reserved at the peak
_SMALLEST_CACHE = 64 << 20  # a few segments are no waste


@dataclass(frozen=True)
class Finding:
    """One cause for which memory was kept in vain."""

    kind: str
    bytes: int  # for growth: per step; for an evaluation: the most at once
    at_peak: int  # how much lower the peak would be
    line: str  # the line that made most of it; "" if lines were not recorded
    module: str
    evidence: str
    change: str


@dataclass(frozen=True)
class Situation:
    """The input of the rules: a device, and the moment of its peak (or of another event)."""

    trace: Trace
    device: str
    position: int
    phase: str | None
    alive: Mask

    def of_category(self, category: str) -> Mask:
        """The allocations of the category that are alive at the moment."""
        is_of_category: Mask = self.alive & (allocations(self.trace).category == CATEGORY[category])
        return is_of_category

    def bytes(self, which: Mask) -> int:
        """The requested bytes of these allocations."""
        return int(allocations(self.trace).requested_bytes[which].sum())

    def where(self, which: Mask) -> tuple[str, str]:
        """The line and the module that hold most of these; "" if unknown."""
        line, module = (grouping.holders(self.trace, key, which) for key in ("line", "module"))
        return line[0].name if line else "", module[0].name if module else ""

    def finding(self, kind: str, which: Mask, evidence: str, change: str) -> Finding:
        """A finding about these allocations, alive at the moment."""
        amount = self.bytes(which)
        return Finding(kind, amount, amount, *self.where(which), evidence, change)


def at_peak(trace: Trace, device: str | None = None) -> Situation:
    """The situation at the device's peak."""
    peak = usage.peak(trace, device)
    alive = usage.alive(trace, "peak", device)
    return Situation(trace, peak.device, peak.position, peak.phase, alive)


def findings(trace: Trace, device: str | None = None) -> list[Finding]:
    """All findings, the most bytes first; none if rows of the trace were lost.

    Without its free, a block would look kept. Without its backward, a call would look in vain.
    """
    if len(allocations(trace)) == 0 or health.has_holes(trace.losses):
        return []
    now = at_peak(trace, device)
    least = _WORTH * now.bytes(now.alive)
    rows = needless(now)
    rows += cache(now)
    # Growth counts even if it is a small part of the peak, because it continues.
    growth = min(_LEAST_GROWTH, now.bytes(now.alive) / 10_000)
    rows = [row for row in rows if row.bytes >= (growth if row.kind == "growth" else least)]
    return sorted(rows, key=lambda finding: -finding.bytes)


def needless(now: Situation) -> list[Finding]:
    """Findings about memory kept in vain. One cause is one finding: growth is not also "held"."""
    grown = list(_growing(now))
    rest = np.ones(len(allocations(now.trace)), np.bool_)
    for group in grown:
        rest &= ~group.alike
    rows = [group.finding for group in grown]
    if phases.training_threads(now.trace) > 1:
        return rows  # phases follow one thread; blocks for another's use would look held in vain
    for rule in RULES:
        rows += rule(now, rest)
    return rows


# ---------------------------------------------------------------- growth


@dataclass(frozen=True)
class _Growing:
    """Blocks that one variable (or an unknown keeper) keeps more of in each step."""

    finding: Finding
    alike: Mask  # the blocks made like them, in any step


def _growing(now: Situation) -> Iterator[_Growing]:
    """Blocks that each step leaves behind. Steps are alike, so something keeps these blocks.

    They may be gone when the trace ends, if the function that kept them has returned.
    """
    turns = _turns(now)
    if turns is None or min(turns.growth) <= 0:
        return
    alloc, each = allocations(now.trace), int(np.median(turns.growth))
    there = (alloc.start <= turns.last) & ((alloc.completed < 0) | (alloc.completed > turns.last))
    kept = there & _follows_the_steps(now)
    kept &= np.isin(turns.of_allocation, turns.settled)
    # Layers that first run later get their optimizer state later. That is not a leak.
    kept &= alloc.category != CATEGORY["optimizer_state"]
    kind = _kinds(now.trace)
    for keeper, own in _by_keeper(now, kept, kind).items():
        amount = now.bytes(own) // len(turns.settled)
        # The very last result is kept, too, but it comes from one turn only.
        made_in = np.unique(turns.of_allocation[own])
        if amount > each // _PART and len(made_in) > len(turns.settled) // 2:
            alike = np.isin(kind, np.unique(kind[own]))
            earlier = alike & (turns.of_allocation < turns.at(now.position)) & now.alive
            yield _Growing(_growth(now, turns, keeper, own, amount, now.bytes(earlier)), alike)
    yield from _swelling(now, turns, each)


def _follows_the_steps(now: Situation) -> Mask:
    """Blocks on the device; if several threads train, only those of the thread that steps count.

    Another thread's step may last for several of these steps, and keeps its tensors that long.
    """
    here = usage.on_device(now.trace, now.device)
    if phases.training_threads(now.trace) > 1:
        here &= allocations(now.trace).thread == phases.main_thread(now.trace)
    return here


def _swelling(now: Situation, turns: "_Turns", each: int) -> Iterator[_Growing]:
    """Blocks that are made anew and larger in each turn, such as torch.cat of old and new."""
    alloc = allocations(now.trace)
    turn = turns.of_allocation
    if _longer_batches(now, turns):
        return
    ends = np.append(turns.begins[1:], turns.last)[np.clip(turn, 0, len(turns.begins) - 1)]
    left = _follows_the_steps(now) & (turn >= 1) & (alloc.start < ends)
    left &= (alloc.completed < 0) | (alloc.completed > ends)
    place = _kinds(now.trace, sizes=False)
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
            yield _Growing(_swollen(now, turns, alike, amount), alike)


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
    keeper = _keeper(now, own, _kinds(now.trace))
    evidence = (
        f"Memory grows by {size_text(amount)} per {turns.word}: "
        f"{f'`{keeper}`' if keeper else 'a tensor'} made at {at} is made anew in each, and larger"
    )
    change = "write into a buffer made once, or keep a list of small results on the CPU"
    there = now.bytes(own & now.alive)
    return Finding("growth", amount, max(there - amount, 0), line, module, evidence, change)


def _growth(
    now: Situation, turns: "_Turns", keeper: str, own: Mask, each: int, there: int
) -> Finding:
    line, module = now.where(own)
    made = f", made in module {module}" if module else ""
    if line:
        lines = grouping.holders(now.trace, "line", own)[:_MOST_LINES]
        large = [row.name for row in lines if row.bytes * _PART > now.bytes(own)]
        made = f", made at {', '.join(large or [line])}"
    by = f"`{keeper}` keeps" if keeper else "something keeps"
    # Detaching a graph's output frees the graph; a tensor alone stays, detached or not. After a
    # backward the graph has freed its saved tensors.
    trains = bool((scopes.tree(now.trace).kind == BACKWARD).any())
    may_have = not trains and bool(_calls(now.trace).with_grad.any())
    graph = _has_graph(now, keeper) if keeper else may_have
    instead = "x.detach() (keeps x, not its graph)" if graph else "x.mean().item()"
    change = f"keep a number, not a tensor: loss.item(), or {instead}"
    if keeper:
        change = f"put numbers into `{keeper}`, not tensors: loss.item(), or {instead}"
    if not graph:
        change += "; tensors that are needed (predictions, a replay buffer) need a bound"
    if graph and not trains:
        change += "; where nothing is trained, `with torch.no_grad():`"
    evidence = f"Memory grows by {size_text(each)} per {turns.word}{made}: {by} what {turns.make}"
    return Finding("growth", each, there, line, module, evidence, change)


def _by_keeper(now: Situation, kept: Mask, kind: U64) -> dict[str, Mask]:
    """These allocations by the variable that keeps them, "" if it is unknown.

    Lines (or modules) with the same keeper are one leak, because one graph keeps the blocks of many
    lines. All other lines count together, under the keeper of most of their blocks.
    """
    key = "line" if grouping.holders(now.trace, "line", kept) else "module"
    by_holder = grouping.group(now.trace, key, kept)
    groups: dict[str, Mask] = {}
    rest = kept.copy()
    for holder in grouping.holders(now.trace, key, kept)[:_MOST_LINES]:
        own = np.zeros(len(kept), np.bool_)
        own[np.flatnonzero(kept)[by_holder.codes == by_holder.names.index(holder.name)]] = True
        rest &= ~own
        keeper = _keeper(now, own, kind)
        groups[keeper] = groups.get(keeper, own) | own
    if rest.any():
        keeper = _keeper(now, rest, kind)
        groups[keeper] = groups.get(keeper, rest) | rest
    return groups


def _keeper(now: Situation, own: Mask, kind: U64) -> str:
    """The variable that held most blocks like these at the end, itself or in its graph; or "".

    Each step overwrites its variables, so the last step's blocks identify the variable. If no such
    block is left at the end, the variable is gone, too.
    """
    alloc = allocations(now.trace)
    own = (alloc.completed < 0) & np.isin(kind, np.unique(kind[own]))
    if not own.any():
        return ""
    size = dict(zip(alloc.address[own].tolist(), alloc.requested_bytes[own].tolist(), strict=True))
    held: dict[str, int] = {}
    count: dict[str, int] = {}
    for variable in meta.of(now.trace).variables:
        distinct = {*variable.addresses, *variable.graph_addresses}
        held[variable.name] = sum(size.get(address, 0) for address in distinct)
        count[variable.name] = len(distinct & size.keys())
    most = max(held, key=lambda name: held[name], default="")
    if most and (held[most] > sum(size.values()) // 2 or count[most] >= _MANY):
        return most
    return ""


def _has_graph(now: Situation, variable: str) -> bool:
    """Whether the variable's graph still has its saved tensors."""
    variables = meta.of(now.trace).variables
    return any(each.graph_addresses for each in variables if each.name == variable)


def _kinds(trace: Trace, *, sizes: bool = True) -> U64:
    """A number per allocation: equal for two blocks that are alike."""
    alloc = allocations(trace)
    kind = alloc.requested_bytes.astype(np.uint64) * np.uint64(sizes)
    for column in (alloc.line, alloc.module, alloc.op, alloc.category):
        kind = kind * np.uint64(0x9E3779B97F4A7C15) + column.astype(np.uint64)
    return kind


@dataclass(frozen=True)
class _Turns:
    """The turns of the program: runs of steps or, without steps, calls of the outermost module."""

    word: str
    make: str  # "each step makes", "every 8 steps make"
    growth: list[int]  # of each turn but the first, which makes optimizer state
    of_allocation: I64
    settled: NDArray[np.intp]  # turns whose leftovers a later turn would have freed
    begins: NDArray[np.intp]  # rows of the event table
    last: int  # the row after which the last growth was measured

    def at(self, position: int) -> int:
        """The turn of this event."""
        return int(np.searchsorted(self.begins, position, side="right")) - 1


def _turns(now: Situation) -> _Turns | None:
    trace, alloc = now.trace, allocations(now.trace)
    ticks, ends = trace.events.ticks, phases.timeline(trace).step_ends
    rows = training_steps.step_rows(trace, now.device)
    if len(ends) >= 3:
        rows = rows[: len(ends)]  # after the last end there is no whole step
    if len(rows) >= 3:
        cuts = np.searchsorted(ticks, ends, side="right")
        last = int(cuts[-1]) - 1 if len(rows) == len(ends) else len(ticks) - 1
        growth = training_steps.steady_growth([row.growth_bytes for row in rows[1:]])
        run = growth.steps
        first = len(rows) - run * len(growth.amounts)  # steps before the first run
        return _Turns(
            "step" if run == 1 else f"{run} steps",
            "each step makes" if run == 1 else f"every {run} steps make",
            growth.amounts,
            np.where(alloc.step < 0, -1, np.maximum((alloc.step - first + run) // run, 0)),
            np.arange(1, len(growth.amounts)),
            np.concatenate([[0], cuts[first - 1 :: run]]),
            last,
        )
    calls = _outermost_calls(trace)
    if len(rows) > 1 or len(calls) < 4:
        return None
    positions = np.searchsorted(ticks, scopes.tree(trace).begin[calls])
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
    )


def _outermost_calls(trace: Trace) -> NDArray[np.intp]:
    """The calls of modules that the program itself made, in order."""
    tree = scopes.tree(trace)
    is_outermost = (tree.kind == MODULE) & (tree.module[tree.parent] == 0) & (tree.node == 0)
    return np.flatnonzero(is_outermost & (tree.thread == phases.main_thread(trace)))


# ---------------------------------------------------------------- kept in vain


@dataclass(frozen=True)
class _Calls:
    """The outermost calls, and whether a backward went through them."""

    numbers: NDArray[np.intp]
    begin: U64
    of_scope: I64  # per scope, the call around it, as a row here; -1: none
    with_grad: Mask  # also True if unknown
    went_back: Mask
    unclear: Mask  # the following pass leads to no call
    backwards: NDArray[np.intp]  # per call, how many passes had begun before it

    def before(self, ticks: U64) -> NDArray[np.intp]:
        """The last call that had begun by then, -1 if none had: a call's loss follows it."""
        call: NDArray[np.intp] = np.searchsorted(self.begin, ticks, side="right") - 1
        return call


@once_per_trace
def _calls(trace: Trace) -> _Calls:
    tree = scopes.tree(trace)
    calls = _outermost_calls(trace)
    row = np.full(len(tree.kind), -1, np.int64)
    row[calls] = np.arange(len(calls))
    is_call = row >= 0
    of_scope = row[tree.nearest_context(is_call)]
    ops = tree.kind == OP
    with_grad = phases.ran_with_grad(trace, calls)
    passes = np.sort(tree.begin[tree.kind == BACKWARD])
    backwards = np.searchsorted(passes, tree.begin[calls])
    went_back = np.isin(np.arange(len(calls)), of_scope[tree.forward])
    unclear = np.append(_leads_nowhere(tree, of_scope, passes), False)[backwards]
    if not (ops & is_call[tree.nearest_context(is_call)]).any() or not (tree.kind == NODE).any():
        # Without ops or nodes, assume that a backward went through the last call before it.
        went_back = np.diff(backwards, append=len(passes)) > 0
        unclear = np.zeros(len(calls), np.bool_)
    went_back |= unclear
    return _Calls(calls, tree.begin[calls], of_scope, with_grad, went_back, unclear, backwards)


def _leads_nowhere(tree: Tree, of_scope: I64, passes: U64) -> Mask:
    """Backward passes whose nodes lead to no call: a transform's or a compiled graph's.

    Such a pass may have gone through any call since the previous pass.
    """
    nodes = np.flatnonzero((tree.kind == NODE) & (of_scope[tree.forward] >= 0))
    leads = np.searchsorted(passes, tree.begin[nodes], side="right")
    result = np.ones(len(passes) + 1, np.bool_)
    result[leads] = False
    return result[1:]


def _in_vain(now: Situation, calls: _Calls) -> Mask:
    """Calls with grad mode on that no backward went through, and none can after the trace.

    A backward after the trace may go through as many calls as one did within it (at least one), if
    blocks of these calls are still alive.
    """
    alloc, tree = allocations(now.trace), scopes.tree(now.trace)
    in_vain: Mask = calls.with_grad & ~calls.went_back
    left = calls.of_scope[alloc.scope[(alloc.start >= 0) & (alloc.end < 0)]]
    open_ = np.isin(np.arange(len(in_vain)), left) | (tree.end[calls.numbers] == NEVER)
    pending = in_vain & open_ & (calls.backwards == calls.backwards.max(initial=0))
    pending &= calls.backwards == (tree.kind == BACKWARD).sum()
    together = np.bincount(calls.backwards[calls.went_back]).max(initial=1)
    if pending.sum() <= together:
        in_vain &= ~pending
    if _lacks_its_end(now.trace):  # the recording may end amid the pass through these calls
        finished = (tree.kind == BACKWARD) & (tree.end != NEVER)
        in_vain &= calls.backwards < finished.sum()
    return in_vain


def _lacks_its_end(trace: Trace) -> bool:
    """Whether the recording was cut off, so that its last calls' backward may be missing."""
    return bool(trace.losses.get("truncated_file"))


def evaluation(now: Situation, rest: Mask) -> Iterator[Finding]:
    """A module ran with grad mode on, and nothing ever went backward through that call."""
    tree, alloc, calls = scopes.tree(now.trace), allocations(now.trace), _calls(now.trace)
    if len(calls.numbers) < 2 or not scopes.has_operators(now.trace):
        return
    in_vain = _in_vain(now, calls) & ~_of_frozen_modules(now.trace, calls)
    in_vain = np.append(in_vain, False)  # -1: in no call
    ends = np.append(tree.end[calls.numbers], NEVER)
    made_in = calls.of_scope[alloc.scope]
    freed = phases.moments(now.trace).freed_ticks
    outlived = in_vain[made_in] & (freed > ends[made_in]) & (alloc.start >= 0)
    outlived &= usage.on_device(now.trace, now.device) & ~np.isin(alloc.category, OWNED)
    # The last op's block is the call's result, which the program keeps in any case.
    last = np.zeros(len(ends), np.uint32)
    np.maximum.at(last, made_in[outlived], alloc.scope[outlived])
    outlived &= (alloc.scope != last[made_in]) & rest
    if not outlived.any():
        return
    none = np.zeros(len(alloc), np.int64)
    _, (level,) = usage.level_columns(now.trace, outlived, none, 1)
    per_call = usage.sums(made_in[outlived], alloc.requested_bytes[outlived], len(ends))
    most, each = int(level.max()), int(per_call.max())
    worst = made_in == int(per_call.argmax())
    line, module = now.where(outlived & worst)
    name = tree.name[calls.numbers]
    trains = calls.went_back[name == name[int(per_call.argmax())]].any()
    count = int((per_call > 0).sum())
    called = now.trace.strings[name[int(per_call.argmax())]] or "a module"
    times = f"{count} calls of {called}" if count > 1 else f"A call of {called}"
    at = f" at {short_line(line)}" if line else ""
    at_once = (
        f"{size_text(most)} at once, {size_text(each)} each," if most > each else size_text(each)
    )
    cure = f"wrap {'them' if count > 1 else 'it'} in `with torch.no_grad():`"
    if most > each:
        cure += ", or keep numbers of them: loss.item()"
    elif trains:  # the same model trains elsewhere, so this may be a skipped step
        cure += "; if a step is skipped, `del` its loss before going on"
    yield Finding(
        "evaluation",
        most,
        now.bytes(outlived & now.alive & ~_in_use(now)),
        line,
        module,
        f"{times} kept up to {at_once}{at} for a backward that never came",
        cure,
    )


def _in_use(now: Situation) -> Mask:
    """Blocks of the latest op and of the op before it, which the latest op usually reads."""
    alloc = allocations(now.trace)
    made = (alloc.start >= 0) & (alloc.start <= now.position)
    latest = np.unique(alloc.scope[made])[-2:]  # scopes are numbered in order
    return made & np.isin(alloc.scope, latest)


def _of_frozen_modules(trace: Trace, calls: _Calls) -> Mask:
    """Calls of modules without trainable parameters, in which no graph begins."""
    is_frozen = meta.of(trace).frozen_modules.__contains__
    of_frozen: Mask = scopes.scopes_named(trace, is_frozen)[calls.numbers]
    return of_frozen


def _backwards_after(now: Situation) -> int:
    """How many backward passes begin after the moment."""
    tree, ticks = scopes.tree(now.trace), now.trace.events.ticks
    moment = ticks[now.position] if now.position >= 0 else 0
    return int((tree.begin[tree.kind == BACKWARD] > moment).sum())


def held(now: Situation, rest: Mask) -> Iterator[Finding]:
    """Activations that a backward had no use for, or that outlive it: a variable keeps them."""
    exact = bool((now.trace.events.action == ACTION["saved"]).any())
    if not (exact or (scopes.tree(now.trace).kind == NODE).any()):
        return  # without nodes, the trace does not show which blocks a backward freed
    if _lacks_its_end(now.trace) and _backwards_after(now) == 0:
        return  # only the beginning of a backward shows which blocks it needs
    which = _of_no_use(now, rest, exact=exact) & ~_behind_numbers(now)
    # Fast weights: the program holds them so as to call a module with them.
    stands_in, _, _ = label_events(now.trace, "stand_in")
    which[stands_in] = False
    if not which.any():
        return
    by_function, function = _on_context(now, which)
    others = which & ~by_function & ~_by_checkpoints(now)
    variable = _keeper(now, others, _kinds(now.trace))
    what = "autograd did not save them" if exact else "the backward did not free them"
    keeper = f"`{variable}` keeps them" if variable else "a variable or a hook keeps them"
    or_return = "" if variable else ", or return only the loss"
    causes = (
        (
            by_function,
            f"{function}'s ctx keeps them instead of autograd, which would free them in backward",
            "ctx.save_for_backward(...) instead of ctx.name = ...",
        ),
        (
            others,
            f"{what}, {keeper}",
            f"del {variable or 'it'} before loss.backward(){or_return}",
        ),
    )
    for group, cause, change in causes:
        if group.any():
            amount = size_text(now.bytes(group))
            yield now.finding("held", group, f"{amount} of activations are held: {cause}", change)


def _of_no_use(now: Situation, rest: Mask, *, exact: bool) -> Mask:
    """Held activations that no backward will need, or that outlived their backward."""
    alloc, moments = allocations(now.trace), phases.moments(now.trace)
    which: Mask = now.of_category("activations") & (alloc.role == ROLE["held"]) & rest
    which &= alloc.step >= _step_at(now)  # older blocks are growth, or will be
    began, over = _following_backward(now.trace)
    outlives = (over != NEVER) & (moments.freed_ticks > over)
    # The graph is read when a backward begins. Hooks record every save, even without a backward.
    which &= np.where(began, outlives | exact, _tells_every_save(now.trace))
    # A call in vain has a graph of its own. That graph keeps the call's blocks, no variable does.
    calls = _calls(now.trace)
    call = calls.before(moments.made_ticks)
    unused = np.append(calls.with_grad & ~calls.went_back, False)[call]
    which &= ~np.append(calls.unclear, False)[call]
    which &= ~(unused & (began | np.append(_in_vain(now, calls), False)[call]))
    return which


def _on_context(now: Situation, which: Mask) -> tuple[Mask, str]:
    """Which of these the forward of an autograd.Function made, and one such Function's name."""
    tree = scopes.tree(now.trace)
    nodes = np.flatnonzero((tree.kind == NODE) & (tree.forward > 0))
    names = now.trace.strings
    which = which & ~_by_checkpoints(now)
    number = {text: i for i, text in enumerate(names)}
    # Per string that names a Function's node, the Function's name. torch's nodes end in a number.
    function_of = np.array(
        [number.get(text.removesuffix("Backward"), 0) if text.endswith("Backward") else 0
         for text in names]
    )  # fmt: skip
    forward = tree.forward[nodes]
    named_so = function_of[tree.name[nodes]]
    functions = np.zeros(len(tree.kind), np.bool_)
    functions[forward[(named_so > 0) & (named_so == tree.name[forward])]] = True
    around = scopes.nearest(tree.parent, functions)[phases.moments(now.trace).made_scope]
    on_context: Mask = which & (around > 0)
    return on_context, names[tree.name[around[on_context][0]]] if on_context.any() else ""


def _by_checkpoints(now: Situation) -> Mask:
    """Blocks that torch's checkpoint keeps for its second forward: states of random numbers."""
    named = scopes.scopes_named(now.trace, "CheckpointFunction".__eq__)
    made = phases.moments(now.trace).made_scope
    by_checkpoint: Mask = scopes.nearest(scopes.tree(now.trace).parent, named)[made] > 0
    return by_checkpoint


# These losses make a value for each element, and reduce the values in place.
_KEEP_ELEMENTS = (
    *("aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss", "aten::binary_cross_entropy"),
)


def behind_numbers(now: Situation) -> Iterator[Finding]:
    """Elements that torch keeps behind the number that a loss returns. This is no mistake."""
    which = now.of_category("activations") & (allocations(now.trace).role == ROLE["held"])
    which &= _behind_numbers(now)
    if which.any():
        yield now.finding(
            "held",
            which,
            f"torch keeps every element of a loss, {size_text(now.bytes(which))}, behind the "
            "number that it returns",
            'reduction="none", and the mean of that, keeps the number only',
        )


def _behind_numbers(now: Situation) -> Mask:
    """Blocks of such losses, and blocks like those behind a variable with a single element."""
    alloc, kind = allocations(now.trace), _kinds(now.trace)
    addresses = [a for each in meta.of(now.trace).variables for a in each.behind_numbers]
    there = (alloc.completed < 0) & np.isin(alloc.address, np.array(addresses, np.uint64))
    of_loss = scopes.names_where(now.trace, lambda text: text in _KEEP_ELEMENTS)[alloc.op]
    is_behind: Mask = np.isin(kind, kind[there]) | of_loss
    return is_behind


def _following_backward(trace: Trace) -> tuple[Mask, U64]:
    """Per allocation: whether its forward ended with a backward, and when this backward ended."""
    line = phases.timeline(trace)
    backwards = line.phase == phases.BACKWARD_PHASE
    begin = np.append(line.ticks[backwards], NEVER)
    over = np.append(np.append(line.ticks[1:], NEVER)[backwards], NEVER)
    kept_from = line.kept_from[phases.moments(trace).made_interval]
    following = np.searchsorted(begin, kept_from)
    began: Mask = (kept_from != NEVER) & (begin[following] == kept_from)
    return began, np.where(began, over[following], NEVER)


def _tells_every_save(trace: Trace) -> bool:
    return meta.of(trace).options.saved_tensors == "hooks"


def late_zero_grad(now: Situation, rest: Mask) -> Iterator[Finding]:
    """The previous step's gradients are still alive in the training forward that has the peak."""
    if now.phase != "forward" or now.position < 0:
        return
    which = now.of_category("gradients") & (allocations(now.trace).step < _step_at(now)) & rest
    if not which.any() or not _is_for_training(now):
        return
    place = owners.place_of(now.trace, int(now.trace.events.scope[now.position]))
    at = f" at {place.line}" if place.line else ""
    amount = now.bytes(which)
    yield Finding(
        "late_zero_grad",
        amount,
        amount,
        place.line,  # the forward's line; torch frees gradients in no op, so theirs is unknown
        place.module,
        f"The peak is in the forward{at} while {size_text(amount)} of the previous step's "
        "gradients are still alive",
        "call optimizer.zero_grad() before that forward",
    )


def _is_for_training(now: Situation) -> bool:
    """Whether a backward goes through the call at that moment, or may after the trace.

    An evaluation between two steps also runs beside the gradients, but is no reason to move
    zero_grad().
    """
    calls = _calls(now.trace)
    position = slice(now.position, now.position + 1)
    call = int(calls.before(now.trace.events.ticks[position])[0])
    if call < 0 or calls.went_back[call]:
        return True
    after_the_last = calls.backwards[call] == (scopes.tree(now.trace).kind == BACKWARD).sum()
    return bool(calls.with_grad[call] & after_the_last & ~_in_vain(now, calls)[call])


def _step_at(now: Situation) -> int:
    if now.position < 0:
        return 0
    at = slice(now.position, now.position + 1)
    return int(phases.timeline(now.trace).step_at(now.trace.events.ticks[at])[0])


# Each rule takes a situation, and the allocations that no leak explains. It yields findings.
RULES: tuple[Callable[[Situation, Mask], Iterator[Finding]], ...] = (
    evaluation,
    held,
    late_zero_grad,
)


def twins(now: Situation) -> Iterator[Finding]:
    """The same numbers twice: a weight, and autocast's copy of it in 16 bits.

    That is how autocast works and no mistake, but a way to save if memory is short.
    """
    alloc = allocations(now.trace)
    which = now.of_category("weights") & (alloc.role == ROLE["autocast_copy"])
    if which.any():
        amount = size_text(now.bytes(which))
        yield now.finding(
            "twins",
            which,
            f"{amount} are 16-bit copies of float32 weights",
            "model.to(torch.bfloat16), where the optimizer allows it, keeps one of the two",
        )


def cache(now: Situation) -> Iterator[Finding]:
    """The allocator reserves much more than the peak needs."""
    memory: Any = blocks.device_bytes(now.trace, now.alive, now.position, now.device)
    if memory.reserved is None or memory.allocated is None:
        return
    spare = memory.reserved - memory.allocated
    if spare > max(_CACHE_SHARE * memory.reserved, _SMALLEST_CACHE):
        yield Finding(
            "cache",
            spare,
            0,
            "",
            "",
            f"The allocator reserves {size_text(memory.reserved)} where the peak needs "
            f"{size_text(memory.allocated)}: pieces that did not fit, or a larger peak before",
            _of_the_cache(now),
        )


def _of_the_cache(now: Situation) -> str:
    advice = allocator_advice.to_reserve_less(now.trace, now.device)
    if advice is not None:
        return f"{advice.text} reserves {size_text(advice.bytes)} less, as replay shows"
    return "no setting of the allocator would reserve less; empty_cache() after a larger peak does"
