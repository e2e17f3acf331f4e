"""What each allocation is for: one category for its whole life, and a role within it.

The rules, first match wins. A label is what the capture saw a block back, at any time.

| category        | shown by                                                                     |
|-----------------|------------------------------------------------------------------------------|
| weights         | a label (parameter, buffer; master: float32, of an optimizer and no module,  |
|                 | beside 16-bit weights); or a cast of a parameter under autocast (casts.py);  |
|                 | or a parameter that DataParallel copies to another GPU (replica); or what    |
|                 | FSDP gathers a layer's weights in (unsharded); or made in forward and a      |
|                 | module's attribute from then on, as a table of cosines is (buffer)           |
| gradients       | a label; those that FSDP reduces to a shard are unsharded                    |
| optimizer_state | a label                                                                      |
| inputs          | made outside forward, backward and optimizer, and: a label (batch); or       |
|                 | autograd saved it, or an op with a graph read it outside of modules (target: |
|                 | the loss uses it), and so of what a model made in a call without grad mode, |
|                 | as a teacher does (batch, where a model is given it); or, in the trace, a batch or a target of one step was     |
|                 | made from it, and itself from no model's results (raw); or                   |
|                 | made by no module and with no graph while a forward                          |
|                 | waits for its backward, and given to, or used for, a later one (and what is  |
|                 | made alike); or made while a batch was fetched, and still there after that,  |
|                 | if nothing below says more (fetched)                                         |
| workspaces      | a label: what torch keeps for cuBLAS                                         |
| communication   | made where FSDP gathers or reduces, and none of these: its buffers           |
| activations     | autograd saved it, but not what one backward node makes and lets go itself;  |
|                 | or it was made in forward and freed inside an autograd node (saved); made in |
|                 | recompute and alive after it (recomputed)                                    |
| workspaces      | the second block of a matrix product that outlives the trace                 |
| communication   | a label; or made inside an op or annotation of a collective; or DDP's bucket |
| graph_pools     | its place is a private pool                                                  |
| activations     | made in forward and alive when its backward began, or, if none did, when the |
|                 | call that made it with grad mode on was over (held)                          |
| functional      | a label (kv_cache; from_before, of a tensor that the program had when the    |
|                 | trace began); or freed in a later interval than it was made in, or never;    |
|                 | made by the op and module that made a kv_cache, it is one (kv_cache)         |
| temporaries     | freed within the interval that made it                                       |
| unknown         | nothing of the above: alive before the trace and never labelled              |

Where no operators were recorded (detail="category"), a 16-bit block of a module under autocast may be
a copy of a weight or an activation. Where sizes do not tell, it is unknown (copy_or_activation).

In a recording by another tool (pytracer/snapshot.py reads some) nobody labelled the blocks. There
held needs an end, and what is left is temporaries within forward, backward or optimizer, or unknown.

`held` comes last of the activations' evidence: being alive says least, and a workspace or a
graph's pool is alive for its own reasons.

An average of weights (EMA) is not a copy of them. In a module (AveragedModel, passed to `trace()`
or called) it is that module's parameters, and so weights; in a dictionary of the program's it is
what such tensors are: functional.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer import meta
from pytracer.analysis.facts import phases, reads, sanitized, saved_tensors, scopes
from pytracer.analysis.facts.casts import autocast_copies, copies_or_not
from pytracer.analysis.facts.lifetimes import Lifetimes, lifetimes
from pytracer.analysis.facts.phases import (
    BACKWARD_PHASE,
    DATA,
    FORWARD,
    MISSING,
    OPTIMIZER_PHASE,
    OTHER,
    RECOMPUTE,
    Moments,
)
from pytracer.analysis.facts.scopes import NEVER, OP, USER, Mask, Tree
from pytracer.recorded import Trace, once_per_trace
from pytracer.schema import ACTION, CATEGORIES, CATEGORY, DEVICE_TYPES, I64, PHASES, U8, U32, U64

# What FSDP calls the stretches in which it gathers weights and reduces gradients: the second and the
# first version's. In others of its stretches it casts inputs and outputs.
_FSDP = re.compile(
    r"FSDP::(\w*(all_gather|prefetch)|pre_forward|pre_backward|(?P<reduces>\w*reduce))"
    r"|FullyShardedDataParallel\._(pre_forward|pre_backward|post_backward_prefetch)"
)

# In these it makes what the weights then lie in: the second version copies from a buffer, which it
# makes in a stretch of its own; the first gathers into it directly.
_GATHERS = re.compile(
    r"FSDP::(all_gather_copy_out|pre_forward|pre_backward|\w*prefetch)"
    r"|FullyShardedDataParallel\._(pre_forward|pre_backward_hook|post_backward_prefetch)"
)
_REDUCES = ("FSDP::post_backward", "FullyShardedDataParallel._post_backward")
_FULLY_SHARDED = re.compile(r"FSDP::|FullyShardedDataParallel\.")

OWNED = [CATEGORY[name] for name in ("weights", "gradients", "optimizer_state")]

# Roles that are inferred; those of labels are rows of the trace's string table. A role is a
# number: below len(ROLES) one of these, above it a row of the string table.
ROLES = (
    "",
    *PHASES,  # of temporaries: the phase that made them
    "autocast_copy",
    "target",
    "saved",
    "recomputed",
    "held",
    "cublas",
    "all_gather",
    "reduce_scatter",
    "collective",
    "bucket",
    "graph",
    "output",  # made by a forward, and kept by the program
    "carried",  # the same, and handed to a later call
    "replica",
    "fetched",
    "raw",
    "unsharded",
    "buffer",
    "batch",
    "copy_or_activation",  # unknown where no operators tell: a weight's copy in 16 bits, or not
)
ROLE = {name: number for number, name in enumerate(ROLES)}

_SEEN_AGAIN = 2  # as an attribute of a module: what is new with each forward is seen once

_TRAINING = (FORWARD, RECOMPUTE, BACKWARD_PHASE, OPTIMIZER_PHASE)

# Products of matrices, whose libraries take their scratch from the allocator and keep it.
# In a backward pass it is the node that counts.
_MATRIX_PRODUCTS = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"),
    *("MmBackward0", "AddmmBackward0", "BmmBackward0", "BaddbmmBackward0"),
)
# What cuBLAS and cuBLASLt are given by default, on Hopper and on earlier devices.
_CUBLAS_BYTES = (32 << 20, 8_519_680, 4 << 20, 1 << 20)


@dataclass(frozen=True)
class Categories:
    """Per allocation, what it is for."""

    category: U8
    role: U32  # see ROLES
    label: U32  # the row of the label table that says most, 0 for none

    def choose(self, where: Mask, category: str, role: U32 | int = 0) -> None:
        """Decides those that are not decided yet."""
        open_ = where & (self.category == CATEGORY["unknown"])
        self.category[open_] = CATEGORY[category]
        self.role[open_] = role[open_] if isinstance(role, np.ndarray) else role


@once_per_trace
def categories(trace: Trace) -> Categories:
    """Applies the rules above, in their order."""
    facts = _facts(trace)
    count = len(facts.label)
    out = Categories(np.zeros(count, np.uint8), np.zeros(count, np.uint32), facts.label.copy())
    label_role = _label_roles(trace, facts)

    def labelled(category: str) -> Mask:
        found: Mask = facts.label_category == CATEGORY[category]
        return found

    if meta.of(trace).imported == "pytracer":  # it was decided when that file was written
        for name in CATEGORIES[1:]:
            out.choose(labelled(name), name, label_role)
        return out

    out.choose(labelled("weights"), "weights", label_role)
    copies = autocast_copies(
        trace, facts.moments, facts.found.bytes, facts.label, facts.label_category
    )
    out.choose(copies.is_copy, "weights", ROLE["autocast_copy"])
    unclear = np.zeros(count, np.bool_)
    if not scopes.has_operators(trace):
        by_size, unclear = copies_or_not(
            trace, facts.moments, facts.found.bytes, facts.label_category
        )
        out.choose(by_size, "weights", ROLE["autocast_copy"])
    out.label[copies.is_copy] = copies.label[copies.is_copy]
    out.choose(_replicas(trace, facts), "weights", ROLE["replica"])
    out.choose(_tables(trace, facts, out), "weights", ROLE["buffer"])
    out.choose(_gathered_weights(trace, facts), "weights", ROLE["unsharded"])
    out.choose(
        labelled("gradients") & _reduced_to_a_shard(trace, facts), "gradients", ROLE["unsharded"]
    )
    out.choose(labelled("gradients"), "gradients", label_role)
    out.choose(labelled("optimizer_state"), "optimizer_state", label_role)
    out.choose(labelled("inputs"), "inputs", label_role)
    out.choose(_handed_results(facts), "inputs", ROLE["batch"])
    out.choose(_targets(trace, facts) | facts.results, "inputs", ROLE["target"])
    out.choose(_raw(trace, facts, out), "inputs", ROLE["raw"])

    out.choose(labelled("workspaces"), "workspaces", label_role)
    gathered = _collectives(trace, facts, _role_in_fsdp)
    out.choose(gathered != 0, "communication", gathered)
    out.choose(_recomputed(trace, facts), "activations", ROLE["recomputed"])
    out.choose(labelled("activations"), "activations", label_role)
    out.choose(facts.saved | _freed_by_a_node(trace, facts), "activations", ROLE["saved"])

    out.choose(_cublas(trace, facts), "workspaces", ROLE["cublas"])
    out.choose(labelled("communication"), "communication", label_role)
    collective = _collectives(trace, facts, _role_of_collective)
    out.choose(collective != 0, "communication", collective)
    out.choose(_ddp_buckets(trace, facts), "communication", ROLE["bucket"])
    out.choose(_in_graph_pool(trace, facts), "graph_pools", ROLE["graph"])

    out.choose(_held(trace, facts), "activations", ROLE["held"])
    made_here = facts.moments.made_phase != MISSING
    in_use = scopes.names_where(trace, lambda text: text != "from_before")
    says_more = in_use[sanitized.labels(trace).role[facts.label]]
    out.choose(labelled("functional") & (says_more | ~made_here), "functional", label_role)
    out.choose(labelled("temporaries"), "temporaries", label_role)
    same = facts.moments.made_interval == facts.moments.freed_interval
    if not was_labelled(trace):
        # Nobody looked whether it is a weight or a gradient; between phases nothing is known.
        made_here &= same & np.isin(facts.moments.made_phase, _TRAINING)
    phase_role = 1 + np.minimum(facts.moments.made_phase, len(PHASES) - 1).astype(np.uint32)
    out.choose(made_here & (same | facts.in_flight), "temporaries", phase_role)
    out.choose(facts.moments.made_phase == DATA, "inputs", ROLE["fetched"])
    out.choose(made_here, "functional", _functional_roles(trace, facts, label_role))
    results = ("activations", "temporaries", "functional")  # the last two without grad mode
    unclear &= np.isin(out.category, [CATEGORY[name] for name in results])
    out.category[unclear], out.role[unclear] = CATEGORY["unknown"], ROLE["copy_or_activation"]
    block, row, _ = label_events(trace, facts.found, "shape")
    nameless = out.label[block] == 0
    out.label[block[nameless]] = row[nameless]
    return out


def was_labelled(trace: Trace) -> bool:
    """Whether the capture looked at what blocks hold: not where another tool recorded them."""
    return not meta.of(trace).imported


def role_text(trace: Trace, role: int) -> str:
    """What a role's number stands for."""
    return ROLES[role] if role < len(ROLES) else trace.strings[role - len(ROLES)]


@dataclass(frozen=True)
class _Facts:
    """What the rules ask about each allocation."""

    found: Lifetimes
    tree: Tree
    moments: Moments
    label: U32
    label_category: U8
    many_names: Mask  # labelled as the gradient of several parameters
    saved: Mask
    read: reads.Reads
    used: Mask  # read by an operator with a graph, outside of modules
    handed: Mask  # given to an outermost module, wherever it was made
    outside: Mask  # made before the trace, or outside forward, backward and optimizer
    without_grad: Mask  # made by a model that was called without grad mode
    results: Mask  # of these, what was saved or used for another's backward
    in_flight: Mask  # made by an op that had not ended when the trace did


def _facts(trace: Trace) -> _Facts:
    found, tree, moments = lifetimes(trace), scopes.tree(trace), phases.moments(trace)
    outside = np.isin(moments.made_phase, (OTHER, DATA, MISSING))
    label, label_category, many_names, handed = _labels(trace, found, moments, outside)
    owned = np.isin(label_category, OWNED)
    made_op = tree.op[moments.made_scope]
    read = reads.reads(trace, found)
    used = np.zeros(len(label), np.bool_)
    used[read.block[read.used]] = True
    saved = saved_tensors.saved(trace, found, moments, owned)
    without_grad = phases.made_without_grad(trace, moments)
    return _Facts(
        found=found,
        tree=tree,
        moments=moments,
        label=label,
        label_category=label_category,
        many_names=many_names,
        saved=saved,
        read=read,
        used=used,
        handed=handed,
        outside=outside,
        without_grad=without_grad,
        results=(saved | used) & without_grad,
        in_flight=(made_op != 0) & (tree.end[made_op] == NEVER),
    )


def _labels(
    trace: Trace, found: Lifetimes, moments: Moments, outside: Mask
) -> tuple[U32, U8, Mask, Mask]:
    """Per allocation: the label that says most and its category, and two things seen by the way."""
    events = np.flatnonzero(trace.events.action == ACTION["label"])
    about = found.allocation_of_event[events]
    row = trace.events.bytes[events]
    good = (about >= 0) & (row < len(sanitized.labels(trace).category))
    events, about, row = events[good], about[good], row[good].astype(np.uint32)
    category = sanitized.labels(trace).category[row]

    label = np.zeros(len(found.start), np.uint32)
    many_names = np.zeros(len(found.start), np.bool_)
    handed = np.zeros(len(found.start), np.bool_)
    has_name = scopes.names_where(trace, bool)[sanitized.labels(trace).name]
    is_old = scopes.names_where(trace, "from_before".__eq__)[sanitized.labels(trace).role]
    says = np.where(is_old, 0, 1 + has_name)  # that it is old says least, a name most
    is_input = category == CATEGORY["inputs"]
    handed[about[is_input]] = True
    for name in reversed(_LABEL_ORDER):
        these = category == CATEGORY[name]
        if name == "inputs":
            # What a forward made is handed on, not put in: unless it is the next one's batch.
            these &= outside[about] | _for_a_later_forward(trace, moments, events, about)
        for rank in (0, 1, 2):  # those that say more come later
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


def _for_a_later_forward(
    trace: Trace, moments: Moments, events: NDArray[np.intp], about: I64
) -> Mask:
    """Of these events: about a block that was made while another forward waited for its backward.

    By no module and with no graph: a batch that is fetched ahead.
    """
    tree, line = scopes.tree(trace), phases.timeline(trace)
    scope = moments.made_scope[about]
    now = line.interval[line.stretch_at(trace.events.ticks[events])]
    found: Mask = (moments.made_phase[about] == FORWARD) & (moments.made_interval[about] != now)
    found &= (tree.op[scope] != 0) & (tree.module[scope] == 0)
    if found.any():
        found &= scopes.nearest(tree.parent, tree.made_nodes)[scope] == 0
    return found


# Labels of a block that has several: the one furthest to the left counts.
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


def _label_roles(trace: Trace, facts: _Facts) -> U32:
    text = sanitized.labels(trace).role[facts.label]
    role = np.where(text == 0, 0, text + len(ROLES)).astype(np.uint32)
    # One block behind the gradients of several parameters: distributed training's bucket.
    role[facts.many_names & (facts.label_category == CATEGORY["gradients"])] = ROLE["bucket"]
    return role


def _targets(trace: Trace, facts: _Facts) -> Mask:
    """Saved, or read by an operator with a graph, though no forward made it: the loss uses it.

    A block from before the trace was made outside of forward if the trace began there.
    """
    line = phases.timeline(trace)
    if not (line.phase == FORWARD).any():
        return np.zeros(len(facts.saved), np.bool_)  # then nothing is known to be outside
    began_in = line.phase[line.stretch_at(trace.events.ticks[:1])]
    before = facts.moments.made_phase == MISSING
    began_outside = bool(np.isin(began_in, (OTHER, DATA)).all())
    found: Mask = (facts.saved | facts.used) & facts.outside & (~before | began_outside)
    return found | _fetched_ahead(trace, facts)


def _handed_results(facts: _Facts) -> Mask:
    """What a model made without grad mode and another was trained on, and what is made alike."""
    saved = facts.results & facts.handed
    if not saved.any():
        return saved
    kind = saved_tensors.kinds(facts.tree, facts.found, facts.moments)
    found: Mask = facts.without_grad & facts.handed & np.isin(kind, kind[saved])
    return found


def _raw(trace: Trace, facts: _Facts, out: Categories) -> Mask:
    """Made in the trace, and outside of forward, and a batch or a target was made from it."""
    made = (out.category == CATEGORY["inputs"]) | facts.used
    found = reads.made_from(trace, facts.moments, facts.read, made)
    raw: Mask = found & facts.outside & (facts.moments.made_phase != MISSING)
    return raw


def _fetched_ahead(trace: Trace, facts: _Facts) -> Mask:
    """What was made while a forward waited for its backward, and used for a later step's alone.

    In the same step a backward through a backward has it. Told by what is alike, made by the same
    op and of the same size: not every graph is read.
    """
    events = np.flatnonzero(trace.events.action == ACTION["saved"])
    events = np.union1d(events, facts.read.event[facts.read.used])
    about = facts.found.allocation_of_event[events]
    events, about = events[about >= 0], about[about >= 0]
    later = _for_a_later_forward(trace, facts.moments, events, about)
    line = phases.timeline(trace)
    made = line.step_at(facts.moments.made_ticks[about])
    later &= line.step_at(trace.events.ticks[events]) != made
    if not later.any():
        return np.zeros(len(facts.saved), np.bool_)
    kind = saved_tensors.kinds(facts.tree, facts.found, facts.moments)
    return np.isin(kind, kind[about[later]]) & ~np.isin(kind, kind[about[~later]])


def _replicas(trace: Trace, facts: _Facts) -> Mask:
    """DataParallel's copies of the parameters, several to a block, which autograd saves as well.

    Where operators are recorded and grad mode is on: else nothing says what makes them.
    """
    op = facts.tree.op[facts.moments.made_scope]
    found: Mask = scopes.scopes_named(trace, lambda name: name == "Broadcast")[op]
    found &= facts.moments.made_phase == FORWARD
    return found


def label_events(trace: Trace, found: Lifetimes, role: str) -> tuple[I64, U32, U64]:
    """Blocks, rows and ticks of the labels of no category that say this."""
    labels, events = sanitized.labels(trace), trace.events
    says = scopes.names_where(trace, role.__eq__)[labels.role]
    says &= labels.category == CATEGORY["unknown"]
    position = np.flatnonzero(events.action == ACTION["label"])
    row = sanitized.within(events.bytes[position], len(says)).astype(np.uint32)
    block = found.allocation_of_event[position]
    good = says[row] & (block >= 0)
    return block[good], row[good], events.ticks[position[good]]


def _tables(trace: Trace, facts: _Facts, out: Categories) -> Mask:
    """What a forward made and a module has as an attribute from then on: rotary tables, masks."""
    block, row, ticks = label_events(trace, facts.found, "attribute")
    tree = facts.tree
    calls = np.sort(tree.begin[(tree.kind == scopes.MODULE) & (tree.module[tree.parent] == 0)])
    pairs = np.unique(np.stack((block, np.searchsorted(calls, ticks))), axis=1)
    times = np.bincount(pairs[0], minlength=len(facts.label))
    by_forward = np.isin(facts.moments.made_phase, (FORWARD, RECOMPUTE))
    tables: Mask = (times >= _SEEN_AGAIN) & by_forward
    named = tables[block] & (out.label[block] == 0)
    out.label[block[named]] = row[named]
    return tables


def _gathered_weights(trace: Trace, facts: _Facts) -> Mask:
    """What FSDP gathers a layer's weights in: of what it makes then, what outlives the stretch."""
    tree, moments = facts.tree, facts.moments
    stretches = scopes.scopes_named(trace, lambda text: bool(_FULLY_SHARDED.match(text)))
    around = tree.nearest_context(stretches & (tree.kind == USER))[moments.made_scope]
    gathers = scopes.scopes_named(trace, lambda text: bool(_GATHERS.match(text)))
    found: Mask = gathers[around] & (moments.freed_ticks > tree.end[around])
    return found


def _reduced_to_a_shard(trace: Trace, facts: _Facts) -> Mask:
    """Let go where FSDP reduces whole gradients to shards of them."""
    tree = facts.tree
    reduces = scopes.scopes_named(trace, lambda text: text.startswith(_REDUCES))
    around = tree.nearest_context(reduces & (tree.kind == USER))
    found: Mask = around[facts.moments.freed_scope] != 0
    return found


def _recomputed(trace: Trace, facts: _Facts) -> Mask:
    """Made by a forward that ran again, and alive when that was over.

    It is over with its last operator, or as a pass of its own begins: between two modules the program lets go of what it needs no more.
    """
    moments, node = facts.moments, facts.tree.node
    passes_within = (facts.tree.kind == scopes.BACKWARD) & (node != 0)
    again = np.flatnonzero((phases.scope_phases(trace) == RECOMPUTE) | passes_within)
    over = np.zeros(len(node), np.uint64)  # per node
    np.maximum.at(over, node[again], facts.tree.begin[again])
    made_in = node[moments.made_scope]
    during = (moments.freed_phase == RECOMPUTE) | (
        (made_in != 0) & (moments.freed_ticks < over[made_in])
    )
    freed_within = during & (node[moments.freed_scope] == made_in)
    alive: Mask = (moments.made_phase == RECOMPUTE) & (~freed_within | facts.saved)
    return alive & ~facts.in_flight


def _freed_by_a_node(trace: Trace, facts: _Facts) -> Mask:
    """What a forward made and an autograd node let go had been saved for that node."""
    moments, tree = facts.moments, facts.tree
    by_node = tree.node[moments.freed_scope] != 0
    if not scopes.has_operators(trace):  # neither ops nor nodes were recorded
        by_node = moments.freed_phase == BACKWARD_PHASE
    found: Mask = (moments.made_phase == FORWARD) & by_node
    return found


def _held(trace: Trace, facts: _Facts) -> Mask:
    """Alive when the backward of the forward that made it began, or when that was cut short."""
    moments = facts.moments
    kept_from = phases.timeline(trace).kept_from[moments.made_interval]
    alive = (moments.made_phase == FORWARD) & (kept_from != NEVER)
    found: Mask = alive & (moments.freed_ticks > kept_from) & ~facts.in_flight
    if not was_labelled(trace):
        # It may be a weight, a workspace or a result as well, unless it is let go at some time.
        found &= moments.freed_ticks != NEVER
    return found


def _cublas(trace: Trace, facts: _Facts) -> Mask:
    """Scratch of a matrix product: of a size that cuBLAS asks for by default, and kept for good.

    It is made in the same op as the product itself, and after it.
    """
    moments, tree, found = facts.moments, facts.tree, facts.found
    computes = (tree.kind == scopes.OP) | (tree.kind == scopes.NODE)
    op = scopes.nearest(tree.parent, computes)[moments.made_scope]
    cuda = trace.places.device_type == DEVICE_TYPES.index("cuda")
    candidates = np.flatnonzero(
        cuda[found.place]
        & (moments.freed_ticks == NEVER)
        & np.isin(found.bytes, _CUBLAS_BYTES)
        & scopes.scopes_named(trace, lambda text: text in _MATRIX_PRODUCTS)[op]
    )
    result = np.zeros(len(op), np.bool_)
    for candidate in candidates:  # a handful: one per device, stream and library
        result[candidate] = (op[max(0, candidate - 8) : candidate] == op[candidate]).any()
    return result


def _collectives(trace: Trace, facts: _Facts, role_of: Callable[[str], str]) -> U32:
    """The role of what was made inside an op or annotation of a collective, 0 for all else.

    `role_of` gives a name's role, and "" to those that have none.
    """
    tree = facts.tree
    role = np.zeros(len(trace.strings), np.uint32)
    for row, text in enumerate(trace.strings):
        name = role_of(text)
        role[row] = ROLE[name] if name else 0
    marked = (role[tree.name] != 0) & ((tree.kind == OP) | (tree.kind == USER))
    if not marked.any():
        return np.zeros(len(facts.label), np.uint32)
    source = scopes.nearest(tree.parent, marked)[facts.moments.made_scope]
    return np.where(source != 0, role[tree.name[source]], 0).astype(np.uint32)


def _role_of_collective(text: str) -> str:
    if not text.startswith(("c10d::", "_c10d_functional::", "nccl:", "gloo:")):
        return ""
    if "all_gather" in text or "allgather" in text:
        return "all_gather"
    return "reduce_scatter" if "reduce_scatter" in text else "collective"


def _role_in_fsdp(text: str) -> str:
    found = _FSDP.match(text)
    if found is None:
        return ""
    return "reduce_scatter" if found["reduces"] else "all_gather"


def _ddp_buckets(trace: Trace, facts: _Facts) -> Mask:
    """What is of the size of one of DDP's buckets, made bare and not freed where it was made.

    DDP makes them when it is built, and again in its second forward. A trace that ends before its
    third does not know the sizes of the latter, if there are several. No object of Python's leads to
    a bucket: of what was there before the trace, such a size and no label tell them.
    """
    tree, moments = facts.tree, facts.moments
    op = tree.op[moments.made_scope]
    bare = scopes.scopes_named(trace, lambda name: name == "aten::empty")[op]
    bare &= tree.op[tree.parent[op]] == 0
    if not scopes.has_operators(trace):  # DDP makes them in its own call and in nobody else's
        bare = _made_by_ddp_itself(trace, facts)
    bare &= moments.made_interval != moments.freed_interval
    bare |= (moments.made_phase == MISSING) & (facts.label == 0)
    found: Mask = bare & np.isin(facts.found.bytes, meta.of(trace).ddp_buckets)
    return found


def _made_by_ddp_itself(trace: Trace, facts: _Facts) -> Mask:
    """Directly in the call of an outermost module, which DDP is, or outside of all modules."""
    tree, scope = facts.tree, facts.moments.made_scope
    module = tree.module[scope]
    found: Mask = (tree.node[scope] == 0) & (tree.module[tree.parent[module]] == 0)
    return found


def _in_graph_pool(trace: Trace, facts: _Facts) -> Mask:
    private = (trace.places.pool_high != 0) | (trace.places.pool_low != 0)
    in_pool: Mask = private[facts.found.place]
    return in_pool


def _functional_roles(trace: Trace, facts: _Facts, label_role: U32) -> U32:
    """Of what a forward made: handed to a later call, or a cache, or just kept."""
    made = facts.moments.made_phase == FORWARD
    role = np.where(facts.handed, ROLE["carried"], ROLE["output"]).astype(np.uint32)
    caches = (facts.label_category == CATEGORY["functional"]) & (label_role == _kv_cache(trace))
    if caches.any():
        tree, scope = facts.tree, facts.moments.made_scope
        module, op = tree.name[tree.module[scope]], tree.name[tree.op[scope]]
        maker = module.astype(np.uint64) * np.uint64(len(trace.strings)) + op
        role[np.isin(maker, maker[caches & made])] = label_role[caches][0]
    return np.where(made, role, 0).astype(np.uint32)


def _kv_cache(trace: Trace) -> int:
    """The number of the role that the capture gives to caches, 0 if it gave it to none."""
    found = [row for row, text in enumerate(trace.strings) if text == "kv_cache"]
    return found[0] + len(ROLES) if found else 0
