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
|                 | or made by a teacher, and operators made from it what a loss used; or made   |
|                 | by no forward, and read with a result without grad mode: both if it outlives |
|                 | its interval (target);                                                       |
|                 | or made while a batch was fetched and alive after that, if it would          |
|                 | otherwise be functional without a label (fetched)                            |
| workspaces      | a label: what torch keeps for cuBLAS                                         |
| communication   | made where FSDP gathers or reduces, and none of the above: its buffers       |
| activations     | made in recompute and alive after it (recomputed);                           |
|                 | or saved by autograd, unless the backward node that made it also freed it;   |
|                 | or made in forward and freed inside an autograd node (saved)                 |
| workspaces      | the second block of a matrix product that outlives the trace                 |
| communication   | a label; or made inside an op or annotation of a collective, or by a thread  |
|                 | of gloo's; or DDP's bucket, or a hook's copy of one; or, in a job with NCCL, |
|                 | the only block of one byte from before the trace without a label (barrier)   |
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

A memory snapshot of torch comes with its categories: pytracer/snapshot/evidence.py has their rules.

`held` is the last evidence for activations. Being alive proves least: a workspace or a graph's pool
is alive for its own reasons.

An average of weights (EMA) is not a copy of them. In a module (AveragedModel, passed to `trace()`
or called) it is that module's parameters, and so weights. In a dictionary of the program it is
functional, like any tensor that the program keeps.
"""

import numpy as np

from pytracer.analysis.facts import distributed, inputs, phases, scopes, timelines
from pytracer.analysis.facts.casts import autocast_copies, copies_or_not
from pytracer.analysis.facts.evidence import (
    Categories,
    Evidence,
    evidence,
    label_events,
)
from pytracer.analysis.facts.lifetimes import lifetimes
from pytracer.analysis.facts.phases import MISSING
from pytracer.analysis.facts.scopes import NEVER
from pytracer.analysis.facts.timelines import (
    BACKWARD_PHASE,
    DATA,
    FORWARD,
    RECOMPUTE,
)
from pytracer.data import meta, sanitized
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import (
    ACTION,
    CATEGORIES,
    CATEGORY,
    DEVICE_TYPES,
    PHASES,
    ROLE,
    ROLES,
    U32,
    U64,
    Mask,
)

# A module's attribute is a buffer if that many forwards saw it; one that each forward makes anew
# is seen once.
_SEEN_AGAIN = 2

# Matrix products. Their libraries take scratch memory from the allocator and keep it. In a
# backward pass the node's name stands for the op.
_MATRIX_PRODUCTS = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"),
    *("MmBackward0", "AddmmBackward0", "BmmBackward0", "BaddbmmBackward0"),
)
# The default workspace sizes of cuBLAS and cuBLASLt, on Hopper and on earlier devices.
_CUBLAS_BYTES = (32 << 20, 8_519_680, 4 << 20, 1 << 20)


@once_per_trace
def categories(trace: Trace) -> Categories:
    """Applies the rules above, in their order."""
    facts = evidence(trace)
    count = len(facts.label)
    out = Categories(np.zeros(count, np.uint8), np.zeros(count, np.uint32), facts.label.copy())
    label_role = _label_roles(trace, facts)

    if meta.of(trace).imported:  # pytracer/snapshot/evidence.py has decided
        for name in CATEGORIES[1:]:
            out.choose(facts.labelled(name), name, label_role)
        return out

    unclear = _choose_owned(trace, facts, out, label_role)
    inputs.choose(trace, facts, out, label_role)
    _choose_by_origin(trace, facts, out, label_role)
    _choose_by_life(trace, facts, out, label_role)
    results = ("activations", "temporaries", "functional")  # the last two without grad mode
    unclear &= np.isin(out.category, [CATEGORY[name] for name in results])
    out.category[unclear], out.role[unclear] = CATEGORY["unknown"], ROLE["copy_or_activation"]
    block, row, _ = label_events(trace, "shape")
    nameless = out.label[block] == 0
    out.label[block[nameless]] = row[nameless]
    return out


def _choose_owned(trace: Trace, facts: Evidence, out: Categories, label_role: U32) -> Mask:
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
    out.choose(distributed.replicas(trace, facts), "weights", ROLE["replica"])
    out.choose(_tables(trace, facts, out), "weights", ROLE["buffer"])
    out.choose(distributed.gathered_weights(trace, facts), "weights", ROLE["unsharded"])
    gradients = facts.labelled("gradients")
    out.choose(
        gradients & distributed.reduced_to_a_shard(trace, facts), "gradients", ROLE["unsharded"]
    )
    out.choose(gradients, "gradients", label_role)
    out.choose(facts.labelled("optimizer_state"), "optimizer_state", label_role)
    return unclear


def _choose_by_origin(trace: Trace, facts: Evidence, out: Categories, label_role: U32) -> None:
    """Blocks known by a label, by the scope that made or freed them, or by their pool."""
    out.choose(facts.labelled("workspaces"), "workspaces", label_role)
    gathered = distributed.collectives(trace, facts, distributed.role_in_fsdp)
    out.choose(gathered != 0, "communication", gathered)
    out.choose(_recomputed(trace, facts), "activations", ROLE["recomputed"])
    out.choose(facts.labelled("activations"), "activations", label_role)
    out.choose(facts.saved | _freed_by_a_node(trace, facts), "activations", ROLE["saved"])

    out.choose(_cublas(trace, facts), "workspaces", ROLE["cublas"])
    out.choose(facts.labelled("communication"), "communication", label_role)
    collective = distributed.collectives(trace, facts, distributed.role_of_collective)
    out.choose(collective != 0, "communication", collective)
    out.choose(distributed.by_a_backend(trace), "communication", ROLE["collective"])
    out.choose(distributed.ddp_buckets(trace, facts), "communication", ROLE["bucket"])
    out.choose(distributed.copies_of_buckets(trace, facts), "communication", ROLE["collective"])
    out.choose(distributed.last_barrier(trace, facts), "communication", ROLE["barrier"])
    out.choose(_in_graph_pool(trace, facts), "graph_pools", ROLE["graph"])


def _choose_by_life(trace: Trace, facts: Evidence, out: Categories, label_role: U32) -> None:
    """Blocks known only by when they were made and freed."""
    made_here = facts.moments.made_phase != MISSING
    same = facts.moments.made_interval == facts.moments.freed_interval
    targets = inputs.teachers(facts) | inputs.labels_of_an_evaluation(trace, facts)
    outlives = made_here & ~same & ~facts.unsettled
    out.choose(targets & outlives, "inputs", ROLE["target"])
    out.choose(_held(trace, facts), "activations", ROLE["held"])
    in_use = scopes.names_where(trace, lambda text: text != "from_before")
    says_more = in_use[sanitized.labels(trace).role[facts.label]]
    out.choose(facts.labelled("functional") & (says_more | ~made_here), "functional", label_role)
    out.choose(facts.labelled("temporaries"), "temporaries", label_role)
    phase_role = 1 + np.minimum(facts.moments.made_phase, len(PHASES) - 1).astype(np.uint32)
    out.choose(made_here & (same | facts.unsettled), "temporaries", phase_role)
    out.choose(facts.moments.made_phase == DATA, "inputs", ROLE["fetched"])
    out.choose(made_here, "functional", _functional_roles(trace, facts, label_role))


def _label_roles(trace: Trace, facts: Evidence) -> U32:
    text = sanitized.labels(trace).role[facts.label]
    role = np.where(text == 0, 0, text + len(ROLES)).astype(np.uint32)
    # A block that holds the gradients of several parameters is a bucket of distributed training.
    role[facts.many_names & (facts.label_category == CATEGORY["gradients"])] = ROLE["bucket"]
    return role


def _tables(trace: Trace, facts: Evidence, out: Categories) -> Mask:
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


def _recomputed(trace: Trace, facts: Evidence) -> Mask:
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


def _freed_by_a_node(trace: Trace, facts: Evidence) -> Mask:
    """Blocks that a forward made and an autograd node freed: they had been saved for that node."""
    moments, tree = facts.moments, facts.tree
    by_node = tree.node[moments.freed_scope] != 0
    if not scopes.has_operators(trace):  # neither ops nor nodes were recorded
        by_node = moments.freed_phase == BACKWARD_PHASE
    was_saved: Mask = (moments.made_phase == FORWARD) & by_node
    return was_saved


def _held(trace: Trace, facts: Evidence) -> Mask:
    """Blocks alive when their forward's backward began, or when their forward was cut short."""
    moments = facts.moments
    kept_from = timelines.timeline(trace).kept_from[moments.made_interval]
    alive = (moments.made_phase == FORWARD) & (kept_from != NEVER)
    is_held: Mask = alive & (moments.freed_ticks > kept_from) & ~facts.unsettled
    return is_held


def _cublas(trace: Trace, facts: Evidence) -> Mask:
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


def _in_graph_pool(trace: Trace, facts: Evidence) -> Mask:
    private = (trace.places.pool_high != 0) | (trace.places.pool_low != 0)
    in_pool: Mask = private[facts.lives.place]
    return in_pool


def _functional_roles(trace: Trace, facts: Evidence, label_role: U32) -> U32:
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
