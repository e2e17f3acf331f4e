"""What each allocation is for: the rules of pytracer/analysis/facts/categories.py, one test each, and
the same rules in slow Python on random programs.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import pytracer
from pytracer.analysis.answers import breakdown
from pytracer.analysis.facts import usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.grouping import role_text
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORIES, SCOPE_GRAPH
from tests.category_reference import Reference
from tests.trace_builder import Block, TraceBuilder, training_step


def verdicts(trace: Trace) -> list[tuple[str, str]]:
    """Category and role of every allocation."""
    found = allocations(trace)
    return [
        (CATEGORIES[category], role_text(trace, int(role)))
        for category, role in zip(found.category, found.role, strict=True)
    ]


def verdict(b: TraceBuilder, block: Block) -> tuple[str, str]:
    trace = b.trace()
    return verdicts(trace)[allocations(trace).address.tolist().index(block.address)]


class Training:
    """A forward that allocates one block; the test says how the block fares."""

    def __init__(self) -> None:
        self.b = TraceBuilder()

    def forward(self, size: int = 100) -> Block:
        b = self.b
        with b.module("model"), b.op("aten::mm", grad=True) as self.op:
            return b.alloc(size)


@pytest.mark.parametrize("category", ["weights", "gradients", "optimizer_state"])
def test_a_label_at_any_time_decides(category: str) -> None:
    t = Training()
    block = t.forward()
    with t.b.backward(), t.b.node("MmBackward0", forward=t.op):
        pass
    t.b.label(block, category, "some role", "layer.weight")
    assert verdict(t.b, block) == (category, "some role")


def test_a_weight_is_a_weight_though_autograd_saves_it() -> None:
    b = TraceBuilder()
    block = b.seed(100)
    b.saved(block)
    b.label(block, "activations", "saved")
    b.label(block, "weights", "parameter", "w")
    assert verdict(b, block) == ("weights", "parameter")


def test_one_block_behind_several_gradients_is_a_bucket() -> None:
    b = TraceBuilder()
    block = b.alloc(100)
    b.label(block, "gradients", "parameter", "a")
    b.label(block, "gradients", "parameter", "b")
    assert verdict(b, block) == ("gradients", "bucket")


def barriers(blocks: int, backend: str) -> TraceBuilder:
    """Blocks of one byte from before the trace, in a job of this backend."""
    b = TraceBuilder()
    for _ in range(blocks):
        b.seed(1, device="cuda")
    b.seed(2, device="cuda")
    b.label(b.seed(1, device="cuda"), "functional", "from_before")
    group = {"name": "0", "description": "default_pg", "backend": backend, "ranks": [0, 1]}
    b.meta["communication"] = {"groups": [group]}
    with b.module("model"):
        pass
    return b


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_the_only_byte_from_before_is_the_last_barriers(backend: str) -> None:
    expected = [("communication", "barrier"), ("unknown", ""), ("functional", "from_before")]
    assert verdicts(barriers(1, backend).trace()) == expected


@pytest.mark.parametrize(("blocks", "backend"), [(2, "nccl"), (1, "gloo")])
def test_bytes_that_may_be_something_else_stay_unknown(blocks: int, backend: str) -> None:
    said = verdicts(barriers(blocks, backend).trace())
    assert said[:blocks] == [("unknown", "")] * blocks


def test_what_is_handed_to_the_model_is_input() -> None:
    b = TraceBuilder()
    batch = b.alloc(100)
    b.label(batch, "inputs", "batch")
    with b.module("model"):
        pass
    assert verdict(b, batch) == ("inputs", "batch")


def test_what_the_model_made_and_the_loss_module_is_handed_is_no_input() -> None:
    t = Training()
    logits = t.forward()
    t.b.label(logits, "inputs", "batch")
    with t.b.module("criterion"), t.b.op("aten::mse_loss", grad=True):
        pass
    with t.b.backward(), t.b.node("MseLossBackward0"):
        t.b.free(logits)
    assert verdict(t.b, logits) == ("activations", "saved")


def test_what_only_the_loss_uses_is_a_target() -> None:
    t = Training()
    target = t.b.alloc(100)
    t.forward()
    t.b.saved(target)
    with t.b.backward():
        pass
    assert verdict(t.b, target) == ("inputs", "target")


def test_what_a_node_frees_was_saved_for_it() -> None:
    t = Training()
    block = t.forward()
    with t.b.backward(), t.b.node("MmBackward0", forward=t.op):
        t.b.free(block)
    assert verdict(t.b, block) == ("activations", "saved")


def test_what_data_parallel_broadcasts_is_a_copy_of_the_weights() -> None:
    """Though autograd saves it; on two H200s these are as many bytes as the model has."""
    b = TraceBuilder()
    with b.module("Encoder"), b.op("Broadcast", grad=True):
        copy = b.alloc(100)
    b.saved(copy)
    with b.backward(), b.node("BroadcastBackward"):
        b.free(copy)
    assert verdict(b, copy) == ("weights", "replica")


def test_what_the_capture_saw_saved_needs_no_backward() -> None:
    t = Training()
    block = t.forward()
    t.b.saved(block)
    assert verdict(t.b, block) == ("activations", "saved")


def test_what_a_variable_keeps_over_the_backward_is_held() -> None:
    t = Training()
    block = t.forward()
    with t.b.backward(), t.b.node("MmBackward0", forward=t.op):
        pass
    t.b.free(block)
    assert verdict(t.b, block) == ("activations", "held")


def test_what_is_alive_when_memory_runs_out_in_forward_is_held() -> None:
    b = TraceBuilder()
    with b.module("model"), b.op("aten::mm", grad=True):
        alive = b.alloc(100)
        gone = b.alloc(100)
        b.free(gone)
        b.oom(10**9)
    b.free(alive)
    assert verdict(b, alive) == ("activations", "held")
    assert verdict(b, gone) == ("temporaries", "forward")


def test_what_is_recomputed_and_outlives_that_is_an_activation() -> None:
    b = TraceBuilder()
    with b.module("model"), b.op("aten::mm", grad=True):
        pass
    with b.backward(), b.node("CheckpointFunctionBackward"):
        with b.module("block"), b.op("aten::mm", grad=True, recompute=True):
            scratch, kept = b.alloc(10), b.alloc(100)
            b.free(scratch)
        with b.backward(), b.node("MmBackward0"):
            b.free(kept)
    assert verdict(b, kept) == ("activations", "recomputed")
    assert verdict(b, scratch) == ("temporaries", "recompute")


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "other"])
def test_what_its_own_phase_frees_is_temporary(phase: str) -> None:
    b = TraceBuilder()
    around = {
        "forward": lambda: b.module("model"),
        "backward": b.backward,
        "optimizer": b.optimizer,
        "other": lambda: b.user("my code"),
    }
    with around[phase](), b.op("aten::mul"):
        block = b.alloc(100)
        b.free(block)
    assert verdict(b, block) == ("temporaries", phase)


def test_without_grad_mode_what_outlives_the_call_is_the_programs() -> None:
    b = TraceBuilder()
    with b.module("model"), b.op("aten::mm"):
        output, cache = b.alloc(100), b.alloc(100)
    b.label(cache, "inputs", "batch")
    with b.module("model"), b.op("aten::mm"):
        pass
    b.free(output)
    assert verdict(b, output) == ("functional", "output")
    assert verdict(b, cache) == ("functional", "carried")


def test_what_is_made_where_caches_are_made_is_one() -> None:
    b = TraceBuilder()
    blocks = []
    for _ in range(2):
        with b.module("model"), b.module("attention"), b.op("aten::cat"):
            blocks.append(b.alloc(100))
        with b.module("model"), b.op("aten::mm"):
            other = b.alloc(100)
    b.label(blocks[0], "functional", "kv_cache")
    assert verdict(b, blocks[1]) == ("functional", "kv_cache")  # the last one: handed to no call
    assert verdict(b, other) == ("functional", "output")


def test_evaluation_between_training_steps_holds_no_activations() -> None:
    t = Training()
    with t.b.module("model"), t.b.op("aten::mm"):
        output = t.b.alloc(100)
    t.forward()
    with t.b.backward():
        pass
    t.b.free(output)
    assert verdict(t.b, output) == ("functional", "output")


def test_cublas_scratch_is_told_from_the_product_beside_it() -> None:
    b = TraceBuilder()
    with b.module("model"), b.op("aten::mm", grad=True):
        product = b.alloc(32 << 20, device="cuda:0")
        scratch = b.alloc(32 << 20, device="cuda:0")
    with b.backward(), b.node("MmBackward0"):
        b.free(product)
    assert verdict(b, product) == ("activations", "saved")
    assert verdict(b, scratch) == ("workspaces", "cublas")


def test_collectives_own_what_they_make() -> None:
    b = TraceBuilder()
    with b.module("model"), b.user("FSDP::all_gather (layer)"), b.op("aten::empty"):
        gathered = b.alloc(100)
    with b.op("c10d::allreduce_"), b.op("aten::empty"):
        reduced = b.alloc(100)
    assert verdict(b, gathered) == ("communication", "all_gather")
    assert verdict(b, reduced) == ("communication", "collective")


def test_a_private_pool_is_a_graphs() -> None:
    b = TraceBuilder()
    block = b.alloc(100, device="cuda:0", pool=7)
    assert verdict(b, block) == ("graph_pools", "graph")


def test_what_was_there_before_and_nobody_knows_is_unknown() -> None:
    b = TraceBuilder()
    block = b.seed(100)
    assert verdict(b, block) == ("unknown", "")


def test_a_whole_step_leaves_nothing_unknown() -> None:
    b = TraceBuilder()
    weight = b.seed(1000)
    b.label(weight, "weights", "parameter", "h.0.weight", "250", "float32")
    training_step(b, weight)
    rows = {row.category: row.own_peak for row in breakdown.category_rows(b.trace())}
    assert {name: amount for name, amount in rows.items() if amount} == {
        "weights": 1000,
        "gradients": 2000,
        "activations": 2004,
        "temporaries": 1000,
        "inputs": 100,
    }


# ---------------------------------------------------------------- autocast's copies of weights


class Autocast:
    """Linear layers under autocast: bias-free, the weight and the input are cast."""

    def __init__(self) -> None:
        self.b = TraceBuilder()
        self.weight = self.b.seed(400)
        self.b.label(self.weight, "weights", "parameter", "fc.weight", "10x10", "float32")

    def cast(self, size: int) -> tuple[Block, int]:
        b = self.b
        with b.op("aten::_to_copy", grad=True) as op, b.op("aten::empty_strided"):
            return b.alloc(size), op

    def forward(self, input_size: int = 200) -> tuple[Block, Block, int]:
        with self.b.module("model"), self.b.module("fc"):
            copy, op = self.cast(200)
            casted_input, _ = self.cast(input_size)
        return copy, casted_input, op

    def backward(self, copy: Block, casted_input: Block, op: int, gradient: bool) -> None:
        b = self.b
        with b.backward():
            with b.node("MmBackward0"):
                b.free(copy)
                b.free(casted_input)
            with b.node("ToCopyBackward0", forward=op):
                made = b.alloc(400)
        if gradient:
            b.label(made, "gradients", "parameter", "fc.weight", "10x10", "float32")


def test_the_gradient_shows_which_cast_was_a_weights() -> None:
    a = Autocast()
    copy, casted_input, op = a.forward(input_size=200)  # as large as the weight's
    a.backward(copy, casted_input, op, gradient=True)
    assert verdict(a.b, copy) == ("weights", "autocast_copy")
    assert verdict(a.b, casted_input) == ("activations", "saved")


def test_accumulated_gradients_show_it_for_the_later_casts_too() -> None:
    a = Autocast()
    a.backward(*a.forward(), gradient=True)
    copy, casted_input, op = a.forward()
    a.backward(copy, casted_input, op, gradient=False)
    assert verdicts(a.b.trace())[-3:-1] == [("weights", "autocast_copy"), ("activations", "saved")]


def test_a_cast_written_down_after_its_block_is_shown_all_the_same() -> None:
    a = Autocast()
    with a.b.module("model"), a.b.module("fc"), a.b.op("aten::linear", grad=True):
        with a.b.op("aten::empty_strided"):
            copy = a.b.alloc(200)
        with a.b.op("aten::_to_copy", grad=True) as op:
            pass
        with a.b.op("aten::empty_strided"):
            casted_input = a.b.alloc(200)
    a.backward(copy, casted_input, op, gradient=True)
    assert verdict(a.b, copy) == ("weights", "autocast_copy")
    assert verdict(a.b, casted_input) == ("activations", "saved")


def test_an_op_inside_an_op_is_over_when_that_is() -> None:
    t = Training()
    with t.b.module("model"), t.b.op("aten::linear"):
        t.b.begin("op", "aten::empty")
        block = t.b.alloc(100)
        t.b._open[0].pop()  # it has no end of its own
    assert verdict(t.b, block) == ("functional", "output")


def test_a_frozen_weights_copy_is_known_by_its_size() -> None:
    a = Autocast()
    copy, casted_input, op = a.forward(input_size=600)
    a.backward(copy, casted_input, op, gradient=False)
    assert verdict(a.b, copy) == ("weights", "autocast_copy")
    assert verdict(a.b, casted_input) == ("activations", "saved")
    frame = breakdown.allocations_frame(a.b.trace()).set_index("address")
    assert frame.name[copy.address] == "fc.weight"
    assert frame.isna().loc[copy.address, "dtype"]  # half of float32 may be either type


def test_size_alone_shows_nothing_when_the_input_is_as_large() -> None:
    a = Autocast()
    copy, casted_input, op = a.forward(input_size=200)
    a.backward(copy, casted_input, op, gradient=False)
    assert verdict(a.b, copy) == ("activations", "saved")


@pytest.mark.parametrize("weights_first", [True, False])
def test_the_order_of_other_ops_casts_tells_a_weight_from_an_input_as_large(
    weights_first: bool,
) -> None:
    a = Autocast()
    b = a.b
    b.label(b.seed(1200), "weights", "parameter", "other.weight", "10x30", "float32")

    def linear(name: str, sizes: tuple[int, int]) -> list[Block]:
        """The sizes of the weight and the input, in 16 bits."""
        with b.module(name), b.op("aten::linear"):
            blocks = [a.cast(size)[0] for size in sizes[:: 1 if weights_first else -1]]
            return blocks[:: 1 if weights_first else -1]

    with b.module("model"):
        copy, its_input = linear("fc", (200, 200))
        shown, _ = linear("other", (600, 200))
    assert verdict(b, shown) == ("weights", "autocast_copy")
    assert verdict(b, copy) == ("weights", "autocast_copy")
    assert verdict(b, its_input) != ("weights", "autocast_copy")


def test_a_tensor_from_before_that_the_program_has_is_functional_and_a_new_one_is_as_before() -> (
    None
):
    b = TraceBuilder()
    old, stray = b.seed(100), b.seed(200)
    with b.module("model"), b.op("aten::mm"):
        new = b.alloc(300)
    for block in (old, new):
        b.label(block, "functional", "from_before")
    assert verdict(b, old) == ("functional", "from_before")
    assert verdict(b, stray) == ("unknown", "")
    assert verdict(b, new) == ("functional", "output")


def test_a_cache_from_before_the_trace_is_a_cache() -> None:
    b = TraceBuilder()
    old = b.seed(100)
    b.label(old, "functional", "from_before")
    b.label(old, "functional", "kv_cache")
    assert verdict(b, old) == ("functional", "kv_cache")


def test_a_gradient_whose_parameter_is_met_later_has_its_name() -> None:
    b = TraceBuilder()
    old = b.seed(100)
    b.label(old, "gradients", "parameter")
    b.label(old, "gradients", "parameter", "head.weight")
    assert verdict(b, old) == ("gradients", "parameter")
    trace = b.trace()
    (label,) = allocations(trace).label
    assert trace.strings[trace.labels.name[label]] == "head.weight"


GLOO = 1  # the number of a thread


def reduced(t: Training, *, late: bool, phase: str) -> Block:
    """Makes a block for a collective in this phase. A thread of gloo's frees it, perhaps late."""
    b = t.b
    b.name_thread(GLOO, "pt_gloo_runloop")

    def let_go() -> None:
        with b.thread(GLOO):
            b.free(buffer)

    with b.module("model"), b.op("aten::mm", grad=True) as op:
        if phase == "forward":
            buffer = b.alloc(200)
            if not late:
                let_go()
    with b.backward(), b.node("MmBackward0", forward=op):
        if phase == "recompute":
            with b.op("aten::cat", recompute=True, grad=True):
                buffer = b.alloc(200)
        elif phase == "backward":
            buffer = b.alloc(200)
        if not late and phase != "forward":
            let_go()
    with b.optimizer():
        pass
    if late:
        let_go()
    return buffer


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
def test_when_gloo_lets_go_of_a_block_decides_nothing(phase: str, late: bool) -> None:
    t = Training()
    assert verdict(t.b, reduced(t, late=late, phase=phase)) == ("temporaries", phase)


def test_what_gloo_has_not_let_go_of_at_the_end_is_what_its_likes_are() -> None:
    t = Training()
    reduced(t, late=False, phase="backward")
    with t.b.backward(), t.b.node("MmBackward0"):
        left, kept = t.b.alloc(200), t.b.alloc(300)
    assert verdict(t.b, left) == ("temporaries", "backward")
    assert verdict(t.b, kept) == ("functional", "")


def test_another_threads_late_free_is_the_programs() -> None:
    t = Training()
    t.b.name_thread(2, "pt_autograd_0")
    with t.b.backward():
        block = t.b.alloc(200)
    with t.b.optimizer():
        pass
    with t.b.thread(2):
        t.b.free(block)
    assert verdict(t.b, block) == ("functional", "")


# ---------------------------------------------------------------- laws, on random programs

NAMES = ("aten::mm", "aten::addmm", "model", "h.0", "FSDP::x", "aten::empty")
LABELLED = ("weights", "gradients", "optimizer_state", "inputs", "activations", "workspaces")
LABELS = [
    (category, role, name)
    for category in (*LABELLED, "communication", "functional", "temporaries")
    for role, name in (("one", "a"), ("two", "b"))
]
LABELS += (
    [("gradients", "parameter", "")] * 2
    + [("functional", "kv_cache", "")] * 4
    + [("functional", "from_before", "")] * 2
    + [("unknown", "used", "")] * 4
    + [("unknown", "read", "")] * 8
)
KINDS = ("op", "op", "op", "node", "module", "backward", "optimizer", "user")


def random_program(choices: list[int]) -> Trace:
    """Interprets numbers as what a program does: nonsense, but never impossible."""
    b = TraceBuilder()
    b.name_thread(2, "pt_gloo_runloop")
    blocks: list[Block] = []
    tape = iter(choices)

    def pick(count: int) -> int:
        return next(tape, 0) % count

    for choice in tape:
        action = choice % 16
        if action < 4:
            kind = KINDS[pick(len(KINDS))]
            flags = pick(4) + SCOPE_GRAPH * pick(2) if kind == "op" else 0
            forward = pick(b.now // 1000 + 1) if kind == "node" else 0
            known = len(b._rows["scopes"])
            b.begin(kind, NAMES[pick(len(NAMES))], flags=flags, forward=min(forward, known))
        elif action < 7 and b.depth():
            b.end()
        elif action < 10:
            device = ("cpu", "cuda:0")[pick(2)]
            size = (0, 1, 100, 33_554_432)[pick(4)]
            blocks.append(b.alloc(size, device=device, pool=pick(8) == 7))
        elif action < 12 and blocks:
            b.free(blocks.pop(pick(len(blocks))), requested=bool(pick(2)))
        elif action == 12 and blocks:
            category, role, name = LABELS[pick(len(LABELS))]
            b.label(blocks[pick(len(blocks))], category, role, name)
        elif action == 13 and blocks:
            b.saved(blocks[pick(len(blocks))])
        elif action == 14:
            b.thread_number = pick(3)
        elif action == 15:
            kind = pick(6)
            if kind == 0:
                b.step()
            elif kind == 1:
                b.oom(100)
            elif kind == 2:
                blocks.append(b.seed(100))
            elif kind == 3 and blocks:  # the address comes again, unseen
                blocks.append(b.alloc(7, address=blocks.pop().address))
    return b.trace()


programs = st.lists(st.integers(0, 2**16), max_size=200).map(random_program)


@given(programs)
def test_the_fast_rules_are_the_slow_ones(trace: Trace) -> None:
    reference = Reference(trace)
    expected = [reference.categorize(a) for a in reference.allocations]
    assert verdicts(trace) == expected


@given(programs)
def test_categories_sum_to_the_total_at_every_event(trace: Trace) -> None:
    for device in usage.devices(trace):
        here = usage.on_device(trace, device)
        found = allocations(trace)
        positions, levels = usage.level_columns(trace, here, found.category, len(CATEGORIES))
        total = np.zeros(len(positions), np.int64)
        for at, position in enumerate(positions):
            alive = here & usage.alive_at(trace, int(position))
            total[at] = found.requested_bytes[alive].sum()
        assert np.sum(levels, axis=0).tolist() == total.tolist()
        peak = usage.peak(trace, device)
        seeds = int(found.requested_bytes[here & (found.start < 0)].sum())
        assert peak.bytes == max([*total.tolist(), seeds])
        assert sum(peak.by_category.values()) == peak.bytes


def recorded_program(name: str) -> Trace:
    """Two steps of a program in which the loss, a teacher or an evaluation reads other tensors."""
    torch.manual_seed(0)
    model, teacher = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    kept: list[Any] = []
    with pytracer.trace(model, teacher, optimizer, devices="cpu", table=False) as t:
        for _ in range(2):
            x, y = torch.randn(4, 8), torch.randn(4, 8)
            if name == "crops":
                out = torch.cat([model(torch.cat([part, part])) for part in (x, y)])
                y = torch.zeros(16, 8)
            else:
                out = model(x)
            with torch.no_grad():
                said = teacher(x)
                kept.append(said)
                if name == "evaluation":
                    labels = torch.randn(4, 8)
                    kept.append((labels, (said - labels.abs()).square().mean()))
            if name == "teacher":
                y = (said / 2).softmax(-1)
            (out - y.double().float() * 2).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return t.data


@pytest.mark.parametrize("name", ["targets", "teacher", "evaluation", "crops"])
def test_the_fast_rules_are_the_slow_ones_of_a_program(name: str) -> None:
    trace = recorded_program(name)
    reference = Reference(trace)
    expected = [reference.categorize(a) for a in reference.allocations]
    assert verdicts(trace) == expected
    words = {role for category, role in expected if category == "inputs"}
    assert {"raw", "batch"} <= words or name == "teacher"
    assert ("target" in words) == (name in ("teacher", "evaluation"))
