"""The rules of pytracer/analysis/facts/categories.py, one allocation at a time: what the fast version is
tested against. Phases and intervals are taken as given; they have tests of their own.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from pytracer.analysis.facts import phases, timelines
from pytracer.data.recorded import Trace
from pytracer.data.schema import (
    ACTIONS,
    CATEGORIES,
    DEVICE_TYPES,
    PHASES,
    SCOPE_GRAD,
    SCOPE_GRAPH,
    SCOPE_KINDS,
)
from tests.lifetimes_reference import match_lifetimes

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"}
PRODUCTS |= {"MmBackward0", "AddmmBackward0", "BmmBackward0", "BaddbmmBackward0"}
GATHERS = re.compile(
    r"FSDP::(all_gather_copy_out|pre_forward|pre_backward|[a-z_]*prefetch)"
    r"|FullyShardedDataParallel._(pre_forward|pre_backward_hook|post_backward_prefetch)"
)
REDUCES = ("FSDP::post_backward", "FullyShardedDataParallel._post_backward")
CONSTANTS = re.compile(r"aten::(new_)?(zeros|ones|full)(_like)?")
CUBLAS_SIZES = {33_554_432, 8_519_680, 4_194_304, 1_048_576}


@dataclass
class Allocation:
    """What the rules ask about one allocation."""

    number: int
    start: int
    end: int
    size: int
    place: int
    labels: list[int] = field(default_factory=list)  # rows of the label table, in time
    labelled_at: list[int] = field(default_factory=list)  # rows of the event table
    saved: bool = False
    saved_at: list[int] = field(default_factory=list)  # rows of the event table


@dataclass
class Scope:
    number: int
    kind: str
    name: str
    parent: int
    flags: int
    is_open: bool


class Reference:
    """Walks up the tree of scopes wherever the fast version has columns."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        ended = set(trace.scope_ends.scope.tolist())
        self.scopes = [Scope(0, "", "", 0, 0, False)]
        for i in range(len(trace.scopes.ticks)):
            kind = SCOPE_KINDS[trace.scopes.kind[i]]
            name = trace.strings[trace.scopes.name[i]]
            parent = int(trace.scopes.parent[i])
            flags = int(trace.scopes.flags[i])
            self.scopes.append(Scope(i + 1, kind, name, parent, flags, i + 1 not in ended))
        self.has_ops = any(scope.kind == "op" for scope in self.scopes)
        self.moments = phases.moments(trace)
        self.line = timelines.timeline(trace)
        self.allocations = self._read()
        self._makers: set[tuple[str, str]] | None = None
        self._ahead: set[tuple[str, str, str, int]] | None = None
        self._reads = self._find_reads()
        self._raw: set[int] | None = None

    def _read(self) -> list[Allocation]:
        trace = self.trace
        found = match_lifetimes(trace.events, trace.places)
        rows = [
            Allocation(i, int(start), int(end), int(size), int(place))
            for i, (start, end, size, place) in enumerate(
                zip(found.start, found.end, found.bytes, found.place, strict=True)
            )
        ]
        for position, number in enumerate(found.allocation_of_event):
            action = ACTIONS[trace.events.action[position]]
            if number >= 0 and action == "label":
                rows[number].labels.append(int(trace.events.bytes[position]))
                rows[number].labelled_at.append(position)
            if number >= 0 and action == "saved":
                rows[number].saved = True
                rows[number].saved_at.append(position)
        return rows

    # ------------------------------------------------------------ what surrounds an event

    def around(self, position: int) -> list[Scope]:
        """The scopes around an event, innermost first."""
        chain = []
        number = int(self.trace.events.scope[position]) if position >= 0 else 0
        while number:
            chain.append(self.scopes[number])
            number = self.scopes[number].parent
        return chain

    def innermost(self, position: int, *kinds: str) -> Scope:
        return next((s for s in self.around(position) if s.kind in kinds), self.scopes[0])

    def made_in(self, a: Allocation) -> str:
        return PHASES[self.moments.made_phase[a.number]] if a.start >= 0 else "before"

    def freed_in(self, a: Allocation) -> str:
        return PHASES[self.moments.freed_phase[a.number]] if a.end >= 0 else "never"

    def interval(self, a: Allocation) -> int:
        return int(self.moments.made_interval[a.number])

    # ------------------------------------------------------------ the rules

    def categorize(self, a: Allocation) -> tuple[str, str]:
        """Category and role."""
        labelled = {}
        labels = self.trace.labels
        old = {row for row in a.labels if self.trace.strings[labels.role[row]] == "from_before"}
        has_a_name = [row for row in a.labels if self.trace.labels.name[row] and row not in old]
        others = [row for row in a.labels if row not in old]
        for row in [*has_a_name, *others, *a.labels]:  # that it is old says least, a name most
            category = CATEGORIES[self.trace.labels.category[row]]
            labelled.setdefault(category, row)
        outside = self.made_in(a) in ("other", "data", "before")
        if not outside and not self.is_fresh(a):
            labelled.pop("inputs", None)
        is_replica = self.made_in(a) == "forward" and (
            self.innermost(a.start, "op").name == "Broadcast"
        )
        if is_replica and "weights" not in labelled:
            return "weights", "replica"
        if "weights" in labelled:
            return "weights", self.label_role(a, labelled["weights"])
        if self.gathered(a):
            return "weights", "unsharded"
        if "gradients" in labelled and self.is_inside(a.end, *REDUCES):
            return "gradients", "unsharded"
        for category in ("gradients", "optimizer_state"):
            if category in labelled:
                return category, self.label_role(a, labelled[category], category)
        if self.made_without_grad(a):
            if self.handed(a) and self.kind(a) in self.kinds_of_results():
                return "inputs", "batch"
            if a.saved or self.used(a):
                return "inputs", "target"
        if self.is_batch_or_target(a):
            return "inputs", self.label_role(a, labelled["inputs"]) if (
                "inputs" in labelled
            ) else "target"
        if outside and a.start >= 0 and a.number in self.raw():
            return "inputs", "raw"

        if "workspaces" in labelled:
            return "workspaces", self.label_role(a, labelled["workspaces"])
        if self.recomputed(a):
            return "activations", "recomputed"
        if "activations" in labelled:
            return "activations", self.label_role(a, labelled["activations"])
        if (a.saved and not self.let_go_at_once(a)) or self.freed_by_a_node(a):
            return "activations", "saved"

        if self.is_cublas(a):
            return "workspaces", "cublas"
        if "communication" in labelled:
            return "communication", self.label_role(a, labelled["communication"])
        if self.is_gloos(a.start):
            return "communication", "collective"
        place = self.trace.places
        if place.pool_high[a.place] or place.pool_low[a.place]:
            return "graph_pools", "graph"

        same_interval = self.moments.freed_interval[a.number] == self.interval(a)
        brief = a.start < 0 or same_interval or self.unsettled(a)
        if not brief and a.number in self.teachers() | self.labels_of_evaluations():
            return "inputs", "target"
        if self.held(a):
            return "activations", "held"
        for category in ("functional", "temporaries"):
            if category not in labelled:
                continue
            role = self.label_role(a, labelled[category])
            if role != "from_before" or a.start < 0:
                return category, role
        if a.start < 0:
            return "unknown", ""
        if brief:
            return "temporaries", self.made_in(a)
        if self.made_in(a) == "data":
            return "inputs", "fetched"
        if self.made_in(a) != "forward":
            return "functional", ""
        if self.maker(a) in self.makers_of_caches():
            return "functional", "kv_cache"
        return "functional", "carried" if self.handed(a) else "output"

    def is_batch_or_target(self, a: Allocation) -> bool:
        """If it is nothing that says more."""
        words = {CATEGORIES[self.trace.labels.category[row]] for row in a.labels}
        outside = self.made_in(a) in ("other", "data", "before")
        if "inputs" in words and (outside or self.is_fresh(a)):
            return True
        if not self.forward_is_known(a):
            return False
        if (a.saved or self.used(a)) and outside:
            return True
        return self.kind(a) in self.kinds_fetched_ahead()

    def used(self, a: Allocation) -> bool:
        """An operator with a graph read it outside of modules."""
        return any(block == a.number for block, _, is_used, _ in self._reads if is_used)

    def handed(self, a: Allocation) -> bool:
        """Given to an outermost module."""
        return any(CATEGORIES[self.trace.labels.category[row]] == "inputs" for row in a.labels)

    def kinds_of_results(self) -> set[tuple[str, str, str, int]]:
        """Of what was made without grad mode, handed on, and saved or used by another's forward."""
        return {
            self.kind(a)
            for a in self.allocations
            if (a.saved or self.used(a)) and self.handed(a) and self.made_without_grad(a)
        }

    def made_without_grad(self, a: Allocation) -> bool:
        """By a model that was called without grad mode."""
        modules = [scope for scope in self.around(a.start) if scope.kind == "module"]
        if (
            not modules
            or modules[-1].name == "GraphModule"
            or not self.has_ops
            or self.made_in(a) != "forward"
        ):
            return False
        return not any(self.with_grad(scope, modules[-1].number) for scope in self.scopes)

    def with_grad(self, scope: Scope, call: int) -> bool:
        """An op inside of this call that ran with grad mode on."""
        if scope.kind != "op" or not scope.flags & SCOPE_GRAD:
            return False
        while scope.number not in (0, call):
            scope = self.scopes[scope.parent]
        return scope.number == call and call != 0

    def gathered(self, a: Allocation) -> bool:
        """Made where FSDP gathers weights, and alive after that."""
        shards = ("FSDP::", "FullyShardedDataParallel.")
        around = [s for s in self.around(a.start) if s.kind == "user" and s.name.startswith(shards)]
        if not around or not GATHERS.match(around[0].name):
            return False
        ends = dict(
            zip(
                self.trace.scope_ends.scope.tolist(),
                self.trace.scope_ends.ticks.tolist(),
                strict=True,
            )
        )
        end = ends.get(around[0].number)
        freed = self.trace.events.ticks[a.end] if a.end >= 0 else None
        return end is not None and (freed is None or int(freed) > end)

    def is_inside(self, position: int, *names: str) -> bool:
        return any(s.kind == "user" and s.name.startswith(names) for s in self.around(position))

    # ------------------------------------------------------------ reads

    def outermost_op(self, position: int) -> int:
        """Of the ops one inside another around an event, the one that the program called."""
        around = self.around(position)
        first = next((i for i, scope in enumerate(around) if scope.kind == "op"), None)
        if first is None:
            return 0
        while first + 1 < len(around) and around[first + 1].kind == "op":
            first += 1
        return around[first].number

    def _find_reads(self) -> list[tuple[int, int, bool, int]]:
        """Block, op, whether the op had a graph, and the row of the event table."""
        labels, found = self.trace.labels, []
        for a in self.allocations:
            for row, position in zip(a.labels, a.labelled_at, strict=True):
                role = self.trace.strings[labels.role[row]]
                if CATEGORIES[labels.category[row]] == "unknown" and role in ("used", "read"):
                    op = self.outermost_op(position)
                    found.append((a.number, op, role == "used", position))
        return found

    def raw(self) -> set[int]:
        """What batches and targets of one step were made from."""
        if self._raw is None:
            shown = {"weights", "gradients", "optimizer_state"}
            inputs = set()
            for a in self.allocations:
                words = {CATEGORIES[self.trace.labels.category[row]] for row in a.labels}
                if not words & shown and not self.gathered(a) and self.is_batch_or_target(a):
                    inputs.add(a.number)
            results = self.results()
            self._raw = self.sources(inputs, self.made_of(results))
            self._raw |= self.sources(self.all_used(), results)
        return self._raw

    def all_used(self) -> set[int]:
        return {number for number, _, is_used, _ in self._reads if is_used}

    def teachers(self) -> set[int]:
        """Results without grad mode from which operators made what a loss used."""
        without = {a.number for a in self.allocations if self.made_without_grad(a)}
        return self.sources(self.all_used(), self.results() - without) & without

    def labels_of_evaluations(self) -> set[int]:
        """Read with what a model gave without grad mode, and what that was made from."""
        without = {a.number for a in self.allocations if self.made_without_grad(a)}
        of_results = without | self.made_of(without)
        ops = {op for number, op, _, _ in self._reads if number in of_results} - {0}
        met = {number for number, op, _, _ in self._reads if op in ops} - of_results
        constants = {
            a.number
            for a in self.allocations
            if CONSTANTS.fullmatch(self.innermost(a.start, "op").name)
        }
        labels = met - constants
        labels |= self.sources(labels, of_results)
        outside = ("other", "data", "before")
        rows = (self.allocations[number] for number in labels)
        return {a.number for a in rows if self.made_in(a) in outside or self.is_fresh(a)}

    def sources(self, made: Iterable[int], but: set[int]) -> set[int]:
        """What was read for one step by operators that made these, and so on."""
        made = set(made) - but
        found: set[int] = set()
        while True:
            of_op: dict[int, int] = {}
            for a in self.allocations:
                op = self.outermost_op(a.start)
                if op and a.number in made | found:
                    of_op[op] = self.step_of(a)
            steps: dict[int, set[int]] = {}
            for number, op, _, _ in self._reads:
                if op in of_op:
                    steps.setdefault(number, set()).add(of_op[op])
            more = {number for number, those in steps.items() if len(those) == 1} - but
            if more <= found:
                return found & more
            found |= more

    def results(self) -> set[int]:
        """What a model made in a forward, or an operator that got what needs a gradient."""
        return {
            a.number
            for a in self.allocations
            if self.made_in(a) in ("forward", "recompute")
            and (
                self.innermost(a.start, "module").number
                or self.scopes[self.outermost_op(a.start)].flags & SCOPE_GRAPH
            )
        }

    def is_fresh(self, a: Allocation) -> bool:
        """Operators made it of no result, while a forward waited for its backward."""
        if self.made_in(a) != "forward" or not self.outermost_op(a.start):
            return False
        results = self.results()
        return a.number not in results | self.made_of(results)

    def made_of(self, begin: set[int]) -> set[int]:
        """What operators outside of modules made of these, or of what they made."""
        found: set[int] = set()
        while True:
            ops = {op for number, op, _, _ in self._reads if number in begin | found} - {0}
            more = {a.number for a in self.allocations if self.outermost_op(a.start) in ops}
            if more <= found:
                return found & more
            found |= more

    def step_of(self, a: Allocation) -> int:
        ends = self.line.step_ends.tolist()
        if not ends:
            rows = zip(self.trace.scopes.kind, self.trace.scopes.ticks, strict=True)
            ends = sorted(int(ticks) for kind, ticks in rows if SCOPE_KINDS[kind] == "backward")
        made = int(self.trace.events.ticks[a.start]) if a.start >= 0 else 0
        return sum(end < made for end in ends)

    def kind(self, a: Allocation) -> tuple[str, str, str, int]:
        return (*self.maker(a), self.made_in(a), a.size)

    def kinds_fetched_ahead(self) -> set[tuple[str, str, str, int]]:
        if self._ahead is None:
            ahead, own = set(), set()
            for a in self.allocations:
                used = [
                    at for number, _, is_used, at in self._reads if is_used and number == a.number
                ]
                for position in [*a.saved_at, *used]:
                    later = (
                        self.made_by_no_model(a)
                        and self.interval_at(position) != self.interval(a)
                        and self.step_at(position) != self.step_at(a.start)
                    )
                    (ahead if later else own).add(self.kind(a))
            self._ahead = ahead - own
        return self._ahead

    def step_at(self, position: int) -> int:
        return int(self.line.step_at(self.trace.events.ticks[position : position + 1])[0])

    def interval_at(self, position: int) -> int:
        stretch = self.line.stretch_at(self.trace.events.ticks[position : position + 1])[0]
        return int(self.line.interval[stretch])

    def made_by_no_model(self, a: Allocation) -> bool:
        around = self.around(a.start)
        ops = {scope.number for scope in around if scope.kind == "op"}
        if self.made_in(a) != "forward" or not ops or any(s.kind == "module" for s in around):
            return False
        return not ops & set(self.trace.scopes.forward.tolist())

    def maker(self, a: Allocation) -> tuple[str, str]:
        return self.innermost(a.start, "module").name, self.innermost(a.start, "op").name

    def makers_of_caches(self) -> set[tuple[str, str]]:
        """Module and op, of what a forward made and the program was seen to keep as a cache."""
        if self._makers is None:
            self._makers = {
                self.maker(other)
                for other in self.allocations
                if self.made_in(other) == "forward" and self.is_labelled_cache(other)
            }
        return self._makers

    def is_labelled_cache(self, a: Allocation) -> bool:
        """By the label that counts: no other says more, and the first of its kind."""
        labels = self.trace.labels
        words = [CATEGORIES[labels.category[row]] for row in a.labels]
        if any(word not in ("inputs", "functional", "temporaries") for word in words):
            return False
        rows = [row for row, word in zip(a.labels, words, strict=True) if word == "functional"]
        return bool(rows) and self.trace.strings[labels.role[rows[0]]] == "kv_cache"

    def label_role(self, a: Allocation, row: int, category: str = "") -> str:
        labels = self.trace.labels
        if category == "gradients":
            names = {
                labels.name[other]
                for other in a.labels
                if CATEGORIES[labels.category[other]] == "gradients" and labels.name[other]
            }
            if len(names) > 1:
                return "bucket"
        return self.trace.strings[labels.role[row]]

    def forward_is_known(self, a: Allocation) -> bool:
        """There is a forward, so that being outside of one says something."""
        if "forward" not in {PHASES[p] for p in self.line.phase}:
            return False
        if a.start >= 0:
            return True
        first = self.line.stretch_at(self.trace.events.ticks[:1])[0]
        return PHASES[self.line.phase[first]] in ("other", "data")

    def let_go_at_once(self, a: Allocation) -> bool:
        if self.made_in(a) != "backward" or a.end < 0:
            return False
        node = self.innermost(a.start, "node")
        return node is not self.scopes[0] and self.innermost(a.end, "node") is node

    def recomputed(self, a: Allocation) -> bool:
        if self.made_in(a) != "recompute" or self.unsettled(a):
            return False
        node = self.innermost(a.start, "node")
        during = self.freed_in(a) == "recompute" or self.before_the_last_again(a, node)
        return a.saved or not (during and self.innermost(a.end, "node") is node)

    def before_the_last_again(self, a: Allocation, node: Scope) -> bool:
        """Freed before the last scope of the forward that ran again in this node, or its own pass."""
        if a.end < 0 or not node.number:
            return False
        phase, ticks = phases.scope_phases(self.trace), self.trace.scopes.ticks
        again = [
            s.number
            for s in self.scopes
            if phase[s.number] == timelines.RECOMPUTE or s.kind == "backward"
        ]
        own = [number for number in again if self.node_around(number) == node.number]
        return any(ticks[number - 1] > self.trace.events.ticks[a.end] for number in own)

    def node_around(self, number: int) -> int:
        while number and self.scopes[number].kind != "node":
            number = self.scopes[number].parent
        return number

    def freed_by_a_node(self, a: Allocation) -> bool:
        if self.made_in(a) != "forward" or a.end < 0:
            return False
        if not self.has_ops:
            return self.freed_in(a) == "backward"
        return self.innermost(a.end, "node").number != 0

    def held(self, a: Allocation) -> bool:
        if self.made_in(a) != "forward" or self.unsettled(a):
            return False
        kept_from = int(self.line.kept_from[self.interval(a)])
        if kept_from == int(phases.NEVER):
            return False
        return a.end < 0 or int(self.trace.events.ticks[a.end]) > kept_from

    def unsettled(self, a: Allocation) -> bool:
        """Its end says nothing."""
        if self.in_flight(a) or self.is_gloos(a.end):
            return True
        alike = (b for b in self.allocations if self.kind(b) == self.kind(a))
        return a.end < 0 and any(self.is_gloos(b.end) for b in alike)

    def is_gloos(self, position: int) -> bool:
        """A thread of gloo's recorded the event."""
        names = self.trace.threads.name.tolist()
        thread = int(self.trace.events.thread[position])
        if position < 0 or thread >= len(names):
            return False
        return self.trace.strings[names[thread]].startswith("pt_gloo")

    def in_flight(self, a: Allocation) -> bool:
        """Its op was open at the end; one inside another is over when the outer one is."""
        op = self.innermost(a.start, "op")
        while op.is_open and self.scopes[op.parent].kind == "op":
            op = self.scopes[op.parent]
        return op.is_open

    def is_cublas(self, a: Allocation) -> bool:
        op = self.innermost(a.start, "op", "node")
        if op.name not in PRODUCTS or a.end >= 0 or a.size not in CUBLAS_SIZES:
            return False
        if DEVICE_TYPES[self.trace.places.device_type[a.place]] != "cuda":
            return False
        before = self.allocations[max(0, a.number - 8) : a.number]
        return any(self.innermost(other.start, "op", "node") is op for other in before)
