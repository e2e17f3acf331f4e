"""Graphs that a backward left whole, as with retain_graph=True, and that no later one used."""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pytracer.analysis.answers.edits import Edit
from pytracer.analysis.answers.keepers import in_graphs_alone, keeper_of, kinds
from pytracer.analysis.answers.situation import Finding, Situation
from pytracer.analysis.facts import phases, scopes
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.scopes import BACKWARD, NEVER, NODE
from pytracer.basics.units import size_text
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORY, U64, Mask

# No closure, no attribute and no cycle: the file and line of a variable, and what it holds.
_A_VARIABLE = re.compile(r"^(?:\S+ )?\w+(?: -> (?:list|tuple|dict\[[^]]*\]))* -> tensor -> grad_fn")


def retained(now: Situation, rest: Mask) -> Iterator[Finding]:
    """What a variable's graph keeps after the last backward that needs it."""
    if now.position < 0:
        return
    alloc, freed = allocations(now.trace), phases.moments(now.trace).freed_ticks
    over = _last_node(now.trace)
    alike = (alloc.category == CATEGORY["activations"]) & in_graphs_alone(now.trace) & rest
    alike &= (over != 0) & (freed > _end_of_pass(now.trace, over))
    # What is there at the end may have another backward after the trace.
    which = now.alive & alike & (over < now.trace.events.ticks[now.position]) & (freed != NEVER)
    keeper = keeper_of(now, which, kinds(now.trace)) if which.any() else None
    if not keeper or not keeper.has_graph or not _A_VARIABLE.search(keeper.path):
        return  # a hook, a module or a Function may run it again
    amount = size_text(now.bytes(which))
    row = now.finding(
        "retained",
        which,
        f"{amount} of activations stay after their last backward: `{keeper.name}` keeps its graph"
        f"{keeper.way}",
        "leave out retain_graph=True and create_graph=True where no other backward follows, or del "
        f"{keeper.name} and what else has its graph",
    )
    edit = Edit(alike, end=over)
    saved = now.saved_by(edit)
    yield replace(row, at_peak=max(min(row.at_peak, saved), 0), edit=edit)


def _end_of_pass(trace: Trace, ticks: U64) -> U64:
    """When the backward pass ends that goes on at each of these times."""
    tree = scopes.tree(trace)
    passes = np.flatnonzero(tree.kind == BACKWARD)
    passes = passes[np.argsort(tree.begin[passes])]
    number = np.searchsorted(tree.begin[passes], ticks, side="right") - 1
    end: U64 = np.append(tree.end[passes], NEVER)[number]
    return end


def _last_node(trace: Trace) -> U64:
    """Per allocation, when the last node of the operator ended that made it; 0: it has none.

    The nodes of all that read its result run before.
    """
    tree = scopes.tree(trace)
    nodes = np.flatnonzero((tree.kind == NODE) & (tree.forward != 0))
    last = np.zeros(len(tree.kind), np.uint64)
    np.maximum.at(last, tree.forward[nodes], tree.end[nodes])
    made: U64 = last[scopes.nearest(tree.parent, last != 0)[phases.moments(trace).made_scope]]
    return made
