"""What the program was doing when: the rules of pytracer/analysis/facts/phases.py, one test each."""

import itertools

import pytest

from pytracer.analysis.answers import training_steps
from pytracer.analysis.facts import phases
from pytracer.analysis.facts.allocations import allocations
from pytracer.data.recorded import Trace
from pytracer.data.schema import PHASES
from tests.trace_builder import TraceBuilder, training_step


def phases_of(trace: Trace) -> list[str]:
    """Of every allocation that the trace saw made, in order."""
    found = allocations(trace)
    return [PHASES[phase] for phase in found.phase[found.start >= 0]]


def steps_of(trace: Trace) -> list[int]:
    return allocations(trace).step.tolist()


def test_a_training_step_has_its_phases() -> None:
    b = TraceBuilder()
    b.alloc(1)
    with b.module("model"), b.op("aten::mm", grad=True):
        b.alloc(1)
    b.alloc(1)  # the loss is computed outside of the model
    with b.backward():
        b.alloc(1)
        with b.node("MmBackward0"):
            b.alloc(1)
    b.alloc(1)  # clipping, say
    with b.optimizer():
        b.alloc(1)
    b.alloc(1)
    assert phases_of(b.trace()) == [
        "other",
        "forward",
        "forward",
        "backward",
        "backward",
        "other",
        "optimizer",
        "other",
    ]


def test_forward_ends_with_the_model_when_no_backward_follows() -> None:
    b = TraceBuilder()
    with b.module("model"), b.op("aten::mm"):
        b.alloc(1)
    b.alloc(1)
    with b.module("model"), b.op("aten::mm"):
        b.alloc(1)
    assert phases_of(b.trace()) == ["forward", "other", "forward"]


def test_evaluation_without_grad_mode_before_a_training_forward_is_apart() -> None:
    b = TraceBuilder()
    with b.module("model"), b.op("aten::mm"):
        b.alloc(1)
    b.alloc(1)
    with b.module("model"), b.op("aten::mm", grad=True):
        b.alloc(1)
    b.alloc(1)
    with b.backward():
        pass
    assert phases_of(b.trace()) == ["forward", "other", "forward", "forward"]


def test_a_model_that_is_no_module_has_a_forward_too() -> None:
    b = TraceBuilder()
    b.alloc(1)
    with b.op("aten::mm", grad=True) as mm:
        b.alloc(1)
    b.alloc(1)
    with b.backward(), b.node("MmBackward0", forward=mm):
        b.alloc(1)
    assert phases_of(b.trace()) == ["other", "forward", "forward", "backward"]


def test_checkpointed_modules_run_again_as_recompute() -> None:
    b = TraceBuilder()
    with b.module("model"), b.op("aten::mm", grad=True):
        pass
    with b.backward(), b.node("CheckpointFunctionBackward"):
        with b.module("block"), b.op("aten::mm", grad=True, recompute=True):
            b.alloc(1)
        with b.op("aten::gelu", grad=True, recompute=True), b.op("aten::empty"):
            b.alloc(1)
        with b.backward(), b.node("MmBackward0"):
            b.alloc(1)
    assert phases_of(b.trace()) == ["recompute", "recompute", "backward"]


def test_nodes_on_the_engines_own_thread_are_backward() -> None:
    b = TraceBuilder()
    with b.module("model"), b.op("aten::mm", grad=True):
        pass
    with b.backward(), b.thread(1):
        b.alloc(1)  # between two nodes
        with b.node("MmBackward0"):
            b.alloc(1)
            with b.module("block"):
                b.alloc(1)
    with b.thread(1):
        b.alloc(1)
    assert phases_of(b.trace()) == ["backward", "backward", "recompute", "other"]


def test_without_ops_a_module_on_the_engines_thread_is_recompute() -> None:
    b = TraceBuilder()
    with b.module("model"):
        b.alloc(1)
    with b.backward(), b.thread(1), b.module("block"):
        b.alloc(1)
    assert phases_of(b.trace()) == ["forward", "recompute"]


def test_fetching_a_batch_is_data_and_does_not_end_a_forward() -> None:
    b = TraceBuilder()
    with b.data():
        b.alloc(1)
    with b.module("model"), b.op("aten::mm", grad=True):
        b.alloc(1)
    before = b.alloc(1)
    with b.data():
        b.alloc(1)
    b.free(before)
    b.alloc(1)
    with b.backward():
        pass
    trace = b.trace()
    assert phases_of(trace) == ["data", "forward", "forward", "data", "forward"]
    moments = phases.moments(trace)
    assert moments.made_interval[2] == moments.freed_interval[2] == moments.made_interval[4]


def test_a_closure_inside_the_optimizer_is_forward_and_backward() -> None:
    b = TraceBuilder()
    with b.optimizer("Optimizer.step#LBFGS.step"):
        first = b.alloc(1)
        with b.module("model"), b.op("aten::mm", grad=True):
            b.alloc(1)
        b.alloc(1)
        with b.backward():
            b.alloc(1)
        second = b.alloc(1)
        b.free(first)
        b.free(second)
    trace = b.trace()
    assert phases_of(trace) == ["optimizer", "forward", "forward", "backward", "optimizer"]
    moments = phases.moments(trace)
    assert moments.made_interval[0] == moments.freed_interval[0]  # the closure does not end it


def test_an_optimizer_that_steps_inside_backward_is_optimizer() -> None:
    b = TraceBuilder()
    with b.module("model"), b.op("aten::mm", grad=True):
        pass
    with b.backward(), b.node("AccumulateGrad"), b.optimizer():
        b.alloc(1)
    assert phases_of(b.trace()) == ["optimizer"]


def test_a_trace_that_ends_within_a_training_forward_leaves_it_forward() -> None:
    b = TraceBuilder()
    weight = b.seed(10)
    training_step(b, weight)
    with b.module("model"), b.op("aten::mm", grad=True):
        b.alloc(1)
    b.alloc(1)
    assert phases_of(b.trace())[-2:] == ["forward", "forward"]


# ---------------------------------------------------------------- steps


def test_a_step_ends_with_the_optimizer() -> None:
    b = TraceBuilder()
    weight = b.seed(10)
    for _ in range(3):
        training_step(b, weight)
    trace = b.trace()
    rows = training_steps.step_rows(trace)
    assert [row.step for row in rows] == [0, 1, 2]
    assert [row.micro_steps for row in rows] == [1, 1, 1]
    assert steps_of(trace)[0] == -1  # it was there before
    assert set(steps_of(trace)[1:]) == {0, 1, 2}


def test_accumulated_gradients_are_micro_steps_of_one_step() -> None:
    b = TraceBuilder()
    weight = b.seed(10)
    for _ in range(2):
        for micro in range(4):
            training_step(b, weight, optimizer=micro == 3)
    assert [row.micro_steps for row in training_steps.step_rows(b.trace())] == [4, 4]


def test_several_optimizers_in_a_row_end_one_step() -> None:
    b = TraceBuilder()
    for _ in range(2):
        with b.module("model"), b.op("aten::mm", grad=True):
            b.alloc(1)
        with b.backward():
            pass
        for name in ("Adam", "SGD"):
            with b.optimizer(f"Optimizer.step#{name}.step"):
                b.alloc(1)
    trace = b.trace()
    assert steps_of(trace) == [0, 0, 0, 1, 1, 1]


def steps_ended_by(row: str) -> str:
    """Optimizers' steps in turn, each after a forward of its own; a bar for each end of a step."""
    b = TraceBuilder()
    for name in row:
        with b.module("model"), b.op("aten::mm", grad=True):
            b.free(b.alloc(1))
        with b.backward():
            pass
        with b.optimizer(f"Optimizer.step#{name}.step"):
            b.alloc(1)
    step = steps_of(b.trace())[1::2]  # of what each optimizer made
    bars = ["|" if after > before else "" for before, after in itertools.pairwise(step)]
    return "".join(map("".join, zip(row, [*bars, ""], strict=True)))


@pytest.mark.parametrize(
    "steps",
    [
        "A|A|A|A",
        "DG|DG|DG|DG",  # a GAN's two optimizers are one iteration
        "DG|DG|D",  # which was cut short
        "CAV|CAV|CAV",  # critics, actor and value
        "D|D|D|GD|D|D|DG|D|D|DG",  # a generator that steps after every third time
        "A|A|A|B|B|B",  # one model after the other
    ],
)
def test_optimizers_that_take_turns_make_one_step(steps: str) -> None:
    assert steps_ended_by(steps.replace("|", "")) == steps


def test_the_users_own_marks_win_over_optimizers() -> None:
    b = TraceBuilder()
    b.alloc(1)
    with b.optimizer():
        b.alloc(1)
    b.alloc(1)
    b.step()
    b.alloc(1)
    assert steps_of(b.trace()) == [0, 0, 0, 1]


def test_what_follows_the_last_step_is_a_step_only_if_it_trains() -> None:
    b = TraceBuilder()
    weight = b.seed(10)
    training_step(b, weight)
    b.free(b.alloc(5))
    assert len(training_steps.step_rows(b.trace())) == 1
    with b.module("model"):
        b.alloc(5)
    assert len(training_steps.step_rows(b.trace())) == 1
    training_step(b, weight)
    assert len(training_steps.step_rows(b.trace())) == 2


def test_a_trace_without_anything_has_no_steps() -> None:
    assert training_steps.step_rows(TraceBuilder().trace()) == []
