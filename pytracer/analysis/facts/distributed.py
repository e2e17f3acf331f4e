"""What distributed training makes: the rules for it of `categories.py`."""

import re
from collections.abc import Callable

import numpy as np

from pytracer.analysis.facts import scopes
from pytracer.analysis.facts.evidence import Evidence, on_a_backends_thread
from pytracer.analysis.facts.lifetimes import lifetimes
from pytracer.analysis.facts.phases import MISSING
from pytracer.analysis.facts.scopes import OP, USER
from pytracer.analysis.facts.timelines import BACKWARD_PHASE, FORWARD
from pytracer.data import meta, sanitized
from pytracer.data.recorded import Trace
from pytracer.data.schema import DEVICE_TYPES, ROLE, U32, Mask

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


def replicas(trace: Trace, facts: Evidence) -> Mask:
    """DataParallel's copies of parameters: several lie in one block, which autograd also saves.

    They are only found if operators were recorded and grad mode was on.
    """
    op = facts.tree.op[facts.moments.made_scope]
    is_replica: Mask = scopes.scopes_named(trace, lambda name: name == "Broadcast")[op]
    is_replica &= facts.moments.made_phase == FORWARD
    return is_replica


def gathered_weights(trace: Trace, facts: Evidence) -> Mask:
    """Blocks in which FSDP gathers a layer's weights: made while it gathers, and freed later."""
    tree, moments = facts.tree, facts.moments
    stretches = scopes.scopes_named(trace, lambda text: bool(_FULLY_SHARDED.match(text)))
    around = tree.nearest_context(stretches & (tree.kind == USER))[moments.made_scope]
    gathers = scopes.scopes_named(trace, lambda text: bool(_GATHERS.match(text)))
    is_unsharded: Mask = gathers[around] & (moments.freed_ticks > tree.end[around])
    return is_unsharded


def reduced_to_a_shard(trace: Trace, facts: Evidence) -> Mask:
    """Blocks freed where FSDP reduces whole gradients to shards."""
    tree = facts.tree
    reduces = scopes.scopes_named(trace, lambda text: text.startswith(_REDUCES))
    around = tree.nearest_context(reduces & (tree.kind == USER))
    is_reduced: Mask = around[facts.moments.freed_scope] != 0
    return is_reduced


def collectives(trace: Trace, facts: Evidence, role_of: Callable[[str], str]) -> U32:
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


def role_of_collective(text: str) -> str:
    """The role of what a scope of this name makes, if it is a collective's."""
    if not text.startswith(("c10d::", "_c10d_functional::", "nccl:", "gloo:")):
        return ""
    if "all_gather" in text or "allgather" in text:
        return "all_gather"
    return "reduce_scatter" if "reduce_scatter" in text else "collective"


def role_in_fsdp(text: str) -> str:
    """The role of what a scope of this name makes, if FSDP gathers or reduces there."""
    match = _FSDP.match(text)
    if match is None:
        return ""
    return "reduce_scatter" if match["reduces"] else "all_gather"


def by_a_backend(trace: Trace) -> Mask:
    """Blocks that a thread of gloo's made: it runs collectives and nothing else."""
    return on_a_backends_thread(trace, lifetimes(trace).start)


def ddp_buckets(trace: Trace, facts: Evidence) -> Mask:
    """Blocks of a DDP bucket's size, made by a bare `aten::empty` and freed in another interval.

    DDP makes buckets when it is built, and again in its second forward. If there are several, a
    trace that ends before the third forward does not know the sizes of the second set. No Python
    object says what a bucket is. So a block from before the trace is one if it has a bucket's size
    and nothing else is known of it.
    """
    tree, moments = facts.tree, facts.moments
    op = tree.op[moments.made_scope]
    bare = scopes.scopes_named(trace, lambda name: name == "aten::empty")[op]
    bare &= tree.op[tree.parent[op]] == 0
    if not scopes.has_operators(trace):  # DDP makes buckets only in its own call
        bare = _made_by_ddp_itself(trace, facts)
    bare &= moments.made_interval != moments.freed_interval
    bare |= _only_from_before(trace, facts)
    is_bucket: Mask = bare & np.isin(facts.lives.bytes, meta.of(trace).ddp_buckets)
    return is_bucket


def copies_of_buckets(trace: Trace, facts: Evidence) -> Mask:
    """What a communication hook sends in a bucket's place: a copy, of the same type or of 16 bits.

    The next backward's copy takes its place.
    """
    moments = facts.moments
    sizes = np.array(meta.of(trace).ddp_hooked, np.uint64)
    outlives = (moments.made_phase == BACKWARD_PHASE) & (facts.label == 0)
    outlives &= moments.made_interval != moments.freed_interval
    outlives |= _only_from_before(trace, facts)
    is_copy: Mask = outlives & np.isin(facts.lives.bytes, np.append(sizes, sizes // 2))
    return is_copy


def _only_from_before(trace: Trace, facts: Evidence) -> Mask:
    """Blocks from before the trace of which no label says what they are."""
    says_less = scopes.names_where(trace, "from_before".__eq__)
    unlabelled = (facts.label == 0) | says_less[sanitized.labels(trace).role[facts.label]]
    is_old: Mask = unlabelled & (facts.moments.made_phase == MISSING)
    return is_old


def last_barrier(trace: Trace, facts: Evidence) -> Mask:
    """The byte of a barrier before the trace: torch keeps one tensor per process, in C++ only.

    It is told by its size, so nothing is said where several blocks of one byte have no label.
    """
    groups = meta.of(trace).communication.groups
    on_gpu = trace.places.device_type[facts.lives.place] == DEVICE_TYPES.index("cuda")
    one_byte: Mask = on_gpu & (facts.lives.bytes == 1) & (facts.label == 0)
    one_byte &= facts.moments.made_phase == MISSING
    is_known = np.count_nonzero(one_byte) == 1 and any("nccl" in one.backend for one in groups)
    return one_byte if is_known else np.zeros_like(one_byte)


def _made_by_ddp_itself(trace: Trace, facts: Evidence) -> Mask:
    """Blocks made directly in an outermost module's call (DDP is one), or outside of modules."""
    tree, scope = facts.tree, facts.moments.made_scope
    module = tree.module[scope]
    by_ddp: Mask = (tree.node[scope] == 0) & (tree.module[tree.parent[module]] == 0)
    # A communication hook may copy its bucket in a backward, where no node is recorded.
    by_ddp &= facts.moments.made_phase != BACKWARD_PHASE
    return by_ddp
