"""The facts that the rules of `categories.py` use, for each allocation."""

from dataclasses import dataclass

import numpy as np

from pytracer.analysis.facts import lines, phases, reads, saved_tensors, scopes
from pytracer.analysis.facts.lifetimes import Lifetimes, lifetimes
from pytracer.analysis.facts.phases import MISSING, Moments
from pytracer.analysis.facts.scopes import NEVER, Tree
from pytracer.analysis.facts.timelines import DATA, OTHER
from pytracer.data import sanitized
from pytracer.data.recorded import Trace
from pytracer.data.schema import ACTION, CATEGORY, I32, OWNED, U8, U32, U64, Mask


@dataclass(frozen=True)
class Categories:
    """Per allocation: its category, role and label."""

    category: U8
    role: U32  # see ROLES
    label: U32  # the most telling row of the label table, 0 if the block has no label

    def choose(self, where: Mask, category: str, role: U32 | int = 0) -> None:
        """Sets the category and role of these allocations, unless a category is set already."""
        open_ = where & (self.category == CATEGORY["unknown"])
        self.category[open_] = CATEGORY[category]
        self.role[open_] = role[open_] if isinstance(role, np.ndarray) else role


@dataclass(frozen=True)
class Evidence:
    """Per allocation, the facts that the rules use."""

    lives: Lifetimes
    tree: Tree
    moments: Moments
    label: U32
    label_category: U8
    many_names: Mask  # has labels as the gradient of several parameters
    saved: Mask
    links: reads.Links
    read: reads.Reads
    used: Mask  # read by an operator with a graph, outside of modules
    handed: Mask  # given to an outermost module, wherever the block was made
    outside: Mask  # made before the trace, or outside forward, backward and optimizer
    without_grad: Mask  # made by a model that was called without grad mode
    with_grad: Mask  # made by another model, or by an operator with a graph
    results: Mask  # the part of `without_grad` that was saved or used for another model's backward
    # Blocks whose end says nothing of the program: made by an op that had not ended when the trace
    # did, or left to a thread of gloo's.
    unsettled: Mask

    def labelled(self, category: str) -> Mask:
        """The allocations whose label is of this category."""
        has_label: Mask = self.label_category == CATEGORY[category]
        return has_label


def evidence(trace: Trace) -> Evidence:
    """Looks at every allocation once."""
    lives, tree, moments = lifetimes(trace), scopes.tree(trace), phases.moments(trace)
    outside = np.isin(moments.made_phase, (OTHER, DATA, MISSING))
    read = reads.reads(trace, lives)
    links = reads.Links(trace, moments, read)
    label, label_category, many_names, handed = _labels(trace, lives, outside | links.fresh)
    owned = np.isin(label_category, OWNED)
    made_op = tree.op[moments.made_scope]
    used = np.zeros(len(label), np.bool_)
    used[read.block[read.used]] = True
    saved = saved_tensors.saved(trace, lives, moments, owned)
    without_grad = phases.made_without_grad(trace, moments)
    return Evidence(
        lives=lives,
        tree=tree,
        moments=moments,
        label=label,
        label_category=label_category,
        many_names=many_names,
        saved=saved,
        links=links,
        read=read,
        used=used,
        handed=handed,
        outside=outside,
        without_grad=without_grad,
        with_grad=links.results & ~without_grad,
        results=(saved | used) & without_grad,
        unsettled=((made_op != 0) & (tree.end[made_op] == NEVER)) | _left_to_a_backend(trace),
    )


def _labels(trace: Trace, lives: Lifetimes, of_no_model: Mask) -> tuple[U32, U8, Mask, Mask]:
    """Per allocation: its most telling label, the label's category, `many_names` and `handed`."""
    events = np.flatnonzero(trace.events.action == ACTION["label"])
    about = lives.allocation_of_event[events]
    row = trace.events.bytes[events]
    good = (about >= 0) & (row < len(sanitized.labels(trace).category))
    events, about, row = events[good], about[good], row[good].astype(np.uint32)
    category = sanitized.labels(trace).category[row]

    label = np.zeros(len(lives.start), np.uint32)
    many_names = np.zeros(len(lives.start), np.bool_)
    handed = np.zeros(len(lives.start), np.bool_)
    has_name = scopes.names_where(trace, bool)[sanitized.labels(trace).name]
    is_old = scopes.names_where(trace, "from_before".__eq__)[sanitized.labels(trace).role]
    says = np.where(is_old, 0, 1 + has_name)  # `from_before` tells least, a name most
    is_input = category == CATEGORY["inputs"]
    handed[about[is_input]] = True
    for name in reversed(_LABEL_ORDER):
        these = category == CATEGORY[name]
        if name == "inputs":
            these &= of_no_model[about]  # a forward's own block is passed on and is no input
        for rank in (0, 1, 2):  # more telling labels overwrite others
            which = these & (says[row] == rank)
            blocks, rows = about[which], row[which]
            # Backwards, so that the first label of a block is the one that stays.
            label[blocks[::-1]] = rows[::-1]
        if name == "gradients":
            other = (
                sanitized.labels(trace).name[rows] != sanitized.labels(trace).name[label[blocks]]
            )
            many_names[blocks[other]] = True
    return label, sanitized.labels(trace).category[label], many_names, handed


# If a block has several labels, the category that is first in this list counts.
_LABEL_ORDER = (
    "weights",
    "gradients",
    "optimizer_state",
    "inputs",
    "activations",
    "workspaces",
    "communication",
    "graph_pools",
    "functional",
    "temporaries",
)


def label_events(trace: Trace, role: str) -> tuple[I32, U32, U64]:
    """Blocks, label rows and ticks of the labels that have this role and no category."""
    labels, events = sanitized.labels(trace), trace.events
    says = scopes.names_where(trace, role.__eq__)[labels.role]
    says &= labels.category == CATEGORY["unknown"]
    position = np.flatnonzero(events.action == ACTION["label"])
    row = sanitized.within(events.bytes[position], len(says)).astype(np.uint32)
    block = lifetimes(trace).allocation_of_event[position]
    good = says[row] & (block >= 0)
    return block[good], row[good], events.ticks[position[good]]


def _left_to_a_backend(trace: Trace) -> Mask:
    """Blocks that a thread of gloo's freed, and blocks alike that nobody had freed at the end.

    Such a thread says first that its collective is done, and lets go of the tensors when it runs
    again. The program may have let go of them long before, and be in another phase by then.
    """
    lives, moments = lifetimes(trace), phases.moments(trace)
    freed = on_a_backends_thread(trace, lives.end)
    if not freed.any():
        return freed
    kind = saved_tensors.kinds(scopes.tree(trace), lives, moments)
    is_left: Mask = freed | ((lives.end < 0) & np.isin(kind, kind[freed]))
    return is_left


def on_a_backends_thread(trace: Trace, position: I32) -> Mask:
    """Per row of the event table, -1 for none: whether a thread of gloo's recorded it."""
    of_gloo = lines.threads_named(trace, "pt_gloo")[trace.events.thread[position]]
    is_there: Mask = of_gloo & (position >= 0)
    return is_there
