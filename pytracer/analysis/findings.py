"""Leaks and waste: what the data shows was kept for nothing, with its bytes, line and remedy.

Each finding is a function from a trace to what it found; it says nothing where it cannot show it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis import blocks, phases, scopes, views
from pytracer.analysis.categories import ROLE
from pytracer.analysis.lifetimes import allocations
from pytracer.analysis.scopes import MODULE, NEVER, OP, Mask
from pytracer.schema import ACTION, CATEGORY, I64, SCOPE_GRAD
from pytracer.trace import Trace

Size = Callable[[int], str]

_WORTH = 0.01  # of the peak: less is noise
_MOST_LINES = 3  # of lines that grow
_CACHE_SHARE = 0.2  # of what is reserved at the peak
_SMALLEST_CACHE = 64 << 20  # a few segments are no waste


@dataclass(frozen=True)
class Finding:
    """One thing that memory was kept for in vain."""

    kind: str
    bytes: int  # of growth: per step
    at_peak: int  # what of the peak it is about
    line: str  # "" where lines were not recorded
    module: str
    evidence: str
    change: str


@dataclass(frozen=True)
class Situation:
    """What the rules look at: a device, and the moment of its peak (or of another event)."""

    trace: Trace
    device: str
    position: int
    phase: str | None
    alive: Mask
    size: Size

    def of_category(self, category: str) -> Mask:
        """Those alive at the moment."""
        found: Mask = self.alive & (allocations(self.trace).category == CATEGORY[category])
        return found

    def bytes(self, which: Mask) -> int:
        """What these ask for."""
        return int(allocations(self.trace).requested_bytes[which].sum())

    def where(self, which: Mask) -> tuple[str, str]:
        """The line and the module that hold most of these; "" where not known."""
        line, module = (views.holders(self.trace, key, which) for key in ("line", "module"))
        return line[0].name if line else "", module[0].name if module else ""

    def found(self, kind: str, which: Mask, evidence: str, change: str) -> Finding:
        """A finding about these allocations, alive at the moment."""
        amount = self.bytes(which)
        return Finding(kind, amount, amount, *self.where(which), evidence, change)


def at_peak(trace: Trace, size: Size, device: str | None = None) -> Situation:
    """The device's peak."""
    peak = views.peak(trace, device)
    alive = views.alive(trace, "peak", device)
    return Situation(trace, peak.device, peak.position, peak.phase, alive, size)


def findings(trace: Trace, size: Size, device: str | None = None) -> list[Finding]:
    """Everything that was found, the most bytes first."""
    if len(allocations(trace)) == 0:
        return []
    now = at_peak(trace, size, device)
    least = _WORTH * now.bytes(now.alive)
    rows = list(growth(now))  # however little: it goes on
    for rule in (held, evaluation, late_zero_grad, twins, cache):
        rows += [finding for finding in rule(now) if finding.bytes >= least]
    return sorted(rows, key=lambda finding: -finding.bytes)


# ---------------------------------------------------------------- growth


def growth(now: Situation) -> Iterator[Finding]:
    """Steps are alike; what each leaves behind, something keeps."""
    turns = _turns(now)
    if turns is None or min(turns.growth) <= 0:
        return
    trace, alloc = now.trace, allocations(now.trace)
    each = int(np.median(turns.growth))
    here = views.on_device(trace, now.device) & (alloc.completed < 0)
    kept = here & np.isin(turns.of_allocation, turns.settled)
    lines = views.holders(trace, "line", kept) or views.holders(trace, "module", kept)
    count = len(turns.settled)
    for holder in [row for row in lines[:_MOST_LINES] if row.bytes // count > each // 10]:
        key = "line" if views.holders(trace, "line", kept) else "module"
        found = views.group(trace, key, kept)
        own = np.zeros(len(alloc), np.bool_)
        own[np.flatnonzero(kept)[found.codes == found.names.index(holder.name)]] = True
        yield _growing(now, turns.word, own, holder.bytes // count)
    if not lines:
        yield _growing(now, turns.word, kept, each)


def _growing(now: Situation, word: str, own: Mask, each: int) -> Finding:
    line, module = now.where(own)
    by, change = "something keeps", "keep a number, not a tensor: loss.item(), or x.detach()"
    if variable := _keeper(now, own):
        by = f"`{variable}` keeps"
        change = f"put numbers into `{variable}`, not tensors: loss.item(), or x.detach()"
    made = f", made at {line or module}" if line or module else ""
    return Finding(
        "growth",
        each,
        now.bytes(own & now.alive),
        line,
        module,
        f"Memory grows by {now.size(each)} per {word}{made}: {by} what each {word} makes",
        change,
    )


def _keeper(now: Situation, own: Mask) -> str:
    """The variable that held most of these at the end; else the one with the largest graph.

    A variable is overwritten in each step, so it is known by what the last one put into it.
    """
    variables = now.trace.meta.get("variables")
    if not isinstance(variables, list):
        return ""
    alloc = allocations(now.trace)
    own = _alike_at_the_end(now, own)
    size = dict(zip(alloc.address[own].tolist(), alloc.requested_bytes[own].tolist(), strict=True))
    held: dict[str, int] = {}
    nodes: dict[str, int] = {}
    for row in variables:
        if not isinstance(row, dict) or not isinstance(row.get("addresses"), list):
            continue
        name, graph = str(row.get("name", "")), row.get("graph_nodes")
        distinct = {address for address in row["addresses"] if isinstance(address, int)}
        held[name] = sum(size.get(address, 0) for address in distinct)
        nodes[name] = graph if isinstance(graph, int) else 0
    most = max(held, key=lambda name: held[name], default="")
    if most and held[most] > sum(size.values()) // 2:
        return most
    largest = max(nodes, key=lambda name: nodes[name], default="")
    return largest if largest and nodes[largest] else ""


def _alike_at_the_end(now: Situation, own: Mask) -> Mask:
    """What is still there of the same size, line and op as any of these."""
    alloc = allocations(now.trace)
    alive = alloc.completed < 0
    kinds = np.stack([alloc.requested_bytes, alloc.line, alloc.op, alloc.category], axis=1)
    _, kind = np.unique(kinds, axis=0, return_inverse=True)
    found: Mask = alive & np.isin(kind.ravel(), kind.ravel()[own])
    return found


@dataclass(frozen=True)
class _Turns:
    """What repeats: steps or, where there are none, calls of the outermost module."""

    word: str
    growth: list[int]  # of each turn but the first
    of_allocation: I64
    settled: NDArray[np.intp]  # turns whose leftovers the next one would have freed


def _turns(now: Situation) -> _Turns | None:
    rows = views.step_rows(now.trace, now.device)
    if len(rows) >= 3:
        growth = [row.growth_bytes for row in rows[1:]]  # the first makes optimizer state
        step = allocations(now.trace).step.astype(np.int64)
        return _Turns("step", growth, step, np.arange(1, len(rows) - 1))
    calls = _outermost_calls(now.trace)
    if len(rows) > 1 or len(calls) < 4:
        return None
    begins = scopes.tree(now.trace).begin[calls]
    positions = np.searchsorted(now.trace.events.ticks, begins)
    here = views.on_device(now.trace, now.device)
    none = np.zeros(len(here), np.int64)
    changes, (level,) = views.level_columns(now.trace, here, none, 1)
    if len(changes) == 0:
        return None
    before = np.searchsorted(changes, positions)  # how many changes came before each call
    at_start = now.bytes(here & (allocations(now.trace).start < 0))
    levels = np.concatenate([[at_start], level])[before]
    made = np.searchsorted(positions, allocations(now.trace).start, side="right") - 1
    return _Turns("call", np.diff(levels)[1:].tolist(), made, np.arange(1, len(calls) - 1))


def _outermost_calls(trace: Trace) -> NDArray[np.intp]:
    """The calls that the program itself made of modules, in order."""
    tree = scopes.tree(trace)
    found = (tree.kind == MODULE) & (tree.module[tree.parent] == 0) & (tree.node == 0)
    return np.flatnonzero(found & (tree.thread == phases.main_thread(trace)))


# ---------------------------------------------------------------- kept in vain


def held(now: Situation) -> Iterator[Finding]:
    """Activations that outlive a backward which went to its end: a variable keeps them."""
    alloc, moments = allocations(now.trace), phases.moments(now.trace)
    line = phases.timeline(now.trace)
    exact = bool((now.trace.events.action == ACTION["saved"]).any())
    backwards = line.phase == phases.BACKWARD_PHASE
    over = np.append(line.ticks[1:], NEVER)[backwards]  # when each was over
    kept_from = line.kept_from[moments.made_interval]
    following = np.searchsorted(line.ticks[backwards], kept_from)
    ended = np.append(over, NEVER)[np.minimum(following, len(over))]
    whole = (kept_from != NEVER) & (ended != NEVER) & (moments.freed_ticks > ended)
    which = now.of_category("activations") & (alloc.role == ROLE["held"]) & (whole | exact)
    which &= alloc.step >= _step_at(now)  # older ones are growth, or will be
    nodes = bool((scopes.tree(now.trace).kind == scopes.NODE).any())
    if not which.any() or not (exact or nodes):
        return  # without its nodes nothing is known of what a backward let go
    variable = _keeper(now, which)
    what = "autograd did not save them" if exact else "the backward did not free them"
    keeper = f"`{variable}` keeps them" if variable else "a variable keeps them"
    yield now.found(
        "held",
        which,
        f"{now.size(now.bytes(which))} of activations are held: {what}, {keeper}",
        f"del {variable} before loss.backward()"
        if variable
        else "del it before loss.backward(), or return only the loss",
    )


def evaluation(now: Situation) -> Iterator[Finding]:
    """A module ran with grad mode on, and nothing ever went backward through that call."""
    tree, alloc = scopes.tree(now.trace), allocations(now.trace)
    calls = _outermost_calls(now.trace)
    calls = calls[tree.end[calls] != NEVER]
    if len(calls) < 2 or not (tree.kind == OP).any():
        return
    is_call = np.zeros(len(tree.kind), np.bool_)
    is_call[calls] = True
    call_of = tree.nearest_context(is_call)
    went_back = np.zeros(len(tree.kind), np.bool_)
    went_back[call_of[tree.forward]] = True
    with_grad = np.zeros(len(tree.kind), np.bool_)
    with_grad[call_of[(tree.flags & SCOPE_GRAD != 0) & (tree.kind == OP)]] = True
    in_vain = is_call & with_grad & ~went_back
    in_vain[calls[-1]] = False  # its backward may come after the trace
    made_in = call_of[alloc.scope]
    freed = phases.moments(now.trace).freed_ticks
    outlived = in_vain[made_in] & (freed > tree.end[made_in]) & (alloc.start >= 0)
    outlived &= views.on_device(now.trace, now.device)
    # What the call's last op returned is its result, which it would keep in any case.
    last = np.zeros(len(tree.kind), np.uint32)
    np.maximum.at(last, made_in[outlived], alloc.scope[outlived])
    outlived &= alloc.scope != last[made_in]
    if not outlived.any():
        return
    per_call = views.sums(made_in[outlived], alloc.requested_bytes[outlived], len(tree.kind))
    worst = made_in == int(per_call.argmax())
    line, module = now.where(outlived & worst)
    count = int((per_call > 0).sum())
    times = f"{count} calls of a module" if count > 1 else "A call of a module"
    yield Finding(
        "evaluation",
        int(per_call.max()),
        now.bytes(outlived & now.alive),
        line,
        module,
        f"{times} kept up to {now.size(int(per_call.max()))} for a backward that never came",
        "wrap the evaluation in `with torch.no_grad():`",
    )


def late_zero_grad(now: Situation) -> Iterator[Finding]:
    """Gradients of the step before are still there in the forward whose peak it is."""
    if now.phase != "forward":
        return
    alloc = allocations(now.trace)
    step = _step_at(now)
    which = now.of_category("gradients") & (alloc.step < step)
    if not which.any():
        return
    yield now.found(
        "late_zero_grad",
        which,
        f"The peak is in forward while {now.size(now.bytes(which))} of gradients of the step "
        "before are still there",
        "call optimizer.zero_grad() before forward",
    )


def _step_at(now: Situation) -> int:
    if now.position < 0:
        return 0
    at = slice(now.position, now.position + 1)
    return int(phases.timeline(now.trace).step_at(now.trace.events.ticks[at])[0])


def twins(now: Situation) -> Iterator[Finding]:
    """The same numbers twice: a weight, and autocast's copy of it in 16 bits."""
    alloc = allocations(now.trace)
    which = now.of_category("weights") & (alloc.role == ROLE["autocast_copy"])
    if which.any():
        amount = now.size(now.bytes(which))
        yield now.found(
            "twins",
            which,
            f"{amount} are 16-bit copies of float32 weights that autocast made",
            "model.to(torch.bfloat16), where the optimizer allows it, keeps one of the two",
        )


def cache(now: Situation) -> Iterator[Finding]:
    """The allocator holds much more than was ever needed at once."""
    found: Any = blocks.device_bytes(now.trace, now.alive, now.position, now.device)
    if found.reserved is None or found.allocated is None:
        return
    spare = found.reserved - found.allocated
    if spare > max(_CACHE_SHARE * found.reserved, _SMALLEST_CACHE):
        yield Finding(
            "cache",
            spare,
            0,
            "",
            "",
            f"The allocator reserves {now.size(found.reserved)} where the peak needs "
            f"{now.size(found.allocated)}: pieces that did not fit, or a larger peak before",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )
