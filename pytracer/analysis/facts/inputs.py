"""Batches, targets and what they were made from: the rules for inputs of `categories.py`."""

import re

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.facts import saved_tensors, scopes, timelines
from pytracer.analysis.facts.evidence import Categories, Evidence
from pytracer.analysis.facts.phases import MISSING, Moments, intervals_at
from pytracer.analysis.facts.reads import Proof
from pytracer.analysis.facts.timelines import DATA, FORWARD, OTHER
from pytracer.data.recorded import Trace
from pytracer.data.schema import ACTION, CATEGORY, I32, ROLE, U32, Mask

_CONSTANTS = re.compile(r"aten::(new_)?(zeros|ones|full)(_like)?")


def choose(trace: Trace, facts: Evidence, out: Categories, label_role: U32) -> None:
    """Batches, targets and their sources."""
    out.choose(facts.labelled("inputs"), "inputs", label_role)
    out.choose(_handed_results(facts), "inputs", ROLE["batch"])
    out.choose(_targets(trace, facts) | facts.results, "inputs", ROLE["target"])
    out.choose(_raw(facts, out), "inputs", ROLE["raw"])


def _targets(trace: Trace, facts: Evidence) -> Mask:
    """Blocks that no forward made, but autograd saved or an op with a graph read: the loss uses it.

    A block from before the trace counts as made outside of forward if the trace began outside.
    """
    line = timelines.timeline(trace)
    if not (line.phase == FORWARD).any():
        return np.zeros(len(facts.saved), np.bool_)  # without a forward, "outside" has no meaning
    began_in = line.phase[line.stretch_at(trace.events.ticks[:1])]
    before = facts.moments.made_phase == MISSING
    began_outside = bool(np.isin(began_in, (OTHER, DATA)).all())
    is_target: Mask = (facts.saved | facts.used) & facts.outside & (~before | began_outside)
    return is_target | _fetched_ahead(trace, facts)


def _handed_results(facts: Evidence) -> Mask:
    """Results of a model without grad mode on which another model was trained, and blocks alike."""
    saved = facts.results & facts.handed
    if not saved.any():
        return saved
    kind = saved_tensors.kinds(facts.tree, facts.lives, facts.moments)
    is_batch: Mask = facts.without_grad & facts.handed & np.isin(kind, kind[saved])
    return is_batch


def _raw(facts: Evidence, out: Categories) -> Mask:
    """Blocks made in the trace and outside of forward, from which a batch or target was made.

    What comes from a model's results (the words it chose, the state of a search) leads to no batch.
    A target may come from a model's results, too: a reward and the next state's value.
    """
    links = facts.links
    of_results = links.made_of(links.results)
    sources = links.sources(out.category == CATEGORY["inputs"], but=of_results)
    sources |= links.sources(facts.used, but=links.results)
    raw: Mask = sources & facts.outside & (facts.moments.made_phase != MISSING)
    return raw


def teachers(facts: Evidence) -> Mask:
    """Results of a model without grad mode from which operators made what a loss used."""
    return facts.links.sources(facts.used, but=facts.with_grad) & facts.without_grad


def labels_of_an_evaluation(trace: Trace, facts: Evidence) -> Mask:
    """Blocks that no forward made, and that were read with what a model gave without grad mode.

    A constant is no label: a score that a search begins with, a sum of losses.
    """
    links, op = facts.links, facts.tree.op[facts.moments.made_scope]
    of_results = facts.without_grad | links.made_of(facts.without_grad)
    constant = scopes.scopes_named(trace, lambda text: bool(_CONSTANTS.fullmatch(text)))[op]
    labels = links.met_by(of_results) & ~constant
    labels |= links.sources(labels, but=of_results)
    is_label: Mask = labels & (facts.outside | links.fresh)
    return is_label


def proof(trace: Trace, facts: Evidence, of: Mask, is_input: Mask) -> Proof:
    """What the rules above have to know so that they say of these blocks what they say now."""
    links, roots = facts.links, facts.without_grad
    of_results = roots | links.made_of(roots)
    proof = links.proof_of_sources(of, labels_of_an_evaluation(trace, facts), but=of_results)
    proof |= links.proof_of_meeting(of | proof.blocks, of_results)
    proof |= links.proof_of_sources(of, is_input, but=links.made_of(links.results))
    proof |= links.proof_of_sources(of, facts.used, but=links.results)
    proof |= links.proof_of_sources(of, facts.used, but=facts.with_grad)
    proof |= links.proof_of_origin(of | proof.blocks, roots)
    return proof | links.proof_of_origin(of | proof.blocks, links.results)


def _fetched_ahead(trace: Trace, facts: Evidence) -> Mask:
    """Blocks made while a forward waited for its backward, and used only for a later step's.

    A use in the same step may be a backward through a backward. Blocks alike (same op, same size)
    count together, because not every graph is read.
    """
    events = np.flatnonzero(trace.events.action == ACTION["saved"])
    events = np.union1d(events, facts.read.event[facts.read.used])
    about = facts.lives.allocation_of_event[events]
    events, about = events[about >= 0], about[about >= 0]
    later = _for_a_later_forward(trace, facts.moments, events, about)
    line = timelines.timeline(trace)
    made = line.step_at(facts.moments.made_ticks[about])
    later &= line.step_at(trace.events.ticks[events]) != made
    if not later.any():
        return np.zeros(len(facts.saved), np.bool_)
    kind = saved_tensors.kinds(facts.tree, facts.lives, facts.moments)
    return np.isin(kind, kind[about[later]]) & ~np.isin(kind, kind[about[~later]])


def _for_a_later_forward(
    trace: Trace, moments: Moments, events: NDArray[np.intp], about: I32
) -> Mask:
    """Per event: whether its block is a batch that was fetched ahead.

    It was made while another forward waited for its backward, by no module and with no graph.
    """
    tree, scope = scopes.tree(trace), moments.made_scope[about]
    now = intervals_at(trace, events)
    is_ahead: Mask = (moments.made_phase[about] == FORWARD) & (moments.made_interval[about] != now)
    is_ahead &= (tree.op[scope] != 0) & (tree.module[scope] == 0)
    if is_ahead.any():
        is_ahead &= scopes.nearest(tree.parent, tree.made_nodes)[scope] == 0
    return is_ahead
