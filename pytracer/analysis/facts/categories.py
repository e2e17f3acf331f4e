"""What each allocation is for: one category for its whole life, and a role within it.

The rules, first match wins. A label is what the capture saw a block hold, at any time.

| category        | shown by                                                                     |
|-----------------|------------------------------------------------------------------------------|
| weights         | a label (parameter, buffer; master: float32, of an optimizer and no module,  |
|                 | beside 16-bit weights);                                                      |
|                 | or a cast of a parameter under autocast (casts.py);                          |
|                 | or a parameter that DataParallel copies to another GPU (replica);            |
|                 | or a block in which FSDP gathers a layer's weights (unsharded);              |
|                 | or made in forward, and a module's attribute from then on, such as a table   |
|                 | of cosines (buffer)                                                          |
| gradients       | a label; a gradient that FSDP reduces to a shard is unsharded                |
| optimizer_state | a label                                                                      |
| inputs          | a label (batch), made outside forward, backward and optimizer;               |
|                 | or made there, or by a model in a call without grad mode (a teacher), and    |
|                 | saved by autograd, or read outside of modules by an op with a graph (target: |
|                 | the loss uses it; batch, if a model got the teacher's result);               |
|                 | or made outside and in the trace, from no model's results, and one step's    |
|                 | batch or target was made from it (raw);                                      |
|                 | or made by no module and with no graph while a forward waits for its         |
|                 | backward, and given to, or used for, a later one (and blocks made alike);    |
|                 | or made while a batch was fetched and alive after that, if it would          |
|                 | otherwise be functional without a label (fetched)                            |
| workspaces      | a label: what torch keeps for cuBLAS                                         |
| communication   | made where FSDP gathers or reduces, and none of the above: its buffers       |
| activations     | made in recompute and alive after it (recomputed);                           |
|                 | or saved by autograd, unless the backward node that made it also freed it;   |
|                 | or made in forward and freed inside an autograd node (saved)                 |
| workspaces      | the second block of a matrix product that outlives the trace                 |
| communication   | a label; or made inside an op or annotation of a collective, or by a thread  |
|                 | of gloo's; or DDP's bucket; or, in a job with NCCL, the only block of one    |
|                 | byte from before the trace without a label (barrier)                         |
| graph_pools     | its place is a private pool                                                  |
| activations     | made in forward and alive when its backward began; without a backward, alive |
|                 | when the call that made it with grad mode on was over (held)                 |
| functional      | a label (kv_cache; from_before: the program had it when the trace began);    |
|                 | or freed in a later interval than it was made in, or never; kv_cache, if a   |
|                 | kv_cache was made by the same op and module                                  |
| temporaries     | freed within the interval that made it, or given to gloo and let go of: a    |
|                 | thread of gloo's frees it, or had freed one alike, at whatever time it runs  |
| unknown         | no rule above: alive before the trace and never labelled                     |

Where no operators were recorded (detail="category"), a 16-bit block of a module under autocast may
be a copy of a weight or an activation. Where sizes cannot tell, it is unknown (copy_or_activation).

In a recording by another tool (pytracer/snapshot.py reads some) no block has a label. There `held`
needs an end. All other blocks are temporaries within forward, backward or optimizer, or unknown.

`held` is the last evidence for activations. Being alive proves least: a workspace or a graph's pool
is alive for its own reasons.

An average of weights (EMA) is not a copy of them. In a module (AveragedModel, passed to `trace()`
or called) it is that module's parameters, and so weights. In a dictionary of the program it is
functional, like any tensor that the program keeps.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer import meta, sanitized
from pytracer.analysis.facts import phases, reads, saved_tensors, scopes
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
from pytracer.analysis.facts.scopes import NEVER, OP, USER, Tree
from pytracer.recorded import Trace, once_per_trace
from pytracer.schema import (
    ACTION,
    CATEGORIES,
    CATEGORY,
    DEVICE_TYPES,
    I32,
    OWNED,
    PHASES,
    ROLE,
    ROLES,
    U8,
    U32,
    U64,
    Mask,
)

# The annotations in which FSDP's second and first version gather weights and reduce gradients.
# In its other annotations FSDP casts inputs and outputs.
_FSDP = re.compile(
    r"FSDP::(\w*(all_gather|prefetch)|pre_forward|pre_backward|(?P<reduces>\w*reduce))"
    r"|FullyShardedDataParallel\._(pre_forward|pre_backward|post_backward_prefetch)"
)

# The annotations in which FSDP makes the blocks for a layer's weights. The second version copies
# the weights there from a buffer, made in another annotation; the first gathers into the block.
_GATHERS = re.compile(
    r"FSDP::(all_gather_copy_out|pre_forward|pre_backward|\w*prefetch)"
    r"|FullyShardedDataParallel\._(pre_forward|pre_backward_hook|post_backward_prefetch)"
)
_REDUCES = ("FSDP::post_backward", "FullyShardedDataParallel._post_backward")
_FULLY_SHARDED = re.compile(r"FSDP::|FullyShardedDataParallel\.")

# A module's attribute is a buffer if that many forwards saw it; one that each forward makes anew
# is seen once.
_SEEN_AGAIN = 2

_TRAINING = (FORWARD, RECOMPUTE, BACKWARD_PHASE, OPTIMIZER_PHASE)

# Matrix products. Their libraries take scratch memory from the allocator and keep it. In a
# backward pass the node's name stands for the op.
_MATRIX_PRODUCTS = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"),
    *("MmBackward0", "AddmmBackward0", "BmmBackward0", "BaddbmmBackward0"),
)
# The default workspace sizes of cuBLAS and cuBLASLt, on Hopper and on earlier devices.
_CUBLAS_BYTES = (32 << 20, 8_519_680, 4 << 20, 1 << 20)


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


@once_per_trace
def categories(trace: Trace) -> Categories:
    """Applies the rules above, in their order."""
    facts = _facts(trace)
    count = len(facts.label)
    out = Categories(np.zeros(count, np.uint8), np.zeros(count, np.uint32), facts.label.copy())
    label_role = _label_roles(trace, facts)

    if meta.of(trace).imported == "pytracer":  # it was decided when that file was written
        for name in CATEGORIES[1:]:
            out.choose(facts.labelled(name), name, label_role)
        return out

    unclear = _choose_owned(trace, facts, out, label_role)
    _choose_inputs(trace, facts, out, label_role)
    _choose_by_origin(trace, facts, out, label_role)
    _choose_by_life(trace, facts, out, label_role)
    results = ("activations", "temporaries", "functional")  # the last two without grad mode
    unclear &= np.isin(out.category, [CATEGORY[name] for name in results])
    out.category[unclear], out.role[unclear] = CATEGORY["unknown"], ROLE["copy_or_activation"]
    block, row, _ = label_events(trace, "shape")
    nameless = out.label[block] == 0
    out.label[block[nameless]] = row[nameless]
    return out


def _choose_owned(trace: Trace, facts: "_Facts", out: Categories, label_role: U32) -> Mask:
    """Weights, gradients and optimizer state.

    Returns which blocks may be copies of weights or not, where no operators tell.
    """
    out.choose(facts.labelled("weights"), "weights", label_role)
    copies = autocast_copies(
        trace, facts.moments, facts.lives.bytes, facts.label, facts.label_category
    )
    out.choose(copies.is_copy, "weights", ROLE["autocast_copy"])
    unclear = np.zeros(len(facts.label), np.bool_)
    if not scopes.has_operators(trace):
        by_size, unclear = copies_or_not(
            trace, facts.moments, facts.lives.bytes, facts.label_category
        )
        out.choose(by_size, "weights", ROLE["autocast_copy"])
    out.label[copies.is_copy] = copies.label[copies.is_copy]
    out.choose(_replicas(trace, facts), "weights", ROLE["replica"])
    out.choose(_tables(trace, facts, out), "weights", ROLE["buffer"])
    out.choose(_gathered_weights(trace, facts), "weights", ROLE["unsharded"])
    gradients = facts.labelled("gradients")
    out.choose(gradients & _reduced_to_a_shard(trace, facts), "gradients", ROLE["unsharded"])
    out.choose(gradients, "gradients", label_role)
    out.choose(facts.labelled("optimizer_state"), "optimizer_state", label_role)
    return unclear


def _choose_inputs(trace: Trace, facts: "_Facts", out: Categories, label_role: U32) -> None:
    """Batches, targets and their sources."""
    out.choose(facts.labelled("inputs"), "inputs", label_role)
    out.choose(_handed_results(facts), "inputs", ROLE["batch"])
    out.choose(_targets(trace, facts) | facts.results, "inputs", ROLE["target"])
    out.choose(_raw(trace, facts, out), "inputs", ROLE["raw"])


def _choose_by_origin(trace: Trace, facts: "_Facts", out: Categories, label_role: U32) -> None:
    """Blocks known by a label, by the scope that made or freed them, or by their pool."""
    out.choose(facts.labelled("workspaces"), "workspaces", label_role)
    gathered = _collectives(trace, facts, _role_in_fsdp)
    out.choose(gathered != 0, "communication", gathered)
    out.choose(_recomputed(trace, facts), "activations", ROLE["recomputed"])
    out.choose(facts.labelled("activations"), "activations", label_role)
    out.choose(facts.saved | _freed_by_a_node(trace, facts), "activations", ROLE["saved"])

    out.choose(_cublas(trace, facts), "workspaces", ROLE["cublas"])
    out.choose(facts.labelled("communication"), "communication", label_role)
    collective = _collectives(trace, facts, _role_of_collective)
    out.choose(collective != 0, "communication", collective)
    out.choose(_by_a_backend(trace), "communication", ROLE["collective"])
    out.choose(_ddp_buckets(trace, facts), "communication", ROLE["bucket"])
    out.choose(_last_barrier(trace, facts), "communication", ROLE["barrier"])
    out.choose(_in_graph_pool(trace, facts), "graph_pools", ROLE["graph"])


def _choose_by_life(trace: Trace, facts: "_Facts", out: Categories, label_role: U32) -> None:
    """Blocks known only by when they were made and freed."""
    out.choose(_held(trace, facts), "activations", ROLE["held"])
    made_here = facts.moments.made_phase != MISSING
    in_use = scopes.names_where(trace, lambda text: text != "from_before")
    says_more = in_use[sanitized.labels(trace).role[facts.label]]
    out.choose(facts.labelled("functional") & (says_more | ~made_here), "functional", label_role)
    out.choose(facts.labelled("temporaries"), "temporaries", label_role)
    same = facts.moments.made_interval == facts.moments.freed_interval
    if not was_labelled(trace):
        # No label rules out a weight or a gradient, and between phases there is no evidence.
        made_here &= same & np.isin(facts.moments.made_phase, _TRAINING)
    phase_role = 1 + np.minimum(facts.moments.made_phase, len(PHASES) - 1).astype(np.uint32)
    out.choose(made_here & (same | facts.unsettled), "temporaries", phase_role)
    out.choose(facts.moments.made_phase == DATA, "inputs", ROLE["fetched"])
    out.choose(made_here, "functional", _functional_roles(trace, facts, label_role))


def was_labelled(trace: Trace) -> bool:
    """Whether the capture labelled blocks. Other tools that record blocks do not."""
    return not meta.of(trace).imported


@dataclass(frozen=True)
class _Facts:
    """Per allocation, the facts that the rules use."""

    lives: Lifetimes
    tree: Tree
    moments: Moments
    label: U32
    label_category: U8
    many_names: Mask  # has labels as the gradient of several parameters
    saved: Mask
    read: reads.Reads
    used: Mask  # read by an operator with a graph, outside of modules
    handed: Mask  # given to an outermost module, wherever the block was made
    outside: Mask  # made before the trace, or outside forward, backward and optimizer
    without_grad: Mask  # made by a model that was called without grad mode
    results: Mask  # the part of `without_grad` that was saved or used for another model's backward
    # Blocks whose end says nothing of the program: made by an op that had not ended when the trace
    # did, or left to a thread of gloo's.
    unsettled: Mask

    def labelled(self, category: str) -> Mask:
        """The allocations whose label is of this category."""
        has_label: Mask = self.label_category == CATEGORY[category]
        return has_label


def _facts(trace: Trace) -> _Facts:
    lives, tree, moments = lifetimes(trace), scopes.tree(trace), phases.moments(trace)
    outside = np.isin(moments.made_phase, (OTHER, DATA, MISSING))
    label, label_category, many_names, handed = _labels(trace, lives, moments, outside)
    owned = np.isin(label_category, OWNED)
    made_op = tree.op[moments.made_scope]
    read = reads.reads(trace, lives)
    used = np.zeros(len(label), np.bool_)
    used[read.block[read.used]] = True
    saved = saved_tensors.saved(trace, lives, moments, owned)
    without_grad = phases.made_without_grad(trace, moments)
    return _Facts(
        lives=lives,
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
        unsettled=((made_op != 0) & (tree.end[made_op] == NEVER)) | _left_to_a_backend(trace),
    )


def _labels(
    trace: Trace, lives: Lifetimes, moments: Moments, outside: Mask
) -> tuple[U32, U8, Mask, Mask]:
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
            # A forward's own block is passed on and is no input, unless it is a later batch.
            these &= outside[about] | _for_a_later_forward(trace, moments, events, about)
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


def _for_a_later_forward(
    trace: Trace, moments: Moments, events: NDArray[np.intp], about: I32
) -> Mask:
    """Per event: whether its block is a batch that was fetched ahead.

    It was made while another forward waited for its backward, by no module and with no graph.
    """
    tree, line = scopes.tree(trace), phases.timeline(trace)
    scope = moments.made_scope[about]
    now = line.interval[line.stretch_at(trace.events.ticks[events])]
    is_ahead: Mask = (moments.made_phase[about] == FORWARD) & (moments.made_interval[about] != now)
    is_ahead &= (tree.op[scope] != 0) & (tree.module[scope] == 0)
    if is_ahead.any():
        is_ahead &= scopes.nearest(tree.parent, tree.made_nodes)[scope] == 0
    return is_ahead


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


def _label_roles(trace: Trace, facts: _Facts) -> U32:
    text = sanitized.labels(trace).role[facts.label]
    role = np.where(text == 0, 0, text + len(ROLES)).astype(np.uint32)
    # A block that holds the gradients of several parameters is a bucket of distributed training.
    role[facts.many_names & (facts.label_category == CATEGORY["gradients"])] = ROLE["bucket"]
    return role


def _targets(trace: Trace, facts: _Facts) -> Mask:
    """Blocks that no forward made, but autograd saved or an op with a graph read: the loss uses it.

    A block from before the trace counts as made outside of forward if the trace began outside.
    """
    line = phases.timeline(trace)
    if not (line.phase == FORWARD).any():
        return np.zeros(len(facts.saved), np.bool_)  # without a forward, "outside" has no meaning
    began_in = line.phase[line.stretch_at(trace.events.ticks[:1])]
    before = facts.moments.made_phase == MISSING
    began_outside = bool(np.isin(began_in, (OTHER, DATA)).all())
    is_target: Mask = (facts.saved | facts.used) & facts.outside & (~before | began_outside)
    return is_target | _fetched_ahead(trace, facts)


def _handed_results(facts: _Facts) -> Mask:
    """Results of a model without grad mode on which another model was trained, and blocks alike."""
    saved = facts.results & facts.handed
    if not saved.any():
        return saved
    kind = saved_tensors.kinds(facts.tree, facts.lives, facts.moments)
    is_batch: Mask = facts.without_grad & facts.handed & np.isin(kind, kind[saved])
    return is_batch


def _raw(trace: Trace, facts: _Facts, out: Categories) -> Mask:
    """Blocks made in the trace and outside of forward, from which a batch or target was made."""
    made = (out.category == CATEGORY["inputs"]) | facts.used
    sources = reads.made_from(trace, facts.moments, facts.read, made)
    raw: Mask = sources & facts.outside & (facts.moments.made_phase != MISSING)
    return raw


def _fetched_ahead(trace: Trace, facts: _Facts) -> Mask:
    """Blocks made while a forward waited for its backward, and used only for a later step's.

    A use in the same step may be a backward through a backward. Blocks alike (same op, same size)
    count together, because not every graph is read.
    """
    events = np.flatnonzero(trace.events.action == ACTION["saved"])
    events = np.union1d(events, facts.read.event[facts.read.used])
    about = facts.lives.allocation_of_event[events]
    events, about = events[about >= 0], about[about >= 0]
    later = _for_a_later_forward(trace, facts.moments, events, about)
    line = phases.timeline(trace)
    made = line.step_at(facts.moments.made_ticks[about])
    later &= line.step_at(trace.events.ticks[events]) != made
    if not later.any():
        return np.zeros(len(facts.saved), np.bool_)
    kind = saved_tensors.kinds(facts.tree, facts.lives, facts.moments)
    return np.isin(kind, kind[about[later]]) & ~np.isin(kind, kind[about[~later]])


def _replicas(trace: Trace, facts: _Facts) -> Mask:
    """DataParallel's copies of parameters: several lie in one block, which autograd also saves.

    They are only found if operators were recorded and grad mode was on.
    """
    op = facts.tree.op[facts.moments.made_scope]
    is_replica: Mask = scopes.scopes_named(trace, lambda name: name == "Broadcast")[op]
    is_replica &= facts.moments.made_phase == FORWARD
    return is_replica


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


def _tables(trace: Trace, facts: _Facts, out: Categories) -> Mask:
    """Blocks that a forward made and a module keeps as an attribute: rotary tables, masks."""
    block, row, ticks = label_events(trace, "attribute")
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
    """Blocks in which FSDP gathers a layer's weights: made while it gathers, and freed later."""
    tree, moments = facts.tree, facts.moments
    stretches = scopes.scopes_named(trace, lambda text: bool(_FULLY_SHARDED.match(text)))
    around = tree.nearest_context(stretches & (tree.kind == USER))[moments.made_scope]
    gathers = scopes.scopes_named(trace, lambda text: bool(_GATHERS.match(text)))
    is_unsharded: Mask = gathers[around] & (moments.freed_ticks > tree.end[around])
    return is_unsharded


def _reduced_to_a_shard(trace: Trace, facts: _Facts) -> Mask:
    """Blocks freed where FSDP reduces whole gradients to shards."""
    tree = facts.tree
    reduces = scopes.scopes_named(trace, lambda text: text.startswith(_REDUCES))
    around = tree.nearest_context(reduces & (tree.kind == USER))
    is_reduced: Mask = around[facts.moments.freed_scope] != 0
    return is_reduced


def _recomputed(trace: Trace, facts: _Facts) -> Mask:
    """Blocks that a recomputed forward made and that were alive when it was over.

    It is over with its last operator, or when a pass of its own begins. Between two of its modules,
    the program frees blocks that it no longer needs.
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
    return alive & ~facts.unsettled


def _freed_by_a_node(trace: Trace, facts: _Facts) -> Mask:
    """Blocks that a forward made and an autograd node freed: they had been saved for that node."""
    moments, tree = facts.moments, facts.tree
    by_node = tree.node[moments.freed_scope] != 0
    if not scopes.has_operators(trace):  # neither ops nor nodes were recorded
        by_node = moments.freed_phase == BACKWARD_PHASE
    was_saved: Mask = (moments.made_phase == FORWARD) & by_node
    return was_saved


def _held(trace: Trace, facts: _Facts) -> Mask:
    """Blocks alive when their forward's backward began, or when their forward was cut short."""
    moments = facts.moments
    kept_from = phases.timeline(trace).kept_from[moments.made_interval]
    alive = (moments.made_phase == FORWARD) & (kept_from != NEVER)
    is_held: Mask = alive & (moments.freed_ticks > kept_from) & ~facts.unsettled
    if not was_labelled(trace):
        # A block that is never freed may also be a weight, a workspace or a result.
        is_held &= moments.freed_ticks != NEVER
    return is_held


def _cublas(trace: Trace, facts: _Facts) -> Mask:
    """Scratch memory of matrix products: of a default size of cuBLAS, and never freed.

    It is made in the same op as the product itself, and after it.
    """
    moments, tree, lives = facts.moments, facts.tree, facts.lives
    computes = (tree.kind == scopes.OP) | (tree.kind == scopes.NODE)
    op = scopes.nearest(tree.parent, computes)[moments.made_scope]
    cuda = trace.places.device_type == DEVICE_TYPES.index("cuda")
    candidates = np.flatnonzero(
        cuda[lives.place]
        & (moments.freed_ticks == NEVER)
        & np.isin(lives.bytes, _CUBLAS_BYTES)
        & scopes.scopes_named(trace, lambda text: text in _MATRIX_PRODUCTS)[op]
    )
    result = np.zeros(len(op), np.bool_)
    for candidate in candidates:  # a handful: one per device, stream and library
        result[candidate] = (op[max(0, candidate - 8) : candidate] == op[candidate]).any()
    return result


def _collectives(trace: Trace, facts: _Facts, role_of: Callable[[str], str]) -> U32:
    """Per allocation: its role if an op or annotation of a collective made it, otherwise 0.

    `role_of` returns the role for a scope's name, or "" if the name is not a collective's.
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
    match = _FSDP.match(text)
    if match is None:
        return ""
    return "reduce_scatter" if match["reduces"] else "all_gather"


def _by_a_backend(trace: Trace) -> Mask:
    """Blocks that a thread of gloo's made: it runs collectives and nothing else."""
    return _on_a_backends_thread(trace, lifetimes(trace).start)


def _left_to_a_backend(trace: Trace) -> Mask:
    """Blocks that a thread of gloo's freed, and blocks alike that nobody had freed at the end.

    Such a thread says first that its collective is done, and lets go of the tensors when it runs
    again. The program may have let go of them long before, and be in another phase by then.
    """
    lives, moments = lifetimes(trace), phases.moments(trace)
    freed = _on_a_backends_thread(trace, lives.end)
    if not freed.any():
        return freed
    kind = saved_tensors.kinds(scopes.tree(trace), lives, moments)
    is_left: Mask = freed | ((lives.end < 0) & np.isin(kind, kind[freed]))
    return is_left


def _on_a_backends_thread(trace: Trace, position: I32) -> Mask:
    """Per row of the event table, -1 for none: whether a thread of gloo's recorded it."""
    of_gloo = phases.threads_named(trace, "pt_gloo")[trace.events.thread[position]]
    is_there: Mask = of_gloo & (position >= 0)
    return is_there


def _ddp_buckets(trace: Trace, facts: _Facts) -> Mask:
    """Blocks of a DDP bucket's size, made by a bare `aten::empty` and freed in another interval.

    DDP makes buckets when it is built, and again in its second forward. If there are several, a
    trace that ends before the third forward does not know the sizes of the second set. No Python
    object leads to a bucket. So a block from before the trace is one if it has a bucket's size and
    no label.
    """
    tree, moments = facts.tree, facts.moments
    op = tree.op[moments.made_scope]
    bare = scopes.scopes_named(trace, lambda name: name == "aten::empty")[op]
    bare &= tree.op[tree.parent[op]] == 0
    if not scopes.has_operators(trace):  # DDP makes buckets only in its own call
        bare = _made_by_ddp_itself(trace, facts)
    bare &= moments.made_interval != moments.freed_interval
    bare |= (moments.made_phase == MISSING) & (facts.label == 0)
    is_bucket: Mask = bare & np.isin(facts.lives.bytes, meta.of(trace).ddp_buckets)
    return is_bucket


def _last_barrier(trace: Trace, facts: _Facts) -> Mask:
    """The byte of a barrier before the trace: torch keeps one tensor per process, in C++ only.

    It is told by its size, so nothing is said where several blocks of one byte have no label.
    """
    groups = meta.of(trace).communication.groups
    on_gpu = trace.places.device_type[facts.lives.place] == DEVICE_TYPES.index("cuda")
    one_byte: Mask = on_gpu & (facts.lives.bytes == 1) & (facts.label == 0)
    one_byte &= facts.moments.made_phase == MISSING
    is_known = np.count_nonzero(one_byte) == 1 and any("nccl" in one.backend for one in groups)
    return one_byte if is_known else np.zeros_like(one_byte)


def _made_by_ddp_itself(trace: Trace, facts: _Facts) -> Mask:
    """Blocks made directly in an outermost module's call (DDP is one), or outside of modules."""
    tree, scope = facts.tree, facts.moments.made_scope
    module = tree.module[scope]
    by_ddp: Mask = (tree.node[scope] == 0) & (tree.module[tree.parent[module]] == 0)
    return by_ddp


def _in_graph_pool(trace: Trace, facts: _Facts) -> Mask:
    private = (trace.places.pool_high != 0) | (trace.places.pool_low != 0)
    in_pool: Mask = private[facts.lives.place]
    return in_pool


def _functional_roles(trace: Trace, facts: _Facts, label_role: U32) -> U32:
    """Roles of blocks that a forward made: carried to a later call, a cache, or an output."""
    made = facts.moments.made_phase == FORWARD
    role = np.where(facts.handed, ROLE["carried"], ROLE["output"]).astype(np.uint32)
    caches = (facts.label_category == CATEGORY["functional"]) & (label_role == _kv_cache(trace))
    if caches.any():
        tree, scope = facts.tree, facts.moments.made_scope
        module, op = tree.name[tree.module[scope]], tree.name[tree.op[scope]]
        maker = module.astype(np.uint64) * np.uint64(len(trace.strings)) + op
        role[np.isin(maker, maker[caches & made])] = label_role[caches][0]
    return np.where(made, role, 0).astype(np.uint32)


def handed_caches(trace: Trace) -> U64:
    """When caches that were handed to a call were made, and when they were handed."""
    labels, events = sanitized.labels(trace), trace.events
    caches = scopes.names_where(trace, "kv_cache".__eq__)[labels.role]
    position = np.flatnonzero(events.action == ACTION["label"])
    row = sanitized.within(events.bytes[position], len(caches)).astype(np.intp)
    handed = position[caches[row]]
    block = lifetimes(trace).allocation_of_event[handed]
    start = lifetimes(trace).start[block[block >= 0]]
    ticks: U64 = np.concatenate([events.ticks[start[start >= 0]], events.ticks[handed]])
    return ticks


def _kv_cache(trace: Trace) -> int:
    """The number of the role that the capture gives to caches, 0 if no block has it."""
    rows = [row for row, text in enumerate(trace.strings) if text == "kv_cache"]
    return rows[0] + len(ROLES) if rows else 0
