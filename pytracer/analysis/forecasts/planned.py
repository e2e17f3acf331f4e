"""What a plan changes in a trace: its events, its memory and its time.

A checkpoint (`torch.utils.checkpoint`, non-reentrant) changes each call of its module so:

- The tensors that autograd keeps for the call are freed when the call ends, except the module's
  result. (Some are freed earlier, which is not recorded. To free them only at the end can only make
  a prediction larger.)
- The module's input stays until the call's backward is over.
- Before the first node of the call's backward, its forward runs again, up to the last tensor that
  autograd keeps. The remade tensors end where the recorded ones ended.
- Autocast's copies of weights stay until the model's call ends, and are made again.
- A linear layer's node frees its remade tensors before it sums its bias's gradient.
- A library that keeps scratch memory per thread takes it once more, for the backward's thread.
- On the CPU, the generator's state is kept in between, and a second one while the forward runs
  again.

An offloaded tensor (`pytracer.recording.offload`) is freed when the call ends, comes back with the first node
of the call's backward, and is freed after its use. The module's input stays. Of its result, a copy
comes back.

On CUDA, a plan fits if the allocator never has to give its cache back. A run frees a little earlier
or later than its replay, so its blocks lie elsewhere; the cache is the reserve for that.

The time is an estimate. A forward that runs again takes its share of the step: by the costs of its
operators if they were recorded; otherwise, on CUDA, by the bytes that it allocates, and on the CPU
by the clock. Offloaded tensors go over the bus twice.

Candidates are the layers of stacks (`h.3`), otherwise modules that the model itself calls. Greedy
orders propose plans: most bytes for the least time first, from the first layer on, and from the
last layer on. If there are few candidates, all plans are tried.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.allocator import replay
from pytracer.analysis.allocator.steps import Steps, steps
from pytracer.analysis.answers import training_steps
from pytracer.analysis.facts import phases, scopes, timelines, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.scopes import MODULE, NEVER, NODE
from pytracer.analysis.forecasts.module_calls import ModuleCalls, grouped, has_inside
from pytracer.analysis.forecasts.tallest_steps import Part
from pytracer.basics.names import called_layer, layers_alike
from pytracer.cost import measurements, per_module
from pytracer.data import meta
from pytracer.data.model_names import in_code, module_text
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORY, I64, PHASE, ROLE, Mask

_ALL_PLANS_OF = 8  # candidates: 256 plans
_MOST_COUNTS = 128  # of modules, in an order of more candidates than that
_WORTH = 0.005  # of the activations at the peak: a module that keeps less is no candidate
_FORWARD = 1 / 3  # of a step, if its phases were not timed
_BUS = 25e9  # bytes a second between the device and pinned memory
_MOST_OFFLOADED = 6  # choices of how many modules to offload
_BESIDE = 16  # blocks that a module keeps beside its result are that many times smaller
_GENERATOR_BYTES = 5056  # the CPU generator's state; CUDA's is kept on the CPU
_LINEAR_NODE = "AddmmBackward"


@dataclass(frozen=True)
class Plan:
    """A choice of modules, and its predicted memory and time. Sizes are bytes."""

    modules: tuple[str, ...]
    peak: int  # of the requested bytes
    peak_reserved: int | None  # by CUDA's allocator; None on the CPU, or where nobody asked
    time_ratio: float  # a step's time with the plan, over that without it
    fits: bool  # in the budget
    offloaded: tuple[str, ...] = ()  # modules whose saved tensors wait in the host's memory
    pinned: int = 0  # the host memory for those


# ---------------------------------------------------------------- one module


@dataclass
class _Edits:
    """Events that a plan adds to the recorded ones."""

    position: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)  # among events at one position
    kind: list[int] = field(default_factory=list)
    block: list[int] = field(default_factory=list)  # the recorded block, for its size and lane
    again: list[bool] = field(default_factory=list)  # whether it is the remade block instead
    bytes: list[int] = field(default_factory=list)  # the change of the bytes in use

    def add(self, position: int, order: int, kind: int, block: int, again: bool, size: int) -> None:
        self.position.append(position)
        self.order.append(order)
        self.kind.append(kind)
        self.block.append(block)
        self.again.append(again)
        self.bytes.append(size)


def _i64(values: list[int]) -> I64:
    return np.array(values, np.int64)


_LAST = 2**62
_ALLOC, _FREE = 0, 2


@dataclass
class Unit:
    """A module that could be checkpointed."""

    name: str
    edits: _Edits
    dropped: int  # bytes that a checkpoint frees in one step
    again: float  # its forward's share of a step's time
    begins: int  # the position at which its forward first runs again
    ops: frozenset[int]  # the ops in it, as rows of the string table
    offload: _Edits  # the events if its saved tensors wait on the host instead
    moved: int  # bytes of one step that wait there
    pinned: int  # the pinned memory for them


class Work:
    """The facts about one trace that plans need, and its plans; or about a part of it."""

    def __init__(
        self, trace: Trace, device: str, part: Part | None = None, *, caches: bool = True
    ) -> None:
        """Without `caches`, what layers add to a cache ends with their backward.

        transformers' own checkpoints turn its cache of keys and values off.
        """
        self.trace, self.device, self.part, self.caches = trace, device, part, caches
        self.alloc = allocations(trace)
        self.tree = scopes.tree(trace)
        self.own = usage.on_device(trace, device)
        self.looked_at = self.own if part is None else self.own & part.blocks(trace)
        self.size = self.alloc.requested_bytes.astype(np.int64)
        self.moments = phases.moments(trace)
        self.end = np.where(self.alloc.completed < 0, np.int64(_LAST), self.alloc.completed)
        self.by_start = np.argsort(self.alloc.start, kind="stable")
        self.starts = self.alloc.start[self.by_start]
        ends = timelines.timeline(trace).step_ends
        self.steps = max(len(ends), 1) if part is None else len(part.before_and_in)
        self.forward_share, self.forward_ticks, self.step_ns = self._times()
        self.forward_bytes = int(self.size[self.looked_at & self._in_forward].sum())
        self.units = self._units()

    @property
    def _in_forward(self) -> Mask:
        forward: Mask = self.alloc.phase == PHASE["forward"]
        return forward

    def _times(self) -> tuple[float, int, float]:
        """A forward's share of a step, its ticks on the host, and a step's nanoseconds.

        The share is by the device's clock if it was measured.
        """
        medians = training_steps.phase_medians(self.trace)
        tree = self.tree
        outermost = np.flatnonzero((tree.kind == MODULE) & (tree.module[tree.parent] == 0))
        outermost = outermost[tree.end[outermost] != NEVER]
        forward = phases.scope_phases(self.trace)[outermost] == PHASE["forward"]
        took = self._ticks(outermost[forward])
        if medians is None or not took or "forward" not in medians.by_phase:
            return _FORWARD, max(took, 1), float("inf")
        total = sum(medians.by_phase.values())
        return medians.by_phase["forward"] / total, took, total

    def _again(self, name: str, calls: NDArray[np.intp], made: int) -> float:
        """Its forward's share of a step's time; `made` is the bytes it allocates in all steps."""
        costs = per_module.per_call(self.trace)
        cost = costs.get(module_text(name))
        if cost is not None:
            took = cost.forward_ms * cost.calls * 1e6
            return took / max(measurements.measured(self.trace).busy_ns, 1)
        if self.device == "cpu":
            return self.forward_share * self._ticks(calls) / self.forward_ticks
        return self.forward_share * made / max(self.forward_bytes, 1)

    def _ticks(self, calls: NDArray[np.intp]) -> int:
        """The host's time of these calls per step: the median, without the first step."""
        if not len(calls):
            return 0
        took = (self.tree.end[calls] - self.tree.begin[calls]).astype(np.int64)
        step = timelines.timeline(self.trace).step_at(self.tree.begin[calls])
        by_step = np.bincount(step, weights=took, minlength=int(step.max()) + 1)[np.unique(step)]
        return int(np.median(by_step[1:] if len(by_step) > 1 else by_step))

    # ------------------------------------------------------------ candidates

    def _units(self) -> dict[str, Unit]:
        kept = self.looked_at & (self.alloc.category == CATEGORY["activations"])
        kept &= self.alloc.phase == PHASE["forward"]
        layers, stacks = self._calls_by_name()
        self.all_calls = layers | stacks
        if self.part is not None:
            layers, stacks = (self.part.calls(self.trace, each) for each in (layers, stacks))
        floor = _WORTH * int(self.size[kept].sum())
        units = dict(self._worthwhile(layers, floor))
        # A stack is a choice only if none of its layers is: they keep no more than their results.
        chosen = sorted(units)
        bare = {s: c for s, c in stacks.items() if not has_inside(s, chosen)}
        units |= dict(self._worthwhile(bare, floor))
        first_call = {name: its[0] for name, its in (layers | bare).items()}
        return dict(sorted(units.items(), key=lambda each: first_call[each[0]]))

    def _worthwhile(
        self, by_name: dict[str, NDArray[np.intp]], floor: float
    ) -> Iterator[tuple[str, Unit]]:
        every = np.concatenate([[], *by_name.values()]).astype(np.intp)
        found = self._calls(every)
        around = found.around[self.tree.parent[every]]
        # Of calls inside calls of other modules, each module has the blocks of its own calls.
        apart = bool(((around != 0) & (self.tree.name[around] != self.tree.name[every])).any())
        for name, calls in by_name.items():
            unit = self._unit(name, calls, self._calls(calls) if apart else found)
            if unit is not None and unit.dropped * self.steps > floor / 4:
                yield name, unit

    def _calls(self, calls: NDArray[np.intp]) -> ModuleCalls:
        return ModuleCalls(self.tree, calls, self.alloc.scope, self.looked_at & self._in_forward)

    def why_no_units(self) -> str:
        """The reason why no module can be checkpointed, and what to do."""
        kept = self.own & (self.alloc.category == CATEGORY["activations"])
        backward = bool((self.tree.kind == NODE).any())
        if kept.any() and backward and bool((self.tree.kind == MODULE).any()):
            return (
                "no module of this trace keeps more than its own result, which the next one reads, so "
                "checkpointing single modules saves nothing: checkpoint several together, as "
                "torch.utils.checkpoint.checkpoint_sequential does"
            )
        return (
            "no module of this trace keeps activations for a backward, so there is nothing to "
            "checkpoint: record whole training steps, with the model's modules"
        )

    def _calls_by_name(self) -> tuple[dict[str, NDArray[np.intp]], dict[str, NDArray[np.intp]]]:
        """The forward calls of each layer of a stack or child of a model, and of the stacks."""
        roots = meta.of(self.trace).roots
        tree = self.tree
        calls = np.flatnonzero((tree.kind == MODULE) & (tree.end != NEVER))
        calls = calls[phases.scope_phases(self.trace)[calls] == PHASE["forward"]]
        by_name: dict[str, list[NDArray[np.intp]]] = {}
        for row, its in grouped(tree.name[calls], calls).items():
            by_name.setdefault(in_code(self.trace.strings[row]), []).append(its)
        called = set(by_name)
        result: dict[str, NDArray[np.intp]] = {}
        for name, parts in by_name.items():
            its = np.sort(np.concatenate(parts))
            if called_layer(name, called) != name or layers_alike(name) == name:
                is_child = "." not in roots.split(name)[1]
                its = its[is_child & (tree.module[tree.parent[its]] != 0)]
            if name and len(its):
                result[name] = its
        # A stack that is itself called, such as a Sequential, is less of a choice than its layers.
        in_order = sorted(result)
        stacks = {name for name in result if has_inside(name, in_order)}
        layers = {name: its for name, its in result.items() if name not in stacks}
        return layers, {name: its for name, its in result.items() if name in stacks}

    def _unit(self, name: str, calls: NDArray[np.intp], found: ModuleCalls) -> Unit | None:
        tree, trace = self.tree, self.trace
        unit = Unit(name, _Edits(), 0, 0.0, _LAST, frozenset(), _Edits(), 0, 0)
        kept_calls, made = [], 0
        for call in calls.tolist():
            own_nodes = found.nodes(call)
            if len(own_nodes) == 0:
                continue  # no backward followed
            first = int(np.searchsorted(trace.events.ticks, tree.begin[own_nodes].min()))
            inside = found.blocks(call)
            self._call(unit, call, first, inside, found.around)
            kept_calls.append(call)
            made += int(self.size[inside].sum())
            unit.begins = min(unit.begins, first)
            unit.ops |= frozenset(self.alloc.op[inside].tolist())
        if not unit.edits.position:
            return None
        timed = np.array(kept_calls) if self.part is None else self.all_calls[name]
        unit.again = self._again(name, timed, made)
        for total in ("dropped", "moved", "pinned"):
            setattr(unit, total, getattr(unit, total) // self.steps)
        return unit

    def _call(self, unit: Unit, call: int, first: int, own: NDArray[np.intp], call_of: Any) -> None:
        """Adds the events of one call; `first` is the first event of its backward."""
        edits, alloc, tree = unit.edits, self.alloc, self.tree
        left = int(np.searchsorted(self.trace.events.ticks, tree.end[call]))  # the call's end
        kept = own[self.end[own] >= first]
        copies = alloc.role[kept] == ROLE["autocast_copy"]
        saved = kept[(alloc.category[kept] == CATEGORY["activations"]) & ~copies]
        copied = kept[copies]
        freed_by = tree.forward[tree.node[self.moments.freed_scope[saved]]]
        returned = call_of[freed_by] != call
        cached = np.zeros(len(saved), np.bool_) if self.caches else returned & (freed_by == 0)
        alive = own[self.end[own] >= left]
        if len(alive):
            # The result was made last, except for the few bytes that a norm keeps beside it.
            sized = alive[self.size[alive] * _BESIDE >= self.size[alive].max()]
            result = saved == sized[alloc.start[sized].argmax()]
            returned, cached = returned | result, cached & ~result
        within = saved[returned & (call_of[freed_by] == call)]
        cached, saved = saved[cached], saved[~returned]
        if len(saved) == 0:
            return
        over = int(self.end[saved].max())  # only then is the checkpoint itself freed
        self._keep_input(edits, call, over)
        saved = np.concatenate([saved, cached])
        root = self._root_end(call)
        last = int(alloc.start[np.concatenate([saved, copied])].max())
        for k in saved.tolist():
            edits.add(left, 0, _FREE, k, False, -int(self.size[k]))
        for k in copied.tolist():
            edits.add(root, 0, _FREE, k, False, -int(self.size[k]))
        if self.device == "cpu":
            edits.add(int(alloc.start[own].min()), -1, -1, 0, False, _GENERATOR_BYTES)
            edits.add(over, 0, -1, 0, False, -_GENERATOR_BYTES)
            # A second state of the generator, while the forward runs again.
            edits.add(first, -_LAST, -1, 0, False, _GENERATOR_BYTES)
            edits.add(first, -1, -1, 0, False, -_GENERATOR_BYTES)
        remade = {*saved.tolist(), *copied.tolist()}
        for k in own[alloc.start[own] <= last].tolist():
            # Before all other events at that position, in the order of the forward.
            begins = int(alloc.start[k]) * 2 - _LAST // 2
            edits.add(first, begins, _ALLOC, k, True, int(self.size[k]))
            if k in remade:
                self._free_remade(edits, k, over)
            else:
                ends = min(int(self.end[k]), last + 1) * 2 + 1 - _LAST // 2
                edits.add(first, ends, _FREE, k, True, -int(self.size[k]))
        unit.dropped += int(self.size[saved].sum())
        if self.part is None:
            self._move(unit, left, root, first, (saved, copied, within))

    def _move(
        self,
        unit: Unit,
        left: int,
        root: int,
        first: int,
        blocks: tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]],
    ) -> None:
        """Adds the events if these wait on the host: saved, copies of weights, and the result."""
        saved, copied, within = blocks
        edits = unit.offload
        for gone, which in ((left, saved), (root, copied)):
            for k in which.tolist():
                edits.add(gone, 0, _FREE, k, False, -int(self.size[k]))
                edits.add(
                    first, int(self.alloc.start[k]) - _LAST // 2, _ALLOC, k, True, self._size(k)
                )
                self._free_remade(edits, k, int(self.end[k]))
        for k in within.tolist():
            edits.add(first, int(self.alloc.start[k]) - _LAST // 2, _ALLOC, k, True, self._size(k))
            edits.add(int(self.end[k]), 0, _FREE, k, True, -self._size(k))
        moved = np.concatenate(blocks)
        unit.moved += int(self.size[moved].sum())
        unit.pinned += sum(1 << (int(size) - 1).bit_length() for size in self.size[moved])

    def _size(self, k: int) -> int:
        return int(self.size[k])

    def _free_remade(self, edits: _Edits, k: int, over: int) -> None:
        """Frees a remade block where the recorded one ended, or before its node's bias sum.

        A block that a cache kept ends with the call's backward, which is then over.
        """
        end, size = int(self.end[k]), int(self.size[k])
        used = self._bias_sums.get(int(self.tree.node[self.moments.freed_scope[k]]), end)
        used = min(used, over)
        edits.add(used, 0, _FREE, k, True, -size if used < end else 0)
        if used < end:
            edits.add(end, 3, -1, k, False, size)  # the recorded free subtracts it there again

    @cached_property
    def _bias_sums(self) -> dict[int, int]:
        """Per linear layer's node, the position at which it sums its bias's gradient.

        It has three results, the smallest last. Autograd keeps tensors that it saved itself until
        the sum is over; tensors that a checkpoint remade are freed before.
        """
        node = self.tree.node[self.moments.made_scope]
        named = scopes.scopes_named(self.trace, lambda text: text.startswith(_LINEAR_NODE))
        left = self.looked_at & named[node] & (node != self.tree.node[self.moments.freed_scope])
        results: dict[int, list[int]] = {}
        for k in np.flatnonzero(left).tolist():
            results.setdefault(int(node[k]), []).append(k)
        return {
            number: int(self.alloc.start[made[2]])
            for number, made in results.items()
            if len(made) == 3 and self.size[made[2]] < min(self.size[made[0]], self.size[made[1]])
        }

    def _scratch(self, chosen: Iterable[str]) -> _Edits:
        """Scratch memory that a library takes once more, for forwards in the backward's thread."""
        edits = _Edits()
        units = [self.units[name] for name in chosen]
        for k in self._scratch_of_forward:
            begins = [unit.begins for unit in units if int(self.alloc.op[k]) in unit.ops]
            if begins:
                edits.add(min(begins), -_LAST + 1, _ALLOC, k, True, int(self.size[k]))
        return edits

    @cached_property
    def _scratch_of_forward(self) -> list[int]:
        """Blocks that libraries keep to the end for other threads, but not for the backward's."""
        if self.device == "cpu":
            return []
        kept = self.own & (self.alloc.category == CATEGORY["workspaces"]) & (self.end == _LAST)
        backward = np.isin(self.alloc.thread, np.unique(self.tree.thread[self.tree.kind == NODE]))
        there = self.size[kept & backward].tolist()
        return [
            k for k in np.flatnonzero(kept & ~backward).tolist() if int(self.size[k]) not in there
        ]

    def _edits_of(self, chosen: Iterable[str], offloaded: Iterable[str]) -> Iterator[_Edits]:
        yield from (self.units[name].edits for name in chosen)
        yield from (self.units[name].offload for name in offloaded)
        yield self._scratch(chosen)

    def _keep_input(self, edits: _Edits, call: int, over: int) -> None:
        """Adds the events by which a checkpoint keeps the module's input.

        The trace does not show which block is the input. Of the live blocks that the model's call
        has made, it is assumed to be the last of those that are as large as the largest that
        nothing else keeps as long.
        """
        alloc, ticks = self.alloc, self.trace.events.ticks
        begins = int(np.searchsorted(ticks, self.tree.begin[call]))
        # Older blocks belong to the step before: its logits, for example.
        earliest = int(np.searchsorted(ticks, self.tree.begin[self._root_of(call)]))
        first, last = np.searchsorted(self.starts, [earliest, begins])
        numbers = np.sort(self.by_start[first:last])
        alive = self.own[numbers] & (self.end[numbers] >= begins)
        numbers = numbers[alive & (alloc.phase[numbers] == PHASE["forward"])]
        given = numbers[self.end[numbers] < over]
        if not len(given):
            return  # kept anyway, or made before the forward, like a batch
        as_large = numbers[self.size[numbers] == self.size[given].max()]
        k = int(as_large[alloc.start[as_large].argmax()])
        if self.end[k] >= over:
            return
        edits.add(int(self.end[k]), 2, _ALLOC, k, True, int(self.size[k]))
        edits.add(over, 0, _FREE, k, True, -int(self.size[k]))

    def _root_end(self, call: int) -> int:
        """The position at which the outermost module's call around it ends."""
        end = self.tree.end[self._root_of(call)]
        return int(np.searchsorted(self.trace.events.ticks, end))

    def _root_of(self, call: int) -> int:
        """The outermost module's call around it."""
        tree, outer = self.tree, call
        while (around := int(tree.module[tree.parent[outer]])) and around != outer:
            outer = around
        return outer

    # ------------------------------------------------------------ plans

    def proposals(self, pinned: int) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Pairs of modules to checkpoint and modules to offload, from none to all."""
        seen = set()
        for offloaded in self._offloads(pinned):
            for chosen in self._checkpoints(offloaded):
                if (chosen, offloaded) not in seen:
                    seen.add((chosen, offloaded))
                    yield chosen, offloaded

    def _offloads(self, pinned: int) -> Iterator[tuple[str, ...]]:
        """Prefixes of the modules: the first modules' tensors wait longest.

        The longest prefix is as many as the host has room for.
        """
        names: list[str] = []
        room = pinned
        for name, unit in self.units.items():
            if unit.pinned > room:
                break
            room -= unit.pinned
            names.append(name)
        counts = {len(names) * part // _MOST_OFFLOADED for part in range(_MOST_OFFLOADED + 1)}
        for count in sorted(counts):
            yield tuple(names[:count])

    def _checkpoints(self, offloaded: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """Choices among the modules that are not offloaded."""
        names = [name for name in self.units if name not in offloaded]
        if len(names) <= _ALL_PLANS_OF:
            for count in range(len(names) + 1):
                yield from combinations(names, count)
            return
        worth = sorted(names, key=lambda n: -self.units[n].dropped / max(self.units[n].again, 1e-9))
        place = {name: number for number, name in enumerate(names)}
        parts = min(len(names), _MOST_COUNTS)
        for order in (names, worth, names[::-1]):
            for part in range(parts + 1):
                count = len(names) * part // parts
                yield tuple(sorted(order[:count], key=place.__getitem__))

    def judge(self, chosen: tuple[str, ...], offloaded: tuple[str, ...], budget: int) -> Plan:
        """Replays the plan."""
        peak = self.peak(chosen, offloaded)
        reserved, fits = None, peak <= budget
        if self.device != "cpu":
            steps = self.steps_of(chosen, offloaded)
            counted = replay.counted_as_recorded(self.trace, self.device, steps, budget)
            fits = counted["failed_step"] < 0 and counted["retries"] == 0
            reserved = counted["peak_reserved"]
            if not fits:
                counted = replay.counted_as_recorded(self.trace, self.device, steps)
                reserved = counted["peak_reserved"]
        pinned = sum(self.units[name].pinned for name in offloaded)
        ratio = self.time_ratio(chosen, offloaded)
        return Plan(chosen, peak, reserved, ratio, fits, offloaded, pinned)

    def in_orders(self, plan: Plan, budget: int | None) -> tuple[tuple[int, int] | None, int]:
        """What the plan reserves in a few orders of segments, and in how many it does not fit.

        At most, gaps of the time before the recording lie beside that.
        """
        if self.device == "cpu":
            return None, 0
        steps = self.steps_of(plan.modules, plan.offloaded)
        beside = replay.gaps(self.trace, self.device) or 0
        left = None if budget is None else max(budget - beside, 0)
        rules = replay.recorded_rules(self.trace, self.device, left)
        tried = replay.in_orders(steps, rules, replay.FEW_ORDERS)
        if tried["failed"] == tried["orders"]:
            return None, tried["failed"]
        return (tried["lowest_peak"], tried["highest_peak"] + beside), tried["failed"]

    def time_ratio(self, chosen: tuple[str, ...], offloaded: tuple[str, ...] = ()) -> float:
        """A step's time with the plan, over that without it."""
        over_the_bus = 2e9 * sum(self.units[name].moved for name in offloaded) / _BUS
        return 1 + sum(self.units[name].again for name in chosen) + over_the_bus / self.step_ns

    def peak(self, chosen: tuple[str, ...], offloaded: tuple[str, ...] = ()) -> int:
        """The plan's highest requested bytes."""
        made = [
            (_i64(edits.position), _i64(edits.order), _i64(edits.bytes))
            for edits in self._edits_of(chosen, offloaded)
        ]
        if self.part is not None:
            position, order, delta = (np.concatenate(each) for each in zip(*made, strict=True))
            return self.part.highest(self.trace, self.device, (position, order, delta))
        position, _, delta = self._base
        columns = [(position, np.where(delta < 0, 1, 2), delta), *made]
        position, order, delta = (np.concatenate(each) for each in zip(*columns, strict=True))
        by_time = np.lexsort((order, position))
        return int(np.cumsum(delta[by_time]).max(initial=0))

    @cached_property
    def _base(self) -> tuple[I64, I64, I64]:
        """The recorded changes: their positions, blocks and bytes."""
        later, changed, change = usage.changes_where(self.trace, self.own)
        before = np.flatnonzero(self.own & (self.alloc.start < 0))
        position = np.concatenate([np.full(len(before), -1), later])
        block = np.concatenate([before, changed])
        delta = np.concatenate([self.size[before], change])
        return position.astype(np.int64), block.astype(np.int64), delta

    def steps_of(self, chosen: tuple[str, ...], offloaded: tuple[str, ...] = ()) -> dict[str, Any]:
        """The allocator's steps with the plan: the recorded ones and the plan's."""
        base = steps(self.trace, self.device)
        columns = {name: base.columns[name] for name in ("kind", "block", "bytes", "lane")}
        lanes = self._lane_of_block(base)
        made = int(columns["block"].max(initial=0)) + 1
        position, order = [base.position], [np.full(len(base.position), 1)]
        parts: dict[str, list[Any]] = {name: [values] for name, values in columns.items()}
        for edits in self._edits_of(chosen, offloaded):
            real = _i64(edits.kind) >= 0
            block = _i64(edits.block)[real]
            again = np.array(edits.again, np.bool_)[real]
            numbers = np.where(again, made + np.searchsorted(np.unique(block[again]), block), block)
            made += int(again.sum())
            position.append(_i64(edits.position)[real])
            order.append(_i64(edits.order)[real])
            parts["kind"].append(_i64(edits.kind)[real].astype(np.uint8))
            parts["block"].append(numbers.astype(np.uint32))
            parts["bytes"].append(self.size[block].astype(np.uint64))
            parts["lane"].append(lanes[block])
        joined = {name: np.concatenate(values) for name, values in parts.items()}
        by_time = np.lexsort((np.concatenate(order), np.concatenate(position)))
        ordered = {name: values[by_time] for name, values in joined.items()}
        return {**base.columns, **ordered}

    def _lane_of_block(self, base: Steps) -> NDArray[np.uint32]:
        lanes = np.zeros(len(self.size), np.uint32)
        made = base.columns["kind"] == _ALLOC
        lanes[base.columns["block"][made]] = base.columns["lane"][made]
        return lanes
