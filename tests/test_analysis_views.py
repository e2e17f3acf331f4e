"""The questions people ask: peaks, tables, owners, health; on traces written by hand."""

import random
import re
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import pytracer
from pytracer import errors
from pytracer.analysis.answers import breakdown, hints, layers, recording_quality, training_steps
from pytracer.analysis.facts import allocations, owners, timelines, usage
from pytracer.analysis.forecasts import changes
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import ACTION, CATEGORY_ORDER
from tests.trace_builder import TraceBuilder, training_step

MIB = 1 << 20


@pytest.fixture
def trace() -> Trace:
    b = TraceBuilder()
    weight = b.seed(1000)
    b.label(weight, "weights", "parameter", "h.0.weight", "25x10", "float32")
    for _ in range(3):
        training_step(b, weight, activation=5000)
    return b.trace()


def test_the_peak_says_when_and_what(trace: Trace) -> None:
    peak = usage.peak(trace)
    assert (peak.step, peak.phase, peak.device) == (0, "backward", "cpu")
    assert peak.bytes == 1000 + 100 + 2 * 5000 + 4 + 1000 + 5000
    assert peak.by_category["temporaries"] == 5000
    assert list(peak.by_category) == list(CATEGORY_ORDER)
    assert usage.timeline(trace).sum(axis=1).max() == peak.bytes


def test_a_peak_before_the_first_event_is_what_was_there() -> None:
    b = TraceBuilder()
    b.free(b.seed(100))
    peak = usage.peak(b.trace())
    assert (peak.bytes, peak.step, peak.phase, peak.time_ns) == (100, None, None, 0)


def test_an_empty_trace_answers_everything() -> None:
    trace = TraceBuilder().trace()
    assert usage.peak(trace).bytes == 0
    assert breakdown.summary(trace).to_numpy().sum() == 0
    for frame in (
        breakdown.allocations_frame,
        usage.timeline,
        training_steps.steps,
        recording_quality.health,
    ):
        assert len(frame(trace)) == 0
    assert len(breakdown.by(trace, "module")) == 0
    assert breakdown.bytes_per_parameter(trace).bytes.sum() == 0


def test_summary_has_every_category_in_order(trace: Trace) -> None:
    summary = breakdown.summary(trace)
    assert list(summary.index) == list(CATEGORY_ORDER)
    assert summary.at_peak.sum() == usage.peak(trace).bytes
    assert summary.loc["gradients", "own_peak"] == 2000
    assert summary.loc["weights", "at_end"] == 1000
    assert summary.loc["activations", "allocations"] == 9


def test_allocations_has_the_columns_of_the_contract(trace: Trace) -> None:
    frame = breakdown.allocations_frame(trace)
    assert list(frame.columns) == [
        "id",
        "device",
        "address",
        "requested_bytes",
        "allocated_bytes",
        "start_ns",
        "end_ns",
        "step",
        "phase",
        "category",
        "role",
        "name",
        "module",
        "op",
        "line",
        "forward_module",
        "forward_op",
        "forward_line",
        "free_phase",
        "stream",
        "pool",
        "thread",
        "shape",
        "dtype",
        "values",
    ]
    seed = frame.loc[0]
    assert (seed["name"], seed["shape"], seed["dtype"]) == ("h.0.weight", "25x10", "float32")
    for column in ("start_ns", "end_ns", "step", "phase", "free_phase", "module", "op", "pool"):
        assert pd.isna(seed[column]), column


def test_what_backward_made_names_the_forward_that_caused_it(trace: Trace) -> None:
    frame = breakdown.allocations_frame(trace)
    gradient = frame[frame.category == "gradients"].iloc[0]
    assert pd.isna(gradient.module)
    assert gradient.op == "aten::mm"
    assert gradient.forward_module == "h.1"
    assert gradient.forward_op == "aten::addmm"
    assert gradient.forward_line == "train.py:9"


def test_the_line_is_the_users_innermost_one() -> None:
    b = TraceBuilder()
    torch_file = "/usr/lib/python3/site-packages/torch/nn/modules/linear.py:125"
    with b.op("aten::linear", at=("/home/user/train.py:3", "/opt/lib/model.py:7", torch_file)):
        b.alloc(1)
    with b.op("aten::linear", at=(torch_file,)):
        b.alloc(1)
    lines = breakdown.allocations_frame(b.trace()).line
    assert lines[0] == "/opt/lib/model.py:7"
    assert pd.isna(lines[1])


@pytest.mark.parametrize(
    ("path", "is_users"),
    [
        ("/x/site-packages/torch/nn/functional.py", False),
        ("/src/pytorch/torch/_tensor.py", False),
        ("/x/site-packages/pytracer/recording/api.py", False),
        ("<frozen importlib._bootstrap>", False),
        ("/home/me/torch/train.py", True),
        ("/home/me/project/model.py", True),
        ("/x/site-packages/transformers/models/gpt2/modeling_gpt2.py", True),
        ("<ipython-input-1>", True),
    ],
)
def test_which_files_are_the_users(path: str, is_users: bool) -> None:
    assert owners.is_users_file(path) is is_users


def test_files_of_ours_that_use_torch_are_not_the_users_but_for_the_demo() -> None:
    """In a checkout as well, which is no installed package."""
    package = Path(pytracer.__file__).parent
    imports = re.compile(r"^ *import torch$", re.MULTILINE)
    using = [path for path in package.rglob("*.py") if imports.search(path.read_text())]
    names = {path.relative_to(package.parent).as_posix() for path in using}
    assert len(names) > 20
    users = {name for name in names if owners.is_users_file(f"/src/{name}")}
    assert users == {"pytracer/cli/demo.py"}


def test_ops_that_only_allocate_own_nothing_for_others() -> None:
    b = TraceBuilder()
    with b.op("aten::linear"), b.op("aten::addmm"), b.op("aten::empty_strided"):
        b.alloc(1)
    with b.op("aten::empty"):
        b.alloc(1)
    assert breakdown.allocations_frame(b.trace()).op.tolist() == ["aten::addmm", "aten::empty"]


def test_by_splits_the_peak_and_loses_nothing(trace: Trace) -> None:
    total = usage.peak(trace).bytes
    for keys in ("module", "op", "line", "phase", "role", ["module", "category"], "name", "step"):
        assert breakdown.by(trace, keys).bytes.sum() == total
    modules = breakdown.by(trace, "module").bytes
    assert modules["h.0"] == 1000 + 1000 + 5000  # its weight, its gradient and its activation


def test_by_answers_for_any_moment(trace: Trace) -> None:
    assert breakdown.by(trace, "category", at="end").bytes.to_dict() == {"weights": 1000}
    assert breakdown.by(trace, "category", at=0).bytes.to_dict() == {"weights": 1000}
    peak = usage.peak(trace)
    assert breakdown.by(trace, "category", at=peak.time_ns).bytes.sum() == peak.bytes


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: breakdown.by(t, "colour"),
        lambda t: breakdown.by(t, "module", at="noon"),
        lambda t: usage.timeline(t, by="moon"),
        lambda t: usage.peak(t, "cuda:3"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(ask, trace: Trace) -> None:
    with pytest.raises(errors.UsageError, match=r"there is|is by|a moment is"):
        ask(trace)


def test_timelines_by_phase_and_device(trace: Trace) -> None:
    total = usage.timeline(trace).sum(axis=1).to_numpy()
    for by in ("phase", "device"):
        assert np.array_equal(usage.timeline(trace, by=by).sum(axis=1).to_numpy(), total)


def test_devices_are_kept_apart_and_the_training_one_comes_first() -> None:
    b = TraceBuilder()
    b.alloc(10**6)
    b.alloc(10, device="cuda:0")
    b.alloc(100, device="cuda:1")
    trace = b.trace()
    assert usage.devices(trace) == ("cuda:1", "cuda:0", "cpu")
    assert usage.peak(trace).bytes == 100
    assert usage.peak(trace, "cpu").bytes == 10**6


def test_a_block_that_a_stream_still_uses_counts_but_its_phase_ended_it() -> None:
    b = TraceBuilder()
    with b.module("model"), b.op("aten::mm"):
        block = b.alloc(100, device="cuda:0")
        b.request_free(block)
    b.free(b.alloc(10, device="cuda:0"))
    b.free(block)
    peak = usage.peak(b.trace())
    assert peak.bytes == 110
    assert peak.by_category["temporaries"] == 110


def test_growth_is_what_a_step_leaves_behind() -> None:
    b = TraceBuilder()
    weight = b.seed(1000)
    for _ in range(3):
        training_step(b, weight)
        b.alloc(7)
    rows = training_steps.step_rows(b.trace())
    assert [row.growth_bytes for row in rows] == [2104, 7, 7]
    assert [row.allocations for row in rows] == [11, 12, 12]  # 7 bytes come after the step's end
    assert all(row.forward_ns > 0 and row.backward_ns > 0 for row in rows)


def test_bytes_per_parameter(trace: Trace) -> None:
    found = breakdown.bytes_per_parameter(trace)
    assert breakdown.parameters(trace) == 250
    assert found.per_parameter["weights"] == 4.0
    assert found.per_parameter["gradients"] == 8.0
    assert found.at_peak["gradients"] == 4.0
    assert found.at_rest["gradients"] == 0.0


def test_what_was_lost_is_named_with_advice() -> None:
    b = TraceBuilder()
    block = b.alloc(1)
    b.free(block)
    b.free(block)
    b.losses = {"lost_alloc": 3, "lost_in_a_new_way": 1}
    found = recording_quality.health(b.trace())
    assert found["count"].to_dict() == {
        "lost_alloc": 3,
        "lost_in_a_new_way": 1,
        "frees_from_before": 1,
    }
    assert found.severity.tolist() == ["loss", "loss", "info"]
    assert found.advice.str.len().min() > 20


def test_a_free_of_something_unknown_is_an_alarm_only_where_all_was_known() -> None:
    b = TraceBuilder()
    b.snapshot(device="cuda:0")
    for device in ("cuda:0", "cpu"):  # no snapshot says what the CPU held before
        block = b.alloc(1, device=device)
        b.free(block)
        b.free(block)
    assert recording_quality.health(b.trace()).severity.to_dict() == {
        "unmatched_frees": "warning",
        "frees_from_before": "info",
    }


def test_frees_of_what_was_there_before_are_no_alarm() -> None:
    b = TraceBuilder()
    block = b.alloc(1)
    b.free(block)
    b.free(block)
    assert recording_quality.health(b.trace()).severity.to_dict() == {"frees_from_before": "info"}


# ---------------------------------------------------------------- hints


def hint_of(trace: Trace) -> str:
    found = changes.changes(trace, usage.main_device(trace))
    return found[0].change if found else ""


@pytest.mark.parametrize(
    ("frameworks", "words"),
    [
        ([], "torch.utils.checkpoint on them keeps only"),
        (["accelerate.Accelerator"], "torch.utils.checkpoint on them keeps only"),
        (
            ["transformers.Trainer", "accelerate.Accelerator", "transformers.PreTrainedModel"],
            "gradient_checkpointing=True in TrainingArguments keeps only",
        ),
        (
            ["accelerate.Accelerator", "transformers.PreTrainedModel"],
            "model.gradient_checkpointing_enable() keeps only",
        ),
    ],
)
def test_a_hint_uses_the_words_of_the_framework(frameworks: list[str], words: str) -> None:
    b = TraceBuilder()
    b.meta["frameworks"] = frameworks
    weight = b.seed(3 << 20)
    b.label(weight, "weights", "parameter", "h.0.weight", "786432", "float32")
    for _ in range(2):
        training_step(b, weight, layers=4, activation=5 << 20)
    assert words in hint_of(b.trace())


@pytest.mark.parametrize(
    ("device", "freed", "agree"),
    [("cpu", False, True), ("cpu", True, False), ("cuda:0", False, False)],
)
def test_the_last_failure_is_named_and_the_rows_only_if_they_are_of_it(
    device: str, freed: bool, agree: bool
) -> None:
    """The rows are of the peak. The note refers to them only if the same blocks were alive then."""
    b = TraceBuilder()
    b.oom(7 << 30)  # the program got over this one
    b.seed(10, device="cuda:0")
    block = b.alloc(1 << 20, device="cpu")
    if freed:
        b.free(block)
    b.oom(9 << 30, device=device)
    rows = "; the rows show who held the memory" if agree else ""
    (note,) = hints.notes(b.trace(), "cpu")
    assert note == f"An allocation of 9.00 GiB failed{rows}."


def test_growing_memory_is_the_first_thing_to_say() -> None:
    b = TraceBuilder()
    weight = b.seed(1000)
    b.label(weight, "weights", "parameter", "h.0.weight", "250", "float32")
    for _ in range(4):
        training_step(b, weight)
        with b.op("aten::add", at=("/home/user/train.py:20",)):
            b.alloc(7 << 10)
    assert "grows by 7.00 KiB per step, made at train.py:20" in hint_of(b.trace())


def test_gradients_alive_in_forward_ask_for_an_earlier_zero_grad() -> None:
    b = TraceBuilder()
    gradient = b.seed(2 * MIB)
    b.label(gradient, "gradients", "parameter", "w")
    with b.module("model"), b.op("aten::mm", grad=True):
        b.alloc(4 * MIB)
    b.free(gradient)
    with b.backward():
        pass
    assert "zero_grad() before that forward" in hint_of(b.trace())


def test_repeated_layers_are_what_to_checkpoint() -> None:
    b = TraceBuilder()
    training_step(b, b.seed(1000), activation=MIB)
    assert "The 2 modules h.* hold" in hint_of(b.trace())


def test_what_would_save_next_to_nothing_is_not_advised(trace: Trace) -> None:
    assert usage.peak(trace).by_category["activations"] > usage.peak(trace).bytes // 10
    assert hint_of(trace) == ""  # 10 KB
    b = TraceBuilder()
    weight = b.seed(100 * MIB)
    b.label(weight, "weights", "parameter", "w")
    with b.op("aten::addmm"):
        b.free(b.alloc(4 * MIB))
    assert hint_of(b.trace()) == ""  # 4 %
    with b.op("aten::addmm"):
        b.free(b.alloc(40 * MIB))
    assert "The largest temporary at the peak is 40.0 MiB of aten::addmm" in hint_of(b.trace())


def a_step_of_two_layers(*, checkpointed: bool) -> Trace:
    b = TraceBuilder()
    for layer in range(2):
        with b.module("model"), b.module(f"h.{layer}"), b.op("aten::mm", grad=True) as op:
            kept = b.alloc(4 * MIB)
        b.label(kept, "activations")
    with b.backward(), b.node("MmBackward0", forward=op):
        if checkpointed:
            for layer in range(2):
                with b.module(f"h.{layer}"), b.op("aten::mm", grad=True, recompute=True):
                    b.alloc(MIB)
    return b.trace()


def test_layers_that_are_checkpointed_already_are_not_advised_to_be() -> None:
    assert "torch.utils.checkpoint" in hint_of(a_step_of_two_layers(checkpointed=False))
    hint = hint_of(a_step_of_two_layers(checkpointed=True))
    assert "Activations are" in hint
    assert "checkpoint" not in hint


def test_layers_are_taken_together_by_their_numbers(trace: Trace) -> None:
    found = layers.repeated_modules(trace, usage.alive(trace))
    assert (found[0].pattern, found[0].modules) == ("h.*", 2)


def test_a_sum_that_is_not_the_allocators_is_told() -> None:
    building = TraceBuilder()
    building.snapshot(device="cuda")
    building.alloc(1000, device="cuda")
    building.meta["counters"] = {"end": {"cuda:0": {"requested_bytes.current": 1000}}}
    assert not recording_quality.health_rows(building.trace())
    building.meta["counters"]["end"]["cuda:0"]["requested_bytes.current"] = 1024
    (row,) = recording_quality.health_rows(building.trace())
    assert (row.name, row.count) == ("allocator_disagrees", 24)


def test_a_block_freed_after_the_counters_were_read_is_no_disagreement() -> None:
    """The engine's thread may let go of blocks while a recording ends."""
    building = TraceBuilder()
    building.snapshot(device="cuda")
    block = building.alloc(1000, device="cuda")
    read = building.now + 1
    building.free(block)
    counted = {"requested_bytes.current": 1000, "ticks.before": read, "ticks.after": read}
    building.meta["counters"] = {"end": {"cuda:0": counted}}
    assert not recording_quality.health_rows(building.trace())
    counted["requested_bytes.current"] = 1024
    (row,) = recording_quality.health_rows(building.trace())
    assert (row.name, row.count) == ("allocator_disagrees", 24)
    counted["ticks.after"] = building.now  # the free came while they were read
    assert not recording_quality.health_rows(building.trace())


def test_an_allocator_without_events_is_told_in_its_own_words() -> None:
    building = TraceBuilder()
    building.meta["cuda_problem"] = "the CUDA allocator is cudaMallocAsync"
    (row,) = recording_quality.health_rows(building.trace())
    assert (row.severity, row.meaning) == ("loss", "the CUDA allocator is cudaMallocAsync")


def test_rows_of_steps_are_what_a_plain_loop_says() -> None:
    """Made for all steps at once; here step by step, from the timeline and the events."""
    b = TraceBuilder()
    kept = [b.alloc(100)]
    draw = random.Random(0)
    for number in range(40):
        for _ in range(draw.randrange(4)):
            with b.module("net"), b.op("aten::mul"):
                kept.append(b.alloc(draw.randrange(1, 1000)))
        if kept and draw.random() < 0.5:
            with b.backward():
                b.free(kept.pop())
        for _ in range(draw.randrange(len(kept) + 1)):
            b.free(kept.pop(draw.randrange(len(kept))))
        if number != 39:
            b.step()
    trace = b.trace()
    changes: list[tuple[int, int, bool]] = []  # tick, bytes since the begin, whether it is an alloc
    alive: dict[int, int] = {}
    events = trace.events
    for row in range(len(events.ticks)):
        address = int(events.address[row])
        if made := events.action[row] == ACTION["alloc"]:
            alive[address] = int(events.bytes[row])
        elif events.action[row] == ACTION["free_completed"]:
            del alive[address]
        changes.append((int(events.ticks[row]), sum(alive.values()), bool(made)))
    begin, level = -1, 0
    ends = [*timelines.timeline(trace).step_ends.tolist(), int(events.ticks[-1])]
    rows = training_steps.step_rows(trace)
    assert len(rows) >= 39
    for step, end in zip(rows, ends, strict=False):
        inside = [(now, made) for tick, now, made in changes if begin < tick <= end]
        levels = [level, *(now for now, _ in inside)]
        assert (step.start_bytes, step.end_bytes, step.peak_bytes) == (
            level, levels[-1], max(levels),
        )  # fmt: skip
        assert step.growth_bytes == levels[-1] - level
        assert step.allocations == sum(made for _, made in inside)
        begin, level = end, levels[-1]


def test_rows_of_twenty_thousand_steps_take_a_moment() -> None:
    """One look for all: a look at every allocation for each step took minutes of a long trace."""
    b = TraceBuilder()
    for _ in range(20_000):
        b.free(b.alloc(100))
        b.step()
    trace = b.trace()
    allocations.allocations(trace)
    began = time.process_time()
    assert len(training_steps.step_rows(trace)) >= 20_000
    assert time.process_time() - began < 1


def test_an_answer_is_worked_out_once_per_trace_and_device() -> None:
    asked = []

    @once_per_trace
    def answer(trace: Trace, device: str = "cpu") -> str:
        asked.append(device)
        return f"{device} of {id(trace)}"

    first, second = TraceBuilder().trace(), TraceBuilder().trace()
    for traced in (first, second, first, second):
        assert answer(traced) == f"cpu of {id(traced)}"
        assert answer(traced, "cuda:0") == f"cuda:0 of {id(traced)}"
        assert answer(traced, device="cuda:1") == f"cuda:1 of {id(traced)}"
    assert asked == ["cpu", "cuda:0", "cuda:1"] * 2
