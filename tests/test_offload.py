"""What autograd keeps waits on the host: the same gradients, and a plan that keeps to its budget."""

from pathlib import Path

import pytest
import torch
from torch import nn

import pytracer
from pytracer import errors
from pytracer.analysis.allocator import steps as steps_of
from pytracer.analysis.forecasts.planned import Work
from pytracer.basics.units import parse_size, size_text
from pytracer.recording.offload import _Waiting, offload
from tests.test_checkpoint_plans import Stack, transformer

H200 = Path(__file__).parent / "data" / "h200.pytrace"


def gradients(*, moved: bool, twice: bool = False) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    model = Stack(3, 32)
    if moved:
        for layer in model.h:
            offload(layer, "cpu")  # from the CPU to the CPU: the same way, without a GPU
    loss = model(torch.randn(4, 8, 32)).square().mean()
    if twice:
        loss.backward(retain_graph=True)
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("twice", [False, True], ids=["once", "the graph kept"])
def test_gradients_are_the_same_bit_for_bit(twice: bool) -> None:
    plain, moved = gradients(moved=False, twice=twice), gradients(moved=True, twice=twice)
    for a, b in zip(plain, moved, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_views_of_one_storage_move_once_and_come_back_as_they_were() -> None:
    waiting = _Waiting([], "cpu")
    x = torch.randn(6, 4)
    kept = [waiting.pack(view) for view in (x, x.t(), x[2:, 1:], x.view(-1))]
    assert len(waiting._host) == 1
    back = [waiting.unpack(each) for each in kept]
    for before, after in zip((x, x.t(), x[2:, 1:], x.view(-1)), back, strict=True):
        assert torch.equal(before, after)
        assert before.stride() == after.stride()
    assert not waiting._back


def test_what_is_written_into_between_two_saves_is_kept_as_it_was_each_time() -> None:
    waiting = _Waiting([], "cpu")
    x = torch.zeros(5)
    first = waiting.pack(x)
    x += 1
    second = waiting.pack(x)
    assert waiting.unpack(first).tolist() == [0] * 5
    assert waiting.unpack(second).tolist() == [1] * 5


def test_weights_and_what_the_module_is_given_stay() -> None:
    x, layer = torch.randn(3, 4), nn.Linear(4, 4)
    waiting = _Waiting([x, *layer.parameters()], "cpu")
    assert waiting.pack(x) is x
    transposed = layer.weight.t()
    assert waiting.pack(transposed) is transposed


def test_a_plan_offloads_no_more_than_may_be_pinned() -> None:
    t = pytracer.load(H200)
    work = Work(t.data, "cuda:0")
    one = next(iter(work.units.values())).pinned
    assert t.checkpoint_plan(1, pinned=one - 1).offloaded == ()
    for room in (one, 3 * one, "64GiB"):
        frontier = t.checkpoint_plan(1, pinned=room).frontier
        most = max(plan.pinned for plan in frontier)
        assert most <= parse_size(room)
        assert all(
            plan.pinned == sum(work.units[n].pinned for n in plan.offloaded) for plan in frontier
        )
    assert any(plan.offloaded for plan in frontier)


def test_a_budget_that_checkpoints_alone_do_not_reach_is_reached_by_offloading_too() -> None:
    """Or nothing is offloaded: it costs more time than a forward."""
    t = pytracer.load(H200)
    alone, both = t.checkpoint_plan(1), t.checkpoint_plan(1, pinned="64GiB")
    # On a GPU the smallest plan is the one for which the allocator reserves least.
    assert (both.chosen.peak_reserved or 0) <= (alone.chosen.peak_reserved or 0)
    assert alone.reserved is not None
    roomy = t.checkpoint_plan(alone.reserved[1], pinned="64GiB")
    assert roomy
    assert roomy.chosen.time_ratio <= alone.chosen.time_ratio


def test_every_block_that_is_moved_comes_and_goes_once() -> None:
    work = Work(pytracer.load(H200).data, "cuda:0")
    for unit in work.units.values():
        edits = unit.offload
        assert sum(edits.bytes) == 0 or max(edits.position) == replay_end(work)
        again = [
            block
            for block, new, kind in zip(edits.block, edits.again, edits.kind, strict=True)
            if new and kind == 0
        ]
        assert len(again) == len(set(again))


def replay_end(work: Work) -> int:
    return int(steps_of.steps(work.trace, work.device).position.max())


def test_the_code_of_a_plan_offloads_what_was_planned() -> None:
    t = pytracer.load(H200)
    plan = next(p for p in t.checkpoint_plan(1, pinned="64GiB").frontier if p.offloaded)
    found = t.checkpoint_plan(1, pinned="64GiB")
    assert "from pytracer.recording.offload import offload" in found.code or not found.offloaded
    assert size_text(plan.pinned)


def test_offloading_is_from_a_gpu() -> None:
    with pytest.raises(errors.UsageError, match="this trace is of the CPU"):
        transformer().checkpoint_plan("1GiB", pinned="1GiB")


def test_a_recording_that_began_late_says_so_with_the_plan() -> None:
    found = pytracer.load(H200).checkpoint_plan("2GiB")
    assert "began late" in found.notes[0]
    assert "began late" in str(found).replace("\n", " ")
