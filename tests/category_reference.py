"""The rules of pytracer/analysis/categories.py, one allocation at a time: what the fast version is
tested against. Phases and intervals are taken as given; they have tests of their own.
"""

from dataclasses import dataclass, field

from pytracer.analysis import phases
from pytracer.analysis.reference import match_lifetimes
from pytracer.schema import ACTIONS, CATEGORIES, DEVICE_TYPES, PHASES, SCOPE_KINDS
from pytracer.trace import Trace

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"}
PRODUCTS |= {"MmBackward0", "AddmmBackward0", "BmmBackward0", "BaddbmmBackward0"}
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
    is_open: bool


class Reference:
    """Walks up the tree of scopes wherever the fast version has columns."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        ended = set(trace.scope_ends.scope.tolist())
        self.scopes = [Scope(0, "", "", 0, False)]
        for i in range(len(trace.scopes.ticks)):
            kind = SCOPE_KINDS[trace.scopes.kind[i]]
            name = trace.strings[trace.scopes.name[i]]
            parent = int(trace.scopes.parent[i])
            self.scopes.append(Scope(i + 1, kind, name, parent, i + 1 not in ended))
        self.has_ops = any(scope.kind == "op" for scope in self.scopes)
        self.moments = phases.moments(trace)
        self.line = phases.timeline(trace)
        self.allocations = self._read()
        self._makers: set[tuple[str, str]] | None = None
        self._ahead: set[tuple[str, str, str, int]] | None = None

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
        if not outside and not self.for_a_later_forward(a):
            labelled.pop("inputs", None)
        is_replica = self.made_in(a) == "forward" and (
            self.innermost(a.start, "op").name == "Broadcast"
        )
        if is_replica and "weights" not in labelled:
            return "weights", "replica"
        for category in ("weights", "gradients", "optimizer_state", "inputs"):
            if category in labelled:
                return category, self.label_role(a, labelled[category], category)
        if a.saved and outside and self.forward_is_known(a):
            return "inputs", "target"
        if self.forward_is_known(a) and self.kind(a) in self.kinds_fetched_ahead():
            return "inputs", "target"

        if self.recomputed(a):
            return "activations", "recomputed"
        if "activations" in labelled:
            return "activations", self.label_role(a, labelled["activations"])
        if (a.saved and not self.let_go_at_once(a)) or self.freed_by_a_node(a):
            return "activations", "saved"

        if "workspaces" in labelled:
            return "workspaces", self.label_role(a, labelled["workspaces"])
        if self.is_cublas(a):
            return "workspaces", "cublas"
        if "communication" in labelled:
            return "communication", self.label_role(a, labelled["communication"])
        place = self.trace.places
        if place.pool_high[a.place] or place.pool_low[a.place]:
            return "graph_pools", "graph"

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
        same_interval = self.moments.freed_interval[a.number] == self.interval(a)
        if same_interval or self.in_flight(a):
            return "temporaries", self.made_in(a)
        if self.made_in(a) == "data":
            return "inputs", "fetched"
        if self.made_in(a) != "forward":
            return "functional", ""
        if self.maker(a) in self.makers_of_caches():
            return "functional", "kv_cache"
        was_handed = any(
            CATEGORIES[self.trace.labels.category[row]] == "inputs" for row in a.labels
        )
        return "functional", "carried" if was_handed else "output"

    def kind(self, a: Allocation) -> tuple[str, str, str, int]:
        return (*self.maker(a), self.made_in(a), a.size)

    def kinds_fetched_ahead(self) -> set[tuple[str, str, str, int]]:
        if self._ahead is None:
            ahead, own = set(), set()
            for a in self.allocations:
                for position in a.saved_at:
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

    def for_a_later_forward(self, a: Allocation) -> bool:
        """Given to another forward than waited for its backward while no model made it."""
        if not self.made_by_no_model(a):
            return False
        return any(
            CATEGORIES[self.trace.labels.category[row]] == "inputs"
            and self.interval_at(position) != self.interval(a)
            for row, position in zip(a.labels, a.labelled_at, strict=True)
        )

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
        if self.made_in(a) != "recompute" or self.in_flight(a):
            return False
        node = self.innermost(a.start, "node")
        within = self.freed_in(a) == "recompute" and self.innermost(a.end, "node") is node
        return a.saved or not within

    def freed_by_a_node(self, a: Allocation) -> bool:
        if self.made_in(a) != "forward" or a.end < 0:
            return False
        if not self.has_ops:
            return self.freed_in(a) == "backward"
        return self.innermost(a.end, "node").number != 0

    def held(self, a: Allocation) -> bool:
        if self.made_in(a) != "forward" or self.in_flight(a):
            return False
        kept_from = int(self.line.kept_from[self.interval(a)])
        if kept_from == int(phases.NEVER):
            return False
        return a.end < 0 or int(self.trace.events.ticks[a.end]) > kept_from

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
